"""Atomic loads, stores and read-modify-writes with a memory order and a scope (PTX ISA, memory consistency model).

Scopes: ``cta`` (flags in shared memory, between the warps of a block), ``gpu`` (between the blocks of a grid) and
``sys`` (between GPUs, and with the host). A load that *acquires* sees everything that happened before the store that
*released* the value. *Relaxed* and *volatile* accesses are indivisible up to 8 bytes, and order nothing around them.
"""

import numpy as np
from numba import cuda

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction


def ld_acquire_sys_s32(pointer, index):
    """``ld.acquire.sys.global.s32``: element ``index``; what came before the store that released it is visible now."""
    return simulator.scoped.load("ld.acquire.sys", pointer, index, acquire=True)


def ld_relaxed_sys_s32(pointer, index):
    """``ld.relaxed.sys.global.s32``: element ``index``, which threads of any GPU may write meanwhile."""
    return simulator.scoped.load("ld.relaxed.sys", pointer, index)


def ld_volatile_s32(pointer, index):
    """``ld.volatile.global.s32``: element ``index``, read anew each time; to the memory model it is relaxed."""
    return simulator.scoped.load("ld.volatile", pointer, index)


def st_release_sys_s32(pointer, index, value):
    """``st.release.sys.global.s32``: to element ``index``, after all that this thread has stored or seen."""
    simulator.scoped.store(pointer, index, value, release=True)


def st_relaxed_sys_s32(pointer, index, value):
    """``st.relaxed.sys.global.s32``: to element ``index``, undivided; in no order with other stores."""
    simulator.scoped.store(pointer, index, value)


def atom_add_relaxed_sys_s32(pointer, index, value):
    """``atom.relaxed.sys.global.add.s32``: add to element ``index``; gives what was there before."""
    return simulator.scoped.add(pointer, index, value)


def red_add_relaxed_sys_s32(pointer, index, value):
    """``red.relaxed.sys.global.add.s32``: the same where no result is needed, so that nobody waits for its way back."""
    simulator.scoped.add(pointer, index, value)


def red_add_release_sys_s32(pointer, index, value):
    """``red.release.sys.global.add.s32``: the same, after all that this thread has stored or seen."""
    simulator.scoped.add(pointer, index, value, release=True)


ld_acquire_sys_s32 = instruction("ld.acquire.sys.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_acquire_sys_s32)
ld_relaxed_sys_s32 = instruction("ld.relaxed.sys.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_relaxed_sys_s32)
ld_volatile_s32 = instruction("ld.volatile.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_volatile_s32)
st_release_sys_s32 = instruction(
    "st.release.sys.global.s32 [$0], $1;", "void", POINTER, "s32", simulate=st_release_sys_s32
)
st_relaxed_sys_s32 = instruction(
    "st.relaxed.sys.global.s32 [$0], $1;", "void", POINTER, "s32", simulate=st_relaxed_sys_s32
)
atom_add_relaxed_sys_s32 = instruction(
    "atom.relaxed.sys.global.add.s32 $0, [$1], $2;", "s32", POINTER, "s32", simulate=atom_add_relaxed_sys_s32
)
red_add_relaxed_sys_s32 = instruction(
    "red.relaxed.sys.global.add.s32 [$0], $1;", "void", POINTER, "s32", simulate=red_add_relaxed_sys_s32
)
red_add_release_sys_s32 = instruction(
    "red.release.sys.global.add.s32 [$0], $1;", "void", POINTER, "s32", simulate=red_add_release_sys_s32
)


def ld_relaxed_gpu_s32(pointer, index):
    """``ld.relaxed.gpu.global.s32``: element ``index``, which other blocks of this GPU may write meanwhile."""
    simulator.thread().spin("ld.relaxed")
    return pointer.load_vector(index, np.int32, 1)[0]


def ld_relaxed_gpu_u64x2(pointer, index):
    """``ld.relaxed.gpu.global.v2.u64``: 16 bytes, 16-byte aligned, at element ``index``; each half is undivided."""
    simulator.thread().spin("ld.relaxed")
    return pointer.load_vector(index, np.uint64, 2)


def st_relaxed_gpu_u64(pointer, index, value):
    """``st.relaxed.gpu.global.u64``: 8 bytes, 8-byte aligned, to element ``index``, undivided."""
    pointer.store_vector(index, (value,), np.uint64)
    simulator.thread().grid.progress()


def atom_add_relaxed_gpu_s32(pointer, index, value):
    """``atom.relaxed.gpu.global.add.s32``: add to element ``index``; gives what was there before."""
    return cuda.atomic.add(pointer, index, value)


ld_relaxed_gpu_s32 = instruction("ld.relaxed.gpu.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_relaxed_gpu_s32)
ld_relaxed_gpu_u64x2 = instruction(
    "ld.relaxed.gpu.global.v2.u64 {$0, $1}, [$2];", "u64 x 2", POINTER, simulate=ld_relaxed_gpu_u64x2
)
st_relaxed_gpu_u64 = instruction(
    "st.relaxed.gpu.global.u64 [$0], $1;", "void", POINTER, "u64", simulate=st_relaxed_gpu_u64
)
atom_add_relaxed_gpu_s32 = instruction(
    "atom.relaxed.gpu.global.add.s32 $0, [$1], $2;", "s32", POINTER, "s32", simulate=atom_add_relaxed_gpu_s32
)


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
