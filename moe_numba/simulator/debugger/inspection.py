"""The commands that show threads and their variables, and that choose the thread in focus."""

import linecache
import os

from moe_numba.simulator.core.errors import format_place, format_ranges
from moe_numba.simulator.debugger.frames import CommandError, describe, evaluate, parse_count, show, source_line

_MOST_GROUPS = 40  # lines of `info threads`


class Inspection:
    """Part of the Shell."""

    level = 0  # of the frame that `up` and `down` have chosen

    def do_cuda(self, arg):
        """cuda [rank R] [block X,Y,Z] [warp W] [lane L] [thread T]: show another thread, and move it from now on."""
        words = arg.replace(", ", ",").split()
        if len(words) % 2:
            raise CommandError("cuda takes pairs such as `block 1 thread 3`")
        self._focus(dict(zip(words[::2], words[1::2])))

    def do_rank(self, arg):
        """rank R: show the same thread of the kernel that runs on rank R."""
        self._focus({"rank": arg})

    def do_block(self, arg):
        """block X[,Y,Z]: show the same thread of another block."""
        self._focus({"block": arg})

    def do_warp(self, arg):
        """warp W: show the same lane of another warp of the block."""
        self._focus({"warp": arg})

    def do_lane(self, arg):
        """lane L: show another lane of the warp; after `warp-step`, at the step at which it executes the line."""
        if self.travel_to_lane(arg):
            return True
        self._focus({"lane": arg})
        return False

    def do_thread(self, arg):
        """thread T | X,Y,Z: show another thread of the block."""
        self._focus({"thread": arg})

    def _focus(self, words):
        session, name = self.session, self.session.focus
        for word, text in words.items():
            numbers = _numbers(word, text) if text else None
            if numbers is None:
                continue
            if word not in ("rank", "block", "warp", "lane", "thread"):
                raise CommandError(f"{word!r} is none of rank, block, warp, lane and thread")
            if len(numbers) > 1 and word not in ("block", "thread"):
                raise CommandError(f"{word} takes one number, not {text!r}")
            size = session.thread.grid.block_dim
            if word == "rank":
                grids = [i for i, grid in enumerate(session.grids) if (grid.rank or 0) == numbers[0]]
                if not grids:
                    raise CommandError(f"no kernel has started on rank {numbers[0]}")
                name = name._replace(grid=grids[-1])
            elif word == "block":
                name = name._replace(block=(*numbers, 0, 0)[:3])
            elif word == "thread":
                x, y, z = (*numbers, 0, 0)[:3]
                if len(numbers) > 1 and any(i >= n for i, n in zip((x, y, z), size)):
                    raise CommandError(f"thread {(x, y, z)} is outside its block, whose size is {tuple(size)}")
                name = name._replace(thread=x + size.x * (y + size.y * z))
            elif word == "warp":
                name = name._replace(thread=32 * numbers[0] + name.thread % 32)
            elif not 0 <= numbers[0] < 32:
                raise CommandError(f"lane {numbers[0]} is outside its warp, which has lanes 0 to 31")
            else:
                name = name._replace(thread=name.thread // 32 * 32 + numbers[0])
        session.find(name)
        session.focus, self.level = name, 0
        self._show_focus()

    def do_print(self, arg):
        """print EXPRESSION: show its value in the frame of the thread in focus; arrays with their elements; alias p."""
        if not arg:
            raise CommandError("print takes an expression")
        self.write(show(self._evaluate(arg)))

    def do_info(self, arg):
        """info locals | breakpoints | threads | warps | lanes: list variables, breakpoints, or where threads are.

        `threads` are those of the launch, `warps` those of the block in focus, `lanes` those of its warp. Threads of a
        warp that are at the same line and wait for the same are listed together; * marks the focus.
        """
        kinds = {"locals": self._locals, "breakpoints": self._points}
        kinds |= {kind: lambda kind=kind: self._groups(kind) for kind in ("threads", "warps", "lanes")}
        if arg not in kinds:
            raise CommandError(f"info takes one of {', '.join(kinds)}, not {arg!r}")
        kinds[arg]()

    def do_backtrace(self, arg):
        """backtrace: list the calls that the thread in focus is in, innermost first; aliases bt, where."""
        for level, frame in enumerate(self._frames()):
            mark = "*" if level == self.level else " "
            self.write(f"{mark} #{level} {format_place(frame.f_code, frame.f_lineno)}")

    def do_up(self, arg):
        """up: select the calling function's frame, for `print`, `info locals` and `list`."""
        self._select(self.level + 1, "the outermost")

    def do_down(self, arg):
        """down: select the called function's frame."""
        self._select(self.level - 1, "the innermost")

    def _select(self, level, end):
        if not 0 <= level < len(self._frames()):
            raise CommandError(f"this is {end} frame")
        self.level = level
        self._show_focus()

    def do_list(self, arg):
        """list [LINE]: show the source around the selected frame's line, or around another one; alias l."""
        frame = self._frames()[self.level]
        path, line = frame.f_code.co_filename, parse_count(arg, "the line") if arg else frame.f_lineno
        last = len(linecache.getlines(path))
        if line > last:
            raise CommandError(f"{os.path.basename(path)} has {last} lines")
        for number in range(max(1, line - 5), min(last, line + 5) + 1):
            mark = ">" if number == frame.f_lineno else " "
            self.write(f"{mark} {source_line(path, number)}")

    def _show_focus(self):
        t, session = self.session.thread, self.session
        frames = session.frames(t)
        step = f", step {session.step}" if not session.over else ""
        self.write(f"{t}{step}: {self._state(t, self.level)}")
        if frames:
            frame = frames[self.level]
            self.write(source_line(frame.f_code.co_filename, frame.f_lineno))

    def _state(self, t, level=0):
        """Describe where a thread is and what it waits for."""
        session, frames = self.session, self.session.frames(t)
        if not frames:
            return "exited" if t.dead else "not started"
        text = format_place(frames[level].f_code, frames[level].f_lineno)
        if t is session.running or t is session.failed_thread:
            return text
        return f"{text}, {f'waits: {t.waits}' if t.waits is not None else 'ready to run'}"

    def _groups(self, kind):
        session, focus = self.session, self.session.thread
        groups = {}
        for grid in session.grids:
            for t in grid.threads():
                if kind == "threads" or t.block is focus.block and (kind == "warps" or t.warp == focus.warp):
                    groups.setdefault((t.block, t.warp, self._state(t)), []).append(t)
        for (block, warp, state), threads in list(groups.items())[:_MOST_GROUPS]:
            lanes = f"lane{'s' * (len(threads) > 1)} {format_ranges(t.lane for t in threads)}"
            self.write(f"{'*' if focus in threads else ' '} {block} warp {warp} {lanes}: {state}")
        if len(groups) > _MOST_GROUPS:
            self.write(f"  and {len(groups) - _MOST_GROUPS} more groups")

    def _locals(self):
        for name, value in self._frames()[self.level].f_locals.items():
            if not name.startswith("."):  # those of `typed_code`
                self.write(f"{name} = {describe(value)}")

    def _points(self):
        for number, point in self.session.points.items():
            self.write(f"{number}: {point}")
        if not self.session.points:
            self.write("there are no breakpoints and no watchpoints")

    # --- the thread in focus ---------------------------------------------------------------------------------------

    def _frames(self, needed=True):
        t = self.session.thread
        frames = self.session.frames(t)
        if needed and not frames:
            raise CommandError(f"{t} has {self._state(t)}")
        return frames

    def _living_focus(self):
        if self.session.thread.dead and not self.session.over:
            self._frames()
        return self.session.focus

    def _evaluate(self, expression):
        try:
            return evaluate(expression, self.session.thread, self._frames()[self.level])
        except CommandError:
            raise
        except Exception as error:  # whatever the expression raises
            raise CommandError(f"{type(error).__name__}: {error}") from None


def _numbers(word, text):
    parts = text.strip("()").split(",")
    if len(parts) > 3 or not all(part.strip().isdecimal() for part in parts):
        raise CommandError(f"{word} takes a number{' or three' if word in ('block', 'thread') else ''}, not {text!r}")
    return tuple(map(int, parts))
