"""Figure of one load instruction of a warp: the sectors and lines that it touches."""

from moe_numba.course.bench.figures.style import BLUE, GREY, PALE, WIDTH
from moe_numba.course.draw.canvas import box, canvas, plural, text

SECTOR, LINE = 32, 128  # bytes
_UNUSED = "#F3D9A4"  # parts of a sector that no lane loads


def warp_loads(loads, row_bytes, title):
    """Draw which 32-byte sectors one load instruction of a warp touches, and which bytes of them it uses.

    The title of each part also counts the 128-byte lines that contain the sectors.

    Parameters
    ----------
    loads : dict
        Name -> (bytes per lane, first byte of each lane in the matrix of logits). Rows that no lane reads are left out.
    row_bytes : int
        A multiple of 32.
    title : str

    Returns
    -------
    Figure
    """
    rows = {name: sorted({start // row_bytes for start in starts}) for name, (_, starts) in loads.items()}
    shown = {name: numbers if len(numbers) <= 4 else [*numbers[:3], numbers[-1]] for name, numbers in rows.items()}
    tall, left, width = 0.26, 1.25, WIDTH - 1.45
    height = 1.0 + sum(0.62 + tall * len(numbers) for numbers in shown.values())
    figure, axes = canvas(WIDTH, height, title)
    scale, y = width / row_bytes, height - 0.55
    for name, (size, starts) in loads.items():
        touched = {start // SECTOR + k for start in starts for k in range(-(-(start % SECTOR + size) // SECTOR))}
        used = len({start + byte for start in starts for byte in range(size)})
        lines = len({sector * SECTOR // LINE for sector in touched})
        words = f"{name}: {plural(lines, 'line')}, {plural(len(touched), 'sector')}, "
        words += f"{used} of {SECTOR * len(touched)} bytes used"
        text(axes, 0.15, y - 0.12, words, ha="left", weight="bold")
        y -= 0.32
        for number, row in enumerate(shown[name]):
            y -= tall
            skipped = number > 0 and row - shown[name][number - 1] > 1
            text(axes, left - 0.1, y + tall / 2, f"{'... ' if skipped else ''}token {row}", size=8.5, ha="right")
            box(axes, left, y + 0.03, width, tall - 0.06, fill="white", edge=PALE)
            for sector in sorted(touched):
                if sector * SECTOR // row_bytes == row:
                    x = left + scale * (sector * SECTOR % row_bytes)
                    box(
                        axes,
                        x,
                        y + 0.03,
                        scale * SECTOR,
                        tall - 0.06,
                        fill=_UNUSED,
                        edge="white",
                        line=0.4,
                        label="sector",
                    )
            for start in starts:
                if start // row_bytes == row:
                    x = left + scale * (start % row_bytes)
                    box(axes, x, y + 0.03, scale * size, tall - 0.06, fill=BLUE, edge="white", line=0.4, label="used")
        for at in range(0, row_bytes + 1, LINE):  # where a line begins
            x = left + scale * at
            axes.plot([x, x], [y - 0.05, y], color=GREY, linewidth=0.8)
        y -= 0.3
    text(axes, left + 4.6, 0.29, f"ticks: {LINE}-byte lines", ha="left", size=8.5, colour=GREY)
    for x, fill, words in ((left, BLUE, "bytes that a lane loads"), (left + 2.4, _UNUSED, "rest of their sectors")):
        box(axes, x, 0.22, 0.14, 0.14, fill=fill, edge="white")
        text(axes, x + 0.2, 0.29, words, ha="left", size=8.5, colour=GREY)
    return figure
