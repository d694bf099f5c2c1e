"""Dispatch-layout kernel: one cluster of eight CTAs, which sum their counts in distributed shared memory.

Summing the counts of several CTAs needs zeroed memory. Here it is the shared memory of the CTAs themselves: no scratch
memory, no second launch, and nothing that two streams or two graphs could share by mistake. For 4096 tokens with 8 of
256 experts on 8 ranks, a CTA reads 32 KB, all loads in flight at once, and the expected time is a few microseconds of
latencies: the launch, one round of loads, one cluster barrier. For many more tokens eight SMs are the limit, and the
time grows with the number of tokens; the other SMs remain free for other kernels.

A **group** of lanes processes a token. A lane reads one of its experts, so that a warp's loads are coalesced, and later
writes the flag of one rank, so that its stores are coalesced too, whatever the numbers of experts and ranks.
"""

from functools import cache

from numba import cuda, int32, int64, uint8, uint32

from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK

CLUSTER_SIZE = 8  # CTAs: the portable maximum
BATCH = 4  # loads in flight per lane, of as many tokens: the rank masks of four tokens fit one word
LOW_BITS = 0x01010101  # the lowest bit of each byte


def group_size(num_ranks, topk):
    """Return the lanes per token: a power of two, at least the number of its experts and of the ranks."""
    return 1 << (max(num_ranks, topk) - 1).bit_length()


@cache
def make_count_tokens(num_experts, num_ranks, topk, threads, cluster_size):
    """Make ``count_tokens``: add a CTA's share of the tokens to ``counts``, and write their flags.

    The warps of the cluster, or of the only CTA, take consecutive tokens round-robin. ``counts`` is in shared memory:
    first the experts, then the ranks. A barrier must follow.
    """
    lanes = group_size(num_ranks, topk)
    lane_bits, tokens_per_warp = lanes.bit_length() - 1, 32 // lanes
    stride = cluster_size * (threads // 32) * tokens_per_warp
    experts_per_rank = num_experts // num_ranks

    @cuda.jit(device=True)
    def count_tokens(topk_idx, is_token_in_rank, num_tokens, counts):
        lane, warp = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
        member = uint32(lane & uint32(lanes - 1))
        first = uint32((warp * uint32(cluster_size) + cluster_ctarank()) * uint32(tokens_per_warp))
        chosen = cuda.local.array(BATCH, uint32)
        rank_count = int32(0)  # tokens of this lane's rank, among those that its warp has processed
        while first < num_tokens:
            own = uint32(first + (lane >> uint32(lane_bits)))
            for k in range(BATCH):
                token = uint32(own + uint32(k * stride))
                chosen[k] = uint32(num_experts)
                if token < num_tokens and member < uint32(topk):
                    expert = topk_idx[int64(token) * topk + int64(member)]
                    if expert >= 0 and expert < num_experts:
                        chosen[k] = uint32(expert)
            ranks = uint32(0)  # one byte per token, one bit per rank
            for k in range(BATCH):
                if chosen[k] < uint32(num_experts):
                    cuda.atomic.add(counts, chosen[k], int32(1))
                    rank = uint32(chosen[k] // uint32(experts_per_rank))
                    ranks = uint32(ranks | (uint32(1 << (8 * k)) << rank))
            cuda.syncwarp()
            for s in range(lane_bits):
                ranks = uint32(ranks | uint32(cuda.shfl_xor_sync(FULL_MASK, int32(ranks), 1 << s)))
            flags = uint32(uint32(ranks >> member) & uint32(LOW_BITS))  # of one rank, one byte per token
            rank_count = int32(rank_count + int32(cuda.popc(flags)))
            for k in range(BATCH):
                token = uint32(own + uint32(k * stride))
                if token < num_tokens and member < uint32(num_ranks):
                    offset = int64(token) * num_ranks + int64(member)
                    is_token_in_rank[offset] = uint8(uint32(flags >> uint32(8 * k)) & uint32(1))
            first = uint32(first + uint32(BATCH * stride))
        cuda.syncwarp()
        for s in range(lane_bits, 5):
            rank_count = int32(rank_count + cuda.shfl_xor_sync(FULL_MASK, rank_count, 1 << s))
        if lane < uint32(num_ranks):
            cuda.atomic.add(counts, uint32(uint32(num_experts) + lane), rank_count)

    return count_tokens


@cache
def make_layout_kernel(num_experts, num_ranks, topk, threads):
    """Make the kernel, for one cluster of ``CLUSTER_SIZE`` CTAs. Each CTA sums a share of the counters."""
    _check_config(num_experts, num_ranks, topk, threads)
    num_counters = num_experts + num_ranks
    share = -(-num_counters // CLUSTER_SIZE)
    all_shares = CLUSTER_SIZE * share
    count_tokens = make_count_tokens(num_experts, num_ranks, topk, threads, CLUSTER_SIZE)

    @cuda.jit
    def get_dispatch_layout(topk_idx, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, num_tokens):
        counts = cuda.shared.array(num_counters, int32)
        shares = cuda.shared.array(all_shares, int32)  # this CTA's share of the counters, from each CTA
        t, block = uint32(cuda.threadIdx.x), cluster_ctarank()
        barrier_cluster_arrive()  # this CTA has started: its shared memory can be written
        for v in range(-(-num_counters // threads)):
            i = uint32(t + uint32(v * threads))
            if i < uint32(num_counters):
                counts[i] = int32(0)
        cuda.syncthreads()
        griddepcontrol_wait()
        count_tokens(topk_idx, is_token_in_rank, num_tokens, counts)
        griddepcontrol_launch_dependents()
        cuda.syncthreads()
        barrier_cluster_wait()
        for v in range(-(-num_counters // threads)):
            i = uint32(t + uint32(v * threads))
            if i < uint32(num_counters):
                owner = uint32(i // uint32(share))
                slot = uint32(block * uint32(share) + i - owner * uint32(share))
                st_cluster_s32(shares, int32(slot), owner, counts[i])
        cuda.syncwarp()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        for v in range(-(-share // threads)):
            slot = uint32(t + uint32(v * threads))
            i = uint32(block * uint32(share) + slot)
            if slot < uint32(share) and i < uint32(num_counters):
                total = int32(0)
                for other in range(CLUSTER_SIZE):
                    total = int32(total + shares[uint32(slot + uint32(other * share))])
                if i < uint32(num_experts):
                    num_tokens_per_expert[i] = total
                else:
                    num_tokens_per_rank[uint32(i - uint32(num_experts))] = total

    return get_dispatch_layout


@cache
def make_single_cta_layout_kernel(num_experts, num_ranks, topk, threads):
    """Make the kernel for GPUs without clusters: one CTA counts all tokens."""
    _check_config(num_experts, num_ranks, topk, threads)
    num_counters = num_experts + num_ranks
    count_tokens = make_count_tokens(num_experts, num_ranks, topk, threads, 1)

    @cuda.jit
    def get_dispatch_layout(topk_idx, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, num_tokens):
        counts = cuda.shared.array(num_counters, int32)
        t = uint32(cuda.threadIdx.x)
        for v in range(-(-num_counters // threads)):
            i = uint32(t + uint32(v * threads))
            if i < uint32(num_counters):
                counts[i] = int32(0)
        cuda.syncthreads()
        count_tokens(topk_idx, is_token_in_rank, num_tokens, counts)
        cuda.syncthreads()
        for v in range(-(-num_counters // threads)):
            i = uint32(t + uint32(v * threads))
            if i < uint32(num_experts):
                num_tokens_per_expert[i] = counts[i]
            elif i < uint32(num_counters):
                num_tokens_per_rank[uint32(i - uint32(num_experts))] = counts[i]

    return get_dispatch_layout


def _check_config(num_experts, num_ranks, topk, threads):
    if not 1 <= num_ranks <= 8 or num_experts % num_ranks or not 1 <= topk <= 32 or threads % 32 or threads > 1024:
        raise ValueError(
            f"{num_experts} experts, {num_ranks} ranks, top-{topk}, {threads} threads: the kernel supports 1 to 8 "
            "ranks with equally many experts, top-1 to top-32, and a multiple of 32 threads up to 1024"
        )
