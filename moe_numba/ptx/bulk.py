"""Bulk copies: one thread starts a copy of many bytes between global and shared memory, and goes on.

Into shared memory, a copy reports its bytes to an mbarrier. Out of it, copies (``tma_store_2d`` too) are put together
into groups by the thread that started them, and that thread alone can wait for its groups.
"""

from functools import cache

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction


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
