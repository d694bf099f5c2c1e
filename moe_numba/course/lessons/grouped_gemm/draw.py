"""Figures of the grouped GEMM: groups and their weights, where tiles begin, orders of tiles, padding, two subtiles."""

from collections.abc import Sequence

from moe_numba.course.draw.drawing import WIDTH, Drawing

__all__ = ["orders", "padded_work", "problem", "subtiles", "tile_starts"]

_KINDS = "blue", "orange", "green", "sky", "purple"


def _kind(group):
    return _KINDS[group % len(_KINDS)]


def problem(lengths: Sequence[int] = (5, 0, 9, 3)) -> Drawing:
    """Draw the rows of x in groups, the weights of each group, and the rows of y."""
    drawing, top, tall = Drawing(f"{len(lengths)} groups: rows of x, weights, rows of y"), 56.0, 132.0
    row_tall, each = tall / max(sum(lengths), 1), tall / len(lengths)
    for x, words in ((52.0, "x: rows, k"), (164.0, "weights: groups, n, k"), (300.0, "y: rows, n")):
        drawing.text(x, 44, words, size=10, bold=True)
    row = 0
    for g, length in enumerate(lengths):
        y, middle = top + row * row_tall, top + (g + 0.5) * each
        drawing.box(170, middle - 0.4 * each, 76, 0.8 * each, _kind(g), f"group {g}", size=9)
        for r in range(length):
            for x in (52, 300):
                drawing.box(x, y + r * row_tall, 76, max(row_tall - 1, 1), _kind(g))
        if length:
            at = y + length * row_tall / 2
            drawing.line((130, at), (168, middle)), drawing.line((248, middle), (298, at))
            drawing.note(8, at + 3, f"{length} rows")
        else:
            drawing.note(254, middle + 3, "no rows")
        row += length
    drawing.note(8, top + tall + 16, "A colour is a group. Its rows need its weights, and no others.")
    return drawing


def tile_starts(lengths: Sequence[int] = (5, 3, 9, 2), tile: int = 4) -> Drawing:
    """Draw where tiles begin: with one tensor map, with padded rows, and with one map per group."""
    drawing = Drawing(f"Where tiles of {tile} rows begin")
    padded = [-(-length // tile) * tile for length in lengths]
    wide = (WIDTH - 20) / max(sum(padded), sum(lengths))
    owners = [g for g, length in enumerate(lengths) for _ in range(length)]
    filled = [g if r < lengths[g] else None for g in range(len(lengths)) for r in range(padded[g])]
    starts = [sum(lengths[:g]) for g in range(len(lengths))]
    by_group = [
        (start + at, min(tile, length - at))
        for start, length in zip(starts, lengths, strict=True)
        for at in range(0, length, tile)
    ]
    for panel, (name, rows, tiles) in enumerate(
        (
            ("one map: a tile may have rows of two groups", owners, [(at, tile) for at in range(0, len(owners), tile)]),
            ("one map, padded rows", filled, [(at, tile) for at in range(0, len(filled), tile)]),
            ("a map per group", owners, by_group),
        )
    ):
        y = 44 + 58 * panel
        drawing.text(8, y, name, size=10, bold=True)
        for r, g in enumerate(rows):
            drawing.box(8 + r * wide, y + 8, wide - 1, 18, "pale" if g is None else _kind(g))
        for at, length in tiles:
            owned = {g for g in rows[at : at + length] if g is not None}
            width = min(length, len(rows) - at) * wide
            drawing.line((9 + at * wide, y + 32), (6 + at * wide + width, y + 32), width=3)
            if len(owned) > 1:
                drawing.text(8 + at * wide + width / 2, y + 43, "mixed", size=9, anchor="middle")
    drawing.note(8, 220, "A box is a row, in its group's colour; pale: padding. A line is a tile.")
    return drawing


def orders(tiles: Sequence[int] = (2, 1, 3), n_tiles: int = 4, ctas: int = 6) -> Drawing:
    """Draw the number of each tile in three orders; the first wave of CTAs is dark."""
    drawing, side, rows = Drawing("The number of each tile, in three orders"), 22.0, sum(tiles)
    places = [(g, m) for g, count in enumerate(tiles) for m in range(count)]
    for panel, name in enumerate(("horizontal", "vertical", "by group")):
        x, y = 30.0 + panel * 122, 62.0
        drawing.text(x, 44, name, size=10, bold=True)
        for row, (g, m) in enumerate(places):
            if panel == 0:
                drawing.note(6, y + row * side + 15, f"g{g}.{m}")
            for n in range(n_tiles):
                before = sum(tiles[:g])
                number = (row * n_tiles + n, n * rows + row, before * n_tiles + n * tiles[g] + m)[panel]
                first = number < ctas
                kind = _kind(g) if first else "pale"
                drawing.box(x + n * side, y + row * side, side - 2, side - 2, kind, f"{number}", size=9)
    bottom = 62 + rows * side
    drawing.note(
        8, bottom + 14, f"Down: tiles of rows (group.m). Across: tiles of weights. Coloured: the first {ctas},"
    )
    drawing.note(8, bottom + 27, "run together. A column within a group shares weights, a row shares x.")
    return drawing


def padded_work(rows: Sequence[int] = (1, 8, 16, 40, 64, 100)) -> Drawing:
    """Draw the rows that MMAs multiply, with rows of x as wgmma's first operand, and as its second."""
    drawing, base, tall = Drawing("Rows that the MMA multiplies, by rows of the group"), 176.0, 110.0
    largest, each = max(-(-r // 64) * 64 for r in rows), (WIDTH - 20) / len(rows)
    for place, r in enumerate(rows):
        x = 10 + place * each
        for side, (granularity, kind) in enumerate(((64, "orange"), (8, "blue"))):
            paid, at = -(-r // granularity) * granularity, x + side * 0.44 * each
            high = tall * paid / largest
            drawing.box(at, base - high, 0.38 * each, high, "pale")
            used = tall * r / largest
            drawing.box(at, base - used, 0.38 * each, used, kind)
            drawing.text(at + 0.19 * each, base - high - 4, f"{paid}", size=9, anchor="middle")
        drawing.text(x + 0.42 * each, base + 14, f"{r}", size=10, anchor="middle", bold=True)
    drawing.legend(base + 34, (("orange", "first operand: 64 rows"), ("blue", "second operand: multiples of 8")))
    drawing.note(8, base + 52, "Pale: rows that are multiplied for nothing.")
    return drawing


def subtiles(rows: int = 144) -> Drawing:
    """Draw a stage with a tile of weights and two subtiles of x, and what each warpgroup multiplies."""
    drawing, top = Drawing(f"A stage with two subtiles of {rows} rows"), 60.0
    drawing.text(8, 46, "a stage", bold=True)
    drawing.box(8, top, 84, 28, "blue", "weights 0 to 63", size=8.5)
    drawing.box(8, top + 30, 84, 28, "green", "weights 64 to 127", size=8.5)
    for s in range(2):
        drawing.box(8, top + 70 + 48 * s, 84, 44, "orange" if s else "sky", f"x, subtile {s}", size=9)
    for group, kind in enumerate(("blue", "green")):
        x = 150 + 118 * group
        drawing.text(x, 46, f"warpgroup {group}", bold=True)
        for s in range(2):
            words = f"64 x {rows}"
            drawing.box(x, top + 70 + 48 * s, 104, 44, "orange" if s else "sky", words, size=10)
        drawing.box(x, top + 15, 104, 28, kind, "its weights", size=9)
        drawing.note(x, top + 60, "multiplied by both:")
    drawing.note(8, top + 182, f"{rows} accumulators of a thread. The weights are loaded once for {2 * rows} rows.")
    return drawing
