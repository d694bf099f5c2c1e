"""Public functions of the grouped GEMM with MXFP4 weights: arguments, options of the output and activations."""

import pytest
import torch
from helpers.w4_gemm import SMALL, gathered, make_problem, pack
from helpers.wrong_kernels import changed_maker, is_rejected
from torch._subclasses import FakeTensorMode

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import group_gemm_mxfp4, reference
from moe_numba.grouped_gemm.reference import finish_rows, mismatch, store_rows
from moe_numba.grouped_gemm.w4 import kernel
from moe_numba.grouped_gemm.w4 import launch as w4_launch
from moe_numba.grouped_gemm.w4.launch import group_gemm

LARGE = SMALL._replace(subtile_m=104, mma_n=(104, 72, 24))


def call(p, packed=None, **options):
    """Call the implementation, which takes a configuration, for a problem."""
    weight = pack(p) if packed is None else packed
    options = dict(config=p.config) | options
    given = dict(x=p.x, weight=weight, seqlens=p.lengths, cu_seqlens=p.starts, gather_indices=p.indices)
    return group_gemm(given, **options)


def test_mxfp4(device):
    p = make_problem([5, 0, 12], 96, 96, device)
    weight, out = pack(p), torch.full_like(p.expected, float("nan"), dtype=torch.bfloat16)
    arguments = p.x, weight, p.lengths, p.starts
    assert group_gemm_mxfp4(*arguments, out=out, n=96) is out
    assert mismatch(out, p.expected) is None
    ends = (p.starts[:-1] + p.lengths).int()
    y = group_gemm_mxfp4(p.x, weight, None, None, 8, ends, n=96)
    assert torch.equal(y, out)
    none = p.x[:0]
    assert group_gemm_mxfp4(none, *arguments[1:]).shape == (0, 128)
    indices = torch.arange(len(p.x), dtype=torch.int32, device=device)
    assert torch.equal(group_gemm_mxfp4(*arguments, gather_indices=indices, n=96), out)
    assert bool((group_gemm_mxfp4(none, *arguments[1:], gather_indices=indices, n=96) == 0).all())


def shifted(weight):
    """The same weight at an odd address."""
    wide = torch.empty(weight.numel() + 1, dtype=torch.uint8, device=weight.device)
    return wide[1:].view(weight.shape).copy_(weight)


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "x is torch.float32; it must be torch.bfloat16", lambda a: dict(x=a["x"].float())),
        (TypeError, "weight is torch.int8; it must be", lambda a: dict(weight=a["weight"].view(torch.int8))),
        (ValueError, "weight has shape .*2175", lambda a: dict(weight=a["weight"][..., 1:])),
        (
            ValueError,
            r"weight has shape \(2, 1, 1, 136, 16\): pack_mxfp4 packed it with gate_up.* without gate_up: .* 2176",
            lambda a: dict(weight=a["weight"].unflatten(3, (136, 16))),
        ),
        (ValueError, "weight starts at address", lambda a: dict(weight=shifted(a["weight"]))),
        (ValueError, "x has 128 columns; weight is packed for 32 or 64", lambda a: dict(x=a["x"].repeat(1, 2))),
        (ValueError, "n is 128; weight is packed for 32 or 64 rows", lambda a: dict(n=128)),
        (TypeError, "n is 1.5", lambda a: dict(n=1.5)),
        (TypeError, "seqlens is None", lambda a: dict(seqlens=None)),
        (ValueError, r"bias has shape \(64,\)", lambda a: dict(bias=a["x"][0])),
        (ValueError, "accumulate is True: out must be given", lambda a: dict(accumulate=True)),
        (ValueError, "offs is given", lambda a: dict(offs=a["seqlens"])),
        (ValueError, "out is", lambda a: dict(out=a["x"][:1].clone())),
    ],
)
def test_bad_arguments_are_refused(error, message, change, device):
    p = make_problem([3, 2], 64, 64, device)
    good = dict(x=p.x, weight=pack(p), seqlens=p.lengths, cu_seqlens=p.starts)
    with pytest.raises(error, match=message):
        group_gemm_mxfp4(**good | change(good))


@pytest.mark.parametrize(
    "message, change",
    [
        (r"x has 2147483648 rows; at most 2147482623", lambda a: dict(x=a["x"][:1].expand(1 << 31, -1))),
        (
            r"x has strides \(1073741824, 1\); with gather_indices .* less than 2 GiB apart",
            lambda a: dict(x=a["x"].as_strided((1, 64), (1 << 30, 1)), gather_indices=a["seqlens"]),
        ),
        (
            "x has 536870912 rows, too many for 512 groups of 64 columns",
            lambda a: dict(x=a["x"][:1].expand(1 << 29, -1), **groups_of(512, a["weight"]), num_seq_per_group_avg=1),
        ),
    ],
)
def test_sizes_beyond_32_bits_are_refused(message, change, device):
    p = make_problem([3, 2], 64, 64, device)
    good = dict(x=p.x, weight=pack(p), seqlens=p.lengths, cu_seqlens=p.starts)
    with pytest.raises(ValueError, match=message):
        group_gemm_mxfp4(**good | change(good))


def groups_of(count, weight):
    sizes = torch.zeros(count + 1, dtype=torch.int32, device=weight.device)
    return dict(weight=weight[:1].repeat(count, 1, 1, 1), seqlens=sizes[1:], cu_seqlens=sizes)


@pytest.mark.parametrize(
    "message, tiles",
    [("weight's n is 2147483648; at most", (1 << 25, 1)), ("weight's k is 1073741824; at most", (1, 1 << 24))],
)
def test_weights_beyond_32_bits_are_refused(message, tiles):
    with FakeTensorMode():  # without their memory
        x, weight = torch.empty(4, 64 * tiles[1]).bfloat16(), torch.empty(1, *tiles, 2176, dtype=torch.uint8)
        sizes = torch.empty(2, dtype=torch.int32)
        with pytest.raises(ValueError, match=message):
            group_gemm_mxfp4(x, weight, sizes[:1], sizes)


@pytest.mark.parametrize("change", [dict(row_layout="offsets"), dict(max_groups=1)])
def test_configurations_of_other_arguments_are_refused(change, device):
    p = make_problem([3, 2], 64, 64, device)
    with pytest.raises(ValueError, match=f"config has {next(iter(change))}"):
        call(p, config=SMALL._replace(**change))


# Options of the output

OPTIONS = [  # configuration, and dtypes of the bias and of the results
    (SMALL, torch.bfloat16, torch.float32),
    (SMALL, torch.float32, torch.bfloat16),
    (SMALL._replace(warpgroups=4), torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("config, bias_dtype, out_dtype", OPTIONS)
def test_bias_row_weights_gather_and_scatter(config, bias_dtype, out_dtype, device):
    p = gathered(make_problem([5, 0, 19], 96, 96, device, config))
    total = len(p.expected)
    bias, row_weights = torch.randn(3, 96, device=device).to(bias_dtype) * 8, torch.rand(total, device=device) + 0.5
    indices = torch.randperm(total + 3)[:total].int().to(device)
    indices[1] = -1  # not stored
    out = torch.full((total + 3, 96), float("nan"), dtype=out_dtype, device=device)
    rows = finish_rows(p.expected, p.lengths, p.starts, bias, row_weights)
    expected, bound = store_rows(rows, out, indices), 2.3e-3 if out_dtype == torch.bfloat16 else 1e-5
    options = dict(row_weights=row_weights, scatter_indices=indices, out_dtype=out_dtype, n=96, out=out)
    call(p, bias=bias, **options)
    assert mismatch(out, expected, bound) is None
    call(p, bias=bias.roll(1, 0), **options)
    assert mismatch(out, expected, bound) is not None


def test_accumulation(device):
    p = make_problem([5, 42], 64, 64, device)
    before = torch.randn(47, 64, device=device)
    for config in (None, LARGE):
        out = before.clone()
        call(p, accumulate=True, out=out, config=config)
        assert mismatch(out, p.expected + before, 1e-5) is None
    y = group_gemm_mxfp4(p.x, pack(p), p.lengths, p.starts, out_dtype=torch.float32)
    assert y.dtype == torch.float32 and mismatch(y, p.expected, 1e-5) is None


# Activations


def activated_reference(rows, activation, alpha=1.702, limit=7.0):
    if activation == "silu":
        gate, up = rows.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return reference.swigluoai(rows, alpha, limit)


GATE_UP = {"silu": "stacked", "swigluoai": "interleaved"}


def activation_error(activation, device, config=SMALL, pack=pack, lengths=(5, 0, 12), with_gather=False, n=192):
    """Return how the activated product with a bias differs from the reference."""
    p = make_problem(lengths, n, 96, device, config)
    bias = (torch.randn(len(lengths), n) * 4).bfloat16().to(device)
    group = torch.repeat_interleave(torch.arange(len(lengths), device=device), p.lengths)
    factor = 2.0 ** -int(p.expected.std().log2())  # so that the activation is not linear
    expected = activated_reference(p.expected * factor + bias[group].double(), activation)
    p.x = p.x * factor
    if with_gather:
        gathered(p)
    out = torch.full((len(expected) + 4, n // 2), float("nan"), dtype=torch.bfloat16, device=device)
    packed = pack(p, GATE_UP[activation])
    call(p, packed, bias=bias, activation=activation, silu_and_mul=True, out=out[: len(expected)])
    assert bool(out[len(expected) :].isnan().all()), "rows behind the output were written"
    return mismatch(out[: len(expected)], expected, 3e-3)


@pytest.mark.parametrize(
    "activation, config, lengths, with_gather",
    [
        ("silu", SMALL, (5, 0, 12), False),
        ("swigluoai", SMALL, (5, 0, 12), True),
        ("swigluoai", LARGE, (97, 65, 20), False),
        ("silu", SMALL._replace(warpgroups=4), (9,), True),
    ],
)
def test_activation(activation, config, lengths, with_gather, device):
    assert activation_error(activation, device, config, lengths=lengths, with_gather=with_gather) is None


WRONG_ACTIVATION = {
    "gate and up are exchanged": (SMALL, "select_gate(acc), select_up(acc)", "select_up(acc), select_gate(acc)"),
    "up has the bias of gate": (SMALL, "2 * column + 1 if", "2 * column if"),
    "the bias is that of another group": (SMALL, "int64(tile.group)", "int64(0)"),
    "the second warpgroup stores the first one's columns": (SMALL, "warpgroup * ACTIVATED_COLUMNS", "0"),
    "a buffer is read before all four warps wrote it": (
        LARGE,
        "        bar_sync(int32(2 + warpgroup), 128)\n        vector",
        "        vector",
    ),
    "a buffer is overwritten while other warps read it": (
        LARGE,
        "        bar_sync(int32(2 + warpgroup), 128)  # all warps have read the previous rows\n",
        "",
    ),
}


@pytest.mark.parametrize("what", WRONG_ACTIVATION)
def test_wrong_activations_are_rejected(what, device, monkeypatch):
    if "buffer" in what and not simulator.ENABLED:
        pytest.skip("a race, which a GPU may survive")
    config, *change = WRONG_ACTIVATION[what]
    monkeypatch.setattr(w4_launch, "make_kernel", changed_maker(kernel, "make_kernel", kernel, *change))
    w4_launch.get_w4_launcher.cache_clear()

    def attempt(seed):
        w4_launch._plans.clear()
        with simulator.seed(seed):
            return activation_error("swigluoai", device, config, lengths=(12, 70))

    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"
    w4_launch.get_w4_launcher.cache_clear()


def test_rows_packed_without_gate_and_up_are_rejected(device):
    assert activation_error("swigluoai", device, pack=lambda p, _: pack(p, "stacked")) is not None
    message = r"weight has shape \(3, 3, 2, 2176\): pack_mxfp4 packed it without gate_up; .* with gate_up=.* 136, 16\]"
    with pytest.raises(ValueError, match=message):
        activation_error("swigluoai", device, pack=lambda p, _: pack(p))
