"""Wrong variants of kernels, made by replacing source text; checkers must reject them."""

from moe_numba.course.simulate import changed_module


def changed(module, right, wrong):
    """Return the namespace of ``module`` with the passage ``right`` of its source replaced by ``wrong``."""
    return vars(changed_module(module, (right, wrong)))
