"""Launches whose data races are to be detected: which ones may run as vectors, and what the next launch learns of them.

A launch that runs as vectors without a conflict has no race: gangs of a `strict` engine order accesses by barriers and
the ends of kernels alone. Anything else runs again with threads, and their detector (`happens_before`) decides.
"""

from moe_numba.simulator.core import scheduler
from moe_numba.simulator.core.settings import override_settings, settings
from moe_numba.simulator.vector.errors import Unsupported


def check_judged(streams):
    """Raise if the detector of data races knows more about the order of accesses than the vector engine."""
    if len(streams) > 1:
        raise Unsupported("several ranks, while data races are detected")
    for grid in next(iter(streams.values())):
        if grid.uses_async or grid.cluster_dim != (1, 1, 1) or grid.dependent:
            raise Unsupported("an asynchronous instruction, a cluster or a dependent launch, while races are detected")


class Repetition:
    """Runs a launch again with threads and the detector of data races, for a dependent launch that may overlap it.

    The vector engine records no source lines. So the history of a kernel, which only a dependent launch needs, comes
    from a repetition with the same seed, on the memory that the kernel found.
    """

    def __init__(self, with_threads):
        self.with_threads = with_threads
        self.settings = {name: settings[name] for name in ("seed", "wraparound")}
        self.settings |= {"races": True, "preempt": 0.0, "memory_model": None, "events": None, "profile": None}
        self.copies = None  # (bytes, what they were before the launch)

    def __call__(self):
        """Return the launch's History; memory is afterwards as it was."""
        if self.copies is None:
            return None
        now = [memory.copy() for memory, _ in self.copies]
        try:
            for memory, before in self.copies:
                memory[:] = before
            with override_settings(**self.settings):
                self.with_threads()
            return scheduler.history()
        finally:
            for (memory, _), content in zip(self.copies, now):
                memory[:] = content
