"""Launches whose data races are to be detected: which ones may run as vectors, and what the next launch learns of them.

A launch that runs as vectors without a conflict has no race: gangs of a `strict` engine order accesses by barriers and
the ends of kernels alone. Anything else runs again with threads, and their detector (`happens_before`) decides.
"""

import numpy as np

from moe_numba.simulator.core import scheduler, uninitialized
from moe_numba.simulator.core.settings import override_settings, settings
from moe_numba.simulator.memory_model.shadow_memory import PAGE_BITS
from moe_numba.simulator.vector.clocks import ATOMIC, WRITE
from moe_numba.simulator.vector.errors import Conflict, Unsupported
from moe_numba.simulator.vector.shadow import ADDRESS, REGION, STEP, WIDTH, lanes_of


def check_judged(streams):
    """Raise if the detector of data races knows more about the order of accesses than the vector engine."""
    if len(streams) > 1:
        raise Unsupported("several ranks, while data races are detected")
    stream = next(iter(streams.values()))
    for grid in stream:
        if grid.uses_async:
            raise Unsupported("an asynchronous instruction, while data races are detected")
        if grid.dependent and len(stream) > 1:
            raise Unsupported("several kernels, one of which may overlap another, while data races are detected")


def check_initialized(entries, all_lanes):
    """Raise if one of these reads or atomic operations is of memory that held poison when the launch began.

    Whether the kernel has written it since then is not known; threads find out.
    """
    for entry in entries:
        region = entry[REGION]
        if region.shared is None and (poisoned := _poisoned_words(region)) is not None:
            first = entry[ADDRESS] - _first_word(region) + lanes_of(entry, all_lanes)[1] * entry[STEP]
            if poisoned[np.maximum(first, 0) >> 2].any():
                raise Unsupported("a read of memory that may be uninitialised")


def check_known(entry, all_lanes):
    """Raise if a read of shared memory finds poison, which nothing has written: threads know whether that matters."""
    region = entry[REGION]
    if region.known:
        return
    word = region.shared.poison[1]
    content = region.shared.bytes
    if past := content.size % 4:
        content = np.concatenate([content, np.frombuffer(word, np.uint8)[past:]])
    poison = content.view(np.uint32) == np.frombuffer(word, np.uint32)
    if not poison.any():
        region.known = True
        return
    first = entry[ADDRESS] - region.start + lanes_of(entry, all_lanes)[1] * entry[STEP]
    for past in range(0, entry[WIDTH], 4):
        if poison.take((first + past >> 2).astype(np.intp), mode="clip").any():
            raise Unsupported("a read of shared memory that nothing has written")


def _first_word(region):
    return region.start + 3 & -4


def _poisoned_words(region):
    """Return which words of a region were poison when the launch began; None if none was."""
    if region.poisoned is None:
        base = _first_word(region)
        content = (region.memory if region.saved is None else region.saved)[base - region.start :]
        found = np.zeros((region.end - base >> 2) + 1, bool)
        for start, end, word in uninitialized.overlapping(base, region.end):
            poison = np.resize(np.frombuffer(word, np.uint8), end - start)
            equal = np.pad(content[start - base : end - base] == poison, (0, start - end & 3), constant_values=True)
            words = equal.reshape(-1, 4).all(axis=1)
            found[start - base >> 2 :][: len(words)] = words
        region.poisoned = found if found.any() else ()
    return region.poisoned if len(region.poisoned) else None


def check_before_wait(last, kinds, all_lanes):
    """Raise if accesses of a dependent launch, before it has waited, may race with those of the kernel before it.

    `last` is what `scheduler.last_kernel` returns.
    """
    for kind, accesses in enumerate(kinds):
        for entry in accesses if last is not None else ():
            if entry[REGION].shared is None:
                index = lanes_of(entry, all_lanes)[1]
                low = entry[ADDRESS] + int(index.min()) * entry[STEP]
                high = entry[ADDRESS] + int(index.max()) * entry[STEP] + entry[WIDTH]
                if _touches(last, low, high, kind in (WRITE, ATOMIC)):
                    raise Conflict("an access before griddepcontrol.wait to memory of the kernel before")


def _touches(last, low, high, writes):
    """Return whether the last kernel wrote these bytes, or also, for accesses that write, whether it read them."""
    if type(last) is Repetition:
        of_last = any(start < high and low < end and (writes or written) for start, end, written in last.accessed)
        return of_last or last.before is not None and _touches(last.before, low, high, writes)
    pages = [last.shadow.pages.get(index) for index in range(low >> PAGE_BITS, (high - 1 >> PAGE_BITS) + 1)]
    return any(np.any(page.writes) or writes and np.any(page.reads) for page in pages if page is not None)


_MOST_KERNELS = 8  # of a chain, each of which overlaps the one before: their memory is kept


class Repetition:
    """Runs a launch again with threads and the detector of data races, for a dependent launch that may overlap it.

    The vector engine records no source lines. So the history of a kernel, which only a dependent launch needs, comes
    from a repetition with the same seed, on the memory that the kernel found.
    """

    def __init__(self, with_threads):
        self.with_threads = with_threads
        self.settings = {name: settings[name] for name in ("seed", "wraparound")}
        self.settings |= {"races": True, "preempt": 0.0, "weak_memory": False, "events": None, "profile": None}
        self.copies, self.accessed = [], []  # (bytes, what they were before the launch); (start, end, whether written)
        self.before, self.depth = None, 0  # what the next kernel may overlap, too, and how many kernels that are

    def keep(self, regions):
        """Keep what the launch found in memory, and which regions it accessed."""
        regions = [region for region in regions if region.saved is not None]
        self.copies = [(region.memory, region.saved) for region in regions]
        self.accessed = [(region.start, region.end, region.written) for region in regions]

    def keep_kernel_before(self, last):
        """Keep what the kernel overlapped, a History or a Repetition, since the next one may do so, too."""
        self.depth = getattr(last, "depth", 0) + 1
        self.before = last if self.depth <= _MOST_KERNELS else None

    def __call__(self):
        """Return the launch's History; memory is afterwards as it was."""
        scheduler.set_history(self.before)  # the kernel did not race with it
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
