"""Figures of the GEMM kernels: a tile and its operands, the roles of warps, multicast, and when tiles are stored."""

from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.lessons.hopper.sizes import BLOCK_K, MMA_WARPS, ROWS

__all__ = ["multicast", "roles", "tile", "timeline"]


def tile(columns: int = 128) -> Drawing:
    """Draw a tile of D with the parts of A and B that a stage holds, and which warpgroup computes which rows."""
    drawing, scale = Drawing(f"A tile of {ROWS} x {columns}, and what a stage holds for it"), 0.62
    x, y, tall, wide = 130.0, 104.0, ROWS * scale, columns * scale
    deep = BLOCK_K * scale * 0.7
    drawing.box(x, y - 8 - deep, wide, deep, "sky", f"B: {columns} rows", size=9)
    drawing.note(x + wide + 6, y - 8 - deep / 2, f"{BLOCK_K} bytes of k")
    for group, kind in enumerate(("blue", "green")):
        top = y + group * tall / 2
        drawing.box(x - 8 - deep, top, deep, tall / 2 - 1, "orange", f"A: {ROWS // 2} rows", size=8)
        drawing.box(x, top, wide, tall / 2 - 1, kind, f"warpgroup {group}", size=10)
    drawing.note(x + wide + 6, y + tall / 2, "D: in registers,")
    drawing.note(x + wide + 6, y + tall / 2 + 13, f"{columns // 2} of each thread")
    drawing.note(8, y + tall + 18, "Each warpgroup reads its own rows of A and all of B from shared memory.")
    return drawing


def roles(stages: int = 6) -> Drawing:
    """Draw the roles of the specialised kernel, its stages, and who arrives at which barrier."""
    drawing = Drawing("The specialised kernel: roles, stages, barriers")
    top, tall = 56.0, 22.0
    drawing.text(8, 44, "producer", bold=True)
    drawing.box(8, top, 84, 40, "orange", "one thread", size=10)
    drawing.note(8, top + 54, "issues TMA loads")
    drawing.note(8, top + 67, "40 registers each")
    drawing.text(150, 44, f"ring of {stages} stages", bold=True)
    for stage in range(stages):
        y = top + stage * (tall + 4)
        drawing.box(150, y, 74, tall, "sky", f"A, B of stage {stage}", size=8)
    bottom = top + stages * (tall + 4)
    drawing.text(290, 44, "consumers", bold=True)
    for group, kind in enumerate(("blue", "green")):
        drawing.box(290, top + 50 * group, 92, 44, kind, f"warpgroup {group}", size=10)
    drawing.note(290, top + 112, "wgmma, then store D")
    drawing.note(290, top + 125, "232 registers each")
    drawing.line((94, top + 12), (148, top + 12), width=1.6)
    drawing.text(121, top + 8, "loads →", size=9, anchor="middle", kind="quiet")
    drawing.line((226, top + 12), (288, top + 12), width=1.6)
    drawing.text(257, top + 8, "wgmma →", size=9, anchor="middle", kind="quiet")
    for y, words in (
        (bottom + 12, "full: complete when the announced bytes have landed. Consumers wait."),
        (bottom + 27, f"empty: complete when all {MMA_WARPS} consumer warps arrived. The producer waits."),
    ):
        drawing.text(8, y, words, size=9.5)
    return drawing


def multicast() -> Drawing:
    """Draw which CTA of a cluster loads what, and where it lands."""
    drawing = Drawing("A cluster of two CTAs: each loads half of B for both")
    for cta, (x, kind) in enumerate(((8.0, "blue"), (204.0, "green"))):
        drawing.text(x, 44, f"CTA {cta}", bold=True)
        drawing.box(x, 104, 178, 84, "pale")
        drawing.text(x + 6, 118, "shared memory", size=9, kind="quiet")
        drawing.box(x + 6, 126, 50, 54, "orange", f"A of {cta}", size=9)
        drawing.box(x + 62, 126, 52, 54, "blue", "B, half 0", size=9)
        drawing.box(x + 120, 126, 52, 54, "green", "B, half 1", size=9)
        drawing.box(x, 54, 178, 22, kind, f"loads its A, and half {cta} of B", size=10)
    drawing.line((60, 76), (60, 90), (292, 90), (292, 126), width=1.4)
    drawing.line((96, 90), (96, 126), width=1.4)
    drawing.line((330, 76), (330, 96), (154, 96), (154, 126), width=1.4)
    drawing.line((350, 96), (350, 126), width=1.4)
    drawing.line((330, 96), (350, 96), width=1.4)
    drawing.note(8, 206, "A full barrier counts the bytes of A and of both halves, whoever loads them.")
    drawing.note(8, 220, "A stage is empty when the consumers of both CTAs have read it.")
    return drawing


def timeline() -> Drawing:
    """Draw when loads, MMAs and stores of two tiles run: one CTA per tile, persistent, and with TMA stores."""
    drawing, y = Drawing("Two tiles on an SM, not to scale"), 40.0
    rows = {
        "one CTA per tile": [
            ("loads", [(0, 70), (122, 70)]),
            ("MMAs", [(16, 62), (138, 62)]),
            ("stores", [(80, 42), (202, 42)]),
        ],
        "persistent: loads go on during stores": [
            ("loads", [(0, 70), (72, 62)]),
            ("MMAs", [(16, 62), (122, 62)]),
            ("stores", [(80, 42), (186, 42)]),
        ],
        "TMA stores: threads only write shared memory": [
            ("loads", [(0, 70), (72, 62)]),
            ("MMAs", [(16, 62), (94, 62)]),
            ("to shared memory", [(79, 14), (157, 14)]),
            ("TMA stores", [(92, 40), (170, 40)]),
        ],
    }
    kinds = {"loads": "orange", "MMAs": "blue", "stores": "green", "to shared memory": "purple", "TMA stores": "green"}
    for name, parts in rows.items():
        drawing.text(8, y, name, bold=True)
        for part, spans in parts:
            y += 15
            drawing.note(8, y + 3, part)
            for number, (start, wide) in enumerate(spans):
                drawing.box(112 + start, y - 6, wide, 11, kinds[part], f"tile {number}" if wide > 30 else "", size=8)
        y += 24
    drawing.line((112, y - 8), (WIDTH - 8, y - 8))
    drawing.note(WIDTH - 40, y + 4, "time")
    return drawing
