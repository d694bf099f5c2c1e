"""Spans of time: what a warp waits for or does, from a simulated trace or from time stamps that a GPU's kernel wrote.

A trace has no clock. A step of the scheduler counts as 1000 ns, as `%globaltimer` does in the simulator, so that a
trace and stamps that the simulated kernel wrote have the same scale. Lengths say nothing about a GPU; who waits for
whom does.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moe_numba.simulator.core.errors import format_ranges
from moe_numba.simulator.core.scheduler import Event

NS_PER_STEP = 1000
_ENDS = {"lands", "has read", "has written", "is done"}  # events of an asynchronous operation after its start


class Track(NamedTuple):
    """A row of a timeline: a process (the simulator, a GPU or a rank) and a thread of it (such as a warp)."""

    process: str
    thread: str


class Span(NamedTuple):
    """Something that takes from `start_ns` on `duration_ns`; 0: an instant. `args` are details to show.

    `kind` chooses the colour: "wait", "copy", "access" or anything else.
    """

    name: str
    track: Track
    start_ns: float
    duration_ns: float = 0
    args: dict = {}  # noqa: RUF012  never changed
    kind: str = "phase"

    @property
    def end_ns(self):
        return self.start_ns + self.duration_ns


def trace_spans(events: Iterable[Event]) -> list[Span]:
    """Return the spans of a trace (`simulator.trace`), by track and then by start.

    Collectives, barriers and mbarriers are spans from the first lane's arrival to the last one's, one for each warp;
    asynchronous copies and wgmmas last from their start to their completion, on tracks of their own. Everything else,
    such as loads and stores, is an instant, one for all lanes of a warp that do it in the same step.

    Parameters
    ----------
    events : iterable of Event
        What `simulator.trace` recorded.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def wait():
    ...     cuda.syncthreads()
    >>> with moe_numba.simulator.trace() as events:
    ...     wait[1, 64]()
    >>> len(moe_numba.simulator.trace_spans(events))
    2
    """
    steps, started, found = {}, {}, []  # `steps`: what the lanes of a warp do in one step of the scheduler
    counts = Counter()
    for event in events:
        where, details = (event.rank, tuple(event.block), event.warp), event.details or {}
        if event.what in ("async copy", "wgmma"):
            _collect_operation(started, where, event)
            continue
        # A lane may do the same several times in a step; the lanes' n-th times belong together.
        what = event.what, details.get("mask"), details.get("buffer")
        counts[where, event.step, event.lane, what] += 1
        group = *what, counts[where, event.step, event.lane, what]
        groups, lanes = steps.setdefault((where, event.step), ({}, {}))
        groups.setdefault(group, []).append(event)
        lanes.setdefault(event.lane, []).append(group)
    for (where, step), (groups, lanes) in steps.items():
        ordered = _in_program_order(groups, lanes)
        places = iter(np.linspace(0, 1, sum(not _has_waited(together[0]) for together in ordered) + 2)[1:].tolist())
        for together in ordered:
            if _has_waited(together[0]):  # lanes arrive, and the last one completes, at the end of a step
                start, end = min(event.details["since"] for event in together) + 1, step + 1
            else:
                start = end = step + next(places)
            found.append((where, 0, _span_of_lanes(where, start, end, together)))
    for operations in started.values():
        for first, last, notes in operations:
            where = first.rank, tuple(first.block), first.warp
            args = {"bytes": first.details.get("bytes"), "thread": f"lane {first.lane}", "state": "; ".join(notes)}
            kind = "copy" if first.what == "async copy" else "compute"
            track = _track(*where, " copies" if kind == "copy" else " wgmma")
            args = {name: value for name, value in args.items() if value}
            found.append((where, 1, _make(first.details["what"], track, first.step, last.step, args, kind)))
    order = lambda entry: (entry[0][0] or 0, entry[0][1][::-1], entry[0][2], entry[1], entry[2].start_ns)
    return [span for *_, span in sorted(found, key=order)]


def _has_waited(event):
    return "since" in (event.details or {})


def _collect_operation(started, where, event):
    """Add an event of an asynchronous operation to those that have started: [first event, last event, notes]."""
    details = event.details
    key = (details["copy"],) if "copy" in details else (*where, event.lane, details["what"])
    if details["event"] == "starts":
        started.setdefault(key, []).append([event, event, []])
    elif (operations := started.get(key)) and details["event"] in _ENDS:
        operation = next((o for o in operations if o[1] is o[0]), operations[-1])
        operation[1] = event
        operation[2].append(f"{details['event']} at step {event.step}")


def _in_program_order(groups, lanes):
    """Return the groups of a step in an order that is that of each lane; `lanes` has the names of each one's groups.

    The lanes ran one after another, each through several groups. A group follows when all of its lanes are at it.
    """
    ordered, todo = {}, [deque(names) for names in lanes.values()]
    while todo := [names for names in todo if names]:
        lanes_at = Counter(names[0] for names in todo)
        name = next((name for name, count in lanes_at.items() if count == len(groups[name])), next(iter(lanes_at)))
        ordered[name] = groups[name]
        for names in todo:
            if names[0] == name:
                names.popleft()
    return list(ordered.values())


def _track(rank, block, warp, suffix=""):
    process = "simulated" if rank is None else f"simulated rank {rank}"
    block = tuple(int(i) for i in block)
    name = str(block[0]) if not any(block[1:]) else ",".join(map(str, block))
    return Track(process, f"block {name} warp {warp}{suffix}")


def _make(name, track, first, last, args, kind):
    return Span(name, track, NS_PER_STEP * first, NS_PER_STEP * (last - first), args, kind)


def _span_of_lanes(where, start, end, events):
    """Return the span of one operation of some lanes of a warp; times are in steps."""
    events = sorted(events, key=lambda event: event.lane)
    what, details = events[0].what, events[0].details or {}
    args = {"lanes": format_ranges({event.lane for event in events})}
    args |= {name: details[name] for name in ("buffer", "barrier", "phase", "bytes") if name in details}
    for name in ("index", "value"):
        values = [event.details[name] for event in events if (event.details or {}).get(name) is not None]
        if values:
            args[name] = ", ".join(map(_format, values[:8])) + (", ..." if len(values) > 8 else "")
    kind = "wait" if _has_waited(events[0]) else "phase"
    if what.startswith(("global ", "shared ")) or what == "store":
        kind = "access"
    return _make(what, _track(*where), start, end, args, kind)


def _format(value):
    return f"({', '.join(map(_format, value))})" if isinstance(value, tuple) else str(value)


def measured_spans(
    stamps: "np.ndarray | torch.Tensor",  # noqa: F821
    phases: Sequence[str],
    tracks: Sequence[str] | None = None,
    process: str = "measured",
) -> list[Span]:
    """Return the spans between time stamps that a kernel wrote.

        stamps[warp, 0] = globaltimer()                     # in the kernel; stamps is uint64[warps, 3]
        ...
        stamps[warp, 1] = globaltimer()
        ...
        measured_spans(stamps, ["load", "compute"], [f"warp {w}" for w in range(warps)])

    Parameters
    ----------
    stamps : array or tensor of shape [tracks, len(phases) + 1]
        Nanoseconds of ``%globaltimer``. 0 stands for a stamp that was not written: the phases beside it are left out.
    phases : sequence of str
        Names of the phases between consecutive stamps.
    tracks : sequence of str, optional
        Name of each row of `stamps`, such as ``"block 0 warp 1"``; "row 0" and so on by default.
    process : str
        Name that stands above the tracks, such as ``"GPU 1"``.

    Raises
    ------
    ValueError
        If the shape does not fit the names, or a phase ends before it starts.

    Examples
    --------
    >>> import numpy as np
    >>> stamps = np.array([[1000, 1500, 1800]], np.uint64)  # of one warp, in ns
    >>> for span in moe_numba.simulator.measured_spans(stamps, ["load", "compute"], ["warp 0"]):
    ...     print(span.name, span.start_ns, span.duration_ns)
    load 1000 500
    compute 1500 300
    """
    values = np.asarray(stamps.cpu() if hasattr(stamps, "cpu") else stamps)
    if values.ndim != 2 or values.shape[1] != len(phases) + 1:
        raise ValueError(
            f"stamps has shape {values.shape}, but {len(phases)} phases need [tracks, {len(phases) + 1}] stamps"
        )
    tracks = [f"row {row}" for row in range(len(values))] if tracks is None else tracks
    if len(tracks) != len(values):
        raise ValueError(f"tracks has {len(tracks)} names, but stamps has {len(values)} rows")
    found = []
    for name, row in zip(tracks, values.tolist()):
        for phase, start, end in zip(phases, row, row[1:]):
            if start and end and end < start:
                raise ValueError(f"phase {phase!r} of track {name!r} ends at {end} ns, before its start at {start} ns")
            if start and end:
                found.append(Span(phase, Track(process, str(name)), start, end - start))
    return found


def as_spans(values: Iterable[Event | Span]) -> list[Span]:
    """Return spans as they are, and those of a trace's events."""
    values = list(values)
    wrong = next((value for value in values if not isinstance(value, (Event, Span))), None)
    if wrong is not None:
        raise TypeError(f"a timeline takes the events of simulator.trace() or Spans, not {type(wrong).__name__}")
    events = [value for value in values if isinstance(value, Event)]
    return [*trace_spans(events), *(value for value in values if isinstance(value, Span))]


def from_zero(values: list[Span]) -> list[Span]:
    """Shift spans in time so that the first one starts at 0."""
    first = min((span.start_ns for span in values), default=0)
    return [span._replace(start_ns=span.start_ns - first) for span in values]


def rows(values: list[Span]) -> dict[tuple[Track, int], list[Span]]:
    """Return the spans of each track in rows in which none overlaps another: (track, row) -> spans by start."""
    by_track = {}
    for span in values:
        by_track.setdefault(span.track, []).append(span)
    result = {}
    for track, found in by_track.items():
        ends = []  # of the last span of each row
        for span in sorted(found, key=lambda span: (span.start_ns, -span.duration_ns)):
            row = next((i for i, end in enumerate(ends) if end <= span.start_ns), len(ends))
            ends[row:row] = [0] * (row == len(ends))
            ends[row] = span.end_ns
            result.setdefault((track, row), []).append(span)
    return dict(sorted(result.items(), key=lambda item: ([*by_track].index(item[0][0]), item[0][1])))
