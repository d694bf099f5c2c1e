"""Figures of low-latency dispatch and combine: the problem, space and time, frames of slots, rows by expert."""

from collections.abc import Iterable, Sequence
from typing import Any

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, WIDTH
from moe_numba.course.draw.canvas import arrow, canvas, cell, check_range, note, text, tint
from moe_numba.course.draw.drawing import Drawing
from moe_numba.course.draw.player import Box, Frame, Label
from moe_numba.expert_parallel.low_latency.layout import SENTINEL

RANK_COLOURS = BLUE, ORANGE, GREEN, PURPLE

# Of the frames of slots, in pixels: left edge and width of slots, upper edge of the first half, heights of its boxes.
_LEFT, _SLOT, _TOP, _METADATA, _ROW = 50, 92, 46, 22, 26
_LEGEND = 24


def problem() -> Drawing:
    """Draw the dependent operations of one token through ring buffers, and the ones that no pair can avoid."""
    drawing = Drawing("One token: what waits for what")
    chains = (
        ("ring buffers: notify", "L M F W M"),
        ("dispatch", "L M S F W M M"),
        ("combine", "L M S F W M M"),
        ("this lesson: dispatch", "L M W"),
        ("combine", "L M W"),
    )
    kinds = {"L": "blue", "M": "sky", "S": "sky", "F": "purple", "W": "orange"}
    y = 40.0
    for name, chain in chains:
        drawing.text(8, y + 13, name, size=10)
        for place, letter in enumerate(chain.split()):
            wide = 46 if letter == "W" else 26
            x = 140 + sum(48 if c == "W" else 28 for c in chain.split()[:place])
            drawing.box(x, y, wide, 18, kinds[letter])
        y += 26 if name != "combine" else 34
    drawing.legend(y + 6, (("blue", "launch"), ("sky", "memory"), ("purple", "fence"), ("orange", "NVLink")))
    drawing.note(8, y + 26, "Each box waits for the one before it. Widths are not times.")
    return drawing


def space_time() -> Drawing:
    """Draw a row, its acknowledgement and its flag between two ranks over time, and the same with data as flag."""
    drawing, top, unit = Drawing("Space and time: a row of one token"), 74.0, 46.0
    for left, title, steps in ((8.0, "a flag after the data", 3), (208.0, "the data is the flag", 1)):
        sender, receiver, end = left + 46, left + 142, top + (steps + 0.35) * unit
        drawing.text(left, 42, title, bold=True)
        drawing.text(sender, 60, "sender", size=10, anchor="middle")
        drawing.text(receiver, 60, "receiver", size=10, anchor="middle")
        for x in (sender, receiver):
            drawing.line((x, top - 6), (x, top + 3.6 * unit), width=1.2)
        _signal(drawing, sender, receiver, top, unit, "row")
        if steps == 3:
            drawing.box(sender - 40, top + 2, 38, 2 * unit - 4, "purple", "fence", size=9)
            _signal(drawing, receiver, sender, top + unit, unit, "ack.")
            _signal(drawing, sender, receiver, top + 2 * unit, unit, "flag")
        drawing.box(receiver + 2, top, 34, steps * unit, "pale", "polls", size=9)
        drawing.box(receiver + 2, top + steps * unit, 34, 14, "green", "reads", size=9)
        drawing.text(left, max(end, top + 3.6 * unit) + 22, f"{steps} x one way", size=10, kind="quiet")
    drawing.note(8, top + 3.6 * unit + 40, "Time runs down. A slanted line is one way over NVLink.")
    return drawing


def _signal(drawing, start, end, y, unit, words):
    """Draw a message: a slanted line with a head, and its name."""
    drawing.line((start, y), (end, y + unit), width=1.8)
    back = 9 if end < start else -9
    drawing.line((end + back, y + unit - 8), (end, y + unit), (end + 1.3 * back, y + unit - 1), width=1.8)
    drawing.text((start + end) / 2, y + unit / 2 - 7, words, size=9, anchor="middle")


# Frames of slots


def slot_frames(events: Iterable, sizes: Any, data_is_flag: bool) -> tuple[list[Frame], int, int]:
    """Return a frame for each change of a slot in a trace of dispatches, and the width and height of the drawing.

    Parameters
    ----------
    events : list of Event
        Of a trace with accesses (``simulator.trace(accesses=True)``) of `runs.outputs`.
    sizes : runs.Sizes
        Two ranks with at most two tokens each, rows of one 16-byte vector, and one expert per token.
    data_is_flag : bool
        The kernel resets what it has read. Otherwise a flag says that the row is complete.

    Raises
    ------
    ValueError
        Other sizes, or the trace has no stores to slots.
    """
    for name, low, high in (("ranks", 2, 2), ("tokens", 1, 2), ("hidden", 8, 8), ("topk", 1, 1)):
        check_range(name, getattr(sizes, name), low, high)
    events = list(events)
    slots, frames, previous = _Slots(sizes, data_is_flag, events), [], None
    for event in events:
        change = slots.apply(event)
        if change is not None and change != previous:  # the words of a vector are one change
            frames.append(Frame(slots.note, list(slots.shapes(change))))
            previous = change
    if not frames:
        raise ValueError("the trace has no stores to slots; was it made with accesses=True?")
    width, height = slots.size()
    return frames, width, height


def _ends_operation(event):
    """Return whether a CTA counts an operation as done."""
    return event.what == "global store" and event.details["buffer"] == "epochs"


class _Slots:
    """The slots of both ranks: (rank, half, slot) -> what lies there."""

    def __init__(self, sizes, data_is_flag, events):
        self.sizes, self.data_is_flag, self.note = sizes, data_is_flag, ""
        self.last = sum(map(_ends_operation, events)) // sizes.slots  # operation
        self.metadata, self.rows, self.states = {}, {}, {}
        self.done = {(rank, cta): 0 for rank in range(sizes.ranks) for cta in range(sizes.tokens)}  # operations

    def apply(self, event):
        """Apply an event; return (kind, operation, rank, half, slot) of the slot that it changes, or None."""
        details, sizes = event.details or {}, self.sizes
        buffer, index, writer = details.get("buffer"), details.get("index"), (event.rank, event.block[0])
        if _ends_operation(event):
            self.done[writer] += 1
        if event.what == "global store" and buffer == "recv_x" and not self.data_is_flag:
            return self._read(writer, int(index) // 4)
        if event.what != "store" or buffer is None:
            return None
        if buffer == "local" and index >= sizes.metadata_words and details["value"] == SENTINEL:
            return self._read(writer, (index - sizes.metadata_words) // 4 % sizes.slots)
        if buffer.startswith("the buffer of rank "):
            return self._write(writer, int(buffer.split()[-1]), index, details["value"])
        return None

    def _write(self, writer, rank, index, value):
        words, number = self.sizes.metadata_words, self.done[writer] + 1
        is_metadata = index < words
        half, slot = divmod(index if is_metadata else (index - words) // 4, self.sizes.slots)
        place, whose = (rank, half, slot), f"of its token {slot % self.sizes.tokens} on rank {rank}"
        if is_metadata:
            what = "row" if value & 1 else "no row"
            self.metadata[place] = f"op {value >> 1}: {what}"
            name = "metadata" if self.data_is_flag else "flag"
            self.note = f"Operation {number}: rank {writer[0]} stores the {name} {whose}: {what}."
            if value & 1 and not self.data_is_flag:
                self.states[place] = "done"
            return "metadata", number, *place
        self.rows[place], self.states[place] = f"row, op {number}", "done" if self.data_is_flag else "waits"
        self.note = f"Operation {number}: rank {writer[0]} stores the row {whose}."
        return "row", number, *place

    def _read(self, reader, slot):
        number = self.done[reader] + 1
        place, (source, token) = (reader[0], number & 1, slot), divmod(slot, self.sizes.tokens)
        self.states[place] = "plain"
        if self.data_is_flag:
            self.rows.pop(place, None)
        then = " and stores the sentinel" if self.data_is_flag else ""
        self.note = f"Operation {number}: rank {reader[0]} reads the row of rank {source}'s token {token}{then}."
        return "read", number, *place

    def size(self):
        """Return the width and height of the drawing."""
        width = self.sizes.ranks * (_LEFT + _SLOT * self.sizes.slots) + 24
        return width, _TOP + 2 * (_METADATA + _ROW + 12) + _LEGEND

    def shapes(self, change):
        kind, _, *changed = change
        for rank in range(self.sizes.ranks):
            left = 4 + rank * (_LEFT + _SLOT * self.sizes.slots + 16)
            numbers = {min(self.done[rank, cta] + 1, self.last) for cta in range(self.sizes.tokens)}
            within = " and ".join(map(str, sorted(numbers)))
            yield Label(left, 12, f"memory of rank {rank}, which is in operation {within}")
            yield Label(left, 32, "token")
            for slot in range(self.sizes.slots):
                x, name = left + _LEFT + _SLOT * slot, "{}:{}".format(*divmod(slot, self.sizes.tokens))
                yield Label(x + _SLOT / 2 - 3, 32, name, centred=True)
                for line, half in enumerate((1, 0)):
                    y, place = _TOP + line * (_METADATA + _ROW + 12), (rank, half, slot)
                    here = list(place) == changed
                    shown = self.metadata.get(place, "")
                    active = "active" if here and kind == "metadata" else "plain"
                    yield Box(x, y, _SLOT - 6, _METADATA, shown, active, f"slot {place}")
                    state = "active" if here and kind == "row" else self.states.get(place, "plain")
                    content = self.rows.get(place, "sentinel" if self.data_is_flag else "")
                    yield Box(x, y + _METADATA, _SLOT - 6, _ROW, content, state, f"slot {place}")
            for line, half in enumerate((1, 0)):
                yield Label(left, _TOP + line * (_METADATA + _ROW + 12) + (_METADATA + _ROW) / 2, f"half {half}")
        x, y = 4, self.size()[1] - _LEGEND + 4
        for kind, meaning in self.legend().items():
            yield Box(x, y, 14, 14, "", kind, "legend")
            yield Label(x + 20, y + 7, meaning)
            x += 40 + 7 * len(meaning)

    def legend(self):
        """Return {kind of a box: what it stands for}."""
        waits = {} if self.data_is_flag else {"waits": "row whose flag is missing"}
        return {"active": "stored in this frame", **waits, "done": "row that may be read"}


def packed_rows(topk_idx: Sequence[Sequence[Sequence[int]]], rank: int, local_experts: int):
    """Draw the slots of a rank with their local experts, and the rows of each expert, packed.

    ``topk_idx`` has the experts of each token of each rank.
    """
    tokens = [(source, token) for source, of_rank in enumerate(topk_idx) for token in range(len(of_rank))]
    check_range("the number of slots", len(tokens), 2, 12)
    local = lambda experts: [e - rank * local_experts for e in experts if e // local_experts == rank]
    experts = [local(topk_idx[source][token]) for source, token in tokens]
    wide, tall, left = min(0.85, 7.6 / len(tokens)), 0.4, 1.35
    height = 1.95 + (tall + 0.2) * local_experts
    title = f"Rank {rank}: a row's place is the number of earlier slots with the same expert"
    figure, axes = canvas(WIDTH, height, title)
    top = height - 1.05
    text(axes, 0.15, top + tall / 2, "slots", ha="left")
    places = [[sum(e in earlier for earlier in experts[:slot]) for e in own] for slot, own in enumerate(experts)]
    for slot, ((source, token), own) in enumerate(zip(tokens, experts, strict=True)):
        fill = tint(RANK_COLOURS[source]) if own else "#FFFFFF"
        names = ", ".join(map(str, own)) or "no row"
        cell(axes, left + slot * wide, top, 0.92 * wide, tall, f"{source}:{token}", fill=fill, label="slot")
        text(axes, left + (slot + 0.46) * wide, top + tall + 0.11, names, size=7.5, colour=GREY)
    text(axes, 0.15, top + tall + 0.11, "local experts", ha="left", size=7.5, colour=GREY)
    for e in range(local_experts):
        y = top - 0.35 - (e + 1) * (tall + 0.2)
        text(axes, 0.15, y + tall / 2, f"expert {e}", ha="left")
        for place in range(len(tokens)):
            cell(axes, left + place * wide, y, 0.92 * wide, tall, "", edge="#DDDDDD", label="free")
        for slot, (own, of_slot) in enumerate(zip(experts, places, strict=True)):
            if e in own:
                place, (source, token) = of_slot[own.index(e)], tokens[slot]
                x, fill = left + place * wide, tint(RANK_COLOURS[source])
                cell(axes, x, y, 0.92 * wide, tall, f"{source}:{token}", fill=fill, label="row")
                ends = (left + (slot + 0.46) * wide, top), (x + 0.46 * wide, y + tall)
                arrow(axes, *ends, colour=RANK_COLOURS[source], line=0.7, alpha=0.5)
    note(axes, 0.15, 0.17, "source rank:token. White: the slot has no row, or the row of the output is not written.")
    return figure
