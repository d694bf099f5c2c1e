"""Test the two kernels of fused_experts for a few tokens with MXFP4 weights."""

import pytest
import torch
from helpers.decode import count_launches, make_mxfp4_inputs, run_on_late_inputs, wrong
from helpers.wrong_kernels import changed, is_rejected

from moe_numba import simulator
from moe_numba.moe_layer import ExpertsWorkspace, fused_experts
from moe_numba.moe_layer.gemv import mxfp4 as gemv_mxfp4
from moe_numba.moe_layer.gemv import plan as gemv_plan
from moe_numba.moe_layer.silu_and_mul.api import check_activation
from moe_numba.moe_layer.weights import check_weights, packed_shape
from moe_numba.runtime.sass import compile_apart

SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")
# tokens, topk, experts, hidden, intermediate; the last has more tiles along k than a lane loads at once
SHAPES = [(1, 3, 8, 192, 128), (2, 2, 64, 128, 64), (1, 1, 1, 1152, 64)]
GPT_OSS = dict(activation="swigluoai", limit=0.5)


@pytest.fixture(params=[1, 2048], ids=["few warps", "many warps"])
def warps(request, monkeypatch):
    """How many warps the plans want: with many, several warps have parts of k."""
    monkeypatch.setattr(gemv_plan, "MXFP4_WARPS", request.param)
    monkeypatch.setattr(gemv_plan, "_plans", {})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "bias, shared, ids_dtype, options",
    [
        (None, True, torch.int32, {}),
        (torch.bfloat16, False, torch.int64, GPT_OSS),
        (torch.float32, True, torch.int64, GPT_OSS),
    ],
)
def test_equals_reference(shape, bias, shared, ids_dtype, options, device, warps, monkeypatch):
    counted = count_launches(monkeypatch)
    layout = dict(gate_up="interleaved" if options else "stacked")
    given = make_mxfp4_inputs(*shape, device=device, bias=bias, shared=shared, ids_dtype=ids_dtype, **layout)
    tokens, topk = given["topk_ids"].shape
    workspace = ExpertsWorkspace(tokens, topk, given["w13"], given["w2"])
    workspace.buffer.fill_(0xFF)
    out = torch.full_like(given["x"], float("nan"))
    assert fused_experts(**given, **options, out=out, workspace=workspace) is out
    assert counted == ["decode_gate_up", "decode_down"]
    assert wrong(out, given, **options) is None
    given["topk_ids"] = given["topk_ids"].t().contiguous().t()
    assert torch.equal(fused_experts(**given, **options), out)


@pytest.mark.parametrize(
    "tokens, topk, hidden, intermediate, decodes",
    [
        (1, 4, 2880, 2880, True),  # gpt-oss
        (3, 4, 2880, 2880, False),  # assignments share experts
        (1, 17, 2880, 64, False),
        (1, 16, 256, 2880, False),  # no shared memory for the activations
        (1, 1, 24576, 64, False),  # nor for x
        (1, 8, 8192, 2048, False),  # 201 MB
    ],
)
def test_choice(tokens, topk, hidden, intermediate, decodes, device):
    sizes = dict(w13=(2 * intermediate, hidden), w2=(hidden, intermediate))
    shapes = (packed_shape(name, 32, *size) for name, size in sizes.items())
    w13, w2 = (torch.empty(shape, device="meta", dtype=torch.uint8) for shape in shapes)
    shape = check_weights(w13, w2)._replace(device=torch.device(device))
    assert gemv_plan.uses_decode_kernels(shape, tokens, topk, w13, w2) == decodes


def test_parts_of_k():
    """All warps of the kernels have a part, and the parts have about as many tiles each."""
    for warps, k, most in ((1, 2880, 4), (720, 2880, 4), (1440, 2880, 4), (10, 64, 4), (1, 320, 4), (4096, 2880, 4)):
        splits, tiles = gemv_plan._splits(warps, k, most), gemv_mxfp4.tiles_of(k)
        part = gemv_mxfp4.part_of(k, splits)
        assert 1 <= splits <= most and (splits - 1) * part < tiles <= splits * part
    assert gemv_plan._splits(720, 2880, 4) == 3 and gemv_plan._splits(4096, 2880, 4) == 1


@SIMULATED
def test_dependent_launch(device, monkeypatch):
    given = make_mxfp4_inputs(*SHAPES[0], device=device)
    activation, activated = check_activation("swigluoai", 1.702, 7.0), torch.empty(3, 128).bfloat16()
    first = lambda t, out: gemv_plan.decode_gate_up(t, activation, out)
    out = run_on_late_inputs(gemv_mxfp4, first, gemv_plan.decode_down, given, activated, monkeypatch)
    assert wrong(out, given, activation="swigluoai") is None


WRONG = {
    "gate and up exchanged": ("activate(gate, up)", "activate(up, gate)"),
    "steps of k exchanged": ("(uint32(b[2]), uint32(b[3]))", "(uint32(c[0]), uint32(c[1]))"),
    "the last part of k is left out": ("for split in range(splits):", "for split in range(splits - 1):"),
    "activations of the first expert": ("activated, token * topk + own, x_words", "activated, token * topk, x_words"),
    "scales of the first rows": ("8 * quarter + (lane >> 2))", "(lane >> 2))"),
    "biases of another column": ("int64(chosen) * hidden + column)", "int64(chosen) * hidden + column + 1)"),
    "vectors in another order": ("8 * q + index)]", "8 * q + (index ^ 1))]"),
    "the last expert is left out": ("for k in range(topk):\n      ", "for k in range(topk - 1):\n      "),
}


@SIMULATED
@pytest.mark.parametrize("name", [None, *WRONG])
def test_wrong_kernels_are_rejected(name, device, monkeypatch):
    monkeypatch.setattr(gemv_plan, "_plans", {})
    if name:
        module = changed(gemv_mxfp4, *WRONG[name])
        for maker in ("make_decode_mxfp4_gate_up_kernel", "make_decode_mxfp4_down_kernel"):
            monkeypatch.setattr(gemv_plan, maker, module[maker])
    given = make_mxfp4_inputs(2, 3, 64, 192, 128, device=device, bias=torch.float32)
    attempt = lambda seed: wrong(fused_experts(**given, **GPT_OSS), given, **GPT_OSS)
    assert is_rejected(attempt, seeds=1) == bool(name)


_POINTERS = "uint16*", "int32*", "uint16*", "int32*"
KERNELS = {
    "first": (
        'make_decode_mxfp4_gate_up_kernel(DecodeMxfp4Shape(32, 2880, 2880, 4, "bf16", 2), "swigluoai", 1.702, 7.0)',
        (*_POINTERS, "uint16*", "int64", "int64"),
        gemv_mxfp4.launch_bounds_of(256),
        False,
    ),
    "second": (
        'make_decode_mxfp4_down_kernel(DecodeMxfp4Shape(32, 2880, 2880, 4, "bf16", 3), False)',
        (*_POINTERS, "float32*", "uint16*", "uint16*", "int64", "int64"),
        gemv_mxfp4.launch_bounds_of(384),
        False,
    ),
}


def test_the_machine_code():
    """16-byte loads of the codes, no spills; 24 warps fit into the registers of an SM."""
    for name, report in compile_apart("from moe_numba.moe_layer.gemv.mxfp4 import *", KERNELS).items():
        assert report.spilled_bytes == 0 and report.stack_bytes == 0 and report.registers <= 80, name
        if report.opcodes is not None:
            assert sum(opcode.startswith("LDG") and ".128" in opcode for opcode in report.opcodes) >= 8, name
