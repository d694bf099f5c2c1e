"""Exercises of notebook 09, on combine."""

from math import ceil, isfinite

import numpy as np
import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.deepep_port.notify import NO_HEAD
from moe_numba.course.exercises import Exercise
from moe_numba.course.lessons.ring_buffer_dispatch.exercises import launch_ranks
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK

_SEEDS = 4


# 1: one rounding


def _rounds_differently(answer):
    try:
        numbers = [float(number) for number in answer]
    except (TypeError, ValueError):
        return f"three finite numbers are needed, not {answer!r}"
    if len(numbers) != 3 or not all(map(isfinite, numbers)):
        return f"three finite numbers are needed, not {numbers}"
    for number in numbers:
        if (rounded := float(torch.tensor(number).bfloat16())) != number:
            return f"{number:g} is no bfloat16 number; the nearest is {rounded:g}"
    rows = torch.tensor(numbers).bfloat16()
    each, once = float(rows[0] + rows[1] + rows[2]), float(rows.float().sum().bfloat16())
    if each == once:
        partial, precise = float(rows[0] + rows[1]), float(rows[0].float() + rows[1].float())
        return (
            f"the sum is {each:g} in both cases, after the partial sum {partial:.10g} in bfloat16 and "
            f"{precise:.10g} in float32"
        )
    return None


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


def _fills_gaps(kernel):
    for seed in range(_SEEDS):
        is_sent = np.random.default_rng(seed).random(32) < (0.4, 0.7, 0.1, 0)[seed]
        is_sent[31] = seed % 2 and is_sent.any()
        send_head = np.where(is_sent, is_sent.cumsum() - 1, -1).astype(np.int32)
        filled = np.full(32, -7, np.int32)
        with simulator.seed(seed):
            kernel[1, 32](send_head.copy(), filled)
        for token in range(32):
            later = send_head[token:][is_sent[token:]]
            wanted = send_head[token] if is_sent[token] else -(later[0] if len(later) else NO_HEAD) - 1
            if filled[token] != wanted:
                why = f"the next position is {later[0]}" if len(later) else "no later token is sent: NO_HEAD"
                return (
                    f"filled[{token}] is {filled[token]}, not {wanted}: "
                    f"{'this token is sent' if is_sent[token] else why}; send_head is {send_head.tolist()}"
                )
    return None


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


def _fills_the_memory(answer):
    for given in _GPUS:
        found, wanted = answer(*given), loads_in_flight(*given)
        if found != wanted:
            bandwidth, latency, sms, threads, rows = given
            return (
                f"with {bandwidth / 1e12:g} TB/s, {latency} ns, {sms} SMs, {threads} threads per SM and {rows} rows "
                f"you find {found}. Bandwidth times latency is {bandwidth * latency * 1e-15:.4g} MB, and one load "
                f"per row and thread has {sms * threads * rows * 16e-6:.4g} MB in flight"
            )
    return None


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


def _routings():
    """Yield which ranks have a row of each token, [rank, token] as masks: the first of a rank go to the other rank."""
    yield torch.tensor([[2] * 4 + [3] * 3, [1] * 4 + [3] * 3], dtype=torch.int32)
    for seed in range(1, _SEEDS):
        yield torch.randint(4, (2, 9), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _combines(kernel):
    for seed, sources in enumerate(_routings()):
        is_in = torch.stack([sources & 1, sources >> 1 & 1])  # [rank with the row, source rank, token]
        values = torch.arange(is_in.numel(), dtype=torch.int32).view(is_in.shape) + 100
        wanted, tokens = (values * is_in).sum(dim=0), sources.shape[1]
        out = [torch.full((tokens,), -7, dtype=torch.int32) for _ in range(2)]
        arguments = [
            (values[r][is_in[r] == 1], is_in[r].sum(dim=1, dtype=torch.int32), sources[r].clone(), tokens, out[r])
            for r in range(2)
        ]
        try:
            launch_ranks(kernel, 64, RINGS + 2 * SLOTS, arguments, seed)
        except simulator.Deadlock as error:
            return f"with sources {sources.tolist()} the ranks wait for each other: {error}"
        if len(wrong := (torch.stack(out) != wanted).nonzero()):
            rank, token = wrong[0].tolist()
            return (
                f"with sources {sources.tolist()}, out[{token}] of rank {rank} is {int(out[rank][token])}, not "
                f"{int(wanted[rank, token])}"
            )
    return _waits_for_free_slots(kernel)


def _waits_for_free_slots(kernel):
    """Return what is wrong if rank 0 does not fill both rings while no rank receives."""
    sizes = [torch.full((2,), rows, dtype=torch.int32) for rows in (SLOTS, 0)]
    y, nothing = torch.arange(2 * SLOTS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    try:
        launch_ranks(kernel, 64, RINGS + 2 * SLOTS, [(y, rows, nothing, 0, nothing) for rows in sizes], seed=0)
    except simulator.Deadlock as error:
        return f"the sums are right, but rank 0 waits although a slot is free ({error})"
    return None


EXERCISES = {
    1: Exercise(
        "three bfloat16 numbers whose sum depends on how often it is rounded",
        _rounds_differently,
        "Between 256 and 512 the bfloat16 numbers are the even integers. What happens to 256 + 1?",
        "(256, 1, 1)",
    ),
    2: Exercise(
        "a kernel that fills the gaps of 32 tokens, one per lane in ascending order",
        _fills_gaps,
        "Lane t needs the lowest set bit of the ballot above bit t. Shift the ballot by t, then by 1, so that no shift "
        "reaches 32; cuda.ffs returns the lowest bit's number plus 1, and 0 if no bit is set.",
        fill_gaps_of_warp,
    ),
    3: Exercise(
        "a function of the bytes per second, the latency in ns, the SMs, the threads per SM and the rows per token",
        _fills_the_memory,
        "Bandwidth times latency is the number of bytes that must be in flight. A load has 16 bytes.",
        loads_in_flight,
    ),
    4: Exercise(
        "a kernel in which two ranks combine through rings of two slots",
        _combines,
        "If one ring is full, which rows can the sender send meanwhile?",
        combine_two_ranks,
    ),
}
