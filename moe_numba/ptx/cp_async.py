"""Copies of 16 bytes that a thread starts by itself, from global to shared memory, and goes on.

A thread puts its copies together into groups, and it alone can wait for them. They write as the thread's own stores do,
through the generic proxy: before a wgmma reads what they brought, the thread waits, then fences, then meets the others.
"""

from functools import cache

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction


def cp_async_16(array, at, pointer, index, valid_bytes):
    """``cp.async.cg.shared.global``: copy 16 bytes to a shared array; behind the first ``valid_bytes``, zeros.

    Both addresses are multiples of 16 bytes. With 0 valid bytes nothing is read, wherever ``index`` leads.
    """
    simulator.async_copy.load_16(array, at, pointer, index, int(valid_bytes))


def cp_async_commit_group():
    """``cp.async.commit_group``: the copies that this thread started since the last one are a group."""
    simulator.async_copy.commit("cp.async")


cp_async_16 = instruction(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;", "void", SHARED, POINTER, "u32", simulate=cp_async_16
)
cp_async_commit_group = instruction("cp.async.commit_group;", "void", simulate=cp_async_commit_group)


@cache
def make_cp_async_wait_group(pending):
    """``wait()``, ``cp.async.wait_group``: until at most ``pending`` of this thread's newest groups are under way."""

    def cp_async_wait_group():
        simulator.async_copy.wait(pending, read_only=False, kind="cp.async")

    return instruction(f"cp.async.wait_group {pending};", "void", simulate=cp_async_wait_group)


def advance(pointer, count):
    """The pointer ``count`` elements further on, which the compiler then has in a register, not as a sum."""
    return pointer.offset(int(count))


def _advance():
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def advance(typingctx, pointer, count):
        def codegen(context, builder, sig, values):
            moved, word = builder.gep(values[0], values[1:]), ir.IntType(64)
            same = ir.InlineAsm(ir.FunctionType(word, [word]), "mov.b64 $0, $1;", "=l,l")
            return builder.inttoptr(builder.call(same, [builder.ptrtoint(moved, word)]), moved.type)

        return pointer(pointer, types.int64), codegen

    return advance


if not simulator.ENABLED:
    advance = _advance()
