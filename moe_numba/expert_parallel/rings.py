"""What dispatch and combine have in common: rings and channels, a block's shared memory, and how a row comes to it."""

from dataclasses import dataclass
from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.expert_parallel.regions import Record, lines
from moe_numba.ptx.bulk import bulk_load, make_bulk_wait_group, make_bulk_wait_group_read
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
        """Where warps say how far each of their rings is, in words, behind the barriers."""
        return 2 * (self.bar + self.warps)

    @property
    def said(self):
        """Where the last warp keeps what of it the other ranks know, in words."""
        return self.progress + self.warps * self.num_ranks

    @property
    def done(self):
        """Where warps say that they are done, in words."""
        return self.said + self.warps * self.num_ranks

    @property
    def shared_bytes(self):
        """Of a block."""
        return 4 * (self.done + self.warps)

    @property
    def threads(self):
        """Of a block: one more warp, which tells the other ranks how far these are."""
        return 32 * (self.warps + 1)


@cuda.jit(device=True)
def first_token(channel, channels, tokens):
    """The first token of a channel; of the channel after the last, the number of tokens."""
    return int32(int64(channel) * tokens // channels)


@cuda.jit(device=True)
def rows_of_channel(rank_prefix, recv_channel_prefix, source, rank, ranks, channel, channels):
    """How many rows a rank gets of another's channel, and which of its rows is the first."""
    before = rank_prefix[int32((source - 1) * ranks + rank)] if source > 0 else int32(0)
    begin = recv_channel_prefix[int32(source * channels + channel)]
    end = int32(rank_prefix[int32(source * ranks + rank)] - before)
    if channel + 1 < channels:
        end = recv_channel_prefix[int32(source * channels + channel + 1)]
    return int32(end - begin), int32(before + begin)


@cuda.jit(device=True)
def own_rows_before(rank_prefix, channel_prefix, rank, ranks, channel, channels):
    """Which of a rank's rows is the first of those that come from itself, from one of its channels."""
    before = rank_prefix[int32((rank - 1) * ranks + rank)] if rank > 0 else int32(0)
    if channel > 0:
        before = int32(before + channel_prefix[int32(rank * channels + channel - 1)])
    return before


@cuda.jit(device=True)
def part_of_block(senders, channels, warps):
    """Whether a block receives, its first channel, and how many it has: a warp for each. The first blocks send."""
    block = int32(cuda.blockIdx.x)
    receives = block >= senders
    receivers = int32(int32(cuda.gridDim.x) - senders)
    most = int32((channels + receivers - 1) // receivers) if receives else warps
    first = int32((block - senders if receives else block) * most)
    return receives, first, max(int32(0), min(most, int32(channels - first)))


@cuda.jit(device=True)
def prepare(smem, bars, bar, progress_at, said_at, done_at, warps, ranks, state, ends, channels):
    """Make a block's barriers, and set down how far the rings of its channels were at the end of the last launch."""
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for w in range(warps):
            mbarrier_init(bars, bar + w, 1)
        fence_mbarrier_init()
    if thread < warps * ranks:
        far = state[int32(ends + thread)] if thread < channels * ranks else int32(0)
        smem[int32(progress_at + thread)] = smem[int32(said_at + thread)] = far
    if thread < warps:
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
