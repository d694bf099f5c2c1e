"""Playing the document's kernels in the simulator, with all ranks in this one process.

    with virtual_ranks(2, least_bytes(constants)) as ranks, simulator.seed(3), simulator.weak_memory():
        received = dispatch_all(ranks, constants, x, is_token_in_rank, topk_idx, topk_weights)

Arguments and results are lists with an entry for each rank.
"""

import contextlib

import torch

from moe_numba import simulator
from moe_numba.course.articles.deepep import launch as run
from moe_numba.course.articles.deepep.buffer_layout import SIGNALS_BYTES
from moe_numba.course.articles.deepep.polling import STATUS, explain
from moe_numba.expert_parallel import reference


class GaveUp(RuntimeError):
    """A rank waited too long for another one."""


@contextlib.contextmanager
def virtual_ranks(ranks, size_bytes, patience=0):
    """Make a buffer for each rank, filled with what is no row; ``patience`` as in ``document_run.Rank``."""
    whole = [torch.full((size_bytes + SIGNALS_BYTES,), 0x7F, dtype=torch.uint8) for _ in range(ranks)]
    for buffer in whole:
        buffer[size_bytes:] = 0
    addresses = [simulator.register(buffer, f"the buffer of rank {r}") for r, buffer in enumerate(whole)]
    try:
        buffers, signals = (
            torch.tensor([a + offset for a in addresses], dtype=torch.uint64) for offset in (0, size_bytes)
        )
        yield [run.Rank(r, buffers, signals, torch.zeros(STATUS, dtype=torch.int32), patience) for r in range(ranks)]
    finally:
        for address in addresses:
            simulator.forget(address)


def on_all(ranks, start):
    """Start something on every rank, ``start(r)``, and run it all at once; gives what it returned."""
    results = []
    with simulator.together():
        for r in ranks:
            with simulator.on_rank(r.rank):
                results.append(start(r))
    if reasons := [said for r in ranks if (said := explain(r.status))]:
        raise GaveUp("; ".join(reasons))
    return results


def notify_all(ranks, constants, is_token_in_rank, topk_idx=None, expert_alignment=1):
    """Give for each rank its two prefix matrices, how many rows it gets, and how many each of its experts gets."""
    n, experts = constants.ranks, constants.experts

    def start(r):
        chosen = is_token_in_rank[r.rank]
        per_expert = torch.zeros(experts, dtype=torch.int32)
        if topk_idx is not None:
            per_expert = reference.dispatch_layout(topk_idx[r.rank], n, experts)[1]
        layout = chosen.sum(dim=0, dtype=torch.int32), per_expert, chosen
        counter, expert_counter = torch.full((1,), -1), torch.full((experts // n,), -1)
        counter, expert_counter = counter.to(torch.int32), expert_counter.to(torch.int32)
        matrices = run.notify_dispatch(r, constants, layout, counter, expert_counter, expert_alignment)
        return *matrices, counter, expert_counter

    return on_all(ranks, start)


def dispatch_all(ranks, constants, x, is_token_in_rank, topk_idx=None, topk_weights=None, handles=None):
    """A dispatch, cached if there are handles; gives for each rank recv_x, recv_topk_idx, recv_topk_weights, handle."""
    if handles is None:
        known = [(a, b, int(count)) for a, b, count, _ in notify_all(ranks, constants, is_token_in_rank, topk_idx)]
    else:
        known = [(h.rank_prefix_matrix, h.channel_prefix_matrix, len(h.recv_src_idx)) for h in handles]

    def start(r):
        i = r.rank
        if handles is not None:
            run.cached_notify_dispatch(r, constants, handles[i].rank_prefix_matrix)
        own = () if topk_idx is None else (topk_idx[i], topk_weights[i])
        return run.dispatch(r, constants, x[i], is_token_in_rank[i], *known[i], *own)

    return on_all(ranks, start)


def combine_all(ranks, constants, y, handles, topk_weights=None, biases=None):
    """A combine; gives for each rank the sums by token, and those of the weights."""

    def start(r):
        i = r.rank
        run.cached_notify_combine(r, constants, handles[i])
        return run.combine(
            r, constants, y[i], handles[i], topk_weights[i] if topk_weights else None, biases[i] if biases else ()
        )

    return on_all(ranks, start)
