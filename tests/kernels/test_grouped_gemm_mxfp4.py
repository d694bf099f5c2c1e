"""The grouped GEMM kernel for MXFP4 weights against the reference, and wrong kernels that must be rejected."""

from types import SimpleNamespace

import pytest
import torch
from helpers.grouped_gemm import PATTERNS
from helpers.wrong_kernels import changed, changed_maker, is_rejected

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import (
    epilogue,
    epilogue_mxfp4,
    gather,
    group_gemm_mxfp4,
    launch_mxfp4,
    packing_mxfp4,
    reference,
)
from moe_numba.grouped_gemm import kernel_mxfp4 as kernel
from moe_numba.grouped_gemm.config import EPILOGUE_BYTES
from moe_numba.grouped_gemm.config_mxfp4 import (
    CONFIGS,
    Mxfp4Config,
    Mxfp4Layout,
    check_mxfp4_config,
    fit_registers,
    select_mxfp4_config,
)
from moe_numba.grouped_gemm.launch_mxfp4 import group_gemm
from moe_numba.grouped_gemm.packing_mxfp4 import MAX_SCALE, MIN_SCALE, pack_mxfp4
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.reference_mxfp4 import E2M1, dequantise_mxfp4, quantise_mxfp4
from moe_numba.runtime.device import H200
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

SMALL = Mxfp4Config(subtile_m=16, mma_n=(16, 8), box_rows=8, stages=3, max_groups=8)
CONFIG_VARIANTS = {
    "two units": SMALL,
    "one unit": SMALL._replace(stage_units=1),
    "four warpgroups": SMALL._replace(warpgroups=4, box_rows=16, mma_n=(16,)),
    "no overlap": SMALL._replace(overlap=False),
}


# Packing


def random_weight(groups, n, k):
    return quantise_mxfp4(torch.randn(groups, n, k) * torch.exp2(torch.randint(-4, 5, (groups, n, 1)).float()))


def test_quantisation_of_mxfp4_numbers_is_exact():
    numbers = torch.tensor([*E2M1, *(-v for v in E2M1)]).repeat(3, 4, 2) * torch.tensor([1.0, 0.25, 1024.0]).view(
        3, 1, 1
    )
    blocks, scales = quantise_mxfp4(numbers)
    assert blocks.shape == (3, 4, 1, 16) and scales.shape == (3, 4, 1) and scales[0, 0, 0] == 127
    assert torch.equal(dequantise_mxfp4(blocks, scales).float(), numbers)
    assert blocks[0, 0, 0, 0] == 0x10  # the first number is in the low half
    assert torch.equal(dequantise_mxfp4(blocks.flatten(2), scales).float(), numbers)


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "blocks is torch.int8; it must be torch.uint8", lambda b, s: (b.view(torch.int8), s)),
        (TypeError, "scales is torch.int8", lambda b, s: (b, s.view(torch.int8))),
        (ValueError, r"blocks has shape \(2, 64, 1, 16\); it must be \[2, 64, 2, 16\]", lambda b, s: (b[:, :, :1], s)),
        (ValueError, r"blocks has shape \(2, 64, 16\); it must be \[2, 64, 32\]", lambda b, s: (b[:, :, 0], s)),
        (ValueError, r"scales has shape \(64, 2\); it must be \[groups", lambda b, s: (b, s[0])),
        (ValueError, r"n must be a multiple of 32", lambda b, s: (b[:, :48], s[:, :48])),
        (ValueError, r"scales has the byte 161, 2\*\*34; it must be at most 160", lambda b, s: (b, s.fill_(161))),
        (ValueError, "gate_up is 'gate'; it must be None", lambda b, s: (b, s, "gate")),
        (ValueError, "scales has 32 rows; with gate_up", lambda b, s: (b[:, :32], s[:, :32], "stacked")),
    ],
)
def test_unsupported_weights_are_refused(error, message, change):
    with pytest.raises(error, match=message):
        pack_mxfp4(*change(*random_weight(2, 64, 64)))


def test_packing_takes_both_layouts_of_codes():
    blocks, scales = random_weight(2, 96, 96)
    packed = pack_mxfp4(blocks, scales)
    assert packed.shape == (2, 2, 2, 2176) and packed.is_contiguous()
    assert torch.equal(pack_mxfp4(blocks.flatten(2), scales), packed)


# The kernel


def make_problem(lengths, n, k, device="cpu", row_layout="lengths", seed=0, weight=None):
    """Random inputs and the expected output, which is NaN in rows that belong to no group."""
    torch.manual_seed(seed)
    lengths, capacity = torch.tensor(lengths, dtype=torch.int32), 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    if row_layout == "masked":
        capacity = int(lengths.max()) + 3
        starts = torch.arange(len(lengths), dtype=torch.int32) * capacity
    total = capacity * len(lengths) if capacity else int(lengths.sum()) or 4  # a tensor map cannot be of no rows
    x, (blocks, scales) = torch.randn(total, k).bfloat16(), weight or random_weight(len(lengths), n, k)
    expected = reference.group_gemm(x.double(), dequantise_mxfp4(blocks, scales), lengths, starts)
    tensors = dict(x=x, blocks=blocks, scales=scales, lengths=lengths, starts=starts, expected=expected)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return SimpleNamespace(**tensors, capacity=capacity, n=n, indices=None, row_layout=row_layout)


def gathered(p):
    """The same problem with x in another order, among rows of NaN that no index names."""
    rows = torch.randperm(len(p.x) + 5)[: len(p.x)].to(p.x.device)
    wide = torch.full((len(p.x) + 5, p.x.shape[1]), float("nan"), dtype=p.x.dtype, device=p.x.device)
    wide[rows] = p.x
    p.x, p.indices = wide, rows.int()
    return p


def run(config, p, blocks=2, seed=0, make_kernel=kernel.make_kernel, pack=pack_mxfp4):
    """Run the kernel on an output filled with NaN, with 4 guard rows behind it."""
    config = config._replace(row_layout=p.row_layout, gather=p.indices is not None)
    made, shared_bytes = make_kernel(config)
    weight, indices = pack(p.blocks, p.scales), p.lengths if p.indices is None else p.indices
    total = len(p.x if p.indices is None else p.indices)
    y = torch.full((total + 4, p.n), float("nan"), dtype=torch.bfloat16, device=p.x.device)
    lengths = p.lengths if p.row_layout != "offsets" else (p.starts[:-1] + p.lengths)
    with simulator.seed(seed):
        launch(
            made,
            blocks,
            Mxfp4Layout(config).threads,
            TensorMap(p.x, (config.box_rows, 64), swizzle=128),
            weight,
            *(y.view(torch.int32), lengths, p.starts),
            *(len(p.lengths), total, p.capacity, p.n, weight.shape[1], weight.shape[2]),
            *(p.x.view(torch.uint8), indices, len(p.x), 2 * p.x.shape[1], 2 * p.x.shape[1]),
            *(p.lengths, p.lengths, p.lengths, total),  # bias, row_weights, scatter_indices: not used
            shared_bytes=shared_bytes,
        )
    assert bool(y[total:].isnan().all()), "rows behind the output were written"
    return y[:total]


def every_code_and_scale():
    """Weights with all 16 codes twice in each block, and a scale of its own for each of 128 blocks."""
    codes = torch.stack([torch.randperm(32) % 16 for _ in range(128)]).view(1, 64, 2, 32).to(torch.uint8)
    scales = torch.randperm(MAX_SCALE - MIN_SCALE + 2) + MIN_SCALE - 1
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales.view(1, 64, 2).to(torch.uint8)


def decoding_error(device, make_kernel=kernel.make_kernel, pack=pack_mxfp4):
    """Return what is wrong with a product with the identity, which is the decoded weight."""
    torch.manual_seed(0)
    p = make_problem([64], 64, 64, device, weight=every_code_and_scale())
    p.x = torch.eye(64, dtype=torch.bfloat16, device=device)
    config = SMALL._replace(subtile_m=64, mma_n=(64,))
    right = dequantise_mxfp4(p.blocks, torch.where(p.scales < MIN_SCALE, 0, p.scales))[0].T
    right = torch.where(right.abs() < 2.0**-100, 0, right)  # of the scale below MIN_SCALE
    found = run(config, p, make_kernel=make_kernel, pack=pack).double()
    return None if torch.equal(found, right) else f"{int((found != right).sum())} weights are wrong"


def test_every_code_is_decoded_exactly_with_every_scale(device):
    assert decoding_error(device) is None


def test_a_scale_that_is_nan_makes_its_row_nan(device):
    p = make_problem([3], 64, 64, device)
    p.scales[0, 5, 1] = 255
    y = run(SMALL, p)
    assert bool(y[:, 5].isnan().all())
    p.expected[:, 5], y[:, 5] = 0, 0
    assert mismatch(y, p.expected) is None


@pytest.mark.parametrize(
    "pattern, variant",
    [
        *(("empty groups", variant) for variant in CONFIG_VARIANTS),
        *(("an exact tile, and one row more", variant) for variant in ("two units", "one unit")),
        ("no rows", "two units"),
    ],
)
def test_group_sizes(pattern, variant, device):
    p = make_problem(PATTERNS[pattern], 128, 192, device)
    assert mismatch(run(CONFIG_VARIANTS[variant], p), p.expected) is None


@pytest.mark.parametrize(
    "n, k, variant",
    [(32, 32, "two units"), (96, 96, "one unit"), (192, 224, "two units"), (320, 96, "four warpgroups")],
)
def test_sizes_that_are_no_multiples_of_a_tile(n, k, variant, device):
    p = make_problem([5, 0, 12], n, k, device)
    assert mismatch(run(CONFIG_VARIANTS[variant], p, blocks=3), p.expected) is None


@pytest.mark.parametrize("row_layout", ["offsets", "masked"])
def test_row_layouts(row_layout, device):
    p = make_problem([3, 0, 20], 64, 128, device, row_layout)
    assert mismatch(run(SMALL, p), p.expected) is None


@pytest.mark.parametrize("seed", [1, 2])
def test_result_does_not_depend_on_thread_order(seed, device):
    p = make_problem([30, 10], 64, 448, device)
    first = run(SMALL, p)
    assert mismatch(first, p.expected) is None
    assert torch.equal(run(SMALL, p, seed=seed), first)


@pytest.mark.parametrize("lengths, starts", [([-5, 3], [0, 0]), ([3, 1 << 30], [0, 3]), ([4, 4], [-7, 1 << 30])])
def test_invalid_group_sizes_stay_in_bounds(lengths, starts, device):
    p = make_problem([4, 4], 64, 64, device)
    p.lengths, p.starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
    run(SMALL, p)  # asserts that the guard rows are unchanged


@pytest.mark.parametrize("variant", ["two units", "one unit"])
def test_gather(variant, device):
    p = gathered(make_problem([5, 0, 40], 96, 160, device))
    assert mismatch(run(CONFIG_VARIANTS[variant], p), p.expected) is None
    p.indices[:3] = torch.tensor([-1, len(p.x), 1 << 30])
    p.expected[:3] = 0
    assert mismatch(run(CONFIG_VARIANTS[variant], p), p.expected) is None


# Wrong kernels

WRONG_DECODING = {
    "the two codes of a byte are swapped": (packing_mxfp4, "codes & 15, codes >> 4", "codes >> 4, codes & 15"),
    "bits of other registers are not compensated": (
        packing_mxfp4,
        "    a = a | ((y ^ b << 3) & 0x80408040) >> 2\n",
        "",
    ),
    "scales below the range are not flushed": (packing_mxfp4, "bytes_ < MIN_SCALE, 0", "bytes_ < 0, 0"),
    "the sign is lost": (kernel, "word & uint32(FIELDS)", "word & uint32(0x01C001C0)"),
    "a block has the scale of its neighbour": (kernel, "rotr(word, 8) & uint32(EXPONENTS)", "word & uint32(EXPONENTS)"),
    "a thread's second row has the first one's scale": (kernel, "mul_rn_bf16x2_high(", "mul_rn_bf16x2_low("),
    "a scale is that of the next row": (
        kernel,
        "8 * (warp & 3) + (lane >> 2))",
        "8 * (warp & 3) + (lane + 4 >> 2 & 7))",
    ),
    "registers of a block are in another order": (kernel, "fields(b), scales", "fields(rotr(b, 4)), scales"),
}


@pytest.mark.parametrize("what", WRONG_DECODING)
def test_wrong_decoding_is_rejected(what, device):
    module, *change = WRONG_DECODING[what]
    if module is kernel:
        options = dict(make_kernel=changed_maker(kernel, "make_kernel", kernel, *change))
    else:
        options = dict(pack=changed(packing_mxfp4, *change)["pack_mxfp4"])
    assert decoding_error(device, **options), f"the check accepts a kernel in which {what}"


WRONG = {
    "a stage is read before it is full": (
        kernel,
        "        while left > 1:\n            mbarrier_wait_parity(smem.barriers, full + stage, phase)\n",
        "        while left > 1:\n",
    ),
    "a stage is filled while it is read": (
        kernel,
        "                mbarrier_wait_parity(barriers, empty + stage, phase)\n                mbarrier_arrive_expect",
        "                mbarrier_arrive_expect",
    ),
    "a stage is released before wgmma has read it": (
        kernel,
        "            stage_1 = stage\n",
        "            release(smem, lane, stage)\n            stage_1 = int32(-1)\n",
    ),
    "a stage is never released": (kernel, "        release(smem, lane, stage_1)\n        return", "        return"),
    "too few bytes are expected": (kernel, "int32(units * unit_bytes))", "int32(units * unit_bytes - 16))"),
    "consumers request more registers than producers release": (
        kernel,
        "make_setmaxnreg_inc(layout.registers[1])",
        "make_setmaxnreg_inc(248)",
    ),
    "rows of the next group are stored": (epilogue, "int32(min(tile.rows, tile.subtile_rows))", "tile.subtile_rows"),
    "the wrong group's weight is loaded": (kernel, "int64(g) * n_units", "int64(0) * n_units"),
    "both warpgroups load the same rows of weight": (kernel, "n_tile * warpgroups + w)", "n_tile * warpgroups)"),
    "units of k are in another order": (kernel, ") * k_units + k_unit\n", ") * k_units + (k_unit ^ 2)\n"),
    "the second unit of a stage is multiplied with the first one's x": (
        kernel,
        "b = uint64(b + uint64(subtile_bytes >> 4))",
        "b = uint64(b)",
    ),
    "the last unit is left out": (kernel, "        if left > 0:\n", "        if left > 1:\n"),
    "the epilogue does not undo its swizzle": (epilogue, "((vector ^ (t & 7)) << 4)", "(vector << 4)"),
}
ON_A_GPU = {  # the others would hang a GPU, access memory out of bounds, or could be right by chance
    "rows of the next group are stored",
    "the wrong group's weight is loaded",
    "both warpgroups load the same rows of weight",
    "the second unit of a stage is multiplied with the first one's x",
    "the epilogue does not undo its swizzle",
}


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what in ON_A_GPU])
def test_wrong_kernels_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG[what])
    p = make_problem([13, 11], 128, 320, device)
    config = SMALL._replace(stages=2)
    attempt = lambda seed: mismatch(run(config, p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


WRONG_GATHER = {
    "gathered rows are not waited for": (gather, "    cp_async_wait_all()\n", ""),
    "gathered rows are copied into a stage that is read": (
        kernel,
        "                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n                    for u",
        "                    for u",
    ),
    "the second unit has the first one's columns": (kernel, "int32(k_unit + u), source", "int32(k_unit), source"),
}


@pytest.mark.parametrize("what", WRONG_GATHER if simulator.ENABLED else ["the second unit has the first one's columns"])
def test_wrong_gathers_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG_GATHER[what])
    p = gathered(make_problem([13, 11], 64, 448, device))
    attempt = lambda seed: mismatch(run(SMALL, p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


# Configurations


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mma_n=(16, 24)), "mma_n is .*; it must descend from subtile_m"),
        (dict(box_rows=24), "box_rows is 24; it must be a multiple of 8 that divides subtile_m"),
        (dict(warpgroups=3), "warpgroups is 3; it must be 2 or 4"),
        (dict(warpgroups=4, scatter=True), "warpgroups is 4; with scatter or row_weights it must be 2"),
        (dict(activation="gelu"), "activation is 'gelu'; it must be 'silu' or 'swigluoai'"),
        (dict(activation="silu", scatter=True), "activation is 'silu'; it must be .* with bf16 results"),
        (dict(stage_units=3), "stage_units is 3; it must be 1 or 2"),
        (dict(gather=True, stages=2), "stages is 2; with gather it must be 3 or more"),
        (dict(stages=40), "needs .* bytes of shared memory"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kernel.make_kernel(SMALL._replace(**change))


def test_selected_configurations_are_supported():
    averages = [limit for limit, _ in CONFIGS if limit] + [1000]
    found = {select_mxfp4_config("masked", average) for average in averages}
    assert len(found) == len(CONFIGS)
    for config in found:
        for options in (dict(), dict(gather=True), dict(scatter=True, row_weights=True, gather=True, bias="f32")):
            check_mxfp4_config(config._replace(**options))
            assert Mxfp4Layout(config._replace(**options)).bytes <= H200.shared_bytes
            assert not (fit_registers(config._replace(**options)).overlap and config.subtile_m > 64 and options)


@pytest.mark.parametrize("change", [dict(), dict(stage_units=1, stages=4), dict(warpgroups=4, stages=4)])
def test_shared_memory_regions_do_not_overlap(change):
    layout = Mxfp4Layout(SMALL._replace(gather=True, **change))
    config = layout.config
    regions = [  # bytes
        (0, config.stages * config.stage_units * 128 * config.subtile_m),
        (layout.weight_offset, config.stages * config.stage_units * config.warpgroups * 2176),
        (layout.epilogue_offset, config.warpgroups * EPILOGUE_BYTES),
        (8 * layout.full, 8 * config.stages),
        (8 * layout.empty, 8 * config.stages),
        (4 * layout.tile_info_offset, 16 * config.stages),
        (4 * layout.warp_sums_offset, layout.threads // 8),
        (4 * layout.first_tile_offset, 4 * config.max_groups),
        (4 * layout.row_index_offset, 4 * 3 * 32),
    ]
    for (start, size), (following, _) in zip(regions, [*regions[1:], (layout.bytes, 0)]):
        assert start + size <= following
    assert layout.weight_offset % 1024 == layout.epilogue_offset % 128 == 0
    producers, consumers = layout.registers
    assert 128 * producers + 128 * config.warpgroups * consumers <= 65536


# The public function


def arguments(p):
    return p.x, pack_mxfp4(p.blocks, p.scales), p.lengths, p.starts


def shifted(weight):
    """The same weight at an odd address."""
    wide = torch.empty(weight.numel() + 1, dtype=torch.uint8, device=weight.device)
    return wide[1:].view(weight.shape).copy_(weight)


def test_public_function(device):
    p = make_problem([5, 0, 12], 96, 96, device)
    out = torch.full_like(p.expected, float("nan"), dtype=torch.bfloat16)
    assert group_gemm_mxfp4(*arguments(p), out=out, n=96) is out
    assert mismatch(out, p.expected) is None
    ends = (p.starts[:-1] + p.lengths).int()
    y = group_gemm_mxfp4(p.x, pack_mxfp4(p.blocks, p.scales), None, None, 8, ends, n=96)
    assert torch.equal(y, out)
    none = p.x[:0]
    assert group_gemm_mxfp4(none, *arguments(p)[1:]).shape == (0, 128)
    indices = torch.arange(len(p.x), dtype=torch.int32, device=device)
    assert torch.equal(group_gemm_mxfp4(*arguments(p), gather_indices=indices, n=96), out)
    assert bool((group_gemm_mxfp4(none, *arguments(p)[1:], gather_indices=indices, n=96) == 0).all())


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "x is torch.float32; it must be torch.bfloat16", lambda a: dict(x=a["x"].float())),
        (
            TypeError,
            "weight is torch.int8; it must be torch.uint8",
            lambda a: dict(weight=a["weight"].view(torch.int8)),
        ),
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
    ],
)
def test_bad_arguments_are_refused(error, message, change, device):
    p = make_problem([3, 2], 64, 64, device)
    good = dict(zip(("x", "weight", "seqlens", "cu_seqlens"), arguments(p), strict=True))
    with pytest.raises(error, match=message):
        group_gemm_mxfp4(**good | change(good))


# Options of the output


def with_options(p, bias_dtype):
    """Add a bias, row weights, and indices that scatter the rows to some of more rows, and what is then expected."""
    groups, total, device = len(p.lengths), len(p.expected), p.x.device
    p.bias = torch.randn(groups, p.n).to(bias_dtype).to(device) * 8
    p.row_weights = torch.rand(total).to(device) + 0.5
    p.scatter_indices = torch.randperm(total + 3)[:total].int().to(device)
    p.scatter_indices[1] = -1  # not stored
    group = torch.repeat_interleave(torch.arange(groups, device=device), p.lengths)
    rows = (p.expected + p.bias[group].double()) * p.row_weights[:, None].double()
    p.scattered = torch.full((total + 3, p.n), float("nan"), dtype=torch.float64, device=device)
    p.scattered[p.scatter_indices[p.scatter_indices >= 0].long()] = rows[p.scatter_indices >= 0]
    return p


def options_error(p, out_dtype=torch.bfloat16, config=SMALL):
    """Return how the product with all options differs from what is expected."""
    out = torch.full_like(p.scattered, float("nan"), dtype=out_dtype)
    rest = dict(bias=p.bias, row_weights=p.row_weights, scatter_indices=p.scatter_indices, out_dtype=out_dtype)
    group_gemm(*arguments(p), gather_indices=p.indices, n=p.n, out=out, config=config, **rest)
    return mismatch(out, p.scattered, 2.3e-3 if out_dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("bias_dtype, out_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_bias_row_weights_gather_and_scatter(bias_dtype, out_dtype, device):
    p = gathered(with_options(make_problem([5, 0, 19], 96, 96, device), bias_dtype))
    assert options_error(p, out_dtype) is None
    p.bias = p.bias.roll(1, 0)
    assert options_error(p, out_dtype) is not None


def test_accumulation(device):
    p = make_problem([5, 42], 64, 64, device)
    before = torch.randn(47, 64, device=device)
    for config in (None, Mxfp4Config(**LARGE)):
        out = before.clone()
        group_gemm(*arguments(p), accumulate=True, out=out, config=config)
        assert mismatch(out, p.expected + before, 1e-5) is None
    y = group_gemm_mxfp4(*arguments(p), out_dtype=torch.float32)
    assert y.dtype == torch.float32 and mismatch(y, p.expected, 1e-5) is None


def activated_reference(rows, activation, alpha=1.702, limit=7.0):
    if activation == "silu":
        gate, up = rows.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    gate, up = rows[:, 0::2].clamp(max=limit), rows[:, 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


GATE_UP = {"silu": "stacked", "swigluoai": "interleaved"}


def activation_error(activation, device, config=SMALL, pack=pack_mxfp4, lengths=(5, 0, 12), with_gather=False, n=192):
    """Return how the activated product with a bias differs from the reference."""
    p = make_problem(lengths, n, 96, device)
    bias = (torch.randn(len(lengths), n) * 4).bfloat16().to(device)
    group = torch.repeat_interleave(torch.arange(len(lengths), device=device), p.lengths)
    expected = activated_reference(p.expected / 8 + bias[group].double(), activation)
    p.x = p.x / 8
    if with_gather:
        gathered(p)
    out = torch.full((len(expected) + 4, n // 2), float("nan"), dtype=torch.bfloat16, device=device)
    group_gemm(
        *(p.x, pack(p.blocks, p.scales, GATE_UP[activation]), p.lengths, p.starts),
        **dict(bias=bias, activation=activation, silu_and_mul=True, gather_indices=p.indices, config=config),
        out=out[: len(expected)],
    )
    assert bool(out[len(expected) :].isnan().all()), "rows behind the output were written"
    return mismatch(out[: len(expected)], expected, 3e-3)


LARGE = dict(subtile_m=104, mma_n=(104, 72, 24), box_rows=8, stages=3, max_groups=8)


@pytest.mark.parametrize(
    "activation, config, lengths, with_gather",
    [
        ("silu", SMALL, (5, 0, 12), False),
        ("swigluoai", SMALL, (5, 0, 12), True),
        ("swigluoai", Mxfp4Config(**LARGE), (97, 65, 20), False),
        ("silu", SMALL._replace(warpgroups=4), (9,), True),
    ],
)
def test_activation(activation, config, lengths, with_gather, device):
    assert activation_error(activation, device, config, lengths=lengths, with_gather=with_gather) is None


WRONG_ACTIVATION = {
    "gate and up are exchanged": (
        epilogue_mxfp4,
        "select_gate(acc), select_up(acc)",
        "select_up(acc), select_gate(acc)",
    ),
    "up has the bias of gate": (epilogue_mxfp4, "2 * column + 1 if", "2 * column if"),
    "the bias is that of another group": (epilogue_mxfp4, "int64(tile.group)", "int64(0)"),
    "the second warpgroup stores the first one's columns": (epilogue_mxfp4, "warpgroup * UNIT_COLUMNS", "0"),
    "a buffer is read before all four warps wrote it": (
        epilogue_mxfp4,
        "        bar_sync(int32(2 + warpgroup), 128)\n        vector",
        "        vector",
    ),
    "a buffer is overwritten while other warps read it": (
        epilogue_mxfp4,
        "        bar_sync(int32(2 + warpgroup), 128)  # all warps have read the previous rows\n",
        "",
    ),
}


@pytest.mark.parametrize("what", WRONG_ACTIVATION)
def test_wrong_activations_are_rejected(what, device, monkeypatch):
    if "buffer" in what and not simulator.ENABLED:
        pytest.skip("a race, which a GPU may survive")
    made = changed_maker(kernel, "make_kernel", *WRONG_ACTIVATION[what])
    monkeypatch.setattr(launch_mxfp4, "make_kernel", made)
    monkeypatch.setattr(launch_mxfp4, "_plans", {})
    launch_mxfp4.get_mxfp4_launcher.cache_clear()

    def attempt(seed):
        with simulator.seed(seed):
            return activation_error("swigluoai", device, Mxfp4Config(**LARGE), lengths=(12, 70))

    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"
    launch_mxfp4.get_mxfp4_launcher.cache_clear()


def test_rows_packed_without_gate_and_up_are_rejected(device):
    assert activation_error("swigluoai", device, pack=lambda blocks, scales, _: pack_mxfp4(blocks, scales)) is not None
    swapped = lambda blocks, scales, _: pack_mxfp4(blocks, scales, "stacked")
    assert activation_error("swigluoai", device, pack=swapped) is not None


def test_a_configuration_can_be_chosen(device):
    p = make_problem([3, 2], 64, 64, device)
    assert mismatch(group_gemm(*arguments(p), config=SMALL._replace(max_groups=64)), p.expected) is None
