"""The rings of a dispatch over time: a player of what `ring_trace` has recorded in the simulator."""

from moe_numba.course.draw.player import Box, Frame, Label, Player
from moe_numba.course.lessons.dispatch.ring_trace import Moment, replay

_WIDTH, _TALL, _RING = 640, 34, 80
_KINDS = {"free": "plain", "written": "waits", "full": "active"}
_SHOWN = "row", "head", "tail"  # start and end say which rows follow: notify's subject


def describe(moment: Moment) -> str:
    """Describe a moment in one sentence."""
    sender = f"Rank {moment.source}, channel {moment.channel}"
    if moment.what == "row":
        where = f"slot {moment.value} at rank {moment.rank}"
        return f"{sender}, writes token {moment.token} to {where}: nobody may read it yet."
    if moment.what == "head":
        copied = f"Rank {moment.rank} has copied rows of {sender[0].lower() + sender[1:]}"
        return f"{copied}; it stores head {moment.value}: those slots are free."
    if moment.what == "tail":
        return f"{sender}, stores tail {moment.value} at rank {moment.rank}: its rows may be read."
    return f"{sender}, stores {moment.what} {moment.value} at rank {moment.rank}, which encodes {-moment.value - 1}."


def rings(played: dict) -> Player:
    """Return a player of the rings of two ranks; a frame for each row, tail and head."""
    frames = []
    for moment, states in replay(played):
        if moment.what in _SHOWN:
            frames.append(
                Frame(describe(moment), _shapes(played, states, (moment.rank, moment.source, moment.channel)))
            )
    rows = max(2, len(played["is_token_in_rank"]) * played["channels"])
    return Player(frames, _WIDTH, 30 + rows * _TALL, "Rings in the memory of two ranks: token numbers in their slots")


def _shapes(played, states, changed):
    shapes: list = []
    wide = _RING / played["ring"]
    for rank in range(2):
        left = rank * _WIDTH / 2
        shapes.append(Label(left + 6, 12, f"in the memory of rank {rank}"))
        for line, key in enumerate(sorted(key for key in states if key[0] == rank)):
            ring, top = states[key], 28 + line * _TALL
            mark = "> " if key == changed else ""
            shapes.append(Label(left + 6, top + 13, f"{mark}channel {key[2]}, from {key[1]}"))
            for slot in range(played["ring"]):
                state = ring.state(slot)
                text = "" if state == "free" else str(ring.slots[slot])
                shapes.append(Box(left + 128 + slot * wide, top, wide, 26, text, _KINDS[state]))
            shapes.append(Label(left + 138 + _RING, top + 13, f"head {ring.head}, tail {ring.tail}"))
    return shapes


def stills(player: Player) -> list[int]:
    """Return numbers of frames that show the life of a slot: a row is written, published, and read."""
    notes = [frame.note for frame in player.frames]
    written = next(n for n, note in enumerate(notes) if "writes token" in note)
    sender, rank = notes[written].split(", writes")[0], notes[written].split("at rank ")[1][0]
    stores = f"{sender}, stores tail"
    published = next(n for n, note in enumerate(notes) if note.startswith(stores) and f"at rank {rank}" in note)
    copied = f"Rank {rank} has copied rows of {sender[0].lower() + sender[1:]};"
    return [written, published, next(n for n, note in enumerate(notes) if note.startswith(copied))]
