"""What notebook 06 combines: sizes, what all ranks bring, what must come out, and the document's ranks."""

from types import SimpleNamespace

import torch

from moe_numba import simulator
from moe_numba.course.articles.deepep import launch
from moe_numba.course.articles.deepep.buffer_layout import SIGNALS_BYTES
from moe_numba.course.articles.deepep.polling import STATUS
from moe_numba.course.sizes import reachable_gpus
from moe_numba.expert_parallel import reference

CHUNKS = {1: 10, 2: 10, 3: 9, 4: 9, 5: 4, 6: 4, 7: 4, 8: 4}  # DeepEP's for combine, by the number of ranks


def combine_sizes():
    """DeepSeek-V3's on as many GPUs as reach one another (or two ranks on one); small ones in the simulator.

    ``devices`` has a GPU for each rank; ranks that share one are virtual, and nothing is timed between them.
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
            document_sweep=(),
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
        document_sweep=(8, 24, 48),
        loads=(1, 2, 4, 8),
        blocks=132,
        threads=512,
        sum_blocks=(12, 132),
        launches=8,
        samples=12,
    )


def random_routing(num_tokens, num_experts, topk, seed=0, holes=0.0):
    """Each rank's topk_idx: distinct experts for each token, and -1 for a part of them."""
    generator, found = torch.Generator().manual_seed(seed), []
    for tokens in num_tokens:
        chosen = torch.rand(tokens, num_experts, generator=generator).topk(topk, dim=1).indices
        found.append(chosen.where(torch.rand(tokens, topk, generator=generator) >= holes, -1))
    return found


def layouts_of(topk_idx, num_experts):
    """Each rank's (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)."""
    return [reference.dispatch_layout(chosen, len(topk_idx), num_experts) for chosen in topk_idx]


def received_by(is_token_in_rank):
    """What each rank has received, but for the rows themselves: see ``reference.Received``."""
    return reference.dispatch([chosen[:, :1] for chosen in is_token_in_rank], is_token_in_rank)


def document_ranges(num_tokens, channels):
    """The tokens of each channel, as the document deals them out: the last channels may have fewer, or none."""
    share = -(-num_tokens // channels)
    return [range(min(c * share, num_tokens), min((c + 1) * share, num_tokens)) for c in range(channels)]


def handles_of(is_token_in_rank, channels):
    """The handles that the document's dispatch would give, in torch."""
    ranks, received = len(is_token_in_rank), received_by(is_token_in_rank)
    channel_prefix, send_head = [], []
    for chosen in is_token_in_rank:
        head, counts = torch.full(chosen.shape, -1, dtype=torch.int32), []
        for tokens in document_ranges(len(chosen), channels):
            part = chosen[tokens.start : tokens.stop].int()
            head[tokens.start : tokens.stop] = (part.cumsum(dim=0) - 1).where(part > 0, -1)
            counts.append(part.sum(dim=0))
        channel_prefix.append(torch.stack(counts).cumsum(dim=0).T.to(torch.int32).contiguous())
        send_head.append(head)
    handles = []
    for rank, (chosen, there) in enumerate(zip(is_token_in_rank, received, strict=True)):
        before = [torch.cat([channel_prefix[s][rank].new_zeros(1), channel_prefix[s][rank][:-1]]) for s in range(ranks)]
        handles.append(
            launch.Handle(
                there.rank_prefix_matrix,
                channel_prefix[rank],
                torch.stack(before),
                there.src_idx,
                chosen,
                send_head[rank],
            )
        )
    return handles


def sums_of(y, received, num_tokens, biases=None):
    """Each rank's sums, to the last bit: biases, then rows in the order of the ranks, in float32, rounded once."""
    for rank, tokens in enumerate(num_tokens):
        total = torch.zeros(tokens, y[rank].shape[1], device=y[0].device)
        for bias in biases[rank] if biases else ():
            total += bias.to(total.device).float()
        for peer, there in enumerate(received):
            first = int(there.rank_prefix_matrix[rank - 1, peer]) if rank else 0
            rows = slice(first, int(there.rank_prefix_matrix[rank, peer]))
            total[there.src_idx[rows].long().to(total.device)] += y[peer][rows].to(total.device).float()
        yield total.bfloat16()


def document_rank(transport, size_bytes, patience_s=10):
    """A ``launch.Rank`` with a new buffer of so many bytes, and what gives the buffer back."""
    shared = transport.allocate(size_bytes + SIGNALS_BYTES)
    signals = (shared.addresses.view(torch.int64) + size_bytes).view(torch.uint64)
    status = torch.zeros(STATUS, dtype=torch.int32, device=transport.device)
    # The simulator finds out by itself that a wait is in vain.
    patience = 0 if simulator.ENABLED else int(patience_s * 1e9)
    rank = launch.Rank(transport.rank, shared.addresses, signals, status, patience, transport.launch)
    return rank, shared.close
