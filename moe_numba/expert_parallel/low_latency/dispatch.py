"""Low-latency dispatch kernel: pushes rows to fixed slots of the ranks that have a token's experts, and unpacks slots.

One launch, no counts, no host. The first CTAs send (`LowLatencyShape.ctas_per_sender`): a row once to each other rank
that has one of its experts. The others receive meanwhile: first the rank's own tokens, which they read from ``x``, then
the slots. Several CTAs may share a row (`LowLatencyShape.parts`). An **item** of a CTA's work is such a part of a row.

All threads of a CTA do the same: a thread moves 16-byte vectors of a part through its registers, from ``x`` to the
slots on the target ranks, or from a slot to the output. There are no mbarriers. What says that data has arrived:

- If data is its own flag, all CTAs first send the metadata of all tokens, whose words are stamped with the low bits of
  the operation's number, and then rows, without any fence. The receiving thread polls each vector until it holds no
  sentinel, and stores the sentinel again.
- With flags after data, the CTA stores its part, synchronises, and one warp fences and sends the metadata of this part:
  its stamp is the flag. All threads of the receiving CTA poll it, with acquire, before they load the part.

The memory of slots is double-buffered: operation ``number`` uses half ``number & 1``. Each CTA counts the operations
that it has sent and received, in the rank's private state.

Rows keep their slot's place, or are packed by expert. The place of a packed row follows from the experts of all
earlier slots, which senders send to all ranks as metadata. Every receiving CTA first waits for the metadata of all
slots, and makes of it a set of slots for each expert, as bits in shared memory; a row's place is the number of earlier
slots in that set. So the rows of an expert are ordered by source rank, then by token. CTAs agree without communication.

A call with a receive hook has a kernel for each phase. The first one stores a rank's own rows in slots as well: the
caller may overwrite ``x`` before the second one.

Protocols and timeouts: `protocol.py`. Memory map: `layout.py`.
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
    STAMP_SHIFT,
)
from moe_numba.expert_parallel.low_latency.protocol import (
    DISPATCH_ROW,
    LowLatencyContext,
    clean,
    count_operation,
    is_last_block,
    load_expert,
    masked_ranks,
    ranks_of,
    roles,
    slot_at,
    stamp_of,
    wait_metadata,
    wait_vector,
    wait_word,
)
from moe_numba.expert_parallel.low_latency.quantize import cast_to_e4m3
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32, st_relaxed_gpu_s32, st_relaxed_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_global_s32x4,
    pointer_from_address,
    st_global_s32x4,
)
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4, st_relaxed_sys_s32x4
from moe_numba.ptx.warp import FULL_MASK, redux_sync_add_s32


@cache
def make_low_latency_dispatch(shape):
    """Make the kernel, for CTAs of ``shape.threads`` threads.

    All CTAs must be resident at once, because each may wait for what any CTA of any rank sends.
    """
    # Choices at compile time: Numba removes branches on them.
    sends, receives, reads_own_rows = shape.sends, shape.receives, shape.reads_own_rows
    data_is_flag, expert_major, in_slots = shape.data_is_flag, shape.expert_major, not shape.expert_major
    is_fp8, rounds_scale, packs_scales = shape.is_fp8, shape.scales != "float32", shape.scales == "ue8m0"

    num_ranks, max_tokens, slots, topk = shape.num_ranks, shape.max_tokens, shape.slots, shape.topk
    num_experts, local_experts, rows_per_slot = shape.num_experts, shape.local_experts, shape.rows_per_slot
    one_token = max_tokens == 1
    parts, threads, warps, ctas_per_sender = shape.parts, shape.threads, shape.threads // 32, shape.ctas_per_sender
    # A rank that is alone copies its rows from x; only with flags after data it sends itself the metadata of its items.
    sends_items = num_ranks > 1 or not (reads_own_rows and data_is_flag)
    own_slots = max_tokens if reads_own_rows else 0  # slots of a rank's own tokens that it does not use

    # A row is sent in 16-byte vectors, each made of ``raw_words`` words of bfloat16. Scales and weights follow it.
    row_words, num_scales, words_of_x = shape.row_words, shape.num_scales, shape.hidden // 2
    raw_words = 8 if is_fp8 else 4
    vectors, part_vectors = row_words // 4, shape.vectors_of_part(row_words)
    fits_threads = shape.fits_threads(row_words)  # if so, loops over the vectors of a part have one step
    weights_offset, rows_offset, slot_words = row_words + num_scales, shape.dispatch_rows, shape.slot_words
    # The output's scales: how many are in a word, how many words a row has, and how many lanes share a word.
    scales_per_word = 4 if packs_scales else 1
    scale_words, scale_lanes = num_scales // scales_per_word, 8 * scales_per_word

    metadata_words, metadata_half, id_mask = shape.metadata_words, shape.metadata_half, (1 << ID_BITS) - 1
    part_words = metadata_words if not data_is_flag else 0  # data that is its own flag has no metadata of parts
    vectors_of_slot, metadata_vectors = metadata_words // 4, slots * metadata_words // 4
    # Shared memory, only if rows are packed by expert: the metadata of all slots; the set of slots of each expert, with
    # the bits of a source rank in whole words; the rows of one slot, -1 for an expert of another rank.
    words_of_rank, words_of_expert = shape.bit_words_of_rank, num_ranks * shape.bit_words_of_rank
    sets_offset, places_offset = slots * metadata_words, slots * metadata_words + local_experts * words_of_expert

    @cuda.jit(device=True)
    def vectors_of(part):
        """Return the first vector of a part of a row, and the one behind its last."""
        return int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))

    @cuda.jit(device=True)
    def load_vector(x, row, i, is_inside, loaded):
        """Load the bfloat16 words that vector ``i`` of a row is made of; loads are in flight when it returns."""
        for j in range(raw_words):
            loaded[j] = int32(0)
        if is_inside:
            if is_fp8:
                offset = int64(row) * words_of_x + 8 * i
                loaded[0], loaded[1], loaded[2], loaded[3] = ld_global_s32x4(x, offset)
                loaded[4], loaded[5], loaded[6], loaded[7] = ld_global_s32x4(x, offset + 4)
            else:
                loaded[0], loaded[1], loaded[2], loaded[3] = ld_global_s32x4(x, int64(row) * words_of_x + 4 * i)

    @cuda.jit(device=True)
    def cast_vector(loaded):
        """Return the four words to send, and the bits of their scale in FP8. All lanes of a warp must call it."""
        if is_fp8:
            return cast_to_e4m3(loaded, rounds_scale)
        return loaded[0], loaded[1], loaded[2], loaded[3], int32(0)

    @cuda.jit(device=True)
    def load_item(x, topk_idx, item, items, num_tokens, loaded):
        """Load this thread's first vector of an item to send, a part of a token; return its expert of the token."""
        token, part, tid = int32(item // parts), int32(item % parts), int32(cuda.threadIdx.x)
        first, last = vectors_of(part)
        is_token = (item < items) & (token < num_tokens)
        load_vector(x, token, int32(first + tid), is_token & (first + tid < last), loaded)
        tokens = num_tokens if item < items else int32(0)
        return load_expert(topk_idx, token, tokens, int32(tid & 31), topk, num_experts)

    @cuda.jit(device=True)
    def send_metadata(ctx, number, masked, token, part, expert):
        """Send a token's experts to all ranks, with one warp; lane k has expert k, and stores word k."""
        lane, repeated = int32(cuda.threadIdx.x & 31), False
        slot = int32(ctx.rank * max_tokens + token)
        offset = int32(int32(number & 1) * metadata_half + (slot * parts + part) * metadata_words)
        for k in range(topk):
            repeated = repeated | ((k < lane) & (cuda.shfl_sync(FULL_MASK, expert, k) == expert))
        for r in range(num_ranks):
            local = int32(expert - r * local_experts)
            is_local = (expert >= 0) & (local >= 0) & (local < local_experts)
            code = int32(NO_EXPERT)
            if is_local:
                code = int32(local + REPEATED) if repeated else local
            low = cuda.shfl_sync(FULL_MASK, code, 2 * lane & 31)
            high = cuda.shfl_sync(FULL_MASK, code, 2 * lane + 1 & 31)
            if 2 * lane >= 32:
                low = high = int32(NO_EXPERT)
            word = uint32(uint32(stamp_of(number) << uint32(STAMP_SHIFT)) | uint32(high << ID_BITS) | uint32(low))
            if (lane < metadata_words) & (masked >> uint32(r) & uint32(1) == uint32(0)):
                st_relaxed_sys_s32(pointer_from_address(ctx.peers[r], ctx.local), offset + lane, int32(word))

    @cuda.jit(device=True)
    def add_slot(shared, word, bit, code):
        """Add a slot to the set of an expert."""
        if code != NO_EXPERT:
            expert = int32(code & (REPEATED - 1))
            cuda.atomic.or_(shared, int32(sets_offset + expert * words_of_expert + word), int32(bit))

    @cuda.jit(device=True)
    def collect_metadata(ctx, shared, number, masked, wait_ns, adds_waits):
        """Copy the metadata of all slots to shared memory, as it arrives, and make the sets of slots."""
        start, half, tid = globaltimer(), int32(number & 1), int32(cuda.threadIdx.x)
        words = cuda.local.array(4, int32)
        for i in range(tid, local_experts * words_of_expert, threads):
            shared[sets_offset + i] = int32(0)
        cuda.syncthreads()
        for i in range(tid, metadata_vectors, threads):
            slot, v = int32(i // vectors_of_slot), int32(i % vectors_of_slot)
            peer, token = int32(slot // max_tokens), int32(slot % max_tokens)
            offset = int32(half * metadata_half + slot * parts * metadata_words + 4 * v)
            adds_wait, waited = adds_waits and token == 0 and v == 0, int64(0)
            if adds_wait:
                waited = wait_ns[peer]  # arrives while the thread waits for the metadata
            words[0], words[1], words[2], words[3], _ = wait_metadata(
                ctx, offset, number, masked, peer, token, data_is_flag
            )
            word, bit = int32(peer * words_of_rank + (token >> 5)), int32(uint32(1) << uint32(token & 31))
            for j in range(4):
                shared[4 * i + j] = words[j]
                add_slot(shared, word, bit, int32(words[j] & id_mask))
                add_slot(shared, word, bit, int32(words[j] >> ID_BITS & id_mask))
            if adds_wait:
                wait_ns[peer] = waited + int64(globaltimer() - start)
        cuda.syncthreads()

    @cuda.jit(device=True)
    def count_slots(shared, expert, first_word, last_word, last_bits, lane):
        """Count the slots of an expert, with one warp: those of whole words, and of ``last_bits`` of the last one."""
        found = int32(0)
        for i in range(int32(first_word + lane), int32(last_word + 1), 32):
            bits = uint32(shared[int32(sets_offset + expert * words_of_expert + i)])
            if i == last_word:
                bits = uint32(bits & last_bits)
            found = int32(found + int32(cuda.popc(bits)))
        return redux_sync_add_s32(uint32(FULL_MASK), found)

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
        # Parts to send. With flags after data also those of tokens that there are not, because receivers wait for them.
        items = int32((num_tokens if data_is_flag else max_tokens) * parts) if sends_items else int32(0)
        senders, first_receiver = roles(grid, sends, receives, items, ctas_per_sender)

        # ---- First loads: what a CTA needs first is loaded at once; none of these loads waits for another one. ----
        loaded, expert = cuda.local.array(raw_words, int32), int32(-1)
        own_state = int32(CTA_STATE + 2 * block)
        sent, received = ld_relaxed_gpu_s32(state, own_state), ld_relaxed_gpu_s32(state, own_state + 1)
        if sends:
            expert = load_item(x, topk_idx, block, items if block < senders else int32(0), num_tokens, loaded)
        masked = masked_ranks(ctx, num_ranks)
        lane, warp = int32(tid & 31), int32(tid >> 5)

        if sends:
            number = int32(sent + 1)
            if data_is_flag:
                # ---- Send the experts of all tokens, with one warp per token ----
                # Tokens from ``num_tokens`` on have none, which the receivers must know.
                for token in range(int32(block * warps + warp), int32(max_tokens), int32(grid * warps)):
                    token_expert = load_expert(topk_idx, token, num_tokens, lane, topk, num_experts)
                    send_metadata(ctx, number, masked, token, 0, token_expert)
            if block < senders:
                # ---- Send rows: this CTA's items, the first of which is loaded ----
                following = cuda.local.array(raw_words, int32)
                for item in range(block, items, senders):
                    # Loads issued after stores to a peer would wait until NVLink has taken these. So a CTA loads its
                    # next item first.
                    next_expert = load_item(x, topk_idx, int32(item + senders), items, num_tokens, following)
                    token, part = int32(item // parts), int32(item % parts)
                    slot = int32(rank * max_tokens + token)
                    row = int32(rows_offset + (int32(number & 1) * slots + slot) * slot_words)
                    first, last = vectors_of(part)
                    if token >= num_tokens:  # only its metadata is sent
                        last = first
                    targets = uint32(ranks_of(expert, local_experts, num_ranks) & ~masked)
                    if reads_own_rows:
                        targets = uint32(targets & ~uint32(uint32(1) << uint32(rank)))
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
                                    remote = pointer_from_address(peers[r], local)
                                    st_relaxed_sys_s32x4(remote, row + 4 * i, a, b, c, d)
                                    if is_fp8 and i % 8 == 0:
                                        st_relaxed_sys_s32(remote, row + row_words + i // 8, scale)
                        if in_slots and part == 0 and tid < topk:
                            weight = topk_weights[int64(token) * topk + tid]
                            if data_is_flag:
                                weight = clean(weight)
                            for r in range(num_ranks):
                                if targets >> uint32(r) & uint32(1) != uint32(0):
                                    remote = pointer_from_address(peers[r], local)
                                    st_relaxed_sys_s32(remote, row + weights_offset + tid, weight)
                    if not data_is_flag:  # the metadata is the flag
                        cuda.syncthreads()
                        if tid < 32:
                            fence_acq_rel_sys()  # on behalf of the CTA
                            send_metadata(ctx, number, masked, token, part, expert)
                    expert = next_expert
                    for j in range(raw_words):
                        loaded[j] = following[j]

        if receives and block >= first_receiver:
            number, start, receivers = int32(received + 1), globaltimer(), int32(grid - first_receiver)
            half, receiver = int32(number & 1), int32(block - first_receiver)
            # ``rows``: the output's rows of the slot that the CTA works on; a negative number is none. ``words``: a
            # vector of metadata.
            if expert_major:
                # ---- Receive metadata: the experts of all slots, which determine where their rows go ----
                rows = shared[places_offset:]
                collect_metadata(ctx, shared, number, masked, wait_ns, receiver == 0)
            else:
                rows, words = cuda.local.array(1, int32), cuda.local.array(4, int32)

            for item in range(receiver, int32(slots * parts), receivers):
                part = int32(item % parts)
                peer, token = slot_at(rank, int32(item // parts), own_slots, num_ranks)
                is_own, slot = reads_own_rows and item < own_slots * parts, int32(peer * max_tokens + token)
                offset = int32(half * metadata_half + slot * parts * metadata_words + part * part_words)
                row = int32(rows_offset + (half * slots + slot) * slot_words)
                has_row, arrived = False, True

                # ---- Load this thread's first vector, before it is known whether there is a row ----
                if is_own:
                    first, last = vectors_of(part)
                    i = int32(first + tid)
                    load_vector(x, token, i, (i < last) & (token < num_tokens), loaded)
                elif data_is_flag:
                    first, last = vectors_of(part)
                    i = int32(first + tid)
                    if i < last:
                        loaded[0], loaded[1], loaded[2], loaded[3] = ld_relaxed_sys_s32x4(local, row + 4 * i)

                # ---- Find the rows of the slot ----
                adds_wait, waited = in_slots and part == 0 and token == 0 and tid == 0, int64(0)
                if adds_wait:
                    waited = wait_ns[peer]
                if expert_major:
                    if not data_is_flag and not is_own:
                        _, _, _, _, arrived = wait_metadata(ctx, offset, number, masked, peer, token, data_is_flag)
                    # Packed rows of the slot are behind those of all earlier slots with the same expert. Each warp
                    # places the rows of some experts. If the token repeats an expert, both have the same place.
                    if one_token:
                        token = int32(0)  # it is, but the compiler cannot see it
                    word = int32(peer * words_of_rank + (token >> 5))
                    earlier = uint32(uint32(1 << (token & 31)) - uint32(1))
                    for k in range(warp, topk, warps):
                        code = int32(shared[int32(slot * metadata_words + (k >> 1))] >> (ID_BITS * (k & 1)) & id_mask)
                        place = int32(-1)
                        if code != NO_EXPERT:
                            local_expert = int32(code & (REPEATED - 1))
                            before = count_slots(shared, local_expert, int32(0), word, earlier, lane)
                            place = int32(local_expert * slots + before)
                        if lane == 0:
                            shared[places_offset + k] = place
                            if part == 0:
                                slot_rows[int64(slot) * topk + k] = place
                                if (place >= 0) & (code < REPEATED):
                                    src_info[place] = token
                    cuda.syncthreads()
                    for k in range(topk):
                        has_row = has_row | (shared[places_offset + k] >= 0)
                else:
                    if is_own:
                        expert = load_expert(topk_idx, token, num_tokens, lane, topk, num_experts)
                        local_expert = int32(expert - rank * local_experts)
                        if part == 0 and tid < topk:
                            is_local = (expert >= 0) & (local_expert >= 0) & (local_expert < local_experts)
                            recv_topk_idx[int64(slot) * topk + tid] = local_expert if is_local else int32(-1)
                        targets = ranks_of(expert, local_experts, num_ranks)
                        has_row = targets >> uint32(rank) & uint32(1) != uint32(0)
                    else:
                        for v in range(vectors_of_slot):
                            a, b, c, d, found = wait_metadata(
                                ctx, offset + 4 * v, number, masked, peer, token, data_is_flag
                            )
                            arrived = arrived & found
                            words[0], words[1], words[2], words[3] = a, b, c, d
                            for j in range(4):
                                for h in range(2):
                                    k, code = int32(8 * v + 2 * j + h), int32(words[j] >> (ID_BITS * h) & id_mask)
                                    has_row = has_row | (code != NO_EXPERT)
                                    if part == 0 and tid == k and k < topk:
                                        local_expert = int32(-1) if code == NO_EXPERT else int32(code & (REPEATED - 1))
                                        recv_topk_idx[int64(slot) * topk + k] = local_expert
                    rows[0] = slot
                    if part == 0 and tid == 0:
                        slot_rows[slot] = slot if has_row else int32(-1)
                    if adds_wait:
                        wait_ns[peer] = waited + int64(globaltimer() - start)

                if is_own:
                    # ---- Copy a part of one of the rank's own tokens ----
                    if has_row:
                        first, last = vectors_of(part)
                        for base in range(first, int32(first + 1) if fits_threads else last, threads):
                            i = int32(base + tid)
                            if base != first:
                                load_vector(x, token, i, i < last, loaded)
                            a, b, c, d, scale = cast_vector(loaded)
                            if packs_scales:
                                exponents = uint32(0)  # of four scales
                                for j in range(4):
                                    bits = uint32(cuda.shfl_sync(FULL_MASK, scale, 8 * j))
                                    exponent = uint32(bits >> uint32(23) & uint32(255))
                                    exponents = uint32(exponents | uint32(exponent << uint32(8 * j)))
                                scale = int32(exponents)
                            for k in range(rows_per_slot):
                                if (rows[k] >= 0) & (i < last):
                                    st_global_s32x4(recv_x, int64(rows[k]) * row_words + 4 * i, a, b, c, d)
                                    if is_fp8 and i % scale_lanes == 0:
                                        expert_of_row = int64(uint32(rows[k]) // uint32(slots))
                                        column = expert_of_row * scale_words + i // scale_lanes
                                        recv_scales[column * slots + int64(rows[k] - expert_of_row * slots)] = scale
                        if in_slots and part == 0 and tid < topk:
                            recv_topk_weights[int64(rows[0]) * topk + tid] = topk_weights[int64(token) * topk + tid]
                elif has_row | (not arrived and in_slots):
                    # ---- Copy a part of a slot, and make it empty again if its data is its own flag ----
                    # If the metadata is late, a row that keeps its place becomes NaN.
                    has_data = has_row & arrived
                    first, last = vectors_of(part)
                    for base in range(first, int32(first + 1) if fits_threads else last, threads):
                        i = int32(base + tid)
                        if i < last:
                            a = b = c = d = int32(SENTINEL)
                            if data_is_flag:
                                if base != first:
                                    loaded[0], loaded[1], loaded[2], loaded[3] = ld_relaxed_sys_s32x4(
                                        local, row + 4 * i
                                    )
                                a, b, c, d = wait_vector(ctx, row + 4 * i, DISPATCH_ROW, peer, token, loaded)
                                empty = int32(SENTINEL)
                                st_relaxed_sys_s32x4(local, row + 4 * i, empty, empty, empty, empty)
                            elif has_data:
                                a, b, c, d = ld_global_s32x4(local, row + 4 * i)
                            for k in range(rows_per_slot):
                                if rows[k] >= 0:
                                    st_global_s32x4(recv_x, int64(rows[k]) * row_words + 4 * i, a, b, c, d)
                    if is_fp8:  # scales are column-major within an expert, or within all slots
                        first_scale = part * part_vectors // scale_lanes
                        last_scale = min(scale_words, (part + 1) * part_vectors // scale_lanes)
                        for i in range(int32(first_scale + tid), last_scale, threads):
                            scale_row = row + row_words + i * scales_per_word
                            scale = take_word(ctx, scale_row, has_data, peer, token)
                            if packs_scales:  # bytes are the exponents; that of a NaN is 255
                                scale = int32(uint32(scale) >> uint32(23) & uint32(255))
                                for j in range(1, scales_per_word):
                                    more = take_word(ctx, scale_row + j, has_data, peer, token)
                                    exponent = uint32(uint32(more) >> uint32(23) & uint32(255))
                                    scale = int32(uint32(scale) | uint32(exponent << uint32(8 * j)))
                            for k in range(rows_per_slot):
                                if rows[k] >= 0:
                                    expert_of_row = int64(uint32(rows[k]) // uint32(slots))
                                    column = expert_of_row * scale_words + i
                                    recv_scales[column * slots + int64(rows[k] - expert_of_row * slots)] = scale
                    if in_slots and part == 0 and tid < topk:
                        weight = take_word(ctx, row + weights_offset + tid, has_data, peer, token)
                        recv_topk_weights[int64(rows[0]) * topk + tid] = weight
                if expert_major:
                    cuda.syncthreads()  # before another slot's rows replace these

            if expert_major:
                # ---- Count the rows of each expert, from each rank and in all, with one warp per expert ----
                # Last, because rows do not wait for the counts.
                for e in range(int32(receiver * warps + warp), local_experts, int32(receivers * warps)):
                    total = int32(0)
                    for r in range(num_ranks):
                        word = int32(r * words_of_rank)
                        last_word, all_bits = int32(word + words_of_rank - 1), uint32(0xFFFFFFFF)
                        from_rank = count_slots(shared, e, word, last_word, all_bits, lane)
                        if lane == 0:
                            layout_range[int64(e) * num_ranks + r] = int64(int64(total) << 32 | int64(from_rank))
                        total = int32(total + from_rank)
                    if lane == 0:
                        recv_count[e] = total
                        atom_add_relaxed_gpu_s32(total_count, e, total)  # the thread does not wait for the old value

        count_operation(state, own_state, sends, sent, receives, received)

        if expert_major and receives:
            # ---- If a wait has timed out, no row counts ----
            # CTAs may have seen different metadata of a late rank, and placed rows differently.
            expired = is_last_block(state) and ld_relaxed_gpu_s32(state, EXPIRED) != 0
            if cuda.syncthreads_or(int32(expired)) != 0:
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
