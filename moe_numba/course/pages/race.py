"""The moving picture of README.md: a kernel with a race, its report, the missing line, and the right result."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = "docs/figures/race.svg"
FILE = "reverse.py"
BARRIER = "    cuda.syncthreads()"
KERNEL = """\
@cuda.jit
def reverse(x):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    x[i] = tile[63 - i]
"""
PROGRAM = """\
import numpy as np
from numba import cuda, float32

{kernel}
x = np.arange(64, dtype=np.float32)
reverse[1, 64](x)
print("right:" if (x == np.arange(64)[::-1]).all() else "wrong:", *x[:8].astype(int), "...")
"""
FIRST_LINE = PROGRAM.partition("{kernel}")[0].count("\n") + 1  # of the kernel in the file

# Narrow, so that a phone shows letters of at least 9 pixels.
WIDTH, MARGIN, LINE, SIZE, COLUMNS = 480, 14, 18, 13, 56
SECONDS, REPORT = 15, 1.5  # of the animation, and when the report appears
INK, GREY, RED, GREEN, PAPER, EDGE = "#e6edf3", "#8b949e", "#ff7b72", "#56d364", "#0d1117", "#30363d"


class Line(NamedTuple):
    """A line of text; it appears after ``start`` seconds of the animation."""

    text: str
    colour: str = INK
    start: float = 0.0


def run(kernel: str) -> str:
    """Return what the simulator prints last for the program with a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, FILE).write_text(PROGRAM.format(kernel=kernel))
        done = subprocess.run(
            [sys.executable, "-m", "moe_numba.simulator", "run", FILE],
            cwd=folder,
            env={**os.environ, "MOE_NUMBA_SIMULATE": "1"},
            capture_output=True,
            text=True,
        )
    report = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]
    return report.removeprefix("moe_numba.simulator.core.errors.")


def repaired() -> str:
    """Return the kernel with the barrier between its last two lines."""
    *before, last = KERNEL.splitlines()
    return "\n".join([*before, BARRIER, last]) + "\n"


def picture() -> str:
    """Return the animation as SVG. Viewers without animations show its last frame, which has everything."""
    race, right = run(KERNEL), run(repaired())
    command = f"$ python -m moe_numba.simulator run {FILE}"
    lines = []
    numbers = iter(range(FIRST_LINE, FIRST_LINE + KERNEL.count("\n")))  # as the report names the lines
    for text in repaired().splitlines():
        if text == BARRIER:
            lines.append(Line(f"  + {text}", GREEN, 8.5))
        else:
            lines.append(Line(f"{next(numbers):>3} {text}"))
    lines += [Line(""), Line(command, GREY, 0.5)]
    lines += [Line(text, RED, REPORT) for text in textwrap.wrap(race, COLUMNS)]
    lines += [Line(""), Line(command, GREY, 10), Line(right, GREEN, 11.5)]
    height = 2 * MARGIN + LINE * len(lines) - 4
    starts = sorted({line.start for line in lines if line.start})
    frames = "".join(
        f"@keyframes at{n}{{0%,{100 * s / SECONDS - 0.01:.2f}%{{opacity:0}}{100 * s / SECONDS:.2f}%,100%{{opacity:1}}}}"
        f".at{n}{{animation:at{n} {SECONDS}s infinite}}"
        for n, s in enumerate(starts)
    )
    texts = "".join(
        f'<text x="{MARGIN}" y="{MARGIN + LINE * n + SIZE}" fill="{line.colour}"'
        + (f' class="at{starts.index(line.start)}"' if line.start else "")
        + f' xml:space="preserve">{escape(line.text)}</text>\n'
        for n, line in enumerate(lines)
        if line.text
    )
    # A bar beside each line that the report names as an access.
    shown = f'class="at{starts.index(REPORT)}"'
    named = {int(number) for number in re.findall(rf"at reverse, {FILE}:(\d+)", race)}
    bars = "".join(
        f'<rect x="5" y="{MARGIN + LINE * n + 2}" width="3" height="{LINE - 4}" fill="{RED}" {shown}/>\n'
        for n, line in enumerate(lines[: repaired().count("\n")])
        if line.text[:3].strip().isdigit() and int(line.text[:3]) in named
    )
    title = escape(f"A kernel with a race; the simulator says: {race}. With the barrier it prints: {right}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,\'DejaVu Sans Mono\',monospace" '
        f'font-size="{SIZE}">\n<title>{title}</title>\n'
        f"<style>@media (prefers-reduced-motion: no-preference){{{frames}}}</style>\n"
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{EDGE}"/>\n'
        f"{bars}{texts}</svg>\n"
    )
