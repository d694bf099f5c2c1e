"""Atomic loads, stores and read-modify-writes with a memory order and a scope (PTX ISA, memory consistency model).

Scopes: ``cta`` (flags in shared memory, between the warps of a block), ``gpu`` (between the blocks of a grid) and
``sys`` (between GPUs, and with the host). An *acquire* load that reads a value written by a *release* store makes
everything visible that the storing thread wrote or observed before that store. *Relaxed* and *volatile* accesses of up
to 8 bytes are single-copy atomic but order no other accesses. Addresses are aligned to the size of the access.
"""

import numpy as np
from numba import cuda

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction


def ld_acquire_sys_s32(pointer, index):
    """``ld.acquire.sys.global.s32``: load element ``index`` with acquire semantics at system scope."""
    return simulator.scoped_access.load("ld.acquire.sys", pointer, index, acquire=True)


def ld_relaxed_sys_s32(pointer, index):
    """``ld.relaxed.sys.global.s32``: load element ``index``, which threads of any GPU may write concurrently."""
    return simulator.scoped_access.load("ld.relaxed.sys", pointer, index)


def ld_volatile_s32(pointer, index):
    """``ld.volatile.global.s32``: load element ``index`` without caching it; the memory model treats it as relaxed."""
    return simulator.scoped_access.load("ld.volatile", pointer, index)


def st_release_sys_s32(pointer, index, value):
    """``st.release.sys.global.s32``: store element ``index`` after everything that this thread stored or observed."""
    simulator.scoped_access.store(pointer, index, value, release=True)


def st_relaxed_sys_s32(pointer, index, value):
    """``st.relaxed.sys.global.s32``: store element ``index`` atomically, in no order with other stores."""
    simulator.scoped_access.store(pointer, index, value)


def atom_add_relaxed_sys_s32(pointer, index, value):
    """``atom.relaxed.sys.global.add.s32``: add to element ``index`` and return the old value."""
    return simulator.scoped_access.add(pointer, index, value)


def red_add_relaxed_sys_s32(pointer, index, value):
    """``red.relaxed.sys.global.add.s32``: add to element ``index``; no result, so the thread does not wait for one."""
    simulator.scoped_access.add(pointer, index, value)


def red_add_release_sys_s32(pointer, index, value):
    """``red.release.sys.global.add.s32``: add to element ``index`` after everything this thread stored or observed."""
    simulator.scoped_access.add(pointer, index, value, release=True)


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
    """``ld.relaxed.gpu.global.s32``: load element ``index``, which other blocks of this GPU may write concurrently."""
    simulator.thread().spin("ld.relaxed")
    value = pointer.load_vector(index, np.int32, 1, "gpu")[0]
    simulator.scoped_access.loaded(simulator.thread(), pointer, index, "gpu")
    return value


def ld_relaxed_gpu_u64(pointer, index):
    """``ld.relaxed.gpu.global.u64``: load 8 bytes, 8-byte aligned, at element ``index`` atomically."""
    simulator.thread().spin("ld.relaxed")
    value = pointer.load_vector(index, np.uint64, 1, "gpu")[0]
    simulator.scoped_access.loaded(simulator.thread(), pointer, index, "gpu")
    return value


def ld_relaxed_gpu_u64x2(pointer, index):
    """``ld.relaxed.gpu.global.v2.u64``: load 16 bytes, 16-byte aligned, at element ``index``; each half is atomic."""
    simulator.thread().spin("ld.relaxed")
    values = pointer.load_vector(index, np.uint64, 2, "gpu")
    simulator.scoped_access.loaded(simulator.thread(), pointer, index, "gpu")
    return values


def st_relaxed_gpu_u64(pointer, index, value):
    """``st.relaxed.gpu.global.u64``: store 8 bytes, 8-byte aligned, at element ``index`` atomically."""
    t = simulator.thread()
    pointer.store_vector(index, (value,), np.uint64, "gpu")
    simulator.scoped_access.stored(t, pointer, index, "gpu")
    t.grid.memory_changed()


def st_relaxed_gpu_s32(pointer, index, value):
    """``st.relaxed.gpu.global.s32``: store element ``index`` atomically, in no order with other stores."""
    simulator.scoped_access.store(pointer, index, value, scope="gpu")


def atom_add_relaxed_gpu_s32(pointer, index, value):
    """``atom.relaxed.gpu.global.add.s32``: add to element ``index`` and return the old value."""
    return cuda.atomic.add(pointer, index, value)


def red_add_relaxed_gpu_s32(pointer, index, value):
    """``red.relaxed.gpu.global.add.s32``: add to element ``index``; no result, so the thread does not wait for one."""
    cuda.atomic.add(pointer, index, value)


ld_relaxed_gpu_s32 = instruction("ld.relaxed.gpu.global.s32 $0, [$1];", "s32", POINTER, simulate=ld_relaxed_gpu_s32)
ld_relaxed_gpu_u64 = instruction("ld.relaxed.gpu.global.u64 $0, [$1];", "u64", POINTER, simulate=ld_relaxed_gpu_u64)
ld_relaxed_gpu_u64x2 = instruction(
    "ld.relaxed.gpu.global.v2.u64 {$0, $1}, [$2];", "u64 x 2", POINTER, simulate=ld_relaxed_gpu_u64x2
)
st_relaxed_gpu_u64 = instruction(
    "st.relaxed.gpu.global.u64 [$0], $1;", "void", POINTER, "u64", simulate=st_relaxed_gpu_u64
)
st_relaxed_gpu_s32 = instruction(
    "st.relaxed.gpu.global.s32 [$0], $1;", "void", POINTER, "s32", simulate=st_relaxed_gpu_s32
)
atom_add_relaxed_gpu_s32 = instruction(
    "atom.relaxed.gpu.global.add.s32 $0, [$1], $2;", "s32", POINTER, "s32", simulate=atom_add_relaxed_gpu_s32
)
red_add_relaxed_gpu_s32 = instruction(
    "red.relaxed.gpu.global.add.s32 [$0], $1;", "void", POINTER, "s32", simulate=red_add_relaxed_gpu_s32
)


def _flag(thread, array, index):
    """Identify a flag in shared memory to the simulator's weak memory."""
    return thread.block, "shared flag", int(index) * array.array.itemsize


def _simulated_load(array, index):
    value, t = array.load(index, "cta"), simulator.thread()
    simulator.store_buffer.receive_from(_flag(t, array, index), t)
    simulator.scoped_access.loaded(t, array, index, "cta", acquire=True)
    return value


def _simulated_poll(array, index):
    simulator.thread().spin("ld.acquire.cta.shared")
    return _simulated_load(array, index)


def _simulated_store(array, index, value):
    t = simulator.thread()
    simulator.store_buffer.publish_to(_flag(t, array, index), t)
    simulator.scoped_access.stored(t, array, index, "cta", release=True)
    if array.store(index, value, "cta"):  # a store of the same value ends no poll
        t.grid.memory_changed()


def ld_acquire_cta_shared_s32(array, index):
    """``ld.acquire.cta.shared.s32``: load element ``index`` of a shared array with acquire semantics at block scope."""
    return _simulated_load(array, index)


def poll_acquire_cta_shared_s32(array, index):
    """``ld.acquire.cta.shared.s32`` for polling loops: in the simulator other threads run before the load."""
    return _simulated_poll(array, index)


def st_release_cta_shared_s32(array, index, value):
    """``st.release.cta.shared.s32``: store element ``index`` after everything that this thread stored or observed."""
    _simulated_store(array, index, value)


def ld_acquire_cta_shared_u64(array, index):
    """``ld.acquire.cta.shared.u64``: load the 8 bytes of element ``index`` atomically, with acquire semantics."""
    return _simulated_load(array, index)


def poll_acquire_cta_shared_u64(array, index):
    """``ld.acquire.cta.shared.u64`` for polling loops: in the simulator other threads run before the load."""
    return _simulated_poll(array, index)


def st_release_cta_shared_u64(array, index, value):
    """``st.release.cta.shared.u64``: store the 8 bytes of element ``index`` atomically, with release semantics."""
    _simulated_store(array, index, value)


_LOAD, _STORE = "ld.acquire.cta.shared.{} $0, [$1];", "st.release.cta.shared.{} [$0], $1;"
ld_acquire_cta_shared_s32 = instruction(_LOAD.format("s32"), "s32", SHARED, simulate=ld_acquire_cta_shared_s32)
poll_acquire_cta_shared_s32 = instruction(_LOAD.format("s32"), "s32", SHARED, simulate=poll_acquire_cta_shared_s32)
st_release_cta_shared_s32 = instruction(_STORE.format("s32"), "void", SHARED, "s32", simulate=st_release_cta_shared_s32)
ld_acquire_cta_shared_u64 = instruction(_LOAD.format("u64"), "u64", SHARED, simulate=ld_acquire_cta_shared_u64)
poll_acquire_cta_shared_u64 = instruction(_LOAD.format("u64"), "u64", SHARED, simulate=poll_acquire_cta_shared_u64)
st_release_cta_shared_u64 = instruction(_STORE.format("u64"), "void", SHARED, "u64", simulate=st_release_cta_shared_u64)
