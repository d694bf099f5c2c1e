"""The lesson "Dispatch": steps are right in weak memory, its check finds wrong kernels, exercises judge answers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lesson_pages import definitions, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, uint32, uint64

from moe_numba.course.lessons.dispatch import answers, exercises, model, runs, symptoms
from moe_numba.course.lessons.dispatch.runs import Version
from moe_numba.course.steps.verdict import OPEN, REFUSED, RIGHT, WRONG
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_acquire_cta_shared_u64,
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,
    poll_acquire_cta_shared_s32,
    st_relaxed_gpu_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_u64,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks/12_dispatch.py"
OWN = {name: getattr(answers, name) for name in ("rows_of", "wait_for_space", "signal", "take")}
LEFT_OUT = r"exercises|page\.|lesson|in_simulator|PLAYED|predicted_us"


# Steps


def page(right="", wrong=""):
    return definitions(NOTEBOOK, OWN, LEFT_OUT, right, wrong)


@pytest.fixture(scope="module")
def steps():
    names, found = page()
    return {name: eval(text, names) for name, text in found.items()}


def version_of(names, found, step):
    return eval(found[step], names)


def fault(version, seed=0):
    return runs.lesson._checked(version, seed, races=True)


STEPS = re.findall(r'^step\("([^"]+)"', NOTEBOOK.read_text(), re.MULTILINE)


def test_steps_are_those_of_the_page(steps):
    assert list(steps) == STEPS and len(STEPS) == 13


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_right_under_other_orders(name, steps):
    """Than those of the page, which are the first ones."""
    assert runs.lesson._checked(steps[name], runs.lesson.seeds, races=False) is None


def test_each_step_changes_one_switch(steps):
    rings = [v for v in steps.values() if v.kind == "ring" and not v.fp8]
    for before, after in zip(rings, rings[1:], strict=False):
        changed = [name for name in Version._fields if getattr(before, name) != getattr(after, name)]
        assert len(changed) == 1, changed


def test_lines_that_the_page_quotes_are_those_of_the_kernel():
    text = NOTEBOOK.read_text()
    kernel = text[text.index("def make_dispatch(") : text.index("return dispatch\n")]
    quotes = re.findall(r"^# ```python\n(.*?)^# ```", text[text.index("## Step 6") :], re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("# ").strip() for quote in quotes for line in quote.splitlines()]
    assert len(lines) > 8 and [line for line in lines if line not in kernel] == []


WRONG_KERNELS = {  # step, right, wrong, message
    "a row too far": (
        "our port of DeepEP's ring",
        "copy_row(recv_x, int64(to + i)",
        "copy_row(recv_x, int64(to + i + 1 - 1 + (i & 1))",
        "recv_x of rank|DataRace|outside",
    ),
    "a full ring": (
        "head at the sender",
        "    wait_for_space(local, HEAD + here, tail, uint32(slots - chunk), has_ring)",
        "    wait_for_space(local, HEAD + here, tail, uint32(slots), has_ring)",
        "DataRace|recv_x of rank|Deadlock|outside",
    ),
    "the head of another ring": (
        "head at the sender",
        "    st_release_sys_s32(remote, HEAD + channel * ranks + rank, int32(head))",
        "    st_release_sys_s32(remote, HEAD + here, int32(head))",
        "DataRace|recv_x of rank|Deadlock",
    ),
    "no order before the tail": (
        "one warp per token",
        "                    # ---- Publish the tail: all rows of the chunk have arrived ----\n"
        "                    if tma:\n                        wait_all()\n                    meet_team(warp)\n",
        "                    if tma:\n                        wait_all()\n",
        "DataRace",
    ),
    "bulk stores not waited for": (
        "TMA, packed slots",
        "                    # ---- Publish the tail: all rows of the chunk have arrived ----\n"
        "                    if tma:\n                        wait_all()\n",
        "",
        "Race|recv_x of rank",
    ),
    "no proxy fence": (
        "TMA, packed slots",
        "                    if tma and mask != uint32(0):\n                        fence_acquired()\n",
        "",
        "Race|fence|Fence|recv_x of rank",
    ),
    "posted too early": (
        "a signalling warp",
        "wait_all_but_one()  # the rows before this one have arrived\n"
        "                                post(board, item, channel, tail)",
        "post(board, item, channel, uint32(tail + uint32(1)))",
        "Race|recv_x of rank",
    ),
    "rows posted that may be under way": (
        "a signalling warp",
        "                                wait_all_but_one()  # the rows before this one have arrived\n",
        "",
        "Race",
    ),
    "a barrier without release": (
        "naive, all SMs",
        "        st_release_sys_s32(pointer_from_address(peers[thread], local), rank, number)\n",
        "        st_relaxed_sys_s32(pointer_from_address(peers[thread], local), rank, number)\n",
        "Race",
    ),
    "a barrier that does not wait": (
        "direct writes",
        "        while ld_acquire_sys_s32(local, thread) < number:\n            pass\n    cuda.syncthreads()\n\n\n@",
        "    cuda.syncthreads()\n\n\n@",
        "Race",
    ),
    "counters that are cleared in half": (
        "our port of DeepEP's ring",
        "flags[i] = state[i] = int32(0)",
        "flags[i] = int32(0)",
        "Deadlock|Race|recv_x",
    ),
    "sends before the peer has cleared": (
        "our port of DeepEP's ring",
        "flags[i] = state[i] = int32(0)\n    meet(peers, local, rank, ranks, number)\n",
        "flags[i] = state[i] = int32(0)\n",
        "Race",
    ),
    "both copy all own rows": ("receivers help", "if own % 2 == 1:", "if own % 2 >= 0:", "Race"),
    "nobody copies half of them": ("receivers help", "if own % 2 == 1:", "if own % 2 == 2:", "recv_x of rank"),
    "a row of another channel": (
        "direct writes",
        "rows_of(rank_prefix, sent, rank, peer, peer, channel, ranks, channels)",
        "rows_of(rank_prefix, sent, rank, peer, peer, int32(0), ranks, channels)",
        "Race|recv_x of rank",
    ),
}


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_a_wrong_kernel_is_found(name):
    step, right, wrong, message = WRONG_KERNELS[name]
    names, found = page(right, wrong)
    version = version_of(names, found, step)
    faults = (fault(version, seed) for seed in range(runs.lesson.seeds))
    assert re.search(message, next(filter(None, faults), "right")), name


def test_without_communication_nothing_arrives(steps):
    """Each rank only copies its own rows: outputs are poisoned, so the rest is missing."""
    naive = steps["naive, all SMs"]
    names, _ = page(
        "if mask >> uint32(r) & uint32(1):\n                    remote, to", "if r < 0:\n                    remote, to"
    )
    assert "recv_x of rank" in fault(naive._replace(make=names["make_naive"]))


def test_a_wrong_notify_is_found():
    names, _ = page("remote[own + to] = tokens_per_rank[to]", "remote[own + to] = tokens_per_rank[rank]")
    assert "rank_prefix of rank" in fault(Version(names["notify"], kind="notify"))
    names, _ = page(
        "st_release_sys_s32(remote, rank, number)\n    else:", "st_relaxed_sys_s32(remote, rank, number)\n    else:"
    )
    assert "Race" in fault(Version(names["notify"], kind="notify"))
    names, _ = page("half = int32(ranks + (number & 1) * ranks * width)", "half = int32(ranks)")
    assert "Race" in fault(Version(names["notify"], kind="notify"))


@pytest.mark.parametrize("kind, make", [("package", "rings"), ("package", "direct"), ("port", "port")])
def test_kernels_beside_the_page_are_right(kind, make):
    assert runs.lesson.fault(Version(make, kind=kind)) is None


# Answers


def test_own_answers_are_right():
    for name in OWN:
        assert getattr(exercises, name).check(OWN[name]).state == RIGHT, name


def stub():
    pass


def test_stubs_are_open():
    for name in OWN:
        assert getattr(exercises, name).check(cuda.jit(device=True)(stub)).state == OPEN
    assert exercises.wire_bytes.check(two_ranks=..., four_ranks=..., eight_ranks=...).state == OPEN
    assert exercises.symptom.check(...).state == exercises.exponent.check(...).state == OPEN


@cuda.jit(device=True)
def forgets_own_rank(rank_prefix, channel_prefix, source, to, line, channel, ranks, channels):
    lower_ranks = rank_prefix[source * ranks + to]
    lower_channels = channel_prefix[line * channels + channel - 1] if channel > 0 else int32(0)
    return int32(lower_ranks + lower_channels), int32(channel_prefix[line * channels + channel] - lower_channels)


@cuda.jit(device=True)
def includes_own_channel(rank_prefix, channel_prefix, source, to, line, channel, ranks, channels):
    lower_ranks = rank_prefix[(source - 1) * ranks + to] if source > 0 else int32(0)
    here = channel_prefix[line * channels + channel]
    return int32(lower_ranks + here), here


@cuda.jit(device=True)
def sums_again(rank_prefix, channel_prefix, source, to, line, channel, ranks, channels):
    first = rank_prefix[(source - 1) * ranks + to] if source > 0 else int32(0)
    before = total = int32(0)
    for c in range(channels):
        own = channel_prefix[line * channels + c] - (channel_prefix[line * channels + c - 1] if c > 0 else int32(0))
        total += own
        if c < channel:
            before += own
    return int32(first + before), int32(channel_prefix[line * channels + channel] - before)


@cuda.jit(device=True)
def takes_the_source_for_the_line(rank_prefix, channel_prefix, source, to, line, channel, ranks, channels):
    return answers.rows_of(rank_prefix, channel_prefix, source, to, source, channel, ranks, channels)


@cuda.jit(device=True)
def returns_at_once(heads, at, tail, most, has_ring):
    cuda.syncwarp()


@cuda.jit(device=True)
def waits_until_empty(heads, at, tail, most, has_ring):
    while has_ring and uint32(ld_acquire_sys_s32(heads, at)) != tail:
        pass
    cuda.syncwarp()


@cuda.jit(device=True)
def each_lane_for_itself(heads, at, tail, most, has_ring):
    full = has_ring
    while full:
        full = uint32(tail - uint32(ld_acquire_sys_s32(heads, at))) > most


@cuda.jit(device=True)
def polls_relaxed(heads, at, tail, most, has_ring):
    full = has_ring
    while cuda.any_sync(FULL_MASK, full):
        if full:
            full = uint32(tail - uint32(ld_relaxed_sys_s32(heads, at))) > most
    cuda.syncwarp()


@cuda.jit(device=True)
def compares_signed(heads, at, tail, most, has_ring):
    full = has_ring
    while cuda.any_sync(FULL_MASK, full):
        if full:
            full = tail > uint32(uint32(ld_acquire_sys_s32(heads, at)) + most)
    cuda.syncwarp()


@cuda.jit(device=True)
def compares_as_int32(heads, at, tail, most, has_ring):
    """Wrong where counters pass 2^31: a difference of two int32 has 64 bits in compiled Numba."""
    while has_ring and int32(tail) - ld_acquire_sys_s32(heads, at) > int32(most):
        pass
    cuda.syncwarp()


def changed_signal(fences=True, done_first=True, publishes=True, lanes=32, most=1 << 20, moves=False):
    """Make a wrong answer; with ``moves`` a ring's flag is where the warp's number says, not the channel."""

    @cuda.jit(device=True)
    def signal(board, lane, flags_at, rank, peers, local):
        running = True
        while running:
            idle = True
            if done_first:
                idle = lane >= board.warps or poll_acquire_cta_shared_s32(board.words, board.done + lane) != 0
            for base in range(0, board.items, 32):
                item, posted, new = int32(base + lane), uint64(0), False
                if item < min(board.items, most) and lane < lanes:
                    posted = ld_acquire_cta_shared_u64(board.posts, board.posted + item)
                    new = posted != board.posts[board.published + item]
                if cuda.any_sync(FULL_MASK, new):
                    if fences:
                        fence_acq_rel_sys()
                    if new:
                        channel, peer = int32(int32(posted >> uint64(32)) - 1), int32(item % board.ranks)
                        if moves:
                            channel = int32(item // board.ranks)
                        remote = pointer_from_address(peers[peer], local)
                        st_relaxed_sys_s32(remote, flags_at + channel * board.ranks + rank, int32(uint32(posted)))
                        if publishes:
                            st_release_cta_shared_u64(board.posts, board.published + item, posted)
            if not done_first:
                idle = lane >= board.warps or poll_acquire_cta_shared_s32(board.words, board.done + lane) != 0
            running = cuda.all_sync(FULL_MASK, idle) == 0

    return signal


@cuda.jit(device=True)
def signals_at_the_end(board, lane, flags_at, rank, peers, local):
    while lane < board.warps and poll_acquire_cta_shared_s32(board.words, board.done + lane) == 0:
        pass
    cuda.syncwarp()
    answers.signal(board, lane, flags_at, rank, peers, local)


@cuda.jit(device=True)
def signals_for_rank_0_only(board, lane, flags_at, rank, peers, local):
    """Ignore where flags and posts begin, the sender's rank, and the peer: all zeros would do."""
    answers.signal(board._replace(posted=0), lane, int32(0), int32(0), peers, local)


@cuda.jit(device=True)
def never_resets(taken, role, channels, lane):
    number = atom_add_relaxed_gpu_s32(taken, role, 1) if lane == 0 else int32(0)
    return cuda.shfl_sync(FULL_MASK, number, 0)


@cuda.jit(device=True)
def resets_one_too_early(taken, role, channels, lane):
    number = int32(0)
    if lane == 0:
        number = atom_add_relaxed_gpu_s32(taken, role, 1)
        if number == channels - 2:
            st_relaxed_gpu_s32(taken, role, 0)
    return cuda.shfl_sync(FULL_MASK, number, 0)


@cuda.jit(device=True)
def resets_one_too_late(taken, role, channels, lane):
    number = int32(0)
    if lane == 0:
        number = atom_add_relaxed_gpu_s32(taken, role, 1)
        if number == channels:
            st_relaxed_gpu_s32(taken, role, 0)
    return cuda.shfl_sync(FULL_MASK, number, 0)


@cuda.jit(device=True)
def takes_from_one_counter(taken, role, channels, lane):
    return answers.take(taken, int32(0), channels, lane)


@cuda.jit(device=True)
def only_lane_0_knows(taken, role, channels, lane):
    number = int32(0)
    if lane == 0:
        number = atom_add_relaxed_gpu_s32(taken, role, 1)
        if number == channels - 1:
            st_relaxed_gpu_s32(taken, role, 0)
    return number


@cuda.jit(device=True)
def each_lane_takes(taken, role, channels, lane):
    return atom_add_relaxed_gpu_s32(taken, role, 1)


@cuda.jit(device=True)
def without_atomics(taken, role, channels, lane):
    number = taken[role]
    cuda.syncwarp()
    if lane == 0:
        taken[role] = int32(number + 1) if number + 1 < channels else int32(0)
    return cuda.shfl_sync(FULL_MASK, number, 0)


ANSWERS = {  # exercise, answer, state, message
    "rows: own rank": ("rows_of", forgets_own_rank, WRONG, "the first row"),
    "rows: own channel": ("rows_of", includes_own_channel, WRONG, "the first row"),
    "rows: sums": ("rows_of", sums_again, REFUSED, "sums counts again|it sums"),
    "rows: line": ("rows_of", takes_the_source_for_the_line, WRONG, "rank 1 sends"),
    "space: none": ("wait_for_space", returns_at_once, WRONG, "nothing orders a sender|received"),
    "space: empty": ("wait_for_space", waits_until_empty, WRONG, "wait for ever"),
    "space: lanes": ("wait_for_space", each_lane_for_itself, WRONG, "race|lane"),
    "space: relaxed": ("wait_for_space", polls_relaxed, WRONG, "nothing orders a sender"),
    "space: signed": ("wait_for_space", compares_signed, WRONG, "counters wrap from 2.32 - 1 to 0: "),
    "space: int32": ("wait_for_space", compares_as_int32, WRONG, "counters pass 2.31: "),
    "signal: no fence": ("signal", changed_signal(fences=False), WRONG, "nothing orders a sender"),
    "signal: late done": ("signal", changed_signal(done_first=False), WRONG, "wait for ever|flags|received"),
    "signal: one lane": ("signal", changed_signal(lanes=1), WRONG, "wait for ever"),
    "signal: at the end": ("signal", signals_at_the_end, WRONG, "wait for ever"),
    "signal: 32 posts": ("signal", changed_signal(most=32), WRONG, "wait for ever"),
    "signal: not published": (
        "signal",
        changed_signal(publishes=False),
        WRONG,
        "board.published . item. has not become",
    ),
    "signal: no channel": ("signal", changed_signal(moves=True), WRONG, "outside|wait for ever|flags"),
    "signal: zeros": ("signal", signals_for_rank_0_only, WRONG, "outside|wait for ever|flags"),
    "take: no reset": ("take", never_resets, WRONG, "launch 2 of 3"),
    "take: early reset": ("take", resets_one_too_early, WRONG, "the number 0"),
    "take: late reset": ("take", resets_one_too_late, WRONG, "launch 2 of 3"),
    "take: one counter": ("take", takes_from_one_counter, WRONG, "lanes that got the number"),
    "take: lane 0": ("take", only_lane_0_knows, WRONG, "the number 0"),
    "take: all lanes": ("take", each_lane_takes, WRONG, "not the 32 of one warp|lane"),
    "take: no atomics": ("take", without_atomics, WRONG, "race"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_judged(name):
    exercise, answer, state, message = ANSWERS[name]
    verdict = getattr(exercises, exercise).check(answer)
    assert verdict.state == state and re.search(message, str(verdict)), str(verdict)


def test_bytes_on_the_wire():
    right = {ranks: model.wire_bytes(ranks) / 1e6 for ranks in (2, 4, 8)}
    of = dict(zip(("two_ranks", "four_ranks", "eight_ranks"), right.values(), strict=True))
    assert exercises.wire_bytes.check(**of).state == RIGHT
    assert exercises.wire_bytes.check(**of | {"four_ranks": 3 * right[2]}).state == WRONG
    ids = runs.route(4000, "uniform", 0, 256, 8)
    share = float((ids // 64 == 1).any(dim=1).float().mean())  # tokens that go to one of four ranks
    assert share == pytest.approx(model.rows_to_a_rank(4) / model.TOKENS, abs=0.02)


def test_the_symptom_is_that_of_one_missing_order():
    assert len(symptoms.shown()) >= 1 and "token" in symptoms.shown()[0]
    found = symptoms.table({"A": "plain tail", "B": "early head", "none": ""}, seeds=1)
    assert symptoms.BEFORE in found.split(";")[0] and "none: nothing wrong" in found
    assert all(
        100 * source + token < v < 300
        for *_, source, token, values in symptoms.wrong_rows("early head", 6)
        for v in values
    )
    verdict = exercises.symptom.check("b")
    assert verdict.state == RIGHT and symptoms.LATER in str(verdict)
    assert exercises.exponent.check("A").state == WRONG


def test_exponents_of_scales_of_two_become_negative():
    packed = torch.tensor([0.25, 0.5, 1.0, 2.0]).view(torch.int32) >> 23
    back = (packed.to(torch.uint8).view(torch.int8).to(torch.int) << 23).view(torch.float)
    assert back.tolist() == [0.25, 0.5, 1.0, -2.0]


# Sizes and tables


def test_the_lower_bound_is_that_of_the_push_rate():
    rates = model.push_gbps(2)
    assert rates and model.lower_bound_us(2) == pytest.approx(model.wire_bytes(2) / max(rates.values()) / 1e3)
    assert "the lower bound" in runs.result()


def test_kernels_of_records_do_not_depend_on_the_simulator(steps):
    of = runs.shape(steps["counters that continue"], small=False)
    assert of.warps == 15 and of.channels == 12 * 15 * 4 and of.shared_bytes <= 227 * 1024
    assert of.row_words == 3584 and of.slot_words >= of.row_words + 1


FEW = dict(SMALL_TOKENS=3, SMALL_WARPS=1, SMALL_TEAM=1)


def test_the_page_runs_with_four_ranks():
    assert "FP8 rows" in run_with_sizes(NOTEBOOK, "dispatch", RANKS=4, **FEW)


_EIGHT = """
import sys
from moe_numba.course.lessons.dispatch import sizes
vars(sizes).update({sizes!r})
sys.path.insert(0, {folder!r})
import test_dispatch_lesson as of
names, found = of.page()
for step in {steps!r}:
    print(step, of.runs.lesson.fault(of.version_of(names, found, step)))
"""


def test_steps_are_right_with_eight_ranks():
    names = "naive, all SMs", "head at the sender", "receivers help", "direct writes"
    code = _EIGHT.format(sizes=FEW | {"RANKS": 8}, folder=str(Path(__file__).parent), steps=names)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MOE_NUMBA_SIMULATE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name} None" for name in names], done.stderr[-2000:]


def test_multicast_saves_no_bytes_that_arrive():
    for ranks, leave, arrive, once, most, *_ in runs.show_multicast().lines:
        assert leave == arrive and int(once) <= int(leave) and int(most) >= int(arrive), ranks


def test_shorter_rings_are_described(steps):
    text = runs.describe_rings(steps["receivers help"], steps["balanced channels"])
    assert text.splitlines() == [
        "180 channels: rings of 17 slots, chunks of 4 rows",
        "720 channels: rings of 4 slots, chunks of 1 row",
    ]


@pytest.mark.parametrize("bulk, text", [(60.0, "So bulk copies are faster"), (40.0, "gains nothing by the rate")])
def test_what_the_rates_of_two_ways_say_is_computed(bulk, text, monkeypatch):
    monkeypatch.setattr(model, "push_gbps", lambda: {(model.BULK, 1): bulk, (model.STORES, 1): 50.0})
    assert f"{bulk:.0f} GB/s in bulk" in model.compare_ways() and text in model.compare_ways()
    monkeypatch.setattr(model, "push_gbps", dict)
    assert model.compare_ways() is None
