"""Drawing primitives of the teaching pictures: boxes, text, arrows and cells on a page measured in inches.

Coordinates count from the lower left corner, so that text and boxes can be given sizes that fit each other.
"""

import matplotlib
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyArrowPatch, Rectangle

from moe_numba.course.bench.style import COLOURS, GREY, INK, STYLE, Picture

WHITE = "#FFFFFF"


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


def check_range(name, value, least, most):
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, but a picture has room for {least} to {most}")


def tint(colour, part=0.28):
    """A colour thinned with white, so that dark words can be read on it."""
    return to_hex([1 - part * (1 - channel) for channel in to_rgb(colour)])


def cell(axes, x, y, wide, tall, value, small="", *, fill=WHITE, edge=INK, colour=None, size=9, label="cell"):
    """A box around a value; below the value, in small print, where it comes from."""
    colour, words = colour or ink_on(fill), "" if small else str(value)
    box(axes, x, y, wide, tall, words, fill=fill, edge=edge, colour=colour, size=size, label=label)
    if small:
        text(axes, x + wide / 2, y + 0.68 * tall, str(value), size=size, colour=colour)
        text(axes, x + wide / 2, y + 0.25 * tall, small, size=6.5, colour=colour)


def plural(n, what):
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
