"""Numba ports of the kernels that the source articles describe."""
