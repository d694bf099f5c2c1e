"""The dispatch kernel: rows travel through rings to the ranks that hold their experts.

A warp is a channel. Even blocks send, odd ones receive; a sending warp's tokens are neighbours, and their rows arrive in
a warp of the same number on each rank. The document has a block for a channel, a group of warps for each rank in it,
and each group reads the token anew, in words. Here one thread asks for the whole row once (a bulk copy, to shared
memory), what belongs to the row is put behind it, and then a lane for each rank sends the **record** on its way in one
piece. Many warps wait at the same time, so that neither a round trip nor a fence is seen.

What stays on its rank takes no ring: it goes from shared memory to where it belongs.
"""

from dataclasses import dataclass
from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.regions import LOST, Record, lines, regions, sent, taken
from moe_numba.expert_parallel.waiting import ROWS, SPACE, give_up, out_of_patience
from moe_numba.ptx.bulk import bulk_commit_group, bulk_load, bulk_store, make_bulk_wait_group, make_bulk_wait_group_read
from moe_numba.ptx.clock import globaltimer
from moe_numba.ptx.fence import fence_proxy_async, fence_proxy_async_shared
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.system import ld_acquire_sys_s32, ld_volatile_s32, pointer_from_address, st_release_sys_s32

FULL = 0xFFFFFFFF
copied, read = make_bulk_wait_group(0), make_bulk_wait_group_read(0)


@dataclass(frozen=True)
class Rings:
    """What a kernel of dispatch or combine is made for."""

    num_ranks: int
    warps: int  # of a block
    slots: int  # of a ring; a power of two, so that running numbers may wrap around
    chunk: int  # rows that a ring's tail may lag behind
    rings: int  # where they begin in the shared buffer, in words
    record: Record

    @property
    def bar(self):
        """Where the barriers begin in shared memory, in 8 bytes, behind the warps' stages."""
        return self.warps * lines(self.record.words) // 2

    @property
    def shared_bytes(self):
        """Of a block."""
        return 8 * (self.bar + self.warps)


@cuda.jit(device=True)
def first_token(channel, channels, tokens):
    """The first token of a channel; of the channel after the last, the number of tokens."""
    return int32(int64(channel) * tokens // channels)


@cache
def make_send(shape):
    """``send``: what a warp of an even block does."""
    ranks, slots, chunk, record, bar, rings_at = (
        shape.num_ranks, shape.slots, shape.chunk, shape.record, shape.bar, shape.rings
    )  # fmt: skip
    tail_at, head_at, sent_at = regions(ranks).tail(False), regions(ranks).head(False), sent(False)
    row_words, scale_words, topk, stride = record.row, record.scales, record.topk, record.stride
    row_bytes, record_bytes, stage_words = 4 * record.row, 4 * record.words, lines(record.words)
    experts_at, weights_at, source_at = record.experts, record.weights, record.source_index
    unpack = make_unpack(record)

    @cuda.jit(device=True)
    def send(
        smem, bars, channel, channels, rank, mine, peers, state, status, patience, x, scales, token_stride,
        scale_stride, experts, weights, is_token_in_rank, tokens, experts_per_rank, before, recv_x, recv_scales,
        recv_experts, recv_weights, recv_source, send_head,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        to = lane if lane < ranks else int32(0)
        theirs = pointer_from_address(peers[to], mine)
        stage, parity = int32(warp * stage_words), uint32(0)
        mark = sent_at + channel * ranks + to
        first = uint32(state[mark])
        put, published, kept, here = first, first, int32(0), lane < ranks and lane != rank
        head = uint32(first - uint32(slots))  # how much has been taken out is asked for before the first row
        t, end = first_token(channel, channels, tokens), first_token(channel + 1, channels, tokens)
        goes = lane < ranks and t < end and is_token_in_rank[int64(t) * ranks + to] != 0
        ready = int32(1)
        while t < end:
            # Space in all the rings that this row goes to.
            start = globaltimer()
            waits = int32(1)
            while waits != 0:
                full = here and goes and uint32(put - head) >= uint32(slots)
                if full:
                    head = uint32(ld_acquire_sys_s32(mine, head_at + channel * ranks + to))
                    full = uint32(put - head) >= uint32(slots)
                waits = int32(1 if cuda.any_sync(FULL, full) else 0)
                if waits != 0:
                    tired = out_of_patience(start, patience, state)
                    if tired and full:
                        give_up(state, status, SPACE, rank, channel, lane, head, put)
                    if cuda.any_sync(FULL, tired):
                        ready = waits = int32(0)
            if ready == 0:
                break
            # The row, and behind it what belongs to it. Whoever sent the last one must have read it.
            read()
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive_expect_tx(bars, bar + warp, row_bytes)
                bulk_load(smem, stage, x, int64(t) * row_words, row_bytes, bars, bar + warp)
            for i in range(lane, scale_words, 32):
                smem[int32(stage + row_words + i)] = scales[t * token_stride + i * scale_stride]
            for i in range(lane, topk, 32):
                smem[int32(stage + experts_at + i)] = int32(experts[int64(t) * topk + i])
                smem[int32(stage + weights_at + i)] = weights[int64(t) * topk + i]
            if lane == 0:
                smem[int32(stage + source_at)] = t
            fence_proxy_async_shared()
            if lane < ranks:
                send_head[int64(t) * ranks + to] = int32(uint32(put - first)) if goes else int32(-1)
            follows = lane < ranks and t + 1 < end and is_token_in_rank[int64(t + 1) * ranks + to] != 0
            # Meanwhile what was sent before has arrived.
            if here and uint32(put - published) >= uint32(chunk):
                copied()
                st_release_sys_s32(theirs, tail_at + channel * ranks + rank, int32(put))
                published = put
            mbarrier_wait_parity(bars, bar + warp, parity)
            parity = uint32(parity ^ uint32(1))
            cuda.syncwarp()
            if goes and here:
                slot = int64((channel * ranks + rank) * slots) + int64(put & uint32(slots - 1))
                fence_proxy_async()
                bulk_store(theirs, rings_at + slot * stride, smem, stage, record_bytes)
                bulk_commit_group()
            stays = cuda.shfl_sync(FULL, int32(1 if goes else 0), rank)
            if stays != 0:
                to_row = int64(before) + kept
                if lane == rank:
                    bulk_store(recv_x, to_row * row_words, smem, stage, row_bytes)
                    bulk_commit_group()
                unpack(smem, stage, lane, to_row, rank, experts_per_rank, recv_scales, recv_experts, recv_weights,
                       recv_source)
                kept = int32(kept + 1)
            if goes:
                put = uint32(put + uint32(1))
            goes = follows
            t = int32(t + 1)
        copied()
        if here and put != published:
            st_release_sys_s32(theirs, tail_at + channel * ranks + rank, int32(put))
        if here:
            state[mark] = int32(put)

    return send


@cache
def make_unpack(record):
    """``unpack``: from shared memory, what came with a row."""
    row_words, scale_words, topk = record.row, record.scales, record.topk
    experts_at, weights_at, source_at = record.experts, record.weights, record.source_index

    @cuda.jit(device=True)
    def unpack(smem, stage, lane, row, rank, experts_per_rank, recv_scales, recv_experts, recv_weights, recv_source):
        for i in range(lane, scale_words, 32):
            recv_scales[row * scale_words + i] = smem[int32(stage + row_words + i)]
        for i in range(lane, topk, 32):
            expert = int32(smem[int32(stage + experts_at + i)] - rank * experts_per_rank)
            is_here = 0 <= expert and expert < experts_per_rank
            recv_experts[row * topk + i] = int64(expert) if is_here else int64(-1)
            weight = smem[int32(stage + weights_at + i)]
            recv_weights[row * topk + i] = weight if is_here else int32(0)
        if lane == 0:
            recv_source[row] = smem[int32(stage + source_at)]

    return unpack


@cache
def make_receive(shape):
    """``receive``: what a warp of an odd block does."""
    ranks, slots, record, bar, rings_at = shape.num_ranks, shape.slots, shape.record, shape.bar, shape.rings
    tail_at, head_at, taken_at = regions(ranks).tail(False), regions(ranks).head(False), taken(False)
    row_words, stride, stage_words = record.row, record.stride, lines(record.words)
    row_bytes, record_bytes = 4 * record.row, 4 * record.words
    unpack = make_unpack(record)

    @cuda.jit(device=True)
    def receive(
        smem, bars, channel, channels, rank, mine, peers, state, status, patience, experts_per_rank, rank_prefix,
        recv_channel_prefix, recv_x, recv_scales, recv_experts, recv_weights, recv_source,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        source = lane if lane < ranks else int32(0)
        theirs = pointer_from_address(peers[source], mine)
        stage, parity = int32(warp * stage_words), uint32(0)
        mark = taken_at + channel * ranks + source
        got, here = uint32(state[mark]), lane < ranks and lane != rank
        before = rank_prefix[int32((source - 1) * ranks + rank)] if source > 0 else int32(0)
        row = recv_channel_prefix[int32(source * channels + channel)]
        last = int32(rank_prefix[int32(source * ranks + rank)] - before)
        if channel + 1 < channels:
            last = recv_channel_prefix[int32(source * channels + channel + 1)]
        left = int32(last - row) if here else int32(0)
        row = int32(row + before)
        start = globaltimer()
        while cuda.any_sync(FULL, left > 0):
            come = int32(0)
            if left > 0:
                come = int32(uint32(ld_acquire_sys_s32(mine, tail_at + channel * ranks + source)) - got)
            mask = uint32(cuda.ballot_sync(FULL, come > 0))
            if mask == uint32(0):
                tired = out_of_patience(start, patience, state)
                if tired and left > 0:
                    give_up(state, status, ROWS, rank, channel, lane, got, uint32(got + uint32(come)))
                if cuda.any_sync(FULL, tired):
                    break
                continue
            fence_proxy_async()  # copies see what other ranks' copies wrote, as this thread does since it acquired
            for s in range(ranks):
                if mask >> uint32(s) & uint32(1):
                    count, to_row = cuda.shfl_sync(FULL, come, s), cuda.shfl_sync(FULL, row, s)
                    base = uint32(cuda.shfl_sync(FULL, int32(got), s))
                    for i in range(count):
                        slot = int64((channel * ranks + s) * slots) + int64(uint32(base + uint32(i)) & uint32(slots - 1))
                        if lane == 0:
                            read()
                            mbarrier_arrive_expect_tx(bars, bar + warp, record_bytes)
                            bulk_load(smem, stage, mine, rings_at + slot * stride, record_bytes, bars,
                                      bar + warp)
                        mbarrier_wait_parity(bars, bar + warp, parity)
                        parity = uint32(parity ^ uint32(1))
                        if lane == 0:
                            bulk_store(recv_x, int64(to_row + i) * row_words, smem, stage, row_bytes)
                            bulk_commit_group()
                        unpack(smem, stage, lane, int64(to_row + i), rank, experts_per_rank, recv_scales, recv_experts,
                               recv_weights, recv_source)
                        cuda.syncwarp()  # all have read what the next row will overwrite
            if come > 0:
                got, left, row = uint32(got + uint32(come)), int32(left - come), int32(row + come)
                st_release_sys_s32(theirs, head_at + channel * ranks + rank, int32(got))
            start = globaltimer()
        copied()
        if here:
            state[mark] = int32(got)

    return receive


@cache
def make_dispatch(shape):
    """The kernel, for an even number of blocks of ``32 * shape.warps`` threads."""
    ranks, warps, bar = shape.num_ranks, shape.warps, shape.bar
    send, receive, topk = make_send(shape), make_receive(shape), shape.record.topk

    @cuda.jit
    def dispatch(
        mine, peers, state, status, patience, rank, x, scales, token_stride, scale_stride, experts, weights,
        is_token_in_rank, tokens, experts_per_rank, rank_prefix, channel_prefix, recv_channel_prefix, recv_x,
        recv_scales, recv_experts, recv_weights, recv_source, send_head, worst,
    ):
        smem = cuda.shared.array(0, int32, 128)
        bars = cuda.shared.array(0, uint64, 128)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        warp = int32(thread >> 5)
        channels = int32((cuda.gridDim.x >> 1) * warps)
        channel = int32((block >> 1) * warps + warp)
        if thread == 0:
            for w in range(warps):
                mbarrier_init(bars, bar + w, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if ld_volatile_s32(state, LOST) != 0:
            pass  # the counts are not to be trusted
        elif block & 1:
            receive(
                smem, bars, channel, channels, rank, mine, peers, state, status, patience, experts_per_rank,
                rank_prefix, recv_channel_prefix, recv_x, recv_scales, recv_experts, recv_weights, recv_source,
            )
            if topk > 0:  # of rows beyond what came, no expert is here
                came = int64(rank_prefix[(ranks - 1) * ranks + rank]) * topk
                at = int64(came + channel * 32 + (thread & 31))
                while at < int64(worst) * topk:
                    recv_experts[at] = int64(-1)
                    at += int64(channels * 32)
        else:
            before = rank_prefix[int32((rank - 1) * ranks + rank)] if rank > 0 else int32(0)
            if channel > 0:
                before = int32(before + channel_prefix[int32(rank * channels + channel - 1)])
            send(
                smem, bars, channel, channels, rank, mine, peers, state, status, patience, x, scales, token_stride,
                scale_stride, experts, weights, is_token_in_rank, tokens, experts_per_rank, before, recv_x, recv_scales,
                recv_experts, recv_weights, recv_source, send_head,
            )

    return dispatch


SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32*", "int32*", "int64", "int64", "int64*"),
    *("int32*", "uint8*", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32*", "int64*", "int32*"),
    *("int32*", "int32*", "int64"),
)
