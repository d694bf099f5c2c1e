"""Tile configurations of the grouped GEMM: the candidates' times for many problems, and how good the choice is.

``grouped_gemm_tiles_measure`` measures. From the record ``tune_grouped_gemm`` generates the table of the package.
"""

from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import markdown_table
from moe_numba.course.bench.topics.grouped_gemm_tiles import tune as tuner
from moe_numba.course.bench.topics.grouped_gemm_tiles.measure import measure

__all__ = ["figures", "generate", "measure", "readme_table", "summary"]


def generate(rows, gpu):
    """Write the package's table, on whose hash the record of these rows depends; return its path.

    Problems that these rows lack are taken from the table's other records.
    """
    others = tuner.recorded_rows([other for other in tuner.config_table.GPUS if other != gpu])
    return tuner.write_table({gpu: rows} | others)


def choices(rows):
    """Return {label: {problem: ratio to the best}}: of the choice when the rows were measured, and of their table."""
    before = {tuner.problem_of(row): row["tile"] for row in rows}
    return {"before": tuner.excess(rows, before.get), "table": tuner.excess(rows, tuner.choose(rows).get)}


def figures(record):
    """Plot how much slower the choice is than the best configuration, over the rows per group."""
    made, found = {}, choices(record["rows"])
    for kind in dict.fromkeys(problem.kind for problem in found["table"]):
        series = {}
        for label, ratios in found.items():
            by_average: dict[int, list[float]] = {}
            for problem, ratio in ratios.items():
                if problem.kind == kind:
                    by_average.setdefault(problem.average, []).append(ratio)
            series[label] = {average: sum(own) / len(own) for average, own in sorted(by_average.items())}
        made[kind.replace(", ", "-")] = plots.sweep_figure(
            series,
            xlabel="rows per group",
            ylabel="time / that of the best configuration, worst routing, mean over shapes",
            caption=plots.caption(record),
            title=f"Tile configurations of the grouped GEMM: {kind}",
        )
    return made


def readme_table(record):
    """Return the summary of a record, with its provenance."""
    text = "Time over that of the best tile configuration, in the worst routing that spreads rows over the groups; "
    return f"{summary(record['rows'])}\n\n{text}{plots.provenance(record, 'measured on')}."


def summary(rows):
    """Return a table: for each kind how much slower the choice is than the best configuration of each problem."""
    found, lines = choices(rows), []
    for kind in dict.fromkeys(problem.kind for problem in found["table"]):
        cells = []
        for ratios in found.values():
            own = [100 * (ratio - 1) for problem, ratio in ratios.items() if problem.kind == kind]
            cells += [f"{sum(own) / len(own):.1f} %", f"{max(own):.1f} %"]
        lines.append([kind, len(own), *cells])
    headings = ["scaling", "problems", "before: mean", "before: worst", "table: mean", "table: worst"]
    return markdown_table(headings, lines)
