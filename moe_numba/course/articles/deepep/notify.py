"""The document's kernels that go before the transfers: all ranks meet, exchange their counts, and clear the queues.

Where they differ from DeepEP's, they mend: additions to signals release and polls acquire, where DeepEP fences and
polls by ``volatile``; and who waits too long for another rank says so and ends.
"""

from functools import cache

from numba import cuda, int32

from moe_numba import simulator
from moe_numba.course.articles.deepep.buffer_layout import combine_regions, dispatch_regions
from moe_numba.course.articles.deepep.polling import BARRIER, FULL, at_most, make_channel_range, make_wait
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    red_add_relaxed_sys_s32,
    red_add_release_sys_s32,
    st_relaxed_sys_s32,
)
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import lanemask_lt, redux_sync_add_s32

THREADS = 64 if simulator.ENABLED else 128  # of a block; simulated threads take their turns
TAG = 1024
NO_HEAD = 1 << 25  # more than any head: no token after this one comes back from that rank


@cache
def make_barrier(ranks):
    """``barrier_block(signals, like, rank, patience, status)``: one block of each rank waits for those of all others.

    A rank adds to its own signal for each peer, and takes the same from its signal at that peer: whoever comes last,
    both end at zero, ready for the next time. A peer can be ahead by one barrier at most, so a signal is never more
    than a TAG away from zero. Gives all threads whether all ranks came.
    """
    wait = make_wait(ld_acquire_sys_s32, at_most, BARRIER)

    @cuda.jit(device=True)
    def barrier_block(signals, like, rank, patience, status):
        thread, came = int32(cuda.threadIdx.x), True
        cuda.syncthreads()  # what the other threads stored, this one's additions release
        if thread < ranks:
            mine = pointer_from_address(signals[rank], like)
            red_add_relaxed_sys_s32(mine, thread, TAG)
            red_add_release_sys_s32(pointer_from_address(signals[thread], like), rank, -TAG)
            came, _ = wait(mine, thread, 0, 0, rank, -1, thread, patience, status)
        return cuda.syncthreads_and(int32(came)) != 0

    return barrier_block


@cache
def make_notify_dispatch(constants):
    """The kernel, for ``1 + ranks`` blocks of ``THREADS``.

    Block 0 exchanges the counts with the other ranks; block 1 + r counts which channel sends how much to rank r.
    ``channel_prefix`` [ranks, channels] and ``rank_prefix`` [ranks, ranks] are the handle's matrices; ``counter`` and
    ``expert_counter`` may lie in the host's memory, and be -1 beforehand, so that the host sees when they come.
    """
    ranks, channels = constants.ranks, constants.channels
    experts = constants.experts // ranks  # of a rank
    barrier_block, channel_range = make_barrier(ranks), make_channel_range(channels)
    at = dispatch_regions(constants)
    counts, queues_end = at.start // 4, at.x // 4  # in int32

    @cuda.jit(device=True)
    def exchange(
        num_tokens_per_rank,
        num_tokens_per_expert,
        rank_prefix,
        counter,
        expert_counter,
        expert_alignment,
        peers,
        signals,
        rank,
        patience,
        status,
    ):
        thread = int32(cuda.threadIdx.x)
        here = barrier_block(signals, rank_prefix, rank, patience, status)  # nobody uses a buffer any more
        if here:
            if thread < ranks:
                theirs = pointer_from_address(peers[thread], rank_prefix)
                for i in range(ranks):
                    theirs[rank * ranks + i] = num_tokens_per_rank[i]
                for i in range(experts):
                    theirs[counts + rank * experts + i] = num_tokens_per_expert[thread * experts + i]
            here = barrier_block(signals, rank_prefix, rank, patience, status)
        if here:
            mine = pointer_from_address(peers[rank], rank_prefix)
            if thread < ranks:
                total = int32(0)
                for source in range(ranks):
                    total = int32(total + mine[source * ranks + thread])
                    mine[source * ranks + thread] = total
                    rank_prefix[source * ranks + thread] = total
                if thread == rank:
                    st_relaxed_sys_s32(counter, 0, total)
            for i in range(thread, experts, THREADS):
                total = int32(0)
                for source in range(ranks):
                    total = int32(total + mine[counts + source * experts + i])
                aligned = int32(int32(total + expert_alignment - 1) // expert_alignment) * expert_alignment
                st_relaxed_sys_s32(expert_counter, i, int32(aligned))
            cuda.syncthreads()  # the counts lie where the queues begin
            for i in range(counts + thread, queues_end, THREADS):
                mine[i] = int32(0)
            barrier_block(signals, rank_prefix, rank, patience, status)

    @cuda.jit(device=True)
    def count_channels(is_token_in_rank, num_tokens, channel_prefix, to):
        warp, lane = int32(cuda.threadIdx.x) // 32, int32(cuda.threadIdx.x) % 32
        for channel in range(warp, channels, THREADS // 32):
            first, last = channel_range(num_tokens, channel)
            count = int32(0)
            for token in range(first + lane, last, 32):
                count = int32(count + int32(is_token_in_rank[token * ranks + to] != 0))
            count = redux_sync_add_s32(FULL, count)
            if lane == 0:
                channel_prefix[to * channels + channel] = count
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for i in range(to * channels + 1, (to + 1) * channels):
                channel_prefix[i] = int32(channel_prefix[i] + channel_prefix[i - 1])

    @cuda.jit
    def notify_dispatch(
        num_tokens_per_rank,
        num_tokens_per_expert,
        is_token_in_rank,
        num_tokens,
        channel_prefix,
        rank_prefix,
        counter,
        expert_counter,
        expert_alignment,
        peers,
        signals,
        rank,
        patience,
        status,
    ):
        if cuda.blockIdx.x == 0:
            exchange(
                num_tokens_per_rank,
                num_tokens_per_expert,
                rank_prefix,
                counter,
                expert_counter,
                expert_alignment,
                peers,
                signals,
                rank,
                patience,
                status,
            )
        else:
            count_channels(is_token_in_rank, num_tokens, channel_prefix, int32(cuda.blockIdx.x) - 1)

    return notify_dispatch


@cache
def make_cached_notify_dispatch(constants):
    """The kernel, for one block of ``THREADS``: counts that are known need not be exchanged."""
    ranks, at = constants.ranks, dispatch_regions(constants)
    barrier_block, queues, queues_end = make_barrier(ranks), at.start // 4, at.x // 4

    @cuda.jit
    def cached_notify_dispatch(rank_prefix, peers, signals, rank, patience, status):
        thread = int32(cuda.threadIdx.x)
        if barrier_block(signals, rank_prefix, rank, patience, status):
            mine = pointer_from_address(peers[rank], rank_prefix)
            for i in range(thread, ranks * ranks, THREADS):
                mine[i] = rank_prefix[i]
            for i in range(queues + thread, queues_end, THREADS):
                mine[i] = int32(0)
            barrier_block(signals, rank_prefix, rank, patience, status)

    return cached_notify_dispatch


def notify_combine_threads(ranks):
    """Of a block of cached_notify_combine: a warp for each rank."""
    return max(THREADS, 32 * ranks)


@cache
def make_cached_notify_combine(constants):
    """The kernel, for ``1 + channels`` blocks of ``notify_combine_threads(ranks)``.

    Block 0 clears the queues. Block 1 + c goes through channel c's tokens backwards, and puts for each rank to which a
    token was not sent, in place of -1, ``-n - 1``, where n is the place in the queue of the next token that was. A
    warp that has dealt with the token then knows how far it has no more need of that queue. Doing it twice changes
    nothing: what is negative is made anew.
    """
    ranks, channels = constants.ranks, constants.channels
    barrier_block, channel_range = make_barrier(ranks), make_channel_range(channels)
    threads, queues_end = notify_combine_threads(ranks), combine_regions(constants).x // 4

    @cuda.jit(device=True)
    def fill_in(send_head, num_tokens, channel, rank, lane):
        first, last = channel_range(num_tokens, channel)
        following = int32(NO_HEAD)
        for newest in range(last - 1, first - 1, -32):
            token = newest - lane  # the lanes before this one have the tokens after its own
            head = int32(send_head[token * ranks + rank]) if token >= first else int32(-1)
            sent = cuda.ballot_sync(FULL, head >= 0)
            after = int32(int32(sent) & int32(lanemask_lt()))
            nearest = int32(31 - int32(cuda.clz(after)))
            found = cuda.shfl_sync(FULL, head, max(nearest, int32(0)))
            found = int32(found if nearest >= 0 else following)
            if token >= first and head < 0:
                send_head[token * ranks + rank] = int32(-found - 1)
            following = cuda.shfl_sync(FULL, head if head >= 0 else found, 31)

    @cuda.jit
    def cached_notify_combine(send_head, num_tokens, peers, signals, rank, patience, status):
        thread = int32(cuda.threadIdx.x)
        if cuda.blockIdx.x == 0:
            if barrier_block(signals, send_head, rank, patience, status):
                mine = pointer_from_address(peers[rank], send_head)
                for i in range(thread, queues_end, threads):
                    mine[i] = int32(0)
                barrier_block(signals, send_head, rank, patience, status)
        elif thread < 32 * ranks:
            fill_in(send_head, num_tokens, int32(cuda.blockIdx.x) - 1, thread // 32, thread % 32)

    return cached_notify_combine
