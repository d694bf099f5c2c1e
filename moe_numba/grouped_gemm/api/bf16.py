"""Public function of the grouped GEMM in bfloat16."""

import torch

from moe_numba.grouped_gemm.api.docstrings import describe_parameters
from moe_numba.grouped_gemm.call.plan import fake_group_gemm, group_gemm
from moe_numba.runtime.torch_op import register_fake, torch_op


@torch_op()
@describe_parameters
def group_gemm_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    num_seq_per_group_avg: int | None = None,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gather_indices: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    scatter_indices: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
    x_low: torch.Tensor | None = None,
    weight_low: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows with the group's bfloat16 weight, as ``torch._grouped_mm`` does.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
    weight : tensor [groups, n, k], bfloat16
        1 to 512 groups; n and k multiples of 16. Either k or n is the contiguous dimension. A view with contiguous n,
        such as ``transposed.mT``, is not copied; it needs a GPU with wgmma (compute capability 9.0).
    {seqlens}
    {cu_seqlens}
    {num_seq_per_group_avg}
    {offs}
    {out}
    {gather_indices}
    {bias}
    {out_dtype}
    {accumulate}
    {scatter_indices}
    {row_weights}
    {m_indices}
    {x_low}
    {weight_low}

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes the result and the errors in full.
    k_grouped_gemm_bf16 : Computes the gradient of the weight.

    Notes
    -----
    If x or weight requires grad, the result has a backward. The gradient of x is a grouped GEMM with the transposed
    weight; it is zero in rows that belong to no group. The gradient of the weight is computed by
    :func:`k_grouped_gemm_bf16`, which needs wgmma (compute capability 9.0): on other GPUs a call whose weight requires
    grad raises UnsupportedDeviceError. Only calls with x, weight, the group sizes and a bfloat16 result have a
    backward. After any other call the backward raises NotImplementedError, as it does for a second derivative.

    Examples
    --------
    >>> x = torch.ones(3, 64, dtype=torch.bfloat16)  # two rows of the first expert, one of the second
    >>> weight = torch.stack([torch.full((64, 64), value / 64) for value in (1, 2)]).bfloat16()
    >>> seqlens = torch.tensor([2, 1], dtype=torch.int32)
    >>> cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    >>> moe_numba.group_gemm_bf16(x, weight, seqlens, cu_seqlens)[:, 0].tolist()
    [1.0, 1.0, 2.0]
    """
    return group_gemm("none", locals())


register_fake(group_gemm_bf16)(lambda call: fake_group_gemm("none", call))
