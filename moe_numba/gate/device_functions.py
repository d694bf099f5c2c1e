"""The device functions that the gate's kernels are put together from, each made for one set of constants."""

import math
from functools import cache

from numba import cuda, float32, int32, uint32

from moe_numba.ptx.arithmetic import (
    ex2_approx,
    float_as_int,
    half_bits_as_float,
    int_as_float,
    rcp_approx,
    uint_as_float,
)
from moe_numba.ptx.memory import load_nc_u16, load_nc_u32x1, load_nc_u32x2, load_nc_u32x4

FULL = 0xFFFFFFFF
EXCLUDED = int32(-(1 << 31))  # the key of what may not be chosen, below every order_key
LOG2_E = float32(1.4426950408889634)
INFINITY = float32(math.inf)
LARGEST = float32(3.4028234663852886e38)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@cuda.jit(device=True)
def order_key(x):
    """An integer that sorts as the float does, so that comparing and ``redux.sync`` work on integers alone.

    A negative float's magnitude bits are flipped. Adding 2 wraps NaN (0x7FFFFFFF) around to the lowest integer but one.
    """
    bits = float_as_int(x)
    return int32((bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 2)


@cuda.jit(device=True)
def key_as_float(key):
    """The float that ``order_key`` made this key of."""
    bits = int32(key - 2)
    return int_as_float(int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))


@cuda.jit(device=True)
def group_worth(best, second):
    """The key of a group's worth, the sum of its two best scores, given by their keys; a NaN counts as -inf."""
    # Not max(x, -inf): what it makes of a NaN is one thing on a GPU and another in Python.
    best_value, second_value = key_as_float(best), key_as_float(second)
    best_value = best_value if best_value == best_value else -INFINITY
    return order_key(best_value + (second_value if second_value == second_value else -INFINITY))


@cuda.jit(device=True)
def sigmoid(x):
    return rcp_approx(float32(1) + ex2_approx(-LOG2_E * x))


@cuda.jit(device=True)
def sqrtsoftplus(x):
    if x > LARGEST:  # an infinite logit must not make an infinite weight; a NaN stays one
        x = LARGEST
    root = ex2_approx(float32(-0.5) * LOG2_E * abs(x))
    # Far below zero softplus(x) is exp(x) to the last bit, which is out of range long before its root is.
    if x < float32(-40):
        return root
    return float32(math.sqrt(max(x, float32(0)) + float32(math.log1p(root * root))))


@cache
def make_scoring(scoring, values):
    """``score_row(row)`` makes scores of a lane's logits, in place; ``score_one`` needs what it gives."""
    if scoring == "softmax":

        @cuda.jit(device=True)
        def score_row(row):
            largest = row[0]
            for j in range(1, values):
                largest = max(largest, row[j])
            for s in range(5):
                largest = max(largest, cuda.shfl_xor_sync(FULL, largest, 1 << s))
            total = float32(0)
            for j in range(values):
                row[j] = ex2_approx((row[j] - largest) * LOG2_E)
                total += row[j]
            for s in range(5):
                total += cuda.shfl_xor_sync(FULL, total, 1 << s)
            inverse = rcp_approx(total)
            for j in range(values):
                row[j] = row[j] * inverse
            return largest, inverse

        @cuda.jit(device=True)
        def score_one(x, largest, inverse):
            return ex2_approx((x - largest) * LOG2_E) * inverse

        return score_row, score_one

    score = sigmoid if scoring == "sigmoid" else sqrtsoftplus

    @cuda.jit(device=True)
    def score_row(row):
        for j in range(values):
            row[j] = score(row[j])
        return float32(0), float32(1)

    @cuda.jit(device=True)
    def score_one(x, largest, inverse):
        return score(x)

    return score_row, score_one


@cache
def make_load(dtype, word_bytes, values):
    """How a lane reads its ``values`` neighbouring numbers, in loads of ``word_bytes``.

    ``fetch(pointer, first, valid, raw)`` starts the loads of the ``valid`` ones; ``unpack(raw, valid, row)`` makes
    float32 of them, and -inf of the rest. They are two, so that one row can be on its way while another is routed.
    ``load_one(pointer, index)`` reads one number.

    Returns
    -------
    fetch, unpack, load_one
    raw_words : int
        Registers that ``raw`` needs.
    """
    item = ITEM_BYTES[dtype]
    per_load, words = word_bytes // item, max(word_bytes // 4, 1)
    per_word = per_load // words
    load_words = {2: load_nc_u16, 4: load_nc_u32x1, 8: load_nc_u32x2, 16: load_nc_u32x4}[word_bytes]

    if dtype == "float32":

        @cuda.jit(device=True)
        def number(word, half):
            return uint_as_float(word)

    elif dtype == "bfloat16":

        @cuda.jit(device=True)
        def number(word, half):  # a bfloat16 is the upper half of a float32
            return uint_as_float(uint32(word & uint32(0xFFFF0000)) if half else uint32(word << uint32(16)))

    else:

        @cuda.jit(device=True)
        def number(word, half):
            return half_bits_as_float(uint32(word >> uint32(16)) if half else word)

    load_item = load_nc_u32x1 if item == 4 else load_nc_u16

    @cuda.jit(device=True)
    def load_one(pointer, index):
        return number(load_item(pointer, index), False)

    if words == 1:

        @cuda.jit(device=True)
        def fetch_load(pointer, index, raw, at):
            raw[at] = load_words(pointer, index)

    else:

        @cuda.jit(device=True)
        def fetch_load(pointer, index, raw, at):
            loaded = load_words(pointer, index)
            for w in range(words):
                raw[at + w] = loaded[w]

    @cuda.jit(device=True)
    def fetch(pointer, first, valid, raw):
        for i in range(values // per_load):
            if i * per_load < valid:
                fetch_load(pointer, first + i * per_load, raw, i * words)

    @cuda.jit(device=True)
    def unpack(raw, valid, row):
        for w in range(values // per_word):
            for half in range(per_word):
                row[w * per_word + half] = number(raw[w], half) if w * per_word < valid else -INFINITY

    return fetch, unpack, load_one, values // per_word


@cache
def make_tokens_to_route(limit_on_device):
    """``tokens_to_route(num_tokens, limit)``: rows from it on are padding. The limit is a number or a pointer."""
    if limit_on_device:

        @cuda.jit(device=True)
        def tokens_to_route(num_tokens, limit):
            return int32(min(num_tokens, limit[0]))

    else:

        @cuda.jit(device=True)
        def tokens_to_route(num_tokens, limit):
            return int32(min(num_tokens, limit))

    return tokens_to_route


def sorting_network(n):
    """The compare-exchange pairs of Batcher's odd-even merge sort of n elements."""
    pairs, p = [], 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                for i in range(min(k, n - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return pairs


@cache
def make_sort_descending(values):
    """``sort_descending(keys)`` sorts a lane's own keys; the network is unrolled, so they stay in registers."""
    network = sorting_network(values)

    # The compiler unrolls short loops only, and a rolled one would index registers: so a chain of short ones.
    sort_descending = _compare_exchange(network[:16])
    for start in range(16, len(network), 16):
        sort_descending = _in_turn(sort_descending, _compare_exchange(network[start : start + 16]))
    return sort_descending


def _compare_exchange(pairs):
    count = len(pairs)
    upper, lower = tuple(i for i, _ in pairs) or (0,), tuple(j for _, j in pairs) or (0,)

    @cuda.jit(device=True)
    def compare_exchange(keys):
        for c in range(count):
            i = upper[c]
            j = lower[c]
            larger = max(keys[i], keys[j])
            keys[j] = min(keys[i], keys[j])
            keys[i] = larger

    return compare_exchange


def _in_turn(first, second):
    @cuda.jit(device=True)
    def in_turn(keys):
        first(keys)
        second(keys)

    return in_turn
