"""Packing by expert in low-latency dispatch: where the rows of a slot go, and how many rows each expert has.

The place of a row follows from the experts of all earlier slots. These are sent first, as metadata to all ranks. Every
receiving CTA makes of them a set of slots for each expert, as bits in shared memory; a row's place is the number of
earlier slots in that set. So the rows of an expert are ordered by source rank, then by token.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.expert_parallel.low_latency.layout import ID_BITS, NO_EXPERT, REPEATED
from moe_numba.expert_parallel.low_latency.protocol import make_wait_metadata
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.warp import FULL_MASK, redux_sync_add_s32


@cache
def make_place_rows(shape):
    """Make what packs rows by expert: ``collect_metadata``, ``count_experts`` and ``place_rows``.

    In shared memory: the metadata of all slots; the bits of the slots of each expert, those of a source rank in whole
    words; the rows of one slot.
    """
    num_ranks, max_tokens, slots, topk = shape.num_ranks, shape.max_tokens, shape.slots, shape.topk
    parts, threads, local_experts = shape.parts, shape.threads, shape.local_experts
    metadata_words, metadata_half, warps = shape.metadata_words, shape.metadata_half, shape.threads // 32
    vectors_per_slot, total_vectors = metadata_words // 4, slots * metadata_words // 4
    words_of_rank, words_of_expert = shape.bit_words_of_rank, num_ranks * shape.bit_words_of_rank
    bits_offset, rows_offset = slots * metadata_words, slots * metadata_words + local_experts * words_of_expert
    wait_metadata = make_wait_metadata(shape.data_is_flag)
    id_mask = (1 << ID_BITS) - 1

    @cuda.jit(device=True)
    def add_slot(shared, word, bit, code):
        if code != NO_EXPERT:
            expert = int32(code & (REPEATED - 1))
            cuda.atomic.or_(shared, int32(bits_offset + expert * words_of_expert + word), int32(bit))

    @cuda.jit(device=True)
    def collect_metadata(ctx, shared, number, masked, wait_ns, adds_waits):
        """Copy the metadata of all slots to shared memory, as it arrives, and make the sets of slots."""
        start, half, tid = globaltimer(), int32(number & 1), int32(cuda.threadIdx.x)
        words = cuda.local.array(4, int32)
        for i in range(tid, local_experts * words_of_expert, threads):
            shared[bits_offset + i] = int32(0)
        cuda.syncthreads()
        for i in range(tid, total_vectors, threads):
            slot, v = int32(i // vectors_per_slot), int32(i % vectors_per_slot)
            peer, token = int32(slot // max_tokens), int32(slot % max_tokens)
            offset = int32(half * metadata_half + slot * parts * metadata_words + 4 * v)
            adds_wait, waited = adds_waits and token == 0 and v == 0, int64(0)
            if adds_wait:
                waited = wait_ns[peer]  # arrives while the thread waits for the metadata
            words[0], words[1], words[2], words[3], _ = wait_metadata(ctx, offset, number, masked, peer, token)
            word, bit = int32(peer * words_of_rank + (token >> 5)), int32(uint32(1) << uint32(token & 31))
            for j in range(4):
                shared[4 * i + j] = words[j]
                add_slot(shared, word, bit, int32(words[j] & id_mask))
                add_slot(shared, word, bit, int32(words[j] >> ID_BITS & id_mask))
            if adds_wait:
                wait_ns[peer] = waited + int64(globaltimer() - start)
        cuda.syncthreads()

    @cuda.jit(device=True)
    def count(shared, expert, first_word, last_word, last_bits, lane):
        """Count the slots of an expert, with one warp: those of whole words, and of ``last_bits`` of the last one."""
        found = int32(0)
        for i in range(int32(first_word + lane), int32(last_word + 1), 32):
            bits = uint32(shared[int32(bits_offset + expert * words_of_expert + i)])
            if i == last_word:
                bits = uint32(bits & last_bits)
            found = int32(found + int32(cuda.popc(bits)))
        return redux_sync_add_s32(uint32(FULL_MASK), found)

    @cuda.jit(device=True)
    def count_experts(shared, block, blocks, layout_range, recv_count, total_count):
        """Count the rows of each expert, from each rank and in all, with one warp per expert."""
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        for expert in range(int32(block * warps + warp), local_experts, int32(blocks * warps)):
            total = int32(0)
            for r in range(num_ranks):
                words = int32(r * words_of_rank)
                found = count(shared, expert, words, int32(words + words_of_rank - 1), uint32(0xFFFFFFFF), lane)
                if lane == 0:
                    layout_range[int64(expert) * num_ranks + r] = int64(int64(total) << 32 | int64(found))
                total = int32(total + found)
            if lane == 0:
                recv_count[expert] = total
                atom_add_relaxed_gpu_s32(total_count, expert, total)  # the thread does not wait for the old value

    @cuda.jit(device=True)
    def place_rows(shared, slot, part, slot_rows, src_info):
        """Compute the rows of a slot, behind those of all earlier slots with the same expert.

        They are left in shared memory, at ``rows_offset``. Returns whether there are any.
        """
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        peer, token = int32(slot // max_tokens), int32(slot % max_tokens)
        word, earlier = int32(peer * words_of_rank + (token >> 5)), uint32(uint32(1 << (token & 31)) - uint32(1))
        for k in range(warp, topk, warps):
            code = int32(shared[int32(slot * metadata_words + (k >> 1))] >> (ID_BITS * (k & 1)) & id_mask)
            row = int32(-1)
            if code != NO_EXPERT:
                expert = int32(code & (REPEATED - 1))
                row = int32(expert * slots + count(shared, expert, int32(0), word, earlier, lane))
            if lane == 0:
                shared[rows_offset + k] = row
                if part == 0:
                    slot_rows[int64(slot) * topk + k] = row
                    if (row >= 0) & (code < REPEATED):
                        src_info[row] = token
        cuda.syncthreads()
        has_row = False
        for k in range(topk):
            has_row = has_row | (shared[rows_offset + k] >= 0)
        return has_row

    return collect_metadata, count_experts, place_rows, rows_offset
