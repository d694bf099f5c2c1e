"""Which third of the slowest cases a run of the test suite tries: planted bugs, and notebooks with other sizes."""

import os
import subprocess
from pathlib import Path

THIRD = "MOE_NUMBA_THIRD"  # environment variable: 0, 1 or 2, or "all"


def chosen_third():
    """Return the environment's choice; by default 0, 1 or 2 by the hash of the commit, or 0 outside of a repository."""
    given = os.environ.get(THIRD)
    if given is not None:
        if given not in ("0", "1", "2", "all"):
            raise ValueError(f"{THIRD} is {given!r}; it must be 0, 1, 2 or all")
        return given
    command = "git", "rev-parse", "HEAD"
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return str(int(commit, 16) % 3)


def take_third(names, third):
    """Return the names of a third: every third one, or all of them."""
    return list(names) if third == "all" else list(names)[int(third) :: 3]
