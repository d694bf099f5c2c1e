"""Teaching pictures, drawn by code from their parameters: one module for each room.

A picture's coordinates are inches from its lower left corner, so that text and boxes can be given sizes that fit each
other. Colours are those of ``bench.plots``, which colour-blind readers tell apart.
"""

import matplotlib
from matplotlib.patches import FancyArrowPatch, Rectangle

from moe_numba.course.bench.plots import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, STYLE, Picture

__all__ = [
    "BLUE",
    "COLOURS",
    "GREEN",
    "GREY",
    "INK",
    "ORANGE",
    "PALE",
    "RED",
    "SKY",
    "arrow",
    "box",
    "canvas",
    "ink_on",
    "lane_colour",
    "note",
    "text",
]


def canvas(width, height, title):
    """A picture of so many inches with its title at the top, and the axes to draw on."""
    with matplotlib.rc_context(STYLE):
        figure = Picture(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    text(axes, 0.15, height - 0.25, title, size=12, weight="bold", ha="left")
    return figure, axes


def text(axes, x, y, words, *, size=9, colour=INK, ha="center", va="center", **more):
    """Words at a place; DejaVu Sans, as in the measured figures."""
    return axes.text(x, y, words, fontsize=size, color=colour, ha=ha, va=va, family="DejaVu Sans", **more)


def note(axes, x, y, words):
    """A quiet sentence that starts at a place."""
    return text(axes, x, y, words, size=8.5, colour=GREY, ha="left")


def box(axes, x, y, width, height, words="", *, fill="white", edge=INK, colour=INK, size=9, line=0.8, **more):
    """A rectangle by its lower left corner, with words in its middle."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=line, **more))
    if words:
        text(axes, x + width / 2, y + height / 2, words, size=size, colour=colour)


def arrow(axes, start, end, *, colour=GREY, bend=0.0, line=1.1, style="-|>", **more):
    """An arrow between two places."""
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
    """One of six colours: neighbouring lanes differ."""
    return COLOURS[lane % len(COLOURS)]


def ink_on(fill):
    """White or dark ink, whichever can be read on a colour."""
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"
