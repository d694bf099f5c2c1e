"""Wrong answers to the exercises of the notebooks, a module per topic."""

import itertools

from moe_numba.runtime.changed_source import changed_source, define

_numbers = itertools.count()


def changed(solution, *changes):
    """Return the kernel of a solution with passages replaced: pairs of the old one and the new one."""
    source = solution
    for old, new in changes:
        source = changed_source(source, old, new)
    file = f"{solution.__name__}_{next(_numbers)}.py"  # the source of each kernel is found by its file
    return define(source, solution.py_func.__globals__, file)[solution.__name__]
