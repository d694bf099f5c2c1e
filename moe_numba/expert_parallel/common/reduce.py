"""Reduction of combine: sums a token's rows in rank order, in float32, rounded once to bfloat16.

One warp reduces one token. The rank's own row is already in the warp's staging buffer, and the sum replaces it there;
both use TMA bulk copies, which are faster than the loads and stores of an SM's warps. Rows of other ranks are loaded
from their rings.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.ptx.arithmetic import add_rn_bf16x2, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, ld_shared_s32x4, st_shared_s32x4
from moe_numba.ptx.warp import FULL_MASK


def make_reduce_token(shape, biases):
    """Make ``reduce_token``, which sums a token's rows and ``biases`` biases; lane r passes the offset of rank r's row.

    At most two rows without biases are summed in bfloat16, everything else in float32; the results are equal.
    """
    if shape.uses_tma and shape.num_ranks <= 2 and not biases:
        return make_reduce_token_two_ranks(shape)
    return make_reduce_token_general(shape, biases)


def _vectors(row_words, max_per_lane):
    """Return a row's number of 16-byte vectors, and how many a lane loads at once.

    The second number divides the row evenly among the lanes if possible.
    """
    vectors = row_words // 4
    max_per_lane = min(max_per_lane, -(-vectors // 32))
    even = [n for n in range(-(-max_per_lane // 2), max_per_lane + 1) if vectors % (32 * n) == 0]
    return vectors, max(even, default=max_per_lane)


@cache
def _make_row_access(row_words, max_per_lane):
    """Make ``load_ring``, ``load_staging`` and ``store_staging``, which move some 16-byte vectors of a row.

    A lane accesses every 32nd vector from ``first`` on. Also returns the numbers of vectors of a row, and of a lane.
    """
    vectors, per_lane = _vectors(row_words, max_per_lane)
    is_even = vectors % (32 * per_lane) == 0

    def make_load(load):
        @cuda.jit(device=True)
        def load_vectors(words, source, row_offset, first):
            offset = row_offset + 4 * first
            for u in range(per_lane):
                if is_even or first + 32 * u < vectors:
                    a, b, c, d = load(source, offset + 128 * u)
                    words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = a, b, c, d

        return load_vectors

    @cuda.jit(device=True)
    def store_staging(smem_i32, staging, first, words):
        offset = int32(staging + 4 * first)
        for u in range(per_lane):
            if is_even or first + 32 * u < vectors:
                a, b, c, d = words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3]
                st_shared_s32x4(smem_i32, offset + 128 * u, a, b, c, d)

    return make_load(ld_global_s32x4), make_load(ld_shared_s32x4), store_staging, vectors, per_lane


@cache
def make_reduce_token_two_ranks(shape):
    """Make ``reduce_token`` for at most two rows: packed bfloat16 additions, which round once as well."""
    load_ring, load_staging, store_staging, vectors, per_lane = _make_row_access(shape.slot.row, 8)
    num_words, has_peer = 4 * per_lane, shape.num_ranks == 2

    @cuda.jit(device=True)
    def reduce_token(smem_i32, staging, local, row_offset, mask, rank, lane, bias_0, bias_1, bias_offset):
        own_words = cuda.local.array(num_words, int32)
        peer_words = cuda.local.array(num_words, int32)
        peer = int32(1 - rank) if has_peer else int32(0)
        has_own_row = mask >> uint32(rank) & uint32(1) != uint32(0)
        has_peer_row = has_peer and mask >> uint32(peer) & uint32(1) != uint32(0)
        peer_offset = cuda.shfl_sync(FULL_MASK, row_offset, peer)
        for base in range(0, vectors, 32 * per_lane):
            first = int32(base + lane)
            for w in range(num_words):
                own_words[w] = peer_words[w] = int32(0)
            if has_peer_row:
                load_ring(peer_words, local, peer_offset, first)
            if has_own_row:
                load_staging(own_words, smem_i32, staging, first)
            for w in range(num_words):
                total = add_rn_bf16x2(uint32(own_words[w]), uint32(0))  # turns -0 into 0, as a sum that begins at 0
                if has_peer_row:
                    total = add_rn_bf16x2(total, uint32(peer_words[w]))
                own_words[w] = int32(total)
            store_staging(smem_i32, staging, first, own_words)

    return reduce_token


@cache
def make_reduce_token_general(shape, biases):
    """Make ``reduce_token`` with one float32 sum per element: biases first, then rows, two of them in flight."""
    load_ring, load_staging, store_staging, vectors, per_lane = _make_row_access(shape.slot.row, 4)
    num_words, num_sums = 4 * per_lane, 8 * per_lane

    @cuda.jit(device=True)
    def lowest_rank(mask):
        return int32(cuda.ffs(mask) - 1)

    @cuda.jit(device=True)
    def without_lowest(mask):
        return uint32(mask & (mask - uint32(1)))

    @cuda.jit(device=True)
    def load_row(words, smem_i32, staging, local, row_offset, r, rank, first):
        offset = cuda.shfl_sync(FULL_MASK, row_offset, r)
        if r != rank:
            load_ring(words, local, offset, first)
        else:
            load_staging(words, smem_i32, staging, first)

    @cuda.jit(device=True)
    def add(sums, words):
        for w in range(num_words):
            sums[2 * w] += uint_as_float(uint32(words[w]) << uint32(16))
            sums[2 * w + 1] += uint_as_float(uint32(words[w]) & uint32(0xFFFF0000))

    @cuda.jit(device=True)
    def reduce_token(smem_i32, staging, local, row_offset, mask, rank, lane, bias_0, bias_1, bias_offset):
        words_0 = cuda.local.array(num_words, int32)
        words_1 = cuda.local.array(num_words, int32)
        sums = cuda.local.array(num_sums, float32)
        for base in range(0, vectors, 32 * per_lane):
            first = int32(base + lane)
            for j in range(num_sums):
                sums[j] = float32(0)
            if biases > 0:
                load_ring(words_0, bias_0, bias_offset, first)
                if biases > 1:
                    load_ring(words_1, bias_1, bias_offset, first)
                add(sums, words_0)
                if biases > 1:
                    add(sums, words_1)
            remaining = mask
            while remaining != uint32(0):
                load_row(words_0, smem_i32, staging, local, row_offset, lowest_rank(remaining), rank, first)
                remaining = without_lowest(remaining)
                has_second = remaining != uint32(0)
                if has_second:
                    load_row(words_1, smem_i32, staging, local, row_offset, lowest_rank(remaining), rank, first)
                    remaining = without_lowest(remaining)
                add(sums, words_0)
                if has_second:
                    add(sums, words_1)
            for w in range(num_words):
                words_0[w] = int32(cvt_rn_bf16x2_f32(sums[2 * w + 1], sums[2 * w]))
            store_staging(smem_i32, staging, first, words_0)

    return reduce_token


@cache
def make_reduce_weights(shape):
    """Make ``reduce_weights``, which sums the weights that came with a token's rows."""
    ranks, topk, weights_offset = shape.num_ranks, shape.slot.scales, shape.slot.row

    @cuda.jit(device=True)
    def reduce_weights(local, row_offset, mask, rank, lane, weights, own_row, out_weights, token):
        if topk > 0:
            total = float32(0)
            for r in range(ranks):
                offset = cuda.shfl_sync(FULL_MASK, row_offset, r)
                if lane < topk and mask >> uint32(r) & uint32(1):
                    bits = weights[own_row * topk + lane] if r == rank else local[offset + weights_offset + lane]
                    total += uint_as_float(uint32(bits))
            if lane < topk:
                out_weights[int64(token) * topk + lane] = total

    return reduce_weights
