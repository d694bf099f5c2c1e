"""Wrong variants of kernels, made by replacing source text; checkers must reject them."""

from moe_numba import simulator
from moe_numba.course.simulate import changed_module


def changed(module, right, wrong):
    """Return the namespace of ``module`` with the passage ``right`` of its source replaced by ``wrong``."""
    return vars(changed_module(module, (right, wrong)))


def changed_maker(kernel, make, module, right, wrong):
    """Return the function ``make`` of the module ``kernel``, built with a change in it or in a module that it uses."""
    made = changed(module, right, wrong)
    if module is kernel:
        return made[make]
    copy = changed(kernel, "", "")  # with empty caches
    used = made.keys() & copy.keys()
    copy.update({name: made[name] for name in used if name.startswith(("make_", "wait_")) or type(made[name]) is type})
    return copy[make]


def is_rejected(attempt, seeds=8):
    """Return whether ``attempt(seed)`` fails, or returns what is wrong, for one of some thread orders."""
    for seed in range(seeds):
        try:
            if attempt(seed):
                return True
        except (simulator.SimulatorError, AssertionError):
            return True
    return False
