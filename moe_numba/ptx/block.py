"""Accesses at block scope: how threads of one block hand over data without a barrier, by a flag in shared memory."""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction


def _key(thread, index):
    return thread.block, "shared", int(index)


def ld_acquire_cta_shared_s32(array, index):
    """``ld.acquire.cta.shared.s32``: what came before the store that released this element is visible now."""
    t = simulator.thread()
    t.spin("ld.acquire.cta.shared")
    value = array[index]
    if (weak := simulator.weak.of(t)) is not None:
        weak.learn(_key(t, index), t)
    return value


def st_release_cta_shared_s32(array, index, value):
    """``st.release.cta.shared.s32``: to element ``index``, after all that this thread has stored or seen."""
    t = simulator.thread()
    if (weak := simulator.weak.of(t)) is not None:
        weak.arrive(_key(t, index), t)
    if array[index] != value:
        t.grid.progress()
    array[index] = value


ld_acquire_cta_shared_s32 = instruction(
    "ld.acquire.cta.shared.s32 $0, [$1];", "s32", SHARED, simulate=ld_acquire_cta_shared_s32
)
st_release_cta_shared_s32 = instruction(
    "st.release.cta.shared.s32 [$0], $1;", "void", SHARED, "s32", simulate=st_release_cta_shared_s32
)
