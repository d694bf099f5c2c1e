"""Parts of the notebook on block scales and 4-bit weights: traces of tiles, the model of L2, layouts, machine code."""

from types import SimpleNamespace

import pytest
import torch

from moe_numba.course import block_scale_diagnoses, block_scale_steps, mxfp4_steps
from moe_numba.course.bench.topics import grouped_gemm as topic
from moe_numba.course.exercises.grouped_gemm_scales import place_of
from moe_numba.course.tile_traces import Tile, dram_bytes, l2_to_sm_bytes, lags, pairs_of, tiles_of
from moe_numba.grouped_gemm.config_block_scaled import BlockScaledConfig
from moe_numba.grouped_gemm.launch_w4 import W4_SIGNATURE
from moe_numba.runtime.sass import compile_apart

TRACED = {
    "make_consumer": block_scale_diagnoses.make_traced_consumer,
    "make_aux_producer": block_scale_steps.make_scales_by_one,
}
SOURCE = """
from moe_numba.course import block_scale_steps as steps, mxfp4_steps
from moe_numba.grouped_gemm.config_block_scaled import BlockScaledConfig
FOUR = dict(make_multiply=steps.make_multiply_in_order, make_aux_producer=steps.make_scales_by_four)
"""


@pytest.mark.parametrize("cluster_size", [1, 2])
def test_a_trace_has_each_tile_once(cluster_size, device):
    lengths = torch.tensor([300, 0, 64, 129], dtype=torch.int32)
    weight = topic.random_weight(4, 384, 128, device=device)
    problem = topic.make_problem(weight, lengths)
    topic.add_block_scales([problem])
    launch = block_scale_steps.StepLaunch(BlockScaledConfig(cluster_size=cluster_size), problem, **TRACED)
    launch(problem)
    tiles = tiles_of(launch.trace, problem.seqlens)
    found = sorted((t.group, t.row, t.rows, t.column) for t in tiles)
    wanted = []
    for group, (start, rows) in enumerate(zip(problem.cu_seqlens.tolist(), lengths.tolist(), strict=False)):
        if cluster_size == 2:
            own = {tile for _, *pair in pairs_of(rows, 2) for tile in pair if tile[1]}
        else:
            own = {(at, min(128, rows - at), column) for at in range(0, rows, 128) for column in range(2)}
        wanted += [(group, start + row, count, column) for row, count, column in own]
    assert found == sorted(wanted)
    assert all(t.start_us < t.end_us for t in tiles) and min(t.start_us for t in tiles) == 0
    sharing = [t.cta for t in tiles if (t.group, t.column) == (0, 0) and t.rows == 128]
    assert cluster_size == 1 or sharing in ([0, 1], [1, 0]), "a pair that shares weights is one cluster"


def test_times_that_wrap_around():
    trace = torch.zeros(4, 1, 3, dtype=torch.int32)
    trace[0, 0], trace[2, 0] = torch.tensor([2**31 - 2000, 1000, 1]), torch.tensor([500, 4000, 2])
    first, second = tiles_of(trace, torch.tensor([3, 1]))
    assert first == Tile(0, 0, 2, 0, 0, 0.0, 3.0) and second == Tile(0, 2, 1, 0, 1, 2.5, 6.0)


def tile(row, start, column=0):
    return Tile(0, row, 64, column, 0, start, start + 10)


@pytest.mark.parametrize("start, cache, weights_read", [(0, 1 << 20, 1), (100, 1 << 20, 1), (100, 1 << 15, 2)])
def test_l2_reads_weights_again_if_they_were_evicted(start, cache, weights_read):
    tiles = [tile(0, 0), tile(64, start)]
    weights, x = 192 * 256, 2 * 64 * 256
    assert dram_bytes(tiles, 192, 256, cache) == (weights_read * weights + x, weights + x)
    assert lags(tiles) == [start] and lags([tile(0, 0), tile(0, 5, column=1)]) == []


def test_bytes_from_l2_count_boxes_and_tiles_of_columns():
    assert l2_to_sm_bytes([128, 0, 10], 384, 256, 192) == 2 * 256 * (192 + 128 + 192 + 64)
    shared, columns = (
        2 * (192 + 128 + 128),
        2 * (192 + 64),
    )  # 300 rows: two pairs that share weights, and one that does not
    assert l2_to_sm_bytes([300], 384, 256, 192, cluster_size=2) == 256 * (shared + columns)


def test_weight_tiles_hold_each_code_at_its_place():
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (1, 64, 32), dtype=torch.uint8, generator=random)
    scales = torch.randint(0, 256, (1, 64, 2), dtype=torch.uint8, generator=random)
    rows, fragments = (
        mxfp4_steps.pack_rows(blocks, scales)[0, 0, 0],
        mxfp4_steps.pack_fragments(blocks, scales)[0, 0, 0],
    )
    assert torch.equal(rows[:2048], blocks.flatten()) and torch.equal(rows[2048:], fragments[2048:])
    for row, column in ((0, 0), (9, 3), (17, 40), (63, 63)):
        thread, byte, half = place_of(row, column)
        code = int(fragments[16 * thread + byte]) >> 4 * half & 15
        assert code == int(blocks[0, row, column // 2]) >> 4 * (column % 2) & 15
        word = 4 * (8 * (row // 16) + row % 8)
        assert fragments[2048 + word + 2 * (row // 8 % 2) + column // 32] == scales[0, row, column // 32]


@pytest.mark.parametrize("make, config", [(block_scale_steps, BlockScaledConfig()), (mxfp4_steps, None)])
def test_parts_with_unknown_names_are_refused(make, config):
    with pytest.raises(ValueError, match="'make_consumers' is not"):
        make.make_step_kernel(config, make_consumers=SimpleNamespace())


def test_kernels_compile_without_large_spills():
    pairs = "BlockScaledConfig(block_n=192, stages=5, cluster_size=1)"
    requests = {
        "by four": (f"steps.make_step_kernel({pairs}, **FOUR)[0]", block_scale_steps.SIGNATURE, 384, True),
        "from rows": (
            "mxfp4_steps.make_kernel_of(mxfp4_steps.config_of(4), 'rows, by value')",
            W4_SIGNATURE,
            mxfp4_steps.definition(4, "rows, by value").block,
            True,
        ),
    }
    codes = compile_apart(SOURCE, requests)
    assert codes["from rows"].spilled_bytes == 0 and codes["by four"].spilled_bytes <= 64
    for name, wgmma in (("by four", "QGMMA"), ("from rows", "HGMMA")):
        assert codes[name].complaints == [] and any(op.startswith(wgmma) for op in codes[name].opcodes)
