"""Numba port of hpc-ops' FP8 grouped GEMM with per-group tensor maps."""
