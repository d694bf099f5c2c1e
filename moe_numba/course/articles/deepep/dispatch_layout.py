"""The document's kernel for the dispatch layout, as DeepEP has it, for the notebook.

Some blocks count experts, 32 each, and some count ranks. Each walks all tokens, a thread a token. A thread counts in a
row of its own in shared memory, so that nothing is atomic; in the end a thread adds up a column.
"""

from functools import cache

import torch
from numba import cuda, int32, int64, uint8

from moe_numba import simulator
from moe_numba.runtime.launch import launch

THREADS, EXPERTS_OF_BLOCK, RANKS_OF_BLOCK = 256, 32, 8
if simulator.ENABLED:  # its threads take their turns: it gets fewer
    THREADS = 64


def blocks_for(num_experts, num_ranks):
    """Blocks for the experts, and after them blocks for the ranks."""
    return -(-num_experts // EXPERTS_OF_BLOCK) + -(-num_ranks // RANKS_OF_BLOCK)


@cache
def make_document_kernel(threads=THREADS):
    """The kernel, for ``blocks_for(num_experts, num_ranks)`` blocks."""

    @cuda.jit(device=True)
    def add_up(rows, column):
        total = int32(0)
        for i in range(threads):
            total = int32(total + rows[i, column])
        return total

    @cuda.jit(device=True)
    def count_experts(topk_idx, num_tokens_per_expert, num_tokens, num_topk, begin, end):
        rows = cuda.shared.array((threads, EXPERTS_OF_BLOCK), int32)
        t = int32(cuda.threadIdx.x)
        for j in range(EXPERTS_OF_BLOCK):
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
            num_tokens_per_expert[int32(begin + t)] = add_up(rows, t)

    @cuda.jit(device=True)
    def count_ranks(
        topk_idx, num_tokens_per_rank, is_token_in_rank, num_tokens, num_topk, num_ranks, experts_of_rank, begin, end
    ):
        rows = cuda.shared.array((threads, RANKS_OF_BLOCK), int32)
        is_in_rank = cuda.local.array(RANKS_OF_BLOCK, int32)
        t = int32(cuda.threadIdx.x)
        for j in range(RANKS_OF_BLOCK):
            rows[t, j] = int32(0)
        token = int64(t)
        while token < num_tokens:
            for j in range(RANKS_OF_BLOCK):
                is_in_rank[j] = int32(0)
            for j in range(num_topk):
                expert = topk_idx[token * num_topk + j]
                if begin * experts_of_rank <= expert and expert < end * experts_of_rank:
                    is_in_rank[int32(int32(expert) // experts_of_rank - begin)] += int32(1)
            for j in range(end - begin):
                flag = int32(1) if is_in_rank[j] > 0 else int32(0)
                is_token_in_rank[token * num_ranks + begin + j] = uint8(flag)
                rows[t, j] += flag
            token += threads
        cuda.syncthreads()
        if begin + t < end:
            num_tokens_per_rank[int32(begin + t)] = add_up(rows, t)

    @cuda.jit
    def get_dispatch_layout_of_the_document(
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
        begin = int32(block * EXPERTS_OF_BLOCK)
        if begin < num_experts:
            end = int32(min(begin + EXPERTS_OF_BLOCK, num_experts))
            count_experts(topk_idx, num_tokens_per_expert, num_tokens, num_topk, begin, end)
        else:
            begin = int32((block - (num_experts + EXPERTS_OF_BLOCK - 1) // EXPERTS_OF_BLOCK) * RANKS_OF_BLOCK)
            end = int32(min(begin + RANKS_OF_BLOCK, num_ranks))
            experts_of_rank = int32(num_experts // num_ranks)
            count_ranks(
                topk_idx,
                num_tokens_per_rank,
                is_token_in_rank,
                num_tokens,
                num_topk,
                num_ranks,
                experts_of_rank,
                begin,
                end,
            )

    return get_dispatch_layout_of_the_document


def get_dispatch_layout(topk_idx, num_experts, num_ranks, out=None):
    """The public function's arguments and results, with the document's kernel; nothing is checked."""
    (tokens, topk), device = topk_idx.shape, topk_idx.device
    if out is None:
        counts = (torch.empty(n, dtype=torch.int32, device=device) for n in (num_ranks, num_experts))
        out = (*counts, torch.empty((tokens, num_ranks), dtype=torch.bool, device=device))
    blocks = blocks_for(num_experts, num_ranks)
    launch(make_document_kernel(), blocks, THREADS, topk_idx, *out, tokens, topk, num_ranks, num_experts)
    return out
