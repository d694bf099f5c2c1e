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
PARTS = "part: dispatch", "part: experts", "part: combine"
STEPS = {  # column of the table -> the row's step and the dtype that dispatch sends
    "one layer": ("final", "bf16"),
    "FP8 dispatch": ("final", "e4m3"),
    "low latency": ("low latency", "bf16"),
    "low latency, FP8": ("low latency", "e4m3"),
    "dispatch": (PARTS[0], "bf16"),
    "experts": (PARTS[1], "bf16"),
    "combine": (PARTS[2], "bf16"),
    "shared expert first": ("shared experts first", "bf16"),
    "beside": ("shared experts beside", "bf16"),
}


def measure(peers, quick):
    """Return the record's rows; each layer's output is checked before it is timed."""
    return moe_layer_ranks_measure.measure(NUMBERS_OF_RANKS, quick)


def out_of_reach(row):
    """Return whether a row needs more GPUs than there are."""
    return row["config"]["ranks"] > torch.cuda.device_count()


def _medians(record, ranks):
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


def predict(record, ranks, wire="bf16"):
    """Return {tokens: microseconds} of a layer on `PREDICTED` GPUs, from the parts on ``ranks`` GPUs.

    A GPU's experts compute as many rows, so they take as long. Dispatch and combine take a time that does not depend on
    the number of rows, and a time per row that is sent to another rank; both are those of the line through the smallest
    and the largest number of tokens.
    """
    times, more = _medians(record, ranks), remote_rows(PREDICTED) / remote_rows(ranks)
    few, many = min(times), max(times)
    found = {}
    for tokens, steps in times.items():
        us = steps[PARTS[1], wire]
        for part in (PARTS[0], PARTS[2]):
            per_token = (times[many][part, wire] - times[few][part, wire]) / (many - few)
            us += steps[part, wire] + per_token * tokens * (more - 1)
        found[tokens] = us
    return found


def readme_table(record):
    """Return a table of a layer, its parts, and the prediction, per group size and number of tokens."""
    lines = [f"| GPUs, tokens on each | {' | '.join(STEPS)} | on {PREDICTED} GPUs (model) |"]
    lines.append("|---|" + "---:|" * (len(STEPS) + 1))
    layers = [step.startswith(("final", "low latency")) for step, _ in STEPS.values()].count(True)
    for ranks in numbers_of_ranks(record):
        times = _medians(record, ranks)
        predicted = predict(record, ranks) if len(times) > 1 else {}
        for tokens, steps in times.items():
            cells = [records.format_us(steps[key]) if key in steps else "" for key in STEPS.values()]
            cells = bold_best(cells, slice(0, layers))
            cells.append(records.format_us(predicted[tokens]) if tokens in predicted else "")
            lines.append(f"| {ranks}, {tokens} | {' | '.join(cells)} |")
    lines += [
        "",
        "Median time of the slowest rank in a CUDA graph, microseconds. Each GPU has 32 of DeepSeek-V3's experts in "
        "FP8 with block scales, and each token 8 experts of all GPUs, drawn evenly at random. Dispatch sends bfloat16, "
        "if not FP8. The shared expert is computed first, or on a stream beside dispatch and experts. The model for "
        f"{PREDICTED} GPUs adds to the parts the time of the rows that each token then sends to more GPUs; "
        f"{plots.provenance(record)}.",
    ]
    return "\n".join(lines)
