"""Counters of a source line. `METRICS` defines each, and names the metric of Nsight Compute that counts the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Metric(NamedTuple):
    """Definition of a counter."""

    description: str
    nsight_compute: str  # the metric that counts the same on a GPU, or ""
    value: Callable  # LineCounters -> number


@dataclass
class Accesses:
    """Accesses of one kind: memory space, operation and bytes per lane."""

    requests: int = 0
    lanes: int = 0
    bytes: int = 0
    sectors: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    contention: int = 0

    def add(self, other):
        """Add the counters of other accesses."""
        for name in ("requests", "lanes", "bytes", "sectors", "wavefronts", "ideal_wavefronts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.contention = max(self.contention, other.contention)


@dataclass
class Operations:
    """Asynchronous copies or wgmmas of one kind."""

    count: int = 0
    bytes: int = 0

    def add(self, other):
        """Add the counters of other operations."""
        self.count, self.bytes = self.count + other.count, self.bytes + other.bytes


@dataclass
class Waits:
    """Waits of warps at one barrier: how often, scheduler steps in all, and the longest."""

    count: int = 0
    steps: int = 0
    longest: int = 0

    def add(self, other):
        """Add the counters of other waits."""
        self.count, self.steps = self.count + other.count, self.steps + other.steps
        self.longest = max(self.longest, other.longest)


@dataclass(eq=False)
class LineCounters:
    """Counters of one source line; each name in `METRICS` is an attribute as well.

    `accesses` maps (space, operation, bytes per lane) to `Accesses`; a space is "global", "shared" or "distributed
    shared", an operation "load", "store", "atomic", "cp.async", "ldmatrix" or "stmatrix". `operations` maps the name of
    an asynchronous copy or a wgmma, with its shape, to `Operations`, and `waits` the name of a barrier to `Waits`.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    executions: int = 0
    active_lanes: int = 0
    accesses: dict = field(default_factory=dict)
    operations: dict = field(default_factory=dict)
    waits: dict = field(default_factory=dict)

    def __getattr__(self, name):
        if name in METRICS:
            return METRICS[name].value(self)
        raise AttributeError(f"a line has no counter {name!r}; counters are {', '.join(METRICS)}")

    def add(self, other):
        """Add the counters of another line."""
        self.executions, self.active_lanes = self.executions + other.executions, self.active_lanes + other.active_lanes
        for name, kind in (("accesses", Accesses), ("operations", Operations), ("waits", Waits)):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine.setdefault(key, kind()).add(value)

    @property
    def vector_widths(self):
        """Bytes per lane of the line's loads and stores, in ascending order."""
        return sorted({size for _, operation, size in self.accesses if operation in ("load", "store")})


def ratio(numerator, denominator):
    """Divide; return None instead of dividing by zero."""
    return numerator / denominator if denominator else None


def _sum(attribute, space, *operations):
    """Return a function that sums an attribute of a line's accesses to a space, or of some operations only."""

    def value(line):
        return sum(
            getattr(accesses, attribute)
            for (where, operation, _), accesses in line.accesses.items()
            if where == space and (not operations or operation in operations)
        )

    return value


def _wavefronts(line, attribute):
    return _sum(attribute, "shared", *_LOADS, *_STORES)(line)


_LOADS, _STORES = ("load", "ldmatrix"), ("store", "stmatrix")
_WAVEFRONTS, _CONFLICTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"

METRICS = {
    "executions": Metric(
        "executions of the line by warps: lanes that execute it together count once. A line compiles to several "
        "SASS instructions, so this is not an instruction count; multiplied by their number (`static.sass_lines`) it "
        "estimates the metric",
        "smsp__inst_executed.sum",
        lambda line: line.executions,
    ),
    "divergence": Metric(
        "average share of active lanes, from 1/32 to 1",
        "smsp__thread_inst_executed_per_inst_executed.ratio / 32",
        lambda line: ratio(line.active_lanes, 32 * line.executions),
    ),
    "global_load_requests": Metric(
        "loads from global memory, one for each warp-level access of any vector width",
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
        _sum("requests", "global", "load"),
    ),
    "global_load_sectors": Metric(
        "sectors of 32 bytes that these loads touch, counted once per request",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        _sum("sectors", "global", "load"),
    ),
    "global_store_requests": Metric(
        "stores to global memory",
        "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
        _sum("requests", "global", "store"),
    ),
    "global_store_sectors": Metric(
        "sectors that these stores touch",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
        _sum("sectors", "global", "store"),
    ),
    "global_atomic_requests": Metric(
        "atomic operations on global memory",
        "l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum + ..._op_red.sum",
        _sum("requests", "global", "atomic"),
    ),
    "sectors_per_request": Metric(
        "sectors of a load from or a store to global memory: 4 if 32 lanes access neighbouring 4-byte elements",
        "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio, ..._op_st.ratio",
        lambda line: ratio(
            _sum("sectors", "global", "load", "store")(line), _sum("requests", "global", "load", "store")(line)
        ),
    ),
    "requested_bytes": Metric(
        "bytes that lanes load from, store to, copy from (cp.async) and update in global memory, each lane's counted",
        "",
        _sum("bytes", "global"),
    ),
    "transferred_bytes": Metric(
        "32 bytes for each sector of these accesses",
        "32 * l1tex__t_sectors_pipe_lsu_mem_global_op_*.sum",
        lambda line: 32 * _sum("sectors", "global")(line),
    ),
    "shared_load_requests": Metric(
        "loads from the block's shared memory; an ldmatrix is one",
        "smsp__inst_executed_op_shared_ld.sum (and smsp__inst_executed_op_ldsm.sum)",
        _sum("requests", "shared", *_LOADS),
    ),
    "shared_load_wavefronts": Metric(
        "wavefronts of these loads", f"{_WAVEFRONTS}_op_ld.sum", _sum("wavefronts", "shared", *_LOADS)
    ),
    "shared_store_requests": Metric(
        "stores to the block's shared memory; a stmatrix is one",
        "smsp__inst_executed_op_shared_st.sum",
        _sum("requests", "shared", *_STORES),
    ),
    "shared_store_wavefronts": Metric(
        "wavefronts of these stores", f"{_WAVEFRONTS}_op_st.sum", _sum("wavefronts", "shared", *_STORES)
    ),
    "bank_conflicts": Metric(
        "wavefronts of shared-memory loads and stores beyond the ideal number",
        f"{_CONFLICTS}_op_ld.sum + ..._op_st.sum",
        lambda line: _wavefronts(line, "wavefronts") - _wavefronts(line, "ideal_wavefronts"),
    ),
    "shared_atomic_requests": Metric(
        "atomic operations on shared memory",
        "smsp__inst_executed_op_shared_atom.sum",
        _sum("requests", "shared", "atomic"),
    ),
    "contention": Metric(
        "largest number of lanes of one warp-level atomic operation that update the same address",
        "",
        lambda line: max((accesses.contention for accesses in line.accesses.values()), default=0),
    ),
    "shared_bytes": Metric("bytes that lanes load from and store to shared memory", "", _sum("bytes", "shared")),
    "distributed_shared_bytes": Metric(
        "bytes that lanes load from and store to the shared memory of other blocks",
        "",
        _sum("bytes", "distributed shared"),
    ),
    "async_bytes": Metric(
        "bytes that cp.async, cp.async.bulk and TMA write",
        "",
        lambda line: sum(o.bytes for name, o in line.operations.items() if not name.startswith("wgmma")),
    ),
    "wait_steps": Metric(
        "scheduler steps from the arrival of a warp's last lane at a barrier, wait or poll until the warp may go on",
        "",
        lambda line: sum(waits.steps for waits in line.waits.values()),
    ),
}
