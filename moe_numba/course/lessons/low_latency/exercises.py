"""Exercises of the notebook on low-latency dispatch and combine."""

import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda

from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, function_test, kernel_test
from moe_numba.course.lessons.low_latency.model import PairModel
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.memory import pointer_from_address

_SEEDS = 6


# 1: a word as its own flag


@cuda.jit
def exchange(local, peers, epoch, rank, value, out):
    half = epoch[0] % 2
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, half, value[0])
    word = ld_relaxed_sys_s32(local, half)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, half)
    st_relaxed_sys_s32(local, half, SENTINEL)
    out[0] = word
    epoch[0] += 1


def _words(rank):
    return [100 * (rank + 1) + launch for launch in range(5)]


def _exchange(kernel):
    """Launch the kernel several times on two ranks, each of which runs ahead as far as the kernel lets it."""

    def work(transport):
        shared, epoch = transport.allocate(8), torch.zeros(1, dtype=torch.int32)
        local = shared.local.view(torch.int32)
        local.fill_(SENTINEL)
        transport.gather(None)
        out = []
        for word in _words(transport.rank):
            out.append(torch.full((1,), -7, dtype=torch.int32))
            value = torch.tensor([word], dtype=torch.int32)
            transport.launch(kernel, 1, 1, local, shared.addresses, epoch, transport.rank, value, out[-1])
        settle(transport)
        shared.close()
        return [int(word) for word in out]

    with simulator.weak_memory():
        received = LocalGroup(2).run(work)
    return {f"rank {rank}'s words": received[rank] for rank in range(2)}


_EXCHANGE = Run(_exchange, {}, {f"rank {rank}'s words": _words(1 - rank) for rank in range(2)})


# 2: rows packed by expert


def place_rows(experts):
    flat = experts.flatten()
    earlier = torch.ones(len(flat), len(flat)).tril(-1).bool()
    place = ((flat[:, None] == flat) & earlier).sum(dim=1)
    return torch.where(flat >= 0, place, -1).view(experts.shape)


def _experts(seed):
    experts = torch.rand(5, 6, generator=torch.Generator().manual_seed(seed)).topk(2).indices
    return torch.where(experts < 3, experts, -1)  # the others are on other ranks


# 3: where bytes begin to matter

_MODELS = PairModel(8.0, 200.0), PairModel(10.0, 350.0)  # examples, not measured


def break_even_tokens(model):
    row_bytes = 2 * 7168
    return model.latency_us * model.gbps * 1e3 / (2 * row_bytes)  # rows travel in dispatch and in combine


EXERCISES = {
    1: Exercise(
        "a kernel with which two ranks exchange a word in each of several launches",
        kernel_test(_EXCHANGE, seeds=_SEEDS),
        "A word that was read stays in memory, and the next launch takes it for a new one. And the other rank may be "
        "in its next launch already, so consecutive launches need different words: choose by epoch[0] % 2.",
        exchange,
    ),
    2: Exercise(
        "a function that returns the place of each slot's row within its expert",
        function_test(place_rows, [(_experts(seed),) for seed in range(_SEEDS)]),
        "Compare all elements with all others, and count the equal ones that come before. torch.tril(-1) of a matrix "
        "of ones marks what comes before.",
        place_rows,
    ),
    3: Exercise(
        "a function that returns the number of tokens for a model",
        function_test(break_even_tokens, [(model,) for model in _MODELS], rtol=0.02),
        "A row has 2 x 7168 bytes and travels in dispatch and in combine. 1 GB/s is 1000 bytes per microsecond.",
        break_even_tokens,
    ),
}
