"""The lesson's own answers: functions that the page uses until the reader's are right."""

from math import ceil

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.lessons.combine.deadlocks import HEAD, RING, SLOTS, TAIL, THREE
from moe_numba.course.lessons.combine.runs import RANKS, VECTORS, give_up
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_cta_shared_s32, st_release_sys_s32
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address
from moe_numba.ptx.warp import FULL_MASK


@cuda.jit(device=True)
def sum_vector(words, first, ranks, mask):
    sums = cuda.local.array(8, float32)
    for k in range(8):
        sums[k] = float32(0)
    for r in range(ranks):
        if mask >> uint32(r) & uint32(1):
            for k in range(4):
                word = uint32(words[first + 4 * r + k])
                sums[2 * k] += uint_as_float(uint32(word << uint32(16)))
                sums[2 * k + 1] += uint_as_float(uint32(word & uint32(0xFFFF0000)))
    a, b = cvt_rn_bf16x2_f32(sums[1], sums[0]), cvt_rn_bf16x2_f32(sums[3], sums[2])
    c, d = cvt_rn_bf16x2_f32(sums[5], sums[4]), cvt_rn_bf16x2_f32(sums[7], sums[6])
    return int32(a), int32(b), int32(c), int32(d)


@cuda.jit(device=True)
def load_several(words, rows, begins, mask, first, row_vectors):
    for u in range(VECTORS):
        i = first + 32 * u
        if i < row_vectors:
            for r in range(RANKS):
                if mask >> uint32(r) & uint32(1):
                    j = 4 * (RANKS * u + r)
                    a, b, c, d = ld_global_s32x4(rows.local, begins[r] + 4 * i)
                    words[j], words[j + 1], words[j + 2], words[j + 3] = a, b, c, d


@cuda.jit(device=True)
def wait_rows(local, at, tail, wanted, waits, state):
    polls, waits = int32(0), waits and int32(tail - wanted) <= 0
    while cuda.any_sync(FULL_MASK, waits):
        if waits:
            tail = uint32(ld_acquire_sys_s32(local, at))
            waits = int32(tail - wanted) <= 0
        polls = int32(polls + 1)
        if give_up(state, polls):
            waits = False
    cuda.syncwarp()  # what one lane has acquired, all lanes may read
    return tail


@cuda.jit(device=True)
def hold(heads, at, needed):
    st_release_cta_shared_s32(heads, at, needed)


def loads_in_flight(bandwidth, latency_ns, sms, threads, rows):
    return ceil(bandwidth * latency_ns * 1e-9 / (sms * threads * rows * 16))


def least_ring(chunk, warps):
    return chunk + warps - 1


@cuda.jit
def combine_three_ranks(local, peers, rank, y, first, position, tokens, out):
    if cuda.threadIdx.x == 0:
        tail = cuda.local.array(THREE, int32)
        for to in range(THREE):
            tail[to] = 0
        left = int32(1)
        while left > 0:
            left = int32(0)
            for to in range(THREE):
                rows = int32(first[to + 1] - first[to])
                if to != rank and tail[to] < rows:
                    left = int32(left + 1)
                    if tail[to] - ld_acquire_sys_s32(local, HEAD + to) < SLOTS:
                        remote = pointer_from_address(peers[to], local)
                        remote[RING + SLOTS * rank + tail[to] % SLOTS] = y[first[to] + tail[to]]
                        tail[to] += 1
                        st_release_sys_s32(remote, TAIL + rank, tail[to])
    elif cuda.threadIdx.x == 32:
        for token in range(tokens):
            total = int32(0)
            for source in range(THREE):
                n = position[THREE * token + source]
                if n >= 0 and source == rank:
                    total += y[first[rank] + n]
                elif n >= 0:
                    while ld_acquire_sys_s32(local, TAIL + source) <= n:
                        pass
                    total += local[RING + SLOTS * source + n % SLOTS]
                    st_release_sys_s32(pointer_from_address(peers[source], local), HEAD + rank, int32(n + 1))
            out[token] = total
