"""A row as dispatch sends it: how a token and what belongs to it become a record, and a record becomes a row."""

from functools import cache

from numba import cuda, int32, int64

from moe_numba.expert_parallel.kernels.channels import make_fetch
from moe_numba.ptx.cp_async import bulk_commit_group, bulk_store
from moe_numba.ptx.fence import fence_proxy_async_shared

_MOST_NUMBER = (1 << 31) - 1


@cache
def make_fill(shape):
    """``fill``: a token's row, and behind it what belongs to it, come to a warp's stage."""
    record, (fetch, _) = shape.record, make_fetch(shape.bar)
    row_words, scale_words, topk, row_bytes = record.row, record.scales, record.topk, 4 * record.row
    experts_at, weights_at, source_at = record.experts, record.weights, record.source_index
    rounds = -(-scale_words // 32)
    held = max(1, rounds)

    @cuda.jit(device=True)
    def fill(smem, bars, warp, lane, stage, t, x, scales, token_stride, scale_stride, experts, weights):
        # What is small is asked for first, so that it comes while the last row goes.
        some = cuda.local.array(held, int32)
        expert, weight = int32(-1), int32(0)
        for j in range(rounds):
            if lane + 32 * j < scale_words:
                some[j] = scales[t * token_stride + (lane + 32 * j) * scale_stride]
        if lane < topk:
            number = experts[int64(t) * topk + lane]
            expert = int32(number) if 0 <= number and number <= _MOST_NUMBER else int32(-1)
            weight = weights[int64(t) * topk + lane]
        fetch(smem, bars, warp, lane, stage, x, int64(t) * row_words, row_bytes)
        for j in range(rounds):
            if lane + 32 * j < scale_words:
                smem[int32(stage + row_words + lane + 32 * j)] = some[j]
        if lane < topk:
            smem[int32(stage + experts_at + lane)] = expert
            smem[int32(stage + weights_at + lane)] = weight
        if lane == 0:
            smem[int32(stage + source_at)] = t
        fence_proxy_async_shared()

    return fill


@cache
def make_keep(record):
    """``keep``: from shared memory to where a row belongs, with what came with it."""
    row_words, scale_words, topk, row_bytes = record.row, record.scales, record.topk, 4 * record.row
    experts_at, weights_at, source_at = record.experts, record.weights, record.source_index

    @cuda.jit(device=True)
    def keep(
        smem,
        stage,
        lane,
        carrier,
        row,
        rank,
        experts_per_rank,
        recv_x,
        recv_scales,
        recv_experts,
        recv_weights,
        recv_source,
    ):
        if lane == carrier:
            bulk_store(recv_x, row * row_words, smem, stage, row_bytes)
            bulk_commit_group()
        for i in range(lane, scale_words, 32):
            recv_scales[row * scale_words + i] = smem[int32(stage + row_words + i)]
        for i in range(lane, topk, 32):
            expert = int32(smem[int32(stage + experts_at + i)] - rank * experts_per_rank)
            is_here = 0 <= expert and expert < experts_per_rank
            recv_experts[row * topk + i] = int64(expert) if is_here else int64(-1)
            weight = smem[int32(stage + weights_at + i)]
            recv_weights[row * topk + i] = weight if is_here else int32(0)
        if lane == 0:
            recv_source[row] = smem[int32(stage + source_at)]

    return keep


@cache
def make_fill_up(record):
    """``fill_up``: a warp's part of the rows beyond those that came, in which no expert is here."""
    topk = record.topk

    @cuda.jit(device=True)
    def fill_up(recv_experts, rank_prefix, rank, ranks, worst, warp, warps, lane):
        if topk > 0:
            at = int64(int64(rank_prefix[(ranks - 1) * ranks + rank]) * topk + warp * 32 + lane)
            while at < int64(worst) * topk:
                recv_experts[at] = int64(-1)
                at += int64(warps * 32)

    return fill_up
