"""Low-latency combine kernel: each rank sums the rows of its own experts, and pushes one row per token to its source.

One launch. The source of a token first pushes the token's weights; the expert ranks sum in float32, in the order of
the token's experts, and round to bfloat16. The source sums the ranks' rows in rank order in float32, and rounds once.
Rows that stayed in their slots are sums already: they are pushed as they are, and the result equals that of
`Buffer.combine` bit for bit.

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
    make_token_routing,
    masked_ranks,
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

_MAX_BATCH = 4  # rows that a thread loads at once


@cuda.jit(device=True)
def add_row(sums, words, first, weight):
    """Add a vector of eight bfloat16 times a weight; its four words begin at ``words[first]``."""
    for j in range(4):
        word = uint32(words[first + j])
        sums[2 * j] = cuda.fma(weight, uint_as_float(uint32(word << uint32(16))), sums[2 * j])
        sums[2 * j + 1] = cuda.fma(weight, uint_as_float(uint32(word & uint32(0xFFFF0000))), sums[2 * j + 1])


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
    load_expert, ranks_of = make_token_routing(shape)

    @cuda.jit(device=True)
    def send_weights(ctx, number, masked, topk_idx, topk_weights, num_tokens):
        """Send each token's weights to the ranks of its experts, with one warp per token."""
        warp, lane = int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
        warps = int32(threads // 32)
        for token in range(int32(cuda.blockIdx.x * warps + warp), num_tokens, int32(cuda.gridDim.x * warps)):
            expert = load_expert(topk_idx, token, num_tokens, lane)
            if expert >= 0:
                peer = int32(expert // local_experts)
                if masked >> uint32(peer) & uint32(1) == uint32(0):
                    pair = uint64(uint64(uint32(number)) << uint64(32)) | uint64(
                        uint32(topk_weights[int64(token) * topk + lane])
                    )
                    slot = int32(ctx.rank * max_tokens + token)
                    offset = int32(weights_offset + (number & 1) * weights_half + 2 * (slot * topk + lane))
                    st_relaxed_sys_u64(pointer_from_address(ctx.peers[peer], ctx.local), offset, uint64(pair))

    @cuda.jit(device=True)
    def send_sum(ctx, number, peer, token, part, x, slot_rows):
        """Sum this rank's rows of a peer's token, and push the sum there; a lost row makes it NaN."""
        half, tid = int32(number & 1), int32(cuda.threadIdx.x)
        rows, weights = cuda.local.array(rows_per_slot, int32), cuda.local.array(rows_per_slot, float32)
        words, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
        loaded = cuda.local.array(loaded_words, int32)
        source_slot, slot = int32(peer * max_tokens + token), int32(ctx.rank * max_tokens + token)
        has_row, is_lost = False, False
        for k in range(rows_per_slot):
            rows[k] = slot_rows[int64(source_slot) * rows_per_slot + k]
            has_row, is_lost = has_row | (rows[k] >= 0), is_lost | (rows[k] == POISONED)
        if has_row | is_lost:
            if weighted:
                for k in range(rows_per_slot):
                    weights[k] = float32(0)
                    if rows[k] >= 0:
                        pair = weights_offset + half * weights_half + 2 * (source_slot * topk + k)
                        weights[k] = uint_as_float(wait_weight(ctx, int32(pair), number, peer, token))
            remote = pointer_from_address(ctx.peers[peer], ctx.local)
            row = int32(rows_offset + (half * slots + slot) * row_words)
            first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
            for i in range(int32(first + tid), last, threads):
                words[0] = words[1] = words[2] = words[3] = int32(SENTINEL)
                if has_row and not is_lost:
                    if weighted:
                        for j in range(8):
                            sums[j] = float32(0)
                        for base in range(0, rows_per_slot, batch):
                            for k in range(batch):  # these loads are all in flight
                                if base + k < rows_per_slot and rows[base + k] >= 0:
                                    a, b, c, d = ld_global_s32x4(x, int64(rows[base + k]) * row_words + 4 * i)
                                    loaded[4 * k], loaded[4 * k + 1], loaded[4 * k + 2], loaded[4 * k + 3] = a, b, c, d
                            for k in range(batch):
                                if base + k < rows_per_slot and rows[base + k] >= 0:
                                    add_row(sums, loaded, 4 * k, weights[base + k])
                        round_sums(sums, words)
                    else:
                        a, b, c, d = ld_global_s32x4(x, int64(rows[0]) * row_words + 4 * i)
                        words[0], words[1], words[2], words[3] = a, b, c, d
                if data_is_flag:
                    for j in range(4):
                        words[j] = clean(words[j])
                st_relaxed_sys_s32x4(remote, row + 4 * i, words[0], words[1], words[2], words[3])
            if not data_is_flag:
                cuda.syncthreads()
                if tid == 0:
                    fence_acq_rel_sys()  # on behalf of the CTA
                    flag = int32(flags_offset + half * flags_half + slot * parts + part)
                    st_relaxed_sys_s32(remote, flag, number)

    @cuda.jit(device=True)
    def receive_sum(ctx, number, masked, targets, token, part, out):
        """Sum a token's rows in rank order; a row that has not arrived in time is NaN."""
        half, tid = int32(number & 1), int32(cuda.threadIdx.x)
        words, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        missing = uint32(targets & masked)
        if not data_is_flag:
            for r in range(num_ranks):
                if targets >> uint32(r) & uint32(1) != uint32(0):
                    flag = int32(flags_offset + half * flags_half + (r * max_tokens + token) * parts + part)
                    if not wait_number(ctx, flag, number, COMBINE_ROW, int32(r), token):
                        missing = uint32(missing | uint32(1 << r))
        for i in range(int32(first + tid), last, threads):
            for j in range(8):
                sums[j] = float32(0)
            for r in range(num_ranks):
                if targets >> uint32(r) & uint32(1) != uint32(0):
                    offset = int32(rows_offset + (half * slots + r * max_tokens + token) * row_words + 4 * i)
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
            for item in range(block, slots * parts, grid):
                part = int32(item % parts)
                slot = int32((item // parts + (rank + 1) * max_tokens) % slots)  # from the next rank on
                peer, token = int32(slot // max_tokens), int32(slot % max_tokens)
                if masked >> uint32(peer) & uint32(1) == uint32(0):
                    send_sum(ctx, number, peer, token, part, x, slot_rows)
        if receives:
            number, start = int32(received + 1), globaltimer()
            for item in range(block, num_tokens * parts, grid):
                token, part = int32(item // parts), int32(item % parts)
                targets = ranks_of(load_expert(topk_idx, token, num_tokens, int32(tid & 31)))
                receive_sum(ctx, number, masked, targets, token, part, out)
            if block == 0 and tid < num_ranks:
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
