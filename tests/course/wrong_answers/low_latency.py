"""Wrong answers to the exercises of notebook 10: (exercise, answer, what the message must match)."""

import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda

from moe_numba.course.lessons.low_latency.exercises import break_even_tokens, place_rows
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.ptx.atomics import ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.memory import pointer_from_address


@cuda.jit
def one_half(local, peers, epoch, rank, value, out):
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, 0, value[0])
    word = ld_relaxed_sys_s32(local, 0)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, 0)
    st_relaxed_sys_s32(local, 0, SENTINEL)
    out[0] = word
    epoch[0] += 1


@cuda.jit
def no_reset(local, peers, epoch, rank, value, out):
    half = epoch[0] % 2
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, half, value[0])
    word = ld_relaxed_sys_s32(local, half)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, half)
    out[0] = word
    epoch[0] += 1


@cuda.jit
def stub(local, peers, epoch, rank, value, out):
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, 0, value[0])
    word = ld_relaxed_sys_s32(local, 0)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, 0)
    out[0] = word
    epoch[0] += 1


@cuda.jit
def does_not_wait(local, peers, epoch, rank, value, out):
    st_relaxed_sys_s32(pointer_from_address(peers[1 - rank], local), epoch[0] % 2, value[0])
    out[0] = ld_relaxed_sys_s32(local, epoch[0] % 2)
    epoch[0] += 1


def counts_itself(experts):
    return torch.where(experts >= 0, place_rows(experts) + 1, -1)


def counts_slots(experts):
    return torch.where(experts >= 0, torch.arange(len(experts))[:, None], -1)


def names_no_expert(experts):
    return place_rows(experts).clamp(min=0)


WRONG = [
    ("low_latency-1", stub, r"thread order of seed \d, rank . receives .* in launch"),
    ("low_latency-1", no_reset, r"rank . receives .* in launch"),
    ("low_latency-1", one_half, "threads wait for ever"),
    ("low_latency-1", does_not_wait, "rank . receives .* in launch"),
    ("low_latency-2", counts_itself, r"element \[., .\] is 1, not 0: expert . is named 0 times before"),
    ("low_latency-2", counts_slots, r"element .* is named \d times before"),
    ("low_latency-2", names_no_expert, "is 0, not -1: -1 stands for the experts of other ranks"),
    ("low_latency-2", lambda experts: place_rows(experts)[:, 0], r"the result has shape \(5,\)"),
    ("low_latency-3", lambda model: 2 * break_even_tokens(model), "the rows travel twice"),
    ("low_latency-3", lambda model: break_even_tokens(model) / 4, "whose bytes take 2 us, not 8 us"),
]
