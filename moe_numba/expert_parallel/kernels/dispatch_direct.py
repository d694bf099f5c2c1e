"""The dispatch kernel without rings: rows go straight to their place in the output of the rank that gets them.

Where a row belongs is known before the first one goes: all ranks have exchanged their counts, and a warp walks its
channel's tokens in order. So nobody receives, nothing is carried twice, and no kernel waits for another one's. All
blocks send. But outputs must lie where other ranks can write, and all ranks must meet before, so that what lies there
is not needed any more, and afterwards, so that all has come.
"""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.kernels.buffer_layout import LOST, lines
from moe_numba.expert_parallel.kernels.channels import (
    ask_no_more,
    copied,
    first_channel,
    first_token,
    make_fetch,
    next_channel,
    prepare,
    rows_before,
)
from moe_numba.expert_parallel.kernels.progress import FULL
from moe_numba.expert_parallel.kernels.token_slot import make_fill, make_fill_up, make_keep
from moe_numba.ptx.atomics import ld_volatile_s32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, pointer_from_address


@cache
def make_direct(shape):
    """The kernel, for blocks of ``32 * shape.warps`` threads."""
    ranks, warps, bar, record = shape.num_ranks, shape.warps, shape.bar, shape.record
    progress_at, told_at, done_at, stage_words = shape.progress, shape.told, shape.done, lines(record.words)
    fill, keep, fill_up, (_, land) = make_fill(shape), make_keep(record), make_fill_up(record), make_fetch(bar)

    @cuda.jit
    def direct(
        mine,
        peers,
        state,
        status,
        patience,
        rank,
        channels,
        outputs,
        scales_at,
        experts_at,
        weights_at,
        source_at,
        room,
        x,
        scales,
        token_stride,
        scale_stride,
        experts,
        weights,
        is_token_in_rank,
        tokens,
        experts_per_rank,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        recv_x,
        recv_scales,
        recv_experts,
        recv_weights,
        recv_source,
        send_head,
        worst,
    ):
        smem = cuda.shared.array(0, int32, 128)
        bars = cuda.shared.array(0, uint64, 128)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        to, stage, parity, follows = lane if lane < ranks else int32(0), int32(warp * stage_words), uint32(0), True
        _, blocks, channel = first_channel(int32(cuda.gridDim.x), warp)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()  # the meeting afterwards may take its place; it waits for our end
        prepare(smem, bars, bar, progress_at, told_at, done_at, warps, ranks)
        if ld_volatile_s32(state, LOST) != 0:
            channel = channels  # the counts are not to be trusted
        while follows and channel < channels:
            t, end = first_token(channel, channels, tokens), first_token(channel + 1, channels, tokens)
            follows = end < tokens
            if not follows:
                ask_no_more(smem, state, done_at, warps, lane)
            first, put = rows_before(rank_prefix, channel_prefix, rank, to, ranks, channel, channels), int32(0)
            goes = lane < ranks and t < end and is_token_in_rank[int64(t) * ranks + to] != 0
            while t < end:
                fill(smem, bars, warp, lane, stage, t, x, scales, token_stride, scale_stride, experts, weights)
                if lane < ranks:
                    send_head[int64(t) * ranks + to] = put if goes else int32(-1)
                next_goes = lane < ranks and t + 1 < end and is_token_in_rank[int64(t + 1) * ranks + to] != 0
                # Who has not room for all that comes tells its host; nobody writes beyond.
                mask = uint32(cuda.ballot_sync(FULL, goes and first + put < room))
                parity = land(bars, warp, parity)
                for d in range(ranks):
                    if mask >> uint32(d) & uint32(1):
                        row, there = int64(cuda.shfl_sync(FULL, int32(first + put), d)), outputs[d]
                        keep(
                            smem,
                            stage,
                            lane,
                            d,
                            row,
                            d,
                            experts_per_rank,
                            pointer_from_address(there, recv_x),
                            pointer_from_address(uint64(there + scales_at), recv_scales),
                            pointer_from_address(uint64(there + experts_at), recv_experts),
                            pointer_from_address(uint64(there + weights_at), recv_weights),
                            pointer_from_address(uint64(there + source_at), recv_source),
                        )
                if goes:
                    put = int32(put + 1)
                goes = next_goes
                t = int32(t + 1)
            if follows:
                channel = next_channel(state, False, blocks, warps, lane)
        if follows:
            ask_no_more(smem, state, done_at, warps, lane)
        copied()
        fill_up(recv_experts, rank_prefix, rank, ranks, worst, warp * blocks + cuda.blockIdx.x, blocks * warps, lane)

    return direct


SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32"),
    *("uint64*", "uint64", "uint64", "uint64", "uint64", "int32"),
    *("int32*", "int32*", "int64", "int64", "int64*"),
    *("int32*", "uint8*", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32*", "int64*", "int32*"),
    *("int32*", "int32*", "int64"),
)
