"""What Numba cannot say: PTX instructions as intrinsics, each with a Python meaning for the simulator."""
