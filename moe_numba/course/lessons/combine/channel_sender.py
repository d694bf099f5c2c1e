"""The sender of steps 4 to 6: the package's, except that a rank also sends its own rows through rings, to itself."""

from functools import cache
from typing import NamedTuple

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.common.buffer_layout import align_words, buffer_layout, sent_counters
from moe_numba.expert_parallel.common.timeout import COMBINE_SPACE, start_of_wait, warp_abort_if_timed_out
from moe_numba.expert_parallel.rings.channels import next_channel_after_publish, retire_warp, rows_of_channel
from moe_numba.expert_parallel.rings.progress import post_progress
from moe_numba.ptx.atomics import ld_acquire_sys_s32
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK


class RingMemory(NamedTuple):
    """The token slots of one operation in each rank's shared buffer, in words."""

    offset: object  # int64, of the first ring
    stride: object  # int32, from ring to ring


class PrefixMatrices(NamedTuple):
    """The prefix sums of row counts that notify computes; the first three tensors of a handle."""

    rank: object  # int32* [num_ranks, num_ranks]
    channel: object  # int32* [num_ranks, channels]
    recv_channel: object  # int32* [num_ranks, channels]


class CombineTensors(NamedTuple):
    """The inputs and outputs of combine."""

    x: object  # int32* [num_rows, hidden / 2], pairs of bfloat16
    num_rows: object  # int32
    send_head: object  # int32* [num_tokens, num_ranks]
    num_tokens: object  # int32
    out: object  # int32*


@cache
def make_send(shape):
    """Make ``send``, the work of a warp of a sending CTA; lane r handles the ring to rank r."""
    ranks, warps, slots, slot, pipeline = shape.num_ranks, shape.warps, shape.slots, shape.slot, shape.pipeline
    row_words, row_bytes, barrier_offset = slot.row, 4 * slot.row, shape.barrier_offset
    staging_words, slot_stride, slot_bytes = align_words(slot.words), slot.stride, 4 * slot.words
    progress_offset, published_offset, done_offset = shape.progress_offset, shape.published_offset, shape.done_offset
    head_offset, sent_offset = buffer_layout(ranks).head(True), sent_counters(True)

    @cuda.jit(device=True)
    def send(smem_i32, smem_u64, channel, channels, blocks, ctx, rings, prefix, tensors):
        lane, warp, rank = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5), ctx.rank
        peer, has_ring = lane if lane < ranks else int32(0), lane < ranks
        remote = pointer_from_address(ctx.peers[peer], ctx.local)
        progress_slot = int32(progress_offset + warp * ranks + lane)
        published_slot = int32(published_offset + warp * ranks + lane)
        staging, phase, has_next = int32(warp * staging_words), uint32(0), True
        while has_next and channel < channels:
            rows_left, row, later_rows = rows_of_channel(
                prefix.rank, prefix.recv_channel, peer, rank, ranks, channel, channels, tensors.num_rows
            )
            has_next = cuda.any_sync(FULL_MASK, has_ring and later_rows > 0) != 0
            if not has_next:
                retire_warp(smem_i32, ctx.state, done_offset, warps, lane)
            base = uint32(ctx.state[sent_offset + channel * ranks + peer])
            tail, head = base, uint32(base - uint32(slots))  # the head is unknown: read it before the first row
            capacity = uint32(1)  # the last launch may have used other slots: wait until the ring is empty
            rows_left, start = rows_left if has_ring else int32(0), uint64(0)
            while cuda.any_sync(FULL_MASK, rows_left > 0):
                if rows_left > 0 and uint32(tail - head) >= capacity:
                    head = uint32(ld_acquire_sys_s32(ctx.local, head_offset + channel * ranks + peer))
                    pipeline.fence_acquired()
                can_send = rows_left > 0 and uint32(tail - head) < capacity
                mask = uint32(cuda.ballot_sync(FULL_MASK, can_send))
                for d in range(ranks):  # one row to each rank whose ring has space
                    if mask >> uint32(d) & uint32(1):
                        x_offset = int64(cuda.shfl_sync(FULL_MASK, row, d)) * row_words
                        pipeline.load_row(
                            smem_i32, smem_u64, barrier_offset + warp, lane, staging, tensors.x, x_offset, row_bytes
                        )
                        pipeline.fence_staging()
                        phase = pipeline.wait_row(smem_u64, barrier_offset + warp, phase)
                        slot_offset = int64(uint32(tail - base) % uint32(slots)) * slot_stride
                        ring = rings.offset + int64(channel * ranks + rank) * rings.stride
                        capacity = pipeline.store_slot(
                            lane == d, capacity, slots, remote, ctx, ring + slot_offset, smem_i32, staging, slot_bytes
                        )
                # The earlier stores have completed, except perhaps the last one.
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
                        has_next = False
                        break
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

    return send
