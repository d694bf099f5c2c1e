"""The gate and the alignment in one launch, for the few tokens of a decode step.

Up to 32 slots: one block, whose first warps route a token each. More: a cluster of eight blocks routes the tokens,
eight a block, and each block gives its choices to all eight through their shared memory; from there on a block knows
all slots, as in the alignment's kernel for few slots. Several clusters route the same tokens, side by side and for
nothing, so that more blocks can write the output.
"""

from functools import cache, cached_property

import torch
from numba import cuda, float32, int32, int64, uint32

from moe_numba import simulator
from moe_numba.align import device_functions, kernel_small, moe_align_block_size
from moe_numba.align import kernel_medium as align_kernel
from moe_numba.align.api import IDS, check_align, check_outputs, check_shared_memory, empty_outputs, launch_arguments
from moe_numba.gate import kernel as gate_kernel
from moe_numba.gate.api import check_limit, plan_for
from moe_numba.gate.device_functions import make_tokens_to_route
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.validate import as_tensor, check_out, check_out_tuple, to_caller_library

CLUSTER = 8  # blocks, as many as every GPU with clusters allows
WARPS = 8  # of a block, each with a token
MOST_TOKENS = CLUSTER * WARPS
_CLUSTERS = 1 if simulator.ENABLED else 4

_plans = {}


@cache
def make_tiny_kernel(gate_constants, limit_on_device, aligned, ignore_invalid_experts, has_map):
    """The kernel for one block of a warp a slot; ``gate_constants`` is a :class:`moe_numba.gate.kernel.Constants`."""
    topk = gate_constants.topk
    my_part, fetch, unpack, read_bias, route, values, raw_words = gate_kernel.make_router(gate_constants)
    tokens_to_route = make_tokens_to_route(limit_on_device)
    align_tiny = kernel_small.make_align_tiny(ignore_invalid_experts, has_map)
    fill_all = kernel_small.make_fill_all(aligned)

    @cuda.jit
    def biased_grouped_topk_align_tiny(
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
        chunk,
        length,
        num_blocks,
    ):
        slots = cuda.shared.array(32, int32)
        blocks_of = cuda.shared.array(32, int32)
        offset = cuda.local.array(values, float32)
        raw = cuda.local.array(raw_words, uint32)
        row = cuda.local.array(values, float32)
        lane, group, rank, first, valid = my_part()
        token = int32(cuda.threadIdx.x >> 5)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        fill_all(sorted_token_ids, expert_ids, numel, length, num_blocks)
        if token < num_tokens:
            cuda.syncwarp()
            source = int64(token) * row_stride
            fetch(x, source + first, valid, raw)
            read_bias(bias, first, valid, offset)
            unpack(raw, valid, row)
            weight, expert = route(x, source, row, offset, lane, group, rank, valid, shared_scale, output_scale)
            if token >= tokens_to_route(num_tokens, limit):
                weight, expert = float32(0), int32(-1)
            if lane < topk:
                slots[int32(token * topk + lane)] = expert
                weights[int32(token * topk + lane)] = weight
                ids[int32(token * topk + lane)] = expert
        cuda.syncthreads()
        align_tiny(
            slots,
            expert_map,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_pad,
            numel,
            num_experts,
            block_size,
            blocks_of,
        )

    return biased_grouped_topk_align_tiny


@cache
def make_cluster_kernel(gate_constants, limit_on_device, capacity, ignore_invalid_experts, has_map):
    """The kernel for clusters; ``gate_constants`` is a :class:`moe_numba.gate.kernel.Constants`."""
    topk, threads = gate_constants.topk, 32 * WARPS
    all_slots = MOST_TOKENS * topk
    my_part, fetch, unpack, read_bias, route, values, raw_words = gate_kernel.make_router(gate_constants)
    tokens_to_route = make_tokens_to_route(limit_on_device)
    carve = align_kernel.make_carve(capacity)
    clear = device_functions.make_clear(threads, capacity * (2 + align_kernel.words_for(capacity)))
    align = align_kernel.make_align(threads, 2, capacity, ignore_invalid_experts, has_map)

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
        chunk,
        length,
        num_blocks,
    ):
        dynamic = cuda.shared.array(0, int32)
        counts, masks, first_block, warp_sums = carve(dynamic)
        slots = cuda.shared.array(all_slots, int32)
        offset = cuda.local.array(values, float32)
        raw = cuda.local.array(raw_words, uint32)
        row = cuda.local.array(values, float32)
        lane, group, rank, first, valid = my_part()
        token = int32((cuda.threadIdx.x >> 5) * CLUSTER + int32(cluster_ctarank()))
        barrier_cluster_arrive()  # this block has started
        clear(dynamic)
        griddepcontrol_wait()
        routable = tokens_to_route(num_tokens, limit)
        source = int64(min(token, num_tokens - 1)) * row_stride  # a warp without a token routes one for nothing
        fetch(x, source + first, valid, raw)
        read_bias(bias, first, valid, offset)
        unpack(raw, valid, row)
        weight, expert = route(x, source, row, offset, lane, group, rank, valid, shared_scale, output_scale)
        weight, expert = (weight, expert) if token < routable else (float32(0), int32(-1))
        barrier_cluster_wait()
        mine = token < num_tokens and lane < topk
        if mine:
            for block in range(CLUSTER):
                st_cluster_s32(slots, int32(token * topk + lane), uint32(block), expert)
        cuda.syncwarp()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if mine and cuda.blockIdx.x < CLUSTER:
            weights[int64(token) * topk + lane] = weight
            ids[int64(token) * topk + lane] = expert
        align(
            slots,
            expert_map,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_pad,
            numel,
            num_experts,
            block_size,
            chunk,
            length,
            num_blocks,
            counts,
            masks,
            first_block,
            warp_sums,
        )

    return biased_grouped_topk_align


class _Plan:
    """What a call needs that shapes, types and options decide."""

    def __init__(self, gate_plan, device, block_size, expert_map, ignore_invalid_experts):
        num_experts, *_, shared = gate_plan.shape
        self.num_experts = num_experts + shared
        check_align(block_size, self.num_experts, expert_map, device)
        self.gate_plan, self.block_size, self.device = gate_plan, block_size, device.index or 0
        self.capacity = device_functions.capacity_for(self.num_experts)
        self.options = ignore_invalid_experts, expert_map is not None
        self.map_type = "int32*" if expert_map is None else IDS[expert_map.dtype]
        self.is_fused = gate_plan.constants is not None

    def _launcher(self, made, **options):
        signature = (*self.gate_plan.signature, self.map_type, "int32*", "int32*", "int32*", *("int32",) * 6)
        return launcher(made, signature, self.device, dependent=True, **options)

    def _tiny(self, aligned):
        made = make_tiny_kernel(self.gate_plan.constants, self.gate_plan.limit_on_device, aligned, *self.options)
        return self._launcher(made, launch_bounds=1024)

    tiny = cached_property(lambda self: self._tiny(aligned=False))
    tiny_aligned = cached_property(lambda self: self._tiny(aligned=True))

    @cached_property
    def cluster(self):
        made = make_cluster_kernel(
            self.gate_plan.constants, self.gate_plan.limit_on_device, self.capacity, *self.options
        )
        shared_bytes = align_kernel.shared_bytes(self.capacity)
        check_shared_memory(shared_bytes, self.num_experts, self.device)
        return self._launcher(made, launch_bounds=32 * WARPS, shared_bytes=shared_bytes, cluster=CLUSTER)

    def start(self, x, bias, limit, expert_map, outputs):
        weights, ids, *aligned = outputs
        numel = ids.numel()
        if numel <= kernel_small.MOST_SLOTS:
            launch = self.tiny if aligned[0].data_ptr() % 16 else self.tiny_aligned
            threads, blocks = 32 * numel, 1
        else:
            most = min(32 * align_kernel.words_for(self.capacity), 32 * WARPS)
            launch, threads = self.cluster, 32 * WARPS
            blocks = CLUSTER * max(_CLUSTERS, -(-numel // (most * CLUSTER)))
        launch(
            blocks,
            threads,
            current_stream(self.device),
            address(x),
            address(bias),
            address(weights),
            address(ids),
            x.shape[0],
            self.gate_plan.row_stride,
            limit,
            *self.gate_plan.tail,
            *launch_arguments(expert_map, aligned, numel, self.num_experts, self.block_size, -(-numel // blocks)),
        )


def biased_grouped_topk_align(
    gating_output,
    correction_bias,
    topk,
    block_size,
    renormalize=True,
    num_expert_group=1,
    topk_group=1,
    num_fused_shared_experts=0,
    routed_scaling_factor=1.0,
    apply_routed_scaling_factor_on_output=False,
    num_token_non_padded=None,
    scoring="sigmoid",
    expert_map=None,
    pad_sorted_ids=True,
    ignore_invalid_experts=False,
    out=None,
):
    """Route tokens and align the routing: :func:`biased_grouped_topk` and :func:`moe_align_block_size` at once.

    Up to 64 tokens and 32 groups of experts it is one launch, otherwise two. The results are those of the two
    functions, bit for bit.

    Parameters
    ----------
    gating_output, correction_bias, topk, renormalize, num_expert_group, topk_group, num_fused_shared_experts,
    routed_scaling_factor, apply_routed_scaling_factor_on_output, num_token_non_padded, scoring
        As for :func:`moe_numba.biased_grouped_topk`. The alignment's experts are the routed ones and, after them, the
        fused shared ones; a padding token's slots are invalid.
    block_size, expert_map, pad_sorted_ids, ignore_invalid_experts
        As for :func:`moe_numba.moe_align_block_size`.
    out : (topk_weights, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad), optional
        Tensors to write into; the call then neither allocates nor synchronises.

    Returns
    -------
    topk_weights, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad
        As those functions return them, in ``gating_output``'s library.

    Raises
    ------
    ValueError, TypeError, UnsupportedDeviceError
        As those functions raise them.
    """
    x = as_tensor(gating_output, "gating_output")
    bias = None if correction_bias is None else as_tensor(correction_bias, "correction_bias")
    local = None if expert_map is None else as_tensor(expert_map, "expert_map")
    if type(block_size) is not int:  # now: 16.0 would find the plan for 16, and True that for 1
        raise TypeError(f"block_size is {block_size!r}; it must be an int")
    limit = check_limit(num_token_non_padded, x.device)
    gate_plan = plan_for(
        x,
        bias,
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        scoring,
        num_token_non_padded,
    )
    key = (
        gate_plan,
        block_size,
        local is not None and (local.dtype, local.shape, local.stride(), local.device),
        bool(ignore_invalid_experts),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(gate_plan, x.device, block_size, local, bool(ignore_invalid_experts))
    tokens, device = x.shape[0], x.device
    shape = tokens * topk, block_size, plan.num_experts, pad_sorted_ids, ignore_invalid_experts
    if out is None:
        weights = torch.empty((tokens, topk), dtype=torch.float32, device=device)
        ids = torch.empty((tokens, topk), dtype=torch.int32, device=device)
        outputs = [weights, ids, *empty_outputs(*shape, device)]
    else:
        outputs = check_out_tuple(out, 5)
        check_out("topk_weights", outputs[0], (tokens, topk), torch.float32, device)
        check_out("topk_ids", outputs[1], (tokens, topk), torch.int32, device)
        check_outputs(outputs[2:], *shape, device)
    if plan.is_fused and 0 < tokens <= MOST_TOKENS:
        plan.start(x, x if bias is None else bias, limit, outputs[1] if local is None else local, outputs)
    else:
        if tokens:
            gate_plan.start(x, x if bias is None else bias, *outputs[:2], tokens, limit)
        moe_align_block_size(
            outputs[1], block_size, plan.num_experts, local, pad_sorted_ids, ignore_invalid_experts, outputs[2:]
        )
    if out is not None:
        return out
    return (
        tuple(outputs) if x is gating_output else tuple(to_caller_library(tensor, gating_output) for tensor in outputs)
    )
