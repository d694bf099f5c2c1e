"""The public function of the k-grouped GEMM, and the backward of the grouped GEMM."""

import contextlib
import re

import pytest
import torch
from torch.library import opcheck

import moe_numba
from moe_numba import group_gemm_bf16, k_grouped_gemm_bf16, simulator
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.k_grouped import launch as k_grouped_launch
from moe_numba.grouped_gemm.k_grouped import unused_rows
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.runtime import device as devices
from moe_numba.runtime.changed_source import changed_module
from moe_numba.runtime.validate import UnsupportedDeviceError

ROUNDING = 2.3e-3  # relative error of rounding to bfloat16; see ``mismatch``


def int32(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def inputs(device, n=72, k=136):
    """Two groups of 5 and 66 rows, an empty one, and rows of no group before, between and behind them."""
    torch.manual_seed(0)
    a, b = torch.randn(80, n).bfloat16(), torch.randn(80, k).bfloat16()
    return a.to(device), b.to(device), int32(5, 0, 66, device=device), int32(2, 8, 10, 76, device=device)


# The k-grouped GEMM


def test_outputs(device):
    a, b, seqlens, cu_seqlens = inputs(device)
    expected = reference.k_grouped_gemm(a, b, seqlens, cu_seqlens)
    wrong = lambda out, bound: mismatch(out.flatten(0, 1), expected.flatten(0, 1), bound)
    out = k_grouped_gemm_bf16(a, b, seqlens, cu_seqlens)
    assert out.dtype == torch.float32 and wrong(out, 2e-5) is None and not out[1].any()
    half = k_grouped_gemm_bf16(a, b, seqlens, cu_seqlens, out_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and wrong(half, ROUNDING) is None
    given = torch.full_like(half, float("nan"))
    assert k_grouped_gemm_bf16(a, b, seqlens, cu_seqlens, out=given) is given and torch.equal(given, half)
    total = torch.ones_like(out)
    assert k_grouped_gemm_bf16(a, b, seqlens, cu_seqlens, out=total, accumulate=True) is total
    assert total[1].eq(1).all() and torch.equal(total, 1 + out)
    ends = int32(7, 7, 73, device=device)
    offset = k_grouped_gemm_bf16(a, b, None, None, ends)
    expected = reference.k_grouped_gemm(a, b, int32(7, 0, 66), int32(0, 7, 7))
    assert wrong(offset, 2e-5) is None
    wide = torch.cat([a, a], 1)[:, : a.shape[1]]  # rows at another distance
    assert torch.equal(k_grouped_gemm_bf16(wide, b, None, None, ends), offset)


def test_no_rows(device):
    a, b, seqlens, cu_seqlens = inputs(device)
    out = torch.full((3, 72, 136), 2.0, device=device)
    arguments = a[:0], b[:0], seqlens, cu_seqlens
    assert k_grouped_gemm_bf16(*arguments, out=out, accumulate=True).eq(2).all()
    assert not k_grouped_gemm_bf16(*arguments, out=out).any() and k_grouped_gemm_bf16(*arguments).shape == out.shape


A, B, SEQLENS, CU_SEQLENS = inputs("cpu")
BAD = {
    "a is torch.float32": dict(a=A.float()),
    "a has shape (72,)": dict(a=A[0]),
    "a has 12 columns": dict(a=A[:, :12]),
    "b has shape (79, 136)": dict(b=B[:79]),
    "b has 0 columns": dict(b=B[:, :0]),
    "a has strides (1, 80)": dict(a=A.T.contiguous().T),
    "b has strides (130, 1)": dict(b=torch.cat([B, B], 1)[:, :130].contiguous()[:, :128]),
    "seqlens is None": dict(seqlens=None),
    "seqlens is torch.int64": dict(seqlens=SEQLENS.long()),
    "seqlens has shape ()": dict(seqlens=SEQLENS[0]),
    "cu_seqlens is None": dict(cu_seqlens=None),
    "cu_seqlens has shape (3,)": dict(cu_seqlens=CU_SEQLENS[:3]),
    "seqlens has 0 groups": dict(seqlens=SEQLENS[:0], cu_seqlens=CU_SEQLENS[:1]),
    "offs is given": dict(offs=SEQLENS),
    "out_dtype is torch.float16": dict(out_dtype=torch.float16),
    "out is torch.float32 (3, 72, 128)": dict(out=torch.zeros(3, 72, 128)),
    "out is torch.float32 (3, 72, 136)": dict(out=torch.zeros(3, 72, 136), out_dtype=torch.bfloat16),
    "accumulate is True, but out is None": dict(accumulate=True),
    "accumulate is 2": dict(accumulate=2),
    "out_dtype is torch.bfloat16": dict(out=torch.zeros(3, 72, 136, dtype=torch.bfloat16), accumulate=True),
}


def same_strides(tensor, device):
    """Copy a tensor to a device; ``to`` would make one with gaps contiguous."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_are_refused(message, device):
    arguments = dict(a=A, b=B, seqlens=SEQLENS, cu_seqlens=CU_SEQLENS) | BAD[message]
    arguments = {n: same_strides(v, device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        k_grouped_gemm_bf16(**arguments)


def test_older_gpus_are_refused(monkeypatch, device):
    monkeypatch.setattr(devices, "gpu_of", lambda device: devices.gpu_like((8, 0)))
    monkeypatch.setattr(k_grouped_launch, "gpu_of", devices.gpu_of)
    with pytest.raises(UnsupportedDeviceError, match="has compute capability 8.0; k_grouped_gemm_bf16 needs a Hopper"):
        k_grouped_gemm_bf16(*inputs(device))


# The backward


def gradients(layout, device, mn_major=False, n=80, k=64, function=group_gemm_bf16):
    """Gradients of x and weight, and those in float64 that they must equal."""
    torch.manual_seed(1)
    x, weight = torch.randn(24, k, device=device), torch.randn(3, n, k, device=device)
    grad = torch.randn(24, n, device=device)
    x, weight, grad = (t.bfloat16() for t in (x, weight, grad))
    if layout == "offsets":
        groups, rows = (
            dict(seqlens=None, cu_seqlens=None, offs=int32(6, 6, 22, device=device)),
            [(0, 6), (6, 6), (6, 22)],
        )
    elif layout == "masked":
        groups, rows = dict(seqlens=int32(3, 0, 8, device=device), cu_seqlens=None), [(0, 3), (8, 8), (16, 24)]
        x, grad = x.view(3, 8, k), grad.view(3, 8, n)
    else:
        seqlens, starts = int32(5, 0, 15, device=device), int32(1, 7, 7, 22, device=device)
        groups, rows = dict(seqlens=seqlens, cu_seqlens=starts), [(1, 6), (7, 7), (7, 22)]
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    flat, flat_grad = exact_x.view(24, k), grad.double().view(24, n)
    exact = sum(((flat[i:j] @ w.T) * flat_grad[i:j]).sum() for (i, j), w in zip(rows, exact_weight, strict=True))
    if mn_major:
        weight = weight.mT.contiguous().mT
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = function(x, weight, **groups)
    inside = torch.zeros(24, dtype=torch.bool)
    for i, j in rows:
        inside[i:j] = True
    # Gradients of rows that belong to no group must have no effect.
    grad = torch.where(inside.view(*x.shape[:-1], 1).to(device), grad, float("nan"))
    found = torch.autograd.grad(y, (x, weight), grad)
    return found, torch.autograd.grad(exact, (exact_x, exact_weight)), inside


def check_gradients(found, exact, inside):
    """Assert that gradients are the exact ones, rounded to bfloat16, and zeros where no group has a row."""
    for got, wanted in zip(found, exact, strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
        assert mismatch(got.flatten(0, -2), wanted.flatten(0, -2), ROUNDING) is None
    assert not found[0].flatten(0, -2)[~inside.to(found[0].device)].any()


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("layout", ["lengths", "offsets", "masked"])
def test_gradients(layout, mn_major, device):
    found, exact, inside = gradients(layout, device, mn_major)
    check_gradients(found, exact, inside)
    wrong = exact[0].roll(1, 0), exact[1].flip(0)
    for got, other in zip(found, wrong, strict=True):
        assert mismatch(got.flatten(0, -2), other.flatten(0, -2), ROUNDING)
    assert found[1].stride() == ((80 * 64, 1, 80) if mn_major else (80 * 64, 64, 1))


def test_gradients_under_torch_compile(device):
    compiled = torch.compile(
        lambda x, weight, **groups: group_gemm_bf16(x * 1, weight, **groups), fullgraph=True, backend="aot_eager"
    )
    for layout in ("lengths", "offsets", "masked"):
        check_gradients(*gradients(layout, device, function=compiled))


LAYOUTS = {
    # shape of the tensor without its columns, group sizes, and the rows that belong to a group
    "lengths": ((20,), ((3, 0, 5), (2, 9, 11, 18), None), [2, 3, 4, *range(11, 16)]),
    "invalid": ((20,), ((-1, 7, 1 << 30), (2, -3, 18, 9), None), [*range(7), 18, 19]),
    "offsets": ((20,), (None, None, (3, 3, 15)), range(15)),
    "masked": ((3, 6), ((2, 9, 0), None, None), [0, 1, *range(6, 12)]),
    "many": ((80,), ([1] * 40, range(0, 82, 2), None), range(0, 80, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_unused_rows_become_zeros(name, device):
    shape, sizes, used = LAYOUTS[name]
    out = torch.full((*shape, 264), 3.0, dtype=torch.bfloat16, device=device)
    sizes = [values if values is None else int32(*values, device=device) for values in sizes]
    with simulator.races() if simulator.ENABLED else contextlib.nullcontext():
        unused_rows.zero_unused_rows(out, *sizes)
    expected = torch.zeros(out.shape[:-1].numel(), 264)
    expected[list(used)] = 3
    assert torch.equal(out.flatten(0, -2).float().cpu(), expected)
    assert unused_rows.zero_unused_rows(out.view(-1, 264)[:0], *sizes) is None
    if name == "lengths":
        opcheck(torch.ops.moe_numba.zero_unused_rows.default, (out, *sizes))


@pytest.mark.parametrize(
    "old, new",
    [("row - first < count", "row - first <= count"), ("first <= row and ", ""), ("if not cuda.any", "if cuda.any")],
)
def test_wrong_kernels_that_zero_rows_are_rejected(old, new, device, monkeypatch):
    if not simulator.ENABLED:
        pytest.skip("the simulator suffices")
    wrong = changed_module(unused_rows, (old, new), ('f"{NAMESPACE}::zero_unused_rows"', '"moe_numba_changed::zero"'))
    monkeypatch.setattr(unused_rows, "zero_unused_rows", wrong.zero_unused_rows)
    with pytest.raises(AssertionError):
        for name in ("lengths", "offsets"):
            test_unused_rows_become_zeros(name, device)


def test_only_one_gradient_is_computed(device, monkeypatch):
    x, weight = torch.randn(6, 64, device=device).bfloat16(), torch.randn(2, 64, 64, device=device).bfloat16()
    groups, called = (int32(2, 4, device=device), int32(0, 2, 6, device=device)), []
    autograd = moe_numba.grouped_gemm.api.autograd
    for name in ("group_gemm_bf16", "k_grouped_gemm_bf16"):
        original = getattr(autograd, name)
        monkeypatch.setattr(autograd, name, lambda *a, f=original, **o: called.append(f.__name__) or f(*a, **o))
    group_gemm_bf16(x.requires_grad_(), weight, *groups).sum().backward()  # of a gradient with strides of 0
    assert called == ["group_gemm_bf16"] and x.grad is not None
    called.clear()
    group_gemm_bf16(x.detach(), weight.requires_grad_(), *groups).sum().backward()
    assert called == ["k_grouped_gemm_bf16"] and weight.grad.shape == weight.shape


def test_what_has_no_backward(device):
    x, weight = torch.randn(6, 64, device=device).bfloat16(), torch.randn(2, 64, 64, device=device).bfloat16()
    groups = int32(2, 4, device=device), int32(0, 2, 6, device=device)
    x.requires_grad_()
    for name, value in (
        ("gather_indices", torch.arange(6, dtype=torch.int32, device=device)),
        ("bias", torch.ones(2, 64, device=device)),
        ("row_weights", torch.ones(6, device=device)),
        ("out_dtype", torch.float32),
    ):
        y = group_gemm_bf16(x, weight, *groups, **{name: value})
        given = "out_dtype=torch.float32" if name == "out_dtype" else name
        with pytest.raises(NotImplementedError, match=f"{given} was given, but group_gemm_bf16 has a backward only"):
            y.sum().backward()
    out = torch.empty(6, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="x requires grad; group_gemm_bf16 has a backward only without out"):
        group_gemm_bf16(x, weight, *groups, out=out)
    with pytest.raises(NotImplementedError, match="create_graph is True, but group_gemm_bf16 has no second derivative"):
        torch.autograd.grad(group_gemm_bf16(x, weight, *groups).sum(), x, create_graph=True)


@pytest.mark.parametrize("mn_major", [False, True])
def test_opcheck(mn_major, device):
    x, weight = torch.randn(6, 64, device=device).bfloat16(), torch.randn(2, 64, 80, device=device).bfloat16()
    weight = weight.mT if mn_major else weight.mT.contiguous()
    groups = int32(2, 4, device=device), int32(0, 2, 6, device=device)
    arguments = x[:, :64].requires_grad_(), weight.requires_grad_(), *groups
    checks = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    opcheck(torch.ops.moe_numba.group_gemm_bf16.default, arguments, test_utils=checks)


# Large sizes, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", [(4096, 7168), (7168, 2048), (520, 1032)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_large_sizes(n, k, out_dtype):
    torch.manual_seed(0)
    lengths = [0, 1, 300, 257, 7, 0, 64, 1024, 63, 0]
    seqlens = int32(*lengths, device="cuda")
    cu_seqlens = torch.cat([int32(0, device="cuda"), seqlens.cumsum(0).int()])
    a, b = (torch.randn(sum(lengths) + 5, columns, device="cuda").bfloat16() for columns in (n, k))
    a[-5:], b[-5:] = float("inf"), float("nan")
    out = torch.full((len(lengths), n, k), float("nan"), dtype=out_dtype, device="cuda")
    k_grouped_gemm_bf16(a, b, seqlens, cu_seqlens, out=out)
    first = out.clone()
    for g, length in enumerate(lengths):
        start = sum(lengths[:g])
        expected = a[start : start + length].double().T @ b[start : start + length].double()
        assert mismatch(out[g], expected, 2e-5 if out_dtype == torch.float32 else ROUNDING) is None, g
    for _ in range(20):
        out.fill_(float("nan"))
        k_grouped_gemm_bf16(a, b, seqlens, cu_seqlens, out=out)
        assert torch.equal(out, first)
    if out_dtype == torch.float32:
        k_grouped_gemm_bf16(a, b, seqlens, cu_seqlens, out=out, accumulate=True)
        assert torch.equal(out, 2 * first)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["lengths", "offsets", "masked"])
def test_gradients_of_inductor(layout, device):
    compiled = torch.compile(lambda x, weight, **groups: group_gemm_bf16(x * 1, weight, **groups), fullgraph=True)
    check_gradients(*gradients(layout, device, function=compiled))
