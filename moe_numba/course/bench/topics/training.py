"""Benchmark of a training step of an MoE layer's experts: forward and backward, in bfloat16, and the memory it needs.

Beside the package: transformers' implementations with the same weights, ``grouped_mm`` also under ``torch.compile``. A
step is timed as a caller sees it, without a CUDA graph, because some of them wait for the host. Steps with LoRA
adapters of rank 16 have frozen weights; beside them stands ``grouped_mm`` with what PEFT does, which adds them to the
weights. Experts are drawn evenly at random, and for a second set of rows by Zipf's law.

A module of ``--peers`` provides one of two functions, or both, for layers with the activation "silu" without biases:

- ``plan_experts_step(problem)``: returns a function without arguments that computes the forward and backward pass of a
  :class:`StepProblem` on torch's current stream, and returns the gradients of x, topk_weights, w13 and w2, in their
  shapes; or None, if the peer has no kernels for these sizes.
- ``plan_lora_step(problem)``: the same with frozen weights, and the gradients of x, topk_weights and ``adapters``.

The tensors of a problem are leaves that require grad, which a step must not change. A peer whose parameters have
another layout makes leaves of its own in its plan, which is not timed, and returns views of their gradients in our
layout. Copies that its users would pay for in each step belong into the step. Gradients are compared with those of
transformers, so peers are measured only where it is installed.
"""

import sys
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

import moe_numba
from moe_numba import simulator
from moe_numba.course.bench import drop_if_wrong, records
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
from moe_numba.moe_layer import fused_experts_lora
from moe_numba.moe_layer.compile_layers import Layer

TOKENS = 1024, 4096, 16384
LAYERS = (
    Layer("Qwen3-30B-A3B", 128, 2048, 768, "bf16", TOKENS),
    Layer("gpt-oss-20b", **GPT_OSS, dtype="bf16", token_counts=TOKENS),
    Layer("DeepSeek-V3, 1 of 8 GPUs", 32, 7168, 2048, "bf16", TOKENS),
)
OURS, FROZEN, FORWARD, AGAIN = "final", "final, frozen weights", "final, forward", "final, checkpointed"
LORA, PEER_LORA = "final, LoRA", f"{TRANSFORMERS} grouped_mm, LoRA"
RANK, MODEL_TOKENS = 16, (4096, 16384)
ROUNDS = 12
BOUND = 2e-2  # relative error of a gradient beside that of transformers' grouped_mm, both in bfloat16
DEFAULT = f"{TRANSFORMERS} grouped_mm"  # what transformers runs if the caller selects nothing
LORA_SUFFIX = ", LoRA"


class StepProblem(NamedTuple):
    """What a step of a peer computes: arguments of ``fused_experts``, which documents their shapes, and ``grad``.

    ``grad`` [tokens, hidden] is the gradient of the layer's output. With LoRA, ``adapters`` are ``w13_a``, ``w13_b``,
    ``w2_a`` and ``w2_b`` of ``fused_experts_lora``, and w13 and w2 do not require grad; without, it is empty.
    """

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    grad: torch.Tensor
    adapters: tuple[torch.Tensor, ...] = ()


def measure(peers, quick, device="cuda"):
    """Return the rows of the record."""
    rows = []
    torch._dynamo.config.recompile_limit = 64  # compiled steps have a graph for each size
    for layer in LAYERS:
        weights, options = make_weights(layer, device), make_options(layer, device)
        for tokens in layer.token_counts[: 1 if quick else None]:
            given = make_inputs(layer, tokens, *weights)
            rows += measure_layer(layer, given, options, peers)
            if not quick and tokens == layer.token_counts[-1]:
                skewed = layer._replace(model=f"{layer.model}, Zipf")
                rows += measure_layer(skewed, given._replace(ids=zipf_ids(layer, tokens, device)), options, peers)
        del weights, given
    if quick or transformers_version() is None:
        return rows
    return rows + [row for tokens in MODEL_TOKENS for row in measure_model(tokens, device)]


def measure_model(tokens, device):
    """Return the rows of a step of a whole model, in which all weights have gradients."""
    from moe_numba.course.bench.topics.models import training_step

    about = training_step.MODELS[0]
    if (steps := training_step.model_steps(about, tokens, device)) is None:
        return []
    named = {name if name.startswith(OURS) else f"{TRANSFORMERS} {name}": step for name, step in steps.items()}
    config = dict(model=f"{about.name}, a model of {about.layers} layers")
    times, version = step_times(named), transformers_version()
    return [
        records.row(
            name,
            config=config,
            size=dict(tokens=tokens),
            dtype="bf16",
            kernel=kernel,
            call=call,
            peak_bytes=peak_bytes(named[name]),
            version=version if name.startswith(TRANSFORMERS) else None,
        )
        for name, (kernel, call) in times.items()
    ]


def zipf_ids(layer, tokens, device):
    """Return the experts of tokens, drawn without repetition by Zipf's law."""
    random = torch.Generator(device).manual_seed(tokens)
    likely = 1 / torch.arange(1, layer.num_experts + 1, device=device, dtype=torch.float32)
    drawn = torch.empty(tokens, layer.num_experts, device=device).exponential_(generator=random)
    return (likely / drawn).topk(layer.topk).indices.int()


def measure_layer(layer, given, options, peers=()):
    """Return the rows of one number of tokens; each gradient is checked before it is timed."""
    versions = {f"peer:{peer.NAME}": peer.VERSION for peer in peers}
    version_of = lambda name: transformers_version() if name.startswith(TRANSFORMERS) else versions.get(name)
    steps = steps_of(layer, given, options, peers)
    drop_wrong(steps, f"{layer.model}, {len(given.x)} tokens")
    times, size = step_times(steps), dict(tokens=len(given.x))
    flops = 6 * 3 * given.ids.numel() * layer.hidden * layer.intermediate  # of the forward, twice as many backward
    floor_us = flops / chip_limits().tensor_flops["bfloat16"] * 1e6
    return [
        records.row(
            name,
            config=layer.config,
            size=size,
            dtype=layer.dtype,
            kernel=kernel,
            call=call,
            floor_us=floor_us if name == OURS else None,
            flops=flops if name == OURS else None,
            peak_bytes=peak_bytes(steps[name]),
            version=version_of(name.removesuffix(LORA_SUFFIX)),
        )
        for name, (kernel, call) in times.items()
    ]


def drop_wrong(steps, where):
    """Check each step's gradients; remove a step of ``--peers`` that fails or whose gradients are wrong, and report it.

    Raises ``AssertionError`` if a step of the package or of transformers is wrong.
    """
    wanted = {name: steps[name]() for name in (DEFAULT, PEER_LORA) if name in steps}
    for name, step in list(steps.items()):
        reference = PEER_LORA if name.endswith(LORA_SUFFIX) else DEFAULT
        if name in (FROZEN, FORWARD, *wanted) or reference not in wanted:
            continue
        is_peer = name.startswith("peer:") and not name.startswith(TRANSFORMERS)

        def find_fault(step=step, is_peer=is_peer, reference=reference):
            if is_peer:
                for gradient in step():
                    gradient.detach().fill_(float("nan"))  # so that the next step must write it
            return differing(step(), wanted[reference])

        drop_if_wrong(steps, name, where, is_peer, find_fault)


def peer_steps(problem, peers, where):
    """Return {name: step} of the peers that support a problem; report those whose plan raises an error."""
    plan_name, suffix = ("plan_lora_step", LORA_SUFFIX) if problem.adapters else ("plan_experts_step", "")
    steps = {}
    for peer in peers:
        if not hasattr(peer, plan_name):
            continue
        name = f"peer:{peer.NAME}{suffix}"
        try:
            step = getattr(peer, plan_name)(problem)
        except Exception as error:  # the other peers are measured whatever this one raises
            print(f"{name} is left out, {where}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if step is not None:
            steps[name] = step
    return steps


def steps_of(layer, given, options, peers=()):
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

    def lora(x, topk_weights, *adapters):
        return fused_experts_lora(
            x, given.w13.detach(), given.w2.detach(), topk_weights, given.ids, *adapters, **options
        )

    again, adapters = partial(checkpoint, ours, use_reentrant=False), make_adapters(layer, given.x.device)
    steps = {OURS: partial(gradients, ours, [*leaves, *weights]), FROZEN: frozen, FORWARD: forward}
    steps[AGAIN] = partial(gradients, again, [*leaves, *weights])
    steps[LORA] = partial(gradients, lora, [*leaves, *adapters])
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

    adapted = transformers_experts(layer)
    set_parameters(adapted, layer, given, options)
    frozen = adapted.gate_up_proj, adapted.down_proj
    del adapted.gate_up_proj, adapted.down_proj  # plain attributes follow

    def peft():
        """Add the adapters to the weights as PEFT does, and compute the gradients of their factors."""
        x, topk_weights = leaves
        factors = [(b.mT, a.mT) if is_transposed else (a, b) for a, b in (adapters[:2], adapters[2:])]
        made = [torch.baddbmm(w, b, a) for w, (a, b) in zip(frozen, factors, strict=True)]
        adapted.gate_up_proj, adapted.down_proj = made
        y = moe.grouped_mm_experts_forward(adapted, x, ids, topk_weights)
        return torch.autograd.grad(y, [*leaves, *adapters], grad)

    eager = type(experts).forward.__wrapped__
    functions = {"grouped_mm": moe.grouped_mm_experts_forward, "eager": eager}
    functions["compiled grouped_mm"] = torch.compile(moe.grouped_mm_experts_forward, dynamic=False)
    steps |= {f"{TRANSFORMERS} {name}": partial(theirs, function) for name, function in functions.items()}
    steps[PEER_LORA] = peft
    if options:  # biases, and another activation
        return steps
    where = f"{layer.model}, {len(given.x)} tokens"
    problem = StepProblem(leaves[0], *weights, leaves[1], given.ids, grad)
    frozen_problem = problem._replace(w13=given.w13.detach(), w2=given.w2.detach(), adapters=tuple(adapters))
    return steps | peer_steps(problem, peers, where) | peer_steps(frozen_problem, peers, where)


def make_adapters(layer, device):
    """Draw a and b of w13 and of w2, which require grad."""
    random = torch.Generator(device).manual_seed(0)
    sizes = (RANK, layer.hidden), (2 * layer.intermediate, RANK), (RANK, layer.intermediate), (layer.hidden, RANK)
    draw = lambda *size: torch.randn(layer.num_experts, *size, generator=random, device=device) * size[1] ** -0.5
    return [(0.1 * draw(*size)).bfloat16().requires_grad_() for size in sizes]


def differing(gradients, wanted):
    """Return which gradient differs from the one that is wanted, and by how much, or None."""
    names = "x", "topk_weights", *(("w13", "w2") if len(wanted) == 4 else ("w13_a", "w13_b", "w2_a", "w2_b"))
    for name, gradient, other in zip(names, gradients, wanted, strict=True):
        if gradient.shape != other.shape:
            return f"the gradient of {name} has the shape {tuple(gradient.shape)}, not {tuple(other.shape)}"
        error = float((gradient.float() - other.float()).norm() / other.float().norm())
        if not error < BOUND:
            return f"the gradient of {name} differs by {error:.1e} from that of transformers; {BOUND} is allowed"
    return None


def step_times(steps):
    """Return {name: (Stats, Stats)}: the time from one step to the next, and the host's, in rounds of random order."""
    if simulator.ENABLED:
        return dict.fromkeys(steps, (None, None))
    kernels = {name: launched_by(step) for name, step in steps.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for name in shuffled_rounds(steps, ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        steps[name]()  # so that another implementation's last kernels are over
        start.record()
        begin = perf_counter()
        steps[name]()
        host_us = (perf_counter() - begin) * 1e6
        end.record()
        end.synchronize()
        samples[name].append((start.elapsed_time(end) * 1000, host_us))
    result = {}
    for name, pairs in samples.items():
        of_steps, of_host = zip(*pairs, strict=True)
        result[name] = Stats.of(of_steps, kernels[name]), Stats.of(of_host)
    return result


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
    named = {OURS: "moe_numba"}
    return named.get(step) or step.removeprefix("peer:").removeprefix("transformers ").replace("final, ", "")


def _lora_steps(record):
    """Return the steps of LoRA: the package's, transformers', and then those of peers."""
    found = {row["step"] for row in record["rows"] if row["step"].endswith(LORA_SUFFIX)}
    return [LORA, PEER_LORA, *sorted(found - {LORA, PEER_LORA})]


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
    """Return tables of times in microseconds, of the package's other steps and LoRA, and of peak memory."""
    others, adapted = [OURS, *records.peers(record)], _lora_steps(record)
    us = lambda row: format_us(row["kernel_us"]["median"])
    gigabytes = lambda row: f"{row['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in row else ""
    times, variants, memory = [], [], []
    for model, tokens, steps in layers(record):
        of = lambda names, show, steps=steps: [show(steps[s]) if s in steps else "" for s in names]
        size, floor = (model, f"{tokens:,}"), steps[OURS].get("floor_us")
        times.append([*size, *bold_best(of(others, us)), format_us(floor) if floor else ""])
        if LORA in steps:
            variants.append([*size, *of((FORWARD, FROZEN, AGAIN), us), *bold_best(of(adapted, us))])
        if "peak_bytes" in steps[OURS]:
            memory.append([*size, *of([*others, LORA, PEER_LORA], gigabytes)])
    names, lora_names = [_label(step) for step in others], ["LoRA"]
    lora_names += [f"LoRA, {_label(step.removesuffix(LORA_SUFFIX))}" for step in adapted[1:]]
    size, provenance = ("experts", "tokens"), plots.provenance(record)
    text = (
        "Time of a training step of a layer's experts in microseconds, forward and backward with the gradients of x, "
        "the routing weights, w13 and w2, in bfloat16, as a caller without a CUDA graph sees it. `eager` and "
        "`grouped_mm` are transformers' implementations. Experts are drawn evenly, or by Zipf's law. The speed of "
        "light is the time of the multiplications at the tensor cores' peak rate. The last rows are steps of a whole "
        f"model, without an optimiser{_hosts_of_models(record)}. "
        f"{_about_peers(record)}{provenance[0].upper()}{provenance[1:]}."
    )
    others_text = (
        "Other steps of moe_numba, and LoRA of rank "
        f"{RANK}, in microseconds: forward alone, frozen weights (gradients of x and the routing only), checkpointed "
        "(the forward pass again, instead of gate and up kept). With LoRA the weights are frozen, and the gradients "
        "are those of x, the routing weights and the adapters; `LoRA, grouped_mm` adds the adapters to the weights, as "
        "PEFT does."
    )
    parts = (
        text,
        markdown_table([*size, *names, "speed of light"], times),
        others_text,
        markdown_table([*size, "forward alone", "frozen weights", "checkpointed", *lora_names], variants),
        "Peak memory of a step beside its inputs, in GB:",
        markdown_table([*size, *names, "LoRA", lora_names[1]], memory),
    )
    return "\n\n".join(parts)


def _hosts_of_models(record):
    """Return what the host's times of a model's steps are, if the record has them."""
    told = [
        f"{format_us(row['call_us']['median'])} of {format_us(row['kernel_us']['median'])} us ({_label(row['step'])}, "
        f"{row['size']['tokens']:,} tokens)"
        for row in record["rows"]
        if "layers" in row["config"]["model"] and row["step"] in (OURS, DEFAULT) and "call_us" in row
    ]
    return f"; the host takes {', '.join(told)}" if told else ""


def _about_peers(record):
    """Return a sentence about the modules of ``--peers`` in a record, and their versions, or nothing."""
    versions = {
        _label(row["step"].removesuffix(LORA_SUFFIX)): row["version"]
        for row in record["rows"]
        if row["step"].startswith("peer:") and not row["step"].startswith(TRANSFORMERS)
    }
    if not versions:
        return ""
    named = ", ".join(f"{name} ({version})" for name, version in sorted(versions.items()))
    return f"Other projects, for silu without biases: {named}; layouts that their kernels need are made beforehand. "
