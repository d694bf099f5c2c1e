"""``silu_and_mul_backward``: the gradients of a SwiGLU MLP's activation and of the weight of its row."""

import torch

from moe_numba.moe_layer.backward.activation_kernel import THREADS, make_kernel
from moe_numba.moe_layer.group_by_expert.api import ID_TYPES
from moe_numba.moe_layer.silu_and_mul.api import check_activation
from moe_numba.runtime.launch import address, launcher

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
    bias_terms: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of gate and up, and of the routing weights, in one launch.

    An assignment with routing weight w adds ``w * (w2 @ a + bias)`` to its token's output, with the activation a of
    gate and up. With the gradient g of the output, ``u = w2.T @ g`` serves all: the gradient of a is ``w * u``, that of
    w is ``u @ a + bias @ g``, and that of w2 the outer product of g and ``w * a``.

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
        ``moe_numba.moe_layer.backward.plan`` keeps them. The gradient has the activation's order.
    bias_terms : (tensor [tokens, topk], tensor [tokens, experts] in float32), optional
        The expert of each assignment, in int32 or int64 and with any strides, and ``bias @ g`` of each expert.
    out : tuple of tensors, optional
        Those that are returned.

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
    if out is None:
        out = torch.empty_like(gate_up), torch.empty_like(grad), torch.empty_like(topk_weights)
    if topk_weights.numel():
        chosen = check_activation(activation, alpha, limit)
        signature: tuple[str, ...] = _SIGNATURE
        terms: tuple = ()
        if bias_terms is not None:
            ids, products = bias_terms
            signature += ID_TYPES[ids.dtype], "float32*", "int32", "int32", "int64", "int64"
            terms = address(ids), address(products), ids.shape[1], products.shape[1], *ids.stride()
        kernel = make_kernel(grad.shape[1], *chosen, has_halves, bool(terms))
        start = launcher(kernel, signature, gate_up.device.index or 0, launch_bounds=THREADS, dependent=True)
        tensors = gate_up, grad, inverse_indices, topk_weights, *out
        start(topk_weights.numel(), THREADS, None, *map(address, tensors), len(gate_up), *terms)
    return out
