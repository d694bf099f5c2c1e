"""Asynchronous copies without a tensor map: ``cp.async`` (16 bytes per thread) and ``cp.async.bulk`` (any length)."""

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


def bulk_load(array, at, pointer, index, size_bytes, barriers, barrier):
    """``cp.async.bulk.shared::cluster.global``: copy ``size_bytes`` from global to shared memory.

    Both addresses and the size are multiples of 16 bytes. The bytes count towards the phase of the barrier.
    """
    simulator.async_copy.load(array, at, pointer, index, int(size_bytes), barriers, barrier)


def bulk_store(pointer, index, array, at, size_bytes):
    """``cp.async.bulk.global.shared::cta``: copy ``size_bytes`` from shared to global memory, as part of a bulk group.

    Both addresses and the size are multiples of 16 bytes.
    """
    simulator.async_copy.store(pointer, index, array, at, int(size_bytes))


def bulk_commit_group():
    """``cp.async.bulk.commit_group``: the copies that this thread started since the last one are a group."""
    simulator.async_copy.commit()


bulk_load = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "void",
    SHARED,
    POINTER,
    "u32",
    SHARED,
    simulate=bulk_load,
)
bulk_store = instruction(
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "void", POINTER, SHARED, "u32", simulate=bulk_store
)
bulk_commit_group = instruction("cp.async.bulk.commit_group;", "void", simulate=bulk_commit_group)


@cache
def make_bulk_wait_group(pending):
    """``wait()``, ``cp.async.bulk.wait_group``: until at most ``pending`` of this thread's newest groups are under way.

    What the other groups wrote to global memory is there.
    """

    def bulk_wait_group():
        simulator.async_copy.wait(pending, read_only=False)

    return instruction(f"cp.async.bulk.wait_group {pending};", "void", simulate=bulk_wait_group)


@cache
def make_bulk_wait_group_read(pending):
    """``wait()``, ``cp.async.bulk.wait_group.read``: the same, but until the groups have read their shared memory.

    It may then be overwritten. A block must not end before its copies have read what they copy.
    """

    def bulk_wait_group_read():
        simulator.async_copy.wait(pending, read_only=True)

    return instruction(f"cp.async.bulk.wait_group.read {pending};", "void", simulate=bulk_wait_group_read)
