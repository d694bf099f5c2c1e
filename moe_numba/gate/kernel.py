"""The gate's kernel: one warp routes one token, in registers from the load to the store."""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.gate.device_functions import (
    EXCLUDED,
    FULL,
    group_worth,
    make_load,
    make_scoring,
    make_sort_descending,
    make_tokens_to_route,
    order_key,
)
from moe_numba.ptx.arithmetic import rcp_approx
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import lanemask_lt, redux_sync_max_s32

WARPS = 4  # of a block, each with a token of its own


class Constants(NamedTuple):
    """What C++ would take as template arguments; here a kernel's closure holds it."""

    num_experts: int
    num_expert_group: int
    topk_group: int
    topk: int
    num_fused_shared_experts: int = 0
    renormalize: bool = True
    scoring: str = "sigmoid"
    dtype: str = "float32"
    bias_dtype: str | None = "float32"  # None: no bias
    word_bytes: int = 16  # width of the loads, which the row's alignment decides
    bias_word_bytes: int = 16


def layout(num_experts, num_expert_group):
    """Lanes that share a group, and experts that a lane holds; a lane holds neighbours, of one group."""
    lanes = 32 // (1 << (num_expert_group - 1).bit_length())
    return lanes, -(-num_experts // num_expert_group // lanes) if lanes else 0


@cache
def make_router(constants):
    """The parts of a warp that routes a token.

    Returns
    -------
    my_part : function
        ``lane, group, rank, first, valid = my_part()``: the lane's group and rank in it, its first expert, how many.
    fetch, unpack : functions
        As :func:`moe_numba.gate.device_functions.make_load` gives them.
    read_bias : function
        ``read_bias(bias, first, valid, offset)``.
    route : function
        ``weight, expert = route(x, start, row, offset, lane, group, rank, valid, shared_scale, output_scale)``, for the
        token whose logits start at ``start``: lane k gets the k-th choice. The warp must be whole.
    values, raw_words : int
        Length of ``row`` and ``offset``, and of what ``fetch`` fills.
    """
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
        word_bytes,
        bias_word_bytes,
    ) = constants
    routed = topk - num_fused_shared_experts
    group_size = num_experts // num_expert_group
    lanes, values = layout(num_experts, num_expert_group)
    exact = values * lanes == group_size and lanes * num_expert_group == 32  # no lane holds less than the others
    depth = min(values, routed)  # a lane can win no more often
    rivals = -(-num_expert_group // lanes)
    group_steps, sum_steps = lanes.bit_length() - 1, (routed - 1).bit_length()
    routed_lanes = uint32((1 << routed) - 2)
    has_bias = bias_dtype is not None
    fetch, unpack, load_one, raw_words = make_load(dtype, word_bytes, values)
    fetch_bias, unpack_bias, _, raw_bias_words = make_load(bias_dtype or "float32", bias_word_bytes, values)
    score_row, score_one = make_scoring(scoring, values)
    sort_descending = make_sort_descending(values)

    @cuda.jit(device=True)
    def my_part():
        lane = int32(cuda.threadIdx.x & 31)
        group = int32(uint32(lane) // uint32(lanes))
        rank = int32(uint32(lane) % uint32(lanes))
        valid = int32(values)
        if not exact:
            valid = int32(min(values, group_size - rank * values)) if group < num_expert_group else int32(0)
        return lane, group, rank, int32(group * group_size + rank * values), valid

    @cuda.jit(device=True)
    def read_bias(bias, first, valid, offset):
        if has_bias:
            raw = cuda.local.array(raw_bias_words, uint32)
            fetch_bias(bias, int64(first), valid, raw)
            unpack_bias(raw, valid, offset)

    @cuda.jit(device=True)
    def beaten_groups(top, lane, group, rank):
        """How many groups beat this lane's: each of a group's lanes meets a few rivals, a ballot adds them up."""
        best, second = top[0], top[1] if values > 1 else EXCLUDED
        for s in range(group_steps):
            other_best = cuda.shfl_xor_sync(FULL, best, 1 << s)
            other_second = cuda.shfl_xor_sync(FULL, second, 1 << s)
            second = max(min(best, other_best), max(second, other_second))
            best = max(best, other_best)
        mine = group_worth(best, second) if group_size > 1 else best
        mates = uint32(((1 << lanes) - 1) << (group * lanes))
        beaten = int32(0)
        for i in range(rivals):
            rival = int32(rank * rivals + i)
            theirs = cuda.shfl_sync(FULL, mine, rival * lanes)
            beats = rival < num_expert_group and (theirs > mine or (theirs == mine and rival < group))
            beaten = int32(beaten + int32(cuda.popc(uint32(uint32(cuda.ballot_sync(FULL, beats)) & mates))))
        return beaten

    @cuda.jit(device=True)
    def route(x, start, row, offset, lane, group, rank, valid, shared_scale, output_scale):
        below = lanemask_lt()
        key = cuda.local.array(values, int32)
        top = cuda.local.array(values, int32)
        largest, inverse = score_row(row)
        for j in range(values):
            key[j] = order_key(row[j] + offset[j] if has_bias else row[j])
            if not exact and j >= valid:
                key[j] = EXCLUDED
            top[j] = key[j]
        sort_descending(top)
        if num_expert_group > 1 and beaten_groups(top, lane, group, rank) >= topk_group:
            top[0] = EXCLUDED

        # Each pick: the best key of any lane, the lowest lane that has it, and that lane moves up its next key.
        picked, holders = int32(0), uint32(0)
        for k in range(routed):
            best = redux_sync_max_s32(uint32(FULL), top[0])
            holds = top[0] == best
            ballot = uint32(cuda.ballot_sync(FULL, holds))
            if lane == k:
                picked, holders = best, ballot
            wins = holds and uint32(ballot & below) == uint32(0)
            for d in range(depth - 1):
                top[d] = top[d + 1] if wins else top[d]
            top[depth - 1] = EXCLUDED if wins else top[depth - 1]

        # Lane k looks for the k-th pick among the keys of the lane that held it; twins are taken in their order.
        holder = int32(cuda.ffs(holders) - 1)
        slots = uint32(0)
        for j in range(values):
            theirs = cuda.shfl_sync(FULL, key[j], holder)
            slots = uint32(slots | uint32(1 << j)) if theirs == picked else slots
        previous_picked = cuda.shfl_up_sync(FULL, picked, 1)
        previous_holder = cuda.shfl_up_sync(FULL, holder, 1)
        twins = cuda.ballot_sync(FULL, picked == previous_picked and holder == previous_holder)
        twins = uint32(uint32(twins) & routed_lanes)
        if twins != 0:
            k = lane
            while k > 0 and (twins >> uint32(k)) & uint32(1):
                slots = uint32(slots & uint32(slots - uint32(1)))
                k -= 1
        expert = int32(holder * values + cuda.ffs(slots) - 1)
        if not exact:
            expert = int32(holder // lanes * group_size + holder % lanes * values + cuda.ffs(slots) - 1)

        weight = float32(0)
        if lane < routed:
            weight = score_one(load_one(x, start + expert), largest, inverse)
            weight = weight if weight == weight else float32(0)
        total = weight
        for s in range(sum_steps):
            total += cuda.shfl_xor_sync(FULL, total, 1 << s)
        total = cuda.shfl_sync(FULL, total, 0)
        if lane >= routed:
            weight = total * shared_scale
            expert = int32(num_experts + lane - routed)
        if renormalize:
            weight *= rcp_approx(total if total > float32(0) else float32(1))
        return weight * output_scale, expert

    return my_part, fetch, unpack, read_bias, route, values, raw_words


@cache
def make_kernel(constants, limit_on_device=False):
    """The kernel for these constants; lane ``l`` holds ``values`` neighbouring experts, ``lanes`` lanes a group."""
    topk = constants.topk
    my_part, fetch, unpack, read_bias, route, values, raw_words = make_router(constants)
    tokens_to_route = make_tokens_to_route(limit_on_device)

    @cuda.jit
    def biased_grouped_topk(x, bias, weights, ids, num_tokens, row_stride, limit, shared_scale, output_scale):
        lane, group, rank, first, valid = my_part()
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32)
        stride = int32(cuda.gridDim.x * WARPS)
        offset = cuda.local.array(values, float32)
        raw = cuda.local.array(raw_words, uint32)
        row = cuda.local.array(values, float32)
        griddepcontrol_wait()
        routable = tokens_to_route(num_tokens, limit)
        if token < routable:
            fetch(x, int64(token) * row_stride + first, valid, raw)
        read_bias(bias, first, valid, offset)

        while token < routable:
            cuda.syncwarp()  # the warp may have parted at the last store, and redux.sync wants it whole
            unpack(raw, valid, row)
            following = int32(token + stride)
            if following < routable:  # the next row is on its way while this one is routed
                fetch(x, int64(following) * row_stride + first, valid, raw)
            weight, expert = route(
                x, int64(token) * row_stride, row, offset, lane, group, rank, valid, shared_scale, output_scale
            )
            if lane < topk:
                weights[int64(token) * topk + lane] = weight
                ids[int64(token) * topk + lane] = expert
            token = following

        while token < num_tokens:  # rows of padding
            if lane < topk:
                weights[int64(token) * topk + lane] = float32(0)
                ids[int64(token) * topk + lane] = int32(-1)
            token = int32(token + stride)
        griddepcontrol_launch_dependents()

    return biased_grouped_topk
