"""What ranks tell one another before rows travel: how many come (`notify_dispatch`), or only "I am here" (`barrier`).

Block d counts what goes to rank d, sends the counts there, and raises a flag. The last block waits for the flags of
all ranks and adds up what came. Counts lie in one of two places, by turns, and flags are running numbers: who is at
exchange n + 1 has seen the flags of all for exchange n, so nobody reads any more what exchange n - 1 left. Nothing is
cleared, and no barrier is needed before or after, where the document has three.
"""

from functools import cache

from numba import cuda, int32, int64

from moe_numba.expert_parallel.kernels.buffer_layout import (
    BARRIERS,
    EXCHANGES,
    LOST,
    MOST_CHANNELS,
    MOST_EXPERTS,
    regions,
)
from moe_numba.expert_parallel.kernels.channels import channel_of, shares
from moe_numba.expert_parallel.kernels.progress import FULL
from moe_numba.expert_parallel.kernels.timeout import BARRIER, COUNTS, MISCOUNT, TOO_MANY, give_up, out_of_patience
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, pointer_from_address
from moe_numba.ptx.special_registers import globaltimer

_AT_ONCE = 4  # loads on their way


@cuda.jit(device=True)
def wait_for_flag(mine, at, wanted, state, status, patience, what, rank, peer):
    """Wait until a running number of another rank is what is wanted, or more."""
    start = globaltimer()
    come = ld_acquire_sys_s32(mine, at)
    while int32(come - wanted) < 0:
        if out_of_patience(start, patience, state):
            give_up(state, status, what, rank, int32(-1), peer, wanted, come)
            break
        come = ld_acquire_sys_s32(mine, at)


@cache
def make_notify_dispatch(num_ranks, threads):
    """The kernel, for ``num_ranks + 1`` blocks of so many threads.

    The host's counters, where it has any, are told the rows that come, and for each expert how many of them, rounded up
    to a multiple of ``alignment``.
    """
    ready_at, counts_at, counts_stride = (
        regions(num_ranks).ready,
        regions(num_ranks).counts,
        regions(num_ranks).counts_stride,
    )

    @cuda.jit(device=True)
    def tell(
        to,
        mine,
        peers,
        state,
        status,
        rank,
        exchange,
        tokens_per_rank,
        tokens_per_expert,
        is_token_in_rank,
        tokens,
        experts,
        channels,
        channel_prefix,
    ):
        """Count the tokens of each channel that go to a rank, and send what it must know."""
        counts = cuda.shared.array(MOST_CHANNELS, int32)
        t = int32(cuda.threadIdx.x)
        for c in range(t, channels, threads):
            counts[c] = int32(0)
        cuda.syncthreads()
        each, longer = shares(channels, tokens)
        for token in range(t, tokens, threads):
            if is_token_in_rank[int64(token) * num_ranks + to] != 0:
                cuda.atomic.add(counts, channel_of(token, each, longer), int32(1))
        cuda.syncthreads()
        if t < 32:  # one warp adds up, a lane some neighbours
            part = int32((channels + 31) // 32 | 1)  # odd: no two lanes of a bank
            first, last = min(channels, int32(t * part)), min(channels, int32((t + 1) * part))
            own = int32(0)
            for c in range(first, last):
                own = int32(own + counts[c])
            total = own
            for s in range(5):
                lower = cuda.shfl_up_sync(FULL, total, 1 << s)
                if t >= 1 << s:
                    total = int32(total + lower)
            total = int32(total - own)
            for c in range(first, last):
                total = int32(total + counts[c])
                counts[c] = total
        cuda.syncthreads()
        theirs = pointer_from_address(peers[to], mine)
        at = counts_at + int32((exchange & 1) * num_ranks + rank) * counts_stride
        for r in range(t, num_ranks, threads):
            st_relaxed_sys_s32(theirs, at + r, tokens_per_rank[r])
        for e in range(t, experts, threads):
            st_relaxed_sys_s32(theirs, at + num_ranks + e, tokens_per_expert[int32(to * experts + e)])
        for c in range(t, channels, threads):
            channel_prefix[int32(to * channels + c)] = counts[c]
            st_relaxed_sys_s32(theirs, at + num_ranks + MOST_EXPERTS + c, counts[int32(c - 1)] if c > 0 else int32(0))
        cuda.syncthreads()
        if t == 0:
            counted = counts[int32(channels - 1)]
            if counted != tokens_per_rank[to]:
                give_up(state, status, MISCOUNT, rank, int32(-1), to, tokens_per_rank[to], counted)
            st_release_sys_s32(theirs, ready_at + rank, exchange)

    @cuda.jit(device=True)
    def learn(
        mine,
        state,
        status,
        patience,
        rank,
        exchange,
        experts,
        channels,
        alignment,
        capacity,
        rank_prefix,
        recv_channel_prefix,
        counters,
        has_counters,
    ):
        """Wait for what all ranks tell this one, and add it up."""
        t = int32(cuda.threadIdx.x)
        if t < num_ranks:
            wait_for_flag(mine, ready_at + t, exchange, state, status, patience, COUNTS, rank, t)
        cuda.syncthreads()
        at = counts_at + int32((exchange & 1) * num_ranks) * counts_stride
        for r in range(t, num_ranks, threads):
            total = int32(0)
            for s in range(num_ranks):
                total = int32(total + mine[at + s * counts_stride + r])
                rank_prefix[int32(s * num_ranks + r)] = total
        some = cuda.local.array(_AT_ONCE, int32)
        for first in range(t, num_ranks * channels, _AT_ONCE * threads):
            for u in range(_AT_ONCE):
                i = int32(first + u * threads)
                if i < num_ranks * channels:
                    s = int32(i // channels)
                    some[u] = mine[at + s * counts_stride + num_ranks + MOST_EXPERTS + (i - s * channels)]
            for u in range(_AT_ONCE):
                i = int32(first + u * threads)
                if i < num_ranks * channels:
                    recv_channel_prefix[i] = some[u]
        if has_counters != 0:
            for e in range(t, experts, threads):
                total = int32(0)
                for s in range(num_ranks):
                    total = int32(total + mine[at + s * counts_stride + num_ranks + e])
                counters[int32(1 + e)] = int32((total + alignment - 1) // alignment * alignment)
            fence_acq_rel_sys()
        cuda.syncthreads()
        if t == 0:
            total = rank_prefix[int32((num_ranks - 1) * num_ranks + rank)]
            if total > capacity:
                give_up(state, status, TOO_MANY, rank, int32(-1), rank, capacity, total)
            elif has_counters != 0:
                st_release_sys_s32(counters, 0, total)

    @cuda.jit
    def notify_dispatch(
        mine,
        peers,
        state,
        status,
        patience,
        rank,
        tokens_per_rank,
        tokens_per_expert,
        is_token_in_rank,
        tokens,
        experts,
        channels,
        alignment,
        capacity,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        counters,
        has_counters,
    ):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()  # the dispatch may take its place meanwhile; it waits for our end
        block = int32(cuda.blockIdx.x)
        exchange = int32(state[int32(EXCHANGES + block)] + 1)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            state[int32(EXCHANGES + block)] = exchange
        if block < num_ranks:
            tell(
                block,
                mine,
                peers,
                state,
                status,
                rank,
                exchange,
                tokens_per_rank,
                tokens_per_expert,
                is_token_in_rank,
                tokens,
                experts,
                channels,
                channel_prefix,
            )
        else:
            learn(
                mine,
                state,
                status,
                patience,
                rank,
                exchange,
                experts,
                channels,
                alignment,
                capacity,
                rank_prefix,
                recv_channel_prefix,
                counters,
                has_counters,
            )

    return notify_dispatch


NOTIFY_SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32*", "int32*", "uint8*", "int32", "int32"),
    *("int32", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32"),
)


@cache
def make_barrier(num_ranks):
    """The kernel, for one block of 32 threads: no rank is beyond it before all have come.

    Who has given up does not come: what the others would find is not what they wait for.
    """
    arrived_at = regions(num_ranks).arrived

    @cuda.jit
    def barrier(mine, peers, state, status, patience, rank):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        lane = int32(cuda.threadIdx.x)
        number = int32(state[BARRIERS] + 1)
        cuda.syncwarp()
        if lane < num_ranks:
            if ld_volatile_s32(state, LOST) == 0:
                st_release_sys_s32(pointer_from_address(peers[lane], mine), arrived_at + rank, number)
            wait_for_flag(mine, arrived_at + lane, number, state, status, patience, BARRIER, rank, lane)
        cuda.syncwarp()
        if lane == 0:
            state[BARRIERS] = number

    return barrier


BARRIER_SIGNATURE = ("int32*", "uint64*", "int32*", "int32*", "uint64", "int32")
