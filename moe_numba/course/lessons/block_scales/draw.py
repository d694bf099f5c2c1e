"""Figures of block scales: the problem, the roles of warps, the factors that a lane needs, the scales of a stage."""

from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.lessons.block_scales.sizes import MMA_WARPS, SCALE_WARPS

__all__ = ["factors", "problem", "roles", "stage"]


def problem() -> Drawing:
    """Draw x, w and D in blocks, with their scales: two k-blocks are highlighted."""
    drawing, side = Drawing("Scales of x, of w, and a partial sum"), 30.0
    drawing.text(8, 44, "x: FP8, a scale per row", bold=True)
    for block in range(4):
        drawing.box(8 + side * block, 54, side - 2, 3 * side, "orange" if block == 1 else "pale")
        for row in range(6):
            drawing.box(8 + side * block + 8, 59 + 14.5 * row, 12, 8, "purple" if block == 1 else "sky")
    drawing.note(8, 158, "a box: 128 elements of k")
    drawing.text(220, 44, "w: FP8, a scale per block", bold=True)
    for block in range(4):
        for rows in range(2):
            own = block == 1 and rows == 0
            x, y = 220 + side * block, 54 + rows * 46
            drawing.box(x, y, side - 2, 44, "green" if own else "pale")
            drawing.box(x + 8, y + 18, 12, 8, "purple" if own else "sky")
    drawing.note(220, 158, "a box: 128 rows by 128 of k")
    y = 190
    drawing.text(8, y, "D += ", bold=True)
    drawing.box(48, y - 14, 84, 20, "purple", "scales of the rows", size=9)
    drawing.text(138, y, "×")
    drawing.box(152, y - 14, 44, 20, "purple", "scale", size=9)
    drawing.text(202, y, "× (")
    drawing.box(222, y - 14, 26, 20, "orange", "x", size=10)
    drawing.text(254, y, "·")
    drawing.box(264, y - 14, 26, 20, "green", "wᵀ", size=10)
    drawing.text(296, y, ")  per k-block")
    return drawing


def roles() -> Drawing:
    """Draw the warps of the kernel, a stage of the ring, and who arrives at its barriers."""
    drawing, top = Drawing("The kernel: who fills a stage, and who reads it"), 56.0
    drawing.text(8, 44, "producer's warpgroup", bold=True)
    drawing.box(8, top, 118, 30, "orange", "1 warp: TMA loads", size=9)
    drawing.box(8, top + 52, 118, 30, "purple", f"{SCALE_WARPS} warps: scales", size=9)
    drawing.text(168, 44, "a stage", bold=True)
    for y, tall, kind, words in ((0, 24, "sky", "A"), (26, 24, "sky", "B"), (52, 30, "purple", "scales")):
        drawing.box(168, top + y, 60, tall, kind, words, size=10)
    drawing.text(270, 44, "consumers", bold=True)
    for group, kind in enumerate(("blue", "green")):
        drawing.box(270, top + 42 * group, 112, 40, kind, f"warpgroup {group}", size=10)
    drawing.line((128, top + 15), (166, top + 15), width=1.6)
    drawing.line((128, top + 67), (166, top + 67), width=1.6)
    drawing.line((230, top + 25), (268, top + 25), width=1.6)
    drawing.text(249, top + 20, "MMAs", size=8, anchor="middle", kind="quiet")
    drawing.line((230, top + 67), (268, top + 67), width=1.6)
    drawing.text(249, top + 62, "read", size=8, anchor="middle", kind="quiet")
    drawing.text(8, 162, f"full: the bytes of A and B, and {SCALE_WARPS} warps that have written scales.", size=9.5)
    drawing.text(8, 177, f"empty: {MMA_WARPS} consumer warps that have read A, B and scales.", size=9.5)
    return drawing


def own_elements(lane: int, columns: int = 24) -> list[tuple[int, int]]:
    """Return the row and column of each element of a fragment that a lane of warp 0 has, of its first columns."""
    return [
        (lane // 4 + 8 * h, 8 * j + 2 * (lane % 4) + i) for j in range(columns // 8) for h in range(2) for i in range(2)
    ]


def factors(transposed: bool, lane: int = 5) -> Drawing:
    """Draw a lane's elements in 16 rows and 24 columns of a tile, and the scales that they need."""
    title = "rows of w are the tile's rows" if transposed else "tokens are the tile's rows"
    drawing, side = Drawing(f"Lane {lane}'s elements: {title}"), 10.5
    left, top, own = 96.0, 66.0, set(own_elements(lane))
    rows, columns = ({each[axis] for each in own} for axis in (0, 1))
    for row in range(16):
        for column in range(24):
            kind = "blue" if (row, column) in own else "pale"
            drawing.box(left + column * side, top + row * side, side - 1.5, side - 1.5, kind)
    x_needed, w_words = len(columns if transposed else rows), "one scale of w for all rows"
    if transposed:
        for column in range(24):
            kind = "orange" if column in columns else "pale"
            drawing.box(left + column * side, top - 16, side - 1.5, side - 1.5, kind)
        drawing.box(left - 16, top, side - 1.5, 16 * side - 1.5, "green")
        drawing.note(8, top - 8, "scales of x")
        drawing.note(8, top + 60, "of w")
    else:
        for row in range(16):
            drawing.box(left - 16, top + row * side, side - 1.5, side - 1.5, "orange" if row in rows else "pale")
        drawing.box(left, top - 16, 24 * side - 1.5, side - 1.5, "green")
        drawing.note(8, top - 8, "scale of w")
        drawing.note(8, top + 60, "of x")
        w_words = "one scale of w for all columns"
    whole = 32 if transposed else 2
    y = top + 16 * side + 16
    drawing.note(8, y, f"Orange: scales of x that it needs, {x_needed} here, {whole} in a tile of 128 x 128.")
    drawing.note(8, y + 14, f"Green: {w_words}, in a tile of 128 x 128.")
    return drawing


def stage() -> Drawing:
    """Draw what the two warps write to a stage: scales, and factors."""
    drawing = Drawing("What a stage holds behind A and B, 192 columns")
    drawing.text(8, 44, "steps 2 and 3: scales", bold=True)
    drawing.box(8, 54, 240, 20, "orange", "x: rows 0 to 127", size=9)
    for i in range(3):
        drawing.box(250 + 30 * i, 54, 28, 20, "green", f"w {i}", size=9)
    drawing.note(8, 90, "A consumer reads 2 + 3 of them, and multiplies 6 times.")
    drawing.text(8, 118, "step 4: factors", bold=True)
    for row in range(3):
        x = 8 + 126 * row
        for i in range(3):
            drawing.box(x + 30 * i, 128, 28, 20, "purple", f"{row}·w{i}", size=8)
        drawing.box(x + 90, 128, 28, 20, "pale")
    drawing.text(WIDTH - 6, 160, "…", size=10, anchor="end")
    drawing.note(8, 164, "A row has 16 bytes: its scale times each of w's three.")
    drawing.note(8, 178, "A consumer reads those of its two rows by two instructions.")
    return drawing
