"""Exercises of the lesson "Dispatch"; the page checks answers with `exercises.<name>`."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32, uint64

from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.grader import Wrong, case, expect_equal
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
    poll_acquire_cta_shared_u64,
    st_release_cta_shared_s32,
    st_release_cta_shared_u64,
    st_release_sys_s32,
)
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK
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
        if (wrong := self._wrong(answer)) is not None:
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
    def around(rank_prefix, channel_prefix, me, sends, out):
        thread = int32(cuda.threadIdx.x)
        peer, channel = thread // _CHANNELS, thread % _CHANNELS
        source, to = int32(me if sends else peer), int32(peer if sends else me)
        first, number = answer(rank_prefix, channel_prefix, source, to, peer, channel, int32(_RANKS), int32(_CHANNELS))
        out[thread, 0], out[thread, 1] = first, number

    return around


def _run_rows(kernel, seed=0, me=1, sends=False):
    counts = np.random.default_rng(seed).integers(0, 9, (_RANKS, _RANKS, _CHANNELS))  # from, to, channel
    rank_prefix = counts.sum(2).cumsum(0)
    lower_ranks = rank_prefix - counts.sum(2)
    first = counts.cumsum(2) - counts + lower_ranks[:, :, None]
    of_me = (lambda array: array[me]) if sends else (lambda array: array[:, me])
    channel_prefix = of_me(counts).cumsum(1).astype(np.int32)
    out = np.full((_RANKS * _CHANNELS, 2), -7, np.int32)
    given = rank_prefix.astype(np.int32).ravel(), channel_prefix.ravel(), np.int32(me), np.int32(sends), out
    kernel[1, _RANKS * _CHANNELS](*given)
    return out, of_me(first).ravel(), of_me(counts).ravel()


def _test_rows(answer):
    for seed, me, sends in ((0, 1, False), (1, 0, False), (2, 2, False), (3, 1, True), (4, 2, True)):
        out, first, number = _run_rows(_around_rows(answer), seed, me, sends)
        does, way = ("sends", "channel c to rank r") if sends else ("receives", "channel c of rank r")
        with case(f"rank {me} {does}; element {_CHANNELS} r + c is for {way}"):
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

_SLOTS, _TAIL, _HEADS, _RING = 4, 0, 32, 64


def _around_wait(answer):
    @cuda.jit
    def around(local, peers, rank, x, rows, received, before, out):
        lane = int32(cuda.threadIdx.x)
        if rank == 0:
            peer = lane if lane < 3 else int32(0)
            has_ring, remote, tail = peer > 0, pointer_from_address(peers[peer], local), uint32(before)
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
            remote, head = pointer_from_address(peers[0], local), uint32(before)
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


def _run_wait(kernel, rows, received, before):
    x = torch.arange(32 * rows, dtype=torch.int32) + 100
    outs = [torch.full((32 * received,), -7, dtype=torch.int32) for _ in range(3)]
    given = [(x if rank == 0 else torch.full_like(x, -9), rows, received, before, outs[rank]) for rank in range(3)]
    launch_ranks(kernel, 32, _RING + 32 * _SLOTS, given, before=before)
    return [out.tolist() for out in outs[1:]], x.tolist()[: 32 * received]


@contextmanager
def _races_on_slots(first: int) -> Iterator[None]:
    """Say first what a race means if it is one on the slots of a ring, which begin at a word of a rank's memory."""
    try:
        yield
    except simulator.DataRace as error:
        word = re.search(r"index (\d+) of (local|the buffer)", str(error))
        if word is None or int(word[1]) < first:
            raise
        text = "nothing orders a sender's store to a slot and the receiver's load from it"
        raise Wrong(f"{text}: {error}") from None


def _test_wait(answer):
    for rows, received, before, name in (
        (9, 9, -3, "9 rows, while counters wrap from 2^32 - 1 to 0"),
        (9, 9, (1 << 31) - 3, "9 rows, while counters pass 2^31"),
        (_SLOTS, 0, -3, f"nothing is received, and {_SLOTS} rows fit"),
    ):
        with case(name), _races_on_slots(_RING):
            found, right = _run_wait(_around_wait(answer), rows, received, before)
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

_ROWS, _SMALL = 6, 4  # of a channel; slots
_WARPS = 18  # copy warps: with two ranks they have more posts than a warp has lanes
_BUSY = {3: (2, 1), 17: (0, 3)}  # the warps that send, and the channels that each takes; the others have none
_FLAGS, _CREDITS, _ROWS_AT = 8, 16, 32
_POSTED = 3
_PUBLISHED = _POSTED + 2 * _WARPS
_DONE = 2 * (_PUBLISHED + 2 * _WARPS)
_MOST_POLLS = 2000


@cuda.jit(device=True)
def wait_for_credit(local, channel, n):
    while n - ld_acquire_sys_s32(local, _CREDITS + channel) >= _SMALL:
        pass
    cuda.syncwarp()


@cuda.jit(device=True)
def wait_for_row(local, channel, n):
    while ld_acquire_sys_s32(local, _FLAGS + 2 * channel + 1) <= n:  # channel * ranks + the sender's rank
        pass
    cuda.syncwarp()


@cuda.jit(device=True)
def wait_until_published(posts, item):
    polls = int32(0)
    while poll_acquire_cta_shared_u64(posts, _PUBLISHED + item) != posts[_POSTED + item] and polls < _MOST_POLLS:
        polls = int32(polls + 1)
    return polls < _MOST_POLLS


@cuda.jit(device=True)
def _post(posts, item, channel, count):
    post = uint64(uint64(channel + 1) << uint64(32) | uint64(count))
    st_release_cta_shared_u64(posts, _POSTED + item, post)


def _around_signal(answer):
    first, second = list(_BUSY)

    @cuda.jit
    def around(local, peers, rank, x, channels, out):
        words, posts = cuda.shared.array(0, int32), cuda.shared.array(0, uint64)
        thread = int32(cuda.threadIdx.x)
        warp, lane = thread // 32, thread % 32
        if rank == 1:  # it sends to rank 0
            offsets = int32(_POSTED), int32(_PUBLISHED), int32(_DONE)
            board = Board(posts, words, *offsets, int32(_WARPS), int32(2 * _WARPS), int32(2))
            if thread < 4 * _WARPS:
                posts[_POSTED + thread] = uint64(0)
            if thread < _WARPS:
                words[_DONE + thread] = int32(0)
            cuda.syncthreads()
            if warp == _WARPS:
                answer(board, lane, int32(_FLAGS), rank, peers, local)
            else:
                if warp == first or warp == second:
                    remote = pointer_from_address(peers[0], local)
                    for turn in range(2):
                        channel = channels[2 * int32(warp == second) + turn]
                        for n in range(_ROWS):
                            wait_for_credit(local, channel, n)
                            slot = _ROWS_AT + 32 * (_SMALL * channel + n % _SMALL)
                            remote[slot + lane] = x[32 * (_ROWS * channel + n) + lane]
                            cuda.syncwarp()
                            if lane == 0:
                                _post(posts, 2 * warp, channel, n + 1)
                        if lane == 1:  # its own rank's ring
                            _post(posts, 2 * warp + 1, channel, 7 + channel)
                        if turn == 0 and lane < 2 and not wait_until_published(posts, 2 * warp + lane):
                            out[2 * warp + lane] = 1  # it has waited in vain
                        cuda.syncwarp()
                if lane == 0:
                    st_release_cta_shared_s32(words, _DONE + warp, 1)
        else:
            remote = pointer_from_address(peers[1], local)
            for turn in range(2):
                channel = channels[2 * warp + turn]
                for n in range(_ROWS):
                    wait_for_row(local, channel, n)
                    slot = _ROWS_AT + 32 * (_SMALL * channel + n % _SMALL)
                    out[32 * (_ROWS * channel + n) + lane] = local[slot + lane]
                    cuda.syncwarp()
                    if lane == 0:
                        st_release_sys_s32(remote, _CREDITS + channel, int32(n + 1))

    return around


def _run_signal(kernel):
    x = torch.arange(32 * _ROWS * 4, dtype=torch.int32) + 100
    out, channels = torch.full_like(x, -7), torch.tensor(list(_BUSY.values()), dtype=torch.int32).flatten()
    late = torch.zeros(2 * _WARPS, dtype=torch.int32)

    def work(transport):
        shared, rank = transport.allocate(4 * (_ROWS_AT + 32 * _SMALL * 4)), transport.rank
        local = shared.local.view(torch.int32)
        local[_ROWS_AT:] = -5
        settle(transport)
        given = (x, channels, late) if rank == 1 else (torch.full_like(x, -9), channels, out)
        threads, shared_bytes = (32 * (_WARPS + 1), 4 * (_DONE + _WARPS)) if rank == 1 else (64, 0)
        transport.launch(kernel, 1, threads, local, shared.addresses, rank, *given, shared_bytes=shared_bytes)
        settle(transport)
        flags = local[_FLAGS : _FLAGS + 8].tolist()
        shared.close()
        return flags

    with simulator.weak_memory():
        flags = LocalGroup(2).run(work)
    return out.numpy(), x.numpy(), flags, late.any()


def _test_signal(answer):
    with _races_on_slots(_ROWS_AT):
        out, right, flags, late = _run_signal(_around_signal(answer))
    if late:
        raise Wrong("a copy warp waits in vain: board.posts[board.published + item] has not become what it has posted")
    expect_equal("what rank 0 has received", out, right)
    for rank, counts in enumerate(([_ROWS] * 4, [7, 8, 9, 10])):
        wanted = np.array([[0, count] for count in counts]).ravel()
        expect_equal(f"flags of rank {rank}, element 2 channel + source", np.array(flags[rank]), wanted)


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

_TAKERS, _OF_CHANNELS = 3, 11  # warps of each of two roles
_LAUNCHES = 3


def _around_take(answer):
    @cuda.jit
    def around(taken, found):
        warp, lane = int32(cuda.threadIdx.x // 32), int32(cuda.threadIdx.x % 32)
        role, channel, calls = warp // _TAKERS, warp % _TAKERS, int32(0)
        while channel < _OF_CHANNELS and calls < 2 * _OF_CHANNELS:
            number = int32(answer(taken, role, int32(_OF_CHANNELS), lane))
            place = number if 0 <= number < _OF_CHANNELS else int32(_OF_CHANNELS)
            cuda.atomic.add(found, (_OF_CHANNELS + 1) * role + place, 1)
            channel = int32(_TAKERS + cuda.shfl_sync(FULL_MASK, number, 0))
            calls = int32(calls + 1)

    return around


def _run_take(kernel, launches=1):
    taken, counts = torch.zeros(2, dtype=torch.int32), []
    for _ in range(launches):
        found = torch.zeros(2, _OF_CHANNELS + 1, dtype=torch.int32)
        launch(kernel, 1, 64 * _TAKERS, taken, found.view(-1))
        counts.append(found.tolist())
    return counts


def _test_take(answer):
    for number, found in enumerate(_run_take(_around_take(answer), _LAUNCHES), 1):
        for role, counts in enumerate(found):
            wrong = [n for n, lanes in enumerate(counts[:-1]) if lanes != 32]
            where = f"launch {number} of {_LAUNCHES}, taken[{role}], {_OF_CHANNELS} channels"
            if wrong:
                raise Wrong(
                    f"{where}: lanes that got the number {wrong[0]}: {counts[wrong[0]]}, not the 32 of one warp"
                )
            if counts[-1]:
                raise Wrong(f"{where}: lanes that got a number outside of 0 to {_OF_CHANNELS - 1}: {counts[-1]}")


take = Build(
    "the next channel",
    "a function that returns numbers 0, 1, 2 and so on, each to one warp, and begins again in the next launch",
    own=answers.take,
    test=_test_take,
    profile=lambda answer: count(kernel := _around_take(answer), lambda _: _run_take(kernel), answer),
    counter="global_atomic_requests",
    score=lambda counted: counted.total.global_atomic_requests,
    unit="atomics of all warps",
    par=2 * _OF_CHANNELS,
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
