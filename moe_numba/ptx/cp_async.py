"""Asynchronous copies without a tensor map: ``cp.async`` (16 bytes per thread) and ``cp.async.bulk`` (any length)."""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, factory, instruction


def cp_async_16(array, offset, pointer, index, valid_bytes):
    """``cp.async.cg.shared.global``: copy 16 bytes from global to shared memory, zero-filled after ``valid_bytes``.

    ``offset`` and ``index`` count elements of ``array`` and ``pointer``; both addresses are 16-byte aligned. With 0
    valid bytes nothing is read, so ``index`` may be out of bounds. The copy belongs to this thread's next group.
    """
    simulator.async_copy.load_16(array, offset, pointer, index, int(valid_bytes))


def cp_async_commit_group():
    """``cp.async.commit_group``: commit the copies that this thread issued since its last commit as a group."""
    simulator.async_copy.commit("cp.async")


cp_async_16 = instruction(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;", "void", SHARED, POINTER, "u32", simulate=cp_async_16
)
cp_async_commit_group = instruction("cp.async.commit_group;", "void", simulate=cp_async_commit_group)


@factory
def make_cp_async_wait_group(pending):
    """Make ``wait()``, ``cp.async.wait_group``: wait until at most ``pending`` groups are in flight."""

    def cp_async_wait_group():
        simulator.async_copy.wait(pending, read_only=False, kind="cp.async")

    return instruction(f"cp.async.wait_group {pending};", "void", simulate=cp_async_wait_group)


def advance(pointer, count):
    """Return the pointer ``count`` elements further on, materialised in a register.

    The ``mov`` keeps the compiler from folding the addition into every use of the pointer.
    """
    return pointer.offset(int(count))


def _advance():
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def advance(typingctx, pointer, count):
        def codegen(context, builder, sig, values):
            moved, i64 = builder.gep(values[0], values[1:]), ir.IntType(64)
            move = ir.InlineAsm(ir.FunctionType(i64, [i64]), "mov.b64 $0, $1;", "=l,l")
            return builder.inttoptr(builder.call(move, [builder.ptrtoint(moved, i64)]), moved.type)

        return pointer(pointer, types.int64), codegen

    return advance


if not simulator.ENABLED:
    advance = _advance()


def bulk_load(array, offset, pointer, index, size_bytes, barriers, barrier_index):
    """``cp.async.bulk.shared::cluster.global``: copy ``size_bytes`` from global to shared memory.

    Both addresses and the size are multiples of 16 bytes. On completion the bytes are subtracted from the pending bytes
    of mbarrier ``barrier_index``, whose current phase must expect them. One thread issues the copy.
    """
    simulator.async_copy.load(array, offset, pointer, index, int(size_bytes), barriers, barrier_index)


def bulk_load_hint(array, offset, pointer, index, size_bytes, barriers, barrier_index, policy):
    """``cp.async.bulk.shared::cluster.global.L2::cache_hint``: as ``bulk_load``, with an L2 eviction policy.

    ``policy`` is made by ``createpolicy_evict_first`` or ``_last`` of ``moe_numba.ptx.tma``.
    """
    simulator.async_copy.load(array, offset, pointer, index, int(size_bytes), barriers, barrier_index)


def bulk_store(pointer, index, array, offset, size_bytes):
    """``cp.async.bulk.global.shared::cta``: copy ``size_bytes`` from shared to global memory, as part of a bulk group.

    Both addresses and the size are multiples of 16 bytes. One thread issues the copy. Shared memory that threads wrote
    needs ``fence_proxy_async_shared`` by the writers, then a barrier, before it.
    """
    simulator.async_copy.store(pointer, index, array, offset, int(size_bytes))


def bulk_commit_group():
    """``cp.async.bulk.commit_group``: commit the copies that this thread issued since its last commit as a group."""
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
bulk_load_hint = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;",
    "void",
    SHARED,
    POINTER,
    "u32",
    SHARED,
    "u64",
    simulate=bulk_load_hint,
)
bulk_store = instruction(
    "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;", "void", POINTER, SHARED, "u32", simulate=bulk_store
)
bulk_commit_group = instruction("cp.async.bulk.commit_group;", "void", simulate=bulk_commit_group)


@factory
def make_bulk_wait_group(pending):
    """Make ``wait()``, ``cp.async.bulk.wait_group``: wait until at most ``pending`` groups are in flight.

    The writes of this thread's older groups to global memory are then complete.
    """

    def bulk_wait_group():
        simulator.async_copy.wait(pending, read_only=False)

    return instruction(f"cp.async.bulk.wait_group {pending};", "void", simulate=bulk_wait_group)


@factory
def make_bulk_wait_group_read(pending):
    """Make ``wait()``, ``cp.async.bulk.wait_group.read``: wait until older groups have read their shared memory.

    At most ``pending`` newest groups may still read theirs. The sources may then be overwritten. A block must not end
    before its copies have read their sources.
    """

    def bulk_wait_group_read():
        simulator.async_copy.wait(pending, read_only=True)

    return instruction(f"cp.async.bulk.wait_group.read {pending};", "void", simulate=bulk_wait_group_read)
