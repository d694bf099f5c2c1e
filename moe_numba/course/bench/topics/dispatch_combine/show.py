"""Benchmark of dispatch and combine over the number of SMs, with NCCL and a plain push as baselines.

``dispatch_combine_measure`` measures the rows, for groups of up to as many GPUs as there are.
"""

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import bold_best, markdown_table
from moe_numba.course.bench.topics.dispatch_combine import measure as dispatch_combine_measure
from moe_numba.expert_parallel.rings.config import num_direct_senders

NUMBERS_OF_RANKS = (2, 4, 8)

STEPS = {
    "dispatch, bfloat16": dict(step="final", operation="dispatch", dtype="bf16"),
    "dispatch, FP8": dict(step="final", operation="dispatch", dtype="e4m3"),
    "dispatch into an output, bfloat16": dict(step="to output", operation="dispatch", dtype="bf16"),
    "dispatch into an output, FP8": dict(step="to output", operation="dispatch", dtype="e4m3"),
    "combine, bfloat16": dict(step="final", operation="combine", dtype="bf16"),
}
NCCL_STEPS = ("NCCL all_to_all_single", "index_select and NCCL", "counts, index_select and NCCL")
LADDERS = {"dispatch": "ring_buffer_dispatch_ladder", "combine": "combine_ladder"}
DECODE_STEPS = {
    "as called": "final",
    "without waiting for counts": "final, worst",
    "in a CUDA graph": "final, graph",
    "into an output, in a graph": "to output, graph",
    "NCCL, every token to all": "NCCL, every token",
}


_PEER_STEPS = {"dispatch, bfloat16": ("dispatch", "bf16"), "dispatch, FP8": ("dispatch", "e4m3")}
_PEER_STEPS["combine, bfloat16"] = "combine", "bf16"


def measure(peers, quick):
    """Return the record's rows; received rows are checked before a step is timed."""
    return dispatch_combine_measure.measure(NUMBERS_OF_RANKS, quick, peers=peers)


def out_of_reach(row):
    """Return whether a row needs more GPUs than there are."""
    return row["config"]["ranks"] > torch.cuda.device_count()


def numbers_of_ranks(record):
    """Return the group sizes in the record, ascending."""
    return sorted({row["config"]["ranks"] for row in records.select(record, operation="dispatch")})


def peer_steps(record):
    """Return what is known of the peers, as `STEPS`."""
    return {
        f"{peer.removeprefix('peer:')}: {name}": dict(step=peer, operation=operation, dtype=dtype)
        for peer in records.peers(record)
        for name, (operation, dtype) in _PEER_STEPS.items()
    }


def _as_of(record, ranks):
    """Return the record with the commit and date at which groups of this size were measured."""
    return record | records.find(record, config={"ranks": ranks}).get("measured", {})


def figures(record):
    """Draw bandwidth over SMs and few-token times of the largest group, and the notebooks' ladders."""
    ranks = numbers_of_ranks(record)[-1]
    caption = plots.caption(_as_of(record, ranks))

    def rates(**wanted):
        rows = records.select(record, config={"ranks": ranks}, **wanted)
        found = {row["config"]["num_sms"]: row["wire_gbps"] for row in rows if "num_sms" in row["config"]}
        return {sms: rate for sms, rate in found.items() if sms <= max(dispatch_combine_measure.SMS)}

    steps = STEPS | peer_steps(record)
    lines = {name: found for name, wanted in steps.items() if (found := rates(**wanted))}
    lines["plain push"] = rates(step="plain push")
    if to_all := rates(step="push to all"):  # with two ranks it equals the plain push
        lines["push to all others"] = to_all
    few = {
        name: records.series(record, step=step, operation="dispatch and combine", config={"ranks": ranks})
        for name, step in DECODE_STEPS.items()
    }
    made = {
        "bandwidth": plots.sweep_figure(
            lines,
            xlabel="SMs",
            ylabel="GB/s on the wire",
            caption=caption,
            title=f"{ranks} GPUs, {dispatch_combine_measure.TOKENS} tokens each: wire bandwidth",
        ),
        "few": plots.sweep_figure(
            few, caption=caption, title=f"{ranks} GPUs, few tokens each: dispatch and combine together"
        ),
    }
    for name, topic in LADDERS.items():
        title = f"{name.capitalize()}, step by step: {{tokens}} tokens on each of {{ranks}} GPUs"
        if ladder := plots.recorded_ladder(record, topic, title):
            made[f"{name}-ladder"] = ladder
    return made


def readme_table(record):
    """Format kernel time and wire bandwidth per group size, then dispatch and combine of few tokens."""
    numbers, few = numbers_of_ranks(record), dispatch_combine_measure.MAIN_SMS
    direct = num_direct_senders(few)  # the most that a direct write launches
    rows = {
        f"{name}, {direct if wanted['step'] == 'to output' else few} SMs": (wanted, few)
        for name, wanted in STEPS.items()
    }
    rows["dispatch into an output, bfloat16, 12 SMs"] = STEPS["dispatch into an output, bfloat16"], 12
    rows["dispatch, bfloat16, with counts and host synchronisation"] = (
        dict(step="final, with notify", dtype="bf16"),
        few,
    )
    rows |= {f"{name}, {few} SMs": (wanted, few) for name, wanted in peer_steps(record).items()}
    rows |= {f"{step}, bfloat16": (dict(step=step), None) for step in NCCL_STEPS}
    rows["plain push, 132 SMs"] = dict(step="plain push"), 132
    rows["push to all others, 132 SMs"] = dict(step="push to all"), 132
    many, few_tokens = [], []
    for name, (wanted, sms) in rows.items():
        cells = []
        for ranks in numbers:
            row = records.find(record, **wanted, config={"ranks": ranks} | ({"num_sms": sms} if sms else {}))
            cells.append(f"{row['kernel_us']['median']:.0f} us, {row['wire_gbps']:.0f} GB/s" if row else "")
        if any(cells):  # older records lack some steps
            many.append([name, *cells])
    for tokens in dispatch_combine_measure.DECODE_TOKENS:
        wanted = dict(operation="dispatch and combine", config={"ranks": numbers[-1]}, size={"tokens": tokens})
        found = [records.find(record, step=step, **wanted) for step in DECODE_STEPS.values()]
        if all(found):
            times = bold_best([f"{row['kernel_us']['median']:.0f}" for row in found])
            few_tokens.append([tokens, *times])
    caption = plots.provenance(record) + plots.other_commits(record, lambda row: f"{row['config']['ranks']} GPUs")
    text = "Median kernel time of the slowest rank, microseconds; few tokens: dispatch and combine together"
    return "\n\n".join(
        [
            markdown_table([f"{dispatch_combine_measure.TOKENS} tokens each", *(f"{n} GPUs" for n in numbers)], many),
            markdown_table([f"few tokens, {numbers[-1]} GPUs", *DECODE_STEPS], few_tokens),
            f"{text}; {caption}.",
        ]
    )
