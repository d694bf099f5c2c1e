"""Compilation of all kernels of some MoE layers by several processes, before the layers are used.

Each process calls the layers in compile-only mode, which reports the kernels, and compiles its share into the cache of
machine code.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch

import moe_numba
from moe_numba.moe_layer.weights import packed_shape
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime import cubin_cache, device

MAX_PROCESSES = 16
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
        Functions without arguments that can be pickled and call other functions of the package, on CPU tensors.
    """
    if cubin_cache.folder() is None:
        return
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    gpu = device.gpu_of(torch.cuda.current_device())
    # A process that was forked could not use the GPU's context, nor a lock that a thread of its parent held.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        share = partial(compile_share, gpu, tuple(layers), processes, ids_dtype=ids_dtype, also=tuple(also))
        list(pool.map(share, range(processes)))


def compile_share(gpu, layers, processes, number, ids_dtype=torch.int32, also=()):
    """Compile one process's share of the kernels; return how many. The process is compile-only from then on."""
    launches = []
    device.compile_only(gpu, lambda *launch: launches.append(launch))
    for layer in layers:
        for tokens in layer.token_counts:
            moe_numba.fused_experts(**empty_arguments(layer, tokens, ids_dtype))
    for call in also:
        call()
    definitions = dict.fromkeys(
        (kernel, signature, options["launch_bounds"]) for kernel, signature, options in launches
    )
    # Grouped GEMMs take longest to compile: neighbours in this order go to different processes.
    ordered = sorted(definitions, key=lambda definition: definition[0].py_func.__name__)
    for kernel, signature, bounds in ordered[number::processes]:
        cubin_cache.machine_code(kernel, signature, arch=gpu.arch, link_arch=gpu.hardware_arch, launch_bounds=bounds)
    return len(ordered[number::processes])


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
