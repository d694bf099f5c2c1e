"""Inputs of notebook 13: sizes, routing, handles, expected sums, and ranks of our port of DeepEP's kernels."""

from types import SimpleNamespace

import torch

from moe_numba import simulator
from moe_numba.course.deepep_port import launch
from moe_numba.course.deepep_port.buffer_layout import SIGNALS_BYTES
from moe_numba.course.deepep_port.polling import STATUS_WORDS
from moe_numba.course.pages.sizes import reachable_gpus
from moe_numba.expert_parallel import reference

CHUNKS = {1: 10, 2: 10, 3: 9, 4: 9, 5: 4, 6: 4, 7: 4, 8: 4}  # DeepEP's for combine, by the number of ranks


def combine_sizes():
    """Return DeepSeek-V3's sizes on peer-accessible GPUs (or two ranks on one GPU); small ones in the simulator.

    ``devices`` has a GPU for each rank. If ranks share a GPU, nothing is timed.
    """
    if simulator.ENABLED:
        return SimpleNamespace(
            ranks=2,
            devices=None,
            tokens=11,
            hidden=64,
            topk=3,
            experts=12,
            num_sms=2,
            ring=32,
            chunk=2,
            warps=2,
            sweep=(),
            deepep_sweep=(),
            loads=(2,),
            blocks=2,
            threads=64,
            sum_blocks=(2,),
            launches=1,
            samples=1,
        )
    ranks = max(n for n in (2, 4, 8) if n <= max(2, reachable_gpus()))
    return SimpleNamespace(
        ranks=ranks,
        devices=list(range(ranks)) if ranks <= reachable_gpus() else [0] * ranks,
        tokens=4096,
        hidden=7168,
        topk=8,
        experts=256,
        num_sms=24,
        ring=256,
        chunk=CHUNKS[ranks],
        warps=24 // ranks,
        sweep=(4, 8, 12, 16, 20, 24, 32, 48),
        deepep_sweep=(8, 24, 48),
        loads=(1, 2, 4, 8),
        blocks=132,
        threads=512,
        sum_blocks=(12, 132),
        launches=8,
        samples=12,
    )


def random_routing(num_tokens, num_experts, topk, seed=0, holes=0.0):
    """Return each rank's topk_idx: distinct experts per token, a fraction ``holes`` of which is -1."""
    generator, found = torch.Generator().manual_seed(seed), []
    for tokens in num_tokens:
        chosen = torch.rand(tokens, num_experts, generator=generator).topk(topk, dim=1).indices
        found.append(chosen.where(torch.rand(tokens, topk, generator=generator) >= holes, -1))
    return found


def layouts_of(topk_idx, num_experts):
    """Return each rank's (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)."""
    return [reference.dispatch_layout(chosen, len(topk_idx), num_experts) for chosen in topk_idx]


def received_by(is_token_in_rank):
    """Return each rank's ``reference.Received``, without the rows."""
    return reference.dispatch([chosen[:, :1] for chosen in is_token_in_rank], is_token_in_rank)


def channel_ranges(num_tokens, channels):
    """Return the tokens of each channel, split as in DeepEP: the last channels may have fewer tokens, or none."""
    share = -(-num_tokens // channels)
    return [range(min(c * share, num_tokens), min((c + 1) * share, num_tokens)) for c in range(channels)]


def handles_of(is_token_in_rank, channels):
    """Compute in torch the handles that DeepEP's dispatch would return."""
    ranks, received = len(is_token_in_rank), received_by(is_token_in_rank)
    channel_prefix, send_head = [], []
    for chosen in is_token_in_rank:
        head, counts = torch.full(chosen.shape, -1, dtype=torch.int32), []
        for tokens in channel_ranges(len(chosen), channels):
            part = chosen[tokens.start : tokens.stop].int()
            head[tokens.start : tokens.stop] = (part.cumsum(dim=0) - 1).where(part > 0, -1)
            counts.append(part.sum(dim=0))
        channel_prefix.append(torch.stack(counts).cumsum(dim=0).T.to(torch.int32).contiguous())
        send_head.append(head)
    handles = []
    for rank, (chosen, result) in enumerate(zip(is_token_in_rank, received, strict=True)):
        before = [torch.cat([channel_prefix[s][rank].new_zeros(1), channel_prefix[s][rank][:-1]]) for s in range(ranks)]
        handles.append(
            launch.Handle(
                result.rank_prefix_matrix,
                channel_prefix[rank],
                torch.stack(before),
                result.src_idx,
                chosen,
                send_head[rank],
            )
        )
    return handles


def sums_of(y, received, num_tokens, biases=None):
    """Yield each rank's sums, bit for bit: biases, then rows in rank order, in float32, rounded once."""
    for rank, tokens in enumerate(num_tokens):
        total = torch.zeros(tokens, y[rank].shape[1], device=y[0].device)
        for bias in biases[rank] if biases else ():
            total += bias.to(total.device).float()
        for peer, at_peer in enumerate(received):
            first = int(at_peer.rank_prefix_matrix[rank - 1, peer]) if rank else 0
            rows = slice(first, int(at_peer.rank_prefix_matrix[rank, peer]))
            total[at_peer.src_idx[rows].long().to(total.device)] += y[peer][rows].to(total.device).float()
        yield total.bfloat16()


def deepep_rank(transport, size_bytes, timeout_s=10):
    """Return a ``launch.Rank`` with a new buffer of ``size_bytes``, and a function that frees the buffer."""
    shared = transport.allocate(size_bytes + SIGNALS_BYTES)
    signals = (shared.addresses.view(torch.int64) + size_bytes).view(torch.uint64)
    status = torch.zeros(STATUS_WORDS, dtype=torch.int32, device=transport.device)
    # The simulator detects deadlocks itself.
    timeout_ns = 0 if simulator.ENABLED else int(timeout_s * 1e9)
    rank = launch.Rank(transport.rank, shared.addresses, signals, status, timeout_ns, transport.launch)
    return rank, shared.close
