"""Counters of a source line. `METRICS` defines each, and names the metric of Nsight Compute that counts the same."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_numba.simulator.core import reachable
from moe_numba.simulator.core.engine import Rendezvous


class Metric(NamedTuple):
    """Definition of a counter."""

    description: str
    nsight_compute: str  # the metric that counts the same on a GPU, or ""
    value: Callable  # LineCounters -> number


@dataclass(eq=False)
class Accesses:
    """Accesses of one kind: memory space, operation and bytes per lane.

    The wavefronts of accesses to global memory are the lines of 128 bytes that each request touches.
    """

    requests: int = 0
    lanes: int = 0
    bytes: int = 0
    sectors: int = 0
    first_sectors: int = 0  # of loads from global memory: those that no earlier load of the block has touched
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    contention: int = 0  # most lanes of one request of an atomic operation that update one address
    warp_contention: int = 0  # most requests of one launch that update one address
    sector_contention: int = 0  # most requests of one launch that update one sector of global memory

    def add(self, other):
        """Add the counters of other accesses."""
        for name in ("requests", "lanes", "bytes", "sectors", "first_sectors", "wavefronts", "ideal_wavefronts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("contention", "warp_contention", "sector_contention"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


@dataclass
class Operations:
    """Asynchronous copies or wgmmas of one kind."""

    count: int = 0
    bytes: int = 0

    def add(self, other):
        """Add the counters of other operations."""
        self.count, self.bytes = self.count + other.count, self.bytes + other.bytes


@dataclass(eq=False)
class LineCounters:
    """Counters of one source line; each name in `METRICS` is an attribute as well.

    `accesses` maps (space, operation, bytes per lane) to `Accesses`; a space is "global", "shared" or "distributed
    shared", an operation "load", "store", "atomic", "cp.async", "ldmatrix" or "stmatrix". `operations` maps the name of
    an asynchronous copy or a wgmma, with its shape, to `Operations`. `collectives` maps the name of a warp-wide
    operation to how often a warp executed it, `waits` that of a barrier or a poll to how often a warp waited there, and
    `peers` the rank of another GPU to the bytes that the line accessed in its memory.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    executions: int = 0
    active_lanes: int = 0
    accesses: dict = field(default_factory=dict)
    operations: dict = field(default_factory=dict)
    collectives: dict = field(default_factory=dict)
    waits: dict = field(default_factory=dict)
    peers: dict = field(default_factory=dict)

    def __getattr__(self, name):
        if name in METRICS:
            return METRICS[name].value(self)
        raise AttributeError(f"a line has no counter {name!r}; counters are {', '.join(METRICS)}")

    def add(self, other):
        """Add the counters of another line."""
        self.executions, self.active_lanes = self.executions + other.executions, self.active_lanes + other.active_lanes
        for name, kind in (("accesses", Accesses), ("operations", Operations)):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine.setdefault(key, kind()).add(value)
        for name in ("collectives", "waits", "peers"):
            mine = getattr(self, name)
            for key, count in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + count

    @property
    def vector_widths(self):
        """Bytes per lane of the line's loads and stores, in ascending order."""
        return sorted({size for _, operation, size in self.accesses if operation in ("load", "store")})


_COLLECTIVES = {
    "shfl": "shuffles",
    **dict.fromkeys(("vote", "all", "any", "eq", "ballot", "elect"), "votes"),
    "match": "matches",
    "redux": "reductions",
    "syncwarp": "syncwarps",
}


def collective_counter(name):
    """Return the counter of a warp-wide operation, such as "shuffles" of "shfl_up_sync"; None if it has none."""
    return _COLLECTIVES.get(re.match(r"[a-z]*", name)[0])


def name_of_wait(where):
    """Name what a thread or a gang waits for."""
    if isinstance(where, Rendezvous):
        return where.what
    if barrier := getattr(where, "barrier", None):
        allocation = barrier.region.allocation
        return f"mbarrier {(barrier.region.start - allocation.start) // 8} of {allocation.name}"
    return re.split(r" \(|, which", str(where))[0]  # the rest is the state of one wait


def is_block_wide(name):
    """Return whether the name of a wait is that of a barrier for which all warps of a block wait."""
    return name.startswith(("syncthreads", "grid sync"))


def count_operation(line, rank, name, nbytes, shape=None, count=1, spans=()):
    """Count an asynchronous copy, or `count` wgmmas, of a line that a kernel of a rank executes."""
    name = re.sub(r" of (rank \d+ )?block .*", "", name)  # a multicast names each destination
    if shape is not None:
        name += f" [{' x '.join(map(str, shape))}]"
    kind = line.operations.setdefault(name, Operations())
    kind.count, kind.bytes = kind.count + count, kind.bytes + nbytes
    for address, size in spans:
        count_peers(line, rank, address, size)


def count_peers(line, rank, address, nbytes):
    """Count bytes that a kernel of a rank accesses at an address, if they are another rank's."""
    owner = reachable.rank_at(address)
    if owner is not None and owner != rank:
        line.peers[owner] = line.peers.get(owner, 0) + nbytes


def is_barrier(name):
    """Return whether the name of a wait is that of a barrier of a block, of some of its warps, or of a grid."""
    return is_block_wide(name) or name.startswith("barrier ")


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


def _collectives(counter):
    return lambda line: sum(n for name, n in line.collectives.items() if collective_counter(name) == counter)


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
    "global_load_first_sectors": Metric(
        "sectors of these loads that no earlier load of the block touched: what a large enough L1 cache requests from "
        "the L2",
        "",
        _sum("first_sectors", "global", "load"),
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
    "warp_contention": Metric(
        "largest number of warp-level atomic operations of one launch that update the same address",
        "",
        lambda line: max((accesses.warp_contention for accesses in line.accesses.values()), default=0),
    ),
    "sector_contention": Metric(
        "largest number of warp-level atomic operations of one launch that update the same sector of global memory",
        "",
        lambda line: max((accesses.sector_contention for accesses in line.accesses.values()), default=0),
    ),
    "shuffles": Metric(
        "shuffles of a warp, executed once by all lanes that its mask names", "", _collectives("shuffles")
    ),
    "votes": Metric("votes of a warp: ballot, all, any, eq, elect", "", _collectives("votes")),
    "matches": Metric("match_any and match_all of a warp", "", _collectives("matches")),
    "reductions": Metric("redux.sync of a warp", "", _collectives("reductions")),
    "syncwarps": Metric("syncwarp of a warp", "", _collectives("syncwarps")),
    "barriers": Metric(
        "waits of warps at a barrier of their block (syncthreads), of some of its warps (`barrier 1`) or of their grid",
        "",
        lambda line: sum(count for name, count in line.waits.items() if is_barrier(name)),
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
    "peer_bytes": Metric(
        "bytes that lanes and copies access in the memory of other ranks; `peers` has them by rank",
        "",
        lambda line: sum(line.peers.values()),
    ),
}
