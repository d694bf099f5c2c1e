"""Thread block clusters: their barrier, and one block's way into the shared memory of another.

What a GPU leaves undefined is an error here: a barrier at which not all lanes of a warp come together, and touching a
block that may not have started yet, or that has exited.
"""

import sys

from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import (
    ClusterError,
    DivergentBarrier,
    OutOfBounds,
    SimulatorError,
    kernel_frame,
    place,
)
from moe_numba.simulator.core.warp import FULL, collective
from moe_numba.simulator.memory_model import weak


def _together(what, act):
    """Wait for all lanes of the warp to come to `what` on one line, and act once for them; each gets the result."""
    t = thread()
    warp = t.block.warps[t.warp]

    def finish(places):
        if len(set(places.values())) > 1:
            raise DivergentBarrier(
                f"the lanes of {warp} come to {what} at different lines: {', '.join(sorted(set(places.values())))}"
            )
        return dict.fromkeys(places, act(warp))

    return collective(what, FULL, place(kernel_frame(sys._getframe(1))), finish)


def arrive():
    """Tell the cluster that this warp has come, and go on."""
    weak.release(thread())
    _together("barrier.cluster.arrive", thread().block.cluster.arrive)


def wait():
    """Wait until all warps of the cluster have arrived or exited."""
    t = thread()
    cluster = t.block.cluster
    phase = _together("barrier.cluster.wait", cluster.depart)
    if phase == cluster.phase:
        cluster.waiting.append(t)
        t.park(cluster)
    cluster.met.add(t.block.warps[t.warp])
    weak.acquire(t)


def remote(array, rank):
    """A pointer to where a shared array lies in the shared memory of the cluster's block `rank`, as `mapa` finds it."""
    t = thread()
    cluster = t.block.cluster
    if not 0 <= rank < len(cluster.blocks):
        raise OutOfBounds(f"{t}: rank {rank} is outside its cluster, which has {len(cluster.blocks)} blocks")
    block = cluster.blocks[rank]
    pointer = t.block.shared.twin(array.array, block.shared)
    if pointer is None:
        raise SimulatorError(f"{t}: {array} is not in shared memory, where another block's could be found beside it")
    pointer.name += f" in {block}"
    if block is not t.block and t.block.warps[t.warp] not in cluster.met:
        raise ClusterError(
            f"{t} reaches for {pointer}, but {block} may not have started: this needs a cluster barrier before it"
        )
    if block.exited == block.size:
        raise ClusterError(
            f"{t} reaches for {pointer}, but {block} has exited: it needs a cluster barrier before its end, after this"
        )
    return pointer
