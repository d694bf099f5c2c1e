"""Kernels of ``group_by_expert``: stable counting sorts of assignments by expert.

An assignment is an element of ``topk_ids``; assignments are numbered in row-major order. In the kernel of one CTA each
warp has a contiguous
share of them and a row of counters in shared memory, one per expert. The warp counts its share; a scan over experts and
warps turns the counts into the first row of each expert and warp; the warp then reads its share again (from L1) and
assigns rows in order. Equal experts among 32 lanes are found with one ballot per bit of the expert's number, which
needs neither a second array in shared memory nor ``match.any.sync``, whose time grows with the number of experts.

Few assignments take one CTA. Many take the alignment's counting sort, whose CTAs exchange their counts.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.align.counting_sort import make_sort
from moe_numba.align.device_functions import check_launch_shape, make_clear, make_scan
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt, uniform

MAX_EXPERTS = 512
_BATCH = 4  # ids that a lane loads at once
_ROWS_IN_FLIGHT = 8  # counters of an expert that a thread loads at once


def counter_words(threads, num_experts):
    """Return the int32 of dynamic shared memory: a row of counters per warp, rounded up to 16 bytes."""
    return -(-threads // 32 * num_experts // 4) * 4


def _check(num_experts, threads):
    check_launch_shape(threads, 4)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts is {num_experts}; 1 to {MAX_EXPERTS} are allowed")


@cache
def make_load_experts(num_experts, topk):
    """Make ``load_experts(...)``: the experts of assignments ``first``, ``first`` + 32, ...; -1 if there is none."""

    @cuda.jit(device=True)
    def load_experts(topk_ids, token_stride, column_stride, first, end, experts):
        for k in range(_BATCH):
            experts[k] = int32(-1)
            assignment = int32(first + 32 * k)
            if assignment < end:
                token = int32(uint32(assignment) // uint32(topk))
                column = int32(assignment - token * topk)
                expert = topk_ids[int64(token) * token_stride + int64(column) * column_stride]
                if expert >= 0 and expert < num_experts:  # before narrowing: an int64 may wrap around to a valid id
                    experts[k] = int32(expert)

    return load_experts


@cuda.jit(device=True)
def share_of_warp(first, end, num_warps):
    """Return the first assignment of this warp's share of ``first`` to ``end``, and its end."""
    warp = int32(cuda.threadIdx.x >> 5)
    share = int32(uint32(end - first + 32 * num_warps - 1) // uint32(32 * num_warps) * 32)
    start = int32(first + warp * share)
    return start, int32(min(int32(start + share), end))


@cache
def make_count(num_experts, topk, threads):
    """Make ``count(...)``: each warp counts its assignments in a row of ``counters``, which must be zero."""
    load_experts, num_warps = make_load_experts(num_experts, topk), threads // 32

    @cuda.jit(device=True)
    def count(topk_ids, token_stride, column_stride, first, end, counters):
        start, warp_end = share_of_warp(first, end, num_warps)
        row = int32((cuda.threadIdx.x >> 5) * num_experts)
        experts = cuda.local.array(_BATCH, int32)
        assignment = int32(start + (cuda.threadIdx.x & 31))
        while assignment < warp_end:
            load_experts(topk_ids, token_stride, column_stride, assignment, warp_end, experts)
            for k in range(_BATCH):
                if experts[k] >= 0:
                    cuda.atomic.add(counters, int32(row + experts[k]), int32(1))
            assignment = int32(assignment + 32 * _BATCH)

    return count


@cache
def make_scan_warps(num_experts, threads):
    """Make ``scan_warps(counters, expert)``: replace an expert's counts by those of lower warps; return their sum."""
    num_warps = threads // 32

    @cuda.jit(device=True)
    def scan_warps(counters, expert):
        total = int32(0)
        counts = cuda.local.array(_ROWS_IN_FLIGHT, int32)
        for warp in range(0, num_warps, _ROWS_IN_FLIGHT):
            for k in range(_ROWS_IN_FLIGHT):
                counts[k] = int32(0)
                if warp + k < num_warps:
                    counts[k] = counters[int32(expert + (warp + k) * num_experts)]
            for k in range(_ROWS_IN_FLIGHT):
                if warp + k < num_warps:
                    counters[int32(expert + (warp + k) * num_experts)] = total
                    total = int32(total + counts[k])
        return total

    return scan_warps


@cache
def make_assign(num_experts, topk, threads):
    """Make ``assign(...)``, which writes this CTA's assignments to both outputs.

    ``starts`` has the CTA's first row of each expert; ``counters`` the counts of lower warps.
    """
    load_experts, num_warps = make_load_experts(num_experts, topk), threads // 32
    num_bits = (num_experts - 1).bit_length()

    @cuda.jit(device=True)
    def assign(topk_ids, token_stride, column_stride, first, end, starts, counters, gather_indices, inverse_indices):
        start, warp_end = share_of_warp(first, end, num_warps)
        lane, row = int32(cuda.threadIdx.x & 31), int32((cuda.threadIdx.x >> 5) * num_experts)
        # Uniform, or else the compiler adds a second copy of each ballot for a diverged warp.
        start, warp_end = uniform(start), uniform(warp_end)
        experts = cuda.local.array(_BATCH, int32)
        while start < warp_end:
            load_experts(topk_ids, token_stride, column_stride, int32(start + lane), warp_end, experts)
            for k in range(_BATCH):
                assignment, expert = int32(start + 32 * k + lane), experts[k]
                same_expert = uint32(cuda.ballot_sync(FULL_MASK, expert >= 0))
                for bit in range(num_bits):
                    is_set = ((expert >> bit) & 1) != 0
                    lanes = uint32(cuda.ballot_sync(FULL_MASK, is_set))
                    same_expert = uint32(same_expert & (lanes if is_set else uint32(~lanes)))
                lower_lanes = uint32(same_expert & lanemask_lt())
                position = int32(-1)
                earlier = int32(0)
                if expert >= 0:
                    earlier = counters[int32(row + expert)]
                    position = int32(starts[expert] + earlier + int32(cuda.popc(lower_lanes)))
                cuda.syncwarp()
                if expert >= 0 and lower_lanes == uint32(0):
                    counters[int32(row + expert)] = int32(earlier + int32(cuda.popc(same_expert)))
                cuda.syncwarp()
                if assignment < warp_end:
                    inverse_indices[assignment] = position
                if position >= 0:
                    gather_indices[position] = int32(uint32(assignment) // uint32(topk))
            start = int32(start + 32 * _BATCH)

    return assign


@cuda.jit(device=True)
def fill_tail(gather_indices, total, end):
    """Write -1 to the rows that have no assignment, distributed over the grid."""
    row = int32(total + cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    while row < end:
        gather_indices[row] = int32(-1)
        row = int32(row + cuda.gridDim.x * cuda.blockDim.x)


@cache
def make_single_cta_kernel(num_experts, topk, threads):
    """Make the kernel for few assignments; launch one CTA."""
    _check(num_experts, threads)
    experts_per_thread = -(-num_experts // threads)
    clear, scan = make_clear(threads, counter_words(threads, num_experts)), make_scan(threads)
    count, assign = make_count(num_experts, topk, threads), make_assign(num_experts, topk, threads)
    scan_warps = make_scan_warps(num_experts, threads)

    @cuda.jit
    def group_by_expert(
        topk_ids, seqlens, cu_seqlens, gather_indices, inverse_indices, assignments, token_stride, column_stride
    ):
        counters = cuda.shared.array(0, int32)
        starts, warp_sums = cuda.shared.array(MAX_EXPERTS, int32), cuda.shared.array(32, int32)
        clear(counters)
        cuda.syncthreads()
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        count(topk_ids, token_stride, column_stride, int32(0), assignments, counters)
        cuda.syncthreads()

        first = int32(cuda.threadIdx.x * experts_per_thread)
        lengths = cuda.local.array(experts_per_thread, int32)
        thread_total = int32(0)
        for v in range(experts_per_thread):
            lengths[v] = int32(0)
            if first + v < num_experts:
                lengths[v] = scan_warps(counters, int32(first + v))
            thread_total = int32(thread_total + lengths[v])
        row, total = scan(thread_total, warp_sums)
        for v in range(experts_per_thread):
            if first + v < num_experts:
                starts[first + v] = row
                cu_seqlens[first + v] = row
                seqlens[first + v] = lengths[v]
            row = int32(row + lengths[v])
        if cuda.threadIdx.x == 0:
            cu_seqlens[num_experts] = total
        cuda.syncthreads()
        assign(
            topk_ids,
            token_stride,
            column_stride,
            int32(0),
            assignments,
            starts,
            counters,
            gather_indices,
            inverse_indices,
        )
        fill_tail(gather_indices, total, assignments)

    return group_by_expert


@cache
def make_many_ctas_kernel(threads, capacity, slots_per_thread, topk):
    """Make the kernel for many assignments; see :func:`moe_numba.align.counting_sort.make_sort`.

    In its words an assignment is a slot, the blocks have one row each, and slots with invalid ids are dropped.
    """
    drop_bucket = capacity - 1

    @cuda.jit(device=True)
    def bucket_of_slot(inputs, slot, num_experts):
        topk_ids, token_stride, column_stride = inputs
        token = int32(uint32(slot) // uint32(topk))
        column = int32(int32(slot) - token * topk)
        expert = topk_ids[int64(token) * token_stride + int64(column) * column_stride]
        # Compare before narrowing: an int64 may wrap around to a valid id.
        is_valid = expert >= 0 and expert < num_experts
        return uint32(uint32(expert) + uint32(1)) if is_valid else uint32(drop_bucket)

    @cuda.jit(device=True)
    def write_slot(outputs, row, slot):
        outputs[0][row] = int32(uint32(slot) // uint32(topk))

    sort = make_sort(threads, capacity, slots_per_thread, bucket_of_slot, write_slot, True)

    @cuda.jit
    def group_by_expert_many_ctas(
        topk_ids,
        seqlens,
        cu_seqlens,
        gather_indices,
        inverse_indices,
        workspace,
        assignments,
        num_experts,
        assignments_per_cta,
        token_stride,
        column_stride,
    ):
        dynamic = cuda.shared.array(0, int32)
        warp_sums = cuda.shared.array(32, int32)
        inputs, outputs = (topk_ids, token_stride, column_stride), (gather_indices, inverse_indices)
        counts, first_row, total = sort(
            inputs, outputs, workspace, assignments, num_experts, int32(1), assignments_per_cta, dynamic, warp_sums
        )
        first, stride = int32(cuda.blockIdx.x * threads + cuda.threadIdx.x), int32(cuda.gridDim.x * threads)
        expert = first
        while expert <= num_experts:
            cu_seqlens[expert] = first_row[expert + 1]
            if expert < num_experts:
                seqlens[expert] = int32(counts[expert + 1] + counts[expert + 1 + capacity])
            expert = int32(expert + stride)
        fill_tail(gather_indices, total, assignments)

    return group_by_expert_many_ctas
