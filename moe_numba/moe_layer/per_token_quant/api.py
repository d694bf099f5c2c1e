"""``per_token_quant_fp8`` and ``silu_and_mul_quant_fp8``: check, allocate and launch."""

import torch

from moe_numba.moe_layer.per_token_quant.kernel import (
    MAX_COLUMNS,
    VECTOR,
    launch_bounds_of,
    make_activation_quant_kernel,
    make_token_quant_kernel,
    threads_of,
)
from moe_numba.moe_layer.silu_and_mul.api import ALPHA, check_activation, check_gate_up
from moe_numba.moe_layer.weighted_sum.api import check_topk
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, look_up, remember, tensor_key
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_device, check_flag, check_tensor, make_outputs

FP8 = torch.float8_e4m3fn
_TOKENS_SIGNATURE = "uint16*", "int32*", "float32*", "int32*", "float32*", "int32"
_ACTIVATION_SIGNATURE = "uint16*", "int32*", "float32*", "int32*", "float32*"
_MAX_ROWS = (1 << 31) - 1
_plans: dict = {}  # of both


@torch_op()
def per_token_quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    inverse_indices: torch.Tensor | None = None,
    permute: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise tokens to FP8, with one scale per token or a given one, in one launch.

    Parameters
    ----------
    x : tensor [tokens, hidden], bfloat16
        Contiguous, 16-byte aligned; ``hidden`` is a multiple of 16, up to 32768.
    scale : tensor of one float32, optional
        Scale of all tokens; larger magnitudes saturate at 448 times it. The kernel reads it, so the host does not wait,
        and multiplies by its reciprocal. If that is infinite, as for 0, zeros become NaN and other numbers saturate;
        if the scale is NaN, all values are. None: each token has its own scale.
    inverse_indices : tensor [tokens, topk], int32, optional
        Row of each assignment, as :func:`moe_numba.group_by_expert` returns it. Contiguous; ``topk`` is 1 to 64. An
        index that is not in 0 to tokens * topk - 1, such as -1, is skipped. With it the scales are those of the rows of
        the grouped GEMM, for its ``row_weights``.
    permute : bool, optional
        Store the values in the rows that ``inverse_indices`` name, too. It must then be given.
    out : (values, scales), optional
        Contiguous tensors to write into, the values 16-byte aligned; the call then neither allocates nor synchronises.

    Returns
    -------
    values : tensor [tokens, hidden], or with ``permute`` [tokens * topk, hidden], float8_e4m3fn
        ``x / scale``, rounded to nearest even. Rows that no index names are not written.
    scales : tensor [tokens], or with ``inverse_indices`` [tokens * topk], float32
        The largest magnitude of a token, but at least 1e-4, divided by 448; or the given scale. From the library that
        ``x`` is from; the values are a torch tensor if that library has no FP8, as NumPy and CuPy. Scales of rows that
        no index names are not written.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    Named after SGLang's kernel. With amax a token's largest magnitude, values are multiplied by ``448 * (1 / amax)``
    and the scale is ``amax * (1 / 448)``. Both reciprocals are first rounded to float32, as in
    :func:`moe_numba.per_token_cast_to_fp8`. If an element is NaN, so are all values of its token.

    Examples
    --------
    >>> x = torch.tensor([[448.0] + [1.0] * 15, [224.0] + [0.0] * 15]).bfloat16()
    >>> values, scales = moe_numba.per_token_quant_fp8(x)
    >>> scales.tolist(), values.float()[:, 0].tolist()
    ([1.0, 0.5], [448.0, 448.0])
    """
    given = x, scale, inverse_indices
    tensors = tuple(t if t is None else as_tensor(t, n) for t, n in zip(given, ("x", "scale", "inverse_indices")))
    key = check_flag("permute", permute), *map(tensor_key, tensors)
    plan = _plans.get(key) or remember(_plans, key, _plan_tokens(key[0], *tensors))
    start, ctas, threads, num_rows, outputs = plan
    check_aligned("x", x)
    results = outputs(out)
    if ctas:
        scale, indices = (x if t is None else t for t in tensors[1:])
        start(ctas, threads, None, *map(address, (x, indices, scale, *results)), num_rows)
    return tuple(results) if out is None else out


@torch_op()
def silu_and_mul_quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    num_valid_rows: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the activation of a SwiGLU MLP and quantise it to FP8, with one scale per row, in one launch.

    Parameters
    ----------
    x : tensor [rows, 2 * columns], bfloat16
        Gate and up. Contiguous, 16-byte aligned; ``columns`` is a multiple of 16, up to 32768.
    scale : tensor of one float32, optional
        Scale of all rows. None: each row has its own.
    out : (values, scales), optional
        Contiguous tensors to write into, the values 16-byte aligned; the call then neither allocates nor synchronises.
    num_valid_rows : tensor [1], int32, optional
        Rows from this one on are neither read nor written.
    activation, alpha, limit : optional
        As for :func:`moe_numba.silu_and_mul`.

    Returns
    -------
    values : tensor [rows, columns], float8_e4m3fn
        The activation, computed in float32, divided by the scale and rounded once.
    scales : tensor [rows], float32
        As :func:`moe_numba.per_token_quant_fp8` returns them.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Examples
    --------
    >>> x = torch.tensor([[20.0] * 16 + [2.0] * 16]).bfloat16()
    >>> values, scales = moe_numba.silu_and_mul_quant_fp8(x)
    >>> values.float()[0, 0].item(), round(values.float()[0, 0].item() * scales[0].item(), 3)
    (448.0, 40.0)
    """
    given = x, scale, num_valid_rows
    tensors = tuple(t if t is None else as_tensor(t, n) for t, n in zip(given, ("x", "scale", "num_valid_rows")))
    key = activation, alpha, limit, type(alpha), type(limit), *map(tensor_key, tensors)
    plan = look_up(_plans, key)
    if plan is None:
        plan = remember(_plans, key, _plan_activation(check_activation(activation, alpha, limit), *tensors))
    start, ctas, threads, outputs = plan
    check_aligned("x", x)
    results = outputs(out)
    if ctas:
        scale, valid = (x if t is None else t for t in tensors[1:])
        start(ctas, threads, None, *map(address, (x, valid, scale, *results)))
    return tuple(results) if out is None else out


def _plan_tokens(permute, x, scale, indices):
    """Check the arguments; return the launcher, its CTAs, threads and number of rows, and the :class:`Outputs`."""
    wanted, topk = _check_tokens(permute, x, scale, indices)
    tokens, hidden = x.shape
    kernel = make_token_quant_kernel(hidden, topk, permute, scale is not None)
    threads = threads_of(hidden)
    start = launcher(
        kernel, _TOKENS_SIGNATURE, x.device.index or 0, launch_bounds=launch_bounds_of(hidden), dependent=True
    )
    return start, tokens, threads, tokens * topk, Outputs(wanted, x.device, aligned=("values",))


def _plan_activation(activation, x, scale, valid):
    """Check the tensors; return the launcher, its CTAs and threads, and the :class:`Outputs`."""
    wanted = _check_activation_quant(x, scale, valid)
    rows, columns = wanted[0][1]
    kernel = make_activation_quant_kernel(columns, valid is not None, scale is not None, *activation)
    threads = threads_of(columns)
    start = launcher(
        kernel, _ACTIVATION_SIGNATURE, x.device.index or 0, launch_bounds=launch_bounds_of(columns), dependent=True
    )
    return start, rows, threads, Outputs(wanted, x.device, aligned=("values",))


def _check_tokens(permute, x, scale, indices):
    """Check the arguments; return a description of the outputs, and topk, 0 without ``inverse_indices``."""
    check_tensor("x", x, dtype=torch.bfloat16, shape=("tokens", "hidden"), contiguous=True)
    check_device(x.device, "x")
    tokens, hidden = x.shape
    _check_columns("x's hidden", hidden)
    check_scale("scale", scale, (x.device, "x"))
    topk = 0
    if indices is not None:
        wanted = dict(shape=(tokens, "topk"), because=("x has {} rows",), device=(x.device, "x"))
        check_tensor("inverse_indices", indices, dtype=torch.int32, contiguous=True, **wanted)
        topk = indices.shape[1]
        check_topk("inverse_indices", topk)
    elif permute:
        raise ValueError("permute is True: inverse_indices must be given")
    if tokens > _MAX_ROWS // max(topk, 1):
        raise ValueError(f"x has {tokens} tokens; at most {_MAX_ROWS // max(topk, 1)} are allowed")
    rows, of_x, of_rows = tokens, "x has {} rows", "x has {} rows"
    if topk:
        rows, of_rows = tokens * topk, "inverse_indices has {} elements"
    values = (rows, of_rows) if permute else (tokens, of_x)
    return _outputs(values, (hidden, "x has {} columns"), (rows, of_rows)), topk


def _check_activation_quant(x, scale, valid):
    """Check the tensors; return a description of the outputs."""
    rows, columns = check_gate_up(x, valid, VECTOR)
    _check_columns("x's columns of a result", columns)
    check_scale("scale", scale, (x.device, "x"))
    all_rows = rows, "x has {} rows"
    return _outputs(all_rows, (columns, f"x has {2 * columns} columns"), all_rows)


def _check_columns(name, columns):
    if not columns or columns % VECTOR or columns > MAX_COLUMNS:
        raise ValueError(f"{name} is {columns}; it must be a multiple of {VECTOR}, up to {MAX_COLUMNS}")


def check_scale(name, scale, place):
    """Check the scale of a whole tensor, one number on the device of ``place``, or None."""
    if scale is None:
        return
    if scale.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; it must have one element, the scale of all rows")
    check_tensor(name, scale, dtype=torch.float32, device=place)


def _outputs(*sizes):
    """Describe the outputs, given rows and columns of values and the number of scales, each with its reason."""
    (rows, columns, num_scales), (*of_values, of_scales) = zip(*sizes, strict=True)
    return ("values", (rows, columns), FP8, tuple(of_values)), ("scales", (num_scales,), torch.float32, (of_scales,))


@register_fake(per_token_quant_fp8)
def _fake_per_token_quant_fp8(call):
    """Check the arguments of a call and return its outputs."""
    wanted, _ = _check_tokens(check_flag("permute", call.permute), call.x, call.scale, call.inverse_indices)
    return make_outputs(call.out, wanted, call.x.device)


@register_fake(silu_and_mul_quant_fp8)
def _fake_silu_and_mul_quant_fp8(call):
    """Check the arguments of a call and return its outputs."""
    check_activation(call.activation, call.alpha, call.limit)
    wanted = _check_activation_quant(call.x, call.scale, call.num_valid_rows)
    return make_outputs(call.out, wanted, call.x.device)
