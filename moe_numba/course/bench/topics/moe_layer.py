"""Benchmark of ``fused_experts``, beside its two grouped GEMMs alone, the lower bound and transformers' functions.

DeepSeek-V3's experts are in FP8 with block scales, all 256 of a layer for decoding and 32, the share of one of 8 GPUs,
for a prompt. Those of Mixtral are in FP8 with a scale per expert, those of gpt-oss in bfloat16 and in MXFP4, the others
in bfloat16. ``moe_layer_measure`` measures the rows.
"""

from typing import Any

from moe_numba.course.bench import plots, records
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.topics.moe_layer_measure import Layer
from moe_numba.course.bench.topics.moe_layer_measure import measure as measure_layers

GPT_OSS: dict[str, Any] = dict(num_experts=32, hidden=2880, intermediate=2880, topk=4, activation="swigluoai")
LAYERS = (
    Layer("DeepSeek-V3", 256, 7168, 2048, "e4m3", (1, 16, 64)),
    Layer("DeepSeek-V3, 1 of 8 GPUs", 32, 7168, 2048, "e4m3", (4096,)),
    Layer("Qwen3-30B-A3B", 128, 2048, 768, "bf16", (1, 16, 64, 4096)),
    Layer("128 experts of 2816 x 704", 128, 2816, 704, "bf16", (1, 64, 4096)),
    Layer("gpt-oss-20b", **GPT_OSS, dtype="bf16", token_counts=(1, 16, 64, 4096)),
    Layer("gpt-oss-20b, MXFP4", **GPT_OSS, dtype="mxfp4", token_counts=(1, 16, 64, 4096)),
    Layer("Mixtral-8x7B, a scale per expert", 8, 4096, 14336, "e4m3", (1, 16, 64, 4096), topk=2, scaling="tensor"),
)
QUICK_TOKENS = 16
OURS, GEMMS = "final", "both GEMMs"
COLUMNS = {OURS: "moe_numba", GEMMS: "its two GEMMs", "peer:transformers grouped_mm": "grouped_mm"}


def measure(peers, quick):
    """Return the rows of the record."""
    layers = [layer._replace(token_counts=(QUICK_TOKENS,)) for layer in LAYERS] if quick else LAYERS
    return measure_layers(layers)


def layers(record):
    """Yield (model, tokens, {step: row}) of each layer and number of tokens."""
    found: dict = {}
    for row in record["rows"]:
        found.setdefault((row["config"]["model"], row["size"]["tokens"]), {})[row["step"]] = row
    for key, steps in found.items():
        yield *key, steps


def figures(record):
    """Draw the kernel times of the layers as bars."""
    rows = [
        {"step": f"{model}, {tokens} token{'s' * (tokens > 1)}"}
        | {step: steps[step]["kernel_us"] for step in COLUMNS if step in steps}
        for model, tokens, steps in layers(record)
    ]
    title = f"Experts of MoE layers on an {record['gpu']}: kernel time"
    return {"layers": plots.bars_figure(rows, COLUMNS, title=title, caption=plots.caption(record))}


def readme_table(record):
    """Return a table of kernel times in microseconds."""
    others = records.peers(record)
    names = ["moe_numba", "its two GEMMs", "speed of light", *(f"`{step.rpartition(' ')[2]}`" for step in others)]
    lines = [f"| experts | tokens | {' | '.join(names)} |", "|---|---:|" + "---:|" * len(names)]
    for model, tokens, steps in layers(record):
        times = [steps[step]["kernel_us"]["median"] if step in steps else None for step in (OURS, GEMMS, *others)]
        times.insert(2, steps[OURS]["floor_us"])
        cells = ["" if us is None else format_us(us) for us in times]
        best = min(us for us in (times[0], *times[3:]) if us is not None)
        cells = [f"**{cell}**" if us == best else cell for cell, us in zip(cells, times, strict=True)]
        lines.append(f"| {model} | {tokens} | {' | '.join(cells)} |")
    version = next((f" {row['version']}" for row in record["rows"] if "version" in row), "")
    provenance = plots.provenance(record)
    text = (
        "Kernel time in microseconds, with 8 experts per token (gpt-oss: 4, Mixtral: 2), drawn evenly at random. Those "
        "of DeepSeek-V3 and Mixtral are in FP8, the others in bfloat16, if not in MXFP4. The speed of light is the "
        "time to read the weights of all chosen experts once, or to "
        f"multiply. `grouped_mm` and `batched_mm` are functions of transformers{version}, for bfloat16 only. "
        f"{provenance[0].upper()}{provenance[1:]}."
    )
    return "\n".join([*lines, "", text])
