"""The layer stage by stage, each computed by its launch or by its torch reference."""

from collections.abc import Collection
from functools import partial

import torch

from moe_numba.gate import biased_grouped_topk
from moe_numba.gate.reference import biased_grouped_topk as reference_topk
from moe_numba.grouped_gemm import reference as gemm
from moe_numba.moe_layer import reference
from moe_numba.moe_layer.fused_experts import check_experts
from moe_numba.moe_layer.launches import ExpertsCall, can_fuse_activation, launches_of
from moe_numba.moe_layer.weights import BF16, FP8, FP8_BLOCK, FP8_TENSOR, MXFP4, scaling_of
from moe_numba.moe_layer.workspace import ExpertsWorkspace
from moe_numba.quantise.reference import per_token_cast_to_fp8

# Stages, and the launches that compute them, of `launches_of`. The gate is in front of these.
LAUNCHES = {
    "permute": ("group_by_expert", "permute"),
    "quantise": ("cast", "permute"),  # which does both in FP8
    "gate_up": ("gate_up",),
    "activation": ("activation",),
    "down": ("down",),
    "sum": ("weighted_sum",),
}
_QUANTISES = {FP8_BLOCK, FP8_TENSOR}
_ACTIVATES = {BF16, FP8_TENSOR}  # others compute the activation only in the gate_up GEMM's epilogue
_NAMES = {BF16: "bfloat16", FP8_BLOCK: "FP8", FP8_TENSOR: "FP8", MXFP4: "MXFP4"}


def check_stages(names, format_):
    """Return the names of stages to replace as a frozenset; refuse a name that is no stage with these weights."""
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"reference is the {type(names).__name__} {names!r}; it must be a set of stages")
    absent = ["quantise"] * (format_ not in _QUANTISES) + ["activation"] * (format_ not in _ACTIVATES)
    allowed = [name for name in ("gate", *LAUNCHES) if name not in absent]
    for name in names:
        if name not in allowed:
            stages = f"the stages with {_NAMES[format_]} weights are {', '.join(allowed)}"
            raise ValueError(f"reference has {name!r}; {stages}")
    return frozenset(names)


def route(logits, correction_bias, topk, options, replaced):
    """Return the weights [tokens, topk] and ids of the gate."""
    gate = reference_topk if "gate" in replaced else biased_grouped_topk
    return gate(logits, correction_bias, topk, **options)


def run_experts(t, activation, replaced, use_fast_accum=False):
    """Compute the experts as :func:`fused_experts`, with the stages in ``replaced`` in torch.

    ``t``: an ``ExpertsTensors``. The torch references of GEMMs copy the group sizes to the host, which synchronises.
    """
    shape, chosen = check_experts(t, *activation)
    out = torch.empty_like(t.x)
    if not len(t.x):
        return out
    workspace = ExpertsWorkspace(*t.topk_ids.shape, t.w13, t.w2, scaling_of(t.w13_scale))
    # A launch that computes two stages is replaced by two, if only one of them is computed in torch.
    fuses = can_fuse_activation(t, shape.format, chosen)
    if shape.format in _ACTIVATES and replaced & {"gate_up", "activation"}:
        fuses = False
    call = ExpertsCall(t, shape, chosen, fuses, False, workspace.intermediates(len(t.x)), use_fast_accum)
    in_torch = {name for stage in replaced - {"gate"} for name in LAUNCHES[stage]}
    if shape.format in _QUANTISES and "quantise" not in replaced:
        in_torch.discard("permute")
    references = references_of(call, out)
    for name, launch in launches_of(call, out).items():
        (references[name] if name in in_torch else launch)()
    return out


def references_of(call, out):
    """Return {name: function in torch} for each of the launches of a call, with the same results in its memory."""
    t, memory = call.tensors, call.memory
    routing = lambda: reference.group_by_expert(t.topk_ids, len(t.w13))
    total = lambda: [reference.weighted_sum(memory.rows[0], call.inverse_indices, t.topk_weights, t.shared)]
    return {
        "group_by_expert": partial(_store, memory.routing, routing),
        "cast": lambda: _quantise(call),
        "permute": lambda: _quantise(call) if call.shape.format in _QUANTISES else _permute([t.x], call),
        "gate_up": lambda: _gate_up(call),
        "activation": lambda: _activate(call, memory.gate_up[0]),
        "down": lambda: _down(call),
        "weighted_sum": partial(_store, [out], total),
    }


def _store(outputs, compute):
    for out, result in zip(outputs, compute(), strict=True):
        out.copy_(result)


def _permute(tensors, call):
    """Store tensors with a row per token in the memory for x, in the rows of the grouped GEMM."""
    indices = call.inverse_indices.flatten().long()
    valid = indices >= 0
    tokens = torch.arange(len(call.tensors.x), device=indices.device).repeat_interleave(call.inverse_indices.shape[1])
    for out, tensor in zip(call.memory.x, tensors, strict=True):
        if out.dtype == FP8:  # as bytes, since torch indexes no FP8 tensors on some devices
            out, tensor = out.view(torch.uint8), tensor.view(torch.uint8)
        out[indices[valid]] = tensor[tokens[valid]]


def _quantise(call):
    t, memory = call.tensors, call.memory
    if call.shape.format == FP8_BLOCK:
        results = per_token_cast_to_fp8(t.x)
    else:
        results = reference.quantise_rows(t.x.float(), t.a1_scale)
    if call.permutes:
        _permute(results, call)
        return
    memory.x[0].copy_(results[0])
    if call.shape.format == FP8_BLOCK:
        memory.x[1].copy_(results[1])
    else:
        rows = memory.routing[2]
        memory.x[1].copy_(gemm.gather_rows(results[1][:, None], rows)[:, 0])


def _product(x, w, call, bias=None):
    """Return the rows of a grouped GEMM in float64, NaN beyond the last."""
    seqlens, cu_seqlens, *_ = call.memory.routing
    starts = cu_seqlens[:-1]
    return gemm.finish_rows(gemm.group_gemm(x, w, seqlens, starts), seqlens, starts, bias)


def _stacked(call, which):
    """Return w13 or w2 of all experts in float32."""
    weights_of = partial(reference.float_weights, call.tensors, call.shape.format, call.activation.interleaved)
    return torch.stack([weights_of(expert)[which] for expert in range(call.shape.num_experts)])


def _gate_up(call):
    t, memory, format_ = call.tensors, call.memory, call.shape.format
    w13 = _stacked(call, 0)
    x = t.x.float() if format_ in (BF16, MXFP4) and not call.permutes else memory.x[0].float()
    x = x if call.permutes else gemm.gather_rows(x, memory.routing[2])
    if format_ == FP8_BLOCK:
        scales = memory.x[1] if call.permutes else gemm.gather_rows(memory.x[1], memory.routing[2])
        x = reference.dequantise_rows(x, scales)
    elif format_ == FP8_TENSOR:
        x = x * memory.x[1][:, None]
    product = _product(x, w13, call, t.w13_bias)
    if format_ in _ACTIVATES:
        memory.gate_up[0].copy_(product)
    else:
        _activate(call, product.bfloat16() if format_ == FP8_BLOCK else product)


def _activate(call, gate_up):
    activated, memory = reference.silu_and_mul(gate_up, **call.activation.options), call.memory.activated
    if call.shape.format == FP8_BLOCK:
        results = gemm.quantise_rows(activated)
    elif call.shape.format == FP8_TENSOR:
        results = reference.quantise_rows(activated, call.tensors.a2_scale)
    else:
        results = [activated]
    for out, result in zip(memory, results, strict=True):
        out.copy_(result)


def _down(call):
    t, memory, format_ = call.tensors, call.memory, call.shape.format
    w2 = _stacked(call, 1)
    x = memory.activated[0].float()
    if format_ == FP8_BLOCK:
        x = reference.dequantise_rows(x, memory.activated[1])
    elif format_ == FP8_TENSOR:
        x = x * (memory.activated[1][:, None] if t.a2_scale is None else t.a2_scale)
    memory.rows[0].copy_(_product(x, w2, call, t.w2_bias))
