"""The document's dispatch: rows travel through rings in the receivers' buffers, and from there to their places.

Blocks come in pairs, a pair for a channel: the even one sends the channel's tokens, the odd one receives. A few warps
of a block serve one rank. The sender asks for room for a chunk, fills the slots that follow its **tail**, and publishes
the tail; the receiver copies what lies between its **head** and the tail to where it belongs, and publishes the head.

Where this differs from DeepEP, it mends: flags are released and acquired where DeepEP polls by ``volatile``; rings are
read by ordinary loads, not by those for memory that nobody writes; the warps of a rank meet once after they have read
which rows will come, so that they give up together or not at all.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.course.articles.deepep.buffer_layout import dispatch_regions
from moe_numba.course.articles.deepep.polling import (
    FULL,
    OFFSETS,
    ROOM,
    ROWS,
    at_least,
    make_channel_range,
    make_copy_row,
    make_wait,
    other_than,
)
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_relaxed_sys_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import ld_global_s32x4, ld_nc_na_s32x4, pointer_from_address
from moe_numba.ptx.warpgroup import bar_sync

FAULTS = ("plain tail", "tail first", "no barrier", "relaxed poll", "early head")


@cache
def make_send_row(constants):
    """``send_row(...)``: a warp puts a token and what goes with it into a slot, which counts over all queues."""
    topk, scales, row_words = constants.topk, constants.scales, constants.row_bytes // 4
    experts = constants.experts // constants.ranks  # of a rank
    at = dispatch_regions(constants)
    x_at, src_idx_at, topk_idx_at = at.x // 4, at.src_idx // 4, at.topk_idx // 8  # in elements
    weights_at, scales_at = at.topk_weights // 4, at.scales // 4
    copy_row = make_copy_row(constants.row_bytes, ld_nc_na_s32x4)

    @cuda.jit(device=True)
    def send_row(
        words,
        indices,
        floats,
        slot,
        x,
        x_scales,
        token_stride,
        column_stride,
        topk_idx,
        topk_weights,
        token,
        peer,
        lane,
    ):
        copy_row(words, x_at + slot * row_words, x, token * row_words, lane)
        if lane == 0:
            words[src_idx_at + slot] = int32(token)
        if lane < topk:
            expert = topk_idx[token * topk + lane] - int64(peer * experts)
            is_there = expert >= 0 and expert < experts
            indices[topk_idx_at + slot * topk + lane] = expert if is_there else int64(-1)
            weight = topk_weights[token * topk + lane]
            floats[weights_at + slot * topk + lane] = weight if is_there else float32(0)
        for i in range(lane, scales, 32):
            floats[scales_at + slot * scales + i] = x_scales[token * token_stride + i * column_stride]

    return send_row


@cache
def make_send(constants):
    """``send(...)``: the even block of a channel. A rank's warps take tokens in turn, and all walk past all of them."""
    ranks, ring, chunk, warps = constants.ranks, constants.ring, constants.chunk, constants.warps
    channels, fault = constants.channels, constants.fault
    at = dispatch_regions(constants)
    start_at, end_at, head_at, tail_at = at.start // 4, at.end // 4, at.head // 4, at.tail // 4
    channel_range, send_row = make_channel_range(channels), make_send_row(constants)
    wait_room = make_wait(ld_acquire_sys_s32, at_least, ROOM)

    @cuda.jit(device=True)
    def send(
        given_up,
        x,
        x_scales,
        token_stride,
        column_stride,
        topk_idx,
        topk_weights,
        is_token_in_rank,
        channel_prefix,
        send_head,
        num_tokens,
        channel,
        peer,
        warp,
        lane,
        peers,
        rank,
        patience,
        status,
    ):
        address, queue = peers[peer], int64(channel * ranks + rank)
        words = pointer_from_address(address, send_head)
        indices, floats = pointer_from_address(address, topk_idx), pointer_from_address(address, topk_weights)
        leads = warp == 0 and lane == 0
        if leads:  # 0 stands for "not written yet", so n is sent as -n - 1
            before = channel_prefix[peer * channels + channel - 1] if channel > 0 else int32(0)
            st_relaxed_sys_s32(words, start_at + queue, int32(-before - 1))
            st_relaxed_sys_s32(words, end_at + queue, int32(-channel_prefix[peer * channels + channel] - 1))
        token, last = channel_range(num_tokens, channel)
        tail = int32(0)
        while token < last:
            if lane == 0:
                limit = int32(tail + chunk - ring)
                there, _ = wait_room(words, head_at + queue, limit, tail, rank, channel, peer, patience, status)
                if not there:
                    given_up[peer] = int32(1)
            cuda.syncwarp()
            has_room, sent = given_up[peer] == 0, int32(0)
            while sent < chunk and token < last:
                chosen = is_token_in_rank[token * ranks + peer] != 0
                if int32(uint32(token) % uint32(warps)) == warp and lane == 0:
                    send_head[token * ranks + peer] = tail if chosen else int32(-1)
                if chosen:
                    slot = queue * ring + int64(uint32(tail) % uint32(ring))
                    tail = int32(tail + 1)
                    if fault == "tail first" and leads:
                        st_release_sys_s32(words, tail_at + queue, tail)
                    if int32(uint32(tail) % uint32(warps)) == warp and has_room:
                        send_row(
                            words,
                            indices,
                            floats,
                            slot,
                            x,
                            x_scales,
                            token_stride,
                            column_stride,
                            topk_idx,
                            topk_weights,
                            token,
                            peer,
                            lane,
                        )
                    sent = int32(sent + 1)
                token += 1
            if fault != "no barrier":
                bar_sync(1 + peer, 32 * warps)
            if leads and given_up[peer] == 0:  # of any warp: then rows are missing, and nobody must read them
                if fault == "plain tail":
                    words[tail_at + queue] = tail
                else:
                    st_release_sys_s32(words, tail_at + queue, tail)

    return send


@cache
def make_receive_rows(constants):
    """``receive_rows(...)``: the warps of a rank copy what lies from head on to its final place."""
    ring, topk, scales, row_words = constants.ring, constants.topk, constants.scales, constants.row_bytes // 4
    warps, threads = constants.warps, 32 * constants.warps
    at = dispatch_regions(constants)
    x_at, src_idx_at, topk_idx_at = at.x // 4, at.src_idx // 4, at.topk_idx // 8  # in elements
    weights_at, scales_at = at.topk_weights // 4, at.scales // 4
    copy_row = make_copy_row(constants.row_bytes, ld_global_s32x4)

    @cuda.jit(device=True)
    def receive_rows(
        words,
        indices,
        floats,
        queue,
        head,
        rows,
        to,
        recv_x,
        recv_scales,
        recv_topk_idx,
        recv_topk_weights,
        recv_src_idx,
        warp,
        lane,
    ):
        first, thread = queue * ring, 32 * warp + lane
        for i in range(warp, rows, warps):
            slot = first + int64(uint32(head + i) % uint32(ring))
            copy_row(recv_x, (to + i) * row_words, words, x_at + slot * row_words, lane)
        for i in range(thread, rows, threads):
            slot = first + int64(uint32(head + i) % uint32(ring))
            recv_src_idx[to + i] = words[src_idx_at + slot]
        if topk > 0:
            for i in range(thread, rows * topk, threads):
                row, k = i // topk, i % topk
                slot = first + int64(uint32(head + row) % uint32(ring))
                recv_topk_idx[(to + row) * topk + k] = indices[topk_idx_at + slot * topk + k]
                recv_topk_weights[(to + row) * topk + k] = floats[weights_at + slot * topk + k]
        if scales > 0:
            for i in range(thread, rows * scales, threads):
                row, k = i // scales, i % scales
                slot = first + int64(uint32(head + row) % uint32(ring))
                recv_scales[(to + row) * scales + k] = floats[scales_at + slot * scales + k]

    return receive_rows


@cache
def make_receive(constants):
    """``receive(...)``: the odd block of a channel. One thread of a rank's polls the tail, for all of them."""
    ranks, channels, warps, fault = constants.ranks, constants.channels, constants.warps, constants.fault
    at = dispatch_regions(constants)
    start_at, end_at, head_at, tail_at = at.start // 4, at.end // 4, at.head // 4, at.tail // 4
    receive_rows = make_receive_rows(constants)
    wait_offset = make_wait(ld_acquire_sys_s32, other_than, OFFSETS)
    wait_rows = make_wait(ld_relaxed_sys_s32 if fault == "relaxed poll" else ld_acquire_sys_s32, other_than, ROWS)

    @cuda.jit(device=True)
    def receive(
        given_up,
        tails,
        topk_idx,
        topk_weights,
        recv_x,
        recv_scales,
        recv_topk_idx,
        recv_topk_weights,
        recv_src_idx,
        recv_channel_prefix,
        channel,
        peer,
        warp,
        lane,
        peers,
        rank,
        patience,
        status,
    ):
        address, queue = peers[rank], int64(channel * ranks + peer)
        words = pointer_from_address(address, recv_src_idx)
        indices, floats = pointer_from_address(address, topk_idx), pointer_from_address(address, topk_weights)
        start = end = int32(0)
        if lane == 0:
            there, start = wait_offset(words, start_at + queue, 0, 0, rank, channel, peer, patience, status)
            if there:
                there, end = wait_offset(words, end_at + queue, 0, 0, rank, channel, peer, patience, status)
            if not there:
                given_up[peer] = int32(1)
        bar_sync(1 + peer, 32 * warps)
        start, end = cuda.shfl_sync(FULL, start, 0), cuda.shfl_sync(FULL, end, 0)
        rows_left, to, head = int32(0), int64(0), int32(0)
        if given_up[peer] == 0:
            rows_left, to = int32(start - end), int64(-start - 1)
            if warp == 0 and lane == 0:
                recv_channel_prefix[peer * channels + channel] = int32(to)
            if peer > 0:
                to += words[(peer - 1) * ranks + rank]  # of the prefix matrix: what comes from the ranks before
        while rows_left > 0:
            if warp == 0 and lane == 0:
                there, tail = wait_rows(words, tail_at + queue, head, head, rank, channel, peer, patience, status)
                tails[peer] = tail if there else int32(-1)
            bar_sync(1 + peer, 32 * warps)
            tail = tails[peer]
            rows = int32(tail - head) if tail >= 0 else rows_left
            if fault == "early head" and warp == 0 and lane == 0 and tail >= 0:
                st_release_sys_s32(words, head_at + queue, tail)
            if tail >= 0:
                receive_rows(
                    words,
                    indices,
                    floats,
                    queue,
                    head,
                    rows,
                    to,
                    recv_x,
                    recv_scales,
                    recv_topk_idx,
                    recv_topk_weights,
                    recv_src_idx,
                    warp,
                    lane,
                )
            head, to, rows_left = int32(head + rows), to + rows, int32(rows_left - rows)
            bar_sync(1 + peer, 32 * warps)
            if warp == warps - 1 and lane == 0 and tail >= 0 and fault != "early head":
                st_release_sys_s32(words, head_at + queue, head)

    return receive


@cache
def make_dispatch(constants):
    """The kernel, for ``2 * channels`` blocks of ``constants.threads``, all resident at once.

    Rows are given as int32. ``x_scales``, read in strides of elements, and ``recv_scales`` are used if there are
    scales, the four tensors of experts if topk is not 0. Beside what was received it writes what a handle keeps:
    ``recv_channel_prefix`` [ranks, channels], the rows from a rank before each channel's, and ``send_head``
    [num_tokens, ranks], where in its queue a token went, or -1.
    """
    ranks, warps = constants.ranks, constants.warps
    send, receive = make_send(constants), make_receive(constants)

    @cuda.jit
    def dispatch(
        x,
        x_scales,
        token_stride,
        column_stride,
        topk_idx,
        topk_weights,
        is_token_in_rank,
        channel_prefix,
        recv_x,
        recv_scales,
        recv_topk_idx,
        recv_topk_weights,
        recv_src_idx,
        recv_channel_prefix,
        send_head,
        num_tokens,
        peers,
        rank,
        patience,
        status,
    ):
        given_up, tails = cuda.shared.array(ranks, int32), cuda.shared.array(ranks, int32)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        if thread < ranks:
            given_up[thread] = int32(0)
        cuda.syncthreads()
        channel, lane = block // 2, thread % 32
        peer, warp = thread // (32 * warps), thread // 32 % warps
        if block % 2 == 0:
            send(
                given_up,
                x,
                x_scales,
                token_stride,
                column_stride,
                topk_idx,
                topk_weights,
                is_token_in_rank,
                channel_prefix,
                send_head,
                num_tokens,
                channel,
                peer,
                warp,
                lane,
                peers,
                rank,
                patience,
                status,
            )
        else:
            receive(
                given_up,
                tails,
                topk_idx,
                topk_weights,
                recv_x,
                recv_scales,
                recv_topk_idx,
                recv_topk_weights,
                recv_src_idx,
                recv_channel_prefix,
                channel,
                peer,
                warp,
                lane,
                peers,
                rank,
                patience,
                status,
            )

    return dispatch
