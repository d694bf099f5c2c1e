"""Backward of ``group_gemm_bf16``: the gradients of x and weight."""

from functools import partial

import torch

from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.api.k_grouped import k_grouped_gemm_bf16
from moe_numba.grouped_gemm.call.checks import has_wgmma, is_mn_major
from moe_numba.grouped_gemm.k_grouped.unused_rows import zero_unused_rows
from moe_numba.runtime.torch_op import register_autograd
from moe_numba.runtime.validate import UnsupportedDeviceError

_SUPPORTED = ("x", "weight", "seqlens", "cu_seqlens", "num_seq_per_group_avg", "offs")


def setup_context(ctx, call, output):
    """Keep what the backward needs."""
    if ctx.needs_input_grad[1] and not has_wgmma(call.x.device):
        raise UnsupportedDeviceError(
            "weight requires grad, but its gradient needs wgmma (compute capability 9.0): use weight.detach()"
        )
    ctx.save_for_backward(call.x, call.weight, call.seqlens, call.cu_seqlens, call.offs)
    ctx.average = call.num_seq_per_group_avg
    others = {name: value for name, value in vars(call).items() if name not in (*_SUPPORTED, "out_dtype")}
    # ``accumulate`` is False, because the op that has a backward has no ``out``.
    ctx.given = [name for name, value in others.items() if value is not None and value is not False]
    if output.dtype != torch.bfloat16:
        ctx.given.append(f"out_dtype={output.dtype}")


def backward(ctx, grad):
    """Return the gradients of x and weight, by name.

    The gradient of x is a grouped GEMM with the transposed view of the weights; that of the weight is a k-grouped GEMM.
    """
    if ctx.given:
        raise NotImplementedError(
            f"{ctx.given[0]} was given, but group_gemm_bf16 has a backward only without it: use torch functions before "
            "or after the call"
        )
    if torch.is_grad_enabled():
        raise NotImplementedError("create_graph is True, but group_gemm_bf16 has no second derivative")
    x, weight, seqlens, cu_seqlens, offs = ctx.saved_tensors
    grad, grad_x, grad_weight = grad.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        grad_x = group_gemm_bf16(grad, transposed(weight), seqlens, cu_seqlens, ctx.average, offs)
        zero_unused_rows(grad_x, seqlens, cu_seqlens, offs)
    if ctx.needs_input_grad[1]:
        if x.dim() == 3:  # masked: group g begins at row g * capacity
            groups, capacity, _ = x.shape
            seqlens = seqlens.clamp(max=capacity)
            cu_seqlens = torch.arange(groups + 1, dtype=torch.int32, device=x.device) * capacity
            x, grad = x.flatten(0, 1), grad.flatten(0, 1)
        groups = dict(seqlens=seqlens, cu_seqlens=cu_seqlens, offs=offs, out_dtype=torch.bfloat16)
        grad_weight = weight_gradient(grad, x, weight, partial(k_grouped_gemm_bf16, **groups))
    return {"x": grad_x, "weight": grad_weight}


def transposed(weight):
    """Return [groups, k, n] of a weight: a view on GPUs with wgmma, whose kernels take one."""
    return weight.mT if has_wgmma(weight.device) else weight.mT.contiguous()


def weight_gradient(grad, x, weight, outer_products):
    """Return the gradient of a weight, with its strides, from the rows of the output's gradient and of the input.

    ``outer_products(a, b)`` returns the sum of the outer products of each group's rows of a and b.
    """
    return outer_products(x, grad).mT if is_mn_major(weight) else outer_products(grad, x)


register_autograd(group_gemm_bf16, backward, setup_context)
