"""Public function of the k-grouped GEMM."""

import torch

from moe_numba.grouped_gemm.k_grouped.launch import (
    check_k_grouped_inputs,
    describe_output,
    k_grouped_gemm,
    select_out_dtype,
)
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_flag, make_outputs


@torch_op()
def k_grouped_gemm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Sum outer products over each group's rows: ``out[g] = a[rows].T @ b[rows]``, the gradient of a grouped weight.

    With the gradient of the output for ``a`` and the input for ``b`` it is the gradient of the weight of
    ``group_gemm_bf16``. Neither operand is transposed in memory.

    Parameters
    ----------
    a : tensor [total, n], bfloat16
    b : tensor [total, k], bfloat16
        The columns of a and b are contiguous; n and k are multiples of 8.
    seqlens : tensor [groups], int32
        Number of rows of each group, 1 to 512 groups.
    cu_seqlens : tensor [groups + 1], int32
        First row of each group. Rows that belong to no group have no effect.
    offs : tensor [groups], int32, optional
        End of each group's rows, as for ``torch._grouped_mm``; replaces seqlens and cu_seqlens.
    out : tensor [groups, n, k], optional
        Contiguous, 16-byte aligned output. The call then neither allocates nor synchronises.
    out_dtype : torch.dtype, optional
        ``torch.float32`` or ``torch.bfloat16``; by default that of ``out``, or float32.
    accumulate : bool
        Add to ``out``, which must be given and float32. A group without rows leaves it as it is.

    Returns
    -------
    tensor [groups, n, k]
        From the library that a is from. Zeros for a group without rows.

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU has no wgmma: only GPUs of compute capability 9.0 (H100, H200) have it.

    Notes
    -----
    The interface follows DeepGEMM's k-grouped GEMM and ``torch._grouped_mm`` of two matrices. Products are accumulated
    in float32 in the tensor cores, each output element by one CTA, so results are bit-identical from run to run. Group
    sizes that point outside of a are clamped as by :func:`group_gemm_pertensor_fp8`. Groups may overlap.

    Examples
    --------
    >>> a, b = torch.ones(3, 64).bfloat16(), torch.ones(3, 64).bfloat16()
    >>> ends = torch.tensor([2, 3], dtype=torch.int32)  # two rows of the first group, one of the second
    >>> out = moe_numba.k_grouped_gemm_bf16(a, b, None, None, offs=ends)
    >>> out.shape, out[:, 0, 0].tolist()
    (torch.Size([2, 64, 64]), [2.0, 1.0])
    """
    return k_grouped_gemm(**locals())


@register_fake(k_grouped_gemm_bf16)
def _fake_k_grouped_gemm_bf16(call):
    dtype = select_out_dtype(call.out, call.out_dtype, check_flag("accumulate", call.accumulate))
    row_layout, shape = check_k_grouped_inputs(call.a, call.b, call.seqlens, call.cu_seqlens, call.offs)
    return make_outputs(call.out, describe_output(row_layout, shape, dtype), call.a.device)[0]
