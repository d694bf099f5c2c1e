"""Benchmark of experts that are distributed over GPUs, of the parts of a layer, and a model of 8 GPUs.

``moe_layer_ranks_measure`` measures the rows.
"""

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import bold_best, markdown_table
from moe_numba.course.bench.topics.moe_layer_ranks import measure as moe_layer_ranks_measure
from moe_numba.course.lessons.moe_layer.model import ranks_per_token

NUMBERS_OF_RANKS = (1, 2, 4, 8)
PREDICTED = 8  # GPUs
SOURCE = "https://github.com/deepseek-ai/DeepGEMM/pull/352"
# Microseconds of this layer on 8 H200, by tokens on each.
PUBLISHED = {
    "DeepGEMM's mega-MoE": {8: 404, 64: 444, 512: 807, 4096: 3866},
    "DeepEP and DeepGEMM": {8: 456, 64: 526, 512: 866, 4096: 4710},
}
PARTS = "part: dispatch", "part: experts", "part: combine"
STEPS = {  # column of the table -> the row's step and the dtype that dispatch sends
    "whole layer": ("final", "bf16"),
    "FP8 dispatch": ("final", "e4m3"),
    "low latency": ("low latency", "bf16"),
    "low latency, FP8": ("low latency", "e4m3"),
    "low latency, FP8 both ways": ("low latency, FP8 sums", "e4m3"),
    "one kernel": ("one kernel", "e4m3"),
    "naive, NCCL": (moe_layer_ranks_measure.NAIVE, "bf16"),
    "launches by expert": ("launches by expert", "e4m3"),
    "its GEMMs alone": moe_layer_ranks_measure.GEMMS,
    "dispatch": (PARTS[0], "bf16"),
    "experts": (PARTS[1], "bf16"),
    "combine": (PARTS[2], "bf16"),
    "with a shared expert first": ("shared experts first", "bf16"),
    "with a shared expert concurrently": ("shared experts beside", "bf16"),
}
LAYERS = [(step, wire) for step in ("final", "low latency") for wire in ("bf16", "e4m3")]
LAYERS.append(("low latency, FP8 sums", "e4m3"))
ONE_KERNEL, NAIVE = STEPS["one kernel"], STEPS["naive, NCCL"]
OURS = *LAYERS, ONE_KERNEL
OTHERS = NAIVE, *(STEPS[name] for name in ("launches by expert", "its GEMMs alone"))


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


def fastest(record, ranks, tokens):
    """Return the microseconds of the fastest layer of launches on ``ranks`` GPUs; None if it is not recorded."""
    steps = medians(record, ranks).get(tokens, {})
    return min((steps[key] for key in LAYERS if key in steps), default=None)


def _table(record, columns, more=(), cells_of=lambda ranks, tokens, steps: []):
    """Return a Markdown table with a row per group size and number of tokens; the fastest layer is bold."""
    found = {ranks: medians(record, ranks) for ranks in numbers_of_ranks(record)}
    measured = {key for times in found.values() for steps in times.values() for key in steps}
    columns = {name: key for name, key in columns.items() if key in measured}
    names = [*columns, *more]
    layers = sum(key in OURS for key in columns.values())
    lines = []
    for ranks, times in found.items():
        for tokens, steps in times.items():
            cells = [records.format_us(steps[key]) if key in steps else "" for key in columns.values()]
            cells = bold_best(cells, slice(0, layers)) + cells_of(ranks, tokens, steps)
            lines.append([f"{ranks}, {tokens}", *cells])
    return markdown_table(["GPUs, tokens on each", *names], lines)


def layers_table(record):
    """Return a table of the layers, beside the published times of 8 GPUs."""

    def published(ranks, tokens, steps):
        return [str(us.get(tokens, "")) if ranks == PREDICTED else "" for us in PUBLISHED.values()]

    columns = {name: key for name, key in STEPS.items() if key in (*OURS, *OTHERS)}
    return _table(record, columns, PUBLISHED, published)


def about_layers(record):
    """Return what the table of the layers shows, and its unit."""
    by_expert = 'In "launches by expert" and "one kernel" rows travel once for each expert, in FP8. '
    has_them = records.find(record, step=ONE_KERNEL[0]) is not None
    return (
        "Median time of the slowest rank in a CUDA graph, microseconds; our fastest layer is bold. Each GPU has "
        "32 of DeepSeek-V3's experts in FP8 with block scales, and each token 8 experts of all GPUs, drawn "
        'uniformly at random. "Whole layer" is dispatch through rings in bfloat16, experts and combine; "low '
        'latency" uses the two kernels for decoding; "FP8 both ways" also sends the sums in FP8. '
        f"{by_expert * has_them}The last two columns "
        f"are published times of a layer of this shape on {PREDICTED} H200 ([DeepGEMM, pull request 352]({SOURCE}))."
    )


def parts_table(record):
    """Return a table of the parts, with their sum; dispatch sends bfloat16."""

    def total(ranks, tokens, steps):
        return [
            records.format_us(sum_of_parts(steps, "bf16")) if all((part, "bf16") in steps for part in PARTS) else ""
        ]

    columns = {name: key for name, key in STEPS.items() if key not in (*OURS, *OTHERS)}
    return _table(record, columns, ["sum of the parts"], total)


def _comparison(record):
    """Return sentences on NCCL, on the published times, and on the model from the smallest group, where measured."""
    measured, words = [ranks for ranks in numbers_of_ranks(record) if ranks > 1], []
    times = [
        (ranks, tokens, steps[NAIVE])
        for ranks in measured
        for tokens, steps in medians(record, ranks).items()
        if NAIVE in steps
    ]
    if ratios := [us / best for ranks, tokens, us in times if (best := fastest(record, ranks, tokens))]:
        words.append(
            'With "naive, NCCL" each GPU gathers the tokens of all and computes its own experts, and a reduce-scatter '
            "adds the results in bfloat16; it takes "
            f"{min(ratios):.2f} to {max(ratios):.2f} times as long as our fastest layer."
        )
    best = {tokens: fastest(record, PREDICTED, tokens) for tokens in medians(record, PREDICTED)}
    for name, us in PUBLISHED.items():
        slower = [str(tokens) for tokens in best if tokens in us and best[tokens] > us[tokens]]
        if best and slower:
            words.append(f"{name} is faster with {' and '.join(slower)} tokens.")
        elif best:
            words.append(f"The times in the column {name} are longer at every size.")
    fewest = min(measured, default=PREDICTED)
    if fewest < PREDICTED and len(medians(record, fewest)) > 1:
        predicted = predict(record, fewest)
        measured_us = {tokens: f" ({us:.0f})" for tokens, us in best.items()}
        pairs = [f"{tokens}: {us:.0f}{measured_us.get(tokens, '')}" for tokens, us in predicted.items()]
        what = ", with the measured time in brackets" if best else ""
        words.append(
            f"Prediction for {PREDICTED} GPUs from the fastest layer on {fewest}, plus the time of the additional "
            f"rows{what}, by tokens on each GPU: {', '.join(pairs)} us."
        )
    return " ".join(words)


def readme_table(record):
    """Return two tables, of the layers and of their parts, and what they show."""
    provenance = plots.provenance(record) + plots.other_commits(record, lambda row: f"{row['config']['ranks']} GPUs")
    return "\n".join(
        [
            layers_table(record),
            "",
            f"{about_layers(record)} {_comparison(record)}",
            "",
            parts_table(record),
            "",
            'The parts of "whole layer", each alone; and this layer with a shared expert, computed first, or on a '
            f"stream concurrently with dispatch and experts; {provenance}.",
        ]
    )
