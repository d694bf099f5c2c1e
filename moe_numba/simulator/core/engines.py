"""The engine that runs grids: vectors of lanes once it is registered, and one greenlet per thread until then.

`moe_numba.simulator` registers `vector.launch.run`, which needs the modules that launch kernels.
"""

from collections.abc import Callable

_run: Callable | None = None


def register(run: Callable) -> None:
    """Let ``run(make_grids, with_threads, seed)`` run all launches; see `vector.launch.run`."""
    global _run
    _run = run


def run(make_grids: Callable, with_threads: Callable[[], None], seed: int | None) -> None:
    """Run the grids that ``make_grids(world)`` makes, or call ``with_threads()``, which runs them with greenlets."""
    if _run is None:
        with_threads()
    else:
        _run(make_grids, with_threads, seed)
