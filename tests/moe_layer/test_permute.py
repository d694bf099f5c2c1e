"""permute_tokens and permute_cast_to_fp8: bitwise equal to rows that are cast first and permuted afterwards."""

import pytest
import torch
from helpers.wrong_kernels import changed, is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.moe_layer import group_by_expert, permute_cast_to_fp8, permute_tokens
from moe_numba.moe_layer.permute import api as permute
from moe_numba.moe_layer.permute import kernel as kernel_permute
from moe_numba.quantise import reference
from moe_numba.runtime.sass import compile_apart

UNWRITTEN = 0xA5
SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")


def make_inputs(tokens, topk, hidden, device, seed=0):
    """Tokens of many magnitudes, and a permutation of the rows in which some assignments have none."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random) * torch.randn(tokens, hidden, generator=random).exp()
    indices = torch.randperm(tokens * topk, generator=random).int().view(tokens, topk)
    indices[indices % 5 == 3] = -1
    return x.bfloat16().to(device), indices.to(device)


def mismatch(x, indices, casts=True):
    """Return None, or what is wrong with the result; bytes of rows that no index names must remain as they were."""
    results = reference.per_token_cast_to_fp8(x) if casts else (x,)
    count, (tokens, topk) = indices.numel(), indices.shape
    wanted, out = ([unwritten(result, count) for result in results] for _ in range(2))
    for rows, result in zip(wanted, results, strict=True):
        for k in range(topk if tokens else 0):
            valid = (indices[:, k] >= 0) & (indices[:, k] < count)
            rows[16:-16].view(count, -1)[indices[valid, k].long()] = result.view(torch.uint8)[valid]
    views = tuple(
        buffer[16:-16].view(result.dtype).view(count, result.shape[1])
        for buffer, result in zip(out, results, strict=True)
    )
    given = views if casts else views[0]
    assert (permute_cast_to_fp8 if casts else permute_tokens)(x, indices, out=given) is given
    differ = [int((a != b).sum()) for a, b in zip(out, wanted, strict=True)]
    return f"{differ} bytes of the output, or beside it, differ" if any(differ) else None


def unwritten(result, rows):
    """Bytes for ``rows`` rows like those of ``result``, and 16 before and behind them."""
    size = rows * result.shape[1] * result.element_size()
    return torch.full((size + 32,), UNWRITTEN, dtype=torch.uint8, device=result.device)


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize(
    "tokens, topk, hidden", [(0, 8, 64), (1, 1, 16), (5, 8, 128), (7, 2, 144), (9, 9, 272), (3, 22, 64), (4, 3, 7168)]
)
def test_equals_a_cast_and_a_permutation(tokens, topk, hidden, casts, device):
    assert mismatch(*make_inputs(tokens, topk, hidden, device), casts) is None


@pytest.mark.parametrize("casts", [False, True])
def test_extreme_indices(casts, device):
    x, indices = make_inputs(3, 2, 64, device)
    indices[0], indices[1, 0] = torch.tensor([-(2**31), 2**31 - 1]), 6
    assert mismatch(x, indices, casts) is None


def test_a_hidden_that_is_no_multiple_of_16(device):
    assert mismatch(*make_inputs(5, 3, 72, device), casts=False) is None


def test_nan_and_small_elements(device):
    x, indices = make_inputs(4, 2, 256, device)
    x[0, 5], x[1], x[2, :128], x[3, 200] = float("nan"), 0, 5e-5, float("inf")
    values, scales = permute_cast_to_fp8(x, torch.arange(8, dtype=torch.int32, device=device).view(4, 2))
    right, right_scales = reference.per_token_cast_to_fp8(x)
    assert torch.equal(scales.isnan(), right_scales.repeat_interleave(2, 0).isnan())
    assert torch.equal(values.float().nan_to_num(7), right.float().repeat_interleave(2, 0).nan_to_num(7))


def test_rows_are_in_the_order_of_the_experts(device):
    x, ids = make_inputs(9, 1, 64, device)[0], torch.randint(-1, 5, (9, 3)).to(device)
    *_, cu_seqlens, gather_indices, inverse_indices = group_by_expert(ids, 4)
    count = int(cu_seqlens[-1])
    values, scales = (t[:count] for t in permute_cast_to_fp8(x, inverse_indices))
    right, right_scales = (t[gather_indices[:count].long()] for t in map(as_bytes, reference.per_token_cast_to_fp8(x)))
    assert torch.equal(as_bytes(values), right) and torch.equal(scales, right_scales.view(scales.dtype))


@pytest.mark.parametrize("hidden", [64, 272])
def test_tokens_that_are_already_cast(hidden, device):
    """permute_fp8 stores the same as permute_cast_to_fp8; it reads scales in any strides."""
    x, indices = make_inputs(5, 3, hidden, device)
    values, scales = reference.per_token_cast_to_fp8(x)
    given, wanted = (
        (torch.zeros(15, hidden, device=device).to(values.dtype), torch.zeros(15, scales.shape[1], device=device))
        for _ in range(2)
    )
    permute_cast_to_fp8(x, indices, out=wanted)
    permute.permute_fp8(values, scales.t().contiguous().t(), indices, given)
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(given, wanted, strict=True))


def as_bytes(tensor):
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@SIMULATED
def test_thread_orders(device):
    inputs = make_inputs(5, 3, 144, device)
    for seed in range(3):
        with simulator.seed(seed, preempt=0.1), simulator.settings.settings.override(engine="threads"):
            assert mismatch(*inputs) is mismatch(*inputs, casts=False) is None


def test_prepared_calls(device):
    x, indices = make_inputs(7, 2, 64, device)
    indices[:] = torch.arange(14).view(7, 2)
    call, copy = (moe_numba.prepare(f, x, indices) for f in (permute_cast_to_fp8, permute_tokens))
    x.copy_(make_inputs(7, 2, 64, device, seed=1)[0])
    assert torch.equal(copy(), x.repeat_interleave(2, 0))
    assert torch.equal(as_bytes(call()[0])[::2], as_bytes(reference.per_token_cast_to_fp8(x)[0]))


REFUSALS = [
    (dict(x=[1.0]), TypeError, "x is list"),
    (dict(x=torch.zeros(3, 64)), TypeError, "x is torch.float32; it must be torch.bfloat16"),
    (dict(x=torch.zeros(3, 24).bfloat16()), ValueError, "x's hidden is 24; it must be a multiple of 16"),
    (dict(x=torch.zeros(64, 3).bfloat16().t()), ValueError, r"x has shape \(3, 64\) and strides \(1, 3\)"),
    (dict(x=torch.zeros(200).bfloat16()[4:196].view(3, 64)), ValueError, "x starts at address"),
    (dict(inverse_indices=torch.zeros(3, 2)), TypeError, "inverse_indices is torch.float32"),
    (dict(inverse_indices=torch.zeros(4, 2).int()), ValueError, r"inverse_indices has shape \(4, 2\)"),
    (dict(inverse_indices=torch.zeros(3, 65).int()), ValueError, "inverse_indices, is 65; 1 to 64 are allowed"),
    (dict(out=(torch.zeros(6, 64), torch.zeros(6, 1))), ValueError, "out's values is torch.float32"),
]


@SIMULATED
@pytest.mark.parametrize("change, error, message", REFUSALS)
def test_wrong_arguments_are_refused(change, error, message):
    arguments = dict(x=torch.zeros(3, 64).bfloat16(), inverse_indices=torch.zeros(3, 2).int()) | change
    with pytest.raises(error, match=message):
        permute_cast_to_fp8(**arguments)
    if "out" not in change and "hidden" not in message:
        with pytest.raises(error, match=message):
            permute_tokens(**arguments)


@SIMULATED
def test_a_hidden_that_is_no_multiple_of_8_is_refused():
    with pytest.raises(ValueError, match="x's hidden is 12; it must be a multiple of 8"):
        permute_tokens(torch.zeros(3, 12).bfloat16(), torch.zeros(3, 2).int())


WRONG = {
    "rows that no index names are written": ("row[k] >= 0 and row[k] < num_rows", "row[k] < num_rows"),
    "rows beyond the output are written": ("row[k] >= 0 and row[k] < num_rows", "row[k] >= 0"),
    "a group has the scale of half of it": ("for distance in (1, 2, 4):", "for distance in (1, 2):"),
    "each odd element is left out of the maximum": ("max(int32(low << 16), high)", "int32(low << 16)"),
    "only the first rows of a token are written": ("range(0, topk, batch)", "range(0, 1, batch)"),
    "pairs are exchanged": ("b * factor, a * factor", "a * factor, b * factor"),
    "elements beyond hidden are read": ("num_threads) and column < hidden", "num_threads)"),
}


@SIMULATED
@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernels_are_rejected(what, device, monkeypatch):
    made = changed(kernel_permute, *WRONG[what])
    for name in ("make_permute_cast_kernel", "make_permute_kernel"):
        monkeypatch.setattr(permute, name, made[name])
    x, indices = make_inputs(5, 9, 144, device)
    indices[1, 2] = 45  # one more than the last row

    def attempt(seed):
        permute._plans.clear()
        with simulator.seed(seed), simulator.races():
            return mismatch(x, indices) or mismatch(x, indices, casts=False)

    assert is_rejected(attempt, seeds=2), f"the check accepts a kernel in which {what}"


def test_the_machine_code():
    threads, makers = kernel_permute.THREADS, ("make_permute_kernel", "make_permute_cast_kernel")
    requests = {
        make: (f"kernel_permute.{make}(7168, 8)", signature, threads, True)
        for make, signature in zip(makers, (permute._SIGNATURE, permute._CAST_SIGNATURE), strict=True)
    }
    for report in compile_apart("from moe_numba.moe_layer.permute import kernel as kernel_permute", requests).values():
        assert report.spilled_bytes == 0 and report.count("STG.E.128") == 8
