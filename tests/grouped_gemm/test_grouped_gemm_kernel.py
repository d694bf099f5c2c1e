"""The grouped GEMM's tile scheduler and shared-memory layout, its kernel on small tiles, and wrong kernels."""

import numpy as np
import pytest
import torch
from helpers.grouped_gemm import PATTERNS, lay_out_scales, make_problem, scatter
from helpers.wrong_kernels import changed_maker, is_rejected
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm.common import gather, scheduler, store_tile
from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.grouped_gemm.common.scheduler import host
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.grouped_gemm.wgmma import kernel
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, SharedMemoryLayout, select_config
from moe_numba.runtime.device import H200
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

# Tile scheduler and shared-memory layout


@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=20).filter(any),
    subtile_m=st.sampled_from([8, 16, 144, 256]),
    m_subtiles=st.integers(1, 2),
    n_tiles=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_tiles_cover_each_row_once(lengths, subtile_m, m_subtiles, n_tiles):
    """Each (row, tile of weight) lies in one tile, no tile is empty, and none is larger than allowed."""
    counts = [int(host.num_tiles(n, subtile_m * m_subtiles)) * n_tiles for n in lengths]
    first_tiles = [sum(counts[:g]) for g in range(len(lengths))]
    seen = set()
    for tile in range(sum(counts)):
        g = int(host.find_group(first_tiles, 0, len(lengths), tile))
        assert first_tiles[g] <= tile < first_tiles[g] + counts[g]
        tiles = counts[g] // n_tiles
        subtile_rows = int(host.subtile_size(lengths[g], tiles, m_subtiles))
        assert subtile_rows % 8 == 0 and 0 < subtile_rows <= subtile_m
        n_tile = int(host.divide(tile - first_tiles[g], tiles))
        begin = (tile - first_tiles[g] - n_tile * tiles) * subtile_rows * m_subtiles
        rows = range(begin, min(begin + subtile_rows * m_subtiles, lengths[g]))
        cells = {(g, row, n_tile) for row in rows}
        assert cells and not cells & seen and n_tile < n_tiles
        seen |= cells
    assert len(seen) == sum(lengths) * n_tiles


@pytest.mark.parametrize("scaling, max_groups, m_subtiles", [("tensor", 512, 1), ("block", 64, 2)])
def test_shared_memory_regions_do_not_overlap(scaling, max_groups, m_subtiles):
    layout = SharedMemoryLayout(GemmConfig(scaling=scaling, max_groups=max_groups, m_subtiles=m_subtiles, stages=3))
    starts = [layout.epilogue_offset, layout.scale_offset * 4, layout.full * 8, layout.empty * 8]
    starts += [4 * layout.tile_info_offset, 4 * layout.warp_sums_offset, 4 * layout.first_tile_offset, layout.bytes]
    assert starts == sorted(starts) and starts[0] == 3 * layout.stage_bytes
    assert layout.stage_bytes % 1024 == 0 and layout.scale_pitch % 4 == 0
    assert layout.full * 2 >= layout.scale_offset + 3 * layout.stage_scales
    assert layout.tile_info_offset >= 2 * (layout.empty + 3)
    assert layout.bytes >= 4 * (layout.first_tile_offset + max_groups + 1)


@pytest.mark.parametrize("silu_and_mul", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "block", "none"])
def test_every_config_fits_into_shared_memory(scaling, silu_and_mul):
    for average in (1, 16, 40, 64, 100, 300):
        config = select_config(scaling, "lengths", average, silu_and_mul)
        assert SharedMemoryLayout(config._replace(gather=True)).bytes <= H200.shared_bytes, config
        assert SharedMemoryLayout(config).bytes <= H200.shared_bytes, config
        assert config.mma_n[0] == config.subtile_m and list(config.mma_n) == sorted(config.mma_n, reverse=True)


# The kernel


def run(config, p, blocks=2, seed=0, make_kernel=kernel.make_kernel, first_row=0, **order):
    """Run the kernel on an output with 4 guard rows behind it, filled with NaN from ``first_row`` on.

    ``blocks`` is a multiple of the cluster; ``order`` is for ``simulator.seed``.
    """
    made, shared_bytes = make_kernel(config)
    indices = p.lengths if p.indices is None else p.indices
    total, (groups, n, k) = len(p.x if p.indices is None else p.indices), p.weight.shape
    block_k = 128 // p.x.element_size()
    y = torch.empty((total + 4, n), dtype=torch.bfloat16, device=p.x.device)
    y[first_row:] = float("nan")
    lengths = p.lengths if config.row_layout != "offsets" else (p.starts[:-1] + p.lengths)
    weight, box = (p.weight.mT, (1, 64, 64)) if config.weight_major == "mn" else (p.weight, (1, 128, block_k))
    with simulator.seed(seed, **order):
        launch(
            made,
            blocks,
            THREADS,
            TensorMap(p.x, (SharedMemoryLayout(config).x_box_rows, block_k), swizzle=128),
            TensorMap(weight, box, swizzle=128),
            y.view(torch.int32),
            p.x_scale,  # only written with silu_and_mul
            *(lengths, p.starts, p.x_scale, p.weight_scale, groups, total, p.capacity, n, k),
            *(*p.scale_strides[:2], np.int64(p.scale_strides[2])),
            *(p.x.view(torch.uint8), indices, len(p.x), k * p.x.element_size()),
            shared_bytes=shared_bytes,
            cluster=config.cluster_size if config.cluster_size > 1 else None,
        )
    assert bool(y[total:].isnan().all()), "rows behind the output were written"
    return y[:total]


TENSOR = GemmConfig(subtile_m=16, mma_n=(16,), stages=3, max_groups=8)
CONFIGS = {
    "tensor": TENSOR._replace(mma_n=(16, 8)),
    "tensor, not warp-uniform": TENSOR._replace(warp_uniform=False),
    "tensor, two subtiles": TENSOR._replace(m_subtiles=2, mma_n=(16, 8), stages=2),
    "block": TENSOR._replace(scaling="block"),
    "block, two subtiles": TENSOR._replace(scaling="block", subtile_m=24, m_subtiles=2, mma_n=(24, 8)),
    "bf16": TENSOR._replace(dtype="bf16", scaling="none"),
    "bf16, MN-major": TENSOR._replace(dtype="bf16", scaling="none", weight_major="mn"),
    "tensor, cluster": TENSOR._replace(cluster_size=2),
    "tensor, fast, bands, cluster": TENSOR._replace(fast_accumulation=True, band_rows=32, cluster_size=2),
    "block, two subtiles, cluster": TENSOR._replace(scaling="block", m_subtiles=2, cluster_size=2),
}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "bf16, MN-major"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_group_sizes(name, pattern, device):
    p = make_problem(CONFIGS[name], PATTERNS[pattern], 128, 256 if name != "bf16" else 128, device)
    assert mismatch(run(CONFIGS[name], p), p.expected) is None


@pytest.mark.parametrize("name", ["tensor", "block", "bf16", "block, two subtiles, cluster"])
@pytest.mark.parametrize("n, k", [(64, 64), (192, 320), (256, 128), (384, 64), (16, 16), (208, 144)])
def test_sizes_that_are_no_multiples_of_a_tile(name, n, k, device):
    p = make_problem(CONFIGS[name], [5, 0, 12], n, k, device)
    assert mismatch(run(CONFIGS[name], p, blocks=4), p.expected) is None


MN_MAJOR = CONFIGS["bf16, MN-major"]


@pytest.mark.parametrize(
    "options, lengths, n, k",
    [
        ({}, PATTERNS["empty groups"], 128, 128),
        ({}, [5, 0, 12], 208, 144),
        ({}, [3], 16, 16),
        (dict(m_subtiles=2, mma_n=(16, 8), stages=2, row_layout="offsets"), [40, 3], 80, 192),
        (dict(cluster_size=2, row_layout="masked"), [3, 0, 20], 192, 80),
        (dict(gather=True), [5, 0, 12], 80, 272),
    ],
    ids=["empty groups", "uneven", "smallest", "subtiles", "cluster", "gather"],
)
def test_mn_major_weights(options, lengths, n, k, device):
    config = MN_MAJOR._replace(**options)
    p = make_problem(config, lengths, n, k, device)
    p = scatter(p) if config.gather else p
    assert mismatch(run(config, p, blocks=4), p.expected) is None


def test_configs_that_cannot_have_mn_major_weights():
    for config in (MN_MAJOR._replace(dtype="e4m3", scaling="tensor"), MN_MAJOR._replace(weight_major="m")):
        with pytest.raises(ValueError, match="weight_major is '.*'; it must be 'k', or with bf16 'mn'"):
            kernel.make_kernel(config)


@pytest.mark.parametrize("row_layout", ["offsets", "masked"])
def test_row_layouts(row_layout, device):
    config = CONFIGS["tensor"]._replace(row_layout=row_layout)
    p = make_problem(config, [3, 0, 20], 128, 128, device)
    assert mismatch(run(config, p), p.expected) is None


def test_more_groups_than_threads(device):
    config = CONFIGS["tensor"]._replace(max_groups=400)
    p = make_problem(config, [1 if g in (0, 399) else 0 for g in range(400)], 64, 64, device)
    assert mismatch(run(config, p, blocks=1), p.expected) is None


@pytest.mark.parametrize("seed", range(6))
def test_result_does_not_depend_on_thread_order(seed, device):
    p = make_problem(CONFIGS["block, two subtiles"], [30, 50], 128, 256, device)
    first = run(CONFIGS["block, two subtiles"], p, seed=0)
    assert mismatch(first, p.expected) is None
    assert torch.equal(run(CONFIGS["block, two subtiles"], p, seed=seed), first)


@pytest.mark.parametrize("lengths, starts", [([-5, 3], [0, 0]), ([3, 1 << 30], [0, 3]), ([4, 4], [-7, 1 << 30])])
def test_invalid_group_sizes_stay_in_bounds(lengths, starts, device):
    p = make_problem(CONFIGS["tensor"], [4, 4], 64, 64, device)
    p.lengths, p.starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
    run(CONFIGS["tensor"], p)  # asserts that the guard rows are unchanged


def test_rows_beyond_2_31_elements(device):
    """The groups begin at row 2**26, which is 2**31 words into an output of 32 words per row."""
    first_row, config = 1 << 26, CONFIGS["tensor, two subtiles"]
    p = make_problem(config, [5, 43], 64, 64, device)
    # The rows before are never touched, so that they take no physical memory on the CPU.
    near, p.x = p.x, torch.empty(first_row + len(p.x), 64, dtype=torch.uint8, device=device).view(p.x.dtype)
    p.x[first_row:] = near
    p.starts += first_row
    assert mismatch(run(config, p, first_row=first_row)[first_row:], p.expected) is None


# Gathered rows


GATHER_CONFIGS = {
    name: config._replace(gather=True, stages=3)
    for name, config in CONFIGS.items()
    if config.cluster_size == 1 and config.weight_major == "k"
}


@pytest.mark.parametrize("name", GATHER_CONFIGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gather(name, pattern, device):
    k = 256 if name != "bf16" else 128
    p = scatter(make_problem(GATHER_CONFIGS[name], PATTERNS[pattern], 128, k, device))
    assert mismatch(run(GATHER_CONFIGS[name], p), p.expected) is None


@pytest.mark.parametrize("name", ["tensor", "block, two subtiles", "bf16"])
@pytest.mark.parametrize("n, k", [(64, 64), (192, 320), (80, 272)])
def test_gather_with_sizes_that_are_no_multiples_of_a_tile(name, n, k, device):
    p = scatter(make_problem(GATHER_CONFIGS[name], [5, 0, 12, 40], n, k, device))
    assert mismatch(run(GATHER_CONFIGS[name], p, blocks=3), p.expected) is None


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("name", ["tensor", "tensor, two subtiles", "block", "bf16", "block, two subtiles, cluster"])
@pytest.mark.parametrize("lengths, k", [([5, 0, 12], 128), ([5, 30, 16], 640)], ids=["few stages", "many stages"])
def test_early_weights(lengths, k, name, gathers, device):
    """The first stages hold several tiles, or a part of one."""
    if gathers and name not in GATHER_CONFIGS:
        pytest.skip("a cluster gathers no rows")
    config = (GATHER_CONFIGS if gathers else CONFIGS)[name]
    p = make_problem(config, lengths, 256, k, device)
    p = scatter(p) if gathers else p
    early = run(config._replace(early_weight=True), p)
    assert mismatch(early, p.expected) is None and torch.equal(early, run(config, p))


SLOW_PRODUCER = (
    "                    griddepcontrol_wait()\n",
    "                    griddepcontrol_wait()\n"
    "                    if early > 0:\n"
    "                        mbarrier_wait_parity(smem.barriers, empty, uint32(0))\n",
)


@pytest.mark.parametrize("name", ["tensor", "block, two subtiles", "bf16"])
def test_consumers_release_an_early_stage_before_the_producer_continues(name, device):
    """With gathered rows they need no more of the TMA producer, which must not wait for such a stage to be empty."""
    config = GATHER_CONFIGS[name]._replace(early_weight=True)
    p = scatter(make_problem(config, [5, 30, 16], 256, 640 if name != "bf16" else 320, device))
    make_kernel = changed_maker(kernel, "make_kernel", kernel, *SLOW_PRODUCER)
    assert mismatch(run(config, p, make_kernel=make_kernel), p.expected) is None
    if simulator.ENABLED:
        right = "                    if early == 0:"
        always = f"                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n{right}"
        wrong = changed_maker(kernel, "make_kernel", kernel, *SLOW_PRODUCER, (right, always))
        assert is_rejected(lambda seed: mismatch(run(config, p, seed=seed, make_kernel=wrong), p.expected))
        wrong, order = changed_maker(kernel, "make_kernel", kernel, right, always), dict(preempt=0.1, slow_warp=8)
        assert is_rejected(lambda seed: mismatch(run(config, p, seed=seed, make_kernel=wrong, **order), p.expected))


@pytest.mark.skipif(not simulator.ENABLED, reason="only the simulator can delay a warp")
@pytest.mark.parametrize("slow_warp", [0, 4, 8, 9], ids=["consumer", "second consumer", "TMA producer", "auxiliary"])
def test_a_warp_may_be_slow(slow_warp, device):
    config = GATHER_CONFIGS["block, two subtiles"]._replace(early_weight=True)
    p = scatter(make_problem(config, [5, 30], 128, 384, device))
    assert mismatch(run(config, p, preempt=0.1, slow_warp=slow_warp), p.expected) is None


@pytest.mark.parametrize("seed", range(1, 5))
def test_gather_does_not_depend_on_thread_order(seed, device):
    p = scatter(make_problem(GATHER_CONFIGS["block, two subtiles"], [30, 50], 128, 640, device))
    first = run(GATHER_CONFIGS["block, two subtiles"], p)
    assert mismatch(first, p.expected) is None
    assert torch.equal(run(GATHER_CONFIGS["block, two subtiles"], p, seed=seed), first)


def test_configs_that_cannot_gather():
    with pytest.raises(ValueError, match="cluster_size is 2; with gather it must be 1"):
        kernel.make_kernel(GATHER_CONFIGS["tensor"]._replace(cluster_size=2))
    with pytest.raises(ValueError, match="stages is 2; with block scaling or gather it must be 3 or more"):
        kernel.make_kernel(GATHER_CONFIGS["tensor"]._replace(stages=2))


@pytest.mark.parametrize(
    "old, new",
    [
        ("                        if early > 0:\n", "                        if early > 1:\n"),
        ("                    if early == 0:", "                    if False:"),
        ("for k_block in range(min(k_blocks, int32(stages - early))):", "for k_block in range(k_blocks):"),
    ],
    ids=["weights are loaded again", "later tiles are not published", "more stages than there are"],
)
def test_wrong_early_weights_are_rejected(old, new, device):
    if not simulator.ENABLED:
        pytest.skip("they wait forever on a GPU, or write out of bounds")
    config = CONFIGS["tensor"]._replace(early_weight=True)
    make_kernel = changed_maker(kernel, "make_kernel", kernel, old, new)
    p = make_problem(config, [5, 11, 7], 256, 640, device)
    assert mismatch(run(config, p, blocks=1), p.expected) is None
    assert is_rejected(lambda seed: mismatch(run(config, p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected))


def test_bands_of_tiles(device):
    """Of 5 tiles of rows the last band has one only; a scheduler that takes it for two is rejected."""
    config = CONFIGS["tensor, fast, bands, cluster"]
    p = make_problem(config, [70, 5], 400, 128, device)
    assert mismatch(run(config, p, blocks=4), p.expected) is None
    change = scheduler, "int32(min(int32(tiles - band * band_tiles), int32(band_tiles)))", "int32(band_tiles)"
    make_kernel = changed_maker(kernel, "make_kernel", *change)
    assert is_rejected(lambda seed: mismatch(run(config, p, seed=seed, make_kernel=make_kernel), p.expected))


# Wrong kernels

WAIT, ADD = "                product = wait(product)\n", "            if scales_fit:\n                acc = add_scaled("
WRONG = {
    "a stage is read before it is full": (
        kernel,
        "                mbarrier_wait_parity(smem.barriers, full + stage, phase)\n                offset",
        "                offset",
    ),
    "a stage is filled while it is read": (
        kernel,
        "mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n                            if allows",
        "if allows",
    ),
    "too few bytes are expected": (kernel, "barrier, num_bytes)", "barrier, num_bytes - 16)"),
    "a stage is released before wgmma has read it": (
        *(kernel, WAIT, ""),
        (ADD, f"            if promotes:\n{WAIT}{ADD}"),
    ),
    "consumers request more registers than producers release": (kernel, "else (24, 240)", "else (24, 256)"),
    "rows of the next group are stored": (store_tile, "int32(min(tile.rows, tile.subtile_rows))", "tile.subtile_rows"),
    "the wrong group's weight is loaded": (
        kernel,
        "k, column, group, barriers, barrier, policy)\n            if",
        "k, column, int32(0), barriers, barrier, policy)\n            if",
    ),
    "the last stage is left out": (kernel, "for _ in range(k_blocks):", "for _ in range(k_blocks - 1):"),
    "the epilogue does not undo its swizzle": (store_tile, "((vector ^ (t & 7)) << 4)", "(vector << 4)"),
    "an epilogue buffer is read before all four warps wrote it": (
        store_tile,
        "            store_chunk(smem, store, int32(chunk - 1), chunks, True)\n"
        "        else:\n            bar_sync(int32(2 + store.warpgroup), 128)\n",
        "            store_chunk(smem, store, int32(chunk - 1), chunks, True)\n",
    ),
    "gathered rows are not waited for": (gather, "    cp_async_wait_all()\n", ""),
    "gathered rows are not fenced": (gather, "    fence_proxy_async_shared()\n", ""),
    "gathered rows are fenced before they arrive": (
        gather,
        "    cp_async_wait_all()\n    fence_proxy_async_shared()\n",
        "    fence_proxy_async_shared()\n    cp_async_wait_all()\n",
    ),
    "gathered rows are not swizzled": (gather, "((vector ^ t) << 4)", "(vector << 4)"),
    "a row is copied by another row's index": (gather, "x, b, min_index", "x, a, min_index"),
    "an index beyond x is used": (gather, "index if index < source.x_rows else int32(-1)", "index"),
}
ON_A_GPU = {  # the others would hang a GPU, or could be right by chance
    "rows of the next group are stored",
    "the wrong group's weight is loaded",
    "the last stage is left out",
    "the epilogue does not undo its swizzle",
    "gathered rows are not swizzled",
    "a row is copied by another row's index",
}


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what in ON_A_GPU])
def test_wrong_kernels_are_rejected(what, device):
    make_kernel, config = changed_maker(kernel, "make_kernel", *WRONG[what]), CONFIGS["tensor"]
    p = make_problem(config, [5, 11], 128, 768, device)
    if WRONG[what][0] is gather:
        p, config = scatter(p), GATHER_CONFIGS["tensor"]
        if "beyond x" in what:
            p.indices[3], p.expected[3] = len(p.x), 0
    attempt = lambda seed: mismatch(run(config, p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


@pytest.mark.parametrize(
    "old, new",
    [
        ("int32(tma_bytes - subtile_bytes) if is_single else int32(tma_bytes)", "int32(tma_bytes)"),
        ("two_subtiles and not is_single:", "two_subtiles and is_single:"),
        ("output_tile.rows > output_tile.subtile_rows:", "output_tile.rows > 2 * output_tile.subtile_rows:"),
    ],
    ids=["bytes of an empty subtile are expected", "only empty subtiles are loaded", "second subtiles are ignored"],
)
def test_wrong_kernels_with_two_subtiles_are_rejected(old, new, device):
    if not simulator.ENABLED:
        pytest.skip("the first two wait forever on a GPU")
    make_kernel, config = changed_maker(kernel, "make_kernel", kernel, old, new), CONFIGS["tensor, two subtiles"]
    p = make_problem(config, [5, 30, 16], 128, 256, device)
    assert mismatch(run(config, p, blocks=1), p.expected) is None
    assert is_rejected(lambda seed: mismatch(run(config, p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected))


@pytest.mark.parametrize(
    "old, new",
    [
        ("accumulate=not promotes, a_major=config.weight_major", 'accumulate=not promotes, a_major="k"'),
        ("int32(column + HALF_TILE_ROWS)", "column"),
        ("map_weight, 0, column, k, group,", "map_weight, 0, column, int32(0), group,"),
    ],
    ids=["wrong major bit", "both warpgroups have the same rows of weight", "always the first 64 k"],
)
def test_wrong_kernels_with_mn_major_weights_are_rejected(old, new, device):
    make_kernel = changed_maker(kernel, "make_kernel", kernel, old, new)
    p = make_problem(MN_MAJOR, [5, 11], 128, 128, device)
    assert is_rejected(lambda seed: mismatch(run(MN_MAJOR, p, seed=seed, make_kernel=make_kernel), p.expected))


@pytest.mark.parametrize(
    "right, wrong",
    [
        (") * strides.row + tile.group", ") * k_blocks + tile.group"),
        ("x_scale_offset(k_block, strides.k_block)", "k_block"),
        ("32 * i) * strides.row", "32 * i) * k_blocks"),
        ("tile.group * strides.group", "int64(0)"),
    ],
)
def test_kernels_that_ignore_the_strides_of_scales_are_rejected(right, wrong, device):
    config = CONFIGS["block, two subtiles"]._replace(row_layout="masked")
    p = lay_out_scales(make_problem(config, [5, 30], 64, 256, device), config)
    assert mismatch(run(config, p, blocks=1), p.expected) is None
    make_kernel = changed_maker(kernel, "make_kernel", kernel, right, wrong)
    assert is_rejected(lambda seed: mismatch(run(config, p, seed=seed, make_kernel=make_kernel), p.expected), seeds=1)


def test_a_kernel_that_stores_columns_beyond_y_is_rejected(device):
    change = store_tile, "        if column + 8 * vector >= output.n:", "        if column >= output.n:"
    make_kernel, config = changed_maker(kernel, "make_kernel", *change), CONFIGS["tensor"]
    p = make_problem(config, [5, 11], 80, 64, device)
    assert is_rejected(lambda seed: mismatch(run(config, p, seed=seed, make_kernel=make_kernel), p.expected))
