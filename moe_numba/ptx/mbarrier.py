"""mbarriers: barriers in shared memory that count arrivals, and the bytes of copies that are under way.

A barrier is an element of a shared ``uint64`` array, ``cuda.shared.array(count, uint64)``, and is named by that array
and an index. It goes from phase to phase: a phase ends when all the arrivals that ``mbarrier_init`` asked for have come
and all the bytes that were expected have landed. Phases are told apart by their parity, 0 for the first. Waiting for
parity 1 on a new barrier therefore returns at once, which is how the producer of a ring starts.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction


def mbarrier_init(barriers, index, count):
    """``mbarrier.init.shared::cta.b64``: a new barrier, each phase of which takes ``count`` arrivals."""
    simulator.mbarrier.init(barriers, index, int(count))


def mbarrier_inval(barriers, index):
    """``mbarrier.inval.shared::cta.b64``: the end of a barrier; its memory may be used for something else."""
    simulator.mbarrier.invalidate(barriers, index)


def fence_mbarrier_init():
    """``fence.mbarrier_init.release.cluster``: lets copies and the cluster's other blocks see this thread's barriers.

    Threads also need a barrier (``cuda.syncthreads``, or the cluster's) between the fence and their first use.
    """
    simulator.mbarrier.fence_init()


mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "void", SHARED, "u32", simulate=mbarrier_init)
mbarrier_inval = instruction("mbarrier.inval.shared::cta.b64 [$0];", "void", SHARED, simulate=mbarrier_inval)
fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;", "void", simulate=fence_mbarrier_init)


def mbarrier_arrive(barriers, index):
    """``mbarrier.arrive.shared::cta.b64``: one arrival; what this thread did before it is done for those who wait."""
    simulator.mbarrier.find(barriers, index).arrive()


def mbarrier_arrive_expect_tx(barriers, index, tx_bytes):
    """``mbarrier.arrive.expect_tx.shared::cta.b64``: one arrival; the phase also waits for so many bytes of copies."""
    simulator.mbarrier.find(barriers, index).arrive(expected=int(tx_bytes))


def mbarrier_expect_tx(barriers, index, tx_bytes):
    """``mbarrier.expect_tx.relaxed.cta.shared::cta.b64``: the phase also waits for so many bytes; no arrival."""
    simulator.mbarrier.find(barriers, index).expect(int(tx_bytes))


def mbarrier_arrive_cluster(barriers, index, rank):
    """``mbarrier.arrive.release.cluster.shared::cluster.b64``: one arrival at the barrier of block ``rank``.

    What this thread wrote before it, to global memory too, is visible to those who wait: for that the thread stands
    still for about a microsecond.
    """
    simulator.mbarrier.find(barriers, index, rank).arrive()


def mbarrier_arrive_relaxed_cluster(barriers, index, rank):
    """``mbarrier.arrive.relaxed.cluster.shared::cluster.b64``: the same at once, from who wrote nothing for others.

    It says that reads are over, such as those of a multiplication that was waited for.
    """
    simulator.mbarrier.find(barriers, index, rank).arrive()


mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "void", SHARED, simulate=mbarrier_arrive)
mbarrier_arrive_expect_tx = instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "void", SHARED, "u32", simulate=mbarrier_arrive_expect_tx
)
mbarrier_expect_tx = instruction(
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", "void", SHARED, "u32", simulate=mbarrier_expect_tx
)
_ARRIVE = "{ .reg .u32 a; mapa.shared::cluster.u32 a, $0, $1; mbarrier.arrive.%s.cluster.shared::cluster.b64 _, [a]; }"
mbarrier_arrive_cluster = instruction(_ARRIVE % "release", "void", SHARED, "u32", simulate=mbarrier_arrive_cluster)
mbarrier_arrive_relaxed_cluster = instruction(
    _ARRIVE % "relaxed", "void", SHARED, "u32", simulate=mbarrier_arrive_relaxed_cluster
)


def mbarrier_try_wait_parity(barriers, index, parity):
    """``mbarrier.try_wait.parity.shared::cta.b64``: 1 if the phase of this parity has ended, 0 if not after a while.

    A barrier knows its current phase and the one before it; who falls two phases behind asks in vain.
    """
    barrier = simulator.mbarrier.find(barriers, index)
    if not barrier.ended(parity):
        barrier.poll(parity)
    return np.uint32(barrier.ended(parity))


def mbarrier_wait_parity(barriers, index, parity):
    """``mbarrier.try_wait.parity.shared::cta.b64`` in a loop: wait until the phase of this parity has ended."""
    simulator.mbarrier.find(barriers, index).wait(parity)


def mbarrier_wait_parity_cluster(barriers, index, parity):
    """``mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64`` in a loop: the same, if other blocks arrive as well.

    What they wrote before they arrived is visible after it.
    """
    simulator.mbarrier.find(barriers, index).wait(parity)


mbarrier_try_wait_parity = instruction(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
    "u32",
    SHARED,
    "u32",
    simulate=mbarrier_try_wait_parity,
)
_LOOP = "{ .reg .pred p; WAIT${:uid}: mbarrier.try_wait.parity%s.shared::cta.b64 p, [$0], $1; @!p bra WAIT${:uid}; }"
mbarrier_wait_parity = instruction(_LOOP % "", "void", SHARED, "u32", simulate=mbarrier_wait_parity)
mbarrier_wait_parity_cluster = instruction(
    _LOOP % ".acquire.cluster", "void", SHARED, "u32", simulate=mbarrier_wait_parity_cluster
)
