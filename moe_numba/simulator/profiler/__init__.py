"""Profiler: counters per source line of the kernels that the simulator runs (`moe_numba.simulator.profile`).

`collect` groups the executions and accesses of lanes by `control_flow`; `coalescing` and `bank_conflicts` count
what the memory system makes of them; `counters` holds the results; `static` asks the compiler; `report` and `html`
render. The package is not called `profile` because that name is the function's.
"""
