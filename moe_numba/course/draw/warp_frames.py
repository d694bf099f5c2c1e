"""Frames of a player from simulator traces: the shuffles of a warp."""

from moe_numba.course.draw.player import Arrow, Box, Frame, Label
from moe_numba.simulator.core.warp import source_lane

# Numba's name of a shuffle -> its mode; the PTX names, such as shfl.sync.bfly, end with the mode.
_MODES = {"shfl_sync": "idx", "shfl_xor_sync": "bfly", "shfl_up_sync": "up", "shfl_down_sync": "down"}
_CELL, _ROW, _LEFT = 44, 34, 64
_ABOVE, _BELOW = 26, 122  # upper edges of the two rows of lanes


def shuffles(events, warp=0, lanes=16, explain=None):
    """Return a frame for each shuffle of a warp in a trace (`simulator.trace`), with the arrows of the first lanes.

    Parameters
    ----------
    events : list of Event
        Of a trace of one block, whose shuffles have the default width of 32 lanes.
    warp : int
    lanes : int
        The first lanes are shown, at most 16; arrows from other lanes are left out.
    explain : callable, optional
        ``explain(number, operation, operand)`` returns the sentence of a frame.

    Returns
    -------
    list of Frame, and the width and height of the drawing in pixels.

    Raises
    ------
    ValueError
        ``lanes`` is not 1 to 16, or the warp executes no shuffle.
    """
    if not 1 <= lanes <= 16:
        raise ValueError(f"lanes is {lanes}; 1 to 16 can be shown")
    found = list(_by_shuffle(events, warp))
    if not found:
        raise ValueError(f"the trace has no shuffle of warp {warp}")
    explain = explain or (lambda number, what, operand: f"{what}, operand {operand}")
    frames = []
    for number, (what, values) in enumerate(found):
        operand = min(values.items())[1][1]  # of the first lane that takes part
        rows = {"before": _ABOVE + _ROW / 2, "received": _BELOW + _ROW / 2, "from lane": _BELOW + _ROW + 12}
        shapes = [Label(4, 12, "lane"), *(Label(4, y, name) for name, y in rows.items())]
        for lane in sorted(values.keys() & range(lanes)):
            given, _, result, source = values[lane]
            x, group = _LEFT + _CELL * lane, f"lane {lane}"
            shapes += [Label(x + 20, 12, str(lane), centred=True)]
            shapes += [Label(x + 20, rows["from lane"], str(source), centred=True)]
            shapes.append(Box(x, _ABOVE, 40, _ROW, _short(given), group=group))
            shapes.append(Box(x, _BELOW, 40, _ROW, _short(result), "active" if source != lane else "plain", group))
            if source < lanes:
                start = _LEFT + _CELL * source + 20
                shapes.append(Arrow(start, _ABOVE + _ROW, x + 20, _BELOW, group))
        frames.append(Frame(explain(number, what, operand), shapes))
    return frames, _LEFT + _CELL * lanes, _BELOW + _ROW + 24


def _by_shuffle(events, warp):
    """Yield each shuffle as (operation, {lane: (value, operand, result, source lane)})."""
    lanes = {}
    for event in events:
        if event.warp != warp or not event.what.startswith("shfl"):
            continue
        value, operand = event.details["value"]
        lanes[event.lane] = value, operand, event.details["result"]
        if len(lanes) == event.details["mask"].bit_count():  # all lanes that the mask names
            mode = _MODES.get(event.what, event.what.rpartition(".")[2])
            found = {lane: (*of_lane, source_lane(mode, lane, of_lane[1])) for lane, of_lane in sorted(lanes.items())}
            yield event.what, found
            lanes = {}


def _short(value):
    """Format a value in the width of a box."""
    return str(int(value)) if float(value).is_integer() else f"{value:.3g}"
