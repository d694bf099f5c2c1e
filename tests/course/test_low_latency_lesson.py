"""The lesson on low latency: steps are right, checks find wrong kernels, exercises judge answers and cheats."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lesson_pages import definitions, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.bench import records
from moe_numba.course.draw.player import Box, Player
from moe_numba.course.lessons.low_latency import answers, draw, exercises, model, runs
from moe_numba.course.lessons.low_latency.answers import take_vector
from moe_numba.course.lessons.low_latency.runs import SHOWN, SHOWN_EXPERTS, Round, Sizes, Version
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.expert_parallel.low_latency.combine import add_row, round_sums
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.low_latency.protocol import has_arrived
from moe_numba.ptx.atomics import ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.memory import pointer_from_address, st_global_s32x4
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4
from moe_numba.ptx.warp import FULL_MASK

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/14_low_latency.py"


# Answers: a word as its own flag


@cuda.jit
def stub(local, peers, epoch, rank, value, out):
    pass


@cuda.jit
def one_word(local, peers, epoch, rank, value, out):
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, 0, value[0])
    word = ld_relaxed_sys_s32(local, 0)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, 0)
    st_relaxed_sys_s32(local, 0, SENTINEL)
    out[0] = word


@cuda.jit
def no_reset(local, peers, epoch, rank, value, out):
    half = epoch[0] & 1
    st_relaxed_sys_s32(pointer_from_address(peers[1 - rank], local), half, value[0])
    word = ld_relaxed_sys_s32(local, half)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, half)
    out[0] = word
    epoch[0] += 1


@cuda.jit
def formula(local, peers, epoch, rank, value, out):
    out[0] = 100 * (2 - rank) + epoch[0]
    epoch[0] += 1


@cuda.jit
def own_word(local, peers, epoch, rank, value, out):
    out[0] = value[0]


@cuda.jit
def sends_twice(local, peers, epoch, rank, value, out):
    half = epoch[0] & 1
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, half, value[0])
    st_relaxed_sys_s32(remote, half, value[0])
    word = ld_relaxed_sys_s32(local, half)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, half)
    st_relaxed_sys_s32(local, half, SENTINEL)
    out[0] = word
    epoch[0] += 1


@cuda.jit
def resets_the_other_word(local, peers, epoch, rank, value, out):
    """Nothing orders this reset before what the other rank sends next."""
    half = epoch[0] & 1
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(local, 1 - half, SENTINEL)
    st_relaxed_sys_s32(remote, half, value[0])
    word = ld_relaxed_sys_s32(local, half)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, half)
    out[0] = word
    epoch[0] += 1


# The sum


@cuda.jit(device=True)
def other_order(memory, slot, tokens, targets, out, token):
    vector, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
    for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
        for j in range(8):
            sums[j] = float32(0)
        for r in range(memory.ranks - 1, -1, -1):
            if targets >> r & 1:
                at = int32((slot + r * tokens) * memory.words + i)
                vector[0], vector[1], vector[2], vector[3] = take_vector(memory.local, at)
                add_row(sums, vector, 0, float32(1))
        round_sums(sums, vector)
        st_global_s32x4(out, token * memory.words + i, vector[0], vector[1], vector[2], vector[3])


@cuda.jit(device=True)
def keeps_what_it_read(memory, slot, tokens, targets, out, token):
    vector, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
    for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
        for j in range(8):
            sums[j] = float32(0)
        for r in range(memory.ranks):
            if targets >> r & 1:
                at = int32((slot + r * tokens) * memory.words + i)
                a, b, c, d = ld_relaxed_sys_s32x4(memory.local, at)
                while not has_arrived(a, b, c, d):
                    a, b, c, d = ld_relaxed_sys_s32x4(memory.local, at)
                vector[0], vector[1], vector[2], vector[3] = a, b, c, d
                add_row(sums, vector, 0, float32(1))
        round_sums(sums, vector)
        st_global_s32x4(out, token * memory.words + i, vector[0], vector[1], vector[2], vector[3])


@cuda.jit(device=True)
def begins_at_zero_once(memory, slot, tokens, targets, out, token):
    vector, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
    for j in range(8):
        sums[j] = float32(0)
    for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
        for r in range(memory.ranks):
            if targets >> r & 1:
                at = int32((slot + r * tokens) * memory.words + i)
                vector[0], vector[1], vector[2], vector[3] = take_vector(memory.local, at)
                add_row(sums, vector, 0, float32(1))
        round_sums(sums, vector)
        st_global_s32x4(out, token * memory.words + i, vector[0], vector[1], vector[2], vector[3])


@cuda.jit(device=True)
def rounds_after_each_rank(memory, slot, tokens, targets, out, token):
    vector, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
    total = cuda.local.array(4, int32)
    for i in range(4 * int32(cuda.threadIdx.x), memory.words, 4 * int32(cuda.blockDim.x)):
        for j in range(4):
            total[j] = 0
        for r in range(memory.ranks):
            if targets >> r & 1:
                at = int32((slot + r * tokens) * memory.words + i)
                vector[0], vector[1], vector[2], vector[3] = take_vector(memory.local, at)
                for j in range(8):
                    sums[j] = float32(0)
                add_row(sums, total, 0, float32(1))
                add_row(sums, vector, 0, float32(1))
                round_sums(sums, total)
        st_global_s32x4(out, token * memory.words + i, total[0], total[1], total[2], total[3])


@cuda.jit(device=True)
def all_ranks(memory, slot, tokens, targets, out, token):
    answers.sum_rows(memory, slot, tokens, int32(7), out, token)


@cuda.jit(device=True)
def meets_first(memory, slot, tokens, targets, out, token):
    cuda.syncthreads()
    answers.sum_rows(memory, slot, tokens, targets, out, token)


# The count


@cuda.jit(device=True)
def alone(experts, expert, n):
    count = int32(0)
    for j in range(n):
        count = int32(count + (experts[j] == expert))
    return count


@cuda.jit(device=True)
def one_lane(experts, expert, n):
    count = int32(0)
    if cuda.threadIdx.x & 31 == 0:
        for j in range(n):
            count = int32(count + (experts[j] == expert))
    return cuda.shfl_sync(FULL_MASK, count, 0)


@cuda.jit(device=True)
def votes_for_nothing(experts, expert, n):
    cuda.ballot_sync(FULL_MASK, True)
    return alone(experts, expert, n)


@cuda.jit(device=True)
def forgets_the_end(experts, expert, n):
    lane, count = int32(cuda.threadIdx.x & 31), int32(0)
    for first in range(0, n - 31, 32):
        count = int32(count + cuda.popc(cuda.ballot_sync(FULL_MASK, experts[first + lane] == expert)))
    return count


@cuda.jit(device=True)
def only_own_lane(experts, expert, n):
    lane, count = int32(cuda.threadIdx.x & 31), int32(0)
    for j in range(lane, n, 32):
        count = int32(count + (experts[j] == expert))
    return count


@cuda.jit(device=True)
def by_shuffles(experts, expert, n):
    lane, count = int32(cuda.threadIdx.x & 31), int32(0)
    for j in range(lane, n, 32):
        count = int32(count + (experts[j] == expert))
    for k in range(5):
        count = int32(count + cuda.shfl_xor_sync(FULL_MASK, count, 1 << k))
    return count


EXCHANGE, SUM, COUNT = exercises.exchange, exercises.sum_rows, exercises.count_by_warp


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (EXCHANGE, ..., OPEN, "not answered yet"),
        (EXCHANGE, stub, OPEN, "not answered yet"),
        (EXCHANGE, answers.exchange, RIGHT, "4 bytes"),
        (EXCHANGE, one_word, WRONG, "wait for ever|what rank . received"),
        (EXCHANGE, no_reset, WRONG, r"what rank . received, by launch\[\d\]"),
        (EXCHANGE, formula, WRONG, r"what rank . received, by launch\[0\]"),
        (EXCHANGE, own_word, WRONG, r"what rank . received, by launch\[0\]"),
        (EXCHANGE, sends_twice, WRONG, r"what rank . received, by launch\[\d\]"),
        (EXCHANGE, resets_the_other_word, WRONG, "wait for ever"),
        (SUM, answers.sum_rows, RIGHT, "with 12800 bytes stored; par is 12800"),
        (SUM, begins_at_zero_once, WRONG, "the sums of launch 0"),
        (SUM, rounds_after_each_rank, WRONG, "the sums of launch 0"),
        (SUM, other_order, WRONG, "the sums of launch 0"),
        (SUM, keeps_what_it_read, WRONG, "do not hold the sentinel"),
        (SUM, all_ranks, WRONG, "wait for ever"),
        (SUM, meets_first, REFUSED, "threads wait for each other"),
        (COUNT, answers.count_by_warp, RIGHT, "10 shared loads"),
        (COUNT, by_shuffles, RIGHT, "10 shared loads"),
        (COUNT, alone, REFUSED, "do not divide the entries"),
        (COUNT, votes_for_nothing, REFUSED, "do not divide the entries"),
        (COUNT, one_lane, REFUSED, "do not divide the entries"),
        (COUNT, forgets_the_end, WRONG, "the first 300 entries"),
        (COUNT, only_own_lane, WRONG, "the first 300 entries"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


def test_explanations_come_after_an_answer():
    trips, halves, formula = exercises.trips.check, exercises.halves.check, exercises.break_even.check
    assert trips().state == OPEN and "acknowledgement" not in trips().text
    assert trips(flag_after_data=2).state == WRONG and trips(flag_after_data=3, data_is_flag=1).state == RIGHT
    assert halves().state == OPEN and "erased" not in halves().text
    assert halves("A").state == WRONG and halves("c").state == RIGHT and "erased" in halves("c").text
    assert formula().state == OPEN and formula(lambda m: m.latency_us * m.gbps * 1e3 / (2 * 7168)).state == WRONG
    right = formula(lambda m: m.latency_us * m.gbps * 1e3 / (4 * 7168))
    assert right.state == RIGHT and re.search(r"with \d+ tokens", right.text)


# The page's kernels, and changes that the check must find


def page(right="", wrong=""):
    own = dict(exchange=answers.exchange, sum_rows=answers.sum_rows, count_by_warp=answers.count_by_warp)
    return definitions(NOTEBOOK, own, r"page\.|exercises\.\w+\.use", right, wrong)[0]


def versions(names):
    return {
        "flags after data": Version(names["flags"], warps=1),
        "a thread per vector": Version(names["flags"]),
        "data as its own flag": Version(names["data"]),
        "with combine": Version(names["data"], names["make_combine"](answers.sum_rows)),
        "packed by expert": Version(names["make_packed"](names["count_alone"]), packed=True),
        "counted by warps": Version(names["make_packed"](answers.count_by_warp), packed=True),
    }


@pytest.fixture(scope="module")
def right_page():
    return page()


def test_the_page_has_these_steps(right_page):
    steps = re.findall(r'^(?:many\.)?step\("([^"]*)"', NOTEBOOK.read_text(), re.M)
    assert list(dict.fromkeys(steps)) == list(versions(right_page))


@pytest.mark.parametrize("name", versions(page()))
def test_all_steps_are_right_without_races(name, right_page):
    of = runs.many if "packed" in name or "counted" in name else runs.lesson
    with of.conditions(5, True):
        assert runs.check(versions(right_page)[name], 1) is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("a thread per vector", "        fence_acq_rel_sys()\n", ""),
        ("a thread per vector", "    cuda.syncthreads()  # all threads have stored their part of the row\n", ""),
        ("a thread per vector", "= int32((number & halves - 1) * slots)", "= int32(0)"),
        ("data as its own flag", "if targets >> r & 1:\n            push_row", "if r == 0:\n            push_row"),
        ("data as its own flag", "SENTINEL, SENTINEL, SENTINEL, SENTINEL)  # for", "0, 0, 0, 0)  # for"),
        ("data as its own flag", "(a != SENTINEL) & (b", "(b != SENTINEL) & (b"),
        ("data as its own flag", "clean(a), clean(b), clean(c), clean(d)", "a, b, c, d"),
        (
            "data as its own flag",
            "# all threads have read epochs\n            if thread == 0:",
            "\n            if thread < 0:",
        ),
        ("with combine", "if has_row[row]:", "if source == rank:"),
        ("with combine", "if has_row[row]:", "if has_row[row] >= 0:"),
        ("with combine", "int32(first + rank * tokens + token), y, row", "int32(first + token), y, row"),
        ("packed by expert", "int32(expert * slots + count(", "int32(expert * slots + (j & 1) + 0 * count("),
        ("packed by expert", "while word >> 8 != number:", "while word == 0:"),
        ("packed by expert", "half, targets = int32(number & 1)", "half, targets = int32(0)"),
        ("counted by warps", "int32(e), int32(entries))", "int32(e), int32(entries - 1))"),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    version = versions(page(right, wrong))[name]
    assert any(runs.lesson._checked(version, seed) for seed in range(runs.lesson.seeds))


def test_kernels_without_communication_are_wrong(right_page):
    """Outputs are poisoned, and inputs random: nothing but the other rank's memory has the rows."""

    @cuda.jit(device=True)
    def receive_nothing(memory, slot, number, recv_x, out):
        return int32(1)

    version = Version(right_page["make_dispatch"](right_page["send_data"], receive_nothing))
    assert runs.check(version, 1) is not None


def test_wrong_kernels_of_the_page_are_found(right_page):
    make, send = right_page["make_dispatch"], right_page["send_data"]
    one_half = runs.lesson.orders(Version(make(send, right_page["receive_data"], 1)), seeds=2)
    no_reset = runs.lesson.orders(Version(make(send, right_page["receive_without_reset"])), seeds=2)
    without_fence = runs.lesson.orders(Version(right_page["without_fence"]), seeds=1)
    assert one_half.wrong and "Deadlock" in one_half.error
    assert no_reset.wrong == 2 and "operation 3" in no_reset.error
    assert without_fence.wrong and "DataRace" in without_fence.race


@pytest.mark.parametrize("name", ["a thread per vector", "data as its own flag", "with combine", "counted by warps"])
def test_numbers_of_operations_wrap(name, right_page):
    sizes, version = Sizes(2, 2, 264, 2, 2), versions(right_page)[name]
    rounds = runs.random_rounds(sizes, 4)
    first = runs.outputs(version, sizes, rounds)
    wrapped = runs.outputs(version, sizes, rounds, operations=right_page["NUMBERS"] - 3)
    for of_round in zip(first, wrapped, strict=True):
        for found, again in zip(*of_round, strict=True):
            for key, tensor in found.items():
                assert torch.equal(tensor.nan_to_num(-7), again[key].nan_to_num(-7)), key


# Frames of slots


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make, data_is_flag", [("flags", False), ("data", True)])
def test_frames_of_slots(right_page, make, data_is_flag, seed):
    rows = torch.ones(4, 8).bfloat16()
    rounds = [Round([rows[:2]] * 2, [torch.tensor(ids) for ids in of], [rows] * 2) for of in SHOWN_EXPERTS]
    with simulator.seed(seed), simulator.trace(accesses=True) as events:
        runs.outputs(Version(right_page[make]), SHOWN, rounds)
    frames, width, height = draw.slot_frames(events, SHOWN, data_is_flag)
    Player(frames, width, height, "slots")  # no box is outside
    notes = [frame.note for frame in frames]
    for number, of_round in enumerate(SHOWN_EXPERTS, start=1):
        for source, tokens in enumerate(of_round):
            for token, (rank,) in enumerate(tokens):
                stored = f"Operation {number}: rank {source} stores the row of its token {token} on rank {rank}."
                read = f"Operation {number}: rank {rank} reads the row of rank {source}'s token {token}"
                assert notes.count(stored) == 1
                assert notes.index(stored) < next(i for i, note in enumerate(notes) if note.startswith(read))
    assert len(notes) == 2 * (8 + 4 + 4)  # metadata on both ranks, rows, and reads
    last = [shape for shape in frames[-1].shapes if isinstance(shape, Box) and shape.group != "legend"]
    assert sum(box.kind in ("done", "waits") for box in last) == 0, "all rows have been read"
    assert sum(box.text == "sentinel" for box in last) == (16 if data_is_flag else 0)


def test_other_traces_are_refused():
    with simulator.trace() as events:
        pass
    with pytest.raises(ValueError, match="no stores to slots; was it made with accesses=True"):
        draw.slot_frames(events, SHOWN, True)
    with pytest.raises(ValueError, match="hidden is 16"):
        draw.slot_frames(events, SHOWN._replace(hidden=16), True)


def test_figures_say_what_they_show():
    for figure in (draw.problem(), draw.space_time()):
        svg = figure._repr_svg_()
        assert svg.startswith("<svg") and "prefers-color-scheme: dark" in svg


# Models and tables


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_of_the_model_are_those_of_random_routing(ranks):
    experts = torch.rand(4000, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    visited = torch.zeros(4000, ranks).scatter_(1, experts // (256 // ranks), 1.0)
    remote = visited[:, 1:].sum().item() * 2 * 7168
    assert model.bytes_each_way(ranks, 4000) == pytest.approx(remote, rel=0.02)


def test_the_fit_finds_the_model_of_its_times():
    of = model.PairModel(8.0, 200.0)
    found = model.fit(2, times := {tokens: of.pair_us(2, tokens) for tokens in (1, 8, 64)})
    assert found == pytest.approx(of) and found.deviation(2, times) == pytest.approx(0)
    assert found.deviation(2, times | {8: 2 * times[8]}) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="times has 1 numbers of tokens; a fit needs at least 2"):
        model.fit(2, {1: 10.0})


def test_latencies_name_their_sources(monkeypatch):
    assert all(source for us, source in (model.launch(), model.load(), *map(model.one_way, ("relaxed", "release"))))
    recorded = records.recorded
    monkeypatch.setattr(records, "recorded", lambda topic, *given: None if topic == "peer_ladder" else recorded(topic))
    assert model.one_way("release").us > model.one_way("relaxed").us and "no record" in model.one_way("relaxed").source
    row = {"step": "launch: an empty kernel", "kernel_us": {"median": 1.5}}
    monkeypatch.setattr(records, "recorded", lambda topic, *given: {"date": "2026-12-01T", "rows": [row]})
    assert model.launch() == (1.5, "this lesson, 2026-12-01")
    row |= {"step": "ping-pong: release", "config": {"ranks": 2}, "size": {"rounds": 10}}
    assert model.one_way("release") == (0.075, "lesson 11, 2026-12-01")


@pytest.mark.parametrize("name", ["lesson", "many", "alone"])
def test_the_simulators_process_finds_each_lesson(name):
    """Where a GPU runs kernels, another process counts: it looks a lesson up by its home."""
    assert getattr(runs, name).home == f"{runs.__name__}:{name}"


def test_predictions_follow_the_chain():
    one = partial(runs.chain_us, order="relaxed")
    assert one(3) - one(2) == pytest.approx(model.load().us)
    assert runs.loads_of(32) == 28 and runs.loads_of(896) == 1
    assert runs.most_counted(Sizes(2, 1, 64, 2, 2)) == (0 + 1 + 2 + 3) + 2 * 4  # places, and experts
    assert 1.99 < runs.rows_each_way() < 2  # nearly every token has experts on both ranks
    assert runs.chain_us(2, "relaxed", launches=2) == pytest.approx(2 * one(1))
    assert model.lower_bound_us(2, 1) < model.lower_bound_us(2, 128) < model.lower_bound_us(8, 128)


def test_the_tables_have_lines():
    assert "DeepEP" in str(runs.show_pairs()) and "lower bound" in str(runs.show_pairs())
    assert "FP8" in str(runs.show_what_did_not_pay()) and "fitted" in str(runs.show_model())
    assert "GB/s" in runs.describe_model() and "in slots" in runs.result()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_page_runs_with_other_numbers_of_ranks(ranks):
    sizes = dict(SMALL_TOKENS=3 if ranks == 2 else 1, SMALL_HIDDEN=72 if ranks == 2 else 8, SMALL_TOPK=3)
    printed = run_with_sizes(NOTEBOOK, "low_latency", RANKS=ranks, SMALL_LOCAL_EXPERTS=3, **sizes)
    assert f"rank {ranks - 1}: right" in printed and "with combine" in printed
