"""The grouped GEMM kernel for MXFP4 weights against the reference, and wrong kernels that must be rejected."""

import pytest
import torch
from helpers.grouped_gemm import PATTERNS
from helpers.w4_gemm import SMALL, gathered, make_problem, run, wrong
from helpers.wrong_kernels import is_rejected

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm.common import gather, store_tile
from moe_numba.grouped_gemm.common.constants import EPILOGUE_BYTES
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.w4 import kernel
from moe_numba.grouped_gemm.w4.config import fit_registers, select_w4_config
from moe_numba.grouped_gemm.w4.layout import W4Layout, check_w4_config, fit_shared_memory
from moe_numba.runtime.device import H200

WGMMA = SMALL._replace(subtile_m=24, mma_n=(24,))
VARIANTS = {
    "two tiles": WGMMA,
    "one tile": SMALL._replace(stage_tiles=1),
    "no overlap": WGMMA._replace(overlap=False),
    "mma.sync": SMALL,
    "four warpgroups": SMALL._replace(warpgroups=4, subtile_m=24, mma_n=(24, 16, 8)),
}


@pytest.mark.parametrize(
    "pattern, variant",
    [
        *(("empty groups", variant) for variant in VARIANTS),
        *(("an exact tile, and one row more", variant) for variant in ("two tiles", "one tile", "mma.sync")),
        ("no rows", "two tiles"),
    ],
)
def test_group_sizes(pattern, variant, device):
    p = make_problem(PATTERNS[pattern], 128, 192, device, VARIANTS[variant])
    assert mismatch(run(p), p.expected) is None


@pytest.mark.parametrize("k", [64, 832], ids=["few stages", "many stages"])
@pytest.mark.parametrize("variant", ["two tiles", "one tile", "mma.sync", "four warpgroups"])
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
    ],
)
def test_sizes_that_are_no_multiples_of_a_tile(n, k, variant, device):
    p = make_problem([5, 0, 12], n, k, device, VARIANTS[variant])
    assert mismatch(run(p, blocks=3), p.expected) is None


@pytest.mark.parametrize("row_layout", ["offsets", "masked"])
def test_row_layouts(row_layout, device):
    p = make_problem([3, 0, 20], 64, 128, device, WGMMA._replace(row_layout=row_layout))
    assert mismatch(run(p), p.expected) is None


@pytest.mark.parametrize("seed, variant", [(1, "two tiles"), (2, "two tiles"), (1, "mma.sync")])
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


@pytest.mark.parametrize("variant", ["two tiles", "one tile", "mma.sync"])
def test_gather(variant, device):
    p = gathered(make_problem([5, 0, 40], 96, 160, device, VARIANTS[variant]))
    assert mismatch(run(p), p.expected) is None
    p.indices[:3] = torch.tensor([-1, len(p.x), 1 << 30])
    p.expected[:3] = 0
    assert mismatch(run(p), p.expected) is None


def test_consumers_release_an_early_stage_before_the_producer_continues(device):
    """As for the kernel of FP8 and bfloat16 weights."""
    p = gathered(make_problem([5, 30, 16], 256, 832, device, WGMMA._replace(early_weight=True)))
    wait, loop = "                    griddepcontrol_wait()\n", "                tile = int32(cuda.blockIdx.x)\n"
    released = (
        "                if early > 0:\n                    mbarrier_wait_parity(smem.barriers, empty, uint32(0))\n"
    )
    slow = kernel, f"{wait}{loop}", f"{wait}{released}{loop}"
    assert mismatch(run(p, **wrong(*slow)), p.expected) is None
    if simulator.ENABLED:
        right = "                    if early == 0:"
        always = f"                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n{right}"
        assert is_rejected(lambda seed: mismatch(run(p, seed=seed, **wrong(*slow, (right, always))), p.expected))


# Wrong kernels

WAIT = "            mbarrier_wait_parity(smem.barriers, full + stage, phase)\n"
PRODUCER_WAIT = "                            mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n"
WRONG = {
    "a stage is read before it is full": (
        *("two tiles", kernel),
        f"{WAIT}            codes_0, scales_0",
        "            codes_0, scales_0",
    ),
    "a stage is filled while it is read": (
        *("two tiles", kernel),
        f"{PRODUCER_WAIT}                            allow_dependents",
        "                            allow_dependents",
    ),
    "a stage is released before wgmma has read it": (
        *("two tiles", kernel),
        "            stage_1 = stage\n",
        "            release(smem, lane, stage)\n            stage_1 = int32(-1)\n",
    ),
    "a stage is never released": (
        *("two tiles", kernel),
        *("        release(smem, lane, stage_1)\n        return", "        return"),
    ),
    "too few bytes are expected": (*("two tiles", kernel), *("* tiles * TILE_BYTES))", "* tiles * TILE_BYTES - 16))")),
    "consumers request more registers than producers release": (
        *("two tiles", kernel),
        *("make_setmaxnreg_inc(layout.registers[1])", "make_setmaxnreg_inc(248)"),
    ),
    "rows of the next group are stored": (
        *("two tiles", store_tile),
        *("int32(min(tile.rows, tile.subtile_rows))", "tile.subtile_rows"),
    ),
    "the wrong group's weight is loaded": ("two tiles", kernel, "int64(info.group) * n_tiles", "int64(0)"),
    "both warpgroups load the same rows of weight": (
        *("two tiles", kernel),
        *("info.n_tile * warpgroups + w)", "info.n_tile * warpgroups)"),
    ),
    "tiles of k are in another order": (
        *("two tiles", kernel),
        *("(row * k_tiles + k_tile)", "(row * k_tiles + (k_tile ^ 2))"),
    ),
    "the second tile of a stage is multiplied with the first one's x": (
        *("two tiles", kernel),
        *("b = uint64(b + uint64(subtile_bytes >> 4))", "b = uint64(b)"),
    ),
    "the last tile is left out": (
        *("two tiles", kernel),
        f"        if left > 0:\n{WAIT}            codes_0, scales_0",
        f"        if left > 1:\n{WAIT}            codes_0, scales_0",
    ),
    "the epilogue does not undo its swizzle": (
        *("two tiles", store_tile),
        *("((vector ^ (t & 7)) << 4)", "(vector << 4)"),
    ),
}
MMA_SYNC = "mma.sync", kernel
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
}


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what in ON_A_GPU])
def test_wrong_kernels_are_rejected(what, device):
    variant, *change = WRONG[what]
    options, config = wrong(*change), VARIANTS[variant]._replace(stages=2)
    p = make_problem([13, 11], 128, 320, device, config)
    attempt = lambda seed: mismatch(run(p, blocks=1, seed=seed, **options), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


WRONG_GATHER = {
    "gathered rows are not waited for": (gather, "    cp_async_wait_all()\n", ""),
    "gathered rows are copied into a stage that is read": (
        kernel,
        f"{PRODUCER_WAIT}                            for i",
        "                            for i",
    ),
    "the second tile has the first one's columns": (kernel, "* stage_tiles + i)\n", "* stage_tiles)\n"),
}


@pytest.mark.parametrize("what", WRONG_GATHER if simulator.ENABLED else [*WRONG_GATHER][2:])
def test_wrong_gathers_are_rejected(what, device):
    p, options = gathered(make_problem([13, 11], 64, 448, device, WGMMA)), wrong(*WRONG_GATHER[what])
    attempt = lambda seed: mismatch(run(p, blocks=1, seed=seed, **options), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


# Configurations


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mma_n=(16, 24)), "mma_n is .*; it must descend from subtile_m"),
        (dict(subtile_m=264, mma_n=(264,)), "mma_n is .* from 256 to 8"),
        (dict(warpgroups=3), "warpgroups is 3; it must be 2 or 4"),
        (dict(box_rows=24), "box_rows is 24; it must be a multiple of 8 that divides subtile_m"),
        (dict(activation="gelu"), "activation is 'gelu'; it must be 'silu' or 'swigluoai'"),
        (dict(activation="silu", scatter=True), "activation is 'silu'; it must be .* with bf16 results"),
        (dict(stage_tiles=3), "stage_tiles is 3; it must be 1 or 2"),
        (dict(gather=True, stages=2), "stages is 2; with gather it must be 3 or more"),
        (dict(stages=40), "needs .* bytes of shared memory"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kernel.make_kernel(SMALL._replace(**change))


def test_selected_configurations_are_supported():
    found = {select_w4_config("masked", average) for average in (1, 12, 40, 112, 1000)}
    assert len(found) == 4
    for config in found:
        for options in (dict(), dict(gather=True), dict(scatter=True, row_weights=True, gather=True, bias="f32")):
            fitted = fit_shared_memory(fit_registers(config._replace(**options)))
            check_w4_config(fitted)
            assert W4Layout(fitted).bytes <= H200.shared_bytes and config.stages - fitted.stages <= 1
            assert not (fitted.overlap and config.subtile_m > 64 and options)


@pytest.mark.parametrize("variant", ["two tiles", "one tile", "four warpgroups"])
def test_shared_memory_regions_do_not_overlap(variant):
    layout = W4Layout(VARIANTS[variant]._replace(gather=True, row_weights=True))
    config = layout.config
    regions = [  # bytes
        (0, config.stages * config.stage_tiles * 128 * config.subtile_m),
        (layout.weight_offset, config.stages * config.stage_tiles * config.warpgroups * 2176),
        (layout.epilogue_offset, config.warpgroups * EPILOGUE_BYTES),
        (8 * layout.full, 8 * config.stages),
        (8 * layout.empty, 8 * config.stages),
        (4 * layout.tile_info_offset, 16 * config.stages),
        (4 * layout.warp_sums_offset, layout.threads // 8),
        (4 * layout.first_tile_offset, 4 * config.max_groups),
        (4 * layout.row_index_offset, 4 * 3 * 32),
        (4 * layout.row_value_offsets[1], 4 * 16),
    ]
    for (start, size), (following, _) in zip(regions, [*regions[1:], (layout.bytes, 0)]):
        assert start + size <= following
    assert layout.weight_offset % 1024 == layout.epilogue_offset % 128 == layout.row_value_offsets[0] % 4 == 0
    producers, consumers = layout.registers
    assert 128 * producers + 128 * config.warpgroups * consumers <= 65536
