"""The ways that rows take: there, through rings or straight to their place, and back.

What follows for a kernel from the kind of rows is worked out once for each kind, see ``Link.kept``.
"""

from functools import partial

from moe_numba.expert_parallel.config import channels_of, most_warps, rings_for, senders_of, senders_without_rings
from moe_numba.expert_parallel.kernels import combine, dispatch, dispatch_direct
from moe_numba.expert_parallel.kernels.buffer_layout import Record
from moe_numba.expert_parallel.kernels.channels import Rings


def through_rings(link, config, hidden, dtype, scales, topk, channels, of_a_warp):
    """Rows go into rings on the ranks that get them, which carry them from there into new tensors.

    Gives the number of channels, and what starts the kernel.
    """
    record, ranks = Record(hidden * dtype.itemsize // 4, scales, topk), link.num_ranks
    channels = channels or channels_of(config.num_sms, ranks, 2 * hidden, of_a_warp)
    shape, ring_words = rings_for(config, ranks, most_warps(2 * hidden), channels, record, link.half, dtype.itemsize)
    start = link.kernel(dispatch.make_dispatch, (shape,), dispatch.SIGNATURE, shape.threads, shape.shared_bytes)
    return channels, partial(start, config.num_sms, senders_of(config.num_sms, ranks), channels, link.rings, ring_words)


def straight(link, config, hidden, dtype, scales, topk, channels, of_a_warp):
    """Rows go to their place in an `Output`; the same."""
    blocks, warps = senders_without_rings(config.num_sms), most_warps(2 * hidden)
    channels = channels or (of_a_warp or 4) * blocks * warps  # four, as with rings where the link is full
    shape = Rings(link.num_ranks, warps, 0, Record(hidden * dtype.itemsize // 4, scales, topk))
    start = link.kernel(
        dispatch_direct.make_direct, (shape,), dispatch_direct.SIGNATURE, 32 * warps, shape.shared_bytes
    )
    return channels, partial(start, blocks, channels)


def back(link, config, hidden, topk, channels, biases):
    """Rows go into rings on the ranks that they came from, which add them up; gives what starts the kernel."""
    record = Record(hidden // 2, topk, 0, source=False)
    shape, ring_words = rings_for(config, link.num_ranks, most_warps(2 * hidden), channels, record, link.half)
    start = link.kernel(combine.make_combine, (shape, biases), combine.SIGNATURE, shape.threads, shape.shared_bytes)
    senders = senders_of(config.num_sms, link.num_ranks)
    return partial(start, config.num_sms, senders, channels, link.rings + link.half, ring_words)
