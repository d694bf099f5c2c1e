"""mbarriers: barriers in shared memory that count arrivals and the bytes of asynchronous copies.

A barrier is an element of a shared ``uint64`` array, ``cuda.shared.array(count, uint64)``; instructions take the array
and an index. A phase completes when it has all the arrivals set by ``mbarrier_init`` and all expected bytes have been
copied. Waits name a phase by its bit (``phaseParity`` in the PTX ISA): 0 for the first phase, 1 for the second, then 0
again. A wait for phase bit 1 of a new barrier therefore returns at once, which is how the producer of a pipeline
starts.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction


def mbarrier_init(barriers, index, count):
    """``mbarrier.init.shared::cta.b64``: initialise a barrier whose phases take ``count`` arrivals."""
    simulator.mbarrier.init(barriers, index, int(count))


def mbarrier_inval(barriers, index):
    """``mbarrier.inval.shared::cta.b64``: invalidate a barrier, so that its memory may be reused."""
    simulator.mbarrier.invalidate(barriers, index)


def fence_mbarrier_init():
    """``fence.mbarrier_init.release.cluster``: make the barriers that this thread initialised visible.

    The async proxy and the cluster's other blocks need it. Other threads also need a barrier (``cuda.syncthreads``, or
    the cluster barrier) between the fence and their first use.
    """
    simulator.mbarrier.fence_init()


mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "void", SHARED, "u32", simulate=mbarrier_init)
mbarrier_inval = instruction("mbarrier.inval.shared::cta.b64 [$0];", "void", SHARED, simulate=mbarrier_inval)
fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;", "void", simulate=fence_mbarrier_init)


def mbarrier_arrive(barriers, index):
    """``mbarrier.arrive.shared::cta.b64``: arrive once, with release semantics at block scope."""
    simulator.mbarrier.find(barriers, index).arrive()


def mbarrier_arrive_expect_tx(barriers, index, tx_bytes):
    """``mbarrier.arrive.expect_tx.shared::cta.b64``: expect ``tx_bytes`` more bytes, then arrive once."""
    simulator.mbarrier.find(barriers, index).arrive(expected_bytes=int(tx_bytes))


def mbarrier_expect_tx(barriers, index, tx_bytes):
    """``mbarrier.expect_tx.relaxed.cta.shared::cta.b64``: expect ``tx_bytes`` more bytes, without arriving."""
    simulator.mbarrier.find(barriers, index).expect(int(tx_bytes))


def mbarrier_arrive_cluster(barriers, index, rank):
    """``mbarrier.arrive.release.cluster.shared::cluster.b64``: arrive at the barrier of block ``rank``.

    Threads that wait at cluster scope see what this thread wrote before, also to global memory. The release takes about
    a microsecond.
    """
    simulator.mbarrier.find(barriers, index, rank).arrive()


def mbarrier_arrive_release_cta_cluster(barriers, index, rank):
    """``mbarrier.arrive.release.cta.shared::cluster.b64``: arrive at block ``rank`` without publishing writes to it.

    Use it, for example, to signal that the operands of a completed wgmma have been read. ``mbarrier.arrive.relaxed``
    compiles to the same machine code, but CUDA 12.6 lacks it.
    """
    simulator.mbarrier.find(barriers, index, rank).arrive()


mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "void", SHARED, simulate=mbarrier_arrive)
mbarrier_arrive_expect_tx = instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "void", SHARED, "u32", simulate=mbarrier_arrive_expect_tx
)
mbarrier_expect_tx = instruction(
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", "void", SHARED, "u32", simulate=mbarrier_expect_tx
)
_ARRIVE = "{ .reg .u32 a; mapa.shared::cluster.u32 a, $0, $1; mbarrier.arrive.release.%s.shared::cluster.b64 _, [a]; }"
mbarrier_arrive_cluster = instruction(_ARRIVE % "cluster", "void", SHARED, "u32", simulate=mbarrier_arrive_cluster)
mbarrier_arrive_release_cta_cluster = instruction(
    _ARRIVE % "cta", "void", SHARED, "u32", simulate=mbarrier_arrive_release_cta_cluster
)


def mbarrier_try_wait_parity(barriers, index, phase):
    """``mbarrier.try_wait.parity.shared::cta.b64``: return 1 if the phase completed, 0 on time-out.

    ``phase`` is the phase bit. A barrier distinguishes only its current and its previous phase, so a thread must not
    fall two phases behind.
    """
    barrier = simulator.mbarrier.find(barriers, index)
    if not barrier.test(phase):
        barrier.poll(phase)
    return np.uint32(barrier.test(phase))


def mbarrier_test_wait_parity(barriers, index, phase):
    """``mbarrier.test_wait.parity.shared::cta.b64``: return 1 if the phase completed, else 0; it does not wait.

    Independent instructions after it execute while its result is on the way.
    """
    return np.uint32(simulator.mbarrier.find(barriers, index).test(phase))


def mbarrier_wait_parity(barriers, index, phase):
    """``mbarrier.try_wait.parity.shared::cta.b64`` in a loop: wait until the phase with bit ``phase`` completes."""
    simulator.mbarrier.find(barriers, index).wait(phase)


def mbarrier_wait_parity_cluster(barriers, index, phase):
    """``mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64`` in a loop: wait, with cluster scope.

    Use it where threads of other blocks arrive: what they wrote before they arrived is visible afterwards.
    """
    simulator.mbarrier.find(barriers, index).wait(phase)


_TEST = "{ .reg .pred p; mbarrier.%s_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }"
mbarrier_try_wait_parity = instruction(_TEST % "try", "u32", SHARED, "u32", simulate=mbarrier_try_wait_parity)
mbarrier_test_wait_parity = instruction(_TEST % "test", "u32", SHARED, "u32", simulate=mbarrier_test_wait_parity)
_LOOP = "{ .reg .pred p; WAIT${:uid}: mbarrier.try_wait.parity%s.shared::cta.b64 p, [$0], $1; @!p bra WAIT${:uid}; }"
mbarrier_wait_parity = instruction(_LOOP % "", "void", SHARED, "u32", simulate=mbarrier_wait_parity)
mbarrier_wait_parity_cluster = instruction(
    _LOOP % ".acquire.cluster", "void", SHARED, "u32", simulate=mbarrier_wait_parity_cluster
)
