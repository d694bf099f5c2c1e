"""Kernels that carry rows to their experts and back, in the order of the experts: launches beside the GEMMs.

``push_rows`` writes a rank's rows to the ranks that have their experts, where ``exchange_counts`` has placed them:
first all rows for every rank's first expert, then those for its second one. ``return_rows`` writes the second GEMM's
rows to the rank that has their token, at the place that they had there.
"""

from functools import cache

from numba import cuda, int32, int64

from moe_numba.expert_parallel.common.arguments import RankContext
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG
from moe_numba.expert_parallel.common.poison import adopt_abort
from moe_numba.expert_parallel.common.timeout import EXPERT_ROWS, ROWS_BACK
from moe_numba.moe_layer.expert_parallel.one_kernel.counts import CONTEXT, wait_count
from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import EXPECTED, EXPECTED_BACK, WARP, Sizes
from moe_numba.ptx.atomics import ld_volatile_s32, red_add_release_sys_s32
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_global_s32x4,
    pointer_from_address,
    st_global_s32x4,
)

PUSH_SIGNATURE = *CONTEXT, *["int32*"] * 5
RETURN_SIGNATURE = *CONTEXT, *["int32*"] * 2
VECTOR = 4  # words of a 16-byte access


@cuda.jit(device=True)
def copy_vectors(to, to_word, source, source_word, words, lane):
    """Copy a row with all lanes of a warp; ``words`` is a multiple of 4."""
    for i in range(lane, words // VECTOR, WARP):
        a, b, c, d = ld_global_s32x4(source, source_word + VECTOR * i)
        st_global_s32x4(to, to_word + VECTOR * i, a, b, c, d)


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
                wait_count(ctx, local, arrived + e, state[EXPECTED + e], EXPERT_ROWS, e)

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
            wait_count(ctx, local, returned, state[EXPECTED_BACK], ROWS_BACK, int32(-1))
            aborted = ld_volatile_s32(local, ABORT_FLAG)
        if cuda.syncthreads_or(aborted) != 0:
            adopt_abort(ctx)
            for i in range(int64(t), int64(assignments) * row_words, threads):
                local[back + i] = int32(-1)  # NaN

    return return_rows
