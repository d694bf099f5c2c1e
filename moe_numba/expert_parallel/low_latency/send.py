"""Sending in low-latency dispatch: tokens' experts to all ranks, and rows to slots of the ranks of these experts."""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.expert_parallel.low_latency.layout import ID_BITS, NO_EXPERT, REPEATED, STAMP_SHIFT
from moe_numba.expert_parallel.low_latency.protocol import clean, make_token_routing, stamp_of
from moe_numba.expert_parallel.low_latency.quantize import make_cast_vector, make_load_vector, raw_words
from moe_numba.ptx.atomics import st_relaxed_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.system_vectors import st_relaxed_sys_s32x4
from moe_numba.ptx.warp import FULL_MASK


@cache
def make_send(shape):
    """Make ``load_item``, ``send_all_metadata`` and ``send_items``, with which a CTA sends parts of tokens."""
    num_ranks, topk, local_experts, parts = shape.num_ranks, shape.topk, shape.local_experts, shape.parts
    threads, row_words, data_is_flag, is_fp8 = shape.threads, shape.row_words, shape.data_is_flag, shape.is_fp8
    metadata_words, slot_words, max_tokens = shape.metadata_words, shape.slot_words, shape.max_tokens
    metadata_half, rows_offset, slots = shape.metadata_half, shape.dispatch_rows, shape.slots
    vectors, part_vectors, reads_own_rows = row_words // 4, shape.vectors_of_part(row_words), shape.reads_own_rows
    sends_weights, weights_offset, warps = not shape.expert_major, row_words + shape.num_scales, threads // 32
    num_raw_words, fits_threads = raw_words(is_fp8), shape.fits_threads(row_words)
    load_expert, ranks_of = make_token_routing(shape)
    load_vector = make_load_vector(is_fp8, shape.hidden // 2)
    cast_vector = make_cast_vector(is_fp8, shape.scales != "float32")

    @cuda.jit(device=True)
    def send_metadata(ctx, expert, offset, stamp, masked):
        """Send a token's experts to all ranks, with one warp; lane k has expert k."""
        lane, repeated = int32(cuda.threadIdx.x & 31), False
        for k in range(topk):
            repeated = repeated | ((k < lane) & (cuda.shfl_sync(FULL_MASK, expert, k) == expert))
        for r in range(num_ranks):
            local = int32(expert - r * local_experts)
            is_local = (expert >= 0) & (local >= 0) & (local < local_experts)
            code = int32(NO_EXPERT)
            if is_local:
                code = int32(local + REPEATED) if repeated else local
            low, high = (
                cuda.shfl_sync(FULL_MASK, code, 2 * lane & 31),
                cuda.shfl_sync(FULL_MASK, code, 2 * lane + 1 & 31),
            )
            if 2 * lane >= 32:
                low = high = int32(NO_EXPERT)
            word = uint32(uint32(stamp << uint32(STAMP_SHIFT)) | uint32(high << ID_BITS) | uint32(low))
            if (lane < metadata_words) & (masked >> uint32(r) & uint32(1) == uint32(0)):
                st_relaxed_sys_s32(pointer_from_address(ctx.peers[r], ctx.local), offset + lane, int32(word))

    @cuda.jit(device=True)
    def metadata_offset(ctx, number, token, part):
        slot = int32(ctx.rank * max_tokens + token)
        return int32(int32(number & 1) * metadata_half + (slot * parts + part) * metadata_words)

    @cuda.jit(device=True)
    def send_all_metadata(ctx, number, masked, topk_idx, num_tokens):
        """Send the experts of all tokens, with one warp per token; for data that is its own flag."""
        warp, lane = int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
        for token in range(int32(cuda.blockIdx.x * warps + warp), int32(max_tokens), int32(cuda.gridDim.x * warps)):
            expert = load_expert(topk_idx, token, num_tokens, lane)
            send_metadata(ctx, expert, metadata_offset(ctx, number, token, 0), stamp_of(number), masked)

    @cuda.jit(device=True)
    def load_item(x, topk_idx, item, items, num_tokens, loaded):
        """Load this thread's first vector of an item, a part of a token; return its expert of the token."""
        token, part, tid = int32(item // parts), int32(item % parts), int32(cuda.threadIdx.x)
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        is_token = (item < items) & (token < num_tokens)
        load_vector(x, token, int32(first + tid), is_token & (first + tid < last), loaded)
        return load_expert(topk_idx, token, num_tokens if item < items else int32(0), int32(tid & 31))

    @cuda.jit(device=True)
    def send_item(ctx, number, masked, token, part, x, topk_weights, num_tokens, expert, loaded):
        """Send a part of a token, whose first vectors and experts are loaded."""
        tid, half = int32(cuda.threadIdx.x), int32(number & 1)
        slot = int32(ctx.rank * max_tokens + token)
        row = int32(rows_offset + (half * slots + slot) * slot_words)
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        if token >= num_tokens:
            last = first
        targets = uint32(ranks_of(expert) & ~masked)
        if reads_own_rows:
            targets = uint32(targets & ~uint32(uint32(1) << uint32(ctx.rank)))
        if targets != uint32(0):
            for base in range(first, int32(first + 1) if fits_threads else last, threads):
                i = int32(base + tid)
                if base != first:
                    load_vector(x, token, i, i < last, loaded)
                a, b, c, d, scale = cast_vector(loaded)
                if data_is_flag:
                    a, b, c, d, scale = clean(a), clean(b), clean(c), clean(d), clean(scale)
                for r in range(num_ranks):
                    if (targets >> uint32(r) & uint32(1) != uint32(0)) & (i < last):
                        remote = pointer_from_address(ctx.peers[r], ctx.local)
                        st_relaxed_sys_s32x4(remote, row + 4 * i, a, b, c, d)
                        if is_fp8 and i % 8 == 0:
                            st_relaxed_sys_s32(remote, row + row_words + i // 8, scale)
            if sends_weights and part == 0 and tid < topk:
                weight = topk_weights[int64(token) * topk + tid]
                if data_is_flag:
                    weight = clean(weight)
                for r in range(num_ranks):
                    if targets >> uint32(r) & uint32(1) != uint32(0):
                        remote = pointer_from_address(ctx.peers[r], ctx.local)
                        st_relaxed_sys_s32(remote, row + weights_offset + tid, weight)
        if not data_is_flag:
            cuda.syncthreads()
            if tid < 32:
                fence_acq_rel_sys()  # on behalf of the CTA
                send_metadata(ctx, expert, metadata_offset(ctx, number, token, part), stamp_of(number), masked)

    @cuda.jit(device=True)
    def send_items(ctx, number, masked, items, senders, x, topk_idx, topk_weights, num_tokens, expert, loaded):
        """Send this CTA's items, the first of which is loaded; load each next one before the stores of the last.

        Loads issued after stores to a peer would wait until NVLink has taken these.
        """
        following = cuda.local.array(num_raw_words, int32)
        for item in range(int32(cuda.blockIdx.x), items, senders):
            next_expert = load_item(x, topk_idx, int32(item + senders), items, num_tokens, following)
            token, part = int32(item // parts), int32(item % parts)
            send_item(ctx, number, masked, token, part, x, topk_weights, num_tokens, expert, loaded)
            expert = next_expert
            for j in range(num_raw_words):
                loaded[j] = following[j]

    return load_item, send_all_metadata, send_items
