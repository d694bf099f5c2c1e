"""Public functions of the grouped GEMM with MXFP4 weights."""

import torch

from moe_numba.grouped_gemm.launch_mxfp4 import fake_group_gemm, group_gemm
from moe_numba.grouped_gemm.packing_mxfp4 import pack_mxfp4
from moe_numba.runtime.torch_op import call_op, needs_dispatch, register_fake, torch_op

__all__ = ["group_gemm_mxfp4", "pack_mxfp4"]


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
    n: int | None = None,
) -> torch.Tensor:
    """Multiply each group's rows in bf16 with the group's MXFP4 weight: ``y = x @ weight.T``.

    Parameters
    ----------
    x : tensor [total, k] or [groups, capacity, k], bfloat16
        Rows, group after group; or "masked", where each group uses the first of its ``capacity`` rows.
    weight : tensor [groups, ceil(n / 64), ceil(k / 64), 2176], uint8
        What :func:`pack_mxfp4` returns: 1 to 512 groups; n and k multiples of 32.
    seqlens : tensor [groups], int32
        Number of rows of each group, 0 or more.
    cu_seqlens : tensor [groups + 1], int32, or None
        First row of each group. None if ``x`` is masked.
    num_seq_per_group_avg : int, optional
        Expected average number of rows per group, which selects the tile size.
    offs : tensor [groups], int32, optional
        End of each group's rows; replaces seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous bfloat16 output. The call then neither allocates nor synchronises.
    gather_indices : tensor [total], int32, optional
        Row i of the product uses row ``gather_indices[i]`` of x, and zeros if that is out of bounds.
    n : int, optional
        Columns of y if the weight had 32 rows less than a multiple of 64.

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], bfloat16
        Rows that belong to no group are not written.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU has no wgmma, as all but those of compute capability 9.0 (H100, H200).

    See Also
    --------
    group_gemm_pertensor_fp8 : Describes group sizes and gathering in full.

    Notes
    -----
    Weights are decoded to bf16 exactly, and products are accumulated in float32 in the tensor cores over all of k.
    Intermediate results are 2**-32 times the product, so magnitudes below 2**-94 are lost. Results are bit-identical
    from run to run. The format is that of the weights of gpt-oss (OCP Microscaling Formats 1.0).
    """
    if needs_dispatch(x, weight):
        groups = seqlens, cu_seqlens, num_seq_per_group_avg, offs
        return call_op("group_gemm_mxfp4", x, weight, *groups, out, gather_indices, n)
    return group_gemm(x, weight, seqlens, cu_seqlens, num_seq_per_group_avg, offs, out, gather_indices, n)


register_fake(group_gemm_mxfp4)(fake_group_gemm)
