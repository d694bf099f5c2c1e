"""Direct dispatch kernel: writes each row directly to its place in the receiving rank's output, without rings.

The place of a row is known before the first row is sent: all ranks have exchanged their counts, and a warp visits its
channel's tokens in order. No CTA receives, no row is copied twice, and no kernel waits for a peer's kernel. All CTAs
send. In return, outputs must be symmetric memory, and all ranks execute a barrier before the kernel, so that no rank
still reads the previous contents, and another one after it, so that all rows have arrived. After an abort this kernel
writes nothing, and the barrier after it poisons the output.
"""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.common.arguments import RecvTensors, TokenInputs
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG, align_words
from moe_numba.expert_parallel.rings.channels import (
    first_channel,
    first_row_at_peer,
    first_token,
    next_channel,
    retire_warp,
)
from moe_numba.expert_parallel.rings.progress import clear_progress
from moe_numba.expert_parallel.rings.token_slot import make_pack_token, make_unpack_token, pad_tail
from moe_numba.ptx.atomics import ld_volatile_s32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, pointer_from_address
from moe_numba.ptx.warp import FULL_MASK


@cache
def make_dispatch_direct(shape):
    """Make the kernel, for CTAs of ``32 * shape.warps`` threads."""
    ranks, warps, barrier_offset, slot = shape.num_ranks, shape.warps, shape.barrier_offset, shape.slot
    progress_offset, published_offset, done_offset = shape.progress_offset, shape.published_offset, shape.done_offset
    pack_token, unpack_token, pipeline = make_pack_token(shape), make_unpack_token(shape), shape.pipeline
    staging_words, topk = align_words(slot.words), slot.topk

    @cuda.jit
    def dispatch_direct(
        local,
        peers,
        state,
        status,
        timeout_ns,
        rank,
        channels,
        outputs,
        scales_offset,
        topk_idx_offset,
        topk_weights_offset,
        src_idx_offset,
        capacity,
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
    ):
        inputs = TokenInputs(x, scales, token_stride, scale_stride, topk_idx, topk_weights)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        peer, has_next = lane if lane < ranks else int32(0), True  # lane r counts the rows to rank r
        _, blocks, channel = first_channel(int32(cuda.gridDim.x), warp)

        # ---- Shared memory: of each warp a row and an mbarrier ----
        smem_i32 = cuda.shared.array(0, int32, 128)
        smem_u64 = cuda.shared.array(0, uint64, 128)  # the same memory
        staging, phase = int32(warp * staging_words), uint32(0)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()  # the barrier kernel may become resident; it waits for this grid to end
        pipeline.init_barriers(smem_u64, barrier_offset, warps)
        clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks)

        # ---- One row after the other, to all ranks that the token goes to ----
        if ld_volatile_s32(local, ABORT_FLAG) != 0:
            channel = channels  # the counts may be wrong
        while has_next and channel < channels:
            token, end = first_token(channel, channels, num_tokens), first_token(channel + 1, channels, num_tokens)
            has_next = end < num_tokens
            if not has_next:
                retire_warp(smem_i32, state, done_offset, warps, lane)
            first_row, sent = (
                first_row_at_peer(rank_prefix, channel_prefix, rank, peer, ranks, channel, channels, capacity),
                int32(0),
            )
            max_rows = int32(capacity - first_row)
            selected = lane < ranks and token < end and is_token_in_rank[int64(token) * ranks + peer] != 0
            while token < end:
                pack_token(smem_i32, smem_u64, barrier_offset + warp, lane, staging, token, inputs)
                if lane < ranks:
                    send_head[int64(token) * ranks + peer] = sent if selected else int32(-1)
                next_selected = (
                    lane < ranks and token + 1 < end and is_token_in_rank[int64(token + 1) * ranks + peer] != 0
                )
                # Writes are clipped to the output's capacity; a rank whose output is too small aborts in notify.
                mask = uint32(cuda.ballot_sync(FULL_MASK, selected and sent < max_rows))
                phase = pipeline.wait_row(smem_u64, barrier_offset + warp, phase)
                for d in range(ranks):
                    if mask >> uint32(d) & uint32(1):
                        row, output = int64(cuda.shfl_sync(FULL_MASK, int32(first_row + sent), d)), outputs[d]
                        recv = RecvTensors(
                            pointer_from_address(output, recv_x),
                            pointer_from_address(uint64(output + scales_offset), recv_scales),
                            pointer_from_address(uint64(output + topk_idx_offset), recv_topk_idx),
                            pointer_from_address(uint64(output + topk_weights_offset), recv_topk_weights),
                            pointer_from_address(uint64(output + src_idx_offset), recv_src_idx),
                        )
                        unpack_token(smem_i32, staging, lane, d, row, d, experts_per_rank, recv)
                if selected:
                    sent = int32(sent + 1)
                selected = next_selected
                token = int32(token + 1)
            if has_next:
                channel = next_channel(state, False, blocks, warps, lane)
        if has_next:
            retire_warp(smem_i32, state, done_offset, warps, lane)
        pipeline.wait_all()
        if topk > 0:
            nth, received = warp * blocks + cuda.blockIdx.x, rank_prefix[(ranks - 1) * ranks + rank]
            pad_tail(recv_topk_idx, topk, received, num_recv_rows, nth, blocks * warps, lane)

    return dispatch_direct


def signature(topk_idx="int64*"):
    """Return the kernel's signature; ``topk_idx`` is the type of the pointers to experts, "int64*" or "int32*"."""
    return (
        *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32"),
        *("uint64*", "uint64", "uint64", "uint64", "uint64", "int32"),
        *("int32*", "int32*", "int64", "int64", topk_idx),
        *("int32*", "uint8*", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32*", topk_idx, "int32*"),
        *("int32*", "int32*", "int64"),
    )
