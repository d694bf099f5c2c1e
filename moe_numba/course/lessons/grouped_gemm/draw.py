"""Figures of the grouped GEMM: groups and their weights, starts of tiles, padding, and the tiles of each CTA."""

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, check_range, ink_on, note, plural, text, tint

__all__ = ["problem", "schedules", "padded_work", "tile_starts"]

_COLOURS = (BLUE, ORANGE, GREEN, SKY, RED, "#CC79A7")


def _colour(group):
    return tint(_COLOURS[group % len(_COLOURS)], 0.45)


def problem(lengths):
    """Draw the rows of x in groups, the weight of each group, and the rows of y."""
    check_range("the number of groups", len(lengths), 2, 6)
    check_range("rows", sum(lengths), 1, 32)
    figure, axes = canvas(WIDTH, 3.9, f"{plural(len(lengths), 'group')}, {len(lengths)} matrices, one output")
    tall, top = 2.6 / sum(lengths), 3.2
    each = 2.6 / len(lengths)
    for left, words in ((0.6, "x [M, K]"), (4.0, "weight [groups, N, K]"), (7.0, "y [M, N]")):
        text(axes, left + 0.75, top + 0.15, words, weight="bold")
    row = 0
    for g, length in enumerate(lengths):
        fill, y = _colour(g), top - (row + length) * tall
        middle = top - (g + 0.5) * each
        for r in range(length):
            for left in (0.6, 7.0):
                box(axes, left, y + r * tall, 1.5, tall, fill=fill, edge=WHITE, line=0.6, label="row")
        box(axes, 4.15, middle - 0.4 * each, 1.2, 0.8 * each, f"W{g}", fill=fill, edge=fill, label="weight")
        if length:
            at = y + length * tall / 2
            arrow(axes, (2.15, at), (4.1, middle)), arrow(axes, (5.4, middle), (6.95, at))
            text(axes, 0.5, at, f"{length}", size=8.5, colour=GREY, ha="right")
        else:
            text(axes, 3.0, middle, "no rows", size=8.5, colour=GREY)
        row += length
    note(axes, 0.15, 0.2, "A colour is a group: its rows of x (their number on the left), its matrix, its rows of y.")
    return figure


def tile_starts(lengths, tile):
    """Draw where tiles begin: with one tensor map, with rows padded to whole tiles, and with one map per group."""
    check_range("the number of groups", len(lengths), 1, 6)
    check_range("tile", tile, 2, 16)
    padded = [-(-length // tile) * tile for length in lengths]
    largest = max(sum(padded), sum(lengths))
    check_range("rows", largest, 1, 64)
    figure, axes = canvas(WIDTH, 3.5, f"Where tiles of {tile} rows begin")
    left, wide = 2.6, (WIDTH - 2.8) / largest
    owners = [g for g, length in enumerate(lengths) for _ in range(length)]
    filled = [g if r < lengths[g] else None for g in range(len(lengths)) for r in range(padded[g])]
    starts = [sum(lengths[:g]) for g in range(len(lengths))]
    by_group = [
        (start + at, min(tile, length - at))
        for start, length in zip(starts, lengths, strict=True)
        for at in range(0, length, tile)
    ]
    panels = {
        "one map, unpadded": (owners, [(at, tile) for at in range(0, len(owners), tile)]),
        "one map, rows padded": (filled, [(at, tile) for at in range(0, len(filled), tile)]),
        "one map per group": (owners, by_group),
    }
    for panel, (name, (rows, tiles)) in enumerate(panels.items()):
        y = 2.35 - 0.85 * panel
        text(axes, 0.15, y + 0.16, name, ha="left", weight="bold")
        for r, g in enumerate(rows):
            fill = WHITE if g is None else _colour(g)
            box(axes, left + r * wide, y, wide, 0.32, fill=fill, edge=PALE, line=0.4, label="row")
        for at, length in tiles:
            inside = {g for g in rows[at : at + length] if g is not None}
            bad = len(inside) > 1
            width = min(length, len(rows) - at) * wide
            box(
                axes,
                left + at * wide + 0.02,
                y - 0.14,
                width - 0.04,
                0.09,
                fill=RED if bad else INK,
                edge="none",
                label="mixed" if bad else "tile",
            )
    note(
        axes,
        0.15,
        0.2,
        "A box is a row, in its group's colour; white: padding. A bar below is a tile; "
        "red: its rows belong to two groups.",
    )
    return figure


def padded_work(rows):
    """Draw the padded part of the tensor cores' work, with tokens as M and as N; ``rows`` are group sizes."""
    check_range("the number of sizes", len(rows), 1, 8)
    figure, axes = canvas(WIDTH, 3.6, "Rows that the MMA multiplies, by group size")
    left, bottom, tall, group = 0.8, 0.8, 2.1, (WIDTH - 1.0) / len(rows)
    variants = {"tokens as M: multiples of 64": (64, ORANGE), "tokens as N: multiples of 8": (8, BLUE)}
    largest = max(-(-r // 64) * 64 for r in rows)
    for place, r in enumerate(rows):
        x = left + place * group
        for side, (step, colour) in enumerate(variants.values()):
            paid, at = -(-r // step) * step, x + (0.1 + 0.4 * side) * group
            wide = 0.36 * group
            box(axes, at, bottom, wide, tall * paid / largest, fill=tint(colour, 0.3), edge=colour, label="paid")
            box(axes, at, bottom, wide, tall * r / largest, fill=colour, edge=colour, label="used")
            text(axes, at + 0.18 * group, bottom + tall * paid / largest + 0.1, f"{paid}", size=8)
        text(axes, x + 0.48 * group, bottom - 0.15, f"{r}", size=8.5)
    axes.plot([left, WIDTH - 0.2], [bottom, bottom], color=INK, linewidth=0.8)
    for side, (words, (_, colour)) in enumerate(variants.items()):
        text(axes, left + 3.0 * side, bottom - 0.4, words, colour=colour, ha="left", weight="bold")
    note(axes, 0.15, 0.17, "Dark: rows of the group. Pale: padding.")
    return figure


def schedules(found, groups):
    """Draw schedules of equal tiles: ``{name: [tiles (g, m, n) of each CTA]}``."""
    check_range("the number of schedules", len(found), 1, 3)
    ctas = len(next(iter(found.values())))
    check_range("CTAs", ctas, 1, 8)
    check_range("groups", groups, 1, 6)
    row = 0.3
    figure, axes = canvas(WIDTH, 0.9 + len(found) * (row * ctas + 0.5), "Tiles of each CTA over time")
    left, top = 0.9, 0.45 + len(found) * (row * ctas + 0.5)
    for name, tiles in found.items():
        waves = max(map(len, tiles))
        wide = min(1.1, (WIDTH - left - 1.6) / max(waves, 1))
        idle = sum(waves - len(own) for own in tiles)
        text(axes, left, top - 0.15, f"{name}: {plural(waves, 'wave')}", ha="left", weight="bold")
        for cta, own in enumerate(tiles):
            y = top - 0.3 - row * (cta + 1)
            text(axes, left - 0.08, y + 0.15, f"CTA {cta}", size=8, colour=GREY, ha="right")
            for wave in range(waves):
                words, fill, edge, colour, label = "idle", WHITE, PALE, GREY, "idle"
                if wave < len(own):
                    g, m, n = own[wave]
                    words, fill, edge, label = f"x{g}.{m} w{g}.{n}", _colour(g), WHITE, "tile"
                    colour = ink_on(fill)
                place = left + wave * wide, y + 0.02, wide - 0.03, row - 0.04
                box(axes, *place, words, fill=fill, edge=edge, colour=colour, size=7.5, label=label)
        side = left + waves * wide + 0.15
        text(axes, side, top - 0.5, f"{plural(sum(map(len, tiles)), 'tile')},", size=8.5, ha="left")
        text(axes, side, top - 0.7, f"{idle} idle at the end", size=8.5, colour=RED if idle else GREY, ha="left")
        top -= row * ctas + 0.5
    note(axes, 0.15, 0.17, "x1.0 w1.2: tile 0 of the rows of group 1 times tile 2 of its weight. A colour is a group.")
    return figure
