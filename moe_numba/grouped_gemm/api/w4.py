"""Public functions of the grouped GEMM with 4-bit weights, in MXFP4."""

import torch

from moe_numba.grouped_gemm.common.constants import ALPHA, LIMIT
from moe_numba.grouped_gemm.w4.launch import fake_group_gemm, group_gemm
from moe_numba.grouped_gemm.w4.packing import pack_mxfp4
from moe_numba.runtime.torch_op import register_fake, torch_op

__all__ = ["group_gemm_mxfp4", "group_gemm_silu_and_mul_mxfp4", "pack_mxfp4"]


@torch_op()
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
) -> torch.Tensor:
    """Multiply each group's rows in bf16 with the group's MXFP4 weight: ``y = x @ weight.T``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
        Rows, group after group; or "masked", where each group uses the first of its ``capacity`` rows.
    weight : tensor [groups, ceil(n / 64), ceil(k / 64), 2176], uint8
        What :func:`pack_mxfp4` returns without ``gate_up``: 1 to 512 groups; n and k multiples of 32.
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
        Rows of the weight before packing, a multiple of 32. A packed weight does not tell it: without ``n`` the result
        has 64 * ceil(n / 64) columns, such as 128 for 96 rows, and the last 32 are those of padding, rows of zeros.

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
    Weights are decoded to bf16 exactly, and products are accumulated in float32 in the tensor cores over all of k.
    Intermediate results are 2**-32 times the product, so magnitudes below 2**-94 are lost. Results are bit-identical
    from run to run. The format is that of the weights of gpt-oss (OCP Microscaling Formats 1.0).

    Examples
    --------
    >>> blocks = torch.full((1, 64, 2, 16), 0x22, dtype=torch.uint8)  # 4-bit codes of 1.0, two in a byte
    >>> scales = torch.full((1, 64, 2), 127 - 6, dtype=torch.uint8)  # 2**-6 for each 32 elements
    >>> weight = moe_numba.pack_mxfp4(blocks, scales)
    >>> x, ends = torch.ones(3, 64).bfloat16(), torch.tensor([3], dtype=torch.int32)
    >>> moe_numba.group_gemm_mxfp4(x, weight, None, None, offs=ends)[:, 0].tolist()
    [1.0, 1.0, 1.0]
    """
    return group_gemm(locals())


@torch_op()
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
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> torch.Tensor:
    """Compute an expert's first GEMM with an MXFP4 weight and its activation, such as ``silu(gate) * up``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
    weight : tensor [groups, n / 64, ceil(k / 64), 136, 16], uint8
        What :func:`pack_mxfp4` returns with ``gate_up``; n, the rows of gate and up, is a multiple of 64.
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

    Returns
    -------
    tensor [total, n / 2] or [groups, capacity, n / 2], bfloat16
        Computed in float32 and rounded once; exponential and reciprocal are approximate.

    See Also
    --------
    group_gemm_mxfp4 : Describes the weights and the errors.
    group_gemm_silu_and_mul_bf16 : Describes the activations.

    Examples
    --------
    >>> blocks = torch.full((1, 2 * 64, 2, 16), 0x22, dtype=torch.uint8)  # 4-bit codes of 1.0, two in a byte
    >>> scales = torch.full((1, 2 * 64, 2), 127 - 6, dtype=torch.uint8)  # 2**-6 for each 32 elements
    >>> weight = moe_numba.pack_mxfp4(blocks, scales, gate_up="stacked")
    >>> x, ends = torch.ones(3, 64).bfloat16(), torch.tensor([3], dtype=torch.int32)
    >>> y = moe_numba.group_gemm_silu_and_mul_mxfp4(x, weight, None, None, offs=ends)
    >>> y.shape, y[0, 0].item()
    (torch.Size([3, 64]), 0.73046875)
    """
    return group_gemm(locals(), silu_and_mul=True)


register_fake(group_gemm_mxfp4)(fake_group_gemm)
register_fake(group_gemm_silu_and_mul_mxfp4)(lambda call: fake_group_gemm(call, silu_and_mul=True))
