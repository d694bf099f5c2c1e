"""Exercises of notebook 13, on combine."""

from math import ceil

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.deepep_port.notify import NO_HEAD
from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, Wrong, function_test, kernel_test
from moe_numba.course.lessons.dispatch.exercises import launch_ranks
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK

# 1: one rounding


def _rounds_differently(answer):
    rows = torch.tensor([float(number) for number in answer]).bfloat16()
    if len(rows) != 3 or not rows.isfinite().all():
        raise Wrong("three finite numbers are needed")
    for number, rounded in zip(answer, rows.tolist(), strict=True):
        if number != rounded:
            raise Wrong(f"{number:g} is no bfloat16 number; the nearest is {rounded:g}")
    each, once = float(rows[0] + rows[1] + rows[2]), float(rows.float().sum().bfloat16())
    if each == once:
        raise Wrong(f"the sum is {each:g} in both cases")


# 2: gaps in send_head


@cuda.jit
def fill_gaps_of_warp(send_head, filled):
    lane = int32(cuda.threadIdx.x)
    position = send_head[lane]
    sent = uint32(cuda.ballot_sync(FULL_MASK, position >= 0))
    later = uint32(sent >> uint32(lane)) >> uint32(1)
    following = cuda.shfl_sync(FULL_MASK, position, int32((lane + cuda.ffs(later)) % 32))
    if later == uint32(0):
        following = int32(NO_HEAD)
    filled[lane] = position if position >= 0 else int32(-following - 1)


def _with_gaps(seed, share):
    is_sent = np.random.default_rng(seed).random(32) < share
    is_sent[31] = seed % 2 and is_sent.any()
    send_head = np.where(is_sent, is_sent.cumsum() - 1, -1).astype(np.int32)
    later = [send_head[token:][is_sent[token:]] for token in range(32)]  # the first is that of the next token
    filled = [positions[0] if len(positions) else NO_HEAD for positions in later]
    wanted = np.where(is_sent, send_head, -np.array(filled) - 1)
    arguments = {"send_head": send_head, "filled": np.full(32, -7, np.int32)}
    return Run((1, 32), arguments, {"filled": wanted}, f"send_head is {send_head.tolist()}")


# 3: bytes in flight

_GPUS = [
    (4.2e12, 600, 132, 512, 2),
    (4.2e12, 600, 12, 480, 2),
    (1.9e12, 500, 108, 256, 8),
    (3.3e12, 700, 100, 512, 1),
    (1.6e12, 512, 100, 256, 1),  # exactly 2, without rounding errors in any order of the operations
]


def loads_in_flight(bandwidth, latency_ns, sms, threads, rows):
    return ceil(bandwidth * latency_ns * 1e-9 / (sms * threads * rows * 16))


# 4: a sender that waits

SLOTS, TAILS, HEADS, RINGS = 2, 0, 2, 4


@cuda.jit
def combine_two_ranks(local, peers, rank, y, rows, sources, tokens, out):
    if cuda.threadIdx.x == 0:  # sends
        tail = cuda.local.array(2, int32)
        tail[0] = tail[1] = 0
        while tail[0] < rows[0] or tail[1] < rows[1]:
            for to in range(2):
                remote = pointer_from_address(peers[to], local)
                if tail[to] < rows[to] and tail[to] - ld_acquire_sys_s32(remote, HEADS + rank) < SLOTS:
                    remote[RINGS + SLOTS * rank + tail[to] % SLOTS] = y[to * rows[0] + tail[to]]
                    tail[to] += 1
                    st_release_sys_s32(remote, TAILS + rank, tail[to])
    elif cuda.threadIdx.x == 32:  # receives
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


def _combine(y, rows, sources, tokens, wanted, case):
    def launch(kernel, out):
        arguments = [(y[r].clone(), rows[r].int(), sources[r].clone(), tokens, out[r]) for r in range(2)]
        launch_ranks(kernel, 64, RINGS + 2 * SLOTS, arguments)

    return Run(launch, {"out": torch.full(wanted.shape, -7, dtype=torch.int32)}, {"out": wanted}, case)


def _routed(sources):
    """Return a run with a routing: ``sources[r]`` has the ranks with a row of each of rank r's tokens, as masks."""
    is_in = torch.stack([sources & 1, sources >> 1 & 1])  # [rank with the row, source rank, token]
    values = torch.arange(is_in.numel(), dtype=torch.int32).view(is_in.shape) + 100
    y, wanted = [values[r][is_in[r] == 1] for r in range(2)], (values * is_in).sum(dim=0)
    return _combine(y, is_in.sum(dim=2), sources, sources.shape[1], wanted, f"sources is {sources.tolist()}")


_FULL_RINGS = torch.arange(2 * SLOTS, dtype=torch.int32).expand(2, -1), torch.tensor([[SLOTS, SLOTS], [0, 0]])
_UNUSED = torch.full((2, 1), -7, dtype=torch.int32)
_COMBINES = [
    _routed(torch.tensor([[2] * 4 + [3] * 3, [1] * 4 + [3] * 3], dtype=torch.int32)),  # first rows to the other rank
    _routed(torch.randint(4, (2, 9), generator=torch.Generator().manual_seed(1), dtype=torch.int32)),
    _combine(*_FULL_RINGS, _UNUSED, 0, _UNUSED, f"rank 0 has {SLOTS} rows for each rank, and no rank receives"),
]


EXERCISES = {
    1: Exercise(
        "three bfloat16 numbers whose sum depends on how often it is rounded",
        _rounds_differently,
        "Between 256 and 512 the bfloat16 numbers are the even integers. What happens to 256 + 1?",
        "(256, 1, 1)",
    ),
    2: Exercise(
        "a kernel that fills the gaps of 32 tokens, one per lane in ascending order",
        kernel_test(*(_with_gaps(seed, share) for seed, share in enumerate((0.4, 0.7, 0.1, 0)))),
        "Lane t needs the lowest set bit of the ballot above bit t. Shift the ballot by t, then by 1, so that no shift "
        "reaches 32; cuda.ffs returns the lowest bit's number plus 1, and 0 if no bit is set.",
        fill_gaps_of_warp,
    ),
    3: Exercise(
        "a function of the bytes per second, the latency in ns, the SMs, the threads per SM and the rows per token",
        function_test(loads_in_flight, _GPUS),
        "Bandwidth times latency is the number of bytes that must be in flight. A load has 16 bytes.",
        loads_in_flight,
    ),
    4: Exercise(
        "a kernel in which two ranks combine through rings of two slots",
        kernel_test(*_COMBINES, seeds=2),
        "If one ring is full, which rows can the sender send meanwhile?",
        combine_two_ranks,
    ),
}
