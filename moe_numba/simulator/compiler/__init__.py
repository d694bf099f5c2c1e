"""Numba's compiler, in a second process, for simulated kernels; `launched` compiles those of a program."""

# Name of the module whose `report` compiles a kernel in the second process: the simulator has no compiler of its own.
MODULE: str | None = None
