"""Checks of the grouped GEMM's arguments. Every error names the argument, its value and what is allowed."""

import numbers

import torch

from moe_numba.grouped_gemm.common.constants import MAX_AVERAGE, MAX_GROUPS, MAX_TILES, PACKED_SCALES
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import (
    UnsupportedDeviceError,
    check_choice,
    check_device,
    check_dtype,
    check_flag,
    check_int,
    check_tensor,
    is_fake,
    reasons,
)

# The kernels count rows, columns and the bytes of a row in 32 bits, also when rounded up to whole tiles.
MAX_SIZE = MAX_TILES - 1024
_OF_WEIGHT = "weight has {} groups", "weight's n is {}"  # reasons for a shape [groups, n]


def check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype, m_indices=None, has_m_indices=True):
    """Check x, weight and the group sizes, without the length of ``m_indices``.

    ``has_m_indices`` is whether the public function has that parameter.

    Returns
    -------
    str
        The row layout: "lengths", "offsets" or "masked"; see ``GemmConfig``.
    """
    for name, tensor, dims in (("x", x, "2 or 3"), ("weight", weight, "3")):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if str(tensor.dim()) not in dims:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions")
    check_device(x.device, "x")
    check_gpu(x.device)
    groups, n, k = weight.shape
    if not 1 <= groups <= MAX_GROUPS:
        raise ValueError(f"weight has {groups} groups; 1 to {MAX_GROUPS} are allowed")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns; it must have weight's k, {k}")
    for name, size in (("n", n), ("k", k)):
        if size % 16 or not size:
            raise ValueError(f"weight's {name} is {size}; it must be a multiple of 16")
        if (most := MAX_SIZE if name == "n" else MAX_SIZE // x.element_size()) < size:
            raise ValueError(f"weight's {name} is {size}; at most {most} are allowed")
    masked = x.dim() == 3
    if masked:
        check_tensor("x", x, shape=(groups, "capacity", k), because=("weight has {} groups",), contiguous=True)
    if m_indices is not None:
        if seqlens is not None or cu_seqlens is not None or offs is not None or masked:
            raise ValueError(
                "m_indices is given: seqlens, cu_seqlens and offs must be None, and x must have 2 dimensions"
            )
        row_layout, sizes, others = "lengths", [], ""  # which a kernel computes from m_indices
    elif offs is not None:
        if seqlens is not None or cu_seqlens is not None or masked:
            raise ValueError("offs is given: seqlens and cu_seqlens must be None, and x must have 2 dimensions")
        row_layout, sizes, others = "offsets", [("offs", offs, groups)], ""
    elif masked:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given: x must have 2 dimensions; for a masked x it must be None")
        row_layout, sizes, others = "masked", [("seqlens", seqlens, groups)], ""
    else:
        row_layout, sizes = "lengths", [("seqlens", seqlens, groups), ("cu_seqlens", cu_seqlens, groups + 1)]
        others = ", or offs or m_indices must be given" if has_m_indices else ", or offs must be given"
    for name, tensor, size in sizes:
        because = (f"weight has {groups} groups",)
        _check_array(name, tensor, (size,), torch.int32, x.device, because, others=others)
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}; it must be where x is, on {x.device}")
    return row_layout


def is_mn_major(weight):
    """Whether a bfloat16 weight [groups, n, k] is a transposed view: its n is contiguous, and its k is not.

    Refuses a weight of which neither is contiguous.
    """
    if weight.dtype != torch.bfloat16 or weight.stride(2) == 1:
        return False
    if weight.stride(1) != 1:
        raise ValueError(f"weight has strides {weight.stride()}; its last dimension must be contiguous, or its second")
    return True


def has_wgmma(device):
    """Whether a GPU has wgmma; True for a device whose tensors have no data."""
    return is_fake(device) or devices.gpu_of(device).has_wgmma


def check_gpu(device):
    """Raise for GPUs that have neither ``cp.async`` nor ``mma.sync`` of bfloat16."""
    if is_fake(device):
        return
    gpu = devices.gpu_of(device)
    if gpu.capability < (8, 0):
        raise UnsupportedDeviceError(
            "{} has compute capability {}.{}; the grouped GEMM needs 8.0 or newer (cp.async, mma.sync of bfloat16): on "
            "this GPU, multiply the rows of each group by torch.mm in float16".format(gpu.name, *gpu.capability)
        )


def check_scales(scaling, x, weight, x_scale, weight_scale):
    """Check the scales of x and of the weight (or of the product)."""
    groups, n, k = weight.shape
    if scaling == "tensor":
        _check_array("y_scale", weight_scale, (groups,), torch.float32, x.device, _OF_WEIGHT)
        if x_scale is not None:
            _check_number("x_scale", x_scale, x.device)
    elif scaling == "row":
        _check_array("x_scale", x_scale, tuple(x.shape[:-1]), torch.float32, x.device, _of_rows(x))
        _check_array("w_scale", weight_scale, (groups, n), torch.float32, x.device, _OF_WEIGHT)
    elif scaling == "block":
        of_x, of_weight = (
            (*_of_rows(x), f"x has {k} columns"),
            (_OF_WEIGHT[0], f"weight's n is {n}", f"weight's k is {k}"),
        )
        for name, scale, shape, because in (
            ("x_scale", x_scale, (*x.shape[:-1], -(-k // FP8_SCALE_BLOCK)), of_x),
            ("w_scale", weight_scale, (groups, -(-n // FP8_SCALE_BLOCK), -(-k // FP8_SCALE_BLOCK)), of_weight),
        ):
            _check_block_scale(name, scale, shape, n, x.device, because)


def _check_block_scale(name, scale, shape, n, device, because):
    """Check block scales: float32 of a shape, or packed exponents, of a weight with a scale for each of ``n`` rows."""
    is_weight = name == "w_scale"
    if not is_packed(scale):
        dtypes = torch.float32, torch.int32  # for the message: int32 would be packed
        _check_array(name, scale, shape, dtypes, device, because, contiguous=is_weight)
        return
    packed = (shape[0], n) if is_weight else shape[:-1]
    shape = *packed, -(-shape[-1] // PACKED_SCALES)
    _check_array(name, scale, shape, torch.int32, device, because, contiguous=False)
    if is_weight and not scale.mT.is_contiguous():
        raise ValueError(
            f"w_scale has strides {scale.stride()}; packed exponents must have contiguous rows, w_scale.mT contiguous, "
            "as DeepGEMM's get_mn_major_tma_aligned_packed_ue8m0_tensor returns them"
        )


def is_packed(scale):
    """Whether block scales are packed exponents, see ``block_scales.py``."""
    return scale is not None and scale.dtype == torch.int32


def check_options(options, n, scaling):
    """Check the options of the epilogue that are not tensors; ``n`` is the weight's."""
    for name in ("accumulate", "silu_and_mul", "use_fast_accum"):
        check_flag(name, getattr(options, name))
    check_dtype("out_dtype", options.out_dtype, (torch.bfloat16, torch.float32))
    if not options.silu_and_mul:
        return
    check_choice("activation", options.activation, ("silu", "swigluoai"))
    for name in ("alpha", "limit"):
        check_positive(name, getattr(options, name))
    if scaling == "block" and options.activation != "silu":
        raise ValueError(
            f"activation is {options.activation!r}; with block scales it must be 'silu': a 128 x 128 block of "
            "interleaved rows would belong to gate and to up"
        )
    if scaling == "block" and n % 256:
        raise ValueError(
            f"weight's n is {n}; with block scales, gate and up, it must be a multiple of 256: a 128 x 128 block of "
            "weight would belong to gate and to up otherwise"
        )
    if n % 32:
        raise ValueError(f"weight's n is {n}; with gate and up it must be a multiple of 32")


def check_average(average):
    """Check ``num_seq_per_group_avg``; return the number that selects a configuration."""
    return min(check_int("num_seq_per_group_avg", average, 0), MAX_AVERAGE)


def check_positive(name, value):
    """Raise for what is not a number, not positive, or zero, subnormal or infinite in float32, also times log2(e)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not 1.2e-38 <= value <= 1e38:
        raise ValueError(f"{name} is {value}; it must be positive and finite in float32, from 1.2e-38 to 1e38")


def check_given_config(config, groups, **wanted):
    """Raise for an explicit configuration that was made for other arguments.

    ``wanted`` are the values that its fields must have; a field that its kernel does not have is not compared.
    """
    for name, value in wanted.items():
        if (found := getattr(config, name, value)) != value:
            raise ValueError(f"config has {name} {found!r}; for these arguments it must be {value!r}")
    if config.max_groups < groups:
        raise ValueError(f"config has max_groups {config.max_groups}; weight has {groups} groups")


def check_arguments(scaling, tensors, options, has_out):
    """Check everything except outputs; return the row layout, as :func:`check_inputs`.

    ``has_out`` is whether the call has an output argument.
    """
    dtype = torch.bfloat16 if scaling in ("none", "mxfp4") else torch.float8_e4m3fn
    x, weight, indices = tensors.x, tensors.weight, tensors.gather_indices
    sizes = tensors.seqlens, tensors.cu_seqlens, tensors.offs
    row_layout = check_inputs(x, weight, *sizes, dtype, tensors.m_indices, scaling != "mxfp4")
    if indices is not None:
        check_indices(indices, x)
    check_scales(scaling, x, weight, tensors.x_scale, tensors.w_scale)
    check_options(options, weight.shape[1], scaling)
    if tensors.out_scale is not None:
        if scaling != "tensor" or not options.silu_and_mul:
            raise ValueError("out_scale is given; it is allowed only with silu_and_mul and per-tensor scales")
        _check_number("out_scale", tensors.out_scale, x.device)
    if is_mn_major(weight) and options.silu_and_mul:
        raise ValueError(
            f"weight has strides {weight.stride()}; with an activation its last dimension must be contiguous"
        )
    if tensors.x_low is not None or tensors.weight_low is not None:
        check_low_rank(scaling, tensors)
    rows, of_rows, (groups, n, _) = tuple(rows_of(tensors)), _of_rows_of(tensors), weight.shape
    if tensors.m_indices is not None:
        _check_array("m_indices", tensors.m_indices, rows, torch.int32, x.device, of_rows)
    if tensors.bias is not None:
        _check_array("bias", tensors.bias, (groups, n), (torch.bfloat16, torch.float32), x.device, _OF_WEIGHT)
    if tensors.row_weights is not None:
        _check_array("row_weights", tensors.row_weights, rows, torch.float32, x.device, of_rows)
    if options.accumulate and not has_out:
        raise ValueError("accumulate is True: out must be given, in float32")
    if tensors.scatter_indices is not None:
        _check_array("scatter_indices", tensors.scatter_indices, rows, torch.int32, x.device, of_rows)
        if not has_out:
            raise ValueError("scatter_indices is given: out must be given, [any number of rows, n]")
        if tensors.out.dim() != 2:
            found = tuple(tensors.out.shape)
            raise ValueError(f"out has shape {found}; with scatter_indices it must be [any number of rows, n]")
    return row_layout


def check_low_rank(scaling, tensors):
    """Check ``x_low`` and ``weight_low``, of which at least one is given."""
    x, weight, x_low, weight_low = tensors.x, tensors.weight, tensors.x_low, tensors.weight_low
    for name, missing in (("x_low", "weight_low"), ("weight_low", "x_low")):
        if getattr(tensors, missing) is None:
            raise ValueError(f"{name} is given, {missing} is None; both must be given, or none of them")
    if scaling != "none":
        raise ValueError("x_low and weight_low are given; they are allowed only with x and weight in bfloat16")
    if tensors.gather_indices is not None:
        raise ValueError(
            "x_low and gather_indices are given: gather_indices must be None, and x have the order of the groups, as "
            "permute_tokens returns it"
        )
    checked, because = dict(dtype=torch.bfloat16, device=(x.device, "x")), (*_of_rows(x), "weight_low has {} columns")
    check_tensor("weight_low", weight_low, shape=(*weight.shape[:2], "r"), because=_OF_WEIGHT, **checked)
    rank = weight_low.shape[2]
    check_tensor("x_low", x_low, shape=(*x.shape[:-1], rank), because=because, contiguous=x.dim() == 3, **checked)
    if not rank or rank % 8 or rank > MAX_SIZE // 2:
        raise ValueError(
            f"x_low and weight_low have {rank} columns; they must have a multiple of 8, and at most {MAX_SIZE // 2}"
        )
    if is_mn_major(weight) != is_mn_major(weight_low):
        raise ValueError(
            f"weight has strides {weight.stride()}, weight_low {weight_low.stride()}; the last dimension of both must "
            "be contiguous, or the second of both"
        )


def rows_of(tensors):
    """Return the shape of the product without its columns."""
    return tensors.x.shape[:-1] if tensors.gather_indices is None else tensors.gather_indices.shape


def _of_rows(x):
    """Return the reasons for a shape of one element for each row of x."""
    return ("x has {} rows",) if x.dim() == 2 else ("x has {} groups", "x has {} rows per group")


def _of_rows_of(tensors):
    """Return the reasons for a shape of one element for each row of the product."""
    return _of_rows(tensors.x) if tensors.gather_indices is None else ("gather_indices has {} elements",)


def check_rows(tensors):
    """Raise for more rows, or rows farther apart, than the kernels can count."""
    x, indices = tensors.x, tensors.gather_indices
    for name, count in (("x", x.shape[:-1].numel()), ("gather_indices", 0 if indices is None else len(indices))):
        if count > MAX_SIZE:
            raise ValueError(f"{name} has {count} rows; at most {MAX_SIZE} are allowed")
    if indices is not None and x.stride(0) * x.element_size() > MAX_TILES:
        raise ValueError(f"x has strides {x.stride()}; with gather_indices its rows must be less than 2 GiB apart")


def describe_outputs(tensors, n, scaling, options):
    """Return name, shape, dtype and reason of each output; ``n`` is the weight's.

    With ``tensors.out``, an output that rows are scattered to, the number of rows is that of ``out``. With
    ``out_scale`` FP8 results have no scales of their own. With ``store_gate_up`` gate and up are an output.
    """
    shape, because = rows_of(tensors), (*_of_rows_of(tensors), f"weight's n is {n}")
    if options.silu_and_mul and scaling in ("tensor", "block"):
        y = "y", (*shape, n // 2), torch.float8_e4m3fn, because
        return [y] if tensors.out_scale is not None else [y, ("scale", (*shape, -(-n // 256)), torch.float32, because)]
    if tensors.out is not None:
        shape, because = tensors.out.shape[:1], ("", because[-1])
    dtype = torch.float32 if options.accumulate else options.out_dtype
    y = "y", (*shape, n // 2 if options.silu_and_mul else n), dtype, because
    if not options.store_gate_up:
        return [y]
    if n % 128:
        raise ValueError(f"weight's n is {n}; with store_gate_up it must be a multiple of 128")
    return [y, ("gate_up", (*shape, n), dtype, because)]


def check_indices(indices, x):
    """Check ``gather_indices``."""
    _check_array("gather_indices", indices, (indices.numel(),), torch.int32, x.device)
    if x.dim() == 3:
        raise ValueError("gather_indices is given: x must be [tokens, k], not masked")


def scale_strides(x_scale):
    """Return the strides of ``x_scale``: rows, blocks of k, and groups beyond the rows of one (0 without groups)."""
    *group, row, k_block = x_scale.stride()
    if max(row, k_block) >= 1 << 31:
        raise ValueError(f"x_scale has strides {x_scale.stride()}; those of rows and blocks must be below 2^31")
    return row, k_block, group[0] - x_scale.shape[1] * row if group else 0


def _check_number(name, tensor, device):
    """Check a tensor of one float32."""
    check_tensor(name, tensor, dtype=torch.float32, contiguous=True, device=(device, "x"))
    if tensor.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have one element")


def _check_array(name, tensor, shape, dtype, device, because=(), contiguous=True, others=""):
    """Check a tensor; ``others`` are the arguments that can replace one that is None, for the message."""
    if tensor is None:
        raise TypeError(f"{name} is None; it must be a tensor {shape} of {dtype}{reasons((), shape, because)}{others}")
    layout = dict(shape=shape, because=because, contiguous=contiguous)
    check_tensor(name, tensor, dtype=dtype, device=(device, "x"), **layout)
