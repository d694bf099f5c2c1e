"""Exercises of the notebook on low-latency dispatch and combine."""

import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda

from moe_numba.course.exercises import Exercise
from moe_numba.course.lessons.low_latency.model import PairModel
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.memory import pointer_from_address

_SEEDS, _LAUNCHES = 6, 5


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


def _exchanges_words(kernel):
    for seed in range(_SEEDS):
        with simulator.seed(seed), simulator.weak_memory():
            received = LocalGroup(2).run(lambda transport: _launch_exchanges(transport, kernel))
        for n in range(_LAUNCHES):
            for rank in range(2):
                if received[rank][n] != (wanted := _word(n, 1 - rank)):
                    sent = ", ".join(str(_word(i, 1 - rank)) for i in range(_LAUNCHES))
                    return (
                        f"with the thread order of seed {seed}, rank {rank} receives {received[rank][n]} in launch "
                        f"{n}, not {wanted}; rank {1 - rank} sends {sent}"
                    )
    return None


def _word(launch, rank):
    return 100 * (rank + 1) + launch


def _launch_exchanges(transport, kernel):
    """Launch the kernel several times on a rank, which runs ahead as far as the kernel lets it."""
    shared, epoch = transport.allocate(8), torch.zeros(1, dtype=torch.int32)
    local = shared.local.view(torch.int32)
    local.fill_(SENTINEL)
    transport.gather(None)
    out = [torch.full((1,), -7, dtype=torch.int32) for _ in range(_LAUNCHES)]
    for n in range(_LAUNCHES):
        value = torch.tensor([_word(n, transport.rank)], dtype=torch.int32)
        transport.launch(kernel, 1, 1, local, shared.addresses, epoch, transport.rank, value, out[n])
    transport.gather(None)  # runs the kernels
    shared.close()
    return [int(word) for word in out]


# 2: rows packed by expert


def place_rows(experts):
    flat = experts.flatten()
    earlier = torch.ones(len(flat), len(flat)).tril(-1).bool()
    place = ((flat[:, None] == flat) & earlier).sum(dim=1)
    return torch.where(flat >= 0, place, -1).view(experts.shape)


def _places_rows(answer):
    for seed in range(_SEEDS):
        generator = torch.Generator().manual_seed(seed)
        experts = torch.rand(5, 6, generator=generator).topk(2).indices
        experts = torch.where(experts < 3, experts, -1)  # the others are on other ranks
        wanted = place_rows(experts)
        given = torch.as_tensor(answer(experts.clone()))
        if given.shape != wanted.shape:
            return f"the result has shape {tuple(given.shape)}; it must be that of experts, {tuple(wanted.shape)}"
        if len(wrong := (given != wanted).nonzero()):
            slot, k = wrong[0].tolist()
            found, place = int(given[slot, k]), int(wanted[slot, k])
            earlier = f"expert {int(experts[slot, k])} is named {place} times before"
            why = "-1 stands for the experts of other ranks" if place < 0 else earlier
            return f"for the experts {experts.tolist()}, element [{slot}, {k}] is {found}, not {place}: {why}"
    return None


# 3: where bytes begin to matter

_MODELS = PairModel(8.0, 200.0), PairModel(10.0, 350.0)  # examples, not measured


def break_even_tokens(model):
    row_bytes = 2 * 7168
    return model.latency_us * model.gbps * 1e3 / (2 * row_bytes)  # rows travel in dispatch and in combine


def _breaks_even(answer):
    for model in _MODELS:
        tokens, wanted = float(answer(model)), break_even_tokens(model)
        if abs(tokens - 2 * wanted) < 0.02 * wanted:
            return "the rows travel twice: in dispatch, and in combine"
        if abs(tokens - wanted) > 0.02 * wanted:
            return (
                f"for {model} the answer is {tokens:.4g} tokens, whose bytes take "
                f"{model.latency_us * tokens / wanted:.3g} us, not {model.latency_us:g} us"
            )
    return None


EXERCISES = {
    1: Exercise(
        "a kernel with which two ranks exchange a word in each of several launches",
        _exchanges_words,
        "A word that was read stays in memory, and the next launch takes it for a new one. And the other rank may be "
        "in its next launch already, so consecutive launches need different words: choose by epoch[0] % 2.",
        exchange,
    ),
    2: Exercise(
        "a function that returns the place of each slot's row within its expert",
        _places_rows,
        "Compare all elements with all others, and count the equal ones that come before. torch.tril(-1) of a matrix "
        "of ones marks what comes before.",
        place_rows,
    ),
    3: Exercise(
        "a function that returns the number of tokens for a model",
        _breaks_even,
        "A row has 2 x 7168 bytes and travels in dispatch and in combine. 1 GB/s is 1000 bytes per microsecond.",
        break_even_tokens,
    ),
}
