"""Starting the document's kernels for one rank; nothing but the constants is checked."""

from typing import NamedTuple

import numpy as np
import torch

from moe_numba.course.articles.deepep.buffer_layout import least_ring
from moe_numba.course.articles.deepep.combine import FAULTS as COMBINE_FAULTS
from moe_numba.course.articles.deepep.combine import make_combine
from moe_numba.course.articles.deepep.dispatch import FAULTS as DISPATCH_FAULTS
from moe_numba.course.articles.deepep.dispatch import make_dispatch
from moe_numba.course.articles.deepep.notify import (
    THREADS,
    make_cached_notify_combine,
    make_cached_notify_dispatch,
    make_notify_dispatch,
    notify_combine_threads,
)
from moe_numba.runtime.launch import launch


class Rank(NamedTuple):
    """A rank, and what of the others it can reach."""

    rank: int
    buffers: torch.Tensor  # [ranks], uint64: the address of each rank's buffer
    signals: torch.Tensor  # [ranks], uint64: and of its signals, int32 [ranks], zero beforehand
    status: torch.Tensor  # [STATUS], int32, zero beforehand: see `document_waits`
    patience: int = 10_000_000_000  # nanoseconds until a thread gives up; 0: never
    start: object = launch  # ranks of one process must not wait in a kernel while another still loads its own


class Handle(NamedTuple):
    """What one dispatch lets the next one, and combine, know."""

    rank_prefix_matrix: torch.Tensor  # [ranks, ranks], int32
    channel_prefix_matrix: torch.Tensor  # [ranks, channels], int32: of what this rank sends
    recv_channel_prefix_matrix: torch.Tensor  # [ranks, channels], int32: of what it received
    recv_src_idx: torch.Tensor  # [rows], int32
    is_token_in_rank: torch.Tensor  # [tokens, ranks], bool
    send_head: torch.Tensor  # [tokens, ranks], int32


def notify_dispatch(r, constants, layout, counter, expert_counter, expert_alignment=1):
    """Give rank_prefix_matrix and channel_prefix_matrix; ``counter`` [1] and ``expert_counter`` get what will come.

    ``layout`` is (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank).
    """
    _check(constants)
    device, n = r.buffers.device, constants.ranks
    channel_prefix = torch.empty(n, constants.channels, dtype=torch.int32, device=device)
    rank_prefix = torch.empty(n, n, dtype=torch.int32, device=device)
    r.start(
        make_notify_dispatch(constants),
        1 + n,
        THREADS,
        *layout,
        len(layout[2]),
        channel_prefix,
        rank_prefix,
        counter,
        expert_counter,
        expert_alignment,
        *_others(r),
        cooperative=True,
    )
    return rank_prefix, channel_prefix


def cached_notify_dispatch(r, constants, rank_prefix):
    """The same for counts that are known."""
    _check(constants)
    r.start(make_cached_notify_dispatch(constants), 1, THREADS, rank_prefix, *_others(r))


def dispatch(r, constants, x, is_token_in_rank, rank_prefix, channel_prefix, rows, topk_idx=None, topk_weights=None):
    """Start the transfer of ``x``, or (values, scales); ``rows`` is how many come.

    Gives recv_x (or a tuple), recv_topk_idx, recv_topk_weights and a Handle.
    """
    _check(constants)
    device, c = r.buffers.device, constants
    values, scales = x if isinstance(x, tuple) else (x, None)
    if values.shape[1] * values.element_size() != c.row_bytes:
        raise ValueError(f"a row of x has {values.shape[1] * values.element_size()} bytes, not {c.row_bytes}")
    given = (scales.shape[1] if scales is not None else 0), (topk_idx.shape[1] if topk_idx is not None else 0)
    if given != (c.scales, c.topk):
        raise ValueError(f"constants have {c.scales} scales and topk {c.topk}, but {given} were given")

    def made(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=device)

    recv_values = made(rows, values.shape[1], dtype=values.dtype)
    recv_scales = made(rows, c.scales, dtype=torch.float32)
    recv_topk_idx, recv_topk_weights = made(rows, c.topk, dtype=torch.int64), made(rows, c.topk, dtype=torch.float32)
    src_idx, recv_channel_prefix = made(rows), made(c.ranks, c.channels)
    send_head = made(len(values), c.ranks)
    if scales is None:
        scales = made(1, 1, dtype=torch.float32)
    if topk_idx is None:
        topk_idx, topk_weights = made(1, dtype=torch.int64), made(1, dtype=torch.float32)
    r.start(
        make_dispatch(c),
        2 * c.channels,
        c.threads,
        _words(values),
        scales,
        *map(np.int64, scales.stride()),
        topk_idx,
        topk_weights,
        is_token_in_rank,
        channel_prefix,
        _words(recv_values),
        recv_scales,
        recv_topk_idx,
        recv_topk_weights,
        src_idx,
        recv_channel_prefix,
        send_head,
        len(values),
        r.buffers,
        *_others(r)[2:],
        cooperative=True,
        launch_bounds=c.threads,
    )
    handle = Handle(rank_prefix, channel_prefix, recv_channel_prefix, src_idx, is_token_in_rank, send_head)
    return (recv_values, recv_scales) if c.scales else recv_values, recv_topk_idx, recv_topk_weights, handle


def cached_notify_combine(r, constants, handle):
    """Clear the queues for a combine, and fill the gaps in ``handle.send_head``."""
    _check(constants, combine=True)
    r.start(
        make_cached_notify_combine(constants),
        1 + constants.channels,
        notify_combine_threads(constants.ranks),
        handle.send_head,
        len(handle.send_head),
        *_others(r),
        cooperative=True,
    )


def combine(r, constants, y, handle, topk_weights=None, biases=()):
    """Start the way back of ``y`` [rows, hidden], bfloat16. Gives the sums by token, and those of the weights."""
    _check(constants, combine=True)
    device, c, tokens = y.device, constants, len(handle.send_head)
    if len(biases) != c.biases or (topk_weights is not None) != bool(c.topk):
        raise ValueError(f"constants have {c.biases} biases and topk {c.topk}, which is not what was given")
    out = torch.empty(tokens, y.shape[1], dtype=torch.bfloat16, device=device)
    out_weights = torch.empty(tokens, c.topk, dtype=torch.float32, device=device)
    nothing = torch.empty(8, dtype=torch.bfloat16, device=device)
    first, second = (*biases, nothing, nothing)[:2]
    r.start(
        make_combine(c),
        2 * c.channels,
        c.threads,
        _words(y),
        out_weights if topk_weights is None else topk_weights,
        handle.recv_src_idx,
        handle.rank_prefix_matrix,
        handle.recv_channel_prefix_matrix,
        handle.send_head,
        _words(out),
        out_weights,
        _words(first),
        _words(second),
        tokens,
        r.buffers,
        *_others(r)[2:],
        cooperative=True,
        launch_bounds=c.threads,
    )
    return out, out_weights if c.topk else None


def _others(r):
    return r.buffers, r.signals, r.rank, np.int64(r.patience), r.status


def _words(tensor):
    return tensor.reshape(-1).view(torch.int32)


def _check(c, combine=False):
    if not 1 <= c.ranks <= 8 or c.row_bytes % 16 or c.topk > 32 or c.experts % c.ranks or not 64 <= c.threads <= 1024:
        raise ValueError(f"these constants cannot be: {c}")
    faults = COMBINE_FAULTS if combine else DISPATCH_FAULTS
    if c.fault not in ("", *faults):
        raise ValueError(f"fault is {c.fault!r}; {faults} are known")
    least = least_ring(c) if combine else c.chunk
    if c.ring < least and c.fault != "short ring":
        raise ValueError(f"the ring has {c.ring} rows; it must have {least}, or it may lock up")
