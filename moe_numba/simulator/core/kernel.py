"""Kernel launch: `run`, which every launch ends in, and `jit`, the simulator's `cuda.jit`."""

import collections
import functools
import inspect
import math
import operator
import types
import weakref
from collections.abc import Callable, Sequence

import greenlet

from moe_numba.simulator.compiler import launched
from moe_numba.simulator.core import engines, memory, numba_modules
from moe_numba.simulator.core.compilable import check_compilable
from moe_numba.simulator.core.engine import Thread
from moe_numba.simulator.core.errors import ShortTraceback, SimulatorError
from moe_numba.simulator.core.grid import Grid
from moe_numba.simulator.core.host import Device
from moe_numba.simulator.core.pointer_wrapping import wrap_argument
from moe_numba.simulator.core.scheduler import World, run_world
from moe_numba.simulator.core.settings import settings
from moe_numba.simulator.core.typed_code import typed_copy

_MAX_CLUSTER_BLOCKS = 8  # the portable cluster size; larger ones need an opt-in that `launch` does not have


def _dim3(name, value, limits):
    """Return a launch dimension as three integers; raise a ValueError if it is not valid."""
    try:
        dims = tuple(operator.index(n) for n in (value if isinstance(value, (tuple, list)) else (value,)))
    except TypeError:
        raise TypeError(f"{name} is {value}, but its dimensions must be integers") from None
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"{name} is {value}, but must have 1 to 3 dimensions")
    dims += (1,) * (3 - len(dims))
    if any(not 1 <= n <= limit for n, limit in zip(dims, limits)):
        raise ValueError(f"{name} is {value}, but each dimension must lie between 1 and {limits}")
    return dims


running = None  # the name, blocks and threads per block of a kernel while it runs; `command` reports them


def run(
    kernel: "Kernel | Callable",
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence,
    shared_bytes: int = 0,
    cluster: int | tuple[int, ...] | None = None,
    cooperative: bool | None = False,
    dependent: bool = False,
    seed: int | None = None,
    launch_bounds: int | tuple[int, int] | None = None,
    done: Sequence[Callable[[], object]] = (),
) -> None:
    """Run a kernel to completion, then call each function in `done`. Within `together`, only queue it.

    Parameters
    ----------
    kernel : Kernel or function
    grid, block, cluster : int or tuple of int
        In blocks, threads and blocks.
    args : sequence
        Scalars, arrays, tensors or Pointers.
    shared_bytes : int
        Dynamic shared memory.
    cooperative : bool, optional
        Launch all blocks at once or fail; `grid.sync()` needs it. None: if the kernel calls `grid.sync()`, as Numba's
        `kernel[grid, block]`.
    dependent : bool
        Programmatic dependent launch: until a thread has executed `griddepcontrol.wait`, nothing orders its accesses
        after those of the kernel that was launched before. It matters for `races` only.
    seed : int
        Replaces the seed in force.
    launch_bounds : int or tuple of int
        Most threads per block, and the least blocks per SM, that the kernel is compiled for.

    Raises
    ------
    SimulatorError
        If the kernel does something that is undefined or an error on a GPU. The kernel's own exceptions propagate.
    """
    if type(greenlet.getcurrent()) is Thread:
        raise SimulatorError(f"{greenlet.getcurrent()} launches a kernel, which a kernel cannot do")
    grid = _dim3("the grid", grid, (2**31 - 1, 65535, 65535))
    block = _dim3("the block", block, (1024, 1024, 64))
    bounds = launch_bounds or getattr(kernel, "targetoptions", {}).get("launch_bounds")
    if bounds:
        bounds = (*bounds, 1)[:2] if isinstance(bounds, tuple) else (bounds, 1)
    if math.prod(block) > 1024:
        raise ValueError(f"the block is {block}, but a block has at most 1024 threads")
    if bounds and math.prod(block) > bounds[0]:
        raise ValueError(f"the block is {block}, but the kernel's launch_bounds allow at most {bounds[0]} threads")
    cluster = _dim3("the cluster", cluster, (_MAX_CLUSTER_BLOCKS,) * 3) if cluster is not None else None
    if cluster and math.prod(cluster) > _MAX_CLUSTER_BLOCKS:
        raise ValueError(f"the cluster is {cluster}, but a cluster has at most {_MAX_CLUSTER_BLOCKS} blocks")
    if cluster and any(g % c for g, c in zip(grid, cluster)):
        raise ValueError(f"the grid is {grid}, which clusters of {cluster} blocks do not divide")
    function = getattr(kernel, "py_func", kernel)
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    if len(args) != len(names) and not code.co_flags & inspect.CO_VARARGS:
        raise TypeError(
            f"kernel {function.__name__} takes {len(names)} arguments ({', '.join(names)}), but {len(args)} were given"
        )
    check_compilable(function)
    launched.note(function, getattr(kernel, "targetoptions", {}), launch_bounds, args)
    names += ("",) * (len(args) - len(names))
    ranks = settings["ranks"]
    if ranks is not None and not ranks.queues(kernel):
        ranks = None
    if ranks is not None and seed is not None:
        raise ValueError(f"kernel {function.__name__} has a seed of its own, but all ranks share one: simulator.seed")

    def make_grid(world):
        wrapped = [wrap_argument(value, name) for value, name in zip(args, names)]
        made = Grid(world, function, grid, block, wrapped, shared_bytes, cluster, cooperative, dependent, bounds)
        made.options = getattr(kernel, "targetoptions", {})
        return made

    if ranks is not None:
        ranks.add(make_grid, done)
        return
    global running
    running = function.__name__, math.prod(grid), math.prod(block)
    try:
        with ShortTraceback():
            _run_alone(make_grid, seed)
    finally:
        running = None
    for callback in done:
        callback()


def _run_alone(make_grid, seed):
    """Run one grid on the vector engine, or else with one greenlet per thread."""

    def with_threads():
        world = World(seed)
        world.add(make_grid(world))
        world.run()

    engines.run(lambda world: {None: [make_grid(world)]}, lambda: run_world(with_threads), seed)


class Kernel:
    """A `@cuda.jit` function: `kernel[grid, block](...)` runs it; another kernel may call it as a device function."""

    def __init__(self, function: Callable, **options):
        self.py_func = self.fn = function
        self.targetoptions, self.extensions = options, options.get("extensions", ())
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        if type(greenlet.getcurrent()) is Thread:
            return self.py_func(*args, **kwargs)
        raise ValueError(f"kernel {self.__name__} needs a launch configuration: {self.__name__}[grid, block](...)")

    def __getitem__(self, configuration):
        if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
            raise ValueError(
                f"kernel {self.__name__}: the launch configuration must be [grid, block], [grid, block, stream] "
                f"or [grid, block, stream, shared_bytes], but is {configuration!r}"
            )
        grid, block, _, shared_bytes = (*configuration, 0, 0)[:4]
        return functools.partial(self._launch, grid, block, shared_bytes)

    def _launch(self, grid, block, shared_bytes, *args):
        write_back = []
        for extension in self.extensions:
            args = [extension.prepare_args(None, arg, stream=0, retr=write_back)[1] for arg in args]
        args = [_to_device(arg, write_back) for arg in args]
        with ShortTraceback():
            run(self, grid, block, args, shared_bytes, cooperative=None, done=write_back)

    def configure(self, griddim, blockdim, stream=0, sharedmem=0):
        """Return what `kernel[griddim, blockdim, stream, sharedmem]` returns."""
        return self[griddim, blockdim, stream, sharedmem]

    def forall(self, ntasks, tpb=0, stream=0, sharedmem=0):
        threads = tpb or 128
        return self[max(1, -(-ntasks // threads)), threads, stream, sharedmem]

    def specialize(self, *_):
        return self

    def bind(self):
        """Do nothing; compiled kernels load their module here."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(f"kernel {self.py_func.__name__} has no attribute {name}")
        raise AttributeError(
            f"kernel {self.py_func.__name__} has no attribute {name} in the simulator, which compiles nothing"
        )

    @property
    def overloads(self):
        """A mapping of each signature to what programs ask of a compiled kernel."""
        return collections.defaultdict(Overload)


class Overload:
    """What stands for a kernel that is compiled for one signature."""

    def max_cooperative_grid_blocks(self, blockdim, dynsmemsize=0):
        """Return the number of blocks that the simulated device holds at the same time."""
        return Device.MULTIPROCESSOR_COUNT * (2048 // math.prod(_dim3("blockdim", blockdim, (1024, 1024, 64))))


def _to_device(arg, write_back):
    """Apply the transfer hints `cuda.In`, `Out` and `InOut` to an argument; append copy-backs to `write_back`."""
    hints = numba_modules.transfer_hints()
    if not isinstance(arg, hints.ArgHint):
        return arg
    host = arg.value
    if isinstance(arg, hints.In):
        return host.copy()
    if isinstance(arg, hints.Out):
        device = memory.poison(host.shape, host.dtype)
        write_back.append(lambda: host.__setitem__(..., device))
        return device
    return host


def call_cpu_functions_as_python() -> None:
    """Let kernels call functions that Numba compiles for the CPU (`njit`): on a GPU it compiles them for that."""
    from numba.core.registry import CPUDispatcher

    compiled, copies = CPUDispatcher.__call__, weakref.WeakKeyDictionary()

    def call(self, *args, **kwargs):
        if type(greenlet.getcurrent()) is Thread:
            if self not in copies:
                copies[self] = typed_copy(self.py_func)
            return copies[self](*args, **kwargs)
        return compiled(self, *args, **kwargs)

    CPUDispatcher.__call__ = call


def jit(func_or_sig=None, device=False, **options):
    """Replace Numba's `cuda.jit`; signatures and compiler options are accepted and ignored."""
    func_or_sig = getattr(func_or_sig, "py_func", func_or_sig)  # of a function that Numba compiles for the CPU
    if not isinstance(func_or_sig, types.FunctionType):
        return lambda function: jit(function, device, **options)
    if device:  # the function itself: a wrapper would slow every call of a device function
        func_or_sig.py_func = func_or_sig
        return func_or_sig
    return Kernel(func_or_sig, **options)
