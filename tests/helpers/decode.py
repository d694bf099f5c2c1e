"""Inputs, checks and late inputs for the tests of the kernels of fused_experts for a few tokens."""

import torch

from moe_numba.grouped_gemm.reference import mismatch, quantise_blocks
from moe_numba.grouped_gemm.w4.reference import quantise_mxfp4
from moe_numba.moe_layer import launches, pack_mxfp4_experts, reference
from moe_numba.moe_layer.gemv import plan as gemv_plan
from moe_numba.moe_layer.launches import ExpertsTensors
from moe_numba.ptx.intrinsic import simulated

BOUND = 4e-3  # activations are rounded to bfloat16 in another order than in the reference, and the sums once


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


def make_fp8_inputs(tokens, topk, experts, hidden, intermediate, device, shared=True, ids_dtype=torch.int32):
    """As `make_inputs`, with weights in FP8."""
    given = make_inputs(tokens, topk, experts, hidden, intermediate, "cpu", None, shared, ids_dtype)
    for name in ("w13", "w2"):
        given[name], given[f"{name}_scale"] = quantise_blocks(given[name])
    return {name: tensor.to(device) for name, tensor in given.items()}


def make_mxfp4_inputs(*shape, device, bias=None, shared=True, ids_dtype=torch.int32, gate_up="interleaved"):
    """As `make_inputs`, with weights in MXFP4."""
    given = make_inputs(*shape, "cpu", bias, shared, ids_dtype)
    given["w13"], given["w2"] = pack_mxfp4_experts(*quantise_mxfp4(given["w13"]), *quantise_mxfp4(given["w2"]), gate_up)
    return {name: tensor.to(device) for name, tensor in given.items()}


def wrong(result, given, **options):
    return mismatch(result, reference.fused_experts(**given, **options), BOUND)


def count_launches(monkeypatch):
    """Return a list that the names of called launches are appended to: the kernels' and those that they replace."""
    calls = []
    names = [f"decode_{format_}{part}" for format_ in ("", "fp8_") for part in ("gate_up", "down")]
    for name in (*names, "group_by_expert", "weighted_sum"):
        module = gemv_plan if name.startswith("decode") else launches
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=function, **options: calls.append(n) or f(*a, **options))
    return calls


class LateInputs:
    """Tensors that the kernel before writes: poisoned until a thread calls griddepcontrol_wait."""

    def __init__(self, module, monkeypatch):
        self.values, wait = [], module.griddepcontrol_wait
        monkeypatch.setattr(module, "griddepcontrol_wait", simulated(lambda: self.arrive() or wait(), ""))

    def __call__(self, *tensors):
        self.values = [(tensor, tensor.clone()) for tensor in tensors]
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(0xFF)

    def arrive(self):
        for tensor, value in self.values:
            tensor.copy_(value)


def run_on_late_inputs(module, first, second, given, activated, monkeypatch):
    """Return the result of two launches: what the kernel before each writes arrives when a thread waits for it.

    ``first(t, activated)`` and ``second(t, activated, out)`` launch kernels of ``module``. The ids are there for the
    second.
    """
    t, late = ExpertsTensors(**given), LateInputs(module, monkeypatch)
    out = torch.empty_like(t.x)
    late(t.x, t.topk_ids)
    first(t, activated)
    late(activated, t.shared, t.topk_weights)
    second(t, activated, out)
    return out
