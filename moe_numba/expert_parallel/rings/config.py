"""``Config``, the resources that dispatch and combine may use, and the launch parameters that follow from it."""

from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import ALIGNMENT_WORDS, MAX_RANKS, MAX_TOPK, align_words
from moe_numba.expert_parallel.rings.channels import RingShape
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
from moe_numba.runtime.device import shared_bytes_of
from moe_numba.runtime.validate import check_int

topk_idx_t = torch.int64  # dtype of experts, as DeepEP is built by default; int32 is allowed as well
TOPK_IDX_POINTERS = {torch.int64: "int64*", torch.int32: "int32*"}  # types of the kernels' pointers to experts

_MAX_WARPS = 2 if simulator.ENABLED else 16
_MAX_WARPS_WITHOUT_TMA = 2 if simulator.ENABLED else 7  # copies need registers: with the publisher 256 threads
_SATURATING_SMS = 8  # SMs whose bulk copies saturate the link: measured in notebook 12
_REDUCER_WARPS = 23  # of DeepEP's combine kernel, each of which may hold a row


class GpuLimits(NamedTuple):
    """What the GPUs of all ranks of a group have in common."""

    uses_tma: bool  # whether kernels copy rows by TMA
    shared_bytes: int  # shared memory of a CTA


HOPPER = GpuLimits(True, shared_bytes_of((9, 0)))


def limits_of(gpu, uses_tma=None):
    """Return the limits of one GPU; ``uses_tma`` None means if it can."""
    return GpuLimits(gpu.capability >= (9, 0) if uses_tma is None else uses_tma, gpu.shared_bytes)


@dataclass(frozen=True)
class Config:
    """Resources of one call, with DeepEP's names.

    Parameters
    ----------
    num_sms : int
        Number of SMs: even, 2 to 132. At most half of them send, see `num_senders`; the others receive.
    num_max_nvl_chunked_send_tokens : int
        Rows that a sender may write to a ring before it publishes the tail; 1 or more. The kernels of this package
        publish as early as they can, whatever the value.
    num_max_nvl_chunked_recv_tokens : int
        Capacity, in rows of bfloat16, of all rings from one rank to one SM; twice as many rows of FP8 fit. At least
        22 more than the chunk: DeepEP's combine kernel deadlocks with fewer, because each of its 23 reducer warps may
        hold a row.
    num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens : int
        DeepEP's, for transfers between nodes, of which there are none: without effect.

    Raises
    ------
    TypeError
        A value is not an int.
    ValueError
        A value is out of range.

    Examples
    --------
    >>> config = moe_numba.Config(num_sms=24, num_max_nvl_chunked_send_tokens=12)
    >>> config.num_max_nvl_chunked_recv_tokens
    256
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self):
        for field in fields(self):
            object.__setattr__(self, field.name, check_int(field.name, getattr(self, field.name)))
        if not 2 <= self.num_sms <= 132 or self.num_sms % 2:
            raise ValueError(f"num_sms is {self.num_sms}; it must be even, 2 to 132")
        for name in ("nvl_chunked_send", "rdma_chunked_send", "rdma_chunked_recv"):
            check_int(f"num_max_{name}_tokens", getattr(self, f"num_max_{name}_tokens"), 1)
        chunk, ring = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if ring < chunk + _REDUCER_WARPS - 1:
            raise ValueError(
                f"num_max_nvl_chunked_recv_tokens is {ring}; with chunks of {chunk} it must be "
                f"{chunk + _REDUCER_WARPS - 1} or more"
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return a sufficient ``num_nvl_bytes`` for dispatch and combine.

        Parameters
        ----------
        hidden_bytes : int
            Bytes of a row.
        num_ranks : int
            Ranks of the group, 1 to 8.
        """
        hidden_bytes = check_int("hidden_bytes", hidden_bytes, 1)
        num_ranks = check_int("num_ranks", num_ranks, 1, MAX_RANKS)
        slot = TokenSlot(-(-hidden_bytes // 4), -(-hidden_bytes // 128), MAX_TOPK)
        channels = num_channels(self.num_sms, num_ranks, hidden_bytes)
        return 2 * 4 * channels * num_ranks * slots_per_ring(self, num_ranks, channels) * slot.stride

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return a sufficient ``num_rdma_bytes``: 0, because all ranks are in one node.

        ``hidden_bytes`` and ``num_ranks`` are DeepEP's, and have no effect.
        """
        check_int("hidden_bytes", hidden_bytes, 1)
        check_int("num_ranks", num_ranks, 1, MAX_RANKS)
        return 0


@cache
def num_senders(num_sms, num_ranks):
    """Return how many SMs send: as many as saturate the link, at most half.

    Eight SMs saturate it if all their rows leave the rank. Senders of dispatch also copy half of the rank's own rows,
    one for every ``num_ranks - 1`` that leave. More senders would need more rings without being faster, and an SM that
    does not send can receive.
    """
    peers = max(1, num_ranks - 1)
    return min(num_sms // 2, -(-_SATURATING_SMS * (2 * peers + 1) // (2 * peers)))


def num_direct_senders(num_sms):
    """Return how many SMs send in direct dispatch, where none receives.

    As many as saturate the link, and as many again for a rank's own rows. More senders only contend with one another.
    """
    return min(num_sms, 2 * _SATURATING_SMS)


@cache
def num_channels(num_sms, num_ranks, hidden_bytes, per_warp=None, limits=HOPPER):
    """Return the number of channels: one per sending warp, or four.

    SMs that do not saturate the link all send at the same rate, so equal shares are best. With more SMs the rates
    differ, and a warp that has finished a channel takes the next one.
    """
    senders = num_senders(num_sms, num_ranks)
    per_warp = per_warp or (1 if senders <= _SATURATING_SMS else 4)
    return per_warp * senders * max_warps(hidden_bytes, limits)


@cache
def slots_per_ring(config, num_ranks, channels):
    """Return the capacity of one of the rings from a rank to an SM, in rows of bfloat16."""
    return max(1, config.num_max_nvl_chunked_recv_tokens * num_senders(config.num_sms, num_ranks) // channels)


@cache
def max_warps(hidden_bytes, limits=HOPPER):
    """Return how many warps of a CTA have space in shared memory for a row and its metadata; 1 to 16."""
    slot = TokenSlot(-(-hidden_bytes // 4), 0, MAX_TOPK)
    bytes_per_warp = 4 * align_words(slot.words) + 8 + 16 * MAX_RANKS + 8
    most = _MAX_WARPS if limits.uses_tma else _MAX_WARPS_WITHOUT_TMA
    warps = min(most, limits.shared_bytes // bytes_per_warp)
    if warps < 1:
        raise ValueError(
            f"x has rows of {hidden_bytes // 2} elements; in bfloat16 one must fit {limits.shared_bytes} bytes, the "
            "shared memory of a CTA"
        )
    return warps


@cache
def make_ring_shape(config, num_ranks, warps, channels, slot, words, element_bytes=2, limits=HOPPER):
    """Return the `RingShape` of an operation with ``words`` of ring memory, and the distance from ring to ring.

    The distance, in words, is the same for rows of all dtypes, so that no two rings ever overlap.
    """
    ring_words = words // (channels * num_ranks) // ALIGNMENT_WORDS * ALIGNMENT_WORDS
    slots = min(slots_per_ring(config, num_ranks, channels) * 2 // element_bytes, ring_words // slot.stride)
    if slots < 1:
        required = 2 * 4 * channels * num_ranks * slot.stride
        raise ValueError(
            f"num_nvl_bytes is too small: {channels} channels of {num_ranks} ranks with rows of {4 * slot.row} bytes "
            f"need {required} or more; Config.get_nvl_buffer_size_hint returns a good size"
        )
    return RingShape(num_ranks, warps, slots, slot, limits.uses_tma), ring_words
