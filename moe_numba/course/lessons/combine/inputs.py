"""Inputs of combine, computed in torch: routing, where each row goes and comes from, and the right sums."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from moe_numba.course.deepep_port.launch import Handle
from moe_numba.expert_parallel import reference


def random_routing(tokens: int, experts: int, topk: int, ranks: int, kind: str = "uniform", seed: int = 0) -> list:
    """Return for each rank which ranks have a row of each of its tokens: bool [tokens, ranks].

    ``kind`` is "uniform" (all experts are equally likely), "Zipf" (expert e has a share proportional to 1 / (e + 1)),
    or "one rank" (all tokens go to experts of the last rank).
    """
    generator, per_rank, found = torch.Generator().manual_seed(seed), experts // ranks, []
    weights = 1.0 / torch.arange(1, experts + 1) if kind == "Zipf" else torch.ones(experts)
    if kind == "one rank":
        weights = torch.zeros(experts).index_fill(0, torch.arange(experts - max(per_rank, topk), experts), 1)
    for _ in range(ranks):
        chosen = torch.multinomial(weights.expand(tokens, -1), topk, generator=generator) // per_rank
        found.append(torch.zeros(tokens, ranks, dtype=torch.bool).scatter_(1, chosen.clamp(max=ranks - 1), True))
    return found


class Rows(NamedTuple):
    """The rows of one rank, ordered by home rank, then by token."""

    home: torch.Tensor  # int32 [rows], the rank whose token it is
    token: torch.Tensor  # int32 [rows], the token on that rank


def rows_of(is_in: Sequence[torch.Tensor], rank: int) -> Rows:
    """Return the rows that a rank has computed, and now returns."""
    tokens = [chosen[:, rank].nonzero().flatten().int() for chosen in is_in]
    home = torch.cat([torch.full_like(each, source) for source, each in enumerate(tokens)])
    return Rows(home, torch.cat(tokens))


class Channels(NamedTuple):
    """How a rank's kernel finds rows, if each rank's tokens are split into channels.

    Attributes
    ----------
    share : int
        Tokens of a channel; the last ones may have fewer, or none.
    row_start : tensor
        int32 [ranks * channels + 1]. This rank's rows for channel c of rank s are rows
        ``row_start[s * channels + c]`` to ``row_start[s * channels + c + 1] - 1``.
    position : tensor
        int32 [tokens, ranks]: which row of its channel a token's row from a rank is, or -1 if there is none.
    """

    share: int
    row_start: torch.Tensor
    position: torch.Tensor


def channels_of(is_in: Sequence[torch.Tensor], rank: int, channels: int) -> Channels:
    """Return the channels of one rank's kernel."""
    share = max(1, -(-max(map(len, is_in)) // channels))
    rows = rows_of(is_in, rank)
    counts = torch.bincount(rows.home.long() * channels + rows.token.long() // share, minlength=len(is_in) * channels)
    row_start = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    chosen = is_in[rank]
    position = torch.full(chosen.shape, -1)
    for first in range(0, len(chosen), share):
        part = chosen[first : first + share].long()
        position[first : first + share] = (part.cumsum(0) - 1).where(part > 0, -1)
    return Channels(share, row_start.int(), position.int().contiguous())


def handles_of(is_in: Sequence[torch.Tensor], channels: int) -> list[Handle]:
    """Return what our port of DeepEP's combine needs of a dispatch, for each rank."""
    ranks = len(is_in)
    split = [-(-len(chosen) // channels) for chosen in is_in]
    counts = [
        torch.stack([chosen[c * share : (c + 1) * share].sum(0) for c in range(channels)])
        for chosen, share in zip(is_in, split, strict=True)
    ]  # of each rank, [channels, ranks]
    prefix = [each.cumsum(0).T.int().contiguous() for each in counts]
    rank_prefix = torch.stack([chosen.sum(0) for chosen in is_in]).cumsum(0).int()
    handles = []
    for rank, chosen in enumerate(is_in):
        before = torch.stack([(prefix[s][rank] - counts[s][:, rank]).int() for s in range(ranks)])
        head = torch.full(chosen.shape, -1, dtype=torch.int32)
        for first in range(0, len(chosen), split[rank]):
            part = chosen[first : first + split[rank]].int()
            head[first : first + split[rank]] = (part.cumsum(0) - 1).where(part > 0, -1).int()
        handles.append(Handle(rank_prefix, prefix[rank], before, rows_of(is_in, rank).token, chosen, head))
    return handles


def sums_of(y: Sequence[torch.Tensor], is_in: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each rank's sums, bit for bit: rows in rank order, in float32 from 0 on, rounded once."""
    for rank, chosen in enumerate(is_in):
        total = torch.zeros(len(chosen), y[rank].shape[1], device=y[rank].device)
        for peer in range(len(is_in)):
            rows = rows_of(is_in, peer)
            own = (rows.home == rank).to(y[peer].device)
            total[rows.token.long().to(total.device)[own.to(total.device)]] += y[peer][own].to(total.device).float()
        yield total.bfloat16()


def reference_sums(y: Sequence[torch.Tensor], is_in: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each rank's sums in float64, by the package's reference."""
    received = reference.dispatch([chosen[:, :1] for chosen in is_in], is_in)
    return [total for total, _ in reference.combine(y, received, [len(chosen) for chosen in is_in])]
