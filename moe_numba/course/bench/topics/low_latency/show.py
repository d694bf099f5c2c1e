"""Benchmark of low-latency dispatch and combine of few tokens, with normal dispatch and combine and NCCL beside them.

``low_latency_measure`` measures the rows, for one rank alone and for groups of up to as many GPUs as there are.
"""

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import bold_best, markdown_table
from moe_numba.course.bench.topics.low_latency import measure as low_latency_measure

NUMBERS_OF_RANKS = (1, 2, 4, 8)
STEPS = {  # column of the table -> the row's step and dtype
    "packed by expert": ("final", "bf16"),
    "FP8 dispatch": ("final", "e4m3"),
    "in slots": ("in slots", "bf16"),
    "in slots, flags": ("in slots, flags", "bf16"),
    "normal, worst case": ("normal, graph", "bf16"),
    "NCCL all-to-all": ("peer:NCCL all-to-all", "bf16"),
    "NCCL all-gather, reduce-scatter": ("peer:NCCL all-gather and reduce-scatter", "bf16"),
}


def measure(peers, quick):
    """Return the record's rows; the sums are checked before a step is timed."""
    return low_latency_measure.measure(NUMBERS_OF_RANKS, quick, peers)


def out_of_reach(row):
    """Return whether a row needs more GPUs than there are."""
    return row["config"]["ranks"] > torch.cuda.device_count()


def _numbers_of_ranks(record):
    return sorted({row["config"]["ranks"] for row in record["rows"]})


def steps_of(record):
    """Return the columns of a record: those of `STEPS`, and those of other peers."""
    found = dict.fromkeys((row["step"], row["dtype"]) for row in record["rows"] if row["step"].startswith("peer:"))
    others = [key for key in found if key not in STEPS.values()]
    return STEPS | {step.removeprefix("peer:") + ", FP8" * (dtype == "e4m3"): (step, dtype) for step, dtype in others}


def is_measured(step, ranks):
    """Return whether a step is measured for a group of this size; one rank has no peers and no normal mode."""
    return ranks > 1 or any(step == own for own, _ in low_latency_measure.LOW_LATENCY)


def figures(record):
    """Draw the time of a pair over the number of tokens, for the largest group."""
    ranks = _numbers_of_ranks(record)[-1]
    lines = {
        name: found
        for name, (step, dtype) in steps_of(record).items()
        if (found := records.series(record, step=step, dtype=dtype, config={"ranks": ranks}))
    }
    where = f"{ranks} GPUs" if ranks > 1 else "One rank, its own rows only"
    title = f"{where}: dispatch and combine of few tokens, in a CUDA graph"
    return {"pair": plots.sweep_figure(lines, caption=plots.caption(record), title=title)}


def readme_table(record):
    """Format the time of a pair per group size and number of tokens."""
    steps = steps_of(record)
    lines = []
    for ranks in _numbers_of_ranks(record):
        for tokens in low_latency_measure.TOKENS:
            wanted = dict(config={"ranks": ranks}, size={"tokens": tokens})
            rows = [records.find(record, step=step, dtype=dtype, **wanted) for step, dtype in steps.values()]
            found = dict(zip(steps.values(), rows, strict=True))
            if all(found[key] or not is_measured(key[0], ranks) for key in STEPS.values()):
                times = bold_best([f"{row['kernel_us']['median']:.1f}" if row else "" for row in rows])
                called = [
                    f"{rows[0][name]['median']:.0f}" if name in rows[0] else "" for name in ("call_us", "loop_us")
                ]
                lines.append([f"{ranks}, {tokens}", *times, *called])
    text = (
        "Median time of the slowest rank for dispatch and combine together, microseconds, in a CUDA graph. The last "
        "two columns are for *packed by expert*, called from Python: *one call* is a single pair after a barrier, "
        "which includes the time between the ranks' leaving it; *in a loop* is the mean of consecutive pairs. With 1 "
        f"GPU a rank copies its own tokens, for {low_latency_measure.ONE_RANK_EXPERTS} experts, and nothing crosses "
        f"NVLink; {plots.provenance(record)}."
    )
    return f"{markdown_table(['GPUs, tokens', *steps, 'one call', 'in a loop'], lines)}\n\n{text}"
