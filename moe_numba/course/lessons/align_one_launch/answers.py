"""The lesson's own answers to the exercises of "Alignment in one launch"."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.align_one_launch.sizes import BINS, FULL
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32, st_relaxed_gpu_s32
from moe_numba.ptx.fence import fence_acq_rel_gpu
from moe_numba.ptx.memory import ld_global_s32x4
from moe_numba.ptx.warp import lanemask_lt


@cuda.jit(device=True)
def rank_in_warp(expert):
    same = uint32(cuda.match_any_sync(FULL, expert))
    return int32(cuda.popc(same & lanemask_lt())), int32(cuda.popc(same))


@cuda.jit(device=True)
def count_ids(topk_ids, counts, first, numel):
    i = int32(4 * cuda.threadIdx.x)
    while i + 3 < numel:
        a, b, c, d = ld_global_s32x4(topk_ids, i)  # all four are there before the first is counted
        cuda.atomic.add(counts, uint32(a) + (0 if i < first else BINS), 1)
        cuda.atomic.add(counts, uint32(b) + (0 if i + 1 < first else BINS), 1)
        cuda.atomic.add(counts, uint32(c) + (0 if i + 2 < first else BINS), 1)
        cuda.atomic.add(counts, uint32(d) + (0 if i + 3 < first else BINS), 1)
        i = int32(i + 4 * cuda.blockDim.x)
    i = int32((numel & ~3) + cuda.threadIdx.x)
    if i < numel:  # up to three ids are left
        cuda.atomic.add(counts, uint32(topk_ids[i]) + (0 if i < first else BINS), 1)


@cuda.jit(device=True)
def grid_barrier(counter):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        others = int32(cuda.gridDim.x - 1)
        add = int32(uint32(1 << 31) - uint32(others)) if cuda.blockIdx.x == 0 else int32(1)
        old = atom_add_relaxed_gpu_s32(counter, 0, add)
        while int32(old ^ ld_relaxed_gpu_s32(counter, 0)) >= 0:  # until the top bit differs
            pass
        cuda.threadfence()
    cuda.syncthreads()


@cuda.jit(device=True)
def grid_barrier_acq_rel(counter):
    """The same barrier with lighter fences, which the page times beside it."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        fence_acq_rel_gpu()
        others = int32(cuda.gridDim.x - 1)
        add = int32(uint32(1 << 31) - uint32(others)) if cuda.blockIdx.x == 0 else int32(1)
        old = atom_add_relaxed_gpu_s32(counter, 0, add)
        while int32(old ^ ld_relaxed_gpu_s32(counter, 0)) >= 0:
            pass
        fence_acq_rel_gpu()
    cuda.syncthreads()


@cuda.jit(device=True)
def hand_on(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        cuda.threadfence()  # the flag is loaded before the prefix
        before = prefix[cta - 1]
    prefix[cta] = before + value
    cuda.threadfence()  # the prefix is stored before the flag
    st_relaxed_gpu_s32(flags, cta, 1)
    return before
