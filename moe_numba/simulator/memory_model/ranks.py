"""Ranks: kernels of several GPUs that run at the same time and access one another's memory.

    with simulator.seed(3), simulator.together():
        for rank in range(2):
            with simulator.on_rank(rank):
                launch(kernel, 1, 64, buffers[rank], addresses, ...)

The launches are queued, and run when the context is left: those of one rank in order, as on a stream; those of
different ranks concurrently. One seed determines how their warps interleave.
"""

import contextlib
import random
import weakref
from collections.abc import Iterator

import greenlet

from moe_numba.simulator.core import engines
from moe_numba.simulator.core.errors import Misaligned, OutOfBounds, ShortTraceback, SimulatorError
from moe_numba.simulator.core.memory import Pointer, as_dtype, thread_prefix
from moe_numba.simulator.core.pointer_wrapping import pointer
from moe_numba.simulator.core.reachable import buffers, ranks
from moe_numba.simulator.core.scheduler import World, run_world
from moe_numba.simulator.core.settings import override_settings, settings

_LAG = 4.0  # added to the priorities of a late rank's warps: they run after all else, asynchronous copies included
_exchanging: weakref.WeakSet = weakref.WeakSet()  # kernels that have been launched within `exchange`


@contextlib.contextmanager
def together(only_exchanges: bool = False) -> Iterator[None]:
    """Queue the launches within this context, and run them as kernels of concurrent ranks when it is left.

    Parameters
    ----------
    only_exchanges : bool
        A launch outside of `exchange` runs immediately, so that the host can read its results, unless launches of its
        rank are queued: it then runs after these.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def add_rank(total, rank):
    ...     cuda.atomic.add(total, 0, rank)
    >>> total = np.zeros(1, np.int32)
    >>> with moe_numba.simulator.together():
    ...     for rank in range(4):
    ...         with moe_numba.simulator.on_rank(rank):
    ...             add_rank[1, 1](total, rank)
    >>> total.tolist()
    [6]
    """
    if settings["ranks"] is not None:
        raise SimulatorError("simulator.together() is used within itself: all launches of its ranks run as one")
    launches = _RankLaunches(only_exchanges)
    with override_settings(ranks=launches):
        yield
    with ShortTraceback():
        launches.run()


def on_rank(rank: int) -> contextlib.AbstractContextManager:
    """Return a context in which launches belong to this rank; elsewhere each launch is a rank of its own.

    Parameters
    ----------
    rank : int
        Number of the rank, from 0.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def add_rank(total, rank):
    ...     cuda.atomic.add(total, 0, rank)
    >>> total = np.zeros(1, np.int32)
    >>> with moe_numba.simulator.together():
    ...     for rank in range(4):
    ...         with moe_numba.simulator.on_rank(rank):
    ...             add_rank[1, 1](total, rank)
    >>> total.tolist()
    [6]
    """
    return override_settings(rank=int(rank))


def exchange() -> contextlib.AbstractContextManager:
    """Return a context for launches of kernels that wait for those of other ranks: `together` always queues them.

    It also queues later launches of these kernels, outside of the context, such as those of a prepared call.
    """
    return override_settings(exchange=True)


def has_queued() -> bool:
    """Return whether launches of the current rank are queued, so that their results are not there yet."""
    launches = settings["ranks"]
    return launches is not None and launches.has(settings["rank"])


class _RankLaunches:
    """The queued launches of all ranks."""

    def __init__(self, only_exchanges=False):
        self.only_exchanges, self.launches, self.done = only_exchanges, [], []
        self.seed = settings["seed"]

    def queues(self, kernel):
        """Return whether a launch of a kernel is queued; else it runs at once."""
        if settings["exchange"]:
            _exchanging.add(kernel)
        return not self.only_exchanges or kernel in _exchanging or self.has(settings["rank"])

    def has(self, rank):
        """Return whether launches of a rank are queued."""
        return any(queued == rank for queued, _ in self.launches)

    def add(self, make_grid, done):
        """Queue a launch, `make_grid(world)`, and callbacks for when all ranks have completed."""
        self.launches.append((settings["rank"], make_grid))
        self.done += done

    def run(self):
        if self.launches:
            engines.run(self._streams, lambda: run_world(self._run_with_threads), self.seed)
        for callback in self.done:
            callback()

    def _streams(self, world):
        """Return the grids of each rank in order."""
        named_ranks = {rank for rank, _ in self.launches if rank is not None}
        free_ranks = (rank for rank in range(len(named_ranks) + len(self.launches)) if rank not in named_ranks)
        streams = {}
        for rank, make_grid in self.launches:
            grid = make_grid(world)
            grid.rank = next(free_ranks) if rank is None else rank
            streams.setdefault(grid.rank, []).append(grid)
        late = self._late_rank(streams)
        for rank, stream in streams.items():
            for grid in stream:
                grid.label = f"rank {rank} " if len(streams) > 1 else ""
                for warp in (warp for block in grid.blocks for warp in block.warps) if rank == late else ():
                    warp.lag = _LAG
        return streams

    def _late_rank(self, streams):
        """Return the rank whose warps run only while all others wait, or None; the seed chooses.

        The others may then be several launches ahead. Where no rank has a further launch, no rank is late.
        """
        if len(streams) == 1 or all(len(stream) == 1 for stream in streams.values()):
            return None
        return random.Random(f"late rank {self.seed}").choice([None, *streams])

    def _run_with_threads(self):
        world = World(self.seed)
        streams = self._streams(world)
        for rank, stream in streams.items():
            for t in (t for grid in stream for t in grid.threads()):
                t.parent = greenlet.getcurrent()  # threads of later grids are started by threads of earlier ones
            world.queued_grids[rank] = stream[1:]
        world.threads = sum(grid.size for stream in streams.values() for grid in stream)
        for stream in streams.values():
            world.add(stream[0])
        world.run()


def register(
    buffer: "torch.Tensor | np.ndarray | Pointer",  # noqa: F821
    name: str,
    rank: int | None = None,
) -> int:
    """Let kernels access a tensor or an array by its address, which is returned, until `forget(address)`.

    On a GPU any mapped address works. Here addresses must lie in registered buffers, so that stray ones are detected.

    Parameters
    ----------
    buffer : tensor or array
        The memory.
    name : str
        Identifies the buffer in error messages.
    rank : int, optional
        Whose memory it is, for `simulator.profile`.

    Returns
    -------
    int
        The address of the first byte.

    Raises
    ------
    ValueError
        The buffer is empty, or its address is registered.

    Examples
    --------
    >>> import numpy as np
    >>> received = np.zeros(64, np.float32)
    >>> address = moe_numba.simulator.register(received, "received", rank=1)
    >>> moe_numba.simulator.forget(address)
    """
    memory = pointer(buffer, name)
    if not memory.size:
        raise ValueError(f"{name} is empty: no address lies in it")
    memory = memory.view("uint8")
    if memory.address in buffers:
        raise ValueError(f"{name} is registered already, as {buffers[memory.address].name}")
    buffers[memory.address] = memory
    if rank is not None:
        ranks[memory.address] = rank
    return memory.address


def forget(address: int) -> None:
    """Unregister a buffer.

    Parameters
    ----------
    address : int
        What `register` returned.

    Examples
    --------
    >>> import numpy as np
    >>> received = np.zeros(64, np.float32)
    >>> address = moe_numba.simulator.register(received, "received", rank=1)
    >>> moe_numba.simulator.forget(address)
    """
    del buffers[address]
    ranks.pop(address, None)


def pointer_at(address: int, like: Pointer) -> Pointer:
    """Return a pointer to an address in a registered buffer, with the element type of `like`."""
    address, dtype = int(address), as_dtype(like.dtype)
    below = [start for start in tuple(buffers) if start <= address]  # other OS threads may register buffers
    if not below:
        raise OutOfBounds(f"{thread_prefix()}address {address:#x} lies in no registered buffer, nor after one")
    start = next((s for s in below if address < s + buffers[s].size), max(below))
    buffer = buffers[start]
    if address >= start + buffer.size:
        raise OutOfBounds(
            f"{thread_prefix()}address {address:#x} lies in no registered buffer; the nearest before it is "
            f"{buffer.name}, which ends {address - start - buffer.size} bytes before"
        )
    if address % dtype.itemsize:
        raise Misaligned(f"{thread_prefix()}address {address:#x} in {buffer.name} is not aligned for {dtype}")
    part = buffer.bytes[address - start :]
    name = buffer.name if address == start else f"{buffer.name} + {address - start} bytes"
    return type(like)(part[: part.size // dtype.itemsize * dtype.itemsize].view(dtype), name)
