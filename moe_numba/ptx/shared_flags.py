"""Flags in shared memory, by which a block's warps hand things over without a barrier.

Who *acquires* a flag sees what came before the store that *released* it, what that thread had itself acquired included.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction


def ld_acquire_cta_shared_s32(array, index):
    """``ld.acquire.cta.shared.s32``: element ``index``; what came before the store that released it is visible now."""
    value, t = array[index], simulator.thread()
    if (weak := simulator.weak.of(t)) is not None:
        weak.learn(_flag(t, array, index), t)
    return value


def poll_acquire_cta_shared_s32(array, index):
    """``ld.acquire.cta.shared.s32`` for loops that wait: in the simulator, others run before it looks."""
    simulator.thread().spin("ld.acquire.cta.shared")
    return simulated_load(array, index)


def st_release_cta_shared_s32(array, index, value):
    """``st.release.cta.shared.s32``: to element ``index``, after all that this thread has stored or seen."""
    t = simulator.thread()
    if (weak := simulator.weak.of(t)) is not None:
        weak.arrive(_flag(t, array, index), t)
    if array[index] != value:  # else nobody waits for it
        array[index] = value
        t.grid.progress()


def ld_acquire_cta_shared_u64(array, index):
    """``ld.acquire.cta.shared.u64``: the same, of 8 bytes, which are one."""
    return simulated_load(array, index)


def poll_acquire_cta_shared_u64(array, index):
    """``ld.acquire.cta.shared.u64`` for loops that wait."""
    return simulated_poll(array, index)


def st_release_cta_shared_u64(array, index, value):
    """``st.release.cta.shared.u64``: 8 bytes, which are one, to element ``index``."""
    simulated_store(array, index, value)


def _flag(thread, array, index):
    """What the simulator hands knowledge over by."""
    return thread.block, "shared flag", int(index) * array.array.itemsize


simulated_load, simulated_poll, simulated_store = (
    ld_acquire_cta_shared_s32,
    poll_acquire_cta_shared_s32,
    st_release_cta_shared_s32,
)
_LOAD, _STORE = "ld.acquire.cta.shared.{} $0, [$1];", "st.release.cta.shared.{} [$0], $1;"
ld_acquire_cta_shared_s32 = instruction(_LOAD.format("s32"), "s32", SHARED, simulate=ld_acquire_cta_shared_s32)
poll_acquire_cta_shared_s32 = instruction(_LOAD.format("s32"), "s32", SHARED, simulate=poll_acquire_cta_shared_s32)
st_release_cta_shared_s32 = instruction(_STORE.format("s32"), "void", SHARED, "s32", simulate=st_release_cta_shared_s32)
ld_acquire_cta_shared_u64 = instruction(_LOAD.format("u64"), "u64", SHARED, simulate=ld_acquire_cta_shared_u64)
poll_acquire_cta_shared_u64 = instruction(_LOAD.format("u64"), "u64", SHARED, simulate=poll_acquire_cta_shared_u64)
st_release_cta_shared_u64 = instruction(_STORE.format("u64"), "void", SHARED, "u64", simulate=st_release_cta_shared_u64)
