"""Dispatch kernel: sends each token's row through per-channel ring buffers to the ranks that hold its experts.

A channel is a range of consecutive tokens of a rank. From each channel a ring leads to each other rank, in whose memory
it lies. The first CTAs send, the others receive. A warp works on one channel at a time, and a channel's rows arrive in
the warp that receives the same channel on each rank.

A CTA has copy warps and, as its last warp, a publisher. Its shared memory holds

- for each copy warp a staging buffer for one **packed token**, a row with its metadata, and one mbarrier, which says
  that the bulk load into the buffer is complete: lane 0 arrives and expects the bytes, all lanes wait, and the parity
  flips with each row. The buffer needs no second mbarrier: before a load, each lane waits until its own bulk stores
  have read it. Nor is it double-buffered, because the other warps of the CTA copy while this one waits.
- for each copy warp and ring the progress that the warp has posted, and what of it the publisher has stored to the
  peer. Each copy warp also has a done flag, and the publisher returns when all are set.

A sending warp takes its tokens in order: lane 0 loads the whole row once with a TMA bulk copy, the warp appends the
metadata in shared memory, and lane r stores the packed token to the ring at rank r with one bulk copy. A receiving warp
loads the slots that have arrived, rank after rank, and stores each row to its place in the output, which follows from
the prefix matrices of `notify.py`. In DeepEP's kernel a CTA has one channel, and in it one group of warps for each
destination rank; every group reads the token again, with loads and stores.

When the link is saturated, SMs do not all get the same share of its bandwidth. There are then more channels than warps,
and idle warps take the next channel (dynamic load balancing). Warps take channels in ascending order, so on every rank
some warp works on the lowest unfinished channel, and that warp waits for no other channel: the ranks cannot deadlock.

A rank's own rows do not pass through a ring: they go from shared memory directly to the output. One SM writes about
50 GB/s, to local or to peer memory. Receivers therefore copy half of these rows, while no rows arrive.

The protocol of a ring, of dispatch and of combine alike (lane r of a warp handles the ring to or from rank r):

1. The sender waits until its copy of the head shows a free slot; it polls the head, in its own memory, only if not. Its
   first row in a channel waits until the ring is empty: each launch begins with slot 0, wherever the last one ended.
2. It stores the row to the slot, and posts the tail in shared memory when that store has completed.
3. The CTA's publisher warp acquires what the other warps have posted, issues one fence at system scope, and stores the
   tails to the peers (`progress.py`).
4. The receiver polls the tail, in its own memory, with acquire; copies the row out of the slot; and posts the head when
   all lanes have read the slot. The publisher of the receiver's CTA stores the head to the sender.

After each acquire a proxy fence precedes the bulk copies that access what the counter guards. Counters continue from
launch to launch, and are never cleared. A warp has one progress slot per rank for all its channels, so it begins the
next channel when its progress on this one is published.

Channels: `channels.py`. Copies of rows: `bulk_pipeline.py`, and on GPUs without TMA `register_pipeline.py`. Memory map:
`buffer_layout.py`.
"""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.common.arguments import RankContext, RecvTensors, TokenInputs
from moe_numba.expert_parallel.common.buffer_layout import (
    ABORT_FLAG,
    align_words,
    buffer_layout,
    received_counters,
    sent_counters,
)
from moe_numba.expert_parallel.common.poison import adopt_abort, fill
from moe_numba.expert_parallel.common.timeout import (
    DISPATCH_ROWS,
    DISPATCH_SPACE,
    start_of_wait,
    warp_abort_if_timed_out,
)
from moe_numba.expert_parallel.rings.channels import (
    first_channel,
    first_row_at_peer,
    first_token,
    next_channel_after_publish,
    retire_warp,
    rows_of_channel,
)
from moe_numba.expert_parallel.rings.progress import clear_progress, make_publish, post_progress
from moe_numba.expert_parallel.rings.token_slot import make_pack_token, make_unpack_token, pad_tail
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_cta_shared_s32
from moe_numba.ptx.memory import griddepcontrol_wait, pointer_from_address
from moe_numba.ptx.warp import FULL_MASK


@cache
def make_dispatch(shape):
    """Make the kernel, for CTAs of ``shape.threads`` threads; the first ``senders`` CTAs send, at most half of them."""
    ranks, warps, slots, slot, pipeline = shape.num_ranks, shape.warps, shape.slots, shape.slot, shape.pipeline
    row_words, scale_words, topk = slot.row, slot.scales, slot.topk
    staging_words, slot_stride, slot_bytes = align_words(slot.words), slot.stride, 4 * slot.words
    barrier_offset, progress_offset = shape.barrier_offset, shape.progress_offset
    published_offset, done_offset = shape.published_offset, shape.done_offset
    tail_offset, head_offset = buffer_layout(ranks).tail(False), buffer_layout(ranks).head(False)
    sent_offset, received_offset = sent_counters(False), received_counters(False)
    pack_token, unpack_token, publish = make_pack_token(shape), make_unpack_token(shape), make_publish(shape)

    @cuda.jit
    def dispatch(
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
        scales,
        token_stride,
        scale_stride,
        topk_idx,
        topk_weights,
        is_token_in_rank,
        num_tokens,
        experts_per_rank,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        recv_x,
        recv_scales,
        recv_topk_idx,
        recv_topk_weights,
        recv_src_idx,
        send_head,
        num_recv_rows,
        can_repeat,
    ):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        inputs = TokenInputs(x, scales, token_stride, scale_stride, topk_idx, topk_weights)
        recv = RecvTensors(recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src_idx)
        num_rows = int32(num_recv_rows)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        receives, blocks, channel = first_channel(senders, warp)

        # ---- Shared memory: of each warp a row, an mbarrier, and its progress on each ring ----
        smem_i32 = cuda.shared.array(0, int32, 128)
        smem_u64 = cuda.shared.array(0, uint64, 128)  # the same memory
        griddepcontrol_wait()  # notify, or whatever ran before, has ended
        pipeline.init_barriers(smem_u64, barrier_offset, warps)
        clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks)

        # The same for all warps of a CTA: its publisher and its copy warps wait for one another.
        aborted, received = ld_volatile_s32(local, ABORT_FLAG), rank_prefix[int32((ranks - 1) * ranks + rank)]
        aborted = int32(cuda.syncthreads_or(aborted))
        if aborted != 0:
            pass  # a rank has aborted in an earlier kernel: the counts may be wrong
        elif can_repeat != 0 and received > num_recv_rows:
            pass  # the host launches the kernel again, with larger outputs; the peers wait meanwhile
        elif warp == warps:
            # ---- Publisher: stores the progress of the CTA's other warps, tails or heads, to the peers ----
            publish(smem_i32, smem_u64, lane, rank, head_offset if receives else tail_offset, local, peers)
        else:
            if not receives:
                # ---- Sender: one token after the other, to all ranks that it goes to ----
                # Lane r handles the ring to rank r. ``tail`` and ``head`` count its rows over all launches, ``base`` is
                # the tail at the beginning of this one. ``capacity`` is how many rows the ring may hold.
                peer, has_ring = lane if lane < ranks else int32(0), lane < ranks and lane != rank
                remote = pointer_from_address(peers[peer], local)
                progress_slot = int32(progress_offset + warp * ranks + lane)
                published_slot = int32(published_offset + warp * ranks + lane)
                staging, phase, has_next = int32(warp * staging_words), uint32(0), True
                while has_next and channel < channels:
                    token = first_token(channel, channels, num_tokens)
                    end = first_token(channel + 1, channels, num_tokens)
                    has_next = end < num_tokens  # if not, later channels are empty
                    if not has_next:
                        retire_warp(smem_i32, state, done_offset, warps, lane)
                    first_own_row = first_row_at_peer(
                        rank_prefix, channel_prefix, rank, rank, ranks, channel, channels, num_rows
                    )
                    max_own_rows = int32(num_rows - first_own_row)
                    ring = rings_offset + int64(channel * ranks + rank) * ring_words
                    base = uint32(state[sent_offset + channel * ranks + peer])
                    tail, own_rows = base, int32(0)
                    head = uint32(base - uint32(slots))  # the head is unknown: read it before the first row
                    capacity = uint32(1)  # for the first row, which waits until the ring is empty
                    selected = lane < ranks and token < end and is_token_in_rank[int64(token) * ranks + peer] != 0
                    store_pending = False
                    while token < end:
                        # Wait for space in all rings that this row goes to.
                        start, waiting = uint64(0), int32(1)
                        while waiting != 0:
                            full = has_ring and selected and uint32(tail - head) >= capacity
                            if full:
                                head = uint32(ld_acquire_sys_s32(local, head_offset + channel * ranks + peer))
                                pipeline.fence_acquired()
                                full = uint32(tail - head) >= capacity
                            waiting = int32(1 if cuda.any_sync(FULL_MASK, full) else 0)
                            if waiting != 0:
                                if has_ring and start == uint64(0):  # post all rows before waiting
                                    pipeline.wait_all()
                                    post_progress(smem_u64, progress_slot, channel, tail)
                                    store_pending = False
                                start = start_of_wait(start)
                                if warp_abort_if_timed_out(start, full, ctx, DISPATCH_SPACE, channel, lane, head, tail):
                                    waiting, has_next, aborted = int32(0), False, int32(1)
                                    end = token
                        if token == end:  # the wait was aborted
                            break
                        # Load the row, and meanwhile post the earlier ones. If the previous token went to this lane's
                        # rank, its store may not have completed, so it is not posted yet.
                        pack_token(smem_i32, smem_u64, barrier_offset + warp, lane, staging, token, inputs)
                        if lane < ranks:
                            send_head[int64(token) * ranks + peer] = (
                                int32(uint32(tail - base)) if selected else int32(-1)
                            )
                        next_selected = (
                            lane < ranks and token + 1 < end and is_token_in_rank[int64(token + 1) * ranks + peer] != 0
                        )
                        if has_ring and store_pending:
                            pipeline.wait_all_but_one()
                            post_progress(smem_u64, progress_slot, channel, tail - uint32(1))
                        elif has_ring:
                            pipeline.wait_all()
                            post_progress(smem_u64, progress_slot, channel, tail)
                        phase = pipeline.wait_row(smem_u64, barrier_offset + warp, phase)
                        # Store it: to the rings of the peers, and every second own row directly to the output. Lane
                        # ``rank`` issues the latter: it has no ring, so no wait for a ring's stores includes them.
                        store_pending = has_ring and selected
                        slot_offset = ring + int64(uint32(tail - base) % uint32(slots)) * slot_stride
                        capacity = pipeline.store_slot(
                            store_pending, capacity, slots, remote, ctx, slot_offset, smem_i32, staging, slot_bytes
                        )
                        if cuda.shfl_sync(FULL_MASK, int32(1 if selected else 0), rank) != 0:
                            if own_rows & 1 == 0 and own_rows < max_own_rows:
                                row = int64(first_own_row + own_rows)
                                unpack_token(smem_i32, staging, lane, rank, row, rank, experts_per_rank, recv)
                            own_rows = int32(own_rows + 1)
                        if selected:
                            tail = uint32(tail + uint32(1))
                        selected = next_selected
                        token = int32(token + 1)
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
                pipeline.wait_all()  # own rows, which lane `rank` stored
            else:
                # ---- Receiver: all rows that have arrived, from one rank after the other ----
                # Lane r handles the ring from rank r: ``rows_left`` rows, the next one for row ``row`` of the output.
                # ``token`` runs over this rank's own tokens of the channel.
                source, has_ring = lane if lane < ranks else int32(0), lane < ranks and lane != rank
                progress_slot = int32(progress_offset + warp * ranks + lane)
                published_slot = int32(published_offset + warp * ranks + lane)
                staging, phase, has_next = int32(warp * staging_words), uint32(0), True
                while has_next and channel < channels:
                    token = first_token(channel, channels, num_tokens)
                    end = first_token(channel + 1, channels, num_tokens)
                    rows_left, row, later_rows = rows_of_channel(
                        rank_prefix, recv_channel_prefix, source, rank, ranks, channel, channels, num_rows
                    )
                    has_next = end < num_tokens or cuda.any_sync(FULL_MASK, has_ring and later_rows > 0) != 0
                    if not has_next:
                        retire_warp(smem_i32, state, done_offset, warps, lane)
                    first_own_row = first_row_at_peer(
                        rank_prefix, channel_prefix, rank, rank, ranks, channel, channels, num_rows
                    )
                    max_own_rows = int32(num_rows - first_own_row)
                    base = uint32(state[received_offset + channel * ranks + source])
                    head, rows_left, own_rows = base, rows_left if has_ring else int32(0), int32(0)
                    start = uint64(0)
                    while cuda.any_sync(FULL_MASK, rows_left > 0) or token < end:
                        arrived = int32(0)
                        if rows_left > 0:
                            tail = ld_acquire_sys_s32(local, tail_offset + channel * ranks + source)
                            arrived = min(int32(uint32(tail) - head), rows_left)
                        mask = uint32(cuda.ballot_sync(FULL_MASK, arrived > 0))
                        if mask != uint32(0):
                            pipeline.fence_acquired()
                            for s in range(ranks):
                                if mask >> uint32(s) & uint32(1):
                                    count, first_row = (
                                        cuda.shfl_sync(FULL_MASK, arrived, s),
                                        cuda.shfl_sync(FULL_MASK, row, s),
                                    )
                                    first_slot = uint32(cuda.shfl_sync(FULL_MASK, int32(uint32(head - base)), s))
                                    for i in range(count):
                                        slot_offset = (
                                            int64(uint32(first_slot + uint32(i)) % uint32(slots)) * slot_stride
                                        )
                                        ring = rings_offset + int64(channel * ranks + s) * ring_words
                                        pipeline.load_row(
                                            smem_i32,
                                            smem_u64,
                                            barrier_offset + warp,
                                            lane,
                                            staging,
                                            local,
                                            ring + slot_offset,
                                            slot_bytes,
                                        )
                                        phase = pipeline.wait_row(smem_u64, barrier_offset + warp, phase)
                                        to_row = int64(first_row + i)
                                        unpack_token(smem_i32, staging, lane, 0, to_row, rank, experts_per_rank, recv)
                                        cuda.syncwarp()  # all lanes have read what the next row overwrites
                            if arrived > 0:
                                head, rows_left = uint32(head + uint32(arrived)), int32(rows_left - arrived)
                                row = int32(row + arrived)
                                post_progress(smem_u64, progress_slot, channel, head)
                            start = uint64(0)
                        elif token < end:  # no rows have arrived: copy every second own row
                            if is_token_in_rank[int64(token) * ranks + rank] != 0:
                                if own_rows & 1 and own_rows < max_own_rows:
                                    pack_token(smem_i32, smem_u64, barrier_offset + warp, lane, staging, token, inputs)
                                    phase = pipeline.wait_row(smem_u64, barrier_offset + warp, phase)
                                    to_row = int64(first_own_row + own_rows)
                                    unpack_token(smem_i32, staging, lane, 0, to_row, rank, experts_per_rank, recv)
                                    cuda.syncwarp()
                                own_rows = int32(own_rows + 1)
                            token = int32(token + 1)
                        else:
                            start, seen = start_of_wait(start), uint32(head + uint32(arrived))
                            if warp_abort_if_timed_out(
                                start, rows_left > 0, ctx, DISPATCH_ROWS, channel, lane, head, seen
                            ):
                                has_next, aborted = False, int32(1)
                                break
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
            if receives and topk > 0:
                nth = warp * blocks + cuda.blockIdx.x - senders
                num_received = rank_prefix[(ranks - 1) * ranks + rank]
                pad_tail(recv_topk_idx, topk, num_received, num_recv_rows, nth, blocks * warps, lane)

        # ---- After an abort: poison the outputs ----
        if cuda.syncthreads_or(aborted) != 0:
            adopt_abort(ctx)
            rows = int64(num_rows)
            fill(recv_x, rows * row_words, int32(-1))
            fill(recv_scales, rows * scale_words, int32(-1))
            fill(recv_topk_idx, rows * topk, int32(-1))
            fill(recv_topk_weights, rows * topk, int32(-1))
            fill(recv_src_idx, rows, int32(-1))

    return dispatch


def signature(topk_idx="int64*"):
    """Return the kernel's signature; ``topk_idx`` is the type of the pointers to experts, "int64*" or "int32*"."""
    return (
        *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32", "int32", "int64", "int32"),
        *("int32*", "int32*", "int64", "int64", topk_idx),
        *("int32*", "uint8*", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32*", topk_idx, "int32*"),
        *("int32*", "int32*", "int64", "int32"),
    )
