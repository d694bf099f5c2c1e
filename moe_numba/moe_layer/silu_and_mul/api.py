"""``silu_and_mul``: checks its arguments and launches the kernel."""

from typing import Any, NamedTuple

import torch

from moe_numba.grouped_gemm.call.checks import check_positive
from moe_numba.grouped_gemm.common.constants import ALPHA, LIMIT
from moe_numba.moe_layer.silu_and_mul.kernel import THREADS, VECTOR, make_silu_and_mul_kernel
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, look_up, remember
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_aligned, check_choice, check_device, check_tensor, make_outputs

_SIGNATURE = "uint16*", "int32*", "uint16*", "int64"
_MAX_VECTORS = 1 << 31
_plans: dict = {}


class Activation(NamedTuple):
    """An activation of gate and up."""

    name: str = "silu"  # or "swigluoai"
    alpha: float = ALPHA  # of swigluoai
    limit: float | None = None  # of gate and up

    @property
    def options(self) -> dict[str, Any]:
        """Options of the functions that compute it."""
        return dict(activation=self.name, alpha=self.alpha, limit=self.limit)

    @property
    def interleaved(self) -> bool:
        """Whether gate and up alternate; else all of gate comes first."""
        return self.name == "swigluoai"

    @property
    def is_plain(self) -> bool:
        """Whether it is ``silu(gate) * up``."""
        return self.name == "silu" and self.limit is None


def check_activation(activation: str, alpha: float, limit: float | None) -> Activation:
    """Check the options of an activation; return it, for "swigluoai" with gpt-oss' limit if there is none."""
    check_choice("activation", activation, ("silu", "swigluoai"))
    check_positive("alpha", alpha)
    if limit is not None:
        check_positive("limit", limit)
    if activation == "silu":
        return Activation("silu", ALPHA, None if limit is None else float(limit))
    return Activation("swigluoai", float(alpha), LIMIT if limit is None else float(limit))


@torch_op()
def silu_and_mul(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    num_valid_rows: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float | None = None,
) -> torch.Tensor:
    """Compute the activation of a SwiGLU MLP, such as ``silu(gate) * up``, in one launch.

    Parameters
    ----------
    x : tensor [rows, 2 * columns], bfloat16
        Gate and up, in the order that ``activation`` needs. Contiguous, 16-byte aligned; ``columns`` is a multiple of
        8.
    out : tensor [rows, columns], bfloat16, optional
        Contiguous, 16-byte aligned, to write into; it must not overlap ``x``. The call then neither allocates nor
        synchronises.
    num_valid_rows : tensor [1], int32, optional
        Rows from this one on are neither read nor written. The kernel reads it, so the host does not wait for it.
    activation : str, optional
        "silu": ``silu(gate) * up``; the first half of the columns is gate, the second up.
        "swigluoai", of gpt-oss, by vLLM's name: ``(up + 1) * gate * sigmoid(alpha * gate)``; the even columns are gate,
        the odd ones up.
    alpha : float, optional
        Of "swigluoai"; positive and normal in float32, 1.2e-38 to 1e38.
    limit : float, optional
        As ``alpha``. gate is first clamped to at most ``limit``, and up to the range ``-limit`` to ``limit``, as in
        DeepSeek-V4. None: no limit with "silu", and 7 with "swigluoai". The kernel is compiled for each value.

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

    Examples
    --------
    >>> x = torch.tensor([[0.0] * 8 + [3.0] * 8, [10.0] * 8 + [2.0] * 8]).bfloat16()  # gate, then up
    >>> moe_numba.silu_and_mul(x)[:, 0].tolist()
    [0.0, 20.0]
    """
    valid = None if num_valid_rows is None else as_tensor(num_valid_rows, "num_valid_rows")
    options = activation, alpha, limit, type(alpha), type(limit)
    key = x.shape, x.stride(), x.dtype, x.device, valid is not None and (valid.shape, valid.dtype, valid.device)
    start, ctas, num_vectors, outputs = look_up(_plans, (key, options)) or remember(
        _plans, (key, options), _make_plan(x, valid, check_activation(activation, alpha, limit))
    )
    check_aligned("x", x)
    (result,) = outputs(out)
    if ctas:
        start(ctas, THREADS, None, address(x), address(x if valid is None else valid), address(result), num_vectors)
    return result if out is None else out


def _make_plan(x, valid, activation):
    """Check the tensors; return the launcher, the numbers of CTAs and of vectors, and the :class:`Outputs`."""
    rows, columns = check_gate_up(x, valid, VECTOR)
    num_vectors = rows * columns // VECTOR
    kernel = make_silu_and_mul_kernel(columns, valid is not None, *activation)
    start = launcher(kernel, _SIGNATURE, x.device.index or 0, dependent=True)
    outputs = Outputs(_describe_output(rows, columns), x.device, aligned=("tensor",))
    return start, -(-num_vectors // THREADS), num_vectors, outputs


def _describe_output(rows, columns):
    return (("tensor", (rows, columns), torch.bfloat16, ("x has {} rows", f"x has {2 * columns} columns")),)


def check_gate_up(x, valid, vector):
    """Check gate and up, and ``num_valid_rows``; return the rows and columns of the result, multiples of ``vector``."""
    check_tensor("x", x, dtype=torch.bfloat16, shape=("rows", "2 * columns"), contiguous=True)
    check_device(x.device, "x")
    rows, twice = x.shape
    if not twice or twice % (2 * vector):
        raise ValueError(f"x has {twice} columns, gate and up; it must have a multiple of {2 * vector}")
    if rows * (twice // (2 * VECTOR)) >= _MAX_VECTORS:
        raise ValueError(f"x has {rows} rows; at most {(_MAX_VECTORS - 1) // (twice // (2 * VECTOR))} are allowed")
    if valid is not None:
        check_tensor("num_valid_rows", valid, dtype=torch.int32, shape=(1,), device=(x.device, "x"))
    return rows, twice // 2


@register_fake(silu_and_mul)
def _fake_silu_and_mul(call):
    """Check the arguments of a call and return its output."""
    check_activation(call.activation, call.alpha, call.limit)
    shape = check_gate_up(call.x, call.num_valid_rows, VECTOR)
    return make_outputs(call.out, _describe_output(*shape), call.x.device)[0]
