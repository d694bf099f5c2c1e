"""The router's linear layer with logits in float32, without converting tokens or weight."""

import torch
from torch import nn

from moe_numba.grouped_gemm import group_gemm_bf16

_STEP = 16  # n of a grouped GEMM is a multiple


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> torch.Tensor:
    """Multiply tokens with the router's weight; products are added, and returned, in float32.

    On a GPU one GEMM reads bfloat16 or float16 as it is: products of two such numbers are exact in float32, so that
    only the order of the sums differs from a GEMM of converted tensors. Conversion would write and read tokens and
    weight in float32, in each call, and multiply without tensor cores.

    Parameters
    ----------
    x : tensor [tokens, hidden]
    weight : tensor [num_experts, hidden]
    bias : tensor [num_experts], optional
    batch_invariant : bool
        Multiply by :func:`moe_numba.group_gemm_bf16`, which adds a row's products in the same order in every batch. The
        kernels of cuBLAS, between which the number of tokens chooses, do not. Tokens and weight must be in bfloat16.

    Returns
    -------
    tensor [tokens, num_experts], float32
    """
    if batch_invariant and len(x):
        padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % _STEP))
        end = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
        logits = group_gemm_bf16(x, padded[None], None, None, offs=end, out_dtype=torch.float32)[:, : len(weight)]
        return logits if bias is None else logits + bias
    wants_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    is_half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    if not x.is_cuda or wants_grad or not is_half:
        return nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    logits = torch.mm(x, weight.mT, out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)
