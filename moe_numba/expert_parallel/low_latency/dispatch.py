"""Low-latency dispatch kernel: pushes rows to fixed slots of the ranks that have a token's experts, and unpacks slots.

One launch, no counts, no host. Some CTAs send (`LowLatencyShape.ctas_per_sender`): a row once to each other rank that
has one of its experts. The others receive meanwhile: first the rank's own tokens, which they read from ``x``, then the
slots. Several CTAs may share a row (`LowLatencyShape.parts`).

Rows are packed by expert (`low_latency_packing.py`), or keep their slot's place.

A call with a receive hook has a kernel for each phase. The first one stores a rank's own rows in slots as well: the
caller may overwrite ``x`` before the second one.

Protocols and timeouts: `low_latency_protocol.py`. Memory map: `low_latency_layout.py`.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.expert_parallel.low_latency.layout import (
    CTA_STATE,
    EXPIRED,
    ID_BITS,
    NO_EXPERT,
    POISONED,
    REPEATED,
    SENTINEL,
)
from moe_numba.expert_parallel.low_latency.packing import make_place_rows
from moe_numba.expert_parallel.low_latency.protocol import (
    DISPATCH_ROW,
    LowLatencyContext,
    copied,
    count_operation,
    is_last_block,
    make_slot_at,
    make_token_routing,
    make_wait_metadata,
    masked_ranks,
    roles,
    wait_vector,
    wait_word,
)
from moe_numba.expert_parallel.low_latency.quantize import make_cast_vector, make_load_vector, raw_words
from moe_numba.expert_parallel.low_latency.send import make_send
from moe_numba.ptx.atomics import ld_relaxed_gpu_s32, st_relaxed_gpu_s32, st_relaxed_sys_s32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_global_s32x4, st_global_s32x4
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4, st_relaxed_sys_s32x4
from moe_numba.ptx.warp import FULL_MASK


@cache
def make_receive_row(shape):
    """Make ``poll_row`` and ``receive_row``: a CTA copies its part of a slot to up to ``rows_per_slot`` rows."""
    threads, row_words, data_is_flag, is_fp8 = shape.threads, shape.row_words, shape.data_is_flag, shape.is_fp8
    vectors, part_vectors, fits_threads = (
        row_words // 4,
        shape.vectors_of_part(row_words),
        shape.fits_threads(row_words),
    )
    num_rows, num_scales, slots = shape.rows_per_slot, shape.num_scales, shape.slots
    packs_scales, topk, has_weights = shape.scales == "ue8m0", shape.topk, not shape.expert_major
    group = 4 if packs_scales else 1  # scales in a word of the output

    @cuda.jit(device=True)
    def take_word(ctx, offset, has_row, peer, token):
        """Return a word of a slot, and reset it if it is its own flag; a NaN if it has not arrived in time."""
        word = int32(SENTINEL)
        if data_is_flag:
            word = wait_word(ctx, offset, DISPATCH_ROW, peer, token)
            st_relaxed_sys_s32(ctx.local, offset, int32(SENTINEL))
        elif has_row:
            word = ctx.local[offset]
        return word

    @cuda.jit(device=True)
    def store_scales(ctx, row, has_row, part, peer, token, rows, scales):
        """Copy the scales of this part, column-major within an expert (or within all slots)."""
        words = num_scales // group
        first, last = part * part_vectors // (8 * group), min(words, (part + 1) * part_vectors // (8 * group))
        for i in range(int32(first + cuda.threadIdx.x), last, threads):
            value = take_word(ctx, row + row_words + i * group, has_row, peer, token)
            if packs_scales:  # bytes are the exponents; that of a NaN is 255
                value = int32(uint32(value) >> uint32(23) & uint32(255))
                for j in range(1, group):
                    more = take_word(ctx, row + row_words + i * group + j, has_row, peer, token)
                    exponent = uint32(uint32(more) >> uint32(23) & uint32(255))
                    value = int32(uint32(value) | uint32(exponent << uint32(8 * j)))
            for k in range(num_rows):
                if rows[k] >= 0:
                    expert = int64(uint32(rows[k]) // uint32(slots))
                    scales[(expert * words + i) * slots + int64(rows[k] - expert * slots)] = value

    @cuda.jit(device=True)
    def poll_row(ctx, row, part, loaded):
        """Load this thread's first vector of a slot, of which it is not known yet whether it arrives."""
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        i = int32(first + cuda.threadIdx.x)
        if i < last:
            loaded[0], loaded[1], loaded[2], loaded[3] = copied(ld_relaxed_sys_s32x4(ctx.local, row + 4 * i))

    @cuda.jit(device=True)
    def receive_row(ctx, row, has_row, part, peer, token, rows, loaded, recv_x, recv_scales, recv_weights):
        """``rows`` has the numbers of the output's rows, or negative numbers; ``row`` is the slot's offset."""
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        for base in range(first, int32(first + 1) if fits_threads else last, threads):
            i = int32(base + cuda.threadIdx.x)
            if i < last:
                a = b = c = d = int32(SENTINEL)
                if data_is_flag:
                    if base != first:
                        loaded[0], loaded[1], loaded[2], loaded[3] = copied(
                            ld_relaxed_sys_s32x4(ctx.local, row + 4 * i)
                        )
                    a, b, c, d = wait_vector(ctx, row + 4 * i, DISPATCH_ROW, peer, token, loaded)
                    empty = int32(SENTINEL)
                    st_relaxed_sys_s32x4(ctx.local, row + 4 * i, empty, empty, empty, empty)
                elif has_row:
                    a, b, c, d = ld_global_s32x4(ctx.local, row + 4 * i)
                for k in range(num_rows):
                    if rows[k] >= 0:
                        st_global_s32x4(recv_x, int64(rows[k]) * row_words + 4 * i, a, b, c, d)
        if is_fp8:
            store_scales(ctx, row, has_row, part, peer, token, rows, recv_scales)
        if has_weights and part == 0 and cuda.threadIdx.x < topk:
            lane = int32(cuda.threadIdx.x)
            word = take_word(ctx, row + row_words + num_scales + lane, has_row, peer, token)
            recv_weights[int64(rows[0]) * topk + lane] = word

    return poll_row, receive_row


@cache
def make_copy_own_row(shape):
    """Make ``load_own_row`` and ``copy_own_row``: a CTA copies its part of a token of its rank to the output."""
    threads, row_words, is_fp8 = shape.threads, shape.row_words, shape.is_fp8
    vectors, part_vectors, fits_threads = (
        row_words // 4,
        shape.vectors_of_part(row_words),
        shape.fits_threads(row_words),
    )
    num_rows, num_scales, slots, topk = shape.rows_per_slot, shape.num_scales, shape.slots, shape.topk
    packs_scales, has_weights = shape.scales == "ue8m0", not shape.expert_major
    lanes, words = (32, num_scales // 4) if packs_scales else (8, num_scales)  # that share a word of the scales
    load_vector = make_load_vector(is_fp8, shape.hidden // 2)
    cast_vector = make_cast_vector(is_fp8, shape.scales != "float32")

    @cuda.jit(device=True)
    def load_own_row(x, token, part, num_tokens, loaded):
        """Load this thread's first vector of a token."""
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        i = int32(first + cuda.threadIdx.x)
        load_vector(x, token, i, (i < last) & (token < num_tokens), loaded)

    @cuda.jit(device=True)
    def copy_own_row(x, topk_weights, token, part, rows, loaded, recv_x, recv_scales, recv_weights):
        """Copy a part of a token, whose first vectors are loaded."""
        tid = int32(cuda.threadIdx.x)
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        for base in range(first, int32(first + 1) if fits_threads else last, threads):
            i = int32(base + tid)
            if base != first:
                load_vector(x, token, i, i < last, loaded)
            a, b, c, d, scale = cast_vector(loaded)
            if packs_scales:
                word = uint32(0)  # the exponents of four scales
                for j in range(4):
                    exponent = uint32(uint32(cuda.shfl_sync(FULL_MASK, scale, 8 * j)) >> uint32(23) & uint32(255))
                    word = uint32(word | uint32(exponent << uint32(8 * j)))
                scale = int32(word)
            for k in range(num_rows):
                if (rows[k] >= 0) & (i < last):
                    st_global_s32x4(recv_x, int64(rows[k]) * row_words + 4 * i, a, b, c, d)
                    if is_fp8 and i % lanes == 0:
                        expert = int64(uint32(rows[k]) // uint32(slots))
                        row = int64(rows[k] - expert * slots)
                        recv_scales[(expert * words + i // lanes) * slots + row] = scale
        if has_weights and part == 0 and tid < topk:
            recv_weights[int64(rows[0]) * topk + tid] = topk_weights[int64(token) * topk + tid]

    return load_own_row, copy_own_row


@cache
def make_low_latency_dispatch(shape):
    """Make the kernel, for CTAs of ``shape.threads`` threads, all of which must be resident at once."""
    num_ranks, max_tokens, slots, topk = shape.num_ranks, shape.max_tokens, shape.slots, shape.topk
    sends, receives, reads_own_rows = shape.sends, shape.receives, shape.reads_own_rows
    ctas_per_sender = shape.ctas_per_sender
    parts, threads, local_experts = shape.parts, shape.threads, shape.local_experts
    expert_major, data_is_flag, metadata_words = shape.expert_major, shape.data_is_flag, shape.metadata_words
    metadata_half, rows_offset, slot_words = shape.metadata_half, shape.dispatch_rows, shape.slot_words
    vectors_per_slot, id_mask = metadata_words // 4, (1 << ID_BITS) - 1
    part_words = metadata_words if not data_is_flag else 0  # data that is its own flag has no metadata of parts
    own_slots = max_tokens if reads_own_rows else 0
    has_peers = num_ranks > 1 or not (reads_own_rows and data_is_flag)
    num_raw_words = raw_words(shape.is_fp8)
    load_item, send_all_metadata, send_items = make_send(shape)
    (poll_row, receive_row), (load_own_row, copy_own_row) = make_receive_row(shape), make_copy_own_row(shape)
    wait_metadata = make_wait_metadata(data_is_flag)
    load_expert, ranks_of = make_token_routing(shape)
    collect_metadata, count_experts, place_rows, placed_rows = make_place_rows(shape)
    slot_at = make_slot_at(shape)

    @cuda.jit(device=True)
    def unpack_metadata(ctx, number, masked, offset, slot, part, peer, token, recv_topk_idx):
        """Wait for the metadata of a slot, and write its experts; return whether it has a row, and has arrived."""
        words, tid, has_row, arrived = cuda.local.array(4, int32), int32(cuda.threadIdx.x), False, True
        for v in range(vectors_per_slot):
            a, b, c, d, found = wait_metadata(ctx, offset + 4 * v, number, masked, peer, token)
            arrived = arrived & found
            words[0], words[1], words[2], words[3] = a, b, c, d
            for j in range(4):
                for h in range(2):
                    k, code = int32(8 * v + 2 * j + h), int32(words[j] >> (ID_BITS * h) & id_mask)
                    has_row = has_row | (code != NO_EXPERT)
                    if part == 0 and tid == k and k < topk:
                        expert = int32(-1) if code == NO_EXPERT else int32(code & (REPEATED - 1))
                        recv_topk_idx[int64(slot) * topk + k] = expert
        return has_row, arrived

    @cuda.jit(device=True)
    def unpack_own_experts(rank, topk_idx, token, num_tokens, slot, part, recv_topk_idx):
        """Write the local experts of one of the rank's own tokens; return whether it has any."""
        tid = int32(cuda.threadIdx.x)
        expert = load_expert(topk_idx, token, num_tokens, int32(tid & 31))
        local = int32(expert - rank * local_experts)
        if part == 0 and tid < topk:
            is_local = (expert >= 0) & (local >= 0) & (local < local_experts)
            recv_topk_idx[int64(slot) * topk + tid] = local if is_local else int32(-1)
        return ranks_of(expert) >> uint32(rank) & uint32(1) != uint32(0)

    @cuda.jit
    def low_latency_dispatch(
        local,
        peers,
        state,
        status,
        timeout_ns,
        rank,
        mask,
        x,
        topk_idx,
        topk_weights,
        num_tokens,
        recv_x,
        recv_scales,
        recv_topk_idx,
        recv_topk_weights,
        slot_rows,
        src_info,
        layout_range,
        recv_count,
        total_count,
        wait_ns,
    ):
        ctx = LowLatencyContext(local, peers, state, status, timeout_ns, rank, mask)
        shared = cuda.shared.array(0, int32, 128)
        tid, block, grid = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()  # combine may become resident; it waits for this grid to end
        items = int32((num_tokens if data_is_flag else max_tokens) * parts) if has_peers else int32(0)  # to send
        senders, first_receiver = roles(grid, sends, receives, items, ctas_per_sender)
        # What a CTA needs first is loaded at once: none of these loads waits for another one.
        loaded, expert = cuda.local.array(num_raw_words, int32), int32(-1)
        own_state = int32(CTA_STATE + 2 * block)
        sent, received = ld_relaxed_gpu_s32(state, own_state), ld_relaxed_gpu_s32(state, own_state + 1)
        if sends:
            expert = load_item(x, topk_idx, block, items if block < senders else int32(0), num_tokens, loaded)
        masked = masked_ranks(ctx, num_ranks)
        if sends:
            number = int32(sent + 1)
            if data_is_flag:
                send_all_metadata(ctx, number, masked, topk_idx, num_tokens)
            if block < senders:
                send_items(ctx, number, masked, items, senders, x, topk_idx, topk_weights, num_tokens, expert, loaded)
        if receives and block >= first_receiver:
            number, start, receivers = int32(received + 1), globaltimer(), int32(grid - first_receiver)
            half, block_of_receivers = int32(number & 1), int32(block - first_receiver)
            if expert_major:
                rows = shared[placed_rows:]
                collect_metadata(ctx, shared, number, masked, wait_ns, block_of_receivers == 0)
            else:
                rows = cuda.local.array(1, int32)
            for item in range(block_of_receivers, int32(slots * parts), receivers):
                part = int32(item % parts)
                peer, token = slot_at(rank, int32(item // parts))
                is_own, slot = reads_own_rows and item < own_slots * parts, int32(peer * max_tokens + token)
                offset = int32(half * metadata_half + slot * parts * metadata_words + part * part_words)
                row = int32(rows_offset + (half * slots + slot) * slot_words)
                has_row, arrived = False, True
                if is_own:  # before it is known whether there is a row
                    load_own_row(x, token, part, num_tokens, loaded)
                elif data_is_flag:
                    poll_row(ctx, row, part, loaded)
                adds_wait, waited = not expert_major and part == 0 and token == 0 and tid == 0, int64(0)
                if adds_wait:
                    waited = wait_ns[peer]
                if expert_major:
                    if not data_is_flag and not is_own:
                        _, _, _, _, arrived = wait_metadata(ctx, offset, number, masked, peer, token)
                    has_row = place_rows(shared, slot, part, slot_rows, src_info)
                else:
                    if is_own:
                        has_row = unpack_own_experts(rank, topk_idx, token, num_tokens, slot, part, recv_topk_idx)
                    else:
                        has_row, arrived = unpack_metadata(
                            ctx, number, masked, offset, slot, part, peer, token, recv_topk_idx
                        )
                    rows[0] = slot
                    if part == 0 and tid == 0:
                        slot_rows[slot] = slot if has_row else int32(-1)
                    if adds_wait:
                        wait_ns[peer] = waited + int64(globaltimer() - start)
                if is_own:
                    if has_row:
                        copy_own_row(x, topk_weights, token, part, rows, loaded, recv_x, recv_scales, recv_topk_weights)
                elif has_row | (not arrived and not expert_major):
                    receive_row(
                        *(ctx, row, has_row & arrived, part, peer, token, rows, loaded),
                        *(recv_x, recv_scales, recv_topk_weights),
                    )
                if expert_major:
                    cuda.syncthreads()  # before another slot's rows replace these
            if expert_major:  # rows do not wait for the counts
                count_experts(shared, block_of_receivers, receivers, layout_range, recv_count, total_count)
        count_operation(state, own_state, sends, sent, receives, received)
        if expert_major and receives:
            expired = is_last_block(state) and ld_relaxed_gpu_s32(state, EXPIRED) != 0
            if cuda.syncthreads_or(int32(expired)) != 0:
                # CTAs may have seen different metadata of a late rank, and placed rows differently: none counts.
                for i in range(tid, slots * topk, threads):
                    if slot_rows[i] >= 0:
                        slot_rows[i] = int32(POISONED)
                for i in range(tid, local_experts, threads):
                    recv_count[i] = int32(0)
                for i in range(tid, local_experts * num_ranks, threads):
                    layout_range[i] = int64(0)
                if tid == 0:
                    st_relaxed_gpu_s32(state, EXPIRED, int32(0))

    return low_latency_dispatch


def signature(topk_idx="int64*"):
    """Return the kernel's signature; ``topk_idx`` is the type of the pointers to experts, "int64*" or "int32*"."""
    return (
        *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32*"),
        *("int32*", topk_idx, "int32*", "int32"),
        *("int32*", "int32*", topk_idx, "int32*", "int32*", "int32*", "int64*", "int32*", "int32*", "int64*"),
    )
