"""Dispatch kernel: sends each token's row through per-channel ring buffers to the ranks that hold its experts.

Each warp works on one channel. The first CTAs send, the others receive; a channel's rows arrive in the warp that
receives the same channel on each rank. DeepEP's kernel has one CTA per channel and one group of warps per destination
rank in it, and every group reads the token again, with loads and stores. Here one thread loads the whole row once with
a TMA bulk copy, the warp appends the metadata in shared memory, and one lane per destination rank stores the **packed
token** to the peer's token slot with one bulk copy. Many warps wait at the same time, which hides round trips and
fences.

When the link is saturated, SMs do not all get the same share of its bandwidth. There are then more channels than warps,
and idle warps take the next channel (dynamic load balancing). Warps take channels in ascending order, so on every rank
some warp works on the lowest unfinished channel, and that warp waits for no other channel: the ranks cannot deadlock.

A rank's own rows do not pass through a ring: they go from shared memory directly to the output. One SM writes about
50 GB/s, to local or to peer memory. Receivers therefore copy half of these rows, while no rows arrive.

Channels: `channels.py`. Copies of rows: `bulk_pipeline.py`, and on GPUs without TMA `register_pipeline.py`. Publishing
of heads and tails: `progress.py`. Memory map: `buffer_layout.py`.
"""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.common.arguments import PrefixMatrices, RankContext, RecvTensors, RingMemory, TokenInputs
from moe_numba.expert_parallel.common.buffer_layout import (
    ABORT_FLAG,
    align_words,
    buffer_layout,
    received_counters,
    sent_counters,
)
from moe_numba.expert_parallel.common.poison import make_poison_rows
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
from moe_numba.expert_parallel.rings.progress import make_publish, post_progress
from moe_numba.expert_parallel.rings.token_slot import make_pack_token, make_pad_tail, make_unpack_token
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_cta_shared_s32
from moe_numba.ptx.memory import griddepcontrol_wait, pointer_from_address
from moe_numba.ptx.warp import FULL_MASK


@cache
def make_send(shape):
    """Make ``send``, the work of a warp of a sending CTA; it returns whether the warp has aborted.

    Lane r handles the ring to rank r.
    """
    ranks, warps, slots, slot = shape.num_ranks, shape.warps, shape.slots, shape.slot
    progress_offset, published_offset, done_offset = shape.progress_offset, shape.published_offset, shape.done_offset
    head_offset, sent_offset = buffer_layout(ranks).head(False), sent_counters(False)
    pack_token, unpack_token, pipeline = make_pack_token(shape), make_unpack_token(shape), shape.pipeline
    staging_words = align_words(slot.words)
    (_, wait_row), store_slot = pipeline.make_row_loader(shape.barrier_offset), pipeline.make_store_slot(shape)

    @cuda.jit(device=True)
    def send(smem_i32, smem_u64, channel, channels, blocks, ctx, rings, inputs, prefix, recv, send_head):
        lane, warp, rank = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5), ctx.rank
        peer, has_ring = lane if lane < ranks else int32(0), lane < ranks and lane != rank
        remote = pointer_from_address(ctx.peers[peer], ctx.local)
        progress_slot = int32(progress_offset + warp * ranks + lane)
        published_slot = int32(published_offset + warp * ranks + lane)
        staging, phase, has_next, aborted = int32(warp * staging_words), uint32(0), True, int32(0)
        while has_next and channel < channels:
            token = first_token(channel, channels, inputs.num_tokens)
            end = first_token(channel + 1, channels, inputs.num_tokens)
            has_next = end < inputs.num_tokens
            if not has_next:
                retire_warp(smem_i32, ctx.state, done_offset, warps, lane)
            first_own_row = first_row_at_peer(prefix, rank, rank, ranks, channel, channels, recv.num_rows)
            max_own_rows = int32(recv.num_rows - first_own_row)
            base = uint32(ctx.state[sent_offset + channel * ranks + peer])
            tail, own_rows = base, int32(0)
            head = uint32(base - uint32(slots))  # the head is unknown: read it before the first row
            capacity = uint32(1)  # the last launch may have used other slots: wait until the ring is empty
            selected = lane < ranks and token < end and inputs.is_token_in_rank[int64(token) * ranks + peer] != 0
            store_pending = False
            while token < end:
                # Wait for space in all rings that this row goes to.
                start, waiting = uint64(0), int32(1)
                while waiting != 0:
                    full = has_ring and selected and uint32(tail - head) >= capacity
                    if full:
                        head = uint32(ld_acquire_sys_s32(ctx.local, head_offset + channel * ranks + peer))
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
                if token == end:
                    break
                pack_token(smem_i32, smem_u64, warp, lane, staging, token, inputs)
                if lane < ranks:
                    send_head[int64(token) * ranks + peer] = int32(uint32(tail - base)) if selected else int32(-1)
                next_selected = (
                    lane < ranks and token + 1 < end and inputs.is_token_in_rank[int64(token + 1) * ranks + peer] != 0
                )
                # Meanwhile the earlier stores have completed, except perhaps the last one.
                if has_ring and store_pending:
                    pipeline.wait_all_but_one()
                    post_progress(smem_u64, progress_slot, channel, tail - uint32(1))
                elif has_ring:
                    pipeline.wait_all()
                    post_progress(smem_u64, progress_slot, channel, tail)
                phase = wait_row(smem_u64, warp, phase)
                store_pending = has_ring and selected
                position = uint32(tail - base)
                capacity = store_slot(store_pending, capacity, remote, ctx, rings, channel, position, smem_i32, staging)
                if cuda.shfl_sync(FULL_MASK, int32(1 if selected else 0), rank) != 0:
                    if own_rows & 1 == 0 and own_rows < max_own_rows:
                        row = int64(first_own_row + own_rows)
                        unpack_token(smem_i32, staging, lane, rank, row, rank, inputs.experts_per_rank, recv)
                    own_rows = int32(own_rows + 1)
                if selected:
                    tail = uint32(tail + uint32(1))
                selected = next_selected
                token = int32(token + 1)
            cuda.syncwarp()  # all lanes have read the counters
            if has_ring:
                pipeline.wait_all()
                post_progress(smem_u64, progress_slot, channel, tail)
                ctx.state[sent_offset + channel * ranks + peer] = int32(tail)
            if has_next:
                channel = next_channel_after_publish(
                    ctx.state, False, blocks, warps, smem_u64, progress_slot, published_slot, has_ring, lane
                )
        if has_next:
            retire_warp(smem_i32, ctx.state, done_offset, warps, lane)
        pipeline.wait_all()  # own rows, which lane `rank` stored
        return aborted

    return send


@cache
def make_receive(shape):
    """Make ``receive``, the work of a warp of a receiving CTA; it returns whether the warp has aborted.

    Lane r handles the ring from rank r.
    """
    ranks, warps, slots, slot = shape.num_ranks, shape.warps, shape.slots, shape.slot
    progress_offset, published_offset, done_offset = shape.progress_offset, shape.published_offset, shape.done_offset
    tail_offset, received_offset = buffer_layout(ranks).tail(False), received_counters(False)
    slot_stride, slot_bytes, staging_words = slot.stride, 4 * slot.words, align_words(slot.words)
    pack_token, unpack_token, pipeline = make_pack_token(shape), make_unpack_token(shape), shape.pipeline
    load_row, wait_row = pipeline.make_row_loader(shape.barrier_offset)

    @cuda.jit(device=True)
    def receive(smem_i32, smem_u64, channel, channels, blocks, ctx, rings, inputs, prefix, recv):
        lane, warp, rank = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5), ctx.rank
        source, has_ring = lane if lane < ranks else int32(0), lane < ranks and lane != rank
        progress_slot = int32(progress_offset + warp * ranks + lane)
        published_slot = int32(published_offset + warp * ranks + lane)
        staging, phase, has_next, aborted = int32(warp * staging_words), uint32(0), True, int32(0)
        while has_next and channel < channels:
            token = first_token(channel, channels, inputs.num_tokens)
            end = first_token(channel + 1, channels, inputs.num_tokens)
            rows_left, row, later_rows = rows_of_channel(prefix, source, rank, ranks, channel, channels, recv.num_rows)
            has_next = end < inputs.num_tokens or cuda.any_sync(FULL_MASK, has_ring and later_rows > 0) != 0
            if not has_next:
                retire_warp(smem_i32, ctx.state, done_offset, warps, lane)
            first_own_row = first_row_at_peer(prefix, rank, rank, ranks, channel, channels, recv.num_rows)
            max_own_rows = int32(recv.num_rows - first_own_row)
            base = uint32(ctx.state[received_offset + channel * ranks + source])
            head, rows_left, own_rows = base, rows_left if has_ring else int32(0), int32(0)
            start = uint64(0)
            while cuda.any_sync(FULL_MASK, rows_left > 0) or token < end:
                arrived = int32(0)
                if rows_left > 0:
                    tail = ld_acquire_sys_s32(ctx.local, tail_offset + channel * ranks + source)
                    arrived = min(int32(uint32(tail) - head), rows_left)
                mask = uint32(cuda.ballot_sync(FULL_MASK, arrived > 0))
                if mask != uint32(0):
                    pipeline.fence_acquired()
                    for s in range(ranks):
                        if mask >> uint32(s) & uint32(1):
                            count, first_row = cuda.shfl_sync(FULL_MASK, arrived, s), cuda.shfl_sync(FULL_MASK, row, s)
                            first_slot = uint32(cuda.shfl_sync(FULL_MASK, int32(uint32(head - base)), s))
                            for i in range(count):
                                slot_offset = int64(uint32(first_slot + uint32(i)) % uint32(slots)) * slot_stride
                                ring = rings.offset + int64(channel * ranks + s) * rings.stride
                                load_row(
                                    smem_i32, smem_u64, warp, lane, staging, ctx.local, ring + slot_offset, slot_bytes
                                )
                                phase = wait_row(smem_u64, warp, phase)
                                to_row = int64(first_row + i)
                                unpack_token(smem_i32, staging, lane, 0, to_row, rank, inputs.experts_per_rank, recv)
                                cuda.syncwarp()  # all lanes have read what the next row overwrites
                    if arrived > 0:
                        head, rows_left = uint32(head + uint32(arrived)), int32(rows_left - arrived)
                        row = int32(row + arrived)
                        post_progress(smem_u64, progress_slot, channel, head)
                    start = uint64(0)
                elif token < end:  # no rows have arrived: copy every second own row
                    if inputs.is_token_in_rank[int64(token) * ranks + rank] != 0:
                        if own_rows & 1 and own_rows < max_own_rows:
                            pack_token(smem_i32, smem_u64, warp, lane, staging, token, inputs)
                            phase = wait_row(smem_u64, warp, phase)
                            to_row = int64(first_own_row + own_rows)
                            unpack_token(smem_i32, staging, lane, 0, to_row, rank, inputs.experts_per_rank, recv)
                            cuda.syncwarp()
                        own_rows = int32(own_rows + 1)
                    token = int32(token + 1)
                else:
                    start, seen = start_of_wait(start), uint32(head + uint32(arrived))
                    if warp_abort_if_timed_out(start, rows_left > 0, ctx, DISPATCH_ROWS, channel, lane, head, seen):
                        has_next, aborted = False, int32(1)
                        break
            cuda.syncwarp()  # all lanes have read the counters
            if has_ring:
                ctx.state[received_offset + channel * ranks + source] = int32(head)
            if has_next:
                channel = next_channel_after_publish(
                    ctx.state, True, blocks, warps, smem_u64, progress_slot, published_slot, has_ring, lane
                )
        if has_next:
            retire_warp(smem_i32, ctx.state, done_offset, warps, lane)
        pipeline.wait_all()
        return aborted

    return receive


@cache
def make_dispatch(shape):
    """Make the kernel, for CTAs of ``shape.threads`` threads; the first ``senders`` CTAs send, at most half of them."""
    ranks, warps, barrier_offset = shape.num_ranks, shape.warps, shape.barrier_offset
    progress_offset, published_offset, done_offset = shape.progress_offset, shape.published_offset, shape.done_offset
    tail_offset, head_offset = buffer_layout(ranks).tail(False), buffer_layout(ranks).head(False)
    send, receive, publish = make_send(shape), make_receive(shape), make_publish(shape)
    pad_tail, poison_rows, pipeline = make_pad_tail(shape.slot), make_poison_rows(shape.slot), shape.pipeline

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
        smem_i32 = cuda.shared.array(0, int32, 128)
        smem_u64 = cuda.shared.array(0, uint64, 128)  # the same memory
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        rings = RingMemory(rings_offset, ring_words)
        prefix = PrefixMatrices(rank_prefix, channel_prefix, recv_channel_prefix)
        inputs = TokenInputs(
            x,
            scales,
            token_stride,
            scale_stride,
            topk_idx,
            topk_weights,
            is_token_in_rank,
            num_tokens,
            experts_per_rank,
        )
        recv = RecvTensors(recv_x, recv_scales, recv_topk_idx, recv_topk_weights, recv_src_idx, int32(num_recv_rows))
        receives, blocks, channel = first_channel(senders, warp)
        griddepcontrol_wait()
        pipeline.init_smem(
            smem_i32, smem_u64, barrier_offset, progress_offset, published_offset, done_offset, warps, ranks
        )
        # The same for all warps of a CTA: its publisher and its copy warps wait for one another.
        aborted, received = ld_volatile_s32(local, ABORT_FLAG), rank_prefix[int32((ranks - 1) * ranks + rank)]
        aborted = int32(cuda.syncthreads_or(aborted))
        if aborted != 0:
            pass  # a rank has aborted in an earlier kernel: the counts may be wrong
        elif can_repeat != 0 and received > num_recv_rows:
            pass  # the host launches the kernel again, with larger outputs; the peers wait meanwhile
        elif warp == warps:
            publish(smem_i32, smem_u64, lane, rank, head_offset if receives else tail_offset, local, peers)
        else:
            if receives:
                aborted = receive(smem_i32, smem_u64, channel, channels, blocks, ctx, rings, inputs, prefix, recv)
            else:
                aborted = send(
                    smem_i32, smem_u64, channel, channels, blocks, ctx, rings, inputs, prefix, recv, send_head
                )
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(smem_i32, done_offset + warp, 1)
            if receives:
                nth = warp * blocks + cuda.blockIdx.x - senders
                pad_tail(recv_topk_idx, rank_prefix, rank, ranks, num_recv_rows, nth, blocks * warps, lane)
        if cuda.syncthreads_or(aborted) != 0:
            poison_rows(ctx, recv)

    return dispatch


def signature(topk_idx="int64*"):
    """Return the kernel's signature; ``topk_idx`` is the type of the pointers to experts, "int64*" or "int32*"."""
    return (
        *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32", "int32", "int64", "int32"),
        *("int32*", "int32*", "int64", "int64", topk_idx),
        *("int32*", "uint8*", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32*", topk_idx, "int32*"),
        *("int32*", "int32*", "int64", "int32"),
    )
