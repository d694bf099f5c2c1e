"""Benchmark of experts that are distributed over GPUs, beside the parts of a layer, and what 8 GPUs would take.

``moe_layer_ranks_measure`` measures the rows.
"""

import torch

from moe_numba.course.bench import plots, records
from moe_numba.course.bench.tables import bold_best
from moe_numba.course.bench.topics import moe_layer_ranks_measure
from moe_numba.course.exercises.moe_layer import ranks_per_token

NUMBERS_OF_RANKS = (2, 4, 8)
PREDICTED = 8  # GPUs
# Microseconds of this layer on 8 H200, by tokens on each: https://github.com/deepseek-ai/DeepGEMM/pull/352
PUBLISHED = {
    "DeepGEMM's mega-MoE": {8: 404, 64: 444, 512: 807, 4096: 3866},
    "DeepEP and DeepGEMM": {8: 456, 64: 526, 512: 866, 4096: 4710},
}
PARTS = "part: dispatch", "part: experts", "part: combine"
STEPS = {  # column of the table -> the row's step and the dtype that dispatch sends
    "one layer": ("final", "bf16"),
    "FP8 dispatch": ("final", "e4m3"),
    "FP8, combine during the sum": ("combine during the sum", "e4m3"),
    "low latency": ("low latency", "bf16"),
    "low latency, FP8": ("low latency", "e4m3"),
    "low latency, FP8 both ways": ("low latency, FP8 sums", "e4m3"),
    "dispatch": (PARTS[0], "bf16"),
    "experts": (PARTS[1], "bf16"),
    "combine": (PARTS[2], "bf16"),
    "shared expert first": ("shared experts first", "bf16"),
    "beside": ("shared experts beside", "bf16"),
}
LAYERS = [(step, wire) for step in ("final", "combine during the sum", "low latency") for wire in ("bf16", "e4m3")]
LAYERS.append(("low latency, FP8 sums", "e4m3"))


def measure(peers, quick):
    """Return the record's rows; each layer's output is checked before it is timed."""
    return moe_layer_ranks_measure.measure(NUMBERS_OF_RANKS, quick)


def out_of_reach(row):
    """Return whether a row needs more GPUs than there are."""
    return row["config"]["ranks"] > torch.cuda.device_count()


def medians(record, ranks):
    """Return {tokens: {(step, dtype): microseconds}} of a group size."""
    found: dict = {}
    for row in records.select(record, config={"ranks": ranks}):
        found.setdefault(row["size"]["tokens"], {})[row["step"], row["dtype"]] = row["kernel_us"]["median"]
    return dict(sorted(found.items()))


def numbers_of_ranks(record):
    """Return the group sizes of a record."""
    return sorted({row["config"]["ranks"] for row in record["rows"]})


def figures(record):
    """Draw the time of a layer and of its parts over the number of tokens, for the largest group."""
    ranks = numbers_of_ranks(record)[-1]
    lines = {
        name: found
        for name, (step, dtype) in STEPS.items()
        if (found := records.series(record, step=step, dtype=dtype, config={"ranks": ranks})) and "shared" not in step
    }
    title = f"DeepSeek-V3's experts on {ranks} GPUs, 32 on each: kernel time"
    return {"layer": plots.sweep_figure(lines, caption=plots.caption(record), title=title)}


def remote_rows(ranks):
    """Return to how many other ranks a token is sent on average, with 32 experts on each rank."""
    experts = moe_layer_ranks_measure.LOCAL_EXPERTS * ranks
    return ranks_per_token(experts, moe_layer_ranks_measure.TOPK, ranks) * (ranks - 1) / ranks


def sum_of_parts(steps, wire):
    """Return the microseconds of dispatch, experts and combine, each measured alone."""
    return sum(steps[part, wire] for part in PARTS)


def predict(record, ranks):
    """Return {tokens: microseconds} of the fastest layer on `PREDICTED` GPUs, from those on ``ranks`` GPUs.

    A GPU's experts compute as many rows, so they take as long. Each token is sent to more GPUs: dispatch and combine
    take longer by their time per row, which is the slope of the line through the smallest and the largest number of
    tokens. That the weighted sum then stores more rows, each of fewer experts, is not in the model.
    """
    times, more = medians(record, ranks), remote_rows(PREDICTED) / remote_rows(ranks)
    few, many = min(times), max(times)
    found = {}
    for tokens, steps in times.items():
        layers = []
        for step, wire in LAYERS:
            if (step, wire) in steps and (PARTS[0], wire) in steps:
                parts = ((times[many][part, wire] - times[few][part, wire]) for part in (PARTS[0], PARTS[2]))
                layers.append(steps[step, wire] + sum(parts) / (many - few) * tokens * (more - 1))
        found[tokens] = min(layers)
    return found


def readme_table(record):
    """Return a table of a layer, its parts, and the prediction, per group size and number of tokens."""
    names = [*STEPS, "sum of parts", "FP8, sum of parts", f"on {PREDICTED} GPUs (model)", *PUBLISHED]
    lines = [f"| GPUs, tokens on each | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    layers = sum(key in LAYERS for key in STEPS.values())
    measured = numbers_of_ranks(record)
    for ranks in measured:
        times = medians(record, ranks)
        predicted = predict(record, ranks) if len(times) > 1 and ranks != PREDICTED else {}
        beside = PUBLISHED.values() if ranks == PREDICTED or PREDICTED not in measured else [{}] * len(PUBLISHED)
        for tokens, steps in times.items():
            cells = [records.format_us(steps[key]) if key in steps else "" for key in STEPS.values()]
            cells = bold_best(cells, slice(0, layers))
            for wire in ("bf16", "e4m3"):
                has_parts = all((part, wire) in steps for part in PARTS)
                cells.append(records.format_us(sum_of_parts(steps, wire)) if has_parts else "")
            cells.append(records.format_us(predicted[tokens]) if tokens in predicted else "")
            cells += [str(us.get(tokens, "")) for us in beside]
            lines.append(f"| {ranks}, {tokens} | {' | '.join(cells)} |")
    lines += [
        "",
        "Median time of the slowest rank in a CUDA graph, microseconds. Each GPU has 32 of DeepSeek-V3's experts in "
        "FP8 with block scales, and each token 8 experts of all GPUs, drawn evenly at random. Dispatch sends bfloat16, "
        "if not FP8. The shared expert is computed first, or on a stream beside dispatch and experts. The model for "
        f"{PREDICTED} GPUs adds to the fastest layer of fewer the time of the rows that each token then sends to more "
        f"GPUs. The last two columns are published times of a layer of this shape on {PREDICTED} H200 (DeepGEMM, pull "
        "request 352); "
        f"{plots.provenance(record)}.",
    ]
    return "\n".join(lines)
