"""The grouped GEMM's public functions, its checker, its argument checks and its tuner."""

import inspect
import re

import pytest
import torch
from helpers.grouped_gemm import FUNCTIONS, SILU, check_graph_replay, inputs, silu_mismatch

from moe_numba.runtime import device as devices

# isort: split
from moe_numba import grouped_gemm
from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_pertensor_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
    reference,
)
from moe_numba.grouped_gemm.api.docstrings import describe_parameters
from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig
from moe_numba.grouped_gemm.call import plan as launch
from moe_numba.grouped_gemm.mma_sync.config import MmaConfig
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, check_config, fit_one_group, fit_registers, select_config


def test_mismatch_reports_errors():
    expected = torch.randn(6, 512, dtype=torch.float64)
    expected[4:] = float("nan")
    good = expected.bfloat16()
    assert mismatch(good, expected) is None
    for change, message in [
        (lambda y: y[5].fill_(0), "row 5 belongs to no group"),
        (lambda y: y[2, 3:4].fill_(float("nan")), "row 2 was not written"),
        (lambda y: y[1].mul_(1.02), "row 1 has relative error"),
        (lambda y: y.copy_((expected * 1.002).bfloat16()), "the relative error is"),
    ]:
        out = good.clone()
        change(out)
        assert message in mismatch(out, expected)
    assert "shape" in mismatch(good[:3], expected)


def test_mismatch_of_single_elements():
    """A large element is rounded by more than the others; an error of a small one is found."""
    expected = torch.randn(8, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected[0, :2] = torch.tensor([50.1, 0.0])
    good = expected.bfloat16()
    assert mismatch(good, expected) is None
    good[0, 1] = 0.2
    assert "an element's error" in mismatch(good, expected)


# The public functions


def test_use_fast_accum(device):
    """The kernel adds in the tensor cores on GPUs with wgmma; the result stays within FP8's bounds."""
    arguments = inputs(device=device)["pertensor"]
    launch._plans.clear()
    y = group_gemm_pertensor_fp8(*arguments, use_fast_accum=True)
    assert mismatch(y, reference.group_gemm(*arguments)) is None
    (plan,) = launch._plans.values()
    assert getattr(plan.launch.config, "fast_accumulation", False) == devices.gpu_of(0).has_wgmma


def test_tiles_of_a_single_group():
    """The tile leaves few CTAs idle at the end, and promoted sums with more values to keep have less rows."""
    config = select_config("tensor", "lengths", 8192)
    assert fit_one_group(config, 8192, 8192, 132).subtile_m == 128  # 16 x 256 rows per CTA instead of 15 x 283
    assert fit_one_group(config, 2048, 4096, 132) == config
    decode = select_config("tensor", "lengths", 8)
    assert fit_one_group(decode, 8, 8192, 132) == decode == fit_registers(decode)
    assert fit_registers(config) == config
    for change in (dict(scaling="row"), dict(out_dtype="f32")):
        fitted = fit_registers(config._replace(**change))
        check_config(fitted)
        assert fitted.subtile_m == 128
    bf16 = select_config("none", "lengths", 8192)._replace(out_dtype="f32")
    assert fit_registers(bf16) == bf16


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("average", [None, 1, 16, 40, 64, 100, 300])
def test_average_does_not_change_the_result(name, average, device):
    """The average number of rows selects the tile configuration and nothing else."""
    function, expected = FUNCTIONS[name]
    arguments = inputs(device=device)[name]
    assert mismatch(function(*arguments, num_seq_per_group_avg=average), expected(*arguments)) is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_offsets_and_masked(name, device):
    function, expected = FUNCTIONS[name]
    x, weight, seqlens, cu_seqlens, *scales = inputs(device=device)[name]
    expected = expected(x, weight, seqlens, cu_seqlens, *scales)
    assert mismatch(function(x, weight, None, None, *scales, offs=cu_seqlens[1:].clone()), expected) is None
    wide = lambda rows: torch.stack(
        [
            torch.nn.functional.pad(rows[a : a + n].float(), (0, 0, 0, 16 - n))
            for a, n in zip(cu_seqlens.tolist(), seqlens.tolist(), strict=False)
        ]
    ).to(rows.dtype)
    if name == "blockwise":
        scales = [wide(scales[0]), scales[1]]
    out = torch.full((3, 16, 128), float("nan"), dtype=torch.bfloat16, device=device)
    assert function(wide(x), weight, seqlens, None, *scales, out=out) is out
    got = torch.cat([out[g, :n] for g, n in enumerate(seqlens.tolist())])
    assert mismatch(got, expected) is None
    assert all(bool(out[g, n:].isnan().all()) for g, n in enumerate(seqlens.tolist()))


@pytest.mark.parametrize(
    "lengths, starts, ends, written",
    [
        ((3, 0), (-2, 1, 1), None, {0: 1, 1: 1, 2: 1}),  # moved, not cut
        ((3, 2), (3, -5, 0), None, {3: 1, 4: 1, 0: 2, 1: 2}),
        (None, None, (-1, 3), {0: 2, 1: 2, 2: 2, 3: 2}),  # group 1 has 3 - -1 rows
        (None, None, (-(2**31), 2**31 - 1), {}),  # group 1 has -1 rows
    ],
)
def test_group_sizes_outside_of_x_are_clamped_as_documented(lengths, starts, ends, written, device):
    def int32(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    x, weight = torch.ones(5, 16, device=device).bfloat16(), torch.ones(2, 16, 16, device=device).bfloat16()
    out = x.new_zeros(5, 16)
    weight[1] *= 2
    group_gemm_bf16(x, weight, int32(lengths), int32(starts), offs=int32(ends), out=out)
    assert out[:, 0].tolist() == [16 * written.get(row, 0) for row in range(5)]


INDICES = {  # 20 indices into 20 rows of x
    "each twice": [i // 2 for i in range(20)],
    "permuted": [7 * i % 20 for i in range(20)],
    "all the same": [13] * 20,
    "some out of bounds": [-1, 5, 20, 3, 19, 1 << 30, -(1 << 31), *range(13)],
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *(f"{name}, silu" for name in SILU)])
@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("average", [1, 64, 300])
def test_gather_indices_match_gathered_rows(name, indices, average, device):
    """The result is bit-identical to that of rows gathered beforehand."""
    name, _, silu = name.partition(", ")
    function = (SILU if silu else FUNCTIONS)[name][0]
    x, weight, seqlens, cu_seqlens, *scales = inputs(n=256, device=device)[name]
    indices, ordered = torch.tensor(INDICES[indices], dtype=torch.int32, device=device), list(scales)
    if name == "blockwise":
        ordered[0] = reference.gather_rows(scales[0], indices)
    expected = function(reference.gather_rows(x, indices), weight, seqlens, cu_seqlens, *ordered, average)
    rows = (
        dict(seqlens=None, cu_seqlens=None, offs=cu_seqlens[1:].clone())
        if average == 64
        else dict(seqlens=seqlens, cu_seqlens=cu_seqlens)
    )
    scales = dict(zip(("x_scale", "w_scale") if len(scales) == 2 else ("y_scale",), scales, strict=False))
    out = function(x, weight, **rows, **scales, num_seq_per_group_avg=average, gather_indices=indices)
    for got, wanted in zip(out, expected, strict=True) if silu else [(out, expected)]:
        assert torch.equal(got.float(), wanted.float())


def test_gather_from_fewer_rows(device):
    """The output has a row per index, whatever the number of rows of x and their stride."""
    x, weight, seqlens, cu_seqlens, scale = inputs(device=device)["pertensor"]
    arguments = weight, seqlens, cu_seqlens, scale
    indices = torch.arange(20, dtype=torch.int32, device=device) % 3
    wide = torch.cat([x, x], 1)[:3, : x.shape[1]]  # with a row stride of 2 k
    assert torch.equal(
        group_gemm_pertensor_fp8(wide, *arguments, gather_indices=indices),
        group_gemm_pertensor_fp8(x[indices.long()], *arguments),
    )
    assert not group_gemm_pertensor_fp8(x[:0].clone(), *arguments, gather_indices=indices).any()
    one, first = x[:1, :64].clone(), weight[..., :64].contiguous()
    assert torch.equal(
        group_gemm_pertensor_fp8(one, first, *arguments[1:], gather_indices=indices // 3),
        group_gemm_pertensor_fp8(one.expand(20, -1).contiguous(), first, *arguments[1:]),
    )
    assert group_gemm_pertensor_fp8(x, *arguments, gather_indices=indices[:0]).shape == (0, 128)


@pytest.mark.parametrize("name", SILU)
@pytest.mark.parametrize("average", [1, 16, 40, 100])
def test_silu_and_mul(name, average, device):
    function, group_gemm = SILU[name]
    arguments = inputs((5, 0, 35), n=512, device=device)[name]
    expected = reference.silu_and_mul(group_gemm(*arguments))
    y, scale = function(*arguments, num_seq_per_group_avg=average)
    assert y.dtype == FP8 and scale.shape == (40, 2)
    assert silu_mismatch(y, scale, expected) is None
    for wrong in (expected.roll(1, 0), expected.roll(1, 1), reference.silu_and_mul(-group_gemm(*arguments))):
        assert silu_mismatch(y, scale, wrong)  # rows, columns or signs are wrong


def test_silu_and_mul_argument_checks(device):
    for name, n, words in (
        ("pertensor", 144, "weight's n is 144; with gate and up it must be a multiple of 32"),
        ("blockwise", 128, "weight's n is 128; with block scales, gate and up, it must be a multiple of 256"),
    ):
        with pytest.raises(ValueError, match=words):
            SILU[name][0](*inputs(n=n, device=device)[name])
    arguments = inputs(n=256, device=device)["pertensor"]
    out = torch.zeros(20, 128, device=device).to(FP8), torch.zeros(20, 1, device=device)
    assert group_gemm_silu_and_mul_pertensor_fp8(*arguments, out=out) is out and bool(out[1].all())
    with pytest.raises(ValueError, match="out's scale"):
        group_gemm_silu_and_mul_pertensor_fp8(*arguments, out=(out[0], torch.zeros(20, 2, device=device)))


def test_no_rows(device):
    x, weight, seqlens, cu_seqlens, scale = inputs((0, 0), device=device)["pertensor"]
    assert group_gemm_pertensor_fp8(x, weight, seqlens, cu_seqlens, scale).shape == (0, 128)


X, WEIGHT, SEQLENS, CU_SEQLENS, SCALE = inputs()["pertensor"]
BAD = {
    "x is torch.float32": dict(x=X.float()),
    "weight is torch.float32": dict(weight=WEIGHT.float()),
    "x has shape (192,)": dict(x=X[0]),
    "x has 128 columns": dict(x=X[:, :128]),
    "weight's n is 104": dict(weight=WEIGHT[:, :104]),
    "weight's k is 24": dict(x=X[:, :24], weight=WEIGHT[:, :, :24]),
    "weight has 0 groups": dict(weight=WEIGHT[:0], y_scale=SCALE[:0]),
    "seqlens is torch.int64": dict(seqlens=SEQLENS.long()),
    "seqlens has shape (2,)": dict(seqlens=SEQLENS[:2]),
    "cu_seqlens has shape (3,)": dict(cu_seqlens=CU_SEQLENS[:3]),
    "y_scale is torch.float64": dict(y_scale=SCALE.double()),
    "y_scale has shape (1,)": dict(y_scale=SCALE[:1]),
    "num_seq_per_group_avg is -1": dict(num_seq_per_group_avg=-1),
    "offs is given": dict(offs=CU_SEQLENS[1:].clone()),
    "m_indices is given": dict(m_indices=torch.zeros(20, dtype=torch.int32)),
    "m_indices is torch.int64": dict(seqlens=None, cu_seqlens=None, m_indices=torch.zeros(20, dtype=torch.int64)),
    "m_indices has shape (19,)": dict(seqlens=None, cu_seqlens=None, m_indices=torch.zeros(19, dtype=torch.int32)),
    "cu_seqlens is given": dict(x=X[:18].view(3, 6, 192)),
    "seqlens is None": dict(seqlens=None),
    "gather_indices is torch.int64": dict(gather_indices=torch.arange(20)),
    "gather_indices has shape (4, 5)": dict(gather_indices=torch.zeros(4, 5, dtype=torch.int32)),
    "gather_indices is given": dict(x=X[:18].view(3, 6, 192), cu_seqlens=None, gather_indices=SEQLENS),
    "out is torch.bfloat16 (20, 128)": dict(gather_indices=SEQLENS, out=torch.zeros(20, 128, dtype=torch.bfloat16)),
    "out is torch.float32": dict(out=torch.zeros(20, 128)),
    "out starts at address": dict(out=torch.zeros(20 * 128 + 1, dtype=torch.bfloat16)[1:].view(20, 128)),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_are_refused(message, device):
    arguments = dict(x=X, weight=WEIGHT, seqlens=SEQLENS, cu_seqlens=CU_SEQLENS, y_scale=SCALE) | BAD[message]
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) and n != "out" else v for n, v in arguments.items()}
    if message.startswith("out starts"):  # .to() would align it
        arguments["out"] = torch.zeros(20 * 128 + 1, dtype=torch.bfloat16, device=device)[1:].view(20, 128)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        group_gemm_pertensor_fp8(**arguments)


def padded(tensor, columns):
    """The same values with rows of more columns, of which the last are not used."""
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + columns, dtype=tensor.dtype, device=tensor.device)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


MASKED, FEW_GROUPS = {"row_layout": "masked"}, {"max_groups": 2}
BAD_CONFIGS = {  # message: function, configuration
    "config has row_layout 'masked'; for these arguments it must be 'lengths'": ("pertensor", GemmConfig(**MASKED)),
    "config has dtype 'e4m3'; for these arguments it must be 'bf16'": ("bf16", GemmConfig(scaling="none")),
    "config has scaling 'tensor'; for these arguments it must be 'block'": ("blockwise", GemmConfig()),
    "config has max_groups 2; weight has 3 groups": ("pertensor", GemmConfig(**FEW_GROUPS)),
    "config has silu_and_mul True; for these": ("blockwise", BlockScaledConfig(silu_and_mul=True)),
    "config has max_groups 2; weight has 3": ("blockwise", BlockScaledConfig(**FEW_GROUPS)),
    "its kernel has block scales, scaling is 'tensor'": ("pertensor", BlockScaledConfig()),
    "config has row_layout 'masked'; for these": ("bf16", MmaConfig(**MASKED)),
    "config is 128; it must be a GemmConfig, BlockScaledConfig or MmaConfig": ("bf16", 128),
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_configurations_of_other_arguments_are_refused(message, device):
    """The kernel would read past its arrays in shared memory, or rows that are not there."""
    name, config = BAD_CONFIGS[message]
    scaling, scales = {
        "pertensor": ("tensor", ["y_scale"]),
        "blockwise": ("block", ["x_scale", "w_scale"]),
        "bf16": ("none", []),
    }[name]
    names = "x", "weight", "seqlens", "cu_seqlens", *scales
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        launch.group_gemm(scaling, dict(zip(names, inputs(device=device)[name], strict=True)), config=config)


def test_unknown_arguments_are_refused(device):
    x, weight, seqlens, cu_seqlens = inputs(device=device)["bf16"]
    given = dict(x=x, weight=weight, seqlens=seqlens, cu_seqlens=cu_seqlens)
    launch.group_gemm("none", given)
    for name in ("y_scale", "n", "average"):
        with pytest.raises(TypeError, match=f"{name}: the grouped GEMM has no such argument"):
            launch.group_gemm("none", given, **{name: None})


@pytest.mark.parametrize("name", [name for name in grouped_gemm.__all__ if "gemm" in name])
def test_help_describes_every_parameter(name):
    function = getattr(grouped_gemm, name)
    section = inspect.getdoc(function).partition("Parameters\n")[2].partition("\nReturns\n")[0]
    described = sum((line.split(" : ")[0].split(", ") for line in section.splitlines() if line[:1].isalpha()), [])
    assert sorted(described) == sorted(inspect.signature(function).parameters) and "{" not in section


def test_unknown_descriptions_are_refused():
    function = lambda: None
    function.__doc__ = "Parameters\n    {no_such_parameter}\n"
    with pytest.raises(KeyError, match="no_such_parameter"):
        describe_parameters(function)


@pytest.mark.parametrize("name", ["x", "weight"])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: padded(t, 8), "strides"),
        (lambda t: t.mT.contiguous().mT, "its last dimension must be contiguous"),
        (lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape), "starts at address"),
        (lambda t: t[:1].expand(t.shape), "strides"),
    ],
    ids=["rows of 200 bytes", "column-major", "misaligned", "expanded"],
)
def test_what_tma_cannot_address_is_refused_by_name(name, change, message, device):
    arguments = dict(x=X, weight=WEIGHT, seqlens=SEQLENS, cu_seqlens=CU_SEQLENS, y_scale=SCALE)
    arguments = {key: value.to(device) for key, value in arguments.items()}
    arguments[name] = change(arguments[name].view(torch.uint8)).view(X.dtype)
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        group_gemm_pertensor_fp8(**arguments)


@pytest.mark.parametrize("average", [1, 300])
def test_mn_major_weights(average, device):
    """A transposed view needs no copy, and has the same result bit by bit."""
    x, weight, *groups = inputs(n=144, k=80, device=device)["bf16"]
    transposed = weight.mT.contiguous().mT
    if devices.gpu_of(0).has_wgmma:
        out = group_gemm_bf16(x, transposed, *groups, num_seq_per_group_avg=average)
        assert torch.equal(out, group_gemm_bf16(x, weight, *groups, num_seq_per_group_avg=average))
        with pytest.raises(ValueError, match="weight starts at address .* multiple of 16"):
            group_gemm_bf16(x, torch.cat([transposed.mT, transposed.mT], 2)[..., 4:148].mT, *groups)
    else:
        with pytest.raises(
            ValueError, match=r"weight has strides .* which .* executes, needs .*: use weight.contiguou"
        ):
            group_gemm_bf16(x, transposed, *groups)
    with pytest.raises(ValueError, match="weight has strides .* must be contiguous, or its second"):
        group_gemm_bf16(x, weight.repeat_interleave(2, 2)[..., ::2], *groups)


# Large sizes, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "lengths, n, k",
    [  # hpc-ops' own cases, and DeepSeek-V3's two products with uneven groups
        ([8, 16, 32, 64, 128, 256, 384, 512], 4096, 7168),
        ([30] * 128, 1024, 4096),
        ([30] * 256, 4096, 4096),
        ([0, 1, 300, 257, 7, 0, 64, 144, 145, 288, 289, 16], 4096, 7168),
        ([700, 0, 33, 255, 256, 1], 7168, 2048),
        ([1] * 512, 512, 512),
    ],
)
def test_large_sizes(name, lengths, n, k):
    """Compare some of the groups with the reference; all rows must be written and no others."""
    if name == "bf16" and len(lengths) > 200:
        pytest.skip("too much memory for the reference")
    function, expected = FUNCTIONS[name]
    torch.manual_seed(2)
    groups, device = len(lengths), "cuda"
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32, device=device), seqlens.cumsum(0).int()])
    dtype = torch.bfloat16 if name == "bf16" else FP8
    x = (torch.randn(sum(lengths), k, device=device) * 0.5).to(dtype)
    weight = torch.empty(groups, n, k, dtype=dtype, device=device)
    for g in range(groups):
        weight[g] = (torch.randn(n, k, device=device) * 0.5).to(dtype)
    scales = {
        "bf16": (),
        "pertensor": (torch.rand(groups, device=device) + 0.5,),
        "blockwise": (
            torch.rand(len(x), k // 128, device=device) + 0.5,
            torch.rand(groups, n // 128, k // 128, device=device) + 0.5,
        ),
    }[name]
    padded = torch.full((len(x) + 64, n), float("nan"), dtype=torch.bfloat16, device=device)
    out = padded[: len(x)]
    for average in (None, 300):
        out.fill_(float("nan"))
        function(x, weight, seqlens, cu_seqlens, *scales, num_seq_per_group_avg=average, out=out)
        first = out.clone()
        assert not bool(out.isnan().any()) and bool(padded[len(x) :].isnan().all())
        for g in sorted({0, groups // 2, groups - 1, lengths.index(max(lengths))}):
            one, rows = slice(g, g + 1), slice(int(cu_seqlens[g]), int(cu_seqlens[g + 1]))
            group_scales = {
                "bf16": (),
                "pertensor": [s[one] for s in scales],
                "blockwise": [scales[0][rows], scales[1][one]] if len(scales) > 1 else [],
            }[name]
            wanted = expected(x[rows], weight[one], seqlens[one], torch.zeros(2, dtype=torch.int32), *group_scales)
            assert mismatch(out[rows], wanted) is None, (g, average)
        for _ in range(20):
            function(x, weight, seqlens, cu_seqlens, *scales, num_seq_per_group_avg=average, out=out)
            assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "groups, rows, n, k, repeats",
    [(1, 8192, 8192, 8192, 200), (32, 2048, 4096, 7168, 1000), (32, 8192, 7168, 2048, 500)],
)
def test_results_are_bit_identical(groups, rows, n, k, repeats):
    torch.manual_seed(1)
    lengths = torch.bincount(torch.randint(0, groups, (rows,)), minlength=groups).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    x, weight = (torch.empty(*sizes, k, dtype=torch.float8_e4m3fn, device="cuda") for sizes in ((rows,), (groups, n)))
    for part in (x, *weight):  # float32 for all groups would need too much memory
        part.copy_(torch.randn(part.shape, device="cuda") * 0.5)
    arguments = x, weight, lengths.cuda(), starts.cuda(), torch.rand(groups, device="cuda") + 0.5
    expected = reference.group_gemm(*arguments)
    first = group_gemm_pertensor_fp8(*arguments)
    assert mismatch(first, expected) is None
    out = torch.empty_like(first)
    for i in range(repeats):
        out.fill_(float("nan"))
        group_gemm_pertensor_fp8(*arguments, out=out)
        assert torch.equal(out, first), f"call {i}: {int((out != first).sum())} elements differ"


@pytest.mark.gpu
def test_graph_replay_reads_new_lengths():
    """The kernel reads the lengths, so a captured call can be replayed with other lengths."""
    check_graph_replay()


# Scalings


@pytest.mark.parametrize("k", [128, 320])
def test_quantisation_error(k):
    x, weight = torch.randn(5, k), torch.randn(2, 192, k)
    for values, scale, exact in [(*reference.quantise_rows(x), x), (*reference.quantise_blocks(weight), weight)]:
        wide = scale.repeat_interleave(128, -1)[..., :k]
        if exact is weight:
            wide = wide.repeat_interleave(128, 1)[:, :192]
        assert values.dtype == FP8 and float(values.float().abs().max()) == 448
        # The rounding error is at most 1/16 of a number, or of the smallest normal number, 2^-6.
        assert bool(((values.float() * wide - exact).abs() <= wide * torch.clamp(exact.abs() / wide, 2**-6) / 16).all())


def test_operands_of_the_epilogue_that_require_grad_are_refused(device):
    arguments = inputs(n=128, device=device)["pertensor"]
    bias, weights = torch.ones(3, 128, device=device), torch.ones(20, device=device)
    with pytest.raises(ValueError, match="bias requires grad; group_gemm_pertensor_fp8 has no backward"):
        group_gemm_pertensor_fp8(*arguments, bias=bias.requires_grad_())
    with pytest.raises(ValueError, match="row_weights requires grad; group_gemm_pertensor_fp8 has no backward"):
        group_gemm_pertensor_fp8(*arguments, row_weights=weights.requires_grad_())
    with torch.no_grad():
        assert group_gemm_pertensor_fp8(*arguments, bias=bias).shape == (20, 128)


def test_gathering_from_no_rows_with_an_mn_major_weight(device):
    x, weight, *sizes = inputs(n=128, device=device)["bf16"]
    indices = torch.zeros(20, dtype=torch.int32, device=device)
    mn_major = weight.mT.contiguous().mT
    assert not group_gemm_bf16(x[:0].clone(), mn_major, *sizes, gather_indices=indices).any()
