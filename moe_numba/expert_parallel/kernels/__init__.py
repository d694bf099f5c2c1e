"""The kernels of expert parallelism."""
