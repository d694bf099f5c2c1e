"""Settings of simulated runs: a thread's own within a context such as `seed`, elsewhere those of the environment.

A context such as `seed`, `trace` or `weak_memory` affects only the OS thread that enters it. A new OS thread starts
from the environment, not from the contexts of the thread that started it.
"""

import contextlib
import os
import threading


def _probability(text):
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def _switch(text):
    return {"0": False, "1": True}[text]


def _engine(text):
    return {"either": "either", "threads": "threads", "vector": "vector"}[text]


def _warp(text):
    if text and int(text) < 0:
        raise ValueError
    return int(text) if text else None


# Setting -> its environment variable, what an empty or missing variable counts as, how to read it, and what is allowed.
_VARIABLES = {
    "seed": ("MOE_NUMBA_SEED", "0", int, "an integer"),
    "preempt": ("MOE_NUMBA_PREEMPT", "0", _probability, "a number from 0 to 1"),
    "slow_warp": ("MOE_NUMBA_SLOW_WARP", "", _warp, "the number of a warp in its block"),
    "weak_memory": ("MOE_NUMBA_WEAK_MEMORY", "0", _switch, "0 or 1"),
    "engine": ("MOE_NUMBA_ENGINE", "either", _engine, "either, vector or threads"),
    "races": ("MOE_NUMBA_RACES", "0", _switch, "0 or 1"),
    "wraparound": ("MOE_NUMBA_WRAPAROUND", "0", _switch, "0 or 1"),
    "compile": ("MOE_NUMBA_COMPILE", "0", _switch, "0 or 1"),
}


class _ThreadSettings(threading.local):
    def __init__(self):
        self.changes = {}  # the settings that this thread has changed


class Settings:
    """What a new World starts from, by name.

    `seed`, `preempt`, `slow_warp` (None, or a warp of each block that runs last), `races` (whether to detect data
    races), `weak_memory` (see `store_buffer`), `wraparound` (whether computed negative indices count from the end) and
    `compile` (whether launched kernels are compiled at the end, see `compiler.launched`) are values. `events` is the
    list of a trace; `sampled_blocks` is the number of blocks that run of larger grids, or None for all (see
    `profiler.collect.profile`); `ranks`, `rank` and `exchange`: see `ranks`.
    The environment is read when a value is needed, so that a wrong variable does not fail an import.
    """

    def __init__(self):
        self._thread = _ThreadSettings()

    def __getitem__(self, name):
        changes = self._thread.changes
        if name in changes:
            return changes[name]
        return self._from_environment(name) if name in _VARIABLES else None

    def is_changed(self, name: str) -> bool:
        """Return whether a context has changed a setting of the calling thread."""
        return name in self._thread.changes

    def of_this_thread(self):
        """Return a function that gives the thread which calls it the changes of this one, now and later.

        Only one of both may run at a time.
        """
        changes = self._thread.changes

        def adopt():
            self._thread.changes = changes

        return adopt

    @staticmethod
    def _from_environment(name):
        variable, default, read, allowed = _VARIABLES[name]
        text = os.environ.get(variable) or default
        try:
            return read(text)
        except (ValueError, KeyError):
            raise ValueError(f"{variable} is {text!r}; it must be {allowed}") from None

    def check_environment(self) -> None:
        """Raise a ValueError that names the first environment variable with an invalid value."""
        for name in _VARIABLES:
            self._from_environment(name)

    @contextlib.contextmanager
    def override(self, **changes):
        """Change settings of the calling thread within this context; yields the list `events` if it is among them."""
        current = self._thread.changes
        before = {name: current[name] for name in changes if name in current}
        current.update(changes)
        try:
            yield changes.get("events")
        finally:
            # By name: threads that have adopted these changes may have made others meanwhile (`ranks`).
            for name in changes:
                del current[name]
            current.update(before)


settings = Settings()
override_settings = settings.override
