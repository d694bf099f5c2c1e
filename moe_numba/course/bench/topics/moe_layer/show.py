"""Benchmark of ``fused_experts``, its two grouped GEMMs alone, the lower bound and other projects' functions.

DeepSeek-V3's experts are in FP8 with block scales, all 256 of a layer for decoding and 32, the share of one of 8 GPUs,
for a prompt; and in bfloat16 with an eighth of each expert's intermediate size, the share of a GPU with 8-way tensor
parallelism, with the shared expert as a ninth of each token. Those of Mixtral are in FP8 with a scale per expert, those
of gpt-oss in bfloat16 and in MXFP4, the others in bfloat16. ``moe_layer_measure`` measures the rows, and describes what
a module of ``--peers`` provides.
"""

from typing import Any

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import bold_best, markdown_table
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.topics.moe_layer.measure import FAST, STATIC, TRANSFORMERS
from moe_numba.course.bench.topics.moe_layer.measure import measure as measure_layers
from moe_numba.moe_layer.compile_layers import Layer

GPT_OSS: dict[str, Any] = dict(num_experts=32, hidden=2880, intermediate=2880, topk=4, activation="swigluoai")
LAYERS = (
    Layer("DeepSeek-V3", 256, 7168, 2048, "e4m3", (1, 16, 64)),
    Layer("DeepSeek-V3, 1 of 8 GPUs", 32, 7168, 2048, "e4m3", (4096,)),
    Layer("DeepSeek-V3, tensor parallel on 8 GPUs", 257, 7168, 256, "bf16", (1, 8, 64), topk=9, num_shared=1),
    Layer("Qwen3-30B-A3B", 128, 2048, 768, "bf16", (1, 16, 64, 4096)),
    Layer("128 experts of 2816 x 704", 128, 2816, 704, "bf16", (1, 64, 4096)),
    Layer("gpt-oss-20b", **GPT_OSS, dtype="bf16", token_counts=(1, 16, 64, 4096)),
    Layer("gpt-oss-20b, MXFP4", **GPT_OSS, dtype="mxfp4", token_counts=(1, 16, 64, 4096)),
    Layer("Mixtral-8x7B, a scale per expert", 8, 4096, 14336, "e4m3", (1, 16, 64, 4096), topk=2, scaling="tensor"),
)
QUICK_TOKENS = 16
OURS, GEMMS = "final", "both GEMMs"
STATIC_SCALES = "peer:flashinfer-cutlass-moe"  # of the activations, with FP8 weights and a scale per expert
DEFAULT = f"{TRANSFORMERS} grouped_mm"  # what transformers runs if the caller selects nothing


def measure(peers, quick):
    """Return the rows of the record."""
    layers = [layer._replace(token_counts=(QUICK_TOKENS,)) for layer in LAYERS] if quick else LAYERS
    return measure_layers(layers, peers)


def layers(record):
    """Yield (model, tokens, {step: row}) of each layer and number of tokens."""
    found: dict = {}
    for row in record["rows"]:
        found.setdefault((row["config"]["model"], row["size"]["tokens"]), {})[row["step"]] = row
    for key, steps in found.items():
        yield *key, steps


def label_of(step):
    """Return the heading of a step's times."""
    named = {OURS: "moe_numba", GEMMS: "its two GEMMs"}
    return named.get(step) or step.removeprefix("peer:").removeprefix("transformers ")


def figures(record):
    """Draw the kernel times of the layers as bars: beside transformers' default, and beside each other project."""
    others = [step for step in records.peers(record) if not step.startswith(TRANSFORMERS)]
    return {"layers": _bars(record, DEFAULT, all_layers=True)} | {
        f"layers-{label_of(step).lower().replace(' ', '-')}": _bars(record, step) for step in others
    }


def _bars(record, other, all_layers=False):
    columns = {step: label_of(step) for step in (OURS, GEMMS, other)}
    rows = [
        {"step": f"{model}, {tokens} token{'s' * (tokens > 1)}"}
        | {step: steps[step]["kernel_us"] for step in columns if step in steps}
        for model, tokens, steps in layers(record)
        if all_layers or other in steps
    ]
    title = f"Experts of MoE layers on an {record['gpu']}: kernel time"
    return plots.bars_figure(rows, columns, title=title, caption=plots.caption(record))


def readme_table(record):
    """Return a table of kernel times in microseconds."""
    others = records.peers(record)
    named = {step: f"`{label_of(step)}`" if step.startswith(TRANSFORMERS) else label_of(step) for step in others}
    names = [label_of(OURS), label_of(GEMMS), "speed of light", *named.values()]
    lines = []
    for model, tokens, steps in layers(record):
        times = [steps[step]["kernel_us"]["median"] if step in steps else None for step in (OURS, GEMMS, *others)]
        times.insert(2, steps[OURS]["floor_us"])
        cells = ["" if us is None else format_us(us) for us in times]
        if any(cells[3:]):  # there is something to compare with
            ours, *best = bold_best([cells[0], *cells[3:]])
            cells = [ours, *cells[1:3], *best]
        lines.append([model, tokens, *cells])
    provenance = plots.provenance(record)
    text = (
        "Kernel time in microseconds, with 8 experts per token (gpt-oss: 4, Mixtral: 2; tensor parallel: also the "
        "shared one), drawn uniformly at random; the fastest implementation is bold. Where a call for few tokens is "
        "two GEMV launches, the first two columns time the same kernels, with noise. Experts are in FP8 for Mixtral "
        "and for DeepSeek-V3 without tensor parallelism, and in MXFP4 where the row says so; all others are in "
        "bfloat16. "
        "The speed of light is the lower bound: the time to read the weights of all chosen experts once, or to "
        "compute, whichever is longer. "
        f"{_about_peers(record, named)}{provenance[0].upper()}{provenance[1:]}."
    )
    return f"{markdown_table(['experts', 'tokens', *names], lines)}\n\n{text}"


def _about_peers(record, named):
    """Return sentences about the projects in a record, and their versions."""
    versions = {row["step"]: row["version"] for row in record["rows"] if "version" in row}
    transformers = next((version for step, version in versions.items() if step.startswith(TRANSFORMERS)), None)
    text = ""
    if transformers:
        functions = " and ".join(name for step, name in named.items() if step.startswith(TRANSFORMERS))
        text += f"{functions} are functions of transformers {transformers}, for bfloat16 only. "
    if others := [f"{named[step]} ({versions[step]})" for step in named if not step.startswith(TRANSFORMERS)]:
        text += f"Other projects: {', '.join(others)}; layouts that their kernels need are made beforehand. "
    if STATIC_SCALES in named:
        text += f"With a scale per expert, {label_of(STATIC_SCALES)} uses static scales; the others compute their own. "
        for step in (STATIC, FAST):
            text += _times_of(record, step)
    return text


def _times_of(record, step):
    """Return a sentence about moe_numba's times of a step that only some rows have, or nothing."""
    rows = records.select(record, step=step)
    if not rows:
        return ""
    times = " / ".join(format_us(row["kernel_us"]["median"]) for row in rows)
    tokens = " / ".join(str(row["size"]["tokens"]) for row in rows)
    return f"With {step} moe_numba takes {times} for {tokens} tokens of {rows[0]['config']['model']}. "
