"""What a module of experts of transformers computes, as arguments of :func:`moe_numba.fused_experts`."""

from typing import Any

import torch
from torch.nn.utils import parametrize
from transformers.activations import SiLUActivation
from transformers.integrations import moe

NAME = "moe_numba"
_SILU = torch.nn.SiLU, SiLUActivation
# What the kernels require of a module of experts: attribute, value where the module has none, allowed value.
_LAYOUT: tuple[tuple[str, Any, Any], ...] = (("has_gate", True, True), ("has_post_expert_norm", False, False))
# Of modules without an own gate, whose activation is act_fn(gate) * up.
_PLAIN = ("is_concatenated", True, True), ("alpha", None, None), ("limit", None, None), ("swiglu_limit", None, None)
# Modules with a gate of their own: the activation, the attribute that limits it, and whether gate comes before up.
_GATES = {
    "GptOssExperts": ("swigluoai", "limit", False),
    "DeepseekV4Experts": ("silu", "limit", True),
    "Glm5NextTextExperts": ("silu", "swiglu_limit", True),
    "HYV4Experts": ("silu", "swiglu_limit", True),
}


def arguments_of(module: Any) -> dict[str, Any]:
    """Return the weights, biases and activation of a module of bfloat16 experts, or of packed MXFP4 ones.

    Transposed weights are views, without a copy. With LoRA adapters of PEFT they are arguments of
    :func:`moe_numba.moe_layer.fused_experts_lora`.

    Raises
    ------
    ValueError, TypeError
        If the module's layout, activation or dtype is not supported; the message names the attribute and what is
        allowed.
    """
    check_attributes(module, _LAYOUT)
    arguments = _activation_of(module)
    weights: dict[str, torch.Tensor] = {}
    for name, attribute in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        weight, a, b = _adapter_of(module, attribute) or (getattr(module, attribute), None, None)
        if name == "w13" and weight.dtype not in (torch.uint8, torch.bfloat16):
            raise TypeError(f"gate_up_proj is {weight.dtype}; {NAME} needs a model in torch.bfloat16")
        if weight.dtype != torch.uint8 and getattr(module, "is_transposed", False):
            weight, a, b = weight.mT, b if b is None else b.mT, a if a is None else a.mT
        weights[name] = weight
        weights |= {} if a is None or b is None else {f"{name}_a": a, f"{name}_b": b}
    if getattr(module, "has_bias", False):
        arguments |= dict(w13_bias=module.gate_up_proj_bias, w2_bias=module.down_proj_bias)
    return arguments | weights


def _adapter_of(module, attribute):
    """Return a weight that PEFT adapts, without its adapter, and the adapter's factors a and b; or None.

    During a call PEFT makes the attribute ``original + scaling * lhs @ rhs``: reading it would form that.
    """
    if not parametrize.is_parametrized(module, attribute):
        return None
    proxies = module.parametrizations[attribute]
    if len(proxies) != 1 or not all(hasattr(proxies[0], name) for name in ("lhs", "rhs", "scaling")):
        return None
    (proxy,) = proxies
    return proxies.original, proxy.rhs, proxy.lhs * proxy.scaling


def kind_of(module: Any) -> str:
    """Return the name of a module's class, also while PEFT replaces its weights, which makes it a subclass."""
    return parametrize.type_before_parametrizations(module).__name__


def _activation_of(module):
    """Return the options of a module's activation."""
    kind = kind_of(module)
    if kind in _GATES:
        activation, limit, is_concatenated = _GATES[kind]
        check_attributes(module, [("is_concatenated", True, is_concatenated)])
        if activation == "silu" and hasattr(module, "act_fn"):
            check_silu(module)
        options = dict(activation=activation, limit=getattr(module, limit))
        return options | (dict(alpha=module.alpha) if activation == "swigluoai" else {})
    check_attributes(module, _PLAIN)
    check_silu(module)
    if type(module)._apply_gate is not moe._default_apply_gate:
        raise ValueError(f"{kind} defines _apply_gate; {NAME} supports act_fn(gate) * up only")
    return {}


def check_attributes(module: Any, allowed: Any = (*_LAYOUT, *_PLAIN)) -> None:
    """Raise for a module with other attributes than those that are allowed."""
    for name, default, value in allowed:
        found = getattr(module, name, default)
        if found != value:
            raise ValueError(f"{kind_of(module)}.{name} is {found}; {NAME} supports {value} only")


def check_silu(module: Any) -> None:
    """Raise for a module with another activation than SiLU."""
    if not isinstance(module.act_fn, _SILU):
        raise ValueError(f"{kind_of(module)}.act_fn is {type(module.act_fn).__name__}; {NAME} supports SiLU only")
