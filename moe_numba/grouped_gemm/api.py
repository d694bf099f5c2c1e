"""The public functions: check, choose tiles, allocate, launch."""

from functools import cache

import torch

from moe_numba import simulator
from moe_numba.arguments import UnsupportedDeviceError, as_outputs, as_tensor, check_out, give_back, require
from moe_numba.grouped_gemm.constants import THREADS, Constants, Layout
from moe_numba.grouped_gemm.kernel import make_kernel
from moe_numba.launch import address, current_stream
from moe_numba.program import MAP, compile_once, program
from moe_numba.tensor_map import tensor_map_value

FP8 = torch.float8_e4m3fn
_MOST_GROUPS, _MOST_TILES = 512, (1 << 31) - 1
SIGNATURE = (MAP, MAP, "int32*", "float32*", "int32*", "int32*", "float32*", "float32*", *("int32",) * 5)
SIGNATURE += ("uint8*", "int32*", "int32", "int32")  # x's own rows, for who gathers

# Average rows of a group up to which a form is taken; see bench/tune_grouped_gemm. A form is the tokens of a part, the
# parts of a tile, the multiplications, the stages, and how many blocks share their tokens.
_FORMS = (
    (10, dict(tokens=32, sizes=(32, 16), stages=10, cluster=2)),
    (40, dict(tokens=64, sizes=(64, 32), stages=8, cluster=2)),
    (120, dict(tokens=128, sizes=(128, 96, 64), stages=6, cluster=2)),
    (None, dict(tokens=144, parts=2, sizes=(144, 136, 128, 120), stages=4)),
)
# With activation a stage has two tiles of weights.
_ACTIVATED_FORMS = (
    (10, dict(tokens=32, sizes=(32, 16), stages=5, cluster=2)),
    (40, dict(tokens=64, sizes=(64, 32), stages=5)),
    (120, dict(tokens=96, sizes=(96, 64), stages=4)),
    (None, dict(tokens=144, sizes=(144, 128, 96), stages=4)),
)
# A factor for each token takes registers, and the way to them shared memory's time: no second part, and none of 144.
_LARGEST_BY_BLOCK = dict(tokens=128, sizes=(128, 96, 64), stages=6)
_LARGEST_ACTIVATED_BY_BLOCK = dict(tokens=96, sizes=(96, 64), stages=4)

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
    x, weight, seqlens, cu_seqlens, x_scale, w_scale, num_seq_per_group_avg=None, offs=None, out=None,
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
    x, weight, seqlens, cu_seqlens, x_scale, w_scale, num_seq_per_group_avg=None, offs=None, out=None,
    gather_indices=None,
):
    """The same for inputs scaled block by block; x_scale and w_scale are :func:`group_gemm_blockwise_fp8`'s."""
    rest = num_seq_per_group_avg, offs, out, True, None, gather_indices
    return _group_gemm("block", x, weight, seqlens, cu_seqlens, x_scale, w_scale, *rest)


def _group_gemm(
    scaling, x, weight, seqlens, cu_seqlens, x_scale, weight_scale, average, offs, out, activated=False,
    constants=None, gather_indices=None,
):
    """All of them; ``constants`` takes the place of the form that the average number of rows asks for."""
    given, x, weight = x, as_tensor(x, "x"), as_tensor(weight, "weight")
    dtype = torch.bfloat16 if scaling == "none" else FP8
    rows, lengths, starts = _check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype)
    groups, n, k = weight.shape
    indices = None if gather_indices is None else _indices(gather_indices, x)
    if scaling == "tensor":
        weight_scale = _scale("y_scale", weight_scale, (groups,), x.device)
    elif scaling == "block":
        blocks = -(-k // 128)
        x_scale = _scale("x_scale", x_scale, (*x.shape[:-1], blocks), x.device)
        weight_scale = _scale("w_scale", weight_scale, (groups, -(-n // 128), blocks), x.device)
    shape = x.shape[:-1] if indices is None else indices.shape
    total = shape.numel()
    if activated:
        if n % 256:
            raise ValueError(f"weight's n is {n}; of gate and up it must be a multiple of 256")
        n //= 2
    wanted = [("y", (*shape, n), FP8 if activated else torch.bfloat16)]
    wanted += [("scale", (*shape, n // 128), torch.float32)] * activated
    outputs = _outputs(out, wanted, x.device)
    if total:
        constants = constants or _constants(scaling, rows, _average(average, total, groups), activated)
        if indices is not None:
            constants = constants._replace(gather=True, cluster=1)
        most = constants.tokens * constants.parts
        if groups * -(-total // most) * -(-n // 128) > _MOST_TILES:
            raise ValueError(f"x has {total} rows, too many for {groups} groups of {n} columns")
        start, line = _launcher(constants, x.device.index or 0), 128 // x.element_size()
        flat = x.view(total, k) if x.dim() == 3 else x
        flat = flat if len(flat) else weight[0]  # of an empty tensor there is no map, and who gathers needs none
        start(
            _blocks(x.device),
            THREADS,
            current_stream(x.device.index or 0),
            tensor_map_value(flat, (Layout(constants).box_tokens, line), swizzle=128),
            tensor_map_value(weight, (1, 128, line), swizzle=128),
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
    results = tuple(give_back(tensor, given) for tensor in outputs)
    return results if activated else results[0]


def _indices(array, x):
    """The rows of x that the product's rows are."""
    tensor = as_tensor(array, "gather_indices")
    _check("gather_indices", tensor, (tensor.numel(),), torch.int32, x.device)
    if x.dim() == 3:
        raise ValueError("gather_indices is given: x must be [tokens, k], not masked")
    return tensor


def _outputs(out, wanted, device):
    """New tensors, or the caller's, checked."""
    if out is None:
        return [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in wanted]
    outputs = [as_tensor(out, "out")] if len(wanted) == 1 else as_outputs(out, len(wanted))
    for tensor, (name, shape, dtype) in zip(outputs, wanted, strict=True):
        check_out(name, tensor, shape, dtype, device)
        if tensor.data_ptr() % 16:
            raise ValueError(f"out's {name} starts at address {tensor.data_ptr():#x}; it must be a multiple of 16")
    return outputs


@cache
def _launcher(constants, device):
    kernel, shared_bytes = make_kernel(constants)
    return program(
        kernel,
        SIGNATURE,
        device,
        threads=THREADS,
        shared_bytes=shared_bytes,
        cluster=constants.cluster if constants.cluster > 1 else None,
        dependent=True,
        key=_key(constants),
    )


def _key(constants):
    return ("grouped_gemm", *constants)


def compile_for(constants):
    """Compile a form, unless its machine code is on disk; no GPU is needed, and it then lies there."""
    compile_once(make_kernel(constants)[0], SIGNATURE, THREADS, key=_key(constants))


@cache
def _blocks(device):
    """One for each multiprocessor; an even number, for clusters of two."""
    return 2 if simulator.ENABLED else torch.cuda.get_device_properties(device).multi_processor_count // 2 * 2


@cache
def _constants(scaling, rows, average, activated=False):
    """The form for groups of so many rows."""
    forms = _ACTIVATED_FORMS if activated else _FORMS
    most, form = next((most, form) for most, form in forms if most is None or average <= most)
    if most is None and scaling == "block":
        form = _LARGEST_ACTIVATED_BY_BLOCK if activated else _LARGEST_BY_BLOCK
    dtype = "bf16" if scaling == "none" else "e4m3"
    return Constants(dtype=dtype, scaling=scaling, rows=rows, activated=activated, **form)


def _require_hopper(device):
    """These tensor core instructions came with compute capability 9.0, and went with it."""
    if not simulator.ENABLED and torch.cuda.get_device_capability(device) != (9, 0):
        major, minor = torch.cuda.get_device_capability(device)
        raise UnsupportedDeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; 9.0 is needed, Hopper's"
        )


def _average(average, total, groups):
    if average is None:
        return -(-total // groups)
    if type(average) is not int or average < 0:
        raise ValueError(f"num_seq_per_group_avg is {average!r}; it must be an int, 0 or more")
    return min(average, 1 << 20)


def _scale(name, array, shape, device):
    tensor = as_tensor(array, name)
    _check(name, tensor, shape, torch.float32, device)
    return tensor


def _check(name, tensor, shape, dtype, device):
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            f"it must be contiguous and {tuple(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be where x is, on {device}")


def _check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype):
    """How rows are given, and the tensors that tell."""
    for name, tensor, dims in (("x", x, "2 or 3"), ("weight", weight, "3")):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if str(tensor.dim()) not in dims:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions")
    require(x.device, (9, 0), "x")
    _require_hopper(x.device)
    groups, n, k = weight.shape
    if not 1 <= groups <= _MOST_GROUPS:
        raise ValueError(f"weight has {groups} groups; 1 to {_MOST_GROUPS} are allowed")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns; it must have weight's k, {k}")
    for name, size in (("n", n), ("k", k)):
        if size % 64 or not size:
            raise ValueError(f"weight's {name} is {size}; it must be a multiple of 64")
    if x.dim() == 3 and (len(x) != groups or not x.is_contiguous()):
        raise ValueError(f"x is {tuple(x.shape)}, strides {x.stride()}; masked, it must be [{groups}, ...], contiguous")
    if offs is not None:
        if seqlens is not None or cu_seqlens is not None or x.dim() == 3:
            raise ValueError("offs is given: seqlens and cu_seqlens must be None, and x not masked")
        rows, wanted = "offsets", {"offs": (offs, groups)}
    elif x.dim() == 3:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given; x is masked, so it must be None")
        rows, wanted = "masked", {"seqlens": (seqlens, groups)}
    else:
        rows, wanted = "lengths", {"seqlens": (seqlens, groups), "cu_seqlens": (cu_seqlens, groups + 1)}
    tensors = []
    for name, (array, size) in wanted.items():
        tensor = as_tensor(array, name)
        _check(name, tensor, (size,), torch.int32, x.device)
        tensors.append(tensor)
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}; it must be where x is, on {x.device}")
    return rows, tensors[0], tensors[1] if len(tensors) > 1 else None
