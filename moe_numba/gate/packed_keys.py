"""Gate kernel for 16-bit logits without a correction bias: one integer holds a logit and its expert.

All scorings rise with the logit, so experts are ranked by logits. A 16-bit logit, mapped to an integer that sorts the
same way, is the upper half of a key, and the expert, negated, the lower one. No two keys are equal, lower experts win
ties, and a key that was picked tells the expert and the logit: nothing is searched or loaded again. A token has as few
lanes as can sort its keys, so that a warp routes up to 16 tokens at once.

A lane sorts only its best four keys, because seldom more of them are picked. If all four are, or if the best logit is
NaN, the warp routes its tokens again, with a loop that looks through all keys for each pick.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.gate.device_functions import (
    EXCLUDED,
    FLOAT32_MAX,
    LOG2_E,
    NO_FEATURES,
    Features,
    make_column_functions,
    make_num_unpadded_tokens,
    make_sort_descending,
    sigmoid,
    sqrtsoftplus,
)
from moe_numba.ptx.arithmetic import (
    add_rn_bf16x2,
    add_rn_f16x2,
    ex2_approx,
    half_bits_as_float,
    rcp_approx,
    sign_halves,
    uint_as_float,
)
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_nc_u32x1,
    load_nc_u32x2,
    load_nc_u32x4,
)
from moe_numba.ptx.warp import FULL_MASK, redux_sync_max_s32

WARPS_PER_BLOCK = 4
MAX_KEYS = 32  # of a lane
FEW_KEYS = 16  # of a lane, with which sorting takes the least instructions per token
SORTED_KEYS = 4  # of a lane
MANY_TOKENS_PER_PICK = 1024  # times the picks of a token: with more, fewer lanes per token are faster
INFINITY_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}
_LOADS = {4: load_nc_u32x1, 8: load_nc_u32x2, 16: load_nc_u32x4}


class PackedConfig(NamedTuple):
    """Compile-time configuration of the kernel: what C++ would take as template parameters."""

    num_experts: int
    topk: int
    lanes: int  # of a token, a power of two
    num_fused_shared_experts: int = 0
    renormalize: bool = True
    scoring: str = "softmax"
    dtype: str = "bfloat16"
    load_bytes: int = 16  # bytes per load instruction, limited by the alignment of the rows

    @property
    def routed(self) -> int:
        return self.topk - self.num_fused_shared_experts

    @property
    def keys(self) -> int:
        """Keys of a lane."""
        return self.num_experts // self.lanes

    @property
    def sorted(self) -> int:
        """The largest keys of a lane, which are sorted: at most a power of two."""
        return min(self.keys, SORTED_KEYS)


def supports(num_experts: int, routed: int, lanes: int) -> bool:
    """Return whether ``lanes`` lanes can route a token: with an even number of keys each, and a lane for each pick."""
    keys = num_experts // lanes
    return num_experts % (2 * lanes) == 0 and keys <= MAX_KEYS and routed <= lanes


def select_lanes(num_experts: int, routed: int, many_tokens: bool) -> int | None:
    """Return the lanes of a token, or None if the kernel does not support the shape.

    With few tokens all lanes of a warp share one, if they can: then ``redux`` finds a maximum. With many tokens, or
    with shuffles, the number of instructions counts: sorting takes the fewest per token with 16 keys, or less, per
    lane. But if there are more than 8, and less than two lanes per pick, a lane's sorted keys run out too often.
    """
    found = [lanes for lanes in (2, 4, 8, 16, 32) if supports(num_experts, routed, lanes)]
    if not found:
        return None
    if not many_tokens and found[-1] == 32:
        return 32
    return next(
        (lanes for lanes in found if num_experts // lanes <= (FEW_KEYS if lanes >= 2 * routed else FEW_KEYS // 2)),
        found[-1],
    )


def load_bytes_of(keys: int, alignment: int) -> int:
    """Return the widest load for ``keys`` logits of a lane, or 0; rows begin at multiples of ``alignment`` bytes."""
    return next((width for width in (16, 8, 4) if alignment % width == 0 and 2 * keys % width == 0), 0)


def check_config(config: PackedConfig) -> None:
    """Raise ValueError for a configuration that the kernel does not support."""
    if config.dtype not in INFINITY_BITS:
        raise ValueError(f"dtype is {config.dtype}; it must be one of {', '.join(INFINITY_BITS)}")
    if config.lanes not in (2, 4, 8, 16, 32) or not supports(config.num_experts, config.routed, config.lanes):
        raise ValueError(
            f"lanes is {config.lanes}; {config.num_experts} experts must be an even number for each of 2, 4, 8, 16 or "
            f"32 lanes, at most {MAX_KEYS}, and the {config.routed} routed experts at most the number of lanes"
        )
    if config.load_bytes not in _LOADS or 2 * config.keys % config.load_bytes:
        raise ValueError(f"load_bytes is {config.load_bytes}; it must be 4, 8 or 16 and divide {2 * config.keys}")


@cache
def make_logit_functions(dtype):
    """Make the functions for pairs of 16-bit logits in 32-bit words.

    Returns
    -------
    canonical : function
        ``canonical(word)``: replace -0.0 by 0.0 and every NaN by 0x7FFF.
    as_float : function
        ``as_float(bits)``: the float32 of the logit in the low 16 bits.
    """
    if dtype == "bfloat16":

        @cuda.jit(device=True)
        def canonical(word):
            return add_rn_bf16x2(word, uint32(0))

        @cuda.jit(device=True)
        def as_float(bits):
            return uint_as_float(uint32(bits << uint32(16)))

        return canonical, as_float

    @cuda.jit(device=True)
    def canonical(word):
        return add_rn_f16x2(word, uint32(0))

    return canonical, half_bits_as_float


@cuda.jit(device=True)
def sortable_pair(word):
    """Map two 16-bit floats to two integers that sort the same way, as signed numbers.

    The magnitude bits of a negative number are flipped.
    """
    return uint32(word ^ uint32(sign_halves(word) & uint32(0x7FFF7FFF)))


@cache
def make_replace_nan(dtype):
    """Make ``replace_nan(word)``: replace each NaN of a pair by 0xFFFF, a negative NaN, which sorts last."""
    infinity = INFINITY_BITS[dtype]

    @cuda.jit(device=True)
    def replace_nan(word):
        if (word & uint32(0x7FFF)) > uint32(infinity):
            word = uint32(word | uint32(0xFFFF))
        if (uint32(word >> uint32(16)) & uint32(0x7FFF)) > uint32(infinity):
            word = uint32(word | uint32(0xFFFF0000))
        return word

    return replace_nan


@cache
def make_row_functions(config):
    """Make the functions with which a lane takes its part of a row: every ``lanes``-th vector of ``load_bytes``.

    Returns
    -------
    fetch : function
        ``fetch(x, start, is_valid, raw)``: load the lane's words; ``start`` is the index of its first logit.
    make_keys : function
        ``make_keys(raw, first_expert, keys, first_word, count)``: make the keys of ``count`` words.
    """
    lanes, load_words = config.lanes, config.load_bytes // 4
    num_loads, load_experts = config.keys // 2 // load_words, 2 * load_words
    load = _LOADS[config.load_bytes]

    @cuda.jit(device=True)
    def fetch(x, start, is_valid, raw):
        for i in range(num_loads):
            if is_valid:
                loaded = load(x, start + i * lanes * load_experts)
                if load_words == 1:
                    raw[i] = loaded
                else:
                    for w in range(load_words):
                        raw[i * load_words + w] = loaded[w]
            else:
                for w in range(load_words):
                    raw[i * load_words + w] = uint32(0)

    @cuda.jit(device=True)
    def make_keys(raw, first_expert, keys, first_word, count):
        for i in range(count):
            w = first_word + i
            pair = sortable_pair(raw[w])
            expert = w // load_words * lanes * load_experts + w % load_words * 2
            lower_half = uint32(0xFFFF - expert - first_expert)
            keys[2 * i] = int32(uint32(pair << uint32(16)) | lower_half)
            keys[2 * i + 1] = int32(uint32(pair & uint32(0xFFFF0000)) | uint32(lower_half - uint32(1)))

    return fetch, make_keys


@cuda.jit(device=True)
def key_expert(key):
    """Return the expert of a key."""
    return int32(0xFFFF - (key & 0xFFFF))


@cache
def make_key_logit(dtype):
    """Make ``key_logit(key)``: the logit of a key as float32."""
    _, as_float = make_logit_functions(dtype)

    @cuda.jit(device=True)
    def key_logit(key):
        sortable = int32(key >> 16)
        return as_float(uint32(uint32(sortable ^ ((sortable >> 31) & 0x7FFF)) & uint32(0xFFFF)))

    return key_logit


@cache
def make_maximum(lanes):
    """Make ``maximum(key)``: the largest key of a token's lanes."""
    steps = lanes.bit_length() - 1

    @cuda.jit(device=True)
    def maximum(key):
        if lanes == 32:
            return redux_sync_max_s32(uint32(FULL_MASK), key)
        for s in range(steps):
            key = max(key, cuda.shfl_xor_sync(FULL_MASK, key, 1 << s))
        return key

    return maximum


@cache
def make_picks(config):
    """Make ``picked = picks(keys, column)``: the k-th largest key of a token for the lane in column k.

    ``keys`` are sorted in each lane, and distinct. The lane that holds the maximum of the token's lanes advances to its
    next key; behind its last one is ``EXCLUDED``.
    """
    routed, count = config.routed, config.sorted
    maximum = make_maximum(config.lanes)

    def make_pick(k):
        later = routed - 1 - k  # picks, which need no more keys
        shifted, may_run_out = min(count - 1, later), count <= later

        @cuda.jit(device=True)
        def pick(keys, column, picked):
            best = maximum(keys[0])
            wins = keys[0] == best
            for d in range(shifted):
                keys[d] = keys[d + 1] if wins else keys[d]
            if may_run_out:
                keys[count - 1] = EXCLUDED if wins else keys[count - 1]
            return best if column == k else picked

        return pick

    def chain(first, second):
        @cuda.jit(device=True)
        def both(keys, column, picked):
            return second(keys, column, first(keys, column, picked))

        return both

    picks = make_pick(0)
    for k in range(1, routed):
        picks = chain(picks, make_pick(k))
    return picks


@cache
def make_unsorted_picks(config):
    """Make ``picked = unsorted_picks(keys, column)``: as `make_picks`, from keys in any order, in a short loop."""
    routed, num_keys = config.routed, config.keys
    maximum = make_maximum(config.lanes)

    @cuda.jit(device=True)
    def unsorted_picks(keys, column):
        picked, last = int32(0), int32(0x7FFFFFFF)
        for k in range(routed):
            best = EXCLUDED
            for j in range(num_keys):
                best = max(best, keys[j] if keys[j] < last else EXCLUDED)
            last = maximum(best)
            picked = last if column == k else picked
        return picked

    return unsorted_picks


@cache
def make_packed_kernel(config: PackedConfig, limit_on_device: bool = False, features: Features = NO_FEATURES):
    """Make the kernel. It takes the arguments of the other kernels; ``bias`` is not read.

    Raises
    ------
    ValueError
        If the kernel does not support the configuration; see :func:`check_config`.
    """
    check_config(config)
    num_experts, topk, lanes, num_shared, renormalize, scoring, dtype, load_bytes = config
    routed, num_keys = config.routed, config.keys
    tokens_per_warp, steps = 32 // lanes, lanes.bit_length() - 1
    words, load_experts = num_keys // 2, load_bytes // 2
    sum_steps = steps if num_shared else (routed - 1).bit_length()  # shared experts need the sum in all columns
    counts_load = features.counts_load
    is_softmax = scoring == "softmax"
    needs_sum = is_softmax and (not renormalize or features.adds_epsilon)  # else only ratios of weights count
    may_run_out = config.sorted < min(num_keys, routed)
    first_nan = int32((INFINITY_BITS[dtype] + 1) << 16)
    canonical, as_float = make_logit_functions(dtype)
    key_logit, replace_nan = make_key_logit(dtype), make_replace_nan(dtype)
    fetch, make_keys = make_row_functions(config)
    picks, unsorted_picks = make_picks(config), make_unsorted_picks(config)
    sort_descending = make_sort_descending(num_keys, config.sorted)
    score = sqrtsoftplus if scoring == "sqrtsoftplus" else sigmoid
    num_unpadded_tokens = make_num_unpadded_tokens(limit_on_device)
    inverse_of_sum, finish_column, store_column = make_column_functions(features)

    @cuda.jit(device=True)
    def is_exhausted(keys, picked):
        """Return whether ``picked`` may be wrong: a NaN was picked, or a lane's sorted keys have run out."""
        return cuda.any_sync(FULL_MASK, picked >= first_nan or (may_run_out and keys[0] == EXCLUDED))

    @cuda.jit(device=True)
    def store(weights, ids, picked, raw, lane, column, token, num_tokens, num_unpadded, scales, optional):
        shared_scale, output_scale = scales
        expert, logit, row_max = key_expert(picked), key_logit(picked), float32(0)
        if is_softmax:
            logit = FLOAT32_MAX if logit > FLOAT32_MAX else logit
            row_max = cuda.shfl_sync(FULL_MASK, logit, int32(lane - column))
            row_max = row_max if row_max >= -FLOAT32_MAX else -FLOAT32_MAX  # all logits are -inf or NaN
            weight = ex2_approx((logit - row_max) * LOG2_E)
        else:
            weight = score(logit)
        weight = weight if weight == weight and column < routed else float32(0)
        total = weight
        for s in range(sum_steps):
            total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << s)
        scale = output_scale
        if needs_sum:
            row_sum = float32(0)
            for w in range(words):
                for half in range(2):
                    value = as_float(uint32(uint32(raw[w] >> uint32(16 * half)) & uint32(0xFFFF)))
                    value = FLOAT32_MAX if value > FLOAT32_MAX else value
                    exponential = ex2_approx((value - row_max) * LOG2_E)
                    row_sum += exponential if exponential == exponential else float32(0)
            for s in range(steps):
                row_sum += cuda.shfl_xor_sync(FULL_MASK, row_sum, 1 << s)
            inverse = rcp_approx(row_sum if row_sum > float32(0) else float32(1))
            if renormalize:
                weight, total = weight * inverse, total * inverse
            else:
                scale *= inverse
        if renormalize:
            scale *= inverse_of_sum(total, optional)
        if token < num_tokens:
            for first in range(0, topk, lanes):  # only shared experts need columns beyond the first ones
                output_column = int32(first + column)
                if output_column < topk:
                    if num_shared > 0 and output_column >= routed:
                        weight, expert = total * shared_scale, int32(num_experts + output_column - routed)
                    final_weight, final_id = finish_column(
                        weight * scale, expert, token, token >= num_unpadded, optional
                    )
                    store_column(weights, ids, int64(token) * topk + output_column, final_weight, final_id, optional)

    @cuda.jit
    def biased_grouped_topk_packed(
        x, bias, weights, ids, num_tokens, row_stride, limit, shared_scale, output_scale, *optional
    ):
        lane = int32(cuda.threadIdx.x & 31)
        column, token_in_warp = int32(lane & (lanes - 1)), int32(lane >> steps)
        first_expert = int32(column * load_experts)
        raw = cuda.local.array(words, uint32)
        keys = cuda.local.array(num_keys, int32)
        first_token = int32((cuda.blockIdx.x * WARPS_PER_BLOCK + cuda.threadIdx.x // 32) * tokens_per_warp)
        token = int32(first_token + token_in_warp)
        # Each branch waits, so that the arguments are loaded before: that takes as long as a few instructions.
        if limit_on_device:
            griddepcontrol_wait()
        num_unpadded = num_unpadded_tokens(num_tokens, limit)
        if first_token < num_unpadded:
            if not limit_on_device:
                griddepcontrol_wait()
            griddepcontrol_launch_dependents()  # the next grid starts meanwhile, and waits
            fetch(x, int64(token) * row_stride + first_expert, token < num_unpadded, raw)
            for w in range(words):
                raw[w] = canonical(raw[w])
            make_keys(raw, first_expert, keys, 0, words)
            sort_descending(keys)
            picked = picks(keys, column, int32(0))
            # A warp stores what it has picked before it knows that it is right, and otherwise picks and stores again.
            about = lane, column, token, num_tokens, num_unpadded, (shared_scale, output_scale), optional
            is_wrong = is_exhausted(keys, picked)
            if not counts_load or not is_wrong:
                store(weights, ids, picked, raw, *about)
            if is_wrong:
                cuda.syncwarp()  # redux.sync needs a converged warp, and the stores above may diverge
                for w in range(words):
                    raw[w] = replace_nan(raw[w])
                make_keys(raw, first_expert, keys, 0, words)
                store(weights, ids, unsorted_picks(keys, column), raw, *about)
        elif first_token < num_tokens:  # padding rows
            if not limit_on_device:
                griddepcontrol_wait()
            for first in range(0, topk, lanes):
                if token < num_tokens and first + column < topk:
                    index = int64(token) * topk + first + column
                    store_column(weights, ids, index, float32(0), int32(-1), optional)

    return biased_grouped_topk_packed
