"""Outputs of the grouped GEMM: bias, float32, accumulation, scattered and weighted rows, activations; wrong kernels."""

import re

import pytest
import torch
from helpers.grouped_gemm import silu_mismatch
from helpers.grouped_gemm_epilogue import BOUNDS, FUNCTIONS, Inputs, options_mismatch
from helpers.wrong_kernels import changed_maker, is_rejected
from torch.library import opcheck

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_rowwise_fp8,
    group_gemm_silu_and_mul_bf16,
    group_gemm_silu_and_mul_pertensor_fp8,
    reference,
)
from moe_numba.grouped_gemm.call import plan as launch
from moe_numba.grouped_gemm.common import epilogue_terms, store_tile
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.wgmma import epilogue, kernel
from moe_numba.grouped_gemm.wgmma import launch as wgmma_launch
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, check_config
from moe_numba.ptx import fragments
from moe_numba.runtime import device as devices

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_together(name, device):
    assert options_mismatch(name, device) is None


def test_each_option_alone(device):
    p = Inputs("bf16", device=device)
    product, bound, nan = p.product(), BOUNDS["bf16"], torch.full_like(p.out, float("nan"))
    assert mismatch(p.call(out_dtype=F32), product, bound) is None
    for bias in (p.bias, p.bias.bfloat16()):
        y = p.call(bias=bias, out_dtype=F32)
        assert y.dtype == F32 and mismatch(y, p.finished(bias), bound) is None
    assert mismatch(p.call(row_weights=p.row_weights), p.finished(row_weights=p.row_weights)) is None
    first = p.out[: len(product)].clone()
    expected = first.double() + product
    assert p.call(out=first, accumulate=True) is first and mismatch(first, expected, bound) is None
    for dtype in (BF16, F32):
        out = p.call(out=nan.to(dtype), scatter_indices=p.scatter, out_dtype=dtype)
        assert mismatch(out, reference.store_rows(product, nan, p.scatter), bound if dtype == F32 else 2.3e-3) is None
    nothing = p.call(out=nan[:0].to(BF16), scatter_indices=p.scatter)
    assert nothing.shape == (0, 144)


@pytest.mark.parametrize("average", [8, 40, 300])
def test_tile_configurations(average, device):
    """Clusters, two subtiles and small groups; the last rows of a group and the last columns of y end within a tile."""
    p = Inputs("rowwise", (21, 0, 170, 1), n=80, k=144, device=device)
    expected = reference.store_rows(p.finished(p.bias, p.row_weights), p.out, p.scatter)
    scales = dict(x_scale=reference.gather_rows(p.scales[0][:, None], p.gather)[:, 0], w_scale=p.scales[1])
    x = reference.gather_rows(p.x.float(), p.gather).to(p.x.dtype)
    out, options = p.out.clone(), dict(bias=p.bias, row_weights=p.row_weights, scatter_indices=p.scatter)
    group_gemm_rowwise_fp8(
        x, p.weight, p.seqlens, p.cu_seqlens, **scales, num_seq_per_group_avg=average, out=out, out_dtype=F32, **options
    )
    assert mismatch(out, expected, BOUNDS["rowwise"]) is None


def test_masked_rows_and_offsets(device):
    """Rows of a masked x that no group owns are not stored, also if their indices are in bounds."""
    p = Inputs("bf16", device=device)
    options = dict(bias=p.bias, row_weights=p.row_weights, scatter_indices=p.scatter, out_dtype=F32)
    expected = reference.store_rows(p.finished(p.bias, p.row_weights), p.out, p.scatter)
    out = p.call(seqlens=None, cu_seqlens=None, offs=p.cu_seqlens[1:].clone(), out=p.out.clone(), **options)
    assert mismatch(out, expected, BOUNDS["bf16"]) is None
    spare = next(row for row in range(25) if row not in p.scatter.tolist())
    x, rows, ordered = torch.zeros(3, 16, 192, dtype=BF16, device=device), torch.full((3, 16), spare), p.ordered()[0]
    weights = torch.full((3, 16), float("nan"), device=device)
    for g, (start, length) in enumerate(zip(p.cu_seqlens.tolist(), p.seqlens.tolist(), strict=False)):
        x[g, :length] = ordered[start : start + length].bfloat16()
        rows[g, :length], weights[g, :length] = p.scatter[start : start + length], p.row_weights[start : start + length]
    options |= dict(row_weights=weights, scatter_indices=rows.int().to(device))
    out = p.out.clone()
    group_gemm_bf16(x, p.weight, p.seqlens, None, out=out, **options)
    assert mismatch(out, expected, BOUNDS["bf16"]) is None


def test_rows_of_zero_rows_of_x(device):
    """Without rows of x there are no scales to read either."""
    p = Inputs("rowwise", device=device)
    p.x, p.scales[0], p.gather = p.x[:0], p.scales[0][:0], torch.zeros_like(p.gather)
    product = torch.zeros(20, 144, dtype=torch.float64, device=device)
    expected = reference.finish_rows(product, p.seqlens, p.cu_seqlens, p.bias)
    assert mismatch(p.call(bias=p.bias), expected) is None


def test_scattered_rows_as_an_op(device):
    """The op with ``out`` reads and writes it, and has the same result; without ``out`` it is refused."""
    p = Inputs("bf16", device=device)
    options = dict(bias=p.bias, scatter_indices=p.scatter, accumulate=True)
    groups = p.x, p.weight, p.seqlens, p.cu_seqlens
    expected = p.call(out=p.out.clone(), **options)
    out, op = p.out.clone(), torch.ops.moe_numba.group_gemm_bf16
    op.out(*groups, gather_indices=p.gather, **options, out=out)
    assert torch.equal(out, expected)
    opcheck(op.out, groups, dict(gather_indices=p.gather, out=p.out.clone(), **options), test_utils="test_faketensor")
    with pytest.raises(ValueError, match="accumulate is True: out must be given"):
        op(*groups, gather_indices=p.gather, **options)


# Activations


def activated(gate_up, activation, dtype=torch.float64):
    if activation == "swigluoai":
        return reference.swigluoai(gate_up.to(dtype), 1.5, 4.0)
    gate, up = gate_up.to(dtype).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def needs_wgmma():
    if not devices.gpu_of(0).has_wgmma:
        pytest.skip("needs wgmma")


ACTIVATION = dict(alpha=1.5, limit=4.0)
BF16_BOUND = 2**-8  # many elements are limited to one number, whose rounding error is that of all of them


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_activation_in_bf16(activation, device):
    needs_wgmma()
    p = Inputs("bf16", n=288, device=device)
    options = dict(activation=activation, gather_indices=p.gather, **ACTIVATION)
    for bias, average in ((None, 1), (p.bias, 100)):
        y = group_gemm_silu_and_mul_bf16(
            p.x, p.weight, p.seqlens, p.cu_seqlens, bias=bias, num_seq_per_group_avg=average, **options
        )
        assert y.dtype == BF16 and mismatch(y, activated(p.finished(bias), activation), BF16_BOUND) is None
    x = p.ordered()[0].bfloat16()
    y = group_gemm_silu_and_mul_bf16(x, p.weight[:, :32], p.seqlens, p.cu_seqlens, activation=activation, **ACTIVATION)
    wanted = reference.group_gemm(x, p.weight[:, :32], p.seqlens, p.cu_seqlens)
    assert mismatch(y, activated(wanted, activation), BF16_BOUND) is None


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("n", [96, 320, 512])
def test_activation_in_fp8(activation, n, device):
    """The last block of 128 columns may be partial, and a bias is added before the activation."""
    needs_wgmma()
    p = Inputs("pertensor", n=n, device=device)
    p.scales[0] *= 1e-5  # few numbers are so large that FP8 sums differ by more than half a step
    for bias in (None, p.bias / 8):
        y, scale = group_gemm_silu_and_mul_pertensor_fp8(
            *(p.x, p.weight, p.seqlens, p.cu_seqlens, p.scales[0]),
            **dict(gather_indices=p.gather, bias=bias, activation=activation, **ACTIVATION),
        )
        expected = activated(p.finished(bias).bfloat16(), activation, F32)
        assert y.shape == (20, n // 2) and scale.shape == (20, -(-n // 256))
        assert silu_mismatch(y, scale, expected) is None


def given_scales_mismatch(p, activation, bias=None):
    """Return what is wrong with a product with given scales of x and of the activations, the largest of which saturate.

    e4m3 rounds a number by up to 1/16, in the norm by 2.6e-2.
    """
    x_scale, y_scale = torch.full((1,), 0.25, device=p.x.device), torch.full((1,), 2.0**-16, device=p.x.device)
    given = dict(x=p.x, weight=p.weight, seqlens=p.seqlens, cu_seqlens=p.cu_seqlens)
    options = dict(activation=activation, gather_indices=p.gather, bias=bias, silu_and_mul=True, **ACTIVATION)
    scales = dict(x_scale=x_scale, y_scale=p.scales[0] * 1e-5, out_scale=y_scale)
    y = launch.group_gemm("tensor", given, **scales, **options)
    product = reference.finish_rows(p.product() * (0.25 * 1e-5), p.seqlens, p.cu_seqlens, bias)
    expected = activated(product.bfloat16(), activation, F32)
    saturated = (expected.abs() > 448 * y_scale).sum()
    assert saturated > 0, "the test needs magnitudes that saturate"
    return mismatch(y.float() * y_scale, expected.clamp(-448 * y_scale, 448 * y_scale), 4e-2)


@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("n", [96, 512])
def test_activation_in_fp8_with_given_scales(activation, n, device):
    needs_wgmma()
    p = Inputs("pertensor", n=n, device=device)
    for bias in (None, p.bias / 8):
        assert given_scales_mismatch(p, activation, bias) is None


def test_scale_of_x(device):
    """It is a factor as the scale of the weight, with a bias or without."""
    needs_wgmma()
    p, x_scale = Inputs("pertensor", device=device), torch.full((1,), 0.3, device=device)
    for bias in (None, p.bias):
        given = dict(x=p.x, weight=p.weight, seqlens=p.seqlens, cu_seqlens=p.cu_seqlens)
        given |= dict(gather_indices=p.gather, bias=bias)
        y = launch.group_gemm("tensor", given, x_scale=x_scale, y_scale=p.scales[0])
        assert torch.equal(y, launch.group_gemm("tensor", given, y_scale=p.scales[0] * x_scale))


# Wrong kernels

APPLY = """        if by_row:
            acc = scale_columns(zeros, acc, smem.f32, int32(x_scale + values))
        if has_row_terms:
            acc = apply_row_terms(acc, terms[0])
"""
GROUP = """        elif by_tensor:
            acc = scale_group(zeros, acc, (tile.scale, tile.scale))
"""
WEIGH = """        if row_weights:
            acc = scale_columns(zeros, acc, smem.f32, int32(weight + values))
"""
BARRIER = "        bar_sync(ALL_CONSUMERS, threads)"
WRONG_VALUES = {  # of rows in float32 and bfloat16 alike
    "scales of x are not gathered": (epilogue_terms, "row = inputs.row_indices[row]", "pass"),
    "a row has its neighbour's values": (epilogue_terms, "(c >> 3) * 2 + (c & 1))", "(c >> 3) * 2 + 1 - (c & 1))"),
    "rows beyond the output are stored": (epilogue_terms, "y_row if y_row < inputs.y_rows else int32(-1)", "y_row"),
    "values are read before they are written": (epilogue_terms, f"{BARRIER}\n\n", "\n"),
    "values are overwritten while they are read": (epilogue_terms, f"{BARRIER}  # all", "        # all"),
}
WRONG = WRONG_VALUES | {
    "the first group's bias is added": (epilogue_terms, "int64(group) * (parts * n)", "int64(0) * (parts * n)"),
    "both rows of a thread have one bias": (
        epilogue_terms,
        "index + (2 * ROW_STEP if interleaved else ROW_STEP)",
        "index",
    ),
    "rows are weighted before the bias is added": (epilogue_terms, APPLY + GROUP + WEIGH, WEIGH + APPLY),
    "scales of weight are not those of the group": (
        epilogue_terms,
        "weight_row(tile.group, column if",
        "weight_row(0, column if",
    ),
    "the second subtile has the first one's values": (store_tile, "int32(values_0 + 4 * pitch)", "values_0"),
    "rows are stored to their neighbours' rows": (fragments, "row = rows[index + k]", "row = rows[index + (k ^ 1)]"),
    "rows of the next group are stored": (epilogue_terms, "c < tile.subtile_rows and row < tile.rows", "True"),
    "accumulation overwrites": (
        store_tile,
        "make_scatter_columns(n, config.accumulate)",
        "make_scatter_columns(n, False)",
    ),
    "the producer publishes another group": (
        kernel,
        "smem.i32[info + uint32(3)] = tile.group\n",
        "smem.i32[info + uint32(3)] = int32(0)\n",
    ),
}
WRONG_BF16 = WRONG_VALUES | {
    "rows are stored to the next row": (store_tile, "int64(row) * store.pitch", "int64(row + 1) * store.pitch"),
    "all chunks have the first one's rows": (store_tile, "store.destinations + offset", "store.destinations"),
    "a row has the row of the other half": (store_tile, "+ (t >> 3) * 2 + (t & 1)", "+ (t & 1)"),
}
WRONG_ACTIVATION = {
    "gate and up are swapped": (kernel, "acc = activate(acc_0, acc_1)", "acc = activate(acc_1, acc_0)"),
    "the bias of gate is added to up": (epilogue_terms, "2 * column + part", "2 * column"),
    "gate is limited from below": (
        fragments,
        "g = np.float32(limit) if gate[k] > np.float32(limit)",
        "g = np.float32(-limit) if gate[k] < np.float32(-limit)",
    ),
    "up is limited from above only": (fragments, "u = np.float32(-limit) if u < np.float32(-limit) else u", "pass"),
    "alpha is 1": (fragments, "np.float32(-LOG2_E * alpha)", "np.float32(-LOG2_E)"),
    "rows of weight are not interleaved": (
        kernel,
        "(int32(part), column) if interleaved",
        "(int32(0), column) if interleaved",
    ),
}
WRONG_FP8 = {
    "gate is limited from below": (epilogue, "g = limit if g > limit else g", "g = -limit if g < -limit else g"),
    "columns beyond y are stored": (epilogue, "if tile.column + 4 * lane < output.n:", "if tile.column < output.n:"),
    "scales are stored as if all blocks were whole": (
        epilogue,
        "int32((output.n + 127) >> 7) if ragged_n",
        "int32(output.n >> 7) if ragged_n",
    ),
    "up is loaded from gate's rows": (kernel, "else (column, int32(part))", "else (column, int32(0))"),
}


WRONG_GIVEN_SCALES = {
    "activations have another scale": (epilogue, "scale = output.second[0]", "scale = output.second[0] * float32(2)"),
    "the scale of x is left out": (
        kernel,
        "scales.weight[tile.group] * scales.x[0] if scaled_x",
        "scales.weight[tile.group] if scaled_x",
    ),
    "scales are stored": (epilogue, "if lane == 0 and not scaled_y:", "if lane == 0:"),
}


def use_kernel(monkeypatch, change):
    """Let the functions launch a kernel with a change."""
    if change is not None:
        monkeypatch.setattr(wgmma_launch, "make_kernel", changed_maker(kernel, "make_kernel", *change))
    monkeypatch.setattr(wgmma_launch, "get_launcher", wgmma_launch.get_launcher.__wrapped__)
    monkeypatch.setattr(launch, "_plans", {})


def attempt_rows(p, dtype):
    """Return what is wrong with scattered rows of two subtiles, with all terms."""
    options = dict(bias=p.bias, row_weights=p.row_weights, scatter_indices=p.scatter)
    expected = reference.store_rows(p.finished(p.bias, p.row_weights), p.out.to(dtype), p.scatter, dtype == F32)
    out = p.out.to(dtype)
    config = GemmConfig(subtile_m=24, m_subtiles=2, mma_n=(24,), stages=3, max_groups=8, scaling="row", gather=True)
    names = dict(gather_indices=p.gather, config=config, out=out, accumulate=dtype == F32)
    given = dict(x=p.x, weight=p.weight, seqlens=p.seqlens, cu_seqlens=p.cu_seqlens)
    x_scale, w_scale = p.scales
    launch.group_gemm("row", given, x_scale=x_scale, w_scale=w_scale, **names, **options)
    return mismatch(out, expected, BOUNDS["rowwise"] if dtype == F32 else 2.3e-3)


def attempt_activation(p):
    options = dict(bias=p.bias, activation="swigluoai", gather_indices=p.gather, **ACTIVATION)
    y = group_gemm_silu_and_mul_bf16(p.x, p.weight, p.seqlens, p.cu_seqlens, 1, **options)
    return mismatch(y, activated(p.finished(p.bias), "swigluoai"), BF16_BOUND)


def attempt_fp8(p):
    wrong = ""
    for activation in ("silu", "swigluoai"):
        options = dict(activation=activation, gather_indices=p.gather, **ACTIVATION)
        given = p.x, p.weight, p.seqlens, p.cu_seqlens, p.scales[0] * 0.01, 1
        y, scale = group_gemm_silu_and_mul_pertensor_fp8(*given, **options)
        expected = activated((p.finished() * 0.01).bfloat16(), activation, F32)
        wrong = wrong or silu_mismatch(y, scale, expected) or ""
    return wrong


ATTEMPTS = {
    "rows": (
        WRONG,
        lambda device: Inputs("rowwise", (5, 0, 40, 30, 33), 32, 64, device),
        lambda p: attempt_rows(p, F32),
    ),
    "rows in bf16": (
        WRONG_BF16,
        lambda device: Inputs("rowwise", (5, 40, 30, 33), 32, 64, device),
        lambda p: attempt_rows(p, BF16),
    ),
    "activation": (WRONG_ACTIVATION, lambda device: Inputs("bf16", (5, 0, 9), 64, 64, device), attempt_activation),
    "FP8": (WRONG_FP8, lambda device: Inputs("pertensor", (5, 9), 96, 64, device), attempt_fp8),
    "FP8, given scales": (
        WRONG_GIVEN_SCALES,
        lambda device: Inputs("pertensor", (5, 9), 256, 64, device),
        lambda p: given_scales_mismatch(p, "silu"),
    ),
}


@pytest.mark.parametrize(
    "which, what", [(a, None) for a in ATTEMPTS] + [(a, w) for a in ATTEMPTS for w in ATTEMPTS[a][0]]
)
def test_wrong_kernels_are_rejected(which, what, device, monkeypatch):
    """Of each kind, the kernel itself is accepted."""
    if not simulator.ENABLED or not devices.gpu_of(0).has_wgmma:
        pytest.skip("some changes write out of bounds, others are in the simulator's version of an instruction")
    changes, make, attempt = ATTEMPTS[which]
    p = make(device)
    use_kernel(monkeypatch, what and changes[what])

    def attempt_with(seed):
        with simulator.seed(seed), simulator.races(what is None or "values are" in what):
            return attempt(p)

    if what is None:
        assert not attempt_with(0)
    else:
        assert is_rejected(attempt_with), f"the check accepts a kernel in which {what}"


# Argument checks

P = Inputs("bf16")
ROWS = torch.zeros(20, dtype=torch.int32)
BAD = {
    "bias has shape (3, 128)": dict(bias=P.bias[:, :128]),
    "bias is torch.float16": dict(bias=P.bias.half()),
    "out_dtype is torch.float16": dict(out_dtype=torch.float16),
    "accumulate is True: out must be given": dict(accumulate=True),
    "out is torch.bfloat16": dict(accumulate=True, out=torch.zeros(20, 144, dtype=BF16)),
    "out is torch.float32 (20, 144)": dict(out=torch.zeros(20, 144)),
    "accumulate is 2": dict(accumulate=2, out=torch.zeros(20, 144)),
    "scatter_indices is given: out must be given": dict(scatter_indices=ROWS),
    "scatter_indices is torch.int64": dict(scatter_indices=ROWS.long(), out=P.out),
    "scatter_indices has shape (19,)": dict(scatter_indices=ROWS[1:], out=P.out),
    "out has shape (3600,)": dict(scatter_indices=ROWS, out=P.out.flatten()),
    "out is torch.float32 (25, 144)": dict(scatter_indices=ROWS, out=P.out),
    "row_weights is torch.bfloat16": dict(row_weights=P.row_weights.bfloat16()),
    "row_weights has shape (19,)": dict(row_weights=P.row_weights[1:]),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_are_refused(message, device):
    options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in BAD[message].items()}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        Inputs("bf16", device=device).call(**options)


def test_invalid_activations_are_refused(device):
    p = Inputs("bf16", device=device)
    given = p.x[:20], p.weight, p.seqlens, p.cu_seqlens
    for options, message in [
        (dict(activation="gelu"), "activation is 'gelu'; it must be one of silu, swigluoai"),
        (dict(activation="swigluoai", limit=0.0), "limit is 0.0; it must be positive"),
        (dict(activation="swigluoai", alpha="a"), "alpha is 'a'; it must be a number"),
        ({}, "weight's n is 144; with gate and up it must be a multiple of 32"),
    ]:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            group_gemm_silu_and_mul_bf16(*given, **options)
    for change, message in [
        (dict(accumulate=True), "out_dtype is bf16; with accumulate it must be f32"),
        (dict(silu_and_mul=True, scatter=True), "scatter must be the default"),
        (dict(silu_and_mul=True, scaling="row"), "scaling must be the default"),
        (dict(silu_and_mul=True, scaling="block", ragged_n=True), "scales must be per tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_config(GemmConfig(**change))
