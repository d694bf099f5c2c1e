"""Gate and alignment fused into one launch, for the small batches of decode steps.

Every CTA routes all tokens, one per warp, so that no CTA waits for another. Each CTA then has all slots, counts them,
and writes the rows of some experts: see :mod:`moe_numba.align.one_expert_per_warp`.
"""

from functools import cache, cached_property

import torch
from numba import cuda, float32, int32, int64, uint32

from moe_numba import simulator
from moe_numba.align import moe_align_block_size
from moe_numba.align import one_expert_per_warp as align_kernel
from moe_numba.align.api import (
    MAP_TYPES,
    MAX_NARROW_ELEMENTS,
    AlignOutputs,
    check_align_arguments,
    check_local_ids,
    fake_align,
    map_key,
)
from moe_numba.align.device_functions import block_reciprocal, capacity_for, make_bucket_of, make_clear
from moe_numba.gate import one_token_per_warp as gate_kernel
from moe_numba.gate.api import fake_topk, get_plan, limit_argument
from moe_numba.gate.device_functions import NO_FEATURES, make_column_functions, make_num_unpadded_tokens
from moe_numba.gate.placement import ExpertPlacement, as_placement
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import uniform_array
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import remember
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_flag, check_int, check_out_tuple

# Beyond these limits two launches are about as fast, or faster. On an H200: 2.62 us with 512 experts and 4 tokens, 2.72
# in one launch; 2.23 us with 256 experts and 12 tokens, 2.31 in one launch, whose CTAs shared the tokens in clusters.
MAX_TOKENS = WARPS_PER_CTA = 8  # one token per warp
MAX_EXPERTS = 384  # with the shared ones
_MAX_CTAS = 8 if simulator.ENABLED else 1 << 30  # the simulator needs time for each

_plans: dict = {}
_FiveTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@cache
def make_kernel(gate_config, limit_on_device, capacity, ignore_invalid_experts, has_map, features=NO_FEATURES):
    """Make the kernel for a :class:`~moe_numba.gate.one_token_per_warp.GateConfig` and up to ``MAX_TOKENS`` tokens."""
    topk, threads = gate_config.topk, 32 * WARPS_PER_CTA
    max_slots = topk * MAX_TOKENS
    num_counts, mask_words = align_kernel.counts_for(capacity), align_kernel.mask_words_for(max_slots)
    drop_bucket = capacity - 1
    lane_slice, fetch, unpack, load_bias, route, experts_per_lane, raw_words = gate_kernel.make_router(
        gate_config, features
    )
    num_unpadded_tokens = make_num_unpadded_tokens(limit_on_device)
    _, finish_column, store_column = make_column_functions(features)
    clear = make_clear(threads, num_counts + capacity * mask_words)
    bucket_of = make_bucket_of(capacity, ignore_invalid_experts, has_map)
    write_experts = align_kernel.make_write_experts(threads, max_slots, capacity, has_map)

    @cuda.jit(device=True)
    def count_slot(slot, expert, expert_map, num_experts, counts, masks):
        bucket = bucket_of(expert, expert_map, num_experts)
        if bucket != uint32(drop_bucket):
            cuda.atomic.add(counts, bucket, int32(1))
            word = uint32(bucket * uint32(mask_words) + uint32(slot >> 5))
            cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(slot & 31)))

    @cuda.jit
    def biased_grouped_topk_align(
        x,
        bias,
        weights,
        ids,
        num_tokens,
        row_stride,
        limit,
        shared_scale,
        output_scale,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        numel,
        num_experts,
        block_size,
        slots_per_cta,
        length,
        num_blocks,
        *optional,
    ):
        dynamic = cuda.shared.array(0, int32)
        lane_bias = cuda.local.array(experts_per_lane, float32)
        raw = cuda.local.array(raw_words, uint32)
        scores = cuda.local.array(experts_per_lane, float32)
        lane, group, lane_in_group, first_expert, num_valid = lane_slice()
        thread = int32(cuda.threadIdx.x)
        token = int32(thread >> 5)
        clear(dynamic)
        dynamic = uniform_array(dynamic)
        counts, masks = dynamic[:num_counts], dynamic[num_counts:]
        reciprocal = block_reciprocal(block_size)
        cuda.syncthreads()
        griddepcontrol_wait()
        has_result, weight, expert = False, float32(0), int32(-1)
        if token < num_tokens:
            cuda.syncwarp()
            start = int64(token) * row_stride
            fetch(x, start + first_expert, num_valid, raw)
            load_bias(bias, first_expert, num_valid, lane_bias)
            unpack(raw, num_valid, scores)
            weight, expert = route(
                x,
                start,
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
            is_padding = token >= num_unpadded_tokens(num_tokens, limit)
            weight, expert = finish_column(weight, expert, token, is_padding, optional)
            has_result = lane < topk
        slot = int32(token * topk + lane)
        if has_result:
            count_slot(slot, expert, expert_map, num_experts, counts, masks)
        if has_result and cuda.blockIdx.x < 1:
            store_column(weights, ids, slot, weight, expert, optional)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        write_experts(
            counts,
            masks,
            reciprocal,
            expert_map,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_pad,
            numel,
            num_experts,
            block_size,
            length,
            num_blocks,
        )

    return biased_grouped_topk_align


class FusedPlan:
    """Launch plan for given shapes, dtypes and options."""

    def __init__(self, gate_plan, device, block_size, expert_map, ignore_invalid_experts):
        num_logical, *_, shared = gate_plan.shape
        num_experts = gate_plan.num_experts
        self.num_experts = num_experts + shared
        because = f"gating_output has {num_logical} columns"
        if num_experts != num_logical:
            because = f"placement.num_physical_experts is {num_experts}"
        because += f", and shared experts {shared}" if shared else ""
        check_align_arguments(block_size, self.num_experts, expert_map, (device, "gating_output"), because)
        self.gate_plan, self.block_size, self.device = gate_plan, block_size, device.index or 0
        self.capacity = capacity_for(self.num_experts, gpu_of(device).capability)
        self.options = ignore_invalid_experts, expert_map is not None
        self.map_type = "int32*" if expert_map is None else MAP_TYPES[expert_map.dtype]
        has_kernel = gate_plan.config is not None and self.num_experts <= MAX_EXPERTS
        self.max_fused_tokens = MAX_TOKENS if has_kernel else 0
        self._outputs, self._launches = {}, {}
        self._aligned_outputs = AlignOutputs(block_size, self.num_experts, ignore_invalid_experts, device)

    def outputs(self, tokens, pad_sorted_ids):
        """Return a function that allocates the five outputs, or checks those of the caller."""
        key = tokens, pad_sorted_ids
        return self._outputs.get(key) or remember(self._outputs, key, self._outputs_for(tokens, pad_sorted_ids))

    def _outputs_for(self, tokens, pad_sorted_ids):
        topk = self.gate_plan.shape[3]
        routing = self.gate_plan.outputs(tokens)
        aligned = self._aligned_outputs(tokens * topk, pad_sorted_ids)

        def outputs(out):
            if out is None:
                return *routing(None), *aligned(None)
            out = tuple(check_out_tuple(out, 5))
            return *routing(out[:2]), *aligned(out[2:])

        return outputs

    @cached_property
    def _launcher(self):
        gate_plan = self.gate_plan
        features = gate_plan.features
        kernel = make_kernel(gate_plan.config, gate_plan.limit_on_device, self.capacity, *self.options, features)
        signature = (*gate_plan.signature, self.map_type, "int32*", "int32*", "int32*", *("int32",) * 6)
        signature += gate_plan.optional_types
        shared_bytes = align_kernel.shared_bytes(gate_plan.shape[3] * MAX_TOKENS, self.capacity)
        options = dict(shared_bytes=shared_bytes, dependent=True)
        return launcher(kernel, signature, self.device, launch_bounds=32 * WARPS_PER_CTA, **options)

    def launch(self, x, bias, limit, expert_map, outputs, is_padding, placement):
        """Launch the fused kernel."""
        gate_plan = self.gate_plan
        weights, ids, sorted_token_ids, expert_ids, num_tokens_post_pad = outputs
        tokens = x.shape[0]
        key = tokens, sorted_token_ids.numel(), expert_ids.numel()
        launch = self._launches.get(key) or remember(self._launches, key, self._launch_for(*key))
        ctas, sizes = launch
        self._launcher(
            ctas,
            32 * WARPS_PER_CTA,
            None,
            address(x),
            address(x if bias is None else bias),
            address(weights),
            address(ids),
            tokens,
            gate_plan.row_stride,
            limit,
            *gate_plan.trailing_arguments,
            address(ids if expert_map is None else expert_map),
            address(sorted_token_ids),
            address(expert_ids),
            address(num_tokens_post_pad),
            *sizes,
            *(
                gate_plan.optional_values(x, bias, weights, ids, is_padding, placement)
                if gate_plan.optional_types
                else ()
            ),
        )

    def _launch_for(self, tokens, length, num_blocks):
        """Return the CTAs, and the numbers that the kernel gets."""
        ctas = min(align_kernel.ctas_for(self.num_experts, 32 * WARPS_PER_CTA), _MAX_CTAS)
        sizes = tokens * self.gate_plan.shape[3], self.num_experts, self.block_size, 0, length, num_blocks
        return ctas, sizes


@torch_op()
def biased_grouped_topk_align(
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor | None,
    topk: int,
    block_size: int,
    renormalize: bool = True,
    num_expert_group: int = 1,
    topk_group: int = 1,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    num_token_non_padded: int | torch.Tensor | None = None,
    scoring: str = "sigmoid",
    expert_map: torch.Tensor | None = None,
    pad_sorted_ids: bool = True,
    ignore_invalid_experts: bool = False,
    out: _FiveTensors | None = None,
    renormalize_epsilon: float = 0.0,
    is_padding: torch.Tensor | None = None,
    placement: ExpertPlacement | None = None,
) -> _FiveTensors:
    """Route tokens and align the routing: :func:`biased_grouped_topk` followed by :func:`moe_align_block_size`.

    Up to 8 tokens and 384 experts with the shared ones it takes one launch, unless the shape has more than 32 expert
    groups; otherwise two. The results are bit-identical to those of the two functions.

    Parameters
    ----------
    gating_output, correction_bias, topk, renormalize, num_expert_group, topk_group, num_fused_shared_experts,
    routed_scaling_factor, apply_routed_scaling_factor_on_output, num_token_non_padded, scoring, renormalize_epsilon,
    is_padding, placement
        See :func:`moe_numba.biased_grouped_topk`. The alignment treats fused shared experts as experts after the routed
        ones, and the slots of padding tokens as invalid. With ``placement`` it aligns physical experts, which
        ``expert_map`` then is for.
    block_size, expert_map, pad_sorted_ids, ignore_invalid_experts
        See :func:`moe_numba.moe_align_block_size`.
    out : (topk_weights, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad), optional
        Tensors to write into, which must overlap neither an input nor each other. The call then neither allocates nor
        synchronises.

    Returns
    -------
    topk_weights, topk_ids : tensors [tokens, topk] of float32 and int32
        See :func:`moe_numba.biased_grouped_topk`.
    sorted_token_ids, expert_ids, num_tokens_post_pad : tensors of int32
        See :func:`moe_numba.moe_align_block_size`. All outputs are in the library of ``gating_output``.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5, or has too little shared memory for the experts.

    Examples
    --------
    >>> logits = torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0]])
    >>> weights, ids, sorted_ids, expert_ids, num_rows = moe_numba.biased_grouped_topk_align(
    ...     logits, None, topk=2, block_size=2
    ... )
    >>> ids.tolist(), sorted_ids[: num_rows.item()].tolist()
    ([[3, 2], [0, 1]], [2, 4, 3, 4, 1, 4, 0, 4])
    """
    x = gating_output
    # Check types before the look-up: 16.0 would find the plan for 16, and True the plan for 1.
    if not (type(block_size) is int and type(pad_sorted_ids) is type(ignore_invalid_experts) is bool):
        block_size = check_int("block_size", block_size)
        pad_sorted_ids = check_flag("pad_sorted_ids", pad_sorted_ids)
        ignore_invalid_experts = check_flag("ignore_invalid_experts", ignore_invalid_experts)
    expert_map = None if expert_map is None else as_tensor(expert_map, "expert_map")
    options = (
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        scoring,
        renormalize_epsilon,
    )
    if is_padding is not None:
        is_padding = as_tensor(is_padding, "is_padding")
    if placement is not None:
        placement = as_placement(placement)
    limit, limit_dtype = limit_argument(num_token_non_padded, x.device)
    gate_plan, bias = get_plan(x, correction_bias, limit_dtype, options, is_padding, placement)
    key = gate_plan, block_size, map_key(expert_map), ignore_invalid_experts
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = FusedPlan(gate_plan, x.device, block_size, expert_map, ignore_invalid_experts)
    if expert_map is not None and simulator.ENABLED:
        check_local_ids(expert_map)
    tokens = x.shape[0]
    outputs = plan.outputs(tokens, pad_sorted_ids)(out)
    is_narrow = max(outputs[2].numel(), outputs[3].numel()) <= MAX_NARROW_ELEMENTS
    if 0 < tokens <= plan.max_fused_tokens and is_narrow:
        plan.launch(x, bias, limit, expert_map, outputs, is_padding, placement)
    else:
        weights, ids, *aligned = outputs
        gate_plan.launch(x, bias, weights, ids, limit, is_padding, placement)
        moe_align_block_size(
            ids, block_size, plan.num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts, tuple(aligned)
        )
    return outputs if out is None else out


@register_fake(biased_grouped_topk_align)
def _fake_topk_align(call):
    """Check the arguments of a call and return its outputs."""
    given, aligned = (None, None) if call.out is None else (call.out[:2], call.out[2:])
    weights, ids = fake_topk(call.replace(out=given))
    placement = call.placement
    num_experts = call.gating_output.shape[1] if placement is None else placement.num_physical_experts
    num_experts += call.num_fused_shared_experts
    return [weights, ids, *fake_align(call.replace(topk_ids=ids, num_experts=num_experts, out=aligned))]
