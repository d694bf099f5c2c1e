"""``fused_experts``: the experts of an MoE layer on one GPU, from routed tokens to their sums."""

import torch

from moe_numba.expert_parallel.fp8_cast import per_token_cast_to_fp8
from moe_numba.grouped_gemm import group_gemm_bf16, group_gemm_blockwise_fp8, group_gemm_silu_and_mul_blockwise_fp8
from moe_numba.grouped_gemm.checks import check_gpu
from moe_numba.moe_layer.activation import silu_and_mul
from moe_numba.moe_layer.permute import permute_cast_to_fp8, permute_tokens
from moe_numba.moe_layer.routing import check_routing, group_by_expert
from moe_numba.moe_layer.unpermute import check_topk, weighted_sum
from moe_numba.moe_layer.workspace import (
    BLOCK,
    FP8,
    ExpertsWorkspace,
    check_weights,
    check_workspace,
    is_permuted,
    shape_of,
)
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import refuse_recording
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.torch_op import call_op, needs_dispatch, register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_device, check_tensor, make_outputs

_NAMES = "w13", "w2", "topk_weights", "topk_ids", "w13_scale", "w2_scale", "shared"
_ALIGNED = 0, 1, 2, 7  # x, w13, w2 and shared: read in 16-byte vectors
_plans: dict = {}


@torch_op
def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: ExpertsWorkspace | None = None,
) -> torch.Tensor:
    """Compute each token's experts, SwiGLU MLPs, and the weighted sum of their outputs.

    For each token: ``sum_k topk_weights[k] * w2[e] @ (silu(gate) * up)``, where e is ``topk_ids[k]`` and gate and up
    are the halves of ``w13[e] @ x``.

    Parameters
    ----------
    x : tensor [tokens, hidden], bfloat16
        Contiguous, 16-byte aligned.
    w13 : tensor [experts, 2 * intermediate, hidden], bfloat16 or float8_e4m3fn
        The first ``intermediate`` rows of an expert compute gate, the others up. Contiguous, 16-byte aligned; 1 to 512
        experts. ``hidden`` is a multiple of 64, ``intermediate`` of 64 (bfloat16) or 128 (FP8).
    w2 : tensor [experts, hidden, intermediate], dtype of w13
        Contiguous, 16-byte aligned.
    topk_weights : tensor [tokens, topk], float32
        Contiguous; ``topk`` is 1 to 64.
    topk_ids : tensor [tokens, topk], int32 or int64
        Any strides. An id outside of 0 to experts - 1, such as -1 for an expert of another rank, adds nothing.
    w13_scale : tensor [experts, 2 * intermediate / 128, hidden / 128], float32, optional
    w2_scale : tensor [experts, hidden / 128, intermediate / 128], float32, optional
        Scale of each 128 x 128 block of an FP8 weight, as in DeepSeek-V3; hidden / 128 is rounded up. Contiguous.
        Required for FP8 weights. Scales per tensor or per channel are not supported.
    shared : tensor [tokens, hidden], bfloat16, optional
        Added to the sum: the output of shared experts. Contiguous, 16-byte aligned.
    out : tensor [tokens, hidden], bfloat16, optional
        Contiguous, 16-byte aligned, to write into; it may be ``x`` or ``shared``.
    workspace : ExpertsWorkspace, optional
        Memory for intermediate results. With it and ``out`` the call neither allocates nor synchronises. Without it
        intermediate results are allocated. It is not an argument of the op: under torch.compile it is not used.

    Returns
    -------
    tensor [tokens, hidden], bfloat16
        From the library that ``x`` is from.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 8.0.

    Notes
    -----
    The parameters are those of vLLM's and SGLang's functions of this name. Launches for bfloat16 weights:
    :func:`group_by_expert`, :func:`group_gemm_bf16` of gathered rows, :func:`silu_and_mul`, :func:`group_gemm_bf16`,
    :func:`weighted_sum`. For FP8 weights: :func:`group_by_expert`, :func:`per_token_cast_to_fp8`,
    :func:`group_gemm_silu_and_mul_blockwise_fp8` of gathered rows, :func:`group_gemm_blockwise_fp8`,
    :func:`weighted_sum`. With more than 64 rows per expert on average the first grouped GEMM does not gather:
    :func:`permute_tokens` is launched before it, or :func:`permute_cast_to_fp8` in place of the cast. Results between
    launches are bfloat16, or FP8 with a scale per 128 elements of a row; sums are float32. Results are bit-identical
    from run to run. Group sizes stay on the GPU, so a CUDA graph that captures the call can be replayed with another
    routing.
    """
    if needs_dispatch(x, w13, w2, topk_weights):
        options = w13_scale, w2_scale, shared, out, workspace
        return call_op("fused_experts", x, w13, w2, topk_weights, topk_ids, *options)
    given = w13, w2, topk_weights, topk_ids, w13_scale, w2_scale, shared
    tensors: tuple = x, *(t if t is None else as_tensor(t, name) for t, name in zip(given, _NAMES, strict=True))
    key = tuple(t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    shape, outputs = _plans.get(key) or remember(_plans, key, _make_plan(*tensors))
    for i in _ALIGNED:
        if tensors[i] is not None:
            check_aligned(("x", *_NAMES)[i], tensors[i])
    tokens, topk = tensors[4].shape
    if workspace is None:
        refuse_recording("workspace is None; a prepared call needs one, which keeps its intermediate results")
        memory = ExpertsWorkspace(tokens, topk, *tensors[1:3])
    else:
        check_workspace(workspace, tokens, topk, shape)
        memory = workspace
    (result,) = outputs(out)
    if tokens:
        _launch(tensors, result, memory.intermediates(tokens))
    return result if out is None else out


def _launch(tensors, out, memory):
    """Launch the kernels. ``tensors``: x and the others in the order of `_NAMES`."""
    x, w13, w2, weights, ids, w13_scale, w2_scale, shared = tensors
    *groups, gather_indices, inverse_indices = group_by_expert(ids, len(w13), out=memory.routing)
    rows, permutes = memory.rows, is_permuted(shape_of(w13, w2), ids.numel())
    gathered = {} if permutes else dict(gather_indices=gather_indices)
    if w13.dtype == FP8:
        if permutes:
            permute_cast_to_fp8(x, inverse_indices, out=memory.x)
        else:
            per_token_cast_to_fp8(x, out=memory.x)
        values, scales = memory.x
        group_gemm_silu_and_mul_blockwise_fp8(values, w13, *groups, scales, w13_scale, out=memory.activated, **gathered)
        values, scales = memory.activated
        group_gemm_blockwise_fp8(values, w2, *groups, scales, w2_scale, out=rows)
    else:
        (activated,) = memory.activated
        if permutes:
            x = permute_tokens(x, inverse_indices, out=memory.x[0])
        group_gemm_bf16(x, w13, *groups, out=memory.gate_up, **gathered)
        silu_and_mul(memory.gate_up, out=activated, num_valid_rows=groups[1][-1:])
        group_gemm_bf16(activated, w2, *groups, out=rows)
    weighted_sum(rows, inverse_indices, weights, shared, out=out)


def _make_plan(x, w13, w2, *others):
    """Check the arguments; return the sizes of the experts and the :class:`Outputs`."""
    shape = _check(x, w13, w2, *others)
    outputs = Outputs((("tensor", tuple(x.shape), torch.bfloat16),), x.device, aligned=("tensor",))
    return shape, outputs


def _check(x, w13, w2, weights, ids, w13_scale, w2_scale, shared):
    """Check the arguments; return the sizes of the experts."""
    check_tensor("x", x, dtype=torch.bfloat16, shape=("tokens", "hidden"), contiguous=True)
    check_device(x.device, "x")
    check_gpu(x.device)
    check_weights(w13, w2)
    shape, place = shape_of(w13, w2), (x.device, "x")
    check_tensor("w13", w13, device=place)
    tokens, hidden = x.shape
    if hidden != shape.hidden:
        raise ValueError(f"x has {hidden} columns; it must have w13's hidden, {shape.hidden}")
    check_topk("topk_ids", check_routing(ids, shape.num_experts)[1])
    check_tensor("topk_ids", ids, shape=(tokens, "topk"), device=place)
    check_tensor("topk_weights", weights, dtype=torch.float32, shape=tuple(ids.shape), contiguous=True, device=place)
    for name, scale, weight in (("w13_scale", w13_scale, w13), ("w2_scale", w2_scale, w2)):
        blocks = shape.num_experts, *(-(-size // BLOCK) for size in weight.shape[1:])
        _check_scale(name, scale, weight.dtype, blocks, place)
    if shared is not None:
        sizes = tokens, hidden
        check_tensor("shared", shared, dtype=torch.bfloat16, shape=sizes, contiguous=True, device=place)
    return shape


def _check_scale(name, scale, dtype, blocks, place):
    if dtype != FP8:
        if scale is not None:
            raise ValueError(f"{name} is given, but the weights are {dtype}; scales are for {FP8}")
        return
    if scale is None:
        raise TypeError(f"{name} is None; FP8 weights need a scale per 128 x 128 block, {blocks}")
    if tuple(scale.shape) != blocks:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must be {blocks}, a scale per 128 x 128 block")
    check_tensor(name, scale, dtype=torch.float32, shape=blocks, contiguous=True, device=place)


@register_fake(fused_experts)
def _fake_fused_experts(call):
    """Check the arguments of a call and return its output."""
    _check(call.x, *(getattr(call, name) for name in _NAMES))
    return make_outputs(call.out, (("tensor", tuple(call.x.shape), torch.bfloat16),), call.x.device)[0]
