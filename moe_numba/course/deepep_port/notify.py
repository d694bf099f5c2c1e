"""Our port of DeepEP's kernels that run before rows are exchanged: barriers, exchange of counts, clearing of queues.

Differences from DeepEP: additions to signals release and polls acquire, where DeepEP uses fences and polls with
``volatile`` loads; and a thread that waits too long for another rank reports it and ends.
"""

from functools import cache

from numba import cuda, int32

from moe_numba import simulator
from moe_numba.course.deepep_port.buffer_layout import combine_offsets, dispatch_offsets
from moe_numba.course.deepep_port.polling import BARRIER, WaitContext, at_most, make_channel_range, make_wait
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    red_add_relaxed_sys_s32,
    red_add_release_sys_s32,
    st_relaxed_sys_s32,
)
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt, redux_sync_add_s32

THREADS = 64 if simulator.ENABLED else 128  # per CTA; the simulator runs threads one after the other
TAG = 1024
NO_HEAD = 1 << 25  # larger than any head: no later token comes back from that rank


@cache
def make_barrier(ranks):
    """Make ``barrier_block(signals, like, ctx)``: one CTA of each rank waits for those of all other ranks.

    A rank adds TAG to its own signal for each peer, and subtracts TAG from its signal at that peer. In either order
    both signals return to zero, ready for the next barrier. A peer can be ahead by one barrier at most, so a signal
    never differs from zero by more than TAG. ``like`` is an int32 pointer. Returns to all threads whether all ranks
    have arrived.
    """
    wait = make_wait(ld_acquire_sys_s32, at_most, BARRIER)

    @cuda.jit(device=True)
    def barrier_block(signals, like, ctx):
        thread, arrived = int32(cuda.threadIdx.x), True
        cuda.syncthreads()  # this thread's release also covers the stores of the other threads
        if thread < ranks:
            local = pointer_from_address(signals[ctx.rank], like)
            red_add_relaxed_sys_s32(local, thread, TAG)
            red_add_release_sys_s32(pointer_from_address(signals[thread], like), ctx.rank, -TAG)
            arrived, _ = wait(local, thread, 0, 0, -1, thread, ctx)
        return cuda.syncthreads_and(int32(arrived)) != 0

    return barrier_block


@cache
def make_notify_dispatch(config):
    """Make the kernel, for ``1 + ranks`` CTAs of ``THREADS``.

    CTA 0 exchanges the counts with the other ranks; CTA 1 + r counts the rows of each channel to rank r.
    ``channel_prefix`` [ranks, channels] and ``rank_prefix`` [ranks, ranks] are the handle's matrices; ``counter`` and
    ``expert_counter`` may be in host memory, and -1 beforehand, so that the host can poll them.
    """
    ranks, channels = config.ranks, config.channels
    experts = config.experts // ranks  # of a rank
    barrier_block, channel_range = make_barrier(ranks), make_channel_range(channels)
    offsets = dispatch_offsets(config)
    counts, queues_end = offsets.start // 4, offsets.x // 4  # in int32

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
        ctx,
    ):
        thread, rank = int32(cuda.threadIdx.x), ctx.rank
        arrived = barrier_block(signals, rank_prefix, ctx)  # no rank uses a buffer any more
        if arrived:
            if thread < ranks:
                remote = pointer_from_address(peers[thread], rank_prefix)
                for i in range(ranks):
                    remote[rank * ranks + i] = num_tokens_per_rank[i]
                for i in range(experts):
                    remote[counts + rank * experts + i] = num_tokens_per_expert[thread * experts + i]
            arrived = barrier_block(signals, rank_prefix, ctx)
        if arrived:
            local = pointer_from_address(peers[rank], rank_prefix)
            if thread < ranks:
                total = int32(0)
                for source in range(ranks):
                    total = int32(total + local[source * ranks + thread])
                    local[source * ranks + thread] = total
                    rank_prefix[source * ranks + thread] = total
                if thread == rank:
                    st_relaxed_sys_s32(counter, 0, total)
            for i in range(thread, experts, THREADS):
                total = int32(0)
                for source in range(ranks):
                    total = int32(total + local[counts + source * experts + i])
                aligned = int32(int32(total + expert_alignment - 1) // expert_alignment) * expert_alignment
                st_relaxed_sys_s32(expert_counter, i, int32(aligned))
            cuda.syncthreads()  # the counts overlap the beginning of the queues
            for i in range(counts + thread, queues_end, THREADS):
                local[i] = int32(0)
            barrier_block(signals, rank_prefix, ctx)

    @cuda.jit(device=True)
    def count_channels(is_token_in_rank, num_tokens, channel_prefix, peer):
        warp, lane = int32(cuda.threadIdx.x) // 32, int32(cuda.threadIdx.x) % 32
        for channel in range(warp, channels, THREADS // 32):
            first, last = channel_range(num_tokens, channel)
            count = int32(0)
            for token in range(first + lane, last, 32):
                count = int32(count + int32(is_token_in_rank[token * ranks + peer] != 0))
            count = redux_sync_add_s32(FULL_MASK, count)
            if lane == 0:
                channel_prefix[peer * channels + channel] = count
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for i in range(peer * channels + 1, (peer + 1) * channels):
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
        timeout_ns,
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
                WaitContext(rank, timeout_ns, status),
            )
        else:
            count_channels(is_token_in_rank, num_tokens, channel_prefix, int32(cuda.blockIdx.x) - 1)

    return notify_dispatch


@cache
def make_cached_notify_dispatch(config):
    """Make the kernel, for one CTA of ``THREADS``: copies known counts instead of exchanging them."""
    ranks, offsets = config.ranks, dispatch_offsets(config)
    barrier_block, queues, queues_end = make_barrier(ranks), offsets.start // 4, offsets.x // 4

    @cuda.jit
    def cached_notify_dispatch(rank_prefix, peers, signals, rank, timeout_ns, status):
        thread, ctx = int32(cuda.threadIdx.x), WaitContext(rank, timeout_ns, status)
        if barrier_block(signals, rank_prefix, ctx):
            local = pointer_from_address(peers[rank], rank_prefix)
            for i in range(thread, ranks * ranks, THREADS):
                local[i] = rank_prefix[i]
            for i in range(queues + thread, queues_end, THREADS):
                local[i] = int32(0)
            barrier_block(signals, rank_prefix, ctx)

    return cached_notify_dispatch


def notify_combine_threads(ranks):
    """Return the threads of a CTA of cached_notify_combine: one warp per rank."""
    return max(THREADS, 32 * ranks)


@cache
def make_cached_notify_combine(config):
    """Make the kernel, for ``1 + channels`` CTAs of ``notify_combine_threads(ranks)``.

    CTA 0 clears the queues. CTA 1 + c visits channel c's tokens in reverse order. For each rank to which a token was
    not sent, it replaces the -1 by ``-n - 1``, where n is the position in the queue of the next token that was sent: a
    warp that has processed the token then knows which slots of that queue it has released. A second run changes nothing
    because negative entries are computed again.
    """
    ranks, channels = config.ranks, config.channels
    barrier_block, channel_range = make_barrier(ranks), make_channel_range(channels)
    threads, queues_end = notify_combine_threads(ranks), combine_offsets(config).x // 4

    @cuda.jit(device=True)
    def fill_in(send_head, num_tokens, channel, rank, lane):
        first, last = channel_range(num_tokens, channel)
        following = int32(NO_HEAD)
        for newest in range(last - 1, first - 1, -32):
            token = newest - lane  # lower lanes have later tokens
            head = int32(send_head[token * ranks + rank]) if token >= first else int32(-1)
            sent = cuda.ballot_sync(FULL_MASK, head >= 0)
            later = int32(int32(sent) & int32(lanemask_lt()))
            nearest = int32(31 - int32(cuda.clz(later)))
            found = cuda.shfl_sync(FULL_MASK, head, max(nearest, int32(0)))
            found = int32(found if nearest >= 0 else following)
            if token >= first and head < 0:
                send_head[token * ranks + rank] = int32(-found - 1)
            following = cuda.shfl_sync(FULL_MASK, head if head >= 0 else found, 31)

    @cuda.jit
    def cached_notify_combine(send_head, num_tokens, peers, signals, rank, timeout_ns, status):
        thread, ctx = int32(cuda.threadIdx.x), WaitContext(rank, timeout_ns, status)
        if cuda.blockIdx.x == 0:
            if barrier_block(signals, send_head, ctx):
                local = pointer_from_address(peers[rank], send_head)
                for i in range(thread, queues_end, threads):
                    local[i] = int32(0)
                barrier_block(signals, send_head, ctx)
        elif thread < 32 * ranks:
            fill_in(send_head, num_tokens, int32(cuda.blockIdx.x) - 1, thread // 32, thread % 32)

    return cached_notify_combine
