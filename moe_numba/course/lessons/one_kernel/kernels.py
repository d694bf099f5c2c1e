"""Kernels that carry rows to their experts and back, in the order of the experts.

``exchange_counts`` tells every rank how many rows each rank has for each expert. From that a rank knows the place of
each of its rows in the memory of the rank that has the expert, and ``push_rows`` writes them there: first all rows for
every rank's first expert, then those for its second one. ``return_rows`` writes the second GEMM's rows to the rank that
has their token, at the place that they had there.

No rank can be a call ahead: to write rows a rank needs the counts of all ranks for this call, which a rank sends when
it has finished the call before. So counters need not be cleared, and rows need one buffer. Counts need two, since a
rank that waits for no rows may finish a call before another one has read its counts.
"""

from functools import cache

from numba import cuda, int32, int64

from moe_numba.course.lessons.one_kernel.sizes import EXPECTED, EXPECTED_BACK, SEQUENCE, WARP, Sizes
from moe_numba.expert_parallel.common.arguments import RankContext
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG
from moe_numba.expert_parallel.common.poison import adopt_abort
from moe_numba.expert_parallel.common.timeout import COMBINE_ROWS, COUNTS, DISPATCH_ROWS, abort, timed_out
from moe_numba.expert_parallel.rings.notify import wait_flag
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    ld_volatile_s32,
    red_add_release_sys_s32,
    st_relaxed_sys_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_global_s32x4,
    pointer_from_address,
    st_global_s32x4,
)
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.warp import FULL_MASK, warp_inclusive_scan

CONTEXT = "int32*", "uint64*", "int32*", "int32*", "uint64", "int32"
COUNTS_SIGNATURE = *CONTEXT, *["int32*"] * 5
PUSH_SIGNATURE = *CONTEXT, *["int32*"] * 5
RETURN_SIGNATURE = *CONTEXT, *["int32*"] * 2
VECTOR = 4  # words of a 16-byte access


@cuda.jit(device=True)
def copy_vectors(to, to_word, source, source_word, words, lane):
    """Copy a row with all lanes of a warp; ``words`` is a multiple of 4."""
    for i in range(lane, words // VECTOR, WARP):
        a, b, c, d = ld_global_s32x4(source, source_word + VECTOR * i)
        st_global_s32x4(to, to_word + VECTOR * i, a, b, c, d)


@cuda.jit(device=True)
def wait_or_leave(ctx, counter, offset, expected):
    """Wait until ``counter[offset]`` is ``expected`` or more, a rank has aborted or time is up; return the number."""
    start = globaltimer()
    found = ld_acquire_sys_s32(counter, offset)
    while int32(found - expected) < 0 and not timed_out(start, ctx):
        found = ld_acquire_sys_s32(counter, offset)
    return found


@cuda.jit(device=True)
def wait_count(ctx, counter, offset, expected, code, about):
    """Wait in the same way, and abort if time is up; ``about`` is for the message."""
    found = wait_or_leave(ctx, counter, offset, expected)
    if int32(found - expected) < 0:
        abort(ctx, code, about, ctx.rank, expected, found)


@cache
def make_exchange_counts(sizes: Sizes, pieces: int = 1):
    """Make the kernel, for one CTA with a warp for each rank.

    A row comes back in ``pieces``. ``done`` has a counter for each expert of this rank, which the kernel clears.
    """
    ranks, experts, all_experts = sizes.ranks, sizes.experts, sizes.all_experts
    count_flags, counts, threads = sizes.count_flags, sizes.counts, WARP * sizes.ranks

    @cuda.jit
    def exchange_counts(local, peers, state, status, timeout_ns, rank, first_rows, lengths, starts, places, done):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        t, lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        for e in range(t, experts, threads):
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


@cache
def make_push_rows(sizes: Sizes):
    """Make the kernel, for any number of CTAs of ``32 * sizes.warps`` threads.

    A warp writes every n-th of the rows that go to one expert, and then adds their number to the counter of the rank
    that has it. The first CTA waits until all rows for this rank's experts are there.
    """
    ranks, experts, all_experts, warps = sizes.ranks, sizes.experts, sizes.all_experts, sizes.warps
    row_words, scale_words, assignments = sizes.row_words, sizes.scale_words, sizes.assignments
    rows_offset, scales_offset, origins_offset = sizes.rows, sizes.scales, sizes.origins
    arrived, threads, num_ends = sizes.arrived, WARP * sizes.warps, sizes.all_experts + 1

    @cuda.jit
    def push_rows(local, peers, state, status, timeout_ns, rank, x, scales, tokens_of_rows, first_rows, places):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        t, lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        first_of, place_of = cuda.shared.array(num_ends, int32), cuda.shared.array(all_experts, int32)
        aborted = int32(0)
        if t == 0:
            aborted = ld_volatile_s32(local, ABORT_FLAG)
        for g in range(t, all_experts, threads):
            first_of[g], place_of[g] = first_rows[g], places[g]
        if t == 0:
            first_of[all_experts] = first_rows[all_experts]
        has_places = cuda.syncthreads_or(aborted) == 0

        # ---- Rows for every rank's expert e, then those for expert e + 1; the ranks begin with different ones ----
        all_warps = int32(cuda.gridDim.x * warps)
        row = int32(warp * cuda.gridDim.x + cuda.blockIdx.x)  # this warp's next row, from the first one of an expert on
        for e in range(experts if has_places else 0):
            for i in range(ranks):
                d = int32((rank + 1 + i) % ranks)
                g = int32(d * experts + e)
                first, count, sent = first_of[g], int32(first_of[g + 1] - first_of[g]), int32(0)
                remote = pointer_from_address(peers[d], local)
                while row < count:
                    token, place = int64(tokens_of_rows[first + row]), int64(place_of[g] + row)
                    copy_vectors(remote, rows_offset + place * row_words, x, token * row_words, row_words, lane)
                    for j in range(lane, scale_words, WARP):
                        remote[scales_offset + place * scale_words + j] = scales[token * scale_words + j]
                    if lane == 0:
                        remote[origins_offset + place] = int32(rank * assignments + first + row)
                    row, sent = int32(row + all_warps), int32(sent + 1)
                row = int32(row - count)
                cuda.syncwarp()
                if lane == 0 and sent > 0:  # releases the stores of the whole warp
                    red_add_release_sys_s32(remote, arrived + e, sent)

        # ---- The rows of all ranks ----
        if cuda.blockIdx.x == 0:
            for e in range(t, experts, threads):
                wait_count(ctx, local, arrived + e, state[EXPECTED + e], DISPATCH_ROWS, e)

    return push_rows


@cache
def make_return_rows(sizes: Sizes):
    """Make the kernel, for any number of CTAs of ``32 * sizes.warps`` threads; the first one waits for all rows."""
    experts, warps, assignments = sizes.experts, sizes.warps, sizes.assignments
    origins, back, returned, row_words = sizes.origins, sizes.back, sizes.returned, sizes.hidden // 2
    threads = WARP * sizes.warps

    @cuda.jit
    def return_rows(local, peers, state, status, timeout_ns, rank, y, starts):
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        t, lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        rows = starts[experts]
        all_warps = int32(cuda.gridDim.x * warps)
        for row in range(warp * cuda.gridDim.x + cuda.blockIdx.x, rows, all_warps):
            origin = local[origins + row]
            source = int32(origin // assignments)
            place = int64(origin - source * assignments)
            remote = pointer_from_address(peers[source], local)
            copy_vectors(remote, back + place * row_words, y, int64(row) * row_words, row_words, lane)
            cuda.syncwarp()
            if lane == 0:
                red_add_release_sys_s32(remote, returned, int32(1))
        aborted = int32(0)
        if cuda.blockIdx.x == 0 and t == 0:
            wait_count(ctx, local, returned, state[EXPECTED_BACK], COMBINE_ROWS, int32(-1))
            aborted = ld_volatile_s32(local, ABORT_FLAG)
        if cuda.syncthreads_or(aborted) != 0:
            adopt_abort(ctx)
            for i in range(int64(t), int64(assignments) * row_words, threads):
                local[back + i] = int32(-1)  # NaN

    return return_rows
