"""Counts of single warps between two block-wide barriers, and the critical path that they give.

A *phase* of a block ends where all its warps wait for one another: at `syncthreads` or a barrier of the grid. The warp
that has most to do between two barriers is the one that the others wait for. The sum over all phases of what that warp
does is the critical path of the block.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from moe_numba.simulator.profiler.counters import LineCounters

_WARPS, _COLUMNS = 32, 1 << 16  # most warps of a block; most pairs of a line and a counter
_ACCESSES = {
    (space, operation): f"{space}_{counted}_requests"
    for space in ("global", "shared")
    for counted, operations in {
        "load": ("load", "ldmatrix"),
        "store": ("store", "stmatrix"),
        "atomic": ("atomic",),
    }.items()
    for operation in operations
}
COUNTERS = (
    *("executions", *dict.fromkeys(_ACCESSES.values()), "bank_conflicts"),
    *("shuffles", "votes", "matches", "reductions", "syncwarps", "barriers"),
)


def access_counter(space: str, operation: str) -> str | None:
    """Return the name in `COUNTERS` of an access; None for one that has none, such as cp.async."""
    return _ACCESSES.get((space, operation))


@dataclass(frozen=True)
class CriticalPath:
    """Counts along the critical path of a block; each name in `COUNTERS` is an attribute, summed over the phases.

    Each counter has its own maximum: where one warp has most loads and another one most shuffles, both count.

    Attributes
    ----------
    phases : list of dict
        From one block-wide barrier to the next: counter -> the largest count of a warp. Zeros are left out.
    """

    phases: list[dict[str, int]]

    def __getattr__(self, name):
        if name in COUNTERS:
            return sum(phase.get(name, 0) for phase in self.phases)
        raise AttributeError(f"a critical path has no counter {name!r}; counters are {', '.join(COUNTERS)}")

    def as_dict(self) -> dict[str, int]:
        """Return the counters that are not zero."""
        return {name: count for name in COUNTERS if (count := getattr(self, name))}


class Phases:
    """What each warp did in each phase of its block. Blocks that did the same are kept once."""

    def __init__(self):
        self._columns, self._lines, self._names = {}, [], []  # (line, counter) -> column, and back
        self._blocks = {}  # bytes -> (packed phase, column and warp; counts)

    def column(self, line: LineCounters, counter: str) -> int:
        """Return the number that stands for a counter of a line in `key`."""
        found = self._columns.get((line, counter))
        if found is None:
            found = self._columns[line, counter] = len(self._lines)
            self._lines.append(line)
            self._names.append(COUNTERS.index(counter))
        return found

    @staticmethod
    def key(phase, column, warp):
        """Pack a phase, a column and a warp of a block; integers or arrays."""
        return (phase * _COLUMNS + column) * _WARPS + warp

    def add_block(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Add what the warps of a block did: `key`s in ascending order, and a count for each."""
        self._blocks[keys.tobytes() + counts.tobytes()] = keys, counts

    def merge(self, other: "Phases", line_of: Mapping) -> None:
        """Add the blocks of another one, whose lines are this one's `line_of[line]`."""
        columns = [
            self.column(line_of[line], COUNTERS[name]) for line, name in zip(other._lines, other._names, strict=True)
        ]
        columns = np.array(columns, np.int64)
        for keys, counts in other._blocks.values():
            phase, column, warp = _unpack(keys)
            keys = self.key(phase, columns[column], warp)
            order = np.argsort(keys)
            self.add_block(keys[order], counts[order])

    def critical_path(self, lines: Iterable[LineCounters] | None = None) -> CriticalPath:
        """Return the critical path of the block that executes most lines on it; of some lines only if given."""
        paths = [self._path(keys, counts) for keys, counts in self._selected(lines)]
        return max(paths, key=lambda path: (path.executions, sum(path.as_dict().values())), default=CriticalPath([]))

    def longest(self, weights: Mapping[str, float], lines: Iterable[LineCounters] | None = None) -> float:
        """Return the sum over the phases of the warp whose counts have the largest sum of weights, of the worst block.

        With latencies as weights this is a lower bound of the time between the first instruction and the last, for
        operations that wait for one another.
        """
        factor = np.array([weights.get(COUNTERS[name], 0.0) for name in self._names])
        found = 0.0
        for keys, counts in self._selected(lines):
            phase, column, warp = _unpack(keys)
            sums = np.bincount((phase * _WARPS + warp).astype(np.intp), counts * factor[column])
            sums = np.append(sums, np.zeros(-len(sums) % _WARPS))
            found = max(found, float(sums.reshape(-1, _WARPS).max(1).sum()))
        return found

    def per_warp(self, weights: Mapping[LineCounters, np.ndarray]) -> Iterator[np.ndarray]:
        """Yield weights [phase, warp, weight] of each distinct block: those of a line times its executions, summed.

        Parameters
        ----------
        weights : dict
            Line -> an array of as many weights for each line; those of a missing line are zeros.
        """
        size = len(next(iter(weights.values()), ()))
        factor = np.zeros((len(self._lines), size))
        for column, (line, name) in enumerate(zip(self._lines, self._names, strict=True)):
            if COUNTERS[name] == "executions" and line in weights:
                factor[column] = weights[line]
        for keys, counts in self._blocks.values():
            phase, column, warp = _unpack(keys)
            sums = np.zeros(((int(phase.max()) + 1 if len(phase) else 0) * _WARPS, size))
            np.add.at(sums, (phase * _WARPS + warp).astype(np.intp), counts[:, None] * factor[column])
            yield sums.reshape(-1, _WARPS, size)

    def _selected(self, lines):
        """Yield the keys and counts of each block, of these lines only."""
        if lines is None:
            yield from self._blocks.values()
            return
        lines = set(lines)
        wanted = np.array([line in lines for line in self._lines], bool)
        for keys, counts in self._blocks.values():
            own = wanted[_unpack(keys)[1]]
            yield keys[own], counts[own]

    def _path(self, keys, counts):
        if not len(keys):
            return CriticalPath([])
        phase, column, warp = _unpack(keys)
        name = np.array(self._names)[column]
        sums = np.bincount(((phase * len(COUNTERS) + name) * _WARPS + warp).astype(np.intp), counts).astype(np.int64)
        sums = np.append(sums, np.zeros(-len(sums) % (_WARPS * len(COUNTERS)), np.int64))
        most = sums.reshape(-1, len(COUNTERS), _WARPS).max(2).tolist()
        return CriticalPath([{n: count for n, count in zip(COUNTERS, row, strict=True) if count} for row in most])


def _unpack(keys):
    return keys // (_WARPS * _COLUMNS), keys // _WARPS % _COLUMNS, keys % _WARPS
