"""Runs our port of DeepEP's kernels in the simulator, with all ranks in one process.

    with virtual_ranks(2, min_buffer_bytes(config)) as ranks, simulator.seed(3), simulator.weak_memory():
        received = dispatch_all(ranks, config, x, is_token_in_rank, topk_idx, topk_weights)

Arguments and results are lists with one entry per rank.
"""

import contextlib

import torch

from moe_numba import simulator
from moe_numba.course.deepep_port import launch
from moe_numba.course.deepep_port.buffer_layout import SIGNALS_BYTES
from moe_numba.course.deepep_port.polling import STATUS_WORDS, explain
from moe_numba.expert_parallel import reference


class RankTimeoutError(RuntimeError):
    """A wait for another rank has timed out."""


@contextlib.contextmanager
def virtual_ranks(ranks, size_bytes, timeout_ns=0):
    """Make a poisoned buffer for each rank, and yield the list of ``launch.Rank``."""
    whole = [torch.full((size_bytes + SIGNALS_BYTES,), 0x7F, dtype=torch.uint8) for _ in range(ranks)]
    for buffer in whole:
        buffer[size_bytes:] = 0
    addresses = [simulator.register(buffer, f"the buffer of rank {r}") for r, buffer in enumerate(whole)]
    try:
        buffers, signals = (
            torch.tensor([a + offset for a in addresses], dtype=torch.uint64) for offset in (0, size_bytes)
        )
        yield [
            launch.Rank(r, buffers, signals, torch.zeros(STATUS_WORDS, dtype=torch.int32), timeout_ns)
            for r in range(ranks)
        ]
    finally:
        for address in addresses:
            simulator.forget(address)


def on_all(ranks, start):
    """Call ``start(r)``, which launches kernels, for each rank; run them together, and return the results."""
    results = []
    with simulator.together():
        for r in ranks:
            with simulator.on_rank(r.rank):
                results.append(start(r))
    if messages := [message for r in ranks if (message := explain(r.status))]:
        raise RankTimeoutError("; ".join(messages))
    return results


def notify_all(ranks, config, is_token_in_rank, topk_idx=None, expert_alignment=1):
    """Return for each rank its two prefix matrices, its number of rows, and the tokens of each of its experts."""
    n, experts = config.ranks, config.experts

    def start(r):
        chosen = is_token_in_rank[r.rank]
        per_expert = torch.zeros(experts, dtype=torch.int32)
        if topk_idx is not None:
            per_expert = reference.dispatch_layout(topk_idx[r.rank], n, experts)[1]
        layout = chosen.sum(dim=0, dtype=torch.int32), per_expert, chosen
        counter, expert_counter = torch.full((1,), -1), torch.full((experts // n,), -1)
        counter, expert_counter = counter.to(torch.int32), expert_counter.to(torch.int32)
        matrices = launch.notify_dispatch(r, config, layout, counter, expert_counter, expert_alignment)
        return *matrices, counter, expert_counter

    return on_all(ranks, start)


def dispatch_all(ranks, config, x, is_token_in_rank, topk_idx=None, topk_weights=None, handles=None):
    """Dispatch, cached if there are handles; return recv_x, recv_topk_idx, recv_topk_weights, handle for each rank."""
    if handles is None:
        known = [(a, b, int(count)) for a, b, count, _ in notify_all(ranks, config, is_token_in_rank, topk_idx)]
    else:
        known = [(h.rank_prefix_matrix, h.channel_prefix_matrix, len(h.recv_src_idx)) for h in handles]

    def start(r):
        i = r.rank
        if handles is not None:
            launch.cached_notify_dispatch(r, config, handles[i].rank_prefix_matrix)
        own = () if topk_idx is None else (topk_idx[i], topk_weights[i])
        return launch.dispatch(r, config, x[i], is_token_in_rank[i], *known[i], *own)

    return on_all(ranks, start)


def combine_all(ranks, config, y, handles, topk_weights=None, biases=None):
    """Combine; return for each rank the sums per token, and those of the weights."""

    def start(r):
        i = r.rank
        launch.cached_notify_combine(r, config, handles[i])
        return launch.combine(
            r, config, y[i], handles[i], topk_weights[i] if topk_weights else None, biases[i] if biases else ()
        )

    return on_all(ranks, start)
