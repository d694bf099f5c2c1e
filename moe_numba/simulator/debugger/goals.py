"""Goals: where a run of a launch stops, or what a repetition of it is to find."""

from collections import deque

from moe_numba.simulator.debugger.warp_steps import Line, align

_MOST_LINES = 1_000_000  # that a warp is recorded with


class Rewind(BaseException):
    """Unwinds a launch, which then starts again, towards a goal."""

    def __init__(self, goal):
        self.goal = goal


class Goal:
    """Stop nowhere but at breakpoints and watchpoints, or, if not `breaks`, not even there."""

    breaks = True

    def reached(self, session, t, frame, hits):
        """Return whether to stop before thread `t` executes the next line of `frame`."""
        return False

    def at_end(self, session):
        """Return whether to stop after the launch's last line."""
        return False


class NextLine(Goal):
    """Stop at a thread's next line, or the `count`-th; with `depth`, in a frame that is nested no deeper."""

    def __init__(self, name=None, depth=None, count=1):
        self.name, self.depth, self.count = name, depth, count

    def reached(self, session, t, frame, hits):
        if not session.is_thread(t, self.name):
            return False
        if self.depth is not None and len(session.frames_from(t, frame)) > self.depth:
            return False
        self.count -= 1
        return self.count == 0


class At(Goal):
    """Stop at a step of the launch; None: after the last one."""

    breaks = False

    def __init__(self, step, focus=None, note=""):
        self.step, self.focus, self.note = step, focus, note

    def reached(self, session, t, frame, hits):
        return session.step == self.step

    def at_end(self, session):
        if self.step is not None:
            self.note = f"the launch has {session.step} steps"
        return True


class Search(Goal):
    """Find the last step before `before` that `matches(t, frame, hits)`, or the `count`-th last, and go there.

    Without one go to `otherwise`. `before` is None if the launch has ended.
    """

    breaks = False

    def __init__(self, before, matches, otherwise, count=1, focus=None):
        self.before, self.matches, self.otherwise, self.focus = before, matches, otherwise, focus
        self.found = deque(maxlen=count)

    def reached(self, session, t, frame, hits):
        if self.matches(t, frame, hits):
            self.found.append(session.step)
        if session.step + 1 == self.before:
            self.at_end(session)
        return False

    def at_end(self, session):
        raise Rewind(At(self.found[0], self.focus) if self.found else self.otherwise)


class Record(Goal):
    """Record what the warp of a thread executes in the whole launch; then go on to the goal that `then` returns.

    Its argument is a list of WarpStep, or None if they are too many.
    """

    breaks = False

    def __init__(self, warp, then):
        self.warp, self.then, self.lanes, self.count = warp, then, {}, 0

    def reached(self, session, t, frame, hits):
        if t.warp == self.warp.thread // 32 and session.name_of(t)[:2] == self.warp[:2]:
            self.count += 1
            if self.count > _MOST_LINES:
                raise Rewind(self.then(None))
            frames = session.frames_from(t, frame)
            calls = *((f.f_code, f.f_lasti) for f in frames[:0:-1]), (frame.f_code, None)
            self.lanes.setdefault(t.lane, []).append(Line(session.step, calls, frame.f_lineno))
        return False

    def at_end(self, session):
        raise Rewind(self.then(align(self.lanes)))
