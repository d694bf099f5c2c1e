"""Accesses that other blocks of the grid meet halfway: how the blocks hand their results over to one another.

*Relaxed* promises that an access of up to 8 bytes is undivided, and that the other blocks of this GPU come to see it.
It promises nothing about the accesses around it; a value that carries all there is to know needs no more.
"""

import numpy as np
from numba import cuda

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, instruction


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
