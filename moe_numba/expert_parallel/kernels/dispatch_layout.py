"""The kernel of the dispatch layout: one cluster of eight blocks, which add up their counts in shared memory.

Counts of many blocks need a place to meet that is zero beforehand. Here it is the shared memory of the blocks
themselves: no scratch memory, no second launch, nothing that two streams or two graphs could share by mistake. For 4096
tokens with 8 of 256 experts on 8 ranks a block reads 32 KB, all on its way at once, and the time should be a few
microseconds of latencies: the launch, one round of loads, one meeting of the cluster. For many more tokens eight
multiprocessors are the limit, and time grows with the tokens; the rest of the GPU is left to other kernels meanwhile.

A **team** of lanes takes a token: a lane reads one of its experts, so that a warp's loads are neighbours, and later
writes the flag of one rank, so that its stores are neighbours too, whatever the numbers of experts and ranks.
"""

from functools import cache

from numba import cuda, int32, int64, uint8, uint32

from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait

CLUSTER = 8  # blocks, as many as every GPU with clusters allows
BATCH = 4  # experts that a lane has on their way at once, of as many tokens: the ranks of four tokens are one word
ONES = 0x01010101
FULL = 0xFFFFFFFF


def team_for(num_ranks, topk):
    """Lanes of a team: a power of two, with a lane for each expert of a token and for each rank."""
    return 1 << (max(num_ranks, topk) - 1).bit_length()


@cache
def make_count_tokens(num_experts, num_ranks, topk, threads):
    """``count_tokens(topk_idx, is_token_in_rank, num_tokens, counts)``: what a block does of the tokens.

    Each warp of the cluster takes a few neighbours, and so on until there are no more. ``counts`` is shared; first come
    the experts, then the ranks. A barrier must follow.
    """
    team = team_for(num_ranks, topk)
    team_bits, tokens_of_warp = team.bit_length() - 1, 32 // team
    stride = CLUSTER * (threads // 32) * tokens_of_warp
    experts_of_rank = num_experts // num_ranks

    @cuda.jit(device=True)
    def count_tokens(topk_idx, is_token_in_rank, num_tokens, counts):
        lane, warp = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
        member = uint32(lane & uint32(team - 1))
        first = uint32((warp * uint32(CLUSTER) + cluster_ctarank()) * uint32(tokens_of_warp))
        chosen = cuda.local.array(BATCH, uint32)
        tokens_of_rank = int32(0)  # this lane's, of those that its warp has seen
        while first < num_tokens:
            own = uint32(first + (lane >> uint32(team_bits)))
            for k in range(BATCH):
                token = uint32(own + uint32(k * stride))
                chosen[k] = uint32(num_experts)
                if token < num_tokens and member < uint32(topk):
                    expert = topk_idx[int64(token) * topk + int64(member)]
                    if expert >= 0 and expert < num_experts:  # all others are as -1: no expert
                        chosen[k] = uint32(expert)
            ranks = uint32(0)  # a byte for each token, a bit for each rank
            for k in range(BATCH):
                if chosen[k] < uint32(num_experts):
                    cuda.atomic.add(counts, chosen[k], int32(1))
                    rank = uint32(chosen[k] // uint32(experts_of_rank))
                    ranks = uint32(ranks | (uint32(1 << (8 * k)) << rank))
            cuda.syncwarp()
            for s in range(team_bits):
                ranks = uint32(ranks | uint32(cuda.shfl_xor_sync(FULL, int32(ranks), 1 << s)))
            flags = uint32(uint32(ranks >> member) & uint32(ONES))  # of one rank, a byte for each token
            tokens_of_rank = int32(tokens_of_rank + int32(cuda.popc(flags)))
            for k in range(BATCH):
                token = uint32(own + uint32(k * stride))
                if token < num_tokens and member < uint32(num_ranks):
                    at = int64(token) * num_ranks + int64(member)
                    is_token_in_rank[at] = uint8(uint32(flags >> uint32(8 * k)) & uint32(1))
            first = uint32(first + uint32(BATCH * stride))
        cuda.syncwarp()
        for s in range(team_bits, 5):
            tokens_of_rank = int32(tokens_of_rank + cuda.shfl_xor_sync(FULL, tokens_of_rank, 1 << s))
        if lane < uint32(num_ranks):
            cuda.atomic.add(counts, uint32(uint32(num_experts) + lane), tokens_of_rank)

    return count_tokens


@cache
def make_layout_kernel(num_experts, num_ranks, topk, threads):
    """The kernel, for one cluster of ``CLUSTER`` blocks."""
    numbers = num_experts + num_ranks
    share = -(-numbers // CLUSTER)  # that a block adds up
    all_shares = CLUSTER * share
    count_tokens = make_count_tokens(num_experts, num_ranks, topk, threads)

    @cuda.jit
    def get_dispatch_layout(topk_idx, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, num_tokens):
        counts = cuda.shared.array(numbers, int32)
        shares = cuda.shared.array(all_shares, int32)  # this block's share, from each block
        t, block = uint32(cuda.threadIdx.x), cluster_ctarank()
        barrier_cluster_arrive()  # this block has started
        for v in range(-(-numbers // threads)):
            i = uint32(t + uint32(v * threads))
            if i < uint32(numbers):
                counts[i] = int32(0)
        cuda.syncthreads()
        griddepcontrol_wait()
        count_tokens(topk_idx, is_token_in_rank, num_tokens, counts)
        griddepcontrol_launch_dependents()
        cuda.syncthreads()
        barrier_cluster_wait()
        for v in range(-(-numbers // threads)):
            i = uint32(t + uint32(v * threads))
            if i < uint32(numbers):
                to = uint32(i // uint32(share))
                place = uint32(block * uint32(share) + i - to * uint32(share))
                st_cluster_s32(shares, int32(place), to, counts[i])
        cuda.syncwarp()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        for v in range(-(-share // threads)):
            place = uint32(t + uint32(v * threads))
            i = uint32(block * uint32(share) + place)
            if place < uint32(share) and i < uint32(numbers):
                total = int32(0)
                for other in range(CLUSTER):
                    total = int32(total + shares[uint32(place + uint32(other * share))])
                if i < uint32(num_experts):
                    num_tokens_per_expert[i] = total
                else:
                    num_tokens_per_rank[uint32(i - uint32(num_experts))] = total

    return get_dispatch_layout
