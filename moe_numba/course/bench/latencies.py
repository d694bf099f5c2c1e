"""Latencies of a GPU: what one operation of a chain takes whose operations wait for one another, as recorded.

Throughputs are in `bench.baselines.limits`. The first edition of the lesson on alignment recorded the chains: a kernel
of one warp, or of one block for barriers, repeats one operation 1024 and 2048 times, so that the difference is the
operation alone.
"""

import functools
from dataclasses import dataclass

from moe_numba.course.bench import records

# Counter of a critical path (`simulator.profiler.phases`) -> name of its recorded chain.
_CHAINS = {
    "global_load_requests": "a load from the L2",
    "global_atomic_requests": "a global atomic",
    "shared_load_requests": "a shared load",
    "shared_atomic_requests": "a shared atomic",
    "shuffles": "a shuffle",
    "barriers": "a barrier",
}
_TOPIC, _LINKS = "align_ladder", (1024, 2048)


@dataclass(frozen=True)
class Latencies:
    """Latencies of a GPU in nanoseconds.

    Attributes
    ----------
    gpu, source : str
        Name of the GPU, and where the figures come from, to be printed beside them.
    ns : dict
        Counter of a critical path, such as "shuffles", -> nanoseconds. A load is one that hits in the L2 cache; a
        barrier is a `syncthreads` of 1024 threads. Counters that were not recorded are missing.
    """

    gpu: str
    source: str
    ns: dict[str, float]

    def __str__(self):
        return f"{', '.join(f'{_CHAINS[n]} {ns:.0f} ns' for n, ns in self.ns.items())} ({self.source})"


@functools.cache
def latencies(gpu: str = "H200") -> Latencies:
    """Return the recorded latencies of a GPU; raise a ValueError for one of which there is no record."""
    record = records.recorded(_TOPIC, gpu.lower())
    chains = (record or {}).get("diagnosis", {}).get("chains")
    if not chains:
        raise ValueError(f"gpu is {gpu!r}, of which docs/results has no chains; there are those of an H200")
    one, two = _LINKS
    ns = {
        counter: 1000 * (chains[f"{name} x {two}"] - chains[f"{name} x {one}"]) / (two - one)
        for counter, name in _CHAINS.items()
        if f"{name} x {two}" in chains
    }
    return Latencies(gpu, f"recorded on an {gpu}, {record['date'][:10]}", ns)
