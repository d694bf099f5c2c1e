"""The k-grouped GEMM's kernel on small tiles, and wrong kernels."""

from types import SimpleNamespace

import pytest
import torch
from helpers.wrong_kernels import changed_maker, is_rejected

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.common.constants import MAX_SHARED_BYTES, THREADS
from moe_numba.grouped_gemm.k_grouped import kernel
from moe_numba.grouped_gemm.k_grouped.config import KGroupedConfig, KGroupedLayout, select_k_grouped_config
from moe_numba.grouped_gemm.k_grouped.launch import K_GROUPED_SIGNATURE
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart
from moe_numba.runtime.tensor_map import TensorMap

BOUNDS = {"float32": 2e-5, "bfloat16": 2.3e-3}  # of the relative error


def make_problem(config, lengths, n, k, device, gap=0, between=float("nan")):
    """Random operands whose groups have ``gap`` rows of ``between`` behind them, and the expected output."""
    torch.manual_seed(0)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    ends = (seqlens + gap).cumsum(0).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    a, b = torch.randn(int(ends[-1]) or 1, n), torch.randn(int(ends[-1]) or 1, k)
    for rows in (a, b):
        for g, length in enumerate(lengths):
            rows[int(starts[g]) + length : int(starts[g + 1])] = between
    a, b = a.bfloat16(), b.bfloat16()
    before = torch.randn(len(lengths), n, k) if config.accumulate else torch.full((len(lengths), n, k), float("nan"))
    expected = reference.k_grouped_gemm(a, b, seqlens, starts)
    if config.accumulate:
        expected += before
    lengths = starts[1:] if config.row_layout == "offsets" else seqlens
    before = before.to(getattr(torch, config.out_dtype))
    return SimpleNamespace(
        **{name: tensor.to(device) for name, tensor in dict(a=a, b=b, lengths=lengths, starts=starts).items()},
        before=before.to(device),
        expected=expected.to(device),
    )


def run(config, p, blocks=2, seed=0, make_kernel=kernel.make_kernel):
    """Run the kernel on a copy of ``p.before`` with a guard group behind it; return the output."""
    made, shared_bytes = make_kernel(config)
    groups, n, k = p.expected.shape
    out = torch.cat([p.before, torch.full_like(p.before[:1], 7)])
    with simulator.seed(seed):
        launch(
            made,
            blocks,
            THREADS,
            TensorMap(p.a, (64, 64), swizzle=128),
            TensorMap(p.b, (64, 64), swizzle=128),
            TensorMap(out[:groups], (1, 16, config.store_columns), swizzle=128),
            *(p.lengths, p.starts, groups, len(p.a), n, k),
            shared_bytes=shared_bytes,
            cluster=config.cluster_size if config.cluster_size > 1 else None,
        )
    assert bool((out[groups] == 7).all()), "memory behind the output was written"
    return out[:groups]


def error(config, p, **options):
    """Return None, or what is wrong with the result of the kernel."""
    out = run(config, p, **options).flatten(0, 1)
    return reference.mismatch(out, p.expected.flatten(0, 1), BOUNDS[config.out_dtype])


SMALL = KGroupedConfig(block_k=64, stages=2)
CASES = {
    # configuration, lengths, n, k, rows behind each group
    "one group of full stages": (SMALL, [128], 128, 64, 0),
    "empty groups at both ends": (SMALL, [0, 5, 0, 70, 0], 128, 64, 3),
    "more empty groups than stages": (SMALL, [0] * 11 + [1], 8, 8, 0),
    "no rows": (SMALL, [0, 0], 64, 16, 0),
    "n and k beyond a tile": (SMALL._replace(stages=3), [70, 64], 200, 136, 1),
    "smallest": (SMALL, [1], 8, 8, 0),
    "bfloat16": (SMALL._replace(out_dtype="bfloat16"), [65, 0, 3], 136, 72, 2),
    "accumulate, offsets": (SMALL._replace(accumulate=True, row_layout="offsets"), [65, 0, 130], 72, 104, 0),
    "cluster": (SMALL._replace(block_k=128, cluster_size=2), [3, 0, 100], 136, 136, 2),
    "cluster, one tile of n": (SMALL._replace(block_k=128, cluster_size=2, stages=3), [70], 16, 128, 0),
    "bands": (SMALL._replace(band_tiles=2, row_layout="offsets"), [3, 4], 384, 72, 0),
    "largest tile": (KGroupedConfig(stages=2), [67, 1], 64, 264, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_results(name, device):
    config, lengths, n, k, gap = CASES[name]
    assert error(config, make_problem(config, lengths, n, k, device, gap), blocks=4) is None


@pytest.mark.parametrize("seed", range(1, 5))
def test_result_does_not_depend_on_thread_order(seed, device):
    config = SMALL._replace(stages=3)
    p = make_problem(config, [70, 3, 130], 128, 64, device, gap=1)
    assert error(config, p) is None
    assert torch.equal(run(config, p, blocks=1, seed=seed), run(config, p))


@pytest.mark.parametrize("between", [float("inf"), float("nan"), 1.0])
def test_rows_of_other_groups_are_no_part_of_the_sum(between, device):
    p = make_problem(SMALL, [5, 66], 64, 16, device, gap=7, between=between)
    assert error(SMALL, p) is None


@pytest.mark.parametrize("lengths, starts", [([-5, 3], [0, 0]), ([3, 1 << 30], [0, 3]), ([4, 4], [-7, 1 << 30])])
def test_invalid_group_sizes_stay_in_bounds(lengths, starts, device):
    p = make_problem(SMALL, [4, 4], 64, 16, device)
    p.lengths, p.starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
    assert not run(SMALL, p).isnan().any()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(block_k=96), "block_k is 96; it must be a multiple of 64 up to 256"),
        (dict(block_k=64, cluster_size=2), "cluster_size is 2; it must be 1, or 2 with block_k, 64, a multiple of 128"),
        (dict(out_dtype="bfloat16", accumulate=True), "out_dtype is bfloat16; it must be float32, or without accum"),
        (dict(stages=1), "stages is 1"),
        (dict(stages=5), "bytes of shared memory; a CTA has"),
    ],
)
def test_configs_that_the_kernel_does_not_support(options, message):
    with pytest.raises(ValueError, match=message):
        kernel.make_kernel(KGroupedConfig(**options))


def test_shared_memory_regions_do_not_overlap():
    for config in (
        SMALL,
        *(select_k_grouped_config(n, k, "offsets", "float32", False) for n, k in [(64, 64), (999, 999)]),
    ):
        layout = KGroupedLayout(config)
        starts = [layout.epilogue_offset, 8 * layout.full, 8 * layout.empty, 8 * layout.masked]
        starts += [4 * layout.tile_info_offset, layout.bytes]
        assert starts == sorted(starts) and layout.stage_bytes % 1024 == 0 and layout.tile_info_offset % 4 == 0
        assert layout.tile_info_offset >= 2 * (layout.masked + config.stages) and layout.bytes <= MAX_SHARED_BYTES


WRONG = {
    "a group's last rows are not masked": ("if (rows & (BLOCK_ROWS - 1)) != 0:", "if rows < 0:"),
    "only a is masked": (
        "boxes, band_tiles = layout.epilogue_offset, stage_bytes // BOX_BYTES,",
        "boxes, band_tiles = layout.epilogue_offset, 2,",
    ),
    "one row too few is masked": ("rows_to_keep * VECTORS_PER_ROW", "(rows_to_keep + 1) * VECTORS_PER_ROW"),
    "one row too many is masked": ("rows_to_keep * VECTORS_PER_ROW", "(rows_to_keep - 1) * VECTORS_PER_ROW"),
    "zeros are not fenced": ("fence_proxy_async_shared()  # wgmma reads", "pass  # wgmma reads"),
    "zeros are not waited for": ("mbarrier_wait_parity(barriers, masked + mask, mask_phase)", "cuda.syncwarp()"),
    "the wrong major bit of a": ('a_major="mn", b_major="mn"', 'b_major="mn"'),
    "the wrong major bit of b": ('a_major="mn", b_major="mn"', 'a_major="mn"'),
    "the wrong distance of boxes": ("make_wgmma_descriptor_mn(BOX_BYTES)", "make_wgmma_descriptor_mn(BOX_BYTES // 2)"),
    "both warpgroups multiply the same columns": ("int32((warp >> 2) * BOX_BYTES)", "int32(0)"),
    "the next group's rows": (
        "first_row, rows = group_rows(problem, group)",
        "first_row, rows = group_rows(problem, 1 - group)",
    ),
    "a stage is filled while it is read": (
        "                        mbarrier_wait_parity(barriers, empty + stage, phase)\n"
        "                        mbarrier_arrive_expect_tx(",
        "                        mbarrier_arrive_expect_tx(",
    ),
    "a buffer is overwritten while it is stored": ("            wait_read()  # an earlier", "            pass  #"),
    "a buffer is not fenced": (
        "        write_rows(smem, offset, values)\n        fence_proxy_async_shared()\n",
        "        write_rows(smem, offset, values)\n",
    ),
    "the CTA ends before its stores": ("                wait_for_stores()", "                pass"),
    "the swizzle of a store is left out": ("((vector ^ (row & 7)) << 4)", "(vector << 4)"),
    "empty groups are not written": ("if not accumulate or rows > 0:", "if rows > 0:"),
}


@pytest.mark.parametrize("what", WRONG if simulator.ENABLED else [])
def test_wrong_kernels_are_rejected(what, device):
    make_kernel = changed_maker(kernel, "make_kernel", kernel, *WRONG[what])
    config = SMALL._replace(block_k=128)
    p = make_problem(config, [70, 0] if "empty" in what else [131, 3], 128, 256, device, gap=2)
    assert is_rejected(lambda seed: error(config, p, blocks=1, seed=seed, make_kernel=make_kernel))


# Machine code


@pytest.fixture(scope="module")
def reports():
    source = "from moe_numba.grouped_gemm.k_grouped.kernel import make_kernel\n"
    source += "from moe_numba.grouped_gemm.k_grouped.config import KGroupedConfig\n"
    configs = {"float32": dict(cluster_size=2), "bfloat16": dict(block_k=128, stages=6, out_dtype="bfloat16")}
    made = "make_kernel(KGroupedConfig(**{}))[0]".format
    return compile_apart(
        source, {name: (made(options), K_GROUPED_SIGNATURE, THREADS, True) for name, options in configs.items()}
    )


def test_machine_code(reports):
    for name, report in reports.items():
        assert report.complaints == [] and report.spilled_bytes == report.stack_bytes == 0, name
        assert set(report.wgmma_transposes) == {".tnspA.tnspB"} and len(report.wgmma_transposes) == 8
        assert not report.count("CALL") and not report.count("LDL", "STL")
        assert sorted(report.setmaxnreg) == [40, 232]
        assert report.count("UTMASTG") and report.count("STSM" if name == "bfloat16" else "STS")
