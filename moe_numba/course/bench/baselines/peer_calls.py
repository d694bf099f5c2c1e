"""Other projects' ops, called with the arguments of this package's functions, for the benchmark of call time."""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch


class Peer(NamedTuple):
    """A package with ops to measure."""

    NAME: str
    VERSION: str
    calls: Callable  # calls(cases) yields (public function's name, suffix of the step, call, its outputs or None)


def installed_peers() -> list[Peer]:
    """Return the peers that can be imported here; one that is installed but fails is reported on standard error."""
    found, distributions = [], importlib.metadata.packages_distributions()
    for module, (name, calls) in _PEERS.items():
        if module not in distributions:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # such as OSError: a library that does not fit torch's
            print(f"peer {name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        found.append(Peer(name, importlib.metadata.version(distributions[module][0]), calls))
    return found


def sgl_kernel_calls(cases: dict) -> Iterator[tuple]:
    """Yield the calls of SGLang's gate and alignment."""
    import sgl_kernel

    (logits, bias, topk), options = cases["biased_grouped_topk"].args, cases["biased_grouped_topk"].options
    groups = options["num_expert_group"], options["topk_group"]
    yield "biased_grouped_topk", "", partial(sgl_kernel.moe_fused_gate, logits, bias, *groups, topk), None
    ids, block_size, experts = cases["moe_align_block_size"].args
    out = _align_outputs(ids, block_size, experts)
    offsets = torch.empty(experts + 2, dtype=torch.int32, device=ids.device)
    # The first of SGLang's experts are the invalid ids, and the last argument fills the padding.
    align = partial(sgl_kernel.moe_align_block_size, ids, experts + 1, block_size, *out, offsets, True)
    yield "moe_align_block_size", ", out=", align, out


def vllm_calls(cases: dict) -> Iterator[tuple]:
    """Yield the calls of vLLM's alignment: the function that allocates the outputs, and the op that it calls."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    ids, block_size, experts = cases["moe_align_block_size"].args
    yield "moe_align_block_size", "", partial(moe_align_block_size, ids, block_size, experts), None
    out = _align_outputs(ids, block_size, experts)
    align = partial(_custom_ops.moe_align_block_size, ids, experts, block_size, *out)
    yield "moe_align_block_size", ", out=", align, out


def deep_gemm_calls(cases: dict) -> Iterator[tuple]:
    """Yield the call of DeepGEMM's grouped GEMM with block scales; its groups are multiples of 128 rows."""
    import deep_gemm

    x, weight, seqlens, _, x_scale, w_scale = cases["group_gemm_blockwise_fp8"].args
    group_of_row = torch.arange(len(seqlens), dtype=torch.int32, device=x.device).repeat_interleave(seqlens)
    out = torch.empty(len(x), weight.shape[1], dtype=torch.bfloat16, device=x.device)
    x_scale = x_scale.t().contiguous().t()  # column-major, so that the call copies no scales
    gemm = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    yield (
        "group_gemm_blockwise_fp8",
        ", out=",
        partial(gemm, (x, x_scale), (weight, w_scale), out, group_of_row),
        (out,),
    )


_PEERS = {
    "sgl_kernel": ("sgl_kernel", sgl_kernel_calls),
    "vllm": ("vllm", vllm_calls),
    "deep_gemm": ("DeepGEMM", deep_gemm_calls),
}


def _align_outputs(ids, block_size, num_experts):
    """Allocate the outputs of an alignment for any routing."""
    blocks = -(-(ids.numel() + (num_experts + 1) * (block_size - 1)) // block_size)
    return tuple(torch.empty(n, dtype=torch.int32, device=ids.device) for n in (blocks * block_size, blocks, 1))
