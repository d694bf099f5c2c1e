"""Gate kernel that takes shapes at run time and supports any grouping; it keeps the scores in shared memory."""

from functools import cache

from numba import cuda, float32, int32, int64

from moe_numba.gate.device_functions import (
    EXCLUDED,
    ITEM_BYTES,
    NO_FEATURES,
    group_score_key,
    make_column_functions,
    make_load,
    make_num_unpadded_tokens,
    make_scoring,
    order_key,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK, redux_sync_max_s32
from moe_numba.runtime.validate import check_choice

MAX_EXPERTS_PER_LANE = 32  # up to 1024 experts


def shared_bytes(num_experts, num_expert_group):
    """Return the bytes of dynamic shared memory per one-warp block: one key per expert and one per group."""
    return 4 * (num_experts + num_expert_group)


@cache
def make_generic_kernel(
    scoring="sigmoid", dtype="float32", bias_dtype="float32", limit_on_device=False, features=NO_FEATURES
):
    """Make the kernel for all shapes; only the scoring and the dtypes are compile-time constants."""
    has_bias = bias_dtype is not None
    check_choice("dtype", dtype, ITEM_BYTES)
    check_choice("bias_dtype", bias_dtype or dtype, ITEM_BYTES)
    load_one = make_load(dtype, ITEM_BYTES[dtype], MAX_EXPERTS_PER_LANE)[2]
    load_one_bias = make_load(bias_dtype or dtype, ITEM_BYTES[bias_dtype or dtype], MAX_EXPERTS_PER_LANE)[2]
    score_row, score_one = make_scoring(scoring, MAX_EXPERTS_PER_LANE)
    num_unpadded_tokens = make_num_unpadded_tokens(limit_on_device)
    inverse_of_sum, finish_column, store_column = make_column_functions(features)

    @cuda.jit
    def biased_grouped_topk_generic(
        x,
        bias,
        weights,
        ids,
        num_tokens,
        row_stride,
        limit,
        shared_scale,
        output_scale,
        num_experts,
        num_expert_group,
        topk_group,
        topk,
        routed,
        renormalize,
        *optional,
    ):
        lane = int32(cuda.threadIdx.x)
        keys = cuda.shared.array(0, int32)  # num_experts keys of experts, then num_expert_group keys of groups
        scores = cuda.local.array(MAX_EXPERTS_PER_LANE, float32)
        group_size = int32(num_experts // num_expert_group)
        griddepcontrol_wait()
        num_unpadded = num_unpadded_tokens(num_tokens, limit)
        token = int32(cuda.blockIdx.x)

        while token < num_unpadded:
            cuda.syncwarp()
            start = int64(token) * row_stride
            # `+ lane + j * 32`, not `+ expert`: one address per array in registers, with constant offsets
            for j in range(MAX_EXPERTS_PER_LANE):
                expert = int32(j * 32 + lane)
                scores[j] = load_one(x, start + lane + j * 32) if expert < num_experts else float32(-float("inf"))
            ranks_logits = not has_bias and num_expert_group == 1
            if ranks_logits:
                for j in range(MAX_EXPERTS_PER_LANE):
                    expert = int32(j * 32 + lane)
                    if expert < num_experts:
                        keys[expert] = order_key(scores[j] + float32(0))  # -0.0 becomes 0.0
            row_max, inverse_sum = score_row(scores)
            if not ranks_logits:
                for j in range(MAX_EXPERTS_PER_LANE):
                    expert = int32(j * 32 + lane)
                    if expert < num_experts:
                        score = scores[j] + load_one_bias(bias, int64(lane) + j * 32) if has_bias else scores[j]
                        keys[expert] = order_key(score)
            cuda.syncwarp()

            if num_expert_group > 1:
                group = lane
                while group < num_expert_group:
                    best, second = EXCLUDED, EXCLUDED
                    for i in range(group_size):
                        key = keys[group * group_size + i]
                        second = max(second, min(best, key))
                        best = max(best, key)
                    keys[num_experts + group] = group_score_key(best, second) if group_size > 1 else best
                    group = int32(group + 32)
                cuda.syncwarp()
                group = lane
                while group < num_expert_group:
                    group_key = keys[num_experts + group]
                    num_better = int32(0)
                    for rival_group in range(num_expert_group):
                        rival_key = keys[num_experts + rival_group]
                        num_better += int32(rival_key > group_key or (rival_key == group_key and rival_group < group))
                    if num_better >= topk_group:
                        for i in range(group_size):
                            keys[group * group_size + i] = EXCLUDED
                    group = int32(group + 32)
                cuda.syncwarp()

            weight, chosen_expert = float32(0), int32(0)
            for k in range(routed):
                best, best_expert = EXCLUDED, int32(num_experts)
                expert = lane
                while expert < num_experts:  # `>` keeps the lowest expert of equal keys
                    if keys[expert] > best:
                        best, best_expert = keys[expert], expert
                    expert = int32(expert + 32)
                warp_best = redux_sync_max_s32(FULL_MASK, best)
                winner = int32(
                    -redux_sync_max_s32(FULL_MASK, int32(-best_expert) if best == warp_best else int32(-num_experts))
                )
                if best_expert == winner:
                    keys[winner] = EXCLUDED
                if lane == k:
                    chosen_expert = winner
                cuda.syncwarp()

            if lane < routed:
                weight = score_one(load_one(x, start + chosen_expert), row_max, inverse_sum)
                weight = weight if weight == weight else float32(0)
            total = weight
            for s in range(5):
                total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << s)
            if lane >= routed:
                weight = total * shared_scale
                chosen_expert = int32(num_experts + lane - routed)
            if renormalize:
                weight *= inverse_of_sum(total, optional)
            if lane < topk:
                weight, chosen_expert = finish_column(weight * output_scale, chosen_expert, token, False, optional)
                store_column(weights, ids, int64(token) * topk + lane, weight, chosen_expert, optional)
            token = int32(token + cuda.gridDim.x)

        while token < num_tokens:  # padding rows
            if lane < topk:
                store_column(weights, ids, int64(token) * topk + lane, float32(0), int32(-1), optional)
            token = int32(token + cuda.gridDim.x)
        griddepcontrol_launch_dependents()

    return biased_grouped_topk_generic
