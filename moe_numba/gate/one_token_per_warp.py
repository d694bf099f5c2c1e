"""Gate kernel that routes one token per warp and keeps it in registers from the load to the store."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.gate.device_functions import (
    EXCLUDED,
    FLOAT32_MAX,
    ITEM_BYTES,
    NO_FEATURES,
    Features,
    group_score_key,
    key_as_float,
    make_column_functions,
    make_load,
    make_num_unpadded_tokens,
    make_scoring,
    make_sort_descending,
    order_key,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt, redux_sync_max_s32
from moe_numba.runtime.validate import check_choice

WARPS_PER_BLOCK = 4
MAX_EXPERTS_PER_LANE = 32  # bits of the mask in which a lane finds its picks again
_MAX_EXPERTS_PER_LANE_BEFORE_HOPPER = 24  # more spill: ptxas uses more registers for older GPUs


class GateConfig(NamedTuple):
    """Compile-time configuration of a gate kernel: what C++ would take as template parameters."""

    num_experts: int
    num_expert_group: int
    topk_group: int
    topk: int
    num_fused_shared_experts: int = 0
    renormalize: bool = True
    scoring: str = "sigmoid"
    dtype: str = "float32"
    bias_dtype: str | None = "float32"  # None without a bias
    load_bytes: int = 16  # bytes per load instruction, limited by the alignment of the rows
    bias_load_bytes: int = 16

    def __str__(self):
        return (
            f"{self.num_experts} experts, {self.num_expert_group} groups, {self.topk_group} kept, top-{self.topk} with "
            f"{self.num_fused_shared_experts} shared experts"
        )


def lane_layout(num_experts, num_expert_group):
    """Return (lanes per group, experts per lane); a lane holds adjacent experts of one group."""
    lanes_per_group = 32 // (1 << (num_expert_group - 1).bit_length())
    return lanes_per_group, -(-num_experts // num_expert_group // lanes_per_group) if lanes_per_group else 0


def supports(num_experts, num_expert_group, capability=(9, 0)):
    """Return whether a warp can hold a token: at least one lane per group, and not too many experts per lane."""
    lanes_per_group, experts_per_lane = lane_layout(num_experts, num_expert_group)
    most = MAX_EXPERTS_PER_LANE if capability >= (9, 0) else _MAX_EXPERTS_PER_LANE_BEFORE_HOPPER
    return lanes_per_group > 0 and experts_per_lane <= most


def check_groups(num_experts, options):
    """Raise if options, those of a ``GateOptions`` or a :class:`GateConfig`, do not fit a number of experts."""
    topk, groups, shared = options.topk, options.num_expert_group, options.num_fused_shared_experts
    if not 1 <= groups <= num_experts or num_experts % groups:
        raise ValueError(f"num_expert_group is {groups}; it must divide the {num_experts} experts")
    if not 1 <= options.topk_group <= groups:
        raise ValueError(f"topk_group is {options.topk_group}; 1 to num_expert_group ({groups}) are allowed")
    if not 0 <= shared < topk:
        raise ValueError(f"num_fused_shared_experts is {shared}; 0 to topk - 1 ({topk - 1}) are allowed")
    candidates = options.topk_group * (num_experts // groups)
    if topk - shared > candidates and groups == 1:
        of_these = f", {shared} of them shared" if shared else ""
        raise ValueError(f"topk is {topk}{of_these}; there are {num_experts} experts")
    if topk - shared > candidates:
        raise ValueError(
            f"topk is {topk}: {topk - shared} routed experts; the {options.topk_group} groups that are kept have "
            f"{candidates}"
        )


def check_config(config):
    """Raise for a :class:`GateConfig` whose shape or load widths the kernels in registers do not support."""
    num_experts, groups = config.num_experts, config.num_expert_group
    try:
        check_groups(num_experts, config)
    except ValueError as error:
        raise ValueError(f"{config}: {error}") from None
    group_size = num_experts // groups
    if config.topk > 32:
        raise ValueError(f"{config}: topk must be at most 32")
    if not supports(num_experts, groups):
        raise ValueError(f"{config}: this kernel supports at most 32 groups, and at most 32 experts per lane")
    _, experts_per_lane = lane_layout(num_experts, groups)
    for name, dtype in (("load_bytes", config.dtype), ("bias_load_bytes", config.bias_dtype)):
        if dtype is not None:
            check_choice("dtype", dtype, ITEM_BYTES)
            widths = [w for w in (2, 4, 8, 16) if _is_load_width(w, ITEM_BYTES[dtype], experts_per_lane, group_size)]
            if getattr(config, name) not in widths:
                raise ValueError(f"{config}: {name} is {getattr(config, name)}; it must be one of {widths}")


def _is_load_width(load_bytes, item_bytes, experts_per_lane, group_size):
    """Return whether loads of this width cover a lane's experts and are aligned in every group."""
    return all(n * item_bytes % load_bytes == 0 for n in (experts_per_lane, group_size)) and load_bytes >= item_bytes


class Stages(NamedTuple):
    """Device functions with which one warp routes one token; all 32 lanes must be converged.

    Attributes
    ----------
    lane_slice : function
        ``lane, group, lane_in_group, first_expert, num_valid = lane_slice()``: the experts that this lane holds.
    fetch, unpack : functions
        See :func:`moe_numba.gate.device_functions.make_load`.
    load_bias : function
        ``load_bias(bias, first_expert, num_valid, lane_bias)``: load the bias of this lane's experts.
    rank : function
        ``is_kept, row_max, inverse_sum = rank(scores, lane_bias, lane, group, lane_in_group, num_valid, keys,
        sorted_keys)``: replace the lane's logits by scores, make its keys, and say whether its group is kept and by
        which two numbers a softmax scales.
    pick, pick_exactly : functions
        ``picked_key, holder_mask, is_ambiguous = pick(keys, sorted_keys, is_kept, lane)``: lane k receives the k-th
        largest key of the kept groups, and the lanes that hold it. If that is ambiguous for any lane, only
        ``pick_exactly`` returns the right ones, which takes longer.
    finish, finish_exactly : functions
        ``weight, expert = finish(x, start, scores, keys, picked_key, holder_mask, row_max, inverse_sum, lane,
        shared_scale, output_scale, *optional)``: lane k receives column k of the result. The token's logits start at
        ``x[start]``. If a lane holds equal keys, only ``finish_exactly`` returns the right experts.
    experts_per_lane : int
        Length of ``scores``, ``lane_bias``, ``keys`` and ``sorted_keys``.
    raw_words : int
        Length of the array that ``fetch`` fills.
    expects_ties : bool
        ``pick`` and ``finish`` are the exact ones.
    """

    lane_slice: Any
    fetch: Any
    unpack: Any
    load_bias: Any
    rank: Any
    pick: Any
    pick_exactly: Any
    finish: Any
    finish_exactly: Any
    experts_per_lane: int
    raw_words: int
    expects_ties: bool


@cache
def make_stages(config: GateConfig, features: Features = NO_FEATURES, *, notices_repeats: bool = True) -> Stages:
    """Make the device functions of a gate kernel.

    ``notices_repeats``: two equal keys of one lane make a pick ambiguous, too, so that ``finish`` need not expect them.
    Otherwise only equal keys of several lanes do, which takes fewer instructions, and ``finish`` is ``finish_exactly``.

    Raises
    ------
    ValueError
        If the warp cannot hold the shape; see :func:`check_config`.
    """
    check_config(config)
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
    all_lanes_full = experts_per_lane * lanes_per_group == group_size and lanes_per_group * num_expert_group == 32
    has_places = experts_per_lane > 1  # a lane's only expert needs no search, and no lane holds equal keys
    max_picks_per_lane = min(experts_per_lane, routed)
    rivals_per_lane = -(-num_expert_group // lanes_per_group)
    group_steps, sum_steps = lanes_per_group.bit_length() - 1, (routed - 1).bit_length()
    routed_lanes = uint32((1 << routed) - 2)
    has_bias = bias_dtype is not None
    # All scores rise with the logits: without bias and groups only the chosen experts need one.
    ranks_logits = not has_bias and num_expert_group == 1
    # With more experts per lane, registers for these two would limit the number of warps.
    has_registers = experts_per_lane <= 16
    shuffles_scores = has_bias and has_registers  # to load and score a logit again takes longer
    expects_ties = not has_registers or (not has_bias and dtype != "float32")
    is_softmax = scoring == "softmax"
    sums_row = is_softmax and (not renormalize or features.adds_epsilon)
    fetch, unpack, load_one, raw_words = make_load(dtype, load_bytes, experts_per_lane)
    fetch_bias, unpack_bias, _, raw_bias_words = make_load(bias_dtype or "float32", bias_load_bytes, experts_per_lane)
    score_row, score_one = make_scoring(scoring, experts_per_lane)
    sort_descending = make_sort_descending(experts_per_lane)
    inverse_of_sum, _, _ = make_column_functions(features)

    @cuda.jit(device=True)
    def lane_slice():
        lane = int32(cuda.threadIdx.x & 31)
        group = int32(uint32(lane) // uint32(lanes_per_group))
        lane_in_group = int32(uint32(lane) % uint32(lanes_per_group))
        num_valid = int32(experts_per_lane)
        if not all_lanes_full:
            num_valid = (
                int32(min(experts_per_lane, group_size - lane_in_group * experts_per_lane))
                if group < num_expert_group
                else int32(0)
            )
        return lane, group, lane_in_group, int32(group * group_size + lane_in_group * experts_per_lane), num_valid

    @cuda.jit(device=True)
    def load_bias(bias, first_expert, num_valid, lane_bias):
        if has_bias:
            raw = cuda.local.array(raw_bias_words, uint32)
            fetch_bias(bias, int64(first_expert), num_valid, raw)
            unpack_bias(raw, num_valid, lane_bias)

    @cuda.jit(device=True)
    def count_better_groups(sorted_keys, lane, group, lane_in_group):
        """Count the groups that score better than this lane's; lower groups win ties.

        Each lane of a group compares it with ``rivals_per_lane`` others. Ballots add up the lanes' results.
        """
        best, second = sorted_keys[0], sorted_keys[1] if experts_per_lane > 1 else EXCLUDED
        for s in range(group_steps):
            other_best = cuda.shfl_xor_sync(FULL_MASK, best, 1 << s)
            other_second = cuda.shfl_xor_sync(FULL_MASK, second, 1 << s)
            second = max(min(best, other_best), max(second, other_second))
            best = max(best, other_best)
        group_key = group_score_key(best, second) if group_size > 1 else best
        group_lanes = uint32(((1 << lanes_per_group) - 1) << (group * lanes_per_group))
        num_better = int32(0)
        for i in range(rivals_per_lane):
            rival_group = int32(lane_in_group * rivals_per_lane + i)
            rival_key = cuda.shfl_sync(FULL_MASK, group_key, rival_group * lanes_per_group)
            is_better = rival_group < num_expert_group and (
                rival_key > group_key or (rival_key == group_key and rival_group < group)
            )
            num_better = int32(
                num_better + int32(cuda.popc(uint32(uint32(cuda.ballot_sync(FULL_MASK, is_better)) & group_lanes)))
            )
        return num_better

    def make_pick(exact):
        """Make ``pick`` or ``pick_exactly``.

        Each pick takes the warp's maximum, and the lane that holds it advances to its next key. If several lanes hold
        it, only the lowest one does if ``exact``, but then each pick waits for a ballot. Otherwise all of them advance,
        and the picks are wrong.
        """

        @cuda.jit(device=True)
        def pick(keys, sorted_keys, is_kept, lane):
            if not is_kept:
                sorted_keys[0] = EXCLUDED
            picked_key, holder_mask, several, is_ambiguous = int32(0), uint32(0), uint32(0), False
            lower_lanes = lanemask_lt()
            for k in range(routed):
                best = redux_sync_max_s32(uint32(FULL_MASK), sorted_keys[0])
                wins = sorted_keys[0] == best
                ballot = uint32(cuda.ballot_sync(FULL_MASK, wins))
                if lane == k:
                    picked_key, holder_mask = best, ballot
                if exact:
                    wins = wins and uint32(ballot & lower_lanes) == uint32(0)
                elif notices_repeats:
                    is_ambiguous = is_ambiguous | (uint32(ballot & uint32(ballot - uint32(1))) != uint32(0))
                    if max_picks_per_lane > 1:
                        is_ambiguous = is_ambiguous | (wins & (sorted_keys[1] == best))
                else:
                    several = uint32(several | uint32(ballot & uint32(ballot - uint32(1))))
                for d in range(max_picks_per_lane - 1):
                    sorted_keys[d] = sorted_keys[d + 1] if wins else sorted_keys[d]
                sorted_keys[max_picks_per_lane - 1] = EXCLUDED if wins else sorted_keys[max_picks_per_lane - 1]
            return picked_key, holder_mask, is_ambiguous | (several != uint32(0))

        return pick

    @cuda.jit(device=True)
    def rank(scores, lane_bias, lane, group, lane_in_group, num_valid, keys, sorted_keys):
        row_max, inverse_sum = float32(0), float32(1)
        if not ranks_logits:
            row_max, inverse_sum = score_row(scores)
        for j in range(experts_per_lane):
            if ranks_logits:
                keys[j] = order_key(scores[j] + float32(0))  # -0.0 becomes 0.0
            else:
                keys[j] = order_key(scores[j] + lane_bias[j] if has_bias else scores[j])
            if not all_lanes_full and j >= num_valid:
                keys[j] = EXCLUDED
            sorted_keys[j] = keys[j]
        sort_descending(sorted_keys)
        is_kept = True
        if num_expert_group > 1:
            is_kept = count_better_groups(sorted_keys, lane, group, lane_in_group) < topk_group
        return is_kept, row_max, inverse_sum

    def make_finish(exact):
        """Make ``finish`` or ``finish_exactly``."""

        @cuda.jit(device=True)
        def finish(
            x,
            start,
            scores,
            keys,
            picked_key,
            holder_mask,
            row_max,
            inverse_sum,
            lane,
            shared_scale,
            output_scale,
            *optional,
        ):
            # Lane k finds the k-th pick among the keys of the lane that held it.
            holder_lane = int32(cuda.ffs(holder_mask) - 1)
            place, match_mask = int32(0), uint32(0)
            held_scores = cuda.local.array(experts_per_lane, float32)
            for j in range(experts_per_lane):
                held_key = cuda.shfl_sync(FULL_MASK, keys[j], holder_lane) if has_places else picked_key
                if shuffles_scores:
                    held_scores[j] = cuda.shfl_sync(FULL_MASK, scores[j], holder_lane)
                if exact:
                    match_mask = uint32(match_mask | uint32(1 << j)) if held_key == picked_key else match_mask
                else:
                    place = int32(j) if held_key == picked_key else place
            if exact:
                # A lane that wins twice in a row with equal keys holds repeats, taken in ascending order of expert.
                previous_key = cuda.shfl_up_sync(FULL_MASK, picked_key, 1)
                previous_holder = cuda.shfl_up_sync(FULL_MASK, holder_lane, 1)
                repeats = cuda.ballot_sync(FULL_MASK, picked_key == previous_key and holder_lane == previous_holder)
                repeats = uint32(uint32(repeats) & routed_lanes)
                if repeats != 0:
                    k = lane
                    while k > 0 and (repeats >> uint32(k)) & uint32(1):
                        match_mask = uint32(match_mask & uint32(match_mask - uint32(1)))
                        k -= 1
                place = int32(cuda.ffs(match_mask) - 1)
            expert = int32(holder_lane * experts_per_lane + place)
            if not all_lanes_full:
                expert = int32(
                    holder_lane // lanes_per_group * group_size
                    + holder_lane % lanes_per_group * experts_per_lane
                    + place
                )

            score = key_as_float(picked_key)  # without a bias the key is the score, or the logit
            if shuffles_scores:
                for j in range(experts_per_lane):
                    score = held_scores[j] if place == j else score
            elif has_bias and lane < routed:
                score = score_one(load_one(x, start + expert), row_max, inverse_sum)
            if ranks_logits and sums_row:
                row_max, inverse_sum = score_row(scores)
            if ranks_logits and is_softmax and not sums_row:
                # Only ratios of weights count; a row without numbers has no maximum.
                row_max = cuda.shfl_sync(FULL_MASK, min(score, FLOAT32_MAX), 0)
                row_max = row_max if row_max >= -FLOAT32_MAX else -FLOAT32_MAX
            if ranks_logits:
                score = score_one(score, row_max, inverse_sum)
            weight = float32(0)
            if lane < routed:
                weight = score if score == score else float32(0)
            total = weight
            for s in range(sum_steps):
                total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << s)
            if num_fused_shared_experts > 0:
                total = cuda.shfl_sync(FULL_MASK, total, 0)
                if lane >= routed:
                    weight = total * shared_scale
                    expert = int32(num_experts + lane - routed)
            if renormalize:
                weight *= inverse_of_sum(total, optional)
            return weight * output_scale, expert

        return finish

    pick_first, finish_exactly = make_pick(True), make_finish(has_places)

    @cuda.jit(device=True)
    def pick_exactly(keys, sorted_keys, is_kept, lane):
        for j in range(experts_per_lane):  # `pick` has consumed them
            sorted_keys[j] = keys[j]
        sort_descending(sorted_keys)
        return pick_first(keys, sorted_keys, is_kept, lane)

    pick = pick_first if expects_ties else make_pick(False)
    finish = make_finish(False) if notices_repeats and not expects_ties else finish_exactly
    functions = lane_slice, fetch, unpack, load_bias, rank, pick, pick_exactly, finish, finish_exactly
    return Stages(*functions, experts_per_lane, raw_words, expects_ties)


@cache
def make_router(config: GateConfig, features: Features = NO_FEATURES):
    """Make the device functions with which one warp routes one token, for kernels that need the result at once.

    Returns
    -------
    lane_slice, fetch, unpack, load_bias : functions
        Those of :class:`Stages`.
    route : function
        ``weight, expert = route(x, start, scores, lane_bias, lane, group, lane_in_group, num_valid, shared_scale,
        output_scale, *optional)``. ``scores`` holds the lane's logits on entry; the token's logits start at
        ``x[start]``. Lane k receives column k of the result. All 32 lanes must be converged.
    experts_per_lane, raw_words : int
        Lengths of arrays, as in :class:`Stages`.

    Raises
    ------
    ValueError
        If the warp cannot hold the shape; see :func:`check_config`.
    """
    stages = make_stages(config, features, notices_repeats=False)
    rank, pick, pick_exactly, finish = stages.rank, stages.pick, stages.pick_exactly, stages.finish
    experts_per_lane, expects_ties = stages.experts_per_lane, stages.expects_ties

    @cuda.jit(device=True)
    def route(x, start, scores, lane_bias, lane, group, lane_in_group, num_valid, *others):
        keys = cuda.local.array(experts_per_lane, int32)
        sorted_keys = cuda.local.array(experts_per_lane, int32)
        is_kept, row_max, inverse_sum = rank(
            scores, lane_bias, lane, group, lane_in_group, num_valid, keys, sorted_keys
        )
        picked_key, holder_mask, is_ambiguous = pick(keys, sorted_keys, is_kept, lane)
        if not expects_ties:
            if is_ambiguous:  # for all lanes: several of them hold a key
                picked_key, holder_mask, _ = pick_exactly(keys, sorted_keys, is_kept, lane)
        return finish(x, start, scores, keys, picked_key, holder_mask, row_max, inverse_sum, lane, *others)

    return (*stages[:4], route, experts_per_lane, stages.raw_words)


@cache
def make_kernel(config, limit_on_device=False, features=NO_FEATURES):
    """Make the kernel that routes one token per warp; see :func:`lane_layout` for the experts that a lane holds.

    A warp stores what it has chosen before it knows that no keys are equal. If some are, it chooses and stores again.
    """
    topk, counts_load = config.topk, features.counts_load
    stages = make_stages(config, features)
    lane_slice, fetch, unpack, load_bias, rank = stages[:5]
    pick, pick_exactly, finish, finish_exactly = stages[5:9]
    experts_per_lane, raw_words, expects_ties = stages[9:]
    num_unpadded_tokens = make_num_unpadded_tokens(limit_on_device)
    _, finish_column, store_column = make_column_functions(features)

    @cuda.jit(device=True)
    def store(weights, ids, token, lane, weight, expert, optional):
        if lane < topk:
            weight, expert = finish_column(weight, expert, token, False, optional)
            store_column(weights, ids, int64(token) * topk + lane, weight, expert, optional)

    @cuda.jit
    def biased_grouped_topk(
        x, bias, weights, ids, num_tokens, row_stride, limit, shared_scale, output_scale, *optional
    ):
        lane, group, lane_in_group, first_expert, num_valid = lane_slice()
        token = int32(cuda.blockIdx.x * WARPS_PER_BLOCK + cuda.threadIdx.x // 32)
        lane_bias = cuda.local.array(experts_per_lane, float32)
        raw = cuda.local.array(raw_words, uint32)
        scores = cuda.local.array(experts_per_lane, float32)
        keys = cuda.local.array(experts_per_lane, int32)
        sorted_keys = cuda.local.array(experts_per_lane, int32)
        # Each branch waits, so that the arguments are loaded before: that takes as long as a few instructions.
        if limit_on_device:
            griddepcontrol_wait()
        num_unpadded = num_unpadded_tokens(num_tokens, limit)
        if token < num_unpadded:
            if not limit_on_device:
                griddepcontrol_wait()
            griddepcontrol_launch_dependents()  # the next grid starts meanwhile, and waits
            start = int64(token) * row_stride
            fetch(x, start + first_expert, num_valid, raw)
            load_bias(bias, first_expert, num_valid, lane_bias)
            unpack(raw, num_valid, scores)
            is_kept, row_max, inverse_sum = rank(
                scores, lane_bias, lane, group, lane_in_group, num_valid, keys, sorted_keys
            )
            others = row_max, inverse_sum, lane, shared_scale, output_scale
            picked_key, holder_mask, is_ambiguous = pick(keys, sorted_keys, is_kept, lane)
            weight, expert = finish(x, start, scores, keys, picked_key, holder_mask, *others, *optional)
            is_wrong = False
            if not expects_ties:
                is_wrong = cuda.any_sync(FULL_MASK, is_ambiguous)
            if not counts_load or not is_wrong:
                store(weights, ids, token, lane, weight, expert, optional)
            if is_wrong:
                cuda.syncwarp()  # redux.sync needs a converged warp, and the stores above may diverge
                picked_key, holder_mask, _ = pick_exactly(keys, sorted_keys, is_kept, lane)
                weight, expert = finish_exactly(x, start, scores, keys, picked_key, holder_mask, *others, *optional)
                store(weights, ids, token, lane, weight, expert, optional)
        elif token < num_tokens:  # a padding row
            if not limit_on_device:
                griddepcontrol_wait()
            if lane < topk:
                store_column(weights, ids, int64(token) * topk + lane, float32(0), int32(-1), optional)

    return biased_grouped_topk


@cache
def make_loop_kernel(config, limit_on_device=False, features=NO_FEATURES):
    """Make the kernel for more tokens than warps are resident: a warp loads its next row while it routes one."""
    topk = config.topk
    lane_slice, fetch, unpack, load_bias, route, experts_per_lane, raw_words = make_router(config, features)
    num_unpadded_tokens = make_num_unpadded_tokens(limit_on_device)
    _, finish_column, store_column = make_column_functions(features)

    @cuda.jit
    def biased_grouped_topk_loop(
        x, bias, weights, ids, num_tokens, row_stride, limit, shared_scale, output_scale, *optional
    ):
        lane, group, lane_in_group, first_expert, num_valid = lane_slice()
        token = int32(cuda.blockIdx.x * WARPS_PER_BLOCK + cuda.threadIdx.x // 32)
        token_stride = int32(cuda.gridDim.x * WARPS_PER_BLOCK)
        lane_bias = cuda.local.array(experts_per_lane, float32)
        raw = cuda.local.array(raw_words, uint32)
        scores = cuda.local.array(experts_per_lane, float32)
        griddepcontrol_wait()
        num_unpadded = num_unpadded_tokens(num_tokens, limit)
        if token < num_unpadded:
            fetch(x, int64(token) * row_stride + first_expert, num_valid, raw)
        load_bias(bias, first_expert, num_valid, lane_bias)
        griddepcontrol_launch_dependents()  # once the loads are issued: the next grid's blocks start meanwhile

        while token < num_unpadded:
            cuda.syncwarp()  # redux.sync needs a converged warp, and the predicated stores below may diverge
            unpack(raw, num_valid, scores)
            next_token = int32(token + token_stride)
            if next_token < num_unpadded:  # load the next row while this one is routed
                fetch(x, int64(next_token) * row_stride + first_expert, num_valid, raw)
            weight, expert = route(
                x,
                int64(token) * row_stride,
                scores,
                lane_bias,
                lane,
                group,
                lane_in_group,
                num_valid,
                shared_scale,
                output_scale,
                *optional,
            )
            if lane < topk:
                weight, expert = finish_column(weight, expert, token, False, optional)
                store_column(weights, ids, int64(token) * topk + lane, weight, expert, optional)
            token = next_token

        while token < num_tokens:  # padding rows
            if lane < topk:
                store_column(weights, ids, int64(token) * topk + lane, float32(0), int32(-1), optional)
            token = int32(token + token_stride)

    return biased_grouped_topk_loop
