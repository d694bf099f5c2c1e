"""The grouped GEMM kernel for 4-bit weights against the reference, and wrong kernels that must be rejected."""

import contextlib

import pytest
import torch
from helpers.grouped_gemm import PATTERNS
from helpers.w4_gemm import E4M3, INT4, SMALL, gathered, make_problem, run, wrong
from helpers.wrong_kernels import is_rejected

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import promotion_w4
from moe_numba.grouped_gemm.common import epilogue_terms, gather, store_tile
from moe_numba.grouped_gemm.common.constants import EPILOGUE_BYTES
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.w4 import kernel
from moe_numba.grouped_gemm.w4 import main_loop as mainloop_w4
from moe_numba.grouped_gemm.w4.config import fit_registers, select_w4_config
from moe_numba.grouped_gemm.w4.layout import W4Layout, check_w4_config, fit_shared_memory
from moe_numba.runtime.device import H200

BLOCK_SCALED = E4M3._replace(x_scaling="block")
WGMMA = SMALL._replace(subtile_m=24, mma_n=(24,))
VARIANTS = {
    "two tiles": WGMMA,
    "one tile": SMALL._replace(stage_tiles=1),
    "no overlap": WGMMA._replace(overlap=False),
    "mma.sync": SMALL,
    "four warpgroups": SMALL._replace(warpgroups=4, subtile_m=24, mma_n=(24, 16, 8)),
    "e4m3, four warpgroups": E4M3._replace(warpgroups=4, mma_n=(16,)),
    "e4m3, tensor": E4M3._replace(x_scaling="tensor"),
    "e4m3, row": E4M3,
    "e4m3, row, no overlap": E4M3._replace(overlap=False),
    "e4m3, block": BLOCK_SCALED,
    "e4m3, block, no overlap": BLOCK_SCALED._replace(overlap=False),
    "int4, groups of 32": INT4._replace(group_size=32, scale_dtype="f32"),
    "int4, groups of 64": INT4._replace(overlap=False),
    "int4, groups of 128": INT4._replace(group_size=128, scale_dtype="f16"),
}


@pytest.mark.parametrize(
    "pattern, variant",
    [
        *(("empty groups", variant) for variant in VARIANTS),
        *(
            ("an exact tile, and one row more", variant)
            for variant in ("two tiles", "one tile", "mma.sync", "e4m3, block")
        ),
        ("no rows", "two tiles"),
    ],
)
def test_group_sizes(pattern, variant, device):
    k = 256 if variant == "int4, groups of 128" else 192
    p = make_problem(PATTERNS[pattern], 128, k, device, VARIANTS[variant])
    assert mismatch(run(p), p.expected) is None


@pytest.mark.parametrize("k", [64, 832], ids=["few stages", "many stages"])
@pytest.mark.parametrize(
    "variant", ["two tiles", "one tile", "mma.sync", "four warpgroups", "e4m3, block", "int4, groups of 64"]
)
def test_early_weights(variant, k, device):
    """The first stages hold several tiles, or a part of one."""
    late = make_problem([5, 0, 30, 7], 256, k, device, VARIANTS[variant])
    p = make_problem([5, 0, 30, 7], 256, k, device, VARIANTS[variant]._replace(early_weight=True))
    early = run(p)
    assert mismatch(early, p.expected) is None and torch.equal(early, run(late))


@pytest.mark.parametrize(
    "n, k, variant",
    [
        (32, 32, "two tiles"),
        (96, 96, "one tile"),
        (192, 224, "two tiles"),
        (192, 224, "mma.sync"),
        (320, 96, "four warpgroups"),
        (96, 96, "e4m3, row"),
        (192, 32, "e4m3, block"),
        (32, 224, "e4m3, block, no overlap"),
        (96, 160, "int4, groups of 32"),
    ],
)
def test_sizes_that_are_no_multiples_of_a_tile(n, k, variant, device):
    p = make_problem([5, 0, 12], n, k, device, VARIANTS[variant])
    assert mismatch(run(p, blocks=3), p.expected) is None


@pytest.mark.parametrize(
    "row_layout, variant", [("offsets", "two tiles"), ("masked", "two tiles"), ("masked", "e4m3, row")]
)
def test_row_layouts(row_layout, variant, device):
    p = make_problem([3, 0, 20], 64, 128, device, VARIANTS[variant]._replace(row_layout=row_layout))
    assert mismatch(run(p), p.expected) is None


@pytest.mark.parametrize("seed, variant", [(1, "two tiles"), (2, "two tiles"), (1, "mma.sync"), (1, "e4m3, block")])
def test_result_does_not_depend_on_thread_order(seed, variant, device):
    p = make_problem([30, 10], 64, 448, device, VARIANTS[variant])
    first = run(p)
    assert mismatch(first, p.expected) is None
    assert torch.equal(run(p, seed=seed), first)


@pytest.mark.parametrize("lengths, starts", [([-5, 3], [0, 0]), ([3, 1 << 30], [0, 3]), ([4, 4], [-7, 1 << 30])])
def test_invalid_group_sizes_stay_in_bounds(lengths, starts, device):
    p = make_problem([4, 4], 64, 64, device)
    p.lengths, p.starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
    run(p)  # asserts that the guard rows are unchanged


@pytest.mark.parametrize("variant", ["two tiles", "one tile", "mma.sync", "e4m3, row", "e4m3, block"])
def test_gather(variant, device):
    p = gathered(make_problem([5, 0, 40], 96, 160, device, VARIANTS[variant]))
    assert mismatch(run(p), p.expected) is None
    p.indices[:3] = torch.tensor([-1, len(p.x), 1 << 30])
    p.expected[:3] = 0
    assert mismatch(run(p), p.expected) is None


@pytest.mark.parametrize("variant", ["two tiles", "e4m3, block"])
def test_consumers_release_an_early_stage_before_the_producer_continues(variant, device):
    """As for the kernel of FP8 and bfloat16 weights."""
    p = gathered(make_problem([5, 30, 16], 256, 832, device, VARIANTS[variant]._replace(early_weight=True)))
    wait = "            griddepcontrol_wait()\n"
    released = "            if early > 0:\n                mbarrier_wait_parity(barriers, empty, uint32(0))\n"
    slow = kernel, f"{wait}        tile = first_tile()", f"{wait}{released}        tile = first_tile()"
    assert mismatch(run(p, **wrong(*slow)), p.expected) is None
    if simulator.ENABLED:
        right = "            if early == 0:"
        always = f"            mbarrier_wait_parity(barriers, empty + stage, phase)\n{right}"
        assert is_rejected(lambda seed: mismatch(run(p, seed=seed, **wrong(*slow, (right, always))), p.expected))


# Wrong kernels

WAIT = "            mbarrier_wait_parity(smem.barriers, full + stage, phase)\n"
WRONG = {
    "a stage is read before it is full": (
        *("two tiles", mainloop_w4),
        f"{WAIT}            codes_0, scales_0",
        "            codes_0, scales_0",
    ),
    "a stage is filled while it is read": (
        *("two tiles", kernel),
        "                mbarrier_wait_parity(barriers, empty + stage, phase)\n                    allow_dependents",
        "                allow_dependents",
    ),
    "a stage is released before wgmma has read it": (
        *("two tiles", mainloop_w4),
        "            stage_1 = stage\n",
        "            release(smem, lane, stage)\n            stage_1 = int32(-1)\n",
    ),
    "a stage is never released": (
        *("two tiles", mainloop_w4),
        *("        release(smem, lane, stage_1)\n        return", "        return"),
    ),
    "too few bytes are expected": (
        *("two tiles", kernel),
        *("int32(x_bytes + bytes_of_tiles(k_tiles))", "int32(x_bytes + bytes_of_tiles(k_tiles) - 16)"),
    ),
    "consumers request more registers than producers release": (
        *("two tiles", kernel),
        *("make_setmaxnreg_inc(layout.registers[1])", "make_setmaxnreg_inc(248)"),
    ),
    "rows of the next group are stored": (
        *("two tiles", store_tile),
        *("int32(min(tile.rows, tile.subtile_rows))", "tile.subtile_rows"),
    ),
    "the wrong group's weight is loaded": ("two tiles", kernel, "int64(group) * weight.n_tiles", "int64(0)"),
    "both warpgroups load the same rows of weight": (
        *("two tiles", kernel),
        *("n_tile * warpgroups + w)", "n_tile * warpgroups)"),
    ),
    "tiles of k are in another order": (
        *("two tiles", kernel),
        *("row * weight.k_tiles + k_tile)", "row * weight.k_tiles + (k_tile ^ 2))"),
    ),
    "the second tile of a stage is multiplied with the first one's x": (
        *("two tiles", mainloop_w4),
        *("b = uint64(b + uint64(subtile_bytes >> 4))", "b = uint64(b)"),
    ),
    "the last tile is left out": (
        *("two tiles", mainloop_w4),
        f"        if left > 0:\n{WAIT}            codes_0, scales_0",
        f"        if left > 1:\n{WAIT}            codes_0, scales_0",
    ),
    "the epilogue does not undo its swizzle": (
        *("two tiles", store_tile),
        *("((vector ^ (t & 7)) << 4)", "(vector << 4)"),
    ),
    "e4m3: a block is multiplied with the x of its neighbour": (
        *("e4m3, row", promotion_w4),
        *("block_step=2 if is_e4m3", "block_step=0 if is_e4m3"),
    ),
    "e4m3: partial accumulators are read before wgmma has written them": (
        *("e4m3, row", promotion_w4),
        *("make_wgmma_wait(n, pending, 4 * steps)", "make_wgmma_wait(n, pending + 1, 4 * steps)"),
    ),
    "e4m3: the last tile is left out": (
        *("e4m3, row", promotion_w4),
        f"        if left > 0:\n{WAIT}            codes_0, factors_0",
        f"        if left > 1:\n{WAIT}            codes_0, factors_0",
    ),
    "e4m3: a row has the scale of the next row of x": (
        *("e4m3, row", epilogue_terms),
        *("load_x_scale(inputs, row) if valid", "load_x_scale(inputs, row ^ 1) if valid"),
    ),
    "e4m3: a block of k has the scale of the first": (
        *("e4m3, block", kernel),
        *("t, int32(k_tile // stage_tiles))", "t, int32(0))"),
    ),
    "e4m3: a row's blocks have the scales of the next row": (
        *("e4m3, block", kernel),
        *("int64(info.row + t) * scales.row", "int64((info.row + t) ^ 1) * scales.row"),
    ),
    "e4m3: the sums of a block are added to those of the next": (
        *("e4m3, block", promotion_w4),
        *("            acc = zeros\n", ""),
    ),
    "e4m3: a stage is released while other lanes read its scales": (
        *("e4m3, block", promotion_w4),
        *("            cuda.syncwarp()  # lane 0 releases the stage for all lanes\n", ""),
    ),
    "int4: the scales are those of the other warpgroup": (
        *("int4, groups of 64", kernel),
        *("w * (scale_groups * group_bytes))", "(1 - w) * (scale_groups * group_bytes))"),
    ),
    "int4: a stage has the scales of the first": (
        *("int4, groups of 64", kernel),
        *("row * weight.k_groups + first)", "row * weight.k_groups)"),
    ),
}
LAST_TILE = f"{WAIT}            codes_0, factors_0 = load_tile(smem, warp, lane, stage, int32(0))\n"
LAST_TILE += "            a_0 = decode_tile"
PROMOTE_FIRST = "acc = promote(acc, wait(partial, a_0), (factors_0[0], factors_0[1]))\n                partial"
WRONG |= {
    "int4: the second tile of a group is multiplied with the first one's x": (
        *("int4, groups of 128", promotion_w4),
        *("            b = uint64(b + uint64(tile_step))\n            if is_stage", "            if is_stage"),
    ),
    "int4: the second tile of a group replaces the first": (
        *("int4, groups of 128", promotion_w4),
        *("add(partial, a_1, b)", "multiply(a_1, b)"),
    ),
    "int4: the sums of the first tile are lost": ("int4, groups of 64", promotion_w4, PROMOTE_FIRST, "partial"),
    "int4: both tiles of a stage have the scales of the second": (
        *("int4, groups of 64", promotion_w4),
        *(PROMOTE_FIRST, PROMOTE_FIRST.replace("factors_0", "factors_1")),
    ),
    "int4: the last tile is left out": (
        *("int4, groups of 64", promotion_w4),
        *(f"        if left > 0:\n{LAST_TILE}", f"        if left > 1:\n{LAST_TILE}"),
    ),
}
MMA_SYNC = "mma.sync", mainloop_w4
RELEASE = "            if lane == 0:\n                mbarrier_arrive(smem.barriers, empty + stage)\n"
WRONG |= {
    "mma.sync: a stage is read before it is full": (*MMA_SYNC, f"{WAIT}            first = ", "            first = "),
    "mma.sync: a stage is never released": (
        *MMA_SYNC,
        f"{RELEASE}            stage, phase = advance(stage, phase)\n            left = int32(left - 2)",
        "            stage, phase = advance(stage, phase)\n            left = int32(left - 2)",
    ),
    "mma.sync: rows of x are read without their swizzle": (*MMA_SYNC, "(lane >> 3 ^ row)", "(lane >> 3)"),
    "mma.sync: the second half of k has the first one's x": (*MMA_SYNC, "int32(first ^ 64)", "first"),
    "mma.sync: the second tile of a stage is multiplied with the first one's x": (
        *MMA_SYNC,
        *("int32(first + subtile_bytes)", "first"),
    ),
    "mma.sync: rows of x from 8 on are the first ones": (
        *MMA_SYNC,
        "tuple(range(0, 128 * n, 1024))",
        "(0,) * (n // 8)",
    ),
    "mma.sync: the last tile is left out": (
        *MMA_SYNC,
        f"        while left > 0:\n{WAIT}            first = ",
        f"        while left > 1:\n{WAIT}            first = ",
    ),
}
RACES = {"e4m3: a stage is released while other lanes read its scales"}  # all lanes of a warp are usually in time
ON_A_GPU = {  # the others would hang a GPU, access memory out of bounds, or could be right by chance
    "rows of the next group are stored",
    "the wrong group's weight is loaded",
    "both warpgroups load the same rows of weight",
    "the second tile of a stage is multiplied with the first one's x",
    "mma.sync: rows of x are read without their swizzle",
    "mma.sync: the second half of k has the first one's x",
    "mma.sync: the second tile of a stage is multiplied with the first one's x",
    "mma.sync: rows of x from 8 on are the first ones",
    "the epilogue does not undo its swizzle",
    "e4m3: a block is multiplied with the x of its neighbour",
    "e4m3: a row has the scale of the next row of x",
    "e4m3: a block of k has the scale of the first",
    "int4: the scales are those of the other warpgroup",
}


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what in ON_A_GPU])
def test_wrong_kernels_are_rejected(what, device):
    variant, *change = WRONG[what]
    options, config = wrong(*change), VARIANTS[variant]._replace(stages=3 if variant == "e4m3, block" else 2)
    p = make_problem([13, 11], 128, 384 if config.group_size == 128 else 320, device, config)
    attempt = lambda seed: mismatch(run(p, blocks=1, seed=seed, **options), p.expected)
    with simulator.races() if what in RACES else contextlib.nullcontext():
        assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


WRONG_GATHER = {
    "gathered rows are not waited for": ("two tiles", gather, "    cp_async_wait_all()\n", ""),
    "gathered rows are copied into a stage that is read": (
        *("two tiles", kernel),
        "                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n                    if gather",
        "                    if gather",
    ),
    "the second tile has the first one's columns": (
        *("two tiles", kernel),
        *("stage_x_tiles + i)\n", "stage_x_tiles)\n"),
    ),
    "e4m3: blocks of a row that is gathered have the scales of another": (
        *("e4m3, block", kernel),
        *("index_slot(t))", "index_slot(t ^ 1))"),
    ),
}


@pytest.mark.parametrize("what", WRONG_GATHER if simulator.ENABLED else [*WRONG_GATHER][2:])
def test_wrong_gathers_are_rejected(what, device):
    variant, *change = WRONG_GATHER[what]
    p, options = gathered(make_problem([13, 11], 64, 448, device, VARIANTS[variant])), wrong(*change)
    attempt = lambda seed: mismatch(run(p, blocks=1, seed=seed, **options), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


# Configurations


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mma_n=(16, 24)), "mma_n is .*; it must descend from subtile_m"),
        (dict(dtype="e4m3", x_scaling="row", subtile_m=136, mma_n=(136,)), "mma_n is .* from 128 to 8"),
        (dict(warpgroups=3), "warpgroups is 3; it must be 2 or 4"),
        (dict(weight="int4", subtile_m=72, mma_n=(72,)), "subtile_m is 72; with overlap, 2 warpgroups .* at most 64"),
        (dict(box_rows=24), "box_rows is 24; it must be a multiple of 8 that divides subtile_m"),
        (dict(activation="gelu"), "activation is 'gelu'; it must be 'silu' or 'swigluoai'"),
        (dict(activation="silu", scatter=True), "activation is 'silu'; it must be .* with bf16 results"),
        (dict(stage_tiles=3), r"stage_tiles is 3; it must be one of \(1, 2\)"),
        (dict(weight="int4", stage_tiles=1), r"stage_tiles is 1; it must be one of \(2,\)"),
        (dict(weight="int4", dtype="e4m3"), "weight and dtype are .* they must be mxfp4 and bf16 or e4m3, or int4"),
        (dict(dtype="e4m3"), "x_scaling is 'none'; with e4m3 it must be tensor or row or block"),
        (dict(x_scaling="row"), "x_scaling is 'row'; with bf16 it must be none"),
        (dict(group_size=64), r"group_size is 64; with mxfp4 it must be one of \(32,\)"),
        (dict(weight="int4", scale_dtype="f64"), "scale_dtype is 'f64'; it must be 'bf16', 'f16' or 'f32'"),
        (dict(gather=True, stages=2), "stages is 2; with gather or block scales it must be 3 or more"),
        (dict(stages=40), "needs .* bytes of shared memory"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kernel.make_kernel(SMALL._replace(**change))


FORMATS = [
    dict(),
    *(dict(dtype="e4m3", x_scaling=scaling) for scaling in ("row", "block")),
    dict(weight="int4", group_size=32, scale_dtype="f32"),
]


@pytest.mark.parametrize("formats", FORMATS)
def test_selected_configurations_are_supported(formats):
    found = {select_w4_config("masked", average, **formats) for average in (1, 12, 40, 112, 1000)}
    assert len(found) == (3 if formats else 4)
    for config in found:
        for options in (dict(), dict(gather=True), dict(scatter=True, row_weights=True, gather=True, bias="f32")):
            fitted = fit_shared_memory(fit_registers(config._replace(**options)))
            check_w4_config(fitted)
            assert W4Layout(fitted).bytes <= H200.shared_bytes and config.stages - fitted.stages <= 1
            assert not (fitted.overlap and config.subtile_m > 64 and options)


@pytest.mark.parametrize("variant", ["two tiles", "one tile", "four warpgroups", "e4m3, block", "int4, groups of 32"])
def test_shared_memory_regions_do_not_overlap(variant):
    layout = W4Layout(VARIANTS[variant]._replace(gather=True, row_weights=True))
    config, int4 = layout.config, variant.startswith("int4")
    regions = [  # bytes
        (0, config.stages * (1 if config.dtype == "e4m3" else config.stage_tiles) * 128 * config.subtile_m),
        (layout.weight_offset, config.stages * config.stage_tiles * config.warpgroups * (2048 if int4 else 2176)),
        (layout.scale_offset, config.stages * 2 * 4 * 64 * 4 * int4),  # of two warpgroups, four groups of k, in float32
        (layout.epilogue_offset, config.warpgroups * EPILOGUE_BYTES),
        (8 * layout.full, 8 * config.stages),
        (8 * layout.empty, 8 * config.stages),
        (4 * layout.tile_info_offset, 16 * config.stages),
        (4 * layout.warp_sums_offset, layout.threads // 8),
        (4 * layout.first_tile_offset, 4 * config.max_groups),
        (4 * layout.row_index_offset, 4 * 3 * 32),
        (4 * layout.x_scale_offset, 4 * 16 * config.stages * (variant == "e4m3, block")),
        (4 * layout.row_value_offsets[1], 4 * 16),
    ]
    for (start, size), (following, _) in zip(regions, [*regions[1:], (layout.bytes, 0)]):
        assert start + size <= following
    assert layout.weight_offset % 1024 == layout.epilogue_offset % 128 == layout.x_scale_offset % 4 == 0
    producers, consumers = layout.registers
    assert 128 * producers + 128 * config.warpgroups * consumers <= 65536
