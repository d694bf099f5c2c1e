"""Public functions of the grouped GEMM with 4-bit weights: arguments, options of the output and activations."""

import pytest
import torch
from helpers.w4_gemm import E4M3, INT4, SMALL, gathered, make_problem, pack
from helpers.wrong_kernels import changed_maker, is_rejected
from torch._subclasses import FakeTensorMode

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import group_gemm_int4, group_gemm_mxfp4, reference
from moe_numba.grouped_gemm.reference import FP8, finish_rows, mismatch, store_rows
from moe_numba.grouped_gemm.w4 import epilogue as w4_epilogue
from moe_numba.grouped_gemm.w4 import kernel
from moe_numba.grouped_gemm.w4 import launch as w4_launch
from moe_numba.grouped_gemm.w4.launch import group_gemm
from moe_numba.grouped_gemm.w4.packing import pack_mxfp4

BLOCK_SCALED = E4M3._replace(x_scaling="block")
LARGE = SMALL._replace(subtile_m=104, mma_n=(104, 72, 24))


def call(p, packed=None, **options):
    """Call the implementation, which takes a configuration, for a problem."""
    weight, w_scale = packed or pack(p)
    scales = dict(x_scale=p.x_scale, w_scale=w_scale)
    arguments = p.config.weight, p.x, weight, p.lengths, p.starts
    return group_gemm(*arguments, gather_indices=p.indices, **scales | dict(config=p.config) | options)


def test_mxfp4(device):
    p = make_problem([5, 0, 12], 96, 96, device)
    weight, out = pack(p)[0], torch.full_like(p.expected, float("nan"), dtype=torch.bfloat16)
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


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_mxfp4_with_fp8_activations(scaling, device):
    p = make_problem([5, 0, 12], 96, 160, device, E4M3._replace(x_scaling=scaling))
    arguments = pack(p)[0], p.lengths, p.starts
    y = group_gemm_mxfp4(p.x, *arguments, n=96, x_scale=p.x_scale)
    assert mismatch(y, p.expected) is None
    if scaling == "row":
        assert torch.equal(group_gemm_mxfp4(p.x, *arguments, n=96, x_scale=p.x_scale[:, None]), y)
    if scaling == "block":  # scales of any strides: column-major
        assert torch.equal(group_gemm_mxfp4(p.x, *arguments, n=96, x_scale=p.x_scale.T.contiguous().T), y)
    indices = torch.arange(len(p.x), dtype=torch.int32, device=device)
    scale = p.x_scale if scaling == "tensor" else p.x_scale[:0]
    y = group_gemm_mxfp4(p.x[:0], *arguments, gather_indices=indices, n=96, x_scale=scale)
    assert bool((y == 0).all())


def test_scales_of_one_block_per_row_have_any_strides(device):
    p = make_problem([5, 0, 12], 64, 128, device, E4M3._replace(x_scaling="block"))
    scale = torch.full((len(p.x), 3), float("nan"), device=device)
    scale[:, 1:2] = p.x_scale
    y = group_gemm_mxfp4(p.x, pack(p)[0], p.lengths, p.starts, x_scale=scale[:, 1:2])
    assert mismatch(y, p.expected) is None
    scale = p.x_scale.view(-1).repeat_interleave(2)[::2]  # of rows: they must be contiguous
    with pytest.raises(ValueError, match="x_scale has strides"):
        group_gemm_mxfp4(p.x, pack(p)[0], p.lengths, p.starts, x_scale=scale)


def test_masked_rows_with_scales_of_blocks(device):
    p = make_problem([3, 0, 20], 64, 256, device, BLOCK_SCALED._replace(row_layout="masked"))
    x, groups = p.x.view(3, p.capacity, -1), (p.lengths, None)
    memory = torch.full((3, 5, p.capacity), float("nan"), device=device)  # column-major in each group
    memory[:, 1:3] = p.x_scale.view(3, p.capacity, 2).mT
    y = group_gemm_mxfp4(x, pack(p)[0], *groups, out=p.expected.new_full((3, p.capacity, 64), float("nan")).bfloat16(),
                         x_scale=memory[:, 1:3].mT)  # fmt: skip
    assert mismatch(y.flatten(0, 1), p.expected) is None


@pytest.mark.parametrize("group_size, scale_dtype", [(32, "f16"), (64, "f32"), (128, "bf16")])
def test_int4(group_size, scale_dtype, device):
    config = INT4._replace(group_size=group_size, scale_dtype=scale_dtype)
    p = make_problem([5, 0, 12], 96, 160 if group_size == 32 else 384, device, config)
    weight, w_scale = pack(p)
    y = group_gemm_int4(p.x, weight, p.lengths, p.starts, w_scale, n=96)
    assert mismatch(y, p.expected) is None


def shifted(weight):
    """The same weight at an odd address."""
    wide = torch.empty(weight.numel() + 1, dtype=torch.uint8, device=weight.device)
    return wide[1:].view(weight.shape).copy_(weight)


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "x is torch.float32; it must be torch.bfloat16 or", lambda a: dict(x=a["x"].float())),
        (TypeError, "weight is torch.int8; it must be", lambda a: dict(weight=a["weight"].view(torch.int8))),
        (ValueError, "weight has shape .*2175", lambda a: dict(weight=a["weight"][..., 1:])),
        (ValueError, "weight starts at address", lambda a: dict(weight=shifted(a["weight"]))),
        (ValueError, "x has 128 columns; weight is packed for 32 or 64", lambda a: dict(x=a["x"].repeat(1, 2))),
        (ValueError, "n is 128; weight is packed for 32 or 64 rows", lambda a: dict(n=128)),
        (TypeError, "n is 1.5", lambda a: dict(n=1.5)),
        (TypeError, "seqlens is None", lambda a: dict(seqlens=None)),
        (ValueError, r"bias has shape \(64,\)", lambda a: dict(bias=a["x"][0])),
        (ValueError, "accumulate is True: out must be given", lambda a: dict(accumulate=True)),
        (ValueError, "offs is given", lambda a: dict(offs=a["seqlens"])),
        (ValueError, "out's y is", lambda a: dict(out=a["x"][:1])),
        (ValueError, "x_scale is given, but x is torch.bfloat16", lambda a: dict(x_scale=torch.ones(1))),
        (
            ValueError,
            r"weight has shape .*: it is packed for torch.bfloat16, but x is torch.float8_e4m3fn: use pack_mxfp4\(..., "
            "activation_dtype=torch.float8_e4m3fn",
            lambda a: dict(x=a["x"].to(FP8), x_scale=torch.ones(1, device=a["x"].device)),
        ),
    ],
)
def test_bad_arguments_are_refused(error, message, change, device):
    p = make_problem([3, 2], 64, 64, device)
    good = dict(x=p.x, weight=pack(p)[0], seqlens=p.lengths, cu_seqlens=p.starts)
    with pytest.raises(error, match=message):
        group_gemm_mxfp4(**good | change(good))


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "packed for torch.float8_e4m3fn, but x is torch.bfloat16", lambda a: dict(x=a["x"].bfloat16())),
        (TypeError, "x_scale is None; for an x of torch.float8_e4m3fn it must be", lambda a: dict(x_scale=None)),
        (TypeError, "x_scale is torch.float64", lambda a: dict(x_scale=a["x_scale"].double())),
        (
            ValueError,
            r"x_scale has shape \(5, 3\); it must be \[1\], \[5\] or \[5, 2\]",
            lambda a: dict(x_scale=a["x_scale"].expand(3, 5).T),
        ),
        (ValueError, "x_scale has strides", lambda a: dict(x_scale=a["x_scale"].repeat(2)[::2])),
    ],
)
def test_bad_scales_of_x_are_refused(error, message, change, device):
    p = make_problem([3, 2], 64, 160, device, E4M3)
    good = dict(x=p.x, weight=pack(p)[0], seqlens=p.lengths, cu_seqlens=p.starts, x_scale=p.x_scale)
    arguments = good | change(good)
    if arguments["x"].dtype == torch.bfloat16:
        arguments["x_scale"] = None
    with pytest.raises(error, match=message):
        group_gemm_mxfp4(**arguments)


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "x is torch.float8_e4m3fn; it must be torch.bfloat16", lambda a: dict(x=a["x"].to(FP8))),
        (ValueError, r"weight has shape .* it must be \[groups, n / 64, k / 64, 2048\]", lambda a: dict(weight=PACKED)),
        (TypeError, "w_scale is None", lambda a: dict(w_scale=None)),
        (TypeError, "w_scale is torch.float64", lambda a: dict(w_scale=a["w_scale"].double())),
        (ValueError, "w_scale has shape .*63", lambda a: dict(w_scale=a["w_scale"][..., 1:].contiguous())),
        (ValueError, "w_scale has 3 groups along k; .* of 32 or 64 or 128", lambda a: dict(w_scale=THREE_GROUPS)),
    ],
)
def test_bad_arguments_of_int4_are_refused(error, message, change, device):
    p = make_problem([3, 2], 64, 128, device, INT4)
    weight, w_scale = pack(p)
    good = dict(x=p.x, weight=weight, seqlens=p.lengths, cu_seqlens=p.starts, w_scale=w_scale)
    arguments = good | change(good)
    arguments |= {name: t.to(device) for name, t in arguments.items() if t is not None}
    with pytest.raises(error, match=message):
        group_gemm_int4(**arguments)


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
        (
            r"x_scale has strides \(2147483648, 1\); those of rows and blocks must be below 2\^31",
            lambda a: dict(
                x=a["x"][:1].repeat(1, 3).to(FP8),
                weight=a["weight"].new_zeros(2, 1, 3, 136, 16),
                x_scale=torch.ones(2, device=a["x"].device).as_strided((1, 2), (1 << 31, 1)),
            ),
        ),
    ],
)
def test_sizes_beyond_32_bits_are_refused(message, change, device):
    p = make_problem([3, 2], 64, 64, device)
    good = dict(x=p.x, weight=pack(p)[0], seqlens=p.lengths, cu_seqlens=p.starts)
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


PACKED, THREE_GROUPS = torch.zeros(2, 1, 2, 2176, dtype=torch.uint8), torch.ones(2, 1, 3, 64)


# Options of the output

OPTIONS = {
    "mxfp4": (SMALL, torch.bfloat16, torch.float32),
    "mxfp4, bf16 results": (SMALL, torch.float32, torch.bfloat16),
    "e4m3, row": (E4M3, torch.bfloat16, torch.bfloat16),
    "e4m3, tensor": (E4M3._replace(x_scaling="tensor"), torch.float32, torch.float32),
    "e4m3, block": (BLOCK_SCALED, torch.bfloat16, torch.float32),
    "int4": (INT4._replace(group_size=32), torch.float32, torch.bfloat16),
    "e4m3, four warpgroups": (E4M3._replace(warpgroups=4), torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bias_row_weights_gather_and_scatter(name, device):
    config, bias_dtype, out_dtype = OPTIONS[name]
    p = gathered(make_problem([5, 0, 19], 96, 96, device, config))
    total = len(p.expected)
    bias, row_weights = torch.randn(3, 96, device=device).to(bias_dtype) * 8, torch.rand(total, device=device) + 0.5
    indices = torch.randperm(total + 3)[:total].int().to(device)
    indices[1] = -1  # not stored
    out = torch.full((total + 3, 96), float("nan"), dtype=out_dtype, device=device)
    rows = finish_rows(p.expected, p.lengths, p.starts, bias, row_weights)
    expected, bound = store_rows(rows, out, indices), 2.3e-3 if out_dtype == torch.bfloat16 else 1e-5
    if config.dtype == "e4m3" and not simulator.ENABLED:
        bound = max(bound, 1e-4)  # tensor cores add FP8 products with about 14 bits
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
    y = group_gemm_mxfp4(p.x, pack(p)[0], p.lengths, p.starts, out_dtype=torch.float32)
    assert y.dtype == torch.float32 and mismatch(y, p.expected, 1e-5) is None


# Activations


def activated_reference(rows, activation, alpha=1.702, limit=7.0):
    if activation == "silu":
        gate, up = rows.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return reference.swigluoai(rows, alpha, limit)


GATE_UP = {"silu": "stacked", "swigluoai": "interleaved"}


def activation_error(activation, device, config=SMALL, pack_with=None, lengths=(5, 0, 12), with_gather=False, n=192):
    """Return how the activated product with a bias differs from the reference."""
    p = make_problem(lengths, n, 96, device, config)
    bias = (torch.randn(len(lengths), n) * 4).bfloat16().to(device)
    group = torch.repeat_interleave(torch.arange(len(lengths), device=device), p.lengths)
    factor = 2.0 ** -int(p.expected.std().log2())  # so that the activation is not linear
    expected = activated_reference(p.expected * factor + bias[group].double(), activation)
    for name in ("x",) if p.x_scale is None else ("x_scale",):
        setattr(p, name, getattr(p, name) * factor)
    if with_gather:
        gathered(p)
    out = torch.full((len(expected) + 4, n // 2), float("nan"), dtype=torch.bfloat16, device=device)
    packed = pack(p, GATE_UP[activation], **dict(pack_mxfp4=pack_with) if pack_with else {})
    call(p, packed, bias=bias, activation=activation, silu_and_mul=True, out=out[: len(expected)])
    assert bool(out[len(expected) :].isnan().all()), "rows behind the output were written"
    return mismatch(out[: len(expected)], expected, 3e-3)


@pytest.mark.parametrize(
    "activation, config, lengths, with_gather",
    [
        ("silu", SMALL, (5, 0, 12), False),
        ("swigluoai", SMALL, (5, 0, 12), True),
        ("swigluoai", LARGE, (97, 65, 20), False),
        ("silu", E4M3, (5, 0, 12), True),
        ("swigluoai", BLOCK_SCALED, (5, 0, 12), False),
        ("swigluoai", INT4._replace(group_size=32), (5, 0, 12), False),
        ("silu", E4M3._replace(warpgroups=4), (9,), True),
    ],
)
def test_activation(activation, config, lengths, with_gather, device):
    assert activation_error(activation, device, config, lengths=lengths, with_gather=with_gather) is None


WRONG_ACTIVATION = {
    "gate and up are exchanged": (SMALL, "select_gate(acc), select_up(acc)", "select_up(acc), select_gate(acc)"),
    "up has the bias of gate": (SMALL, "2 * column + 1 if", "2 * column if"),
    "the bias is that of another group": (SMALL, "int64(tile.group)", "int64(0)"),
    "the second warpgroup stores the first one's columns": (SMALL, "warpgroup * TILE_COLUMNS", "0"),
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
    "the activation is of rows without their scales": (E4M3, "        if by_row:\n", "        if False:\n"),
}


@pytest.mark.parametrize("what", WRONG_ACTIVATION)
def test_wrong_activations_are_rejected(what, device, monkeypatch):
    if "buffer" in what and not simulator.ENABLED:
        pytest.skip("a race, which a GPU may survive")
    config, *change = WRONG_ACTIVATION[what]
    monkeypatch.setattr(w4_launch, "make_kernel", changed_maker(kernel, "make_kernel", w4_epilogue, *change))
    w4_launch.get_w4_launcher.cache_clear()

    def attempt(seed):
        w4_launch._plans.clear()
        with simulator.seed(seed):
            return activation_error("swigluoai", device, config, lengths=(12, 70))

    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"
    w4_launch.get_w4_launcher.cache_clear()


def test_rows_packed_without_gate_and_up_are_rejected(device):
    for gate_up in (None, "stacked"):
        other = lambda blocks, scales, _, dtype, gate_up=gate_up: pack_mxfp4(blocks, scales, gate_up, dtype)
        assert activation_error("swigluoai", device, pack_with=other) is not None
