"""Device functions shared by the gate's kernels: loads, scoring, sortable keys and a sorting network."""

import math
from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, uint32, uint64

from moe_numba.gate.reference import SCORINGS
from moe_numba.ptx import arithmetic
from moe_numba.ptx.arithmetic import (
    ex2_approx,
    float_as_int,
    half_bits_as_float,
    int_as_float,
    murmur3_finalizer,
    rcp_approx,
    uint_as_float,
)
from moe_numba.ptx.atomics import red_add_relaxed_gpu_s32
from moe_numba.ptx.memory import load_nc_u16, load_nc_u32x1, load_nc_u32x2, load_nc_u32x4
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.runtime.validate import check_choice

EXCLUDED = int32(-(1 << 31))  # key of an expert that cannot be chosen; less than every order_key
LOG2_E = float32(arithmetic.LOG2_E)
INFINITY = float32(math.inf)
FLOAT32_MAX = float32(3.4028234663852886e38)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@cuda.jit(device=True)
def order_key(x):
    """Map a float32 to an int32 that sorts the same way, so that comparisons and ``redux.sync`` use integers.

    The magnitude bits of a negative float are flipped. Adding 2 makes NaN (0x7FFFFFFF) wrap around to the second lowest
    int32, so NaN sorts last.
    """
    bits = float_as_int(x)
    return int32((bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 2)


@cuda.jit(device=True)
def key_as_float(key):
    """Convert a key back to its float32: the inverse of ``order_key``."""
    bits = int32(key - 2)
    return int_as_float(int32(bits ^ ((bits >> 31) & 0x7FFFFFFF)))


@cuda.jit(device=True)
def group_score_key(best, second):
    """Return the key of a group's score, the sum of its two best scores, from their keys. NaN counts as -inf."""
    # max(x, -inf) would treat NaN differently on a GPU and in Python.
    best_score, second_score = key_as_float(best), key_as_float(second)
    best_score = best_score if best_score == best_score else -INFINITY
    return order_key(best_score + (second_score if second_score == second_score else -INFINITY))


@cuda.jit(device=True)
def sigmoid(x):
    """Compute 1 / (1 + exp(-x)) with the approximate exponential and reciprocal units."""
    return rcp_approx(float32(1) + ex2_approx(-LOG2_E * x))


@cuda.jit(device=True)
def sqrtsoftplus(x):
    """Compute sqrt(log(1 + exp(x)))."""
    if x > FLOAT32_MAX:  # keep the weight of an infinite logit finite; NaN stays NaN
        x = FLOAT32_MAX
    root = ex2_approx(float32(-0.5) * LOG2_E * abs(x))
    # Here softplus(x) equals exp(x) in float32. exp(x) underflows much earlier than its root, so compute the root.
    if x < float32(-40):
        return root
    return float32(math.sqrt(max(x, float32(0)) + float32(math.log1p(root * root))))


@cache
def make_scoring(scoring, experts_per_lane):
    """Make the scoring functions for lanes that hold ``experts_per_lane`` logits.

    Returns
    -------
    score_row : function
        ``row_max, inverse_sum = score_row(values)``: replace a lane's logits by scores; the whole warp must call it.
        The returned numbers are the softmax statistics of the row (0 and 1 for other scorings).
    score_one : function
        ``score_one(logit, row_max, inverse_sum)``: the score of one logit.

    Notes
    -----
    In a softmax a NaN logit counts as -inf for the other experts, and +inf as the largest float32.
    """
    check_choice("scoring", scoring, SCORINGS)
    if scoring == "softmax":

        @cuda.jit(device=True)
        def score_row(values):
            row_max, probe = values[0], float32(0)
            for j in range(1, experts_per_lane):
                row_max = max(row_max, values[j])
            for j in range(experts_per_lane):
                probe += values[j] * float32(0)  # NaN if a logit is NaN or infinite
            if cuda.any_sync(FULL_MASK, probe != probe):
                return score_special_row(values)
            for s in range(5):
                row_max = max(row_max, cuda.shfl_xor_sync(FULL_MASK, row_max, 1 << s))
            total = float32(0)
            for j in range(experts_per_lane):
                values[j] = ex2_approx((values[j] - row_max) * LOG2_E)
                total += values[j]
            for s in range(5):
                total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << s)
            inverse_sum = rcp_approx(total)
            for j in range(experts_per_lane):
                values[j] = values[j] * inverse_sum
            return row_max, inverse_sum

        @cuda.jit(device=True)
        def score_special_row(values):
            """Score a row with NaN, which counts as -inf but stays NaN, or with +inf, which counts as `FLOAT32_MAX`."""
            row_max = -FLOAT32_MAX
            for j in range(experts_per_lane):
                values[j] = FLOAT32_MAX if values[j] > FLOAT32_MAX else values[j]
                row_max = values[j] if values[j] > row_max else row_max
            for s in range(5):
                row_max = max(row_max, cuda.shfl_xor_sync(FULL_MASK, row_max, 1 << s))
            total = float32(0)
            for j in range(experts_per_lane):
                values[j] = ex2_approx((values[j] - row_max) * LOG2_E)
                total += values[j] if values[j] == values[j] else float32(0)
            for s in range(5):
                total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << s)
            inverse_sum = rcp_approx(total) if total > float32(0) else float32(0)  # all logits are -inf or NaN
            for j in range(experts_per_lane):
                values[j] = values[j] * inverse_sum
            return row_max, inverse_sum

        @cuda.jit(device=True)
        def score_one(x, row_max, inverse_sum):
            x = FLOAT32_MAX if x > FLOAT32_MAX else x
            return ex2_approx((x - row_max) * LOG2_E) * inverse_sum

        return score_row, score_one

    score_function = sigmoid if scoring == "sigmoid" else sqrtsoftplus

    @cuda.jit(device=True)
    def score_row(values):
        for j in range(experts_per_lane):
            values[j] = score_function(values[j])
        return float32(0), float32(1)

    @cuda.jit(device=True)
    def score_one(x, row_max, inverse_sum):
        return score_function(x)

    return score_row, score_one


@cache
def make_load(dtype, load_bytes, experts_per_lane):
    """Make the functions with which a lane loads ``experts_per_lane`` adjacent values, ``load_bytes`` per instruction.

    Loading and converting are separate, so that the load of one row overlaps with the routing of another.

    Returns
    -------
    fetch : function
        ``fetch(pointer, first_index, num_valid, raw)``: load the first ``num_valid`` values as raw 32-bit words.
    unpack : function
        ``unpack(raw, num_valid, values)``: convert them to float32; the remaining values become -inf.
    load_one : function
        ``load_one(pointer, index)``: load one value as float32.
    raw_words : int
        Length of ``raw``, in registers.
    """
    item_bytes = ITEM_BYTES[dtype]
    values_per_load, words_per_load = load_bytes // item_bytes, max(load_bytes // 4, 1)
    values_per_word = values_per_load // words_per_load
    load_vector = {2: load_nc_u16, 4: load_nc_u32x1, 8: load_nc_u32x2, 16: load_nc_u32x4}[load_bytes]

    if dtype == "float32":

        @cuda.jit(device=True)
        def to_float32(word, half):
            return uint_as_float(word)

    elif dtype == "bfloat16":

        @cuda.jit(device=True)
        def to_float32(word, half):  # bfloat16 is the upper half of a float32
            return uint_as_float(uint32(word & uint32(0xFFFF0000)) if half else uint32(word << uint32(16)))

    else:

        @cuda.jit(device=True)
        def to_float32(word, half):
            return half_bits_as_float(uint32(word >> uint32(16)) if half else word)

    load_item = load_nc_u32x1 if item_bytes == 4 else load_nc_u16

    @cuda.jit(device=True)
    def load_one(pointer, index):
        return to_float32(load_item(pointer, index), False)

    if words_per_load == 1:

        @cuda.jit(device=True)
        def fetch_vector(pointer, index, raw, offset):
            raw[offset] = load_vector(pointer, index)

    else:

        @cuda.jit(device=True)
        def fetch_vector(pointer, index, raw, offset):
            loaded = load_vector(pointer, index)
            for w in range(words_per_load):
                raw[offset + w] = loaded[w]

    @cuda.jit(device=True)
    def fetch(pointer, first_index, num_valid, raw):
        for i in range(experts_per_lane // values_per_load):
            if i * values_per_load < num_valid:
                fetch_vector(pointer, first_index + i * values_per_load, raw, i * words_per_load)

    @cuda.jit(device=True)
    def unpack(raw, num_valid, values):
        for w in range(experts_per_lane // values_per_word):
            for half in range(values_per_word):
                values[w * values_per_word + half] = (
                    to_float32(raw[w], half) if w * values_per_word < num_valid else -INFINITY
                )

    return fetch, unpack, load_one, experts_per_lane // values_per_word


@cache
def make_num_unpadded_tokens(limit_on_device):
    """Make ``num_unpadded_tokens(num_tokens, limit)``: the number of rows before the padding.

    ``limit`` is a pointer to one integer if ``limit_on_device``, otherwise an integer.
    """
    if limit_on_device:

        @cuda.jit(device=True)
        def num_unpadded_tokens(num_tokens, limit):
            return int32(min(num_tokens, limit[0]))

    else:

        @cuda.jit(device=True)
        def num_unpadded_tokens(num_tokens, limit):
            return int32(min(num_tokens, limit))

    return num_unpadded_tokens


class Features(NamedTuple):
    """What a kernel does beyond choosing experts, at compile time. Each needs `OPTIONAL_TYPES` as last arguments."""

    masks_tokens: bool = False  # `is_padding`
    replica_choice: str | None = None  # `how` of an `ExpertPlacement`, which maps experts to physical ones
    counts_load: bool = False
    adds_epsilon: bool = False


NO_FEATURES = Features()
# The optional arguments of a kernel, a tuple: the place of each, and its type; `table` is that of the placement.
IS_PADDING, PHYSICAL_IDS, NUM_REPLICAS, LOAD, NUM_EXPERTS, NUM_PHYSICAL, MAX_REPLICAS, SEED_LOW, SEED_HIGH, EPSILON = (
    range(10)
)


def optional_types(features, table):
    """Return the types of a kernel's optional arguments; ``table`` is the type of pointers to the placement's ids."""
    if features == NO_FEATURES:
        return ()
    return "uint8*", table, table, "int32*", *("int32",) * 3, *("uint32",) * 2, "float32"


@cache
def make_column_functions(features):
    """Make the functions for what follows the choice of experts in all of the gate's kernels.

    Returns
    -------
    inverse_of_sum : function
        ``inverse_of_sum(total, optional)``: what weights are multiplied by to renormalize them.
    finish_column : function
        ``weight, expert = finish_column(weight, expert, token, is_padding, optional)``: map the expert to a physical
        one, and replace both by 0 and -1 if the token is padding. It reads no mask for what is passed as padding, such
        as a token behind the last one.
    store_column : function
        ``store_column(weights, ids, index, weight, expert, optional)``: store both, and count the physical expert.
    """
    masks_tokens, replica_choice, counts_load, adds_epsilon = features
    is_placed = replica_choice is not None

    @cuda.jit(device=True)
    def inverse_of_sum(total, optional):
        divisor = total
        if adds_epsilon:
            divisor = total + optional[EPSILON]
        return rcp_approx(divisor if total > float32(0) else float32(1))

    if replica_choice == "random":

        @cuda.jit(device=True)
        def choose_replica(token, expert, num_replicas, optional):
            word = murmur3_finalizer(uint32(uint32(token) ^ optional[SEED_LOW]))
            word = murmur3_finalizer(uint32(word + optional[SEED_HIGH]))
            word = murmur3_finalizer(uint32(word + uint32(expert)))
            return int32((uint64(word) * uint64(num_replicas)) >> uint64(32))

    else:

        @cuda.jit(device=True)
        def choose_replica(token, expert, num_replicas, optional):
            return int32(uint32(token) % uint32(num_replicas))

    @cuda.jit(device=True)
    def finish_column(weight, expert, token, is_padding, optional):
        if is_placed:
            if expert < optional[NUM_EXPERTS]:
                replica = int32(0)
                if replica_choice != "static":
                    num_replicas = int32(min(max(optional[NUM_REPLICAS][expert], 1), optional[MAX_REPLICAS]))
                    replica = choose_replica(token, expert, num_replicas, optional)
                physical = optional[PHYSICAL_IDS][expert * optional[MAX_REPLICAS] + replica]
                is_valid = physical >= 0 and physical < optional[NUM_PHYSICAL]
                weight = weight if is_valid else float32(0)
                expert = int32(physical) if is_valid else int32(-1)
            else:  # a shared expert
                expert = int32(expert + (optional[NUM_PHYSICAL] - optional[NUM_EXPERTS]))
        if masks_tokens:
            is_padding = is_padding or optional[IS_PADDING][token] != 0
        return float32(0) if is_padding else weight, int32(-1) if is_padding else expert

    @cuda.jit(device=True)
    def store_column(weights, ids, index, weight, expert, optional):
        weights[index] = weight
        ids[index] = expert
        if counts_load:
            if expert >= 0 and expert < optional[NUM_PHYSICAL]:
                red_add_relaxed_gpu_s32(optional[LOAD], expert, int32(1))

    return inverse_of_sum, finish_column, store_column


def sorting_network(n):
    """Return the compare-exchange pairs of Batcher's odd-even merge sort of ``n`` elements."""
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


def selection_network(n, kept):
    """Return compare-exchange pairs that leave the ``kept`` largest of ``n`` elements, sorted, in the first places.

    Chunks of ``kept`` elements, a power of two, are sorted. Two sorted chunks are merged by a bitonic network, of which
    only the upper half is needed: the larger one of each pair, first with last. The compiler drops the smaller ones.
    """
    chunks = [range(first, min(first + kept, n)) for first in range(0, n, kept)]
    pairs = [(chunk[i], chunk[j]) for chunk in chunks for i, j in sorting_network(len(chunk))]
    while len(chunks) > 1:
        for first, second in zip(chunks[::2], chunks[1::2]):
            pairs += [(first[kept - 1 - i], second[i]) for i in range(len(second))]
            distance = kept // 2
            while distance:
                pairs += [(first[i], first[i + distance]) for i in range(kept) if not i & distance]
                distance //= 2
        chunks = chunks[::2]
    return pairs


@cache
def make_sort_descending(num_keys, kept=None):
    """Make ``sort_descending(keys)``, which sorts the keys of one lane in registers with an unrolled network.

    With ``kept``, a power of two, only the ``kept`` largest keys are wanted; the others are lost.
    """
    network = sorting_network(num_keys) if kept is None else selection_network(num_keys, kept)

    # The compiler only unrolls short loops. Registers cannot be indexed dynamically, so a rolled loop would move
    # the keys to local memory. A chain of short loops avoids this.
    sort_descending = make_compare_exchange(network[:16])
    for start in range(16, len(network), 16):
        sort_descending = chain(sort_descending, make_compare_exchange(network[start : start + 16]))
    return sort_descending


def make_compare_exchange(pairs):
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


def chain(first, second):
    @cuda.jit(device=True)
    def chained(*arguments):
        first(*arguments)
        second(*arguments)

    return chained
