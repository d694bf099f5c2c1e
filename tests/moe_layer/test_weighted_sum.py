"""Test weighted_sum and silu_and_mul against their references: the sum bit by bit."""

import numpy as np
import pytest
import torch
from helpers.machine_code import is_dependent_launch
from helpers.wrong_kernels import changed, is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.moe_layer import reference, silu_and_mul
from moe_numba.moe_layer import weighted_sum as public_weighted_sum
from moe_numba.moe_layer.silu_and_mul import api as silu_and_mul_api
from moe_numba.moe_layer.silu_and_mul import kernel as kernel_silu_and_mul
from moe_numba.moe_layer.weighted_sum import api as weighted_sum_api
from moe_numba.moe_layer.weighted_sum import kernel as kernel_weighted_sum
from moe_numba.runtime.sass import compile_apart

BF16 = torch.bfloat16
SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a kernel in the simulator")


def make_inputs(tokens, topk, hidden, device, num_rows=None, seed=0):
    """Rows, indices (some of which are -1 or beyond the rows), weights, and the output of shared experts."""
    random = torch.Generator().manual_seed(seed)
    num_rows = tokens * topk if num_rows is None else num_rows
    rows, shared = torch.randn(num_rows, hidden, generator=random), torch.randn(tokens, hidden, generator=random)
    indices = torch.randint(-1, num_rows + 1, (tokens, topk), generator=random, dtype=torch.int32)
    weights = torch.rand(tokens, topk, generator=random)
    return [t.to(device) for t in (rows.bfloat16(), indices, weights, shared.bfloat16())]


def bits(tensor):
    return tensor.view(torch.int16)


def poisoned(shape, device):
    """Return a poisoned output in the middle of a larger poisoned buffer, and the buffer."""
    buffer = torch.full((shape[0] * shape[1] + 16,), -1234, dtype=torch.int16, device=device)
    return buffer[8:-8].view(BF16).view(shape), buffer


def check_sum(rows, indices, weights, shared=None):
    wanted = reference.weighted_sum(rows, indices, weights, shared)
    out, buffer = poisoned(wanted.shape, rows.device)
    assert public_weighted_sum(rows, indices, weights, shared, out=out) is out
    assert torch.equal(bits(out), bits(wanted))
    assert (buffer[:8] == -1234).all() and (buffer[-8:] == -1234).all(), "out-of-bounds write"
    return out


def check_silu(x, valid=None, **options):
    """Compare with rounding to bfloat16 once, which the approximate exponential may move to the other neighbour."""
    wanted, rows = reference.silu_and_mul(x, **options), len(x) if valid is None else int(valid)
    out, buffer = poisoned(wanted.shape, x.device)
    before = out.clone()
    assert silu_and_mul(x, out=out, num_valid_rows=valid, **options) is out
    assert torch.equal(bits(out[rows:]), bits(before[rows:])), "an invalid row was written"
    error = (out[:rows].float() - wanted[:rows]).abs()
    assert (error <= wanted[:rows].abs() * (2**-8 + 2**-15) + 1e-36).all()
    assert (out[:rows] == wanted[:rows].bfloat16()).float().mean() > 0.99 if rows else True
    assert (buffer[:8] == -1234).all() and (buffer[-8:] == -1234).all(), "out-of-bounds write"
    return out


# The weighted sum


def test_reference_by_hand():
    rows = torch.tensor([[1.0, 2], [10, 20], [100, 200]]).bfloat16()
    indices, weights = torch.tensor([[2, 0], [-1, 3], [1, 1]]), torch.tensor([[0.5, 2], [1, 1], [0.25, 0.5]])
    assert reference.weighted_sum(rows, indices, weights).tolist() == [[52, 104], [0, 0], [7.5, 15]]
    shared = torch.ones(3, 2).bfloat16()
    assert reference.weighted_sum(rows, indices, weights, shared).tolist() == [[53, 105], [1, 1], [8.5, 16]]


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(
    "tokens, topk, hidden", [(0, 8, 64), (1, 1, 8), (7, 2, 136), (9, 8, 1032), (64, 8, 64), (5, 9, 72), (3, 22, 16)]
)
def test_equals_reference(tokens, topk, hidden, has_shared, device):
    *inputs, shared = make_inputs(tokens, topk, hidden, device)
    check_sum(*inputs, shared if has_shared else None)


def test_without_rows(device):
    rows, indices, weights, shared = make_inputs(5, 2, 64, device, num_rows=0)
    assert not check_sum(rows, indices, weights).any()
    assert torch.equal(check_sum(rows, indices, weights, shared), shared)


def test_what_is_skipped_adds_nothing(device):
    """Neither a NaN weight of an index that is out of bounds, nor a NaN row that no index names."""
    rows, indices, weights, _ = make_inputs(7, 4, 64, device)
    indices[:, 1], indices[:, 2], indices[indices == 5] = -1, len(rows), 6
    weights[:, 1:3], rows[5] = float("nan"), float("nan")
    assert not check_sum(rows, indices, weights).isnan().any()


def test_extreme_indices(device):
    rows, indices, weights, _ = make_inputs(3, 2, 64, device)
    indices[0], indices[1, 0] = torch.tensor([-(2**31), 2**31 - 1]), len(rows) - 1
    check_sum(rows, indices, weights)


@SIMULATED
def test_offset_of_a_row_beyond_32_bits():
    """The rows before the last take no memory: NumPy's zeros are pages that nothing has touched."""
    rows = torch.from_numpy(np.zeros(((1 << 31) // 2048 + 1, 2048), np.int16)).view(BF16)
    rows[-1] = 3
    indices = torch.tensor([[len(rows) - 1]], dtype=torch.int32, device="cpu")
    assert (public_weighted_sum(rows, indices, torch.ones(1, 1, device="cpu")) == 3).all()


def test_position_in_the_batch_does_not_matter(device):
    rows, indices, weights, shared = make_inputs(16, 8, 72, device)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).to(device)
    whole = check_sum(rows, indices, weights, shared)
    assert torch.equal(check_sum(rows, indices[order], weights[order], shared[order]), whole[order])
    assert torch.equal(check_sum(rows, indices[3:4], weights[3:4], shared[3:4]), whole[3:4])


def test_order_of_the_sum(device):
    """In order of the columns: 2**30 - 2**30 + 1 is 1, 1 + 2**30 - 2**30 is 0 in float32."""
    rows = torch.tensor([2.0**30, -(2.0**30), 1.0], device=device)[:, None].expand(3, 8).bfloat16().contiguous()
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]], dtype=torch.int32, device=device)
    assert check_sum(rows, indices, torch.ones(2, 3, device=device))[:, 0].tolist() == [1, 0]


def make_cancelling_inputs(device):
    """Inputs whose rows cancel, so that the rounding errors of the sum remain."""
    rows, indices, weights, _ = make_inputs(5, 10, 72, device)
    indices[:, :5] = torch.arange(25, device=device).view(5, 5)
    indices[:, 5:], weights[:, 5:] = indices[:, :5], -weights[:, :5]
    return rows, indices, weights


def test_rounding_errors_of_the_sum(device):
    total = check_sum(*make_cancelling_inputs(device))
    assert 0 < float(total.abs().max()) < 1e-5


def test_out_may_be_the_shared_experts_output(device):
    rows, indices, weights, shared = make_inputs(7, 2, 64, device)
    wanted = reference.weighted_sum(rows, indices, weights, shared)
    assert public_weighted_sum(rows, indices, weights, shared, out=shared) is shared
    assert torch.equal(shared, wanted)


@SIMULATED
def test_thread_orders(device):
    *inputs, shared = make_inputs(5, 3, 72, device)
    x = make_inputs(5, 1, 144, device)[0]
    for seed in range(3):
        with simulator.seed(seed, preempt=0.1), simulator.settings.settings.override(engine="threads"):
            check_sum(*inputs, shared)
            check_silu(x)


def test_prepared_calls(device):
    rows, indices, weights, _ = make_inputs(7, 2, 64, device)
    total, activated = (
        moe_numba.prepare(public_weighted_sum, rows, indices, weights),
        moe_numba.prepare(silu_and_mul, rows),
    )
    rows.copy_(make_inputs(7, 2, 64, device, seed=1)[0])
    assert torch.equal(total(), reference.weighted_sum(rows, indices, weights))
    assert torch.equal(activated(), silu_and_mul(rows))


# The activation


@pytest.mark.parametrize("rows, columns", [(0, 8), (1, 8), (7, 136), (3, 1032), (40, 64)])
def test_silu_and_mul(rows, columns, device):
    x = make_inputs(rows, 1, 2 * columns, device)[0] * 4
    check_silu(x)
    for limit in (0, 3, rows + 5):
        check_silu(x, torch.tensor([min(limit, rows)], dtype=torch.int32, device=device))


@pytest.mark.parametrize("options", [dict(limit=2.0), dict(activation="swigluoai", alpha=1.5, limit=1.0)])
def test_other_activations(options, device):
    x = make_inputs(5, 1, 48, device)[0] * 4
    check_silu(x, torch.tensor([4], dtype=torch.int32, device=device), **options)
    swapped = silu_and_mul(x.roll(24, 1), **options)
    assert not torch.equal(swapped, silu_and_mul(x, **options))
    x[2, 7] = float("nan")
    assert silu_and_mul(x, **options).isnan().sum() == 1


def test_silu_of_every_bfloat16(device):
    """Large, subnormal and special gates; torch's result is NaN for NaN and for minus infinity, too."""
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16).to(device)
    if simulator.ENABLED:
        gate = gate[::16].contiguous()
    x = torch.stack([gate.view(-1, 8), torch.ones_like(gate).view(-1, 8)], 1).view(-1, 16)
    given, wanted = silu_and_mul(x).flatten().float(), reference.silu_and_mul(x).flatten()
    finite = gate.isfinite()
    error = (given - wanted).abs()[finite]
    assert (error <= wanted[finite].abs() * (2**-8 + 2**-15) + 1e-36).all()
    assert torch.equal(given.isnan(), wanted.isnan()) and float(given[gate == float("inf")].min()) == float("inf")


def test_a_limit_beyond_the_rows_and_a_negative_one(device):
    x = make_inputs(5, 1, 32, device)[0]
    whole = silu_and_mul(x)
    assert torch.equal(silu_and_mul(x, num_valid_rows=torch.tensor([99], dtype=torch.int32, device=device)), whole)
    out = torch.full_like(whole, 7)
    silu_and_mul(x, out, torch.tensor([-3], dtype=torch.int32, device=device))
    assert (out == 7).all()


# Error messages

SUM_REFUSALS = [
    (dict(rows=[1.0]), TypeError, "rows is list"),
    (dict(rows=torch.zeros(6, 64)), TypeError, "rows is torch.float32; it must be torch.bfloat16"),
    (dict(rows=torch.zeros(6, 12).bfloat16()), ValueError, "rows's hidden is 12; it must be a multiple of 8"),
    (dict(rows=torch.zeros(64, 6).bfloat16().t()), ValueError, r"rows has shape \(6, 64\) and strides \(1, 6\)"),
    (dict(rows=torch.zeros(392).bfloat16()[4:388].view(6, 64)), ValueError, "rows starts at address"),
    (dict(inverse_indices=torch.zeros(3, 2)), TypeError, "inverse_indices is torch.float32"),
    (dict(inverse_indices=torch.zeros(6).int()), ValueError, r"inverse_indices has shape \(6,\)"),
    (dict(inverse_indices=torch.zeros(3, 65).int()), ValueError, "inverse_indices, is 65; 1 to 64 are allowed"),
    (dict(topk_weights=torch.zeros(3, 2).bfloat16()), TypeError, "topk_weights is torch.bfloat16; it must be"),
    (dict(topk_weights=torch.zeros(3, 1)), ValueError, r"topk_weights has shape \(3, 1\).* it must be \[3, 2\]"),
    (dict(shared=torch.zeros(3, 64)), TypeError, "shared is torch.float32"),
    (dict(shared=torch.zeros(2, 64).bfloat16()), ValueError, r"shared has shape \(2, 64\).* it must be \[3, 64\]"),
    (dict(shared=torch.zeros(200).bfloat16()[4:196].view(3, 64)), ValueError, "shared starts at address"),
    (dict(out=torch.zeros(3, 64)), ValueError, "out is torch.float32"),
    (dict(out=torch.zeros(200).bfloat16()[4:196].view(3, 64)), ValueError, "out starts at address"),
]
SILU_REFUSALS = [
    (dict(x=torch.zeros(3, 16)), TypeError, "x is torch.float32; it must be torch.bfloat16"),
    (dict(x=torch.zeros(3, 24).bfloat16()), ValueError, "x has 24 columns, gate and up; .* a multiple of 16"),
    (dict(x=torch.zeros(16).bfloat16()), ValueError, r"x has shape \(16,\)"),
    (dict(x=torch.zeros(56).bfloat16()[4:52].view(3, 16)), ValueError, "x starts at address"),
    (dict(num_valid_rows=torch.zeros(1)), TypeError, "num_valid_rows is torch.float32"),
    (dict(num_valid_rows=torch.zeros(2).int()), ValueError, r"num_valid_rows has shape \(2,\); it must be \[1\]"),
    (dict(num_valid_rows=3), TypeError, "num_valid_rows is int"),
    (dict(activation="relu"), ValueError, "activation is 'relu'; it must be one of silu, swigluoai"),
    (dict(alpha=-1.0), ValueError, "alpha is -1.0; it must be positive and finite"),
    (dict(alpha=3e38), ValueError, "alpha is 3e.38; it must be positive and finite in float32, from"),
    (dict(limit=True), TypeError, "limit is True; it must be a number"),
    (dict(out=torch.zeros(3, 16).bfloat16()), ValueError, r"out is .*; it must be .* \(3, 8\)"),
]


def moved(arguments, device):
    def move(value):
        if not isinstance(value, torch.Tensor) or value.device.type == device:
            return value
        whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).to(device)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    return {name: move(value) for name, value in arguments.items()}


def test_the_largest_alpha(device):
    """No factor of the exponent is infinite: zeros stay zeros."""
    x = torch.zeros(1, 16, device=device).bfloat16()
    assert not silu_and_mul(x, activation="swigluoai", alpha=1e38).any()


@pytest.mark.parametrize("change, error, message", SUM_REFUSALS)
def test_invalid_arguments_of_weighted_sum(change, error, message, device):
    rows, indices = torch.zeros(6, 64).bfloat16(), torch.zeros(3, 2).int()
    arguments = dict(rows=rows, inverse_indices=indices, topk_weights=torch.zeros(3, 2)) | change
    with pytest.raises(error, match=message):
        public_weighted_sum(**moved(arguments, device))


@pytest.mark.parametrize("change, error, message", SILU_REFUSALS)
def test_invalid_arguments_of_silu_and_mul(change, error, message, device):
    with pytest.raises(error, match=message):
        silu_and_mul(**moved(dict(x=torch.zeros(3, 16).bfloat16()) | change, device))


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (kernel_weighted_sum.make_weighted_sum_kernel, (12, 8, False), "hidden is 12; it must be a multiple of 8"),
        (kernel_weighted_sum.make_weighted_sum_kernel, (64, 0, False), "topk is 0"),
        (kernel_silu_and_mul.make_silu_and_mul_kernel, (4, False), "columns is 4; it must be a multiple of 8"),
    ],
)
def test_factories_refuse_shapes(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(*arguments)


# Wrong kernels

WRONG_SUMS = {
    "an index beyond the rows is read": ("and row[k] < num_rows:", "and row[k] <= num_rows:"),
    "-1 is read": ("if row[k] >= 0 and", "if row[k] >= -1 and"),
    "columns after the first batch are left out": ("range(0, topk, batch)", "range(0, batch, batch)"),
    "a batch goes past the last column": ("if first + k < topk:", "if first + k <= topk:"),
    "in another order": ("add_row(words, 4 * k, weight[k], sums)", "add_row(words, 4 * (k ^ 1), weight[k ^ 1], sums)"),
    "rounded in between": ("cuda.fma(weight, low, sums[2 * i])", "float32(weight * low) + sums[2 * i]"),
    "low and high halves exchanged": (
        "cvt_rn_bf16x2_f32(sums[2 * i + 1], sums[2 * i])",
        "cvt_rn_bf16x2_f32(sums[2 * i], sums[2 * i + 1])",
    ),
    "shared experts are left out": ("            if has_shared:", "            if has_shared and vector == 0:"),
    "vectors beyond the last": ("if vector < uint32(num_vectors):", "if vector <= uint32(num_vectors):"),
}
WRONG_SILUS = {
    "up and gate exchanged": ("gates, ups = ", "ups, gates = "),
    "sigmoid without gate": ("return gate * rcp_approx", "return rcp_approx"),
    "base e instead of 2": ("float32(-LOG2_E)", "float32(-1.0)"),
    "the limit is inclusive": ("row < num_valid_rows[0]", "row <= num_valid_rows[0]"),
    "rows of x as wide as those of the result": (
        "int64(row) * (2 * columns) + column",
        "int64(row) * columns + column",
    ),
}


@SIMULATED
@pytest.mark.parametrize("name", WRONG_SUMS)
def test_wrong_sums_are_rejected(name, device, monkeypatch):
    made = changed(kernel_weighted_sum, *WRONG_SUMS[name])
    monkeypatch.setattr(weighted_sum_api, "make_weighted_sum_kernel", made["make_weighted_sum_kernel"])
    rows, indices, weights, shared = make_inputs(5, 22, 72, device)
    indices[0, :2] = torch.tensor([-1, len(rows)])

    def attempt(seed):
        weighted_sum_api._plans.clear()
        with simulator.seed(seed), simulator.races():
            check_sum(*make_cancelling_inputs(device))
            check_sum(rows, indices, weights, shared)
            check_sum(rows, indices, weights)

    assert is_rejected(attempt, seeds=2)


@SIMULATED
@pytest.mark.parametrize("name", WRONG_SILUS)
def test_wrong_activations_are_rejected(name, device, monkeypatch):
    made = changed(kernel_silu_and_mul, *WRONG_SILUS[name])
    monkeypatch.setattr(silu_and_mul_api, "make_silu_and_mul_kernel", made["make_silu_and_mul_kernel"])
    x = make_inputs(5, 1, 48, device)[0]

    def attempt(seed):
        silu_and_mul_api._plans.clear()
        with simulator.seed(seed), simulator.races():
            check_silu(x, torch.tensor([3], dtype=torch.int32))

    assert is_rejected(attempt, seeds=2)


# Machine code; no GPU is needed.

_SUM = "uint16*", "int32*", "float32*", "uint16*", "uint16*", "int32", "int64"
_SILU = "uint16*", "int32*", "uint16*", "int64"
SUMS = [(7168, 8, False), (7168, 8, True), (136, 9, False), (2048, 1, False)]
SILUS = [(2048, True), (136, False, "swigluoai", 1.702, 7.0)]
KERNELS = {f"sum {shape}": (f"make_weighted_sum_kernel{shape}", _SUM, 128, False) for shape in SUMS}
KERNELS |= {f"silu {shape}": (f"make_silu_and_mul_kernel{shape}", _SILU, 128, False) for shape in SILUS}


@pytest.fixture(scope="module")
def reports():
    source = (
        "from moe_numba.moe_layer.silu_and_mul.kernel import *\nfrom moe_numba.moe_layer.weighted_sum.kernel import *"
    )
    return compile_apart(source, KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_the_machine_code(name, reports):
    """16-byte accesses, all loads of a batch in flight before the first sum, no spills."""
    report = reports[name]
    assert report.spilled_bytes == report.stack_bytes == 0 and report.registers <= 64
    if report.opcodes is None:
        pytest.skip("there is no nvdisasm")
    assert report.count("LDL", "STL", "LD", "ST") == report.count("CALL") == 0
    assert is_dependent_launch(report) and report.count("STG.E.128") == 1
    if name.startswith("silu"):
        assert report.count("LDG.E.128.CONSTANT") == 2 and report.count("MUFU.EX2") == report.count("MUFU.RCP") == 8
        return
    topk = int(name.split(", ")[1])
    assert report.count("LDG.E.128.CONSTANT") == topk and report.count("FFMA") == 8 * topk
    loads = [i for i, opcode in enumerate(report.opcodes) if opcode.startswith("LDG.E.128.CONSTANT")]
    one_batch = report.opcodes[loads[0] : loads[-1]]
    assert not [opcode for opcode in one_batch if opcode.startswith("FFMA")]


# On a GPU: large sizes and graphs.


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, topk, hidden", [(1, 8, 7168), (64, 9, 7168), (4096, 8, 7168), (999, 8, 2888)])
def test_large(tokens, topk, hidden):
    rows, indices, weights, shared = make_inputs(tokens, topk, hidden, "cuda")
    first = check_sum(rows, indices, weights, shared)
    for _ in range(10):
        assert torch.equal(public_weighted_sum(rows, indices, weights, shared), first)
    check_silu(rows[:, : hidden // 16 * 16].contiguous())


@pytest.mark.gpu
def test_graph_replays_with_changed_inputs():
    inputs = make_inputs(64, 8, 7168, "cuda")
    out = public_weighted_sum(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        public_weighted_sum(*inputs, out=out)
    for seed in range(3):
        for tensor, value in zip(inputs, make_inputs(64, 8, 7168, "cuda", seed=seed + 1), strict=True):
            tensor.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, reference.weighted_sum(*inputs))


@pytest.mark.gpu
def test_beyond_32_bits():
    """2.4e9 elements: the offsets of the last rows need more than 32 bits."""
    rows = torch.zeros(1_200_000, 2056, dtype=BF16, device="cuda")
    rows[-1] = 3
    indices = torch.tensor([[1_199_999, 0]], dtype=torch.int32, device="cuda").expand(1_200_000, 2).contiguous()
    total = public_weighted_sum(rows, indices, torch.ones(1_200_000, 2, device="cuda"))
    assert (total == 3).all()


def test_numpy_arrays_beside_tensors(device):
    """Arguments after the first may be arrays of another library; NumPy has no bfloat16."""
    rows, indices, weights, _ = make_inputs(7, 2, 64, device)
    wanted = reference.weighted_sum(rows, indices, weights)
    library = np if simulator.ENABLED else pytest.importorskip("cupy")
    arrays = library.from_dlpack(indices), library.from_dlpack(weights)
    assert torch.equal(public_weighted_sum(rows, *arrays), wanted)
