"""Thread block clusters: the cluster barrier, and access to the shared memory of another block of the cluster.

Access to a block that may not have started yet or has exited, which a GPU leaves undefined, is an error here.
"""

from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import ClusterError, OutOfBounds, SimulatorError
from moe_numba.simulator.core.warp import aligned
from moe_numba.simulator.memory_model import store_buffer


def _once_per_warp(what, act):
    """Wait for all lanes of the warp; return the result of one `act(warp)`."""
    warp = thread().unit
    return aligned(what, finish=lambda lanes: dict.fromkeys(lanes, act(warp)))


def arrive():
    """Arrive at the cluster barrier with this warp, and continue."""
    t = thread()
    store_buffer.release(t)
    if (races := t.grid.world.races) is not None:
        races.arrive(t.block.cluster, t.block.cluster.phase, t, "cluster")
    _once_per_warp("barrier.cluster.arrive", t.block.cluster.arrive)


def wait():
    """Wait until all warps of the cluster have arrived or exited."""
    t = thread()
    cluster = t.block.cluster
    phase = _once_per_warp("barrier.cluster.wait", cluster.begin_wait)
    if phase == cluster.phase:
        cluster.waiting.append(t)
        t.park(cluster)
    cluster.synchronized.add(t.block.warps[t.warp])
    store_buffer.acquire(t)
    if (races := t.grid.world.races) is not None:
        races.wait(cluster, phase, t, "cluster")


def remote(array, rank):
    """Return a pointer to a shared array's counterpart in block `rank` of the cluster (`mapa`)."""
    t = thread()
    cluster = t.block.cluster
    if not 0 <= rank < len(cluster.blocks):
        raise OutOfBounds(f"{t}: rank {rank} is outside its cluster, which has {len(cluster.blocks)} blocks")
    block = cluster.blocks[rank]
    pointer = t.block.shared.counterpart(array.array, block.shared)
    if pointer is None:
        raise SimulatorError(f"{t}: {array} is not in shared memory, so it has no counterpart in another block")
    pointer.name += f" in {block}"
    if block is not t.block and t.block.warps[t.warp] not in cluster.synchronized:
        raise ClusterError(
            f"{t} accesses {pointer}, but {block} may not have started: this needs a cluster barrier before it"
        )
    if block.exited == block.size:
        raise ClusterError(
            f"{t} accesses {pointer}, but {block} has exited: that block needs a cluster barrier before its end, "
            f"after this access"
        )
    return pointer
