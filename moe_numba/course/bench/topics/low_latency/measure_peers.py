"""Peers of the topic `low_latency`: other projects' dispatch and combine of the same tokens, in the same run.

A module of ``--peers`` provides ``plan_low_latency(problem)`` (`Problem`), which all ranks call. It returns {(name,
dtype): (pair, checked_pair, is_weighted)}. ``pair()`` dispatches and combines. ``checked_pair()`` also makes the rows
that it receives the experts' results, and returns the sums: weighted, or of one row for each rank with an expert of the
token.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from moe_numba.course.bench.timing.dist import on_all_ranks


class Problem(NamedTuple):
    """What a peer dispatches and combines, on one rank."""

    transport: Any  # see ``expert_parallel.transport``
    x: torch.Tensor  # [tokens, hidden], bfloat16
    topk_idx: torch.Tensor  # [tokens, topk], int64
    topk_weights: torch.Tensor  # [tokens, topk], float32
    num_experts: int


def peer_pairs(bench, problem):
    """Return {(step, dtype): pair} of the peers of a benchmark whose sums are right on all ranks."""
    found, weighted = {}, problem.topk_weights.sum(1, keepdim=True)
    for peer in bench.peers:
        plan = partial(peer.plan_low_latency, problem)
        for (name, dtype), (pair, checked_pair, is_weighted) in (
            on_all_ranks(problem.transport, f"peer {peer.NAME}", plan) or {}
        ).items():
            copies = weighted if is_weighted else bench.ranks_of(problem.topk_idx)
            check = partial(_check, bench, checked_pair, problem.x, copies, 0.1 if dtype == "e4m3" else 0.02)
            what = f"peer {peer.NAME} {name}, {dtype}, {len(problem.x)} tokens"
            if on_all_ranks(problem.transport, what, check):
                found[f"peer:{peer.NAME} {name}", dtype] = pair
                bench.versions[f"peer:{peer.NAME} {name}"] = peer.VERSION
    return found


def _check(bench, pair, *of):
    bench.check_sums(pair(), *of)
    return True
