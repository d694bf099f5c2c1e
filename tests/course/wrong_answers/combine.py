"""Wrong answers to the exercises of notebook 09: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.deepep_port.notify import NO_HEAD
from moe_numba.course.lessons.combine.exercises import combine_two_ranks, fill_gaps_of_warp, loads_in_flight
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK
from wrong_answers import changed

SLOTS, TAILS, HEADS, RINGS = 2, 0, 2, 4


@cuda.jit
def stub_of_gaps(send_head, filled):
    lane = int32(cuda.threadIdx.x)
    position = send_head[lane]
    sent = uint32(cuda.ballot_sync(FULL_MASK, position >= 0))
    nearest = int32(31 - cuda.clz(sent))
    following = cuda.shfl_sync(FULL_MASK, position, max(nearest, 0))
    filled[lane] = position if position >= 0 else int32(-following - 1)


@cuda.jit
def nothing_follows(send_head, filled):
    lane = int32(cuda.threadIdx.x)
    position = send_head[lane]
    sent = uint32(cuda.ballot_sync(FULL_MASK, position >= 0))
    later = uint32(sent >> uint32(lane)) >> uint32(1)
    following = cuda.shfl_sync(FULL_MASK, position, int32((lane + cuda.ffs(later)) % 32))
    filled[lane] = position if position >= 0 else int32(-following - 1)


@cuda.jit
def shuffles_in_a_branch(send_head, filled):
    lane = int32(cuda.threadIdx.x)
    position = send_head[lane]
    sent = uint32(cuda.ballot_sync(FULL_MASK, position >= 0))
    later = uint32(sent >> uint32(lane)) >> uint32(1)
    if position < 0:
        following = int32(NO_HEAD)
        if later != uint32(0):
            following = cuda.shfl_sync(FULL_MASK, position, int32(lane + cuda.ffs(later)))
        position = int32(-following - 1)
    filled[lane] = position


@cuda.jit
def stub_of_combine(local, peers, rank, y, rows, sources, tokens, out):
    if cuda.threadIdx.x == 0:
        tail = cuda.local.array(2, int32)
        tail[0] = tail[1] = 0
        while tail[0] < rows[0] or tail[1] < rows[1]:
            for to in range(2):
                remote = pointer_from_address(peers[to], local)
                if tail[to] < rows[to]:
                    while tail[to] - ld_acquire_sys_s32(remote, HEADS + rank) == SLOTS:
                        pass
                    remote[RINGS + SLOTS * rank + tail[to] % SLOTS] = y[to * rows[0] + tail[to]]
                    tail[to] += 1
                    st_release_sys_s32(remote, TAILS + rank, tail[to])
    elif cuda.threadIdx.x == 32:
        head = cuda.local.array(2, int32)
        head[0] = head[1] = 0
        for token in range(tokens):
            out[token] = 0
            for source in range(2):
                if sources[token] >> source & 1:
                    while ld_acquire_sys_s32(local, TAILS + source) == head[source]:
                        pass
                    out[token] += local[RINGS + SLOTS * source + head[source] % SLOTS]
                    head[source] += 1
                    st_release_sys_s32(local, HEADS + source, head[source])


@cuda.jit
def does_not_wait(local, peers, rank, y, rows, sources, tokens, out):
    if cuda.threadIdx.x == 0:
        tail = cuda.local.array(2, int32)
        tail[0] = tail[1] = 0
        while tail[0] < rows[0] or tail[1] < rows[1]:
            for to in range(2):
                remote = pointer_from_address(peers[to], local)
                if tail[to] < rows[to]:
                    remote[RINGS + SLOTS * rank + tail[to] % SLOTS] = y[to * rows[0] + tail[to]]
                    tail[to] += 1
                    st_release_sys_s32(remote, TAILS + rank, tail[to])
    elif cuda.threadIdx.x == 32:
        head = cuda.local.array(2, int32)
        head[0] = head[1] = 0
        for token in range(tokens):
            out[token] = 0
            for source in range(2):
                if sources[token] >> source & 1:
                    while ld_acquire_sys_s32(local, TAILS + source) == head[source]:
                        pass
                    out[token] += local[RINGS + SLOTS * source + head[source] % SLOTS]
                    head[source] += 1
                    st_release_sys_s32(local, HEADS + source, head[source])


@cuda.jit
def own_rank_first(local, peers, rank, y, rows, sources, tokens, out):
    if cuda.threadIdx.x == 0:
        for i in range(2):
            to = rank ^ i
            remote = pointer_from_address(peers[to], local)
            for n in range(rows[to]):
                while n - ld_acquire_sys_s32(remote, HEADS + rank) == SLOTS:
                    pass
                remote[RINGS + SLOTS * rank + n % SLOTS] = y[to * rows[0] + n]
                st_release_sys_s32(remote, TAILS + rank, int32(n + 1))
    elif cuda.threadIdx.x == 32:
        head = cuda.local.array(2, int32)
        head[0] = head[1] = 0
        for token in range(tokens):
            out[token] = 0
            for source in range(2):
                if sources[token] >> source & 1:
                    while ld_acquire_sys_s32(local, TAILS + source) == head[source]:
                        pass
                    out[token] += local[RINGS + SLOTS * source + head[source] % SLOTS]
                    head[source] += 1
                    st_release_sys_s32(local, HEADS + source, head[source])


@cuda.jit
def one_source_per_token(local, peers, rank, y, rows, sources, tokens, out):
    if cuda.threadIdx.x == 0:
        tail = cuda.local.array(2, int32)
        tail[0] = tail[1] = 0
        while tail[0] < rows[0] or tail[1] < rows[1]:
            for to in range(2):
                remote = pointer_from_address(peers[to], local)
                if tail[to] < rows[to] and tail[to] - ld_acquire_sys_s32(remote, HEADS + rank) < SLOTS:
                    remote[RINGS + SLOTS * rank + tail[to] % SLOTS] = y[to * rows[0] + tail[to]]
                    tail[to] += 1
                    st_release_sys_s32(remote, TAILS + rank, tail[to])
    elif cuda.threadIdx.x == 32:
        head = cuda.local.array(2, int32)
        head[0] = head[1] = 0
        for token in range(tokens):
            for source in range(2):
                if sources[token] >> source & 1:
                    while ld_acquire_sys_s32(local, TAILS + source) == head[source]:
                        pass
                    out[token] = local[RINGS + SLOTS * source + head[source] % SLOTS]
                    head[source] += 1
                    st_release_sys_s32(local, HEADS + source, head[source])


WRONG = [
    ("combine-1", (..., ..., ...), "not answered yet"),
    ("combine-1", (1, 2, 3), "the sum is 6 in both cases, after the partial sum 3 in bfloat16"),
    ("combine-1", (1, 1, 256), "the sum is 258 in both cases"),
    ("combine-1", (257, 1, 1), "257 is no bfloat16 number; the nearest is 256"),
    ("combine-1", (1, float("inf"), 0), "three finite numbers are needed"),
    ("combine-1", (256, 1), "three finite numbers are needed"),
    ("combine-1", None, "three finite numbers are needed, not None"),
    ("combine-1", (2**30, 1, -(2**30)), "the sum is 0 in both cases, .* bfloat16 and 1073741824 in float32"),
    ("combine-2", stub_of_gaps, r"filled\[0\] is -\d+, not -1: the next position is 0; send_head is"),
    ("combine-2", nothing_follows, "no later token is sent: NO_HEAD"),
    ("combine-2", shuffles_in_a_branch, "a lane is missing"),
    ("combine-2", changed(fill_gaps_of_warp, (" >> uint32(1)", "")), r"filled\[0\] is .*, not -1"),
    ("combine-2", changed(fill_gaps_of_warp, ("-following - 1", "-following")), r"filled\[0\] is 0, not -1"),
    (
        "combine-2",
        changed(
            fill_gaps_of_warp, ("filled[lane] = position if position >= 0 else", "if position < 0: filled[lane] =")
        ),
        r"filled\[1\] is -7, not 0: this token is sent",
    ),
    ("combine-3", lambda bandwidth, latency, sms, threads, rows: 0, "you find 0. Bandwidth times latency is 2.52 MB"),
    (
        "combine-3",
        lambda bandwidth, latency, sms, threads, rows: loads_in_flight(bandwidth, latency, sms, threads, rows) * rows,
        "you find 4. .* one load per row and thread has 2.163 MB in flight",
    ),
    (
        "combine-3",
        lambda bandwidth, latency, sms, threads, rows: bandwidth * latency * 1e-9 / (sms * threads * rows * 16),
        "you find 1.165",
    ),
    (
        "combine-3",
        lambda bandwidth, latency, sms, threads, rows: (
            1 + int(bandwidth * latency * 1e-9 / (sms * threads * rows * 16))
        ),
        "with 1.6 TB/s, 512 ns, .* you find 3",
    ),
    ("combine-4", stub_of_combine, "the ranks wait for each other"),
    ("combine-4", own_rank_first, "the ranks wait for each other"),
    ("combine-4", does_not_wait, r"out\[0\] of rank 0 is 120, not 114"),
    ("combine-4", one_source_per_token, r"out\[4\] of rank 0 is 118, not 222"),
    ("combine-4", changed(combine_two_ranks, ("< SLOTS", "<= SLOTS")), r"out\[0\] of rank 0 is 116, not 114"),
    ("combine-4", changed(combine_two_ranks, ("< SLOTS", "< SLOTS - 1")), "right, but rank 0 waits although a slot is"),
    ("combine-4", changed(combine_two_ranks, ("rows[0] or tail", "rows[0] and tail")), "the ranks wait for each other"),
    ("combine-4", changed(combine_two_ranks, ("tail[to] < rows[to] and ", "")), "an index is out of bounds"),
]
