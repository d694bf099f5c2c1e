"""Figures of "Talk to a peer": two ranks, a rank's allocation, a torn message, a ring, a stuck ring, resident CTAs."""

from math import atan2, cos, gcd, pi, sin

from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.lessons.talk_to_a_peer import runs
from moe_numba.course.lessons.talk_to_a_peer.sizes import WORD_SLOTS

__all__ = ["buffer", "message", "problem", "resident", "ring", "stuck"]


def _arrow(drawing, start, end, width=1.4):
    """Draw a line with a head at its end."""
    drawing.line(start, end, width=width)
    angle = atan2(end[1] - start[1], end[0] - start[0])
    wing = lambda turn: (end[0] - 6 * cos(angle + turn), end[1] - 6 * sin(angle + turn))
    drawing.line(wing(pi / 7), end, wing(-pi / 7), width=width)


def problem() -> Drawing:
    """Draw two GPUs: a kernel of one stores data and a flag in the other's memory, where a kernel polls the flag."""
    drawing = Drawing("Rank 0 writes, rank 1 reads, over NVLink")
    for rank, x in ((0, 8.0), (1, 246.0)):
        drawing.text(x, 46, f"rank {rank}: a GPU", bold=True)
        drawing.box(x, 54, 136, 30, "sky", "its kernel", size=10)
        drawing.box(x, 120, 136, 56, "pale")
        drawing.text(x + 6, 172, "its memory", size=9)
    drawing.box(252, 136, 84, 22, "orange", "data", size=9)
    drawing.box(342, 136, 34, 22, "purple", "flag", size=9)
    _arrow(drawing, (110, 86), (250, 144))
    _arrow(drawing, (134, 86), (344, 134))
    drawing.text(150, 142, "1  store data", size=9)
    drawing.text(240, 88, "2  store the flag", size=9, anchor="end")
    _arrow(drawing, (359, 134), (359, 86))
    drawing.text(354, 102, "3  poll", size=9, anchor="end")
    drawing.note(8, 196, "Stores 1 and 2 may arrive in any order.")
    drawing.note(8, 210, "What must both kernels do so that rank 1 reads exactly what rank 0 wrote?")
    return drawing


def buffer() -> Drawing:
    """Draw a rank's allocation with its parts, and how another process gets an address of it."""
    drawing, y = Drawing("How another process finds a buffer"), 66.0
    drawing.text(8, 46, "process of rank 0: cudaMalloc, once", bold=True)
    kinds = {"data": "orange", "barrier signals": "purple", "buffer_ptrs": "sky", "barrier_signal_ptrs": "green"}
    for (name, (_, size)), x, wide in zip(
        runs.buffer_parts(2 * 10**9).items(), (8, 152, 232, 308), (142, 78, 74, 74), strict=True
    ):
        drawing.box(x, y - 12, wide, 24, kinds[name], name if wide > 80 else "", size=9)
        drawing.text(x, y + 26, "2 GB" if name == "data" else f"{size} B", size=9)
    drawing.legend(y + 46, [(kinds[n], n) for n in list(kinds)[1:]])
    drawing.text(8, 142, "cudaIpcGetMemHandle: a handle of 64 bytes", size=10)
    _arrow(drawing, (40, 148), (40, 172))
    drawing.note(50, 164, "all ranks exchange their handles on the host")
    drawing.text(8, 190, "process of rank 1: cudaIpcOpenMemHandle(handle)", bold=True)
    drawing.text(8, 206, "returns an address of the same memory, in its own address space", size=10)
    drawing.box(8, 216, 142, 22, "sky", "buffer_ptrs[0] = address", size=9)
    _arrow(drawing, (152, 227), (176, 227))
    drawing.text(182, 231, "kernels of rank 1 load from it and store to it", size=9)
    return drawing


def message() -> Drawing:
    """Draw when stores become visible to the other rank: relaxed, and with release and acquire."""
    drawing = Drawing("When stores reach rank 1; time runs down")
    for x, name, right in ((8.0, "relaxed store of the flag", False), (204.0, "release, and acquire", True)):
        drawing.text(x, 44, name, bold=True)
        drawing.note(x + 8, 60, "rank 0")
        drawing.note(x + 128, 60, "rank 1")
        left, far = x + 24, x + 146
        drawing.line((left, 66), (left, 186))
        drawing.line((far, 66), (far, 186))
        for i, (sent, seen) in enumerate(((76, 104), (86, 162 if not right else 124))):
            _arrow(drawing, (left, sent), (far, seen), 1.2)
            drawing.text(left - 4, sent + 4, f"d{i}", size=9, anchor="end")
        flag, seen = (98, 122) if not right else (132, 154)
        _arrow(drawing, (left, flag), (far, seen), 2.2)
        drawing.text(left - 4, flag + 4, "flag", size=9, anchor="end", bold=True)
        if right:
            drawing.box(left - 3, 88, 6, 42, "purple")
            drawing.text(left + 8, 176, "purple: the release waits", size=8, kind="quiet")
        at = seen + 12
        drawing.text(far + 4, at, "reads", size=9)
        drawing.text(far + 4, at + 11, "d0, d1" if right else "d0, old", size=9, bold=True)
    drawing.note(8, 206, "A release makes visible what came before it, then the flag.")
    return drawing


def ring() -> Drawing:
    """Draw a ring: slots and tail in the receiver's memory, the head in the sender's."""
    drawing = Drawing("A ring: 6 rows sent, 3 taken")
    drawing.text(8, 46, "sender's memory", bold=True)
    drawing.box(8, 56, 70, 26, "green", "head = 3", size=10)
    drawing.text(150, 46, "receiver's memory", bold=True)
    drawing.box(150, 56, 70, 26, "purple", "tail = 6", size=10)
    held = {3: "row 3", 4 % WORD_SLOTS: "row 4", 5 % WORD_SLOTS: "row 5"}
    for slot in range(WORD_SLOTS):
        x = 150 + 58 * slot
        drawing.box(x, 94, 56, 34, "orange" if slot in held else "pale", held.get(slot, "free"), size=10)
        drawing.note(x, 142, f"slot {slot}")
    drawing.text(8, 166, "The sender stores row n in slot n % slots, then the tail n + 1: over there.", size=9)
    drawing.text(8, 180, "The receiver takes row n, then stores the head n + 1 over there: a credit.", size=9)
    drawing.text(8, 194, "Both counters only grow, and each end polls only its own memory.", size=9)
    return drawing


def stuck(chunk: int, batch: int, slots: int) -> Drawing:
    """Draw a ring with as many rows without a credit as there can be, and say whether both ends wait for ever."""
    most = batch - gcd(chunk, batch)  # both ends move by multiples of the divisor
    held = 0 if slots < chunk else min(most, slots)
    free = slots - held
    drawing = Drawing(f"{slots} slots, chunks of {chunk}, batches of {batch}")
    wide = min(44.0, (WIDTH - 16) / slots)
    for slot in range(slots):
        drawing.box(
            8 + wide * slot, 36, wide - 2, 26, "orange" if slot < held else "pale", "row" if slot < held else "free"
        )
    if slots < chunk:
        found, says = (
            f"All {slots} slots are free.",
            f"The sender waits for {chunk} free slots, and the ring has {slots}.",
        )
    elif free < chunk:
        found = f"{held} rows have been read without a credit, {free} slots are free."
        says = f"The sender waits for {chunk} free slots; a credit needs {batch} rows."
    else:
        found = f"When all rows have been read, at most {held} lack a credit: {free} slots are free."
        says = f"The sender needs {chunk} free slots, so it never waits for ever."
    drawing.text(8, 82, found, size=10)
    drawing.text(8, 98, says, size=10)
    return drawing


def resident() -> Drawing:
    """Draw which CTAs are resident if all senders come first, and if senders and receivers alternate."""
    drawing = Drawing("Eight CTAs, four SMs: which have started?")
    for y, name, first in ((48.0, "all senders first", True), (132.0, "sender, receiver, sender ...", False)):
        drawing.text(8, y, name, bold=True)
        for cta in range(8):
            sends = cta < 4 if first else cta % 2 == 0
            x = 8 + 46 * cta + (8 if cta >= 4 else 0)
            kind = ("orange" if sends else "green") if cta < 4 else "pale"
            drawing.box(x, y + 10, 44, 24, kind, "send" if sends else "receive", size=9)
        drawing.note(8, y + 50, "on an SM")
        drawing.note(200, y + 50, "not started: no SM is free")
    drawing.note(8, 198, "Above, senders wait for receivers that wait for an SM.")
    return drawing
