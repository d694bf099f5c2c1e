"""The public functions: check, choose tiles, allocate, launch."""

from functools import cache

import torch

from moe_numba import simulator
from moe_numba.grouped_gemm.checks import check_average, check_indices, check_inputs, check_scale
from moe_numba.grouped_gemm.configs import form_for, launcher_for
from moe_numba.grouped_gemm.constants import THREADS, Layout
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import address, current_stream
from moe_numba.runtime.tensor_map import encode_tensor_map
from moe_numba.runtime.validate import as_tensor, make_outputs, to_caller_library

FP8 = torch.float8_e4m3fn
_MOST_TILES = (1 << 31) - 1


def group_gemm_pertensor_fp8(
    x, weight, seqlens, cu_seqlens, y_scale, num_seq_per_group_avg=None, offs=None, out=None, gather_indices=None
):
    """Multiply each group's rows with the group's weight, in FP8: ``y = x weight^T * y_scale``, in one launch.

    Products are added up in float32: the tensor cores' sums of 128 products each. Every result is bit-identical from
    run to run.

    Parameters
    ----------
    x : tensor [total, k], float8_e4m3fn
        Rows, group after group. Or [groups, capacity, k], "masked": a group's rows are the first of its ``capacity``.
    weight : tensor [groups, n, k], float8_e4m3fn
        1 to 512 groups; n and k multiples of 64.
    seqlens : tensor [groups], int32
        Rows of each group; it may have none. Read on the GPU: the host does not wait.
    cu_seqlens : tensor [groups + 1], int32, or None
        Where each group's rows begin. None if ``x`` is masked.
    y_scale : tensor [groups], float32
        What a group's results are multiplied with: the scale of x times that of the weight.
    num_seq_per_group_avg : int, optional
        How many rows a group has on average, which decides the tiles and nothing else. Rows by groups if not given.
    offs : tensor [groups], int32, optional
        The end of each group's rows, as ``torch._scaled_grouped_mm`` has it, in place of seqlens and cu_seqlens.
    out : tensor, optional
        Contiguous, bfloat16, to write into; the call then neither allocates nor synchronises.
    gather_indices : tensor [total], int32, optional
        Contiguous. The row of x that each of ``total`` rows is: x, and its scales, are then [tokens, ...], in any
        order, and no copy in the order of groups is made. Rows are zeros where an index is not one of x's.

    Returns
    -------
    tensor [total, n] or [groups, capacity, n], bfloat16
        In ``x``'s library. Rows that belong to no group are not written.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed.
    UnsupportedDeviceError
        The GPU is not of compute capability 9.0.

    Notes
    -----
    After hpc-ops' function of this name. Lengths that point outside of x are cut, so nothing is read or written out of
    bounds. It runs on the caller's current stream, and can be captured in a CUDA graph after one call has compiled it.
    """
    rest = num_seq_per_group_avg, offs, out, False, None, gather_indices
    return _group_gemm("tensor", x, weight, seqlens, cu_seqlens, None, y_scale, *rest)


def group_gemm_blockwise_fp8(
    x,
    weight,
    seqlens,
    cu_seqlens,
    x_scale,
    w_scale,
    num_seq_per_group_avg=None,
    offs=None,
    out=None,
    gather_indices=None,
):
    """The same for inputs that are scaled block by block, as DeepSeek-V3's are.

    Parameters
    ----------
    x, weight, seqlens, cu_seqlens, num_seq_per_group_avg, offs, out, gather_indices
        As for :func:`group_gemm_pertensor_fp8`.
    x_scale : tensor [total, k / 128] or [groups, capacity, k / 128], float32
        A scale for each 128 elements of a row; contiguous, as a cast gives it. k / 128 is rounded up.
    w_scale : tensor [groups, n / 128, k / 128], float32
        A scale for each 128 by 128 of a weight; contiguous. Both are rounded up.
    """
    rest = num_seq_per_group_avg, offs, out, False, None, gather_indices
    return _group_gemm("block", x, weight, seqlens, cu_seqlens, x_scale, w_scale, *rest)


def group_gemm_bf16(
    x, weight, seqlens, cu_seqlens, num_seq_per_group_avg=None, offs=None, out=None, gather_indices=None
):
    """The same in bfloat16, without scales: ``torch._grouped_mm``'s case.

    Parameters
    ----------
    x, weight : tensor, bfloat16
    seqlens, cu_seqlens, num_seq_per_group_avg, offs, out, gather_indices
        As for :func:`group_gemm_pertensor_fp8`.
    """
    rest = num_seq_per_group_avg, offs, out, False, None, gather_indices
    return _group_gemm("none", x, weight, seqlens, cu_seqlens, None, None, *rest)


def group_gemm_silu_and_mul_pertensor_fp8(
    x, weight, seqlens, cu_seqlens, y_scale, num_seq_per_group_avg=None, offs=None, out=None, gather_indices=None
):
    """An expert's first product and its activation in one launch: ``silu(gate) * up`` in FP8, ready for the second.

    Parameters
    ----------
    weight : tensor [groups, n, k], float8_e4m3fn
        The upper half of the n rows makes gate, the lower half up; n is a multiple of 256.
    x, seqlens, cu_seqlens, y_scale, num_seq_per_group_avg, offs, gather_indices
        As for :func:`group_gemm_pertensor_fp8`.
    out : (tensor, tensor), optional
        Contiguous tensors to write into.

    Returns
    -------
    y : tensor [total, n / 2], float8_e4m3fn
        silu(gate) * up, where gate and up are rounded to bfloat16 as if another kernel had read them. Masked if x is.
    scale : tensor [total, n / 256], float32
        Of each 128 elements of a row: their largest by 448.
    """
    rest = num_seq_per_group_avg, offs, out, True, None, gather_indices
    return _group_gemm("tensor", x, weight, seqlens, cu_seqlens, None, y_scale, *rest)


def group_gemm_silu_and_mul_blockwise_fp8(
    x,
    weight,
    seqlens,
    cu_seqlens,
    x_scale,
    w_scale,
    num_seq_per_group_avg=None,
    offs=None,
    out=None,
    gather_indices=None,
):
    """The same for inputs scaled block by block; x_scale and w_scale are :func:`group_gemm_blockwise_fp8`'s."""
    rest = num_seq_per_group_avg, offs, out, True, None, gather_indices
    return _group_gemm("block", x, weight, seqlens, cu_seqlens, x_scale, w_scale, *rest)


def _group_gemm(
    scaling,
    x,
    weight,
    seqlens,
    cu_seqlens,
    x_scale,
    weight_scale,
    average,
    offs,
    out,
    activated=False,
    constants=None,
    gather_indices=None,
):
    """All of them; ``constants`` takes the place of the form that the average number of rows asks for."""
    given, x, weight = x, as_tensor(x, "x"), as_tensor(weight, "weight")
    dtype = torch.bfloat16 if scaling == "none" else FP8
    rows, lengths, starts = check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype)
    groups, n, k = weight.shape
    indices = None if gather_indices is None else check_indices(gather_indices, x)
    if scaling == "tensor":
        weight_scale = check_scale("y_scale", weight_scale, (groups,), x.device)
    elif scaling == "block":
        blocks = -(-k // 128)
        x_scale = check_scale("x_scale", x_scale, (*x.shape[:-1], blocks), x.device)
        weight_scale = check_scale("w_scale", weight_scale, (groups, -(-n // 128), blocks), x.device)
    shape = x.shape[:-1] if indices is None else indices.shape
    total = shape.numel()
    if activated:
        if n % 256:
            raise ValueError(f"weight's n is {n}; of gate and up it must be a multiple of 256")
        n //= 2
    wanted = [("y", (*shape, n), FP8 if activated else torch.bfloat16)]
    wanted += [("scale", (*shape, n // 128), torch.float32)] * activated
    outputs = make_outputs(out, wanted, x.device, aligned=[name for name, _, _ in wanted])
    if total:
        constants = constants or form_for(scaling, rows, check_average(average, total, groups), activated)
        if indices is not None:
            constants = constants._replace(gather=True, cluster=1)
        most = constants.tokens * constants.parts
        if groups * -(-total // most) * -(-n // 128) > _MOST_TILES:
            raise ValueError(f"x has {total} rows, too many for {groups} groups of {n} columns")
        start, line = launcher_for(constants, x.device.index or 0), 128 // x.element_size()
        flat = x.view(total, k) if x.dim() == 3 else x
        flat = flat if len(flat) else weight[0]  # of an empty tensor there is no map, and who gathers needs none
        start(
            _blocks(x.device),
            THREADS,
            current_stream(x.device.index or 0),
            encode_tensor_map(flat, (Layout(constants).box_tokens, line), swizzle=128),
            encode_tensor_map(weight, (1, 128, line), swizzle=128),
            address(outputs[0]),
            address(outputs[-1]),
            address(lengths),
            address(lengths if starts is None else starts),
            address(lengths if x_scale is None else x_scale),
            address(lengths if weight_scale is None else weight_scale),
            groups,
            total,
            x.shape[1] if rows == "masked" else 0,
            n,
            k,
            address(flat),
            address(lengths if indices is None else indices),
            len(x),
            0 if indices is None else x.stride(0) * x.element_size(),
        )
    if out is not None:
        return out
    results = tuple(to_caller_library(tensor, given) for tensor in outputs)
    return results if activated else results[0]


@cache
def _blocks(device):
    """One for each multiprocessor; an even number, for clusters of two."""
    return 2 if simulator.ENABLED else devices.gpu_of(device).sm_count // 2 * 2
