"""The lesson "The experts of a layer": steps are right, checks find wrong kernels, exercises judge answers."""

import re
from pathlib import Path

import pytest
import torch
from lesson_pages import definitions, run_with_sizes

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, int64, uint32

from moe_numba.course.bench import records
from moe_numba.course.lessons.moe_layer import answers, draw, exercises, model, profile, runs
from moe_numba.course.lessons.moe_layer.answers import activate_pair, high, low
from moe_numba.course.lessons.moe_layer.runs import Decode, Stages
from moe_numba.course.steps.score import TOTAL
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.moe_layer.compile_layers import Layer
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/15_moe_layer.py"
LAYER = Layer("toy, 1 of 2 GPUs", 8, 1024, 256, "bf16", (1, 64), topk=2)


# Answers: the position


@cuda.jit(device=True)
def stub(expert):
    pass


@cuda.jit(device=True)
def counts_itself(expert):
    same = uint32(cuda.match_any_sync(FULL_MASK, expert))
    return int32(cuda.popc(same & (lanemask_lt() | (uint32(1) << (cuda.threadIdx.x & 31))))), int32(cuda.popc(same))


@cuda.jit(device=True)
def upper_lanes(expert):
    same = uint32(cuda.match_any_sync(FULL_MASK, expert))
    earlier = int32(cuda.popc(same & lanemask_lt()))
    return int32(cuda.popc(same) - earlier - 1), int32(cuda.popc(same))


@cuda.jit(device=True)
def compares_three_bits(expert):
    same = uint32(cuda.match_any_sync(FULL_MASK, expert & 7))
    return int32(cuda.popc(same & lanemask_lt())), int32(cuda.popc(same))


@cuda.jit(device=True)
def by_shuffles(expert):
    earlier, equal = int32(0), int32(0)
    for lane in range(32):
        is_equal = cuda.shfl_sync(FULL_MASK, expert, lane) == expert
        equal = int32(equal + is_equal)
        earlier = int32(earlier + (is_equal and lane < cuda.threadIdx.x & 31))
    return earlier, equal


@cuda.jit(device=True)
def by_blackboard(expert):
    board, warp = cuda.shared.array(96, int32), int32(cuda.threadIdx.x >> 5 << 5)
    board[cuda.threadIdx.x] = expert
    cuda.syncwarp()
    earlier, equal = int32(0), int32(0)
    for lane in range(32):
        is_equal = board[warp + lane] == expert
        equal = int32(equal + is_equal)
        earlier = int32(earlier + (is_equal and lane < cuda.threadIdx.x & 31))
    return earlier, equal


# SwiGLU


@cuda.jit(device=True)
def word_by_word(gate_up, out, row, word, words):
    at = int64(row) * (2 * words) + word
    for i in range(4):
        out[int64(row) * words + word + i] = activate_pair(gate_up[at + i], gate_up[at + words + i])


@cuda.jit(device=True)
def stores_words(gate_up, out, row, word, words):
    at = int64(row) * (2 * words) + word
    gate, up = load_nc_u32x4(gate_up, at), load_nc_u32x4(gate_up, at + words)
    to = int64(row) * words + word
    out[to], out[to + 1] = activate_pair(gate[0], up[0]), activate_pair(gate[1], up[1])
    out[to + 2], out[to + 3] = activate_pair(gate[2], up[2]), activate_pair(gate[3], up[3])


@cuda.jit(device=True)
def up_first(gate_up, out, row, word, words):
    at = int64(row) * (2 * words) + word
    up, gate = load_nc_u32x4(gate_up, at), load_nc_u32x4(gate_up, at + words)
    a, b = activate_pair(gate[0], up[0]), activate_pair(gate[1], up[1])
    c, d = activate_pair(gate[2], up[2]), activate_pair(gate[3], up[3])
    st_global_s32x4(out, int64(row) * words + word, a, b, c, d)


# The sum


@cuda.jit(device=True)
def sum_words(rows, inverse, weights, out, words, topk, token, word):
    for i in range(4):
        first, second = float32(0), float32(0)
        for k in range(topk):
            row, weight = inverse[token * topk + k], weights[token * topk + k]
            if row >= 0:
                pair = rows[int64(row) * words + word + i]
                first, second = cuda.fma(weight, low(pair), first), cuda.fma(weight, high(pair), second)
        out[int64(token) * words + word + i] = int32(cvt_rn_bf16x2_f32(second, first))


def make_sum(order, check, weighted):
    @cuda.jit(device=True)
    def wrong_sum(rows, inverse, weights, out, words, topk, token, word):
        sums = cuda.local.array(8, float32)
        for i in range(8):
            sums[i] = float32(0)
        for n in range(topk):
            k = order * n + (topk - 1) * (order < 0)
            row, weight = inverse[token * topk + k], weights[token * topk + k] if weighted else float32(1)
            if row >= 0 or not check:
                vector = load_nc_u32x4(rows, int64(max(row, 0)) * words + word)
                for i in range(4):
                    sums[2 * i] = cuda.fma(weight, low(vector[i]), sums[2 * i])
                    sums[2 * i + 1] = cuda.fma(weight, high(vector[i]), sums[2 * i + 1])
        a, b = int32(cvt_rn_bf16x2_f32(sums[1], sums[0])), int32(cvt_rn_bf16x2_f32(sums[3], sums[2]))
        c, d = int32(cvt_rn_bf16x2_f32(sums[5], sums[4])), int32(cvt_rn_bf16x2_f32(sums[7], sums[6]))
        st_global_s32x4(out, int64(token) * words + word, a, b, c, d)

    return wrong_sum


# The dot product


@cuda.jit(device=True)
def dot_of_one_lane(x, x_at, w, w_at, words):
    total = float32(0)
    if cuda.threadIdx.x & 31 == 0:
        for i in range(words):
            total += low(x[x_at + i]) * low(w[w_at + i]) + high(x[x_at + i]) * high(w[w_at + i])
    return cuda.shfl_sync(FULL_MASK, total, 0)


@cuda.jit(device=True)
def dot_of_every_lane(x, x_at, w, w_at, words):
    total = float32(0)
    for i in range(0, words, 4):
        x_, w_ = load_nc_u32x4(x, x_at + i), load_nc_u32x4(w, w_at + i)
        for j in range(4):
            total += low(x_[j]) * low(w_[j]) + high(x_[j]) * high(w_[j])
    return total


@cuda.jit(device=True)
def dot_of_every_lane_and_a_shuffle(x, x_at, w, w_at, words):
    return cuda.shfl_sync(FULL_MASK, dot_of_every_lane(x, x_at, w, w_at, words), 0)


@cuda.jit(device=True)
def dot_of_the_first_vector(x, x_at, w, w_at, words):
    return answers.dot(x, int64(0), w, w_at, words)


@cuda.jit(device=True)
def dot_in_bfloat16(x, x_at, w, w_at, words):
    total = float32(0)
    for i in range(4 * int32(cuda.threadIdx.x & 31), words, 128):
        x_, w_ = load_nc_u32x4(x, x_at + i), load_nc_u32x4(w, w_at + i)
        for j in range(4):
            pair = cvt_rn_bf16x2_f32(high(x_[j]) * high(w_[j]), low(x_[j]) * low(w_[j]))
            total += low(pair) + high(pair)
    for distance in (16, 8, 4, 2, 1):
        total = total + cuda.shfl_xor_sync(FULL_MASK, total, distance)
    return total


@cuda.jit(device=True)
def dot_without_shuffles(x, x_at, w, w_at, words):
    total = float32(0)
    for i in range(int32(cuda.threadIdx.x & 31), words, 32):
        total += low(x[x_at + i]) * low(w[w_at + i]) + high(x[x_at + i]) * high(w[w_at + i])
    return total


@cuda.jit(device=True)
def dot_of_words(x, x_at, w, w_at, words):
    total = float32(0)
    for i in range(int32(cuda.threadIdx.x & 31), words, 32):
        total += low(x[x_at + i]) * low(w[w_at + i]) + high(x[x_at + i]) * high(w[w_at + i])
    for distance in (16, 8, 4, 2, 1):
        total = total + cuda.shfl_xor_sync(FULL_MASK, total, distance)
    return total


POSITION, ACTIVATE, SUM, DOT = exercises.position, exercises.activate_eight, exercises.sum_eight, exercises.dot


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (POSITION, ..., OPEN, "not answered yet"),
        (POSITION, stub, OPEN, "not answered yet"),
        (POSITION, answers.position, RIGHT, "1 exchange between lanes"),
        (POSITION, compares_three_bits, WRONG, "lower lanes"),
        (POSITION, counts_itself, WRONG, "lower lanes"),
        (POSITION, upper_lanes, WRONG, "lower lanes"),
        (POSITION, by_shuffles, OVER_PAR, "compares a value with those of all lanes"),
        (POSITION, by_blackboard, REFUSED, "shared memory"),
        (ACTIVATE, answers.activate_eight, RIGHT, "2 loads"),
        (ACTIVATE, word_by_word, REFUSED, "stores its result in pieces"),
        (ACTIVATE, stores_words, REFUSED, "stores its result in pieces"),
        (ACTIVATE, up_first, WRONG, "silu"),
        (SUM, answers.sum_eight, RIGHT, "12 loads"),
        (SUM, sum_words, REFUSED, "stores its result in pieces"),
        (SUM, make_sum(1, True, True), RIGHT, "12 loads"),
        (SUM, make_sum(-1, True, True), WRONG, "the sums"),
        (SUM, make_sum(1, False, True), WRONG, "the sums"),
        (SUM, make_sum(1, True, False), WRONG, "the sums"),
        (DOT, answers.dot, RIGHT, "4 loads"),
        (DOT, dot_of_one_lane, REFUSED, "do not divide the words"),
        (DOT, dot_of_every_lane, REFUSED, "do not divide the words"),
        (DOT, dot_of_every_lane_and_a_shuffle, REFUSED, "do not divide the words"),
        (DOT, dot_of_the_first_vector, WRONG, "the dot product, by lane"),
        (DOT, dot_in_bfloat16, WRONG, "the dot product, by lane"),
        (DOT, dot_without_shuffles, WRONG, "the dot product, by lane"),
        (DOT, dot_of_words, OVER_PAR, "How many bytes"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state, verdict.text
    assert re.search(text, verdict.text, re.S), verdict.text
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


def test_explanations_come_after_an_answer():
    traffic, unstable = exercises.traffic.check, exercises.unstable.check
    assert traffic().state == OPEN and traffic(gather=1).state == WRONG
    assert traffic(gather=2, multiplication=3, reduction=2).state == RIGHT
    assert traffic(gather=2, multiplication=3, reduction=2.25).state == RIGHT
    assert unstable().state == OPEN and unstable("A").state == WRONG and unstable("b").state == RIGHT
    fill = exercises.tokens_that_fill.check
    assert fill(lambda e, k, b, bandwidth, rate: e * b * rate / (k * bandwidth)).state == WRONG
    assert fill(exercises.tokens_that_fill.own).state == RIGHT


# The page's kernels, and changes that the check must find


def page(right="", wrong=""):
    names = "position", "activate_eight", "sum_eight", "dot"
    own = {name: getattr(answers, name) for name in names}
    return definitions(NOTEBOOK, own, r"page\.|exercises\.\w+\.use", right, wrong)[0]


@pytest.fixture(scope="module")
def right_page():
    return page()


def versions(names):
    return {
        "a chunk per warp": (runs.groups, names["group_by_warps"]),
        "group in torch": (runs.groups, names["group_in_torch"]),
        "SwiGLU, two columns": (runs.swiglus, (names["swiglu_by_two"], 2)),
        "SwiGLU, eight columns": (runs.swiglus, (names["swiglu_by_eight"], 8)),
        "sum, two columns": (runs.sums, (names["sum_by_two"], 2)),
        "sum, eight columns": (runs.sums, (names["sum_by_eight"], 8)),
        "GEMV": (runs.one, names["by_gemv"]),
        "layer": (runs.layers, Stages(names["group_by_warps"], names["swiglu_by_eight"], names["sum_by_eight"])),
    }


@pytest.mark.parametrize("name", versions(page()))
def test_all_steps_are_right_without_races(name, right_page):
    lesson, version = versions(right_page)[name]
    with lesson.conditions(5, True):
        assert lesson.run.check(version) is None


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("a chunk per warp", "            # each warp counts its chunk\n", "            first = int32(first + 1)\n"),
        ("a chunk per warp", "counts[own + expert] += equal", "counts[own + expert] += 1"),
        ("a chunk per warp", "+ counts[own + expert] + earlier)", "+ counts[own + expert])"),
        ("a chunk per warp", "counts[i] = 0\n            cuda.syncthreads()", "counts[i] = 0"),
        ("SwiGLU, two columns", "silu(high(gate)) * high(up)", "silu(low(gate)) * high(up)"),
        ("SwiGLU, two columns", "gate_up[at + words])", "gate_up[at])"),
        ("sum, two columns", "cuda.fma(weight, high(pair), second)", "cuda.fma(weight, low(pair), second)"),
        ("GEMV", "(gate_row + intermediate) * words, words)", "gate_row * words, words)"),
        ("GEMV", "for k in range(topk):  # in order", "for k in range(topk - 1):"),
        ("layer", "uint32(word) & uint32(0xFFFF0000)", "uint32(word) & uint32(0xFFF00000)"),
    ],
)
def test_the_check_finds_wrong_kernels(name, right, wrong):
    lesson, version = versions(page(right, wrong))[name]
    if name == "layer":
        version = Stages(version.group, page(right, wrong)["swiglu_by_two"], version.total, columns=2)
        version = version._replace(total=page(right, wrong)["sum_by_two"])
    assert any(lesson._checked(version, seed, races=True) for seed in range(2))


def test_the_pages_unstable_sort_is_found_by_the_indices(right_page):
    assert any(runs.error_of_unstable(right_page["unstable"], seed) for seed in range(4))


@pytest.mark.parametrize("name", ["groups", "swiglus", "sums", "layers", "one"])
def test_the_simulators_process_finds_each_lesson(name):
    """Where a GPU runs kernels, another process counts: it looks a lesson up by its home."""
    assert getattr(runs, name).home == f"{runs.__name__}:{name}"


def test_poisoned_groups_are_rejected():
    ids = torch.tensor([[0, 1], [1, 2]])
    assert runs.wrong_groups(runs.poisoned_groups(ids, 3), ids, 3) == "seqlens differs at [0]"


def test_torch_has_no_kernels_and_layers_count_launches(right_page):
    group, layers = runs.groups, runs.layers
    assert group.run.kernels(right_page["group_in_torch"]) == () and group.count(right_page["group_in_torch"], "t").rows
    in_torch, ours = right_page["in_torch"], versions(right_page)["layer"][1]
    runs.one_token.cache_clear()  # as in the process that counts where a GPU runs the kernels
    counted = [layers.count(version, "x").rows for version in (in_torch, ours)]
    launches = [sum(rows.values()) for rows in counted]
    assert launches[0] > launches[1] and len(layers.run.kernels(ours)) == 3
    assert counted[1][TOTAL, "operations of torch"] == 0, "inputs and outputs are no operations of a layer"
    assert runs.one.count((lambda *inputs: None,), "x").rows[TOTAL, "operations of torch"] == 0


def test_wide_loads_need_fewer_lines_of_all_warps(right_page):
    """The rows of the simulator fill warps also with eight columns for each thread, as those of the page do."""
    eight = {runs.swiglus: answers.activate_eight, runs.sums: answers.sum_eight}
    for lesson, make, two in ((runs.swiglus, "make_swiglu", "activate_two"), (runs.sums, "make_sum", "sum_two")):
        narrow, wide = (right_page[two], 2), (eight[lesson], 8)
        lines = [
            lesson.count((right_page[make](hole, columns), columns), "x").rows[TOTAL, "source lines"]
            for hole, columns in (narrow, wide)
        ]
        assert lines[1] < lines[0]


# Tables, figures, models


def test_the_tables_have_lines(right_page):
    assert "tensor cores" in str(runs.show_bounds()) and "flashinfer" in str(runs.show_layers())
    assert "DeepGEMM" in str(runs.show_layers_on_ranks()) and "64 tokens" in runs.result()
    assert "faster with 512, 4096 tokens per rank" in runs.compare_with_others()
    assert "L2 promotion" in str(runs.show_what_did_not_pay())
    calls = str(runs.show_calls(right_page["experts_in_torch"], {}, right_page["group_in_torch"]))
    assert "not counted at this size" in next(line for line in calls.splitlines() if "loop over experts" in line)


def test_predictions_are_bytes_and_launches():
    assert runs.sum_us() == pytest.approx(4096 * 9 * 2048 * 2 / runs.chip_limits().copy_bandwidth * 1e6)
    assert 0.5 < runs.sort_us() < 3 and runs.gemv_us() > runs.lower_bound_us(1)
    assert runs.less("no step", runs.groups, "a", "b") is None if "no step" in runs.layers.steps else True


def test_figures_say_what_they_show():
    of = draw.tensor_bytes(64, 128, 8, 2048, 768)
    assert of["rows"] == 8 * of["out"] and of["gate and up"] == 2 * of["activated"] and of["w13"] == 2 * of["w2"]
    svg = draw.tensors(64, 4096, 128, 8, 2048, 768)._repr_svg_()
    assert "prefers-color-scheme: dark" in svg and "weighted sum" in svg


def test_bounds_are_those_of_random_routing():
    ids = torch.rand(500, 64, LAYER.num_experts, generator=torch.Generator().manual_seed(0)).topk(2).indices
    used, read, compute = model.bounds(LAYER, 64)
    assert used == pytest.approx(sum(len(drawn.unique()) for drawn in ids) / 500, rel=0.01)
    assert read == pytest.approx(used * 3 * 1024 * 256 * 2 / 4.8e6)
    assert compute == pytest.approx(2 * 64 * 2 * 3 * 1024 * 256 / 989e6)


def test_a_limit_of_nodes_shortens_the_transfers():
    reached = model.ranks_per_token(model.NUM_EXPERTS, model.TOPK, 8)
    assert model.transfer_us(64, 4096, 4) == pytest.approx(model.transfer_us(64, 4096) * 4 / reached)
    assert model.transfer_us(64, 4096, 8) == model.transfer_us(64, 4096), "more nodes than a token reaches"
    assert model.total_us(64, 4096, 4) < model.total_us(64, 4096)


@pytest.mark.parametrize("gpus", [8, 64])
def test_transfers_of_the_model_are_those_of_random_routing(gpus):
    experts = torch.rand(4000, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    visited = torch.zeros(4000, gpus).scatter_(1, experts // (256 // gpus), 1.0)
    assert model.ranks_per_token(256, 8, gpus) == pytest.approx(visited.sum(1).mean().item(), rel=0.02)
    nodes = visited.view(4000, -1, 8).amax(2)
    seconds = max(visited[:, 1:].sum().item() / model.NVLINK, nodes[:, 1:].sum().item() / model.NETWORK)
    assert model.part_times(gpus, 4000)["combine"] == pytest.approx(1e6 * seconds * 2 * 7168, rel=0.02)
    assert model.part_times(1, 4000)["dispatch"] == 0
    assert model.table((1, gpus), (64,)).count("\n") == 3


def test_tables_of_the_pages_in_docs():
    record = records.read("moe_layer")
    assert "| Qwen3-30B-A3B | 4096 |" in profile.profile(record) and "| permute |" in profile.profile(record)
    assert "measured / model" in profile.model_beside_measurements(records.read("moe_layer_ranks"))
    assert "at most 4 nodes" in profile.model_of_64_gpus()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_page_runs_with_other_sizes(ranks):
    """No size is a power of two; assignments fill no whole warps, and rows no whole CTA."""
    sizes = dict(SMALL_EXPERTS=7, SMALL_TOPK=3, SMALL_HIDDEN=192, SMALL_TOKENS=29, SMALL_WARPS=3, SMALL_MANY=3)
    printed = run_with_sizes(NOTEBOOK, "moe_layer", RANKS=ranks, **(sizes if ranks == 2 else {}))
    assert "DeepGEMM's mega-MoE" in printed and "weighted sum in one launch" in printed


def test_the_check_of_the_sum_has_an_assignment_without_a_row():
    names = page("if row >= 0:\n            pair", "if True:\n            pair")
    with pytest.raises(simulator.SimulatorError, match="outside rows"):
        runs.sums.run.check((names["make_sum"](names["sum_two"], 2), 2))


def test_decode_has_two_kernels(right_page):
    assert isinstance(right_page["by_gemv"], Decode) and len(runs.one.run.kernels(right_page["by_gemv"])) == 2
