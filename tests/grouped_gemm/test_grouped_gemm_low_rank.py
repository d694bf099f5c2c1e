"""Grouped GEMM with a second pair of operands, as for LoRA: shapes, layouts, outputs, refusals, wrong kernels."""

import re

import pytest
import torch
from helpers.wrong_kernels import changed_maker, is_rejected

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import group_gemm_bf16, group_gemm_pertensor_fp8, group_gemm_silu_and_mul_bf16, reference
from moe_numba.grouped_gemm.call import plan
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.wgmma import kernel, launch
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, check_config
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import UnsupportedDeviceError

BF16, F32 = torch.bfloat16, torch.float32
BOUND = 2e-5  # of float32 results
BF16_BOUND = 2**-8


@pytest.fixture(autouse=True)
def _needs_wgmma(device):
    if not devices.gpu_of(0).has_wgmma:
        pytest.skip("needs wgmma")


def problem(lengths=(5, 0, 15), n=144, k=80, r=16, *, mn_major=False, device="cpu", seed=0):
    """The arguments of a call, whose two products are equally large."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    rows, groups = sum(lengths), len(lengths)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    weight, weight_low = draw(groups, n, k), draw(groups, n, r) * (k / r) ** 0.5
    given = dict(x=draw(rows, k), weight=weight, x_low=draw(rows, r), weight_low=weight_low)
    given = {name: t.bfloat16().to(device) for name, t in given.items()}
    if mn_major:
        given |= {name: given[name].mT.contiguous().mT for name in ("weight", "weight_low")}
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), seqlens.cumsum(0).int()])
    return given | dict(seqlens=seqlens.to(device), cu_seqlens=starts.to(device))


def product(given):
    """The result in float64; NaN in rows of no group."""
    sizes = given["seqlens"], given["cu_seqlens"]
    low = reference.group_gemm(given["x_low"], given["weight_low"], *sizes).double()
    return reference.group_gemm(given["x"], given["weight"], *sizes).double() + low


SHAPES = {
    "empty groups": ((0, 3, 0, 0, 9, 0), 128, 128, 8),
    "one row": ((1,), 64, 64, 16),
    "groups without tiles": ((0,) * 30 + (2,) + (0,) * 9, 128, 64, 24),
    "64 columns": ((5, 0, 15), 144, 80, 64),
    "two blocks": ((5, 0, 15), 208, 144, 72),
    "two subtiles": ((200, 3, 300), 64, 64, 16),
}


@pytest.mark.parametrize("mn_major", (False, True), ids=("k-major", "mn-major"))
@pytest.mark.parametrize("average", (1, 8, 30, 300), ids=("small", "cluster", "larger cluster", "subtiles"))
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, average, mn_major, device):
    given = problem(*SHAPES[shape], mn_major=mn_major, device=device)
    y = group_gemm_bf16(**given, num_seq_per_group_avg=average, out_dtype=F32)
    assert mismatch(y, product(given), BOUND) is None


@pytest.mark.parametrize("layout", ("offsets", "masked", "m_indices"))
def test_group_sizes_in_other_forms(layout, device):
    """Rows of no group are NaN in both operands, and have no effect."""
    given = problem(device=device)
    wanted, lengths, nan = product(given), given.pop("seqlens"), float("nan")
    starts = given.pop("cu_seqlens")
    if layout == "masked":
        masked = {name: torch.full((3, 18, given[name].shape[1]), nan).bfloat16() for name in ("x", "x_low")}
        for g, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=False)):
            for name, t in masked.items():
                t[g, :length] = given[name][start : start + length]
        given |= {name: t.to(device) for name, t in masked.items()}
        y = group_gemm_bf16(**given, seqlens=lengths, cu_seqlens=None, out_dtype=F32)
        y = torch.cat([y[g, :length] for g, length in enumerate(lengths.tolist())])
    else:
        for name in ("x", "x_low"):
            spare = torch.full((4, given[name].shape[1]), nan, device=device).bfloat16()
            given[name] = torch.cat([given[name], spare])
        groups = torch.arange(3, device=device).repeat_interleave(lengths)
        groups = torch.cat([groups, groups.new_full((4,), -1)]).int()
        sizes = dict(offs=starts[1:].clone()) if layout == "offsets" else dict(m_indices=groups)
        y = group_gemm_bf16(**given, seqlens=None, cu_seqlens=None, **sizes, out_dtype=F32)[:20]
    assert mismatch(y, wanted, BOUND) is None


def test_rows_between_groups_have_no_effect(device):
    given = problem((5, 7, 15), device=device)
    given["seqlens"][1] = 0
    wanted = product(given)
    for name in ("x", "x_low"):
        given[name][5:12] = float("nan")
    y = group_gemm_bf16(**given, out=torch.full((27, 144), 7.0, device=device), out_dtype=F32)
    rows = [*range(5), *range(12, 27)]
    assert mismatch(y[rows], wanted[rows], BOUND) is None and bool((y[5:12] == 7).all())


def test_a_product_of_zero_changes_no_bit(device):
    """And a plan is used again with tensors at other addresses."""
    given = problem((5, 0, 200), device=device)
    first = group_gemm_bf16(**given)
    other = problem((5, 0, 200), device=device, seed=1)
    assert mismatch(group_gemm_bf16(**other), product(other)) is None
    other["x_low"].zero_()
    plain = {name: t for name, t in other.items() if "low" not in name}
    assert torch.equal(group_gemm_bf16(**other), group_gemm_bf16(**plain))
    assert mismatch(first, product(given)) is None


def test_strided_operands(device):
    """Columns of wider matrices, such as the first of two adapters' x_low side by side."""
    given = problem(r=16, device=device)
    wide = dict(x_low=torch.full((20, 48), float("nan")), weight_low=torch.full((3, 144, 24), float("nan")))
    for name, t in wide.items():
        t = t.bfloat16().to(device)
        t[..., 8:24] = given[name]
        given[name] = t[..., 8:24]
    assert mismatch(group_gemm_bf16(**given), product(given)) is None


def test_outputs(device):
    """A bias and row weights apply to the sum; rows are scattered and added to others."""
    given, generator = problem(device=device), torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device)
    bias, weights, out = draw(3, 144), draw(20), draw(24, 144)
    scatter = torch.randperm(24, generator=generator)[:20].int().to(device)
    finished = reference.finish_rows(product(given), given["seqlens"], given["cu_seqlens"], bias, weights)
    expected = reference.store_rows(finished, out, scatter, accumulate=True)
    options = dict(bias=bias, row_weights=weights, scatter_indices=scatter, accumulate=True)
    assert mismatch(group_gemm_bf16(**given, out=out, **options), expected, BOUND) is None


@pytest.mark.parametrize("activation", ("silu", "swigluoai"))
@pytest.mark.parametrize("lengths, average", (((3, 1, 0, 2), 1), ((0, 40, 1, 5), 30), ((0, 40, 1, 150), 200)))
def test_activations(lengths, average, activation, device):
    """The activation of gate and up that the plain kernel computes, which are an output, too."""
    given = problem(lengths, n=2 * 192, k=80, r=24, device=device)
    bias = torch.randn(4, 2 * 192, generator=torch.Generator().manual_seed(3)).to(device)
    given |= dict(bias=bias, num_seq_per_group_avg=average)
    own = dict(activation=activation, alpha=1.5, limit=4.0)
    y = group_gemm_silu_and_mul_bf16(**given, **own)
    gate_up = group_gemm_bf16(**given, out_dtype=F32)
    gate, up = (gate_up[:, 0::2], gate_up[:, 1::2]) if activation == "swigluoai" else gate_up.chunk(2, dim=1)
    if activation == "swigluoai":
        wanted = reference.swigluoai(gate_up.double(), 1.5, 4.0)
    else:
        wanted = torch.nn.functional.silu(gate.double()) * up
    assert mismatch(y, wanted, BF16_BOUND) is None
    kept = plan.group_gemm("none", given | own, silu_and_mul=True, store_gate_up=True)
    assert torch.equal(kept[0], y) and torch.equal(kept[1], torch.cat((gate, up), dim=1).bfloat16())


SMALL = GemmConfig(dtype="bf16", scaling="none", subtile_m=16, mma_n=(16, 8), stages=3, max_groups=8)
CONFIGS = {
    "one subtile": SMALL,
    "two subtiles": SMALL._replace(m_subtiles=2, stages=2),
    "cluster": SMALL._replace(cluster_size=2),
    "two subtiles, cluster": SMALL._replace(m_subtiles=2, cluster_size=2),
    "two subtiles, bands": SMALL._replace(m_subtiles=2, band_rows=32),
}
NEEDS_SIMULATOR = pytest.mark.skipif(not simulator.ENABLED, reason="it tests in the simulator")


@pytest.mark.parametrize("mn_major", (False, True), ids=("k-major", "mn-major"))
@pytest.mark.parametrize("lengths", ((5, 0, 12), (5, 30, 16)), ids=("few rows", "more rows"))
@pytest.mark.parametrize("k", (64, 320), ids=("few stages", "many stages"))
@pytest.mark.parametrize("name", CONFIGS)
def test_early_weights(name, k, lengths, mn_major, device):
    """The stages that are filled early end before, within or behind the k blocks of weight_low."""
    given = problem(lengths, n=192, k=k, r=72, mn_major=mn_major, device=device)
    y = plan.group_gemm("none", given, config=CONFIGS[name], out_dtype=F32)
    early = plan.group_gemm("none", given, config=CONFIGS[name], early_weight=True, out_dtype=F32)
    assert mismatch(y, product(given), BOUND) is None and torch.equal(y, early)


@NEEDS_SIMULATOR
@pytest.mark.parametrize("name", ("one subtile", "two subtiles, cluster"))
def test_no_data_races(name, device):
    given = problem((5, 30), n=192, k=80, r=72, device=device)
    with simulator.races():
        y = plan.group_gemm("none", given, config=CONFIGS[name], early_weight=True, out_dtype=F32)
    assert mismatch(y, product(given), BOUND) is None


WAIT_OF_PRODUCER = "                    griddepcontrol_wait()\n"


@NEEDS_SIMULATOR
def test_the_kernel_before_may_write_x_low(device, monkeypatch):
    """Weights are loaded early, x_low is not."""
    given = problem((5, 12), n=128, k=80, r=16, device=device)
    sizes = {name: given[name] for name in ("seqlens", "cu_seqlens")}
    first_matrix = torch.randn(3, 16, 80, generator=torch.Generator().manual_seed(4))[:2].bfloat16().to(device)

    def compute():
        given["x_low"] = group_gemm_bf16(given["x"], first_matrix, **sizes)
        return plan.group_gemm("none", given, config=SMALL, early_weight=True, out_dtype=F32)

    with simulator.races():
        y = compute()
    assert mismatch(y, product(given), BOUND) is None
    use_kernel(changed_maker(kernel, "make_kernel", kernel, WAIT_OF_PRODUCER, ""), monkeypatch)
    with simulator.races(), pytest.raises(simulator.DataRace, match="at compute_tiles.* reads .* store_chunk"):
        compute()


def use_kernel(make_kernel, patch):
    """Let the functions launch another kernel."""
    patch.setattr(launch, "make_kernel", make_kernel)
    patch.setattr(launch, "get_launcher", launch.get_launcher.__wrapped__)
    patch.setattr(plan, "_plans", {})


def attempt(given, config, make_kernel, monkeypatch, seed=0):
    """Return what is wrong with the result of another kernel."""
    with monkeypatch.context() as patch:
        use_kernel(make_kernel, patch)
        with simulator.seed(seed):
            y = plan.group_gemm("none", given, config=config, early_weight=True, out_dtype=F32)
    return mismatch(y, product(given), BOUND)


WRONG = {
    "k offsets go on where those of x ended": ("int32((k_block - first_low) * block_k)", "int32(k_block * block_k)"),
    "each block is the first": ("int32((k_block - first_low) * block_k)", "int32(0)"),
    "weight_low is multiplied by x": ("return maps.x_low, maps.weight_low", "return maps.x, maps.weight_low"),
    "x_low is multiplied by weight": ("return maps.x_low, maps.weight_low", "return maps.x_low, maps.weight"),
    "the second pair begins a block late": ("if k_block >= first_low:", "if k_block > first_low:"),
    "the last block is left out": ("((maps.rank + block_k - 1) >> block_k_shift)", "(maps.rank >> block_k_shift)"),
    "early weights are all of the first map": (
        "_, map_weight, at_k = operands_of(maps, k_block, first_low)",
        "map_weight, at_k = maps.weight, int32(k_block * block_k)",
    ),
    "bytes beyond the rank are not expected": (
        "mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes)",
        "mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes >> 1 if k_block > first_low else num_bytes)",
    ),
}


@NEEDS_SIMULATOR
@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_kernels_are_rejected(mistake, device, monkeypatch):
    given = problem((5, 12), n=128, k=80, r=72, device=device)
    assert attempt(given, SMALL, kernel.make_kernel, monkeypatch) is None
    right, wrong = WRONG[mistake]
    make_kernel = changed_maker(kernel, "make_kernel", kernel, right, wrong)
    assert is_rejected(lambda seed: attempt(given, SMALL, make_kernel, monkeypatch, seed))


BAD = {
    "x_low is given, weight_low is None; both must be given": dict(weight_low=None),
    "weight_low is given, x_low is None; both must be given": dict(x_low=None),
    "x_low and gather_indices are given: gather_indices must be None": dict(gather_indices=torch.arange(20).int()),
    "x_low has shape (19, 16); it must be [20, 16], as x has 20 rows": dict(x_low=torch.zeros(19, 16).bfloat16()),
    "x_low has shape (20, 24); it must be [20, 16], as weight_low has 16 columns": dict(
        x_low=torch.zeros(20, 24).bfloat16()
    ),
    "x_low has shape (20,); it must be [20, 16]": dict(x_low=torch.zeros(20).bfloat16()),
    "weight_low has shape (2, 144, 16); it must be [3, 144, r], as weight has 3 groups": dict(
        weight_low=torch.zeros(2, 144, 16).bfloat16()
    ),
    "weight_low has shape (3, 128, 16); it must be [3, 144, r], as weight's n is 144": dict(
        weight_low=torch.zeros(3, 128, 16).bfloat16()
    ),
    "weight_low has shape (144, 16); it must be [3, 144, r]": dict(weight_low=torch.zeros(144, 16).bfloat16()),
    "x_low is torch.float32; it must be torch.bfloat16": dict(x_low=torch.zeros(20, 16)),
    "weight_low is torch.float16; it must be torch.bfloat16": dict(weight_low=torch.zeros(3, 144, 16).half()),
    "x_low and weight_low have 12 columns; they must have a multiple of 8": dict(
        x_low=torch.zeros(20, 12).bfloat16(), weight_low=torch.zeros(3, 144, 12).bfloat16()
    ),
    "weight has strides (11520, 80, 1), weight_low (2304, 1, 144); the last dimension of both": dict(
        weight_low=torch.zeros(3, 16, 144).bfloat16().mT
    ),
    "x_low has strides (18, 1)": dict(x_low=torch.zeros(20, 18).bfloat16()[:, :16]),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_are_refused(message, device):
    to = lambda t: t.to(device) if isinstance(t, torch.Tensor) and t.is_contiguous() else t
    changes = {name: to(t) for name, t in BAD[message].items()}
    if device != "cpu" and any(isinstance(t, torch.Tensor) and not t.is_cuda for t in changes.values()):
        pytest.skip("strides on a GPU are the same test")
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        group_gemm_bf16(**problem(device=device) | changes)


def test_operands_on_another_device_are_refused(device):
    given = problem(device=device)
    for name in ("x_low", "weight_low"):
        with pytest.raises(ValueError, match=f"{name} is on meta; it must be where x is, on {device}"):
            group_gemm_bf16(**given | {name: given[name].to("meta")})


def test_other_formats_are_refused(device):
    given = problem(device=device)
    given |= {name: given[name].to(torch.float8_e4m3fn) for name in ("x", "weight")}
    with pytest.raises(ValueError, match="x_low and weight_low are given; they are allowed only with .* bfloat16"):
        plan.group_gemm("tensor", given, y_scale=torch.ones(3, device=device))
    with pytest.raises(TypeError, match="unexpected keyword argument 'x_low'"):
        group_gemm_pertensor_fp8(**given, y_scale=torch.ones(3, device=device))
    for change in (dict(dtype="e4m3", scaling="tensor"), dict(gather=True)):
        with pytest.raises(ValueError, match="low_rank is True; dtype must be 'bf16'"):
            check_config(SMALL._replace(low_rank=True, **change))


def test_gpus_without_wgmma_are_refused(device, monkeypatch):
    monkeypatch.setattr(plan, "gpu_of", lambda device: devices.gpu_like((8, 0), "A100"))
    monkeypatch.setattr(plan, "_plans", {})
    for function in (group_gemm_bf16, group_gemm_silu_and_mul_bf16):
        with pytest.raises(UnsupportedDeviceError, match="x_low is given; A100 has no wgmma .*, which it needs"):
            function(**problem(n=128, device=device))


def test_there_is_no_backward(device):
    """A backward would lose the gradients of one of the pairs."""
    for name in ("x", "weight_low"):
        given = problem(device=device)
        given[name].requires_grad_()
        y = group_gemm_bf16(**given)
        with pytest.raises(
            NotImplementedError, match="x_low was given, but group_gemm_bf16 has a backward only without"
        ):
            y.sum().backward()
        with pytest.raises(ValueError, match=f"{name} requires grad"):
            group_gemm_silu_and_mul_bf16(**given | dict(bias=None))
