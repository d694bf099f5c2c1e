"""Benchmark of ``fused_experts`` for each routing, beside other projects' functions.

A layer's time depends on how many experts a batch uses and how evenly: with ``uniform`` routing experts are drawn
evenly at random; with ``zipf`` by Zipf's law, in an order that differs from set to set; with ``same`` all tokens have
the same experts, as a batch of equal prompts has. Four sets of inputs with different experts take turns, so that no
weights stay in the L2 cache. Peers are those of ``moe_layer``; see there what a module of ``--peers`` provides.
"""

from functools import partial
from math import exp, log

import torch

import moe_numba
from moe_numba.course.bench import kernel_times, records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import markdown_table
from moe_numba.course.bench.topics.moe_layer.measure import (
    drop_wrong,
    lower_bound,
    make_inputs,
    make_options,
    make_weights,
    peer_calls,
)
from moe_numba.moe_layer import ExpertsWorkspace, reference
from moe_numba.moe_layer.compile_layers import Layer, compile_layers

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
QUICK_TOKENS = (4,)
ROUTINGS = {
    "uniform": "experts drawn evenly at random",
    "zipf": "experts drawn by Zipf's law",
    "same": "the same experts for all tokens",
}
SETS = 4  # of inputs, with different experts
_GPT_OSS = dict(num_experts=32, hidden=2880, intermediate=2880, topk=4, activation="swigluoai", token_counts=TOKENS)
LAYERS = (
    Layer("Qwen3-30B-A3B, bfloat16", 128, 2048, 768, "bf16", TOKENS),
    Layer("gpt-oss-20b, bfloat16", **_GPT_OSS, dtype="bf16"),
    Layer("gpt-oss-20b, MXFP4", **_GPT_OSS, dtype="mxfp4"),
    Layer("Mixtral-8x7B, bfloat16", 8, 4096, 14336, "bf16", TOKENS, topk=2),
    Layer("DeepSeek-V3, FP8", 256, 7168, 2048, "e4m3", TOKENS),
)
OURS = "final"


def measure(peers, quick, device="cuda"):
    """Return the rows of the record. Each output is checked before it is timed."""
    layers, rows = [layer._replace(token_counts=QUICK_TOKENS) if quick else layer for layer in LAYERS], []
    if device == "cuda":
        compile_layers(layers)
    for layer in layers:
        weights, options = make_weights(layer, device), make_options(layer, device)
        for tokens in layer.token_counts:
            for routing in ROUTINGS:
                rows += measure_routing(layer, tokens, routing, weights, options, peers)
        del weights
    return rows


def draw_experts(layer, tokens, routing, seed, device):
    """Return the experts of each token [tokens, topk], int32; another ``seed`` gives others."""
    experts, topk = layer.num_experts, layer.topk
    generator = torch.Generator(device).manual_seed(1000 * seed + tokens)
    order = torch.randperm(experts, generator=generator, device=device)
    if routing == "same":
        return order[:topk].int().expand(tokens, -1).contiguous()
    likely = 1 / (order + 1) if routing == "zipf" else torch.ones(experts, device=device)
    return torch.multinomial(likely.expand(tokens, -1), topk, generator=generator).int()


def measure_routing(layer, tokens, routing, weights, options, peers):
    """Return the rows of a number of tokens and a routing."""
    given, calls = make_inputs(layer, tokens, *weights), {}
    sets = [given._replace(ids=draw_experts(layer, tokens, routing, seed, given.x.device.type)) for seed in range(SETS)]
    for inputs in sets:
        workspace = ExpertsWorkspace(tokens, layer.topk, inputs.w13, inputs.w2, layer.scaling)
        out = torch.empty_like(inputs.x)
        ours = partial(moe_numba.fused_experts, *inputs, out=out, workspace=workspace, **options)
        for name, call in ({OURS: ours} | peer_calls(layer, inputs, options, peers)).items():
            calls.setdefault(name, []).append(call)
    first = {name: made[0] for name, made in calls.items()}
    drop_wrong(first, reference.fused_experts(*sets[0], **options), layer)
    times = kernel_times({name: calls[name] for name in first}, replays=15)
    floor_us = sum(lower_bound(layer, inputs.ids)[0] for inputs in sets) / SETS
    versions = {f"peer:{peer.NAME}": peer.VERSION for peer in peers}
    return [
        records.row(
            name,
            config={**layer.config, "routing": routing},
            size=dict(tokens=tokens),
            dtype=layer.dtype,
            kernel=stats,
            floor_us=floor_us,
            version=versions.get(name),
        )
        for name, stats in times.items()
    ]


def ratios(record, model, routing):
    """Return {tokens: time of the fastest peer relative to moe_numba's}, of the sizes that a peer has."""
    found: dict = {}
    for row in records.select(record, config={"model": model, "routing": routing}):
        found.setdefault(row["size"]["tokens"], {})[row["step"]] = row["kernel_us"]["median"]
    return {
        tokens: min(us for step, us in times.items() if step != OURS) / times[OURS]
        for tokens, times in found.items()
        if len(times) > 1
    }


def models_of(record):
    """Return the models of a record, in order."""
    return list(dict.fromkeys(row["config"]["model"] for row in record["rows"]))


def figures(record):
    """Draw the ratio of the fastest peer's time to moe_numba's over the tokens, a line per model and routing."""
    made = {}
    for routing, text in ROUTINGS.items():
        series = {model: found for model in models_of(record) if (found := ratios(record, model, routing))}
        if series:
            title = f"{text[0].upper()}{text[1:]}: the fastest peer's time, relative to moe_numba's"
            caption = plots.caption(record)
            made[routing] = plots.sweep_figure(series, ylabel="ratio of times", title=title, caption=caption)
    return made


def readme_table(record):
    """Return a table of mean and least ratios of the fastest peer's time to moe_numba's."""
    lines = []
    for model in models_of(record):
        cells = []
        for routing in ROUTINGS:
            found = ratios(record, model, routing)
            least = min(found, key=found.get, default=None)
            mean = exp(sum(map(log, found.values())) / len(found)) if found else None
            plural = "s" if least != 1 else ""
            cells.append("" if mean is None else f"{mean:.2f} (least {found[least]:.2f}, {least} token{plural})")
        lines.append([model, *cells])
    sizes = sorted({row["size"]["tokens"] for row in record["rows"]})
    others = [f"{step.removeprefix('peer:')} ({version})" for step, version in versions_of(record).items()]
    provenance = plots.provenance(record)
    text = (
        f"How many times as long the fastest of the other projects takes: geometric mean over {len(sizes)} sizes from "
        f"{sizes[0]} to {sizes[-1]} tokens, and in brackets the least of them. {SETS} sets of inputs with different "
        f"experts take turns. Other projects: {', '.join(others) or 'none'}. {provenance[0].upper()}{provenance[1:]}."
    )
    return f"{markdown_table(['experts', *ROUTINGS.values()], lines)}\n\n{text}"


def versions_of(record):
    """Return {step: version} of the peers."""
    return {row["step"]: row["version"] for row in record["rows"] if "version" in row}
