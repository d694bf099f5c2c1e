"""Public functions of the grouped GEMM in FP8."""

import torch

from moe_numba.grouped_gemm.api.docstrings import describe_parameters
from moe_numba.grouped_gemm.call.plan import fake_group_gemm, group_gemm
from moe_numba.runtime.torch_op import register_fake, torch_op


@torch_op()
@describe_parameters
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
    use_fast_accum: bool = False,
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
    {seqlens}
    {cu_seqlens}
    y_scale : tensor [groups], float32
        Factor for each group's results: the scale of x times the scale of the weight.
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
    {use_fast_accum}

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
    the tensor cores), and results are bit-identical from run to run. The kernel runs on the caller's current stream,
    and can be captured in a CUDA graph after one call has compiled it.

    Group sizes that point outside of x cause no access out of bounds. A group's first row is clamped to 0 to total, and
    then its number of rows to 0 to what x has from there on: a start at row -2 with 3 rows reads rows 0 to 2. With
    ``offs`` group g begins at ``offs[g - 1]``, or at row 0, and its number of rows is the difference to ``offs[g]`` in
    int32, which wraps around. In a masked x the number is clamped to 0 to ``capacity``. If groups overlap, as they do
    if ``offs`` decreases, it is undefined whose result a common row has.

    GPUs of compute capability 9.0 (H100, H200) execute a kernel with TMA and wgmma; others from 8.0 on one with
    ``cp.async`` and ``mma.sync``. Before 8.9 there is no FP8 ``mma.sync``, so this kernel converts e4m3 to float16 in
    registers. The two kernels add in different orders, so that results differ between GPUs by roundings.

    Examples
    --------
    >>> x = torch.ones(3, 64).to(torch.float8_e4m3fn)  # two rows of the first expert, one of the second
    >>> weight = torch.ones(2, 64, 64).to(torch.float8_e4m3fn)
    >>> seqlens = torch.tensor([2, 1], dtype=torch.int32)
    >>> cu_seqlens = torch.tensor([0, 2, 3], dtype=torch.int32)
    >>> y_scale = torch.tensor([1 / 64, 2 / 64])  # the scale of x times that of each weight
    >>> moe_numba.group_gemm_pertensor_fp8(x, weight, seqlens, cu_seqlens, y_scale)[:, 0].tolist()
    [1.0, 1.0, 2.0]
    """
    return group_gemm("tensor", locals())


@torch_op()
@describe_parameters
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
    {seqlens}
    {cu_seqlens}
    x_scale : tensor [total, ceil(k / 128)] or [groups, capacity, ceil(k / 128)], float32
        A scale for each 128 elements of a row, with any strides: contiguous, as a cast kernel writes it, or with
        contiguous columns, as DeepGEMM takes it (``get_mn_major_tma_aligned_tensor``). Contiguous scales are faster
        with 64 or more rows per group. Or [total, ceil(k / 512)] or [groups, capacity, ceil(k / 512)], int32: exponents
        as DeepGEMM packs them (``get_mn_major_tma_aligned_packed_ue8m0_tensor``), see below; also with any strides.
    w_scale : tensor [groups, ceil(n / 128), ceil(k / 128)], float32
        Contiguous: a scale for each 128 x 128 block of a weight. Or [groups, n, ceil(k / 512)], int32: packed exponents
        of a scale for each row, of which the first of each 128 rows is used; ``w_scale.mT`` is contiguous.
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

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes the result and the errors in full.

    Notes
    -----
    A packed scale is a byte e of UE8M0 and means 2**(e - 127); 255 is NaN. An int32 has those of four neighbouring
    blocks of k, the first in the lowest byte. Kernels unpack them as they load them. x_scale, w_scale or both may be
    packed.

    Examples
    --------
    >>> x, x_scale = moe_numba.per_token_cast_to_fp8(torch.ones(3, 128).bfloat16())
    >>> weight = torch.ones(2, 128, 128).to(torch.float8_e4m3fn)
    >>> w_scale = torch.full((2, 1, 1), 1 / 128)  # of each block of 128 x 128
    >>> ends = torch.tensor([2, 3], dtype=torch.int32)
    >>> moe_numba.group_gemm_blockwise_fp8(x, weight, None, None, x_scale, w_scale, offs=ends)[:, 0].tolist()
    [1.0, 1.0, 1.0]
    """
    return group_gemm("block", locals())


@torch_op()
@describe_parameters
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
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Multiply each group's rows with the group's FP8 weight, with scales per row as ``torch._scaled_grouped_mm``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], float8_e4m3fn
    weight : tensor [groups, n, k], float8_e4m3fn
        1 to 512 groups; n and k multiples of 16.
    {seqlens}
    {cu_seqlens}
    x_scale : tensor [total] or [groups, capacity], float32
        Contiguous: a scale for each row of x.
    w_scale : tensor [groups, n], float32
        Contiguous: a scale for each row of a weight, a column of the result. The sum over k is multiplied by both.
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
    {use_fast_accum}

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], ``out_dtype``

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes the result and the errors in full.

    Examples
    --------
    >>> x = torch.ones(3, 64).to(torch.float8_e4m3fn)
    >>> weight = torch.ones(2, 64, 64).to(torch.float8_e4m3fn)
    >>> x_scale = torch.tensor([1.0, 2.0, 3.0])  # of each row of x
    >>> w_scale = torch.full((2, 64), 1 / 64)  # of each row of a weight
    >>> ends = torch.tensor([2, 3], dtype=torch.int32)
    >>> moe_numba.group_gemm_rowwise_fp8(x, weight, None, None, x_scale, w_scale, offs=ends)[:, 0].tolist()
    [1.0, 2.0, 3.0]
    """
    return group_gemm("row", locals())


register_fake(group_gemm_pertensor_fp8)(lambda call: fake_group_gemm("tensor", call))
register_fake(group_gemm_blockwise_fp8)(lambda call: fake_group_gemm("block", call))
register_fake(group_gemm_rowwise_fp8)(lambda call: fake_group_gemm("row", call))
