"""Compiles the kernels that a program has launched, with the types of their arguments: `run --compile`.

A kernel is packed at its first launch with new types of arguments, since Numba freezes globals and closures then. All
are compiled at the end of the program, in a second process.
"""

import atexit
import linecache
import os
import re
import sys
from typing import NamedTuple

from moe_numba.simulator import capability
from moe_numba.simulator.compiler import process
from moe_numba.simulator.core.errors import file_name
from moe_numba.simulator.core.pointer_wrapping import wrap_argument
from moe_numba.simulator.core.settings import settings
from moe_numba.simulator.core.source import NoSource, definition, original


class _Launched(NamedTuple):
    name: str
    file: str
    line: int  # of its definition
    types: str


_seen = {}  # (function, types of its arguments) -> None
_requests = {}  # request, or _Launched if it cannot be sent -> (_Launched, why it cannot be sent)


def note(function, jit_options, launch_bounds, args):
    """Pack a kernel that is launched with these arguments, if it is to be compiled."""
    if not settings["compile"]:
        return
    code = original(function)
    launched, reason = _Launched(function.__name__, code.co_filename, _first_line(code), ""), ""
    try:
        signature = process.signature_of([wrap_argument(value, "") for value in args])
        if (function, signature) in _seen:
            return
        _seen[function, signature] = None
        launched = launched._replace(types=", ".join(map(_shown, signature)))
        options = {"arch": process.architecture(capability.SIMULATED)}
        request = process.request(function, jit_options, signature, launch_bounds=launch_bounds, **options)
    except process.NotSent as error:
        request, reason = launched, str(error)
    _requests.setdefault(request, (launched, reason))


def _first_line(code):
    """Return the line of a function's `def`."""
    try:
        return definition(code).lineno
    except NoSource:
        return code.co_firstlineno


def _shown(name):
    """Return a type as Numba writes it."""
    if isinstance(name, tuple):
        return f"({', '.join(map(_shown, name))})"
    return re.sub(r"\[(,*)\][FA]?", lambda found: f"[{', '.join(':' * (len(found[1]) + 1))}]", str(name))


def compile_launched() -> tuple[list[str], list[str]]:
    """Compile what has been noted; return a message for each kernel that does not compile, and other messages."""
    noted = dict(_requests)
    _requests.clear()
    sent = [request for request, (_, reason) in noted.items() if not reason]
    reports = dict(zip(sent, process.compile_apart(sent) if sent else [], strict=True))
    errors, notes = [], []
    for request, (launched, reason) in noted.items():
        report = reports.get(request, {"reason": reason, "unpacked": False})
        where = f"{file_name(report.get('file', launched.file))}:{report.get('line', launched.line)}"
        if not report.get("unpacked", True):
            notes.append(f"kernel {launched.name} was not compiled: {where}: {report['reason']}")
        elif report:
            source = linecache.getline(report.get("file", launched.file), report.get("line", launched.line)).strip()
            message = f"kernel {launched.name}({launched.types}) does not compile: {where}: {report['reason']}"
            errors.append(message + (f"\n    {source}" if source else ""))
    if compiled := len(noted) - len(errors) - len(notes):
        arch = "{}.{}".format(*capability.SIMULATED)
        notes.append(f"{compiled} kernel{'s' * (compiled > 1)} compiled for compute capability {arch}")
    return errors, notes


def report_launched() -> int:
    """Print what `compile_launched` returns to standard error; return the number of kernels that do not compile."""
    if _requests:
        print(f"compiling {len(_requests)} kernel{'s' * (len(_requests) > 1)} ...", file=sys.stderr, flush=True)
    errors, notes = compile_launched()
    for message in errors + notes:
        print(f"moe_numba.simulator: {message}", file=sys.stderr)
    return len(errors)


def _exit():
    """Set the exit code of a program that was started without the command `run`."""
    if _requests and report_launched():
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(1)  # the only way to change the exit code now


atexit.register(_exit)  # when the simulator is imported, so that the program's own functions run before
