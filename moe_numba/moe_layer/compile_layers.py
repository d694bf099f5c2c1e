"""Compilation of all kernels of some MoE layers, described by their sizes, before the layers are used."""

from functools import partial
from typing import Any, NamedTuple

import torch

import moe_numba
from moe_numba.moe_layer.weights import packed_shape
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime import cubin_cache
from moe_numba.runtime.compile_calls import compile_calls

_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "mxfp4": torch.uint8}


class Layer(NamedTuple):
    """Sizes of a layer; each token has ``topk`` experts, the shared ones and others drawn evenly at random."""

    model: str
    num_experts: int
    hidden: int
    intermediate: int
    dtype: str
    token_counts: tuple[int, ...]
    topk: int = 8
    scaling: str = "block"  # of e4m3: a scale per 128 x 128 block, or "tensor", one per expert
    activation: str = "silu"  # "swigluoai" with biases, as gpt-oss
    num_shared: int = 0  # the last experts, which every token has
    transposed: bool = False  # in a model: w13 and w2 are transposed views

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of a row."""
        names = "model", "num_experts", "hidden", "intermediate", "topk"
        changed = [
            name
            for name in ("scaling", "activation", "num_shared")
            if getattr(self, name) != self._field_defaults[name]
        ]
        return {name: getattr(self, name) for name in (*names, *changed)}


def compile_layers(layers, ids_dtype=torch.int32, also=()):
    """Compile the kernels of ``fused_experts`` for all sizes of some layers, for the current GPU.

    Parameters
    ----------
    layers : iterable of Layer
    ids_dtype : torch.dtype
        Of ``topk_ids``.
    also : iterable of callables
        Further calls, as for `compile_calls`.
    """
    if cubin_cache.folder() is not None:
        for _ in compile_calls([*calls_of(layers, ids_dtype), *also]):
            pass


def calls_of(layers, ids_dtype=torch.int32):
    """Return a call of ``fused_experts`` for each size of some layers."""
    return [partial(_call, layer, tokens, ids_dtype) for layer in layers for tokens in layer.token_counts]


def _call(layer, tokens, ids_dtype):
    moe_numba.fused_experts(**empty_arguments(layer, tokens, ids_dtype))


def empty_arguments(layer, tokens, ids_dtype=torch.int32):
    """Return arguments of ``fused_experts`` on the CPU, whose memory is reserved but not touched."""
    experts, dtype = layer.num_experts, _DTYPES[layer.dtype]
    shapes = dict(w13=(experts, 2 * layer.intermediate, layer.hidden), w2=(experts, layer.hidden, layer.intermediate))
    packed = layer.dtype == "mxfp4"
    given = {name: torch.empty(packed_shape(name, *s) if packed else s, dtype=dtype) for name, s in shapes.items()}
    if layer.transposed:
        given = {name: weight.view(experts, *weight.shape[:0:-1]).mT for name, weight in given.items()}
    if layer.dtype == "e4m3":
        for name, (_, *sizes) in shapes.items():
            blocks = [-(-size // FP8_SCALE_BLOCK) for size in sizes] if layer.scaling == "block" else []
            given[f"{name}_scale"] = torch.empty(experts, *blocks)
    if layer.activation != "silu":
        biases = dict(w13_bias=2 * layer.intermediate, w2_bias=layer.hidden)
        given |= {name: torch.empty(experts, size).bfloat16() for name, size in biases.items()}
    ids = torch.empty(tokens, layer.topk, dtype=ids_dtype)
    x = torch.empty(tokens, layer.hidden, dtype=torch.bfloat16)
    return given | dict(x=x, topk_weights=torch.empty(tokens, layer.topk), topk_ids=ids, activation=layer.activation)


def call_gate(tokens, num_experts, topk, dtype, bias_dtype, *options, **named):
    """Call ``biased_grouped_topk`` for logits whose memory is not touched; the options are its own."""
    bias = None if bias_dtype is None else torch.empty(num_experts, dtype=bias_dtype)
    moe_numba.biased_grouped_topk(torch.empty(tokens, num_experts, dtype=dtype), bias, topk, *options, **named)
