"""The exchange of counts before rows are sent in the order of the experts, and waits for counters.

``exchange_counts`` tells every rank how many rows each rank has for each expert. From that a rank knows the place of
each of its rows in the memory of the rank that has the expert.

No rank can be a call ahead: to write rows a rank needs the counts of all ranks for this call, which a rank sends when
it has finished the call before. So counters need not be cleared, and rows need one buffer. Counts need two, since a
rank that waits for no rows may finish a call before another one has read its counts.
"""

from functools import cache

from numba import cuda, int32

from moe_numba.expert_parallel.common.arguments import RankContext
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG
from moe_numba.expert_parallel.common.poison import adopt_abort
from moe_numba.expert_parallel.common.timeout import COUNTS, abort, timed_out
from moe_numba.expert_parallel.rings.notify import wait_flag
from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import EXPECTED, EXPECTED_BACK, SEQUENCE, WARP, Sizes
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, pointer_from_address
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.warp import FULL_MASK, warp_inclusive_scan

CONTEXT = "int32*", "uint64*", "int32*", "int32*", "uint64", "int32"
COUNTS_SIGNATURE = *CONTEXT, *["int32*"] * 5


@cuda.jit(device=True)
def wait_count(ctx, counter, offset, expected, code, about):
    """Wait until ``counter[offset]`` is ``expected`` or more, or a rank has aborted; abort if time is up.

    ``code`` and ``about`` are for the message.
    """
    start = globaltimer()
    found = ld_acquire_sys_s32(counter, offset)
    while int32(found - expected) < 0 and not timed_out(start, ctx):
        found = ld_acquire_sys_s32(counter, offset)
    if int32(found - expected) < 0:
        abort(ctx, code, about, ctx.rank, expected, found)


@cuda.jit(device=True)
def wait_too(ctx, counter, offset, expected):
    """Wait for what another thread of the CTA waits for by ``wait_count``, without a timeout of its own.

    With one, it could give up just before the counter reaches its value, and the other thread would continue.
    """
    found = ld_acquire_sys_s32(counter, offset)
    while int32(found - expected) < 0 and ld_volatile_s32(ctx.local, ABORT_FLAG) == 0:
        found = ld_acquire_sys_s32(counter, offset)


@cache
def make_exchange_counts(sizes: Sizes, pieces: int = 1):
    """Make the kernel, for one CTA with a warp for each rank.

    A row comes back in ``pieces``. ``done`` has a counter for each expert of this rank, and one for the tiles that CTAs
    have asked for; the kernel clears them.
    """
    ranks, experts, all_experts = sizes.ranks, sizes.experts, sizes.all_experts
    count_flags, counts, threads = sizes.count_flags, sizes.counts, WARP * sizes.ranks

    @cuda.jit
    def exchange_counts(local, peers, state, status, timeout_ns, rank, first_rows, lengths, starts, places, done):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        t, lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        for e in range(t, experts + 1, threads):
            done[e] = int32(0)
        sequence = int32(state[SEQUENCE] + 1)
        cuda.syncthreads()

        # ---- Send this rank's counts to all ranks; after the barrier a release covers the stores of all threads ----
        half = int32(counts + (sequence & 1) * ranks * all_experts)
        for g in range(lane, all_experts, WARP):
            remote = pointer_from_address(peers[warp], local)
            st_relaxed_sys_s32(remote, half + rank * all_experts + g, first_rows[g + 1] - first_rows[g])
        cuda.syncthreads()
        must_abort = int32(0)
        if t < ranks:
            st_release_sys_s32(pointer_from_address(peers[t], local), count_flags + rank, sequence)
            must_abort = wait_flag(ctx, count_flags + t, sequence, COUNTS, t)
        if t == 0:
            state[SEQUENCE] = sequence
        if cuda.syncthreads_or(must_abort) != 0:  # counts are missing: no rows
            adopt_abort(ctx)
            for e in range(t, experts, threads):
                lengths[e], starts[e] = int32(0), int32(0)
            if t == 0:
                starts[experts] = int32(0)
            return

        # ---- Warp d finds the places of this rank's rows at rank d: an exclusive prefix sum over its experts ----
        end = int32(0)
        for first in range(0, experts, WARP):
            e, before, total = int32(first + lane), int32(0), int32(0)
            if e < experts:
                for s in range(ranks):
                    count = local[half + s * all_experts + warp * experts + e]
                    before = int32(before + count) if s < rank else before
                    total = int32(total + count)
            inclusive = warp_inclusive_scan(total, lane)
            start = int32(end + inclusive - total)
            if e < experts:
                places[warp * experts + e] = int32(start + before)
            if e < experts and warp == rank:
                lengths[e], starts[e] = total, start
                state[EXPECTED + e] = int32(state[EXPECTED + e] + total)
            end = int32(end + cuda.shfl_sync(FULL_MASK, inclusive, 31))
        if lane == 0 and warp == rank:
            starts[experts] = end
        if t == 0:
            state[EXPECTED_BACK] = int32(state[EXPECTED_BACK] + pieces * first_rows[all_experts])

    return exchange_counts
