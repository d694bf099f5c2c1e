"""Detection of loops that poll memory with plain loads, and the state of a thread that polls.

`while flag[0] == 0: pass` never lets another thread run here. On a GPU the compiler may load the flag once, before the
loop, since a plain load promises that no other thread writes it. So the loop is an error, even if another thread would
set the flag. Polls are atomics, and loads with volatile, relaxed or acquire semantics (`ptx.atomics`): these yield to
other threads. Numba's `cuda.ldcv` and its like are plain here, because the compiler may move them as well.

`core.memory` counts the loads since a thread last waited. Each `LOADS`, the next loads are sampled here: a loop that
polls repeats a few loads that return the same values, from the same state.
"""

import sys
from typing import NamedTuple

import greenlet
import numpy as np

from moe_numba.simulator.core.errors import Deadlock, kernel_frame, source_location

LOADS = 1 << 16  # loads, with no thread waiting in between, after which the next ones are sampled
_SAMPLES = 64  # samples of a thread that are compared
_MAX_FLAGS = 8  # different loads that one iteration of a polling loop is expected to make
_MAX_SAMPLES = 1 << 14  # samples of all threads before none is found; more than one thread has some under preemption
_MAX_REPEATS = 16  # how often in a row the same loads are found before changing local variables count for nothing

_samples = {}  # thread -> its samples, in order
_last = None, (), 0  # the thread and the loads that were found to repeat last, and how often in a row


class Poll(NamedTuple):
    """What a thread waits for that polls an element of a pointer or an array."""

    what: str
    target: object
    index: object

    def element(self):
        return element_name(self.target, self.index)

    def __str__(self):
        return self.what


def element_name(target, index):
    """Format an element of a pointer or an array for messages."""
    return f"{getattr(target, 'name', '') or 'an array'}[{index}]"


def sample(target, index):
    """Sample a load; return how many loads are left until the next sample."""
    t = greenlet.getcurrent()
    if not hasattr(t, "grid") or (_samples and t not in _samples and not t.grid.world.preempt):
        return _end()
    frame = kernel_frame(sys._getframe(1))
    load = frame.f_code, frame.f_lasti, target.address, element_name(target, index), _bits(target, index)
    own = _samples.setdefault(t, [])
    own.append((load, (t.grid.world.changes, snapshot(frame))))
    if len(own) >= _SAMPLES:
        _check_repeats(t, own, frame)
        return _end()
    return 1 if sum(map(len, _samples.values())) < _MAX_SAMPLES else _end()


def _end():
    _samples.clear()
    return LOADS


def _bits(target, index):
    try:
        return np.asarray(target.array[index]).tobytes()
    except IndexError:
        return None  # a vector load; its index is checked elsewhere


def _check_repeats(t, samples, frame):
    """Raise a Deadlock if a thread's samples are those of a polling loop."""
    global _last
    loads = dict.fromkeys(load for load, _ in samples)
    if len(loads) > _MAX_FLAGS:
        return
    poller = t if not t.grid.world.preempt else None  # under preemption several threads may poll the same flags
    repeats = _last[2] + 1 if _last[:2] == (poller, loads.keys()) else 1
    _last = poller, loads.keys(), repeats
    states = [state for _, state in samples]
    if repeats < _MAX_REPEATS and not any(state in states[:i] for i, state in enumerate(states)):
        return
    _last, what = (None, (), 0), ", ".join(dict.fromkeys(name for *_, name, _ in loads))
    _end()
    raise Deadlock(
        f"deadlock: {t} polls {what} with plain loads, at {source_location(frame)}: more than {LOADS} loads in a row, "
        "and no value changes. The compiler may load a value only once, before the loop: poll with an atomic or a load "
        "of ptx.atomics (acquire, relaxed, volatile)"
    )


def snapshot(frame):
    """Return the position and the local variables of a thread's frames, from the innermost one on."""
    frames = []
    while frame is not None:
        # A name with a dot belongs to `typed_code`, which may count iterations.
        frames.append((frame.f_lasti, [_comparable(v) for n, v in frame.f_locals.items() if n[0] != "."]))
        frame = frame.f_back
    return frames


def _comparable(value):
    """Return a variable's content in a form that compares by bits, so that a NaN equals itself."""
    if type(value) is int or type(value) is str:
        return value
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, tuple):  # not its repr, which would format all elements of arrays
        return tuple(_comparable(v) for v in value)
    return repr(value) if isinstance(value, (int, float, str)) else id(value)
