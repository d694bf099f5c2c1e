"""Measures the experts of MoE layers, their parts and transformers' functions: rows of the topic `moe_layer`."""

from functools import partial
from typing import Any, NamedTuple

import torch

import moe_numba
from moe_numba.course.bench import kernel_times, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.topics.grouped_gemm import FP8, TORCH_NAMES, random_weight
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.moe_layer import ExpertsWorkspace, reference
from moe_numba.moe_layer.workspace import is_permuted

GATHERED_BYTES = 16 << 30  # batched_mm copies the weights of each assignment: leave out larger copies
BOUNDS = {"bf16": 1e-2, "e4m3": 1e-2}  # relative error of a layer's output; see tests/kernels/test_moe_layer.py


class Layer(NamedTuple):
    """Sizes of a layer; each token has ``topk`` experts, drawn evenly at random."""

    model: str
    num_experts: int
    hidden: int
    intermediate: int
    dtype: str
    token_counts: tuple[int, ...]
    topk: int = 8

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of a row."""
        names = "model", "num_experts", "hidden", "intermediate", "topk"
        return {name: getattr(self, name) for name in names}


class Inputs(NamedTuple):
    """Arguments of ``fused_experts``, in its order, without ``shared``."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None


def measure(layers, device="cuda"):
    """Return the rows of all layers. Each output is checked before it is timed."""
    rows = []
    for layer in layers:
        weights = make_weights(layer, device)
        for tokens in layer.token_counts:
            rows += measure_layer(layer, make_inputs(layer, tokens, *weights))
        del weights
    return rows


def make_weights(layer, device):
    """Draw the weights, and for FP8 a scale per 128 x 128 block; outputs have magnitudes of about 1."""
    torch.manual_seed(0)
    experts, hidden, intermediate = layer.num_experts, layer.hidden, layer.intermediate
    shapes, dtype = ((2 * intermediate, hidden), (hidden, intermediate)), getattr(torch, TORCH_NAMES[layer.dtype])
    weights = [random_weight(experts, *shape, dtype, device) for shape in shapes]
    if dtype == FP8:
        blocks = [[-(-size // 128) for size in shape] for shape in shapes]
        scales = [(torch.rand(experts, *block, device=device) + 0.5) / 16 for block in blocks]
    else:
        scales = [None, None]
        for weight in weights:
            weight /= 16
    return *weights, *scales


def make_inputs(layer, tokens, w13, w2, w13_scale, w2_scale):
    """Draw tokens, and their experts evenly at random."""
    random = torch.Generator(w13.device).manual_seed(tokens)
    draw = partial(torch.rand, generator=random, device=w13.device)
    ids = draw(tokens, layer.num_experts).topk(layer.topk).indices.int()
    x = (2 * draw(tokens, layer.hidden) - 1).bfloat16()
    return Inputs(x, w13, w2, draw(tokens, layer.topk), ids, w13_scale, w2_scale)


def measure_layer(layer, given):
    """Return the rows of one number of tokens."""
    tokens = len(given.x)
    workspace, out = ExpertsWorkspace(tokens, layer.topk, given.w13, given.w2), torch.empty_like(given.x)
    calls = {"final": partial(moe_numba.fused_experts, *given, out=out, workspace=workspace)} | peer_calls(layer, given)
    expected = reference.fused_experts(*given)
    for name, call in calls.items():
        if fault := mismatch(call(), expected, BOUNDS[layer.dtype]):
            raise AssertionError(f"{name}, {layer.model}, {tokens} tokens: {fault}")
    floor_us, flops = lower_bound(layer, given.ids)
    parts = part_calls(given, workspace, out)
    gemms = [parts["gate_up"], parts["down"]]
    calls |= {"both GEMMs": lambda: [gemm() for gemm in gemms]} | {
        f"part: {name}": part for name, part in parts.items()
    }
    times, version = kernel_times(calls, replays=15), transformers_version()
    return [
        records.row(
            name,
            config=layer.config,
            size=dict(tokens=tokens),
            dtype=layer.dtype,
            kernel=stats,
            floor_us=floor_us if name == "final" else None,
            flops=flops if name == "final" else None,
            version=version if name.startswith("peer:") else None,
        )
        for name, stats in times.items()
    ]


def lower_bound(layer, ids):
    """Return the time to read the weights of the chosen experts once, or to multiply, and the operations."""
    size, limits = {"bf16": 2, "e4m3": 1}[layer.dtype], chip_limits()
    per_expert = 3 * layer.hidden * layer.intermediate
    flops = 2 * ids.numel() * per_expert
    num_bytes = int(ids.unique().numel()) * per_expert * size
    return max(num_bytes / limits.hbm_bandwidth, flops / limits.tensor_flops[TORCH_NAMES[layer.dtype]]) * 1e6, flops


def part_calls(given, workspace, out):
    """Return {name: call} of the launches of ``fused_experts``, on the results that it left in its workspace."""
    memory = workspace.intermediates(len(given.x))
    *groups, gather_indices, inverse_indices = memory.routing
    permutes = is_permuted(workspace.shape, given.ids.numel())
    gathered = {} if permutes else dict(gather_indices=gather_indices)
    calls = {"group_by_expert": partial(moe_numba.group_by_expert, given.ids, len(given.w13), out=memory.routing)}
    if given.w13_scale is not None:
        if permutes:
            calls["permute"] = partial(moe_numba.permute_cast_to_fp8, given.x, inverse_indices, out=memory.x)
        else:
            calls["cast"] = partial(moe_numba.per_token_cast_to_fp8, given.x, out=memory.x)
        calls["gate_up"] = partial(
            moe_numba.group_gemm_silu_and_mul_blockwise_fp8,
            *(memory.x[0], given.w13, *groups, memory.x[1], given.w13_scale),
            out=memory.activated,
            **gathered,
        )
        values, scales = memory.activated
        down = values, given.w2, *groups, scales, given.w2_scale
        calls["down"] = partial(moe_numba.group_gemm_blockwise_fp8, *down, out=memory.rows)
    else:
        x, (activated,) = given.x, memory.activated
        if permutes:
            (x,) = memory.x
            calls["permute"] = partial(moe_numba.permute_tokens, given.x, inverse_indices, out=x)
        calls["gate_up"] = partial(moe_numba.group_gemm_bf16, x, given.w13, *groups, out=memory.gate_up, **gathered)
        rows = dict(num_valid_rows=groups[1][-1:])
        calls["activation"] = partial(moe_numba.silu_and_mul, memory.gate_up, out=activated, **rows)
        calls["down"] = partial(moe_numba.group_gemm_bf16, activated, given.w2, *groups, out=memory.rows)
    calls["weighted_sum"] = partial(moe_numba.weighted_sum, memory.rows, inverse_indices, given.weights, out=out)
    return calls


def transformers_version():
    """Return the version of transformers, or None."""
    try:
        import transformers
    except ImportError:
        return None
    return transformers.__version__


def peer_calls(layer, given):
    """Return the calls of transformers' functions for bfloat16 experts, if it is installed."""
    if layer.dtype != "bf16" or transformers_version() is None:
        return {}
    from transformers import Qwen3MoeConfig
    from transformers.integrations import moe
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = dict(hidden_size=layer.hidden, moe_intermediate_size=layer.intermediate, num_experts=layer.num_experts)
    with torch.device("meta"):
        experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes, num_experts_per_tok=layer.topk))
    experts.gate_up_proj = torch.nn.Parameter(given.w13, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(given.w2, requires_grad=False)
    arguments = experts, given.x, given.ids.long(), given.weights
    calls = {"peer:transformers grouped_mm": partial(moe.grouped_mm_experts_forward, *arguments)}
    if given.ids.numel() * 6 * layer.hidden * layer.intermediate <= GATHERED_BYTES:
        calls["peer:transformers batched_mm"] = partial(moe.batched_mm_experts_forward, *arguments)
    return calls
