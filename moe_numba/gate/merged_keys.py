"""Gate kernel for 16-bit logits without a correction bias and many tokens: lanes merge sorted keys.

Keys are those of :mod:`moe_numba.gate.packed_keys`. Two to eight lanes share a token, so that a warp routes up to 16. A
lane takes eight keys at a time, sorts them, and merges them with the best eight that it has seen. Then the lanes of a
token merge their best keys by shuffles, after which each of them has all picks. Picks one after another need a maximum
of all lanes and a winner that advances, for each pick; here the lanes of a warp seldom wait for one another.
"""

from functools import cache, reduce

from numba import cuda, float32, int32, int64, uint32

from moe_numba.gate.device_functions import (
    FLOAT32_MAX,
    LOG2_E,
    NO_FEATURES,
    Features,
    chain,
    make_column_functions,
    make_compare_exchange,
    make_num_unpadded_tokens,
    sigmoid,
    sorting_network,
    sqrtsoftplus,
)
from moe_numba.gate.packed_keys import (
    INFINITY_BITS,
    WARPS_PER_BLOCK,
    PackedConfig,
    key_expert,
    make_key_logit,
    make_logit_functions,
    make_replace_nan,
    make_row_functions,
)
from moe_numba.ptx.arithmetic import ex2_approx, rcp_approx
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK

MAX_KEYS = 64  # of a lane
KEPT = 8  # keys of a lane, which are sorted
LAUNCH_BOUNDS = 128, 3  # threads, CTAs per SM: with 64 registers, for 8 CTAs, 65,536 tokens took 11.1 us, not 10.0
MIN_PICKS = 5  # with fewer ones, picks one after another are faster
LANES = (2, 4, 8)


def supports(num_experts: int, routed: int, lanes: int) -> bool:
    """Return whether ``lanes`` lanes can route a token, with whole chunks of keys each."""
    fits = MIN_PICKS <= routed <= KEPT and num_experts <= lanes * MAX_KEYS
    return lanes in LANES and fits and num_experts % (lanes * KEPT) == 0


def select_lanes(num_experts: int, routed: int) -> int | None:
    """Return the lanes of a token, as few as can hold its keys, or None if the kernel does not support the shape."""
    return next((lanes for lanes in LANES if supports(num_experts, routed, lanes)), None)


_DISTANCES = [KEPT >> s for s in range(1, KEPT.bit_length())]
_sort_bitonic = make_compare_exchange([(i, i + d) for d in _DISTANCES for i in range(KEPT) if not i & d])
_sort_keys = make_compare_exchange(sorting_network(KEPT))


@cuda.jit(device=True)
def merge(best, other):
    """Leave the largest keys of both, sorted, in ``best``. Both are sorted, descending.

    The larger ones of first and last, second and last but one, and so on, are the largest, in a bitonic order.
    """
    for i in range(KEPT):
        best[i] = max(best[i], other[KEPT - 1 - i])
    _sort_bitonic(best)


@cache
def make_best_keys(config):
    """Make the functions that leave the best keys, sorted, in ``best``.

    Returns
    -------
    best_of_lane : function
        ``best_of_lane(raw, first_expert, best)``: of those of a lane's logits.
    best_of_token : function
        ``best_of_token(best)``: of those in ``best`` of a token's lanes. The whole warp must call it.
    """
    steps = config.lanes.bit_length() - 1
    _, make_keys = make_row_functions(config)

    def make_take(first_word):
        is_first = first_word == 0

        @cuda.jit(device=True)
        def take(raw, first_expert, best):
            keys = cuda.local.array(KEPT, int32)
            make_keys(raw, first_expert, keys, first_word, KEPT // 2)
            _sort_keys(keys)
            if is_first:
                for i in range(KEPT):
                    best[i] = keys[i]
            else:
                merge(best, keys)

        return take

    def make_exchange(distance):
        @cuda.jit(device=True)
        def exchange(best):
            keys = cuda.local.array(KEPT, int32)
            for i in range(KEPT):
                keys[i] = cuda.shfl_xor_sync(FULL_MASK, best[i], distance)
            merge(best, keys)

        return exchange

    takes = [make_take(first_word) for first_word in range(0, config.keys // 2, KEPT // 2)]
    return reduce(chain, takes), reduce(chain, [make_exchange(1 << s) for s in range(steps)])


@cache
def make_merged_kernel(config: PackedConfig, limit_on_device: bool = False, features: Features = NO_FEATURES):
    """Make the kernel. It takes the arguments of the other kernels; ``bias`` is not read."""
    num_experts, topk, lanes, num_shared, renormalize, scoring, dtype, load_bytes = config
    routed, tokens_per_warp, steps, words = config.routed, 32 // lanes, lanes.bit_length() - 1, config.keys // 2
    columns = KEPT // lanes  # picks of which a lane computes the weights
    load_experts = load_bytes // 2
    is_softmax = scoring == "softmax"
    needs_sum = is_softmax and (not renormalize or features.adds_epsilon)  # else only ratios of weights count
    first_nan = int32((INFINITY_BITS[dtype] + 1) << 16)
    canonical, as_float = make_logit_functions(dtype)
    key_logit, replace_nan = make_key_logit(dtype), make_replace_nan(dtype)
    fetch, _ = make_row_functions(config)
    best_of_lane, best_of_token = make_best_keys(config)
    score = sqrtsoftplus if scoring == "sqrtsoftplus" else sigmoid
    num_unpadded_tokens = make_num_unpadded_tokens(limit_on_device)
    inverse_of_sum, finish_column, store_column = make_column_functions(features)

    @cuda.jit
    def biased_grouped_topk_merged(
        x, bias, weights, ids, num_tokens, row_stride, limit, shared_scale, output_scale, *optional
    ):
        lane = int32(cuda.threadIdx.x & 31)
        column = int32(lane & (lanes - 1))
        first_expert = int32(column * load_experts)
        raw, best = cuda.local.array(words, uint32), cuda.local.array(KEPT, int32)
        weight, expert = cuda.local.array(columns, float32), cuda.local.array(columns, int32)
        griddepcontrol_wait()
        num_unpadded = num_unpadded_tokens(num_tokens, limit)
        first_token = int32((cuda.blockIdx.x * WARPS_PER_BLOCK + cuda.threadIdx.x // 32) * tokens_per_warp)

        if first_token < num_tokens:
            token, has_nan = int32(first_token + (lane >> steps)), False
            is_padding = token >= num_unpadded
            while True:  # a second time if the best logit of a lane is NaN
                fetch(x, int64(token) * row_stride + first_expert, not is_padding, raw)
                griddepcontrol_launch_dependents()  # once the loads are issued: the next grid's blocks start meanwhile
                for w in range(words):
                    raw[w] = canonical(raw[w])
                if has_nan:
                    for w in range(words):
                        raw[w] = replace_nan(raw[w])
                best_of_lane(raw, first_expert, best)
                has_nan = cuda.any_sync(FULL_MASK, best[0] >= first_nan)
                if not has_nan:
                    break
            best_of_token(best)

            row_max = key_logit(best[0])
            if is_softmax:
                row_max = FLOAT32_MAX if row_max > FLOAT32_MAX else row_max
                row_max = row_max if row_max >= -FLOAT32_MAX else -FLOAT32_MAX  # all logits are -inf or NaN
            total = float32(0)
            for j in range(columns):
                key = best[j]
                for other in range(1, KEPT // columns):
                    key = best[other * columns + j] if column == other else key
                expert[j] = key_expert(key)
                logit = key_logit(key)
                if is_softmax:
                    logit = FLOAT32_MAX if logit > FLOAT32_MAX else logit
                    weight[j] = ex2_approx((logit - row_max) * LOG2_E)
                else:
                    weight[j] = score(logit)
                weight[j] = weight[j] if weight[j] == weight[j] and column * columns + j < routed else float32(0)
                total += weight[j]
            for s in range(steps):
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
                    for j in range(columns):
                        weight[j] *= inverse
                    total *= inverse
                else:
                    scale *= inverse
            if renormalize:
                scale *= inverse_of_sum(total, optional)

            if token < num_tokens:
                for j in range(columns):
                    pick = int32(column * columns + j)
                    if pick < routed:
                        w, e = finish_column(weight[j] * scale, expert[j], token, is_padding, optional)
                        store_column(weights, ids, int64(token) * topk + pick, w, e, optional)
                shared = column
                while shared < num_shared:
                    w, e = finish_column(
                        total * shared_scale * scale, int32(num_experts + shared), token, is_padding, optional
                    )
                    store_column(weights, ids, int64(token) * topk + routed + shared, w, e, optional)
                    shared = int32(shared + lanes)

    return biased_grouped_topk_merged
