"""Figures of combine: where a token's rows are, rounding, loads in flight, roles of warps, paths of rows, deadlocks."""

import math
from collections.abc import Sequence

import torch

from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.lessons.combine.deadlocks import Stuck
from moe_numba.course.lessons.combine.inputs import rows_of

__all__ = ["cycle", "loads", "paths", "problem", "roles", "rounding", "stuck_ring"]

_RANKS = ("blue", "orange", "green")


def problem() -> Drawing:
    """Draw the rows of three ranks, ordered by home rank, and the sums of rank 0's tokens."""
    drawing, wide = Drawing("Rows come back to the rank that has their token"), 27.0
    generator = torch.Generator().manual_seed(5)
    is_in = [torch.rand(4, 3, generator=generator) < 0.55 for _ in range(3)]
    is_in[0][0] = True
    places = {}
    for rank in range(3):
        y = 34 + 46 * rank
        drawing.text(8, y + 12, f"rank {rank} has computed", size=10, bold=True)
        for n, (home, token) in enumerate(zip(*(each.tolist() for each in rows_of(is_in, rank)), strict=True)):
            drawing.box(
                8 + n * wide, y + 17, wide - 2, 17, _RANKS[rank] if home == 0 else "pale", f"{home}:{token}", size=8
            )
            if home == 0:
                places[token, rank] = n
    top = 186
    drawing.text(8, top, "rank 0 sums, for each of its tokens", size=10, bold=True)
    for token in range(4):
        y = top + 8 + 21 * token
        drawing.text(8, y + 12, f"token {token}", size=10)
        x = 62.0
        for rank in range(3):
            if (token, rank) in places:
                drawing.box(x, y, 66, 17, _RANKS[rank], f"row of rank {rank}", size=8)
                x += 84
                if any((token, later) in places for later in range(rank + 1, 3)):
                    drawing.text(x - 9, y + 12, "+", size=11, anchor="middle")
        if x == 62:
            drawing.text(x, y + 12, "0", size=10)
    drawing.note(8, top + 106, "home rank:token. A rank's rows are ordered by home rank, then by token.")
    return drawing


def rounding(values: Sequence[float]) -> Drawing:
    """Draw a sum that is rounded to bfloat16 after each row, and one in float32 that is rounded once."""
    drawing, columns = Drawing(f"One element of {len(values)} rows"), (96.0, 192.0, 288.0)
    for x, words in zip(columns, ("row", "rounded each time", "float32"), strict=True):
        drawing.text(x + 40, 40, words, size=10, kind="quiet", anchor="middle")
    rows = torch.tensor(list(values)).bfloat16()
    narrow, wide = torch.zeros((), dtype=torch.bfloat16), torch.zeros(())
    for i, value in enumerate(rows):
        narrow, wide = (narrow.float() + value.float()).bfloat16(), wide + value.float()
        y = 46 + 20 * i
        drawing.text(84, y + 13, f"rank {i}", size=10, anchor="end")
        for x, number, kind in zip(columns, (value, narrow, wide), ("pale", "orange", "sky"), strict=True):
            drawing.box(x, y, 80, 17, kind, f"{number.item():.7g}", size=9)
    exact, y = rows.double().sum().item(), 54 + 20 * len(values)
    drawing.text(84, y + 13, "result", size=10, anchor="end", bold=True)
    for x, number in zip(columns[1:], (narrow, wide.bfloat16()), strict=True):
        drawing.box(x, y, 80, 17, "pale", f"{number.item():.7g}", size=9)
        drawing.note(x, y + 31, f"error {abs(number.item() - exact):.3g}")
    return drawing


def loads() -> Drawing:
    """Draw what a lane does over time: one load at a time, and four in flight."""
    drawing = Drawing("A lane over time: it waits, or it has loads in flight")
    for top, title, several in ((34, "one vector of a row in flight", False), (104, "four vectors in flight", True)):
        drawing.text(8, top + 8, title, size=10, bold=True)
        for i in range(4):
            x = 8.0 + (6 * i if several else 90 * i)
            y = top + 14 + (8 * i if several else 0)
            drawing.box(x, y, 74, 7 if several else 12, "sky")
            if not several:
                drawing.box(x + 75, y, 12, 12, "green")
        if several:
            for i in range(4):
                drawing.box(104 + 13 * i, top + 38, 12, 8, "green")
            drawing.note(170, top + 46, "the same four vectors")
    drawing.legend(168, (("sky", "a load on its way"), ("green", "add, and store")))
    return drawing


def roles() -> Drawing:
    """Draw the warps of a channel in our port of DeepEP's kernel and in this lesson's, and who publishes what."""
    drawing = Drawing("Who does what for a channel, and who publishes")
    for y, title, sends, sums, words in (
        (
            36,
            "our port of DeepEP's kernel: a channel is a pair of CTAs",
            (("warps for rank 0", "orange"), ("warps for rank 1", "orange")),
            (("warp 0: heads", "purple"), ("warp 1 sums", "green"), ("warp 2 sums", "green")),
            (
                "Tail: a warp per rank, with release, after a chunk and a barrier of its warps.",
                "Head: warp 0, the least of what all other warps still need.",
            ),
        ),
        (
            178,
            "this lesson: a channel is one warp that sends, and one that sums",
            (("warp c sends to all", "orange"),),
            (("warp c sums", "green"),),
            (
                "Tail: the warp's own count. Head: the warp's own count.",
                "From step 8 on one more warp of each CTA publishes for all.",
            ),
        ),
    ):
        drawing.text(8, y + 8, title, size=10, bold=True)
        drawing.box(140, y + 18, 108, 44, "pale")
        drawing.text(194, y + 30, "rings", size=9, anchor="middle")
        for slot in range(6):
            drawing.box(147 + 16 * slot, y + 36, 14, 14, "sky" if slot < 4 else "pale")
        for n, (name, kind) in enumerate(sends):
            drawing.box(8, y + 18 + 24 * n, 112, 20, kind, name, size=9)
        for n, (name, kind) in enumerate(sums):
            drawing.box(268, y + 18 + 24 * n, 114, 20, kind, name, size=9)
        drawing.line((120, y + 36), (138, y + 36), width=1.6)
        drawing.line((250, y + 36), (266, y + 36), width=1.6)
        below = y + 30 + 24 * max(len(sends), len(sums), 2)
        for n, line in enumerate(words):
            drawing.note(8, below + 13 * n, line)
    return drawing


def paths() -> Drawing:
    """Draw how a row travels, in steps: through registers, by TMA, and own rows directly."""
    drawing = Drawing("The way of a row")
    kinds = {"registers": "sky", "shared memory": "orange"}
    steps = (
        ("through registers", ("y", "registers", "ring at the peer", "registers", "out")),
        ("bulk copies send", ("y", "shared memory", "ring at the peer", "registers", "out")),
        ("own rows directly: an own row", ("y", "", "", "registers", "out")),
        ("bulk copies receive: an own row", ("y", "", "shared memory", "registers", "out")),
    )
    places = ((8, 30), (60, 88), (170, 92), (280, 66), (352, 30))
    for n, (title, names) in enumerate(steps):
        y = 36 + 46 * n
        drawing.text(8, y + 8, title, size=10, bold=True)
        last = None
        for (x, wide), name in zip(places, names, strict=True):
            if not name:
                continue
            if last is not None:
                drawing.line((last, y + 23), (x, y + 23), width=1.4)
            drawing.box(x, y + 14, wide, 18, kinds.get(name, "pale"), name, size=8)
            last = x + wide
    drawing.note(8, 36 + 46 * len(steps) + 4, "Rows are summed in registers. At last a bulk store writes the sum.")
    return drawing


def stuck_ring(chunk: int, ring: int, warps: int, stuck: Stuck) -> Drawing:
    """Draw a deadlocked ring of our port: its slots, the sender, and what each summing warp has read and waits for."""
    reducers, head, tail = 2 * warps - 1, stuck.head, stuck.tail
    drawing = Drawing(f"A ring of {ring} rows, chunks of {chunk}, {reducers} summing warps")
    wide = min(44.0, 300.0 / ring)
    drawing.text(8, 48, "slots", size=10)
    for slot in range(ring):
        row = next((row for row in range(head, tail) if row % ring == slot), None)
        words = "free" if row is None else f"row {row}"
        drawing.box(70 + wide * slot, 36, wide - 2, 18, "pale" if row is None else "orange", words, size=8)
    drawing.note(70, 68, f"head {head}, tail {tail}: {ring - (tail - head)} free. Orange: read, and not free.")
    drawing.text(8, 90, "sender", size=10)
    drawing.text(70, 90, f"waits for {chunk} free slots", size=10, bold=True)
    for warp in range(reducers):
        own = range(warp, tail + reducers, reducers)
        read, later = [row for row in own if row < tail], [row for row in own if row >= tail]
        needs, y = (read[-1] + 1 if read else 0), 112 + 20 * warp
        drawing.text(8, y, f"warp {warp + 1}", size=10)
        said = f"has read {', '.join(map(str, read))}" if read else "has read nothing"
        drawing.text(70, y, f"{said}; said: none before {needs}", size=9.5, bold=needs == head)
        drawing.text(WIDTH - 8, y, f"waits for row {later[0]}", size=9.5, anchor="end")
    drawing.note(8, 118 + 20 * reducers, f"The head is the least that a warp has said: {head}.")
    return drawing


def cycle(waits: Sequence[tuple[str, str]]) -> Drawing:
    """Draw a cycle of waits: each of ``waits``, (who, for what), waits for the next, the last for the first."""
    drawing, n = Drawing("A cycle of waits"), len(waits)
    middle, across, up = (WIDTH / 2, 176.0), 150.0, 118.0
    spots = [
        (middle[0] + across * math.sin(2 * math.pi * i / n), middle[1] - up * math.cos(2 * math.pi * i / n))
        for i in range(n)
    ]
    for i, (x, y) in enumerate(spots):
        to = spots[(i + 1) % n]
        drawing.line((x, y), to, width=1.4)
        half, angle = ((x + to[0]) / 2, (y + to[1]) / 2), math.atan2(to[1] - y, to[0] - x)
        for turn in (2.6, -2.6):  # an arrow's head
            drawing.line(half, (half[0] + 9 * math.cos(angle + turn), half[1] + 9 * math.sin(angle + turn)), width=1.8)
    for (who, why), (x, y) in zip(waits, spots, strict=True):
        kind, ink = ("orange", "dark") if "sends" in who else ("sky", "dark")
        drawing.box(x - 57, y - 17, 114, 34, kind)
        drawing.text(x, y - 3, who, size=10, kind=ink, anchor="middle", bold=True)
        drawing.text(x, y + 11, why, size=8.5, kind=ink, anchor="middle")
    drawing.note(8, 330, "Each waits for the one that its arrow points to.")
    return drawing
