"""The combine kernel: rows travel back through rings, and a token's rows are added up on the token's own rank.

As in dispatch a warp is a channel, and even blocks send. A sending warp serves its channel's rings by turns, and passes
over one that is full: if it waited there, ranks could wait for one another in a circle. A receiving warp takes its
tokens in order, waits until a token's rows are there from all ranks that got it, and adds them up in the order of the
ranks, in float32, rounded once: the same bits at every call. A rank's own rows are read where they lie.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.expert_parallel.publish import FULL, make_publish
from moe_numba.expert_parallel.regions import LOST, lines, regions, sent, taken
from moe_numba.expert_parallel.rings import (
    copied,
    copied_but_last,
    first_token,
    make_fetch,
    own_rows_before,
    prepare,
    rows_of_channel,
)
from moe_numba.expert_parallel.waiting import COMBINE_ROWS, COMBINE_SPACE, give_up, out_of_patience
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.bulk import bulk_commit_group, bulk_store
from moe_numba.ptx.clock import globaltimer
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.fence import fence_proxy_async, fence_proxy_async_shared
from moe_numba.ptx.memory import griddepcontrol_wait, st_global_s32x4
from moe_numba.ptx.shared_flags import st_release_cta_shared_s32
from moe_numba.ptx.system import ld_acquire_sys_s32, ld_global_s32x4, ld_volatile_s32, pointer_from_address


@cache
def make_send(shape):
    """``send``: what a warp of an even block does."""
    ranks, slots, record, progress_at = shape.num_ranks, shape.slots, shape.record, shape.progress
    fetch, land = make_fetch(shape.bar)
    head_at, sent_at = regions(ranks).head(True), sent(True)
    row_words, topk, stride, stage_words = record.row, record.scales, record.stride, lines(record.words)
    row_bytes, record_bytes, weights_at = 4 * record.row, 4 * record.words, record.row

    @cuda.jit(device=True)
    def send(
        smem, bars, channel, channels, rank, rings_at, ring_words, mine, peers, state, status, patience, x, weights,
        rank_prefix, recv_channel_prefix,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        to = lane if lane < ranks else int32(0)
        theirs = pointer_from_address(peers[to], mine)
        stage, parity = int32(warp * stage_words), uint32(0)
        first, here = uint32(state[sent_at + channel * ranks + to]), lane < ranks and lane != rank
        put = first
        head = uint32(first - uint32(slots))  # how much has been taken out is asked for before the first row
        room = uint32(1)  # rows of the last launch may have lain otherwise: the first waits until all are gone
        left, row = rows_of_channel(rank_prefix, recv_channel_prefix, to, rank, ranks, channel, channels)
        left = left if here else int32(0)
        start = uint64(0)
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
                st_release_cta_shared_s32(smem, progress_at + warp * ranks + lane, int32(put))
                put, left, row = uint32(put + uint32(1)), int32(left - 1), int32(row + 1)
            elif here:
                copied()
                st_release_cta_shared_s32(smem, progress_at + warp * ranks + lane, int32(put))
            cuda.syncwarp()
            if mask != uint32(0):
                start = uint64(0)
            else:
                if start == uint64(0):
                    start = globaltimer()
                tired = out_of_patience(start, patience, state)
                if tired and left > 0:
                    give_up(state, status, COMBINE_SPACE, rank, channel, lane, head, put)
                if cuda.any_sync(FULL, tired):
                    break
        copied()
        if here:
            st_release_cta_shared_s32(smem, progress_at + warp * ranks + lane, int32(put))
            state[sent_at + channel * ranks + to] = int32(put)

    return send


@cache
def make_add_up(shape, biases):
    """``add_up``: the sum of a token's rows, in the order of the ranks, and of their weights."""
    ranks = shape.num_ranks
    row_words, topk, stride, weights_at = shape.record.row, shape.record.scales, shape.record.stride, shape.record.row
    pieces = row_words // 4  # of 16 bytes
    at_once = max(1, 16 // ranks)  # pieces of each row that a lane has on their way, 64 registers
    held = 4 * ranks * at_once
    places_held = max(2, ranks)  # NVVM 13.0 does not come to an end over an array of one element

    @cuda.jit(device=True)
    def add_piece(sums, a, b, c, d):
        """To 8 sums, the 8 elements of a piece."""
        sums[0] += uint_as_float(uint32(a) << uint32(16))
        sums[1] += uint_as_float(uint32(a) & uint32(0xFFFF0000))
        sums[2] += uint_as_float(uint32(b) << uint32(16))
        sums[3] += uint_as_float(uint32(b) & uint32(0xFFFF0000))
        sums[4] += uint_as_float(uint32(c) << uint32(16))
        sums[5] += uint_as_float(uint32(c) & uint32(0xFFFF0000))
        sums[6] += uint_as_float(uint32(d) << uint32(16))
        sums[7] += uint_as_float(uint32(d) & uint32(0xFFFF0000))

    @cuda.jit(device=True)
    def add_up(
        rings_at, ring_words, mine, x, weights, own_row, bias_0, bias_1, out, out_weights, token, lane, rank, channel,
        places, mask,
    ):
        """``places``: of lane r, the slot in rank r's ring."""
        begins = cuda.local.array(places_held, int64)
        words = cuda.local.array(held, int32)
        sums = cuda.local.array(8, float32)
        for r in range(ranks):
            place = cuda.shfl_sync(FULL, places, r)
            begins[r] = rings_at + int64(channel * ranks + r) * ring_words + int64(place) * stride
        for first in range(lane, pieces, 32 * at_once):
            for u in range(at_once):
                i = first + 32 * u
                for r in range(ranks):
                    if i < pieces and mask >> uint32(r) & uint32(1):
                        if r == rank:
                            a, b, c, d = ld_global_s32x4(x, own_row * row_words + 4 * i)
                        else:
                            a, b, c, d = ld_global_s32x4(mine, begins[r] + 4 * i)
                        j = 4 * (ranks * u + r)
                        words[j], words[j + 1], words[j + 2], words[j + 3] = a, b, c, d
            for u in range(at_once):
                i = first + 32 * u
                if i < pieces:
                    at = int64(token) * row_words + 4 * i
                    for j in range(8):
                        sums[j] = float32(0)
                    if biases > 0:
                        a, b, c, d = ld_global_s32x4(bias_0, at)
                        add_piece(sums, a, b, c, d)
                    if biases > 1:
                        a, b, c, d = ld_global_s32x4(bias_1, at)
                        add_piece(sums, a, b, c, d)
                    for r in range(ranks):
                        if mask >> uint32(r) & uint32(1):
                            j = 4 * (ranks * u + r)
                            add_piece(sums, words[j], words[j + 1], words[j + 2], words[j + 3])
                    a, b = cvt_rn_bf16x2_f32(sums[1], sums[0]), cvt_rn_bf16x2_f32(sums[3], sums[2])
                    c, d = cvt_rn_bf16x2_f32(sums[5], sums[4]), cvt_rn_bf16x2_f32(sums[7], sums[6])
                    st_global_s32x4(out, at, int32(a), int32(b), int32(c), int32(d))
        if lane < topk:
            total = float32(0)
            for r in range(ranks):
                if mask >> uint32(r) & uint32(1):
                    bits = weights[own_row * topk + lane] if r == rank else mine[begins[r] + weights_at + lane]
                    total += uint_as_float(uint32(bits))
            out_weights[int64(token) * topk + lane] = total

    return add_up


@cache
def make_receive(shape, biases):
    """``receive``: what a warp of an odd block does."""
    ranks, slots, progress_at = shape.num_ranks, shape.slots, shape.progress
    tail_at, taken_at = regions(ranks).tail(True), taken(True)
    add_up = make_add_up(shape, biases)

    @cuda.jit(device=True)
    def receive(
        smem, channel, channels, rank, rings_at, ring_words, mine, state, status, patience, x, weights, tokens, before,
        send_head, bias_0, bias_1, out, out_weights,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        source = lane if lane < ranks else int32(0)
        first, here = uint32(state[taken_at + channel * ranks + source]), lane < ranks and lane != rank
        got, tail = first, first
        t, end = first_token(channel, channels, tokens), first_token(channel + 1, channels, tokens)
        follows = send_head[int64(t) * ranks + source] if lane < ranks and t < end else int32(-1)
        ready = int32(1)
        while t < end:
            nth = follows
            wanted = uint32(first + uint32(nth))
            start, waits = uint64(0), int32(1)
            while waits != 0:
                missing = here and nth >= 0 and int32(uint32(tail - wanted)) <= 0
                if missing:
                    tail = uint32(ld_acquire_sys_s32(mine, tail_at + channel * ranks + source))
                    missing = int32(uint32(tail - wanted)) <= 0
                waits = int32(1 if cuda.any_sync(FULL, missing) else 0)
                if waits != 0:
                    if start == uint64(0):
                        start = globaltimer()
                    tired = out_of_patience(start, patience, state)
                    if tired and missing:
                        give_up(state, status, COMBINE_ROWS, rank, channel, lane, wanted, tail)
                    if cuda.any_sync(FULL, tired):
                        ready = waits = int32(0)
            if ready == 0:
                break
            mask = uint32(cuda.ballot_sync(FULL, nth >= 0))
            own_row = int64(before) + cuda.shfl_sync(FULL, nth, rank)
            place = int32(uint32(nth) % uint32(slots))
            follows = send_head[int64(t + 1) * ranks + source] if lane < ranks and t + 1 < end else int32(-1)
            add_up(
                rings_at, ring_words, mine, x, weights, own_row, bias_0, bias_1, out, out_weights, t, lane, rank,
                channel, place, mask,
            )
            cuda.syncwarp()  # all have read
            if here and nth >= 0:
                got = uint32(wanted + uint32(1))
                st_release_cta_shared_s32(smem, progress_at + warp * ranks + lane, int32(got))
            t = int32(t + 1)
        if here:
            state[taken_at + channel * ranks + source] = int32(got)

    return receive


@cache
def make_combine(shape, biases):
    """The kernel, for an even number of blocks of ``shape.threads`` threads; with so many biases, 0 to 2."""
    ranks, warps, bar = shape.num_ranks, shape.warps, shape.bar
    progress_at, said_at, done_at = shape.progress, shape.said, shape.done
    tail_at, head_at = regions(ranks).tail(True), regions(ranks).head(True)
    sent_at, taken_at = sent(True), taken(True)
    send, receive, publish = make_send(shape), make_receive(shape, biases), make_publish(shape)

    @cuda.jit
    def combine(
        mine, peers, state, status, patience, rank, rings_at, ring_words, x, weights, channels, rank_prefix,
        channel_prefix, recv_channel_prefix, send_head, tokens, bias_0, bias_1, out, out_weights,
    ):
        smem = cuda.shared.array(0, int32, 128)
        bars = cuda.shared.array(0, uint64, 128)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane, warp, receives = int32(thread & 31), int32(thread >> 5), int32(block & 1)
        first_channel = int32((block >> 1) * warps)
        channel = int32(first_channel + warp)
        griddepcontrol_wait()
        prepare(
            smem, bars, bar, progress_at, said_at, done_at, warps, ranks, state,
            int32((taken_at if receives else sent_at) + first_channel * ranks),
        )
        if ld_volatile_s32(state, LOST) != 0:
            pass  # something went wrong before
        elif warp == warps:
            publish(smem, lane, rank, first_channel, head_at if receives else tail_at, mine, peers)
        else:
            if channel < channels:
                if receives:
                    before = own_rows_before(rank_prefix, channel_prefix, rank, ranks, channel, channels)
                    receive(
                        smem, channel, channels, rank, rings_at, ring_words, mine, state, status, patience, x, weights,
                        tokens, before, send_head, bias_0, bias_1, out, out_weights,
                    )
                else:
                    send(
                        smem, bars, channel, channels, rank, rings_at, ring_words, mine, peers, state, status, patience,
                        x, weights, rank_prefix, recv_channel_prefix,
                    )
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(smem, done_at + warp, 1)

    return combine


SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int64", "int32"),
    *("int32*", "int32*", "int32", "int32*"),
    *("int32*", "int32*", "int32*", "int32", "int32*", "int32*", "int32*", "float32*"),
)
