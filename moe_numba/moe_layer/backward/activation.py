"""``silu_and_mul_backward``: the gradients of a SwiGLU MLP's activation and of the weight of its row."""

import torch

from moe_numba.moe_layer.backward.activation_kernel import THREADS, make_kernel
from moe_numba.moe_layer.silu_and_mul.api import check_activation
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.torch_op import NAMESPACE, needs_dispatch

_SIGNATURE = "uint16*", "uint16*", "int32*", "float32*", "uint16*", "uint16*", "float32*", "int32"


def silu_and_mul_backward(
    gate_up: torch.Tensor,
    grad: torch.Tensor,
    inverse_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    has_halves: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up, and of the routing weights, in one launch.

    An assignment with routing weight w adds ``w * w2 @ a`` to its token's output, with the activation a of gate and up.
    With the gradient g of the output, ``u = w2.T @ g`` serves all: the gradient of a is ``w * u``, that of w is
    ``u @ a``, and that of w2 the outer product of g and ``w * a``.

    Parameters
    ----------
    gate_up : tensor [rows, 2 * columns], bfloat16
        Gate and up of each row, as for :func:`moe_numba.silu_and_mul`. This and the others are contiguous and 16-byte
        aligned; the caller has checked them.
    grad : tensor [rows, columns], bfloat16
        u of each row.
    inverse_indices : tensor [tokens, topk], int32
        Row of each assignment, as :func:`moe_numba.group_by_expert` returns it. One that is not in 0 to rows - 1 has no
        row, and its weight the gradient 0.
    topk_weights : tensor [tokens, topk], float32
    activation, alpha, limit
        As for :func:`moe_numba.silu_and_mul`.
    has_halves : bool
        Whether rows of ``gate_up`` have first all gates with "swigluoai", too, as
        ``moe_numba.moe_layer.backward.experts`` keeps them. The gradient has the activation's order.

    Returns
    -------
    grad_gate_up : tensor [rows, 2 * columns], bfloat16
    weighted : tensor [rows, columns], bfloat16
        ``w * a``. In both, rows without an assignment are not written.
    grad_weights : tensor [tokens, topk], float32

    Notes
    -----
    Computed in float32 and rounded once. The sum over a row has a fixed order, so results are bit-identical from run to
    run. Where gate or up is clamped, its gradient is zero.
    """
    arguments = gate_up, grad, inverse_indices, topk_weights, activation, alpha, limit, has_halves
    if needs_dispatch(*arguments[:4]):
        return torch.ops.moe_numba.silu_and_mul_backward(*arguments)
    return _launch(*arguments)


def _empty_outputs(gate_up, grad, topk_weights):
    return torch.empty_like(gate_up), torch.empty_like(grad), torch.empty_like(topk_weights)


def _launch(gate_up, grad, inverse_indices, topk_weights, activation, alpha, limit, has_halves):
    outputs = _empty_outputs(gate_up, grad, topk_weights)
    if topk_weights.numel():
        kernel = make_kernel(grad.shape[1], *check_activation(activation, alpha, limit), has_halves)
        device = gate_up.device.index or 0
        start = launcher(kernel, _SIGNATURE, device, launch_bounds=THREADS, dependent=True)
        tensors = gate_up, grad, inverse_indices, topk_weights, *outputs
        start(topk_weights.numel(), THREADS, None, *map(address, tensors), len(gate_up))
    return outputs


@torch.library.custom_op(f"{NAMESPACE}::silu_and_mul_backward", mutates_args=())
def _op(
    gate_up: torch.Tensor,
    grad: torch.Tensor,
    inverse_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    has_halves: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _launch(gate_up, grad, inverse_indices, topk_weights, activation, alpha, limit, has_halves)


@_op.register_fake
def _fake(gate_up, grad, inverse_indices, topk_weights, activation, alpha, limit, has_halves):
    return _empty_outputs(gate_up, grad, topk_weights)
