"""Figures of simulator traces: the phases of an mbarrier and the stages of a pipeline.

A trace (``simulator.trace``) has no clock: from left to right events are in order, not to scale.
"""

from typing import NamedTuple

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, ORANGE, PALE, RED, SKY, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, check_range, ink_on, note, plural, text, tint

__all__ = ["Span", "barrier_life", "barrier_steps", "ring", "ring_spans"]


def _number(name):
    """Parse a barrier's index from the simulator's name for it: "mbarrier 3 of ..."."""
    return int(name.split()[1])


def _copies(events):
    """Map each copy to its barrier: the one to which its thread last announced bytes."""
    announced, barriers = {}, {}
    for event in events:
        thread = tuple(event.block), event.warp, event.lane
        if event.what == "mbarrier.arrive" and event.details["bytes"]:
            announced[thread] = _number(event.details["barrier"])
        if event.what == "async copy" and event.details["event"] == "starts":
            barriers[event.details["copy"]] = announced.get(thread)
    return barriers


def barrier_steps(events, barrier, arrivals):
    """List the events of one barrier: (event, thread, phase, pending arrivals, pending bytes).

    ``arrivals`` is its count. Kernels announce bytes before they start the copies.
    """
    copies, phase, pending, due, steps = _copies(events), 0, arrivals, 0, []
    for event in events:
        thread = f"warp {event.warp} lane {event.lane}"
        if event.what == "mbarrier.arrive" and _number(event.details["barrier"]) == barrier:
            due, pending = due + event.details["bytes"], pending - 1
            what = f"arrive, expect {event.details['bytes']}" if event.details["bytes"] else "arrive"
        elif event.what == "async copy" and copies.get(event.details["copy"]) == barrier:
            if event.details["event"] != "lands":
                continue
            due, what, thread = due - event.details["bytes"], f"{event.details['bytes']} bytes land", "TMA"
        else:
            continue
        steps.append((what, thread, phase, pending, due))
        if pending == 0 and due == 0:
            phase, pending = phase + 1, arrivals
    return steps


def barrier_life(events, barrier, arrivals):
    """Draw an mbarrier over time: its phase, pending arrivals and pending bytes after each event."""
    steps = barrier_steps(events, barrier, arrivals)
    check_range("the number of events", len(steps), 1, 12)
    figure, axes = canvas(WIDTH, 3.5, f"Phases of mbarrier {barrier}: {plural(arrivals, 'arrival')} per phase")
    left, wide = 1.25, (WIDTH - 1.4) / len(steps)
    largest, each = max(due for *_, due in steps) or 1, min(0.5, 0.6 / arrivals)
    for y, name in ((2.62, "event"), (1.95, "pending\narrivals"), (1.02, "pending\nbytes"), (0.55, "phase")):
        text(axes, left - 0.1, y, name, ha="right", weight="bold", size=8.5)
    begun = 0
    for i, (what, thread, phase, pending, due) in enumerate(steps):
        x, ends = left + i * wide, pending == 0 and due == 0
        size = 8 if wide > 0.9 else 6.5
        words = what.replace(", ", ",\n").replace(" land", "\nland")
        text(axes, x + wide / 2, 2.77, words, size=size)
        text(axes, x + wide / 2, 2.45, thread, size=size - 0.5, colour=GREY)
        for k in range(pending):
            box(axes, x + 0.06, 1.72 + k * each, wide - 0.12, each * 0.85, fill=ORANGE, edge=WHITE, label="arrival")
        if not pending:
            text(axes, x + wide / 2, 1.88, "0", size=8, colour=GREY)
        if due:
            fill = BLUE if due > 0 else RED
            box(axes, x + 0.06, 0.86, wide - 0.12, 0.55 * abs(due) / largest, fill=fill, edge=WHITE, label="bytes")
        text(axes, x + wide / 2, 0.93 + 0.55 * abs(due) / largest if due else 0.95, str(due), size=7, colour=GREY)
        if ends or i == len(steps) - 1:
            start, end = left + begun * wide, x + wide
            fill = GREEN if phase % 2 else SKY
            words = f"phase {phase}, parity {phase % 2}" if end - start > 1.2 else str(phase)
            box(axes, start, 0.43, end - start, 0.24, words, fill=tint(fill, 0.6), edge=WHITE, size=8, label="phase")
            begun = i + 1
        if ends:
            axes.plot([x + wide, x + wide], [0.43, 2.3], color=RED, linewidth=1.4, label="end of phase")
    note(
        axes,
        0.15,
        0.17,
        "Red line: no arrivals and no bytes are pending, so the phase completes and the next one begins.",
    )
    return figure


class Span(NamedTuple):
    """A load or a use of a stage, from one event to another; ``iteration`` counts the stage's uses."""

    what: str
    stage: int
    iteration: int
    start: int
    end: int


def ring_spans(events, full, empty, stages):
    """List loads and uses of a ring's stages from a block's trace; ``full`` and ``empty`` index the first barriers.

    A stage is loaded from the arrival that announces its bytes until the last of them lands, and then used from the
    first wait for it until the last arrival that releases it.
    """
    copies, spans, open_ = _copies(events), [], {}
    loaded, used = [0] * stages, [0] * stages
    for at, event in enumerate(events):
        index = _number(event.details["barrier"]) if event.what.startswith("mbarrier") else None
        if event.what == "mbarrier.arrive" and event.details["bytes"] and full <= index < full + stages:
            stage = index - full
            open_["load", stage, loaded[stage]] = [at, at]
            loaded[stage] += 1
        elif event.what == "async copy" and event.details["event"] == "lands":
            index = copies[event.details["copy"]]
            if index is not None and full <= index < full + stages:
                open_["load", index - full, loaded[index - full] - 1][1] = at
        elif event.what == "mbarrier.wait" and full <= index < full + stages:
            iteration = event.details["phase"] - 1
            open_.setdefault(("use", index - full, iteration), [at, at])
        elif event.what == "mbarrier.arrive" and empty <= index < empty + stages:
            stage, iteration = index - empty, event.details["phase"]
            used[stage] = max(used[stage], iteration + 1)
            if ("use", stage, iteration) in open_:
                open_["use", stage, iteration][1] = at
    for (what, stage, iteration), (start, end) in open_.items():
        spans.append(Span(what, stage, iteration, start, end))
    return sorted(spans, key=lambda span: (span.start, span.stage))


def ring(events, full, empty, stages):
    """Draw the loads and MMAs that occupy each stage of a ring over time."""
    spans = ring_spans(events, full, empty, stages)
    check_range("stages", stages, 1, 8)
    check_range("the number of loads and uses", len(spans), 1, 48)
    moments = sorted({m for span in spans for m in (span.start, span.end)})
    place = {moment: i for i, moment in enumerate(moments)}
    tall, left = 0.62, 0.85
    height = 1.45 + stages * tall
    figure, axes = canvas(WIDTH, height, f"A ring of {plural(stages, 'stage')}: loads above, MMAs below")
    wide = (WIDTH - left - 0.2) / len(moments)
    for stage in range(stages):
        y = height - 0.6 - (stage + 1) * tall
        text(axes, left - 0.1, y + 0.27, f"stage {stage}", ha="right", size=8.5, weight="bold")
        axes.plot([left, WIDTH - 0.2], [y - 0.02, y - 0.02], color=PALE, linewidth=0.8)
        for span in spans:
            if span.stage == stage:
                load, x = span.what == "load", left + place[span.start] * wide
                length = (place[span.end] - place[span.start] + 1) * wide
                step = span.iteration * stages + stage
                words = f"k {step}" if length > 0.34 else str(step)
                box(
                    axes,
                    x,
                    y + (0.29 if load else 0.03),
                    length - 0.02,
                    0.24,
                    words,
                    fill=ORANGE if load else BLUE,
                    edge=WHITE,
                    colour=ink_on(ORANGE if load else BLUE),
                    size=7.5,
                    label=span.what,
                )
    arrow(axes, (left, 0.55), (WIDTH - 0.2, 0.55))
    text(axes, WIDTH - 0.2, 0.68, "order of events", ha="right", size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.22,
        "Orange: bytes in flight. Blue: the tile is read. They never overlap in one stage, "
        "and should overlap in different stages.",
    )
    return figure
