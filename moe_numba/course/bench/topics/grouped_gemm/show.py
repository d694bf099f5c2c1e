"""Benchmark of the grouped GEMM: the two GEMMs of a DeepSeek-V3 expert, beside torch and other projects' kernels.

``grouped_gemm_measure`` makes the problems and measures; this module draws and tabulates the record.
"""

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import bold_best
from moe_numba.course.bench.topics.grouped_gemm.measure import (
    FEW_GROUPS,
    FP8,
    GROUPS,
    MANY_GROUPS,
    ROWS,
    SETS,
    SHAPES,
    TORCH_NAMES,
    add_block_scales,
    expected_blockwise,
    expected_output,
    lower_bound,
    make_problem,
    measure,
    random_lengths,
    random_weight,
    scaled_mm_loop,
)

__all__ = [
    "FP8",
    "GROUPS",
    "MANY_GROUPS",
    "ROWS",
    "SETS",
    "SHAPES",
    "TORCH_NAMES",
    "add_block_scales",
    "expected_blockwise",
    "expected_output",
    "figures",
    "lower_bound",
    "make_problem",
    "measure",
    "random_lengths",
    "random_weight",
    "readme_table",
    "roofline",
    "row_config",
    "scaled_mm_loop",
    "series_by_label",
]

TITLES = {
    "tensor": "FP8, a scale per group",
    "block": "FP8, block scales",
    "none": "bf16",
    "mxfp4": "bf16 with MXFP4 weights",
}
TABLE_ROWS = [  # groups, routing, rows, and what a row of the table says about them
    *((GROUPS, "uniform", rows, "") for rows in ROWS),
    (GROUPS, "zipf", 8192, ", by Zipf's law"),
    (FEW_GROUPS, "uniform", 8192, " in 8 groups"),
]


def row_config(shape, scaling="tensor", groups=GROUPS, routing="uniform"):
    """Return the ``config`` of a record's row for one of ``SHAPES``."""
    return {"num_groups": groups, **SHAPES[shape], "scaling": scaling, "routing": routing}


def series_by_label(record, shape, scaling="tensor"):
    """Return ``{label: {rows: statistics}}`` of all kernels that were measured for a shape."""
    named = {"moe_numba": "final", **{n.removeprefix("peer:"): n for n in records.peers(record)}}
    named |= {"torch": "torch", "torch, loop": "torch, loop"}
    config = row_config(shape, scaling)
    found = {label: records.series(record, over="rows", step=step, config=config) for label, step in named.items()}
    return {label: points for label, points in found.items() if points}


def figures(record):
    """Plot a sweep over rows for each shape and scaling, the roofline, and the recorded ladders."""
    made, caption = {}, plots.caption(record)
    for shape, (n, k) in {name: sides.values() for name, sides in SHAPES.items()}.items():
        for scaling in TITLES:
            if series := series_by_label(record, shape, scaling):
                floors = records.series(
                    record, over="rows", value="floor_us", step="final", config=row_config(shape, scaling)
                )
                made[f"sweep-{shape}-{scaling}"] = plots.sweep_figure(
                    series,
                    xlabel="rows in 32 groups",
                    floor=floors,
                    caption=caption,
                    title=f"Grouped GEMM, N {n}, K {k}, {TITLES[scaling]}: kernel time",
                )
    made["roofline"] = roofline(record, caption)
    for topic, title in (("grouped_gemm_dense_ladder", "One matrix"), ("grouped_gemm_ladder", "32 groups")):
        ladder = records.recorded(topic, records.folder(record["gpu"]))
        if ladder:
            floor_us = next(row["floor_us"] for row in ladder["rows"] if "floor_us" in row)
            made[topic.removeprefix("grouped_gemm_").replace("_", "-")] = plots.ladder_figure(
                ladder["rows"],
                lines={"speed of light": floor_us},
                title=f"Grouped GEMM step by step: {title}",
                caption=plots.caption(ladder),
                reference="torch",
            )
    return made


def roofline(record, caption=""):
    """Plot TFLOP/s of the package's kernel over arithmetic intensity; the roof is that of the data sheet."""
    series, roof = {}, {}
    for shape in SHAPES:
        for row in records.select(record, step="final", config=row_config(shape)):
            intensity = round(row["flops"] / row["bytes"], 1)
            series.setdefault(shape, {})[intensity] = row["flops"] / row["kernel_us"]["median"] / 1e6
            roof[intensity] = row["flops"] / row["floor_us"] / 1e6
    figure = plots.sweep_figure(
        series,
        xlabel="operations per byte",
        ylabel="TFLOP/s",
        floor=roof,
        caption=caption,
        title="Grouped GEMM, FP8: roofline",
    )
    figure.axes[0].set_xticks([4, 8, 16, 32, 64, 128, 256, 512])
    return figure


def readme_table(record):
    """Return a table for each scaling: kernel times of this package, the peers, torch and the lower bound."""
    peers, lines = records.peers(record), []
    for scaling, title in TITLES.items():
        steps = ["final", *peers, "torch", "torch, loop"]
        steps = [s for s in steps if records.find(record, step=s, config={"scaling": scaling})]
        if steps[:1] != ["final"]:
            continue
        names = ["moe_numba" if name == "final" else name.removeprefix("peer:") for name in steps]
        lines += [f"{title}:", "", f"| N x K, rows | {' | '.join(names)} | speed of light |"]
        lines.append("|---|" + "---:|" * (len(names) + 1))
        for shape, sides in SHAPES.items():
            for groups, routing, rows, label in TABLE_ROWS:
                size, config = {"rows": rows}, row_config(shape, scaling, groups, routing)
                found = [records.find(record, step=step, config=config, size=size) for step in steps]
                if found[0]:
                    cells = [f"{row['kernel_us']['median']:.0f}" if row else "" for row in found]
                    cells = bold_best(cells) if len(steps) > 1 else cells
                    cells.append(f"{found[0]['floor_us']:.0f}")
                    lines.append(f"| {sides['n']} x {sides['k']}, {rows}{label} | {' | '.join(cells)} |")
        lines.append("")
    text = f"32 groups and rows drawn evenly at random, unless stated. Kernel time in us, {plots.provenance(record)}."
    if peers:
        text += " Layouts that other projects' kernels need are made beforehand."
    return "\n".join([*lines, text])
