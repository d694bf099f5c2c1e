"""``fused_experts_lora``: the experts of a layer with low-rank adapters of their weights."""

from typing import Any

import torch

from moe_numba.grouped_gemm.call.checks import has_wgmma, is_mn_major
from moe_numba.moe_layer.backward.experts import adapted_experts
from moe_numba.moe_layer.fused_experts import fused_experts
from moe_numba.moe_layer.weights import check_weights
from moe_numba.runtime.validate import check_tensor

_RANK_MULTIPLE = 16  # of the columns of a grouped GEMM
_DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64


def fused_experts_lora(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_a: torch.Tensor | None = None,
    w13_b: torch.Tensor | None = None,
    w2_a: torch.Tensor | None = None,
    w2_b: torch.Tensor | None = None,
    *,
    w13_scaling: float = 1.0,
    w2_scaling: float = 1.0,
    shared: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
) -> torch.Tensor:
    """Compute the experts of a layer whose weights, in bfloat16 or MXFP4, have LoRA adapters, with gradients.

    As :func:`moe_numba.fused_experts` with the weights ``w13 + w13_scaling * w13_b @ w13_a`` and
    ``w2 + w2_scaling * w2_b @ w2_a`` of each expert. On GPUs with wgmma neither these nor their gradients are formed.

    Parameters
    ----------
    x, w13, w2, topk_weights, topk_ids
        As for :func:`moe_numba.fused_experts`, in bfloat16; or w13 and w2 in MXFP4, as
        :func:`moe_numba.pack_mxfp4_experts` packs them, on a GPU with wgmma. Those stay as they are: they have no
        gradients, and adapters have the sizes of the weights as padded.
    w13_a : tensor [experts, rank, hidden], optional
        With ``w13_b``; without both w13 has no adapter. Any floating-point dtype, rounded to bfloat16, and any strides:
        those of PEFT's weights are views. ``[1, rank, hidden]`` is shared by all experts.
    w13_b : tensor [experts, 2 * intermediate, rank], optional
        In the order of w13's rows; of packed weights in that of the activation: with "silu" gate and then up, with
        "swigluoai" alternately. ``rank`` is at least 1; it is padded with zeros to a multiple of 16.
    w2_a : tensor [experts, rank, intermediate], optional
    w2_b : tensor [experts, hidden, rank], optional
        Likewise with w2; its rank may be another one.
    w13_scaling, w2_scaling : float
        Factors of the adapters, ``lora_alpha / rank`` of PEFT.
    shared, w13_bias, w2_bias, activation, alpha, limit
        As for :func:`moe_numba.fused_experts`.

    Returns
    -------
    tensor [tokens, hidden], bfloat16

    Raises
    ------
    ValueError, TypeError
        With the name of the argument, its value and what is allowed.
    moe_numba.UnsupportedDeviceError
        As for :func:`moe_numba.fused_experts`.

    Notes
    -----
    ``z = w13_a @ x`` is a grouped GEMM with ``rank`` columns, rounded to bfloat16. A second one multiplies w13 by x and
    w13_b by z in the same loop. On a GPU without wgmma the adapters are added to the weights before the call.

    MXFP4 weights are decoded to bfloat16 in each forward pass and again in each backward, by a kernel that reads 17/32
    bytes per weight and writes two. The result and the gradients have the bits of those with decoded weights, but
    between the passes only the packed weights are kept. Without adapters the call is one of
    :func:`moe_numba.fused_experts`, which has no backward with MXFP4 weights.

    Gradients of all floating-point tensors, like results, are bit-identical from run to run.

    Examples
    --------
    >>> x, ids, weights = torch.ones(2, 64).bfloat16(), torch.tensor([[0], [1]], dtype=torch.int32), torch.ones(2, 1)
    >>> w13, w2 = torch.full((2, 2 * 64, 64), 1 / 64).bfloat16(), torch.full((2, 64, 64), 1 / 64).bfloat16()
    >>> a, b = torch.full((2, 8, 64), 1 / 64).bfloat16().requires_grad_(), torch.zeros(2, 64, 8).bfloat16()
    >>> from moe_numba.moe_layer import fused_experts_lora
    >>> y = fused_experts_lora(x, w13, w2, weights, ids, w2_a=a, w2_b=b)
    >>> y[:, 0].tolist()  # silu(1) = 0.731; an adapter whose b is zero adds nothing
    [0.73046875, 0.73046875]
    """
    given: dict[str, Any] = dict(topk_weights=topk_weights, topk_ids=topk_ids, shared=shared)
    given |= dict(w13_bias=w13_bias, w2_bias=w2_bias, activation=activation, alpha=alpha, limit=limit)
    weights: dict[str, Any] = dict(w13=w13, w2=w2)
    adapters: dict[str, Any] = {}
    if is_checked := not torch.compiler.is_dynamo_compiling():  # which cannot trace the checks
        check_tensor("x", x, dtype=torch.bfloat16, shape=("tokens", "hidden"))
        shapes = _check_weights(w13, w2)
    for name, a, b, scaling in (("w13", w13_a, w13_b, w13_scaling), ("w2", w2_a, w2_b, w2_scaling)):
        weight = weights[name]
        if is_checked:
            _check_adapter(name, shapes[name], weight.device, a, b, scaling)
        if a is None or b is None:
            continue
        a, b = a.bfloat16(), (b if scaling == 1 else b.float() * scaling).bfloat16()
        if len(a) < len(weight) or len(b) < len(weight):  # shared by all experts
            a, b = (t.expand(len(weight), -1, -1) for t in (a, b))
        if weight.dtype == torch.bfloat16 and not _adds_in_kernel(x.device):
            weights[name] = torch.baddbmm(weight, b, a)
            continue
        if missing := -a.shape[1] % _RANK_MULTIPLE:
            a, b = torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))
        adapters |= {f"{name}_a": _like_weight(a, weight), f"{name}_b": _like_weight(b, weight)}
    if not adapters:
        return fused_experts(x, **weights, **given)
    return adapted_experts(x=x, batch_invariant=False, **weights, **adapters, **given)


def _adds_in_kernel(device):
    """Whether grouped GEMMs take adapters."""
    if torch.compiler.is_dynamo_compiling():  # which cannot trace `has_wgmma`
        return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
    return has_wgmma(device)


def _check_weights(w13, w2):
    """Check the weights as far as adapters need it; return [experts, outputs, inputs] of each by name."""
    weights = dict(w13=w13, w2=w2)
    is_packed = [isinstance(weight, torch.Tensor) and weight.dtype == torch.uint8 for weight in weights.values()]
    if all(is_packed):
        experts, hidden, intermediate, *_ = check_weights(w13, w2)
        return dict(w13=(experts, 2 * intermediate, hidden), w2=(experts, hidden, intermediate))
    for name, weight in weights.items():
        allowed = (torch.bfloat16, torch.uint8) if any(is_packed) else torch.bfloat16
        check_tensor(name, weight, dtype=allowed)
    if any(is_packed):
        raise ValueError(
            f"w13 is {w13.dtype}, w2 is {w2.dtype}; both must be torch.bfloat16, or both torch.uint8 that "
            "pack_mxfp4_experts has packed"
        )
    for name, weight in weights.items():
        check_tensor(name, weight, shape=("experts", "outputs", "inputs"))
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _check_adapter(name, shape, device, a, b, scaling):
    """Raise for an adapter of a weight that is not allowed."""
    of_a, of_b = f"{name}_a", f"{name}_b"
    if (a is None) != (b is None):
        missing, other = (of_a, of_b) if a is None else (of_b, of_a)
        raise ValueError(f"{other} is given, {missing} is None; both must be given, or none of them")
    if a is None:
        return
    if isinstance(scaling, bool) or not isinstance(scaling, int | float):
        raise TypeError(f"{name}_scaling is {scaling!r}; it must be a number")
    experts, outputs, inputs = shape
    options = dict(dtype=_DTYPES, device=(device, name))
    check_tensor(of_a, a, shape=("experts", "rank", inputs), because=("", "", f"{name} has {{}} inputs"), **options)
    because = "", f"{name} has {{}} outputs", f"{of_a} has rank {{}}"
    check_tensor(of_b, b, shape=("experts", outputs, a.shape[1]), because=because, **options)
    if not a.shape[1]:
        raise ValueError(f"{of_a} has rank 0; it must be at least 1")
    for given, tensor in ((of_a, a), (of_b, b)):
        if len(tensor) not in (1, experts):
            raise ValueError(f"{given} has {len(tensor)} experts; it must have {name}'s {experts}, or 1 for all")


def _like_weight(tensor, weight):
    """Return a tensor whose contiguous dimension, one of the last two, is that of a weight; packed ones are decoded."""
    if weight.dtype == torch.bfloat16 and is_mn_major(weight):
        return tensor.mT.contiguous().mT
    return tensor.contiguous()
