"""MXFP4 weights in models of gpt-oss of transformers."""

from collections.abc import Mapping

import torch

from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4, quantise_mxfp4
from moe_numba.integrations.transformers_layout import kind_of
from moe_numba.moe_layer import pack_mxfp4_experts

_PROJECTIONS = "gate_up_proj", "down_proj"


def pack_mxfp4_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor] | None = None, allow_rounding: bool = False
) -> int:
    """Replace the bfloat16 weights of the experts of gpt-oss by MXFP4, in place, for the implementation "moe_numba".

    The experts then take 4.25 bits per weight. Other implementations, such as "eager", cannot compute them.

    Parameters
    ----------
    model : torch.nn.Module
        In bfloat16: load a checkpoint in MXFP4 with ``quantization_config=Mxfp4Config(dequantize=True)``. Experts on
        the meta device need ``tensors``.
    tensors : mapping of str to tensor, optional
        Tensors of a checkpoint by name, such as "model.layers.0.mlp.experts.gate_up_proj_blocks", from which the
        weights and, if they are there, the biases are taken. None: convert the model's weights, which are exactly
        representable if they come from a checkpoint in MXFP4.
    allow_rounding : bool, optional
        Convert weights that are not exactly representable, too.

    Returns
    -------
    int
        Number of modules that were changed.

    Raises
    ------
    ValueError
        If the model has no module of experts of gpt-oss, or only such that transformers computes by kernels from its
        hub; or if the weights would be rounded. Modules before the one that is named have been changed then.
    KeyError
        If a tensor is missing in ``tensors``.
    """
    named = list(model.named_modules())
    if any(kind_of(module) == "Mxfp4GptOssExperts" for _, module in named):
        raise ValueError(
            "model has Mxfp4GptOssExperts, which set_experts_implementation does not affect; load it with "
            "quantization_config=Mxfp4Config(dequantize=True), and call this function then"
        )
    experts = [(name, module) for name, module in named if kind_of(module) == "GptOssExperts"]
    experts = [(name, module) for name, module in experts if module.gate_up_proj.dtype != torch.uint8]
    if not experts:
        raise ValueError(f"model is a {type(model).__name__} without GptOssExperts in bfloat16")
    for name, module in experts:
        device = module.gate_up_proj.device
        found = tuple(
            part
            for projection in _PROJECTIONS
            for part in _blocks_of(name, projection, module, tensors, allow_rounding)
        )
        if device.type == "meta":
            device = found[0].device
        packed = pack_mxfp4_experts(*(part.to(device) for part in found))
        for projection, weight in zip(_PROJECTIONS, packed, strict=True):
            setattr(module, projection, torch.nn.Parameter(weight, requires_grad=False))
            bias = None if tensors is None else tensors.get(f"{name}.{projection}_bias")
            if bias is not None:
                bias = torch.nn.Parameter(bias.to(device, torch.bfloat16), requires_grad=False)
                setattr(module, f"{projection}_bias", bias)
    return len(experts)


def _blocks_of(name, projection, module, tensors, allow_rounding):
    """Return the blocks and scales of a projection."""
    if tensors is not None:
        return [tensors[f"{name}.{projection}_{part}"] for part in ("blocks", "scales")]
    parts = []
    for weight in getattr(module, projection).detach().mT:  # expert by expert: intermediate results are float32
        parts.append(quantise_mxfp4(weight.contiguous()))
        if not allow_rounding and not torch.equal(dequantise_mxfp4(*parts[-1]).to(weight.dtype), weight):
            raise ValueError(
                f"{name}.{projection} is not exactly representable in MXFP4; pass allow_rounding=True to round it"
            )
    return [torch.stack(part) for part in zip(*parts, strict=True)]
