"""``fused_experts`` for few tokens in bfloat16, FP8 blocks or MXFP4: choice and launches of matrix-vector kernels."""

from functools import partial

import torch

from moe_numba.moe_layer.gemv.bf16 import (
    BF16_MAX_TOPK,
    VECTOR,
    DecodeShape,
    make_decode_down_kernel,
    make_decode_gate_up_kernel,
)
from moe_numba.moe_layer.gemv.fp8_blocks import (
    FP8_MAX_ACTIVATION_BYTES,
    FP8_MAX_TOPK,
    FP8_WARP_ACTIVATIONS,
    MMA_ROWS,
    DecodeFp8Shape,
    make_decode_fp8_down_kernel,
    make_decode_fp8_gate_up_kernel,
)
from moe_numba.moe_layer.gemv.mxfp4 import (
    MAX_SPLITS,
    MAX_WARPS,
    MXFP4_MAX_TOPK,
    MXFP4_MAX_VECTOR_BYTES,
    QUARTERS,
    TILE_ACTIVATIONS,
    DecodeMxfp4Shape,
    launch_bounds_of,
    make_decode_mxfp4_down_kernel,
    make_decode_mxfp4_gate_up_kernel,
    part_of,
    tiles_of,
)
from moe_numba.moe_layer.group_by_expert.api import ID_TYPES
from moe_numba.moe_layer.weights import BF16, FP8_BLOCK, MXFP4
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import remember

# Max. tokens * topk / E[distinct experts], with uniform routing: the kernels read an expert's weights once for each
# assignment, grouped GEMMs once. On an H200 two tokens of gpt-oss in MXFP4, 1.07, take 40 us, with grouped GEMMs 49;
# in bfloat16, where grouped GEMMs read at a higher rate, 107 and 103.
MAX_ASSIGNMENTS_PER_EXPERT = {BF16: 1.06, FP8_BLOCK: 1.06, MXFP4: 1.08}
MAX_ASSIGNMENTS = 64
# Max. weight bytes read by a call. These kernels save a fixed time, that of two launches, but grouped GEMMs read at a
# higher rate. Measured with one token (records `moe_layer` of both GPUs): with 75 to 99 MB they take 0.54 to 0.75 of
# the grouped GEMMs' time, on an H100 and on an H200, and with 199 MB (gpt-oss, bfloat16) 0.88 on an H200; in FP8 with
# 352 MB (DeepSeek-V3) 0.98 and 1.04. In bfloat16 one token takes them with any size: 705 MB (Mixtral) 0.87.
MAX_WEIGHT_BYTES = {BF16: 256 << 20, FP8_BLOCK: 128 << 20, MXFP4: 128 << 20}
# In the second kernel for bfloat16 a lane loads MANY_LOADS vectors at once, instead of 4, if it reads at least
# MANY_STEPS for each column. Both kernels on an H200, with 4, 8 and 16 loads: gpt-oss (48 vectors per column) takes
# 72.2, 60.7 and 55.0 us, Qwen3-30B-A3B (24 vectors) 22.4, 22.8 and 25.1 us.
MANY_STEPS, MANY_LOADS = 32, 16
MIN_FP8_WARPS = 1024  # of the first kernel for FP8: with fewer, a grouped GEMM loads the weights faster
# Warps that a kernel for MXFP4 should have; k is split between warps to reach this number. gpt-oss with one token on an
# H200 takes 27.4 us with 1024 warps, 23.1 with 2048 and 28.1 with 4096; grouped GEMMs take 37.7.
MXFP4_WARPS = 2048
_BIAS_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_BIAS_TYPES = {"": "uint16*", "bf16": "uint16*", "f32": "float32*"}
_plans: dict = {}


def uses_decode_kernels(shape, tokens, topk, w13, w2):
    """Return whether a call with ``tokens`` tokens takes the matrix-vector kernels."""
    if shape.format not in _FITS or tokens * topk > MAX_ASSIGNMENTS:
        return False
    is_limited = tokens > 1 or shape.format != BF16
    if is_limited and tokens * topk * (w13.nbytes + w2.nbytes) > MAX_WEIGHT_BYTES[shape.format] * shape.num_experts:
        return False
    if not (w13.is_contiguous() and w2.is_contiguous() and _FITS[shape.format](shape, tokens, topk)):
        return False
    used = shape.num_experts * (1 - (1 - min(topk / shape.num_experts, 1)) ** tokens)
    return tokens == 1 or tokens * topk <= MAX_ASSIGNMENTS_PER_EXPERT[shape.format] * used


def _fits_bf16(shape, tokens, topk):
    return topk <= BF16_MAX_TOPK


def _fits_fp8(shape, tokens, topk):
    """Return whether the kernels for FP8 have the sizes; activations are kept in the memory for rows, in float32."""
    if topk > FP8_MAX_TOPK or topk * shape.intermediate > FP8_MAX_ACTIVATION_BYTES:
        return False
    if shape.hidden < 2 * shape.intermediate or gpu_of(shape.device).capability < (8, 9):  # mma.sync with e4m3
        return False
    return tokens * topk * shape.intermediate // FP8_WARP_ACTIVATIONS >= MIN_FP8_WARPS


def _fits_mxfp4(shape, tokens, topk):
    """Return whether the kernels for MXFP4 have the sizes."""
    tiles = max(tiles_of(shape.hidden), topk * (tiles_of(shape.intermediate) + MAX_SPLITS))
    return topk <= MXFP4_MAX_TOPK and 128 * tiles <= MXFP4_MAX_VECTOR_BYTES


_FITS = {BF16: _fits_bf16, FP8_BLOCK: _fits_fp8, MXFP4: _fits_mxfp4}


def decode_launches(call, out):
    """Return {name: launch} of a call, an ``ExpertsCall``, in order."""
    t = call.tensors
    if call.shape.format == FP8_BLOCK:
        activated = call.memory.rows[0].view(torch.float32)
        first, second = partial(decode_fp8_gate_up, t, activated), decode_fp8_down
    else:
        (activated,) = call.memory.activated
        first, second = partial(decode_gate_up, t, call.activation, activated), decode_down
    return {"gate_up": first, "down": partial(second, t, activated, out)}


def decode_gate_up(t, activation, out):
    """Launch the first kernel for bfloat16 or MXFP4: the activations ``out`` [tokens * topk, intermediate].

    ``t``: an ``ExpertsTensors``, whose tensors have been checked.
    """
    start, ctas, threads, sizes = _plan("gate_up", t, activation, t.w13_bias)
    bias = t.x if t.w13_bias is None else t.w13_bias
    start(ctas, threads, None, *map(address, (t.x, t.w13, bias, t.topk_ids, out)), *sizes)
    return out


def decode_down(t, activated, out):
    """Launch the second kernel for bfloat16 or MXFP4, directly after the first: the sums ``out`` [tokens, hidden]."""
    start, ctas, threads, sizes = _plan("down", t, None, t.w2_bias)
    bias, shared = (activated if tensor is None else tensor for tensor in (t.w2_bias, t.shared))
    pointers = activated, t.w2, bias, t.topk_ids, t.topk_weights, shared, out
    start(ctas, threads, None, *map(address, pointers), *sizes)
    return out


def decode_fp8_gate_up(t, out):
    """Launch the first kernel for FP8: the activations ``out``, in float32."""
    start, ctas, threads, sizes = _plan("gate_up", t)
    start(ctas, threads, None, *map(address, (t.x, t.w13, t.w13_scale, t.topk_ids, out)), *sizes)
    return out


def decode_fp8_down(t, activated, out):
    """Launch the second kernel for FP8, directly after the first: the weighted sums ``out`` [tokens, hidden]."""
    start, ctas, threads, sizes = _plan("down", t)
    shared = activated if t.shared is None else t.shared
    pointers = activated, t.w2, t.w2_scale, t.topk_ids, t.topk_weights, shared, out
    start(ctas, threads, None, *map(address, pointers), *sizes)
    return out


def _plan(which, t, activation=None, bias=None):
    """Return the launcher, the numbers of CTAs and threads, and the kernel's numbers."""
    ids = t.topk_ids
    key = which, t.x.shape, t.w13.shape, t.w13.dtype, ids.shape, ids.stride(), ids.dtype, ids.device, activation
    key = *key, None if bias is None else bias.dtype, t.shared is None
    make = {torch.bfloat16: _make_plan, torch.uint8: _make_mxfp4_plan}.get(t.w13.dtype, _make_fp8_plan)
    return _plans.get(key) or remember(_plans, key, make(which, t, activation, bias))


def _make_plan(which, t, activation, bias):
    num_experts, twice, hidden = t.w13.shape
    (tokens, topk), intermediate, is_first = t.topk_ids.shape, twice // 2, which == "gate_up"
    results = tokens * (topk * intermediate if is_first else hidden)
    # Measured on an H100: the first kernel needs many warps, as a row of gate and one of up are long; those of w2 are
    # short, and two of them share the loads of the activations.
    columns = 1 if is_first else 2
    bias_dtype = "" if bias is None else _BIAS_NAMES[bias.dtype]
    shape = DecodeShape(num_experts, hidden, intermediate, topk, bias_dtype, columns)
    if not is_first and topk * -(-intermediate // (32 * VECTOR)) >= MANY_STEPS:
        shape = shape._replace(max_loads=MANY_LOADS)
    threads, num_items = 32 * shape.warps, results // shape.columns
    pointers = "uint16*", "uint16*", _BIAS_TYPES[bias_dtype], ID_TYPES[t.topk_ids.dtype]
    if is_first:
        kernel = make_decode_gate_up_kernel(shape, *activation)
        signature = *pointers, "uint16*", "int32", "int64", "int64"
    else:
        kernel = make_decode_down_kernel(shape, t.shared is not None)
        signature = *pointers, "float32*", "uint16*", "uint16*", "int32", "int64", "int64"
    start = launcher(kernel, signature, t.x.device.index or 0, launch_bounds=threads, dependent=True)
    return start, -(-num_items // shape.warps), threads, (num_items, *t.topk_ids.stride())


def _make_fp8_plan(which, t, *_):
    num_experts, twice, hidden = t.w13.shape
    (tokens, topk), intermediate = t.topk_ids.shape, twice // 2
    shape, ids = DecodeFp8Shape(num_experts, hidden, intermediate, topk), ID_TYPES[t.topk_ids.dtype]
    if which == "gate_up":
        kernel, threads = make_decode_fp8_gate_up_kernel(shape), 32 * shape.warps
        ctas = tokens * topk * intermediate // (FP8_WARP_ACTIVATIONS * shape.warps)
        signature = "uint16*", "uint8*", "float32*", ids, "float32*", "int64", "int64"
    else:
        kernel, threads = make_decode_fp8_down_kernel(shape, t.shared is not None), 32 * topk
        ctas = tokens * hidden // MMA_ROWS
        signature = "float32*", "uint8*", "float32*", ids, "float32*", "uint16*", "uint16*", "int64", "int64"
    start = launcher(kernel, signature, t.x.device.index or 0, launch_bounds=threads, dependent=True)
    return start, ctas, threads, tuple(t.topk_ids.stride())


def _splits(warps, k, most):
    """Return the parts of k, at most ``most``, of which ``warps`` warps get one each: about `MXFP4_WARPS` in all."""
    wanted = min(most, tiles_of(k), -(-MXFP4_WARPS // warps))
    return -(-tiles_of(k) // part_of(k, wanted))


def _make_mxfp4_plan(which, t, activation, bias):
    num_experts, row_tiles = t.w13.shape[:2]
    (tokens, topk), hidden, intermediate = t.topk_ids.shape, t.x.shape[1], row_tiles * TILE_ACTIVATIONS
    bias_dtype = "" if bias is None else _BIAS_NAMES[bias.dtype]
    sizes = num_experts, hidden, intermediate, topk, bias_dtype
    pointers = "uint16*", "int32*", _BIAS_TYPES[bias_dtype], ID_TYPES[t.topk_ids.dtype]
    if which == "gate_up":
        ctas = tokens * topk * row_tiles
        splits = _splits(QUARTERS * ctas, hidden, MAX_SPLITS)
        kernel = make_decode_mxfp4_gate_up_kernel(DecodeMxfp4Shape(*sizes, splits), *activation)
        threads, signature = 32 * QUARTERS * splits, (*pointers, "uint16*", "int64", "int64")
    else:
        ctas = tokens * hidden // MMA_ROWS
        most = min(MAX_SPLITS, MAX_WARPS // topk)
        splits = _splits(topk * ctas, intermediate, most)
        kernel = make_decode_mxfp4_down_kernel(DecodeMxfp4Shape(*sizes, splits), t.shared is not None)
        threads, signature = 32 * topk * splits, (*pointers, "float32*", "uint16*", "uint16*", "int64", "int64")
    start = launcher(kernel, signature, t.x.device.index or 0, launch_bounds=launch_bounds_of(threads), dependent=True)
    return start, ctas, threads, tuple(t.topk_ids.stride())
