"""PTX instructions as Numba intrinsics, each with a Python implementation for the simulator.

An intrinsic has the name of its instruction. A pointer operand is passed as a pointer (or an array) and an element
index.
"""
