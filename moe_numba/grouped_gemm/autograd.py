"""Backward of ``group_gemm_bf16``: the gradients of x and weight."""

import torch

from moe_numba.grouped_gemm.api import group_gemm_bf16
from moe_numba.grouped_gemm.api_k_grouped import k_grouped_gemm_bf16
from moe_numba.grouped_gemm.checks import has_wgmma, is_mn_major
from moe_numba.runtime.torch_op import register_autograd


def setup_context(ctx, inputs, output):
    """Keep what the backward needs."""
    x, weight, seqlens, cu_seqlens, average, offs, gather_indices = inputs
    ctx.save_for_backward(x, weight, seqlens, cu_seqlens, offs)
    ctx.average, ctx.is_gathered = average, gather_indices is not None


def backward(ctx, grad):
    """Return the gradients of the inputs.

    That of x is a grouped GEMM with the transposed weights, a view; that of the weight is a k-grouped GEMM.
    """
    if ctx.is_gathered:
        raise NotImplementedError(
            "gather_indices was given, but group_gemm_bf16 has a backward only without: gather the rows before the call"
        )
    if torch.is_grad_enabled():
        raise NotImplementedError("create_graph is True, but group_gemm_bf16 has no second derivative")
    x, weight, seqlens, cu_seqlens, offs = ctx.saved_tensors
    grad, grad_x, grad_weight = grad.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        transposed = weight.mT if has_wgmma(x.device) else weight.mT.contiguous()
        grad_x = x.new_zeros(x.shape)  # the GEMM writes no rows that belong to no group
        group_gemm_bf16(grad, transposed, seqlens, cu_seqlens, ctx.average, offs, out=grad_x)
    if ctx.needs_input_grad[1]:
        if x.dim() == 3:  # masked: group g begins at row g * capacity
            groups, capacity, _ = x.shape
            seqlens = seqlens.clamp(max=capacity)
            cu_seqlens = torch.arange(groups + 1, dtype=torch.int32, device=x.device) * capacity
            x, grad = x.flatten(0, 1), grad.flatten(0, 1)
        left, right = (x, grad) if is_mn_major(weight) else (grad, x)
        grad_weight = k_grouped_gemm_bf16(left, right, seqlens, cu_seqlens, offs, out_dtype=torch.bfloat16)
        if is_mn_major(weight):
            grad_weight = grad_weight.mT  # of the strides of weight
    return grad_x, grad_weight, None, None, None, None, None


register_autograd(group_gemm_bf16, backward, setup_context)
