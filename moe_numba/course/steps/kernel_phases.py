"""Kernels without their later phases: how long each phase of a kernel takes, from the differences of their times.

A phase begins with a comment line of its own in the kernel's body, such as ``# scan``. The kernel is what a factory
returns, which ends with ``return`` and the kernel's name.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from moe_numba.runtime.changed_source import define, source_of

_PHASE = re.compile(r"^        # ([a-z_ ]+)\n", re.M)
_END = re.compile(r"^    return \w+$", re.M)  # of the factory


def phases_of(make: Callable) -> list[str]:
    """Return the names of the phases of a factory's kernel, in order."""
    return _PHASE.findall(source_of(make))


def until(make: Callable, phase: str, namespace: Mapping[str, Any]) -> Callable:
    """Return a factory like ``make`` whose kernel ends after a phase.

    Parameters
    ----------
    make : callable
        The factory. What its phases write is defined without the later ones, so that the shortened kernel ends.
    phase : str
        A name of ``phases_of(make)``.
    namespace : dict
        Global names that the factory uses: ``globals()`` of the notebook.

    Raises
    ------
    ValueError
        The kernel has no such phase.
    """
    source, names = source_of(make), phases_of(make)
    if phase not in names:
        raise ValueError(f"the kernel of {make.__name__} has the phases {names}, not {phase!r}")
    end = [found.start() for found in _END.finditer(source)][-1]
    starts = [found.start() for found in _PHASE.finditer(source)] + [end]
    text = source[: starts[names.index(phase) + 1]].rstrip() + "\n\n" + source[end:]
    return define(text, namespace, f"{make.__name__} until {phase}")[make.__name__]


def without_earlier(times: Mapping[str, float], phases: list[str]) -> dict[str, float]:
    """Return the time of each phase alone, from the times of kernels that end after it.

    ``times`` may have further entries, which are returned as they are. No phase takes less than zero.
    """
    found, before = dict(times), 0.0
    for phase in phases:
        found[phase] = max(times[phase] - before, 0.0)
        before = max(times[phase], before)
    return found
