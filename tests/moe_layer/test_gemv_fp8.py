"""Test the two kernels of fused_experts for a few tokens in FP8 with block scales."""

import pytest
import torch
from helpers.decode import count_launches, make_fp8_inputs, run_on_late_inputs, wrong
from helpers.wrong_kernels import changed, is_rejected

from moe_numba import simulator
from moe_numba.moe_layer import ExpertsWorkspace, fused_experts
from moe_numba.moe_layer.gemv import fp8_blocks as gemv_fp8_blocks
from moe_numba.moe_layer.gemv import plan as gemv_plan
from moe_numba.moe_layer.weights import FP8_BLOCK, check_weights
from moe_numba.runtime.sass import compile_apart

SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")
SHAPES = [(1, 2, 4, 320, 128), (2, 3, 64, 256, 128), (1, 1, 1, 576, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared, ids_dtype", [(True, torch.int32), (False, torch.int64)])
def test_equals_reference(shape, shared, ids_dtype, device, monkeypatch):
    counted = count_launches(monkeypatch)
    monkeypatch.setattr(gemv_plan, "MIN_FP8_WARPS", 1)
    given = make_fp8_inputs(*shape, device, shared, ids_dtype)
    tokens, topk = given["topk_ids"].shape
    workspace = ExpertsWorkspace(tokens, topk, given["w13"], given["w2"])
    workspace.buffer.fill_(0xFF)
    out = torch.full_like(given["x"], float("nan"))
    assert fused_experts(**given, out=out, workspace=workspace) is out
    assert counted == ["decode_fp8_gate_up", "decode_fp8_down"]
    assert wrong(out, given) is None
    given["topk_ids"] = given["topk_ids"].t().contiguous().t()
    assert torch.equal(fused_experts(**given), out)


@pytest.mark.parametrize(
    "tokens, topk, hidden, intermediate, decodes",
    [
        (1, 8, 7168, 2048, True),
        (1, 8, 5120, 1024, True),  # 126 MB
        (4, 8, 7168, 2048, True),
        (8, 8, 7168, 2048, False),  # assignments share experts
        (1, 8, 7168, 256, False),  # too few warps
        (1, 17, 7168, 2048, False),
        (1, 8, 2048, 2048, False),  # no memory for the activations
        (1, 8, 16384, 5248, False),  # nor shared memory
    ],
)
def test_choice(tokens, topk, hidden, intermediate, decodes, monkeypatch, device):
    """By the sizes; the bytes of the weights decide, too."""
    w13, w2 = (
        torch.empty(256, *shape, device="meta", dtype=torch.float8_e4m3fn)
        for shape in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    shape = check_weights(w13, w2)._replace(device=torch.device(device))
    few_bytes = tokens * topk * 3 * hidden * intermediate <= gemv_plan.MAX_WEIGHT_BYTES[FP8_BLOCK]
    assert gemv_plan.uses_decode_kernels(shape, tokens, topk, w13, w2) == (decodes and few_bytes)
    monkeypatch.setitem(gemv_plan.MAX_WEIGHT_BYTES, FP8_BLOCK, 1 << 40)
    assert gemv_plan.uses_decode_kernels(shape, tokens, topk, w13, w2) == decodes


@SIMULATED
def test_dependent_launch(device, monkeypatch):
    given = make_fp8_inputs(*SHAPES[0], device)
    launches, activated = (gemv_plan.decode_fp8_gate_up, gemv_plan.decode_fp8_down), torch.empty(2, 128)
    out = run_on_late_inputs(gemv_fp8_blocks, *launches, given, activated, monkeypatch)
    assert wrong(out, given) is None


WRONG = {
    "up with the scales of gate": ("scale * scales[2 * i + 1], products[1]", "scale * scales[2 * i], products[1]"),
    "scales of x of the first group": ("scale = x_scales[(start + i) >> 1]\n", "scale = x_scales[0]\n"),
    "gate and up exchanged": ("(rounded_gate, rounded_up)", "(rounded_up, rounded_gate)"),
    "words in another order": ("uint32(a[1]), uint32(b[1])", "uint32(a[2]), uint32(b[2])"),
    "activations of the first expert": ("first_scale = token * topk + warp", "first_scale = token * topk"),
    "the last expert is left out": ("for k in range(topk):\n      ", "for k in range(topk - 1):\n      "),
    "eight rows twice": ("weights + 8 * intermediate + CHUNK", "weights + CHUNK"),
}


@SIMULATED
@pytest.mark.parametrize("name", [None, *WRONG])
def test_wrong_kernels_are_rejected(name, device, monkeypatch):
    monkeypatch.setattr(gemv_plan, "MIN_FP8_WARPS", 1)
    monkeypatch.setattr(gemv_plan, "_plans", {})
    if name:
        module = changed(gemv_fp8_blocks, *WRONG[name])
        for maker in ("make_decode_fp8_gate_up_kernel", "make_decode_fp8_down_kernel"):
            monkeypatch.setattr(gemv_plan, maker, module[maker])
    given = make_fp8_inputs(2, 3, 64, 256, 128, device)
    for scales in ("w13_scale", "w2_scale"):  # blocks differ
        given[scales] *= torch.rand(given[scales].shape, generator=torch.Generator().manual_seed(0)).to(device) + 0.5
    assert is_rejected(lambda seed: wrong(fused_experts(**given), given), seeds=1) == bool(name)


_FP8_FIRST = "uint16*", "uint8*", "float32*", "int32*", "float32*", "int64", "int64"
_FP8_SECOND = "float32*", "uint8*", "float32*", "int32*", "float32*", "uint16*", "uint16*", "int64", "int64"
_FP8_SHAPE = "DecodeFp8Shape(256, 7168, 2048, 8)"
KERNELS = {
    "first": (f"make_decode_fp8_gate_up_kernel({_FP8_SHAPE})", _FP8_FIRST, 256, False),
    "second": (f"make_decode_fp8_down_kernel({_FP8_SHAPE}, True)", _FP8_SECOND, 256, False),
}


def test_the_machine_code():
    """16-byte loads, no spills; two CTAs of 256 threads fit into the registers of an SM."""
    for name, report in compile_apart("from moe_numba.moe_layer.gemv.fp8_blocks import *", KERNELS).items():
        assert report.spilled_bytes == 0 and report.stack_bytes == 0 and report.registers <= 128, name
        if report.opcodes is not None:
            assert sum(opcode.startswith("LDG") and ".128" in opcode for opcode in report.opcodes) >= 9, name
