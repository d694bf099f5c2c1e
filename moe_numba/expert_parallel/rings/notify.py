"""Kernels around the exchange of rows: `notify_dispatch` exchanges the counts before it, `barrier` only synchronises.

A grid of `notify_dispatch` has a CTA for each rank, and one more. CTA d counts this rank's tokens for rank d, stores
the counts to rank d's memory, and raises a flag there. The last CTA waits for the flags of all ranks, and computes

    rank_prefix          [N, N]  at (s, r) the rows that ranks 0 to s send to rank r
    recv_channel_prefix  [N, C]  at (s, c) the rows that channels 0 to c - 1 of rank s send to this rank

The CTAs of the ranks have written ``channel_prefix``, [N, C]: the rows that channels 0 to c of this rank send to rank
d. It includes channel c; ``recv_channel_prefix``, which rank d makes of the same counts, does not.

The counts are double-buffered, and flags are sequence numbers: a rank at notify n + 1 has seen the flags of all ranks
for notify n, so no rank still reads the counts of notify n - 1. Nothing is cleared, and no barrier is needed before or
after, where DeepEP's kernel has three.

With its counts a rank sends the arguments of its call that must be the same on all ranks. Each rank compares those of
all others with its own, and aborts if one differs.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.expert_parallel.common.arguments import RankContext
from moe_numba.expert_parallel.common.buffer_layout import (
    ABORT_FLAG,
    BARRIER_COUNT,
    CALL_WORDS,
    MAX_CHANNELS,
    MAX_EXPERTS,
    MAX_ROWS,
    MAX_TOPK,
    NOTIFY_COUNTS,
    buffer_layout,
)
from moe_numba.expert_parallel.common.poison import adopt_abort, fill
from moe_numba.expert_parallel.common.timeout import (
    BARRIER,
    CALL_MISMATCH,
    COUNT_MISMATCH,
    COUNTS,
    TOO_MANY_ROWS,
    WRONG_COUNT,
    abort,
    timed_out,
)
from moe_numba.expert_parallel.rings.channels import channel_of, split_tokens
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, pointer_from_address
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.warp import warp_inclusive_scan

_LOADS_IN_FLIGHT = 8  # per thread


@cuda.jit(device=True)
def wait_flag(ctx, offset, expected, code, peer):
    """Wait until the number that a peer stores at ``offset`` is ``expected`` or more; return whether to abort."""
    start = globaltimer()
    found = ld_acquire_sys_s32(ctx.local, offset)
    while int32(found - expected) < 0:
        if timed_out(start, ctx):
            abort(ctx, code, int32(-1), peer, expected, found)
            return int32(1)
        found = ld_acquire_sys_s32(ctx.local, offset)
    return int32(0)


@cache
def make_notify_dispatch(num_ranks, threads):
    """Make the kernel, for ``num_ranks + 1`` CTAs of ``threads`` threads.

    With ``has_counters`` it writes to ``counters``, in host memory, the number of rows that this rank receives, and
    behind it, for each local expert, the number of its tokens, rounded up to a multiple of ``alignment``.
    """
    layout = buffer_layout(num_ranks)
    flags_offset, counts_offset, counts_stride = layout.notify_flags, layout.counts, layout.counts_stride
    call_offset = layout.call

    @cuda.jit(device=True)
    def check_call(ctx, offset, peer, call):
        """Abort if a peer has aborted, or if its call differs; return whether this rank must abort."""
        argument, local_value, peer_value = int32(-1), int32(0), int32(0)
        for i in range(CALL_WORDS):
            found = ctx.local[offset + call_offset + i]
            if found != call[i] and argument < 0:
                argument, local_value, peer_value = int32(i), call[i], found
        must_abort = int32(ld_volatile_s32(ctx.local, ABORT_FLAG) != 0 or argument >= 0)
        if must_abort != 0:
            abort(ctx, CALL_MISMATCH, argument, peer, local_value, peer_value)
        return must_abort

    @cuda.jit
    def notify_dispatch(
        local,
        peers,
        state,
        status,
        timeout_ns,
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
        hidden,
        dtype,
        num_scales,
        topk,
        slots,
        scales_dtype,
        out,
    ):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        call = hidden, dtype, num_scales, scales_dtype, topk, int32(num_ranks * experts), out, channels, slots
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()  # dispatch may become resident; it waits for this grid to end
        block, t = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        # Each CTA has its own counter of launches, so that CTAs need not synchronise to count one.
        sequence = int32(state[int32(NOTIFY_COUNTS + block)] + 1)
        cuda.syncthreads()
        if t == 0:
            state[int32(NOTIFY_COUNTS + block)] = sequence

        if block < num_ranks:
            # ---- Send the arguments of the call to this CTA's peer ----
            peer, counts = block, cuda.shared.array(MAX_CHANNELS, int32)
            remote = pointer_from_address(peers[peer], local)
            offset = counts_offset + int32((sequence & 1) * num_ranks + rank) * counts_stride
            if t == 0:
                for i in range(CALL_WORDS):
                    st_relaxed_sys_s32(remote, offset + call_offset + i, call[i])

            # ---- Count the tokens of each channel that go to the peer ----
            for c in range(t, channels, threads):
                counts[c] = int32(0)
            cuda.syncthreads()
            each, longer = split_tokens(channels, tokens)
            is_sent = cuda.local.array(_LOADS_IN_FLIGHT, int32)
            for first in range(t, tokens, _LOADS_IN_FLIGHT * threads):
                for u in range(_LOADS_IN_FLIGHT):
                    token, is_sent[u] = int32(first + u * threads), int32(0)
                    if token < tokens:
                        is_sent[u] = int32(is_token_in_rank[int64(token) * num_ranks + peer])
                for u in range(_LOADS_IN_FLIGHT):
                    if is_sent[u] != 0:
                        cuda.atomic.add(counts, channel_of(int32(first + u * threads), each, longer), int32(1))
            cuda.syncthreads()
            if t < 32:  # one warp computes the inclusive prefix sum; each lane has consecutive channels
                per_lane = int32((channels + 31) // 32 | 1)  # odd: avoids bank conflicts
                first, last = min(channels, int32(t * per_lane)), min(channels, int32((t + 1) * per_lane))
                own = int32(0)
                for c in range(first, last):
                    own = int32(own + counts[c])
                total = int32(warp_inclusive_scan(own, t) - own)
                for c in range(first, last):
                    total = int32(total + counts[c])
                    counts[c] = total
            cuda.syncthreads()

            # ---- Send the counts ----
            for r in range(t, num_ranks, threads):
                st_relaxed_sys_s32(remote, offset + r, tokens_per_rank[r])
            most = int32(min(int64(tokens) * MAX_TOPK, int64(MAX_ROWS)))
            for e in range(t, experts, threads):
                count = tokens_per_expert[int32(peer * experts + e)]
                if uint32(count) > uint32(most):  # also if it is negative
                    abort(ctx, WRONG_COUNT, int32(-1), peer, count, most)
                st_relaxed_sys_s32(remote, offset + num_ranks + e, count)
            for c in range(t, channels, threads):
                channel_prefix[int32(peer * channels + c)] = counts[c]
                before = counts[int32(c - 1)] if c > 0 else int32(0)
                st_relaxed_sys_s32(remote, offset + num_ranks + MAX_EXPERTS + c, before)
            cuda.syncthreads()

            # ---- Raise the flag: after the barrier, the release covers the stores of all threads ----
            if t == 0:
                counted = counts[int32(channels - 1)]
                if counted != tokens_per_rank[peer]:
                    abort(ctx, COUNT_MISMATCH, int32(-1), peer, tokens_per_rank[peer], counted)
                st_release_sys_s32(remote, flags_offset + rank, sequence)
        else:
            # ---- The last CTA waits for the flags of all ranks ----
            must_abort = int32(0)
            if t < num_ranks:
                must_abort = wait_flag(ctx, flags_offset + t, sequence, COUNTS, t)
            if cuda.syncthreads_or(must_abort) != 0:  # counts are missing; later kernels use the prefixes as indices
                fill(rank_prefix, num_ranks * num_ranks, int32(0))
                fill(recv_channel_prefix, num_ranks * channels, int32(0))
                return

            # ---- Compute the prefix matrices, and the host's counters ----
            offset = counts_offset + int32((sequence & 1) * num_ranks) * counts_stride
            for r in range(t, num_ranks, threads):
                total = int32(0)
                for s in range(num_ranks):
                    total = int32(total + local[offset + s * counts_stride + r])
                    rank_prefix[int32(s * num_ranks + r)] = total
            loaded = cuda.local.array(_LOADS_IN_FLIGHT, int32)
            for first in range(t, num_ranks * channels, _LOADS_IN_FLIGHT * threads):
                for u in range(_LOADS_IN_FLIGHT):
                    i = int32(first + u * threads)
                    if i < num_ranks * channels:
                        s = int32(i // channels)
                        loaded[u] = local[offset + s * counts_stride + num_ranks + MAX_EXPERTS + (i - s * channels)]
                for u in range(_LOADS_IN_FLIGHT):
                    i = int32(first + u * threads)
                    if i < num_ranks * channels:
                        recv_channel_prefix[i] = loaded[u]
            if has_counters != 0:
                for e in range(t, experts, threads):
                    total = int32(0)
                    for s in range(num_ranks):
                        total = int32(total + local[offset + s * counts_stride + num_ranks + e])
                    counters[int32(1 + e)] = int32((total + alignment - 1) // alignment * alignment)
                fence_acq_rel_sys()  # the host sees the counters when it sees the number of rows

            # ---- Compare the calls: the last warp does, while the others load counts ----
            source = int32(t - (threads - 32))
            if 0 <= source and source < num_ranks:
                must_abort = check_call(ctx, offset + source * counts_stride, source, call)
            must_abort = cuda.syncthreads_or(must_abort)

            # ---- Post the number of rows to the host, unless there are too many ----
            if t == 0 and must_abort == 0:
                total = rank_prefix[int32((num_ranks - 1) * num_ranks + rank)]
                if total > capacity:
                    abort(ctx, TOO_MANY_ROWS, int32(-1), rank, capacity, total)
                elif has_counters != 0:
                    st_release_sys_s32(counters, 0, total)

    return notify_dispatch


NOTIFY_SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32*", "int32*", "uint8*", "int32", "int32"),
    *("int32", "int32", "int32", "int32*", "int32*", "int32*", "int32*", "int32"),
    *("int32", "int32", "int32", "int32", "int32", "int32", "int32"),
)


@cache
def make_barrier(num_ranks):
    """Make the barrier kernel, for one CTA of 32 threads or more.

    Thread r stores this rank's flag to rank r, and waits for the flag of rank r. A rank that has aborted does not
    arrive, because the data that its peers expect is missing. If the barrier fails, it poisons the output of the direct
    dispatch before it: up to five tensors, each with its size in words.
    """
    flags_offset = buffer_layout(num_ranks).barrier_flags

    @cuda.jit
    def barrier(
        local,
        peers,
        state,
        status,
        timeout_ns,
        rank,
        x,
        x_words,
        scales,
        scales_words,
        topk_idx,
        topk_idx_words,
        topk_weights,
        topk_weights_words,
        src_idx,
        src_idx_words,
    ):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        t, aborted = int32(cuda.threadIdx.x), int32(0)
        sequence = int32(state[BARRIER_COUNT] + 1)
        cuda.syncthreads()
        if t < num_ranks:
            if ld_volatile_s32(local, ABORT_FLAG) == 0:
                st_release_sys_s32(pointer_from_address(peers[t], local), flags_offset + rank, sequence)
            wait_flag(ctx, flags_offset + t, sequence, BARRIER, t)
            aborted = ld_volatile_s32(local, ABORT_FLAG)
        if t == 0:
            state[BARRIER_COUNT] = sequence
        if cuda.syncthreads_or(aborted) != 0:
            adopt_abort(ctx)
            fill(x, x_words, int32(-1))
            fill(scales, scales_words, int32(-1))
            fill(topk_idx, topk_idx_words, int32(-1))
            fill(topk_weights, topk_weights_words, int32(-1))
            fill(src_idx, src_idx_words, int32(-1))

    return barrier


BARRIER_SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32"),
    *("int32*", "int64", "int32*", "int64", "int32*", "int64", "int32*", "int64", "int32*", "int64"),
)
