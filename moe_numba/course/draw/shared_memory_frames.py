"""Frames of a player from simulator traces: what the threads of a CTA write to and read from a shared array."""

from moe_numba.course.draw.player import Arrow, Box, Frame, Label

_CELL, _LEFT, _HEIGHT = 56, 74, 30
_THREADS, _ARRAY = 22, 102  # upper edges of the two rows
_MOST = 14


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
        frames.append(Frame(note, list(_shapes(read, array, threads, elements, kind, thread, element, stale))))
    if not frames:
        raise ValueError("the trace has no access to shared memory by these threads; was it made with accesses=True?")
    return frames, _LEFT + _CELL * max(threads, elements), _ARRAY + _HEIGHT + 24


def _shapes(read, array, threads, elements, kind, thread, element, stale):
    yield Label(4, _THREADS + _HEIGHT / 2, "value read")
    yield Label(4, _ARRAY + _HEIGHT / 2, "array")
    for t in range(threads):
        state = "waits" if read.get(t) == "?" else "active" if t == thread and kind == "load" else "plain"
        yield Label(_LEFT + _CELL * t + 25, 10, f"thread {t}", centred=True)
        yield Box(_LEFT + _CELL * t, _THREADS, 50, _HEIGHT, read.get(t, ""), state, f"thread {t}")
    for e in range(elements):
        state = "waits" if stale and e == element else "active" if e == element else "done" if e in array else "plain"
        yield Label(_LEFT + _CELL * e + 25, _ARRAY + _HEIGHT + 12, f"[{e}]", centred=True)
        yield Box(_LEFT + _CELL * e, _ARRAY, 50, _HEIGHT, array.get(e, ""), state, f"element {e}")
    ends = [(_LEFT + _CELL * thread + 25, _THREADS + _HEIGHT), (_LEFT + _CELL * element + 25, _ARRAY)]
    (x1, y1), (x2, y2) = ends if kind == "store" else ends[::-1]
    yield Arrow(x1, y1, x2, y2, f"thread {thread}")


def _short(value):
    return str(int(value)) if float(value).is_integer() else f"{float(value):.3g}"
