"""Calls of functions in new processes: ``python -m ... MODULE FUNCTION ARGUMENTS FILE`` writes the result to a file."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[4])


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports this package, with some variables changed."""
    paths = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    return os.environ | variables | {"PYTHONPATH": paths}


def call_in_process(function: Callable, *arguments: Any, **variables: str) -> Any:
    """Call a function of a module in a new process with some environment variables; return its result.

    Arguments and result are passed as JSON. Raises RuntimeError, with the end of the process's standard error, if it
    fails or if it returns nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        names = function.__module__, function.__name__
        command = [sys.executable, "-m", __name__, *names, json.dumps(arguments), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(**variables))
        result = json.loads(file.read_text()) if done.returncode == 0 and file.is_file() else None
    if not result:
        given = ", ".join(f"{name}={value}" for name, value in variables.items())
        raise RuntimeError(
            f"{function.__name__} with {given} returned nothing, exit code {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return result


if __name__ == "__main__":
    module, name, given, file = sys.argv[1:]
    Path(file).write_text(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(given))))
