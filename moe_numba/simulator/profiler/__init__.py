"""Profiler: counters per source line of the kernels that the simulator runs (`moe_numba.simulator.profile`).

`collect` groups the executions and accesses of threads by `control_flow`, `collect_vectors` those of vectors of lanes
by their masks; `coalescing` and `bank_conflicts` count what the memory system makes of them; `counters` holds the
results, and `phases` those of each warp between two barriers; `static` asks the compiler; `report` and `html` render.
The package is not called `profile` because that name is the function's.
"""
