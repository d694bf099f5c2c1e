"""The lesson "Talk to a peer": steps are right, its checks find wrong kernels, exercises judge answers and cheats."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lesson_pages import definitions, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32

from moe_numba.course.bench import link, records
from moe_numba.course.lessons.talk_to_a_peer import answers, draw, exercises, runs
from moe_numba.course.lessons.talk_to_a_peer.answers import copy_row, slot_of
from moe_numba.course.lessons.talk_to_a_peer.runs import Version
from moe_numba.course.lessons.talk_to_a_peer.sizes import DATA, FLAG, HEAD, RING, TAIL, WORD_SLOTS
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,
    poll_acquire_cta_shared_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks/11_talk_to_a_peer.py"


# Tell everyone


@cuda.jit
def stub(peers, local, rank, ranks, value):
    pass


@cuda.jit
def tell_itself(peers, local, rank, ranks, value):
    thread = int32(cuda.threadIdx.x)
    if thread < ranks:
        local[thread] = value


@cuda.jit
def tell_the_next(peers, local, rank, ranks, value):
    if cuda.threadIdx.x == 0:
        local[rank] = value
        pointer_from_address(peers[(rank + 1) % ranks], local)[rank] = value


@cuda.jit
def tell_beyond(peers, local, rank, ranks, value):
    pointer_from_address(peers[cuda.threadIdx.x], local)[rank] = value


# Publish


@cuda.jit(device=True)
def publish_stub(there, number):
    pass


@cuda.jit(device=True)
def publish_relaxed(there, number):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        st_relaxed_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def publish_without_barrier(there, number):
    if cuda.threadIdx.x == 0:
        st_release_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def publish_fence_after(there, number):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        st_relaxed_sys_s32(there, FLAG, number)
        fence_acq_rel_sys()


@cuda.jit(device=True)
def publish_by_all(there, number):
    cuda.syncthreads()
    st_release_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def publish_by_fence(there, number):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        fence_acq_rel_sys()
        st_relaxed_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def publish_always_one(there, number):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        st_release_sys_s32(there, FLAG, 1)


@cuda.jit
def publish_as_a_kernel(there, number):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        st_release_sys_s32(there, FLAG, number)


def tell_as_a_function(peers, local, rank, ranks, value):
    if cuda.threadIdx.x < ranks:
        pointer_from_address(peers[cuda.threadIdx.x], local)[rank] = value


# A ring of words


@cuda.jit
def words_without_communication(peers, local, x, out, sends, receives, to, source):
    if cuda.blockIdx.x == 0:
        local[HEAD] = receives
        local[TAIL] = sends
    else:
        for n in range(receives):
            out[n] = x[n]


@cuda.jit
def words_beside_the_ring(peers, local, x, out, sends, receives, to, source):
    if cuda.blockIdx.x == 0:
        there = pointer_from_address(peers[to], local)
        for n in range(sends):
            there[TAIL + 1 + n] = x[n]
        st_release_sys_s32(there, TAIL, sends)
    else:
        while ld_acquire_sys_s32(local, TAIL) < receives:
            pass
        for n in range(receives):
            out[n] = local[TAIL + 1 + n]
        pointer_from_address(peers[source], local)[HEAD] = receives


def ring_of_words(slots=WORD_SLOTS, early=False, relaxed=False):
    """Return a kernel as the lesson's, with a mistake."""
    store = st_relaxed_sys_s32 if relaxed else st_release_sys_s32

    @cuda.jit
    def ring(peers, local, x, out, sends, receives, to, source):
        if cuda.blockIdx.x == 0:
            there = pointer_from_address(peers[to], local)
            for n in range(sends):
                while n - ld_acquire_sys_s32(local, HEAD) >= slots:
                    pass
                there[RING + n % WORD_SLOTS] = x[n]
                store(there, TAIL, int32(n + 1))
        else:
            there = pointer_from_address(peers[source], local)
            for n in range(receives):
                while ld_acquire_sys_s32(local, TAIL) <= n:
                    pass
                if early:
                    st_release_sys_s32(there, HEAD, int32(n + 1))
                out[n] = local[RING + n % WORD_SLOTS]
                if not early:
                    st_release_sys_s32(there, HEAD, int32(n + 1))

    return ring


def ring_at_wrong_places(slots_there=True, tail_there=True, head_there=True, swapped=False, one_address=False):
    """Return a kernel that communicates, with words or counters at the wrong end, or with the wrong rank."""

    @cuda.jit
    def ring(peers, local, x, out, sends, receives, to, source):
        if cuda.blockIdx.x == 0:
            there = pointer_from_address(peers[source if swapped else to], local)
            for n in range(sends):
                while n - ld_acquire_sys_s32(local if head_there else there, HEAD) >= WORD_SLOTS:
                    pass
                (there if slots_there else local)[RING + n % WORD_SLOTS] = x[n]
                st_release_sys_s32(there if tail_there else local, TAIL, int32(n + 1))
        else:
            there = pointer_from_address(peers[to if swapped or one_address else source], local)
            for n in range(receives):
                while ld_acquire_sys_s32(local if tail_there else there, TAIL) <= n:
                    pass
                out[n] = (local if slots_there else there)[RING + n % WORD_SLOTS]
                st_release_sys_s32(there if head_there else local, HEAD, int32(n + 1))

    return ring


# A ring of rows


@cuda.jit(device=True)
def send_the_first_rows(queue, x, first, count):
    answers.send(queue, x, int32(0), count)


@cuda.jit(device=True)
def receive_in_the_first_rows(queue, out, first, count):
    answers.receive(queue, out, int32(0), count)


@cuda.jit
def send_as_a_kernel(queue, x, first, count):
    answers.send(queue, x, first, count)


def send_with(
    waits=True, meets=True, by_all=False, own_copy=copy_row, numbers=True, store=st_release_sys_s32, order=True, most=0
):
    """Return the lesson's function with a mistake."""

    @cuda.jit(device=True)
    def send(queue, x, first, count):
        lane = int32(cuda.threadIdx.x & 31)
        for n in range(count):
            number = int32(queue.before + n) if numbers else int32(n)
            if lane == 0 and waits:
                while number - ld_acquire_sys_s32(queue.here, queue.head) >= (most or queue.slots):
                    pass
            if order:
                cuda.syncwarp()
            own_copy(queue.there, slot_of(queue, number), x, int32((first + n) * queue.row_words), queue.row_words)
            if meets:
                cuda.syncwarp()
            if lane == 0 or by_all:
                store(queue.there, queue.tail, int32(number + 1))

    return send


@cuda.jit(device=True)
def copy_by_one_lane(to, to_at, source, at, words):
    if cuda.threadIdx.x & 31 == 0:
        for i in range(words):
            to[to_at + i] = source[at + i]


@cuda.jit(device=True)
def send_nothing(queue, x, first, count):
    lane = int32(cuda.threadIdx.x & 31)
    if lane == 0:
        st_release_sys_s32(queue.there, queue.tail, int32(queue.before + count))


def receive_with(waits=True, meets=True, by_all=False, own_copy=copy_row, early=False, store=st_release_sys_s32):
    """Return the lesson's function with a mistake."""

    @cuda.jit(device=True)
    def receive(queue, out, first, count):
        lane = int32(cuda.threadIdx.x & 31)
        for n in range(count):
            number = int32(queue.before + n)
            if lane == 0 and waits:
                while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                    pass
            cuda.syncwarp()
            if early and lane == 0:
                store(queue.there, queue.head, int32(number + 1))
            own_copy(out, int32((first + n) * queue.row_words), queue.here, slot_of(queue, number), queue.row_words)
            if meets:
                cuda.syncwarp()
            if not early and (lane == 0 or by_all):
                store(queue.there, queue.head, int32(number + 1))

    return receive


# A signal for others


def signal_with(meets=True, fence_first=True, own=False):
    """Return the lesson's function with a mistake."""

    @cuda.jit(device=True)
    def signal(posted, there):
        thread = int32(cuda.threadIdx.x)
        warp, lane = int32(thread >> 5), int32(thread & 31)
        if warp < 2:
            if meets:
                cuda.syncwarp()
            if lane == 0:
                if own:
                    st_release_sys_s32(there, FLAG + warp, 1)
                st_release_cta_shared_s32(posted, warp, 1)
        elif lane < 2 and not own:
            while poll_acquire_cta_shared_s32(posted, lane) == 0:
                pass
            if fence_first:
                fence_acq_rel_sys()
            st_relaxed_sys_s32(there, FLAG + lane, 1)
            if not fence_first:
                fence_acq_rel_sys()

    return signal


@cuda.jit(device=True)
def signal_after_a_barrier(posted, there):
    cuda.syncthreads()
    if cuda.threadIdx.x >= 64 and cuda.threadIdx.x < 66:
        fence_acq_rel_sys()
        st_relaxed_sys_s32(there, FLAG + (cuda.threadIdx.x & 31), 1)


@cuda.jit(device=True)
def signal_and_wait(posted, there):
    answers.signal_for_others(posted, there)
    cuda.syncthreads()


@cuda.jit(device=True)
def signal_with_fences(posted, there):
    if cuda.threadIdx.x < 64:
        fence_acq_rel_sys()
    answers.signal_for_others(posted, there)


EVERYONE, PUBLISH, WORDS = exercises.everyone, exercises.publish, exercises.words
SEND, RECEIVE, SIGNAL = exercises.send, exercises.receive, exercises.signal
ANSWERS = {
    "everyone: stub": (EVERYONE, stub, OPEN, "not answered yet"),
    "everyone": (EVERYONE, answers.tell_everyone, RIGHT, "weak memory"),
    "everyone: only itself": (EVERYONE, tell_itself, WRONG, "the words of rank 0"),
    "everyone: only the next": (EVERYONE, tell_the_next, WRONG, "with 4 ranks"),
    "everyone: threads beyond": (EVERYONE, tell_beyond, WRONG, "out of bounds"),
    "publish: stub": (PUBLISH, publish_stub, OPEN, "not answered yet"),
    "publish": (PUBLISH, answers.publish, RIGHT, "flags per message: 1"),
    "publish: by a fence": (PUBLISH, publish_by_fence, RIGHT, "flags per message: 1"),
    "publish: relaxed": (PUBLISH, publish_relaxed, WRONG, "race"),
    "publish: no barrier": (PUBLISH, publish_without_barrier, WRONG, "race"),
    "publish: fence after": (PUBLISH, publish_fence_after, WRONG, "race"),
    "everyone: no kernel": (EVERYONE, tell_as_a_function, WRONG, "this is no kernel"),
    "publish: always 1": (PUBLISH, publish_always_one, WRONG, "in a second message"),
    "publish: a kernel": (PUBLISH, publish_as_a_kernel, WRONG, "a kernel cannot call it: write @cuda.jit.device=True"),
    "publish: by all": (PUBLISH, publish_by_all, OVER_PAR, "Which threads"),
    "words": (WORDS, answers.ring_of_words, RIGHT, "weak memory"),
    "words: no communication": (WORDS, words_without_communication, WRONG, "out"),
    "words: no ring": (WORDS, words_beside_the_ring, WRONG, "outside of the ring"),
    "words: mailbox": (WORDS, ring_of_words(1), WRONG, "must use all 4 slots"),
    "words: a slot too many": (WORDS, ring_of_words(WORD_SLOTS + 1), WRONG, "race|out"),
    "words: head too early": (WORDS, ring_of_words(early=True), WRONG, "race"),
    "words: slots at the sender": (
        WORDS,
        ring_at_wrong_places(slots_there=False),
        WRONG,
        "slots are in the receiver's",
    ),
    "words: tail at the sender": (WORDS, ring_at_wrong_places(tail_there=False), WRONG, "tail is in the receiver's"),
    "words: head at the receiver": (WORDS, ring_at_wrong_places(head_there=False), WRONG, "head is in the sender's"),
    "words: the other way round": (WORDS, ring_at_wrong_places(swapped=True), WRONG, "wait for ever|out"),
    "words: one address": (WORDS, ring_at_wrong_places(one_address=True), WRONG, "race|wait for ever|HEAD"),
    "words: relaxed": (WORDS, ring_of_words(relaxed=True), WRONG, "race"),
    "send": (SEND, answers.send, RIGHT, "signals for 5 rows: 5"),
    "send: does not wait": (SEND, send_with(waits=False), WRONG, "race|rows are wrong"),
    "send: lanes do not wait": (SEND, send_with(order=False), WRONG, "race|rows are wrong"),
    "send: lanes do not meet": (SEND, send_with(meets=False), WRONG, "race"),
    "send: relaxed": (SEND, send_with(store=st_relaxed_sys_s32), WRONG, "race"),
    "send: counts from 0": (SEND, send_with(numbers=False), WRONG, "race|second launch|wait for ever"),
    "send: the first channel's rows": (SEND, send_the_first_rows, WRONG, "2 channels.*5 of 10 rows are wrong"),
    "send: a row at a time": (SEND, send_with(most=1), WRONG, "must use all slots"),
    "send: a kernel": (SEND, send_as_a_kernel, WRONG, "this is a kernel"),
    "send: nothing": (SEND, send_nothing, WRONG, "rows are wrong"),
    "send: by one lane": (SEND, send_with(own_copy=copy_by_one_lane), REFUSED, "1 of 32 lanes"),
    "send: all lanes signal": (SEND, send_with(by_all=True), OVER_PAR, "Which lanes"),
    "receive": (RECEIVE, answers.receive, RIGHT, "signals for 5 rows: 5"),
    "receive: does not wait": (RECEIVE, receive_with(waits=False), WRONG, "race|rows are wrong"),
    "receive: head too early": (RECEIVE, receive_with(early=True), WRONG, "race"),
    "receive: lanes do not meet": (RECEIVE, receive_with(meets=False), WRONG, "race"),
    "receive: the first channel's rows": (RECEIVE, receive_in_the_first_rows, WRONG, "2 channels"),
    "receive: relaxed": (RECEIVE, receive_with(store=st_relaxed_sys_s32), WRONG, "race"),
    "receive: by one lane": (RECEIVE, receive_with(own_copy=copy_by_one_lane), REFUSED, "1 of 32 lanes"),
    "receive: all lanes signal": (RECEIVE, receive_with(by_all=True), OVER_PAR, "Which lanes"),
    "signal": (SIGNAL, answers.signal_for_others, RIGHT, "weak memory"),
    "signal: lanes do not meet": (SIGNAL, signal_with(meets=False), WRONG, "race"),
    "signal: fence after": (SIGNAL, signal_with(fence_first=False), WRONG, "race"),
    "signal: by its own warp": (SIGNAL, signal_with(own=True), WRONG, "must be stored by warp 2"),
    "signal: a barrier": (SIGNAL, signal_after_a_barrier, WRONG, "warps 0 and 1 wait for warp 2"),
    "signal: a barrier at the end": (SIGNAL, signal_and_wait, WRONG, "warps 0 and 1 wait for warp 2"),
    "signal: fences everywhere": (SIGNAL, signal_with_fences, WRONG, "warps 0 and 1 execute a fence"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    exercise, answer, state, text = ANSWERS[name]
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


@cuda.jit(device=True)
def without_the_first_meeting(queue, out, first, count):
    lane = int32(cuda.threadIdx.x & 31)
    for n in range(count):
        number = int32(queue.before + n)
        if lane == 0:
            while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                pass
        copy_row(out, int32((first + n) * queue.row_words), queue.here, slot_of(queue, number), queue.row_words)
        cuda.syncwarp()
        if lane == 0:
            st_release_sys_s32(queue.there, queue.head, int32(number + 1))


@cuda.jit(device=True)
def without_the_second_meeting(queue, out, first, count):
    lane = int32(cuda.threadIdx.x & 31)
    for n in range(count):
        number = int32(queue.before + n)
        if lane == 0:
            while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                pass
        cuda.syncwarp()
        copy_row(out, int32((first + n) * queue.row_words), queue.here, slot_of(queue, number), queue.row_words)
        if lane == 0:
            st_release_sys_s32(queue.there, queue.head, int32(number + 1))


def test_the_barrier_whose_loss_no_check_finds():
    check = exercises.broken.check
    assert check().state == check(answers.receive).state == OPEN
    assert check(answers.send).state == REFUSED
    assert check(without_the_first_meeting).state == WRONG, check(without_the_first_meeting).text
    right = check(without_the_second_meeting)
    assert right.state == RIGHT and "DataRace" in right.text


def test_formulas_are_judged_by_their_results():
    assert exercises.in_flight.check(...).state == OPEN
    one_way = exercises.in_flight.check(lambda gbps, us, size: -(-us * gbps * 1e3 // size))
    assert one_way.state == WRONG and "for link_gbps = 350" in one_way.text and "it is 64" in one_way.text
    assert "round up" in exercises.in_flight.check(lambda gbps, us, size: 2 * us * gbps * 1e3 / size).text
    assert exercises.in_flight.check(answers.rows_in_flight).state == RIGHT
    all_leave = exercises.saturate.check(lambda ranks, cta, link: -(-link // cta))
    assert all_leave.state == WRONG and "and it is 14" in all_leave.text
    assert exercises.saturate.check(exercises.ctas_that_saturate).state == RIGHT
    assert "they deadlock" in exercises.fewest.check(lambda chunk, batch: max(chunk, batch)).text
    assert "4 suffice" in exercises.fewest.check(lambda chunk, batch: chunk + batch - 1).text
    assert exercises.fewest.check(exercises.fewest_slots).state == RIGHT


def test_choices_are_explained_after_an_answer():
    for exercise in (exercises.fences, exercises.slower_end):
        assert exercise.check().state == OPEN and exercise.why not in exercise.check().text
        assert exercise.check("A").state == WRONG and exercise.check("b").state == RIGHT
    resident = exercises.resident
    assert resident.check(own_gpu=...).state == OPEN and "132" not in resident.check(own_gpu=...).text
    assert resident.check(own_gpu=132, shared_gpu=132).state == WRONG
    assert resident.check(own_gpu=132, shared_gpu=66).state == RIGHT


# The page's kernels, and changes that the check must find


def page(right="", wrong=""):
    """Return what the page's cells define, with a passage replaced, and its steps: name -> version as Python."""
    own = {name: getattr(answers, name) for name in ("tell_everyone", "publish", "send", "receive")}
    return definitions(NOTEBOOK, own, r"page\.|exercises\.\w+\.use", right, wrong)


@pytest.fixture(scope="module")
def right_page():
    return page()


STEPS = "one slot", "ring", "signal per chunk", "credits in batches", "many channels"


def test_the_page_has_these_steps(right_page):
    assert tuple(right_page[1]) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_all_steps_are_right(name, right_page):
    names, steps = right_page
    with simulator.seed(3), simulator.weak_memory(), simulator.races():
        assert runs.check_ring(eval(steps[name], names)) is None


UNORDERED_CREDIT = (  # a lane returns the last credit of a batch before the others have read
    "            cuda.syncwarp()\n            if lane == 0 and ((n + 1)",
    "            if lane == 0 and ((n + 1)",
)


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("signal per chunk", "a, b, c, d = ld_global_s32x4(source, int32(at + i))", "a = b = c = d = int32(0)"),
        ("signal per chunk", "int32(slot) * queue.row_words)", "int32(slot))"),
        ("ring", "int32(launch * count)", "int32(0)"),
        ("many channels", "at, before = int32(channel * (RING + slots * row_words))", "at, before = int32(0)"),
        ("signal per chunk", "number + rows - ld_acquire", "number - ld_acquire"),
        ("signal per chunk", "tail, int32(number + rows)", "tail, int32(number + rows + 1)"),
        ("credits in batches", "int32(number + 1))\n\n    return receive", "int32(number + 9))\n\n    return receive"),
        ("credits in batches", *UNORDERED_CREDIT),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    names, steps = page(right, wrong)
    assert runs.lesson.fault(eval(steps[name], names)) is not None


def test_variants_are_checked_as_steps_are(right_page):
    make, send = right_page[0]["make_ring"], right_page[0]["make_send_variant"]
    polls_another_head = make(send(True, False, False), answers.receive)
    with pytest.raises(WrongResult, match="the head: DataRace"):
        runs.show_variants({"the head": polls_another_head})


def test_a_message_needs_both_ends(right_page):
    make, names = right_page[0]["make_message"], right_page[0]
    orders = lambda publish, observe: runs.messages.orders(make(publish, observe), seeds=4)
    right = orders(answers.publish, names["observe"])
    assert right.wrong == 0 and right.race is None
    for publish, observe in (
        (names["publish_relaxed"], names["observe"]),
        (names["publish_with_barrier_only"], names["observe"]),
        (names["publish_without_barrier"], names["observe"]),
        (answers.publish, names["observe_relaxed"]),
    ):
        assert orders(publish, observe).wrong == 4 and "DataRace" in orders(publish, observe).race


def test_variants_are_right_in_weak_memory(right_page):
    make, send = right_page[0]["make_ring"], right_page[0]["make_send_variant"]
    own_head = right_page[0]["receive_with_own_head"]
    for switches in ((True, False, False), (False, True, False), (False, False, True)):
        receive = own_head if switches[0] else answers.receive
        with simulator.seed(1), simulator.weak_memory(), simulator.races():
            assert runs.check_ring(Version(make(send(*switches), receive))) is None


@pytest.mark.parametrize("chunk, batch", [(4, 3), (3, 4), (4, 2), (1, 1), (6, 4)])
def test_the_formula_is_what_the_simulator_finds(chunk, batch, right_page):
    fewest = exercises.fewest_slots(chunk, batch)
    cases = [(chunk, batch, slots) for slots in (fewest - 1, fewest) if slots >= 1]
    found = runs.deadlocks(right_page[0]["make_batched"], cases)
    assert found == ["deadlock", "right"][-len(cases) :]


def test_ctas_that_have_not_started_do_not_receive(right_page):
    make = right_page[0]["make_ring"]
    table = runs.show_residency(
        {"pairs": make(answers.send, answers.receive), "first": make(answers.send, answers.receive, False)}
    )
    assert [line[1] for line in table.lines] == ["right", "deadlock"]


def test_the_score_counts_what_crosses_the_link(right_page):
    names, steps = right_page
    rows = {name: runs.lesson.count(eval(text, names), name).rows for name, text in steps.items()}
    of = lambda row: [next(v for (_, r), v in rows[name].items() if r == row) for name in STEPS[:4]]
    assert of("signals of senders, of a rank") == [14, 14, 4, 4]
    assert of("signals of receivers, of a rank") == [14, 14, 14, 4]
    flight = of("rows in a ring, at most")
    assert flight[0] == 1 and all(1 < number <= runs.SLOTS for number in flight[1:])
    assert min(of("bytes to other ranks, of a rank")) >= 14 * 1024


def test_the_ping_pong_and_pushes_run_and_are_checked(right_page):
    names = right_page[0]
    table = runs.show_ping_pong({"relaxed": names["make_ping_pong"](st_relaxed_sys_s32)})
    assert "ran" in str(table) or "0." in str(table)
    assert "bulk copies" in str(runs.show_push(names["push_stores"], names["push_bulk"]))

    @cuda.jit
    def push_half(peers, local, x, rows, row_words, to):
        there = pointer_from_address(peers[to], local)
        for i in range(cuda.grid(1), rows * row_words // 2, cuda.gridsize(1)):
            there[i] = int32(i // 4)

    with pytest.raises(WrongResult, match="have not arrived"):
        runs.show_push(push_half, names["push_bulk"])


def test_a_kernel_that_stores_at_the_wrong_peer_is_found():
    @cuda.jit
    def store_into_itself(buffer_ptrs, mine, peer, value):
        mine[cuda.threadIdx.x] = value + cuda.threadIdx.x

    with pytest.raises(WrongResult, match="should have stored"):
        runs.show_second_process(store_into_itself)


# Records


def test_recorded_latencies_and_rates(monkeypatch):
    row = lambda step, us: dict(
        step=step, config={"ranks": 2}, size=dict(rows=1024, row_bytes=14336, rounds=100), kernel_us={"median": us}
    )
    steps = [row("ping-pong: release", 266.0), row("push: stores, 8 CTAs", 160.0)]
    steps.append(row("signal: st.release, nobody", 90.0))
    found = {runs.TOPIC: {"rows": steps}}
    monkeypatch.setattr(records, "recorded", lambda topic, gpu="h200": found.get(topic))
    assert runs.one_way_us("release") == 1.33 and runs.one_way_us("relaxed") is None
    assert runs.push_gbps() == {("stores", 8): 367.0} and runs.link_gbps() == 367.0
    assert runs.signal_ns("st.release", "nobody") == 900 and runs.signal_ns("st.relaxed", "nobody") is None
    assert runs.one_way_us("release", ranks=4) is None and runs.link_gbps(4) is None


def test_recorded_times_by_ranks(monkeypatch):
    row = lambda step, ranks, us: dict(
        step=step, config={"ranks": ranks}, size=dict(rows=1024, row_bytes=14336, rounds=100), kernel_us={"median": us}
    )
    rows = [row("ring", 2, 3000.0), row("ring", 4, 3100.0), row("push: stores, 8 CTAs", 4, 160.0)]
    monkeypatch.setattr(records, "recorded", lambda topic, gpu="h200": {"rows": rows} if topic == runs.TOPIC else None)
    monkeypatch.setattr(runs.lesson, "steps", {"one slot": None, "ring": None})
    table = runs.show_ranks()
    assert list(table.headings) == ["recorded, us", "2 ranks", "4 ranks"]
    assert table.lines == [["one slot", "", ""], ["ring", "3000", "3100"], ["lower bound", "", "40"]]
    monkeypatch.setattr(records, "recorded", lambda topic, gpu="h200": None)
    assert "no times" in str(runs.show_ranks())


def test_an_earlier_record_serves_until_there_is_a_new_one(monkeypatch):
    earlier = dict(
        step="final", config={"ranks": 2}, flag={"us": 1.341}, push_gbps={"stores: 48": 355.6, "bulk copies: 1": 9}
    )
    found = {link.EARLIER: {"rows": [earlier]}}
    monkeypatch.setattr(records, "recorded", lambda topic, gpu="h200": found.get(topic))
    assert runs.one_way_us("release") == 1.341 and runs.one_way_us("relaxed") is None
    assert runs.push_gbps() == {("stores", 48): 355.6}
    assert "356 GB/s" in runs.result()


def test_without_records_the_page_says_nothing_of_times(monkeypatch):
    monkeypatch.setattr(records, "recorded", lambda topic, gpu="h200": None)
    assert runs.link_gbps() is None and runs.lower_bound_us() is None
    assert "Recorded" not in runs.result() and "best push" not in runs.lower_bound()
    assert runs.with_fewer_signals("ring", 4) is None and runs.without_waits("ring") is None


def test_slots_follow_from_rates(monkeypatch):
    monkeypatch.setattr(runs, "one_way_us", lambda *_: 1.0)
    monkeypatch.setattr(runs, "link_gbps", lambda ranks=2: 358.4)
    monkeypatch.setattr(runs.lesson, "steps", {"ring": SimpleNamespace(us=None)})
    assert "358 GB/s needs 50 rows in flight. This ring has 8 slots" in runs.slots_needed("ring")
    runs.lesson.steps["ring"].us = runs.ROWS * runs.ROW_BYTES / 14336.0
    assert "one warp copies 14.3 GB/s through this ring, and needs 2." in runs.slots_needed("ring")
    monkeypatch.setattr(runs, "one_way_us", lambda *_: None)
    assert "No rates are recorded" in runs.slots_needed("ring")


def test_tables_say_whose_records_they_show(monkeypatch):
    monkeypatch.setattr(runs, "RANKS", 4)
    only_two = lambda kind, ranks=2: 1.3 if ranks == 2 else None
    assert runs._recorded_ranks(lambda ranks: only_two("release", ranks)) == 2
    assert runs._recorded_ranks(lambda ranks: 1.4) == 4 and "4 H200s" in runs._source(4)


# Figures and sizes


def test_figures_say_what_they_show():
    figures = (draw.problem(), draw.buffer(), draw.message(), draw.ring(), draw.stuck(4, 3, 5), draw.resident())
    for figure in figures:
        svg = figure._repr_svg_()
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg
    assert "2 rows have been read without a credit, 3 slots are free" in figures[4]._repr_svg_()
    assert "never waits for ever" in draw.stuck(4, 2, 5)._repr_svg_()
    assert "and the ring has 3" in draw.stuck(4, 2, 3)._repr_svg_()


def test_rows_are_private():
    assert not torch.equal(runs.private(0, 64), runs.private(1, 64))
    assert runs.buffer_parts(1024)["barrier_signal_ptrs"] == (1024 + 32 + 64, 64)
    assert DATA > FLAG and ld_relaxed_sys_s32 is not ld_acquire_sys_s32


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_page_runs_with_more_ranks(ranks):
    printed = run_with_sizes(
        NOTEBOOK, "talk_to_a_peer", RANKS=ranks, ROWS=512, SMALL_ROWS=4, SMALL_ROW_BYTES=512, SEEDS=2
    )
    assert f"{ranks} ranks: each sends 512 rows" in printed and "many channels" in printed
