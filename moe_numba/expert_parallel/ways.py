"""The two ways in which dispatch can send rows: through rings, or straight to their place."""

from typing import NamedTuple

import torch

from moe_numba.expert_parallel import direct, dispatch
from moe_numba.expert_parallel.config import channels_of, most_warps, rings_for, senders_of, senders_without_rings
from moe_numba.expert_parallel.regions import Record
from moe_numba.expert_parallel.rings import Rings


class Way(NamedTuple):
    """What ``Buffer.dispatch`` must know of it."""

    channels: int
    blocks: int
    kernel: tuple  # what ``Link.kernel`` takes
    given: tuple  # what this kernel takes besides what both take
    outputs: object  # (received, sources or None): rows, scales, top-k, weights and sources, or None for these
    around: object  # (has_met): the context in which the kernel is started


def _record(x, scales, topk):
    return Record(x.shape[1] * x.element_size() // 4, 0 if scales is None else scales.shape[1], topk)


def through_rings(link, config, x, scales, topk, channels, of_a_warp):
    """Rows go into rings on the ranks that get them, which carry them from there into new tensors."""
    record, hidden_bytes = _record(x, scales, topk), 2 * x.shape[1]
    channels = channels or channels_of(config.num_sms, link.num_ranks, hidden_bytes, of_a_warp)
    shape, ring_words = rings_for(
        config, link.num_ranks, most_warps(hidden_bytes), channels, record, link.half, x.element_size()
    )

    def outputs(received, sources):
        new = lambda *size, dtype: torch.empty(size, dtype=dtype, device=x.device)
        return (
            new(received, x.shape[1], dtype=x.dtype),
            None if scales is None else new(received, record.scales, dtype=scales.dtype),
            new(received, topk, dtype=torch.int64) if topk else None,
            new(received, topk, dtype=torch.float32) if topk else None,
            new(received, dtype=torch.int32) if sources is None else sources,
        )

    return Way(
        channels,
        config.num_sms,
        ("dispatch", dispatch.make_dispatch, (shape,), dispatch.SIGNATURE, shape.threads, shape.shared_bytes),
        (senders_of(config.num_sms, link.num_ranks), channels, link.rings, ring_words),
        outputs,
        lambda has_met: link.guarded(False, channels, has_met),
    )


def straight_to(out, link, config, x, scales, topk, channels):
    """Rows go to their place in an `Output`."""
    blocks, warps = senders_without_rings(config.num_sms), most_warps(2 * x.shape[1])
    channels = channels or 4 * blocks * warps  # as with rings, where the link is full
    shape = Rings(link.num_ranks, warps, 0, _record(x, scales, topk))
    return Way(
        channels,
        blocks,
        ("direct", direct.make_direct, (shape,), direct.SIGNATURE, 32 * warps, shape.shared_bytes),
        (link.at(out.addresses), *out.begins, out.num_rows, channels),
        lambda received, _: out.first(received, scales is not None, topk > 0),
        link.between_meetings,
    )
