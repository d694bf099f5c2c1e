"""Figures of Hopper's instructions: swizzle, wgmma descriptor, accumulator fragment, mbarriers and rings."""

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, SKY, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, cell, check_range, ink_on, note, plural, text, tint
from moe_numba.course.lessons.hopper.draw_kernel import multicast, roles, tile, timeline
from moe_numba.course.lessons.hopper.draw_time import barrier_life, ring, ring_spans

__all__ = [
    "banks",
    "barrier_life",
    "descriptor",
    "descriptor_fields",
    "fragment",
    "holder",
    "multicast",
    "problem",
    "ring",
    "ring_spans",
    "roles",
    "swizzle",
    "tile",
    "timeline",
]

CHUNK_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, "#8C8C8C", "#F0E442")  # one for each chunk of a row


def problem():
    """Draw what Hopper adds: a copy engine, barriers that count bytes, tensor cores that read shared memory."""
    figure, axes = canvas(WIDTH, 3.9, "An SM before Hopper, and on Hopper")
    middle = WIDTH / 2
    axes.plot([middle, middle], [0.68, 3.4], color=PALE, linewidth=1)
    for x, name, new in (
        (0.2, "before: threads copy all data", False),
        (middle + 0.2, "Hopper: threads issue copies, and wait", True),
    ):
        text(axes, x, 3.4, name, ha="left", weight="bold", colour=BLUE)
        wide = middle - 0.4
        box(axes, x, 2.75, wide, 0.36, "global memory and L2 cache", fill=tint(GREY))
        box(axes, x, 1.75, wide, 0.36, "shared memory", fill=tint(SKY))
        box(axes, x, 0.75, wide, 0.36, "tensor cores", fill=tint(GREEN))
        at = x + wide * 0.3
        if new:
            box(axes, at - 0.42, 2.27, 0.84, 0.32, "TMA", fill=ORANGE)
            arrow(axes, (at, 2.75), (at, 2.59), colour=INK), arrow(axes, (at, 2.27), (at, 2.11), colour=INK)
            arrow(axes, (at, 1.75), (at, 1.11), colour=INK, label="direct")
            box(axes, x + wide - 1.62, 2.27, 1.6, 0.32, "one thread issues", fill=tint(ORANGE))
            arrow(axes, (x + wide - 1.62, 2.43), (at + 0.42, 2.43))
            box(axes, x + wide - 1.62, 1.27, 1.6, 0.32, "four warps issue", fill=tint(ORANGE))
            arrow(axes, (x + wide - 1.62, 1.43), (at + 0.06, 1.43))
            text(axes, at - 0.5, 2.43, "one box", size=8, colour=GREY, ha="right")
            text(axes, at - 0.1, 1.43, "64 x n x 32 B", size=8, colour=GREY, ha="right")
        else:
            for y, words in ((2.27, "registers of 32 lanes"), (1.27, "registers of 32 lanes")):
                box(axes, at - 0.8, y, 1.6, 0.32, words, fill=tint(ORANGE), size=8.5)
                arrow(axes, (at, y + 0.48), (at, y + 0.32), colour=INK)
                arrow(axes, (at, y), (at, y - 0.16), colour=INK)
            text(axes, at + 0.95, 2.43, "16 bytes a lane", size=8, colour=GREY, ha="left")
            text(axes, at + 0.95, 1.43, "ldmatrix, then mma", size=8, colour=GREY, ha="left")
    note(
        axes,
        0.2,
        0.4,
        "Orange: the unit that moves the bytes. An mbarrier in shared memory signals that a copy is complete: "
        "it counts arrivals, and bytes.",
    )
    return figure


def swizzle(rows=8, column=0):
    """Draw rows of eight 16-byte chunks without and with the 128-byte swizzle, coloured by chunk.

    ``column`` is the highlighted chunk: one column without the swizzle, all columns with it.
    """
    check_range("rows", rows, 8, 16)
    check_range("column", column, 0, 7)
    tall, wide, left = 0.27, 0.47, 0.75
    height = rows * tall + 1.65
    figure, axes = canvas(WIDTH, height, "The 128-byte swizzle: chunk c of row r is stored at c xor (r mod 8)")
    right, top = left + 8 * wide + 0.55, height - 0.95
    for x, name in ((left, "without the swizzle"), (right, "with the swizzle")):
        text(axes, x, top + 0.34, name, ha="left", weight="bold")
        for chunk in range(8):
            text(axes, x + (chunk + 0.5) * wide, top + 0.12, f"{16 * chunk}", size=7, colour=GREY)
    for row in range(rows):
        y = top - (row + 1) * tall
        text(axes, left - 0.1, y + tall / 2, f"row {row}", size=8, colour=GREY, ha="right")
        for chunk in range(8):
            for x, place, name in ((left, chunk, "before"), (right, chunk ^ row % 8, "after")):
                own = chunk == column
                fill = CHUNK_COLOURS[chunk] if own else tint(CHUNK_COLOURS[chunk], 0.35)
                cell(
                    axes,
                    x + place * wide,
                    y,
                    wide,
                    tall,
                    chunk,
                    fill=fill,
                    edge=WHITE,
                    size=8,
                    label=name,
                    colour=None if own else INK,
                )
    bottom = top - rows * tall
    for x, swizzled in ((left, False), (right, True)):
        used = len(banks(column, swizzled))
        wavefronts = plural(32 // used, "wavefront")
        words = f"chunk {column} of 8 rows: {used} of 32 banks, {wavefronts}"
        text(axes, x, bottom - 0.2, words, ha="left", size=8.5)
    note(axes, 0.15, 0.15, "A box is a chunk of 16 bytes, four banks wide. Number and colour: its index in its row.")
    return figure


def banks(column, swizzled):
    """Return the shared-memory banks of one chunk in each of 8 rows of 128 bytes."""
    places = [(row, column ^ row if swizzled else column) for row in range(8)]
    return {(128 * row + 16 * place + byte) // 4 % 32 for row, place in places for byte in range(16)}


def descriptor_fields(value):
    """Decode a wgmma descriptor: name, first bit, bits, field and meaning; see the PTX ISA."""
    fields = (
        ("address", 0, 14, 16),
        ("leading bytes", 16, 14, 16),
        ("stride bytes", 32, 14, 16),
        ("base", 49, 3, 1),
        ("swizzle", 62, 2, 1),
    )
    modes = {0: "none", 1: "128 bytes", 2: "64 bytes", 3: "32 bytes"}
    parts = []
    for name, first, bits, unit in fields:
        field = int(value) >> first & (1 << bits) - 1
        parts.append((name, first, bits, field, modes[field] if name == "swizzle" else field * unit))
    return parts


def descriptor(value):
    """Draw the 64 bits of a wgmma descriptor, bit 63 on the left, with their fields."""
    figure, axes = canvas(WIDTH, 2.75, f"A wgmma descriptor: {int(value):#018x}")
    wide, left, tall, colours = 0.262, 0.15, 0.26, dict(zip((62, 49, 32, 16, 0), (RED, GREY, GREEN, SKY, BLUE)))
    parts = {first: (name, bits, field, means) for name, first, bits, field, means in descriptor_fields(value)}
    for half, y in ((1, 1.62), (0, 0.62)):
        for bit in range(32 * half, 32 * half + 32):
            first = next((f for f, (_, bits, *_) in parts.items() if f <= bit < f + bits), None)
            x, set_ = left + (32 * half + 31 - bit) * 1.06 * wide, int(value) >> bit & 1
            fill = WHITE if first is None else colours[first] if set_ else tint(colours[first])
            cell(
                axes,
                x,
                y,
                wide,
                tall,
                set_,
                fill=fill,
                edge=PALE if first is None else colours[first],
                size=7.5,
                colour=GREY if first is None else None,
                label="bit",
            )
            if bit % 4 == 0 or bit in (62, 49):
                text(axes, x + wide / 2, y - 0.1, str(bit), size=6, colour=GREY)
        for first, (name, bits, _field, means) in parts.items():
            if first // 32 == half:
                x0, x1 = (left + (32 * half + 31 - b) * 1.06 * wide for b in (first + bits - 1, first))
                text(
                    axes,
                    x1 + wide if half and bits < 4 and first > 60 else (x0 + x1 + wide) / 2,
                    y + tall + 0.13,
                    f"{name}: {means}",
                    size=8,
                    ha="center" if bits > 3 else "right" if first < 60 else "left",
                )
                axes.plot([x0, x1 + wide], [y + tall + 0.03] * 2, color=colours[first], linewidth=1.6)
    note(
        axes,
        0.15,
        0.15,
        "Addresses and strides are in units of 16 bytes. Bits without a colour are zero. "
        "The next instruction along k adds 2.",
    )
    return figure


def holder(row, column):
    """Return the thread of the warpgroup that holds an element of a 64 x n accumulator, and the fragment index."""
    warp, low = divmod(row, 16)
    h, quad = divmod(low, 8)
    j, inside = divmod(column, 8)
    return 32 * warp + 4 * quad + inside // 2, 4 * j + 2 * h + inside % 2


def fragment(lane=5):
    """Draw which thread holds which element of a 64 x 16 accumulator; one lane's elements are outlined."""
    check_range("lane", lane, 0, 31)
    figure, axes = canvas(WIDTH, 5.05, "wgmma accumulator fragment of a 64 x 16 tile")
    top, small, left = 4.2, 0.054, 0.82
    for warp in range(4):
        y, fill = top - (warp + 1) * 16 * small, tint((BLUE, ORANGE, GREEN, RED)[warp])
        box(axes, left, y, 16 * small, 16 * small, fill=fill, edge=WHITE, label="warp")
        text(axes, left - 0.08, y + 8 * small, f"rows {16 * warp} on", size=7, colour=GREY, ha="right")
        text(axes, left + 8 * small, y + 8 * small, f"warp {warp}", size=8)
    text(axes, left + 8 * small, top + 0.15, "4 warps", weight="bold")
    x0, wide, tall = 2.55, 0.405, 0.222
    arrow(axes, (left + 16 * small + 0.08, top - 8 * small), (x0 - 0.42, top - 8 * small))
    words = f"warp 0: lane, and in small print the fragment index; dark: lane {lane}"
    text(axes, x0, top + 0.38, words, ha="left", weight="bold", size=8.5)
    for row in range(16):
        text(axes, x0 - 0.08, top - (row + 0.5) * tall, str(row), size=7, colour=GREY, ha="right")
        for column in range(16):
            thread, number = holder(row, column)
            fill = BLUE if thread == lane else tint(BLUE, 0.12 + 0.3 * ((thread + thread // 4) % 2))
            x, y = x0 + column * wide, top - (row + 1) * tall
            box(axes, x, y, wide, tall, fill=fill, edge=WHITE, label="held" if thread == lane else "element")
            text(axes, x + 0.36 * wide, y + tall / 2, str(thread), size=7.5, colour=ink_on(fill))
            text(axes, x + 0.75 * wide, y + 0.36 * tall, str(number), size=5.5, colour=ink_on(fill))
            if row == 0:
                text(axes, x + wide / 2, top + 0.11, str(column), size=7, colour=GREY)
    note(axes, 0.15, 0.2, "d[4 j + 2 h + i] of lane l in warp w: row 16 w + l // 4 + 8 h, column 8 j + 2 (l % 4) + i.")
    return figure
