"""Public functions of the grouped GEMM with 4-bit weights: MXFP4 and int4."""

from typing import Any

import torch

from moe_numba.grouped_gemm.packing_int4 import pack_int4
from moe_numba.grouped_gemm.w4.launch import fake_group_gemm, group_gemm
from moe_numba.grouped_gemm.w4.packing import pack_mxfp4
from moe_numba.runtime.torch_op import call_op, needs_dispatch, register_fake, torch_op

__all__ = [
    "group_gemm_int4",
    "group_gemm_mxfp4",
    "group_gemm_silu_and_mul_int4",
    "group_gemm_silu_and_mul_mxfp4",
    "pack_int4",
    "pack_mxfp4",
]


@torch_op
def group_gemm_mxfp4(
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
    n: int | None = None,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows in bf16 or FP8 with the group's MXFP4 weight: ``y = x @ weight.T``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16 or float8_e4m3fn
        Rows, group after group; or "masked", where each group uses the first of its ``capacity`` rows.
    weight : tensor [groups, ceil(n / 64), ceil(k / 64), ...], uint8
        What :func:`pack_mxfp4` returns for the dtype of x: 1 to 512 groups; n and k multiples of 32.
    seqlens : tensor [groups], int32
        Number of rows of each group, 0 or more.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked.
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous, 16-byte aligned output. The call then neither allocates nor synchronises.
    gather_indices : tensor [total], int32, optional
        Row i of the GEMM uses row ``gather_indices[i]`` of x, and zeros if that is out of bounds.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to each row of a group, in float32.
    out_dtype : torch.dtype, optional
        torch.bfloat16 or torch.float32.
    accumulate : bool, optional
        Add the result to ``out``, which must then be given and float32.
    scatter_indices : tensor [total] or [groups, capacity], int32, optional
        Row i of the result is stored to row ``scatter_indices[i]`` of ``out``.
    row_weights : tensor [total] or [groups, capacity], float32, optional
        Row i of the result, with its bias, is multiplied by ``row_weights[i]``.
    n : int, optional
        Rows of the weight before packing, if they were 32 less than a multiple of 64.
    x_scale : tensor, float32, optional
        Of an x in FP8, which is multiplied by it: one number, a contiguous tensor with one for each row of x, [total]
        or [total, 1], or one for each 1 x 128 block, [total, ceil(k / 128)] with any strides. If x is masked, [groups,
        capacity] instead of [total].

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``
        Rows that belong to no group are not written.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU has no wgmma: only GPUs of compute capability 9.0 (H100, H200) have it.

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes group sizes, gathering and the options of the output in full.

    Notes
    -----
    With x in bf16, weights are decoded to bf16 exactly, and products are accumulated in float32 in the tensor cores
    over all of k. Intermediate results are 2**-32 times the product, so magnitudes below 2**-94 are lost. With x in
    FP8, e2m1 numbers are decoded to e4m3 exactly, the tensor cores accumulate the products of each block of 32, and
    float32 instructions add up the blocks times their scales. Results are bit-identical from run to run. The format is
    that of the weights of gpt-oss (OCP Microscaling Formats 1.0).

    FP8 is for few rows: up to 16 rows per group it takes no more time than bf16. With more rows, the float32 additions,
    one per output and 32 elements of k, take longer than FP8 saves in the tensor cores, and bf16 is faster.
    """
    if needs_dispatch(x, weight, bias, row_weights, x_scale):
        groups, epilogue = (seqlens, cu_seqlens, num_seq_per_group_avg, offs), (bias, out_dtype, accumulate)
        rows = scatter_indices, row_weights, n, x_scale
        return call_op("group_gemm_mxfp4", x, weight, *groups, out, gather_indices, *epilogue, *rows)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(bias=bias, out_dtype=out_dtype, accumulate=accumulate, n=n, x_scale=x_scale)
    options |= dict(scatter_indices=scatter_indices, row_weights=row_weights)
    return group_gemm("mxfp4", x, weight, seqlens, cu_seqlens, **options)


@torch_op
def group_gemm_silu_and_mul_mxfp4(
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
    alpha: float = 1.702,
    limit: float = 7.0,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute an expert's first GEMM with an MXFP4 weight and its activation, such as ``silu(gate) * up``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16 or float8_e4m3fn
    weight : tensor [groups, n / 64, ceil(k / 64), ...], uint8
        What :func:`pack_mxfp4` returns with ``gate_up`` for the dtype of x; n, the rows of gate and up, is a multiple
        of 64.
    seqlens : tensor [groups], int32
        Number of rows of each group.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked, [groups, capacity, k].
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous, 16-byte aligned output.
    gather_indices : tensor [total], int32, optional
        Row i of the GEMM uses row ``gather_indices[i]`` of x.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to gate and up before the activation. With "silu" first all of gate, then up; with "swigluoai"
        alternately of gate and up. It is not packed.
    activation : str, optional
        "silu" or "swigluoai"; see :func:`group_gemm_silu_and_mul_bf16`. The order of the rows before packing is what
        ``gate_up`` of :func:`pack_mxfp4` says: "interleaved" for the weights of gpt-oss.
    alpha, limit : float, optional
        Of "swigluoai"; positive. The kernel is compiled for each value.
    x_scale : tensor, float32, optional
        Of an x in FP8; see :func:`group_gemm_mxfp4`.

    Returns
    -------
    tensor [total, n / 2] or [groups, capacity, n / 2], bfloat16
        Computed in float32 and rounded once; exponential and reciprocal are approximate.

    See Also
    --------
    group_gemm_mxfp4 : Describes the weights and the errors.
    group_gemm_silu_and_mul_bf16 : Describes the activations.
    """
    if needs_dispatch(x, weight, bias, x_scale):
        groups, epilogue = (seqlens, cu_seqlens, num_seq_per_group_avg, offs), (bias, activation, alpha, limit, x_scale)
        return call_op("group_gemm_silu_and_mul_mxfp4", x, weight, *groups, out, gather_indices, *epilogue)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(silu_and_mul=True, bias=bias, activation=activation, alpha=alpha, limit=limit, x_scale=x_scale)
    return group_gemm("mxfp4", x, weight, seqlens, cu_seqlens, **options)


@torch_op
def group_gemm_int4(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    w_scale: torch.Tensor,
    num_seq_per_group_avg: int | None = None,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gather_indices: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    scatter_indices: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    n: int | None = None,
) -> torch.Tensor:
    """Multiply each group's rows in bf16 with the group's int4 weight: ``y = x @ weight.T``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
        Rows, group after group; or "masked", where each group uses the first of its ``capacity`` rows.
    weight : tensor [groups, ceil(n / 64), ceil(k / 64), 2048], uint8
    w_scale : tensor [groups, ceil(n / 64), k / group_size, 64], bfloat16, float16 or float32
        ``weight`` and ``w_scale`` are what :func:`pack_int4` returns: 1 to 512 groups; n and k multiples of 32.
    seqlens, cu_seqlens, num_seq_per_group_avg, offs, out, gather_indices : optional
    bias, out_dtype, accumulate, scatter_indices, row_weights, n : optional
        As for :func:`group_gemm_mxfp4`.

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``
        Rows that belong to no group are not written.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU has no wgmma: only GPUs of compute capability 9.0 (H100, H200) have it.

    Notes
    -----
    Codes are decoded to bf16 exactly, the tensor cores accumulate the products of each group of elements of k, and
    float32 instructions add up these sums times their scales. Results are bit-identical from run to run. The format is
    that of symmetric GPTQ and AWQ weights, without ``act_order``.

    With many rows per group the float32 additions, one per output and group of elements of k, take longer the smaller
    these groups are, and a weight in bfloat16 is faster; int4 then only saves memory. Groups of 128 are the fastest.
    """
    if needs_dispatch(x, weight, w_scale, bias, row_weights):
        groups, epilogue = (seqlens, cu_seqlens, w_scale, num_seq_per_group_avg, offs), (bias, out_dtype, accumulate)
        rows = scatter_indices, row_weights, n
        return call_op("group_gemm_int4", x, weight, *groups, out, gather_indices, *epilogue, *rows)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(bias=bias, out_dtype=out_dtype, accumulate=accumulate, n=n, w_scale=w_scale)
    options |= dict(scatter_indices=scatter_indices, row_weights=row_weights)
    return group_gemm("int4", x, weight, seqlens, cu_seqlens, **options)


@torch_op
def group_gemm_silu_and_mul_int4(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    w_scale: torch.Tensor,
    num_seq_per_group_avg: int | None = None,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gather_indices: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Compute an expert's first GEMM with an int4 weight and its activation, such as ``silu(gate) * up``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
    weight : tensor [groups, n / 64, ceil(k / 64), 2048], uint8
    w_scale : tensor [groups, n / 64, k / group_size, 64], bfloat16, float16 or float32
        ``weight`` and ``w_scale`` are what :func:`pack_int4` returns with ``gate_up``; n, the rows of gate and up, is a
        multiple of 64.
    seqlens, cu_seqlens, num_seq_per_group_avg, offs, out, gather_indices : optional
    bias, activation, alpha, limit : optional
        As for :func:`group_gemm_silu_and_mul_mxfp4`.

    Returns
    -------
    tensor [total, n / 2] or [groups, capacity, n / 2], bfloat16
        Computed in float32 and rounded once; exponential and reciprocal are approximate.

    See Also
    --------
    group_gemm_int4 : Describes the weights and the errors.
    group_gemm_silu_and_mul_bf16 : Describes the activations.
    """
    if needs_dispatch(x, weight, w_scale, bias):
        groups, epilogue = (seqlens, cu_seqlens, w_scale, num_seq_per_group_avg, offs), (bias, activation, alpha, limit)
        return call_op("group_gemm_silu_and_mul_int4", x, weight, *groups, out, gather_indices, *epilogue)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(silu_and_mul=True, bias=bias, activation=activation, alpha=alpha, limit=limit, w_scale=w_scale)
    return group_gemm("int4", x, weight, seqlens, cu_seqlens, **options)


register_fake(group_gemm_mxfp4)(lambda call: fake_group_gemm("mxfp4", call))
register_fake(group_gemm_silu_and_mul_mxfp4)(lambda call: fake_group_gemm("mxfp4", call, silu_and_mul=True))
register_fake(group_gemm_int4)(lambda call: fake_group_gemm("int4", call))
register_fake(group_gemm_silu_and_mul_int4)(lambda call: fake_group_gemm("int4", call, silu_and_mul=True))
