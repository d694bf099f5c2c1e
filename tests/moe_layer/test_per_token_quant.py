"""Test per_token_quant_fp8 and silu_and_mul_quant_fp8 against their references, bit by bit where these are exact."""

import pytest
import torch
from helpers.wrong_kernels import changed, is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.moe_layer import reference
from moe_numba.moe_layer.per_token_quant import api as per_token_quant
from moe_numba.moe_layer.per_token_quant import kernel as per_token_quant_kernels
from moe_numba.runtime.sass import compile_apart

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")
# Tokens 0 to 4 in rows 0 to 9 of a grouped GEMM; -1 and 10 are no rows.
INDICES = torch.tensor([[3, 0], [-1, 7], [9, 2], [10, 1], [4, 5]], dtype=torch.int32)
LIMITED = dict(activation="swigluoai", alpha=1.5, limit=1.0)


def make_x(columns, device, rows=5):
    """Rows of different magnitudes, one of them zeros; in one the last element is the largest."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[2, -1] = 9
    x[1] *= 100
    x[3] = 0
    return x.bfloat16().to(device)


def poisoned(rows, columns, device):
    """Return outputs full of 0xAA bytes."""
    values = torch.full((rows, columns), 0xAA, dtype=torch.uint8, device=device).view(FP8)
    return values, torch.full((rows,), -7.0, device=device)


def check_tokens(columns, device, scale=None, permute=False):
    x, indices = make_x(columns, device), INDICES.to(device)
    scale = None if scale is None else torch.tensor([scale], device=device)
    values, scales = (t.view(torch.uint8) for t in reference.quantise_rows(x.float(), scale))
    out, out_scales = moe_numba.per_token_quant_fp8(x, scale)
    assert torch.equal(out.view(torch.uint8), values) and torch.equal(out_scales.view(torch.uint8), scales)
    out = poisoned(10, columns, device)
    if not permute:
        out = out[0][:5], out[1]
    before = out[0].view(torch.uint8).clone()
    assert moe_numba.per_token_quant_fp8(x, scale, indices, permute, out=out) is out
    wanted, wanted_scales = before.clone(), torch.full((10,), -7.0, device=device)
    for token, rows in enumerate(INDICES.tolist()):
        for row in rows:
            if 0 <= row < 10:
                wanted_scales[row] = scales.view(torch.float32)[token]
                if permute:
                    wanted[row] = values[token]
    assert torch.equal(out[1], wanted_scales)
    assert torch.equal(out[0].view(torch.uint8), wanted if permute else values)


@pytest.mark.parametrize(
    "columns, scale, permute", [(16, None, True), (1040, None, False), (1040, 0.005, True), (8208, None, False)]
)
def test_tokens(columns, scale, permute, device):
    """With 8208 columns a thread has two vectors."""
    check_tokens(columns, device, scale, permute)


def check_activation(columns, device, scale=None, valid=None, **options):
    """The approximate exponential may move a value to the other neighbour in FP8, 1/8 away at most."""
    x, rows = make_x(2 * columns, device), 5 if valid is None else valid
    scale = None if scale is None else torch.tensor([scale], device=device)
    valid = None if valid is None else torch.tensor([valid], dtype=torch.int32, device=device)
    wanted, wanted_scales = reference.quantise_rows(reference.silu_and_mul(x, **options), scale)
    values, scales = out = poisoned(5, columns, device)
    before = values.view(torch.uint8).clone()
    assert moe_numba.silu_and_mul_quant_fp8(x, scale, out, valid, **options) is out
    assert torch.equal(values.view(torch.uint8)[rows:], before[rows:]) and (scales[rows:] == -7).all()
    torch.testing.assert_close(scales[:rows], wanted_scales[:rows], rtol=2**-15, atol=0)
    given, wanted = values[:rows].float(), wanted[:rows].float()
    assert ((given - wanted).abs() <= wanted.abs() / 7).all() and (given == wanted).float().mean() > 0.99


@pytest.mark.parametrize(
    "columns, options",
    [(16, {}), (1040, dict(valid=2)), (48, LIMITED | dict(valid=4)), (48, dict(limit=2.0, scale=0.01))],
)
def test_activation(columns, options, device):
    check_activation(columns, device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [2880, 7168, 16400, 32768])
def test_large(columns):
    for scale in (None, 0.01):
        check_tokens(columns, "cuda", scale, permute=True)
        check_activation(columns, "cuda", scale, valid=3, **LIMITED)


def test_nan_and_infinity(device):
    x = torch.ones(3, 64, dtype=BF16, device=device)
    x[0, 5], x[1, 6] = float("nan"), float("inf")
    values, scales = moe_numba.per_token_quant_fp8(x)
    assert values[0].float().isnan().all() and scales[0].isnan() and scales[1] == float("inf")
    assert values[1].float().isnan()[6] and (values[2].float() == 448).all()


X = torch.zeros(3, 64).bfloat16()
REFUSALS = [
    (dict(x=X.float()), TypeError, "x is torch.float32; it must be torch.bfloat16"),
    (dict(x=X[:, :24].contiguous()), ValueError, "x's hidden is 24; it must be a multiple of 16, up to 32768"),
    (dict(scale=torch.ones(3)), ValueError, r"scale has shape \(3,\); it must have one element"),
    (dict(scale=torch.ones(1).double()), TypeError, "scale is torch.float64; it must be torch.float32"),
    (dict(inverse_indices=torch.zeros(2, 2).int()), ValueError, r"inverse_indices has shape \(2, 2\)"),
    (dict(permute=True), ValueError, "permute is True: inverse_indices must be given"),
    (dict(permute=2), TypeError, "permute is 2; it must be True or False"),
]
REFUSALS_OF_ACTIVATION = [
    (dict(x=X[:, :48].contiguous()), ValueError, "x has 48 columns, gate and up; it must have a multiple of 32"),
    (dict(scale=torch.ones(3)), ValueError, "scale has shape"),
    (dict(activation="gelu"), ValueError, "activation is 'gelu'; it must be one of silu, swigluoai"),
    (dict(limit=0.0), ValueError, "limit is 0.0; it must be positive and finite"),
    (dict(alpha=True), TypeError, "alpha is True; it must be a number"),
]


@pytest.mark.parametrize("change, error, message", REFUSALS)
def test_invalid_arguments(change, error, message, device):
    given = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in (dict(x=X) | change).items()}
    with pytest.raises(error, match=message):
        moe_numba.per_token_quant_fp8(**given)


@pytest.mark.parametrize("change, error, message", REFUSALS_OF_ACTIVATION)
def test_invalid_arguments_of_the_activation(change, error, message, device):
    given = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in (dict(x=X) | change).items()}
    with pytest.raises(error, match=message):
        moe_numba.silu_and_mul_quant_fp8(**given)


WRONG = {  # check, passage, replacement
    "no barrier": (check_tokens, "            cuda.syncthreads()\n", ""),
    "the largest of the first warp only": (check_tokens, "for warp in range(warps):", "for warp in range(1):"),
    "columns beyond the last": (
        check_tokens,
        "if column < columns:\n                index",
        "if True:\n                index",
    ),
    "rows beyond the last": (check_tokens, "row[k] < num_rows:", "row[k] <= num_rows:"),
    "one valid row too many": (check_activation, "row < num_valid_rows[0]", "row <= num_valid_rows[0]"),
    "values in another order": (
        check_activation,
        "column + 8, values, v * VECTOR + 8",
        "column, values, v * VECTOR + 8",
    ),
}


@SIMULATED
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_rejected(name, device, monkeypatch):
    check, right, replacement = WRONG[name]
    made = changed(per_token_quant_kernels, right, replacement)
    for make in ("make_token_quant_kernel", "make_activation_quant_kernel"):
        monkeypatch.setattr(per_token_quant, make, made[make])
    options = dict(permute=True) if check is check_tokens else dict(valid=2)

    def attempt(seed):
        per_token_quant._plans.clear()
        with simulator.seed(seed), simulator.races():
            check(1040, device, **options)

    assert is_rejected(attempt, seeds=2)


_TOKENS, _ACTIVATION = per_token_quant._TOKENS_SIGNATURE, per_token_quant._ACTIVATION_SIGNATURE
KERNELS = {
    "tokens": ("make_token_quant_kernel(7168, 8, True, False)", _TOKENS, 448, False),
    "activation": (
        "make_activation_quant_kernel(14336, True, False, 'swigluoai', 1.7, 7.0)",
        _ACTIVATION,
        (448, 2),
        False,
    ),
}


def test_the_machine_code():
    """16-byte accesses, no spills; two CTAs of 448 threads fit into the registers of an SM."""
    for name, report in compile_apart("from moe_numba.moe_layer.per_token_quant.kernel import *", KERNELS).items():
        assert report.spilled_bytes == report.stack_bytes == 0 and report.registers <= 72, name
        if report.opcodes is not None:
            assert report.count("LDG.E.128.CONSTANT") == {"tokens": 2, "activation": 8}[name]
            assert report.count("LDL", "STL") == 0 and report.count("BAR") == 1, name
