"""Starting a kernel: what `@cuda.jit` makes of a function, and `run`, which every launch comes down to."""

import functools
import inspect
import math
import types

import greenlet

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.arguments import argument
from moe_numba.simulator.core.engine import Grid, Thread
from moe_numba.simulator.core.errors import SimulatorError
from moe_numba.simulator.core.scheduler import World, _settings

_CLUSTER_BLOCKS = 8  # what every GPU with clusters takes; more must be asked for, which `launch` does not


def _dim3(name, value, limits):
    """A launch dimension as three integers, or an error that says what is wrong with it."""
    dims = tuple(int(n) for n in (value if isinstance(value, (tuple, list)) else (value,)))
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"{name} is {value}, but must have 1 to 3 dimensions")
    dims += (1,) * (3 - len(dims))
    if any(not 1 <= n <= limit for n, limit in zip(dims, limits)):
        raise ValueError(f"{name} is {value}, but each dimension must lie between 1 and {limits}")
    return dims


def run(kernel, grid, block, args, shared_bytes=0, cluster=None, cooperative=False, seed=None, done=()):
    """Run a kernel to its end, and call what is in `done`; or leave that to the `together` that this is called in.

    `grid` and `block` are integers or tuples; `args` are scalars, arrays, tensors or Pointers; `seed` replaces the one
    in force.
    Raises a SimulatorError for what a GPU would answer with garbage or silence, and whatever the kernel itself raises.
    """
    if type(greenlet.getcurrent()) is Thread:
        raise SimulatorError(f"{greenlet.getcurrent()} launches a kernel, which a kernel cannot do")
    grid = _dim3("the grid", grid, (2**31 - 1, 65535, 65535))
    block = _dim3("the block", block, (1024, 1024, 64))
    if block[0] * block[1] * block[2] > 1024:
        raise ValueError(f"the block is {block}, but a block has at most 1024 threads")
    cluster = _dim3("the cluster", cluster, (_CLUSTER_BLOCKS,) * 3) if cluster is not None else None
    if cluster and math.prod(cluster) > _CLUSTER_BLOCKS:
        raise ValueError(f"the cluster is {cluster}, but a cluster has at most {_CLUSTER_BLOCKS} blocks")
    if cluster and any(g % c for g, c in zip(grid, cluster)):
        raise ValueError(f"the grid is {grid}, which clusters of {cluster} blocks do not divide")
    function = getattr(kernel, "py_func", kernel)
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    if len(args) != len(names) and not code.co_flags & inspect.CO_VARARGS:
        raise TypeError(
            f"kernel {function.__name__} takes {len(names)} arguments ({', '.join(names)}), but {len(args)} were given"
        )
    names += ("",) * (len(args) - len(names))
    args = [argument(value, name) for value, name in zip(args, names)]
    ranks = _settings["ranks"]
    if ranks is not None and seed is not None:
        raise ValueError(f"kernel {function.__name__} has a seed of its own, but all ranks have one: simulator.seed")
    world = World(seed) if ranks is None else ranks.world
    launched = Grid(world, function, grid, block, args, shared_bytes, cluster, cooperative)
    if ranks is not None:
        ranks.add(launched, done)
        return
    world.add(launched)
    world.run()
    for step in done:
        step()


class Kernel:
    """A `@cuda.jit` function: `kernel[grid, block](...)` runs it; another kernel may call it as a device function."""

    def __init__(self, function, **options):
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
        args = [_transferred(arg, write_back) for arg in args]
        run(self, grid, block, args, shared_bytes, done=write_back)

    def forall(self, ntasks, tpb=0, stream=0, sharedmem=0):
        threads = tpb or 128
        return self[max(1, -(-ntasks // threads)), threads, stream, sharedmem]

    def specialize(self, *_):
        return self

    def bind(self):
        """Nothing: there is nothing to compile."""

    @property
    def overloads(self):
        from numba.cuda.simulator.kernel import FakeOverloadDict

        return FakeOverloadDict()


def _transferred(arg, write_back):
    """What the hints `cuda.In`, `Out` and `InOut` leave of an argument on the device."""
    from numba.cuda.simulator.args import ArgHint, In, Out

    if not isinstance(arg, ArgHint):
        return arg
    host = arg.value
    if isinstance(arg, In):
        return host.copy()
    if isinstance(arg, Out):
        device = memory.poison(host.shape, host.dtype)
        write_back.append(lambda: host.__setitem__(..., device))
        return device
    return host


def jit(func_or_sig=None, device=False, **options):
    """Numba's `cuda.jit`; signatures and what concerns the compiler are accepted and mean nothing here."""
    if not isinstance(func_or_sig, types.FunctionType):
        return lambda function: jit(function, device, **options)
    if device:  # the function itself: nothing stands between it and who calls it, so often
        func_or_sig.py_func = func_or_sig
        return func_or_sig
    return Kernel(func_or_sig, **options)
