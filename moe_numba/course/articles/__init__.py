"""Numba ports of the kernels that the source articles describe, and what the articles claim (``claims``)."""
