"""``per_token_cast_to_fp8`` and ``per_token_cast_back``: check, allocate and launch."""

import torch

from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.quantise.fp8_cast_kernels import (
    GROUPS_PER_WARP_BACK,
    THREADS,
    groups_per_warp,
    make_cast_back,
    make_cast_to_fp8,
)
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_device, check_tensor, make_outputs, reasons

FP8 = torch.float8_e4m3fn
_MAX_TOKENS, _MAX_HIDDEN = 1 << 31, 1 << 20
_WARPS = THREADS // 32
_TO_FP8 = {
    torch.bfloat16: ("bfloat16", ("uint16*", "uint64*", "float32*", "int64")),
    torch.float32: ("float32", ("float32*", "uint32*", "float32*", "int64")),
}
_BACK_SIGNATURE = ("uint8*", "int32*", "uint16*", "int64", "int64", "int64")
_plans: dict = {}  # of both casts


@torch_op()
def per_token_cast_to_fp8(
    x: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast tokens to FP8, with one scale per 128 consecutive elements of a token, in one launch.

    Parameters
    ----------
    x : torch.Tensor [tokens, hidden], bfloat16 or float32
        Contiguous, 16-byte aligned. ``hidden`` is a multiple of 8; if it is not a multiple of 128, the last group of a
        token has the remaining elements.
    out : (values, scales), optional
        Contiguous tensors to write into, the values 16-byte aligned; the call then neither allocates nor synchronises.

    Returns
    -------
    values : torch.Tensor [tokens, hidden], float8_e4m3fn
        ``x * (448 / amax)``, rounded to nearest even. amax is the largest magnitude in the group, but at least 1e-4:
        the elements of a group below that are not scaled up to 448.
    scales : torch.Tensor [tokens, hidden / 128], float32
        ``amax / 448``; hidden / 128 is rounded up. An array of ``x``'s library; the values are a torch tensor if that
        library has no FP8, as NumPy and CuPy.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; the message names it, its value and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 7.5.

    Notes
    -----
    After DeepEP's function of this name (tests/utils.py), bitwise equal to its results with torch on a GPU: values are
    multiplied by ``448 * (1 / amax)`` and the scale is ``amax * (1 / 448)``, with both reciprocals first rounded to
    float32.

    If an element is NaN, its whole group and the scale become NaN. If one is infinite, the scale is infinite, infinite
    elements become NaN and the others zero. Other groups are not affected.

    Examples
    --------
    >>> x = torch.tensor([[448.0] + [1.0] * 127]).bfloat16()
    >>> values, scales = moe_numba.per_token_cast_to_fp8(x)
    >>> values.dtype, scales.tolist()
    (torch.float8_e4m3fn, [[1.0]])
    """
    key = x.shape, x.stride(), x.dtype, x.device
    start, ctas, groups, outputs = _plans.get(key) or remember(_plans, key, _plan_cast_to_fp8(x))
    check_aligned("x", x)
    results = outputs(out)
    if ctas:
        start(ctas, THREADS, None, address(x), address(results[0]), address(results[1]), groups)
    return tuple(results) if out is None else out


def _plan_cast_to_fp8(x):
    """Check the input; return the launcher, the numbers of CTAs and of groups, and the :class:`Outputs`."""
    tokens, hidden = _check_cast_to_fp8(x)
    groups, (dtype, signature) = tokens * -(-hidden // FP8_SCALE_BLOCK), _TO_FP8[x.dtype]
    start = launcher(make_cast_to_fp8(dtype, hidden), signature, x.device.index or 0, dependent=True)
    outputs = Outputs(_values_and_scales(tokens, hidden), x.device, aligned=("values",))
    return start, -(-groups // (_WARPS * groups_per_warp(dtype))), groups, outputs


@torch_op()
def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Cast tokens from FP8 to bfloat16, with one scale per 128 consecutive elements, in one launch.

    Parameters
    ----------
    x_fp8 : torch.Tensor [tokens, hidden], float8_e4m3fn
        Contiguous, 16-byte aligned; ``hidden`` is a multiple of 8.
    x_scales : torch.Tensor [tokens, hidden / 128], float32, or [tokens, hidden / 512], int32
        Any strides, for example column-major; the number of columns is rounded up. An int32 packs four scales that are
        powers of two, the first in the lowest byte: each byte is the exponent of a float32.
    out : torch.Tensor [tokens, hidden], bfloat16, optional
        Contiguous, 16-byte aligned, to write into; the call then neither allocates nor synchronises.

    Returns
    -------
    torch.Tensor [tokens, hidden], bfloat16
        An array of ``x_fp8``'s library. Multiplied in float32 and rounded once; NaN stays NaN.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; the message names it, its value and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 7.5.

    Notes
    -----
    After DeepEP's function of this name (tests/utils.py), which reads the exponents of int32 scales as signed, so that
    a scale of 2 or more becomes negative; here they are unsigned.

    Examples
    --------
    >>> x = torch.tensor([[448.0] + [1.0] * 127]).bfloat16()
    >>> torch.equal(moe_numba.per_token_cast_back(*moe_numba.per_token_cast_to_fp8(x)), x)
    True
    """
    x, scales = x_fp8, as_tensor(x_scales, "x_scales")
    key = x.shape, x.stride(), x.dtype, x.device, scales.shape, scales.stride(), scales.dtype, scales.device
    start, ctas, numbers, outputs = _plans.get(key) or remember(_plans, key, _plan_cast_back(x, scales))
    check_aligned("x_fp8", x)
    (result,) = outputs(out)
    if ctas:
        start(ctas, THREADS, None, address(x), address(scales), address(result), *numbers)
    return result if out is None else out


def _plan_cast_back(x, scales):
    """Check the inputs; return the launcher, the number of CTAs, the kernel's numbers, and the :class:`Outputs`."""
    tokens, hidden = _check_cast_back(x, scales)
    groups, kernel = tokens * -(-hidden // FP8_SCALE_BLOCK), make_cast_back(hidden, scales.dtype == torch.int32)
    start = launcher(kernel, _BACK_SIGNATURE, x.device.index or 0, dependent=True)
    outputs = Outputs(_rows_in_bf16(tokens, hidden), x.device, aligned=("tensor",))
    return start, -(-groups // (_WARPS * GROUPS_PER_WARP_BACK)), (groups, *scales.stride()), outputs


def _check_rows(name, x):
    """Check the shape and device of an input; return its tokens and hidden."""
    check_tensor(name, x, shape=("tokens", "hidden"), contiguous=True)
    check_device(x.device, name)
    tokens, hidden = x.shape
    if hidden % 8 or not 8 <= hidden <= _MAX_HIDDEN:
        raise ValueError(f"{name}'s hidden is {hidden}; multiples of 8 from 8 to {_MAX_HIDDEN} are allowed")
    if tokens > _MAX_TOKENS:
        raise ValueError(f"{name} has {tokens} tokens; at most {_MAX_TOKENS} are allowed")
    return tokens, hidden


def _check_cast_to_fp8(x):
    """Check the input; return its tokens and hidden."""
    if x.dtype not in _TO_FP8:
        raise TypeError(f"x is {x.dtype}; it must be torch.bfloat16 or torch.float32")
    return _check_rows("x", x)


def _check_cast_back(x, scales):
    """Check the inputs; return the tokens and hidden of x."""
    if x.dtype != FP8:
        raise TypeError(f"x_fp8 is {x.dtype}; it must be {FP8}")
    if scales.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"x_scales is {scales.dtype}; it must be torch.float32 or torch.int32")
    tokens, hidden = _check_rows("x_fp8", x)
    per_row = -(-hidden // FP8_SCALE_BLOCK)
    shape = (tokens, -(-per_row // 4) if scales.dtype == torch.int32 else per_row)
    if scales.shape != shape or scales.device != x.device:
        raise ValueError(
            f"x_scales is {scales.dtype} {tuple(scales.shape)} on {scales.device}; it must be {shape} on {x.device}"
            + reasons(scales.shape, shape, ("x_fp8 has {} rows", f"x_fp8 has {hidden} columns"))
        )
    return tokens, hidden


def _values_and_scales(tokens, hidden):
    scales, because = (tokens, -(-hidden // FP8_SCALE_BLOCK)), ("x has {} rows", f"x has {hidden} columns")
    return ("values", (tokens, hidden), FP8, because), ("scales", scales, torch.float32, because)


def _rows_in_bf16(tokens, hidden):
    return (("tensor", (tokens, hidden), torch.bfloat16, ("x_fp8 has {} rows", "x_fp8 has {} columns")),)


@register_fake(per_token_cast_to_fp8)
def _fake_cast_to_fp8(call):
    """Check the arguments of a call and return its outputs."""
    return make_outputs(call.out, _values_and_scales(*_check_cast_to_fp8(call.x)), call.x.device)


@register_fake(per_token_cast_back)
def _fake_cast_back(call):
    """Check the arguments of a call and return its output."""
    shape = _check_cast_back(call.x_fp8, call.x_scales)
    return make_outputs(call.out, _rows_in_bf16(*shape), call.x_fp8.device)[0]
