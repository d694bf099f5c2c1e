"""Low-latency combine kernel: each rank sums the rows of its own experts, and pushes one row per token to its source.

One launch. The source of a token first pushes the token's weights; the expert ranks sum in float32, in the order of
the token's experts, and round to bfloat16. The source sums the ranks' rows in rank order in float32, and rounds once.
Rows that stayed in their slots are sums already: they are pushed as they are, and the result equals that of
`Buffer.combine` bit for bit.

The first CTAs push sums to the other ranks (`LowLatencyShape.ctas_per_sender`). The others receive meanwhile, and sum
the rows of the rank's own experts for its own tokens. A call with a receive hook has a kernel for each phase; the first
one pushes these sums as well, because the caller may overwrite the rows before the second one.

As in dispatch, each CTA takes parts of rows, **items**, in turn. A sender's rows are those of the other ranks' slots, a
receiver's those of its rank's tokens. A thread moves and sums vectors of eight elements in registers; there is neither
shared memory nor an mbarrier. What says that data has arrived:

- A weight and the operation's number are one 8-byte word, which the sender of the sum polls.
- If data is its own flag, the thread that needs a vector of a sum polls it until it holds no sentinel, and stores the
  sentinel again. A thread polls the vectors of several ranks at a time.
- With flags after data, the CTA stores its part of a sum, synchronises, and one thread fences and stores its flag. All
  threads of the receiving CTA poll the flags with acquire, and then load the sums once.

Operation ``number`` uses half ``number & 1`` of the slots. Every rank also posts to all others that it has started, and
waits for them at the end: no rank can be two combines ahead of another. Protocols and timeouts: `protocol.py`. Memory
map: `layout.py`.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.expert_parallel.low_latency.layout import CTA_STATE, POISONED, SENTINEL
from moe_numba.expert_parallel.low_latency.protocol import (
    COMBINE_ROW,
    POLLS_PER_CHECK,
    STARTED,
    LowLatencyContext,
    clean,
    count_operation,
    has_arrived,
    load_expert,
    masked_ranks,
    must_stop,
    ranks_of,
    roles,
    slot_at,
    wait_number,
    wait_weight,
)
from moe_numba.expert_parallel.low_latency.quantize import SUM_LANES_PER_SCALE, add_e4m3, cast_sums_to_e4m3
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.atomics import ld_relaxed_gpu_s32, ld_relaxed_sys_s32, st_relaxed_sys_s32, st_release_sys_s32
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
from moe_numba.ptx.system_vectors import (
    ld_relaxed_sys_s32x4,
    ld_relaxed_sys_u64,
    st_relaxed_sys_s32x4,
    st_relaxed_sys_u64,
)
from moe_numba.ptx.warp import FULL_MASK

_MAX_BATCH = 4  # rows that a thread loads at once


@cuda.jit(device=True)
def lowest_bit(mask):
    """Return the number of the lowest bit that is set."""
    return int32(cuda.popc(uint32(~mask & (mask - uint32(1)))))


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
    """Make the kernel, for CTAs of ``shape.threads`` threads.

    All CTAs must be resident at once, because each may wait for what any CTA of any rank sends.
    """
    # Choices at compile time: Numba removes branches on them.
    sends, receives, reads_own_rows = shape.sends, shape.receives, shape.reads_own_rows
    data_is_flag, weighted, combines_fp8 = shape.data_is_flag, shape.expert_major, shape.combines_fp8

    num_ranks, max_tokens, slots, topk = shape.num_ranks, shape.max_tokens, shape.slots, shape.topk
    num_experts, local_experts, rows_per_slot = shape.num_experts, shape.local_experts, shape.rows_per_slot
    parts, threads, warps, ctas_per_sender = shape.parts, shape.threads, shape.threads // 32, shape.ctas_per_sender
    num_rows = slots * local_experts if weighted else slots  # of x
    own_slots = max_tokens if reads_own_rows else 0  # slots of a rank's own tokens that it does not use

    # A thread sums vectors of eight elements: four words of bfloat16, or two of e4m3 and a scale that 16 lanes share.
    row_words, sum_words, scales_offset = shape.combined_words, shape.sum_words, shape.combined_words // 2
    vectors, part_vectors = row_words // 4, shape.vectors_of_part(row_words)
    fits_threads = shape.fits_threads(row_words)  # if so, loops over the vectors of a part have one step
    weights_offset, weights_half, flags_half = shape.weights_offset, shape.weights_half, shape.flags_half
    flags_offset, rows_offset = shape.flags_offset, shape.combine_rows
    batch = min(rows_per_slot, _MAX_BATCH)
    polled_ranks = min(num_ranks, _MAX_BATCH // ((1 + weighted) * (1 + combines_fp8)))  # registers limit them
    loaded_words, polled_words, batch_mask = 4 * batch, 4 * polled_ranks, (1 << polled_ranks) - 1

    @cuda.jit(device=True)
    def vectors_of(part):
        """Return the first vector of a part of a row, and the one behind its last."""
        return int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))

    # ---- Rows of this rank's experts ----
    # A lane has one of a slot's rows, and its weight: as arrays they would not fit in registers. So all lanes of a warp
    # must call the following functions.

    @cuda.jit(device=True)
    def load_row_number(slot_rows, slot, is_inside):
        """Load this lane's row of a slot: its number, -1 for none, or POISONED, also for a number beyond x."""
        lane, row = int32(cuda.threadIdx.x & 31), int32(-1)
        if is_inside & (lane < rows_per_slot):
            row = slot_rows[int64(slot) * rows_per_slot + lane]
            row = row if row < num_rows else int32(POISONED)
        return row

    @cuda.jit(device=True)
    def lanes_with_rows(row):
        """Return the mask of lanes with a row of a slot, and whether the rows were lost."""
        return uint32(cuda.ballot_sync(FULL_MASK, row >= 0)), cuda.any_sync(FULL_MASK, row == POISONED)

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
    def sum_vector(x, row, weight, lanes, i, is_inside, loaded, sums):
        """Sum vector ``i`` of all rows, the first of which are loaded."""
        for j in range(8):
            sums[j] = float32(0)
        if weighted:
            lanes = add_rows(sums, weight, lanes, loaded)
            while lanes != uint32(0):
                load_rows(x, row, lanes, i, is_inside, loaded)
                lanes = add_rows(sums, weight, lanes, loaded)
        else:
            add_row(sums, loaded, 0, float32(1))

    @cuda.jit(device=True)
    def sum_own_rows(x, row, weight, lanes, i, is_inside, words):
        """Sum vector ``i`` of the rows of one of this rank's own tokens, and round the sum to bfloat16.

        It has its own array of loaded words, so that these need not stay in registers until the next token.
        """
        loaded, sums = cuda.local.array(loaded_words, int32), cuda.local.array(8, float32)
        load_rows(x, row, lanes, i, is_inside, loaded)
        sum_vector(x, row, weight, lanes, i, is_inside, loaded, sums)
        round_sums(sums, words)

    @cuda.jit(device=True)
    def load_item(x, slot_rows, rank, item, loaded):
        """Load this lane's row number of an item; of a row in its slot also this thread's first vector of the part."""
        tid, row, is_item = int32(cuda.threadIdx.x), int32(-1), item < slots * parts
        if is_item:
            peer, token = slot_at(rank, int32(item // parts), own_slots, num_ranks)
            slot, i = int32(peer * max_tokens + token), int32(item % parts * part_vectors + tid)
            row = load_row_number(slot_rows, slot, is_item)
            if not weighted and i < min(int32(vectors), int32((item % parts + 1) * part_vectors)):
                # The row of a slot has the slot's number, if there is one.
                loaded[0], loaded[1], loaded[2], loaded[3] = ld_global_s32x4(x, int64(slot) * row_words + 4 * i)
        return row

    # ---- Sums from the other ranks: those of a batch of ranks are loaded at once, and polled together. ----

    @cuda.jit(device=True)
    def sum_offset(half, r, token):
        """Return the offset of the sum that rank ``r`` sends for a token."""
        return int32(rows_offset + (half * slots + r * max_tokens + token) * sum_words)

    @cuda.jit(device=True)
    def load_sums(local, half, peers, token, first_rank, i, polled):
        """Load vector ``i`` of the sums that a batch of ranks sends for a token, from those in the mask ``peers``.

        Each word is loaded once, plainly if flags have been waited for.
        """
        for k in range(polled_ranks):
            r, first = int32(first_rank + k), 4 * k
            if peers >> uint32(r) & uint32(1) != uint32(0):
                row = sum_offset(half, r, token)
                if combines_fp8:
                    scale = row + scales_offset + i // SUM_LANES_PER_SCALE
                    polled[first + 2] = polled[first + 3] = int32(0)
                    if data_is_flag:
                        pair = ld_relaxed_sys_u64(local, row + 2 * i)
                        polled[first], polled[first + 1] = int32(uint32(pair)), int32(uint32(pair >> uint64(32)))
                        if i % SUM_LANES_PER_SCALE == 0:
                            polled[first + 2] = ld_relaxed_sys_s32(local, scale)
                    else:
                        polled[first], polled[first + 1] = local[int32(row + 2 * i)], local[int32(row + 2 * i + 1)]
                        if i % SUM_LANES_PER_SCALE == 0:
                            polled[first + 2] = local[int32(scale)]
                else:
                    if data_is_flag:
                        a, b, c, d = ld_relaxed_sys_s32x4(local, row + 4 * i)
                    else:
                        a, b, c, d = ld_global_s32x4(local, row + 4 * i)
                    polled[first], polled[first + 1], polled[first + 2], polled[first + 3] = a, b, c, d

    @cuda.jit(device=True)
    def not_arrived(pending, first_rank, polled):
        """Return the mask of the ranks in ``pending`` whose vector has not arrived."""
        for k in range(polled_ranks):
            if has_arrived(polled[4 * k], polled[4 * k + 1], polled[4 * k + 2], polled[4 * k + 3]):
                pending = uint32(pending & ~uint32(uint32(1) << uint32(first_rank + k)))
        return pending

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
        senders, first_receiver = roles(grid, sends, receives, (slots - own_slots) * parts, ctas_per_sender)

        # ---- First loads: what a CTA needs first is loaded at once; none of these loads waits for another one. ----
        loaded, row = cuda.local.array(loaded_words, int32), int32(-1)
        own_state = int32(CTA_STATE + 2 * block)
        sent, received = ld_relaxed_gpu_s32(state, own_state), ld_relaxed_gpu_s32(state, own_state + 1)
        if sends and block < senders:
            row = load_item(x, slot_rows, rank, int32(own_slots * parts + block), loaded)
        masked = masked_ranks(ctx, num_ranks)
        lane, warp = int32(tid & 31), int32(tid >> 5)
        words, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)

        if sends:
            number = int32(sent + 1)
            half = int32(number & 1)
            # ---- Post to all ranks that this one has started: ``started`` is at offset 0 ----
            if block == 0 and tid < num_ranks and masked >> uint32(tid) & uint32(1) == uint32(0):
                remote = pointer_from_address(peers[tid], local)
                if data_is_flag:
                    st_relaxed_sys_s32(remote, rank, number)
                else:  # after this rank's plain loads of the half that the peer writes next
                    st_release_sys_s32(remote, rank, number)
            if weighted:
                # ---- Send each token's weights to the ranks of its experts, with one warp per token ----
                for token in range(int32(block * warps + warp), num_tokens, int32(grid * warps)):
                    expert = load_expert(topk_idx, token, num_tokens, lane, topk, num_experts)
                    if expert >= 0:
                        peer = int32(expert // local_experts)
                        if (masked >> uint32(peer) & uint32(1) == uint32(0)) & (not reads_own_rows or peer != rank):
                            bits = uint32(topk_weights[int64(token) * topk + lane])
                            pair = uint64(uint64(uint32(number)) << uint64(32)) | uint64(bits)
                            slot = int32(rank * max_tokens + token)
                            offset = int32(weights_offset + half * weights_half + 2 * (slot * topk + lane))
                            st_relaxed_sys_u64(pointer_from_address(peers[peer], local), offset, uint64(pair))
            if block < senders:
                # ---- Send sums: this CTA's items, the first of which is loaded ----
                following = cuda.local.array(loaded_words, int32)
                for item in range(int32(own_slots * parts + block), int32(slots * parts), senders):
                    # Loads issued after stores to a peer would wait until NVLink has taken these. So a CTA loads its
                    # next item first.
                    next_row = load_item(x, slot_rows, rank, int32(item + senders), following)
                    part = int32(item % parts)
                    peer, token = slot_at(rank, int32(item // parts), own_slots, num_ranks)
                    if masked >> uint32(peer) & uint32(1) == uint32(0):
                        source_slot, slot = int32(peer * max_tokens + token), int32(rank * max_tokens + token)
                        lanes, is_lost = lanes_with_rows(row)
                        if (lanes != uint32(0)) | is_lost:
                            remote = pointer_from_address(peers[peer], local)
                            sum_row = int32(rows_offset + (half * slots + slot) * sum_words)
                            first, last = vectors_of(part)
                            weight = int32(0)
                            if weighted:
                                # The loads do not wait for the weights.
                                load_rows(x, row, lanes, int32(first + tid), first + tid < last, loaded)
                                if row >= 0:
                                    k = int32(source_slot * topk + lane)
                                    offset = int32(weights_offset + half * weights_half + 2 * k)
                                    weight = int32(wait_weight(ctx, offset, number, peer, token))
                            for base in range(first, int32(first + 1) if fits_threads else last, threads):
                                i = int32(base + tid)
                                if base != first:
                                    load_rows(x, row, lanes, i, i < last, loaded)
                                sum_vector(x, row, weight, lanes, i, i < last, loaded, sums)
                                if combines_fp8:
                                    cast_sums_to_e4m3(sums, words)
                                else:
                                    round_sums(sums, words)
                                for j in range(4):
                                    if is_lost:
                                        words[j] = int32(SENTINEL)  # a NaN
                                    if data_is_flag:
                                        words[j] = clean(words[j])
                                if i < last:
                                    if combines_fp8:
                                        pair = uint64(uint64(uint32(words[1])) << uint64(32)) | uint64(uint32(words[0]))
                                        st_relaxed_sys_u64(remote, sum_row + 2 * i, uint64(pair))
                                        if i % SUM_LANES_PER_SCALE == 0:
                                            offset = sum_row + scales_offset + i // SUM_LANES_PER_SCALE
                                            st_relaxed_sys_s32(remote, offset, words[2])
                                    else:
                                        offset = sum_row + 4 * i
                                        st_relaxed_sys_s32x4(remote, offset, words[0], words[1], words[2], words[3])
                            if not data_is_flag:
                                cuda.syncthreads()
                                if tid == 0:
                                    fence_acq_rel_sys()  # on behalf of the CTA
                                    flag = int32(flags_offset + half * flags_half + slot * parts + part)
                                    st_relaxed_sys_s32(remote, flag, number)
                    row = next_row
                    if not weighted:
                        for j in range(4):
                            loaded[j] = following[j]

        if receives and block >= first_receiver:
            number, start = int32(received + 1), globaltimer()
            half = int32(number & 1)
            # ``own``: the sum of this rank's rows. ``polled``: the sums of a batch of ranks.
            own, polled = cuda.local.array(4, int32), cuda.local.array(polled_words, int32)
            for item in range(int32(block - first_receiver), int32(num_tokens * parts), int32(grid - first_receiver)):
                # ---- Find out which ranks have an expert of the token, and this rank's rows of it ----
                # ``targets`` are all these ranks, ``missing`` those that are masked or late. This rank waits for the
                # sums of those that are ``expected``.
                token, part, weight = int32(item // parts), int32(item % parts), int32(0)
                expert = load_expert(topk_idx, token, num_tokens, lane, topk, num_experts)
                row = load_row_number(slot_rows, int32(rank * max_tokens + token), reads_own_rows)
                if weighted and reads_own_rows and lane < topk:
                    weight = topk_weights[int64(token) * topk + lane]
                first, last = vectors_of(part)
                own_bit = uint32(uint32(1) << uint32(rank))  # here, because it costs two registers before the loop
                targets = ranks_of(expert, local_experts, num_ranks)
                missing, lanes, is_lost = uint32(targets & masked), uint32(0), False
                if reads_own_rows:
                    missing = uint32(missing & ~own_bit)
                    if targets & own_bit != uint32(0):
                        lanes, is_lost = lanes_with_rows(row)
                has_own, expected = lanes != uint32(0) and not is_lost, uint32(targets & ~missing)
                if reads_own_rows:
                    expected = uint32(expected & ~own_bit)
                if not data_is_flag:
                    for r in range(num_ranks):
                        if expected >> uint32(r) & uint32(1) != uint32(0):
                            flag = int32(flags_offset + half * flags_half + (r * max_tokens + token) * parts + part)
                            if not wait_number(ctx, flag, number, COMBINE_ROW, int32(r), token):
                                missing = uint32(missing | uint32(1 << r))
                    expected = uint32(expected & ~missing)

                for base in range(first, int32(first + 1) if fits_threads else last, threads):
                    # ---- Sum this rank's rows ----
                    i = int32(base + tid)
                    for j in range(polled_words):
                        polled[j] = int32(SENTINEL)
                    if not weighted and i < last:
                        load_sums(local, half, expected, token, int32(0), i, polled)
                    own[0] = own[1] = own[2] = own[3] = int32(SENTINEL)
                    if has_own:
                        sum_own_rows(x, row, weight, lanes, i, i < last, own)
                    if weighted and i < last:  # now, because registers do not suffice for all vectors at once
                        load_sums(local, half, expected, token, int32(0), i, polled)

                    # ---- Add the ranks' sums in rank order; what has not arrived in time is NaN ----
                    for j in range(8):
                        sums[j] = float32(0)
                    for first_rank in range(0, num_ranks, polled_ranks):
                        if first_rank != 0:
                            for j in range(polled_words):
                                polled[j] = int32(SENTINEL)
                            if i < last:
                                load_sums(local, half, expected, token, int32(first_rank), i, polled)
                        if data_is_flag and i < last:
                            # Wait for the vectors of a batch, which are loaded once, and make their slots empty again.
                            of_batch = uint32(expected & uint32(uint32(batch_mask) << uint32(first_rank)))
                            wait_start, polls = uint64(0), int32(0)
                            pending = not_arrived(of_batch, int32(first_rank), polled)
                            while pending != uint32(0):
                                if polls % POLLS_PER_CHECK == 0:
                                    wait_start = globaltimer() if polls == 0 else wait_start
                                    if must_stop(ctx, wait_start, COMBINE_ROW, lowest_bit(pending), token):
                                        pending = uint32(pending & (pending - uint32(1)))
                                polls = int32(polls + 1)
                                load_sums(local, half, pending, token, int32(first_rank), i, polled)
                                pending = not_arrived(pending, int32(first_rank), polled)
                            for k in range(polled_ranks):
                                if of_batch >> uint32(first_rank + k) & uint32(1) != uint32(0):
                                    sum_row, empty = sum_offset(half, int32(first_rank + k), token), int32(SENTINEL)
                                    if combines_fp8:
                                        st_relaxed_sys_u64(local, sum_row + 2 * i, uint64(0xFFFFFFFFFFFFFFFF))
                                        if i % SUM_LANES_PER_SCALE == 0:
                                            offset = sum_row + scales_offset + i // SUM_LANES_PER_SCALE
                                            st_relaxed_sys_s32(local, offset, empty)
                                    else:
                                        st_relaxed_sys_s32x4(local, sum_row + 4 * i, empty, empty, empty, empty)
                        for k in range(polled_ranks):
                            r = int32(first_rank + k)
                            if targets >> uint32(r) & uint32(1) != uint32(0):
                                if reads_own_rows and r == rank:
                                    add_row(sums, own, 0, float32(1))
                                elif combines_fp8:
                                    add_e4m3(sums, polled, 4 * k)
                                else:
                                    add_row(sums, polled, 4 * k, float32(1))
                    if i < last:
                        round_sums(sums, words)
                        st_global_s32x4(out, int64(token) * row_words + 4 * i, words[0], words[1], words[2], words[3])

            # ---- Wait for all ranks to start: so no rank is two combines ahead of another ----
            if block == first_receiver and tid < num_ranks:
                waited = wait_ns[tid]
                wait_number(ctx, tid, number, STARTED, tid, int32(-1))
                wait_ns[tid] = waited + int64(globaltimer() - start)

        count_operation(state, own_state, sends, sent, receives, received)

    return low_latency_combine


def signature(topk_idx="int64*"):
    """Return the kernel's signature; ``topk_idx`` is the type of the pointers to experts, "int64*" or "int32*"."""
    return (
        *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32*"),
        *("int32*", "int32*", topk_idx, "int32*", "int32", "int32*", "int64*"),
    )
