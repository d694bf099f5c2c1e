"""The block-scaled grouped GEMM kernel against the reference, and wrong kernels that must be rejected."""

import pytest
import torch
from helpers.grouped_gemm import PATTERNS, make_problem, scatter, silu_mismatch
from helpers.wrong_kernels import changed_maker, is_rejected

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from numba import cuda, float32, int32, uint8, uint64

from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.block_scaled import balanced, epilogue, kernel, pairs
from moe_numba.grouped_gemm.block_scaled.config import (
    BOX_ROWS,
    BlockScaledConfig,
    BlockScaledLayout,
    check_block_scaled_config,
    select_block_scaled_config,
    with_gather,
)
from moe_numba.grouped_gemm.call.checks import scale_strides
from moe_numba.grouped_gemm.common import gather
from moe_numba.grouped_gemm.common.constants import THREADS, SharedMemory
from moe_numba.grouped_gemm.common.scheduler import Problem
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.grouped_gemm.wgmma.config import GemmConfig
from moe_numba.runtime.device import H200
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

SMALL = BlockScaledConfig(stages=3, max_groups=8)
ALONE = SMALL._replace(cluster_size=1)  # CTAs that compute no pairs of tiles
BALANCED = ALONE._replace(balanced=True)
BY_BLOCKS = GemmConfig(scaling="block")  # make_problem's dtype and scales


def problem(lengths, n, k, device, row_layout="lengths"):
    return make_problem(BY_BLOCKS._replace(row_layout=row_layout), lengths, n, k, device)


def run(config, p, blocks=2, seed=0, make_kernel=kernel.make_kernel):
    """Run the kernel on an output filled with NaN, with 4 guard rows behind it."""
    total = len(p.x if p.indices is None else p.indices)
    y = torch.full((total + 4, p.weight.shape[1]), float("nan"), dtype=torch.bfloat16, device=p.x.device)
    launch_kernel(config, p, y, p.x_scale, blocks, seed, make_kernel)  # without activation there is no y_scale
    assert bool(y[total:].isnan().all()), "rows behind the output were written"
    return y[:total]


def launch_kernel(config, p, y, y_scale, blocks, seed, make_kernel):
    """Launch the kernel once; ``y`` and ``y_scale`` have guard rows behind the last row."""
    made, shared_bytes = make_kernel(config)
    groups, _, k = p.weight.shape
    lengths = p.lengths if config.row_layout != "offsets" else (p.starts[:-1] + p.lengths)
    total, indices = (len(p.x), p.lengths) if p.indices is None else (len(p.indices), p.indices)
    with simulator.seed(seed):
        launch(
            made,
            blocks,
            THREADS,
            TensorMap(p.x, (BOX_ROWS, 128), swizzle=128),
            TensorMap(p.weight, (1, config.half_rows, 128), swizzle=128),
            TensorMap(y, (16, 128 // y.element_size()), swizzle=128),
            *(y.view(torch.int32), y_scale, lengths, p.starts, p.x_scale, p.weight_scale),
            *(groups, total, p.capacity, y.shape[1], k, *scale_strides(p.x_scale)),
            *(p.x.view(torch.uint8), indices, len(p.x), k),
            shared_bytes=shared_bytes,
            cluster=config.cluster_size if config.cluster_size > 1 else None,
        )


LENGTHS = PATTERNS | {"tiles of 128 rows, and the next": [128, 129], "64 rows, and one more": [64, 65]}


@pytest.mark.parametrize("pattern", LENGTHS)
def test_group_sizes(pattern, device):
    p = problem(LENGTHS[pattern], 192, 256, device)
    expected = run(ALONE, p)
    assert mismatch(expected, p.expected) is None
    assert torch.equal(torch.nan_to_num(run(SMALL, p)), torch.nan_to_num(expected))


@pytest.mark.parametrize("pattern", LENGTHS)
@pytest.mark.parametrize("blocks", [1, 4])
def test_balanced_tiles(blocks, pattern, device):
    p = problem(LENGTHS[pattern], 400, 256, device)
    found = run(BALANCED, p, blocks=blocks)
    assert mismatch(found, p.expected) is None
    assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(run(ALONE, p)))


@pytest.mark.parametrize("change", [dict(row_layout="offsets"), dict(row_layout="masked"), dict(gather=True)], ids=str)
def test_balanced_tiles_of_other_layouts(change, device):
    config = BALANCED._replace(**change)
    p = problem([3, 0, 80, 150], 400, 256, device, config.row_layout)
    p = scatter(p) if config.gather else p
    assert mismatch(run(config, p, blocks=3), p.expected) is None


@pytest.mark.parametrize("lengths", [[150] * 8, [64, 0, 200, 129, 1, 300, 0, 193], [0] * 8, [128] * 8, [5] * 8])
@pytest.mark.parametrize("ctas", [1, 4, 7])
def test_balanced_ctas_get_as_many_tiles_of_each_kind(ctas, lengths, device):
    """Each tile once, in the order of the groups."""
    columns, most = 3, 64
    config, found = BALANCED._replace(max_groups=8), torch.full((ctas, most, 4), -1, dtype=torch.int32, device=device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = (lengths.cumsum(0) - lengths).int()
    layout = BlockScaledLayout(config)
    arguments = lengths, starts, len(lengths), columns, most, found
    launch(tiles_of_ctas(config, layout), ctas, THREADS, *arguments, shared_bytes=layout.bytes)
    tiles = [[tuple(tile) for tile in rows if tile[0] >= 0] for rows in found.tolist()]
    starts, wanted = starts.tolist(), []
    for g, count in enumerate(lengths.tolist()):
        rows = [(starts[g] + at, min(count - at, 128)) for at in range(0, count, 128)]
        wanted += [(g, *row, n) for row in rows for n in range(columns)]
    assert sorted(sum(tiles, [])) == sorted(wanted)
    for is_half in (False, True):
        shares = [sum((rows <= 64) == is_half for _, _, rows, _ in of_cta) for of_cta in tiles]
        assert max(shares) - min(shares) <= 1
    assert all([g for g, *_ in of_cta] == sorted(g for g, *_ in of_cta) for of_cta in tiles)


def tiles_of_ctas(config, layout):
    """Make a kernel that writes the group, rows and columns of each CTA's tiles to ``out [ctas, most, 4]``."""
    count_tiles, look_up_tile = balanced.make_balanced_tiles(config, layout)

    @cuda.jit
    def write_tiles(lengths, starts, groups, columns, most, out):
        smem = SharedMemory(
            cuda.shared.array(0, uint8, 1024),
            cuda.shared.array(0, int32, 1024),
            cuda.shared.array(0, float32, 1024),
            cuda.shared.array(0, uint64, 1024),
        )
        problem = Problem(lengths, starts, groups, int32(1 << 20), int32(0))
        tiles = count_tiles(smem, problem, columns)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            walk = balanced.first_walk()
            for i in range(tiles):
                info, _, walk = look_up_tile(smem, problem, int32(i), walk)
                at = int32(4 * (cuda.blockIdx.x * most + i))
                out[at], out[at + 1], out[at + 2], out[at + 3] = info.group, info.row, info.rows, info.n_tile

    return write_tiles


# Groups of 3 to 7 blocks of 64 rows; 3, 2 and 1 tiles of columns.
@pytest.mark.parametrize("lengths, n", [([192, 256], 400), ([257, 0, 321], 208), ([385, 193], 192)])
def test_pairs_of_tiles(lengths, n, device):
    p = problem(lengths, n, 256, device)
    assert mismatch(run(SMALL, p, blocks=4), p.expected) is None


# A tile of 192 columns begins at the first or the second half of a block of weight scales; 256 are computed in halves.
@pytest.mark.parametrize("block_n", [128, 192, 256])
@pytest.mark.parametrize("n, k", [(64, 64), (192, 320), (576, 128), (448, 64), (16, 16), (208, 144)])
def test_sizes_that_are_no_multiples_of_a_tile(block_n, n, k, device):
    p = problem([5, 0, 70], n, k, device)
    assert mismatch(run(SMALL._replace(block_n=block_n), p, blocks=4), p.expected) is None


@pytest.mark.parametrize("lengths", [[5, 0, 70], [140, 1]])
def test_early_test_of_the_next_stage(lengths, device):
    config, p = SMALL._replace(block_n=256, early_test=True), problem(lengths, 400, 640, device)
    found = run(config, p, blocks=4)
    assert mismatch(found, p.expected) is None
    assert torch.equal(found, run(config._replace(early_test=False), p, blocks=4))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(block_n=64), "block_n is 64; it must be 128 or 192 or 256"),
        (dict(silu_and_mul=True), "block_n is 192; it must be 256 with silu_and_mul"),
        (dict(block_n=256, stages=4, gather=True), "cluster_size is 2; with block_n 256 and gather it must be 1"),
        (dict(cluster_size=4), "cluster_size is 4; it must be 1 or 2"),
        (dict(balanced=True), "cluster_size is 2; with balanced it must be 1"),
        (dict(stages=2), "stages is 2; it must be 3 or more"),
        (dict(stages=6), "needs .* bytes of shared memory"),
    ],
)
def test_unsupported_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kernel.make_kernel(BlockScaledConfig()._replace(**change))


def test_selected_configurations_are_supported():
    for average in (80, 128, 129, 1000):
        for silu_and_mul in (False, True):
            config = select_block_scaled_config("lengths", average, silu_and_mul)
            check_block_scaled_config(config)
            check_block_scaled_config(with_gather(config))
    assert select_block_scaled_config("lengths", 79) is None


@pytest.mark.parametrize("row_layout", ["offsets", "masked"])
def test_row_layouts(row_layout, device):
    p = problem([3, 0, 80], 128, 128, device, row_layout)
    assert mismatch(run(SMALL._replace(row_layout=row_layout), p), p.expected) is None


@pytest.mark.parametrize("row_layout", ["lengths", "masked"])
def test_scales_of_x_with_other_strides(row_layout, device):
    p = problem([3, 0, 80], 128, 256, device, row_layout)
    p.x_scale = p.x_scale.mT.contiguous().mT  # as DeepGEMM's layout: rows are contiguous
    assert mismatch(run(SMALL._replace(row_layout=row_layout), p), p.expected) is None


@pytest.mark.parametrize("seed", range(1, 4))
def test_result_does_not_depend_on_thread_order(seed, device):
    p = problem([30, 70], 192, 640, device)
    first = run(SMALL, p, seed=0)
    assert mismatch(first, p.expected) is None
    assert torch.equal(run(SMALL, p, seed=seed), first)


@pytest.mark.parametrize("lengths, starts", [([-5, 3], [0, 0]), ([3, 1 << 30], [0, 3]), ([4, 4], [-7, 1 << 30])])
def test_invalid_group_sizes_stay_in_bounds(lengths, starts, device):
    p = problem([4, 4], 64, 64, device)
    p.lengths, p.starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
    run(SMALL, p)  # asserts that the guard rows are unchanged


# Gathered rows

GATHER = SMALL._replace(gather=True)


@pytest.mark.parametrize("pattern", LENGTHS)
def test_gather(pattern, device):
    p = scatter(problem(LENGTHS[pattern], 192, 256, device))
    assert mismatch(run(GATHER, p), p.expected) is None


@pytest.mark.parametrize("row_layout, n, k", [("offsets", 208, 144), ("lengths", 64, 64)])
def test_gather_with_sizes_that_are_no_multiples_of_a_tile(row_layout, n, k, device):
    p = scatter(problem([5, 0, 70], n, k, device, row_layout))
    assert mismatch(run(GATHER._replace(row_layout=row_layout), p, blocks=4), p.expected) is None


@pytest.mark.parametrize("seed", range(1, 4))
def test_gather_does_not_depend_on_thread_order(seed, device):
    p = scatter(problem([30, 70], 192, 640, device))
    assert torch.equal(run(GATHER, p, seed=seed), run(SMALL, problem([30, 70], 192, 640, device)))


SILU = BlockScaledConfig(block_n=256, silu_and_mul=True, stages=3, max_groups=8)


@pytest.mark.parametrize("with_gather", [False, True])
@pytest.mark.parametrize("lengths", [[5, 0, 70], [64, 1], [128, 3]])
@pytest.mark.parametrize("n, k", [(128, 320), (384, 128)])
def test_silu_and_mul(lengths, n, k, with_gather, device):
    assert silu_error(lengths, n, k, device, with_gather=with_gather) is None


def silu_error(lengths, n, k, device, seed=0, make_kernel=kernel.make_kernel, with_gather=False):
    """Return how the activated output, with 4 guard rows behind it, differs from the reference; ``n`` is its width."""
    p = problem(lengths, 2 * n, k, device)
    total = len(p.x)
    if with_gather:
        p = scatter(p)
    y = torch.full((total + 4, n), 0x7F, dtype=torch.uint8, device=device)  # NaN
    scale = torch.full((total + 4, n // 128), float("nan"), device=device)
    config = SILU._replace(gather=True, cluster_size=1) if with_gather else SILU
    launch_kernel(config, p, y, scale, 2, seed, make_kernel)
    assert bool((y[total:] == 0x7F).all() & scale[total:].isnan().all()), "rows behind the output were written"
    return silu_mismatch(y[:total].view(FP8), scale[:total], reference.silu_and_mul(p.expected.bfloat16().float()))


def test_shared_memory_regions_do_not_overlap():
    layout = BlockScaledLayout(BlockScaledConfig(gather=True))
    config = layout.config
    regions = [  # bytes
        (0, config.stages * layout.stage_bytes),
        (layout.epilogue_offset, 8 * 16 * 2 * config.columns),
        (4 * layout.factor_offset, 4 * config.stages * 4 * 128),
        (8 * layout.full, 8 * config.stages),
        (8 * layout.empty, 8 * config.stages),
        (4 * layout.tile_info_offset, 16 * config.stages),
        (4 * layout.warp_sums_offset, 4 * 12),
        (4 * layout.first_tile_offset, 4 * config.max_groups),
        (4 * layout.tiles_offset, 4),
        (4 * layout.row_index_offset, 4 * 3 * 128),
    ]
    for (start, size), (following, _) in zip(regions, [*regions[1:], (layout.bytes, 0)]):
        assert start + size <= following
    assert layout.stage_bytes % 1024 == layout.epilogue_offset % 1024 == layout.factor_offset % 4 == 0
    assert layout.bytes <= H200.shared_bytes


WRONG = {
    "a stage is read before it is full": (
        kernel,
        "                        if ready == 0:\n",
        "                        if ready == 2:\n",
    ),
    "a stage is filled while it is read": (
        kernel,
        "                        mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n"
        "                        mbarrier_arrive_expect",
        "                        mbarrier_arrive_expect",
    ),
    "factors are overwritten while they are read": (
        kernel,
        "        mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n        write_factors(",
        "        write_factors(",
    ),
    "factors are published before they are written": (
        kernel,
        "        mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n        write_factors(",
        "        cuda.syncwarp()\n"
        "        if lane == 0:\n"
        "            mbarrier_arrive(smem.barriers, full + stage)\n"
        "        mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n        write_factors(",
    ),
    "a stage is released before wgmma has read it": (
        kernel,
        "                            product = wait(wgmma(x_tile, weight_tile))\n",
        "                            product = wgmma(x_tile, weight_tile)\n"
        "                            cuda.syncwarp()\n"
        "                            if lane == 0:\n"
        "                                release_stage(smem.barriers, empty + stage)\n"
        "                            product = wait(product)\n",
        (
            "                        cuda.syncwarp()\n"
            "                        if lane == 0:\n"
            "                            release_stage(smem.barriers, empty + stage)\n"
            "                        stage, phase = advance(stage, phase)\n"
            "                        if tests_early",
            "                        stage, phase = advance(stage, phase)\n                        if tests_early",
        ),
    ),
    "a warpgroup without rows does not wait for its stages": (
        kernel,
        "                        mbarrier_wait_parity(smem.barriers, full + stage, phase)\n"
        "                        cuda.syncwarp()\n",
        "                        cuda.syncwarp()\n",
    ),
    "too few bytes are expected": (kernel, "full + stage, tma_bytes)", "full + stage, tma_bytes - 16)"),
    "consumers request more registers than producers release": (kernel, "else (56, 224)", "else (56, 240)"),
    "rows of the next group are stored": (epilogue, "        if t < rows:", "        if t < 16:"),
    "the wrong group's weight is loaded": (kernel, "k_at, column, g)", "k_at, column, int32(0))"),
    "the wrong group's weight scales are loaded": (
        kernel,
        "find_weight_scale(info.group, ",
        "find_weight_scale(int32(0), ",
    ),
    "all columns have the first weight scale": (kernel, "columns + i * scaled_columns", "columns"),
    "all tiles have the first one's factors": (kernel, "int32(min(4, (k_blocks - 1) & -4))", "int32(-1)"),
    "TMA stores a buffer before it is written": (epilogue, "    fence_proxy_async_shared()\n", ""),
    "a buffer is overwritten while TMA reads it": (epilogue, "        bulk_wait_read()\n", "        pass\n"),
    "a thread's second row has the first one's scale": (kernel, "int32(factors + 4 * 8)", "factors"),
    "the last stage is left out": (
        kernel,
        "for _ in range(k_blocks):\n                        if ready == 0:",
        "for _ in range(k_blocks - 1):\n                        if ready == 0:",
    ),
    "the epilogue does not undo its swizzle": (epilogue, "((vector ^ (t & 7)) << 4)", "(vector << 4)"),
}
ON_A_GPU = {  # the others would hang a GPU, or could be right by chance
    "rows of the next group are stored",
    "the wrong group's weight is loaded",
    "the wrong group's weight scales are loaded",
    "all columns have the first weight scale",
    "a thread's second row has the first one's scale",
    "the epilogue does not undo its swizzle",
}


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what in ON_A_GPU])
def test_wrong_kernels_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG[what])
    p = problem([70, 11], 192, 768, device)
    attempt = lambda seed: mismatch(run(ALONE, p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


WRONG_BALANCED = {
    "half tiles have the rows of the one before": (
        balanced,
        "int32(half - smem.i32[uint32(first_half + g)]), full_of_group",
        "int32(half - smem.i32[uint32(first_half + g)]), int32(full_of_group - 1)",
    ),
    "a half tile is left out": (balanced, "share(half, walk[1])", "share(half, int32(walk[1] + 1))"),
    "half tiles are those of another group": (balanced, "g = g_half if is_half else g", "g = g"),
    "the last half tiles are left out": (balanced, " | (full >= smem.i32[uint32(total)])", ""),
    "a tile is computed twice": (balanced, "half = int32(half + cuda.gridDim.x)", "half = half"),
}


@pytest.mark.parametrize("what", WRONG_BALANCED)
def test_wrong_balanced_tiles_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG_BALANCED[what])
    p = problem([70, 11, 130], 400, 256, device)
    attempt = lambda seed: mismatch(run(BALANCED, p, blocks=2, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


WRONG_PAIRS = {
    "both CTAs load the same half of the weights": (
        kernel,
        "half, to = second if rank else column",
        "half, to = column",
    ),
    "a stage is released in one CTA only": (kernel, "make_release_stage(cluster_size)", "make_release_stage(1)"),
    "both CTAs compute the first rows": (pairs, "                begin = middle", "                end = middle"),
    "both CTAs compute the first columns": (pairs, "int32(n_tile + rank)", "n_tile"),
    "a block of rows is left out": (pairs, "begin = middle", "begin = int32(middle + 1)"),
    "the second tile of columns is left out": (pairs, "pair >= sharing", "pair > sharing"),
    "a CTA exits while the other may write its shared memory": (
        kernel,
        "        if pairs:  # the other",
        "        if not pairs:  # the other",
    ),
}


WRONG_EARLY_TESTS = {
    "a stage is read before the early test finds it full": (
        kernel,
        "ready = mbarrier_test_wait_parity(smem.barriers, full + stage, phase)",
        "ready = uint32(1)",
    )
}


@pytest.mark.parametrize("what", [what for what in WRONG_EARLY_TESTS if simulator.ENABLED])  # on a GPU right by chance
def test_wrong_early_tests_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG_EARLY_TESTS[what])
    config, p = SMALL._replace(block_n=256, early_test=True), problem([140, 70], 400, 384, device)
    attempt = lambda seed: mismatch(run(config, p, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


@pytest.mark.parametrize("what", [what for what in WRONG_PAIRS if simulator.ENABLED or what.startswith("both")])
def test_wrong_pairs_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG_PAIRS[what])
    p = problem([140, 70], 400, 384, device)
    attempt = lambda seed: mismatch(run(SMALL, p, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


WRONG_GATHER = {
    "gathered rows are not waited for": (gather, "    cp_async_wait_all()\n", ""),
    "gathered rows are not fenced": (gather, "    fence_proxy_async_shared()\n", ""),
    "gathered rows are copied into a stage that is read": (
        kernel,
        "                                mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n"
        "                                copy_rows",
        "                                copy_rows",
    ),
    "a row has the scales of the row of its own number": (
        kernel,
        "int64(x_row) * scale_row_stride + offset",
        "int64(info.row + lane + 32 * i) * scale_row_stride + offset",
    ),
    "an index beyond x is used": (gather, "index if index < source.x_rows else int32(-1)", "index"),
}


@pytest.mark.parametrize("what", [what for what in WRONG_GATHER if simulator.ENABLED or "scales" in what])
def test_wrong_gathers_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG_GATHER[what])
    p = scatter(problem([70, 11], 192, 768, device))
    if "beyond x" in what:
        p.indices[3], p.expected[3] = len(p.x), 0
    attempt = lambda seed: mismatch(
        run(GATHER._replace(cluster_size=1), p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected
    )
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


WRONG_SILU = {
    "a tile beyond the weight is stored": (kernel, "rows if column < n else int32(0)", "rows"),
    "gate is loaded in place of up": (kernel, "int32(n + column) if silu", "int32(column) if silu"),
    "up has gate's scales": (kernel, "(a[1], b[1])", "(a[0], b[0])"),
    "the first half's result is overwritten": (
        kernel,
        "product = wait(wgmma(product, x_tile, uint64(",
        "acc = wait(wgmma(product, x_tile, uint64(",
    ),
    "the scale leaves out half of the columns": (
        epilogue,
        "    return max(value, cuda.shfl_xor_sync(FULL_MASK, value, 2))",
        "    return value",
    ),
    "neighbouring lanes do not exchange their columns": (epilogue, "first if odd else second), 1)", "second), 1)"),
    "the second row has the first one's scale": (
        epilogue,
        "rcp_approx(scale_0), rcp_approx(scale_1)",
        "rcp_approx(scale_0), rcp_approx(scale_0)",
    ),
    "scales of the next group's rows are stored": (epilogue, "own + 8 < rows", "own + 8 < 16"),
}


@pytest.mark.parametrize("what", WRONG_SILU)
def test_wrong_activations_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", *WRONG_SILU[what])
    attempt = lambda seed: silu_error([70, 11], 128, 384, device, seed, make_kernel)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


def test_a_kernel_that_stores_columns_beyond_y_is_rejected(device):
    change = epilogue, "rows if column + vector_elements * vector < n else int32(0)", "rows"
    make_kernel = changed_maker(kernel, "make_kernel", *change)
    p = problem([70, 11], 80, 64, device)
    assert is_rejected(lambda seed: mismatch(run(SMALL, p, seed=seed, make_kernel=make_kernel), p.expected))
