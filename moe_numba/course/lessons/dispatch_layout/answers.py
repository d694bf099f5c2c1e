"""The lesson's own answers to the exercises of "Dispatch layout"."""

from math import comb

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint8, uint32

from moe_numba.course.lessons.dispatch_layout.sizes import (
    CLUSTER,
    COUNTERS,
    EACH,
    EXPERTS,
    FULL,
    LANE_BITS,
    LANES,
    PER_WARP,
    RANKS,
    SHARE,
    SHARES,
    TOPK,
)
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32


def ranks_of_a_token(experts, topk, ranks):
    others = experts - experts // ranks  # that are on other ranks than a certain one
    return ranks * (1 - comb(others, topk) / comb(experts, topk))


@cuda.jit(device=True)
def tokens_of_rank(ranks):
    lane, own = cuda.threadIdx.x & 31, 0
    for rank in range(RANKS):
        tokens = uint32(cuda.ballot_sync(FULL, ranks >> rank & 1))
        if lane == rank:
            own = cuda.popc(tokens)
    return int32(own)


@cuda.jit(device=True)
def sum_in_cluster(own, counts):
    shares = cuda.shared.array(SHARES, int32)  # the counters that this CTA adds up, of each CTA
    thread, cta = cuda.threadIdx.x, int32(cluster_ctarank())
    barrier_cluster_wait()  # all CTAs have started: others may be stored to
    i = thread
    while i < COUNTERS:
        to = i // SHARE
        st_cluster_s32(shares, cta * SHARE + i - to * SHARE, to, own[i])
        i += cuda.blockDim.x
    cuda.syncwarp()
    barrier_cluster_arrive()
    barrier_cluster_wait()  # all counts have arrived
    i = thread
    while i < SHARE and cta * SHARE + i < COUNTERS:
        total = int32(0)
        for other in range(CLUSTER):
            total = int32(total + shares[other * SHARE + i])
        counts[cta * SHARE + i] = total
        i += cuda.blockDim.x


@cuda.jit(device=True)
def or_in_group(bits):
    for s in range(LANE_BITS):
        bits = uint32(bits | uint32(cuda.shfl_xor_sync(FULL, int32(bits), 1 << s)))
    return bits


@cuda.jit(device=True)
def count_in_groups(topk_idx, is_in_rank, counts, tokens):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.grid(1) >> 5, cuda.gridsize(1) >> 5
    member, tokens_of_mine = lane % LANES, int32(0)
    first = warp * PER_WARP
    while first < tokens:  # the same for all lanes
        token, bits = first + lane // LANES, uint32(0)
        if token < tokens and member < TOPK:
            expert = topk_idx[token * TOPK + member]
            if 0 <= expert and expert < EXPERTS:
                cuda.atomic.add(counts, expert, 1)
                bits = uint32(uint32(1) << uint32(uint32(expert) // uint32(EACH)))
        flag = or_in_group(bits) >> uint32(member) & uint32(1)
        tokens_of_mine = int32(tokens_of_mine + int32(flag))
        if token < tokens and member < RANKS:
            is_in_rank[token * RANKS + member] = uint8(flag)
        first += warps * PER_WARP
    if member < RANKS:
        cuda.atomic.add(counts, EXPERTS + member, tokens_of_mine)
