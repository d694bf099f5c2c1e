"""Frames of a player from simulator traces: what the threads of a block do to a shared array between two barriers."""

from moe_numba.course.draw.player import Arrow, Box, Frame, Label

_CELL, _ROW, _LEFT = 56, 34, 64
_ABOVE, _BELOW = 26, 112  # upper edges of the two rows of elements


def barrier_steps(events, length, explain=None):
    """Return a frame for each interval between barriers in which threads store to a block's shared array.

    Parameters
    ----------
    events : list of Event
        Of a trace with accesses (``simulator.trace(accesses=True)``) of one block that has one shared array and
        executes only ``syncthreads`` as barriers.
    length : int
        Elements of the array that are shown, at most 16.
    explain : callable, optional
        ``explain(number, stored)`` returns the sentence of a frame; ``stored`` is {index: value}.

    Returns
    -------
    list of Frame, and the width and height of the drawing in pixels.

    Raises
    ------
    ValueError
        ``length`` is not 1 to 16, or no thread stores between two barriers.
    """
    if not 1 <= length <= 16:
        raise ValueError(f"length is {length}; 1 to 16 elements can be shown")
    explain = explain or (lambda number, stored: f"Elements {', '.join(map(str, sorted(stored)))} change.")
    values, frames = {}, []
    for accesses in _between_barriers(events):
        stored = {index: value for _, what, index, value in accesses if what == "shared store" and index < length}
        if stored and values:
            shapes = _shapes(length, values, values | stored, stored, _moves(accesses, length))
            frames.append(Frame(explain(len(frames), stored), shapes))
        values |= stored
    if not frames:
        raise ValueError("the trace has no stores to shared memory after its first barrier: is it a trace of accesses?")
    return frames, _LEFT + _CELL * length, _BELOW + _ROW + 12


def _between_barriers(events):
    """Return the accesses (thread, operation, index, value) of each interval, for all threads together."""
    intervals, passed = {}, {}
    for event in events:
        thread = event.warp, event.lane
        if event.what == "syncthreads":
            passed[thread] = passed.get(thread, 0) + 1
        elif event.what.startswith("shared"):
            access = thread, event.what, int(event.details["index"]), event.details["value"]
            intervals.setdefault(passed.get(thread, 0), []).append(access)
    return [accesses for _, accesses in sorted(intervals.items())]


def _moves(accesses, length):
    """Return (from, to): a thread loads one element and stores to another."""
    loaded, stored = {}, {}
    for thread, what, index, _ in accesses:
        (stored if what == "shared store" else loaded).setdefault(thread, set()).add(index)
    pairs = {(a, b) for thread in stored for a in loaded.get(thread, ()) for b in stored[thread] if a != b}
    return sorted(pair for pair in pairs if max(pair) < length)


def _shapes(length, before, after, stored, moves):
    middle = lambda index: _LEFT + _CELL * index + 24
    shapes = [Label(4, _ABOVE + _ROW / 2, "before"), Label(4, _BELOW + _ROW / 2, "after")]
    for index in range(length):
        x, group = _LEFT + _CELL * index, f"element {index}"
        shapes.append(Label(middle(index), 12, str(index), centred=True))
        shapes.append(Box(x, _ABOVE, 48, _ROW, str(before.get(index, "")), group=group))
        kind = "active" if index in stored else "plain"
        shapes.append(Box(x, _BELOW, 48, _ROW, str(after.get(index, "")), kind, group))
    for a, b in moves:
        shapes.append(Arrow(middle(a), _ABOVE + _ROW, middle(b), _BELOW, f"element {b}"))
    return shapes
