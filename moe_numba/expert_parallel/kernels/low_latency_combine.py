"""Low-latency combine kernel: each rank sums the rows of its own experts, and pushes one row per token to its source.

One launch. The source of a token first pushes the token's weights; the expert ranks sum in float32, in the order of
the token's experts, and round to bfloat16. The source sums the ranks' rows in rank order in float32, and rounds once.
Rows that stayed in their slots are sums already: they are pushed as they are, and the result equals that of
`Buffer.combine` bit for bit.

Half of the CTAs push sums to the other ranks. The others receive meanwhile, and sum the rows of the rank's own experts
for its own tokens. A call with a receive hook has a kernel for each phase; the first one pushes these sums as well,
because the caller may overwrite the rows before the second one.

Every rank also posts to all others that it has started, and waits for them at the end: no rank can be two combines
ahead of another. Protocols and timeouts: `low_latency_protocol.py`. Memory map: `low_latency_layout.py`.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.expert_parallel.kernels.low_latency_layout import EXPIRED, POISONED, RECEIVED, SENT, SENTINEL
from moe_numba.expert_parallel.kernels.low_latency_protocol import (
    COMBINE_ROW,
    STARTED,
    LowLatencyContext,
    clean,
    is_last_block,
    make_slot_at,
    make_token_routing,
    masked_ranks,
    roles,
    wait_number,
    wait_vector,
    wait_weight,
)
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.atomics import ld_relaxed_gpu_s32, st_relaxed_gpu_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_global_s32x4,
    pointer_from_address,
    st_global_s32x4,
)
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.system_vectors import st_relaxed_sys_s32x4, st_relaxed_sys_u64
from moe_numba.ptx.warp import FULL_MASK

_MAX_BATCH = 4  # rows that a thread loads at once


@cuda.jit(device=True)
def add_row(sums, words, first, weight):
    """Add a vector of eight bfloat16 times a weight; its four words begin at ``words[first]``."""
    for j in range(4):
        word = uint32(words[first + j])
        sums[2 * j] = cuda.fma(weight, uint_as_float(uint32(word << uint32(16))), sums[2 * j])
        sums[2 * j + 1] = cuda.fma(weight, uint_as_float(uint32(word & uint32(0xFFFF0000))), sums[2 * j + 1])


@cuda.jit(device=True)
def lowest_bit(mask):
    """Return the number of the lowest bit that is set."""
    return int32(cuda.popc(uint32(~mask & (mask - uint32(1)))))


@cuda.jit(device=True)
def round_sums(sums, words):
    """Round eight float32 to bfloat16."""
    for j in range(4):
        words[j] = int32(cvt_rn_bf16x2_f32(sums[2 * j + 1], sums[2 * j]))


@cache
def make_low_latency_combine(shape):
    """Make the kernel, for CTAs of ``shape.threads`` threads, all of which must be resident at once."""
    num_ranks, max_tokens, slots, topk = shape.num_ranks, shape.max_tokens, shape.slots, shape.topk
    sends, receives = shape.sends, shape.receives
    parts, threads, local_experts, weighted = shape.parts, shape.threads, shape.local_experts, shape.expert_major
    data_is_flag, row_words, rows_per_slot = shape.data_is_flag, shape.combined_words, shape.rows_per_slot
    weights_offset, weights_half, flags_half = shape.weights_offset, shape.weights_half, shape.flags_half
    flags_offset, rows_offset = shape.flags_offset, shape.combine_rows
    vectors, part_vectors = row_words // 4, shape.vectors_of_part(row_words)
    batch = min(rows_per_slot, _MAX_BATCH)
    loaded_words = 4 * batch
    reads_own_rows, own_slots = shape.reads_own_rows, max_tokens if shape.reads_own_rows else 0
    load_expert, ranks_of = make_token_routing(shape)
    slot_at = make_slot_at(shape)

    @cuda.jit(device=True)
    def send_weights(ctx, number, masked, topk_idx, topk_weights, num_tokens):
        """Send each token's weights to the ranks of its experts, with one warp per token."""
        warp, lane = int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
        warps = int32(threads // 32)
        for token in range(int32(cuda.blockIdx.x * warps + warp), num_tokens, int32(cuda.gridDim.x * warps)):
            expert = load_expert(topk_idx, token, num_tokens, lane)
            if expert >= 0:
                peer = int32(expert // local_experts)
                if (masked >> uint32(peer) & uint32(1) == uint32(0)) & (not reads_own_rows or peer != ctx.rank):
                    pair = uint64(uint64(uint32(number)) << uint64(32)) | uint64(
                        uint32(topk_weights[int64(token) * topk + lane])
                    )
                    slot = int32(ctx.rank * max_tokens + token)
                    offset = int32(weights_offset + (number & 1) * weights_half + 2 * (slot * topk + lane))
                    st_relaxed_sys_u64(pointer_from_address(ctx.peers[peer], ctx.local), offset, uint64(pair))

    # A lane has one of a slot's rows, and its weight: as arrays they would not fit in registers. So all lanes of a warp
    # must call the following functions.

    @cuda.jit(device=True)
    def find_rows(slot_rows, slot):
        """Return this lane's row of a slot, the mask of lanes with one, and whether the rows were lost."""
        lane, row = int32(cuda.threadIdx.x & 31), int32(-1)
        if lane < rows_per_slot:
            row = slot_rows[int64(slot) * rows_per_slot + lane]
        return row, uint32(cuda.ballot_sync(FULL_MASK, row >= 0)), cuda.any_sync(FULL_MASK, row == POISONED)

    @cuda.jit(device=True)
    def load_rows(x, row, lanes, i, is_inside, loaded):
        """Load vector ``i`` of the rows of the first lanes of a mask; these loads are all in flight."""
        for k in range(batch):
            if lanes != uint32(0):
                found = cuda.shfl_sync(FULL_MASK, row, lowest_bit(lanes))
                if is_inside:
                    a, b, c, d = ld_global_s32x4(x, int64(found) * row_words + 4 * i)
                    loaded[4 * k], loaded[4 * k + 1], loaded[4 * k + 2], loaded[4 * k + 3] = a, b, c, d
                lanes = uint32(lanes & (lanes - uint32(1)))

    @cuda.jit(device=True)
    def add_rows(sums, weight, lanes, loaded):
        """Add what `load_rows` has loaded, in the order of lanes; return the mask of the others."""
        for k in range(batch):
            if lanes != uint32(0):
                factor = uint_as_float(uint32(cuda.shfl_sync(FULL_MASK, weight, lowest_bit(lanes))))
                add_row(sums, loaded, 4 * k, factor)
                lanes = uint32(lanes & (lanes - uint32(1)))
        return lanes

    @cuda.jit(device=True)
    def sum_vector(x, row, weight, lanes, i, is_inside, loaded, words):
        """Sum vector ``i`` of all rows, the first of which are loaded; round the sum."""
        if weighted:
            sums = cuda.local.array(8, float32)
            for j in range(8):
                sums[j] = float32(0)
            lanes = add_rows(sums, weight, lanes, loaded)
            while lanes != uint32(0):
                load_rows(x, row, lanes, i, is_inside, loaded)
                lanes = add_rows(sums, weight, lanes, loaded)
            round_sums(sums, words)
        else:
            words[0], words[1], words[2], words[3] = loaded[0], loaded[1], loaded[2], loaded[3]

    @cuda.jit(device=True)
    def send_sum(ctx, number, peer, token, part, x, slot_rows):
        """Sum this rank's rows of a peer's token, and push the sum there; a lost row makes it NaN."""
        half, tid = int32(number & 1), int32(cuda.threadIdx.x)
        words, loaded = cuda.local.array(4, int32), cuda.local.array(loaded_words, int32)
        source_slot, slot = int32(peer * max_tokens + token), int32(ctx.rank * max_tokens + token)
        own_row, lanes, is_lost = find_rows(slot_rows, source_slot)
        if (lanes != uint32(0)) | is_lost:
            remote = pointer_from_address(ctx.peers[peer], ctx.local)
            row = int32(rows_offset + (half * slots + slot) * row_words)
            first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
            load_rows(
                x, own_row, lanes, int32(first + tid), first + tid < last, loaded
            )  # does not wait for the weights
            weight = int32(0)
            if weighted and own_row >= 0:
                pair = int32(weights_offset + half * weights_half + 2 * (source_slot * topk + (tid & 31)))
                weight = int32(wait_weight(ctx, pair, number, peer, token))
            for base in range(first, last, threads):
                i = int32(base + tid)
                if base != first:
                    load_rows(x, own_row, lanes, i, i < last, loaded)
                sum_vector(x, own_row, weight, lanes, i, i < last, loaded, words)
                for j in range(4):
                    if is_lost:
                        words[j] = int32(SENTINEL)
                    if data_is_flag:
                        words[j] = clean(words[j])
                if i < last:
                    st_relaxed_sys_s32x4(remote, row + 4 * i, words[0], words[1], words[2], words[3])
            if not data_is_flag:
                cuda.syncthreads()
                if tid == 0:
                    fence_acq_rel_sys()  # on behalf of the CTA
                    flag = int32(flags_offset + half * flags_half + slot * parts + part)
                    st_relaxed_sys_s32(remote, flag, number)

    @cuda.jit(device=True)
    def receive_sum(ctx, number, masked, targets, token, part, x, slot_rows, topk_weights, out):
        """Sum a token's rows in rank order; a row that has not arrived in time is NaN."""
        half, tid, own_bit = int32(number & 1), int32(cuda.threadIdx.x), uint32(uint32(1) << uint32(ctx.rank))
        words, sums, own = cuda.local.array(4, int32), cuda.local.array(8, float32), cuda.local.array(4, int32)
        loaded = cuda.local.array(loaded_words, int32)
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        missing, own_row, weight, lanes, is_lost = uint32(targets & masked), int32(-1), int32(0), uint32(0), False
        if reads_own_rows and targets & own_bit != uint32(0):
            missing = uint32(missing & ~own_bit)
            own_row, lanes, is_lost = find_rows(slot_rows, int32(ctx.rank * max_tokens + token))
            if weighted and own_row >= 0:
                weight = topk_weights[int64(token) * topk + (tid & 31)]
        if not data_is_flag:
            for r in range(num_ranks):
                if (targets >> uint32(r) & uint32(1) != uint32(0)) & (not reads_own_rows or r != ctx.rank):
                    flag = int32(flags_offset + half * flags_half + (r * max_tokens + token) * parts + part)
                    if not wait_number(ctx, flag, number, COMBINE_ROW, int32(r), token):
                        missing = uint32(missing | uint32(1 << r))
        for base in range(first, last, threads):
            i = int32(base + tid)
            own[0] = own[1] = own[2] = own[3] = int32(SENTINEL)
            if lanes != uint32(0) and not is_lost:
                load_rows(x, own_row, lanes, i, i < last, loaded)
                sum_vector(x, own_row, weight, lanes, i, i < last, loaded, own)
            if i < last:
                for j in range(8):
                    sums[j] = float32(0)
                for r in range(num_ranks):
                    if targets >> uint32(r) & uint32(1) != uint32(0):
                        offset = int32(rows_offset + (half * slots + r * max_tokens + token) * row_words + 4 * i)
                        a, b, c, d = own[0], own[1], own[2], own[3]
                        if not reads_own_rows or r != ctx.rank:
                            a = b = c = d = int32(SENTINEL)
                            if missing >> uint32(r) & uint32(1) == uint32(0):
                                if data_is_flag:
                                    a, b, c, d = wait_vector(ctx, offset, COMBINE_ROW, int32(r), token)
                                    empty = int32(SENTINEL)
                                    st_relaxed_sys_s32x4(ctx.local, offset, empty, empty, empty, empty)
                                else:
                                    a, b, c, d = ld_global_s32x4(ctx.local, offset)
                        words[0], words[1], words[2], words[3] = a, b, c, d
                        add_row(sums, words, 0, float32(1))
                round_sums(sums, words)
                st_global_s32x4(out, int64(token) * row_words + 4 * i, words[0], words[1], words[2], words[3])

    @cuda.jit
    def low_latency_combine(
        local,
        peers,
        state,
        status,
        timeout_ns,
        rank,
        mask,
        x,
        slot_rows,
        topk_idx,
        topk_weights,
        num_tokens,
        out,
        wait_ns,
    ):
        ctx = LowLatencyContext(local, peers, state, status, timeout_ns, rank, mask)
        tid, block, grid = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()  # the next kernel may become resident; it waits for this grid to end
        masked = masked_ranks(ctx, num_ranks)
        sent, received = ld_relaxed_gpu_s32(state, SENT), ld_relaxed_gpu_s32(state, RECEIVED)
        senders, first_receiver = roles(grid, sends, receives, (slots - own_slots) * parts)
        if sends:
            number = int32(sent + 1)
            if block == 0 and tid < num_ranks and masked >> uint32(tid) & uint32(1) == uint32(0):
                remote = pointer_from_address(peers[tid], local)
                if data_is_flag:
                    st_relaxed_sys_s32(remote, rank, number)
                else:  # after this rank's plain loads of the half that the peer writes next
                    st_release_sys_s32(remote, rank, number)
            if weighted:
                send_weights(ctx, number, masked, topk_idx, topk_weights, num_tokens)
            if block < senders:
                for item in range(int32(own_slots * parts + block), slots * parts, senders):
                    part = int32(item % parts)
                    peer, token = slot_at(rank, int32(item // parts))
                    if masked >> uint32(peer) & uint32(1) == uint32(0):
                        send_sum(ctx, number, peer, token, part, x, slot_rows)
        if receives and block >= first_receiver:
            number, start = int32(received + 1), globaltimer()
            for item in range(int32(block - first_receiver), num_tokens * parts, int32(grid - first_receiver)):
                token, part = int32(item // parts), int32(item % parts)
                targets = ranks_of(load_expert(topk_idx, token, num_tokens, int32(tid & 31)))
                receive_sum(ctx, number, masked, targets, token, part, x, slot_rows, topk_weights, out)
            if block == first_receiver and tid < num_ranks:
                wait_number(ctx, tid, number, STARTED, tid, int32(-1))
                wait_ns[tid] += int64(globaltimer() - start)
        if is_last_block(state, False):
            if sends:
                st_relaxed_gpu_s32(state, SENT, int32(sent + 1))
            if receives:
                st_relaxed_gpu_s32(state, RECEIVED, int32(received + 1))
                st_relaxed_gpu_s32(state, EXPIRED, int32(0))

    return low_latency_combine


def signature(topk_idx="int64*"):
    """Return the kernel's signature; ``topk_idx`` is the type of the pointers to experts, "int64*" or "int32*"."""
    return (
        *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32*"),
        *("int32*", "int32*", topk_idx, "int32*", "int32", "int32*", "int64*"),
    )
