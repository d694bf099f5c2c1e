"""``silu_and_mul``: checks its arguments and launches the kernel."""

import torch

from moe_numba.moe_layer.kernel_silu_and_mul import THREADS, VECTOR, make_silu_and_mul_kernel
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.torch_op import call_op, needs_dispatch, register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_device, check_tensor, make_outputs

_SIGNATURE = "uint16*", "int32*", "uint16*", "int64"
_MAX_VECTORS = 1 << 31
_plans: dict = {}


@torch_op
def silu_and_mul(
    x: torch.Tensor, out: torch.Tensor | None = None, num_valid_rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the activation of a SwiGLU MLP, ``silu(gate) * up``, in one launch.

    Parameters
    ----------
    x : tensor [rows, 2 * columns], bfloat16
        The first half of the columns is gate, the second up. Contiguous, 16-byte aligned; ``columns`` is a multiple
        of 8.
    out : tensor [rows, columns], bfloat16, optional
        Contiguous, 16-byte aligned, to write into. The call then neither allocates nor synchronises.
    num_valid_rows : tensor [1], int32, optional
        Rows from this one on are neither read nor written. The kernel reads it, so the host does not wait for it.

    Returns
    -------
    tensor [rows, columns], bfloat16
        Computed in float32 and rounded once. From the library that ``x`` is from.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    Named after the function of vLLM and SGLang. The exponential is approximate (``ex2.approx``), with a relative error
    below 2**-17 for gates above -87, below which silu(gate) is zero.
    """
    if needs_dispatch(x):
        return call_op("silu_and_mul", x, out, num_valid_rows)
    limit = None if num_valid_rows is None else as_tensor(num_valid_rows, "num_valid_rows")
    key = x.shape, x.stride(), x.dtype, x.device, limit is not None and (limit.shape, limit.dtype, limit.device)
    start, ctas, num_vectors, outputs = _plans.get(key) or remember(_plans, key, _make_plan(x, limit))
    check_aligned("x", x)
    (result,) = outputs(out)
    if ctas:
        start(ctas, THREADS, None, address(x), address(x if limit is None else limit), address(result), num_vectors)
    return result if out is None else out


def _make_plan(x, limit):
    """Check the arguments; return the launcher, the numbers of CTAs and of vectors, and the :class:`Outputs`."""
    rows, columns = _check(x, limit)
    num_vectors = rows * columns // VECTOR
    start = launcher(
        make_silu_and_mul_kernel(columns, limit is not None), _SIGNATURE, x.device.index or 0, dependent=True
    )
    outputs = Outputs((("tensor", (rows, columns), torch.bfloat16),), x.device, aligned=("tensor",))
    return start, -(-num_vectors // THREADS), num_vectors, outputs


def _check(x, limit):
    """Check the arguments; return the rows and columns of the result."""
    check_tensor("x", x, dtype=torch.bfloat16, shape=("rows", "2 * columns"), contiguous=True)
    check_device(x.device, "x")
    rows, twice = x.shape
    if not twice or twice % (2 * VECTOR):
        raise ValueError(f"x has {twice} columns, gate and up; it must have a multiple of {2 * VECTOR}")
    if rows * (twice // (2 * VECTOR)) >= _MAX_VECTORS:
        raise ValueError(f"x has {rows} rows; at most {(_MAX_VECTORS - 1) // (twice // (2 * VECTOR))} are allowed")
    if limit is not None:
        check_tensor("num_valid_rows", limit, dtype=torch.int32, shape=(1,), device=(x.device, "x"))
    return rows, twice // 2


@register_fake(silu_and_mul)
def _fake_silu_and_mul(call):
    """Check the arguments of a call and return its output."""
    shape = _check(call.x, call.num_valid_rows)
    return make_outputs(call.out, (("tensor", shape, torch.bfloat16),), call.x.device)[0]
