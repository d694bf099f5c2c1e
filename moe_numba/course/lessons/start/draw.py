"""Figure of calls on the CPU and kernels on the GPU over time."""

from collections.abc import Mapping

import matplotlib

from moe_numba.course.bench.figures.plots import Picture
from moe_numba.course.bench.figures.style import BLUE, GREY, INK, ORANGE, STYLE, WIDTH


def schedule(call_us: float | None, kernel_us: float, calls: int) -> list[tuple[float, float]]:
    """Return (start, end) of the kernels of consecutive calls, in microseconds from the first call.

    A kernel starts when its call has returned and the previous kernel has ended. With ``call_us`` None a CUDA graph
    launches the kernels, without calls.
    """
    found, free = [], 0.0
    for number in range(calls):
        start = max((number + 1) * call_us if call_us else 0.0, free)
        free = start + kernel_us
        found.append((start, free))
    return found


def call_timeline(cases: Mapping[str, tuple[float | None, float]], caption: str = "", calls: int = 4):
    """Draw consecutive calls: a row of calls on the CPU and a row of kernels on the GPU for each case.

    Parameters
    ----------
    cases : dict
        Label -> (call time, kernel time) in microseconds; call time None for a CUDA graph.
    caption : str
    calls : int
        Consecutive calls per case.

    Returns
    -------
    Figure
    """
    with matplotlib.rc_context(STYLE):
        height = 0.95 * len(cases) + 1.1
        figure = Picture(figsize=(WIDTH, height))
        axes = figure.add_axes((0.27, 0.62 / height, 0.71, 1 - 1.05 / height))
        names, ends = [], []
        for case, (label, (call_us, kernel_us)) in enumerate(cases.items()):
            cpu_y, gpu_y = 2.6 * case, 2.6 * case + 1
            kernels = schedule(call_us, kernel_us, calls)
            for number, (start, end) in enumerate(kernels):
                axes.barh(gpu_y, end - start, left=start, height=0.8, color=BLUE, edgecolor="white")
                if call_us:
                    axes.barh(cpu_y, call_us, left=number * call_us, height=0.8, color=ORANGE, edgecolor="white")
            ends.append(kernels[-1][1])
            text = f" {max(call_us or 0, kernel_us):.1f} µs per call in a long run"
            axes.annotate(text, (ends[-1], gpu_y), va="center", fontsize=8.5)
            names += [(cpu_y, f"{label}:  CPU" if call_us else f"{label}:"), (gpu_y, "GPU")]
        axes.set_yticks(*zip(*names), color=INK)
        axes.set_ylim(2.6 * len(cases) - 1, -0.7)
        axes.set_xlim(0, 1.4 * max(ends))
        axes.set_xlabel("µs")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        title = f"{calls} consecutive calls: the CPU calls (orange), the GPU runs kernels (blue)"
        figure.text(0.01, 0.985, title, va="top", fontsize=12, fontweight="bold")
        figure.text(0.01, 0.02, caption, fontsize=7.5, color=GREY)
    return figure
