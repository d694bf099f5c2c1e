"""Benchmark of the grouped GEMM: the two GEMMs of a DeepSeek-V3 expert, beside torch and other projects' kernels.

``grouped_gemm_measure`` makes the problems and measures; this module draws and tabulates the record.
"""

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import kernel_times_table, steps_with_peers
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
    config = row_config(shape, scaling)
    steps = steps_with_peers(record, "torch", "torch, loop").items()
    found = {label: records.series(record, over="rows", step=step, config=config) for label, step in steps}
    return {label: points for label, points in found.items() if points}


def figures(record):
    """Plot a sweep over rows for each shape and scaling, the roofline, and the recorded ladders."""
    made, steps = {}, steps_with_peers(record, "torch", "torch, loop")
    for shape, (n, k) in {name: sides.values() for name, sides in SHAPES.items()}.items():
        for scaling in TITLES:
            if series_by_label(record, shape, scaling):
                made[f"sweep-{shape}-{scaling}"] = plots.kernel_sweep(
                    record,
                    steps,
                    dict(config=row_config(shape, scaling)),
                    over="rows",
                    xlabel="rows in 32 groups",
                    title=f"Grouped GEMM, N {n}, K {k}, {TITLES[scaling]}: kernel time",
                )
    made["roofline"] = roofline(record, plots.caption(record))
    for name, title in (("dense-ladder", "One matrix"), ("ladder", "32 groups")):
        topic = f"grouped_gemm_{name.replace('-', '_')}"
        if ladder := plots.recorded_ladder(record, topic, f"Grouped GEMM step by step: {title}"):
            made[name] = ladder
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
    lines = []
    for scaling, title in TITLES.items():
        steps = {
            name: step
            for name, step in steps_with_peers(record, "torch", "torch, loop").items()
            if records.find(record, step=step, config={"scaling": scaling})
        }
        if "moe_numba" in steps:
            rows = {
                f"{sides['n']} x {sides['k']}, {rows}{label}": dict(
                    config=row_config(shape, scaling, groups, routing), size={"rows": rows}
                )
                for shape, sides in SHAPES.items()
                for groups, routing, rows, label in TABLE_ROWS
            }
            lines += [f"{title}:", "", kernel_times_table(record, "N x K, rows", steps, rows, digits=0), ""]
    text = f"32 groups and rows drawn evenly at random, unless stated. Kernel time in us, {plots.provenance(record)}."
    if records.peers(record):
        text += " Layouts that other projects' kernels need are made beforehand."
    return "\n".join([*lines, text])
