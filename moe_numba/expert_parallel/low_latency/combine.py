"""Low-latency combine kernel: each rank sums the rows of its own experts, and pushes one row per token to its source.

One launch. The source of a token first pushes the token's weights; the expert ranks sum in float32, in the order of
the token's experts, and round to bfloat16. The source sums the ranks' rows in rank order in float32, and rounds once.
Rows that stayed in their slots are sums already: they are pushed as they are, and the result equals that of
`Buffer.combine` bit for bit.

Some CTAs push sums to the other ranks (`LowLatencyShape.ctas_per_sender`). The others receive meanwhile, and sum the
rows of the rank's own experts for its own tokens. A call with a receive hook has a kernel for each phase; the first one
pushes these sums as well, because the caller may overwrite the rows before the second one.

Every rank also posts to all others that it has started, and waits for them at the end: no rank can be two combines
ahead of another. Protocols and timeouts: `low_latency_protocol.py`. Memory map: `low_latency_layout.py`.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.expert_parallel.low_latency.layout import CTA_STATE, POISONED, SENTINEL
from moe_numba.expert_parallel.low_latency.protocol import (
    COMBINE_ROW,
    POLLS_PER_CHECK,
    STARTED,
    LowLatencyContext,
    count_operation,
    has_arrived,
    make_slot_at,
    make_token_routing,
    masked_ranks,
    must_stop,
    roles,
    wait_number,
    wait_weight,
)
from moe_numba.expert_parallel.low_latency.sums import add_row, make_hide_sentinel, make_sum_format, round_sums
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.atomics import ld_relaxed_gpu_s32, st_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_global_s32x4,
    pointer_from_address,
    st_global_s32x4,
)
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.system_vectors import st_relaxed_sys_u64
from moe_numba.ptx.warp import FULL_MASK

_MAX_BATCH = 4  # rows that a thread loads at once


@cuda.jit(device=True)
def lowest_bit(mask):
    """Return the number of the lowest bit that is set."""
    return int32(cuda.popc(uint32(~mask & (mask - uint32(1)))))


@cache
def make_low_latency_combine(shape):
    """Make the kernel, for CTAs of ``shape.threads`` threads, all of which must be resident at once."""
    num_ranks, max_tokens, slots, topk = shape.num_ranks, shape.max_tokens, shape.slots, shape.topk
    sends, receives, ctas_per_sender = shape.sends, shape.receives, shape.ctas_per_sender
    parts, threads, local_experts, weighted = shape.parts, shape.threads, shape.local_experts, shape.expert_major
    num_rows = slots * local_experts if weighted else slots  # of x
    data_is_flag, row_words, rows_per_slot = shape.data_is_flag, shape.combined_words, shape.rows_per_slot
    weights_offset, weights_half, flags_half = shape.weights_offset, shape.weights_half, shape.flags_half
    flags_offset, rows_offset = shape.flags_offset, shape.combine_rows
    vectors, part_vectors = row_words // 4, shape.vectors_of_part(row_words)
    fits_threads = shape.fits_threads(row_words)
    batch = min(rows_per_slot, _MAX_BATCH)
    polled_ranks = min(num_ranks, _MAX_BATCH // ((1 + weighted) * (1 + shape.combines_fp8)))  # registers limit them
    loaded_words = 4 * batch
    polled_words, batch_mask = 4 * polled_ranks, (1 << polled_ranks) - 1
    reads_own_rows, own_slots = shape.reads_own_rows, max_tokens if shape.reads_own_rows else 0
    sum_words, hide_sentinel = shape.sum_words, make_hide_sentinel(data_is_flag)
    encode, store, load, reset, add = make_sum_format(shape)
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
    def load_item(x, slot_rows, rank, item, loaded):
        """Load this lane's row number of an item, a part of a peer's token, and a vector of a row in its slot."""
        tid, row, is_item = int32(cuda.threadIdx.x), int32(-1), item < slots * parts
        if is_item:
            peer, token = slot_at(rank, int32(item // parts))
            slot, i = int32(peer * max_tokens + token), int32(item % parts * part_vectors + tid)
            row = load_row_number(slot_rows, slot, is_item)
            if not weighted and i < min(int32(vectors), int32((item % parts + 1) * part_vectors)):
                # The row of a slot has the slot's number, if there is one.
                loaded[0], loaded[1], loaded[2], loaded[3] = ld_global_s32x4(x, int64(slot) * row_words + 4 * i)
        return row

    @cuda.jit(device=True)
    def send_sum(ctx, number, peer, token, part, x, own_row, loaded):
        """Sum this rank's rows of a peer's token, and push the sum there; a lost row makes it NaN.

        Rows that are not weighted are loaded.
        """
        half, tid = int32(number & 1), int32(cuda.threadIdx.x)
        words, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
        source_slot, slot = int32(peer * max_tokens + token), int32(ctx.rank * max_tokens + token)
        lanes, is_lost = lanes_with_rows(own_row)
        if (lanes != uint32(0)) | is_lost:
            remote = pointer_from_address(ctx.peers[peer], ctx.local)
            row = int32(rows_offset + (half * slots + slot) * sum_words)
            first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
            weight = int32(0)
            if weighted:
                # The loads do not wait for the weights.
                load_rows(x, own_row, lanes, int32(first + tid), first + tid < last, loaded)
                if own_row >= 0:
                    pair = int32(weights_offset + half * weights_half + 2 * (source_slot * topk + (tid & 31)))
                    weight = int32(wait_weight(ctx, pair, number, peer, token))
            for base in range(first, int32(first + 1) if fits_threads else last, threads):
                i = int32(base + tid)
                if base != first:
                    load_rows(x, own_row, lanes, i, i < last, loaded)
                sum_vector(x, own_row, weight, lanes, i, i < last, loaded, sums)
                encode(sums, words)
                hide_sentinel(words, is_lost)
                if i < last:
                    store(remote, row, i, words)
            if not data_is_flag:
                cuda.syncthreads()
                if tid == 0:
                    fence_acq_rel_sys()  # on behalf of the CTA
                    flag = int32(flags_offset + half * flags_half + slot * parts + part)
                    st_relaxed_sys_s32(remote, flag, number)

    @cuda.jit(device=True)
    def send_items(ctx, number, masked, senders, x, slot_rows, row, loaded):
        """Send this CTA's items, the first of which is loaded; load each next one before the stores of the last.

        Loads issued after stores to a peer would wait until NVLink has taken these.
        """
        following = cuda.local.array(loaded_words, int32)
        for item in range(int32(own_slots * parts + cuda.blockIdx.x), int32(slots * parts), senders):
            next_row = load_item(x, slot_rows, ctx.rank, int32(item + senders), following)
            part = int32(item % parts)
            peer, token = slot_at(ctx.rank, int32(item // parts))
            if masked >> uint32(peer) & uint32(1) == uint32(0):
                send_sum(ctx, number, peer, token, part, x, row, loaded)
            row = next_row
            if not weighted:
                for j in range(4):
                    loaded[j] = following[j]

    # The sums of a batch of ranks are loaded at once, and polled together.

    @cuda.jit(device=True)
    def sum_offset(half, r, token):
        """Return the offset of the sum that rank ``r`` sends for a token."""
        return int32(rows_offset + (half * slots + r * max_tokens + token) * sum_words)

    @cuda.jit(device=True)
    def load_sums(ctx, half, peers, token, first_rank, i, polled):
        """Load vector ``i`` of the sums that a batch of ranks sends for a token, from those in the mask ``peers``."""
        for k in range(polled_ranks):
            r = int32(first_rank + k)
            if peers >> uint32(r) & uint32(1) != uint32(0):
                load(ctx.local, sum_offset(half, r, token), i, polled, 4 * k)

    @cuda.jit(device=True)
    def not_arrived(pending, first_rank, polled):
        """Return the mask of the ranks in ``pending`` whose vector has not arrived."""
        for k in range(polled_ranks):
            if has_arrived(polled[4 * k], polled[4 * k + 1], polled[4 * k + 2], polled[4 * k + 3]):
                pending = uint32(pending & ~uint32(uint32(1) << uint32(first_rank + k)))
        return pending

    @cuda.jit(device=True)
    def wait_sums(ctx, half, peers, token, first_rank, i, polled):
        """Wait for the vectors of a batch, which are loaded once, and reset them; those that are late stay NaN."""
        of_batch = uint32(peers & uint32(uint32(batch_mask) << uint32(first_rank)))
        start, polls, pending = uint64(0), int32(0), not_arrived(of_batch, first_rank, polled)
        while pending != uint32(0):
            if polls % POLLS_PER_CHECK == 0:
                start = globaltimer() if polls == 0 else start
                if must_stop(ctx, start, COMBINE_ROW, lowest_bit(pending), token):
                    pending = uint32(pending & (pending - uint32(1)))
            polls = int32(polls + 1)
            load_sums(ctx, half, pending, token, first_rank, i, polled)
            pending = not_arrived(pending, first_rank, polled)
        for k in range(polled_ranks):
            if of_batch >> uint32(first_rank + k) & uint32(1) != uint32(0):
                reset(ctx.local, sum_offset(half, int32(first_rank + k), token), i)

    @cuda.jit(device=True)
    def receive_sum(ctx, number, masked, expert, own_row, weight, token, part, x, out):
        """Sum a token's rows in rank order; a row that has not arrived in time is NaN.

        Each lane has one of the token's experts, and a row and its weight.
        """
        half, tid, own_bit = int32(number & 1), int32(cuda.threadIdx.x), uint32(uint32(1) << uint32(ctx.rank))
        words, sums, own = cuda.local.array(4, int32), cuda.local.array(8, float32), cuda.local.array(4, int32)
        loaded, polled = cuda.local.array(loaded_words, int32), cuda.local.array(polled_words, int32)
        first, last = int32(part * part_vectors), min(int32(vectors), int32((part + 1) * part_vectors))
        targets = ranks_of(expert)
        missing, lanes, is_lost = uint32(targets & masked), uint32(0), False
        if reads_own_rows:
            missing = uint32(missing & ~own_bit)
            if targets & own_bit != uint32(0):
                lanes, is_lost = lanes_with_rows(own_row)
        has_own, peers = lanes != uint32(0) and not is_lost, uint32(targets & ~missing)
        if reads_own_rows:
            peers = uint32(peers & ~own_bit)
        if not data_is_flag:
            for r in range(num_ranks):
                if peers >> uint32(r) & uint32(1) != uint32(0):
                    flag = int32(flags_offset + half * flags_half + (r * max_tokens + token) * parts + part)
                    if not wait_number(ctx, flag, number, COMBINE_ROW, int32(r), token):
                        missing = uint32(missing | uint32(1 << r))
            peers = uint32(peers & ~missing)
        for base in range(first, int32(first + 1) if fits_threads else last, threads):
            i = int32(base + tid)
            for j in range(polled_words):
                polled[j] = int32(SENTINEL)
            if not weighted and i < last:
                load_sums(ctx, half, peers, token, int32(0), i, polled)
            own[0] = own[1] = own[2] = own[3] = int32(SENTINEL)
            if has_own:
                load_rows(x, own_row, lanes, i, i < last, loaded)
                sum_vector(x, own_row, weight, lanes, i, i < last, loaded, sums)
                round_sums(sums, own)
            if weighted and i < last:  # now, because registers do not suffice for all vectors at once
                load_sums(ctx, half, peers, token, int32(0), i, polled)
            for j in range(8):
                sums[j] = float32(0)
            for first_rank in range(0, num_ranks, polled_ranks):
                if first_rank != 0:
                    for j in range(polled_words):
                        polled[j] = int32(SENTINEL)
                    if i < last:
                        load_sums(ctx, half, peers, token, int32(first_rank), i, polled)
                if data_is_flag and i < last:
                    wait_sums(ctx, half, peers, token, int32(first_rank), i, polled)
                for k in range(polled_ranks):
                    r = int32(first_rank + k)
                    if targets >> uint32(r) & uint32(1) != uint32(0):
                        if reads_own_rows and r == ctx.rank:
                            add_row(sums, own, 0, float32(1))
                        else:
                            add(sums, polled, 4 * k)
            if i < last:
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
        senders, first_receiver = roles(grid, sends, receives, (slots - own_slots) * parts, ctas_per_sender)
        # What a CTA needs first is loaded at once: none of these loads waits for another one.
        loaded, row = cuda.local.array(loaded_words, int32), int32(-1)
        own_state = int32(CTA_STATE + 2 * block)
        sent, received = ld_relaxed_gpu_s32(state, own_state), ld_relaxed_gpu_s32(state, own_state + 1)
        if sends and block < senders:
            row = load_item(x, slot_rows, rank, int32(own_slots * parts + block), loaded)
        masked = masked_ranks(ctx, num_ranks)
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
                send_items(ctx, number, masked, senders, x, slot_rows, row, loaded)
        if receives and block >= first_receiver:
            number, start, lane = int32(received + 1), globaltimer(), int32(tid & 31)
            for item in range(int32(block - first_receiver), int32(num_tokens * parts), int32(grid - first_receiver)):
                token, part, weight = int32(item // parts), int32(item % parts), int32(0)
                expert = load_expert(topk_idx, token, num_tokens, lane)
                row = load_row_number(slot_rows, int32(rank * max_tokens + token), reads_own_rows)
                if weighted and reads_own_rows and lane < topk:
                    weight = topk_weights[int64(token) * topk + lane]
                receive_sum(ctx, number, masked, expert, row, weight, token, part, x, out)
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
