"""Exercises of the lesson "Low-latency dispatch and combine"; the page checks answers with `exercises.<name>`."""

from functools import cache

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.grader import Wrong, expect_equal, function_test
from moe_numba.course.lessons.low_latency import answers
from moe_numba.course.lessons.low_latency.model import PairModel
from moe_numba.course.lessons.low_latency.runs import Memory, Sizes, fitted
from moe_numba.course.steps.exercises import Build, Choose, Formula, Predict
from moe_numba.course.steps.score import count
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import st_relaxed_sys_s32
from moe_numba.ptx.memory import pointer_from_address

_random = np.random.default_rng(14)


# Predict: ways over NVLink

trips = Predict(
    "ways over NVLink",
    {"flag_after_data": 3, "data_is_flag": 1},
    "With a flag the row travels, its acknowledgement travels back, and only then does the fence let the flag travel. "
    "Without a flag only the row travels",
)


# Build: a word as its own flag

_LAUNCHES = 5


@cache
def _words():
    """Return random words [rank, launch]: no kernel can work out those of the other rank."""
    return _random.integers(1, 1 << 30, (2, _LAUNCHES)).tolist()


def _exchange(kernel):
    """Launch the kernel several times on two ranks, each of which runs ahead as far as the kernel lets it."""

    def work(transport):
        shared, epoch = transport.allocate(8), torch.zeros(1, dtype=torch.int32)
        local = shared.local.view(torch.int32)
        local.fill_(SENTINEL)
        transport.gather(None)
        out = []
        for word in _words()[transport.rank]:
            out.append(torch.full((1,), -7, dtype=torch.int32))
            value = torch.tensor([word], dtype=torch.int32)
            transport.launch(kernel, 1, 1, local, shared.addresses, epoch, transport.rank, value, out[-1])
        settle(transport)
        shared.close()
        return [int(word) for word in out]

    with simulator.weak_memory():
        return LocalGroup(2).run(work)


def _test_exchange(kernel):
    for rank, received in enumerate(_exchange(kernel)):
        expect_equal(f"what rank {rank} received, by launch", received, _words()[1 - rank])


exchange = Build(
    "a word as its own flag",
    "a kernel with which two ranks exchange a word in each of several launches",
    own=answers.exchange,
    test=_test_exchange,
    profile=lambda answer: count(answer, _exchange),
    counter="",
    score=lambda counted: counted.total.peer_bytes // (2 * _LAUNCHES),
    unit="bytes to the other rank per launch",
    par=4,
    par_is_bound=True,
    most_alone=None,
    over_par="The word is its own flag: what else do you send?",
    hint="A word that was read stays in memory, and the next launch takes it for a new one: store the sentinel again. "
    "And the other rank may be in its next launch already, so consecutive launches need different words: choose by "
    "epoch[0] & 1. The end of a launch orders the reset before what the next launch sends; nothing else does.",
    seeds=64,  # what is wrong with the order of a reset and of the next word shows in few of them
    home=f"{__name__}:exchange",
)


# Build: the sum in rank order

_SIZES = Sizes(3, 3, 320, 1, 1)
_TARGETS = (0b111, 0b101, 0b110)  # ranks that send a row, by token
_LAUNCHES_OF_SUMS = 2
_SUMMING_THREADS = 32  # fewer than a row has vectors


def _around_sum(answer):
    @cuda.jit
    def around(local, peers, rank, rows, out, slot, tokens, targets, words):
        """Rank 0 sums. The other ranks store their rows, rank 2 first, as combine does."""
        thread, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        memory = Memory(local, peers, int32(0), words, int32(_SIZES.ranks))
        remote = pointer_from_address(peers[0], local)
        if targets[token] >> rank & 1:
            for i in range(thread, words, int32(cuda.blockDim.x)):
                st_relaxed_sys_s32(remote, (slot + rank * tokens + token) * words + i, rows[token * words + i])
        if rank == 0:
            answer(memory, int32(slot + token), tokens, targets[token], out, token)

    return around


@cache
def _rows_to_add():
    """Return rows [rank, token, hidden] whose sum depends on the order and on every rounding.

    The first row is small, and the two large ones cancel: in rank order float32 keeps a part of the first, bfloat16
    nothing of it.
    """
    generator = torch.Generator().manual_seed(5)
    of_ranks = (_SIZES.tokens, _SIZES.hidden)
    small, large = (torch.randn(of_ranks, generator=generator).bfloat16() for _ in range(2))
    return torch.stack([small, large * 2**20, -large * 2**20])


def _sums(answer):
    kernel = _around_sum(answer)

    def work(transport):
        words, out = _SIZES.words, []
        shared = transport.allocate(4 * 2 * _SIZES.slots * words)
        local = shared.local.view(torch.int32)
        local.fill_(SENTINEL)
        targets = torch.tensor(_TARGETS, dtype=torch.int32)
        transport.gather(None)
        for launch in range(_LAUNCHES_OF_SUMS):
            out.append(torch.full((_SIZES.tokens, words), -7, dtype=torch.int32))
            rows, slot = _rows_to_add()[transport.rank].view(torch.int32), (1 - launch) * _SIZES.slots
            given = local, shared.addresses, transport.rank, rows, out[-1], slot, _SIZES.tokens, targets, words
            transport.launch(kernel, _SIZES.tokens, _SUMMING_THREADS, *given)
        settle(transport)
        left = int((local != SENTINEL).sum())
        shared.close()
        return [each.view(torch.bfloat16) for each in out], left

    with simulator.weak_memory():
        return LocalGroup(_SIZES.ranks).run(work)[0]


def _test_sum(answer):
    sums, left = _sums(answer)
    total = torch.zeros(_SIZES.tokens, _SIZES.hidden)
    for rank in range(_SIZES.ranks):
        for token, targets in enumerate(_TARGETS):
            if targets >> rank & 1:
                total[token] += _rows_to_add()[rank, token].float()
    for launch, found in enumerate(sums):
        expect_equal(f"the sums of launch {launch}, token by token", found.float(), total.bfloat16().float())
    if left:
        raise Wrong(f"{left} words that were read do not hold the sentinel: the operation after the next reads them")


def _stored(counted):
    """Return the bytes of all stores: unlike their number, it does not depend on how lanes diverge while they poll."""
    return sum(found.bytes for (space, what, _), found in counted.total.accesses.items() if (space, what) == _STORE)


_STORE = "global", "store"

sum_rows = Build(
    "a sum in rank order",
    "a function that waits for the rows of a token, adds them in rank order and rounds once",
    own=answers.sum_rows,
    test=_test_sum,
    profile=lambda answer: count(_around_sum(answer), lambda _: _sums(answer), answer),
    counter="",
    score=_stored,
    unit="bytes stored",
    par=_LAUNCHES_OF_SUMS * 4 * _SIZES.words * (sum(map(int.bit_count, _TARGETS)) + _SIZES.tokens),
    forbidden={"barriers": "threads wait for each other, where each needs only its own vectors"},
    over_par="You store each vector that was read once, to reset it, and each vector of out once: what else?",
    hint="One loop over the vectors of the thread, and inside it a loop over the ranks: if the rank has sent a row, "
    "take its vector from slot + r * tokens, and add it to eight sums. Then round them, and store four words.",
    seeds=3,
    home=f"{__name__}:sum_rows",
)


# Build: a warp counts

_ENTRIES = 300


def _around_count(answer):
    @cuda.jit
    def around(entries, wanted, lengths, out):
        experts = cuda.shared.array(_ENTRIES, int32)
        thread = int32(cuda.threadIdx.x)
        for i in range(thread, _ENTRIES, 64):
            experts[i] = entries[i]
        cuda.syncthreads()
        warp = int32(thread >> 5)
        out[thread] = answer(experts, wanted[warp], lengths[warp])

    return around


def _count(kernel):
    entries = np.random.default_rng(7).integers(0, 5, _ENTRIES).astype(np.int32)
    wanted, lengths = np.array([2, 4], np.int32), np.array([_ENTRIES, 77], np.int32)
    out = np.full(64, -7, np.int32)
    kernel[1, 64](entries, wanted, lengths, out)
    right = [int((entries[:n] == expert).sum()) for expert, n in zip(wanted, lengths, strict=True)]
    return out, np.repeat(right, 32)


def _test_count(answer):
    out, right = _count(_around_count(answer))
    for warp, n in enumerate((_ENTRIES, 77)):
        at = slice(32 * warp, 32 * warp + 32)
        expect_equal(f"the number of the first {n} entries, by lane", out[at], right[at])


count_by_warp = Build(
    "a warp counts",
    "a function that counts equal entries, a lane for each of 32",
    own=answers.count_by_warp,
    test=_test_count,
    profile=lambda answer: count(kernel := _around_count(answer), lambda _: _count(kernel), answer),
    counter="shared_load_requests",
    unit="shared loads",
    par=-(-_ENTRIES // 32),
    par_is_bound=True,
    forbidden={
        "barriers": "warps wait for each other, where each counts for itself",
        "shared_store_requests": "it writes shared memory, where lanes can exchange registers",
        "global_load_requests": "it reads global memory",
        "shared_atomic_requests": "it counts with atomics, one after the other",
    },
    limits={"shared_load_requests": (2 * -(-_ENTRIES // 32), "the lanes do not divide the entries among them")},
    needs=(("votes", "shuffles", "reductions"), "no lane learns what the others have counted"),
    over_par="How many entries can a warp load by one instruction?",
    hint="Go through the entries 32 at a time. Each lane compares one; cuda.ballot_sync(FULL_MASK, is_equal) returns a "
    "word with a bit for each lane, and cuda.popc counts its bits. All 32 lanes must vote, also those beyond n.",
    home=f"{__name__}:count_by_warp",
)


# Choose, formula

halves = Choose(
    "one half instead of two",
    {
        "A": "nothing: flags have numbers",
        "B": "rows are wrong, but all operations end",
        "C": "rows may be wrong, and the ranks may wait forever",
    },
    "C",
    "A rank that is one operation ahead stores its row before the other one has read the last. The receiver then takes "
    "the new row for the old one, and resets the slot: in the next operation it waits for a row that it has erased.",
)

_MODELS = PairModel(8.0, 200.0), PairModel(10.0, 350.0)  # examples, not measured


def _break_even(model):
    row_bytes = 2 * 7168
    return model.latency_us * model.gbps * 1e3 / (2 * row_bytes)  # rows travel in dispatch and in combine


break_even = Formula(
    "break-even",
    "a function of the model that returns the number of tokens",
    own=_break_even,
    test=function_test(_break_even, [(model,) for model in _MODELS], rtol=0.02),
    praise=f"in the fitted model bytes take as long as the constant with {_break_even(fitted()):.0f} tokens",
    hint="A row has 2 x 7168 bytes and travels in dispatch and in combine. 1 GB/s is 1000 bytes per microsecond.",
)
