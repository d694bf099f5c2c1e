"""Figure of kernels divided into phases: where the time of each version goes."""

from collections.abc import Mapping, Sequence

from moe_numba.course.bench.figures.style import COLOURS, GREY, INK, ROW, WIDTH
from moe_numba.course.draw.canvas import box, canvas, check_range, ink_on, note, text

_LEFT, _RIGHT, _NOTES, _BAR = 1.9, 0.9, 2.1, 0.26
_WIDE = 0.3  # inches of a phase that has room for its time; that of a shorter one stands after the bar


def phase_bars(
    versions: Mapping[str, Mapping[str, float]], title: str, caption: str = "", phases: Sequence[str] | None = None
):
    """Draw a bar for each version, divided into its phases, to scale from zero.

    Each phase has its time written in it, or after the bar if it is too short.

    Parameters
    ----------
    versions : dict
        Version -> phase -> microseconds. A phase keeps its colour in all versions; at most seven phases.
    title, caption : str
    phases : sequence of str, optional
        All phases, in the order of their colours: figures with the same order have the same colours. By default they
        are in the order in which they first occur.

    Returns
    -------
    Figure
    """
    phases = list(dict.fromkeys([*(phases or ()), *(phase for parts in versions.values() for phase in parts)]))
    check_range("the number of versions", len(versions), 1, 16)
    check_range("the number of phases", len(phases), 1, len(COLOURS))
    for version, parts in versions.items():
        for phase, us in parts.items():
            if us < 0:
                raise ValueError(f"{phase} of {version} takes {us} us; a phase takes zero or more")
    longest = max(sum(parts.values()) for parts in versions.values())
    if longest == 0:
        raise ValueError("no phase takes any time")
    height = ROW * len(versions) + 1.15
    figure, axes = canvas(WIDTH, height, title)
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    if any(0 < scale * us < _WIDE for parts in versions.values() for us in parts.values()):
        scale = (WIDTH - _LEFT - _RIGHT - _NOTES) / longest
    for number, (version, parts) in enumerate(versions.items()):
        y, x = height - 0.85 - ROW * number, _LEFT
        text(axes, _LEFT - 0.12, y + _BAR / 2, version, ha="right")
        for phase, us in parts.items():
            colour = COLOURS[phases.index(phase)]
            words = f"{us:.3g}" if scale * us >= _WIDE else ""
            box(axes, x, y, scale * us, _BAR, words, fill=colour, edge="white", colour=ink_on(colour), size=8)
            x += scale * us
        text(axes, x + 0.08, y + _BAR / 2, f"{sum(parts.values()):.3g} µs", ha="left", colour=INK)
        if short := [f"{phase} {us:.2g}" for phase, us in parts.items() if 0 < scale * us < _WIDE]:
            text(axes, x + 0.72, y + _BAR / 2, ", ".join(short), ha="left", size=8, colour=GREY)
    _legend(axes, phases)
    if caption:
        note(axes, 0.15, 0.12, caption)
    return figure


def _legend(axes, phases):
    each = (WIDTH - 0.3) / len(phases)
    for number, phase in enumerate(phases):
        x = 0.15 + each * number
        box(axes, x, 0.34, 0.14, 0.14, fill=COLOURS[number], edge="white")
        text(axes, x + 0.2, 0.41, phase, ha="left", size=8.5, colour=GREY)
