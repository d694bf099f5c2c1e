"""Figures of the lesson "The gate, for decode": rounds that wait for one another, and launches that overlap."""

from collections.abc import Mapping, Sequence

from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.lessons.gate_decode.runs import GROUPS, HELD, KEPT, LANES, SUM_ROUNDS, TOPK

_KINDS = {"load": "purple", "groups": "green", "pick": "blue", "sum": "orange"}
_PAIR = LANES.bit_length() - 1  # rounds in which the lanes of a group merge their two best
_ARGMAX = (GROUPS - 1).bit_length()  # rounds of a butterfly over the groups
CHAINS = {
    "argmax by shuffles": [
        ("load", 1, 4 * HELD // 8),
        ("groups", _PAIR, 2),
        ("groups", KEPT * _ARGMAX, 2),
        ("pick", TOPK * 5, 2),
        ("load", 1, 1),
        ("sum", SUM_ROUNDS, 1),
    ],
    "groups ranked by counting": [
        ("load", 1, 4 * HELD // 8),
        ("groups", _PAIR, 2),
        ("groups", 1, GROUPS - 1),
        ("pick", TOPK * 5, 2),
        ("load", 1, 1),
        ("sum", SUM_ROUNDS, 1),
    ],
    "the last step": [
        ("load", 1, 4 * HELD // 8),
        ("groups", _PAIR, 2),
        ("groups", 1, GROUPS - 1),
        ("pick", TOPK, 1),
        ("pick", 1, 2 * HELD),
        ("sum", SUM_ROUNDS, 1),
    ],
}


def chains(names: Sequence[str] = tuple(CHAINS), known: Mapping = CHAINS) -> Drawing:
    """Draw the exchanges of one token: each column waits for the one on its left, a column's boxes fly together.

    Parameters
    ----------
    names : sequence of str
        Keys of `CHAINS`.
    known : dict
        Name -> (kind, columns one after another, boxes in a column).
    """
    longest = max(sum(rounds for _, rounds, _ in known[name]) for name in known)
    step = (WIDTH - 16) / longest
    wide, y = 0.78 * step, 40.0
    drawing = Drawing("Which exchange waits for which")
    for name in names:
        rounds = sum(each for _, each, _ in known[name])
        drawing.text(8, y, name, bold=True)
        drawing.text(WIDTH - 8, y, f"{rounds} rounds", anchor="end", kind="quiet")
        x, tallest = 8.0, max(at_once for *_, at_once in known[name])
        for kind, columns, at_once in known[name]:
            for _ in range(columns):
                for box in range(at_once):
                    drawing.box(x, y + 6 + 7 * box, wide, 5.5, _KINDS[kind])
                x += step
        y += 7 * tallest + 30
    words = {"load": "loads", "groups": "groups: shuffles", "pick": "picks: shuffles, or redux", "sum": "sum: shuffles"}
    for number, (kind, text) in enumerate(words.items()):
        x = 8 + 180 * (number % 2)
        drawing.box(x, y - 9 + 16 * (number // 2), 9, 9, _KINDS[kind])
        drawing.text(x + 14, y + 16 * (number // 2), text, size=10, kind="quiet")
    return drawing


def lanes() -> Drawing:
    """Draw which lane of a warp holds which experts, and which lanes form a group."""
    drawing, wide = Drawing("One warp, one token"), (WIDTH - 16) / 32
    kinds = "blue", "orange", "green", "purple"
    for group in range(GROUPS):
        x, kind = 8 + group * LANES * wide, kinds[group % len(kinds)]
        drawing.box(
            x + 1, 40, LANES * wide - 2, 16, kind, f"group {group}" if LANES * wide > 42 else str(group), size=9
        )
        for lane in range(LANES):
            drawing.box(x + lane * wide + 1, 58, wide - 2, 22, "pale", str(group * LANES + lane), size=7)
    drawing.text(8, 36, f"a group is {LANES} lanes:", size=10, kind="quiet")
    first = ", ".join(map(str, range(min(HELD, 3))))
    drawing.text(
        8,
        94,
        f"lane 0 holds experts {first}, ..., {HELD - 1}; lane 1 those from {HELD} to {2 * HELD - 1}",
        size=10,
        kind="quiet",
    )
    return drawing


def overlap() -> Drawing:
    """Draw two launches, one after the other: in order, dependent and released at the end, and released early."""
    drawing, y, end = Drawing("Two launches of the gate, not to scale"), 40.0, 178
    parts = {"start": (44, "pale"), "load": (34, "purple"), "compute, store": (92, "blue")}

    def row(x, waits=0.0):
        for words, (wide, kind) in parts.items():
            drawing.box(x, y, wide - 1, 18, kind, words, size=9)
            x += wide
            if words == "start" and waits:
                drawing.box(x, y, waits - 1, 18, "orange", "wait", size=9)
                x += waits

    for name, second in (
        ("ordinary launches", end),
        ("dependent launch, released at the end", end - 16),
        ("dependent launch, released after the wait", 8 + 44),
    ):
        drawing.text(8, y, name, bold=True)
        y += 6
        row(8)
        y += 20
        row(second, max(0, end - second - 44))
        y += 40
    for number, words in enumerate(
        (
            "Wait: the second kernel has started, and waits for the end of the first.",
            "Start: its CTAs get their places on the SMs, and read their arguments.",
        )
    ):
        drawing.text(8, y - 6 + 15 * number, words, size=10, kind="quiet")
    return drawing
