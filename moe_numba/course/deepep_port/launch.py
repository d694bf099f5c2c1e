"""Launches our port of DeepEP's kernels on one rank. Only the configuration is checked."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from moe_numba.course.deepep_port.buffer_layout import min_ring_slots
from moe_numba.course.deepep_port.combine import FAULTS as COMBINE_FAULTS
from moe_numba.course.deepep_port.combine import make_combine
from moe_numba.course.deepep_port.dispatch import FAULTS as DISPATCH_FAULTS
from moe_numba.course.deepep_port.dispatch import make_dispatch
from moe_numba.course.deepep_port.notify import (
    THREADS,
    make_cached_notify_combine,
    make_cached_notify_dispatch,
    make_notify_dispatch,
    notify_combine_threads,
)
from moe_numba.runtime.launch import launch


class Rank(NamedTuple):
    """A rank, and the memory of its peers."""

    rank: int
    buffers: torch.Tensor  # [ranks], uint64: the address of each rank's buffer
    signals: torch.Tensor  # [ranks], uint64: the address of each rank's signals, int32 [ranks], zero beforehand
    status: torch.Tensor  # [STATUS_WORDS], int32, zero beforehand: see ``polling``
    timeout_ns: int = 10_000_000_000  # 0: no timeout
    start: Callable = launch  # a transport's ``launch`` where ranks are threads of one process


class Handle(NamedTuple):
    """What a dispatch returns for later dispatches with the same layout, and for combine."""

    rank_prefix_matrix: torch.Tensor  # [ranks, ranks], int32
    channel_prefix_matrix: torch.Tensor  # [ranks, channels], int32: rows that this rank sends
    recv_channel_prefix_matrix: torch.Tensor  # [ranks, channels], int32: rows that it received
    recv_src_idx: torch.Tensor  # [rows], int32
    is_token_in_rank: torch.Tensor  # [tokens, ranks], bool
    send_head: torch.Tensor  # [tokens, ranks], int32


def notify_dispatch(r, config, layout, counter, expert_counter, expert_alignment=1):
    """Exchange the counts; return rank_prefix_matrix and channel_prefix_matrix.

    ``layout`` is (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank). The kernel writes the number of rows
    that this rank receives to ``counter`` [1], and the tokens of each of its experts to ``expert_counter``.
    """
    _check(config)
    device, n = r.buffers.device, config.ranks
    channel_prefix = torch.empty(n, config.channels, dtype=torch.int32, device=device)
    rank_prefix = torch.empty(n, n, dtype=torch.int32, device=device)
    r.start(
        make_notify_dispatch(config),
        1 + n,
        THREADS,
        *layout,
        len(layout[2]),
        channel_prefix,
        rank_prefix,
        counter,
        expert_counter,
        expert_alignment,
        *_common_arguments(r),
        cooperative=True,
    )
    return rank_prefix, channel_prefix


def cached_notify_dispatch(r, config, rank_prefix):
    """Clear the queues for a dispatch whose counts are known."""
    _check(config)
    r.start(make_cached_notify_dispatch(config), 1, THREADS, rank_prefix, *_common_arguments(r))


def dispatch(r, config, x, is_token_in_rank, rank_prefix, channel_prefix, rows, topk_idx=None, topk_weights=None):
    """Send ``x``, or (values, scales); ``rows`` is the number of rows that this rank receives.

    Returns recv_x (or a tuple), recv_topk_idx, recv_topk_weights and a Handle.
    """
    _check(config)
    device, c = r.buffers.device, config
    values, scales = x if isinstance(x, tuple) else (x, None)
    if values.shape[1] * values.element_size() != c.row_bytes:
        raise ValueError(f"a row of x has {values.shape[1] * values.element_size()} bytes, not {c.row_bytes}")
    given = (scales.shape[1] if scales is not None else 0), (topk_idx.shape[1] if topk_idx is not None else 0)
    if given != (c.scales, c.topk):
        raise ValueError(f"config has {c.scales} scales and topk {c.topk}, but the arguments have {given}")

    def new(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=device)

    recv_values = new(rows, values.shape[1], dtype=values.dtype)
    recv_scales = new(rows, c.scales, dtype=torch.float32)
    recv_topk_idx, recv_topk_weights = new(rows, c.topk, dtype=torch.int64), new(rows, c.topk, dtype=torch.float32)
    src_idx, recv_channel_prefix = new(rows), new(c.ranks, c.channels)
    send_head = new(len(values), c.ranks)
    if scales is None:
        scales = new(1, 1, dtype=torch.float32)
    if topk_idx is None:
        topk_idx, topk_weights = new(1, dtype=torch.int64), new(1, dtype=torch.float32)
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
        *_common_arguments(r)[2:],
        cooperative=True,
        launch_bounds=c.threads,
    )
    handle = Handle(rank_prefix, channel_prefix, recv_channel_prefix, src_idx, is_token_in_rank, send_head)
    return (recv_values, recv_scales) if c.scales else recv_values, recv_topk_idx, recv_topk_weights, handle


def cached_notify_combine(r, config, handle):
    """Clear the queues for a combine, and replace the -1 entries of ``handle.send_head``."""
    _check(config, combine=True)
    r.start(
        make_cached_notify_combine(config),
        1 + config.channels,
        notify_combine_threads(config.ranks),
        handle.send_head,
        len(handle.send_head),
        *_common_arguments(r),
        cooperative=True,
    )


def combine(r, config, y, handle, topk_weights=None, biases=()):
    """Send back ``y`` [rows, hidden], bfloat16; return the sums per token, and those of the weights or None."""
    _check(config, combine=True)
    device, c, tokens = y.device, config, len(handle.send_head)
    if len(biases) != c.biases or (topk_weights is not None) != bool(c.topk):
        raise ValueError(
            f"config has {c.biases} biases and topk {c.topk}, but the arguments have {len(biases)} biases and "
            f"{'no ' if topk_weights is None else ''}weights"
        )
    out = torch.empty(tokens, y.shape[1], dtype=torch.bfloat16, device=device)
    out_weights = torch.empty(tokens, c.topk, dtype=torch.float32, device=device)
    placeholder = torch.empty(8, dtype=torch.bfloat16, device=device)
    bias_0, bias_1 = (*biases, placeholder, placeholder)[:2]
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
        _words(bias_0),
        _words(bias_1),
        tokens,
        r.buffers,
        *_common_arguments(r)[2:],
        cooperative=True,
        launch_bounds=c.threads,
    )
    return out, out_weights if c.topk else None


def _common_arguments(r):
    return r.buffers, r.signals, r.rank, np.int64(r.timeout_ns), r.status


def _words(tensor):
    return tensor.reshape(-1).view(torch.int32)


def _check(c, combine=False):
    if not 1 <= c.ranks <= 8 or c.row_bytes % 16 or c.topk > 32 or c.experts % c.ranks or not 64 <= c.threads <= 1024:
        raise ValueError(f"{c} is not a valid configuration")
    faults = COMBINE_FAULTS if combine else DISPATCH_FAULTS
    if c.fault not in ("", *faults):
        raise ValueError(f"fault is {c.fault!r}; it must be one of {faults}")
    required = min_ring_slots(c) if combine else c.chunk
    if c.ring < required and c.fault != "short ring":
        raise ValueError(f"ring is {c.ring}; it must be {required} or more, otherwise the kernels may deadlock")
