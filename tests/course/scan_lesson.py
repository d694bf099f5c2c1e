"""The kernels of a lesson in the form of the second edition: an alignment with a hole for its scan, and four scans."""

import numpy as np
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.grader import expect_equal
from moe_numba.course.lessons.align.answers import warp_scan
from moe_numba.course.steps.align_runs import poisoned, random_ids
from moe_numba.course.steps.exercises import Build
from moe_numba.course.steps.score import count
from moe_numba.ptx.memory import st_global_s32x4
from moe_numba.runtime.launch import launch

EXPERTS, TOPK, BLOCK, THREADS, FULL = 256, 8, 16, 1024, 0xFFFFFFFF


def run(kernel, experts=EXPERTS, threads=THREADS, tokens=64):
    """Launch an alignment once; return None, or what is wrong with the experts' starts."""
    torch.manual_seed(0)
    ids = random_ids(tokens, experts, TOPK)
    outputs, cumsum = poisoned(ids, experts, BLOCK), torch.full((experts + 1,), -7, dtype=torch.int32)
    launch(kernel, 1, threads, ids, *outputs, cumsum, BLOCK, ids.numel())
    ends = ((torch.bincount(ids.flatten().long(), minlength=experts) + BLOCK - 1) // BLOCK * BLOCK).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends]).int()
    if torch.equal(cumsum, starts):
        return None
    e = int((cumsum != starts).nonzero()[0])
    return f"cumsum[{e}] is {int(cumsum[e])}, not {int(starts[e])}"


def race(kernel, experts=EXPERTS, threads=THREADS):
    """Return the message of the race detector, or None."""
    try:
        with simulator.races():
            run(kernel, experts, threads)
    except simulator.DataRace as error:
        return str(error)
    return None


@cuda.jit(device=True)
def round_up(count, block_size):
    return int32(uint32(count + block_size - 1) // uint32(block_size) * uint32(block_size))


def make_align(scan, experts=EXPERTS):
    @cuda.jit
    def align(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel):
        counts = cuda.shared.array(experts, int32)
        tid = cuda.threadIdx.x
        if tid < experts:
            counts[tid] = 0
        cuda.syncthreads()
        for i in range(tid, numel, cuda.blockDim.x):
            cuda.atomic.add(counts, topk_ids[i], 1)
        cuda.syncthreads()

        scan(counts, cumsum, total_tokens_post_pad, block_size, experts)  # <-- the hole

        if tid < experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        for i in range(tid, (total_tokens_post_pad[0] + 3) // 4, cuda.blockDim.x):
            st_global_s32x4(sorted_token_ids, 4 * i, numel, numel, numel, numel)  # four elements at once

    return align


@cuda.jit(device=True)
def serial_scan(counts, cumsum, total_tokens_post_pad, block_size, experts):
    if cuda.threadIdx.x == 0:
        start = int32(0)
        cumsum[0] = start
        for e in range(experts):
            start = int32(start + round_up(counts[e], block_size))
            cumsum[e + 1] = start
        total_tokens_post_pad[0] = start
    cuda.syncthreads()


@cuda.jit(device=True)
def blelloch_scan(counts, cumsum, total_tokens_post_pad, block_size, experts):
    tree = cuda.shared.array(EXPERTS, int32)
    tid, stride = cuda.threadIdx.x, 1
    if tid < experts:
        tree[tid] = round_up(counts[tid], block_size)
    cuda.syncthreads()
    while stride < experts:  # up: a tree of sums
        right = 2 * stride * (tid + 1) - 1
        if right < experts:
            tree[right] += tree[right - stride]
        stride *= 2
        cuda.syncthreads()
    if tid == 0:
        cumsum[experts] = total_tokens_post_pad[0] = tree[experts - 1]
        tree[experts - 1] = 0
    cuda.syncthreads()
    while stride > 1:  # down: hand out what lies before each half
        stride //= 2
        right = 2 * stride * (tid + 1) - 1
        if right < experts:
            left = tree[right - stride]
            tree[right - stride] = tree[right]
            tree[right] += left
        cuda.syncthreads()
    if tid < experts:
        cumsum[tid] = tree[tid]
    cuda.syncthreads()


def make_two_level(sum_below):
    @cuda.jit(device=True)
    def two_level_scan(counts, cumsum, total_tokens_post_pad, block_size, experts):
        tid = cuda.threadIdx.x
        inclusive = warp_scan(round_up(counts[tid], block_size) if tid < experts else int32(0))
        end = int32(sum_below(inclusive) + inclusive)
        if tid < experts:
            cumsum[tid + 1] = end
        if tid == 0:
            cumsum[0] = 0
        if tid == experts - 1:
            total_tokens_post_pad[0] = end
        cuda.syncthreads()

    return two_level_scan


@cuda.jit(device=True)
def one_barrier_less(inclusive):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    if warp == 0:
        sums[lane] = warp_scan(sums[lane] if lane < warps else int32(0))
    return sums[warp - 1] if warp > 0 else int32(0)


@cuda.jit(device=True)
def add_in_a_loop(inclusive):
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    before = int32(0)
    for w in range(warp):
        before = int32(before + sums[w])
    return before


@cuda.jit(device=True)
def every_warp_scans(inclusive):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    scanned = warp_scan(sums[lane] if lane < warps else int32(0))
    return cuda.shfl_sync(FULL, scanned, warp - 1) if warp > 0 else int32(0)


def _around(answer):
    @cuda.jit
    def around(x, out):
        out[cuda.threadIdx.x] = answer(x[cuda.threadIdx.x])

    return around


def _run_around(kernel, lanes=64):
    x, out = np.arange(lanes, dtype=np.int32) % 7, np.full(lanes, -7, np.int32)
    kernel[1, lanes](x, out)
    return x, out


def _test_scan(answer):
    x, out = _run_around(_around(answer))
    expect_equal("the scan", out, x.reshape(-1, 32).cumsum(1).ravel())


SCAN = Build(
    "scan-1",
    "the sum of x over lanes 0 to this one",
    own=warp_scan,
    test=_test_scan,
    profile=lambda answer: count(_around(answer), _run_around, answer),
    counter="shuffles",
    par=5,
    par_is_bound=True,
    forbidden={
        "shared_load_requests": "it exchanges values through shared memory",
        "votes": "it uses votes; the exercise is about shuffles",
    },
    over_par="What could a lane learn from lane - 16 in one step?",
    home="scan_lesson:SCAN",
)
