"""The casts to FP8 and back: the public functions, which check, allocate and launch."""

import torch

from moe_numba.expert_parallel.kernels.fp8_cast import (
    BACK_GROUPS,
    GROUP,
    THREADS,
    make_cast_back,
    make_cast_to_fp8,
    to_fp8_groups,
)
from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.validate import (
    as_tensor,
    check_aligned,
    check_device,
    check_out,
    make_outputs,
    to_caller_library,
)

FP8 = torch.float8_e4m3fn
_MOST_TOKENS, _MOST_HIDDEN = 1 << 31, 1 << 20
_WARPS = THREADS // 32
_TO_FP8 = {
    torch.bfloat16: ("bfloat16", ("uint16*", "uint64*", "float32*", "int64")),
    torch.float32: ("float32", ("float32*", "uint32*", "float32*", "int64")),
}
_BACK = ("uint8*", "int32*", "uint16*", "int64", "int64", "int64")


def per_token_cast_to_fp8(x, out=None):
    """Cast tokens to FP8, with a scale for each 128 neighbours of a token, in one launch.

    Parameters
    ----------
    x : tensor [tokens, hidden], bfloat16 or float32
        Contiguous, at an address that is a multiple of 16. Hidden is a multiple of 8; if it is none of 128, the last
        scale of a token is that of the elements that are left.
    out : (values, scales), optional
        Contiguous tensors to write into, the values at a multiple of 16; the call then neither allocates nor
        synchronises.

    Returns
    -------
    values : tensor [tokens, hidden], float8_e4m3fn
        ``x * (448 / amax)``, rounded to the nearest, of two to the even one. amax is the largest size among the 128,
        and at least 1e-4: what is smaller than that does not become 448.
    scales : tensor [tokens, hidden / 128], float32
        ``amax / 448``; hidden / 128 is rounded up. Both are in ``x``'s library.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 9.0.

    Notes
    -----
    After DeepEP's function of this name (tests/utils.py), with the bits that torch gives it on a GPU: 448 / amax is the
    rounded reciprocal times 448, and amax / 448 a product with the rounded 1 / 448.

    Where one of the 128 is NaN, all of them and their scale become NaN. Where one is infinite, the scale is infinite,
    what is infinite becomes NaN and the others zero. Other groups are as ever.
    """
    given, x = x, as_tensor(x, "x")
    if x.dtype not in _TO_FP8:
        raise TypeError(f"x is {x.dtype}; it must be torch.bfloat16 or torch.float32")
    tokens, hidden = _check_rows("x", x)
    per_row = -(-hidden // GROUP)
    wanted = (("values", (tokens, hidden), FP8), ("scales", (tokens, per_row), torch.float32))
    results = make_outputs(out, wanted, x.device, aligned=("values",))
    if tokens:
        device, (dtype, signature) = x.device.index or 0, _TO_FP8[x.dtype]
        launcher(make_cast_to_fp8(dtype, hidden), signature, device, dependent=True)(
            -(-tokens * per_row // (_WARPS * to_fp8_groups(dtype))),
            THREADS,
            current_stream(device),
            address(x),
            *map(address, results),
            tokens * per_row,
        )
    return out if out is not None else tuple(to_caller_library(tensor, given) for tensor in results)


def per_token_cast_back(x_fp8, x_scales, out=None):
    """Cast tokens from FP8 to bfloat16, each 128 neighbours multiplied with their scale, in one launch.

    Parameters
    ----------
    x_fp8 : tensor [tokens, hidden], float8_e4m3fn
        Contiguous, at an address that is a multiple of 16; hidden is a multiple of 8.
    x_scales : tensor [tokens, hidden / 128], float32, or [tokens, hidden / 512], int32
        In any strides, such as column after column; the number of columns is rounded up. An int32 is four scales that
        are powers of two, the first in its lowest byte: each byte is the exponent of a float32.
    out : tensor [tokens, hidden], bfloat16, optional
        Contiguous, at a multiple of 16, to write into; the call then neither allocates nor synchronises.

    Returns
    -------
    tensor [tokens, hidden], bfloat16
        In ``x_fp8``'s library. The product is reckoned in float32 and rounded once; NaN stays NaN.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 9.0.

    Notes
    -----
    After DeepEP's function of this name (tests/utils.py). That reads the exponents of int32 scales as signed, so that a
    scale of 2 or more would be negative; here they are unsigned.
    """
    given, x, scales = x_fp8, as_tensor(x_fp8, "x_fp8"), as_tensor(x_scales, "x_scales")
    if x.dtype != FP8:
        raise TypeError(f"x_fp8 is {x.dtype}; it must be {FP8}")
    if scales.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"x_scales is {scales.dtype}; it must be torch.float32 or torch.int32")
    tokens, hidden = _check_rows("x_fp8", x)
    per_row, packed = -(-hidden // GROUP), scales.dtype == torch.int32
    shape = (tokens, -(-per_row // 4) if packed else per_row)
    if scales.shape != shape or scales.device != x.device:
        raise ValueError(
            f"x_scales is {scales.dtype} {tuple(scales.shape)} on {scales.device}; it must be {shape} on {x.device}"
        )
    if out is None:
        result = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    else:
        result = as_tensor(out, "out")
        check_out("tensor", result, (tokens, hidden), torch.bfloat16, x.device)
        check_aligned("out", result)
    if tokens:
        device = x.device.index or 0
        launcher(make_cast_back(hidden, packed), _BACK, device, dependent=True)(
            -(-tokens * per_row // (_WARPS * BACK_GROUPS)),
            THREADS,
            current_stream(device),
            address(x),
            address(scales),
            address(result),
            tokens * per_row,
            *scales.stride(),
        )
    return out if out is not None else to_caller_library(result, given)


def _check_rows(name, x):
    """The tokens and hidden of an input, which must be as the kernels read it."""
    if x.dim() != 2 or not x.is_contiguous():
        shape = f"shape {tuple(x.shape)}, strides {x.stride()}"
        raise ValueError(f"{name} has {shape}; it must be [tokens, hidden], contiguous")
    check_device(x.device, (9, 0), name)
    tokens, hidden = x.shape
    if hidden % 8 or not 8 <= hidden <= _MOST_HIDDEN:
        raise ValueError(f"{name}'s hidden is {hidden}; multiples of 8 from 8 to {_MOST_HIDDEN} are allowed")
    if tokens > _MOST_TOKENS:
        raise ValueError(f"{name} has {tokens} tokens; at most {_MOST_TOKENS} are allowed")
    check_aligned(name, x)
    return tokens, hidden
