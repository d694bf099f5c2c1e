"""``fused_experts`` for a few tokens in bfloat16: when its two kernels are chosen, and their launches."""

import torch

from moe_numba.moe_layer.kernel_decode import MAX_TOPK, DecodeShape, make_decode_down_kernel, make_decode_gate_up_kernel
from moe_numba.moe_layer.routing import ID_TYPES
from moe_numba.moe_layer.weights import BF16
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import remember

# Assignments, as a multiple of the experts that they use if they are drawn evenly at random: the kernels read the
# weights once for each assignment, the grouped GEMMs once for each expert.
MAX_ASSIGNMENTS_PER_EXPERT = 1.06
MAX_ASSIGNMENTS = 64
_MIN_WARPS = 2048  # about 16 for each SM: with fewer, a warp computes fewer columns
_BIAS_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_BIAS_TYPES = {"": "uint16*", "bf16": "uint16*", "f32": "float32*"}
_plans: dict = {}


def uses_decode_kernels(shape, tokens, topk, w13, w2):
    """Return whether a call with ``tokens`` tokens takes the two kernels."""
    if shape.format != BF16 or topk > MAX_TOPK or tokens * topk > MAX_ASSIGNMENTS:
        return False
    if not (w13.is_contiguous() and w2.is_contiguous()):
        return False
    used = shape.num_experts * (1 - (1 - min(topk / shape.num_experts, 1)) ** tokens)
    return tokens == 1 or tokens * topk <= MAX_ASSIGNMENTS_PER_EXPERT * used


def decode_gate_up(t, activation, out):
    """Launch the first kernel: the activations ``out`` [tokens * topk, intermediate] of each assignment.

    ``t``: an ``ExpertsTensors``, whose tensors have been checked.
    """
    start, ctas, threads, sizes = _plan(True, t, activation)
    bias = t.x if t.w13_bias is None else t.w13_bias
    start(ctas, threads, None, *map(address, (t.x, t.w13, bias, t.topk_ids, out)), *sizes)
    return out


def decode_down(t, activated, out):
    """Launch the second kernel, directly behind the first: the weighted sums ``out`` [tokens, hidden]."""
    start, ctas, threads, sizes = _plan(False, t, None)
    bias, shared = (activated if tensor is None else tensor for tensor in (t.w2_bias, t.shared))
    pointers = activated, t.w2, bias, t.topk_ids, t.topk_weights, shared, out
    start(ctas, threads, None, *map(address, pointers), *sizes)
    return out


def _plan(is_first, t, activation):
    bias, ids = t.w13_bias if is_first else t.w2_bias, t.topk_ids
    key = is_first, t.w13.shape, ids.shape, ids.stride(), ids.dtype, ids.device, activation
    key = *key, None if bias is None else bias.dtype, t.shared is None
    return _plans.get(key) or remember(_plans, key, _make_plan(is_first, t, activation, bias))


def _make_plan(is_first, t, activation, bias):
    """Return the launcher, the numbers of CTAs and threads, and the kernel's numbers."""
    num_experts, twice, hidden = t.w13.shape
    (tokens, topk), intermediate = t.topk_ids.shape, twice // 2
    results = tokens * (topk * intermediate if is_first else hidden)
    # The second kernel needs its registers to start beside the first: it has no vectors to share between columns.
    columns = 2 if is_first and results >= 2 * _MIN_WARPS else 1
    bias_dtype = "" if bias is None else _BIAS_NAMES[bias.dtype]
    shape = DecodeShape(num_experts, hidden, intermediate, topk, bias_dtype, columns)
    threads, num_items = 32 * shape.warps, results // columns
    pointers = "uint16*", "uint16*", _BIAS_TYPES[bias_dtype], ID_TYPES[t.topk_ids.dtype]
    if is_first:
        kernel = make_decode_gate_up_kernel(shape, *activation)
        signature = *pointers, "uint16*", "int32", "int64", "int64"
    else:
        kernel = make_decode_down_kernel(shape, t.shared is not None)
        signature = *pointers, "float32*", "uint16*", "uint16*", "int32", "int64", "int64"
    start = launcher(kernel, signature, t.x.device.index or 0, launch_bounds=threads, dependent=True)
    return start, -(-num_items // shape.warps), threads, (num_items, *t.topk_ids.stride())
