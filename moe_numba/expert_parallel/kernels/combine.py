"""The combine kernel: rows travel back through rings, and a token's rows are added up on the token's own rank.

As in dispatch warps have channels, one after the other, and the first blocks send. A sending warp serves its channel's
rings by turns, and passes over one that is full: if it waited there, ranks could wait for one another in a circle. A
receiving warp takes its tokens in order, waits until a token's rows are there from all ranks that got it, and adds them
up in the order of the ranks, in float32, rounded once: the same bits at every call. A rank's own rows take no ring.
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
    read,
    rows_before,
    rows_of_channel,
)
from moe_numba.expert_parallel.kernels.progress import FULL, leave_word, make_publish
from moe_numba.expert_parallel.kernels.reduce import make_add_up, make_add_weights
from moe_numba.expert_parallel.kernels.timeout import COMBINE_ROWS, COMBINE_SPACE, since, warp_gives_up
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_cta_shared_s32
from moe_numba.ptx.cp_async import bulk_commit_group, bulk_store
from moe_numba.ptx.fence import fence_proxy_async, fence_proxy_async_shared
from moe_numba.ptx.memory import griddepcontrol_wait, pointer_from_address


@cache
def make_send(shape):
    """``send``: what a warp of the first blocks does."""
    ranks, warps, slots, record = shape.num_ranks, shape.warps, shape.slots, shape.record
    progress_at, told_at, done_at, (fetch, land) = shape.progress, shape.told, shape.done, make_fetch(shape.bar)
    head_at, sent_at = regions(ranks).head(True), sent(True)
    row_words, topk, stride, stage_words = record.row, record.scales, record.stride, lines(record.words)
    row_bytes, record_bytes, weights_at = 4 * record.row, 4 * record.words, record.row

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
        weights,
        rank_prefix,
        recv_channel_prefix,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        to, here = lane if lane < ranks else int32(0), lane < ranks and lane != rank
        theirs = pointer_from_address(peers[to], mine)
        word, told = int32(progress_at + warp * ranks + lane), int32(told_at + warp * ranks + lane)
        stage, parity, follows = int32(warp * stage_words), uint32(0), True
        while follows and channel < channels:
            left, row, after = rows_of_channel(rank_prefix, recv_channel_prefix, to, rank, ranks, channel, channels)
            follows = cuda.any_sync(FULL, here and after > 0) != 0
            if not follows:
                ask_no_more(smem, state, done_at, warps, lane)
            first = uint32(state[sent_at + channel * ranks + to])
            put, head = first, uint32(first - uint32(slots))  # how much was taken out is asked for before the first row
            room = uint32(1)  # rows of the last launch may have lain otherwise: the first waits until all are gone
            left, start = left if here else int32(0), uint64(0)
            while cuda.any_sync(FULL, left > 0):
                if left > 0 and uint32(put - head) >= room:
                    head = uint32(ld_acquire_sys_s32(mine, head_at + channel * ranks + to))
                    fence_proxy_async()  # this lane's copies come after what it has just seen
                goes = left > 0 and uint32(put - head) < room
                mask = uint32(cuda.ballot_sync(FULL, goes))
                for d in range(ranks):  # a row for each rank that has space
                    if mask >> uint32(d) & uint32(1):
                        from_row = int64(cuda.shfl_sync(FULL, row, d))
                        fetch(smem, bars, warp, lane, stage, x, from_row * row_words, row_bytes)
                        for i in range(lane, topk, 32):
                            smem[int32(stage + weights_at + i)] = weights[from_row * topk + i]
                        fence_proxy_async_shared()
                        parity = land(bars, warp, parity)
                        if lane == d:
                            slot = int64(uint32(put - first) % uint32(slots)) * stride
                            ring = rings_at + int64(channel * ranks + rank) * ring_words
                            bulk_store(theirs, ring + slot, smem, stage, record_bytes)
                            bulk_commit_group()
                            room = uint32(slots)
                # What was sent before has arrived, but perhaps not the last row.
                if goes:
                    copied_but_last()
                elif here:
                    copied()
                if here:
                    leave_word(bars, word, channel, put)
                if goes:
                    put, left, row = uint32(put + uint32(1)), int32(left - 1), int32(row + 1)
                cuda.syncwarp()
                if mask != uint32(0):
                    start = uint64(0)
                else:
                    start, full = since(start), left > 0
                    if warp_gives_up(
                        start, patience, full, state, status, COMBINE_SPACE, rank, channel, lane, head, put
                    ):
                        follows = False
                        break
            if here:
                copied()
                leave_word(bars, word, channel, put)
                state[sent_at + channel * ranks + to] = int32(put)
            if follows:
                channel = next_channel_when_told(state, False, blocks, warps, bars, word, told, here, lane)
        if follows:
            ask_no_more(smem, state, done_at, warps, lane)

    return send


@cache
def make_receive(shape, biases):
    """``receive``: what a warp of the other blocks does."""
    ranks, warps, slots, row_words = shape.num_ranks, shape.warps, shape.slots, shape.record.row
    progress_at, told_at, done_at, (fetch, land) = shape.progress, shape.told, shape.done, make_fetch(shape.bar)
    tail_at, taken_at = regions(ranks).tail(True), taken(True)
    row_bytes, stride, stage_words = 4 * row_words, shape.record.stride, lines(shape.record.words)
    add_up, add_weights = make_add_up(shape, biases), make_add_weights(shape)

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
        weights,
        tokens,
        rank_prefix,
        channel_prefix,
        send_head,
        bias_0,
        bias_1,
        out,
        out_weights,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        source, here = lane if lane < ranks else int32(0), lane < ranks and lane != rank
        word, told = int32(progress_at + warp * ranks + lane), int32(told_at + warp * ranks + lane)
        stage, parity, follows = int32(warp * stage_words), uint32(0), True
        while follows and channel < channels:
            t, end = first_token(channel, channels, tokens), first_token(channel + 1, channels, tokens)
            follows = end < tokens
            if not follows:
                ask_no_more(smem, state, done_at, warps, lane)
            before = rows_before(rank_prefix, channel_prefix, rank, rank, ranks, channel, channels)
            first = uint32(state[taken_at + channel * ranks + source])
            got, tail, ring = first, first, rings_at + int64(channel * ranks + lane) * ring_words
            upcoming = send_head[int64(t) * ranks + source] if lane < ranks and t < end else int32(-1)
            while t < end:
                nth = upcoming
                own = cuda.shfl_sync(FULL, nth, rank)
                own_row = int64(before + own)
                if own >= 0:
                    fetch(smem, bars, warp, lane, stage, x, own_row * row_words, row_bytes)
                else:
                    read()  # the last sum is on its way
                wanted = uint32(first + uint32(nth))
                start, waits, ready = uint64(0), int32(1), int32(1)
                while waits != 0:
                    missing = here and nth >= 0 and int32(uint32(tail - wanted)) <= 0
                    if missing:
                        tail = uint32(ld_acquire_sys_s32(mine, tail_at + channel * ranks + source))
                        missing = int32(uint32(tail - wanted)) <= 0
                    waits = int32(1 if cuda.any_sync(FULL, missing) else 0)
                    if waits != 0:
                        start = since(start)
                        if warp_gives_up(
                            start, patience, missing, state, status, COMBINE_ROWS, rank, channel, lane, wanted, tail
                        ):
                            waits = ready = int32(0)
                upcoming = send_head[int64(t + 1) * ranks + source] if lane < ranks and t + 1 < end else int32(-1)
                if own >= 0:
                    parity = land(bars, warp, parity)
                if ready == 0:
                    follows = False
                    break
                cuda.syncwarp()  # what one lane has acquired all may read
                mask, to = uint32(cuda.ballot_sync(FULL, nth >= 0)), int64(t) * row_words
                begins = ring + int64(uint32(nth) % uint32(slots)) * stride
                add_up(smem, stage, mine, begins, mask, rank, lane, bias_0, bias_1, to)
                add_weights(mine, begins, mask, rank, lane, weights, own_row, out_weights, t)
                fence_proxy_async_shared()
                cuda.syncwarp()  # all have read the rows, and the sum is whole
                if lane == 0:
                    bulk_store(out, to, smem, stage, row_bytes)
                    bulk_commit_group()
                if here and nth >= 0:
                    got = uint32(wanted + uint32(1))
                    leave_word(bars, word, channel, got)
                t = int32(t + 1)
            if here:
                state[taken_at + channel * ranks + source] = int32(got)
            if follows:
                channel = next_channel_when_told(state, True, blocks, warps, bars, word, told, here, lane)
        if follows:
            ask_no_more(smem, state, done_at, warps, lane)
        copied()

    return receive


@cache
def make_combine(shape, biases):
    """The kernel, for blocks of ``shape.threads`` threads; with so many biases, 0 to 2.

    The first ``senders`` blocks send, half at most.
    """
    ranks, warps, bar = shape.num_ranks, shape.warps, shape.bar
    progress_at, told_at, done_at = shape.progress, shape.told, shape.done
    tail_at, head_at = regions(ranks).tail(True), regions(ranks).head(True)
    send, receive, publish = make_send(shape), make_receive(shape, biases), make_publish(shape)

    @cuda.jit
    def combine(
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
        weights,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        send_head,
        tokens,
        bias_0,
        bias_1,
        out,
        out_weights,
    ):
        smem = cuda.shared.array(0, int32, 128)
        bars = cuda.shared.array(0, uint64, 128)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        receives, blocks, channel = first_channel(senders, warp)
        griddepcontrol_wait()
        prepare(smem, bars, bar, progress_at, told_at, done_at, warps, ranks)
        if ld_volatile_s32(state, LOST) != 0:
            pass  # something went wrong before
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
                    weights,
                    tokens,
                    rank_prefix,
                    channel_prefix,
                    send_head,
                    bias_0,
                    bias_1,
                    out,
                    out_weights,
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
                    weights,
                    rank_prefix,
                    recv_channel_prefix,
                )
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(smem, done_at + warp, 1)

    return combine


SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32", "int32", "int64", "int32"),
    *("int32*", "int32*", "int32*"),
    *("int32*", "int32*", "int32*", "int32", "int32*", "int32*", "int32*", "float32*"),
)
