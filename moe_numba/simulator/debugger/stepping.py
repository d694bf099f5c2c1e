"""The commands that move: forwards to a goal, and backwards by repeating the launch."""

from moe_numba.simulator.core.errors import format_ranges
from moe_numba.simulator.debugger import warp_steps
from moe_numba.simulator.debugger.frames import CommandError, parse_count
from moe_numba.simulator.debugger.goals import At, Goal, NextLine, Record, Search


class Stepping:
    """Part of the Shell. A command that moves returns True, which ends the reading of commands, or rewinds."""

    _warp_steps = None  # of the last `warp-step`: (copies of the launch, its step, warp, {lane: its step})

    def do_step(self, arg):
        """step [COUNT]: run until the thread in focus comes to its next line, also in a device function; alias s."""
        self.session.go(NextLine(self._living_focus(), None, parse_count(arg)))
        return True

    def do_next(self, arg):
        """next [COUNT]: as `step`, but run device functions that the line calls to their ends; alias n."""
        name = self._living_focus()
        self.session.go(NextLine(name, len(self._frames()), parse_count(arg)))
        return True

    def do_finish(self, arg):
        """finish: run until the device function that the thread in focus is in has returned; alias fin."""
        depth = len(self._frames()) - self.level
        if depth < 2:
            raise CommandError("the thread is in the kernel itself, which no function has called; use `continue`")
        self.session.go(NextLine(self._living_focus(), depth - 1))
        return True

    def do_continue(self, arg):
        """continue: run to the next breakpoint or watchpoint, or to the end of the launch; alias c."""
        self.session.goal = Goal()
        return True

    def do_reverse_step(self, arg):
        """reverse-step [COUNT]: go back to the last line that the thread in focus executed; alias rs."""
        self._reverse(parse_count(arg), None)

    def do_reverse_next(self, arg):
        """reverse-next [COUNT]: as `reverse-step`, but not into device functions; alias rn."""
        frames = self._frames(needed=False)
        self._reverse(parse_count(arg), max(len(frames), 1))

    def _reverse(self, count, depth):
        session, focus = self.session, self.session.focus
        line = NextLine(focus, depth)

        def matches(t, frame, hits):
            line.count = 1
            return line.reached(session, t, frame, hits)

        stay = At(session.now, focus, "the thread has no earlier line")
        if session.now == 1:
            raise CommandError(stay.note)
        session.go(Search(session.now, matches, stay, count, focus), backwards=True)

    def do_reverse_continue(self, arg):
        """reverse-continue: go back to the last breakpoint or watchpoint, or to the launch's first line; alias rc."""
        otherwise = At(1, None, "the beginning of the launch")
        if self.session.now == 1:
            raise CommandError("this is the beginning of the launch")
        self.session.go(Search(self.session.now, lambda t, frame, hits: bool(hits), otherwise), backwards=True)

    def do_goto(self, arg):
        """goto STEP | begin | end: go to a step of the launch, forwards or backwards."""
        session = self.session
        if arg == "end":
            if session.over:
                raise CommandError("this is the end of the launch")
            session.go(At(None))
            return True
        step = 1 if arg == "begin" else parse_count(arg, "the step")
        if session.over and step > session.step:
            raise CommandError(f"the launch has {session.step} steps")
        self._travel(At(step))
        return True

    def _travel(self, goal):
        now = self.session.now
        self.session.go(goal, backwards=now is None or goal.step <= now)

    def do_warp_step(self, arg):
        """warp-step [COUNT]: go to the next line that the warp in focus executes, with the lanes that do; alias ws.

        The lanes execute lines together as on a GPU: after a branch those that are behind go first. Since the simulator
        runs them one after another, `lane N` then goes to the step at which lane N executes the line.
        """
        return self._move_warp(parse_count(arg))

    def do_reverse_warp_step(self, arg):
        """reverse-warp-step [COUNT]: go to the last line that the warp in focus executed; alias rws."""
        return self._move_warp(-parse_count(arg))

    def _move_warp(self, count):
        session, focus = self.session, self.session.focus
        warp, now = (*focus[:2], focus.thread // 32), session.now
        at = session.lines.get(session.thread, (0,))[0]

        def goal(steps):
            session.warp_steps[warp] = steps
            if steps is None:
                return At(now, focus, "the warp executes too many lines to record them")
            number = warp_steps.find(steps, focus.thread % 32, at) + count
            if not 0 <= number < len(steps):
                return At(now, focus, f"the warp has no {'later' if count > 0 else 'earlier'} line")
            lanes = steps[number].steps
            lane = focus.thread % 32 if focus.thread % 32 in lanes else min(lanes)
            self._warp_steps = session.copies, lanes[lane], warp, lanes
            note = f"warp step {number + 1} of {len(steps)}: lanes {format_ranges(lanes)}"
            return At(lanes[lane], focus._replace(thread=focus.thread // 32 * 32 + lane), note)

        if warp in session.warp_steps:
            self._travel_or_stay(goal(session.warp_steps[warp]))
        else:
            session.go(Record(focus, goal), backwards=True)
        return True

    def _travel_or_stay(self, goal):
        if goal.step == self.session.now and goal.focus == self.session.focus:
            raise CommandError(goal.note)
        self._travel(goal)

    def travel_to_lane(self, text):
        """After `warp-step`, go to the step at which a lane executes the line; return whether the launch runs."""
        focus, now = self.session.focus, self.session.now
        warp = (*focus[:2], focus.thread // 32)
        launch, step, stepped, lanes = self._warp_steps or (None, None, None, {})
        if self.session.copies is not launch or (step, stepped) != (now, warp):
            return False
        if not text.isdecimal() or int(text) not in lanes:
            return False
        lane = int(text)
        self._warp_steps = launch, lanes[lane], warp, lanes
        if lanes[lane] == step:
            return False
        self._travel(At(lanes[lane], focus._replace(thread=focus.thread // 32 * 32 + lane)))
        return True
