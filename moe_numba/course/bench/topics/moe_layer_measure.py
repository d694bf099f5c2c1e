"""Measures the experts of a layer: whole, in parts, step by step from a loop in torch, and transformers' beside them.

*Kernel time* is that of CUDA graphs. A step in which the host waits for the GPU has no graph; for those steps, and for
comparison with them, *call time* here is the time between two CUDA events around one call that finds the GPU idle.

The steps replace references of `moe_numba.moe_layer.stages` by kernels. The references are exact and simple, not fast:
what torch reaches with its own grouped GEMM is the time of transformers' ``grouped_mm``.
"""

from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines import torch_experts
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.timing import Stats, kernel_times, shuffled_rounds
from moe_numba.course.bench.topics.grouped_gemm import TORCH_NAMES, random_weight
from moe_numba.expert_parallel.fp8_cast import per_token_cast_to_fp8
from moe_numba.grouped_gemm import group_gemm_bf16, group_gemm_blockwise_fp8, group_gemm_silu_and_mul_blockwise_fp8
from moe_numba.grouped_gemm.reference import BLOCK, FP8, mismatch
from moe_numba.moe_layer import ExpertsWorkspace, fused_experts, group_by_expert, silu_and_mul, weighted_sum
from moe_numba.moe_layer.stages import run_experts

BF16 = torch.bfloat16
DTYPES = {BF16: "bf16", FP8: "e4m3"}
DEVICE = "cpu" if simulator.ENABLED else "cuda"
SETS = 4  # tokens with routings of their own: a call does not find the weights of the call before in the L2 cache
CALLS = 20  # of each step whose call time is measured
BATCHED_TOKENS = 64  # transformers' batched_mm copies the weights of each assignment
GEMMS = "both GEMMs"
LOOP = "torch loop over experts"
# Error of the whole output relative to the reference, as in the tests of fused_experts. A GPU's tensor cores add FP8
# products with about 13 significant bits, which moves some activations to the next FP8 number.
BOUNDS = {BF16: 4e-3, FP8: 4e-3 if simulator.ENABLED else 1e-2}
TORCH_BOUND = 2e-2  # torch and transformers round more intermediate results to bfloat16


class Layer(NamedTuple):
    """Sizes of a layer's experts, and the numbers of tokens that are measured."""

    num_experts: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    tokens: tuple[int, ...]
    topk: int = 8


class Weights:
    """Random weights of a layer; FP8 weights with a scale per 128 x 128 block."""

    def __init__(self, layer):
        torch.manual_seed(0)
        experts, hidden, wide = layer[:3]
        self.w13 = random_weight(experts, 2 * wide, hidden, layer.dtype, DEVICE)
        self.w2 = random_weight(experts, hidden, wide, layer.dtype, DEVICE)
        self.scales = ()
        if layer.dtype == FP8:
            blocks = [[-(-size // BLOCK) for size in weight.shape[1:]] for weight in (self.w13, self.w2)]
            self.scales = tuple(torch.rand(experts, *sizes, device=DEVICE) + 0.5 for sizes in blocks)

    @property
    def bytes_per_expert(self):
        """Bytes of one expert's weights and scales."""
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w2, *self.scales)) // len(self.w13)


class Problem:
    """Random tokens, their routing, and memory for the results of a call."""

    def __init__(self, layer, weights, tokens, seed):
        random, self.weights = torch.Generator().manual_seed(seed), weights
        # Gates have a standard deviation of about 1, because weights have 0.5.
        x = torch.randn(tokens, layer.hidden, generator=random) * (2 / layer.hidden**0.5)
        ids = torch.rand(tokens, layer.num_experts, generator=random).topk(layer.topk, dim=1).indices
        shares = torch.rand(tokens, layer.topk, generator=random) + 0.1
        self.x, self.ids = x.bfloat16().to(DEVICE), ids.int().to(DEVICE)
        self.topk_weights = (shares / shares.sum(1, keepdim=True)).to(DEVICE)
        # As from Qwen3-MoE's router in transformers
        self.router_outputs = self.topk_weights.bfloat16(), ids.to(DEVICE)
        self.out = torch.empty_like(self.x)
        self.workspace = ExpertsWorkspace(tokens, layer.topk, weights.w13, weights.w2)
        self.active = len(ids.unique())

    @property
    def arguments(self):
        """Arguments of ``fused_experts``."""
        return self.x, self.weights.w13, self.weights.w2, self.topk_weights, self.ids, *self.weights.scales

    def poison(self):
        """Fill the memory of results with NaN, and that of indices with -1."""
        memory = self.workspace.intermediates(len(self.x))
        for tensor in (*memory.routing, *memory.x, *memory.activated, memory.gate_up, memory.rows, self.out):
            if tensor is not None:
                tensor.view(torch.uint8).fill_(0xFF)


# Steps


def final(p):
    """Compute the experts by one call."""
    return fused_experts(*p.arguments, out=p.out, workspace=p.workspace)


def parts(layer):
    """Return {name: function of a problem} of the launches of ``fused_experts`` in their order."""
    found = {
        "group_by_expert": lambda p: group_by_expert(p.ids, layer.num_experts, out=_memory(p).routing),
        "per_token_cast_to_fp8": lambda p: per_token_cast_to_fp8(p.x, out=_memory(p).x),
        "gate_up GEMM": _gate_up,
        "silu_and_mul": _activation,
        "down GEMM": _down,
        "weighted_sum": lambda p: weighted_sum(_memory(p).rows, _memory(p).routing[3], p.topk_weights, out=p.out),
    }
    if layer.dtype == FP8:  # the first GEMM's epilogue is the activation
        del found["silu_and_mul"]
        return {{"gate_up GEMM": "gate_up GEMM, silu_and_mul"}.get(name, name): call for name, call in found.items()}
    del found["per_token_cast_to_fp8"]
    return found


def _memory(p):
    return p.workspace.intermediates(len(p.x))


def _gate_up(p):
    memory, w = _memory(p), p.weights
    *groups, indices, _ = memory.routing
    if w.scales:
        values, scales = memory.x
        arguments = values, w.w13, *groups, scales, w.scales[0]
        return group_gemm_silu_and_mul_blockwise_fp8(*arguments, out=memory.activated, gather_indices=indices)
    return group_gemm_bf16(p.x, w.w13, *groups, out=memory.gate_up, gather_indices=indices)


def _activation(p):
    memory = _memory(p)
    return silu_and_mul(memory.gate_up, out=memory.activated[0], num_valid_rows=memory.routing[1][-1:])


def _down(p):
    memory, w = _memory(p), p.weights
    groups = memory.routing[:2]
    if w.scales:
        values, scales = memory.activated
        return group_gemm_blockwise_fp8(values, w.w2, *groups, scales, w.scales[1], out=memory.rows)
    return group_gemm_bf16(memory.activated[0], w.w2, *groups, out=memory.rows)


def both_gemms(p):
    """Run the two grouped GEMMs, without what is between them."""
    _gate_up(p)
    return _down(p)


def stages_in_torch(dtype):
    """Return {step: stages that are computed in torch}, from both grouped GEMMs to all stages as kernels.

    Both GEMMs are replaced at once, because their references are float64.
    """
    other = "quantise" if dtype == FP8 else "activation"
    kernel = "per_token_cast_to_fp8" if dtype == FP8 else "silu_and_mul"
    return {
        "grouped GEMMs": {"permute", other, "sum"},
        "group_by_expert": {other, "sum"},
        kernel: {"sum"},
        "weighted_sum": set(),
    }


def ladder_steps(layer):
    """Return {name: function of a problem} of the steps as they are called: the loop, then one kernel more each."""
    scales = () if layer.dtype == FP8 else (None, None)

    def run(replaced, p):
        return run_experts(*p.arguments, *scales, None, frozenset(replaced))

    steps = {LOOP: lambda p: torch_experts.loop_over_experts(*p.arguments)}
    return steps | {f"with {name}": partial(run, replaced) for name, replaced in stages_in_torch(layer.dtype).items()}


def peer_steps(layer, weights, tokens, peers):
    """Return {name: (function of a problem, version)} of the peers; transformers' are for bfloat16 only."""
    found, kind = {}, DTYPES[layer.dtype]
    version = torch_experts.transformers_version()
    if layer.dtype == BF16 and version:
        module = torch_experts.TransformersExperts(weights.w13, weights.w2)
        for name in torch_experts.IMPLEMENTATIONS:
            if name != "batched_mm" or tokens <= BATCHED_TOKENS:
                call = lambda p, name=name: module(name, p.x, *p.router_outputs)
                found[f"peer:transformers {name}"] = call, version
    for peer in peers:
        if function := getattr(peer, f"fused_experts_{kind}", None):
            call = lambda p, function=function: function(*p.arguments, out=p.out)
            found[f"peer:{peer.NAME}"] = call, peer.VERSION
    return found


def waits(step):
    """Return whether the host waits for the GPU in a step, so that no CUDA graph can capture it."""
    return step == LOOP or step.endswith(" eager") or (step.startswith("with ") and step != "with weighted_sum")


# Measuring


def called_times(named, repeats=CALLS):
    """Measure the time between CUDA events around one call, in microseconds, with interleaved steps.

    Each call finds the GPU idle. ``named`` is {name: list of calls}, which are called round-robin.
    """
    for calls in named.values():
        for call in calls:
            call()
    if simulator.ENABLED:
        return dict.fromkeys(named)
    samples, calls = {name: [] for name in named}, {name: cycle(own) for name, own in named.items()}
    for name in shuffled_rounds(named, repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        next(calls[name])()
        end.record()
        end.synchronize()
        samples[name].append(start.elapsed_time(end) * 1000)
    return {name: Stats.of(own) for name, own in samples.items()}


def check(layer, p, expected, steps):
    """Compare every step's output with the reference, and the parts' with that of one call, bit by bit."""
    p.poison()
    if wrong := mismatch(final(p), expected, BOUNDS[layer.dtype]):
        raise AssertionError(f"final: {wrong}")
    whole = p.out.clone()
    p.poison()
    for call in parts(layer).values():
        call(p)
    if not torch.equal(p.out, whole):
        raise AssertionError("the parts one after another differ from one call")
    for name, step in steps.items():
        if wrong := mismatch(step(p), expected, TORCH_BOUND if name == LOOP else BOUNDS[layer.dtype]):
            raise AssertionError(f"{name}: {wrong}")


def bound(layer, weights, problems):
    """Return the limits of a size: ``bytes``, ``flops``, ``read_us`` and ``floor_us``.

    ``bytes`` are those of the weights that the tokens use, the mean over the problems' routings; ``read_us`` is the time
    to read them at the memory's bandwidth. The bound ``floor_us`` is that time, or that of both GEMMs at the peak rate of
    the tensor cores, whichever is longer.
    """
    num_bytes = round(sum(p.active for p in problems) / len(problems) * weights.bytes_per_expert)
    flops, limits = 2 * problems[0].ids.numel() * 3 * layer.hidden * layer.intermediate, chip_limits()
    rate = limits.tensor_flops[TORCH_NAMES[DTYPES[layer.dtype]]]
    read_us = num_bytes / limits.hbm_bandwidth * 1e6
    return dict(bytes=num_bytes, flops=flops, read_us=read_us, floor_us=max(read_us, flops / rate * 1e6))


def measure_layer(name, layer, weights, tokens, peers=()):
    """Return the rows of one number of tokens. Each step is checked before it is timed; a wrong peer is refused."""
    problems = [Problem(layer, weights, tokens, seed) for seed in range(1, SETS + 1)]
    config = dict(model=name, num_experts=layer.num_experts, topk=layer.topk)
    config |= dict(hidden=layer.hidden, intermediate=layer.intermediate)
    limits = bound(layer, weights, problems)
    common = dict(config=config, size={"tokens": tokens}, dtype=DTYPES[layer.dtype])
    expected = torch_experts.expected_output(*problems[0].arguments)
    steps, theirs, rows = ladder_steps(layer), peer_steps(layer, weights, tokens, peers), []
    try:
        check(layer, problems[0], expected, steps)
    except AssertionError as error:
        raise AssertionError(f"{name}, {tokens} tokens: {error}") from None
    for peer, (call, version) in list(theirs.items()):
        problems[0].out.fill_(float("nan"))
        if wrong := mismatch(call(problems[0]), expected, TORCH_BOUND):
            rows.append(records.row(peer, **common, refused=wrong, version=version))
            del theirs[peer]
    del expected
    for p in problems:  # the parts read what the launches before them have written
        final(p)
    steps = {"final": final, **steps, **{peer: call for peer, (call, _) in theirs.items()}}
    graphs = {step: call for step, call in steps.items() if not waits(step)}
    graphs |= {f"part: {part}": call for part, call in parts(layer).items()} | {GEMMS: both_gemms}
    kernel = kernel_times({step: [partial(call, p) for p in problems] for step, call in graphs.items()})
    called = called_times({step: [partial(call, p) for p in problems] for step, call in steps.items()})
    for step in {**steps, **graphs}:
        more = dict(version=theirs.get(step, (None, None))[1], host_waits=waits(step) or None)
        more |= limits if step in ("final", GEMMS) else {}
        rows.append(records.row(step, **common, kernel=kernel.get(step), call=called.get(step), **more))
    if layer.dtype == BF16 and not torch_experts.transformers_version():
        why = "transformers 5 is not installed"
        rows += [
            records.row(f"peer:transformers {i}", **common, not_run=why)
            for i in torch_experts.IMPLEMENTATIONS
            if i != "batched_mm" or tokens <= BATCHED_TOKENS
        ]
    return rows
