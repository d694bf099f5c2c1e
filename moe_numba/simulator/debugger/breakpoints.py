"""Breakpoints, and the lines that locations such as ``FILE:LINE`` name."""

import linecache
import os
import sys
import types

from moe_numba.simulator.core.compilable import with_device_functions
from moe_numba.simulator.debugger.frames import CommandError, Hit, evaluate


class Breakpoint:
    """A line of a file, with a condition that may be None."""

    def __init__(self, path, line, condition=None):
        self.path, self.line, self.condition = path, line, condition
        self.code = condition and compile(condition, "<condition>", "eval")

    def hit(self, number, t, frame):
        """Return a Hit if thread `t` is about to execute this line and the condition holds, else None."""
        if frame.f_lineno != self.line or frame.f_code.co_filename != self.path:
            return None
        try:
            if self.code is not None and not evaluate(self.code, t, frame):
                return None
        except Exception as error:  # whatever the condition raises
            return Hit(t, f"Breakpoint {number}, whose condition raises {type(error).__name__}: {error}")
        return Hit(t, f"Breakpoint {number}")

    def __str__(self):
        return f"breakpoint at {os.path.basename(self.path)}:{self.line}" + (
            f" if {self.condition}" if self.condition else ""
        )


def parse_location(text, path, kernel):
    """Return the file and the line that ``LINE``, ``FILE:LINE`` or ``FUNCTION`` names, the next line with code.

    `path` is the file of a lone line number.
    """
    file, colon, line = text.rpartition(":")
    if not line.isdecimal():
        if colon:
            raise CommandError(f"{text!r} is neither FILE:LINE nor LINE nor a function")
        return _first_line(text, kernel)
    if file:
        path = _find_file(file, kernel)
    lines = _lines_with_code(path)
    found = [n for n in lines if n >= int(line)]
    if not found:
        raise CommandError(f"line {line} is after line {max(lines)}, the last one with code in {path}")
    return path, min(found)


def _codes(path):
    """Return the code objects of a file and its functions, an empty list without its source."""
    try:
        todo = [compile("".join(linecache.getlines(path)), path, "exec")]
    except SyntaxError:  # a cell of a notebook with magics
        return []
    for code in todo:
        todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return todo


def _lines_with_code(path):
    lines = {n for code in _codes(path)[1:] for *_, n in code.co_lines() if n}
    if not lines:
        raise CommandError(f"{path} has no functions, or its source was not found")
    return lines


def _find_file(name, kernel):
    known = [function.__code__.co_filename for function in with_device_functions(kernel)]
    known += [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    for path in known:
        if path == name or path.endswith(os.sep + name):
            return path
    raise CommandError(f"no module's file is named {name!r}; the kernel {kernel.__name__} is in {known[0]}")


def _first_line(name, kernel):
    """Return the file and the first line of a function of a kernel, or of one in the kernel's file."""
    codes = [function.__code__ for function in with_device_functions(kernel)]
    names = {code.co_name: code for code in (*_codes(kernel.__code__.co_filename)[1:], *codes)}
    if name not in names:
        functions = ", ".join(sorted(code.co_name for code in codes))
        raise CommandError(f"{name!r} is no function of kernel {kernel.__name__}; there are: {functions}")
    code = names[name]
    lines = [n for *_, n in code.co_lines() if n]
    return code.co_filename, next((n for n in lines if n > lines[0]), lines[0])
