"""Places titles, captions, columns of numbers and names of lines in figures, so that no two texts overlap."""

import textwrap

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import LogFormatter

from moe_numba.course.bench.figures.style import BROWN, COLUMN, GREEN, GREY, INK, PURPLE, RED, SKY
from moe_numba.course.bench.records import format_us

_DASHED = (0, (4, 3))
_PEERS = (PURPLE, _DASHED), (RED, (0, (1, 1.5))), (INK, (0, (6, 2, 1, 2))), (SKY, (0, (2, 2)))  # colour and dashes


def headings(figure, title, caption):
    """Write the title at the top, and the caption in lines of the figure's width at the bottom."""
    width, height = figure.get_size_inches()
    figure.text(0.15 / width, 1 - 0.12 / height, title, va="top", ha="left", fontsize=12, fontweight="bold")
    caption = textwrap.fill(caption, int(14.5 * (width - 0.3)))  # 14.5 characters of this size per inch
    figure.text(0.15 / width, 0.1 / height, caption, va="bottom", ha="left", fontsize=7.5, color=GREY)


def plain_numbers(axis):
    """Label a logarithmic axis with plain numbers, between the decades only if it is short."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(LogFormatter())


def number_columns(axes, rows, columns, colours=(INK, INK, INK)):
    """Write aligned columns of numbers to the right of the bars, under headings of one or more lines."""
    characters = int(72 * COLUMN / 5.2)  # that fit in a column
    for number, ((head, text), colour) in enumerate(zip(columns.items(), colours, strict=False)):
        x = 72 * COLUMN * (number + 0.85)  # points right of the axes
        axes.annotate(
            textwrap.fill(head, characters, break_long_words=False),
            (1, 1),
            (x, 5),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=GREY if colour == INK else colour,
            fontsize=8.5,
        )
        for y, row in enumerate(rows):
            quiet = row.get("slower") or "refused" in row
            axes.annotate(
                text(row) or "–",
                (1, y),
                (x, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center",
                color=GREY if quiet else colour,
                fontweight="normal" if number else "bold",
            )


def vertical_lines(figure, axes, lines):
    """Draw dashed lines named above the bars; return the number of text lines that avoid overlaps.

    The lower bound and torch have colours of their own; the other lines differ in colour and dashes.
    """
    levels, renderer = [], _renderer(figure)
    peers = [label for label in lines if label != "speed of light" and not label.startswith("torch")]
    for label, value in sorted(lines.items(), key=lambda line: line[1]):
        if label in peers:
            colour, dashes = _PEERS[peers.index(label) % len(_PEERS)]
        else:
            colour, dashes = GREEN if label == "speed of light" else BROWN, _DASHED
        axes.axvline(value, color=colour, linestyle=dashes, linewidth=1.1, zorder=3)
        text = axes.annotate(
            f"{label} {format_us(value)}",
            (value, 1),
            (0, 5),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=colour,
        )
        box = text.get_window_extent(renderer).padded(4)
        shift = max(axes.bbox.x0 - box.x0, 0) + min(axes.bbox.x1 - box.x1, 0)  # keep the name above the axes
        left, right = box.x0 + shift, box.x1 + shift
        free = (i for i, level in enumerate(levels) if all(right < start or end < left for start, end in level))
        level = next(free, len(levels))
        if level == len(levels):
            levels.append([])
        levels[level].append((left, right))
        text.set_position((shift * 72 / figure.dpi, 5 + 13 * level))
    return len(levels)


def free_place(figure, axes, text, values):
    """Return where text of a row begins, as a fraction of the axes' width, so that it covers none of the values."""
    width = widest(figure, [text]) / (axes.get_position().width * figure.get_figwidth()) + 0.02
    to_fraction = axes.transData + axes.transAxes.inverted()
    taken = [0, *sorted(to_fraction.transform((value, 0))[0] for value in values), 1]
    gaps = [(end - start, start) for start, end in zip(taken, taken[1:])]
    return 0.01 + next((start for size, start in gaps if size >= width), max(gaps)[1])


def name_ends(figure, axes, ends):
    """Write each line's name to the right of its end; names that would overlap are pushed apart."""
    to_pixels, height = axes.transData, 13 * figure.dpi / 72
    ends = sorted(ends, key=lambda end: end[2])
    wanted = [to_pixels.transform((x, y))[1] for _, x, y, _ in ends]
    places = list(wanted)
    for _ in range(200):  # neighbours that are too close both move by half; this converges in a few iterations
        for i in range(1, len(places)):
            missing = height - (places[i] - places[i - 1])
            if missing > 0:
                places[i - 1] -= missing / 2
                places[i] += missing / 2
    column = axes.bbox.x1 + 16 * figure.dpi / 72
    for (label, x, y, colour), place in zip(ends, places, strict=True):
        end = to_pixels.transform((x, y))
        where = axes.transAxes.inverted().transform([end, (column - 3, place), (column, place)])
        axes.plot(where[:2, 0], where[:2, 1], transform=axes.transAxes, color=colour, linewidth=0.6, clip_on=False)
        axes.text(*where[2], label, transform=axes.transAxes, va="center", color=colour)


def widest(figure, labels):
    """Return the width of the longest label in inches, with a margin, because it varies with the resolution."""
    texts, renderer = [figure.text(0, 0, label) for label in labels], _renderer(figure)
    width = max((text.get_window_extent(renderer).width for text in texts), default=0)
    for text in texts:
        text.remove()
    return 1.03 * width / figure.dpi


def _renderer(figure):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()
