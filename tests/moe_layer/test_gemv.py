"""Test the two kernels of fused_experts for a few tokens: in bfloat16, and on a GPU also in FP8."""

import pytest
import torch
from helpers.decode import count_launches, make_fp8_inputs, make_inputs, run_on_late_inputs, wrong
from helpers.wrong_kernels import changed, is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.moe_layer import ExpertsWorkspace, fused_experts, reference
from moe_numba.moe_layer.gemv import bf16 as gemv_bf16
from moe_numba.moe_layer.gemv import plan as gemv_plan
from moe_numba.moe_layer.silu_and_mul.api import check_activation
from moe_numba.moe_layer.weights import check_weights
from moe_numba.runtime.sass import compile_apart

SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")
SHAPES = [  # tokens, topk, experts, hidden, intermediate; the second has whole warps of vectors
    (1, 3, 8, 320, 64),
    (1, 1, 1, 256, 256),
    (2, 2, 64, 128, 64),
    (1, 16, 16, 64, 512),  # as many vectors along k as make a lane of the second kernel load more at once
]


@pytest.fixture
def few_loads(monkeypatch):
    """Two vectors at once, so that small shapes need several iterations."""
    monkeypatch.setattr(gemv_plan, "DecodeShape", lambda *sizes: gemv_bf16.DecodeShape(*sizes, max_loads=2))
    monkeypatch.setattr(gemv_plan, "_plans", {})


@pytest.fixture
def counted(monkeypatch):
    return count_launches(monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "bias, shared, ids_dtype, options",
    [
        (None, True, torch.int32, {}),
        (torch.bfloat16, False, torch.int64, dict(activation="swigluoai", limit=0.5)),
        (torch.float32, True, torch.int64, dict(limit=0.5)),
    ],
)
def test_equals_reference(shape, bias, shared, ids_dtype, options, counted, few_loads, device):
    given = make_inputs(*shape, device, bias, shared, ids_dtype)
    tokens, topk = given["topk_ids"].shape
    workspace = ExpertsWorkspace(tokens, topk, given["w13"], given["w2"])
    workspace.buffer.fill_(0xFF)
    out = torch.full_like(given["x"], float("nan"))
    assert fused_experts(**given, **options, out=out, workspace=workspace) is out
    assert counted == ["decode_gate_up", "decode_down"]
    assert wrong(out, given, **options) is None
    given["topk_ids"] = given["topk_ids"].t().contiguous().t()
    assert torch.equal(fused_experts(**given, **options), out)


@SIMULATED
def test_the_number_of_columns_does_not_matter(device, monkeypatch):
    """A warp with one or two columns computes the same bits."""
    given, made = make_inputs(*SHAPES[0], device), []
    make = gemv_plan.make_decode_gate_up_kernel
    monkeypatch.setattr(
        gemv_plan, "make_decode_gate_up_kernel", lambda shape, *a: made.append(shape) or make(shape, *a)
    )
    results = []
    for columns in (1, 2):
        shape = lambda *sizes, columns=columns: gemv_bf16.DecodeShape(*sizes[:-1], columns)
        monkeypatch.setattr(gemv_plan, "DecodeShape", shape)
        monkeypatch.setattr(gemv_plan, "_plans", {})
        results.append(fused_experts(**given))
    assert [shape.columns for shape in made] == [1, 2] and torch.equal(*results)


def test_tokens_without_experts(device):
    given = make_inputs(*SHAPES[0], device)
    given["topk_ids"][:] = torch.tensor([-1, 8, -7])
    assert torch.equal(fused_experts(**given), given["shared"])
    del given["shared"]
    assert not fused_experts(**given).any()


@pytest.mark.parametrize("name", ["x", "shared"])
def test_out_may_be_an_input(name, device):
    given = make_inputs(*SHAPES[2], device)
    expected = fused_experts(**given)
    assert torch.equal(fused_experts(**given, out=given[name]), expected)


@pytest.mark.parametrize(
    "tokens, topk, experts, decodes",
    [(1, 8, 8, True), (1, 33, 64, False), (4, 8, 256, True), (8, 8, 256, False), (2, 4, 32, False), (9, 8, 512, False)],
)
def test_choice(tokens, topk, experts, decodes):
    w13, w2 = torch.empty(experts, 128, 64).bfloat16(), torch.empty(experts, 64, 64).bfloat16()
    choose = lambda w13, w2: gemv_plan.uses_decode_kernels(check_weights(w13, w2), tokens, topk, w13, w2)
    assert choose(w13, w2) == decodes
    assert not choose(w13.mT.contiguous().mT, w2)


@pytest.mark.parametrize(
    "sizes, decodes",
    [
        ((1, 9, 257, 7168, 256), True),  # DeepSeek-V3, an eighth of each expert: 99 MB
        ((2, 9, 257, 7168, 256), True),
        ((3, 9, 257, 7168, 256), False),
        ((1, 8, 128, 2048, 768), True),  # Qwen3-30B-A3B: 75 MB
        ((1, 8, 128, 2816, 704), True),  # 95 MB
        ((1, 4, 32, 2880, 2880), True),  # gpt-oss-20b: 199 MB
    ],
)
def test_choice_by_the_bytes_of_the_weights(sizes, decodes):
    tokens, topk, experts, hidden, intermediate = sizes
    make = lambda *shape: torch.empty(shape, dtype=torch.bfloat16)  # whose memory is not touched
    w13, w2 = make(experts, 2 * intermediate, hidden), make(experts, hidden, intermediate)
    assert gemv_plan.uses_decode_kernels(check_weights(w13, w2), tokens, topk, w13, w2) == decodes


@SIMULATED
def test_dependent_launch(device, monkeypatch):
    given = make_inputs(*SHAPES[0], device)
    activation, activated = check_activation("silu", 1.702, None), torch.empty(3, 64).bfloat16()
    first = lambda t, out: gemv_plan.decode_gate_up(t, activation, out)
    out = run_on_late_inputs(gemv_bf16, first, gemv_plan.decode_down, given, activated, monkeypatch)
    assert wrong(out, given) is None


WRONG = {
    "up of the next column": ("(i >> 1) + (i & 1) * intermediate", "(i >> 1) + (i & 1) * (intermediate - 1)"),
    "vectors beyond the row": ("int32(lane + (step + b) * 32) < num_vectors", "lane >= 0"),
    "vectors of the next expert": ("is_whole or vector_index < num_vectors", "vector_index >= 0"),
    "the first weight for all": ("own_weight, int32(uint32(first + b) // uint32(steps_of_expert))", "own_weight, 0"),
    "a lane is missing": ("(16, 8, 4, 2, 1)", "(16, 8, 4, 2)"),
    "another token's activations": ("token * topk, lane, first", "0, lane, first"),
    "weights of the first steps again": ("column, lane, first + batch, words", "column, lane, 0, words"),
    "shared experts twice": ("total + low_half", "total + float32(2) * low_half"),
}


@SIMULATED
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_rejected(name, few_loads, device, monkeypatch):
    module = changed(gemv_bf16, *WRONG[name])
    for maker in ("make_decode_gate_up_kernel", "make_decode_down_kernel"):
        monkeypatch.setattr(gemv_plan, maker, module[maker])
    given = make_inputs(2, 3, 96, 320, 64, device)
    assert is_rejected(lambda seed: wrong(fused_experts(**given), given), seeds=1)


@SIMULATED
def test_the_check_accepts_right_kernels(few_loads, device):
    given = make_inputs(2, 3, 96, 320, 64, device)
    assert wrong(fused_experts(**given), given) is None


# On a GPU: real sizes, and launches that overlap


LARGE = {"bf16": (1, 9, 64, 7168, 256), "fp8": (1, 8, 16, 5120, 1024)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_large(name, counted):
    given = (make_fp8_inputs if name == "fp8" else make_inputs)(*LARGE[name], "cuda")
    first = fused_experts(**given)
    assert len(counted) == 2
    # Tensor cores and roundings in between; see test_moe_layer.py.
    assert mismatch(first, reference.fused_experts(**given), 1e-2) is None
    assert all(torch.equal(fused_experts(**given), first) for _ in range(100))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_layers_that_overlap_in_a_graph(name):
    """The second kernel reads ids before it waits: in each layer a gate writes new ones to the same memory."""
    tokens, topk, experts, hidden, intermediate = LARGE[name]
    given = (make_fp8_inputs if name == "fp8" else make_inputs)(*LARGE[name], "cuda", shared=False)
    random = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(30, tokens, experts, generator=random, device="cuda")
    routing = given.pop("topk_weights"), given.pop("topk_ids")
    results = torch.empty(len(logits), tokens, hidden, dtype=torch.bfloat16, device="cuda")
    workspace = ExpertsWorkspace(tokens, topk, given["w13"], given["w2"])

    def run(after_each):
        for of_layer, out in zip(logits, results, strict=True):
            moe_numba.biased_grouped_topk(of_layer, None, topk, scoring="softmax", out=routing)
            weights, ids = routing
            fused_experts(**given, topk_weights=weights, topk_ids=ids, out=out, workspace=workspace)
            after_each()

    run(torch.cuda.synchronize)
    expected, graph = results.clone(), torch.cuda.CUDAGraph()
    assert expected.isfinite().all() and not torch.equal(expected[0], expected[1])
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(20):
        results.fill_(float("nan"))
        graph.replay()
        assert torch.equal(results, expected)


_POINTERS = "uint16*", "uint16*", "uint16*", "int32*"
_FIRST = *_POINTERS, "uint16*", "int32", "int64", "int64"
_SECOND = *_POINTERS, "float32*", "uint16*", "uint16*", "int32", "int64", "int64"
_SHAPES = (257, 7168, 256, 9, ""), (32, 2880, 2880, 4, "bf16")
KERNELS = {}
for _shape in _SHAPES:
    KERNELS[f"first {_shape}"] = f"make_decode_gate_up_kernel(DecodeShape{(*_shape, 1)})", _FIRST, 128, False
    for _loads in (4, gemv_plan.MANY_LOADS):
        _kernel = f"make_decode_down_kernel(DecodeShape{(*_shape, 2, _loads)}, False)"
        KERNELS[f"second {_shape} {_loads}"] = _kernel, _SECOND, 128, False


def test_the_machine_code():
    """16-byte loads, no spills; three CTAs of 128 threads fit into the registers of an SM."""
    for name, report in compile_apart("from moe_numba.moe_layer.gemv.bf16 import *", KERNELS).items():
        assert report.spilled_bytes == 0 and report.stack_bytes == 0 and report.registers <= 168, name
        if report.opcodes is not None:
            wide = [opcode for opcode in report.opcodes if opcode.startswith("LDG") and ".128" in opcode]
            assert len(wide) >= 5, name  # four of weights at once, and one of x
