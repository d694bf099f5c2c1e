"""Figures of low-latency dispatch and combine: chains of latencies, frames of slots from traces, rows by expert."""

from collections.abc import Iterable, Mapping, Sequence

import matplotlib

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, STYLE, WIDTH, Picture
from moe_numba.course.draw.canvas import arrow, canvas, cell, check_range, ink_on, note, text, tint
from moe_numba.course.draw.player import Box, Frame, Label
from moe_numba.course.lessons.low_latency.runs import Sizes
from moe_numba.expert_parallel.low_latency.layout import SENTINEL

RANK_COLOURS = BLUE, ORANGE, GREEN, PURPLE
_KINDS = {"kernel": BLUE, "launch": GREY, "link": ORANGE, "memory": SKY, "rest": PURPLE}

# Of the frames of slots, in pixels: left edge and width of slots, upper edge of the first half, heights of its boxes.
_LEFT, _SLOT, _TOP, _METADATA, _ROW = 50, 92, 46, 22, 26
_LEGEND = 24


def latency_chain(chains: Mapping[str, Sequence[tuple[str, str, float, float]]], title: str, caption: str = ""):
    """Draw spans of time to scale, one line per chain.

    Parameters
    ----------
    chains : dict
        Label -> (name, kind, start, end) in microseconds. The kind is "kernel", "launch", "link", "memory" or "rest".
        Names that do not fit their span are listed behind the chain's end.
    title, caption : str

    Returns
    -------
    Figure
    """
    with matplotlib.rc_context(STYLE):
        height = 1.25 + 0.55 * len(chains)
        figure = Picture(figsize=(WIDTH, height))
        axes = figure.add_axes((0.31, 0.8 / height, 0.67, 1 - 1.25 / height))
        last = max(span[3] for spans in chains.values() for span in spans)
        right = 1.1 * last
        for y, spans in enumerate(chains.values()):
            outside = []
            for name, kind, start, end in spans:
                bar = axes.barh(y, end - start, left=start, height=0.5, color=_KINDS[kind], edgecolor="white")
                bar[0].set_label("span")
                if end - start > 0.017 * last * (len(name) + 1):
                    colour = ink_on(_KINDS[kind])
                    axes.text((start + end) / 2, y, name, ha="center", va="center", fontsize=8.5, color=colour)
                else:
                    outside.append(name)
            total = f"{spans[-1][3]:.1f} µs" + (f" ({', '.join(outside)})" if any(outside) else "")
            axes.text(spans[-1][3] + 0.01 * last, y, total, va="center", fontsize=8.5, color=INK)
            right = max(right, spans[-1][3] + (0.02 + 0.013 * len(total)) * last)
        axes.set_yticks(range(len(chains)), list(chains), color=INK)
        axes.set_ylim(len(chains) - 0.4, -0.6)
        axes.set_xlim(0, right)
        axes.set_xlabel("µs")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        used = {kind for spans in chains.values() for _, kind, *_ in spans}
        for place, kind in enumerate(kind for kind in _KINDS if kind in used):
            figure.text(0.31 + 0.1 * place, 0.28 / height, f"■ {kind}", fontsize=8.5, color=_KINDS[kind])
        figure.text(0.01, 1 - 0.08 / height, title, va="top", fontsize=12, fontweight="bold")
        figure.text(0.01, 0.08 / height, caption, fontsize=7.5, color=GREY)
    return figure


# Frames of slots


def slot_frames(events: Iterable, sizes: Sizes, data_is_flag: bool) -> tuple[list[Frame], int, int]:
    """Return a frame for each change of a slot in a trace of dispatches, and the width and height of the drawing.

    Parameters
    ----------
    events : list of Event
        Of a trace with accesses (``simulator.trace(accesses=True)``) of `low_latency_runs.run_rounds`.
    sizes : Sizes
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
