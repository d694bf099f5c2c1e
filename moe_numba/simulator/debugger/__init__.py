"""Debugger for kernels: step by lane or warp, breakpoints, watchpoints, and all of it backwards.

`session` runs launches and repeats them to go backwards, `goals` says where a run stops, `breakpoints` where else it
does, `frames` reads the threads' variables, `warp_steps` reconstructs what a warp executes together, `memory_copies`
restores a launch's memory, and `shell` has the commands.
"""
