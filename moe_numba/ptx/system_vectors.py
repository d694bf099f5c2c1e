"""Relaxed and acquire accesses of 8 and 16 bytes at system scope, for data that threads of several GPUs exchange.

PTX treats a vector access as accesses of its elements in no order: of a vector of four words that another thread stores
at the same time, a load may return some new and some old words. An access of one 8-byte element is atomic.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, instruction
from moe_numba.simulator.core.polling import Poll


def _load(what, pointer, index, dtype, count, acquire=False):
    t, itemsize = simulator.thread(), np.dtype(dtype).itemsize
    t.spin(Poll(what, pointer, index))
    start = pointer.address + int(index) * pointer.array.itemsize
    if (model := simulator.store_buffer.of(t)) is not None:
        model.drop_stale(t.block, start, start + count * itemsize)
    values = pointer.load_vector(index, dtype, count, "sys")
    if (races := t.grid.world.races) is not None:
        for i in range(count):
            races.loaded(t, start + i * itemsize, "sys", acquire)
    if acquire:
        simulator.store_buffer.acquire(t)
    return values


def ld_relaxed_sys_s32x4(pointer, index):
    """``ld.relaxed.sys.global.v4.s32``: load 16 bytes, 16-byte aligned, that threads of any GPU may write."""
    return _load("ld.relaxed.sys", pointer, index, np.int32, 4)


def ld_acquire_sys_s32x4(pointer, index):
    """``ld.acquire.sys.global.v4.s32``: load 16 bytes, 16-byte aligned, each word with acquire semantics."""
    return _load("ld.acquire.sys", pointer, index, np.int32, 4, acquire=True)


def st_relaxed_sys_s32x4(pointer, index, a, b, c, d):
    """``st.relaxed.sys.global.v4.s32``: store 16 bytes, 16-byte aligned, in no order with other stores."""
    pointer._vector_bytes(index, 16)  # refuses a vector that is misaligned or out of bounds
    for i, value in enumerate((a, b, c, d)):  # each word may become visible alone
        simulator.scoped_access.store(pointer, index + i, value)


def ld_relaxed_sys_u64(pointer, index):
    """``ld.relaxed.sys.global.u64``: load 8 bytes, 8-byte aligned, at element ``index`` atomically."""
    return _load("ld.relaxed.sys", pointer, index, np.uint64, 1)[0]


def st_relaxed_sys_u64(pointer, index, value):
    """``st.relaxed.sys.global.u64``: store 8 bytes, 8-byte aligned, at element ``index`` atomically."""
    t = simulator.thread()
    pointer.store_vector(index, (value,), np.uint64, "sys")
    simulator.scoped_access.stored(t, pointer, index, "sys")
    t.grid.memory_changed()


_VECTOR = "{$0, $1, $2, $3}"
ld_relaxed_sys_s32x4 = instruction(
    f"ld.relaxed.sys.global.v4.s32 {_VECTOR}, [$4];", "s32 x 4", POINTER, simulate=ld_relaxed_sys_s32x4
)
ld_acquire_sys_s32x4 = instruction(
    f"ld.acquire.sys.global.v4.s32 {_VECTOR}, [$4];", "s32 x 4", POINTER, simulate=ld_acquire_sys_s32x4
)
st_relaxed_sys_s32x4 = instruction(
    "st.relaxed.sys.global.v4.s32 [$0], {$1, $2, $3, $4};",
    *("void", POINTER, "s32", "s32", "s32", "s32"),
    simulate=st_relaxed_sys_s32x4,
)
ld_relaxed_sys_u64 = instruction("ld.relaxed.sys.global.u64 $0, [$1];", "u64", POINTER, simulate=ld_relaxed_sys_u64)
st_relaxed_sys_u64 = instruction(
    "st.relaxed.sys.global.u64 [$0], $1;", "void", POINTER, "u64", simulate=st_relaxed_sys_u64
)
