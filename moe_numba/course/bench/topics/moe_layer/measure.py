"""Measures the experts of MoE layers, their parts and other projects' functions: rows of the topic `moe_layer`.

A module of ``--peers`` provides two functions for this topic:

- ``serves_experts(scaling, problem) -> bool``: whether the peer has kernels for it. ``scaling`` is "none" (bfloat16),
  "block" or "tensor" (FP8), or "mxfp4"; ``problem`` is an :class:`ExpertsProblem`, whose tensors it must not change.
- ``plan_experts(scaling, problem)``: returns a function without arguments that computes the experts on torch's current
  stream, can be captured in a CUDA graph, and returns a tensor [tokens, hidden] in bfloat16. Converting weights into
  the peer's layout is part of the plan and is not timed; quantising tokens is timed.
"""

import sys
from functools import partial
from typing import NamedTuple

import torch

import moe_numba
from moe_numba.course.bench import drop_if_wrong, kernel_times, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.topics.grouped_gemm.measure import BYTES_OF_WEIGHT
from moe_numba.course.bench.topics.grouped_gemm.show import FP8, TORCH_NAMES, random_weight
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.w4.reference import quantise_mxfp4
from moe_numba.moe_layer import ExpertsWorkspace, reference
from moe_numba.moe_layer.compile_layers import compile_layers
from moe_numba.moe_layer.gemv.plan import uses_decode_kernels
from moe_numba.moe_layer.launches import ExpertsCall, ExpertsTensors, can_fuse_activation, launches_of
from moe_numba.moe_layer.silu_and_mul.api import ALPHA, check_activation
from moe_numba.moe_layer.weights import FP8_TENSOR

TRANSFORMERS = "peer:transformers"
STATIC, FAST = "static scales", "static scales, fast accumulation"  # of x and the activations, with FP8 per expert
GROUPED = "grouped"  # with grouped GEMMs, where `fused_experts` takes the two kernels for few tokens
GATHERED_BYTES = 16 << 30  # batched_mm copies the weights of each assignment: leave out larger copies
# Relative error of a layer's output; see tests/moe_layer/test_moe_layer.py and test_moe_layer_formats.py.
BOUND, BOUND_OF_ROW_SCALES = 1e-2, 2.5e-2
# The reference rounds where the package's kernels do. Other projects round activations to bfloat16 before they quantise
# them (1.2e-2), and with a scale per expert have one scale for all tokens (4e-2).
BOUNDS_OF_PEERS = {"none": 1e-2, "block": 2.5e-2, "tensor": 6e-2, "mxfp4": 1e-2}


class Inputs(NamedTuple):
    """Arguments of ``fused_experts``, in its order, without ``shared``."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None


class ExpertsProblem(NamedTuple):
    """What a peer computes: the arguments of ``fused_experts``, which documents their shapes."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    activation: str = "silu"


def measure(layers, peers=(), device="cuda"):
    """Return the rows of all layers. Each output is checked before it is timed."""
    rows = []
    if device == "cuda":
        compile_layers(layers)
    for layer in layers:
        weights, options = make_weights(layer, device), make_options(layer, device)
        for tokens in layer.token_counts:
            rows += measure_layer(layer, make_inputs(layer, tokens, *weights), options, peers)
        del weights
    return rows


def make_weights(layer, device):
    """Draw the weights, and for FP8 their scales; outputs have magnitudes of about 1."""
    random = torch.Generator(device).manual_seed(0)  # threads of ranks draw the same numbers
    experts, hidden, intermediate = layer.num_experts, layer.hidden, layer.intermediate
    shapes, dtype = ((2 * intermediate, hidden), (hidden, intermediate)), getattr(torch, TORCH_NAMES[layer.dtype])
    weights = [random_weight(experts, *shape, dtype, device, random) for shape in shapes]
    if dtype == FP8:
        blocks = [[-(-size // 128) for size in shape] if layer.scaling == "block" else [] for shape in shapes]
        scales = [(torch.rand(experts, *block, device=device, generator=random) + 0.5) / 16 for block in blocks]
        return *weights, *scales
    for weight in weights:
        weight /= 16
    if layer.dtype == "mxfp4":
        weights = pack(*weights, "interleaved" if layer.activation == "swigluoai" else "stacked")
    return *weights, None, None


def pack(w13, w2, gate_up):
    """Quantise weights to MXFP4, expert by expert, and pack them."""
    w13, w2 = ([quantise_mxfp4(expert) for expert in weight] for weight in (w13, w2))
    packed = [
        moe_numba.pack_mxfp4_experts(*(t[None] for t in (*first, *second)), gate_up)
        for first, second in zip(w13, w2, strict=True)
    ]
    return [torch.cat(experts) for experts in zip(*packed, strict=True)]


def make_options(layer, device):
    """Draw the biases, and return the other options of ``fused_experts``."""
    if layer.activation == "silu":
        return {}
    sizes = dict(w13_bias=2 * layer.intermediate, w2_bias=layer.hidden)
    draw = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(1))
    biases = {name: draw(layer.num_experts, size).bfloat16() / 4 for name, size in sizes.items()}
    return biases | dict(activation=layer.activation)


def make_inputs(layer, tokens, w13, w2, w13_scale, w2_scale):
    """Draw tokens, and their experts evenly at random except for the shared ones."""
    random = torch.Generator(w13.device).manual_seed(tokens)
    draw = partial(torch.rand, generator=random, device=w13.device)
    routed = layer.num_experts - layer.num_shared
    ids = draw(tokens, routed).topk(layer.topk - layer.num_shared).indices
    shared = torch.arange(routed, layer.num_experts, device=ids.device).expand(tokens, -1)
    ids = torch.cat([ids, shared], dim=1).int()
    x = (2 * draw(tokens, layer.hidden) - 1).bfloat16()
    return Inputs(x, w13, w2, draw(tokens, layer.topk), ids, w13_scale, w2_scale)


def measure_layer(layer, given, options, peers=()):
    """Return the rows of one number of tokens."""
    tokens = len(given.x)
    workspace = ExpertsWorkspace(tokens, layer.topk, given.w13, given.w2, layer.scaling)
    out = torch.empty_like(given.x)
    ours = partial(moe_numba.fused_experts, *given, out=out, workspace=workspace, **options)
    calls = {"final": ours}
    if uses_decode_kernels(workspace.shape, tokens, layer.topk, given.w13, given.w2):
        calls[GROUPED] = grouped_call(given, workspace, options)
    calls |= transformers_calls(layer, given, options) | peer_calls(layer, given, options, peers)
    drop_wrong(calls, reference.fused_experts(*given, **options), layer)
    calls |= static_scales_calls(given, out, workspace)
    floor_us, flops = lower_bound(layer, given.ids)
    parts = part_calls(given, workspace, out, options)
    gemms = [parts["gate_up"], parts["down"]]
    calls |= {"both GEMMs": lambda: [gemm() for gemm in gemms]} | {
        f"part: {name}": part for name, part in parts.items()
    }
    times = kernel_times(calls, replays=15)
    versions = {f"peer:{peer.NAME}": peer.VERSION for peer in peers}
    return [
        records.row(
            name,
            config=layer.config,
            size=dict(tokens=tokens),
            dtype=layer.dtype,
            kernel=stats,
            floor_us=None if name.startswith("part: ") else floor_us,
            flops=flops if name == "final" else None,
            version=transformers_version() if name.startswith(TRANSFORMERS) else versions.get(name),
        )
        for name, stats in times.items()
    ]


def drop_wrong(calls, expected, layer):
    """Check each call's output, poisoned before; remove a peer that fails or whose output is wrong, and report it."""
    for name, call in list(calls.items()):
        is_peer, where = name.startswith("peer:"), f"{layer.model}, {len(expected)} tokens"
        bound = BOUND if layer.scaling == "block" else BOUND_OF_ROW_SCALES
        if is_peer:
            bound = BOUNDS_OF_PEERS[scaling_of(layer)]

        def find_fault(call=call, bound=bound):
            call().fill_(float("nan"))
            return mismatch(call(), expected, bound)

        drop_if_wrong(calls, name, where, is_peer, find_fault)


def lower_bound(layer, ids):
    """Return the time to read the weights of the chosen experts once, or to multiply, and the operations."""
    limits, per_expert = chip_limits(), 3 * layer.hidden * layer.intermediate
    flops = 2 * ids.numel() * per_expert
    num_bytes = int(ids.unique().numel()) * per_expert * BYTES_OF_WEIGHT[layer.dtype]
    return max(num_bytes / limits.hbm_bandwidth, flops / limits.tensor_flops[TORCH_NAMES[layer.dtype]]) * 1e6, flops


def grouped_call(given, workspace, options):
    """Return a call of ``fused_experts`` with grouped GEMMs, however few tokens there are."""
    out = torch.empty_like(given.x)
    launches = part_calls(given, workspace, out, options, decodes=False).values()
    return lambda: [launch() for launch in launches] and out


def static_scales_calls(given, out, workspace):
    """Return calls with one scale for all x and one for all activations, with FP8 weights and a scale per expert.

    As a calibration would, they cover the largest magnitudes of this batch; each output is checked.
    """
    if workspace.shape.format != FP8_TENSOR:
        return {}
    moe_numba.fused_experts(*given, out=out, workspace=workspace)
    scales = dict(
        a1_scale=given.x.abs().max().float().reshape(1) / torch.finfo(FP8).max,
        a2_scale=workspace.intermediates(len(given.x)).activated[1].max().reshape(1),
    )
    expected, calls = reference.fused_experts(*given, **scales), {}
    for name, fast in ((STATIC, False), (FAST, True)):
        options = scales | dict(use_fast_accum=fast, out=torch.empty_like(out), workspace=workspace)
        calls[name] = partial(moe_numba.fused_experts, *given, **options)
        if fault := mismatch(calls[name](), expected, BOUND_OF_ROW_SCALES):
            raise AssertionError(f"{name}, {len(given.x)} tokens: {fault}")
    return calls


def part_calls(given, workspace, out, options, decodes=None):
    """Return {name: call} of the launches of ``fused_experts``, on the results that it left in its workspace.

    ``decodes``: whether they are the two kernels for few tokens; by default where ``fused_experts`` takes them.
    """
    activation = check_activation(options.get("activation", "silu"), ALPHA, None)
    biases = {name: value for name, value in options.items() if name.endswith("bias")}
    tensors = ExpertsTensors(*given, **biases)
    fuses = can_fuse_activation(tensors, workspace.shape.format, activation)
    if decodes is None:
        decodes = uses_decode_kernels(workspace.shape, *given.ids.shape, given.w13, given.w2)
    memory = workspace.intermediates(len(given.x))
    return launches_of(ExpertsCall(tensors, workspace.shape, activation, fuses, decodes, memory), out)


def transformers_version():
    """Return the version of transformers, or None."""
    try:
        import transformers
    except ImportError:
        return None
    return transformers.__version__


def scaling_of(layer):
    """Return how a layer's weights are scaled, by the name that peers know."""
    return {"e4m3": layer.scaling, "bf16": "none"}.get(layer.dtype, layer.dtype)


def peer_calls(layer, given, options, peers):
    """Return {step: call} of the peers that have kernels for a layer; report those whose plan raises an error."""
    problem, calls, scaling = ExpertsProblem(*given, **options), {}, scaling_of(layer)
    for peer in peers:
        if not hasattr(peer, "plan_experts"):
            continue
        try:
            if peer.serves_experts(scaling, problem):
                calls[f"peer:{peer.NAME}"] = peer.plan_experts(scaling, problem)
        except Exception as error:  # the other peers are measured whatever this one raises
            what = f"{layer.model}, {len(given.x)} tokens"
            print(f"peer {peer.NAME} is left out ({what}): {type(error).__name__}: {error}", file=sys.stderr)
    return calls


def transformers_calls(layer, given, options):
    """Return the calls of transformers' functions for bfloat16 experts, if it is installed."""
    if layer.dtype != "bf16" or transformers_version() is None:
        return {}
    from transformers.integrations import moe

    experts = transformers_experts(layer)
    set_parameters(experts, layer, given, options)
    arguments = experts, given.x, given.ids.long(), given.weights
    calls = {f"{TRANSFORMERS} grouped_mm": partial(moe.grouped_mm_experts_forward, *arguments)}
    if given.ids.numel() * 6 * layer.hidden * layer.intermediate <= GATHERED_BYTES:
        calls[f"{TRANSFORMERS} batched_mm"] = partial(moe.batched_mm_experts_forward, *arguments)
    return calls


def set_parameters(experts, layer, given, options):
    """Give a module of experts of transformers the weights and biases of a layer, which require no grad."""
    parameters = dict(gate_up_proj=given.w13, down_proj=given.w2)
    if layer.activation == "swigluoai":
        parameters = {name: weight.mT.contiguous() for name, weight in parameters.items()}
        parameters |= dict(gate_up_proj_bias=options["w13_bias"], down_proj_bias=options["w2_bias"])
    for name, tensor in parameters.items():
        setattr(experts, name, torch.nn.Parameter(tensor, requires_grad=False))


def transformers_experts(layer):
    """Make a module of experts of transformers without memory: that of gpt-oss, or of Qwen3-MoE."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = dict(hidden_size=layer.hidden, num_experts_per_tok=layer.topk)
    with torch.device("meta"):
        if layer.activation == "swigluoai":
            sizes |= dict(intermediate_size=layer.intermediate, num_local_experts=layer.num_experts)
            return GptOssExperts(GptOssConfig(**sizes))
        sizes |= dict(moe_intermediate_size=layer.intermediate, num_experts=layer.num_experts)
        return Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
