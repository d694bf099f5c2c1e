"""Kernels with one mistake in them, which the checks must reject."""

from moe_numba.course.simulate import changed_module


def changed(module, right, wrong):
    """Return the namespace of ``module`` with the passage ``right`` of its source replaced by ``wrong``."""
    return vars(changed_module(module, (right, wrong)))
