"""What dispatch and combine have in common: rings and channels, a block's shared memory, and how a row comes to it."""

from dataclasses import dataclass
from functools import cache

from numba import cuda, int32, uint32, uint64

from moe_numba.expert_parallel.kernels.buffer_layout import ASKED, AT_END, Record, lines
from moe_numba.expert_parallel.kernels.progress import FULL, wait_until_told
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32
from moe_numba.ptx.cp_async import bulk_load, make_bulk_wait_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_acq_rel_gpu
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity

copied, copied_but_last, read = make_bulk_wait_group(0), make_bulk_wait_group(1), make_bulk_wait_group_read(0)


@dataclass(frozen=True)
class Rings:
    """What a kernel of dispatch or combine is made for."""

    num_ranks: int
    warps: int  # of a block
    slots: int  # of a ring
    record: Record

    @property
    def bar(self):
        """Where the barriers begin in shared memory, in 8 bytes, behind the warps' stages."""
        return self.warps * lines(self.record.words) // 2

    @property
    def progress(self):
        """Where warps leave word how far each ring of their channels is, in 8 bytes, behind the barriers."""
        return self.bar + self.warps

    @property
    def told(self):
        """Where the last warp keeps what of it the other ranks know, in 8 bytes."""
        return self.progress + self.warps * self.num_ranks

    @property
    def done(self):
        """Where warps say that they are done, in words; behind it how many ask for no more channels."""
        return 2 * (self.told + self.warps * self.num_ranks)

    @property
    def shared_bytes(self):
        """Of a block."""
        return 4 * (self.done + self.warps + 1)

    @property
    def threads(self):
        """Of a block: one more warp, which tells the other ranks how far these are."""
        return 32 * (self.warps + 1)


@cuda.jit(device=True)
def shares(channels, tokens):
    """How many tokens a channel has at least, and how many of the first channels have one more.

    All shares are as good as equal. But few tokens go to the first quarter of the channels only, until these have four
    each: where there are four channels for a warp, warps begin with these.
    """
    tokens, channels = uint32(tokens), uint32(channels)
    used = max(min(tokens, channels // uint32(4)), (tokens + uint32(3)) // uint32(4), uint32(1))
    used = min(used, channels)
    each = uint32(tokens // used)
    return each, uint32(tokens - each * used)


@cuda.jit(device=True)
def first_token(channel, channels, tokens):
    """The first token of a channel; of those that have none, the number of tokens."""
    each, longer = shares(channels, tokens)
    return int32(min(uint32(tokens), uint32(channel) * each + min(uint32(channel), longer)))


@cuda.jit(device=True)
def channel_of(token, each, longer):
    """The channel of a token; ``each`` and ``longer`` are the `shares`."""
    token, long = uint32(token), uint32(each + uint32(1))
    in_longer = uint32(longer * long)
    return int32(token // long if token < in_longer else longer + uint32(token - in_longer) // each)


@cuda.jit(device=True)
def rows_of_channel(rank_prefix, recv_channel_prefix, source, rank, ranks, channel, channels):
    """How many rows a rank gets of another's channel, which of its rows is the first, and how many come after them."""
    before = rank_prefix[int32((source - 1) * ranks + rank)] if source > 0 else int32(0)
    begin = recv_channel_prefix[int32(source * channels + channel)]
    all_of_it = int32(rank_prefix[int32(source * ranks + rank)] - before)
    end = recv_channel_prefix[int32(source * channels + channel + 1)] if channel + 1 < channels else all_of_it
    return int32(end - begin), int32(before + begin), int32(all_of_it - end)


@cuda.jit(device=True)
def rows_before(rank_prefix, channel_prefix, rank, to, ranks, channel, channels):
    """Which of a rank's rows is the first of those that come from this rank, from one of its channels."""
    before = rank_prefix[int32((rank - 1) * ranks + to)] if rank > 0 else int32(0)
    if channel > 0:
        before = int32(before + channel_prefix[int32(to * channels + channel - 1)])
    return before


@cuda.jit(device=True)
def first_channel(senders, warp):
    """Whether a block receives, how many blocks do as it does, and the channel that a warp begins with.

    The first blocks send. To begin with, each block has channels of its own; of few channels each gets some.
    """
    block = int32(cuda.blockIdx.x)
    receives = block >= senders
    blocks = int32(int32(cuda.gridDim.x) - senders) if receives else senders
    return receives, blocks, int32(warp * blocks + (block - senders if receives else block))


@cuda.jit(device=True)
def next_channel(state, receives, blocks, warps, lane):
    """The first channel that nobody has asked for, after those with which warps begin."""
    asked = atom_add_relaxed_gpu_s32(state, ASKED + (1 if receives else 0), 1) if lane == 0 else int32(0)
    return int32(blocks * warps + cuda.shfl_sync(FULL, asked, 0))


@cuda.jit(device=True)
def next_channel_when_told(state, receives, blocks, warps, bars, word, told, here, lane):
    """The same, when what the warp left of its last channel is told: now it may leave word of another one."""
    channel = next_channel(state, receives, blocks, warps, lane)
    if here:
        wait_until_told(bars, word, told)
    cuda.syncwarp()
    return channel


@cuda.jit(device=True)
def ask_no_more(smem, state, done_at, warps, lane):
    """What a warp does as soon as it will ask for no more channels: the last of all prepares the next launch."""
    if lane == 0 and cuda.atomic.add(smem, int32(done_at + warps), int32(1)) == warps - 1:
        fence_acq_rel_gpu()
        if atom_add_relaxed_gpu_s32(state, AT_END, 1) == int32(cuda.gridDim.x) - 1:
            fence_acq_rel_gpu()
            state[ASKED] = state[int32(ASKED + 1)] = state[AT_END] = int32(0)


@cuda.jit(device=True)
def prepare(smem, bars, bar, progress_at, told_at, done_at, warps, ranks):
    """Make a block's barriers; nothing has been told, and nobody is done."""
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for w in range(warps):
            mbarrier_init(bars, bar + w, 1)
        fence_mbarrier_init()
    for i in range(thread, warps * ranks, int32(cuda.blockDim.x)):
        bars[int32(progress_at + i)] = bars[int32(told_at + i)] = uint64(0)
    if thread <= warps:
        smem[int32(done_at + thread)] = int32(0)
    cuda.syncthreads()


@cache
def make_fetch(bar):
    """``fetch`` and ``land``: ask for what is to come to a warp's stage, and wait until it is there."""

    @cuda.jit(device=True)
    def fetch(smem, bars, warp, lane, stage, source, at, size_bytes):
        read()  # who sent the last row has read it
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive_expect_tx(bars, bar + warp, size_bytes)
            bulk_load(smem, stage, source, at, size_bytes, bars, bar + warp)

    @cuda.jit(device=True)
    def land(bars, warp, parity):
        mbarrier_wait_parity(bars, bar + warp, parity)
        cuda.syncwarp()
        return uint32(parity ^ uint32(1))

    return fetch, land
