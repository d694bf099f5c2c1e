"""Exercises of the lesson "Talk to a peer"; the page checks answers with `exercises.<name>`."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from math import ceil, gcd
from typing import Any

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.grader import Wrong, case, expect_equal
from moe_numba.course.lessons.talk_to_a_peer import answers, runs
from moe_numba.course.lessons.talk_to_a_peer.answers import copy_row, make_message, make_ring, slot_of
from moe_numba.course.lessons.talk_to_a_peer.runs import SMS, Version, private
from moe_numba.course.lessons.talk_to_a_peer.sizes import DATA, FLAG, HEAD, RING, TAIL, WORD_SLOTS
from moe_numba.course.steps.exercises import Break, Build, Choose, Formula, Predict
from moe_numba.course.steps.verdict import OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    poll_acquire_cta_shared_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.simulator.profiler.report import source_text

_EMPTY = -7  # in what a rank receives, before a launch


def _launch(kernel: Callable, ctas: int, threads: int, words: int, arguments: Callable, ranks: int = 2) -> list[list]:
    """Launch a kernel on ranks in weak memory; return what the memory of each rank contains afterwards.

    The kernel's arguments are the addresses of all ranks' memory, a rank's own, of zeros, and ``arguments(rank)``.
    """

    def work(transport):
        shared = transport.allocate(4 * words)
        local = shared.local.view(torch.int32)
        transport.launch(kernel, ctas, threads, shared.addresses, local, *arguments(transport.rank))
        settle(transport)
        found = local.tolist()
        shared.close()
        return found

    with simulator.weak_memory():
        return LocalGroup(ranks).run(work)


def _stores(run: Callable[[], object]) -> list:
    """Return the traced stores of `run` that may be polled."""
    with simulator.trace() as events:
        run()
    return [event for event in events if event.what == "store"]


@dataclass(frozen=True)
class Exchange(Build):
    """A `Build` between ranks: whatever arrives must have come from another rank, and signals are counted.

    Attributes
    ----------
    signals : callable
        ``signals(answer)`` returns how many signals a right answer stores, which are compared with par.
    one_lane : callable, optional
        ``one_lane(answer)`` says how an answer leaves the work of a warp to one lane, or returns None.
    """

    signals: Callable[[Any], int] = lambda answer: 0
    one_lane: Callable[[Any], str | None] = lambda answer: None

    def judge(self, answer):
        """Return the state, a sentence and the number of signals of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        if (reason := self.one_lane(answer)) is not None:
            return REFUSED, f"the result is right, but {reason}", None
        if not self.unit:
            return RIGHT, "right, under all seeds in weak memory, and without a race", None
        found = self.signals(answer)
        text = f"right, under all seeds in weak memory, and without a race; {self.unit}: {found}"
        if found > self.par:
            return OVER_PAR, f"{text}; par is {self.par}. {self.over_par}".rstrip(), found
        return RIGHT, text, found


def _exchange(name, task, own, test, *, hint, home, **more) -> Exchange:
    unused = dict(profile=lambda answer: None, counter="", most_alone=None, **({} if "par" in more else {"par": 0}))
    return Exchange(name, task, own, test, hint=hint, home=f"{__name__}:{home}", **unused, **more)  # type: ignore[arg-type]


# Build: tell everyone


def _test_everyone(kernel):
    for ranks in (2, 4):
        values = private(0, ranks).tolist()
        found = _launch(kernel, 1, 32, ranks, lambda rank, n=ranks, v=values: (rank, n, v[rank]), ranks)
        for rank, words in enumerate(found):
            expect_equal(f"with {ranks} ranks, the words of rank {rank}", torch.tensor(words), torch.tensor(values))


everyone = _exchange(
    "tell everyone",
    "a kernel that stores this rank's value into the memory of all ranks",
    answers.tell_everyone,
    _test_everyone,
    hint="One thread for each peer: pointer_from_address(peers[thread], local) is a pointer into that rank's memory. "
    "peers[rank] is the rank's own.",
    home="everyone",
    seeds=2,
)


# Build: publish


def _publish(answer, messages=1):
    wrong = runs.check_message(make_message(answer, answers.observe), LocalGroup(2), messages)
    if wrong:
        raise Wrong(f"{wrong}. What orders the stores of all threads before the flag?")


def _test_publish(answer):
    with simulator.weak_memory():
        _publish(answer)
        with case("in a second message, whose number is 2"):
            _publish(answer, messages=2)


def _flags(answer):
    return sum(event.rank == 0 for event in _stores(lambda: _publish(answer)))


publish = _exchange(
    "publish",
    "a function with which all threads of a CTA publish what they have stored",
    answers.publish,
    _test_publish,
    signals=_flags,
    unit="flags per message",
    par=1,
    over_par="Which threads need to store it?",
    hint="A release covers what its own thread has stored, and what that thread has observed of others. A barrier "
    "makes it observe what all threads of the CTA have stored.",
    home="publish",
    seeds=6,
)


# Choose: where the fence goes

fences = Choose(
    "a fence",
    {
        "A": "barrier; thread 0: relaxed store of the flag, then fence",
        "B": "barrier; thread 0: fence, then relaxed store of the flag",
        "C": "thread 0: fence; barrier; thread 0: relaxed store of the flag",
        "D": "each thread: fence; thread 0: relaxed store of the flag",
    },
    "B",
    "A fence orders what its thread has stored or observed before it against what the same thread stores after it. In "
    "A the flag may be visible first. In C the fence comes before thread 0 has observed the stores of the others, and "
    "in D it never observes them: there is no barrier. A fence and a relaxed store do what a release does, and one "
    "fence may serve several flags.",
)


# Formula: rows in flight


def _formula(own, cases):
    names = signature(own).parameters

    def test(answer):
        for values in cases:
            found, right = answer(*values), own(*values)
            if found != right:
                given = ", ".join(f"{name} = {value:g}" for name, value in zip(names, values, strict=True))
                whole = "; only whole ones count: round up" if ceil(found) == right else ""
                raise Wrong(f"for {given} your formula says {found:g}, and it is {right}{whole}")

    return test


in_flight = Formula(
    "rows in flight",
    "a function of the link's GB/s, the microseconds of one way and the bytes of a row",
    answers.rows_in_flight,
    _formula(answers.rows_in_flight, ((350, 1.3, 14336), (350, 1.3, 7168), (100, 0.7, 14336), (25, 1.3, 1 << 20))),
    praise="a slot is taken until its signal has gone there and the credit has come back. What crosses a link in that "
    "time must be in flight (Little's law).",
    hint="A GB/s is 1000 bytes per microsecond. How long is a slot taken, if copying takes no time?",
)


# Build: a ring of words


def _test_words(kernel):
    words = RING + WORD_SLOTS
    _words(kernel, words, (11, 9, 6), receives=True)
    try:
        _words(kernel, words, (WORD_SLOTS,) * 3, receives=False)
    except simulator.Deadlock as error:
        text = f"{WORD_SLOTS} words fit into the ring, but the sender waits although no word has been received"
        raise Wrong(f"{text}: it must use all {WORD_SLOTS} slots\n{error}") from None


def _words(kernel, words, sends, receives):
    """Let each of several ranks send a number of words to the next one, and look at all memories afterwards."""
    ranks = len(sends)
    outs = [torch.full((max(sends),), _EMPTY, dtype=torch.int32) for _ in sends]
    sent = [private(rank, number) for rank, number in enumerate(sends)]

    def arguments(rank):
        to, source = (rank + 1) % ranks, (rank - 1) % ranks
        return sent[rank], outs[rank], sends[rank], sends[source] if receives else 0, to, source

    found = _launch(kernel, 2, 1, words, arguments, ranks)
    for rank, memory in enumerate(found):
        source = (rank - 1) % ranks
        taken = sends[source] if receives else 0
        with case(f"rank {rank}, which sends {sends[rank]} words and receives {taken} from rank {source}"):
            expect_equal("out", outs[rank][:taken], sent[source][:taken])
            _look_at_ring(memory, sent[source].tolist(), source, sends[rank] if receives else 0)


def _look_at_ring(memory, sent, source, credits):
    """Check a rank's memory: slots and tail, which rank ``source`` has stored, and its own words that were received."""
    if memory[TAIL] != len(sent):
        text = f"the {len(sent)} words that rank {source} has sent; the tail is in the receiver's memory"
        raise Wrong(f"local[TAIL] is {memory[TAIL]}, and should count {text}")
    if memory[HEAD] != credits:
        text = f"its {credits} words that were received; the head is in the sender's memory"
        raise Wrong(f"local[HEAD] is {memory[HEAD]}, and should count {text}")
    if any(word for at, word in enumerate(memory[:RING]) if at not in (TAIL, HEAD)):
        raise Wrong(f"something has been stored outside of the ring's {WORD_SLOTS} slots")
    for n in range(max(0, len(sent) - WORD_SLOTS), len(sent)):
        if memory[RING + n % WORD_SLOTS] != sent[n]:
            raise Wrong(
                f"word {n} of rank {source} is not in slot {n % WORD_SLOTS}; slots are in the receiver's memory"
            )


words = _exchange(
    "ring of words",
    "a kernel in which each rank sends words to the next one through a ring",
    answers.ring_of_words,
    _test_words,
    hint=f"The sender may store word n if n - head < {WORD_SLOTS}; the receiver may read it if tail > n. Which access "
    "must come before the sender's release of the tail, and which before the receiver's release of the head?",
    home="words",
    seeds=4,
)


# Formula: CTAs that saturate the link


def ctas_that_saturate(ranks, cta_gbps, link_gbps):
    return ceil(link_gbps / (cta_gbps * (ranks - 1) / ranks))


_LINKS = (2, 50, 350), (8, 50, 350), (2, 43, 340), (8, 43, 340), (4, 60, 355)
saturate = Formula(
    "CTAs that saturate the link",
    "a function of the number of ranks, the GB/s of a CTA and the GB/s of the link",
    ctas_that_saturate,
    _formula(ctas_that_saturate, _LINKS),
    praise="rows that stay cost a CTA as much as those that leave, so with two ranks half of its work loads the link.",
    hint="Of the rows that a CTA copies, one in `ranks` stays on its rank. How many GB/s of a CTA go over the link?",
)


# Build: both ends of a ring of rows

_ROWS, _WORDS = 5, 256


def _test_ring(make):
    def test(answer):
        kernel = make(answer)
        for slots, channels in ((3, 1), (1, 1), (3, 2)):
            version = Version(kernel, slots, channels)
            many = f"with {slots} slot{'s' * (slots > 1)}, {channels} channel{'s' * (channels > 1)}"
            with simulator.weak_memory(), case(many):
                wrong = runs.check_ring(version, LocalGroup(2), rows=_ROWS * channels, row_words=_WORDS)
                if wrong:
                    raise Wrong(f"in the second launch: {wrong}")

    return test


def _run_ring(kernel):
    runs.check_ring(Version(kernel, 3), LocalGroup(2), rows=_ROWS, row_words=_WORDS)


def _ring_signals(make, counter):
    def signals(answer):
        found = _stores(lambda: _run_ring(make(answer)))
        return sum(event.rank == 0 and event.details["index"] % RING == counter for event in found) // 2

    return signals


def _by_one_lane(make):
    """Return a function that says whether an answer copies rows by single lanes: few lanes store per request."""

    def found(answer):
        with simulator.profile() as profile:
            _run_ring(make(answer))
        inside = [line for line in profile.kernels[0].lines if line.function in _functions(answer)]
        stores = [
            each for line in inside for (space, what, _), each in line.accesses.items() if (space, what) == _STORE
        ]
        lanes, requests = sum(each.lanes for each in stores), sum(each.requests for each in stores)
        signals = 4 * _ROWS  # of two ranks in two launches, by one lane each
        if requests > 2 * signals and lanes < 16 * (requests - signals):
            return f"on average {lanes / requests:.0f} of 32 lanes take part in a store: let all of them copy a row"
        return None

    return found


_STORE = "global", "store"


def _functions(answer):
    from moe_numba.simulator.core.typed_code import reachable

    return {each.__name__ for each in reachable(answer)}


def _end(name, task, own, test, make, counter, hint, over_par):
    return _exchange(
        name,
        task,
        own,
        test,
        signals=_ring_signals(make, counter),
        one_lane=_by_one_lane(make),
        unit=f"signals for {_ROWS} rows",
        par=_ROWS,
        over_par=over_par,
        hint=hint,
        home=name,
        seeds=2,
    )


@cuda.jit(device=True)
def _receive_late(queue, out, first, count):
    """Receive rows, but return no credit before all slots are full."""
    lane = int32(cuda.threadIdx.x & 31)
    for n in range(count):
        number = int32(queue.before + n)
        if lane == 0:
            while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                pass
        cuda.syncwarp()
        copy_row(out, int32((first + n) * queue.row_words), queue.here, slot_of(queue, number), queue.row_words)
        cuda.syncwarp()
        if lane == 0 and ((n + 1) % queue.slots == 0 or n + 1 == count):
            st_release_sys_s32(queue.there, queue.head, int32(number + 1))


def _test_send(answer):
    _test_ring(_ring_of_sender)(answer)
    try:
        _run_ring(make_ring(answer, _receive_late))
    except simulator.Deadlock as error:
        text = "the sender waits although slots are free: it must use all slots before it waits"
        raise Wrong(f"{text}\n{error}") from None


def _ring_of_sender(answer):
    return make_ring(answer, answers.receive)


send = _end(
    "send",
    "a function with which a warp sends rows",
    answers.send,
    _test_send,
    _ring_of_sender,
    TAIL,
    "Row n of this launch has the number queue.before + n. One lane waits until number - head < slots; the others wait "
    "for that lane at a syncwarp. Then all copy. What must come before the lane releases the tail?",
    "Which lanes need to store the tail?",
)


def _ring_of_receiver(answer):
    return make_ring(answers.send, answer)


receive = _end(
    "receive",
    "a function with which a warp receives rows",
    answers.receive,
    _test_ring(_ring_of_receiver),
    _ring_of_receiver,
    HEAD,
    "One lane waits until tail > number; the others wait for that lane. When all have copied the row, one lane stores "
    "the new head in the sender's memory: queue.there.",
    "Which lanes need to store the head?",
)


# Break: a receiver


def _received(answer, seed, races=False):
    """Return what is wrong with a receiver under one seed, in weak memory, or None."""
    version = Version(make_ring(answers.send, answer), 3)
    try:
        with simulator.seed(seed), simulator.weak_memory(), simulator.races(races):
            return runs.check_ring(version, LocalGroup(2), rows=_ROWS, row_words=_WORDS)
    except simulator.SimulatorError as error:
        return f"{type(error).__name__}: {error}"


def _race_of(answer):
    found = (_received(answer, seed, races=True) for seed in range(2))
    return next((error for error in found if error and error.startswith("DataRace")), None)


broken = Break(
    "an order that no test misses",
    answers.receive,
    passes=lambda answer, seed: _received(answer, seed) is None,
    race=_race_of,
    barrier="cuda.syncwarp()",
    seeds=6,
    home=f"{__name__}:broken",
)


# Build: a signal for others


def _around_signal(answer):
    @cuda.jit
    def around(peers, local, x, out, rank):
        posted, thread = cuda.shared.array(2, int32), int32(cuda.threadIdx.x)
        if thread < 2:
            posted[thread] = 0
        cuda.syncthreads()
        if cuda.blockIdx.x == 0:
            there = pointer_from_address(peers[1 - rank], local)
            if thread < 64:
                there[DATA + thread] = x[thread]
            answer(posted, there)
        elif thread < 64:
            while ld_acquire_sys_s32(local, FLAG + (thread >> 5)) == 0:
                pass
            out[thread] = local[DATA + thread]

    return around


def _around_posts(answer):
    """Return a kernel in which only the copying warps call an answer; warp 2 waits until they have returned."""

    @cuda.jit
    def around(peers, local, x, out, rank):
        posted, returned = cuda.shared.array(2, int32), cuda.shared.array(2, int32)
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> 5), int32(thread & 31)
        if thread < 2:
            posted[thread] = returned[thread] = 0
        cuda.syncthreads()
        there = pointer_from_address(peers[1 - rank], local)
        if warp < 2:
            there[DATA + thread] = x[thread]
            answer(posted, there)
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(returned, warp, 1)
        elif lane < 2:
            while poll_acquire_cta_shared_s32(returned, lane) == 0:
                pass
            out[lane] = posted[lane]

    return around


def _test_posts(answer):
    """Check that the copying warps post and return: without a fence, and without warp 2."""
    outs = [torch.full((2,), _EMPTY, dtype=torch.int32) for _ in range(2)]
    run = lambda: _launch(_around_posts(answer), 1, 96, DATA + 64, lambda rank: (private(rank, 64), outs[rank], rank))
    try:
        with simulator.profile() as profile:
            run()
    except simulator.Deadlock as error:
        text = "warps 0 and 1 wait for warp 2, and should go on with other rows: they must post and return"
        raise Wrong(f"{text}\n{error}") from None
    expect_equal("what warps 0 and 1 post", outs[0], torch.ones(2, dtype=torch.int32))
    lines = [line for line in profile.kernels[0].lines if line.function in _functions(answer)]
    if any("fence_acq_rel_sys" in source_text(line) for line in lines):
        raise Wrong("warps 0 and 1 execute a fence, which waits for their stores: only warp 2 should wait")


def _run_signal(answer):
    outs = [torch.full((64,), _EMPTY, dtype=torch.int32) for _ in range(2)]
    _launch(_around_signal(answer), 2, 96, DATA + 64, lambda rank: (private(rank, 64), outs[rank], rank))
    for rank in range(2):
        expect_equal(f"what rank {rank} has received", outs[rank], private(1 - rank, 64))


def _test_signal(answer):
    _run_signal(answer)
    stores = _stores(lambda: _run_signal(answer))
    own = [event.warp for event in stores if event.rank == 0 and event.details["index"] in (FLAG, FLAG + 1)]
    if any(warp != 2 for warp in own):
        raise Wrong("the flags must be stored by warp 2, and warps 0 and 1 must go on with other rows meanwhile")
    _test_posts(answer)


signal = _exchange(
    "signal for others",
    "a function with which warp 2 publishes what warps 0 and 1 have stored",
    answers.signal_for_others,
    _test_signal,
    hint="Warps 0 and 1: what orders the stores of 31 lanes before lane 0 posts? Warp 2: lane i waits for posted[i], "
    "with acquire. Then a fence and the flag: in which order?",
    home="signal",
    seeds=4,
)


# Choose: which end limits

slower_end = Choose(
    "a signal per chunk",
    {
        "A": "the time falls by nearly all releases of the sender",
        "B": "nothing changes much: the receiver still pays a release per row",
        "C": "the time grows: the receiver waits longer for its first row",
        "D": "the rows arrive in another order",
    },
    "B",
    "Sender and receiver work at the same time, so the slower end counts. Both copied a row and paid a release for "
    "it, and now only one of them does less. The first row of each chunk does arrive later (C), but that delays the "
    "whole by less than a chunk. If the time on a GPU did fall, the sender's end was the slower one.",
)


# Formula: the fewest slots


def fewest_slots(chunk, batch):
    return chunk + batch - gcd(chunk, batch)


def _test_fewest(answer):
    for chunk, batch in ((4, 3), (3, 4), (5, 2), (1, 1), (1, 6), (4, 4), (4, 2), (6, 4), (6, 9), (24, 16)):
        found, right = answer(chunk, batch), fewest_slots(chunk, batch)
        if found == right:
            continue
        who = f"chunks of {chunk} and batches of {batch}: your formula says {found}"
        if found < right:
            raise Wrong(f"{who}, and with so few slots they deadlock; {right} are needed")
        raise Wrong(
            f"{who}. That does not deadlock, but {right} suffice: which numbers of rows can lack a credit at all?"
        )


fewest = Formula(
    "fewest slots",
    "a function of the rows of a chunk and of a batch",
    fewest_slots,
    _test_fewest,
    praise="the ring is stuck with o rows that have no credit yet if o < batch and slots - o < chunk, and o can only "
    "be a multiple of the greatest common divisor. chunk + batch - 1 slots always suffice.",
    hint="Both ends wait if o rows have been read without a credit, o < batch, and fewer than chunk slots are free. "
    "Which is the largest o below batch that occurs? `from math import gcd`.",
)


# Predict: who is resident

resident = Predict(
    "resident CTAs",
    {"own_gpu": SMS, "shared_gpu": SMS // 2},
    f"A CTA stays on its SM until it has ended, and one that waits has not. So the {SMS} SMs are the limit for all "
    "CTAs that wait for one another. Ranks that share a GPU share its SMs, too. That is why DeepEP takes the number of "
    "SMs as an argument, and why virtual ranks have few CTAs.",
)
