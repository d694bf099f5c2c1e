"""Figure of aggregated atomic operations: which lane adds, and how much."""

from moe_numba.course.draw.canvas import arrow, canvas, cell, check_range, lane_colour, note, text

_WIDTH, _TALL, _STEP = 5.2, 0.34, 0.52


def aggregation(experts):
    """Draw the lanes of a warp by their experts, and the additions to the experts' counters: of each lane, and of one.

    Parameters
    ----------
    experts : list of int
        The expert of each lane: 2 to 8 lanes, experts 0 to 7.
    """
    check_range("the number of lanes", len(experts), 2, 8)
    check_range("an expert", min(experts), 0, 7), check_range("an expert", max(experts), 0, 7)
    distinct = sorted(set(experts))
    figure, axes = canvas(_WIDTH, 3.9, f"{len(experts)} lanes, {len(distinct)} experts")
    aggregated = {e: [lane for lane, other in enumerate(experts) if other == e] for e in distinct}
    for top, words, adds in (
        (3.2, f"an addition per lane: {len(experts)}", [(lane, e, 1) for lane, e in enumerate(experts)]),
        (1.6, f"one per expert: {len(distinct)}", [(lanes[0], e, len(lanes)) for e, lanes in aggregated.items()]),
    ):
        text(axes, 0.15, top + 0.12, words, ha="left", weight="bold")
        left = (_WIDTH - _STEP * len(experts)) / 2
        centre = lambda lane, left=left: left + _STEP * (lane + 0.5)
        spread = _STEP * len(experts) / len(distinct)
        counter = {e: left + spread * (n + 0.5) for n, e in enumerate(distinct)}
        for lane, expert in enumerate(experts):
            x = left + _STEP * lane
            cell(axes, x, top - 0.36, _STEP, _TALL, expert, f"lane {lane}", fill=lane_colour(expert), label="lane")
        for expert, x in counter.items():
            cell(axes, x - 0.45, top - 1.25, 0.9, _TALL, f"counter {expert}", fill=lane_colour(expert), size=8)
        for lane, expert, n in adds:
            arrow(
                axes, (centre(lane), top - 0.38), (counter[expert], top - 0.9), colour=lane_colour(expert), label="add"
            )
            if n > 1:
                text(axes, (centre(lane) + counter[expert]) / 2 + 0.16, top - 0.62, f"+{n}", size=8.5)
    note(axes, 0.15, 0.13, "The lowest lane with an expert adds for all of them.")
    return figure
