"""Channels: how tokens are split into channels, which rows a channel has, and how warps take channels.

A channel is a range of consecutive tokens. Warps take channels in ascending order, first statically, then from an
atomic counter (dynamic load balancing).
"""

from dataclasses import dataclass

from numba import cuda, int32, uint32

from moe_numba.expert_parallel.common.buffer_layout import BLOCKS_DONE, MAX_RANKS, MAX_TOPK, NEXT_CHANNEL, align_words
from moe_numba.expert_parallel.rings import bulk_pipeline, register_pipeline
from moe_numba.expert_parallel.rings.progress import wait_published
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32
from moe_numba.ptx.fence import fence_acq_rel_gpu
from moe_numba.ptx.warp import FULL_MASK


@dataclass(frozen=True)
class RingShape:
    """Compile-time configuration of dispatch and combine, and their shared-memory layout.

    A CTA's shared memory holds the warps' staging buffers, one mbarrier per warp, one progress and one published slot
    per warp and rank (8 bytes each), one done flag per warp, and a counter of retired warps.
    """

    num_ranks: int
    warps: int  # per CTA, without the publisher warp
    slots: int  # per ring
    slot: TokenSlot
    uses_tma: bool = True  # how rows are copied

    def __post_init__(self):
        if not 1 <= self.num_ranks <= MAX_RANKS or not 0 <= self.slot.topk <= MAX_TOPK or not 1 <= self.warps <= 31:
            raise ValueError(
                f"{self}: the kernels support 1 to {MAX_RANKS} ranks, at most {MAX_TOPK} experts per token, and 1 to "
                "31 warps besides the publisher"
            )

    @property
    def pipeline(self):
        """The module whose functions copy rows."""
        return bulk_pipeline if self.uses_tma else register_pipeline

    @property
    def barrier_offset(self):
        """Offset of the mbarriers, in 8-byte words."""
        return self.warps * align_words(self.slot.words) // 2

    @property
    def progress_offset(self):
        """Offset of the progress that warps have posted for each of their rings, in 8-byte words."""
        return self.barrier_offset + self.warps

    @property
    def published_offset(self):
        """Offset of the last progress value that was published to peers, in 8-byte words."""
        return self.progress_offset + self.warps * self.num_ranks

    @property
    def done_offset(self):
        """Offset of the warps' done flags, in 4-byte words; the counter of retired warps follows them."""
        return 2 * (self.published_offset + self.warps * self.num_ranks)

    @property
    def shared_bytes(self):
        """Dynamic shared memory of a CTA."""
        return 4 * (self.done_offset + self.warps + 1)

    @property
    def threads(self):
        """Threads of a CTA, including the publisher warp."""
        return 32 * (self.warps + 1)


@cuda.jit(device=True)
def split_tokens(channels, tokens):
    """Return the minimum number of tokens per channel, and how many of the first channels have one more.

    Channels are as equal as possible. Few tokens use only the first quarter of the channels, until these have four
    tokens each: where there are four channels per warp, warps begin with that first quarter.
    """
    tokens, channels = uint32(tokens), uint32(channels)
    used = max(min(tokens, channels // uint32(4)), (tokens + uint32(3)) // uint32(4), uint32(1))
    used = min(used, channels)
    each = uint32(tokens // used)
    return each, uint32(tokens - each * used)


@cuda.jit(device=True)
def first_token(channel, channels, tokens):
    """Return the first token of a channel, or the number of tokens for a channel without any."""
    each, longer = split_tokens(channels, tokens)
    return int32(min(uint32(tokens), uint32(channel) * each + min(uint32(channel), longer)))


@cuda.jit(device=True)
def channel_of(token, each, longer):
    """Return the channel of a token; ``each`` and ``longer`` come from `split_tokens`."""
    token, long = uint32(token), uint32(each + uint32(1))
    in_longer = uint32(longer * long)
    return int32(token // long if token < in_longer else longer + uint32(token - in_longer) // each)


# The prefix matrices may come from a handle that the caller has overwritten. Rows that follow from them are therefore
# limited, once per channel, to the rows of the tensor that they index.


@cuda.jit(device=True)
def clamp(value, most):
    """Limit a number to 0..most."""
    return max(int32(0), min(int32(value), int32(most)))


@cuda.jit(device=True)
def rows_of_channel(rank_prefix, recv_channel_prefix, source, rank, ranks, channel, channels, num_rows):
    """Return the rows that ``rank`` receives from a channel of ``source``: count, first row, rows of later channels."""
    before = rank_prefix[int32((source - 1) * ranks + rank)] if source > 0 else int32(0)
    begin = recv_channel_prefix[int32(source * channels + channel)]
    from_source = int32(rank_prefix[int32(source * ranks + rank)] - before)
    end = recv_channel_prefix[int32(source * channels + channel + 1)] if channel + 1 < channels else from_source
    first = clamp(int32(before + begin), num_rows)
    return clamp(int32(end - begin), num_rows - first), first, int32(from_source - end)


@cuda.jit(device=True)
def first_row_at_peer(rank_prefix, channel_prefix, rank, peer, ranks, channel, channels, num_rows):
    """Return the row of ``peer``'s output, of ``num_rows`` rows, where the rows of this rank's channel begin."""
    before = rank_prefix[int32((rank - 1) * ranks + peer)] if rank > 0 else int32(0)
    if channel > 0:
        before = int32(before + channel_prefix[int32(peer * channels + channel - 1)])
    return clamp(before, num_rows)


@cuda.jit(device=True)
def first_channel(senders, warp):
    """Return whether this CTA receives, the number of CTAs with its role, and the first channel of a warp.

    The first ``senders`` CTAs send. Consecutive channels go to different CTAs, so that a few channels use all of them.
    """
    block = int32(cuda.blockIdx.x)
    receives = block >= senders
    blocks = int32(int32(cuda.gridDim.x) - senders) if receives else senders
    return receives, blocks, int32(warp * blocks + (block - senders if receives else block))


@cuda.jit(device=True)
def next_channel(state, receives, blocks, warps, lane):
    """Take the next channel from the role's counter; the first ``blocks * warps`` channels are assigned statically."""
    taken = atom_add_relaxed_gpu_s32(state, NEXT_CHANNEL + (1 if receives else 0), 1) if lane == 0 else int32(0)
    return int32(blocks * warps + cuda.shfl_sync(FULL_MASK, taken, 0))


@cuda.jit(device=True)
def next_channel_after_publish(state, receives, blocks, warps, smem_u64, progress_slot, published_slot, has_ring, lane):
    """Take the next channel, and wait until this warp's progress on the previous one has been published."""
    channel = next_channel(state, receives, blocks, warps, lane)
    if has_ring:
        wait_published(smem_u64, progress_slot, published_slot)
    cuda.syncwarp()
    return channel


@cuda.jit(device=True)
def retire_warp(smem_i32, state, done_offset, warps, lane):
    """Record that this warp takes no further channel; the grid's last warp resets the counters for the next launch."""
    if lane == 0:
        cuda.threadfence_block()  # other warps count this one as done only after its last access to the counters
    if lane == 0 and cuda.atomic.add(smem_i32, int32(done_offset + warps), int32(1)) == warps - 1:
        fence_acq_rel_gpu()
        if atom_add_relaxed_gpu_s32(state, BLOCKS_DONE, 1) == int32(cuda.gridDim.x) - 1:
            fence_acq_rel_gpu()
            state[NEXT_CHANNEL] = state[int32(NEXT_CHANNEL + 1)] = state[BLOCKS_DONE] = int32(0)
