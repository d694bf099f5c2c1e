"""Our Numba port of DeepEP's intranode combine kernel: rows go back, and each token's own rank sums them.

CTAs form pairs, one pair per channel. The even CTA sends rows back through rings, as in dispatch. In the odd one, warp
0 polls the tails and advances the heads. Each other warp takes every (num_warps - 1)-th token of the channel, waits for
its rows, and sums them in rank order, in float32, rounded once.

Each warp reports the slots it has released per rank; the head is the minimum over warps. A warp that has retired has
released everything. Differences from DeepEP: the warps of a CTA communicate with release and acquire operations, where
DeepEP uses volatile shared memory, and rings are read with ordinary loads.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.course.deepep_port.buffer_layout import combine_offsets
from moe_numba.course.deepep_port.polling import (
    SPACE,
    TOKEN,
    WaitContext,
    at_least,
    make_channel_range,
    make_copy_row,
    make_wait,
    more_than,
)
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.atomics import (
    ld_acquire_cta_shared_s32,
    ld_acquire_sys_s32,
    poll_acquire_cta_shared_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, ld_nc_na_s32x4, pointer_from_address, st_na_s32x4
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_sync

FAULTS = ("plain tail", "no barrier", "early head", "short ring")


class CombineTensors(NamedTuple):
    """The inputs and outputs of the kernel."""

    x: object  # int32*, pairs of bfloat16
    topk_weights: object  # float32*
    src_idx: object  # int32*
    rank_prefix: object  # int32*
    recv_channel_prefix: object  # int32*
    send_head: object  # int32*
    out: object  # int32*
    out_weights: object  # float32*
    bias_0: object  # int32*
    bias_1: object  # int32*
    num_tokens: object  # int32


@cache
def make_send_back(config):
    """Make ``send_back(...)``, the even CTA of a channel. A rank's warps return the rows that came from that rank."""
    ranks, ring, chunk, warps = config.ranks, config.ring, config.chunk, config.warps
    channels, topk, row_words, fault = config.channels, config.topk, config.row_bytes // 4, config.fault
    offsets = combine_offsets(config)
    head_offset, tail_offset, x_offset = offsets.head // 4, offsets.tail // 4, offsets.x // 4  # in elements
    src_idx_offset, weights_offset = offsets.src_idx // 4, offsets.topk_weights // 4
    copy_row = make_copy_row(config.row_bytes, ld_nc_na_s32x4)
    wait_space = make_wait(ld_acquire_sys_s32, at_least, SPACE)

    @cuda.jit(device=True)
    def send_back(aborted, tensors, channel, peer, warp, lane, peers, ctx):
        address, queue, rank = peers[peer], int64(channel * ranks + ctx.rank), ctx.rank
        buf_i32 = pointer_from_address(address, tensors.src_idx)
        buf_f32 = pointer_from_address(address, tensors.topk_weights)
        before = int64(tensors.rank_prefix[(peer - 1) * ranks + rank] if peer > 0 else int32(0))
        row = before + tensors.recv_channel_prefix[peer * channels + channel]
        last = int64(tensors.rank_prefix[peer * ranks + rank])
        if channel < channels - 1:
            last = before + tensors.recv_channel_prefix[peer * channels + channel + 1]
        tail = int32(0)
        while row < last:
            rows = int32(min(int64(chunk), last - row))
            if lane == 0:
                limit = int32(tail + rows - ring)
                ok, _ = wait_space(buf_i32, head_offset + queue, limit, tail, channel, peer, ctx)
                if not ok:
                    aborted[peer] = int32(1)
            cuda.syncwarp()
            has_space = aborted[peer] == 0
            for i in range(warp, rows, warps):
                if has_space:
                    slot = queue * ring + int64(uint32(tail + i) % uint32(ring))
                    copy_row(buf_i32, x_offset + slot * row_words, tensors.x, (row + i) * row_words, lane)
                    if lane == 0:  # as in DeepEP; the receiver does not need it
                        buf_i32[src_idx_offset + slot] = tensors.src_idx[row + i]
                    if lane < topk:
                        weight = tensors.topk_weights[(row + i) * topk + lane]
                        buf_f32[weights_offset + slot * topk + lane] = weight
            row, tail = row + rows, int32(tail + rows)
            if fault != "no barrier":
                bar_sync(1 + peer, 32 * warps)
            if warp == 0 and lane == 0 and aborted[peer] == 0:
                if fault == "plain tail":
                    buf_i32[tail_offset + queue] = tail
                else:
                    st_release_sys_s32(buf_i32, tail_offset + queue, tail)

    return send_back


@cache
def make_update_heads(config):
    """Make ``update_heads(...)``: warp 0 of the odd CTA, one lane per rank, until all other warps have retired."""
    ranks, warps = config.ranks, config.warps * config.ranks
    offsets = combine_offsets(config)
    head_offset, tail_offset = offsets.head // 4, offsets.tail // 4

    @cuda.jit(device=True)
    def update_heads(tails, heads, retired, buf_i32, channel, lane):
        queue = int64(channel * ranks + lane)
        published, running = int32(0), lane < ranks
        while running:
            st_release_cta_shared_s32(tails, lane, ld_acquire_sys_s32(buf_i32, tail_offset + queue))
            minimum, running = int32(0x7FFFFFFF), False
            for warp in range(1, warps):
                if ld_acquire_cta_shared_s32(retired, warp) == 0:
                    running = True
                    minimum = min(minimum, ld_acquire_cta_shared_s32(heads, warp * ranks + lane))
            if running and minimum > published:
                published = minimum
                st_release_sys_s32(buf_i32, head_offset + queue, published)

    return update_heads


@cache
def make_reduce_token(config):
    """Make ``reduce_token(...)``: a warp sums a token's rows. Lane r passes the slot of rank r's row, or -1."""
    ranks, topk, row_words, biases = config.ranks, config.topk, config.row_bytes // 4, config.biases
    offsets = combine_offsets(config)
    x_offset, weights_offset, num_words = offsets.x // 4, offsets.topk_weights // 4, 4 * ranks

    @cuda.jit(device=True)
    def add(sums, a, b, c, d):
        """Add 8 bf16, each of which is the upper half of a float32."""
        for k, word in enumerate((a, b, c, d)):
            sums[2 * k] += uint_as_float(uint32(uint32(word) << uint32(16)))
            sums[2 * k + 1] += uint_as_float(uint32(uint32(word) & uint32(0xFFFF0000)))

    @cuda.jit(device=True)
    def reduce_token(buf_i32, buf_f32, slot, tensors, token, lane):
        slots, rows = cuda.local.array(ranks, int32), cuda.local.array(num_words, int32)
        sums = cuda.local.array(8, float32)
        for r in range(ranks):
            slots[r] = cuda.shfl_sync(FULL_MASK, slot, r)
        for i in range(4 * lane, row_words, 128):
            for r in range(ranks):  # all loads are in flight at once
                if slots[r] >= 0:
                    a, b, c, d = ld_global_s32x4(buf_i32, x_offset + int64(slots[r]) * row_words + i)
                    rows[4 * r], rows[4 * r + 1], rows[4 * r + 2], rows[4 * r + 3] = a, b, c, d
            for k in range(8):
                sums[k] = float32(0)
            if biases > 0:
                a, b, c, d = ld_nc_na_s32x4(tensors.bias_0, token * row_words + i)
                add(sums, a, b, c, d)
            if biases > 1:
                a, b, c, d = ld_nc_na_s32x4(tensors.bias_1, token * row_words + i)
                add(sums, a, b, c, d)
            for r in range(ranks):
                if slots[r] >= 0:
                    add(sums, rows[4 * r], rows[4 * r + 1], rows[4 * r + 2], rows[4 * r + 3])
            st_na_s32x4(
                tensors.out,
                token * row_words + i,
                int32(cvt_rn_bf16x2_f32(sums[1], sums[0])),
                int32(cvt_rn_bf16x2_f32(sums[3], sums[2])),
                int32(cvt_rn_bf16x2_f32(sums[5], sums[4])),
                int32(cvt_rn_bf16x2_f32(sums[7], sums[6])),
            )
        if lane < topk:
            total = float32(0)
            for r in range(ranks):
                if slots[r] >= 0:
                    total += buf_f32[weights_offset + int64(slots[r]) * topk + lane]
            tensors.out_weights[token * topk + lane] = total

    return reduce_token


@cuda.jit(device=True)
def hold_nothing(heads, at, needed):
    """As in DeepEP's kernel, a warp that waits for its next token says nothing new."""


@cache
def make_reduce(config, hold=hold_nothing):
    """Make ``reduce(...)``, the other warps of the odd CTA: each takes every (num_warps - 1)-th token.

    Lane r calls ``hold(heads, at, needed)`` before it waits for its token's row from rank r: ``heads[at]`` is the
    position before which its warp needs no more rows of rank r, and from now on it needs none before ``needed``.
    """
    ranks, channels, ring, fault = config.ranks, config.channels, config.ring, config.fault
    warps = config.warps * config.ranks
    channel_range, reduce_token = make_channel_range(channels), make_reduce_token(config)
    wait_token = make_wait(poll_acquire_cta_shared_s32, more_than, TOKEN)

    @cuda.jit(device=True)
    def reduce(tails, heads, retired, buf_i32, buf_f32, tensors, channel, warp, lane, ctx):
        first, last = channel_range(tensors.num_tokens, channel)
        for token in range(first + warp - 1, last, warps - 1):
            position, ok, slot = int32(-1), True, int32(-1)
            if lane < ranks:
                position = tensors.send_head[token * ranks + lane]
                hold(heads, warp * ranks + lane, int32(position if position >= 0 else -position - 1))
                if position >= 0:
                    slot = int32((channel * ranks + lane) * ring + int32(uint32(position) % uint32(ring)))
                    ok, _ = wait_token(tails, lane, position, position, channel, lane, ctx)
            released = int32(position + 1 if position >= 0 else -position - 1)  # all slots before this one
            if fault == "early head" and lane < ranks:
                st_release_cta_shared_s32(heads, warp * ranks + lane, released)
            if cuda.all_sync(FULL_MASK, ok):
                cuda.syncwarp()  # makes what a lane has acquired visible to all lanes
                reduce_token(buf_i32, buf_f32, slot, tensors, token, lane)
                cuda.syncwarp()
                if lane < ranks:
                    st_release_cta_shared_s32(heads, warp * ranks + lane, released)
        cuda.syncwarp()
        if lane == 0:
            st_release_cta_shared_s32(retired, warp, 1)

    return reduce


@cache
def make_combine(config, hold=hold_nothing):
    """Make the kernel, for ``2 * channels`` CTAs of ``config.threads``, all resident at once.

    Rows are bf16, passed as int32. ``send_head`` must have been processed by cached_notify_combine. The two biases are
    used according to ``config.biases``, the weights if topk is not 0. Rows are not multiplied by the weights. ``hold``:
    see `make_reduce`.
    """
    ranks, warps = config.ranks, config.warps * config.ranks
    send_back, update_heads = make_send_back(config), make_update_heads(config)
    reduce, num_heads = make_reduce(config, hold), ranks * warps

    @cuda.jit
    def combine(
        x,
        topk_weights,
        src_idx,
        rank_prefix,
        recv_channel_prefix,
        send_head,
        out,
        out_weights,
        bias_0,
        bias_1,
        num_tokens,
        peers,
        rank,
        timeout_ns,
        status,
    ):
        aborted, tails = cuda.shared.array(ranks, int32), cuda.shared.array(ranks, int32)
        heads, retired = cuda.shared.array(num_heads, int32), cuda.shared.array(warps, int32)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane, warp, channel = thread % 32, thread // 32, block // 2
        tensors = CombineTensors(
            x,
            topk_weights,
            src_idx,
            rank_prefix,
            recv_channel_prefix,
            send_head,
            out,
            out_weights,
            bias_0,
            bias_1,
            num_tokens,
        )
        ctx = WaitContext(rank, timeout_ns, status)
        if thread < ranks:
            aborted[thread] = int32(0)
            tails[thread] = int32(0)
        if thread < warps:
            retired[thread] = int32(0)
        for i in range(thread, num_heads, 32 * warps):
            heads[i] = int32(0)
        cuda.syncthreads()
        if block % 2 == 0:
            # Each channel begins with another rank, to distribute the traffic over the ranks.
            send_back(aborted, tensors, channel, (channel + warp) % ranks, warp // ranks, lane, peers, ctx)
        else:
            buf_i32 = pointer_from_address(peers[rank], src_idx)
            buf_f32 = pointer_from_address(peers[rank], topk_weights)
            if warp == 0:
                update_heads(tails, heads, retired, buf_i32, channel, lane)
            else:
                reduce(tails, heads, retired, buf_i32, buf_f32, tensors, channel, warp, lane, ctx)

    return combine
