"""Kernels of decode that are fused across the exchange of tokens, made from the package's source, of which they replace
passages: gate and dispatch, and down projection and combine. ``fused_decode`` measures them.

Both take bfloat16 rows and data that is its own flag, and have the waits and timeouts of the package's kernels.
"""

from functools import cache

from moe_numba.course.simulate import changed_module
from moe_numba.expert_parallel.kernels import low_latency_dispatch, low_latency_send
from moe_numba.gate.kernel import make_router
from moe_numba.moe_layer import kernel_decode

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

# A warp computes two columns of a slot, a CTA a 16-byte vector. One thread stores it to the slot's rank or, for a token
# of this rank, waits for the other ranks' vectors and adds them. CTAs that only store come first, so that those that
# wait cannot keep them from starting.
_IMPORTS = """
from moe_numba.expert_parallel.kernels.low_latency_layout import CTA_STATE, SENTINEL
from moe_numba.expert_parallel.kernels.low_latency_protocol import (
    COMBINE_ROW, STARTED, LowLatencyContext, clean, copied, count_operation, make_token_routing, masked_ranks,
    wait_number, wait_vector,
)
from moe_numba.expert_parallel.kernels.low_latency_sums import add_row, round_sums
from moe_numba.ptx.atomics import ld_relaxed_gpu_s32, st_relaxed_sys_s32
from moe_numba.ptx.memory import pointer_from_address, st_global_s32x4
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4, st_relaxed_sys_s32x4
from moe_numba.ptx.warp import FULL_MASK, uniform
"""
_FACTORY = """def make_decode_down_kernel(shape: DecodeShape, has_shared, exchange):
    load_expert, ranks_of = make_token_routing(exchange)
    num_ranks, max_tokens, slots = exchange.num_ranks, exchange.max_tokens, exchange.slots
    rows_offset, sum_words = exchange.combine_rows, exchange.sum_words
"""
_SIGNATURE = """    def decode_down(
        local, peers, state, status, timeout_ns, rank, mask,
        activated, w2, topk_ids, topk_weights, global_ids, num_tokens, out, num_items, token_stride, column_stride,
    ):
        ctx = LowLatencyContext(local, peers, state, status, timeout_ns, rank, mask)
        vector = cuda.shared.array(warps, int32)
"""
_SLOT = """        index = int32(uint32(item) // uint32(warps_per_token))
        peer, of_peer = int32((rank + 1 + index // max_tokens) % num_ranks), int32(index % max_tokens)
        token = int32(peer * max_tokens + of_peer)
        column = int32(item - index * warps_per_token) * columns
"""
_COLUMN = "        column = int32(item - token * warps_per_token) * columns\n"
_STATE = """        own_state = int32(CTA_STATE + 2 * cuda.blockIdx.x)
        number = int32(ld_relaxed_gpu_s32(state, own_state) + 1)
        masked = masked_ranks(ctx, num_ranks)
        half, tid, i = int32(number & 1), int32(cuda.threadIdx.x), int32(column // 8)
        if cuda.blockIdx.x == 0 and tid < num_ranks and masked >> uint32(tid) & uint32(1) == uint32(0):
            st_relaxed_sys_s32(pointer_from_address(peers[tid], local), rank, number)
        has_row, targets = cuda.any_sync(FULL_MASK, own_expert >= 0), uint32(0)
        if peer == rank:
            targets = ranks_of(load_expert(global_ids, of_peer, num_tokens, lane))
        remote = pointer_from_address(peers[peer], local)
"""
_END = """        low, high = sum_of_lanes(sums[0]), sum_of_lanes(sums[1])
        if lane == 0:
            vector[tid >> 5] = int32(cvt_rn_bf16x2_f32(high, low))
        cuda.syncthreads()
        if tid == 0:
            a, b, c, d = vector[0], vector[1], vector[2], vector[3]
            if peer != rank:
                if has_row and masked >> uint32(peer) & uint32(1) == uint32(0):
                    row = int32(rows_offset + (half * slots + rank * max_tokens + of_peer) * sum_words + 4 * i)
                    st_relaxed_sys_s32x4(remote, row, clean(a), clean(b), clean(c), clean(d))
            elif of_peer < num_tokens:
                total, loaded = cuda.local.array(8, float32), cuda.local.array(4, int32)
                for j in range(8):
                    total[j] = float32(0)
                for r in range(num_ranks):
                    if targets >> uint32(r) & uint32(1) != uint32(0):
                        if r == rank:
                            loaded[0], loaded[1], loaded[2], loaded[3] = a, b, c, d
                        else:
                            row = int32(rows_offset + (half * slots + r * max_tokens + of_peer) * sum_words + 4 * i)
                            loaded[0], loaded[1], loaded[2], loaded[3] = copied(ld_relaxed_sys_s32x4(local, row))
                            if masked >> uint32(r) & uint32(1) == uint32(0):
                                e, f, g, h = wait_vector(ctx, row, COMBINE_ROW, r, of_peer, loaded)
                                loaded[0], loaded[1], loaded[2], loaded[3] = e, f, g, h
                            empty = int32(SENTINEL)
                            st_relaxed_sys_s32x4(local, row, empty, empty, empty, empty)
                        add_row(total, loaded, 0, float32(1))
                round_sums(total, loaded)
                at = int64(of_peer) * (hidden // 2) + 4 * i
                st_global_s32x4(out, at, loaded[0], loaded[1], loaded[2], loaded[3])
        if cuda.blockIdx.x == cuda.gridDim.x - 1 and tid < num_ranks:
            wait_number(ctx, tid, number, STARTED, tid, int32(-1))
        count_operation(state, own_state, True, int32(number - 1), False, int32(0))

    return decode_down
"""
_LOAD = """        load_weights(w2, own_expert, column, lane, 0, words)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
"""
DOWN_COMBINE = (
    ("from moe_numba.ptx.warp import FULL_MASK, uniform\n", _IMPORTS),
    ("def make_decode_down_kernel(shape: DecodeShape, has_shared):\n", _FACTORY),
    (
        "    def decode_down(activated, w2, bias, topk_ids, topk_weights, shared, out, num_items, token_stride, "
        "column_stride):\n",
        _SIGNATURE,
    ),
    ("        token = int32(uint32(item) // uint32(warps_per_token))\n" + _COLUMN, _SLOT),
    (_LOAD, _LOAD + _STATE),
    ("sums[c] = own_weight * load_bias(bias, int64(own_expert) * hidden + (column + c))", "sums[c] = float32(0)"),
    (
        """        for c in range(columns):
            total = sum_of_lanes(sums[c])
            index = int64(token) * hidden + (column + c)
            if is_inside and lane == 0:
                if has_shared:
                    total = total + low_half(uint32(shared[index]))
                out[index] = bf16_bits(total)

    return decode_down
""",
        _END,
    ),
)
DOWN_COMBINE_SIGNATURE = (
    *("int32*", "uint64*", "int32*", "int32*", "uint64", "int32", "int32*"),
    *("uint16*", "uint16*", "int32*", "float32*", "int32*", "int32", "int32*", "int32", "int64", "int64"),
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


def make_down_combine(key):
    """Make the kernel that is down projection and combine.

    ``key`` is (the shape of combine, in slots, `DecodeShape` without bias and with two columns).
    """
    exchange, shape = key
    return _changed(kernel_decode, DOWN_COMBINE).make_decode_down_kernel(shape, False, exchange)
