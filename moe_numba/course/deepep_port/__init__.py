"""Numba port of DeepEP's intranode dispatch and combine kernels."""
