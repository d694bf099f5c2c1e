"""The gate's kernel for many tokens: a warp routes four at once, so that no lane works for a group that was dropped.

Choosing the groups takes all experts; choosing the experts takes only those of the kept groups, often half. So the warp
first meets its four tokens one after another, eight experts a lane, and then deals the candidates that are left out
anew: eight lanes a token, sixteen candidates a lane.
"""

from functools import cache

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
from moe_numba.gate.kernel import layout
from moe_numba.ptx.arithmetic import rcp_approx
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4, st_shared_s32x4
from moe_numba.ptx.warp import lanemask_lt

WARPS = 4  # of a block
TOKENS = 4  # of a warp
LANES = 32 // TOKENS  # of a token, when its experts are chosen
LAUNCH_BOUNDS = 32 * WARPS, 6  # 80 registers: 24 warps a multiprocessor hide one another's waiting


def serves(num_experts, num_expert_group, topk_group, topk, num_fused_shared_experts):
    """Whether the shapes are this kernel's: full lanes, four a group, and candidates that eight lanes share evenly."""
    lanes, values = layout(num_experts, num_expert_group)
    group_size = num_experts // num_expert_group
    dealt = topk_group * group_size // LANES
    return (
        topk_group < num_expert_group
        and lanes == TOKENS
        and lanes * num_expert_group == 32
        and values * lanes == group_size
        and values % 4 == 0
        and dealt * LANES == topk_group * group_size
        and dealt % 4 == 0
        and dealt <= 16
        and group_size % dealt == 0
        and topk - num_fused_shared_experts <= LANES
    )


@cache
def make_throughput_kernel(constants, limit_on_device=False):
    """The kernel for these constants, a :class:`moe_numba.gate.kernel.Constants`."""
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
    dealt = topk_group * group_size // LANES
    lanes_a_group = group_size // dealt
    depth = min(dealt, routed)
    pitch = group_size + 4  # of a group's keys in shared memory; the 16 bytes keep lanes off one another's banks
    token_pitch = num_expert_group * pitch
    all_keys = WARPS * TOKENS * token_pitch
    has_bias = bias_dtype is not None
    fetch, unpack, load_one, raw_words = make_load(dtype, word_bytes, values)
    fetch_bias, unpack_bias, _, raw_bias_words = make_load(bias_dtype or "float32", bias_word_bytes, values)
    score_row, score_one = make_scoring(scoring, values)
    sort_descending = make_sort_descending(dealt)
    tokens_to_route = make_tokens_to_route(limit_on_device)

    @cuda.jit
    def biased_grouped_topk_throughput(
        x, bias, weights, ids, num_tokens, row_stride, limit, shared_scale, output_scale
    ):
        lane = int32(cuda.threadIdx.x & 31)
        warp = int32(cuda.threadIdx.x // 32)
        group, rank = int32(lane >> 2), int32(lane & 3)  # while groups are chosen; the lane judges token `rank`
        member, column = int32(lane >> 3), int32(lane & 7)  # while experts are chosen: token of the warp, lane of it
        keys = cuda.shared.array(all_keys, int32)
        kept = cuda.shared.array((WARPS, TOKENS, num_expert_group), int32)
        base = int32(warp * TOKENS * token_pitch)
        mine_at = int32(base + group * pitch + rank * values)
        octet = uint32(0xFF << (member * 8))
        below_in_octet = uint32(lanemask_lt() & octet)
        below_of_rank = uint32(lanemask_lt() & uint32(0x11111111 << rank))
        low, middle, high = int32(group & 1), int32((group >> 1) & 1), int32((group >> 2) & 1)

        offset = cuda.local.array(values, float32)
        raw = cuda.local.array((TOKENS, raw_words), uint32)
        raw_bias = cuda.local.array(raw_bias_words, uint32)
        row = cuda.local.array(values, float32)
        largest = cuda.local.array(TOKENS, float32)
        inverse = cuda.local.array(TOKENS, float32)
        key = cuda.local.array(values, int32)
        top = cuda.local.array(dealt, int32)
        griddepcontrol_wait()
        routable = tokens_to_route(num_tokens, limit)
        if has_bias:
            fetch_bias(bias, int64(lane * values), int32(values), raw_bias)
            unpack_bias(raw_bias, int32(values), offset)
        stride = int32(cuda.gridDim.x * (WARPS * TOKENS))
        token = int32((cuda.blockIdx.x * WARPS + warp) * TOKENS)

        while token < num_tokens:
            cuda.syncwarp()
            start = int64(token) * row_stride + lane * values
            for t in range(TOKENS):
                if int32(token + t) < routable:
                    fetch(x, start + t * row_stride, int32(values), raw[t])

            # Groups: each lane's two best, then the group's; lane (group, rank) goes on with token `rank`.
            for t in range(TOKENS):
                unpack(raw[t], int32(values), row)
                largest[t], inverse[t] = score_row(row)
                for j in range(values):
                    key[j] = order_key(row[j] + offset[j] if has_bias else row[j])
                for j in range(0, values, 4):
                    st_shared_s32x4(
                        keys, int32(mine_at + (t * token_pitch + j)), key[j], key[j + 1], key[j + 2], key[j + 3]
                    )
                best, second = max(key[0], key[1]), min(key[0], key[1])
                for j in range(2, values, 2):
                    larger, smaller = max(key[j], key[j + 1]), min(key[j], key[j + 1])
                    second = max(max(second, smaller), min(best, larger))
                    best = max(best, larger)
                for s in range(2):
                    other_best = cuda.shfl_xor_sync(FULL, best, 1 << s)
                    other_second = cuda.shfl_xor_sync(FULL, second, 1 << s)
                    second = max(max(second, other_second), min(best, other_best))
                    best = max(best, other_best)
                if t == 0 or rank == t:
                    my_best, my_second = best, second
            mine = group_worth(my_best, my_second)

            # A rival wins with more, or with as much and a lower number: then of the bits that differ its top one is 0.
            beaten = int32(0)
            for i in range(1, num_expert_group):
                theirs = cuda.shfl_xor_sync(FULL, mine, 4 * i)
                lower = high if i >= 4 else (middle if i >= 2 else low)
                if theirs > int32(mine - lower):
                    beaten = int32(beaten + 1)
            stays = beaten < topk_group
            ballot = uint32(cuda.ballot_sync(FULL, stays))
            if stays:
                kept[warp, rank, cuda.popc(uint32(ballot & below_of_rank))] = group
            cuda.syncwarp()

            # Experts: the kept groups' keys are dealt to the token's eight lanes in their order.
            my_group = kept[warp, member, int32(uint32(column) // uint32(lanes_a_group))]
            my_first = int32(int32(uint32(column) % uint32(lanes_a_group)) * dealt)
            at = int32(base + member * token_pitch + my_group * pitch + my_first)
            for j in range(0, dealt, 4):
                a, b, c, d = ld_shared_s32x4(keys, int32(at + j))
                top[j], top[j + 1], top[j + 2], top[j + 3] = a, b, c, d
            sort_descending(top)
            picked, holders = int32(0), uint32(0)
            for k in range(routed):
                best = top[0]
                for s in range(3):
                    best = max(best, cuda.shfl_xor_sync(FULL, best, 1 << s))
                holds = top[0] == best
                ballot = uint32(cuda.ballot_sync(FULL, holds))
                if column == k:
                    picked, holders = best, ballot
                wins = holds and uint32(ballot & below_in_octet) == uint32(0)
                for d in range(depth - 1):
                    top[d] = top[d + 1] if wins else top[d]
                top[depth - 1] = EXCLUDED if wins else top[depth - 1]

            # Column k looks for the k-th pick among the keys of the lane that held it; twins are taken in their order.
            holder = int32((cuda.ffs(uint32(holders & octet)) - 1) & 7)
            its_group = kept[warp, member, int32(uint32(holder) // uint32(lanes_a_group))]
            its_first = int32(int32(uint32(holder) % uint32(lanes_a_group)) * dealt)
            at = int32(base + member * token_pitch + its_group * pitch + its_first)
            slots = uint32(0)
            for j in range(0, dealt, 4):
                a, b, c, d = ld_shared_s32x4(keys, int32(at + j))
                slots = uint32(slots | uint32(1 << j)) if a == picked else slots
                slots = uint32(slots | uint32(2 << j)) if b == picked else slots
                slots = uint32(slots | uint32(4 << j)) if c == picked else slots
                slots = uint32(slots | uint32(8 << j)) if d == picked else slots
            previous_picked = cuda.shfl_up_sync(FULL, picked, 1)
            previous_holder = cuda.shfl_up_sync(FULL, holder, 1)
            twin = picked == previous_picked and holder == previous_holder and column > 0 and column < routed
            twins = uint32(cuda.ballot_sync(FULL, twin))
            if twins != 0:
                k = lane
                while (twins >> uint32(k)) & uint32(1):
                    slots = uint32(slots & uint32(slots - uint32(1)))
                    k -= 1
            expert = int32(its_group * group_size + its_first + cuda.ffs(slots) - 1)

            # Weights: eight lanes a token, then one more round for what shared experts need beyond eight columns.
            mine_token = int32(token + member)
            weight, my_largest, my_inverse = float32(0), largest[0], inverse[0]
            if scoring == "softmax":
                for t in range(1, TOKENS):
                    if member == t:
                        my_largest, my_inverse = largest[t], inverse[t]
            if column < routed and mine_token < routable:
                weight = score_one(load_one(x, int64(mine_token) * row_stride + expert), my_largest, my_inverse)
                weight = weight if weight == weight else float32(0)
            total = weight
            for s in range(3):
                total += cuda.shfl_xor_sync(FULL, total, 1 << s)
            scale = output_scale
            if renormalize:
                scale *= rcp_approx(total if total > float32(0) else float32(1))
            place = column
            while place < topk and mine_token < num_tokens:
                if place >= routed:
                    weight, expert = total * shared_scale, int32(num_experts + place - routed)
                padding = mine_token >= routable
                weights[int64(mine_token) * topk + place] = float32(0) if padding else weight * scale
                ids[int64(mine_token) * topk + place] = int32(-1) if padding else expert
                place = int32(place + LANES)
            token = int32(token + stride)
        griddepcontrol_launch_dependents()

    return biased_grouped_topk_throughput
