"""Test the two kernels of fused_experts for a few tokens."""

import pytest
import torch
from helpers.wrong_kernels import changed, is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.grouped_gemm.reference import mismatch, quantise_blocks
from moe_numba.moe_layer import (
    ExpertsWorkspace,
    decode,
    fused_experts,
    kernel_decode,
    kernel_decode_fp8,
    launches,
    reference,
)
from moe_numba.moe_layer.activation import check_activation
from moe_numba.moe_layer.launches import ExpertsTensors
from moe_numba.moe_layer.weights import check_weights
from moe_numba.runtime.sass import compile_apart

BOUND = 4e-3  # activations are rounded to bfloat16 in another order than in the reference, and the sums once
SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")
SHAPES = [  # tokens, topk, experts, hidden, intermediate; the second has whole warps of vectors
    (1, 3, 8, 320, 64),
    (1, 1, 1, 256, 256),
    (2, 2, 64, 128, 64),
]


def make_inputs(tokens, topk, experts, hidden, intermediate, device, bias=None, shared=True, ids_dtype=torch.int32):
    """Arguments of a call; with several columns of ids one is invalid."""
    random = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(shape, generator=random)
    ids = torch.stack([torch.randperm(experts, generator=random)[:topk] for _ in range(tokens)]).to(ids_dtype)
    if topk > 1:
        ids[0, -1] = (-1, experts)[tokens % 2]
    given = dict(
        x=draw(tokens, hidden).bfloat16(),
        w13=(draw(experts, 2 * intermediate, hidden) / hidden**0.5).bfloat16(),
        w2=(draw(experts, hidden, intermediate) / intermediate**0.5).bfloat16(),
        topk_weights=draw(tokens, topk).abs(),
        topk_ids=ids,
    )
    if shared:
        given["shared"] = draw(tokens, hidden).bfloat16()
    if bias is not None:
        given |= dict(w13_bias=draw(experts, 2 * intermediate).to(bias), w2_bias=draw(experts, hidden).to(bias))
    return {name: tensor.to(device) for name, tensor in given.items()}


def wrong(result, given, **options):
    return mismatch(result, reference.fused_experts(**given, **options), BOUND)


@pytest.fixture
def few_loads(monkeypatch):
    """Two vectors at once, so that small shapes need several iterations."""
    monkeypatch.setattr(decode, "DecodeShape", lambda *sizes: kernel_decode.DecodeShape(*sizes, max_loads=2))
    monkeypatch.setattr(decode, "_plans", {})


@pytest.fixture
def counted(monkeypatch):
    """The calls of the two kernels and of the launches that they replace."""
    calls = []
    names = "decode_gate_up", "decode_down", "decode_fp8_gate_up", "decode_fp8_down", "group_by_expert", "weighted_sum"
    for name in names:
        module = decode if name.startswith("decode") else launches
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=function, **options: calls.append(n) or f(*a, **options))
    return calls


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
    for tensor in (*workspace._whole.activated, *workspace._whole.rows):
        tensor.fill_(float("nan"))
    out = torch.full_like(given["x"], float("nan"))
    assert fused_experts(**given, **options, out=out, workspace=workspace) is out
    assert counted == ["decode_gate_up", "decode_down"]
    assert wrong(out, given, **options) is None
    given["topk_ids"] = given["topk_ids"].t().contiguous().t()
    assert torch.equal(fused_experts(**given, **options), out)


FP8_SHAPES = [(1, 2, 4, 320, 128), (2, 3, 64, 256, 128), (1, 1, 1, 576, 256)]


@pytest.mark.parametrize("shape", FP8_SHAPES)
@pytest.mark.parametrize("shared, ids_dtype", [(True, torch.int32), (False, torch.int64)])
def test_fp8_equals_reference(shape, shared, ids_dtype, counted, device, monkeypatch):
    monkeypatch.setattr(decode, "MIN_FP8_WARPS", 1)
    given = make_fp8_inputs(*shape, device, shared, ids_dtype)
    tokens, topk = given["topk_ids"].shape
    workspace = ExpertsWorkspace(tokens, topk, given["w13"], given["w2"])
    workspace._whole.rows[0].fill_(float("nan"))
    out = torch.full_like(given["x"], float("nan"))
    assert fused_experts(**given, out=out, workspace=workspace) is out
    assert counted == ["decode_fp8_gate_up", "decode_fp8_down"]
    assert wrong(out, given) is None
    given["topk_ids"] = given["topk_ids"].t().contiguous().t()
    assert torch.equal(fused_experts(**given), out)


def make_fp8_inputs(tokens, topk, experts, hidden, intermediate, device, shared=True, ids_dtype=torch.int32):
    """As `make_inputs`, with weights in FP8."""
    given = make_inputs(tokens, topk, experts, hidden, intermediate, "cpu", None, shared, ids_dtype)
    for name in ("w13", "w2"):
        given[name], given[f"{name}_scale"] = quantise_blocks(given[name])
    return {name: tensor.to(device) for name, tensor in given.items()}


@SIMULATED
def test_the_number_of_columns_does_not_matter(device, monkeypatch):
    """A warp with one or two columns computes the same bits."""
    given, made = make_inputs(*SHAPES[0], device), []
    make = decode.make_decode_gate_up_kernel
    monkeypatch.setattr(decode, "make_decode_gate_up_kernel", lambda shape, *a: made.append(shape) or make(shape, *a))
    results = []
    for columns in (1, 2):
        shape = lambda *sizes, columns=columns: kernel_decode.DecodeShape(*sizes[:-1], columns)
        monkeypatch.setattr(decode, "DecodeShape", shape)
        monkeypatch.setattr(decode, "_plans", {})
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
def test_choice_in_bf16(tokens, topk, experts, decodes):
    w13, w2 = torch.empty(experts, 128, 64).bfloat16(), torch.empty(experts, 64, 64).bfloat16()
    choose = lambda w13, w2: decode.uses_decode_kernels(check_weights(w13, w2), tokens, topk, w13, w2)
    assert choose(w13, w2) == decodes
    assert not choose(w13.mT.contiguous().mT, w2)


@pytest.mark.parametrize(
    "tokens, topk, hidden, intermediate, decodes",
    [
        (1, 8, 7168, 2048, True),
        (4, 8, 7168, 2048, True),
        (8, 8, 7168, 2048, False),  # assignments share experts
        (1, 8, 7168, 256, False),  # too few warps
        (1, 17, 7168, 2048, False),
        (1, 8, 2048, 2048, False),  # no memory for the activations
        (1, 8, 16384, 5248, False),  # nor shared memory
    ],
)
def test_choice_in_fp8(tokens, topk, hidden, intermediate, decodes):
    w13, w2 = (
        torch.empty(256, *shape, device="meta", dtype=torch.float8_e4m3fn)
        for shape in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    shape = check_weights(w13, w2)._replace(device=torch.device("cpu"))
    assert decode.uses_decode_kernels(shape, tokens, topk, w13, w2) == decodes


@SIMULATED
def test_dependent_launch_in_fp8(device, monkeypatch):
    given = make_fp8_inputs(*FP8_SHAPES[0], device)
    t = ExpertsTensors(**given)
    activated, out = torch.empty(2, 128), torch.empty_like(t.x)
    late = LateInputs(kernel_decode_fp8, monkeypatch)
    late(t.x, t.topk_ids)
    decode.decode_fp8_gate_up(t, activated)
    late(activated, t.shared, t.topk_weights)
    decode.decode_fp8_down(t, activated, out)
    assert wrong(out, given) is None


@SIMULATED
def test_dependent_launch(device, monkeypatch):
    """What the kernel before writes arrives when a thread calls griddepcontrol_wait; ids are there for the second."""
    given = make_inputs(*SHAPES[0], device)
    t, activation = ExpertsTensors(**given), check_activation("silu", 1.702, None)
    activated, out = torch.empty(3, 64).bfloat16(), torch.empty_like(t.x)
    late = LateInputs(kernel_decode, monkeypatch)
    late(t.x, t.topk_ids)
    decode.decode_gate_up(t, activation, activated)
    late(activated, t.shared, t.topk_weights)
    decode.decode_down(t, activated, out)
    assert wrong(out, given) is None


class LateInputs:
    """Tensors that the kernel before writes: poisoned until a thread calls griddepcontrol_wait."""

    def __init__(self, module, monkeypatch):
        self.values, wait = [], module.griddepcontrol_wait
        monkeypatch.setattr(module, "griddepcontrol_wait", lambda: self.arrive() or wait())

    def __call__(self, *tensors):
        self.values = [(tensor, tensor.clone()) for tensor in tensors]
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(0xFF)

    def arrive(self):
        for tensor, value in self.values:
            tensor.copy_(value)


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
    module = changed(kernel_decode, *WRONG[name])
    for maker in ("make_decode_gate_up_kernel", "make_decode_down_kernel"):
        monkeypatch.setattr(decode, maker, module[maker])
    given = make_inputs(2, 3, 96, 320, 64, device)
    assert is_rejected(lambda seed: wrong(fused_experts(**given), given), seeds=1)


@SIMULATED
def test_the_check_accepts_right_kernels(few_loads, device):
    given = make_inputs(2, 3, 96, 320, 64, device)
    assert wrong(fused_experts(**given), given) is None


WRONG_FP8 = {
    "up with the scales of gate": ("scale * scales[2 * i + 1], products[1]", "scale * scales[2 * i], products[1]"),
    "scales of x of the first group": ("scale = x_scales[(start + i) >> 1]\n", "scale = x_scales[0]\n"),
    "gate and up exchanged": ("(rounded_gate, rounded_up)", "(rounded_up, rounded_gate)"),
    "words in another order": ("uint32(a[1]), uint32(b[1])", "uint32(a[2]), uint32(b[2])"),
    "activations of the first expert": ("first_scale = token * topk + warp", "first_scale = token * topk"),
    "the last expert is left out": ("for k in range(topk):\n      ", "for k in range(topk - 1):\n      "),
    "eight rows twice": ("weights + 8 * intermediate + CHUNK", "weights + CHUNK"),
}


@SIMULATED
@pytest.mark.parametrize("name", [None, *WRONG_FP8])
def test_wrong_fp8_kernels_are_rejected(name, device, monkeypatch):
    monkeypatch.setattr(decode, "MIN_FP8_WARPS", 1)
    monkeypatch.setattr(decode, "_plans", {})
    if name:
        module = changed(kernel_decode_fp8, *WRONG_FP8[name])
        for maker in ("make_decode_fp8_gate_up_kernel", "make_decode_fp8_down_kernel"):
            monkeypatch.setattr(decode, maker, module[maker])
    given = make_fp8_inputs(2, 3, 64, 256, 128, device)
    for scales in ("w13_scale", "w2_scale"):  # blocks differ
        given[scales] *= torch.rand(given[scales].shape, generator=torch.Generator().manual_seed(0)).to(device) + 0.5
    assert is_rejected(lambda seed: wrong(fused_experts(**given), given), seeds=1) == bool(name)


# On a GPU: real sizes, and launches that overlap


LARGE = {"bf16": (1, 9, 64, 7168, 256), "fp8": (1, 8, 16, 7168, 1024)}


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
    KERNELS[f"second {_shape}"] = f"make_decode_down_kernel(DecodeShape{(*_shape, 2)}, False)", _SECOND, 128, False


_FP8_FIRST = "uint16*", "uint8*", "float32*", "int32*", "float32*", "int64", "int64"
_FP8_SECOND = "float32*", "uint8*", "float32*", "int32*", "float32*", "uint16*", "uint16*", "int64", "int64"
_FP8_SHAPE = "DecodeFp8Shape(256, 7168, 2048, 8)"
FP8_KERNELS = {
    "first": (f"make_decode_fp8_gate_up_kernel({_FP8_SHAPE})", _FP8_FIRST, 256, False),
    "second": (f"make_decode_fp8_down_kernel({_FP8_SHAPE}, True)", _FP8_SECOND, 256, False),
}


def test_the_machine_code_in_fp8():
    """16-byte loads, no spills; two CTAs of 256 threads fit into the registers of an SM."""
    for name, report in compile_apart("from moe_numba.moe_layer.kernel_decode_fp8 import *", FP8_KERNELS).items():
        assert report.spilled_bytes == 0 and report.stack_bytes == 0 and report.registers <= 128, name
        if report.opcodes is not None:
            assert sum(opcode.startswith("LDG") and ".128" in opcode for opcode in report.opcodes) >= 9, name


def test_the_machine_code():
    """16-byte loads, no spills; three CTAs of 128 threads fit into the registers of an SM."""
    for name, report in compile_apart("from moe_numba.moe_layer.kernel_decode import *", KERNELS).items():
        assert report.spilled_bytes == 0 and report.stack_bytes == 0 and report.registers <= 168, name
        if report.opcodes is not None:
            wide = [opcode for opcode in report.opcodes if opcode.startswith("LDG") and ".128" in opcode]
            assert len(wide) >= 5, name  # four of weights at once, and one of x
