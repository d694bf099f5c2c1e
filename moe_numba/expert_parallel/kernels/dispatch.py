"""The dispatch kernel: rows travel through rings to the ranks that hold their experts.

A warp has a channel. The first blocks send, the others receive; a sending warp's tokens are neighbours, and their rows
arrive in a warp that has the same channel, on each rank. The document has a block for a channel, a group of warps for
each rank in it, and each group reads the token anew, in words. Here one thread asks for the whole row once (a bulk
copy, to shared memory), what belongs to the row is put behind it, and then a lane for each rank sends the **record** on
its way in one piece. Many warps wait at the same time, so that neither a round trip nor a fence is seen.

Where the link is full, multiprocessors do not all get the same part of it. So there are more channels than warps then,
and who is done takes the next channel that nobody has begun with. Warps take them in ascending order. So the lowest
channel that is not done is with a warp on every rank, which waits for no other one: ranks cannot wait for one another
in a circle.

What stays on its rank takes no ring: it goes from shared memory to where it belongs. A multiprocessor writes some
50 GB/s and no more, whether to its own memory or to another GPU's. So receivers carry half of these rows, when nothing
has come.
"""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.kernels.buffer_layout import LOST, lines, regions, sent, taken
from moe_numba.expert_parallel.kernels.channels import (
    ask_no_more,
    copied,
    copied_but_last,
    first_channel,
    first_token,
    make_fetch,
    next_channel_when_told,
    prepare,
    rows_before,
    rows_of_channel,
)
from moe_numba.expert_parallel.kernels.progress import FULL, leave_word, make_publish
from moe_numba.expert_parallel.kernels.timeout import ROWS, SPACE, since, warp_gives_up
from moe_numba.expert_parallel.kernels.token_slot import make_fill, make_fill_up, make_keep
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_cta_shared_s32
from moe_numba.ptx.cp_async import bulk_commit_group, bulk_store
from moe_numba.ptx.fence import fence_proxy_async
from moe_numba.ptx.memory import griddepcontrol_wait, pointer_from_address


@cache
def make_send(shape):
    """``send``: what a warp of the first blocks does."""
    ranks, warps, slots, record = shape.num_ranks, shape.warps, shape.slots, shape.record
    progress_at, told_at, done_at = shape.progress, shape.told, shape.done
    head_at, sent_at = regions(ranks).head(False), sent(False)
    stride, record_bytes, stage_words = record.stride, 4 * record.words, lines(record.words)
    fill, keep, (_, land) = make_fill(shape), make_keep(record), make_fetch(shape.bar)

    @cuda.jit(device=True)
    def send(
        smem,
        bars,
        channel,
        channels,
        blocks,
        rank,
        rings_at,
        ring_words,
        mine,
        peers,
        state,
        status,
        patience,
        x,
        scales,
        token_stride,
        scale_stride,
        experts,
        weights,
        is_token_in_rank,
        tokens,
        experts_per_rank,
        rank_prefix,
        channel_prefix,
        recv_x,
        recv_scales,
        recv_experts,
        recv_weights,
        recv_source,
        send_head,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        to, here = lane if lane < ranks else int32(0), lane < ranks and lane != rank
        theirs = pointer_from_address(peers[to], mine)
        word, told = int32(progress_at + warp * ranks + lane), int32(told_at + warp * ranks + lane)
        stage, parity, follows = int32(warp * stage_words), uint32(0), True
        while follows and channel < channels:
            t, end = first_token(channel, channels, tokens), first_token(channel + 1, channels, tokens)
            follows = end < tokens
            if not follows:
                ask_no_more(smem, state, done_at, warps, lane)
            before = rows_before(rank_prefix, channel_prefix, rank, rank, ranks, channel, channels)
            first = uint32(state[sent_at + channel * ranks + to])
            put, kept = first, int32(0)
            head = uint32(first - uint32(slots))  # how much has been taken out is asked for before the first row
            room = uint32(1)  # rows of the last launch may have lain otherwise: the first waits until all are gone
            goes = lane < ranks and t < end and is_token_in_rank[int64(t) * ranks + to] != 0
            went = False
            while t < end:
                # Space in all the rings that this row goes to.
                start, waits = uint64(0), int32(1)
                while waits != 0:
                    full = here and goes and uint32(put - head) >= room
                    if full:
                        head = uint32(ld_acquire_sys_s32(mine, head_at + channel * ranks + to))
                        fence_proxy_async()  # this lane's copies come after what it has just seen
                        full = uint32(put - head) >= room
                    waits = int32(1 if cuda.any_sync(FULL, full) else 0)
                    if waits != 0:
                        if here and start == uint64(0):  # who waits has told all
                            copied()
                            leave_word(bars, word, channel, put)
                            went = False
                        start = since(start)
                        if warp_gives_up(start, patience, full, state, status, SPACE, rank, channel, lane, head, put):
                            waits, follows = int32(0), False
                            end = t
                if t == end:
                    break
                fill(smem, bars, warp, lane, stage, t, x, scales, token_stride, scale_stride, experts, weights)
                if lane < ranks:
                    send_head[int64(t) * ranks + to] = int32(uint32(put - first)) if goes else int32(-1)
                next_goes = lane < ranks and t + 1 < end and is_token_in_rank[int64(t + 1) * ranks + to] != 0
                # Meanwhile what was sent before has arrived, but perhaps not the last row.
                if here and went:
                    copied_but_last()
                    leave_word(bars, word, channel, put - uint32(1))
                elif here:
                    copied()
                    leave_word(bars, word, channel, put)
                parity = land(bars, warp, parity)
                went = here and goes
                if went:
                    slot = int64(uint32(put - first) % uint32(slots)) * stride
                    ring = rings_at + int64(channel * ranks + rank) * ring_words
                    bulk_store(theirs, ring + slot, smem, stage, record_bytes)
                    bulk_commit_group()
                    room = uint32(slots)
                if cuda.shfl_sync(FULL, int32(1 if goes else 0), rank) != 0:
                    if kept & 1 == 0:
                        keep(
                            smem,
                            stage,
                            lane,
                            rank,
                            int64(before + kept),
                            rank,
                            experts_per_rank,
                            recv_x,
                            recv_scales,
                            recv_experts,
                            recv_weights,
                            recv_source,
                        )
                    kept = int32(kept + 1)
                if goes:
                    put = uint32(put + uint32(1))
                goes = next_goes
                t = int32(t + 1)
            if here:
                copied()
                leave_word(bars, word, channel, put)
                state[sent_at + channel * ranks + to] = int32(put)
            if follows:
                channel = next_channel_when_told(state, False, blocks, warps, bars, word, told, here, lane)
        if follows:
            ask_no_more(smem, state, done_at, warps, lane)
        copied()  # what stayed here

    return send


@cache
def make_receive(shape):
    """``receive``: what a warp of the other blocks does."""
    ranks, warps, slots, record = shape.num_ranks, shape.warps, shape.slots, shape.record
    progress_at, told_at, done_at = shape.progress, shape.told, shape.done
    tail_at, taken_at = regions(ranks).tail(False), taken(False)
    stride, record_bytes, stage_words = record.stride, 4 * record.words, lines(record.words)
    fill, keep, (fetch, land) = make_fill(shape), make_keep(record), make_fetch(shape.bar)

    @cuda.jit(device=True)
    def receive(
        smem,
        bars,
        channel,
        channels,
        blocks,
        rank,
        rings_at,
        ring_words,
        mine,
        state,
        status,
        patience,
        x,
        scales,
        token_stride,
        scale_stride,
        experts,
        weights,
        is_token_in_rank,
        tokens,
        experts_per_rank,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        recv_x,
        recv_scales,
        recv_experts,
        recv_weights,
        recv_source,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        source, here = lane if lane < ranks else int32(0), lane < ranks and lane != rank
        word, told = int32(progress_at + warp * ranks + lane), int32(told_at + warp * ranks + lane)
        stage, parity, follows = int32(warp * stage_words), uint32(0), True
        while follows and channel < channels:
            t, end = first_token(channel, channels, tokens), first_token(channel + 1, channels, tokens)
            left, row, after = rows_of_channel(rank_prefix, recv_channel_prefix, source, rank, ranks, channel, channels)
            follows = end < tokens or cuda.any_sync(FULL, here and after > 0) != 0
            if not follows:
                ask_no_more(smem, state, done_at, warps, lane)
            before = rows_before(rank_prefix, channel_prefix, rank, rank, ranks, channel, channels)
            first = uint32(state[taken_at + channel * ranks + source])
            got, left, kept = first, left if here else int32(0), int32(0)
            start = uint64(0)
            while cuda.any_sync(FULL, left > 0) or t < end:
                come = int32(0)
                if left > 0:
                    come = int32(uint32(ld_acquire_sys_s32(mine, tail_at + channel * ranks + source)) - got)
                mask = uint32(cuda.ballot_sync(FULL, come > 0))
                if mask != uint32(0):
                    fence_proxy_async()  # copies see what other ranks' copies wrote, as this thread does since then
                    for s in range(ranks):
                        if mask >> uint32(s) & uint32(1):
                            count, to_row = cuda.shfl_sync(FULL, come, s), cuda.shfl_sync(FULL, row, s)
                            base = uint32(cuda.shfl_sync(FULL, int32(uint32(got - first)), s))
                            for i in range(count):
                                slot = int64(uint32(base + uint32(i)) % uint32(slots)) * stride
                                ring = rings_at + int64(channel * ranks + s) * ring_words
                                fetch(smem, bars, warp, lane, stage, mine, ring + slot, record_bytes)
                                parity = land(bars, warp, parity)
                                keep(
                                    smem,
                                    stage,
                                    lane,
                                    0,
                                    int64(to_row + i),
                                    rank,
                                    experts_per_rank,
                                    recv_x,
                                    recv_scales,
                                    recv_experts,
                                    recv_weights,
                                    recv_source,
                                )
                                cuda.syncwarp()  # all have read what the next row will overwrite
                    if come > 0:
                        got, left, row = uint32(got + uint32(come)), int32(left - come), int32(row + come)
                        leave_word(bars, word, channel, got)
                    start = uint64(0)
                elif t < end:  # nothing has come: every second of the rows that stay here
                    if is_token_in_rank[int64(t) * ranks + rank] != 0:
                        if kept & 1:
                            fill(
                                smem,
                                bars,
                                warp,
                                lane,
                                stage,
                                t,
                                x,
                                scales,
                                token_stride,
                                scale_stride,
                                experts,
                                weights,
                            )
                            parity = land(bars, warp, parity)
                            keep(
                                smem,
                                stage,
                                lane,
                                0,
                                int64(before + kept),
                                rank,
                                experts_per_rank,
                                recv_x,
                                recv_scales,
                                recv_experts,
                                recv_weights,
                                recv_source,
                            )
                            cuda.syncwarp()
                        kept = int32(kept + 1)
                    t = int32(t + 1)
                else:
                    start, tail = since(start), uint32(got + uint32(come))
                    if warp_gives_up(start, patience, left > 0, state, status, ROWS, rank, channel, lane, got, tail):
                        follows = False
                        break
            if here:
                state[taken_at + channel * ranks + source] = int32(got)
            if follows:
                channel = next_channel_when_told(state, True, blocks, warps, bars, word, told, here, lane)
        if follows:
            ask_no_more(smem, state, done_at, warps, lane)
        copied()

    return receive


@cache
def make_dispatch(shape):
    """The kernel, for blocks of ``shape.threads`` threads, of which the first ``senders`` send, half at most."""
    ranks, warps, bar = shape.num_ranks, shape.warps, shape.bar
    progress_at, told_at, done_at = shape.progress, shape.told, shape.done
    tail_at, head_at = regions(ranks).tail(False), regions(ranks).head(False)
    send, receive, publish = make_send(shape), make_receive(shape), make_publish(shape)
    fill_up = make_fill_up(shape.record)

    @cuda.jit
    def dispatch(
        mine,
        peers,
        state,
        status,
        patience,
        rank,
        senders,
        channels,
        rings_at,
        ring_words,
        x,
        scales,
        token_stride,
        scale_stride,
        experts,
        weights,
        is_token_in_rank,
        tokens,
        experts_per_rank,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        recv_x,
        recv_scales,
        recv_experts,
        recv_weights,
        recv_source,
        send_head,
        worst,
    ):
        smem = cuda.shared.array(0, int32, 128)
        bars = cuda.shared.array(0, uint64, 128)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        receives, blocks, channel = first_channel(senders, warp)
        griddepcontrol_wait()
        prepare(smem, bars, bar, progress_at, told_at, done_at, warps, ranks)
        if ld_volatile_s32(state, LOST) != 0:
            pass  # the counts are not to be trusted
        elif warp == warps:
            publish(smem, bars, lane, rank, head_at if receives else tail_at, mine, peers)
        else:
            if receives:
                receive(
                    smem,
                    bars,
                    channel,
                    channels,
                    blocks,
                    rank,
                    rings_at,
                    ring_words,
                    mine,
                    state,
                    status,
                    patience,
                    x,
                    scales,
                    token_stride,
                    scale_stride,
                    experts,
                    weights,
                    is_token_in_rank,
                    tokens,
                    experts_per_rank,
                    rank_prefix,
                    channel_prefix,
                    recv_channel_prefix,
                    recv_x,
                    recv_scales,
                    recv_experts,
                    recv_weights,
                    recv_source,
                )
            else:
                send(
                    smem,
                    bars,
                    channel,
                    channels,
                    blocks,
                    rank,
                    rings_at,
                    ring_words,
                    mine,
                    peers,
                    state,
                    status,
                    patience,
                    x,
                    scales,
                    token_stride,
                    scale_stride,
                    experts,
                    weights,
                    is_token_in_rank,
                    tokens,
                    experts_per_rank,
                    rank_prefix,
                    channel_prefix,
                    recv_x,
                    recv_scales,
                    recv_experts,
                    recv_weights,
                    recv_source,
                    send_head,
                )
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(smem, done_at + warp, 1)
            if receives:
                nth = warp * blocks + cuda.blockIdx.x - senders
                fill_up(recv_experts, rank_prefix, rank, ranks, worst, nth, blocks * warps, lane)

    return dispatch


SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32", "int32", "int64", "int32"),
    *("int32*", "int32*", "int64", "int64", "int64*"),
    *("int32*", "uint8*", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32*", "int64*", "int32*"),
    *("int32*", "int32*", "int64"),
)
