"""Latencies of NVLink, and a model of the time of low-latency dispatch and combine: a constant and the bytes.

The two latencies were measured on two H200s of one node with CUDA C++ programs that are not part of the repository, so
they are no records. Everything else that the notebook predicts with comes from records. All times are microseconds.
"""

from collections.abc import Mapping
from math import comb
from typing import NamedTuple

import numpy as np

MEASURED = "two H200s, CUDA C++ program of 2026-11-22, no record"
ONE_WAY_US = 0.73  # half of a ping-pong between flags in the peers' memory, over NVLink
FENCED_ONE_WAY_US = 1.33  # the same with fence.sys before each flag


def bytes_each_way(ranks: int, tokens: int, hidden: int = 7168, topk: int = 8, num_experts: int = 256) -> float:
    """Return the bfloat16 bytes that a rank sends to other ranks in a dispatch, or receives in a combine.

    All sets of experts are equally likely; a row is sent once to each rank that has one of the token's experts.
    """
    elsewhere = comb(num_experts - num_experts // ranks, topk) / comb(num_experts, topk)
    return tokens * (ranks - 1) * (1 - elsewhere) * 2 * hidden


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
