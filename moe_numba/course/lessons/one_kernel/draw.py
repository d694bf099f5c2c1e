"""Figures of the lesson on one kernel: the chain, what needs what, places of rows, and the kernel's timeline."""

from collections.abc import Mapping, Sequence

from moe_numba.course.draw.canvas import check_range
from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.lessons.one_kernel.model import Timeline

_LEFT, _RIGHT = 62.0, 10.0
KINDS = {"dispatch": "orange", "combine": "orange", "first GEMM": "blue", "second GEMM": "green"}
RANK_KINDS = "sky", "orange", "green", "purple"


def chain(parts: Mapping[int, Mapping[str, float]]) -> Drawing:
    """Draw the recorded parts of a chain of launches, of several numbers of GPUs: what the link and the SMs do."""
    drawing = Drawing("A chain of launches, in microseconds")
    longest, y = max(sum(of.values()) for of in parts.values()), 34.0
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    for ranks, of in parts.items():
        drawing.text(8, y + 10, f"{ranks} GPUs", bold=True)
        for row, name in enumerate(("NVLink", "compute")):
            drawing.text(8, y + 30 + 24 * row, name, size=10)
            drawing.box(_LEFT, y + 16 + 24 * row, sum(of.values()) * scale, 20)
        x = _LEFT
        for name, us in of.items():
            on_link = name in ("dispatch", "combine")
            words = f"{us:.0f}" if us * scale > 24 else ""
            drawing.box(x, y + (16 if on_link else 40), us * scale, 20, KINDS.get(name, "purple"), words)
            x += us * scale
        y += 74
    kinds = (("orange", "dispatch, combine"), ("blue", "first GEMM"), ("green", "second"), ("purple", "other launches"))
    drawing.legend(y + 6, kinds)
    drawing.note(8, y + 24, "Grey: idle. Parts were timed alone; their sum is not the layer's time.")
    return drawing


def dependencies() -> Drawing:
    """Draw what each part of a layer needs."""
    drawing = Drawing("What needs what")
    boxes = (
        ("counts of all ranks", "purple", "for each rank and expert"),
        ("rows of one expert", "orange", "from all ranks"),
        ("first GEMM of the expert", "blue", "a tile: its rows"),
        ("second GEMM of the expert", "green", "a tile: all columns of its rows"),
        ("rows at home", "orange", "a piece: when it is stored"),
        ("sum of a token", "purple", "the rows of its experts"),
    )
    y = 34.0
    for number, (name, kind, needs) in enumerate(boxes):
        drawing.box(8, y, 176, 26, kind, name)
        drawing.note(194, y + 17, needs)
        if number + 1 < len(boxes):
            drawing.line((96, y + 26), (96, y + 40), width=1.6)
            drawing.line((92, y + 35), (96, y + 40), (100, y + 35), width=1.6)
        y += 40
    drawing.note(8, y + 8, "Arrows: what is needed. None of it is of all experts.")
    return drawing


def places(counts: Sequence[Sequence[int]], rank: int, experts: int) -> Drawing:
    """Draw the rows of a rank's experts with the ranks that they come from.

    Parameters
    ----------
    counts : sequence
        Of each rank: its rows for each expert of all ranks.
    rank, experts : int
        Whose memory is drawn, and how many experts each rank has.
    """
    check_range("the number of ranks", len(counts), 1, 4)
    own = range(rank * experts, (rank + 1) * experts)
    total = sum(of[g] for of in counts for g in own)
    check_range("the number of rows", total, 1, 16)
    drawing, y = Drawing(f"Rows in the memory of rank {rank}"), 34.0
    drawing.text(8, y + 8, "counts", size=10, bold=True)
    for i, g in enumerate(own):
        drawing.text(96 + 64 * i, y + 8, f"expert {g}", size=10, anchor="middle")
    for source, of in enumerate(counts):
        y += 24
        drawing.text(8, y + 4, f"rank {source}", size=10)
        for i, g in enumerate(own):
            drawing.box(76 + 64 * i, y - 9, 40, 18, RANK_KINDS[source], str(of[g]))
    y += 34
    wide = min(30.0, (WIDTH - 16) / total)
    drawing.text(8, y, "places", size=10, bold=True)
    x, place = 8.0, 0
    for g in own:
        start = x
        for source, of in enumerate(counts):
            if of[g]:
                drawing.text(x + wide / 2, y + 18, str(place), size=9, anchor="middle", kind="quiet")
            for _ in range(of[g]):
                drawing.box(x + 1, y + 24, wide - 2, 22, RANK_KINDS[source], str(place))
                x, place = x + wide, place + 1
        if x > start:
            drawing.line((start + 1, y + 52), (x - 1, y + 52), width=1.6)
            drawing.text((start + x) / 2, y + 66, f"expert {g}", size=10, anchor="middle")
    drawing.legend(y + 88, [(RANK_KINDS[source], f"from rank {source}") for source in range(len(counts))])
    drawing.note(8, y + 106, "Grey numbers: the first place of a rank's rows, the rows before it.")
    return drawing


def kernel(timelines: Mapping[int, tuple[float, Timeline]]) -> Drawing:
    """Draw the model's timelines of one kernel, each with the time at which the last row has arrived."""
    drawing = Drawing("One kernel, in microseconds (model)")
    longest, y = max(of.sums for _, of in timelines.values()), 34.0
    scale = (WIDTH - _LEFT - _RIGHT) / longest
    for ranks, (last_row, of) in timelines.items():
        drawing.text(8, y + 10, f"{ranks} GPUs, sums end after {of.sums:.0f}", bold=True)
        for row, name in enumerate(("NVLink", "compute")):
            drawing.text(8, y + 30 + 24 * row, name, size=10)
            drawing.box(_LEFT, y + 16 + 24 * row, of.sums * scale, 20)
        bars = (
            (16, 0.0, last_row, "orange"),
            (16, of.first_gemm, of.rows_sent, "orange"),
            (40, of.first_rows, of.first_gemm, "blue"),
            (40, of.first_gemm, of.second_gemm, "green"),
            (40, max(of.second_gemm, of.rows_sent), of.sums, "purple"),
        )
        for at, begin, end, kind in bars:
            words = f"{end - begin:.0f}" if (end - begin) * scale > 24 else ""
            drawing.box(_LEFT + begin * scale, y + at, max(end - begin, 0) * scale, 20, kind, words)
        y += 74
    drawing.legend(y + 6, (("orange", "rows"), ("blue", "first GEMM"), ("green", "second GEMM"), ("purple", "sums")))
    drawing.note(8, y + 24, "Grey: idle, but NVLink may have pauses within orange bars, too.")
    return drawing
