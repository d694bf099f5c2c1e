"""Numba's compiler, in a second process, for simulated kernels; `launched` compiles those of a program."""
