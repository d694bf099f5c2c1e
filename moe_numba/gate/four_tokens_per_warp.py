"""Gate kernel for large batches: one warp routes four tokens, so that no lane idles on experts of dropped groups.

Choosing the groups reads all experts. Choosing the experts only reads those of the kept groups, often half of them. So
the warp first scores its four tokens one after another, with eight experts per lane for 256 experts. It then
redistributes the remaining candidates through shared memory: eight lanes per token, up to sixteen candidates per lane.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.gate.device_functions import (
    EXCLUDED,
    NO_FEATURES,
    group_score_key,
    make_column_functions,
    make_load,
    make_num_unpadded_tokens,
    make_scoring,
    make_sort_descending,
    order_key,
)
from moe_numba.gate.one_token_per_warp import check_config, lane_layout
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4, st_shared_s32x4
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt

WARPS_PER_BLOCK = 4
TOKENS_PER_WARP = 4
LANES_PER_TOKEN = 32 // TOKENS_PER_WARP  # while experts are chosen
_LAUNCH_BOUNDS = 32 * WARPS_PER_BLOCK, 6  # at most 80 registers, so that 24 warps per SM hide latency
_LAUNCH_BOUNDS_BEFORE_HOPPER = 32 * WARPS_PER_BLOCK, 3  # at most 168: ptxas uses more for older GPUs
_MAX_STATIC_SHARED_BYTES = 48 * 1024


def launch_bounds(capability):
    """Return threads per block and least blocks per SM for a compute capability."""
    return _LAUNCH_BOUNDS if capability >= (9, 0) else _LAUNCH_BOUNDS_BEFORE_HOPPER


def supports(num_experts, num_expert_group, topk_group, topk, num_fused_shared_experts):
    """Return whether this kernel supports a shape.

    It needs four full lanes per group, candidates that eight lanes can share evenly, and keys that fit in static shared
    memory.
    """
    lanes_per_group, experts_per_lane = lane_layout(num_experts, num_expert_group)
    group_size = num_experts // num_expert_group
    candidates_per_lane = topk_group * group_size // LANES_PER_TOKEN
    return (
        topk_group < num_expert_group
        and lanes_per_group == TOKENS_PER_WARP
        and lanes_per_group * num_expert_group == 32
        and experts_per_lane * lanes_per_group == group_size
        and experts_per_lane % 4 == 0
        and candidates_per_lane * LANES_PER_TOKEN == topk_group * group_size
        and candidates_per_lane % 4 == 0
        and candidates_per_lane <= 16
        and group_size % candidates_per_lane == 0
        and topk - num_fused_shared_experts <= LANES_PER_TOKEN
        and 4 * WARPS_PER_BLOCK * TOKENS_PER_WARP * num_expert_group * (_group_pitch(group_size) + 1)
        <= _MAX_STATIC_SHARED_BYTES
    )


def _group_pitch(group_size):
    """Return the keys per group in shared memory; 16 bytes of padding avoid bank conflicts."""
    return group_size + 4


@cache
def make_4tokens_kernel(config, limit_on_device=False, features=NO_FEATURES):
    """Make the kernel that routes four tokens per warp; ``config`` is a `one_token_per_warp.GateConfig`.

    Raises
    ------
    ValueError
        If the kernel does not support the shape; see :func:`supports`.
    """
    check_config(config)
    if not supports(*config[:5]):
        raise ValueError(
            f"{config}: the kernel for four tokens per warp supports 8 groups of which some are dropped, at most 8 "
            "routed experts, and 32, 64, 96 or 128 candidates that divide among 8 lanes without crossing groups"
        )
    (
        num_experts,
        num_expert_group,
        topk_group,
        topk,
        num_fused_shared_experts,
        renormalize,
        scoring,
        dtype,
        bias_dtype,
        load_bytes,
        bias_load_bytes,
    ) = config
    routed = topk - num_fused_shared_experts
    group_size = num_experts // num_expert_group
    lanes_per_group, experts_per_lane = lane_layout(num_experts, num_expert_group)
    candidates_per_lane = topk_group * group_size // LANES_PER_TOKEN
    lanes_per_kept_group = group_size // candidates_per_lane
    max_picks_per_lane = min(candidates_per_lane, routed)
    group_pitch = _group_pitch(group_size)
    token_pitch = num_expert_group * group_pitch
    num_keys = WARPS_PER_BLOCK * TOKENS_PER_WARP * token_pitch
    has_bias = bias_dtype is not None
    fetch, unpack, load_one, raw_words = make_load(dtype, load_bytes, experts_per_lane)
    fetch_bias, unpack_bias, _, raw_bias_words = make_load(bias_dtype or "float32", bias_load_bytes, experts_per_lane)
    score_row, score_one = make_scoring(scoring, experts_per_lane)
    sort_descending = make_sort_descending(candidates_per_lane)
    num_unpadded_tokens = make_num_unpadded_tokens(limit_on_device)
    inverse_of_sum, finish_column, store_column = make_column_functions(features)

    @cuda.jit
    def biased_grouped_topk_4tokens(
        x, bias, weights, ids, num_tokens, row_stride, limit, shared_scale, output_scale, *optional
    ):
        lane = int32(cuda.threadIdx.x & 31)
        warp = int32(cuda.threadIdx.x // 32)
        # Groups are chosen by lane (group, lane_in_group), experts by lane (token_in_warp, column).
        group, lane_in_group = int32(lane >> 2), int32(lane & 3)
        token_in_warp, column = int32(lane >> 3), int32(lane & 7)
        smem_keys = cuda.shared.array(num_keys, int32)
        kept_groups = cuda.shared.array((WARPS_PER_BLOCK, TOKENS_PER_WARP, num_expert_group), int32)
        warp_offset = int32(warp * TOKENS_PER_WARP * token_pitch)
        lane_offset = int32(warp_offset + group * group_pitch + lane_in_group * experts_per_lane)
        token_lanes = uint32(0xFF << (token_in_warp * 8))
        lower_token_lanes = uint32(lanemask_lt() & token_lanes)
        lower_group_lanes = uint32(lanemask_lt() & uint32(0x11111111 << lane_in_group))
        group_bit0, group_bit1, group_bit2 = int32(group & 1), int32((group >> 1) & 1), int32((group >> 2) & 1)

        lane_bias = cuda.local.array(experts_per_lane, float32)
        raw = cuda.local.array((TOKENS_PER_WARP, raw_words), uint32)
        raw_bias = cuda.local.array(raw_bias_words, uint32)
        scores = cuda.local.array(experts_per_lane, float32)
        row_max = cuda.local.array(TOKENS_PER_WARP, float32)
        inverse_sum = cuda.local.array(TOKENS_PER_WARP, float32)
        keys = cuda.local.array(experts_per_lane, int32)
        sorted_keys = cuda.local.array(candidates_per_lane, int32)
        griddepcontrol_wait()
        num_unpadded = num_unpadded_tokens(num_tokens, limit)
        if has_bias:
            fetch_bias(bias, int64(lane * experts_per_lane), int32(experts_per_lane), raw_bias)
            unpack_bias(raw_bias, int32(experts_per_lane), lane_bias)
        token = int32((cuda.blockIdx.x * WARPS_PER_BLOCK + warp) * TOKENS_PER_WARP)

        if token < num_tokens:
            start = int64(token) * row_stride + lane * experts_per_lane
            for t in range(TOKENS_PER_WARP):
                if int32(token + t) < num_unpadded:
                    fetch(x, start + t * row_stride, int32(experts_per_lane), raw[t])

            # Groups: reduce each lane's two best keys to the group's. Lane (group, lane_in_group) keeps those of token
            # `lane_in_group`.
            for t in range(TOKENS_PER_WARP):
                unpack(raw[t], int32(experts_per_lane), scores)
                row_max[t], inverse_sum[t] = score_row(scores)
                for j in range(experts_per_lane):
                    keys[j] = order_key(scores[j] + lane_bias[j] if has_bias else scores[j])
                for j in range(0, experts_per_lane, 4):
                    st_shared_s32x4(
                        smem_keys,
                        int32(lane_offset + (t * token_pitch + j)),
                        keys[j],
                        keys[j + 1],
                        keys[j + 2],
                        keys[j + 3],
                    )
                best, second = max(keys[0], keys[1]), min(keys[0], keys[1])
                for j in range(2, experts_per_lane, 2):
                    larger, smaller = max(keys[j], keys[j + 1]), min(keys[j], keys[j + 1])
                    second = max(max(second, smaller), min(best, larger))
                    best = max(best, larger)
                for s in range(2):
                    other_best = cuda.shfl_xor_sync(FULL_MASK, best, 1 << s)
                    other_second = cuda.shfl_xor_sync(FULL_MASK, second, 1 << s)
                    second = max(max(second, other_second), min(best, other_best))
                    best = max(best, other_best)
                if t == 0 or lane_in_group == t:
                    token_best, token_second = best, second
            group_key = group_score_key(token_best, token_second)

            # The rival is group ^ i. It is better with a higher key, or with an equal key and a lower index: then
            # the highest bit that differs is 0 in the rival.
            num_better = int32(0)
            for i in range(1, num_expert_group):
                rival_key = cuda.shfl_xor_sync(FULL_MASK, group_key, 4 * i)
                tie_break = group_bit2 if i >= 4 else (group_bit1 if i >= 2 else group_bit0)
                if rival_key > int32(group_key - tie_break):
                    num_better = int32(num_better + 1)
            is_kept = num_better < topk_group
            ballot = uint32(cuda.ballot_sync(FULL_MASK, is_kept))
            if is_kept:
                kept_groups[warp, lane_in_group, cuda.popc(uint32(ballot & lower_group_lanes))] = group
            cuda.syncwarp()

            # Experts: distribute the keys of the kept groups over the token's eight lanes, in order.
            candidate_group = kept_groups[warp, token_in_warp, int32(uint32(column) // uint32(lanes_per_kept_group))]
            candidate_first = int32(int32(uint32(column) % uint32(lanes_per_kept_group)) * candidates_per_lane)
            key_offset = int32(
                warp_offset + token_in_warp * token_pitch + candidate_group * group_pitch + candidate_first
            )
            for j in range(0, candidates_per_lane, 4):
                a, b, c, d = ld_shared_s32x4(smem_keys, int32(key_offset + j))
                sorted_keys[j], sorted_keys[j + 1], sorted_keys[j + 2], sorted_keys[j + 3] = a, b, c, d
            sort_descending(sorted_keys)
            picked_key, holder_mask = int32(0), uint32(0)
            for k in range(routed):
                best = sorted_keys[0]
                for s in range(3):
                    best = max(best, cuda.shfl_xor_sync(FULL_MASK, best, 1 << s))
                holds = sorted_keys[0] == best
                ballot = uint32(cuda.ballot_sync(FULL_MASK, holds))
                if column == k:
                    picked_key, holder_mask = best, ballot
                wins = holds and uint32(ballot & lower_token_lanes) == uint32(0)
                for d in range(max_picks_per_lane - 1):
                    sorted_keys[d] = sorted_keys[d + 1] if wins else sorted_keys[d]
                sorted_keys[max_picks_per_lane - 1] = EXCLUDED if wins else sorted_keys[max_picks_per_lane - 1]

            # Column k finds the k-th pick among the keys of the lane that held it. Equal keys of one lane (repeats) are
            # taken in ascending order of expert.
            holder_column = int32((cuda.ffs(uint32(holder_mask & token_lanes)) - 1) & 7)
            holder_group = kept_groups[
                warp, token_in_warp, int32(uint32(holder_column) // uint32(lanes_per_kept_group))
            ]
            holder_first = int32(int32(uint32(holder_column) % uint32(lanes_per_kept_group)) * candidates_per_lane)
            key_offset = int32(warp_offset + token_in_warp * token_pitch + holder_group * group_pitch + holder_first)
            match_mask = uint32(0)
            for j in range(0, candidates_per_lane, 4):
                a, b, c, d = ld_shared_s32x4(smem_keys, int32(key_offset + j))
                match_mask = uint32(match_mask | uint32(1 << j)) if a == picked_key else match_mask
                match_mask = uint32(match_mask | uint32(2 << j)) if b == picked_key else match_mask
                match_mask = uint32(match_mask | uint32(4 << j)) if c == picked_key else match_mask
                match_mask = uint32(match_mask | uint32(8 << j)) if d == picked_key else match_mask
            previous_key = cuda.shfl_up_sync(FULL_MASK, picked_key, 1)
            previous_holder = cuda.shfl_up_sync(FULL_MASK, holder_column, 1)
            is_repeat = (
                picked_key == previous_key and holder_column == previous_holder and column > 0 and column < routed
            )
            repeats = uint32(cuda.ballot_sync(FULL_MASK, is_repeat))
            if repeats != 0:
                k = lane
                while (repeats >> uint32(k)) & uint32(1):
                    match_mask = uint32(match_mask & uint32(match_mask - uint32(1)))
                    k -= 1
            expert = int32(holder_group * group_size + holder_first + cuda.ffs(match_mask) - 1)

            # Weights: eight columns per token at a time. Only shared experts need columns beyond the first eight.
            column_token = int32(token + token_in_warp)
            weight, token_max, token_inverse = float32(0), row_max[0], inverse_sum[0]
            if scoring == "softmax":
                for t in range(1, TOKENS_PER_WARP):
                    if token_in_warp == t:
                        token_max, token_inverse = row_max[t], inverse_sum[t]
            if column < routed and column_token < num_unpadded:
                weight = score_one(load_one(x, int64(column_token) * row_stride + expert), token_max, token_inverse)
                weight = weight if weight == weight else float32(0)
            total = weight
            for s in range(3):
                total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << s)
            scale = output_scale
            if renormalize:
                scale *= inverse_of_sum(total, optional)
            output_column = column
            while output_column < topk and column_token < num_tokens:
                if output_column >= routed:
                    weight, expert = total * shared_scale, int32(num_experts + output_column - routed)
                is_padding, index = column_token >= num_unpadded, int64(column_token) * topk + output_column
                final_weight, final_id = finish_column(weight * scale, expert, column_token, is_padding, optional)
                store_column(weights, ids, index, final_weight, final_id, optional)
                output_column = int32(output_column + LANES_PER_TOKEN)
        griddepcontrol_launch_dependents()

    return biased_grouped_topk_4tokens
