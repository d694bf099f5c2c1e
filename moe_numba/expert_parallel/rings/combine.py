"""Combine kernel: sends rows back through rings and sums each token's rows on the token's own rank.

Rings, warps, shared memory and the protocol are those of dispatch, see `dispatch.py`; rows flow in the other direction.
The first CTAs send: a channel's ring to rank r takes back the rows that dispatch received from the same channel of rank
r, in the same order. The others receive: a warp takes the tokens of its own channel.

A sending warp serves its channel's rings round-robin, one row to each that has space, and skips full ones: if it waited
for one ring, ranks could wait for one another in a cycle. Each row passes through the warp's staging buffer: lane 0
loads it with a bulk copy, which completes on the warp's mbarrier, the lanes append the weights, and lane r stores both
to rank r with another bulk copy.

A receiving warp takes its tokens in order. ``send_head``, which dispatch has written, says where in each ring a token's
row is. The own row, which does not pass through a ring, is loaded to the staging buffer while the warp waits for the
tails of all ranks that received the token. The lanes load the rows from the rings to registers, and sum all in rank
order, in float32, rounded once: the result is bitwise reproducible. The sum replaces the own row in the staging buffer,
and lane 0 stores it to the output with a bulk copy.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.expert_parallel.common.arguments import RankContext
from moe_numba.expert_parallel.common.buffer_layout import (
    ABORT_FLAG,
    MAX_ROWS,
    align_words,
    buffer_layout,
    received_counters,
    sent_counters,
)
from moe_numba.expert_parallel.common.poison import adopt_abort, fill
from moe_numba.expert_parallel.common.reduce import make_reduce_token, make_reduce_weights
from moe_numba.expert_parallel.common.timeout import COMBINE_ROWS, COMBINE_SPACE, start_of_wait, warp_abort_if_timed_out
from moe_numba.expert_parallel.rings.channels import (
    first_channel,
    first_row_at_peer,
    first_token,
    next_channel_after_publish,
    retire_warp,
    rows_of_channel,
)
from moe_numba.expert_parallel.rings.progress import clear_progress, make_publish, post_progress
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_cta_shared_s32
from moe_numba.ptx.memory import griddepcontrol_wait, pointer_from_address
from moe_numba.ptx.warp import FULL_MASK

_NAN = float("nan")


@cache
def make_combine(shape, biases):
    """Make the kernel, for CTAs of ``shape.threads`` threads and 0 to 2 biases.

    The first ``senders`` CTAs send, at most half of them.
    """
    ranks, warps, slots, slot, pipeline = shape.num_ranks, shape.warps, shape.slots, shape.slot, shape.pipeline
    # Behind the row, where dispatch has its scales, a slot of combine has ``topk`` weights.
    row_words, row_bytes, topk, weights_offset = slot.row, 4 * slot.row, slot.scales, slot.row
    staging_words, slot_stride, slot_bytes = align_words(slot.words), slot.stride, 4 * slot.words
    barrier_offset, progress_offset = shape.barrier_offset, shape.progress_offset
    published_offset, done_offset = shape.published_offset, shape.done_offset
    tail_offset, head_offset = buffer_layout(ranks).tail(True), buffer_layout(ranks).head(True)
    sent_offset, received_offset = sent_counters(True), received_counters(True)
    reduce_token, reduce_weights = make_reduce_token(shape, biases), make_reduce_weights(shape)
    publish = make_publish(shape)

    @cuda.jit
    def combine(
        local,
        peers,
        state,
        status,
        timeout_ns,
        rank,
        senders,
        channels,
        rings_offset,
        ring_words,
        x,
        topk_weights,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        send_head,
        num_tokens,
        bias_0,
        bias_1,
        out,
        out_weights,
        num_rows,
    ):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        receives, blocks, channel = first_channel(senders, warp)

        # ---- Shared memory: of each warp a row, an mbarrier, and its progress on each ring ----
        smem_i32 = cuda.shared.array(0, int32, 128)
        smem_u64 = cuda.shared.array(0, uint64, 128)  # the same memory
        griddepcontrol_wait()
        pipeline.init_barriers(smem_u64, barrier_offset, warps)
        clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks)

        # The same for all warps of a CTA: its publisher and its copy warps wait for one another.
        aborted = int32(cuda.syncthreads_or(ld_volatile_s32(local, ABORT_FLAG)))
        if aborted != 0:
            pass  # a rank has aborted in an earlier kernel
        elif warp == warps:
            # ---- Publisher: stores the progress of the CTA's other warps, tails or heads, to the peers ----
            publish(smem_i32, smem_u64, lane, rank, head_offset if receives else tail_offset, local, peers)
        else:
            if not receives:
                # ---- Sender: in each iteration one row to each rank whose ring has space ----
                # Lane r handles the ring to rank r: ``rows_left`` rows, from row ``row`` of x on. ``tail``, ``head``,
                # ``base`` and ``capacity`` are those of dispatch.
                peer, has_ring = lane if lane < ranks else int32(0), lane < ranks and lane != rank
                remote = pointer_from_address(peers[peer], local)
                progress_slot = int32(progress_offset + warp * ranks + lane)
                published_slot = int32(published_offset + warp * ranks + lane)
                staging, phase, has_next = int32(warp * staging_words), uint32(0), True
                while has_next and channel < channels:
                    rows_left, row, later_rows = rows_of_channel(
                        rank_prefix, recv_channel_prefix, peer, rank, ranks, channel, channels, num_rows
                    )
                    has_next = cuda.any_sync(FULL_MASK, has_ring and later_rows > 0) != 0
                    if not has_next:
                        retire_warp(smem_i32, state, done_offset, warps, lane)
                    base = uint32(state[sent_offset + channel * ranks + peer])
                    tail, head = base, uint32(base - uint32(slots))  # the head is unknown: read it before the first row
                    capacity = uint32(1)  # for the first row, which waits until the ring is empty
                    rows_left, start = rows_left if has_ring else int32(0), uint64(0)
                    while cuda.any_sync(FULL_MASK, rows_left > 0):
                        if rows_left > 0 and uint32(tail - head) >= capacity:
                            head = uint32(ld_acquire_sys_s32(local, head_offset + channel * ranks + peer))
                            pipeline.fence_acquired()
                        can_send = rows_left > 0 and uint32(tail - head) < capacity
                        mask = uint32(cuda.ballot_sync(FULL_MASK, can_send))
                        for d in range(ranks):
                            if mask >> uint32(d) & uint32(1):
                                from_row = int64(cuda.shfl_sync(FULL_MASK, row, d))
                                x_offset = from_row * row_words
                                pipeline.load_row(
                                    smem_i32, smem_u64, barrier_offset + warp, lane, staging, x, x_offset, row_bytes
                                )
                                for i in range(lane, topk, 32):
                                    smem_i32[int32(staging + weights_offset + i)] = topk_weights[from_row * topk + i]
                                pipeline.fence_staging()
                                phase = pipeline.wait_row(smem_u64, barrier_offset + warp, phase)
                                slot_offset = int64(uint32(tail - base) % uint32(slots)) * slot_stride
                                ring = rings_offset + int64(channel * ranks + rank) * ring_words
                                capacity = pipeline.store_slot(
                                    lane == d,
                                    capacity,
                                    slots,
                                    remote,
                                    ctx,
                                    ring + slot_offset,
                                    smem_i32,
                                    staging,
                                    slot_bytes,
                                )
                        # Post the rows of earlier iterations, which ``tail`` counts. Their stores have completed when
                        # only the store of this iteration is pending.
                        if can_send:
                            pipeline.wait_all_but_one()
                        elif has_ring:
                            pipeline.wait_all()
                        if has_ring:
                            post_progress(smem_u64, progress_slot, channel, tail)
                        if can_send:
                            tail, rows_left, row = uint32(tail + uint32(1)), int32(rows_left - 1), int32(row + 1)
                        cuda.syncwarp()
                        if mask != uint32(0):
                            start = uint64(0)
                        else:
                            start, full = start_of_wait(start), rows_left > 0
                            if warp_abort_if_timed_out(start, full, ctx, COMBINE_SPACE, channel, lane, head, tail):
                                has_next, aborted = False, int32(1)
                                break
                    cuda.syncwarp()  # all lanes have read the counters
                    if has_ring:
                        pipeline.wait_all()
                        post_progress(smem_u64, progress_slot, channel, tail)
                        state[sent_offset + channel * ranks + peer] = int32(tail)
                    if has_next:
                        channel = next_channel_after_publish(
                            state, False, blocks, warps, smem_u64, progress_slot, published_slot, has_ring, lane
                        )
                if has_next:
                    retire_warp(smem_i32, state, done_offset, warps, lane)
            else:
                # ---- Receiver: one token after the other, the sum of its rows ----
                # Lane r handles the ring from rank r, lane ``rank`` the own rows, which are in x.
                source, has_ring = lane if lane < ranks else int32(0), lane < ranks and lane != rank
                progress_slot = int32(progress_offset + warp * ranks + lane)
                published_slot = int32(published_offset + warp * ranks + lane)
                staging, phase, has_next = int32(warp * staging_words), uint32(0), True
                while has_next and channel < channels:
                    token = first_token(channel, channels, num_tokens)
                    end = first_token(channel + 1, channels, num_tokens)
                    has_next = end < num_tokens
                    if not has_next:
                        retire_warp(smem_i32, state, done_offset, warps, lane)
                    first_own_row = first_row_at_peer(
                        rank_prefix, channel_prefix, rank, rank, ranks, channel, channels, num_rows
                    )
                    # ``send_head`` may come from a handle that the caller has overwritten. Own positions are limited to
                    # the rows of x. Those in rings need no limit, since they are taken modulo the slots.
                    max_rows = int32(num_rows - first_own_row) if lane == rank else int32(MAX_ROWS)
                    base = uint32(state[received_offset + channel * ranks + source])
                    head, tail, ring = base, base, rings_offset + int64(channel * ranks + lane) * ring_words
                    next_position = (
                        send_head[int64(token) * ranks + source] if lane < ranks and token < end else int32(-1)
                    )
                    while token < end:
                        # Start to load the own row. A position is that of the token's row in the ring, or among the own
                        # rows of the channel; or -1.
                        position = next_position if next_position < max_rows else int32(-1)
                        own = cuda.shfl_sync(FULL_MASK, position, rank)
                        own_row = int64(first_own_row + own)
                        if own >= 0:
                            pipeline.load_row(
                                smem_i32,
                                smem_u64,
                                barrier_offset + warp,
                                lane,
                                staging,
                                x,
                                own_row * row_words,
                                row_bytes,
                            )
                        else:
                            pipeline.wait_read()  # the store of the previous sum has read the staging buffer
                        # Wait for the rows of the sources: until the tail of each ring exceeds the position of its row.
                        wanted = uint32(base + uint32(position))
                        start, waiting, ready = uint64(0), int32(1), int32(1)
                        while waiting != 0:
                            missing = has_ring and position >= 0 and int32(uint32(tail - wanted)) <= 0
                            if missing:
                                tail = uint32(ld_acquire_sys_s32(local, tail_offset + channel * ranks + source))
                                missing = int32(uint32(tail - wanted)) <= 0
                            waiting = int32(1 if cuda.any_sync(FULL_MASK, missing) else 0)
                            if waiting != 0:
                                start = start_of_wait(start)
                                if warp_abort_if_timed_out(
                                    start, missing, ctx, COMBINE_ROWS, channel, lane, wanted, tail
                                ):
                                    waiting = ready = int32(0)
                        next_position = (
                            send_head[int64(token + 1) * ranks + source]
                            if lane < ranks and token + 1 < end
                            else int32(-1)
                        )
                        if own >= 0:
                            phase = pipeline.wait_row(smem_u64, barrier_offset + warp, phase)
                        if ready == 0:
                            has_next, aborted = False, int32(1)
                            break
                        cuda.syncwarp()  # makes the rows that one lane has acquired visible to all lanes
                        # Sum the rows, in place of the own one, and store the sum. Lanes read the rings with plain
                        # loads, which need no proxy fence after the acquire.
                        mask, out_offset = uint32(cuda.ballot_sync(FULL_MASK, position >= 0)), int64(token) * row_words
                        row_offset = ring + int64(uint32(position) % uint32(slots)) * slot_stride
                        reduce_token(smem_i32, staging, local, row_offset, mask, rank, lane, bias_0, bias_1, out_offset)
                        reduce_weights(local, row_offset, mask, rank, lane, topk_weights, own_row, out_weights, token)
                        pipeline.fence_staging()
                        cuda.syncwarp()  # all lanes have read the rows and written the sum
                        pipeline.store_row(lane, 0, out, out_offset, smem_i32, staging, row_bytes)
                        if has_ring and position >= 0:
                            head = uint32(wanted + uint32(1))
                            post_progress(smem_u64, progress_slot, channel, head)
                        token = int32(token + 1)
                    cuda.syncwarp()  # all lanes have read the counters
                    if has_ring:
                        state[received_offset + channel * ranks + source] = int32(head)
                    if has_next:
                        channel = next_channel_after_publish(
                            state, True, blocks, warps, smem_u64, progress_slot, published_slot, has_ring, lane
                        )
                if has_next:
                    retire_warp(smem_i32, state, done_offset, warps, lane)
                pipeline.wait_all()
            # ---- Tell the publisher that this warp is done ----
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(smem_i32, done_offset + warp, 1)

        # ---- After an abort: poison the outputs ----
        if cuda.syncthreads_or(aborted) != 0:
            adopt_abort(ctx)
            tokens = int64(num_tokens)
            fill(out, tokens * row_words, int32(-1))
            fill(out_weights, tokens * topk, float32(_NAN))

    return combine


SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32", "int32", "int64", "int32"),
    *("int32*", "int32*", "int32*"),
    *("int32*", "int32*", "int32*", "int32", "int32*", "int32*", "int32*", "float32*", "int32"),
)
