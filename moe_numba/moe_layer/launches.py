"""The launches of ``fused_experts``, in order, for each format of weights."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_numba.grouped_gemm.call.checks import has_wgmma, is_mn_major
from moe_numba.grouped_gemm.call.plan import group_gemm
from moe_numba.grouped_gemm.w4.launch import group_gemm as group_gemm_w4
from moe_numba.moe_layer.gemv.plan import decode_launches
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.per_token_quant.api import per_token_quant_fp8, silu_and_mul_quant_fp8
from moe_numba.moe_layer.permute.api import permute_cast_to_fp8, permute_fp8, permute_tokens
from moe_numba.moe_layer.silu_and_mul.api import Activation, silu_and_mul
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import BF16, FP8_BLOCK, FP8_TENSOR, MXFP4, ExpertsShape
from moe_numba.moe_layer.workspace import Intermediates, is_permuted
from moe_numba.quantise.fp8_cast import per_token_cast_to_fp8

Launches = dict[str, Callable[[], Any]]
# With given scales: fewest assignments for which the first grouped GEMM computes the activation. Its tiles have twice
# as many weights. With one token of Mixtral, two assignments, the layer takes 104 us with it, and 100 without (H200).
MIN_ASSIGNMENTS_TO_FUSE = 3


class ExpertsTensors(NamedTuple):
    """The tensors of a call of ``fused_experts``, with their names in messages."""

    x: Any
    w13: Any
    w2: Any
    topk_weights: Any
    topk_ids: Any
    w13_scale: Any = None
    w2_scale: Any = None
    shared: Any = None
    w13_bias: Any = None
    w2_bias: Any = None
    a1_scale: Any = None
    a2_scale: Any = None
    x_scale: Any = None


class Adapters(NamedTuple):
    """LoRA adapters of a call, or None: w13 + w13_b @ w13_a is multiplied by x, and w2 + w2_b @ w2_a.

    They are bfloat16, [experts, rank, inputs] and [experts, outputs, rank], and contiguous in the dimension in which
    the weight is. ``rank`` is a multiple of 16.
    """

    w13_a: Any
    w13_b: Any
    w2_a: Any
    w2_b: Any
    w13_z: Any = None  # memory for the product of ``a`` with each row's input, [rows, rank]
    w2_z: Any = None


class ExpertsCall(NamedTuple):
    """A call of ``fused_experts``, whose arguments have been checked."""

    tensors: ExpertsTensors
    shape: ExpertsShape
    activation: Activation
    fuses: bool  # whether the first grouped GEMM computes the activation
    decodes: bool  # whether the two kernels for few tokens compute all
    memory: Intermediates
    use_fast_accum: bool = False
    keeps_gate_up: bool = False  # in bfloat16: whether the memory has them afterwards, for a backward
    adapters: Adapters | None = None  # in bfloat16, without ``decodes``

    @property
    def permutes(self):
        """Whether tokens are stored in the order of the experts."""
        return self.adapters is not None or is_permuted(self.shape, self.tensors.topk_ids.numel())

    @property
    def group_sizes(self):
        """Arguments of both grouped GEMMs: group sizes, and first rows of the groups."""
        seqlens, cu_seqlens, *_ = self.memory.routing
        return dict(seqlens=seqlens, cu_seqlens=cu_seqlens)

    @property
    def gathered(self):
        """Option of the first grouped GEMM."""
        return {} if self.permutes else dict(gather_indices=self.memory.routing[2])

    @property
    def inverse_indices(self):
        """Row of each assignment."""
        return self.memory.routing[3]

    @property
    def num_valid_rows(self):
        """Number of rows that belong to an expert."""
        return self.memory.routing[1][-1:]


def can_fuse_activation(t: ExpertsTensors, format_: str, activation: Activation, batch_invariant: bool = False) -> bool:
    """Return whether the first grouped GEMM can compute the activation in its epilogue.

    With FP8 weights and a scale per expert it needs the scales of x and of the activations: a row's own scale is not
    known before all of its columns are. See also ``MIN_ASSIGNMENTS_TO_FUSE``; a ``batch_invariant`` call ignores it.
    """
    if format_ in (FP8_BLOCK, MXFP4):
        return True
    supported = (activation.is_plain or activation.name == "swigluoai") and has_wgmma(t.w13.device)
    if format_ == FP8_TENSOR:
        has_scales = t.a1_scale is not None and t.a2_scale is not None
        is_many = batch_invariant or t.topk_ids.numel() >= MIN_ASSIGNMENTS_TO_FUSE
        return supported and has_scales and is_many
    return supported and not is_mn_major(t.w13)


def launches_of(call: ExpertsCall, out: torch.Tensor) -> Launches:
    """Return {name: launch} of a call, in order.

    Intermediate results are in the call's memory, so that a launch can be replaced, or repeated alone.
    """
    t, memory, indices = call.tensors, call.memory, call.inverse_indices
    if call.decodes:
        return decode_launches(call, out)
    return {
        "group_by_expert": partial(group_by_expert, t.topk_ids, len(t.w13), out=memory.routing),
        **_EXPERTS[call.shape.format](call),
        "weighted_sum": partial(weighted_sum, memory.rows[0], indices, t.topk_weights, t.shared, out=out),
    }


def _bf16_rows(call):
    """Return the first grouped GEMM's x in bfloat16, and the launch that permutes it, if one does."""
    if not call.permutes:
        return call.tensors.x, {}
    (x,) = call.memory.x
    return x, {"permute": partial(permute_tokens, call.tensors.x, call.inverse_indices, out=x)}


def _gemm_activation(activation):
    """Return the options of a grouped GEMM with an activation."""
    return {} if activation.is_plain else activation.options


def _bf16(call):
    t, (gate_up,), (activated,), (rows,) = call.tensors, call.memory.gate_up, call.memory.activated, call.memory.rows
    x, launches = _bf16_rows(call)
    multiply = partial(group_gemm, "none", **call.group_sizes)
    first = partial(multiply, x=x, weight=t.w13, bias=t.w13_bias, early_weight=call.permutes, **call.gathered)
    adapters, second_low = call.adapters or Adapters(None, None, None, None), {}
    if adapters.w13_a is not None:
        launches["w13_a"] = partial(multiply, x=x, weight=adapters.w13_a, out=adapters.w13_z)
        first = partial(first, x_low=adapters.w13_z, weight_low=adapters.w13_b)
    if call.fuses:
        outputs = dict(out=(activated, gate_up), store_gate_up=True) if call.keeps_gate_up else dict(out=activated)
        launches["gate_up"] = partial(first, silu_and_mul=True, **outputs, **_gemm_activation(call.activation))
    else:
        launches["gate_up"] = partial(first, out=gate_up)
        options = dict(num_valid_rows=call.num_valid_rows, **call.activation.options)
        launches["activation"] = partial(silu_and_mul, gate_up, out=activated, **options)
    if adapters.w2_a is not None:
        launches["w2_a"] = partial(multiply, x=activated, weight=adapters.w2_a, out=adapters.w2_z)
        second_low = dict(x_low=adapters.w2_z, weight_low=adapters.w2_b)
    second = partial(multiply, x=activated, weight=t.w2, bias=t.w2_bias, early_weight=True, **second_low)
    launches["down"] = partial(second, out=rows)
    return launches


def _mxfp4(call):
    t, (activated,), (rows,) = call.tensors, call.memory.activated, call.memory.rows
    x, launches = _bf16_rows(call)
    multiply = partial(group_gemm_w4, **call.group_sizes)
    first = dict(early_weight=call.permutes, **call.gathered, **_gemm_activation(call.activation))
    first |= dict(weight=t.w13, bias=t.w13_bias, out=activated, silu_and_mul=True)
    launches["gate_up"] = partial(multiply, x=x, **first)
    launches["down"] = partial(multiply, x=activated, weight=t.w2, bias=t.w2_bias, out=rows, early_weight=True)
    return launches


def _fp8_block(call):
    t, memory = call.tensors, call.memory
    (x, x_scale), launches = memory.x, {}
    is_given = t.x_scale is not None
    if call.permutes and is_given:
        launches["permute"] = partial(permute_fp8, t.x, t.x_scale, call.inverse_indices, out=memory.x)
    elif call.permutes:
        launches["permute"] = partial(permute_cast_to_fp8, t.x, call.inverse_indices, out=memory.x)
    elif is_given:
        x, x_scale = t.x, t.x_scale
    else:
        launches["cast"] = partial(per_token_cast_to_fp8, t.x, out=memory.x)
    multiply = partial(group_gemm, "block", **call.group_sizes)
    first = dict(x=x, x_scale=x_scale, weight=t.w13, w_scale=t.w13_scale, early_weight=bool(launches), **call.gathered)
    launches["gate_up"] = partial(multiply, out=memory.activated, silu_and_mul=True, **first)
    (activated, scale), (rows,) = memory.activated, memory.rows
    second = dict(x=activated, x_scale=scale, weight=t.w2, w_scale=t.w2_scale, early_weight=True)
    launches["down"] = partial(multiply, out=rows, **second)
    return launches


def _fp8_tensor(call):
    """A row's own scale is a factor of the grouped GEMM's row."""
    t, memory = call.tensors, call.memory
    (x, x_scale), (gate_up,), (activated, scale), (rows,) = memory.x, memory.gate_up, memory.activated, memory.rows
    quantise = partial(per_token_quant_fp8, t.x, t.a1_scale, call.inverse_indices, call.permutes, out=memory.x)
    launches: Launches = {"permute" if call.permutes else "cast": quantise}
    multiply = partial(group_gemm, "tensor", early_weight=True, use_fast_accum=call.use_fast_accum, **call.group_sizes)
    first = partial(multiply, x=x, weight=t.w13, y_scale=t.w13_scale, **call.gathered)
    second = partial(multiply, x=activated, weight=t.w2, y_scale=t.w2_scale, out=rows)
    if call.fuses:
        options = dict(x_scale=t.a1_scale, silu_and_mul=True, **_gemm_activation(call.activation))
        launches["gate_up"] = partial(first, out=activated, out_scale=t.a2_scale, **options)
        launches["down"] = partial(second, x_scale=t.a2_scale)
    else:
        launches["gate_up"] = partial(first, out=gate_up, row_weights=x_scale)
        options = dict(num_valid_rows=call.num_valid_rows, **call.activation.options)
        launches["activation"] = partial(silu_and_mul_quant_fp8, gate_up, t.a2_scale, out=memory.activated, **options)
        launches["down"] = partial(second, row_weights=scale)
    return launches


_EXPERTS = {BF16: _bf16, FP8_BLOCK: _fp8_block, FP8_TENSOR: _fp8_tensor, MXFP4: _mxfp4}
