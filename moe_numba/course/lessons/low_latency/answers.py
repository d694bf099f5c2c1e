"""The lesson's own answers to the exercises of "Low-latency dispatch and combine"; the page goes on with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32

from moe_numba.expert_parallel.low_latency.combine import add_row, round_sums
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.low_latency.protocol import has_arrived
from moe_numba.ptx.atomics import ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.memory import pointer_from_address, st_global_s32x4
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4, st_relaxed_sys_s32x4
from moe_numba.ptx.warp import FULL_MASK


@cuda.jit
def exchange(local, peers, epoch, rank, value, out):
    half = epoch[0] & 1
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, half, value[0])
    word = ld_relaxed_sys_s32(local, half)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, half)
    st_relaxed_sys_s32(local, half, SENTINEL)
    out[0] = word
    epoch[0] += 1


@cuda.jit(device=True)
def take_vector(local, offset):
    a, b, c, d = ld_relaxed_sys_s32x4(local, offset)
    while not has_arrived(a, b, c, d):
        a, b, c, d = ld_relaxed_sys_s32x4(local, offset)
    st_relaxed_sys_s32x4(local, offset, SENTINEL, SENTINEL, SENTINEL, SENTINEL)
    return a, b, c, d


@cuda.jit(device=True)
def sum_rows(memory, slot, tokens, targets, out, token):
    vector, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
    for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
        for j in range(8):
            sums[j] = float32(0)
        for r in range(memory.ranks):  # in rank order
            if targets >> r & 1:
                at = int32((slot + r * tokens) * memory.words + i)
                vector[0], vector[1], vector[2], vector[3] = take_vector(memory.local, at)
                add_row(sums, vector, 0, float32(1))
        round_sums(sums, vector)
        st_global_s32x4(out, token * memory.words + i, vector[0], vector[1], vector[2], vector[3])


@cuda.jit(device=True)
def count_by_warp(experts, expert, n):
    lane, count = int32(cuda.threadIdx.x & 31), int32(0)
    for first in range(0, n, 32):
        is_equal = first + lane < n and experts[first + lane] == expert
        count = int32(count + cuda.popc(cuda.ballot_sync(FULL_MASK, is_equal)))
    return count
