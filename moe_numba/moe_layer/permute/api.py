"""``permute_tokens``, ``permute_cast_to_fp8`` and ``permute_fp8``: check, allocate and launch."""

import torch

from moe_numba.moe_layer.permute.kernel import (
    CAST_VECTOR,
    THREADS,
    VECTOR,
    make_permute_cast_kernel,
    make_permute_fp8_kernel,
    make_permute_kernel,
    threads_per_token,
)
from moe_numba.moe_layer.weighted_sum.api import check_topk
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_device, check_tensor, make_outputs

_SIGNATURE = "uint16*", "int32*", "uint16*", "int32", "int64"
_CAST_SIGNATURE = "uint16*", "int32*", "int32*", "float32*", "int32", "int64"
_FP8_SIGNATURE = "uint16*", "float32*", "int32*", "int32*", "float32*", "int32", "int64", "int64", "int64"
_MAX_ROWS, _MAX_THREADS = (1 << 31) - 1, 1 << 31
_plans: dict = {}


@torch_op()
def permute_tokens(x: torch.Tensor, inverse_indices: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Store each token in the rows of its assignments to experts, in one launch.

    Parameters
    ----------
    x : tensor [tokens, hidden], bfloat16
        Contiguous, 16-byte aligned; ``hidden`` is a multiple of 8.
    inverse_indices : tensor [tokens, topk], int32
        Row of each assignment, as :func:`moe_numba.group_by_expert` returns it. Contiguous; ``topk`` is 1 to 64. An
        index that is not in 0 to tokens * topk - 1, such as -1, is skipped.
    out : tensor [tokens * topk, hidden], bfloat16, optional
        Contiguous, 16-byte aligned, to write into; it must not overlap an input. The call then neither allocates nor
        synchronises.

    Returns
    -------
    tensor [tokens * topk, hidden], bfloat16
        The rows of the grouped GEMM, ordered by expert, from the library that ``x`` is from. A row that no index names
        is not written.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    This writes each token ``topk`` times, but the grouped GEMM then reads consecutive rows, which TMA loads. With many
    rows per expert this is faster in total than a grouped GEMM that gathers rows.

    Examples
    --------
    >>> x = torch.arange(2).repeat_interleave(8).view(2, 8).bfloat16()  # token 0 is zeros, token 1 ones
    >>> inverse_indices = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
    >>> moe_numba.permute_tokens(x, inverse_indices)[:, 0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    indices = as_tensor(inverse_indices, "inverse_indices")
    start, ctas, sizes, outputs = _plan(False, x, indices)
    (result,) = outputs(out)
    if ctas:
        start(ctas, THREADS, None, *map(address, (x, indices, result)), *sizes)
    return result if out is None else out


@torch_op()
def permute_cast_to_fp8(
    x: torch.Tensor, inverse_indices: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast tokens to FP8, and store each of them in the rows of its assignments to experts, in one launch.

    Parameters
    ----------
    x : tensor [tokens, hidden], bfloat16
        Contiguous, 16-byte aligned; ``hidden`` is a multiple of 16.
    inverse_indices : tensor [tokens, topk], int32
        Row of each assignment, as :func:`moe_numba.group_by_expert` returns it. Contiguous; ``topk`` is 1 to 64. An
        index that is not in 0 to tokens * topk - 1, such as -1, is skipped.
    out : (values, scales), optional
        Contiguous tensors to write into, the values 16-byte aligned; they must overlap neither an input nor each other.
        The call then neither allocates nor synchronises.

    Returns
    -------
    values : tensor [tokens * topk, hidden], float8_e4m3fn
        The rows of the grouped GEMM, ordered by expert. A row that no index names is not written.
    scales : tensor [tokens * topk, hidden / 128], float32
        One per 128 elements of a row, rounded up. Both results are from the library that ``x`` is from.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    Rows are bitwise equal to those of :func:`moe_numba.per_token_cast_to_fp8`. See :func:`moe_numba.permute_tokens` for
    what this saves.

    Examples
    --------
    >>> x = torch.full((2, 128), 224.0).bfloat16()
    >>> inverse_indices = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
    >>> values, scales = moe_numba.permute_cast_to_fp8(x, inverse_indices)
    >>> values.shape, scales[:, 0].tolist()
    (torch.Size([4, 128]), [0.5, 0.5, 0.5, 0.5])
    """
    indices = as_tensor(inverse_indices, "inverse_indices")
    start, ctas, sizes, outputs = _plan(True, x, indices)
    results = outputs(out)
    if ctas:
        start(ctas, THREADS, None, *map(address, (x, indices, *results)), *sizes)
    return tuple(results) if out is None else out


def permute_fp8(x, x_scale, inverse_indices, out):
    """Store each token in FP8, and its scales, in the rows of its assignments to experts, in one launch.

    The caller has checked the arguments.

    Parameters
    ----------
    x : tensor [tokens, hidden], float8_e4m3fn
        Contiguous, 16-byte aligned; ``hidden`` is a multiple of 16.
    x_scale : tensor [tokens, hidden / 128], float32
        Any strides; hidden / 128 is rounded up.
    inverse_indices : tensor [tokens, topk], int32
        As for :func:`permute_tokens`.
    out : (values, scales)
        As for :func:`permute_cast_to_fp8`.
    """
    key = "fp8", x.shape, x_scale.stride(), inverse_indices.shape, x.device
    start, ctas, sizes = _plans.get(key) or remember(_plans, key, _make_fp8_plan(x, x_scale, inverse_indices))
    if ctas:
        start(ctas, THREADS, None, *map(address, (x, x_scale, inverse_indices, *out)), *sizes)


def _make_fp8_plan(x, x_scale, indices):
    (tokens, topk), hidden = indices.shape, x.shape[1]
    num_threads = tokens * (hidden // CAST_VECTOR)
    kernel = make_permute_fp8_kernel(hidden, topk)
    start = launcher(kernel, _FP8_SIGNATURE, x.device.index or 0, dependent=True)
    return start, -(-num_threads // THREADS), (tokens * topk, num_threads, *x_scale.stride())


def _plan(casts, x, indices):
    """Check the arguments; return the launcher, the number of CTAs, the kernel's numbers and the :class:`Outputs`."""
    key = casts, *((t.shape, t.stride(), t.dtype, t.device) for t in (x, indices))
    plan = _plans.get(key) or remember(_plans, key, _make_plan(casts, x, indices))
    check_aligned("x", x)
    return plan


def _make_plan(casts, x, indices):
    tokens, topk, hidden = _check(casts, x, indices)
    make, signature = (make_permute_cast_kernel, _CAST_SIGNATURE) if casts else (make_permute_kernel, _SIGNATURE)
    start = launcher(make(hidden, topk), signature, x.device.index or 0, dependent=True)
    num_threads, wanted = tokens * _threads(casts, hidden), _outputs(casts, tokens * topk, hidden)
    outputs = Outputs(wanted, x.device, aligned=(wanted[0][0],))
    return start, -(-num_threads // THREADS), (tokens * topk, num_threads), outputs


def _threads(casts, hidden):
    """Return the number of threads of a token."""
    return threads_per_token(hidden) if casts else hidden // VECTOR


def _check(casts, x, indices):
    """Check the arguments; return the tokens, topk and hidden."""
    check_tensor("x", x, dtype=torch.bfloat16, shape=("tokens", "hidden"), contiguous=True)
    check_device(x.device, "x")
    tokens, hidden = x.shape
    wanted = dict(shape=(tokens, "topk"), because=("x has {} rows",), device=(x.device, "x"))
    check_tensor("inverse_indices", indices, dtype=torch.int32, contiguous=True, **wanted)
    topk = indices.shape[1]
    check_topk("inverse_indices", topk)
    vector = CAST_VECTOR if casts else VECTOR
    if not hidden or hidden % vector:
        raise ValueError(f"x's hidden is {hidden}; it must be a multiple of {vector}")
    most = min(_MAX_ROWS // topk, (_MAX_THREADS - 1) // _threads(casts, hidden))
    if tokens > most:
        raise ValueError(f"x has {tokens} tokens; at most {most} are allowed")
    return tokens, topk, hidden


def _outputs(casts, rows, hidden):
    because = "inverse_indices has {} elements", f"x has {hidden} columns"
    if not casts:
        return (("tensor", (rows, hidden), torch.bfloat16, because),)
    scales = rows, -(-hidden // FP8_SCALE_BLOCK)
    return ("values", (rows, hidden), torch.float8_e4m3fn, because), ("scales", scales, torch.float32, because)


@register_fake(permute_tokens)
def _fake_permute_tokens(call):
    """Check the arguments of a call and return its output."""
    tokens, topk, hidden = _check(False, call.x, call.inverse_indices)
    return make_outputs(call.out, _outputs(False, tokens * topk, hidden), call.x.device)[0]


@register_fake(permute_cast_to_fp8)
def _fake_permute_cast_to_fp8(call):
    """Check the arguments of a call and return its outputs."""
    tokens, topk, hidden = _check(True, call.x, call.inverse_indices)
    return make_outputs(call.out, _outputs(True, tokens * topk, hidden), call.x.device)
