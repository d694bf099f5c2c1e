"""Figures of prefix sums: Blelloch's scan and a two-level block scan."""

import numpy as np

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, PALE, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, canvas, cell, check_range, lane_colour, note, plural, text, tint


def blelloch_steps(values):
    """Compute Blelloch's scan: two sweeps of (name, numbers, pairs (ai, bi), meaning of each stored number)."""
    a, offset = list(values), 1
    up = [("start", list(a), [], {})]
    while offset < len(a):
        pairs = [(i + offset - 1, i + 2 * offset - 1) for i in range(0, len(a), 2 * offset)]
        stored = {bi: f"{a[ai]} + {a[bi]}" for ai, bi in pairs}
        for ai, bi in pairs:
            a[bi] += a[ai]
        up.append((f"up, stride {offset}", list(a), pairs, stored))
        offset *= 2
    a[-1] = 0
    down = [("zero the last", list(a), [], {len(a) - 1: "zero"})]
    while offset > 1:
        offset //= 2
        pairs = [(i + offset - 1, i + 2 * offset - 1) for i in range(0, len(a), 2 * offset)]
        stored = {ai: f"tree[{bi}]" for ai, bi in pairs} | {bi: f"{a[ai]} + {a[bi]}" for ai, bi in pairs}
        for ai, bi in pairs:
            a[ai], a[bi] = a[bi], a[ai] + a[bi]
        down.append((f"down, stride {offset}", list(a), pairs, stored))
    return up, down


def blelloch(values):
    """Draw Blelloch's exclusive scan of 2, 4 or 8 numbers: the up-sweep on the left, the down-sweep on the right."""
    n = len(values)
    if n not in (2, 4, 8):
        raise ValueError(f"values has {n} numbers, but must have 2, 4 or 8")
    sweeps = blelloch_steps(values)
    rows, step, tall, wide = len(sweeps[0]), 0.82, 0.37, 3.5 / n
    top = 0.3 + step * rows
    title = f"Blelloch's scan of {n} numbers: {plural(rows - 1, 'step')} up, {plural(rows - 1, 'step')} down"
    figure, axes = canvas(WIDTH, top + 0.7, title)
    heads = "up: tree[right] += tree[right - stride]", "down: tree[right - stride] = tree[right]; tree[right] += left"
    for side, (sweep, head) in enumerate(zip(sweeps, heads, strict=True)):
        left = 0.15 + side * (WIDTH / 2)
        x = [left + 0.92 + (i + 0.5) * wide for i in range(n)]
        text(axes, left, top + 0.15, head, ha="left", weight="bold", size=8.5)
        for row, (name, numbers, pairs, stored) in enumerate(sweep):
            y = top - 0.28 - tall - row * step
            text(axes, left, y + tall - 0.08, name, ha="left", size=8.5)
            listed = [" ".join(f"({ai},{bi})" for ai, bi in pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
            text(axes, left, y + tall - 0.2, "\n".join(listed), ha="left", va="top", size=7, colour=GREY)
            for i, number in enumerate(numbers):
                small = stored.get(i, "")
                fill = tint(GREEN if small.startswith("tree[") else BLUE if "+" in small else GREY) if small else WHITE
                cell(
                    axes,
                    x[i] - 0.46 * wide,
                    y,
                    0.92 * wide,
                    tall,
                    number,
                    small,
                    fill=fill,
                    edge=INK if small or row == 0 else PALE,
                    label="stored" if small else "cell",
                )
                if row == 0:
                    text(axes, x[i], top - 0.17, str(i), size=7.5, colour=GREY)
                elif not small:
                    axes.plot([x[i]] * 2, [y + tall, y + step], color=PALE, linewidth=0.9, zorder=0)
            for ai, bi in pairs:
                arrow(axes, (x[ai], y + step), (x[bi], y + tall), colour=BLUE, label="add")
                arrow(axes, (x[bi], y + step), (x[bi], y + tall), colour=BLUE, label="add")
                if side:
                    arrow(axes, (x[bi], y + step), (x[ai], y + tall), colour=GREEN, label="copy")
    note(
        axes,
        0.15,
        0.15,
        "Coloured: the elements that a step stores. Blue: a sum. Green: a copy. A CTA-wide barrier follows each step.",
    )
    return figure


def two_level_scan(warps=4, lanes=4, seed=0):
    """Draw a block scan made of warp scans, for ``warps`` warps of ``lanes`` lanes and random numbers from 1 to 9."""
    check_range("lanes", lanes, 2, 8)
    check_range("warps", warps, 2, min(lanes, 24 // lanes))
    values = np.random.default_rng(seed).integers(1, 10, (warps, lanes))
    inside, sums = values.cumsum(1), values.sum(1)
    before = sums.cumsum() - sums
    figure, axes = canvas(WIDTH, 4.4, f"A two-level scan: {warps} warps of {lanes} lanes, two barriers")
    left, gap, tall = 1.75, 0.16, 0.29
    wide = (WIDTH - left - 0.15 - gap * (warps - 1)) / (warps * lanes)
    start_y, inside_y, sums_y, before_y, last_y = 3.5, 2.95, 1.93, 1.48, 0.4
    names = {
        start_y: ("counts", ""),
        inside_y: ("1. all warps", "scan their counts"),
        sums_y: ("2. warp 0", "reads the sums"),
        before_y: ("", "scans them"),
        last_y: ("3. all warps", "add their offset"),
    }
    for y, (name, quiet) in names.items():
        text(axes, 0.15, y + tall / 2 + (0.09 if quiet else 0), name, ha="left", weight="bold", size=8.5)
        text(axes, 0.15, y + tall / 2 - (0.09 if name else 0), quiet, ha="left", colour=GREY, size=8)
    for w in range(warps):
        first, middle_x, colour = left + w * (lanes * wide + gap), left + (w + 0.5) * wide, lane_colour(w)
        middle, last = first + lanes * wide / 2, first + (lanes - 0.5) * wide
        text(axes, middle, start_y + tall + 0.14, f"warp {w}", size=8.5, colour=GREY)
        for lane in range(lanes):
            x = first + lane * wide
            cell(axes, x, start_y, wide, tall, values[w, lane])
            cell(axes, x, inside_y, wide, tall, inside[w, lane], fill=tint(colour))
            cell(axes, x, last_y, wide, tall, inside[w, lane] + before[w], fill=tint(colour), label="result")
        text(axes, last + wide / 2, inside_y - 0.12, f"sum {sums[w]}", size=8, ha="right")
        arrow(axes, (last, inside_y - 0.22), (middle_x, sums_y + tall), colour=colour, label="sum")
        cell(axes, middle_x - wide / 2, sums_y, wide, tall, sums[w], fill=colour)
        cell(axes, middle_x - wide / 2, before_y, wide, tall, before[w], fill=colour)
        arrow(axes, (middle_x, before_y), (middle, last_y + tall + 0.21), colour=colour, label="before")
        text(axes, middle, last_y + tall + 0.11, f"+ {before[w]}", size=8)
    for y in (2.4, 1.16):
        axes.plot([0.15, WIDTH - 0.15], [y, y], color=INK, linewidth=1.2, linestyle="--", label="barrier")
        text(axes, 0.15, y + 0.09, "barrier", ha="left", size=8)
    note(
        axes,
        0.15,
        0.15,
        "Colour: the warp. No barrier inside a warp. A third barrier follows if other threads read the result.",
    )
    return figure
