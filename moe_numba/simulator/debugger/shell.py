"""The commands of the debugger, which are those of cuda-gdb where it has them."""

import ast
import cmd
import contextlib
import re
import signal
import sys
import threading

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.reachable import bytes_at, intervals
from moe_numba.simulator.debugger.breakpoints import Breakpoint, parse_location
from moe_numba.simulator.debugger.frames import CommandError, describe
from moe_numba.simulator.debugger.inspection import Inspection
from moe_numba.simulator.debugger.stepping import Stepping
from moe_numba.simulator.debugger.watchpoints import Watchpoint

_PROMPT = "(sim) "
_ALIASES = {
    **{"b": "break", "c": "continue", "s": "step", "n": "next", "p": "print", "l": "list", "q": "quit", "i": "info"},
    **{"bt": "backtrace", "fin": "finish", "ws": "warp-step", "rs": "reverse-step", "rn": "reverse-next"},
    **{"rc": "reverse-continue", "rws": "reverse-warp-step", "d": "delete", "h": "help", "where": "backtrace"},
}


class DebuggerQuit(BaseException):
    """The command `quit`: ends the launch, and leaves the context of the debugger."""


class _Transcript:
    """Keeps what is written, and writes it to the terminal of an interactive session."""

    def __init__(self, stream):
        self.texts, self.stream = [], stream

    def write(self, text):
        self.texts.append(text)
        if self.stream is not None:
            self.stream.write(text)
            self.stream.flush()

    def flush(self):
        pass


class Shell(Stepping, Inspection, cmd.Cmd):
    """Reads and carries out commands; each moves, selects or shows something of a Session."""

    identchars = cmd.Cmd.identchars + "-"
    doc_header = "Commands (help COMMAND explains one):"

    def __init__(self, session, commands=None):
        if isinstance(commands, str):
            commands = commands.splitlines()
        super().__init__(stdout=_Transcript(sys.stdout if commands is None else None))
        self.session, self.prompt = session, _PROMPT
        self._commands = None if commands is None else iter([line for line in commands if line.strip()])

    def transcript(self):
        return "".join(self.stdout.texts)

    def write(self, text):
        self.stdout.write(f"{text}\n")

    # --- reading -------------------------------------------------------------------------------------------------

    def interact(self, texts):
        """Show where the launch has stopped, and carry out commands until one lets it run on."""
        for text in texts:
            self.write(text)
        self.level = 0
        self._show_focus()
        # Kernels print through a filter.
        with contextlib.redirect_stdout(self.stdout.stream or sys.stdout):
            while True:
                line = self._read()
                if line is None:
                    self.onecmd("detach" if self._commands is not None else "quit")
                    return
                if self.onecmd(line):
                    return

    def _read(self):
        if self._commands is not None:
            line = next(self._commands, None)
            if line is not None:
                self.write(self.prompt + line)
            return line
        try:
            line = input(self.prompt)
        except EOFError:
            line = None
        except KeyboardInterrupt:
            self.write("")
            return self._read()
        self.stdout.texts.append(f"{self.prompt}{line or ''}\n")
        return line

    def report_unused(self):
        """Note the commands that no stop was left for."""
        if unused := [] if self._commands is None else list(self._commands):
            self.write(f"[not executed, since no launch has stopped any more: {'; '.join(unused)}]")

    @contextlib.contextmanager
    def interrupts(self):
        """Let Ctrl-C stop a launch of an interactive session at its next line."""
        if self._commands is not None or threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_):
            if not self.session.is_running or not self.session.grids:
                raise KeyboardInterrupt
            self.session.interrupted = True

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def onecmd(self, line):
        try:
            return super().onecmd(line)
        except CommandError as error:
            self.write(str(error))
        return False

    def parseline(self, line):
        command, arg, line = super().parseline(line)
        if command:
            command = _ALIASES.get(command, command).replace("-", "_")
        return command, arg, line

    def default(self, line):
        raise CommandError(f"{line.split()[0]!r} is no command; `help` lists them")

    def do_help(self, arg):
        """help [COMMAND]: list the commands, or explain one."""
        name = _ALIASES.get(arg, arg).replace("-", "_")
        if arg and not hasattr(self, f"do_{name}"):
            raise CommandError(f"{arg!r} is no command; `help` lists them")
        texts = [getattr(self, n).__doc__ for n in self.get_names() if n.startswith("do_")]
        self.write(getattr(self, f"do_{name}").__doc__ if arg else "\n".join(text.splitlines()[0] for text in texts))

    def do_detach(self, arg):
        """detach: run on without the debugger."""
        self.session.detached = True
        return True

    def do_quit(self, arg):
        """quit: end the launch and the program, or leave the `with` statement; alias q."""
        raise DebuggerQuit

    # --- breakpoints ---------------------------------------------------------------------------------------------

    def do_break(self, arg):
        """break LINE | FILE:LINE | FUNCTION [if CONDITION]: stop before this line; alias b."""
        location, *condition = re.split(r"\s+if\s+", arg.strip(), maxsplit=1)
        if not location:
            raise CommandError("break takes LINE, FILE:LINE or FUNCTION")
        kernel = self.session.thread.grid.source
        frames = self._frames(needed=False)
        path = (frames[self.level].f_code if frames else kernel.__code__).co_filename
        try:
            point = Breakpoint(*parse_location(location, path, kernel), *condition)
        except SyntaxError as error:
            raise CommandError(f"the condition {condition[0]!r} is no expression: {error.msg}") from None
        self._add(point)

    def do_watch(self, arg):
        """watch ARRAY[INDEX] | ADDRESS DTYPE: stop after this element of global or shared memory has changed."""
        self._watch(arg, loads=False)

    def do_rwatch(self, arg):
        """rwatch ARRAY[INDEX] | ADDRESS DTYPE: stop after a thread has loaded this element."""
        self._watch(arg, loads=True)

    def _watch(self, arg, loads):
        grid = self.session.focus.grid
        self._add(Watchpoint(arg, *self._element(arg), grid, loads))
        self.session.watcher.compare(None)  # notes the value
        self.session.watcher.observe()

    def _element(self, text):
        """Return the array or pointer and the index that an argument of `watch` names."""
        if address := re.fullmatch(r"(0x[0-9a-fA-F]+|\d+)\s+(\w+)", text):
            return _at_address(int(address[1], 0), address[2], self.session.grids), 0
        try:
            expression = ast.parse(text, mode="eval").body
        except SyntaxError:
            expression = None
        if not isinstance(expression, ast.Subscript):
            raise CommandError(f"watch and rwatch take ARRAY[INDEX] or ADDRESS DTYPE, not {text!r}")
        target, index = (self._evaluate(ast.unparse(node)) for node in (expression.value, expression.slice))
        if not isinstance(target, (memory.Array, memory.Pointer)):
            raise CommandError(f"{ast.unparse(expression.value)} is no array or pointer, but {describe(target)}")
        return target, index

    def _add(self, point):
        number = max(self.session.points, default=0) + 1
        self.session.points[number] = point
        self.write(f"{number}: {point}")

    def do_delete(self, arg):
        """delete [NUMBER]: remove a breakpoint or watchpoint, or all of them; alias d."""
        if not arg:
            self.session.points.clear()
        elif not arg.isdecimal() or self.session.points.pop(int(arg), None) is None:
            raise CommandError(f"there is no breakpoint {arg}; `info breakpoints` lists them")


def _at_address(address, dtype, grids):
    """Return a pointer to an address in the launch's memory."""
    try:
        dtype = memory.as_dtype(dtype)
    except TypeError:
        raise CommandError(f"{dtype!r} is no data type; use a NumPy name such as int32") from None
    if not any(start <= address and address + dtype.itemsize <= end for start, end in intervals(grids)):
        raise CommandError(f"address {address:#x} lies in no argument of the launch and in no registered buffer")
    if address % dtype.itemsize:
        raise CommandError(f"address {address:#x} is not aligned for {dtype}")
    return memory.Pointer(bytes_at(address, dtype.itemsize).view(dtype))
