"""Public functions of the grouped GEMM."""

from typing import Any

import torch

from moe_numba.grouped_gemm.launch import fake_group_gemm, group_gemm
from moe_numba.runtime.torch_op import call_op, needs_dispatch, register_fake, torch_op


@torch_op
def group_gemm_pertensor_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    y_scale: torch.Tensor,
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
) -> torch.Tensor:
    """Multiply each group's rows with the group's FP8 weight: ``y = x @ weight.T * y_scale``.

    With all options it computes, for each row i of the product,
    ``out[scatter_indices[i]] += (x[gather_indices[i]] @ weight.T * y_scale + bias) * row_weights[i]``.

    Parameters
    ----------
    x : tensor [total, k], float8_e4m3fn
        Rows, group after group. Or [groups, capacity, k], "masked": each group uses the first of its ``capacity`` rows.
    weight : tensor [groups, n, k], float8_e4m3fn
        1 to 512 groups; n and k multiples of 16.
    seqlens : tensor [groups], int32
        Number of rows of each group, 0 or more. The kernel reads it, so the host does not wait for it.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked.
    y_scale : tensor [groups], float32
        Factor for each group's results: the scale of x times the scale of the weight.
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group. It selects the tile size and affects nothing else. Rows divided by
        groups if not given.
    offs : tensor [groups], int32, optional
        End of each group's rows, as for ``torch._scaled_grouped_mm``; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous output. The call then neither allocates nor synchronises.
    gather_indices : tensor [total], int32, optional
        Contiguous. Row i of the product uses row ``gather_indices[i]`` of x, and zeros if that is out of bounds. x and
        its scales are then [tokens, ...] in any order, so they need not be permuted first.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Contiguous. Added to each row of a group, in float32.
    out_dtype : torch.dtype, optional
        torch.bfloat16 or torch.float32.
    accumulate : bool, optional
        Add the result to ``out``, which must then be given and float32; ``out_dtype`` has no effect.
    scatter_indices : tensor [total] or [groups, capacity], int32, optional
        Contiguous. Row i of the result is stored to row ``scatter_indices[i]`` of ``out``, or not at all if that is out
        of bounds. ``out`` must be given, [any number of rows, n]; its other rows do not change. Indices in bounds must
        differ from each other: of rows with equal ones it is undefined which remains, or in what order they are added.
    row_weights : tensor [total] or [groups, capacity], float32, optional
        Contiguous. Row i of the result, with its bias, is multiplied by ``row_weights[i]`` before it is rounded: the
        routing weights, if each row of the result belongs to one token and expert.
    m_indices : tensor [total], int32, optional
        Group of each row, as for DeepGEMM's contiguous layout; replaces seqlens, cu_seqlens and offs. The rows of a
        group follow one another; rows with -1, or any other value that is no group, may lie before, between and behind
        the groups and belong to none. Rows of a group that do not follow its first ones belong to none either. A kernel
        of one CTA in front finds the groups.

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``
        From the library that x is from, or ``out``. Rows that belong to no group are not written.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 8.0 (A100).

    Notes
    -----
    The interface follows hpc-ops' function of this name. Products are accumulated in float32 (per 128 elements of k in
    the tensor cores), and results are bit-identical from run to run. Group sizes that point outside of x are clamped,
    so the kernel never accesses memory out of bounds. It runs on the caller's current stream, and can be captured in a
    CUDA graph after one call has compiled it.

    GPUs of compute capability 9.0 (H100, H200) execute a kernel with TMA and wgmma; others from 8.0 on one with
    ``cp.async`` and ``mma.sync``. Before 8.9 there is no FP8 ``mma.sync``, so this kernel converts e4m3 to float16 in
    registers. The two kernels add in different orders, so that results differ between GPUs by roundings.
    """
    if needs_dispatch(x, weight, y_scale, bias, row_weights):
        more = bias, out_dtype, accumulate, scatter_indices, row_weights, m_indices
        groups = seqlens, cu_seqlens, y_scale, num_seq_per_group_avg, offs
        return call_op("group_gemm_pertensor_fp8", x, weight, *groups, out, gather_indices, *more)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(bias=bias, out_dtype=out_dtype, accumulate=accumulate)
    options |= dict(scatter_indices=scatter_indices, row_weights=row_weights, m_indices=m_indices)
    return group_gemm("tensor", x, weight, seqlens, cu_seqlens, None, y_scale, **options)


@torch_op
def group_gemm_blockwise_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    x_scale: torch.Tensor,
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
    m_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows with the group's FP8 weight, with block scales as in DeepSeek-V3.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], float8_e4m3fn
    weight : tensor [groups, n, k], float8_e4m3fn
        1 to 512 groups; n and k multiples of 16.
    seqlens : tensor [groups], int32
        Number of rows of each group.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked, [groups, capacity, k].
    x_scale : tensor [total, ceil(k / 128)] or [groups, capacity, ceil(k / 128)], float32
        A scale for each 128 elements of a row, with any strides: contiguous, as a cast kernel writes it, or with
        contiguous columns, as DeepGEMM takes it (``get_mn_major_tma_aligned_tensor``). Contiguous scales are faster
        with 64 or more rows per group.
    w_scale : tensor [groups, ceil(n / 128), ceil(k / 128)], float32
        Contiguous: a scale for each 128 x 128 block of a weight.
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous output.
    gather_indices : tensor [total], int32, optional
        Row i of the product uses row ``gather_indices[i]`` of x and of x_scale.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to each row of a group.
    out_dtype : torch.dtype, optional
        torch.bfloat16 or torch.float32.
    accumulate : bool, optional
        Add the result to ``out``, which must be float32.
    scatter_indices : tensor [total] or [groups, capacity], int32, optional
        Store row i of the result to row ``scatter_indices[i]`` of ``out``.
    row_weights : tensor [total] or [groups, capacity], float32, optional
        Factor of each row of the result, with its bias.
    m_indices : tensor [total], int32, optional
        Group of each row, or -1; replaces seqlens, cu_seqlens and offs.

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes group sizes, options, the result and the errors in full.
    """
    if needs_dispatch(x, weight, x_scale, w_scale, bias, row_weights):
        more = bias, out_dtype, accumulate, scatter_indices, row_weights, m_indices
        groups = seqlens, cu_seqlens, x_scale, w_scale, num_seq_per_group_avg, offs
        return call_op("group_gemm_blockwise_fp8", x, weight, *groups, out, gather_indices, *more)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(bias=bias, out_dtype=out_dtype, accumulate=accumulate)
    options |= dict(scatter_indices=scatter_indices, row_weights=row_weights, m_indices=m_indices)
    return group_gemm("block", x, weight, seqlens, cu_seqlens, x_scale, w_scale, **options)


@torch_op
def group_gemm_rowwise_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    x_scale: torch.Tensor,
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
    m_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows with the group's FP8 weight, with scales per row as ``torch._scaled_grouped_mm``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], float8_e4m3fn
    weight : tensor [groups, n, k], float8_e4m3fn
        1 to 512 groups; n and k multiples of 16.
    seqlens : tensor [groups], int32
        Number of rows of each group.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked, [groups, capacity, k].
    x_scale : tensor [total] or [groups, capacity], float32
        Contiguous: a scale for each row of x.
    w_scale : tensor [groups, n], float32
        Contiguous: a scale for each row of a weight, a column of the result. The sum over k is multiplied by both.
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous output.
    gather_indices : tensor [total], int32, optional
        Row i of the product uses row ``gather_indices[i]`` of x and of x_scale.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to each row of a group.
    out_dtype : torch.dtype, optional
        torch.bfloat16 or torch.float32.
    accumulate : bool, optional
        Add the result to ``out``, which must be float32.
    scatter_indices : tensor [total] or [groups, capacity], int32, optional
        Store row i of the result to row ``scatter_indices[i]`` of ``out``.
    row_weights : tensor [total] or [groups, capacity], float32, optional
        Factor of each row of the result, with its bias.
    m_indices : tensor [total], int32, optional
        Group of each row, or -1; replaces seqlens, cu_seqlens and offs.

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes group sizes, options, the result and the errors in full.
    """
    if needs_dispatch(x, weight, x_scale, w_scale, bias, row_weights):
        more = bias, out_dtype, accumulate, scatter_indices, row_weights, m_indices
        groups = seqlens, cu_seqlens, x_scale, w_scale, num_seq_per_group_avg, offs
        return call_op("group_gemm_rowwise_fp8", x, weight, *groups, out, gather_indices, *more)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(bias=bias, out_dtype=out_dtype, accumulate=accumulate)
    options |= dict(scatter_indices=scatter_indices, row_weights=row_weights, m_indices=m_indices)
    return group_gemm("row", x, weight, seqlens, cu_seqlens, x_scale, w_scale, **options)


@torch_op
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
) -> torch.Tensor:
    """Multiply each group's rows with the group's bfloat16 weight, as ``torch._grouped_mm`` does.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
    weight : tensor [groups, n, k], bfloat16
        1 to 512 groups; n and k multiples of 16. Its k or its n is contiguous (``transposed.mT``), which needs no copy;
        a GPU without wgmma, older than Hopper, takes only the former.
    seqlens : tensor [groups], int32
        Number of rows of each group.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked, [groups, capacity, k].
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous output.
    gather_indices : tensor [total], int32, optional
        Row i of the product uses row ``gather_indices[i]`` of x.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to each row of a group.
    out_dtype : torch.dtype, optional
        torch.bfloat16 or torch.float32.
    accumulate : bool, optional
        Add the result to ``out``, which must be float32.
    scatter_indices : tensor [total] or [groups, capacity], int32, optional
        Store row i of the result to row ``scatter_indices[i]`` of ``out``.
    row_weights : tensor [total] or [groups, capacity], float32, optional
        Factor of each row of the result, with its bias.
    m_indices : tensor [total], int32, optional
        Group of each row, or -1; replaces seqlens, cu_seqlens and offs.

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes group sizes, options, the result and the errors in full.
    """
    if needs_dispatch(x, weight, bias, row_weights):
        more = bias, out_dtype, accumulate, scatter_indices, row_weights, m_indices
        groups = seqlens, cu_seqlens, num_seq_per_group_avg, offs
        return call_op("group_gemm_bf16", x, weight, *groups, out, gather_indices, *more)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(bias=bias, out_dtype=out_dtype, accumulate=accumulate)
    options |= dict(scatter_indices=scatter_indices, row_weights=row_weights, m_indices=m_indices)
    return group_gemm("none", x, weight, seqlens, cu_seqlens, None, None, **options)


@torch_op
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
    alpha: float = 1.702,
    limit: float = 7.0,
    m_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute an expert's first GEMM and its activation, such as ``silu(gate) * up``, in bfloat16.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
    weight : tensor [groups, n, k], bfloat16
        n is a multiple of 32, k of 16. Its rows compute gate and up, in the order that ``activation`` needs.
    seqlens : tensor [groups], int32
        Number of rows of each group.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked, [groups, capacity, k].
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous output.
    gather_indices : tensor [total], int32, optional
        Row i of the product uses row ``gather_indices[i]`` of x.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to gate and up before the activation; in the order of the rows of weight.
    activation : str, optional
        "silu": ``silu(gate) * up``. The first n / 2 rows of weight compute gate, the others up.
        "swigluoai", of gpt-oss, by vLLM's name: ``(up + 1) * gate * sigmoid(alpha * gate)``. Before, gate is limited to
        at most ``limit``, and up to between ``-limit`` and ``limit``. The even rows of weight compute gate, the odd
        ones up.
    alpha, limit : float, optional
        Of "swigluoai"; positive. The kernel is compiled for each value.
    m_indices : tensor [total], int32, optional
        Group of each row, or -1; replaces seqlens, cu_seqlens and offs.

    Returns
    -------
    tensor [total, n / 2] or [groups, capacity, n / 2], bfloat16
        Computed in float32 and rounded once; exponential and reciprocal are approximate (``ex2.approx``,
        ``rcp.approx``).

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes group sizes, gathering and the errors in full.

    Notes
    -----
    On GPUs other than compute capability 9.0 it raises UnsupportedDeviceError: call :func:`group_gemm_bf16` and then
    :func:`silu_and_mul`.
    """
    if needs_dispatch(x, weight, bias):
        groups = seqlens, cu_seqlens, num_seq_per_group_avg, offs
        more = bias, activation, alpha, limit, m_indices
        return call_op("group_gemm_silu_and_mul_bf16", x, weight, *groups, out, gather_indices, *more)
    options: dict[str, Any] = dict(average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices)
    options |= dict(silu_and_mul=True, bias=bias, activation=activation, alpha=alpha, limit=limit, m_indices=m_indices)
    return group_gemm("none", x, weight, seqlens, cu_seqlens, None, None, **options)


@torch_op
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
    alpha: float = 1.702,
    limit: float = 7.0,
    m_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute an expert's first GEMM and its activation, ``silu(gate) * up``, quantised to FP8 for the second GEMM.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], float8_e4m3fn
    weight : tensor [groups, n, k], float8_e4m3fn
        n is a multiple of 32, k of 16. Its rows compute gate and up, in the order that ``activation`` needs.
    seqlens : tensor [groups], int32
        Number of rows of each group.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked, [groups, capacity, k].
    y_scale : tensor [groups], float32
        Factor for each group's gate and up.
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : (tensor, tensor), optional
        Contiguous outputs: y and scale.
    gather_indices : tensor [total], int32, optional
        Row i of the product uses row ``gather_indices[i]`` of x.
    bias : tensor [groups, n], bfloat16 or float32, optional
        Added to gate and up before the activation.
    activation : str, optional
        "silu", or "swigluoai": see :func:`group_gemm_silu_and_mul_bf16`, also for ``alpha`` and ``limit``.
    alpha, limit : float, optional
        Of "swigluoai".
    m_indices : tensor [total], int32, optional
        Group of each row, or -1; replaces seqlens, cu_seqlens and offs.

    Returns
    -------
    y : tensor [total, n / 2] or [groups, capacity, n / 2], float8_e4m3fn
        ``silu(gate) * up / scale``. gate and up are first rounded to bfloat16, as if another kernel had read them.
    scale : tensor [total, ceil(n / 256)] or [groups, capacity, ceil(n / 256)], float32
        A scale for each 128 elements of a row, or less in the last block: their maximum magnitude divided by 448.

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes group sizes, gathering and the errors in full.
    """
    if needs_dispatch(x, weight, y_scale, bias):
        groups = seqlens, cu_seqlens, y_scale, num_seq_per_group_avg, offs
        more = bias, activation, alpha, limit, m_indices
        return call_op("group_gemm_silu_and_mul_pertensor_fp8", x, weight, *groups, out, gather_indices, *more)
    options: dict[str, Any] = dict(
        average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices, silu_and_mul=True
    )
    options |= dict(bias=bias, activation=activation, alpha=alpha, limit=limit, m_indices=m_indices)
    return group_gemm("tensor", x, weight, seqlens, cu_seqlens, None, y_scale, **options)


@torch_op
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
    seqlens : tensor [groups], int32
        Number of rows of each group.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked, [groups, capacity, k].
    x_scale : tensor [total, ceil(k / 128)] or [groups, capacity, ceil(k / 128)], float32
        With any strides.
    w_scale : tensor [groups, ceil(n / 128), ceil(k / 128)], float32
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : (tensor, tensor), optional
    gather_indices : tensor [total], int32, optional
        Row i of the product uses row ``gather_indices[i]`` of x.
    m_indices : tensor [total], int32, optional
        Group of each row, or -1; replaces seqlens, cu_seqlens and offs.

    Returns
    -------
    y : tensor [total, n / 2] or [groups, capacity, n / 2], float8_e4m3fn
    scale : tensor [total, n / 256] or [groups, capacity, n / 256], float32

    See Also
    --------
    group_gemm_silu_and_mul_pertensor_fp8 : Describes the results.
    group_gemm_blockwise_fp8 : Describes the scales.
    group_gemm_pertensor_fp8 : Describes group sizes, gathering and the errors in full.
    """
    if needs_dispatch(x, weight, x_scale, w_scale):
        groups = seqlens, cu_seqlens, x_scale, w_scale, num_seq_per_group_avg, offs
        return call_op("group_gemm_silu_and_mul_blockwise_fp8", x, weight, *groups, out, gather_indices, m_indices)
    options: dict[str, Any] = dict(
        average=num_seq_per_group_avg, offs=offs, out=out, gather_indices=gather_indices, silu_and_mul=True
    )
    options |= dict(m_indices=m_indices)
    return group_gemm("block", x, weight, seqlens, cu_seqlens, x_scale, w_scale, **options)


register_fake(group_gemm_pertensor_fp8)(lambda call: fake_group_gemm("tensor", call))
register_fake(group_gemm_blockwise_fp8)(lambda call: fake_group_gemm("block", call))
register_fake(group_gemm_rowwise_fp8)(lambda call: fake_group_gemm("row", call))
register_fake(group_gemm_bf16)(lambda call: fake_group_gemm("none", call))
register_fake(group_gemm_silu_and_mul_bf16)(lambda call: fake_group_gemm("none", call, silu_and_mul=True))
register_fake(group_gemm_silu_and_mul_pertensor_fp8)(lambda call: fake_group_gemm("tensor", call, silu_and_mul=True))
register_fake(group_gemm_silu_and_mul_blockwise_fp8)(lambda call: fake_group_gemm("block", call, silu_and_mul=True))
