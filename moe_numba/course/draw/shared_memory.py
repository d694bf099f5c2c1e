"""Frames of a player from simulator traces: what the threads of a block do to an array in shared memory.

``shared_accesses`` shows one access at a time, ``barrier_steps`` all stores between two barriers.
"""

from moe_numba.course.draw.player import Arrow, Box, Frame, Label

_CELL = 56  # of one thread or element, in pixels

# of the frames of single accesses: left edge, height of a box, and upper edges of the threads and of the array
_ACCESSES_LEFT, _HEIGHT = 74, 30
_THREADS, _ARRAY = 22, 102
_MOST = 14

# of the frames of intervals: left edge, height of a row, and upper edges of the array before and after
_ARRAYS_LEFT, _ROW = 64, 34
_ABOVE, _BELOW = 26, 112


def shared_accesses(events, threads, elements):
    """Return a frame for each access to shared memory in a trace (`simulator.trace(accesses=True)`).

    The first row of boxes are the threads, with the value that each has read last; the second row is the array. A box
    of the array is empty until a thread writes the element. A read of an element that no thread has written is orange.

    Parameters
    ----------
    events : list of Event
        Of a trace of one CTA with one warp and one shared array.
    threads, elements : int
        How many threads and elements are shown, from the first: at most 14 of each.

    Returns
    -------
    list of Frame, and the width and height of the drawing in pixels.

    Raises
    ------
    ValueError
        Too many threads or elements, or the trace has no access to shared memory among them.
    """
    for name, number in (("threads", threads), ("elements", elements)):
        if not 1 <= number <= _MOST:
            raise ValueError(f"{name} is {number}; 1 to {_MOST} can be shown")
    read, array, frames = {}, {}, []
    for event in events:
        kind = event.what.removeprefix("shared ")
        if kind not in ("load", "store") or kind == event.what:
            continue
        thread, element = event.lane, event.details["index"]
        if thread >= threads or element >= elements:
            continue
        stale = kind == "load" and element not in array
        if kind == "store":
            array[element] = _short(event.details["value"])
            note = f"Thread {thread} writes {array[element]} to element {element}."
        else:
            read[thread] = "?" if stale else _short(event.details["value"])
            note = f"Thread {thread} reads element {element}"
            note += ", which no thread has written yet." if stale else f", {read[thread]}."
        frames.append(Frame(note, list(_access_shapes(read, array, threads, elements, kind, thread, element, stale))))
    if not frames:
        raise ValueError("the trace has no access to shared memory by these threads; was it made with accesses=True?")
    return frames, _ACCESSES_LEFT + _CELL * max(threads, elements), _ARRAY + _HEIGHT + 24


def _access_shapes(read, array, threads, elements, kind, thread, element, stale):
    yield Label(4, _THREADS + _HEIGHT / 2, "value read")
    yield Label(4, _ARRAY + _HEIGHT / 2, "array")
    for t in range(threads):
        state = "waits" if read.get(t) == "?" else "active" if t == thread and kind == "load" else "plain"
        yield Label(_ACCESSES_LEFT + _CELL * t + 25, 10, f"thread {t}", centred=True)
        yield Box(_ACCESSES_LEFT + _CELL * t, _THREADS, 50, _HEIGHT, read.get(t, ""), state, f"thread {t}")
    for e in range(elements):
        state = "waits" if stale and e == element else "active" if e == element else "done" if e in array else "plain"
        yield Label(_ACCESSES_LEFT + _CELL * e + 25, _ARRAY + _HEIGHT + 12, f"[{e}]", centred=True)
        yield Box(_ACCESSES_LEFT + _CELL * e, _ARRAY, 50, _HEIGHT, array.get(e, ""), state, f"element {e}")
    ends = [(_ACCESSES_LEFT + _CELL * thread + 25, _THREADS + _HEIGHT), (_ACCESSES_LEFT + _CELL * element + 25, _ARRAY)]
    (x1, y1), (x2, y2) = ends if kind == "store" else ends[::-1]
    yield Arrow(x1, y1, x2, y2, f"thread {thread}")


def _short(value):
    return str(int(value)) if float(value).is_integer() else f"{float(value):.3g}"


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
            shapes = _array_shapes(length, values, values | stored, stored, _moves(accesses, length))
            frames.append(Frame(explain(len(frames), stored), shapes))
        values |= stored
    if not frames:
        raise ValueError("the trace has no stores to shared memory after its first barrier: is it a trace of accesses?")
    return frames, _ARRAYS_LEFT + _CELL * length, _BELOW + _ROW + 12


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


def _array_shapes(length, before, after, stored, moves):
    middle = lambda index: _ARRAYS_LEFT + _CELL * index + 24
    shapes = [Label(4, _ABOVE + _ROW / 2, "before"), Label(4, _BELOW + _ROW / 2, "after")]
    for index in range(length):
        x, group = _ARRAYS_LEFT + _CELL * index, f"element {index}"
        shapes.append(Label(middle(index), 12, str(index), centred=True))
        shapes.append(Box(x, _ABOVE, 48, _ROW, str(before.get(index, "")), group=group))
        kind = "active" if index in stored else "plain"
        shapes.append(Box(x, _BELOW, 48, _ROW, str(after.get(index, "")), kind, group))
    for a, b in moves:
        shapes.append(Arrow(middle(a), _ABOVE + _ROW, middle(b), _BELOW, f"element {b}"))
    return shapes
