"""Drawing primitives of the course's figures: boxes, text, arrows and cells on a canvas measured in inches.

Coordinates count from the lower left corner, so that text and boxes can be given sizes that fit each other.
"""

import matplotlib
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle

from moe_numba.course.bench.figures.style import COLOURS, GREY, INK, STYLE, Picture

WHITE = "#FFFFFF"


def canvas(width, height, title):
    """Create a figure of the given size in inches with a title; return the figure and its axes."""
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    text(axes, 0.15, height - 0.25, title, size=12, weight="bold", ha="left")
    return figure, axes


def text(axes, x, y, words, *, size=9, colour=INK, ha="center", va="center", **more):
    """Draw text in DejaVu Sans, the font of all figures."""
    return axes.text(x, y, words, fontsize=size, color=colour, ha=ha, va=va, family="DejaVu Sans", **more)


def note(axes, x, y, words):
    """Draw a grey, left-aligned caption."""
    return text(axes, x, y, words, size=8.5, colour=GREY, ha="left")


def box(axes, x, y, width, height, words="", *, fill="white", edge=INK, colour=INK, size=9, line=0.8, **more):
    """Draw a rectangle from its lower left corner, with centred text."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=line, **more))
    if words:
        text(axes, x + width / 2, y + height / 2, words, size=size, colour=colour)


def arrow(axes, start, end, *, colour=GREY, bend=0.0, line=1.1, style="-|>", **more):
    """Draw an arrow between two points."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle=style,
            mutation_scale=9,
            color=colour,
            linewidth=line,
            shrinkA=0,
            shrinkB=0,
            connectionstyle=f"arc3,rad={bend}",
            **more,
        )
    )


def lane_colour(lane):
    """Return a lane's colour; neighbouring lanes differ."""
    return COLOURS[lane % len(COLOURS)]


def ink_on(fill):
    """Return white or dark ink, whichever is readable on the given colour."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"


def check_range(name, value, minimum, maximum):
    """Raise ``ValueError`` unless ``minimum <= value <= maximum``."""
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value}; this figure can show {minimum} to {maximum}")


def tint(colour, part=0.28):
    """Mix a colour with white, so that dark text is readable on it."""
    return to_hex([1 - part * (1 - channel) for channel in to_rgb(colour)])


def cell(axes, x, y, wide, tall, value, small="", *, fill=WHITE, edge=INK, colour=None, size=9, label="cell"):
    """Draw a box around a value, with an optional note in small print below the value."""
    colour, words = colour or ink_on(fill), "" if small else str(value)
    box(axes, x, y, wide, tall, words, fill=fill, edge=edge, colour=colour, size=size, label=label)
    if small:
        text(axes, x + wide / 2, y + 0.68 * tall, str(value), size=size, colour=colour)
        text(axes, x + wide / 2, y + 0.25 * tall, small, size=6.5, colour=colour)


def plural(n, what):
    """Return "1 row" or "2 rows"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
