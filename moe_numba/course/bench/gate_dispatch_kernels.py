"""Low-latency dispatch that loads rows before it waits for the gate, or that is the gate, too.

The kernels are made from the package's source by replacing passages of it; ``gate_dispatch`` measures them. They take
bfloat16 rows and data that is its own flag.
"""

from functools import cache

from moe_numba.course.steps.simulate import changed_module
from moe_numba.expert_parallel.low_latency import dispatch as low_latency_dispatch
from moe_numba.expert_parallel.low_latency import send as low_latency_send
from moe_numba.gate.one_token_per_warp import make_router

_WAIT = """        griddepcontrol_wait()
        griddepcontrol_launch_dependents()  # combine may become resident; it waits for this grid to end
"""
# Dispatch that loads its rows, state and rank mask before it waits for the kernel before: correct only if that kernel
# has not written them, such as the gate, which begins to work when the kernel before it has ended.
_LOAD_ITEM = """        if sends:
            expert = load_item(x, topk_idx, block, items if block < senders else int32(0), num_tokens, loaded)
        masked = masked_ranks(ctx, num_ranks)
"""
_LOAD_ROW = """        masked = masked_ranks(ctx, num_ranks)
        is_sender = block < senders
        load_own_row(x, int32(block // parts), int32(block % parts), num_tokens if is_sender else int32(0), loaded)
"""
_LOAD_EXPERT = """        tokens_of_sender = num_tokens if is_sender else int32(0)
        expert = load_expert({ids}, int32(block // parts), tokens_of_sender, int32(tid & 31))
"""
ROWS_EARLY = ((_WAIT, ""), (_LOAD_ITEM, _LOAD_ROW + _WAIT + _LOAD_EXPERT.format(ids="topk_idx")))
_ROUTE = """        number, lane, warp, warps = int32(sent + 1), int32(tid & 31), int32(tid >> 5), int32(threads // 32)
        first, step, last = block, senders, items
        if not is_sender:
            first, step = int32(block - first_receiver), int32(grid - first_receiver)
            last = int32(0) if expert_major else int32(own_slots * parts)
        _, group, lane_in_group, first_expert, num_valid = lane_slice()
        lane_bias, scores = cuda.local.array(experts_per_lane, float32), cuda.local.array(experts_per_lane, float32)
        raw = cuda.local.array(gate_words, uint32)
        if first + warp * step < last:
            load_bias(bias, first_expert, num_valid, lane_bias)
        for item in range(int32(first + warp * step), last, int32(warps * step)):
            token, k = int32(item // parts), int32(item // parts * topk + lane)
            if token < num_tokens:
                start = int64(token) * num_experts
                fetch(logits, start + first_expert, num_valid, raw)
                unpack(raw, num_valid, scores)
                weight, routed = route(
                    logits, start, scores, lane_bias, lane, group, lane_in_group, num_valid, shared_scale, output_scale
                )
                sends_metadata = is_sender and item % parts == 0
                if lane < topk:
                    own_ids[k], own_weights[k] = routed, float_as_int(weight)
                    if sends_metadata:
                        topk_idx[k], topk_weights[k] = routed, float_as_int(weight)
                if sends_metadata:
                    routed = routed if lane < topk else int32(-1)
                    send_metadata(ctx, routed, metadata_offset(ctx, number, token, 0), stamp_of(number), masked)
        cuda.syncthreads()
"""
_SEND = """            number = int32(sent + 1)
            if data_is_flag:
                send_all_metadata(ctx, number, masked, topk_idx, num_tokens)
"""
# The warps of a CTA route the tokens of the CTA's items, and leave their experts in shared memory.
GATE_DISPATCH = (
    ("import cuda, int32", "import cuda, float32, int32"),
    ("from moe_numba.ptx.atomics", "from moe_numba.ptx.arithmetic import float_as_int\nfrom moe_numba.ptx.atomics"),
    ("    make_wait_metadata,\n", "    make_wait_metadata,\n    stamp_of,\n"),
    ("def make_low_latency_dispatch(shape)", "def make_low_latency_dispatch(shape, gate)"),
    (
        "    slot_at = make_slot_at(shape)\n",
        "    slot_at, num_experts, routed_words = make_slot_at(shape), shape.num_experts, max_tokens * topk\n"
        "    lane_slice, fetch, unpack, load_bias, route, experts_per_lane, gate_words = make_router(gate)\n",
    ),
    ("load_item, send_all_metadata, send_items =", "send_metadata, metadata_offset, send_items ="),
    (
        "        wait_ns,\n    ):",
        "        wait_ns,\n        logits,\n        bias,\n        shared_scale,\n        output_scale,\n    ):",
    ),
    (
        _LOAD_ITEM,
        "        own_ids = cuda.shared.array(routed_words, int32)\n"
        "        own_weights = cuda.shared.array(routed_words, int32)\n"
        + _LOAD_ROW
        + _ROUTE
        + _LOAD_EXPERT.format(ids="own_ids"),
    ),
    (_SEND, ""),
    ("senders, x, topk_idx, topk_weights,", "senders, x, own_ids, own_weights,"),
    ("= unpack_own_experts(rank, topk_idx,", "= unpack_own_experts(rank, own_ids,"),
    (
        "has_row:\n                        copy_own_row(x, topk_weights,",
        "has_row:\n                        copy_own_row(x, own_weights,",
    ),
)


@cache
def _changed(module, changes):
    return changed_module(module, *changes)


def make_rows_early(shape):
    """Make dispatch that loads rows before it waits for the kernel before."""
    return _changed(low_latency_dispatch, ROWS_EARLY).make_low_latency_dispatch(shape)


def make_gate_dispatch(key):
    """Make the kernel that is gate and dispatch; ``key`` is (the shape of dispatch, the gate's configuration)."""
    module, send = _changed(low_latency_dispatch, GATE_DISPATCH), "return load_item, send_all_metadata, send_items"
    exported = ((send, "return send_metadata, metadata_offset, send_items"),)
    module.make_send, module.make_router = _changed(low_latency_send, exported).make_send, make_router
    return module.make_low_latency_dispatch(*key)
