"""Records every change of the rings of our Numba port of DeepEP's dispatch, by running it in the simulator.

`ring_player` draws it. The result of `play` can be written as JSON, so it can come from another process.
"""

from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.course.deepep_port import simulate
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig, dispatch_offsets, min_buffer_bytes

_FLAGS = "start", "end", "head", "tail"


class Moment(NamedTuple):
    """One change of the ring from a channel of ``source`` to ``rank``; the ring lies in the buffer of ``rank``."""

    what: str  # "start", "end", "tail", "head": the flag that was stored; "row": a row was written
    rank: int
    source: int
    channel: int
    value: int  # the stored value, or the row's slot
    token: int = -1  # the row's token on the source rank


def decode(events, config):
    """Return the moments in a trace of DeepEP's dispatch, in order."""
    offsets, queues = dispatch_offsets(config), config.ranks * config.channels
    found = []
    for event in events:
        details = event.details
        if event.what == "row":
            found.append(Moment("row", *(details[name] for name in ("rank", "source", "channel", "slot", "token"))))
        elif event.what == "store" and details["buffer"].startswith("the buffer of rank "):
            for name in _FLAGS:
                queue = details["index"] - getattr(offsets, name) // 4
                if 0 <= queue < queues:
                    rank, (channel, source) = int(details["buffer"].split()[-1]), divmod(queue, config.ranks)
                    found.append(Moment(name, rank, source, channel, details["value"]))
    return found


def play(is_token_in_rank, ring=4, chunk=2, channels=2, warps=1, seed=0, fault=""):
    """Run a dispatch of two or more virtual ranks and record every change of the rings.

    ``is_token_in_rank`` has for each rank a list of rows of 0 and 1. The result is a dict of lists and numbers:
    ``moments``, the ``matrices`` of each rank's handle, ``received`` (each rank's rows, as (source, token)), and the
    arguments.
    """
    ranks = len(is_token_in_rank)
    config = DeepEPConfig(ranks, channels, ring, chunk, 16, 0, 0, ranks, warps, fault=fault, on_row=_note_row)
    chosen = [torch.tensor(rows, dtype=torch.bool).view(-1, ranks) for rows in is_token_in_rank]
    x = [torch.full((len(c), 8), 100.0 * r, dtype=torch.bfloat16) for r, c in enumerate(chosen)]
    # The contents of torch.empty would influence the order of events under a seed: fill new tensors.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with simulate.virtual_ranks(ranks, min_buffer_bytes(config)) as virtual_ranks:
            with simulator.seed(seed), simulator.weak_memory(), simulator.trace() as events:
                got = simulate.dispatch_all(virtual_ranks, config, x, chosen)
    finally:
        torch.use_deterministic_algorithms(before)
    handles = [g[3] for g in got]
    received = []
    for r, h in enumerate(handles):
        ends = h.rank_prefix_matrix[:, r].tolist()
        sources = [s for s in range(ranks) for _ in range(([0, *ends])[s], ends[s])]
        received.append([[s, t] for s, t in zip(sources, h.recv_src_idx.tolist(), strict=True)])
    names = "rank_prefix_matrix", "channel_prefix_matrix", "recv_channel_prefix_matrix", "send_head"
    return {
        "moments": [list(moment) for moment in decode(events, config)],
        "matrices": [{name: getattr(h, name).tolist() for name in names} for h in handles],
        "received": received,
        "is_token_in_rank": [c.int().tolist() for c in chosen],
        "ring": ring,
        "chunk": chunk,
        "channels": channels,
        "ranks": ranks,
    }


def _note_row(config, slot, token, peer, lane):
    """Add an event to the trace when a row has been written."""
    if lane == 0:
        queue, position = divmod(slot, config.ring)
        channel, source = divmod(queue, config.ranks)
        details = {"rank": peer, "source": source, "channel": channel, "slot": position, "token": token}
        simulator.thread().record_event("row", details)


class Ring:
    """The state of one ring: its flags and the token in each slot."""

    def __init__(self, size):
        self.slots = [None] * size  # tokens
        self.unpublished = set()  # slots that are written, but not published yet
        self.start = self.end = self.head = self.tail = 0

    def apply(self, moment):
        """Apply a moment."""
        if moment.what == "row":
            self.slots[moment.value] = moment.token
            self.unpublished.add(moment.value)
            return
        setattr(self, moment.what, moment.value)
        if moment.what == "tail":
            self.unpublished -= self.full()

    def full(self):
        """Return the slots between head and tail."""
        return {i % len(self.slots) for i in range(self.head, self.tail)}

    def state(self, slot):
        """Return the state of a slot: "written" (not yet published), "full" (until the head passes it) or "free"."""
        return "written" if slot in self.unpublished else "full" if slot in self.full() else "free"


def replay(played):
    """Yield (moment, {(rank, source, channel): Ring}) after each moment; the rings are modified in place."""
    every = [
        (r, s, c) for r in range(played["ranks"]) for c in range(played["channels"]) for s in range(played["ranks"])
    ]
    rings = {key: Ring(played["ring"]) for key in every}
    for values in played["moments"]:
        moment = Moment(*values)
        rings[moment.rank, moment.source, moment.channel].apply(moment)
        yield moment, rings
