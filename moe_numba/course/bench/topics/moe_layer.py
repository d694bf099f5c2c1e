"""Benchmark of the experts of a layer: whole, in parts and step by step, beside transformers and the peers.

``moe_layer_measure`` measures the rows. transformers' implementations are measured if transformers 5 is installed. A
peer provides ``fused_experts_bf16(x, w13, w2, topk_weights, topk_ids, out=None)`` or ``fused_experts_e4m3``, with
``w13_scale, w2_scale`` behind ``topk_ids``; both return the output.
"""

import torch

from moe_numba.course.bench import plots, records
from moe_numba.course.bench.parts_figure import stacked_parts
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY
from moe_numba.course.bench.tables import bold_best
from moe_numba.course.bench.topics import moe_layer_measure
from moe_numba.course.bench.topics.moe_layer_measure import GEMMS, LOOP, Layer
from moe_numba.grouped_gemm.reference import FP8

BF16 = torch.bfloat16
LAYERS = {
    "DeepSeek-V3": Layer(256, 7168, 2048, FP8, (1, 16, 64)),
    "DeepSeek-V3, 32 experts": Layer(32, 7168, 2048, FP8, (4096,)),
    "Qwen3-30B-A3B": Layer(128, 2048, 768, BF16, (1, 16, 64, 4096)),
    "E128 N704 K2816": Layer(128, 2816, 704, BF16, (1, 64, 4096)),
}
QUICK = {"DeepSeek-V3": (16,), "Qwen3-30B-A3B": (1, 64)}
MODELS = {  # figures: name -> title and layers
    "deepseek-v3": ("DeepSeek-V3's experts, FP8", ["DeepSeek-V3", "DeepSeek-V3, 32 experts"]),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B's experts, bf16", ["Qwen3-30B-A3B"]),
    "e128-n704-k2816": ("128 experts, N 704, K 2816, bf16", ["E128 N704 K2816"]),
}
COLOURS = {  # of the parts
    "group_by_expert": ORANGE,
    "per_token_cast_to_fp8": PURPLE,
    "gate_up GEMM": BLUE,
    "gate_up GEMM, silu_and_mul": BLUE,
    "silu_and_mul": RED,
    "down GEMM": SKY,
    "weighted_sum": GREEN,
}
OWN_PEERS = ("transformers grouped_mm", "transformers batched_mm", "transformers eager")  # need no folder of peers


def measure(peers, quick):
    """Return the rows of the record; each step's output is checked before it is timed."""
    rows = []
    for name, layer in LAYERS.items():
        tokens = QUICK.get(name, ()) if quick else layer.tokens
        if tokens:
            weights = moe_layer_measure.Weights(layer)
            for count in tokens:
                rows += moe_layer_measure.measure_layer(name, layer, weights, count, peers)
            del weights
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return rows


def sizes(record):
    """Return the (model, tokens) of a record, in the order of their rows."""
    return list(dict.fromkeys((row["config"]["model"], row["size"]["tokens"]) for row in record["rows"]))


def rows_of(record, model, tokens):
    """Return {step: row} of one size."""
    return {row["step"]: row for row in records.select(record, config={"model": model}, size={"tokens": tokens})}


def kernel_us(row):
    """Return the median kernel time of a row, or None."""
    return row["kernel_us"]["median"] if row and "kernel_us" in row else None


def waterfall(record, models):
    """Return ``{"64 tokens": ({part: us}, us of one call, lower bound)}`` of layers, for `stacked_parts`."""
    found = {}
    for model, tokens in sizes(record):
        if model in models:
            rows = rows_of(record, model, tokens)
            parts = {step.removeprefix("part: "): kernel_us(row) for step, row in rows.items() if "part: " in step}
            label = f"{tokens} token{'s' * (tokens > 1)}" + "".join(f"\n{note}" for note in model.split(", ")[1:])
            found[label] = parts, kernel_us(rows["final"]), rows["final"]["floor_us"]
    return found


def peer_series(record, model):
    """Return ``{label: {tokens: statistics}}`` of a layer: this package, and the peers where they were measured.

    A peer in which the host waits for the GPU has its call time.
    """
    found = {"moe_numba": records.series(record, step="final", config={"model": model})}
    for peer in records.peers(record):
        label, wanted = peer.removeprefix("peer:"), dict(step=peer, config={"model": model})
        if any(row.get("host_waits") for row in records.select(record, **wanted)):
            found[f"{label}, as called"] = records.series(record, value="call_us", **wanted)
        else:
            found[label] = records.series(record, **wanted)
    return {label: points for label, points in found.items() if points}


def ladder_rows(record, model):
    """Return a row per step of a layer with its call times as ``{tokens: statistics}``."""
    found = {}
    for tokens in (tokens for name, tokens in sizes(record) if name == model):
        for step, row in rows_of(record, model, tokens).items():
            if step in (LOOP, "final") or step.startswith("with "):
                name = "with a workspace and out" if step == "final" else step
                found.setdefault(name, {"step": name})[tokens] = row["call_us"]
    last = found.pop("with a workspace and out", None)
    return [*found.values(), *([last] if last else [])]


def parts_figure(record, models, title, tokens=None):
    """Draw each launch and one call at each size, or at some numbers of ``tokens``; None if there are none."""
    groups = waterfall(record, models)
    if tokens:
        groups = {label: group for label, group in groups.items() if int(label.split()[0]) in tokens}
    heading = f"{title}: time of each launch"
    return groups and stacked_parts(groups, title=heading, caption=plots.caption(record), colours=COLOURS) or None


def steps_figure(record, model, title):
    """Draw the call times of the steps at the least, a middle and the largest number of tokens; None without them."""
    if not (rows := ladder_rows(record, model)):
        return None
    tokens = [key for key in rows[0] if key != "step"]
    chosen = sorted({tokens[0], tokens[len(tokens) // 2], tokens[-1]})
    columns = {count: f"{count} token{'s' * (count > 1)}" for count in chosen}
    heading = f"{title}: time of a call, one more kernel each"
    return plots.bars_figure(rows, columns, title=heading, caption=plots.caption(record))


def peers_figure(record, model, title):
    """Draw the time over the number of tokens, beside the peers and the lower bound; None without peers."""
    if len(series := peer_series(record, model)) < 2:
        return None
    floor = records.series(record, value="floor_us", step="final", config={"model": model})
    heading = f"{title}: beside other implementations"
    return plots.sweep_figure(series, floor=floor, title=heading, caption=plots.caption(record))


def figures(record):
    """Draw parts and whole at each size, the steps as called, and the peers over the number of tokens."""
    made = {}
    for name, (title, models) in MODELS.items():
        made[f"parts-{name}"] = parts_figure(record, models, title)
        made[f"steps-{name}"] = steps_figure(record, models[0], title)
        made[f"peers-{name}"] = peers_figure(record, models[0], title)
    return {name: figure for name, figure in made.items() if figure}


def limits_table(record):
    """Return a table of one call beside its GEMMs and the lower bound, and which limit the bound comes from."""
    lines = ["| experts, tokens | one call | both GEMMs | lower bound | call / bound | limit |"]
    lines.append("|---|---:|---:|---:|---:|---|")
    for model, tokens in sizes(record):
        rows = rows_of(record, model, tokens)
        us, bound, read_us = kernel_us(rows["final"]), rows["final"]["floor_us"], rows["final"]["read_us"]
        cells = *map(format_us, (us, kernel_us(rows[GEMMS]), bound)), f"{us / bound:.2f}"
        limit = "reading weights" if read_us >= bound else "tensor cores"
        lines.append(f"| {model}, {tokens} | {' | '.join(cells)} | {limit} |")
    return "\n".join([*lines, "", f"Kernel time in microseconds, {plots.caption(record)}."])


def readme_table(record):
    """Return a table of times in microseconds: this package, its GEMMs alone, the peers, the loop, the lower bound."""
    peers = records.peers(record)
    names = ["moe_numba", *(peer.removeprefix("peer:") for peer in peers), "torch loop", "both GEMMs", "lower bound"]
    lines = [f"| experts, tokens | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for model, tokens in sizes(record):
        rows = rows_of(record, model, tokens)
        cells = bold_best([_cell(rows.get(step)) for step in ("final", *peers, LOOP)])
        cells += [format_us(kernel_us(rows[GEMMS])), format_us(rows["final"]["floor_us"])]
        lines.append(f"| {model}, {tokens} | {' | '.join(cells)} |")
    versions = {row.get("version") for row in record["rows"] if row["step"].startswith("peer:transformers")} - {None}
    text = "Kernel time in microseconds, median. With `*`: the host waits for the GPU, so the time is that of a call, "
    text += "between CUDA events. Lower bound: reading the weights of the experts that the tokens use, at the memory's "
    text += "bandwidth, or computing both GEMMs at the peak rate."
    if versions:
        text += f" transformers {', '.join(sorted(versions))}."
    provenance = plots.provenance(record)
    return "\n".join([*lines, "", f"{text} {provenance[0].upper()}{provenance[1:]}."])


def _cell(row):
    """Format a row's kernel time, or its call time with an asterisk where the host waits."""
    if row is None or ("kernel_us" not in row and "call_us" not in row):
        return ""
    if row.get("host_waits"):
        return f"{format_us(row['call_us']['median'])}*"
    return format_us(kernel_us(row))
