"""The document's combine: rows travel back, and the rank where a token lives adds up what comes from the others.

Blocks come in pairs, a pair for a channel. The even one sends rows back through rings, as dispatch does. In the odd one
warp 0 watches the tails and moves the heads on, and each other warp takes every so manieth token of the channel, waits
for its rows, and adds them up in the order of the ranks, in float32, rounded once.

A warp says for each rank how far it has no more need of its queue; the least of that is the head. A warp that has
retired has no more need of anything. Where this differs from DeepEP, it mends: the block's warps tell one another by
releasing and acquiring, where DeepEP has volatile shared memory, and rings are read by ordinary loads.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.course.articles.deepep.buffer_layout import combine_regions
from moe_numba.course.articles.deepep.polling import (
    FULL,
    ROOM,
    TOKEN,
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
from moe_numba.ptx.warpgroup import bar_sync

FAULTS = ("plain tail", "no barrier", "early head", "short ring")


@cache
def make_send_back(constants):
    """``send_back(...)``: the even block of a channel. The warps of a rank send back what came from it."""
    ranks, ring, chunk, warps = constants.ranks, constants.ring, constants.chunk, constants.warps
    channels, topk, row_words, fault = constants.channels, constants.topk, constants.row_bytes // 4, constants.fault
    at = combine_regions(constants)
    head_at, tail_at, x_at = at.head // 4, at.tail // 4, at.x // 4  # in elements
    src_idx_at, weights_at = at.src_idx // 4, at.topk_weights // 4
    copy_row = make_copy_row(constants.row_bytes, ld_nc_na_s32x4)
    wait_room = make_wait(ld_acquire_sys_s32, at_least, ROOM)

    @cuda.jit(device=True)
    def send_back(
        given_up,
        x,
        topk_weights,
        src_idx,
        rank_prefix,
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
        address, queue = peers[peer], int64(channel * ranks + rank)
        words, floats = pointer_from_address(address, src_idx), pointer_from_address(address, topk_weights)
        before = int64(rank_prefix[(peer - 1) * ranks + rank] if peer > 0 else int32(0))
        row = before + recv_channel_prefix[peer * channels + channel]
        last = int64(rank_prefix[peer * ranks + rank])
        if channel < channels - 1:
            last = before + recv_channel_prefix[peer * channels + channel + 1]
        tail = int32(0)
        while row < last:
            rows = int32(min(int64(chunk), last - row))
            if lane == 0:
                limit = int32(tail + rows - ring)
                there, _ = wait_room(words, head_at + queue, limit, tail, rank, channel, peer, patience, status)
                if not there:
                    given_up[peer] = int32(1)
            cuda.syncwarp()
            has_room = given_up[peer] == 0
            for i in range(warp, rows, warps):
                if has_room:
                    slot = queue * ring + int64(uint32(tail + i) % uint32(ring))
                    copy_row(words, x_at + slot * row_words, x, (row + i) * row_words, lane)
                    if lane == 0:  # for who looks into the ring; the receiver knows without it
                        words[src_idx_at + slot] = src_idx[row + i]
                    if lane < topk:
                        floats[weights_at + slot * topk + lane] = topk_weights[(row + i) * topk + lane]
            row, tail = row + rows, int32(tail + rows)
            if fault != "no barrier":
                bar_sync(1 + peer, 32 * warps)
            if warp == 0 and lane == 0 and given_up[peer] == 0:
                if fault == "plain tail":
                    words[tail_at + queue] = tail
                else:
                    st_release_sys_s32(words, tail_at + queue, tail)

    return send_back


@cache
def make_update_heads(constants):
    """``update_heads(...)``: warp 0 of the odd block, a lane for each rank, until all other warps have retired."""
    ranks, warps = constants.ranks, constants.warps * constants.ranks
    at = combine_regions(constants)
    head_at, tail_at = at.head // 4, at.tail // 4

    @cuda.jit(device=True)
    def update_heads(tails, heads, retired, words, channel, lane):
        queue = int64(channel * ranks + lane)
        published, working = int32(0), lane < ranks
        while working:
            st_release_cta_shared_s32(tails, lane, ld_acquire_sys_s32(words, tail_at + queue))
            least, working = int32(0x7FFFFFFF), False
            for warp in range(1, warps):
                if ld_acquire_cta_shared_s32(retired, warp) == 0:
                    working = True
                    least = min(least, ld_acquire_cta_shared_s32(heads, warp * ranks + lane))
            if working and least > published:
                published = least
                st_release_sys_s32(words, head_at + queue, published)

    return update_heads


@cache
def make_add_up(constants):
    """``add_up(...)``: a warp adds up a token's rows. ``slot`` is, in lane r, where that of rank r lies, or -1."""
    ranks, topk, row_words, biases = constants.ranks, constants.topk, constants.row_bytes // 4, constants.biases
    at = combine_regions(constants)
    x_at, weights_at, words_at_once = at.x // 4, at.topk_weights // 4, 4 * ranks

    @cuda.jit(device=True)
    def add(sums, a, b, c, d):
        """Add 8 bf16, which are the high halves of floats."""
        for k, word in enumerate((a, b, c, d)):
            sums[2 * k] += uint_as_float(uint32(uint32(word) << uint32(16)))
            sums[2 * k + 1] += uint_as_float(uint32(uint32(word) & uint32(0xFFFF0000)))

    @cuda.jit(device=True)
    def add_up(words, floats, slot, first_bias, second_bias, out, out_weights, token, lane):
        slots, rows = cuda.local.array(ranks, int32), cuda.local.array(words_at_once, int32)
        sums = cuda.local.array(8, float32)
        for r in range(ranks):
            slots[r] = cuda.shfl_sync(FULL, slot, r)
        for i in range(4 * lane, row_words, 128):
            for r in range(ranks):  # all on their way at once
                if slots[r] >= 0:
                    a, b, c, d = ld_global_s32x4(words, x_at + int64(slots[r]) * row_words + i)
                    rows[4 * r], rows[4 * r + 1], rows[4 * r + 2], rows[4 * r + 3] = a, b, c, d
            for k in range(8):
                sums[k] = float32(0)
            if biases > 0:
                a, b, c, d = ld_nc_na_s32x4(first_bias, token * row_words + i)
                add(sums, a, b, c, d)
            if biases > 1:
                a, b, c, d = ld_nc_na_s32x4(second_bias, token * row_words + i)
                add(sums, a, b, c, d)
            for r in range(ranks):
                if slots[r] >= 0:
                    add(sums, rows[4 * r], rows[4 * r + 1], rows[4 * r + 2], rows[4 * r + 3])
            st_na_s32x4(
                out,
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
                    total += floats[weights_at + int64(slots[r]) * topk + lane]
            out_weights[token * topk + lane] = total

    return add_up


@cache
def make_reduce(constants):
    """``reduce(...)``: the other warps of the odd block; each has every so manieth token."""
    ranks, channels, ring, fault = constants.ranks, constants.channels, constants.ring, constants.fault
    warps = constants.warps * constants.ranks
    channel_range, add_up = make_channel_range(channels), make_add_up(constants)
    wait_token = make_wait(poll_acquire_cta_shared_s32, more_than, TOKEN)

    @cuda.jit(device=True)
    def reduce(
        tails,
        heads,
        retired,
        words,
        floats,
        send_head,
        first_bias,
        second_bias,
        out,
        out_weights,
        num_tokens,
        channel,
        warp,
        lane,
        rank,
        patience,
        status,
    ):
        first, last = channel_range(num_tokens, channel)
        for token in range(first + warp - 1, last, warps - 1):
            place, there, slot = int32(-1), True, int32(-1)
            if lane < ranks:
                place = send_head[token * ranks + lane]
                if place >= 0:
                    slot = int32((channel * ranks + lane) * ring + int32(uint32(place) % uint32(ring)))
                    there, _ = wait_token(tails, lane, place, place, rank, channel, lane, patience, status)
            no_more = int32(place + 1 if place >= 0 else -place - 1)  # need of what lies before it
            if fault == "early head" and lane < ranks:
                st_release_cta_shared_s32(heads, warp * ranks + lane, no_more)
            if cuda.all_sync(FULL, there):
                cuda.syncwarp()  # what a lane has acquired, all lanes read
                add_up(words, floats, slot, first_bias, second_bias, out, out_weights, token, lane)
                cuda.syncwarp()
                if lane < ranks:
                    st_release_cta_shared_s32(heads, warp * ranks + lane, no_more)
        cuda.syncwarp()
        if lane == 0:
            st_release_cta_shared_s32(retired, warp, 1)

    return reduce


@cache
def make_combine(constants):
    """The kernel, for ``2 * channels`` blocks of ``constants.threads``, all resident at once.

    Rows are bf16, given as int32. ``send_head`` must have been through cached_notify_combine. The two biases are used
    if ``constants.biases`` says so, the weights if topk is not 0. Rows are not multiplied with weights.
    """
    ranks, warps = constants.ranks, constants.warps * constants.ranks
    send_back, update_heads = make_send_back(constants), make_update_heads(constants)
    reduce, all_heads = make_reduce(constants), ranks * warps

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
        first_bias,
        second_bias,
        num_tokens,
        peers,
        rank,
        patience,
        status,
    ):
        given_up, tails = cuda.shared.array(ranks, int32), cuda.shared.array(ranks, int32)
        heads, retired = cuda.shared.array(all_heads, int32), cuda.shared.array(warps, int32)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane, warp, channel = thread % 32, thread // 32, block // 2
        if thread < ranks:
            given_up[thread] = int32(0)
            tails[thread] = int32(0)
        if thread < warps:
            retired[thread] = int32(0)
        for i in range(thread, all_heads, 32 * warps):
            heads[i] = int32(0)
        cuda.syncthreads()
        if block % 2 == 0:
            # Each channel begins with another rank, so that not all send to the same one.
            send_back(
                given_up,
                x,
                topk_weights,
                src_idx,
                rank_prefix,
                recv_channel_prefix,
                channel,
                (channel + warp) % ranks,
                warp // ranks,
                lane,
                peers,
                rank,
                patience,
                status,
            )
        else:
            words, floats = pointer_from_address(peers[rank], src_idx), pointer_from_address(peers[rank], topk_weights)
            if warp == 0:
                update_heads(tails, heads, retired, words, channel, lane)
            else:
                reduce(
                    tails,
                    heads,
                    retired,
                    words,
                    floats,
                    send_head,
                    first_bias,
                    second_bias,
                    out,
                    out_weights,
                    num_tokens,
                    channel,
                    warp,
                    lane,
                    rank,
                    patience,
                    status,
                )

    return combine
