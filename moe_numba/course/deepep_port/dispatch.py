"""Our Numba port of DeepEP's intranode dispatch kernel: rows pass through rings in the receivers' buffers.

CTAs form pairs, one pair per channel: the even CTA sends the channel's tokens, the odd one receives. A group of warps
in a CTA serves one rank. The sender waits for space for a chunk, fills the slots from its **tail** on, and publishes
the tail. The receiver copies the rows between its **head** and the tail to their final place, and publishes the head.

Differences from DeepEP: flags use release and acquire where DeepEP polls with ``volatile`` loads; rings are read with
ordinary loads instead of non-coherent ones (``ld.global.nc``); and the warps of a rank synchronise once after reading
which rows will arrive, so that they time out together or not at all.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.course.deepep_port.buffer_layout import dispatch_offsets
from moe_numba.course.deepep_port.polling import (
    OFFSETS,
    ROWS,
    SPACE,
    WaitContext,
    at_least,
    make_channel_range,
    make_copy_row,
    make_wait,
    other_than,
)
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_relaxed_sys_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.intrinsic import simulated
from moe_numba.ptx.memory import ld_global_s32x4, ld_nc_na_s32x4, pointer_from_address
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_sync

FAULTS = ("plain tail", "tail first", "no barrier", "relaxed poll", "early head")


class TokenInputs(NamedTuple):
    """The tokens that this rank sends."""

    x: object  # int32*, rows in words
    scales: object  # float32*, with the two strides that follow
    token_stride: object  # int64
    column_stride: object  # int64
    topk_idx: object  # int64*
    topk_weights: object  # float32*
    is_token_in_rank: object  # uint8*
    channel_prefix: object  # int32*
    num_tokens: object  # int32


class RecvTensors(NamedTuple):
    """The output tensors of this rank."""

    x: object  # int32*
    scales: object  # float32*
    topk_idx: object  # int64*
    topk_weights: object  # float32*
    src_idx: object  # int32*


@cache
def make_send_row(config):
    """Make ``send_row(...)``: a warp copies a token and its metadata to a slot, whose index counts over all queues."""
    topk, scales, row_words = config.topk, config.scales, config.row_bytes // 4
    experts = config.experts // config.ranks  # of a rank
    offsets = dispatch_offsets(config)
    x_offset, src_idx_offset, topk_idx_offset = offsets.x // 4, offsets.src_idx // 4, offsets.topk_idx // 8  # elements
    weights_offset, scales_offset = offsets.topk_weights // 4, offsets.scales // 4
    copy_row = make_copy_row(config.row_bytes, ld_nc_na_s32x4)

    @cuda.jit(device=True)
    def send_row(buf_i32, buf_i64, buf_f32, slot, inputs, token, peer, lane):
        copy_row(buf_i32, x_offset + slot * row_words, inputs.x, token * row_words, lane)
        if lane == 0:
            buf_i32[src_idx_offset + slot] = int32(token)
        if lane < topk:
            expert = inputs.topk_idx[token * topk + lane] - int64(peer * experts)
            is_at_peer = expert >= 0 and expert < experts
            buf_i64[topk_idx_offset + slot * topk + lane] = expert if is_at_peer else int64(-1)
            weight = inputs.topk_weights[token * topk + lane]
            buf_f32[weights_offset + slot * topk + lane] = weight if is_at_peer else float32(0)
        for i in range(lane, scales, 32):
            scale = inputs.scales[token * inputs.token_stride + i * inputs.column_stride]
            buf_f32[scales_offset + slot * scales + i] = scale

    if config.on_row is None:
        return send_row

    def traced_send_row(buf_i32, buf_i64, buf_f32, slot, inputs, token, peer, lane):
        send_row(buf_i32, buf_i64, buf_f32, slot, inputs, token, peer, lane)
        config.on_row(config, int(slot), int(token), int(peer), int(lane))

    return simulated(traced_send_row, "")  # the host observes


@cache
def make_send(config):
    """Make ``send(...)``, the even CTA of a channel. A rank's warps visit all tokens, and send them round-robin."""
    ranks, ring, chunk, warps = config.ranks, config.ring, config.chunk, config.warps
    channels, fault = config.channels, config.fault
    offsets = dispatch_offsets(config)
    start_offset, end_offset = offsets.start // 4, offsets.end // 4
    head_offset, tail_offset = offsets.head // 4, offsets.tail // 4
    channel_range, send_row = make_channel_range(channels), make_send_row(config)
    wait_space = make_wait(ld_acquire_sys_s32, at_least, SPACE)

    @cuda.jit(device=True)
    def send(aborted, inputs, send_head, channel, peer, warp, lane, peers, ctx):
        address, queue = peers[peer], int64(channel * ranks + ctx.rank)
        buf_i32 = pointer_from_address(address, send_head)
        buf_i64 = pointer_from_address(address, inputs.topk_idx)
        buf_f32 = pointer_from_address(address, inputs.topk_weights)
        prefix, is_leader = inputs.channel_prefix, warp == 0 and lane == 0
        if is_leader:  # 0 means "not written yet", so n is sent as -n - 1
            before = prefix[peer * channels + channel - 1] if channel > 0 else int32(0)
            st_relaxed_sys_s32(buf_i32, start_offset + queue, int32(-before - 1))
            st_relaxed_sys_s32(buf_i32, end_offset + queue, int32(-prefix[peer * channels + channel] - 1))
        token, last = channel_range(inputs.num_tokens, channel)
        tail = int32(0)
        while token < last:
            if lane == 0:
                limit = int32(tail + chunk - ring)
                ok, _ = wait_space(buf_i32, head_offset + queue, limit, tail, channel, peer, ctx)
                if not ok:
                    aborted[peer] = int32(1)
            cuda.syncwarp()
            has_space, sent = aborted[peer] == 0, int32(0)
            while sent < chunk and token < last:
                selected = inputs.is_token_in_rank[token * ranks + peer] != 0
                if int32(uint32(token) % uint32(warps)) == warp and lane == 0:
                    send_head[token * ranks + peer] = tail if selected else int32(-1)
                if selected:
                    slot = queue * ring + int64(uint32(tail) % uint32(ring))
                    tail = int32(tail + 1)
                    if fault == "tail first" and is_leader:
                        st_release_sys_s32(buf_i32, tail_offset + queue, tail)
                    if int32(uint32(tail) % uint32(warps)) == warp and has_space:
                        send_row(buf_i32, buf_i64, buf_f32, slot, inputs, token, peer, lane)
                    sent = int32(sent + 1)
                token += 1
            if fault != "no barrier":
                bar_sync(1 + peer, 32 * warps)
            if is_leader and aborted[peer] == 0:  # if any warp has aborted, rows are missing and must not be read
                if fault == "plain tail":
                    buf_i32[tail_offset + queue] = tail
                else:
                    st_release_sys_s32(buf_i32, tail_offset + queue, tail)

    return send


@cache
def make_receive_rows(config):
    """Make ``receive_rows(...)``: the warps of a rank copy ``rows`` rows from the head on to their final place."""
    ring, topk, scales, row_words = config.ring, config.topk, config.scales, config.row_bytes // 4
    warps, threads = config.warps, 32 * config.warps
    offsets = dispatch_offsets(config)
    x_offset, src_idx_offset, topk_idx_offset = offsets.x // 4, offsets.src_idx // 4, offsets.topk_idx // 8  # elements
    weights_offset, scales_offset = offsets.topk_weights // 4, offsets.scales // 4
    copy_row = make_copy_row(config.row_bytes, ld_global_s32x4)

    @cuda.jit(device=True)
    def receive_rows(buf_i32, buf_i64, buf_f32, queue, head, rows, dst_row, recv, warp, lane):
        first, thread = queue * ring, 32 * warp + lane
        for i in range(warp, rows, warps):
            slot = first + int64(uint32(head + i) % uint32(ring))
            copy_row(recv.x, (dst_row + i) * row_words, buf_i32, x_offset + slot * row_words, lane)
        for i in range(thread, rows, threads):
            slot = first + int64(uint32(head + i) % uint32(ring))
            recv.src_idx[dst_row + i] = buf_i32[src_idx_offset + slot]
        if topk > 0:
            for i in range(thread, rows * topk, threads):
                row, k = i // topk, i % topk
                slot = first + int64(uint32(head + row) % uint32(ring))
                recv.topk_idx[(dst_row + row) * topk + k] = buf_i64[topk_idx_offset + slot * topk + k]
                recv.topk_weights[(dst_row + row) * topk + k] = buf_f32[weights_offset + slot * topk + k]
        if scales > 0:
            for i in range(thread, rows * scales, threads):
                row, k = i // scales, i % scales
                slot = first + int64(uint32(head + row) % uint32(ring))
                recv.scales[(dst_row + row) * scales + k] = buf_f32[scales_offset + slot * scales + k]

    return receive_rows


@cache
def make_receive(config):
    """Make ``receive(...)``, the odd CTA of a channel. One thread per rank polls the tail for all warps of the rank."""
    ranks, channels, warps, fault = config.ranks, config.channels, config.warps, config.fault
    offsets = dispatch_offsets(config)
    start_offset, end_offset = offsets.start // 4, offsets.end // 4
    head_offset, tail_offset = offsets.head // 4, offsets.tail // 4
    receive_rows = make_receive_rows(config)
    wait_offset = make_wait(ld_acquire_sys_s32, other_than, OFFSETS)
    wait_rows = make_wait(ld_relaxed_sys_s32 if fault == "relaxed poll" else ld_acquire_sys_s32, other_than, ROWS)

    @cuda.jit(device=True)
    def receive(aborted, tails, inputs, recv, recv_channel_prefix, channel, peer, warp, lane, peers, ctx):
        address, queue = peers[ctx.rank], int64(channel * ranks + peer)
        buf_i32 = pointer_from_address(address, recv.src_idx)
        buf_i64 = pointer_from_address(address, inputs.topk_idx)
        buf_f32 = pointer_from_address(address, inputs.topk_weights)
        start = end = int32(0)
        if lane == 0:
            ok, start = wait_offset(buf_i32, start_offset + queue, 0, 0, channel, peer, ctx)
            if ok:
                ok, end = wait_offset(buf_i32, end_offset + queue, 0, 0, channel, peer, ctx)
            if not ok:
                aborted[peer] = int32(1)
        bar_sync(1 + peer, 32 * warps)
        start, end = cuda.shfl_sync(FULL_MASK, start, 0), cuda.shfl_sync(FULL_MASK, end, 0)
        rows_left, dst_row, head = int32(0), int64(0), int32(0)
        if aborted[peer] == 0:
            rows_left, dst_row = int32(start - end), int64(-start - 1)
            if warp == 0 and lane == 0:
                recv_channel_prefix[peer * channels + channel] = int32(dst_row)
            if peer > 0:
                dst_row += buf_i32[(peer - 1) * ranks + ctx.rank]  # rank_prefix: the rows from lower ranks
        while rows_left > 0:
            if warp == 0 and lane == 0:
                ok, tail = wait_rows(buf_i32, tail_offset + queue, head, head, channel, peer, ctx)
                tails[peer] = tail if ok else int32(-1)
            bar_sync(1 + peer, 32 * warps)
            tail = tails[peer]
            rows = int32(tail - head) if tail >= 0 else rows_left
            if fault == "early head" and warp == 0 and lane == 0 and tail >= 0:
                st_release_sys_s32(buf_i32, head_offset + queue, tail)
            if tail >= 0:
                receive_rows(buf_i32, buf_i64, buf_f32, queue, head, rows, dst_row, recv, warp, lane)
            head, dst_row, rows_left = int32(head + rows), dst_row + rows, int32(rows_left - rows)
            bar_sync(1 + peer, 32 * warps)
            if warp == warps - 1 and lane == 0 and tail >= 0 and fault != "early head":
                st_release_sys_s32(buf_i32, head_offset + queue, head)

    return receive


@cache
def make_dispatch(config):
    """Make the kernel, for ``2 * channels`` CTAs of ``config.threads``, all resident at once.

    Rows are int32 words. ``x_scales`` (with strides in elements) and ``recv_scales`` are used if there are scales, the
    four tensors of experts if topk is not 0. Besides the received rows the kernel writes two tensors of the handle:
    ``recv_channel_prefix`` [ranks, channels], the rows from a rank before each of its channels, and ``send_head``
    [num_tokens, ranks], the position of a token in its queue, or -1.
    """
    ranks, warps = config.ranks, config.warps
    send, receive = make_send(config), make_receive(config)

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
        timeout_ns,
        status,
    ):
        aborted, tails = cuda.shared.array(ranks, int32), cuda.shared.array(ranks, int32)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        if thread < ranks:
            aborted[thread] = int32(0)
        cuda.syncthreads()
        inputs = TokenInputs(
            x,
            x_scales,
            token_stride,
            column_stride,
            topk_idx,
            topk_weights,
            is_token_in_rank,
            channel_prefix,
            num_tokens,
        )
        recv = RecvTensors(recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src_idx)
        ctx = WaitContext(rank, timeout_ns, status)
        channel, lane = block // 2, thread % 32
        peer, warp = thread // (32 * warps), thread // 32 % warps
        if block % 2 == 0:
            send(aborted, inputs, send_head, channel, peer, warp, lane, peers, ctx)
        else:
            receive(aborted, tails, inputs, recv, recv_channel_prefix, channel, peer, warp, lane, peers, ctx)

    return dispatch
