"""Figure of a layer's kernel time per variant, relative to a base variant."""

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, WIDTH, Picture
from moe_numba.course.draw.canvas import box, canvas, check_range, ink_on, note, text


def layer_bars(times: dict, base: str, *, title: str = "", caption: str = "") -> Picture:
    """Draw the times of variants relative to ``base``, a group of bars per size.

    Parameters
    ----------
    times : dict
        ``{size: {variant: microseconds}}``; at most 10 sizes and 3 variants besides the base.
    base : str
        The variant whose time is 100 %.
    """
    names = [name for name in next(iter(times.values())) if name != base]
    check_range("the number of sizes", len(times), 1, 10)
    check_range("the number of variants", len(names), 1, 3)
    figure, axes = canvas(WIDTH, 3.9, title)
    left, bottom, width, tall = 0.75, 0.95, WIDTH - 0.95, 1.95
    parts = {size: {name: own[name] / own[base] for name in names} for size, own in times.items()}
    largest = max([1.0, *(part for own in parts.values() for part in own.values())]) * 1.02
    group = width / len(times)
    colours = dict(zip(names, (BLUE, ORANGE, GREEN), strict=False))
    axes.plot([left, left + width], [bottom, bottom], color=INK, linewidth=0.8)
    for place, (size, own) in enumerate(times.items()):
        x, wide = left + place * group, 0.8 * group / len(names)
        for at, name in enumerate(names):
            part = parts[size][name]
            start = x + 0.1 * group + at * wide
            box(axes, start, bottom, 0.94 * wide, tall * part / largest, fill=colours[name], edge="none", label="part")
            text(
                axes,
                start + 0.47 * wide,
                bottom + tall * part / largest - 0.12,
                f"{100 * (part - 1):+.1f}",
                size=7.5,
                colour=ink_on(colours[name]),
            )
        text(axes, x + group / 2, bottom - 0.14, str(size), size=8.5)
        text(axes, x + group / 2, bottom - 0.32, f"{own[base]:.0f} us", size=8, colour=GREY)
    y = bottom + tall / largest
    axes.plot([left, left + width], [y, y], color=PALE, linewidth=1.1, linestyle="--", label="base", zorder=0)
    text(axes, 0.6, y, "100 %", size=8, colour=GREY, ha="right")
    text(axes, left - 0.08, bottom - 0.14, "tokens", size=8, colour=GREY, ha="right")
    text(axes, left - 0.08, bottom - 0.32, "before", size=8, colour=GREY, ha="right")
    x = left
    for name in names:
        box(axes, x, 3.22, 0.16, 0.16, fill=colours[name], edge="none")
        text(axes, x + 0.24, 3.3, name, size=8.5, ha="left")
        x += 2.6
    note(axes, 0.15, 0.4, f"Kernel time relative to '{base}'; numbers in bars: difference in percent.")
    text(axes, 0.15, 0.15, caption, size=7.5, colour=GREY, ha="left")
    return figure
