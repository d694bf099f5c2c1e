"""The lesson's own answers to the exercises of "Alignment as published"; the page goes on with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.align.sizes import FULL
from moe_numba.ptx.memory import atom_add_s32


@cuda.jit(device=True)
def warp_scan(x):
    lane, distance = cuda.threadIdx.x & 31, 1
    while distance < 32:
        below = cuda.shfl_up_sync(FULL, x, distance)
        if lane >= distance:
            x = int32(x + below)
        distance *= 2
    return x


@cuda.jit(device=True)
def warp_0_scans(inclusive):
    """The function of the page that a barrier is removed from."""
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    if warp == 0:
        sums[lane] = warp_scan(sums[lane] if lane < warps else int32(0))
    cuda.syncthreads()
    return sums[warp - 1] if warp > 0 else int32(0)


@cuda.jit(device=True)
def sum_below(inclusive):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    scanned = warp_scan(sums[lane] if lane < warps else int32(0))
    below = cuda.shfl_sync(FULL, scanned, warp - 1 if warp > 0 else 0)
    return below if warp > 0 else int32(0)


def buffer_length(numel, num_experts, block_size):
    used = min(numel, num_experts)  # experts with an assignment: each may have a single one in its last block
    return (used + (numel - used) // block_size) * block_size


@cuda.jit(device=True)
def take_places(next_place, expert):
    lane = cuda.threadIdx.x & 31
    same = uint32(cuda.match_any_sync(FULL, expert))
    lowest = cuda.ffs(same) - 1
    first = int32(0)
    if lane == lowest:
        first = atom_add_s32(next_place, expert, int32(cuda.popc(same)))
    first = cuda.shfl_sync(FULL, first, lowest)
    return int32(first + cuda.popc(same & uint32((uint32(1) << uint32(lane)) - uint32(1))))
