"""Public functions of an expert's first GEMM and its activation, in one kernel."""

import torch

from moe_numba.grouped_gemm.api.docstrings import describe_parameters
from moe_numba.grouped_gemm.call.plan import fake_group_gemm, group_gemm
from moe_numba.grouped_gemm.common.constants import ALPHA, LIMIT
from moe_numba.runtime.torch_op import register_fake, torch_op


@torch_op()
@describe_parameters
def group_gemm_silu_and_mul_bf16(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    num_seq_per_group_avg: int | None = None,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gather_indices: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    m_indices: torch.Tensor | None = None,
    x_low: torch.Tensor | None = None,
    weight_low: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute an expert's first GEMM and its activation, such as ``silu(gate) * up``, in bfloat16.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
    weight : tensor [groups, n, k], bfloat16
        n is a multiple of 32, k of 16. Its rows compute gate and up, in the order that ``activation`` needs.
    {seqlens}
    {cu_seqlens}
    {num_seq_per_group_avg}
    {offs}
    {out}
    {gather_indices}
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to gate and up before the activation; in the order of the rows of weight.
    {activation}
    {alpha, limit}
    {m_indices}
    {x_low}
    {weight_low}

    Returns
    -------
    tensor [total, n / 2] or [groups, capacity, n / 2], bfloat16
        Computed in float32 and rounded once; exponential and reciprocal are approximate (``ex2.approx``,
        ``rcp.approx``).

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes the errors in full.

    Notes
    -----
    On GPUs other than compute capability 9.0 it raises UnsupportedDeviceError: call :func:`group_gemm_bf16` and then
    :func:`silu_and_mul`.

    Examples
    --------
    >>> x, ends = torch.ones(3, 64).bfloat16(), torch.tensor([3], dtype=torch.int32)
    >>> weight = torch.full((1, 2 * 64, 64), 1 / 64).bfloat16()  # gate and up are 1, and silu(1) is 0.731
    >>> y = moe_numba.group_gemm_silu_and_mul_bf16(x, weight, None, None, offs=ends)
    >>> y.shape, y[0, 0].item()
    (torch.Size([3, 64]), 0.73046875)
    """
    return group_gemm("none", locals(), silu_and_mul=True)


@torch_op()
@describe_parameters
def group_gemm_silu_and_mul_pertensor_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    y_scale: torch.Tensor,
    num_seq_per_group_avg: int | None = None,
    offs: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    gather_indices: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float = LIMIT,
    m_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute an expert's first GEMM and its activation, such as ``silu(gate) * up``, quantised to FP8.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], float8_e4m3fn
    weight : tensor [groups, n, k], float8_e4m3fn
        n is a multiple of 32, k of 16. Its rows compute gate and up, in the order that ``activation`` needs.
    {seqlens}
    {cu_seqlens}
    y_scale : tensor [groups], float32
        Factor for each group's gate and up.
    {num_seq_per_group_avg}
    {offs}
    out : (tensor, tensor), optional
        Contiguous, 16-byte aligned outputs: y and scale.
    {gather_indices}
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to gate and up before the activation.
    {activation}
    {alpha, limit}
    {m_indices}

    Returns
    -------
    y : tensor [total, n / 2] or [groups, capacity, n / 2], float8_e4m3fn
        The activation divided by ``scale``. gate and up are first rounded to bfloat16, as if they were stored between
        two kernels.
    scale : tensor [total, ceil(n / 256)] or [groups, capacity, ceil(n / 256)], float32
        A scale for each 128 elements of a row, or less in the last block: their maximum magnitude divided by 448.

    Raises
    ------
    UnsupportedDeviceError
        If the GPU is older than compute capability 8.0. Without wgmma (compute capability 9.0) also if ``bias`` is
        given, if ``activation`` is not "silu", or if n is not a multiple of 256.

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes the other errors.

    Examples
    --------
    >>> x, ends = torch.ones(3, 64).to(torch.float8_e4m3fn), torch.tensor([3], dtype=torch.int32)
    >>> weight = torch.ones(1, 2 * 64, 64).to(torch.float8_e4m3fn)
    >>> y_scale = torch.tensor([1 / 64])
    >>> values, scales = moe_numba.group_gemm_silu_and_mul_pertensor_fp8(x, weight, None, None, y_scale, offs=ends)
    >>> values.shape, scales.shape
    (torch.Size([3, 64]), torch.Size([3, 1]))
    """
    return group_gemm("tensor", locals(), silu_and_mul=True)


@torch_op()
@describe_parameters
def group_gemm_silu_and_mul_blockwise_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    num_seq_per_group_avg: int | None = None,
    offs: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    gather_indices: torch.Tensor | None = None,
    m_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute an expert's first GEMM with block scales and its activation, ``silu(gate) * up``, quantised to FP8.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], float8_e4m3fn
    weight : tensor [groups, n, k], float8_e4m3fn
        The first n / 2 rows compute gate, the others up. n is a multiple of 256, so that no 128 x 128 block belongs to
        both; k is a multiple of 16.
    {seqlens}
    {cu_seqlens}
    x_scale : tensor [total, ceil(k / 128)] or [groups, capacity, ceil(k / 128)], float32
        With any strides; or packed exponents, int32.
    w_scale : tensor [groups, ceil(n / 128), ceil(k / 128)], float32
        Contiguous; or packed exponents, int32.
    {num_seq_per_group_avg}
    {offs}
    out : (tensor, tensor), optional
        Contiguous, 16-byte aligned outputs: y and scale.
    {gather_indices}
    {m_indices}

    Returns
    -------
    y : tensor [total, n / 2] or [groups, capacity, n / 2], float8_e4m3fn
    scale : tensor [total, n / 256] or [groups, capacity, n / 256], float32

    See Also
    --------
    group_gemm_silu_and_mul_pertensor_fp8 : Describes the results.
    group_gemm_blockwise_fp8 : Describes the scales.
    group_gemm_pertensor_fp8 : Describes the errors in full.

    Examples
    --------
    >>> x, x_scale = moe_numba.per_token_cast_to_fp8(torch.ones(3, 128).bfloat16())
    >>> weight = torch.ones(1, 2 * 128, 128).to(torch.float8_e4m3fn)
    >>> w_scale = torch.full((1, 2, 1), 1 / 128)
    >>> ends = torch.tensor([3], dtype=torch.int32)
    >>> values, scales = moe_numba.group_gemm_silu_and_mul_blockwise_fp8(
    ...     x, weight, None, None, x_scale, w_scale, offs=ends
    ... )
    >>> values.shape, scales.shape
    (torch.Size([3, 128]), torch.Size([3, 1]))
    """
    return group_gemm("block", locals(), silu_and_mul=True)


register_fake(group_gemm_silu_and_mul_bf16)(lambda call: fake_group_gemm("none", call, silu_and_mul=True))
register_fake(group_gemm_silu_and_mul_pertensor_fp8)(lambda call: fake_group_gemm("tensor", call, silu_and_mul=True))
register_fake(group_gemm_silu_and_mul_blockwise_fp8)(lambda call: fake_group_gemm("block", call, silu_and_mul=True))
