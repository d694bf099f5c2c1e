"""Figures of block scales and 4-bit weights: factors of a thread, pairs of tiles, tiles over time, packed codes."""

from collections import Counter

from matplotlib.ticker import MaxNLocator

from moe_numba.course.bench.figures.style import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PALE, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, cell, check_range, ink_on, note, plural, text, tint
from moe_numba.course.lessons.grouped_gemm_scales.tile_traces import pairs_of

__all__ = ["decoding", "factors", "pairs", "tile_bytes", "tile_times"]

_ROWS, _COLUMNS = 16, 24  # of a warp's accumulators that figures show


def factors(lane):
    """Draw the accumulators of a lane in 16 rows and 24 columns, and the scales they need, with rows of x as either."""
    check_range("lane", lane, 0, 31)
    figure, axes = canvas(WIDTH, 4.35, f"Scales that lane {lane} needs for one wgmma")
    side, top = 0.148, 3.3
    rows = lane // 4, lane // 4 + 8
    columns = [8 * j + 2 * (lane % 4) + i for j in range(_COLUMNS // 8) for i in range(2)]
    for left, title in ((0.75, "rows of x are columns"), (5.35, "rows of x are rows")):
        as_rows = title.endswith("rows")
        text(axes, left + _COLUMNS * side / 2, top + 0.48, title, weight="bold")
        for row in range(_ROWS):
            for column in range(_COLUMNS):
                own = row in rows and column in columns
                fill, label = (BLUE, "own") if own else (tint(BLUE, 0.12), "other")
                x, y = left + column * side, top - (row + 1) * side
                box(axes, x, y, side, side, fill=fill, edge=WHITE, line=0.5, label=label)
        if as_rows:
            box(axes, left, top + 0.1, _COLUMNS * side, side, fill=GREEN, edge=WHITE, label="factor")
            text(axes, left - 0.3, top + 0.2, "weight", size=8, colour=GREY, ha="right")
            for row in range(_ROWS):
                fill, label = (ORANGE, "factor") if row in rows else (tint(ORANGE, 0.2), "unused")
                y = top - (row + 1) * side
                box(axes, left - 0.1 - side, y, side, side, fill=fill, edge=WHITE, line=0.5, label=label)
            text(axes, left - 0.3, top - 8 * side, "x", size=8, colour=GREY, ha="right")
            words = "2 scales of x; 1 of weight per 128 rows of weight"
        else:
            for column in range(_COLUMNS):
                fill, label = (ORANGE, "factor") if column in columns else (tint(ORANGE, 0.2), "unused")
                box(axes, left + column * side, top + 0.1, side, side, fill=fill, edge=WHITE, line=0.5, label=label)
            text(axes, left - 0.08, top + 0.2, "x scale ×\nweight scale", size=6.5, colour=GREY, ha="right")
            words = f"{len(columns)} scales for {_COLUMNS} columns: one per column of the lane"
        text(axes, left + _COLUMNS * side / 2, top - _ROWS * side - 0.2, words, size=8.5)
    note(
        axes,
        0.15,
        0.2,
        "Squares: accumulators of warp 0; dark: those of the lane. Strips: scales; dark: those it loads.",
    )
    return figure


def pairs(rows, n_tiles):
    """Draw the tiles of a group of ``rows`` rows in pairs, and what the two CTAs of a pair load."""
    check_range("rows", rows, 1, 640)
    check_range("tiles of columns", n_tiles, 2, 6)
    made = pairs_of(rows, n_tiles)
    figure, axes = canvas(WIDTH, 4.1, f"A group of {plural(rows, 'row')}: {plural(len(made), 'pair')} of tiles")
    left, top, tall, wide = 0.85, 3.25, 2.35 / rows, 3.5 / n_tiles
    for n, (_, *tiles) in enumerate(made):
        fill = tint(COLOURS[n % len(COLOURS)], 0.5)
        for rank, (row, count, column) in enumerate(tiles):
            if count and column < n_tiles:
                place = left + column * wide, top - (row + count) * tall, wide, count * tall
                words = f"{n}.{rank}"
                box(axes, *place, words, fill=fill, edge=WHITE, line=1.5, colour=ink_on(fill), size=8.5, label="tile")
    for column in range(n_tiles):
        text(axes, left + (column + 0.5) * wide, top + 0.12, f"columns {column}", size=7.5, colour=GREY)
    for row in sorted({tile[0] for _, *tiles in made for tile in tiles if tile[1]}):
        text(axes, left - 0.08, top - row * tall - 0.08, f"row {row}", size=7.5, colour=GREY, ha="right")
    x, size = 5.35, 1.3
    text(axes, x + 1.6, 3.4, "a pair that shares weights", weight="bold")
    for rank in range(2):
        at = x + 2.0 * rank
        box(axes, at, 0.95, size, 1.3, fill=WHITE, label="CTA")
        text(axes, at + size / 2, 0.8, f"shared memory of CTA {rank}", size=7.5, colour=GREY)
        for half in range(2):
            fill = tint((BLUE, GREEN)[half], 0.5)
            y = 1.85 - 0.35 * half
            cell(axes, at + 0.08, y, size - 0.16, 0.33, f"weights, half {half}", fill=fill, edge=WHITE, size=7.5)
        fill = tint(ORANGE, 0.5)
        cell(axes, at + 0.08, 1.02, size - 0.16, 0.42, f"rows of x of {rank}", fill=fill, edge=WHITE, size=7.5)
        fill = tint((BLUE, GREEN)[rank], 0.5)
        cell(axes, at + 0.08, 2.8, size - 0.16, 0.33, f"half {rank} from L2", fill=fill, edge=INK, size=7.5)
        for to in range(2):
            colour = (BLUE, GREEN)[rank]
            arrow(axes, (at + size / 2, 2.8), (x + 2.0 * to + size / 2, 2.27), colour=colour, label="multicast")
    text(axes, x + 1.65, 2.97, "multicast", size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.4,
        "3.1: the tile of CTA 1 in pair 3. Two tiles of a pair that lie one above the other share their weights.",
    )
    note(axes, 0.15, 0.17, "Last rows that fill one tile only: the CTAs compute two neighbouring tiles of columns.")
    return figure


def tile_times(tiles, ctas):
    """Draw when the first CTAs of a grid computed which tile; colours are the tiles of weights of one group.

    It is the group with the most tiles among those shown, and the last one of several: CTAs drift apart over time.
    """
    check_range("ctas", ctas, 1, 16)
    shown = [tile for tile in tiles if tile.cta < ctas]
    last, counts = max(tile.end_us for tile in shown), Counter(tile.group for tile in shown)
    group = max(counts, key=lambda group: (counts[group], group))
    figure, axes = canvas(WIDTH, 1.25 + 0.24 * ctas, f"Tiles of {plural(ctas, 'CTA')} over time")
    left, top, row = 0.85, 0.6 + 0.24 * ctas, 0.24
    scale = (WIDTH - left - 0.2) / last
    columns = {column: n for n, column in enumerate(dict.fromkeys(t.column for t in shown if t.group == group))}
    for tile in shown:
        own = tile.group == group
        fill = tint(COLOURS[columns[tile.column] % len(COLOURS)], 0.6) if own else tint(GREY, 0.2)
        place = left + tile.start_us * scale, top - (tile.cta + 1) * row + 0.02
        wide = (tile.end_us - tile.start_us) * scale
        box(axes, *place, wide, row - 0.04, fill=fill, edge=WHITE, line=0.6, label="tile")
        if wide > 0.24:
            words = f"{tile.group}:{tile.column}"
            text(axes, place[0] + wide / 2, place[1] + row / 2 - 0.02, words, size=6.5)
    for cta in range(ctas):
        text(axes, left - 0.08, top - (cta + 0.5) * row, f"CTA {cta}", size=8, colour=GREY, ha="right")
    for time in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, last):
        if time <= last:
            x = min(left + time * scale, WIDTH - 0.3)
            text(axes, x, top - ctas * row - 0.12, f"{time:.0f} µs", size=8, colour=GREY)
    words = f"2:5: group 2, tile of columns 5. Of group {group}, tiles of one colour read the same weights."
    note(axes, 0.15, 0.17, words)
    return figure


def tile_bytes(lane):
    """Draw the 16 bytes of codes that a lane of warp 0 needs of a weight tile, in both orders."""
    check_range("lane", lane, 0, 31)
    figure, axes = canvas(WIDTH, 3.3, f"Codes of lane {lane} in a weight tile of 64 x 64")
    side, top = 0.117, 2.45
    own = {(row, 8 * s + 4 * h + lane % 4) for row in (lane // 4, lane // 4 + 8) for s in range(4) for h in range(2)}
    panels = ((0.75, "rows of 32 bytes", own), (5.1, "fragments: 16 bytes per lane", None))
    for left, title, chosen in panels:
        text(axes, left + 16 * side, top + 0.2, title, weight="bold")
        for row in range(16):
            for byte in range(32):
                is_own = (row, byte) in chosen if chosen else (32 * row + byte) // 16 == lane
                fill, label = (BLUE, "own") if is_own else (tint(BLUE, 0.12), "other")
                place = left + byte * side, top - (row + 1) * side
                box(axes, *place, side, side, fill=fill, edge=WHITE, line=0.4, label=label)
        for row in (0, 8, 15):
            name = f"row {row}" if chosen else f"byte {32 * row}"
            text(axes, left - 0.06, top - (row + 0.5) * side, name, size=7, colour=GREY, ha="right")
    note(axes, 0.15, 0.2, "A square is a byte with two codes; the 512 bytes of warp 0. Dark: bytes of the lane.")
    return figure


def decoding(code):
    """Draw the bits of an e2m1 code in a bfloat16, and the values of all magnitudes in that place."""
    check_range("code", code, 0, 15)
    figure, axes = canvas(WIDTH, 3.1, f"An e2m1 code in a bfloat16: {code:04b}")
    left, side, top = 0.6, 0.3, 1.95
    fields = [
        ("sign", 15, 15, tint(ORANGE, 0.5)),
        ("exponent", 14, 7, tint(GREEN, 0.4)),
        ("mantissa", 6, 0, tint(BLUE, 0.4)),
    ]
    bits = (code & 8) << 12 | (code & 7) << 6
    for name, high, low, fill in fields:
        first = left + (15 - high) * side
        text(axes, first + (high - low + 1) * side / 2, top + 0.42, name, size=8, colour=GREY)
        for bit in range(high, low - 1, -1):
            x, is_code = left + (15 - bit) * side, bit in (15, 8, 7, 6)
            edge = INK if is_code else PALE
            cell(
                axes,
                x,
                top,
                side - 0.03,
                side,
                bits >> bit & 1,
                fill=fill if is_code else WHITE,
                edge=edge,
                label="bit",
            )
    for n, bit in enumerate((15, 8, 7, 6)):
        start = left + (3.5 + 2.2 * n) * side, 1.15
        cell(axes, start[0] - side / 2, 0.85, side, side, code >> (3 - n) & 1, fill=tint(BLUE, 0.15), label="code")
        arrow(axes, start, (left + (15.5 - bit) * side, top - 0.03), colour=GREY, label="move")
    text(axes, left, 1.0, "code", size=8.5, ha="left")
    values = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    text(axes, 7.25, top + 0.55, "bits 8 to 6, value", size=8, colour=GREY)
    for n, value in enumerate(values):
        y = top + 0.28 - 0.21 * n
        chosen = n == code & 7
        weight = "bold" if chosen else "normal"
        words = f"{n:03b}   {value:g} · 2⁻¹²⁶"
        text(axes, 6.55, y, words, size=8.5, ha="left", weight=weight, label="value")
    note(
        axes,
        0.15,
        0.4,
        "In both formats a number with exponent 0 is subnormal, so one multiplication by a power of two",
    )
    note(axes, 0.15, 0.17, "decodes every code: 2¹²⁶ times the scale of the block.")
    return figure
