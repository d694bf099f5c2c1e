"""Several ranks: kernels of several GPUs that run at the same time, and reach into one another's memory.

    with simulator.seed(3), simulator.together():
        for rank in range(2):
            with simulator.on_rank(rank):
                launch(kernel, 1, 64, buffers[rank], addresses, ...)

The launches are collected, and run when the context is left: those of one rank one after the other, as on a stream,
those of different ranks at once. One seed says how all their warps take turns.
"""

import contextlib

import greenlet

from moe_numba.simulator.core.arguments import pointer
from moe_numba.simulator.core.errors import Misaligned, OutOfBounds, SimulatorError
from moe_numba.simulator.core.memory import as_dtype, who
from moe_numba.simulator.core.scheduler import World, _setting, _settings

_buffers = {}  # the address of a registered buffer -> a pointer to its bytes


@contextlib.contextmanager
def together():
    """Collect the launches within this context, and run them as the kernels of so many ranks when it is left."""
    if _settings["ranks"] is not None:
        raise SimulatorError("simulator.together() is used within itself: all launches of its ranks run as one")
    ranks = Ranks()
    with _setting(ranks=ranks):
        yield
    ranks.run()


def on_rank(rank):
    """Within this context launches are this rank's; elsewhere each launch is a rank of its own."""
    return _setting(rank=int(rank))


class Ranks:
    """The launches of all ranks, before they run."""

    def __init__(self):
        self.world, self.launches, self.done = World(), [], []

    def add(self, grid, done):
        """A launch, and what is to be done when all is over."""
        self.launches.append((_settings["rank"], grid))
        self.done += done

    def run(self):
        taken = {rank for rank, _ in self.launches if rank is not None}
        free = (rank for rank in range(len(taken) + len(self.launches)) if rank not in taken)
        streams = {}
        for rank, grid in self.launches:
            for t in grid.threads():
                t.parent = greenlet.getcurrent()  # a rank's host may be a greenlet of its own
            grid.rank = next(free) if rank is None else rank
            streams.setdefault(grid.rank, []).append(grid)
        for rank, stream in streams.items():
            for grid in stream:
                grid.label = f"rank {rank} " if len(streams) > 1 else ""
            self.world.later[rank] = stream[1:]
        for stream in streams.values():
            self.world.add(stream[0])
        self.world.run()
        for step in self.done:
            step()


def register(buffer, name):
    """Let kernels reach a tensor or an array by its address, which is returned; until `forget` is called.

    On a GPU any address will do. Here one must be known to lie in a buffer, so that what misses it is found.
    """
    known = pointer(buffer, name)
    if not known.size:
        raise ValueError(f"{name} is empty: no address lies in it")
    known = known.view("uint8")
    if known.address in _buffers:
        raise ValueError(f"{name} is registered already, as {_buffers[known.address].name}")
    _buffers[known.address] = known
    return known.address


def forget(address):
    """The buffer that `register` gave this address for is no more."""
    del _buffers[address]


def at(address, like):
    """A pointer to an address in a registered buffer, to elements as `like` has them."""
    address, dtype = int(address), as_dtype(like.dtype)
    below = [start for start in _buffers if start <= address]
    if not below:
        raise OutOfBounds(f"{who()}address {address:#x} lies in no registered buffer, nor after one")
    start = next((s for s in below if address < s + _buffers[s].size), max(below))
    buffer = _buffers[start]
    if address >= start + buffer.size:
        raise OutOfBounds(
            f"{who()}address {address:#x} lies in no registered buffer; the nearest before it is {buffer.name}, "
            f"which ends {address - start - buffer.size} bytes before"
        )
    if address % dtype.itemsize:
        raise Misaligned(f"{who()}address {address:#x} in {buffer.name} is not aligned for {dtype}")
    part = buffer.bytes[address - start :]
    name = buffer.name if address == start else f"{buffer.name} + {address - start} bytes"
    return type(like)(part[: part.size // dtype.itemsize * dtype.itemsize].view(dtype), name)
