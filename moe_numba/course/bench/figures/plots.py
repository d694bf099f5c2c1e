"""Draws figures from the rows of records. Needs no GPU and does not touch pyplot's state."""

from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from moe_numba.course.bench import records
from moe_numba.course.bench.figures.labels import (
    free_place,
    headings,
    name_ends,
    number_columns,
    plain_numbers,
    vertical_lines,
    widest,
)
from moe_numba.course.bench.figures.style import (
    BLUE,
    BROWN,
    COLOURS,
    COLUMN,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    ROW,
    STYLE,
    WIDTH,
    Picture,
)
from moe_numba.course.bench.records import find_step, format_us, previous_step, speedup
from moe_numba.course.steps.prediction import NOISE


def save(figure: Figure, path: Path | str) -> list[Path]:
    """Write ``path``.svg and ``path``.png without dates; return the two paths."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_name(path.name + suffix) for suffix in (".svg", ".png")]
    with matplotlib.rc_context(STYLE):
        for name in written:
            figure.savefig(name, metadata={"Date": None} if name.suffix == ".svg" else None)
    return written


def caption(record: dict, verb: str = "recorded on") -> str:
    """Return the provenance of a record, and whether its kernels have changed since."""
    return provenance(record, verb) + ("; kernels changed since" if records.changed_kernels(record) else "")


def provenance(record: dict, verb: str = "recorded on") -> str:
    """Return "recorded on NVIDIA H200, driver 580.95, numba-cuda 0.30.4, commit 1a2b3c4, 2026-11-20"."""
    versions = record["versions"]
    known = [f"{name} {versions[name]}" for name in ("numba-cuda", "torch") if name in versions]
    parts = [f"{verb} {record['gpu']}", f"driver {record['driver']}", *known, f"commit {record['commit'][:7]}"]
    return ", ".join([*parts, record["date"][:10]])


def with_commit(measured: dict) -> str:
    """Return "with commit 1a2b3c4, 2026-11-20" of a row's field ``measured``."""
    return f"with commit {measured['commit'][:7]}, {measured['date'][:10]}"


def other_commits(record: dict, label: Callable[[dict], str]) -> str:
    """Return "; LABEL with commit 1a2b3c4, 2026-11-20" for the rows of earlier records, or nothing."""
    found: dict = {}  # when -> labels, each once
    for row in record["rows"]:
        if measured := row.get("measured"):
            found.setdefault(with_commit(measured), {})[label(row)] = None
    return "".join(f"; {' and '.join(labels)} {when}" for when, labels in found.items())


def ladder_figure(
    rows: list[dict],
    *,
    lines: dict[str, float] | None = None,
    title: str = "",
    caption: str = "",
    reference: str = "torch eager",
) -> Picture:
    """Draw kernel times as horizontal bars, top to bottom in teaching order, or as dots on a logarithmic axis.

    Columns show each step's time and its speedup over the previous step and over ``reference``. Slower steps are grey:
    those that are marked so, and those that take over 2 % longer than the previous step; the caption says so. Steps
    that were rejected, or not run, have no mark. Whiskers span the 10th to 90th percentile.

    Parameters
    ----------
    rows : list of rows of a record
    lines : dict
        ``{label: microseconds}``: dashed lines for the best peer and the speed of light. The reference step always
        has a line.
    """
    lines, torch_row = dict(lines or {}), find_step(rows, reference)
    if torch_row and "kernel_us" in torch_row:
        lines = {reference: torch_row["kernel_us"]["median"]} | lines
    with matplotlib.rc_context(STYLE):
        figure, axes = _bars(rows, columns=3)
        logarithmic = _time_axis(axes, rows, ["kernel_us"], list(lines.values()), "kernel time, µs")
        for y, row in enumerate(rows):
            stats = row.get("kernel_us")
            if stats:
                colour = PALE if _is_slower(rows, row) else ORANGE if row is torch_row else BLUE
                _mark(axes, y, stats, 0.62, logarithmic, color=colour)
            else:
                reasons = {"refused": "refused: wrong result", "not_run": "not run on this GPU"}
                why = next((text for key, text in reasons.items() if key in row), "no kernel time")
                axes.text(
                    free_place(figure, axes, why, lines.values()),
                    y,
                    why,
                    transform=axes.get_yaxis_transform(),
                    va="center",
                    color=GREY,
                    style="italic",
                    zorder=4,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )
        columns = {
            "µs": lambda row: _us(row.get("kernel_us")),
            "× previous": lambda row: speedup(previous_step(rows, row), row),
        }
        if torch_row:
            columns[f"× {reference.split()[0]}"] = lambda row: speedup(torch_row, row)
        number_columns(axes, rows, columns)
        levels = vertical_lines(figure, axes, lines)
        if any("kernel_us" in row and _is_slower(rows, row) for row in rows):
            caption = "; ".join(filter(None, [caption, "grey: not faster than an earlier step"]))
        _finish(figure, axes, title, caption, rows=len(rows), levels=levels)
    return figure


def recorded_ladder(
    record: dict, topic: str, title: str, lines: dict[str, float] | None = None, reference: str = "torch"
) -> Picture | None:
    """Draw a ladder that was recorded on the GPU of ``record``; return None if there is none.

    ``title`` may contain the sizes and the configuration of the ladder's first step, such as "{tokens} tokens".
    """
    ladder = records.recorded(topic, records.folder(record["gpu"]))
    if ladder is None:
        return None
    rows = [row for row in ladder["rows"] if ": " not in row["step"]]  # the others diagnose a step of a lesson
    first, floors = rows[0], [row["floor_us"] for row in rows if "floor_us" in row]
    return ladder_figure(
        rows,
        lines=({"speed of light": floors[0]} if floors else {}) | (lines or {}),
        title=title.format(**first["config"] | first["size"]),
        caption=caption(ladder),
        reference=reference,
    )


def split_figure(rows: list[dict], *, title: str = "", caption: str = "") -> Picture:
    """Draw kernel time and call time of each step, one bar below the other."""
    return bars_figure(rows, {"kernel_us": "kernel µs", "call_us": "call µs"}, title=title, caption=caption)


def bars_figure(
    rows: list[dict],
    columns: dict[str, str],
    *,
    lines: dict[str, float] | None = None,
    title: str = "",
    caption: str = "",
) -> Picture:
    """Draw up to three times of each step as bars, one below the other, and as columns of numbers.

    On a logarithmic axis, where the length of a bar means nothing, they are dots.

    Parameters
    ----------
    rows : list of dict
        A ``step``, and statistics in microseconds; a time that is missing has no bar.
    columns : dict
        ``{key of a row: heading}``
    lines : dict, optional
        ``{label: microseconds}``: dashed lines.
    """
    lines = lines or {}
    with matplotlib.rc_context(STYLE):
        figure, axes = _bars(rows, columns=len(columns))
        logarithmic = _time_axis(axes, rows, list(columns), list(lines.values()), "µs")
        for number, (key, colour) in enumerate(zip(columns, (BLUE, ORANGE, GREEN))):
            offset = (number - (len(columns) - 1) / 2) * 0.76 / len(columns)
            for y, row in enumerate(rows):
                if key in row:
                    alpha = 0.4 if row.get("slower") else 1
                    _mark(axes, y + offset, row[key], 0.68 / len(columns), logarithmic, color=colour, alpha=alpha)
        texts = {heading: lambda row, key=key: _us(row.get(key)) for key, heading in columns.items()}
        number_columns(axes, rows, texts, colours=(BLUE, BROWN, GREEN))
        levels = vertical_lines(figure, axes, lines)
        _finish(figure, axes, title, caption, rows=len(rows), levels=max(levels, 1))
    return figure


def sweep_figure(
    series: dict[str, dict],
    *,
    xlabel: str = "tokens",
    ylabel: str = "us",
    floor: dict | None = None,
    title: str = "",
    caption: str = "",
) -> Picture:
    """Draw one line per label over a size, labelled at the right end.

    Parameters
    ----------
    series : dict
        ``{label: {x: statistics or number}}``, as returned by ``records.series``; the band spans p10 to p90.
    floor : dict, optional
        Lower bound, ``{x: number}``, drawn dashed as "speed of light".
    """
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(WIDTH, 4.8))
        right = widest(figure, [*series, "speed of light"]) + 0.35
        axes = figure.add_axes((0.08, 0.19, 0.92 - right / WIDTH, 0.69))
        ends = []
        for number, (label, points) in enumerate(series.items()):
            colour, xs = COLOURS[number % len(COLOURS)], sorted(points)
            style = "-" if number < len(COLOURS) else "-."  # colours repeat
            points = {x: v if isinstance(v, dict) else {"median": v, "p10": v, "p90": v} for x, v in points.items()}
            median, p10, p90 = ([points[x][key] for x in xs] for key in ("median", "p10", "p90"))
            axes.plot(xs, median, color=colour, linestyle=style, marker="o", markersize=3.5, linewidth=1.6)
            axes.fill_between(xs, p10, p90, color=colour, alpha=0.18, linewidth=0)
            ends.append((label, xs[-1], median[-1], colour))
        if floor:
            xs = sorted(floor)
            axes.plot(xs, [floor[x] for x in xs], color=INK, linestyle="--", linewidth=1)
            ends.append(("speed of light", xs[-1], floor[xs[-1]], INK))
        sizes = sorted({x for points in series.values() for x in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::-1][:: 1 + len(sizes) // 10])  # every n-th if they are many, and always the last
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(xlabel)
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
        axes.set_ylabel(_unit(ylabel))
        low, high = axes.get_ylim()
        axes.grid(axis="y", which="major" if high > 20 * low else "both")  # a short axis has at most one decade
        headings(figure, title, caption)
        name_ends(figure, axes, ends)
    return figure


def kernel_sweep(record: dict, steps: dict[str, str], wanted: dict, over: str = "tokens", **texts: str) -> Picture:
    """Draw the kernel times of ``{label: step}`` over a size, and the lower bound, if that is known.

    ``wanted`` selects rows as in ``records.select``. The lower bound is not below the time of an empty kernel, if that
    was measured. ``texts`` are further arguments of ``sweep_figure``.
    """
    found = {label: records.series(record, over, step=step, **wanted) for label, step in steps.items()}
    floor = records.series(record, over, value="floor_us", step="final", **wanted)
    if empty := records.find(record, step="empty kernel", config={"dependent": True}):
        floor = {size: max(us, empty["kernel_us"]["median"]) for size, us in floor.items()}
    series = {label: points for label, points in found.items() if points}
    return sweep_figure(series, floor=floor, caption=caption(record), **texts)


def _bars(rows, columns):
    """Make axes with one row per step, between the names on the left and ``columns`` columns of numbers."""
    figure = Picture(figsize=(WIDTH, 4))
    axes = figure.add_axes((0.3, 0.3, 0.4, 0.4))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row["step"] for row in rows], color=INK)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        if row.get("slower") or "refused" in row:
            label.set_color(GREY)
    left, right = widest(figure, [row["step"] for row in rows]) + 0.3, COLUMN * columns + 0.15
    width = max(WIDTH, left + 3 + right)  # long names widen the figure and leave the bars 3 inches
    figure.set_figwidth(width)
    axes.set_position((left / width, 0.3, (width - left - right) / width, 0.4))
    return figure, axes


def _finish(figure, axes, title, caption, rows, levels):
    """Set the figure's height: title, ``levels`` lines of names above the bars, rows, axis and caption."""
    below, above = 0.9, 0.55 + 0.18 * levels
    height = below + ROW * rows + above
    box = axes.get_position()
    figure.set_figheight(height)
    axes.set_position((box.x0, below / height, box.width, ROW * rows / height))
    headings(figure, title, caption)


def _time_axis(axes, rows, keys, more, label):
    """Scale the axis linearly from zero, or logarithmically if the values span more than a factor of ten.

    Returns whether it is logarithmic.
    """
    stats = [row[key] for row in rows for key in keys if key in row]
    low, high = min([s["median"] for s in stats] + more, default=1), max([s["p90"] for s in stats] + more, default=1)
    if high > 10 * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 2, high * 1.15)
        plain_numbers(axes.xaxis)
    else:
        axes.set_xlim(0, high * 1.05)
    axes.set_xlabel(label)
    return high > 10 * low


def _mark(axes, y, stats, height, logarithmic, **style):
    """Draw a median as a bar, or as a dot on a logarithmic axis, with a whisker."""
    if logarithmic:
        axes.plot([stats["median"]], [y], "o", markersize=max(5, 12 * height), **style)
    else:
        axes.barh(y, stats["median"], height=height, **style)
    axes.plot([stats["p10"], stats["p90"]], [y, y], color=INK, linewidth=0.9, alpha=0.7, solid_capstyle="butt")


def _is_slower(rows, row):
    before = (previous_step(rows, row) or {}).get("kernel_us")
    return bool(row.get("slower") or (before and row["kernel_us"]["median"] > (1 + NOISE) * before["median"]))


def _us(stats):
    return stats and format_us(stats["median"])


def _unit(label):
    return "µs" if label == "us" else label
