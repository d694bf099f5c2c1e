"""Our Numba port of DeepEP's dispatch-layout kernel.

Some CTAs count the tokens of 32 experts each, others those of the ranks. Each CTA reads all tokens, one token per
thread and iteration. Each thread counts in its own row of shared memory, so no atomics are needed; at the end one
thread per column sums the rows.
"""

from functools import cache

import torch
from numba import cuda, int32, int64, uint8

from moe_numba import simulator
from moe_numba.runtime.launch import launch

THREADS, EXPERTS_PER_BLOCK, RANKS_PER_BLOCK = 256, 32, 8
if simulator.ENABLED:  # which runs threads one after the other
    THREADS = 64


def num_blocks(num_experts, num_ranks):
    """Return the number of CTAs: those that count experts, then those that count ranks."""
    return -(-num_experts // EXPERTS_PER_BLOCK) + -(-num_ranks // RANKS_PER_BLOCK)


@cache
def make_layout_kernel(threads=THREADS):
    """Make the kernel, for ``num_blocks(num_experts, num_ranks)`` CTAs."""

    @cuda.jit(device=True)
    def sum_column(rows, column):
        total = int32(0)
        for i in range(threads):
            total = int32(total + rows[i, column])
        return total

    @cuda.jit(device=True)
    def count_experts(topk_idx, num_tokens_per_expert, num_tokens, num_topk, begin, end):
        rows = cuda.shared.array((threads, EXPERTS_PER_BLOCK), int32)
        t = int32(cuda.threadIdx.x)
        for j in range(EXPERTS_PER_BLOCK):
            rows[t, j] = int32(0)
        token = int64(t)
        while token < num_tokens:
            for j in range(num_topk):
                expert = topk_idx[token * num_topk + j]
                if begin <= expert and expert < end:
                    rows[t, int32(expert - begin)] += int32(1)
            token += threads
        cuda.syncthreads()
        if begin + t < end:
            num_tokens_per_expert[int32(begin + t)] = sum_column(rows, t)

    @cuda.jit(device=True)
    def count_ranks(
        topk_idx, num_tokens_per_rank, is_token_in_rank, num_tokens, num_topk, num_ranks, experts_per_rank, begin, end
    ):
        rows = cuda.shared.array((threads, RANKS_PER_BLOCK), int32)
        is_in_rank = cuda.local.array(RANKS_PER_BLOCK, int32)
        t = int32(cuda.threadIdx.x)
        for j in range(RANKS_PER_BLOCK):
            rows[t, j] = int32(0)
        token = int64(t)
        while token < num_tokens:
            for j in range(RANKS_PER_BLOCK):
                is_in_rank[j] = int32(0)
            for j in range(num_topk):
                expert = topk_idx[token * num_topk + j]
                if begin * experts_per_rank <= expert and expert < end * experts_per_rank:
                    is_in_rank[int32(int32(expert) // experts_per_rank - begin)] += int32(1)
            for j in range(end - begin):
                flag = int32(1) if is_in_rank[j] > 0 else int32(0)
                is_token_in_rank[token * num_ranks + begin + j] = uint8(flag)
                rows[t, j] += flag
            token += threads
        cuda.syncthreads()
        if begin + t < end:
            num_tokens_per_rank[int32(begin + t)] = sum_column(rows, t)

    @cuda.jit
    def deepep_get_dispatch_layout(
        topk_idx,
        num_tokens_per_rank,
        num_tokens_per_expert,
        is_token_in_rank,
        num_tokens,
        num_topk,
        num_ranks,
        num_experts,
    ):
        block = int32(cuda.blockIdx.x)
        begin = int32(block * EXPERTS_PER_BLOCK)
        if begin < num_experts:
            end = int32(min(begin + EXPERTS_PER_BLOCK, num_experts))
            count_experts(topk_idx, num_tokens_per_expert, num_tokens, num_topk, begin, end)
        else:
            begin = int32((block - (num_experts + EXPERTS_PER_BLOCK - 1) // EXPERTS_PER_BLOCK) * RANKS_PER_BLOCK)
            end = int32(min(begin + RANKS_PER_BLOCK, num_ranks))
            experts_per_rank = int32(num_experts // num_ranks)
            count_ranks(
                topk_idx,
                num_tokens_per_rank,
                is_token_in_rank,
                num_tokens,
                num_topk,
                num_ranks,
                experts_per_rank,
                begin,
                end,
            )

    return deepep_get_dispatch_layout


def get_dispatch_layout(topk_idx, num_experts, num_ranks, out=None):
    """Run DeepEP's kernel with the arguments and results of the public function; nothing is checked."""
    (tokens, topk), device = topk_idx.shape, topk_idx.device
    if out is None:
        counts = (torch.empty(n, dtype=torch.int32, device=device) for n in (num_ranks, num_experts))
        out = (*counts, torch.empty((tokens, num_ranks), dtype=torch.bool, device=device))
    blocks = num_blocks(num_experts, num_ranks)
    launch(make_layout_kernel(), blocks, THREADS, topk_idx, *out, tokens, topk, num_ranks, num_experts)
    return out
