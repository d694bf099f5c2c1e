"""A debugging session: runs launches line by line, stops them, and repeats them to go backwards.

A launch is determined by its arguments and its seed. So going backwards means to run it again, with its memory
restored, up to an earlier step. A step is one line executed by one thread; Python's line events count them. The order
of threads is that of a run without the debugger, and so are the results.
"""

import contextlib
import sys

import greenlet

from moe_numba.simulator.core.engine import Thread
from moe_numba.simulator.core.errors import SimulatorError, kernel_frame
from moe_numba.simulator.core.settings import override_settings, settings
from moe_numba.simulator.debugger.breakpoints import Breakpoint
from moe_numba.simulator.debugger.frames import CommandError, KernelCode, ThreadName, block_at, chain, frames_of_error
from moe_numba.simulator.debugger.goals import Goal, NextLine, Rewind
from moe_numba.simulator.debugger.memory_copies import MemoryCopies
from moe_numba.simulator.debugger.run_context import run_context
from moe_numba.simulator.debugger.shell import DebuggerQuit, Shell
from moe_numba.simulator.debugger.watchpoints import Watcher


@contextlib.contextmanager
def debug(commands: "list[str] | str | None" = None, max_copied_bytes: int = 1 << 30):
    """Return a context whose launches run under the debugger; it stops at the first line of the first one.

    In a program::

        with simulator.debug(["break 14", "continue", "print x"]) as session:
            kernel[grid, block](x)
        print(session.transcript)

    Parameters
    ----------
    commands : list of str, or str with a command per line, optional
        Commands to execute; after the last one the launches run on without the debugger. None: read them from the
        terminal.
    max_copied_bytes : int
        Most bytes of memory that a launch's arguments may have if it is to be debugged backwards: they are copied.

    Yields
    ------
    Session
        Its `transcript` is what the debugger has printed, with the commands.

    Raises
    ------
    SimulatorError
        Within `profile`, `together` or another `debug`. Errors of a kernel propagate after the debugger has stopped.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def double(x):
    ...     i = cuda.grid(1)
    ...     x[i] *= 2
    >>> x = np.arange(64, dtype=np.float32)
    >>> with moe_numba.simulator.seed(0), moe_numba.simulator.debug(["step", "print i"]) as session:
    ...     double[1, 32](x)
    >>> session.transcript.splitlines()[-1]
    '7'
    """
    for name, function in (("ranks", "together"), ("debugger", "debug"), ("profile", "profile")):
        if settings[name] is not None:
            raise SimulatorError(f"simulator.debug() is used within simulator.{function}(): enter it outside")
    session = Session(commands, max_copied_bytes)
    sys.breakpointhook = session.on_breakpoint_call
    try:
        with override_settings(debugger=session, engine="threads"), session.shell.interrupts():
            yield session
        session.shell.report_unused()
    except DebuggerQuit:
        pass
    finally:
        sys.breakpointhook = session.breakpoint_hook


class Session:
    """The debugger's state: of the session, of its present launch, and of the present run of that launch."""

    def __init__(self, commands, max_copied_bytes):
        self.max_copied_bytes = max_copied_bytes
        self.points = {}  # number -> Breakpoint or Watchpoint
        self.breakpoint_hook = sys.breakpointhook  # for calls outside of kernels
        self.shell, self.watcher = Shell(self, commands), Watcher(self)
        self.goal, self.focus = NextLine(), None
        self.detached = self.interrupted = False
        self._in_launch = False  # worlds that a program runs itself are not debugged: they cannot be repeated
        self.start_run()

    @property
    def transcript(self) -> str:
        """What the debugger has printed, with the commands."""
        return self.shell.transcript()

    def run(self, run):
        """Run a launch, `run()`, as often as commands ask for it."""
        if self.detached:
            return run()
        self.copies, self.warp_steps = MemoryCopies(self.max_copied_bytes), {}
        self.cannot_repeat = ""  # why not
        self.furthest = self.stops = 0  # the last step of all runs; how often the launch has stopped
        self.completed = False  # whether one run came to the launch's end
        events = settings["events"]
        recorded, self._in_launch = len(events or ()), True
        try:
            while True:
                self.start_run()
                try:
                    with run_context(self):
                        run()
                    return self.detached or self._finish("ended", [])
                except Rewind as rewind:
                    self.goal = rewind.goal
                    self.copies.restore()
                    del (events or [])[recorded:]
        finally:
            self._in_launch = False
            self.goal = Goal()
            self.points = {n: p for n, p in self.points.items() if not getattr(p, "is_shared", False)}

    def start_run(self):
        """Forget the last run of the launch."""
        self.grids, self._codes, self.step, self.stopped_at = [], {}, 0, 0
        self.lines = {}  # thread -> (step, code, line): what it executes
        self.last = None  # the thread that executed the last line
        self.running = self.frame = None  # the thread that has stopped, and its frame
        self.over, self.failed_thread, self._failed_frames = "", None, []  # `over`: "ended" or "failed"
        self.watcher.reset()

    @property
    def is_running(self):
        """Whether threads run now, not the debugger."""
        return not (self.over or self.detached or self.running is not None)

    def start(self, grid):
        """Prepare a grid that is about to start."""
        if self.detached or not self._in_launch:
            return
        self.copies.add(grid)
        if grid.dependent and grid.world.detects_races:
            self.cannot_repeat = "races of a dependent launch depend on the launch before it as well (see --no-races)"
        kernel = grid.source = grid.kernel
        self.grids.append(grid)
        self._codes[grid] = KernelCode(kernel)

        def traced(*args):
            # Python keeps the trace function per greenlet, from Python 3.12 on per system thread.
            sys.settrace(self._trace_call)
            kernel(*args)

        traced.__name__, grid.kernel = kernel.__name__, traced
        self.watcher.observe()

    # --- lines ---------------------------------------------------------------------------------------------------

    def _trace_call(self, frame, event, _):
        codes = self._codes.get(getattr(greenlet.getcurrent(), "grid", None))
        return self._trace_line if codes is not None and frame.f_code in codes and not self.detached else None

    def _trace_line(self, frame, event, _):
        if self.is_running:
            if event == "line":
                self._on_line(greenlet.getcurrent(), frame)
            elif event == "return" and self.points:
                self._on_return(greenlet.getcurrent(), frame)
        return self._trace_line

    def _on_line(self, t, frame):
        """Count a line that thread `t` is about to execute; stop if the goal, a breakpoint or a watchpoint says so."""
        if self.points:
            self.watcher.compare(t)
        self.step, self.last = self.step + 1, t
        self.furthest = max(self.furthest, self.step)
        self.lines[t] = self.step, frame.f_code, frame.f_lineno
        hits = self.watcher.take_hits()
        for number, point in self.points.items():
            if isinstance(point, Breakpoint) and (hit := point.hit(number, t, frame)):
                hits.append(hit)
        reached = self.goal.reached(self, t, frame, hits)
        if reached or self.goal.breaks and (hits or self.interrupted):
            texts = [hit.text for hit in hits] + ["Interrupted"] * self.interrupted
            self._stop(t, frame, texts, next((hit.thread for hit in hits if hit.thread is not None), t))

    def _on_return(self, t, frame):
        """Attribute what follows to the line of the caller, of which the call is only a part."""
        self.watcher.compare(t)
        callers = self.frames_from(t, frame.f_back)
        if callers:
            self.lines[t] = self.lines[t][0], callers[0].f_code, callers[0].f_lineno

    def _stop(self, t, frame, texts, focus):
        self.running, self.frame, self.stopped_at, self.interrupted = t, frame, self.step, False
        self._interact(texts, focus)
        self.running = self.frame = None

    def _interact(self, texts, focus):
        goal, self.goal = self.goal, Goal()
        self.stops += 1
        self.focus = getattr(goal, "focus", None) or self.name_of(focus)
        self.shell.interact([*texts, *filter(None, [getattr(goal, "note", "")])])

    def on_breakpoint_call(self, *args, **kwargs):
        """Stop in a kernel that calls `breakpoint()`, unless detached; elsewhere start Python's debugger."""
        t = greenlet.getcurrent()
        if type(t) is not Thread:
            return self.breakpoint_hook(*args, **kwargs)
        if not self.detached and self.goal.breaks and self.stopped_at != self.step:
            self._stop(t, kernel_frame(sys._getframe(1)), ["breakpoint()"], t)

    def failed(self, error):
        """Stop because a launch has failed; its threads still exist."""
        if self._in_launch and not self.detached:
            self.failed_thread, self._failed_frames = frames_of_error(error)
            self._finish("failed", [f"{type(error).__name__}: {error}"])

    def _finish(self, how, texts):
        if self.step < self.furthest:
            raise SimulatorError(
                f"repeated, the launch has {how} after {self.step} steps, but had {self.furthest} before: it depends "
                "on something besides its arguments and its seed, so the debugger cannot go backwards in it"
            )
        self.over, self.completed = how, True
        self.watcher.compare(None)
        texts = [hit.text for hit in self.watcher.take_hits()] + texts
        stop = self.goal.at_end(self) or how == "failed" or bool(texts) and self.goal.breaks
        texts.append(f"[{' and '.join(dict.fromkeys(f'kernel {g.name}' for g in self.grids))} has {how}]")
        if stop:
            self._interact(texts, self._thread_at_end())
        elif self.stops:
            self.shell.write(texts[-1])

    def _thread_at_end(self):
        """Return the thread that is shown after the end: the one that failed, or that waits, or the last one."""
        waiting = (t for grid in self.grids for t in grid.started_threads() if t.gr_frame is not None)
        # Not by truth value: a greenlet that has ended is false.
        candidates = self.failed_thread, *waiting, self.last, self.grids[0].blocks[0].threads()[0]
        return next(t for t in candidates if t is not None)

    # --- threads -------------------------------------------------------------------------------------------------

    def name_of(self, t):
        return ThreadName(self.grids.index(t.grid), tuple(t.block.index), t.thread_id)

    def find(self, name):
        """Return the thread that a ThreadName names."""
        if name.grid >= len(self.grids):
            raise CommandError("this kernel has not started")
        block = block_at(self.grids[name.grid], name.block)
        if not 0 <= name.thread < block.size:
            raise CommandError(f"thread {name.thread} is outside its block, which has {block.size} threads")
        return block.warps[name.thread // 32].threads[name.thread % 32]

    def is_thread(self, t, name):
        """Return whether a ThreadName names a thread; None names every thread."""
        return name is None or t.thread_id == name.thread and self.name_of(t) == name

    @property
    def thread(self):
        """The thread in focus."""
        return self.find(self.focus)

    def frames(self, t):
        """Return the kernel's frames of a thread, innermost first; none before its start and after its end."""
        if t is self.running:
            return self.frames_from(t, self.frame)
        if t is self.failed_thread:
            return [frame for frame in self._failed_frames if frame.f_code in self._codes[t.grid]]
        return self.frames_from(t, t.gr_frame)

    def frames_from(self, t, frame):
        return chain(frame, self._codes[t.grid])

    @property
    def now(self):
        """The step at which the launch has stopped; None after its end."""
        return None if self.over else self.step

    def go(self, goal, backwards=False):
        """Run on to a goal; with `backwards` from the start of the launch."""
        if not backwards:
            if self.over:
                raise CommandError(
                    f"the launch has {self.over}: only backwards commands and `continue` go on from here"
                )
            self.goal = goal
            return
        if not self.copies.complete:
            raise CommandError(
                "warp-step and going backwards repeat the launch, which needs a copy of the memory that it can reach, "
                f"{self.copies.bytes} bytes; max_copied_bytes is {self.max_copied_bytes}"
            )
        if self.cannot_repeat:
            raise CommandError(f"going backwards is not possible: {self.cannot_repeat}")
        raise Rewind(goal)
