"""Figure of the kernels that one call launches, over time."""

import re
from collections.abc import Mapping, Sequence

from moe_numba.course.bench.figures.style import BLUE, GREY, INK, ORANGE, WIDTH
from moe_numba.course.draw.canvas import box, canvas, ink_on, note, plural, text

_SEARCH = re.compile(r"topk|sort|radix|kthvalue|median", re.IGNORECASE)


def is_search(kernel: str) -> bool:
    """Whether a kernel of torch selects or sorts, by its name."""
    return bool(_SEARCH.search(kernel))


def launch_timeline(calls: Mapping[str, Sequence[tuple[str, float, float]]], title: str, caption: str = ""):
    """Draw the kernels of each call as bars on a common time axis, to scale; kernels that select or sort are orange.

    Parameters
    ----------
    calls : dict
        Name -> kernels as (name, start, duration) in microseconds; see `launch_profile`.
    title, caption : str

    Returns
    -------
    Figure
    """
    longest = max(start + duration for kernels in calls.values() for _, start, duration in kernels)
    left, tall = 1.5, 0.34
    height = 1.55 + 0.62 * len(calls)
    figure, axes = canvas(WIDTH, height, title)
    scale = (WIDTH - left - 0.3) / longest
    for number, (name, kernels) in enumerate(calls.items()):
        y = height - 1.0 - 0.62 * number
        count, busy = plural(len(kernels), "kernel"), sum(duration for *_, duration in kernels)
        text(axes, left - 0.12, y + 0.25, name, ha="right")
        text(axes, left - 0.12, y + 0.06, f"{count}, {busy:.3g} µs", ha="right", size=8, colour=GREY)
        for kernel, start, duration in kernels:
            fill = ORANGE if is_search(kernel) else BLUE
            words = kernel if scale * duration > 0.075 * len(kernel) + 0.1 else ""
            is_wide = scale * duration > 0.05  # a white edge would hide a narrow bar
            style = {
                "fill": fill,
                "colour": ink_on(fill),
                "edge": "white" if is_wide else fill,
                "line": 0.5,
                "size": 7.5,
            }
            box(axes, left + scale * start, y, max(scale * duration, 0.012), tall, words, label="kernel", **style)
    axis = 0.82
    axes.plot([left, left + scale * longest], [axis, axis], color=GREY, linewidth=0.8)
    unit = _tick(longest)
    for tick in range(int(longest / unit) + 1):
        x = left + scale * unit * tick
        axes.plot([x, x], [axis - 0.05, axis], color=GREY, linewidth=0.8)
        text(axes, x, axis - 0.16, f"{unit * tick:g}", size=8, colour=GREY)
    text(axes, left - 0.12, axis - 0.16, "µs", size=8, colour=GREY, ha="right")
    for x, fill, words in ((left, ORANGE, "kernels that select or sort"), (left + 2.4, BLUE, "all others")):
        box(axes, x, 0.33, 0.14, 0.14, fill=fill, edge="white")
        text(axes, x + 0.2, 0.4, words, ha="left", size=8.5, colour=INK)
    if caption:
        note(axes, 0.15, 0.12, caption)
    return figure


def _tick(longest):
    """Return a round distance of ticks, so that there are 3 to 8 of them."""
    unit = 10.0 ** len(str(int(longest)))
    return next(unit / n for n in (1, 2, 5, 10, 20, 50, 100) if longest * n / unit >= 3)
