"""State of a ring of shared-memory stages that are guarded by mbarriers."""

from functools import cache

from numba import cuda, int32, uint32


@cache
def make_advance(stages):
    """Make ``stage, phase = advance(stage, phase)``, which moves on to the next of ``stages`` pipeline stages.

    ``phase`` (uint32, 0 or 1) is the mbarrier phase to wait for. It flips when ``stage`` (int32) wraps around to 0.
    A consumer starts with (0, 0). A producer starts with (0, 1), so that its first wait on each empty barrier returns
    at once.
    """

    @cuda.jit(device=True)
    def advance(stage, phase):
        stage = int32(stage + 1)
        if stage == stages:
            stage, phase = int32(0), uint32(phase ^ uint32(1))
        return stage, phase

    return advance
