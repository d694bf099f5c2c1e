"""Exercises of the lesson "Dispatch"; the page checks answers with `exercises.<name>`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32, uint64

from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.grader import case, expect_equal, fault
from moe_numba.course.lessons.dispatch import answers, symptoms
from moe_numba.course.lessons.dispatch.model import rows_to_a_rank
from moe_numba.course.lessons.dispatch.model import wire_bytes as wire_bytes_of
from moe_numba.course.lessons.dispatch.runs import Board
from moe_numba.course.lessons.dispatch.sizes import TOKENS, TOPK
from moe_numba.course.steps.exercises import Build, Choose, Predict
from moe_numba.course.steps.score import count
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.verdict import RIGHT, WRONG
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    st_release_cta_shared_s32,
    st_release_cta_shared_u64,
    st_release_sys_s32,
)
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.runtime.launch import launch


def launch_ranks(
    kernel: Callable, threads: int, num_words: int, arguments: Sequence[Sequence], before: int = 0
) -> list:
    """Launch a kernel of one CTA on several ranks with weak memory, each with memory that its peers can access.

    The kernel's arguments are that memory (int32, each word is ``before``), the addresses of all ranks' memory, the
    rank, and ``arguments`` of the rank. Returns what that memory contains afterwards, a list per rank.
    """

    def work(transport):
        shared, rank = transport.allocate(4 * num_words), transport.rank
        local = shared.local.view(torch.int32)
        local.fill_(before)
        settle(transport)
        transport.launch(kernel, 1, threads, local, shared.addresses, rank, *arguments[rank])
        settle(transport)
        words = local.tolist()
        shared.close()
        return words

    with simulator.weak_memory():
        return LocalGroup(len(arguments)).run(work)


@dataclass(frozen=True)
class BetweenRanks(Build):
    """A `Build` that is judged by its results in weak memory: how often it polls is left to chance."""

    def judge(self, answer):
        """Return the state and a sentence of an answer, in the simulator."""
        if (wrong := fault(self._test, answer)) is not None:
            return WRONG, wrong, None
        return RIGHT, f"right under {self.seeds} orders of threads and stores", None


def _no_profile(answer):
    raise AssertionError("it is judged by its results")


# Predict: bytes on the wire


def _wire_mb():
    megabytes = lambda ranks: round(wire_bytes_of(ranks) / 1e6, 1)
    return {"two_ranks": megabytes(2), "four_ranks": megabytes(4), "eight_ranks": megabytes(8)}


def _why_wire():
    share = lambda ranks: f"{rows_to_a_rank(ranks) / TOKENS:.1%} with {ranks} ranks"
    return (
        f"A token goes to a rank unless all its {TOPK} experts are elsewhere. The chance that it goes is "
        f"{share(2)}, {share(4)}, "
        f"{share(8)}. The row passes the link once for each rank except the own one, however many experts it has there"
    )


wire_bytes = Predict(
    "bytes on the wire", _wire_mb, _why_wire, within={"two_ranks": 1.5, "four_ranks": 4.0, "eight_ranks": 8.0}
)


# Build: the rows of a channel

_RANKS, _CHANNELS = 3, 4


def _around_rows(answer):
    @cuda.jit
    def around(rank_prefix, channel_prefix, to, out):
        thread = int32(cuda.threadIdx.x)
        source, channel = thread // _CHANNELS, thread % _CHANNELS
        first, number = answer(
            rank_prefix, channel_prefix, source, to, source, channel, int32(_RANKS), int32(_CHANNELS)
        )
        out[thread, 0], out[thread, 1] = first, number

    return around


def _run_rows(kernel, seed=0, to=1):
    counts = np.random.default_rng(seed).integers(0, 9, (_RANKS, _RANKS, _CHANNELS))  # from, to, channel
    rank_prefix = counts.sum(2).cumsum(0).astype(np.int32)
    channel_prefix = counts[:, to].cumsum(1).astype(np.int32)
    before = counts[:, to].ravel().cumsum() - counts[:, to].ravel()
    out = np.full((_RANKS * _CHANNELS, 2), -7, np.int32)
    kernel[1, _RANKS * _CHANNELS](rank_prefix.ravel(), channel_prefix.ravel(), np.int32(to), out)
    return out, before, counts[:, to].ravel()


def _test_rows(answer):
    for seed, to in ((0, 1), (1, 0), (2, 2)):
        out, first, number = _run_rows(_around_rows(answer), seed, to)
        with case(f"to rank {to}; element 4 s + c is for channel c of rank s"):
            expect_equal("the first row", out[:, 0], first)
            expect_equal("the number of rows", out[:, 1], number)


rows_of = Build(
    "rows of a channel",
    "a function that returns the first row of a channel, and how many rows it has",
    own=answers.rows_of,
    test=_test_rows,
    profile=lambda answer: count(kernel := _around_rows(answer), lambda _: _run_rows(kernel), answer),
    counter="global_load_requests",
    unit="loads of a warp",
    par=3,
    most_alone=None,
    limits={"global_load_requests": (8, "it sums counts again, which the matrices already contain")},
    over_par="Which of these loads reads the same element twice?",
    hint="Entry (s, r) of rank_prefix counts the rows from ranks 0 to s to rank r, and entry (line, c) "
    "of channel_prefix those of "
    "channels 0 to c. What comes before channel 0 of rank 0?",
    seeds=1,
    home=f"{__name__}:rows_of",
)


# Build: wait for space

_SLOTS, _TAIL, _HEADS, _RING, _START = 4, 0, 32, 64, 0xFFFFFFFD  # counters wrap after three rows


def _around_wait(answer):
    @cuda.jit
    def around(local, peers, rank, x, rows, received, out):
        lane = int32(cuda.threadIdx.x)
        if rank == 0:
            peer = lane if lane < 3 else int32(0)
            has_ring, remote, tail = peer > 0, pointer_from_address(peers[peer], local), uint32(_START)
            for n in range(rows):
                answer(local, _HEADS + peer, tail, uint32(_SLOTS - 1), has_ring)
                slot = int32(tail % uint32(_SLOTS))
                for r in range(1, 3):
                    pointer_from_address(peers[r], local)[_RING + 32 * slot + lane] = x[32 * n + lane]
                cuda.syncwarp()
                tail = uint32(tail + uint32(1))
                if has_ring:
                    st_release_sys_s32(remote, _TAIL, int32(tail))
        else:
            remote, head = pointer_from_address(peers[0], local), uint32(_START)
            for n in range(received):
                while int32(uint32(ld_acquire_sys_s32(local, _TAIL)) - head) <= 0:
                    pass
                cuda.syncwarp()
                out[32 * n + lane] = local[_RING + 32 * int32(head % uint32(_SLOTS)) + lane]
                cuda.syncwarp()
                head = uint32(head + uint32(1))
                if lane == 0:
                    st_release_sys_s32(remote, _HEADS + rank, int32(head))

    return around


def _run_wait(kernel, rows, received):
    x = torch.arange(32 * rows, dtype=torch.int32) + 100
    outs = [torch.full((32 * received,), -7, dtype=torch.int32) for _ in range(3)]
    given = [(x if rank == 0 else torch.full_like(x, -9), rows, received, outs[rank]) for rank in range(3)]
    launch_ranks(kernel, 32, _RING + 32 * _SLOTS, given, before=_START - (1 << 32))
    return [out.tolist() for out in outs[1:]], x.tolist()[: 32 * received]


def _test_wait(answer):
    for rows, received, name in ((9, 9, "9 rows"), (_SLOTS, 0, f"nothing is received, and {_SLOTS} rows fit")):
        with case(name):
            found, right = _run_wait(_around_wait(answer), rows, received)
            for rank, out in enumerate(found, 1):
                expect_equal(f"what rank {rank} has received", np.array(out), np.array(right))


wait_for_space = BetweenRanks(
    "wait for space",
    "a function in which a warp waits until the ring of each of its lanes has space",
    own=answers.wait_for_space,
    test=_test_wait,
    profile=_no_profile,
    counter="",
    par=0,
    hint="Subtract as uint32, so that counters may wrap. A lane without a ring must take part in "
    "`any_sync`. And the lanes that "
    "have not read a head will write to the slot, too: what orders their stores after the acquire of another lane?",
    seeds=4,
    home=f"{__name__}:wait_for_space",
)


# Build: the signalling warp

_ROWS, _ITEMS, _WARPS = 5, 4, 2  # of a warp; posts of two warps for two ranks
_FLAGS, _CREDITS, _ROWS_AT = 0, 32, 64
_SMALL = 2  # slots


def _around_signal(answer):
    @cuda.jit
    def around(local, peers, rank, x, out):
        words, posts = cuda.shared.array(0, int32), cuda.shared.array(0, uint64)
        thread = int32(cuda.threadIdx.x)
        warp, lane = thread // 32, thread % 32
        board = Board(posts, words, int32(0), int32(_ITEMS), int32(4 * _ITEMS), int32(_WARPS), int32(_ITEMS), int32(2))
        if thread < 2 * _ITEMS:
            posts[thread] = uint64(0)
        if thread < _WARPS:
            words[4 * _ITEMS + thread] = int32(0)
        cuda.syncthreads()
        if rank == 0:  # a warp is a channel; it sends to rank 1
            if warp == _WARPS:
                answer(board, lane, int32(_FLAGS), rank, peers, local)
            else:
                remote = pointer_from_address(peers[1], local)
                for n in range(_ROWS):
                    while n - ld_acquire_sys_s32(local, _CREDITS + warp) >= _SMALL:
                        pass
                    cuda.syncwarp()
                    remote[_ROWS_AT + 32 * (_SMALL * warp + n % _SMALL) + lane] = x[32 * (_ROWS * warp + n) + lane]
                    cuda.syncwarp()
                    if lane == 0:
                        post = uint64(uint64(warp + 1) << uint64(32) | uint64(n + 1))
                        st_release_cta_shared_u64(posts, 2 * warp + 1, post)
                cuda.syncwarp()
                if lane == 0:
                    st_release_cta_shared_s32(words, 4 * _ITEMS + warp, 1)
        elif warp < _WARPS:
            remote = pointer_from_address(peers[0], local)
            for n in range(_ROWS):
                while ld_acquire_sys_s32(local, _FLAGS + 2 * warp) <= n:  # channel * ranks + the sender's rank
                    pass
                cuda.syncwarp()
                out[32 * (_ROWS * warp + n) + lane] = local[_ROWS_AT + 32 * (_SMALL * warp + n % _SMALL) + lane]
                cuda.syncwarp()
                if lane == 0:
                    st_release_sys_s32(remote, _CREDITS + warp, int32(n + 1))

    return around


def _run_signal(kernel):
    x = torch.arange(32 * _ROWS * _WARPS, dtype=torch.int32) + 100
    out = torch.full_like(x, -7)

    def work(transport):
        shared, rank = transport.allocate(4 * (_ROWS_AT + 32 * _SMALL * _WARPS)), transport.rank
        local = shared.local.view(torch.int32)
        local[_ROWS_AT:] = -5
        settle(transport)
        given = (x, out[:0]) if rank == 0 else (torch.full_like(x, -9), out)
        shared_bytes = 4 * (4 * _ITEMS + _WARPS)
        transport.launch(kernel, 1, 96, local, shared.addresses, rank, *given, shared_bytes=shared_bytes)
        settle(transport)
        flags = local[_FLAGS : _FLAGS + 4].tolist()
        shared.close()
        return flags

    with simulator.weak_memory():
        flags = LocalGroup(2).run(work)[1]
    return out.numpy(), x.numpy(), flags


def _test_signal(answer):
    out, right, flags = _run_signal(_around_signal(answer))
    expect_equal("what rank 1 has received", out, right)
    expect_equal("flags of rank 1, [channel, source]", np.array(flags), np.array([_ROWS, 0, _ROWS, 0]))


signal = BetweenRanks(
    "the signalling warp",
    "a function in which a warp publishes what the other warps have posted",
    own=answers.signal,
    test=_test_signal,
    profile=_no_profile,
    counter="",
    par=0,
    hint="Read the done flags before the posts: otherwise a warp may post its last row and be done in "
    "between. Fence after you have "
    "acquired a post and before you store its flag. The warps wait for `published` to become what they have posted.",
    seeds=4,
    home=f"{__name__}:signal",
)


# Build: take the next channel

_TAKERS, _OF_CHANNELS = 4, 19


def _around_take(answer):
    @cuda.jit
    def around(taken, done):
        warp, lane = int32(cuda.threadIdx.x // 32), int32(cuda.threadIdx.x % 32)
        channel = warp
        while channel < _OF_CHANNELS:
            if lane == 0:
                cuda.atomic.add(done, channel, 1)
            channel = int32(_TAKERS + answer(taken, int32(1), int32(_OF_CHANNELS), lane))

    return around


def _run_take(kernel, launches=1):
    taken, done = torch.zeros(2, dtype=torch.int32), torch.zeros(_OF_CHANNELS, dtype=torch.int32)
    for _ in range(launches):
        launch(kernel, 1, 32 * _TAKERS, taken, done)
    return done.numpy()


def _test_take(answer):
    for launches in (1, 3):
        done = _run_take(_around_take(answer), launches)
        with case(f"{launches} launches" if launches > 1 else "one launch"):
            expect_equal("how often each channel was taken", done, np.full(_OF_CHANNELS, launches))


take = Build(
    "the next channel",
    "a function that returns numbers 0, 1, 2 and so on, each to one warp, and begins again in the next launch",
    own=answers.take,
    test=_test_take,
    profile=lambda answer: count(kernel := _around_take(answer), lambda _: _run_take(kernel), answer),
    counter="global_atomic_requests",
    score=lambda counted: counted.total.global_atomic_requests,
    unit="atomics of all warps",
    par=_OF_CHANNELS,
    most_alone=None,
    needs=(("shuffles",), "lanes of a warp must have the same number, which one of them has taken"),
    over_par="How many lanes need to add?",
    hint="Every warp takes until a number is too large. How many numbers are taken in one launch, "
    "whatever the order? Who takes the "
    "last one, and what may that lane do?",
    home=f"{__name__}:take",
)


# Diagnose


_FAULTS = {"A": "plain tail", "B": "early head", "C": "relaxed poll", "D": "no barrier"}


def _why_symptom() -> str:
    found = in_simulator(symptoms.table, _FAULTS)
    return (
        "The receiver frees a slot before it has read it, so it finds a later row, which the sender has "
        "written there since. "
        f"If rows are published too early, it finds what was in the slot before them. What wrong rows contain: {found}"
    )


symptom = Choose(
    "which order is missing",
    {
        "A": "the sender stores the tail with a plain store, without release",
        "B": "the receiver stores the head before it copies the rows",
        "C": "the receiver polls the tail with relaxed loads",
        "D": "the sender's warps do not wait for each other before one of them stores the tail",
    },
    "B",
    _why_symptom,
)

exponent = Choose(
    "packed exponents",
    {
        "A": "scales that are not powers of two",
        "B": "scales of 2 or more",
        "C": "scales below 1",
        "D": "none, if the shift is 23",
    },
    "B",
    "The exponent of 2.0 is 128, which an int8 reads as -128. The shift then sets the sign bit, "
    "too: a scale of 2 becomes -2. "
    "Scales below 2 have exponents up to 127. A test with normal inputs passes, since a scale of 2 "
    "needs an element above 448",
)
