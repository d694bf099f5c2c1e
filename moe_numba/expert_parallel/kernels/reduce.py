"""How combine adds up a token's rows: in the order of the ranks, in float32, rounded once.

A warp adds up a token. The rank's own row lies in the warp's stage when it begins, and the sum takes its place there:
both travel by bulk copies, since a multiprocessor's warps can neither load nor store as fast. Other ranks' rows are
loaded from their rings.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.expert_parallel.kernels.progress import FULL
from moe_numba.ptx.arithmetic import add_rn_bf16x2, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, ld_shared_s32x4, st_shared_s32x4


def make_add_up(shape, biases):
    """``add_up``: the sum of a token's rows, with so many biases; ``begins`` is of lane r where rank r's row begins."""
    return make_add_pair(shape) if shape.num_ranks <= 2 and not biases else make_add_many(shape, biases)


def _pieces(row_words, most):
    """A row's pieces of 16 bytes, and how many a lane takes at once: if it can be, so many that all lanes have some."""
    pieces = row_words // 4
    most = min(most, -(-pieces // 32))
    fitting = [n for n in range(-(-most // 2), most + 1) if pieces % (32 * n) == 0]
    return pieces, max(fitting, default=most)


@cache
def _make_parts(row_words, most):
    """``ask``, ``own`` and ``keep``: some pieces of a row from a ring; from the stage; and to it.

    A lane takes every 32nd piece from ``first`` on. Also how many pieces a row has, and a lane takes at once.
    """
    pieces, at_once = _pieces(row_words, most)
    all_have_all = pieces % (32 * at_once) == 0

    def reader(load):
        @cuda.jit(device=True)
        def read_pieces(words, source, begin, first):
            at = begin + 4 * first
            for u in range(at_once):
                if all_have_all or first + 32 * u < pieces:
                    a, b, c, d = load(source, at + 128 * u)
                    words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = a, b, c, d

        return read_pieces

    @cuda.jit(device=True)
    def keep(smem, stage, first, words):
        at = int32(stage + 4 * first)
        for u in range(at_once):
            if all_have_all or first + 32 * u < pieces:
                st_shared_s32x4(smem, at + 128 * u, words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3])

    return reader(ld_global_s32x4), reader(ld_shared_s32x4), keep, pieces, at_once


@cache
def make_add_pair(shape):
    """Two rows at most: added as they are, two elements at a time, for that rounds once as well."""
    ask, own, keep, pieces, at_once = _make_parts(shape.record.row, 8)
    held, has_peer = 4 * at_once, shape.num_ranks == 2

    @cuda.jit(device=True)
    def add_up(smem, stage, mine, begins, mask, rank, lane, bias_0, bias_1, bias_at):
        some = cuda.local.array(held, int32)
        other = cuda.local.array(held, int32)
        peer = int32(1 - rank) if has_peer else int32(0)
        is_here = mask >> uint32(rank) & uint32(1) != uint32(0)
        is_there = has_peer and mask >> uint32(peer) & uint32(1) != uint32(0)
        begin = cuda.shfl_sync(FULL, begins, peer)
        for base in range(0, pieces, 32 * at_once):
            first = int32(base + lane)
            for w in range(held):
                some[w] = other[w] = int32(0)
            if is_there:
                ask(other, mine, begin, first)
            if is_here:
                own(some, smem, stage, first)
            for w in range(held):
                total = add_rn_bf16x2(uint32(some[w]), uint32(0))  # a sum is 0, not -0, even of -0 alone
                if is_there:
                    total = add_rn_bf16x2(total, uint32(other[w]))
                some[w] = int32(total)
            keep(smem, stage, first, some)

    return add_up


@cache
def make_add_many(shape, biases):
    """A float32 sum for each element: biases first, then two rows at a time are on their way."""
    ask, own, keep, pieces, at_once = _make_parts(shape.record.row, 4)
    held, summed = 4 * at_once, 8 * at_once

    @cuda.jit(device=True)
    def lowest(mask):
        return int32(cuda.ffs(mask) - 1)

    @cuda.jit(device=True)
    def without_lowest(mask):
        return uint32(mask & (mask - uint32(1)))

    @cuda.jit(device=True)
    def take(words, smem, stage, mine, begins, r, rank, first):
        begin = cuda.shfl_sync(FULL, begins, r)
        if r != rank:
            ask(words, mine, begin, first)
        else:
            own(words, smem, stage, first)

    @cuda.jit(device=True)
    def add(sums, words):
        for w in range(held):
            sums[2 * w] += uint_as_float(uint32(words[w]) << uint32(16))
            sums[2 * w + 1] += uint_as_float(uint32(words[w]) & uint32(0xFFFF0000))

    @cuda.jit(device=True)
    def add_up(smem, stage, mine, begins, mask, rank, lane, bias_0, bias_1, bias_at):
        some = cuda.local.array(held, int32)
        other = cuda.local.array(held, int32)
        sums = cuda.local.array(summed, float32)
        for base in range(0, pieces, 32 * at_once):
            first = int32(base + lane)
            for j in range(summed):
                sums[j] = float32(0)
            if biases > 0:
                ask(some, bias_0, bias_at, first)
                if biases > 1:
                    ask(other, bias_1, bias_at, first)
                add(sums, some)
                if biases > 1:
                    add(sums, other)
            rest = mask
            while rest != uint32(0):
                take(some, smem, stage, mine, begins, lowest(rest), rank, first)
                rest = without_lowest(rest)
                two = rest != uint32(0)
                if two:
                    take(other, smem, stage, mine, begins, lowest(rest), rank, first)
                    rest = without_lowest(rest)
                add(sums, some)
                if two:
                    add(sums, other)
            for w in range(held):
                some[w] = int32(cvt_rn_bf16x2_f32(sums[2 * w + 1], sums[2 * w]))
            keep(smem, stage, first, some)

    return add_up


@cache
def make_add_weights(shape):
    """``add_weights``: the sum of what came with a token's rows."""
    ranks, topk, weights_at = shape.num_ranks, shape.record.scales, shape.record.row

    @cuda.jit(device=True)
    def add_weights(mine, begins, mask, rank, lane, weights, own_row, out_weights, token):
        if topk > 0:
            total = float32(0)
            for r in range(ranks):
                begin = cuda.shfl_sync(FULL, begins, r)
                if lane < topk and mask >> uint32(r) & uint32(1):
                    bits = weights[own_row * topk + lane] if r == rank else mine[begin + weights_at + lane]
                    total += uint_as_float(uint32(bits))
            if lane < topk:
                out_weights[int64(token) * topk + lane] = total

    return add_weights
