"""Benchmark of a training step of an MoE layer's experts: forward and backward, in bfloat16, and the memory it needs.

Beside the package: transformers' implementations with the same weights, ``grouped_mm`` also under ``torch.compile``. A
step is timed as a caller sees it, without a CUDA graph, because some of them wait for the host.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

import moe_numba
from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import bold_best, markdown_table
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.timing import Stats, launched_by, shuffled_rounds
from moe_numba.course.bench.topics.moe_layer.measure import (
    TRANSFORMERS,
    make_inputs,
    make_options,
    make_weights,
    set_parameters,
    transformers_experts,
    transformers_version,
)
from moe_numba.course.bench.topics.moe_layer.show import GPT_OSS, layers
from moe_numba.moe_layer.compile_layers import Layer

TOKENS = 1024, 4096, 16384
LAYERS = (
    Layer("Qwen3-30B-A3B", 128, 2048, 768, "bf16", TOKENS),
    Layer("gpt-oss-20b", **GPT_OSS, dtype="bf16", token_counts=TOKENS),
    Layer("DeepSeek-V3, 1 of 8 GPUs", 32, 7168, 2048, "bf16", TOKENS),
)
OURS, FROZEN, FORWARD, AGAIN = "final", "final, frozen weights", "final, forward", "final, checkpointed"
ROUNDS = 12
BOUND = 2e-2  # relative error of a gradient beside that of transformers' grouped_mm, both in bfloat16


def measure(peers, quick, device="cuda"):
    """Return the rows of the record."""
    rows = []
    for layer in LAYERS:
        weights, options = make_weights(layer, device), make_options(layer, device)
        for tokens in layer.token_counts[: 1 if quick else None]:
            rows += measure_layer(layer, make_inputs(layer, tokens, *weights), options)
        del weights
    return rows


def measure_layer(layer, given, options):
    """Return the rows of one number of tokens; each gradient is checked before it is timed."""
    steps = steps_of(layer, given, options)
    reference = f"{TRANSFORMERS} grouped_mm"
    if reference in steps:
        wanted = steps[reference]()
        for name, step in steps.items():
            if name not in (FROZEN, FORWARD) and (fault := differing(step(), wanted)):
                raise AssertionError(f"{name}, {layer.model}, {len(given.x)} tokens: {fault}")
    times, size = step_times(steps), dict(tokens=len(given.x))
    flops = 6 * 3 * given.ids.numel() * layer.hidden * layer.intermediate  # of the forward, twice as many backward
    floor_us = flops / chip_limits().tensor_flops["bfloat16"] * 1e6
    return [
        records.row(
            name,
            config=layer.config,
            size=size,
            dtype=layer.dtype,
            kernel=stats,
            floor_us=floor_us if name == OURS else None,
            flops=flops if name == OURS else None,
            peak_bytes=peak_bytes(steps[name]),
            version=transformers_version() if name.startswith(TRANSFORMERS) else None,
        )
        for name, stats in times.items()
    ]


def steps_of(layer, given, options):
    """Return {name: function that computes a step and returns its gradients, of x, the routing and the weights}."""
    grad = torch.randn_like(given.x, dtype=torch.float32).bfloat16()
    leaves = [t.detach().clone().requires_grad_() for t in (given.x, given.weights)]
    weights = [t.detach().requires_grad_() for t in (given.w13, given.w2)]

    def ours(x, topk_weights, w13, w2):
        return moe_numba.fused_experts(x, w13, w2, topk_weights, given.ids, **options)

    def gradients(function, tensors):
        return torch.autograd.grad(function(*tensors), tensors, grad)

    def frozen():
        x, topk_weights = leaves
        return torch.autograd.grad(ours(x, topk_weights, given.w13.detach(), given.w2.detach()), leaves, grad)

    def forward():
        with torch.no_grad():
            return (ours(*leaves, *weights),)

    again = partial(checkpoint, ours, use_reentrant=False)
    steps = {OURS: partial(gradients, ours, [*leaves, *weights]), FROZEN: frozen, FORWARD: forward}
    steps[AGAIN] = partial(gradients, again, [*leaves, *weights])
    if transformers_version() is None:
        return steps
    from transformers.integrations import moe

    experts, ids = transformers_experts(layer), given.ids.long()
    set_parameters(experts, layer, given, options)
    parameters = [experts.gate_up_proj.requires_grad_(), experts.down_proj.requires_grad_()]
    is_transposed = layer.activation == "swigluoai"

    def theirs(function):
        x, topk_weights = leaves
        found = torch.autograd.grad(function(experts, x, ids, topk_weights), [*leaves, *parameters], grad)
        return (*found[:2], *(t.mT for t in found[2:])) if is_transposed else found

    eager = type(experts).forward.__wrapped__
    functions = {"grouped_mm": moe.grouped_mm_experts_forward, "eager": eager}
    functions["compiled grouped_mm"] = torch.compile(moe.grouped_mm_experts_forward, dynamic=False)
    return steps | {f"{TRANSFORMERS} {name}": partial(theirs, function) for name, function in functions.items()}


def differing(gradients, wanted):
    """Return which gradient differs from the one that is wanted, and by how much, or None."""
    for name, gradient, other in zip(("x", "topk_weights", "w13", "w2"), gradients, wanted, strict=True):
        error = float((gradient.float() - other.float()).norm() / other.float().norm())
        if not error < BOUND:
            return f"the gradient of {name} differs by {error:.1e} from that of transformers; {BOUND} is allowed"
    return None


def step_times(steps):
    """Return {name: Stats}: the time from one step to the next, in rounds of random order."""
    if simulator.ENABLED:
        return dict.fromkeys(steps)
    kernels = {name: launched_by(step) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for name in shuffled_rounds(steps, ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        steps[name]()  # so that another implementation's last kernels are over
        start.record()
        steps[name]()
        end.record()
        end.synchronize()
        samples[name].append(start.elapsed_time(end) * 1000)
    return {name: Stats.of(times, kernels[name]) for name, times in samples.items()}


def peak_bytes(step):
    """Return the memory that a step allocates at its peak, beside its inputs."""
    if simulator.ENABLED:
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _label(step):
    return {OURS: "moe_numba"}.get(step) or step.removeprefix("peer:transformers ").replace("final, ", "")


def figures(record):
    """Draw the times of a step as bars."""
    columns = {step: _label(step) for step in (OURS, *records.peers(record))}
    rows = [
        {"step": f"{model}, {tokens} tokens"} | {s: steps[s]["kernel_us"] for s in columns if s in steps}
        for model, tokens, steps in layers(record)
    ]
    title = f"Forward and backward of a layer's experts on an {record['gpu']}"
    return {"steps": plots.bars_figure(rows, columns, title=title, caption=plots.caption(record))}


def readme_table(record):
    """Return a table of times in microseconds, and of peak memory."""
    others, lines = records.peers(record), []
    for model, tokens, steps in layers(record):
        us = lambda step, steps=steps: format_us(steps[step]["kernel_us"]["median"]) if step in steps else ""
        cells, own = bold_best([us(step) for step in (OURS, *others)]), map(us, (FORWARD, FROZEN, AGAIN))
        memory = [f"{steps[s]['peak_bytes'] / 1e9:.1f}" if s in steps else "" for s in (OURS, *others)]
        lines.append([model, f"{tokens:,}", *cells, *own, format_us(steps[OURS]["floor_us"]), " / ".join(memory)])
    names = [_label(step) for step in (OURS, *others)]
    own_names = "forward alone", "frozen weights", "checkpointed"
    headings = ["experts", "tokens", *names, *own_names, "speed of light", "peak memory, GB"]
    provenance = plots.provenance(record)
    text = (
        "Time of a training step of a layer's experts in microseconds, forward and backward with the gradients of x, "
        "the routing weights, w13 and w2, in bfloat16, as a caller without a CUDA graph sees it. `eager` and "
        "`grouped_mm` are transformers' implementations. Forward alone, frozen weights (gradients of x and the routing "
        "only) and checkpointed (the forward pass again, instead of gate and up kept) are moe_numba's. The speed of "
        "light is the time of the multiplications at the tensor cores' "
        "peak rate. Peak memory is that of the columns of times, in their order. "
        f"{provenance[0].upper()}{provenance[1:]}."
    )
    return f"{markdown_table(headings, lines)}\n\n{text}"
