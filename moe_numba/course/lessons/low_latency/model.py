"""Latencies of NVLink and of launches, and a model of the time of a pair: a constant and bytes. All in us."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moe_numba.course.bench import link, records
from moe_numba.course.bench.latencies import latencies
from moe_numba.course.lessons.moe_layer.model import ranks_per_token

# Of two H200s, by CUDA C++ programs that are not in the repository: used where lesson 11 has no record.
_BEFORE_RECORDS = {"relaxed": 0.73, "release": 1.33}
_NO_RECORD = "two H200s, CUDA C++ program of 2026-11-22, no record"


class Latency(NamedTuple):
    """A time in microseconds, and where it comes from."""

    us: float
    source: str


def one_way(order: str) -> Latency:
    """Return half of a ping-pong between two ranks, whose flags are stored "relaxed" or with "release"."""
    record = records.recorded("peer_ladder")
    row = record and records.find(record, step=f"ping-pong: {order}", config={"ranks": 2})
    if not row:
        return Latency(_BEFORE_RECORDS[order], _NO_RECORD)
    us = row["kernel_us"]["median"] / (2 * row["size"]["rounds"])  # a round is there and back
    return Latency(us, f"lesson 11, {record['date'][:10]}")


def launch() -> Latency:
    """Return what a kernel that does nothing takes in a stream of kernels, recorded by this lesson if it was timed."""
    record = records.recorded("low_latency_ladder")
    row = record and records.find(record, step="launch: an empty kernel")
    if row:
        return Latency(row["kernel_us"]["median"], f"this lesson, {record['date'][:10]}")
    earlier = records.read("align_one_launch_ladder")
    return Latency(earlier["diagnosis"]["basics"]["empty"], f"an empty kernel in a CUDA graph, {earlier['date'][:10]}")


def load() -> Latency:
    """Return the latency of a load that hits in L2."""
    of = latencies()
    return Latency(of.ns["global_load_requests"] / 1000, of.source)


def bytes_each_way(ranks: int, tokens: int, hidden: int = 7168, topk: int = 8, num_experts: int = 256) -> float:
    """Return the bfloat16 bytes that a rank sends to other ranks in a dispatch, or receives in a combine.

    All sets of experts are equally likely; a row is sent once to each rank that has one of the token's experts.
    """
    return tokens * ranks_per_token(num_experts, topk, ranks) * (ranks - 1) / ranks * 2 * hidden


def push_gbps() -> float:
    """Return the rate at which one rank pushes to another one: the best recorded method."""
    if rate := link.link_gbps():
        return rate
    raise LookupError(f"neither {link.RECORD} nor {link.EARLIER} has recorded how fast rows are pushed")


def lower_bound_us(ranks: int, tokens: int) -> float:
    """Return the lower bound of a pair: two launches, loads and ways over NVLink, and the bytes at the push rate."""
    chain = 2 * (launch().us + load().us + one_way("relaxed").us)
    return chain + 2 * bytes_each_way(ranks, tokens) / (push_gbps() * 1e3)


class PairModel(NamedTuple):
    """Time of a pair: a constant for all latencies, and the bytes of both directions at a bandwidth."""

    latency_us: float
    gbps: float

    def pair_us(self, ranks: int, tokens: int) -> float:
        """Return the time of a dispatch and a combine in bfloat16."""
        return self.latency_us + 2 * bytes_each_way(ranks, tokens) / (self.gbps * 1e3)

    def deviation(self, ranks: int, times: Mapping[int, float]) -> float:
        """Return the largest relative deviation from recorded times, {tokens: us}."""
        return max(abs(self.pair_us(ranks, tokens) / us - 1) for tokens, us in times.items())


def fit(ranks: int, times: Mapping[int, float]) -> PairModel:
    """Fit the model to recorded times, {tokens: us}, of at least two numbers of tokens.

    Minimises the squares of relative deviations, so that large numbers of tokens do not outweigh small ones.
    """
    if len(times) < 2:
        raise ValueError(f"times has {len(times)} numbers of tokens; a fit needs at least 2")
    us = np.array(list(times.values()), dtype=float)
    sent = np.array([2 * bytes_each_way(ranks, tokens) / 1e3 for tokens in times])
    (latency_us, us_per_kb), *_ = np.linalg.lstsq(np.stack([1 / us, sent / us], axis=1), np.ones(len(us)), rcond=None)
    return PairModel(float(latency_us), float(1 / us_per_kb))
