"""Runs one program and says what a page shows of it: its error with the lines to mark, or counters per line."""

import contextlib
import linecache
import re
import runpy
import traceback
from pathlib import Path

from moe_numba import simulator

NAME = "program.py"
# Places that a message names, other than where an array was made.
_PLACE = re.compile(rf"(?<!array of ){re.escape(NAME)}:(\d+)")
# Counters that the page shows: name -> (heading, what it says).
COUNTERS = {
    "executions": ("executions", "how often warps execute the line"),
    "divergence": ("active lanes", "average share of a warp's 32 lanes that execute it"),
    "sectors_per_request": (
        "sectors",
        "32-byte sectors of global memory per access of a warp; 4 if lanes are neighbours",
    ),
    "bank_conflicts": (
        "bank conflicts",
        "accesses to shared memory that had to be repeated for lanes of the same bank",
    ),
    "contention": ("contention", "most lanes of a warp that update one address atomically at once"),
}


def run(source: str, folder: str, races: bool = True, seed: int = 0, profile: bool = False) -> dict:
    """Run a program in the simulator; what it prints goes to standard output.

    Returns
    -------
    dict
        ``error``: None, or ``{"kind", "message", "lines"}`` with the lines of the program to mark, the most important
        first. ``profile``: None, or a list of ``{"kernel", "launch", "lines"}``.
    """
    path = Path(folder, NAME)
    path.write_text(source, encoding="utf-8")
    linecache.checkcache(str(path))
    counters = simulator.profile() if profile else contextlib.nullcontext()
    error = None
    with simulator.seed(seed), simulator.races() if races else contextlib.nullcontext():
        try:
            with counters as counted:
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as exit:
            if exit.code not in (None, 0):
                error = {"kind": "SystemExit", "message": str(exit.code), "lines": []}
        except Exception as problem:
            error = _describe(problem, str(path))
    return {"error": error, "profile": _table(counted) if profile and error is None else None}


def _describe(error, path):
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    innermost = [frames[-1].lineno] if frames else []
    if isinstance(error, SyntaxError):
        return {"kind": type(error).__name__, "message": error.msg, "lines": [error.lineno] if error.lineno else []}
    message = "\n".join([str(error), *getattr(error, "__notes__", ())])
    named = [int(number) for number in _PLACE.findall(message)]
    lines = list(dict.fromkeys(named or innermost))
    if not isinstance(error, simulator.SimulatorError):
        lines = innermost
    return {"kind": type(error).__name__, "message": message.replace(NAME + ":", "line "), "lines": lines}


def _table(profile):
    return [
        {
            "kernel": kernel.name,
            "launch": _launch(kernel.launches),
            "lines": [
                {"line": line.line, **{name: getattr(line, name) for name in COUNTERS}}
                for line in kernel.lines
                if line.file == kernel.file and Path(line.file).name == NAME
            ],
        }
        for kernel in profile.kernels
    ]


def _launch(launches):
    text = f"{_shape(launches[0]['grid'])} blocks of {_shape(launches[0]['block'])} threads"
    return text if len(launches) == 1 else f"{len(launches)} launches, the first of {text}"


def _shape(dims):
    """Return "4 x 2" for (4, 2, 1)."""
    used = max(n for n, size in enumerate(dims, 1) if size > 1 or n == 1)
    return " x ".join(map(str, dims[:used]))
