"""Wrong variants of kernels, made by replacing source text; checkers must reject them."""

import ast
import functools
import importlib
import inspect

from moe_numba import simulator
from moe_numba.runtime.changed_source import changed_module

_CHANGEABLE = tuple(f"moe_numba.{package}." for package in ("align", "grouped_gemm", "expert_parallel", "ptx"))


def changed(module, right, wrong, *more):
    """Return the namespace of ``module`` with the passage ``right`` of its source replaced by ``wrong``.

    ``more`` are further pairs (right, wrong).
    """
    return vars(changed_module(module, (right, wrong), *more))


def changed_maker(kernel, make, module, right, wrong, *more):
    """Return the function ``make`` of the module ``kernel``, built with changes in a module that it depends on."""
    return _with_change(kernel, {module.__name__: changed(module, right, wrong, *more)})[make]


def _with_change(module, made):
    """Return the namespace of ``module`` built anew if it imports, directly or not, one that is in ``made``."""
    name = module.__name__
    if name not in made:
        replaced = {}
        for imported, names in _imports(module):
            namespace = _with_change(imported, made)
            if namespace is not vars(imported):
                replaced |= {own_name: namespace[name] for own_name, name in names}
        made[name] = vars(module)
        if replaced:
            made[name] = changed(module, "", "")  # with empty caches
            made[name].update(replaced)
    return made[name]


@functools.cache
def _imports(module):
    """Return the changeable modules that a module imports from, with (its name, their name) of what it imports."""
    found = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith(_CHANGEABLE):
            names = [(alias.asname or alias.name, alias.name) for alias in node.names]
            found.append((importlib.import_module(node.module), names))
    return found


def is_rejected(attempt, seeds=8):
    """Return whether ``attempt(seed)`` fails, or returns what is wrong, for one of some thread orders."""
    for seed in range(seeds):
        try:
            if attempt(seed):
                return True
        except (simulator.SimulatorError, AssertionError):
            return True
    return False
