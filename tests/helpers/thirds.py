"""Which third, or sixth, of the slowest cases a run of the test suite tries, so that a few commits try all.

These are planted bugs, some of the wrong kernels and corrupted handles, expert-parallel layers, whole notebooks, calls
of ``torch.library.opcheck``, and what kernels are compiled for: other architectures, and options of a kernel that every
run compiles in its main configurations.
"""

import functools
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
    return _third_of_commit()


def _third_of_commit():
    return str(_number_of_commit() % 3)


@functools.cache
def _number_of_commit():
    command = "git", "rev-parse", "HEAD"
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(commit, 16)


def take_third(names, third=None):
    """Return the names of a third, by default the chosen one: every third one, one of fewer than three, or all."""
    names, third = list(names), chosen_third() if third is None else third
    if third == "all" or not names:
        return names
    return names[int(third) :: 3] or [names[int(third) % len(names)]]


def take_sixth(names):
    """Return half of the names of the commit's third, so that six commits or so try all; of a given third, all."""
    third = take_third(names)
    return third if os.environ.get(THIRD) else third[_number_of_commit() // 3 % 2 :: 2] or third
