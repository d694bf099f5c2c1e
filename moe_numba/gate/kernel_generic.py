"""The dynamic twin of the gate's kernel: shapes come at run time, scores lie in shared memory, any grouping goes."""

from functools import cache

from numba import cuda, float32, int32, int64

from moe_numba.gate.device_functions import (
    EXCLUDED,
    FULL,
    ITEM_BYTES,
    group_worth,
    make_load,
    make_scoring,
    make_tokens_to_route,
    order_key,
)
from moe_numba.ptx.arithmetic import rcp_approx
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import redux_sync_max_s32

VALUES = 32  # of a lane, at most: 1024 experts


def shared_bytes(num_experts, num_expert_group):
    """Dynamic shared memory of a block, which is one warp: a key an expert, and a key a group."""
    return 4 * (num_experts + num_expert_group)


@cache
def make_dynamic_kernel(scoring="sigmoid", dtype="float32", bias_dtype="float32", limit_on_device=False):
    """The kernel for all shapes; only what decides which instructions there are is a constant."""
    has_bias = bias_dtype is not None
    load_one = make_load(dtype, ITEM_BYTES[dtype], VALUES)[2]
    load_bias = make_load(bias_dtype or dtype, ITEM_BYTES[bias_dtype or dtype], VALUES)[2]
    score_row, score_one = make_scoring(scoring, VALUES)
    tokens_to_route = make_tokens_to_route(limit_on_device)

    @cuda.jit
    def biased_grouped_topk_dynamic(
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
    ):
        lane = int32(cuda.threadIdx.x)
        keys = cuda.shared.array(0, int32)  # of the experts, then of the groups
        row = cuda.local.array(VALUES, float32)
        group_size = int32(num_experts // num_expert_group)
        griddepcontrol_wait()
        routable = tokens_to_route(num_tokens, limit)
        token = int32(cuda.blockIdx.x)

        while token < routable:
            cuda.syncwarp()
            start = int64(token) * row_stride
            for j in range(VALUES):
                expert = int32(j * 32 + lane)
                row[j] = load_one(x, start + expert) if expert < num_experts else float32(-float("inf"))
            largest, inverse = score_row(row)
            for j in range(VALUES):
                expert = int32(j * 32 + lane)
                if expert < num_experts:
                    keys[expert] = order_key(row[j] + load_bias(bias, int64(expert)) if has_bias else row[j])
            cuda.syncwarp()

            if num_expert_group > 1:
                group = lane
                while group < num_expert_group:
                    best, second = EXCLUDED, EXCLUDED
                    for i in range(group_size):
                        key = keys[group * group_size + i]
                        second = max(second, min(best, key))
                        best = max(best, key)
                    keys[num_experts + group] = group_worth(best, second) if group_size > 1 else best
                    group = int32(group + 32)
                cuda.syncwarp()
                group = lane
                while group < num_expert_group:
                    mine = keys[num_experts + group]
                    beaten = int32(0)
                    for rival in range(num_expert_group):
                        theirs = keys[num_experts + rival]
                        beaten += int32(theirs > mine or (theirs == mine and rival < group))
                    if beaten >= topk_group:
                        for i in range(group_size):
                            keys[group * group_size + i] = EXCLUDED
                    group = int32(group + 32)
                cuda.syncwarp()

            weight, chosen = float32(0), int32(0)
            for k in range(routed):
                best, at = EXCLUDED, int32(num_experts)
                expert = lane
                while expert < num_experts:  # the first of equals, since a lane goes upward
                    if keys[expert] > best:
                        best, at = keys[expert], expert
                    expert = int32(expert + 32)
                winning = redux_sync_max_s32(FULL, best)
                first = int32(-redux_sync_max_s32(FULL, int32(-at) if best == winning else int32(-num_experts)))
                if at == first:
                    keys[first] = EXCLUDED
                if lane == k:
                    chosen = first
                cuda.syncwarp()

            if lane < routed:
                weight = score_one(load_one(x, start + chosen), largest, inverse)
                weight = weight if weight == weight else float32(0)
            total = weight
            for s in range(5):
                total += cuda.shfl_xor_sync(FULL, total, 1 << s)
            if lane >= routed:
                weight = total * shared_scale
                chosen = int32(num_experts + lane - routed)
            if renormalize:
                weight *= rcp_approx(total if total > float32(0) else float32(1))
            if lane < topk:
                weights[int64(token) * topk + lane] = weight * output_scale
                ids[int64(token) * topk + lane] = chosen
            token = int32(token + cuda.gridDim.x)

        while token < num_tokens:  # rows of padding
            if lane < topk:
                weights[int64(token) * topk + lane] = float32(0)
                ids[int64(token) * topk + lane] = int32(-1)
            token = int32(token + cuda.gridDim.x)
        griddepcontrol_launch_dependents()

    return biased_grouped_topk_dynamic
