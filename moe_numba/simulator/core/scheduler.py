"""The scheduler: decides which simulated thread runs next, and finds out when none can.

Which warp runs next, and in which order its lanes run, follows from a seed: each warp has a random priority, now and
then drawn anew, so that one warp runs far ahead of another, and a missing barrier shows as a wrong result under some
seeds. The same seed repeats the same run. A World may run several grids at once, and anything else that has a `step`.
"""

import contextlib
import contextvars
import heapq
import os
import random
from typing import NamedTuple

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.errors import Deadlock, standing

_IDLE_ROUNDS = 16  # of polling in vain, before a deadlock is suspected
_IDLE_LIMIT = 4096  # before it is taken for certain, though some local variable still changes
_LONGEST_CYCLE = 8  # rounds after which a polling loop is expected to be back where it was
_REDRAW = 0.125  # the chance that a warp's priority is drawn anew after a step

_settings = {"seed": int(os.environ.get("MOE_NUMBA_SEED", "0")), "preempt": 0.0, "events": None}
_settings |= {"weak": None, "ranks": None, "rank": None}  # see `weak` and `ranks`


class Event(NamedTuple):
    """One entry of a trace; `step` counts the scheduler's decisions."""

    step: int
    block: tuple
    warp: int
    lane: int
    what: str
    details: object
    rank: object = None  # where there are several


@contextlib.contextmanager
def _setting(**changes):
    before = {name: _settings[name] for name in changes}
    _settings.update(changes)
    try:
        yield changes.get("events")
    finally:
        _settings.update(before)


def seed(n, preempt=0.0):
    """Within this context threads run in the order that seed `n` gives.

    With `preempt` each memory access by index may hand over to another thread, with that probability.
    """
    return _setting(seed=n, preempt=preempt)


def trace():
    """Within this context every collective is recorded: `with trace() as events`."""
    return _setting(events=[])


class World:
    """The scheduler, and the grids that run under it at the same time."""

    def __init__(self, seed=None):
        self.rng = random.Random(_settings["seed"] if seed is None else seed)
        self.preempt, self.events = _settings["preempt"], _settings["events"]
        self.grids, self.queue, self.spinners = [], [], []
        self.steps = self.tickets = self.progress = 0
        self.footprints = None
        self.later = {}  # rank -> the grids that start when the one that runs there has ended
        self.weak = _settings["weak"](self) if _settings["weak"] else None
        self.acquired = {}  # the tensor maps that threads have acquired: (thread, address) -> publication
        self.leaders = {}  # mask -> the lane that elect.sync names
        self.attentive = 0  # how often this world is counted in `memory.attentive`
        # Greenlets do not inherit NumPy's error state; on a GPU integers wrap around, and floats overflow, silently.
        self.context = contextvars.copy_context()
        self.context.run(np.seterr, all="ignore")

    def attend(self):
        """From now on, accesses to memory are looked at before they happen."""
        self.attentive += 1
        memory.attentive += 1

    def add(self, grid):
        self.grids.append(grid)
        if grid.asynchronous or self.preempt:
            self.attend()
        if self.weak is not None:
            self.weak.start(grid)
        self.wake(grid.threads())

    def leave(self, grid):
        """A block of a grid has ended, or a copy; after the last of them the next grid of its rank starts."""
        grid.going -= 1
        if not grid.going and self.later.get(grid.rank):
            if self.weak is not None:
                self.weak.end(grid)
            self.add(self.later[grid.rank].pop(0))

    def schedule(self, unit):
        """Put a warp, or anything else with `priority`, `queued` and `step`, among those that may run next."""
        self.tickets += 1
        heapq.heappush(self.queue, (unit.priority, self.tickets, unit))

    def some_time(self):
        """A priority for what goes on by itself: done before all else, when all else has come to a halt, or between."""
        return self.rng.choice((-1.0, 2.0, 2.0, self.rng.random()))

    def wake(self, threads):
        for t in threads:
            t.waits = None
            warp = t.block.warps[t.warp]
            warp.ready.append(t)
            if not warp.queued:
                warp.queued = True
                self.schedule(warp)

    def run(self):
        """Run until every thread has ended; whatever happens, leave no thread behind."""
        seen = idle = 0
        try:
            while self.queue or self.spinners:
                if self.spinners and (self.progress != seen or not self.queue):
                    if self.weak is not None and self.progress == seen:
                        self.weak.reveal()
                    idle = idle + 1 if self.progress == seen else 0
                    seen = self.progress
                    if self._stuck(idle):
                        raise Deadlock(self._report("every thread that still runs polls in vain"))
                    spinners, self.spinners = self.spinners, []
                    self.wake(spinners)
                _, _, unit = heapq.heappop(self.queue)
                unit.queued = False
                self.steps += 1
                if self.rng.random() < _REDRAW:
                    unit.priority = self.rng.random()
                unit.step(self.rng)
                if self.weak is not None:
                    self.weak.leak()
            if any(not t.dead for t in self._threads()):
                raise Deadlock(self._report("no thread can run"))
            if self.weak is not None:
                self.weak.end(*self.grids)
        finally:
            memory.attentive -= self.attentive
            for t in self._threads():
                if not t.dead:
                    t.throw()

    def _threads(self):
        return [t for grid in self.grids for t in grid.threads()]

    def _report(self, what):
        lines = [standing([t for t in grid.threads() if not t.dead]) for grid in self.grids]
        for grid in self.grids:
            if grid.going and self.later.get(grid.rank):
                lines += [f"  {later} waits for the end of kernel {grid.name}" for later in self.later[grid.rank]]
        return f"deadlock: {what}\n" + "\n".join(filter(None, lines))

    def _stuck(self, idle):
        """Whether pollers are back where they were, in a world where nothing has changed: they will be for ever.

        Looking is slow, so it is done after 16 idle rounds, after 32, after 64 ...: each time a footprint of the
        pollers is kept, and compared with those of the next rounds.
        """
        since = idle - (1 << idle.bit_length() >> 1)
        if idle < _IDLE_ROUNDS or since > _LONGEST_CYCLE:
            return idle > _IDLE_LIMIT
        footprints = {t: _footprint(t.gr_frame) for t in self.spinners}
        if since == 0:
            self.footprints = footprints
        return since > 0 and footprints == self.footprints


def _footprint(frame):
    """Where a waiting thread stands, in all its frames, and what its local variables hold."""
    steps = []
    while frame is not None:
        steps.append((frame.f_lasti, [_content(v) for v in frame.f_locals.values()]))
        frame = frame.f_back
    return steps


def _content(value):
    """What a variable holds, in a form that equals only itself: a NaN too."""
    if type(value) is int or type(value) is str:
        return value
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    return repr(value) if isinstance(value, (int, float, str, tuple)) else id(value)
