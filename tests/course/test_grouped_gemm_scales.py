"""Parts of the notebook on block scales and 4-bit weights: traces of tiles, the model of L2, layouts, machine code."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.bench.topics.grouped_gemm import show as topic
from moe_numba.course.lessons.grouped_gemm_scales import diagnoses as block_scale_diagnoses
from moe_numba.course.lessons.grouped_gemm_scales import mxfp4_steps
from moe_numba.course.lessons.grouped_gemm_scales import parts as block_scale_parts
from moe_numba.course.lessons.grouped_gemm_scales import steps as block_scale_steps
from moe_numba.course.lessons.grouped_gemm_scales.exercises import place_of
from moe_numba.course.lessons.grouped_gemm_scales.tile_traces import (
    Tile,
    dram_bytes,
    l2_to_sm_bytes,
    lags,
    pairs_of,
    tiles_of,
)
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig
from moe_numba.grouped_gemm.call.heuristics import measured_config
from moe_numba.grouped_gemm.w4.launch import W4_SIGNATURE
from moe_numba.runtime.sass import compile_apart

TRACED = {"make_consumer": block_scale_diagnoses.make_traced_consumer}


def make_problem(lengths, n, k, device):
    problem = topic.make_problem(topic.random_weight(len(lengths), n, k, device=device), torch.tensor(lengths).int())
    topic.add_block_scales([problem])
    problem.out.fill_(float("nan"))
    return problem


@pytest.mark.parametrize("name", block_scale_steps.KERNELS)
def test_each_step_is_correct(name, device):
    problem = make_problem([140, 0, 3], 384, 512, device)
    config, parts = block_scale_steps.KERNELS[name]
    y = block_scale_steps.StepLaunch(config, problem, **parts)(problem)
    assert reference.mismatch(y, topic.expected_output(problem, "block")) is None


def test_steps_exchange_fewer_and_fewer_parts():
    counts = [len(parts) for _, parts in block_scale_steps.STEPS.values()]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0


def test_steps_change_one_part_or_the_configuration():
    steps = list(block_scale_steps.STEPS.values())
    for (config, parts), (next_config, next_parts) in zip(steps, steps[1:]):
        exchanged = {name for name in parts | next_parts if parts.get(name) != next_parts.get(name)}
        fields = block_scale_steps.changed_fields(config, next_config)
        assert exchanged or fields
    assert block_scale_steps.changed_fields(*(config for config, _ in steps[:2])) == "block_n 128 -> 192, stages 6 -> 5"
    assert block_scale_steps.changed_fields(steps[0][0], steps[0][0]) == ""


@pytest.mark.parametrize("average", [128, 256, 1024])
def test_the_package_selects_a_tile_that_the_notebook_measures(average):
    tiles = [block_scale_steps.tile_of(config) for config in block_scale_steps.TILES.values()]
    assert len(set(tiles)) == len(tiles)
    assert block_scale_steps.tile_of(measured_config("block", 4096, 7168, 32, average)) in tiles


def test_processes_that_compile_ahead_find_the_parts():
    for variant in block_scale_steps.STEPS.values():
        definition = block_scale_steps.definition(*variant)
        assert pickle.loads(pickle.dumps(definition)) == definition


def test_ones_instead_of_scales_are_found(device):
    problem = make_problem([20], 128, 512, device)
    config, parts = block_scale_steps.STEPS["scales of four stages"]
    parts = parts | {"make_aux_producer": block_scale_parts.make_ones_by_four}
    y = block_scale_steps.StepLaunch(config, problem, **parts)(problem)
    assert reference.mismatch(y, topic.expected_output(problem, "block"))


@pytest.mark.parametrize("name", ["make_multiply_exchanging_rows", "make_multiply_loading_once"])
def test_wrong_scales_are_found(name, device):
    problem = make_problem([20], 128, 512, device)
    config, parts = block_scale_steps.STEPS["scales per row"]
    parts = parts | {"make_multiply": getattr(block_scale_diagnoses, name)}
    y = block_scale_steps.StepLaunch(config, problem, **parts)(problem)
    assert reference.mismatch(y, topic.expected_output(problem, "block"))


@pytest.mark.parametrize("exchanged", [{}, block_scale_steps.BY_LANES], ids=["TMA store", "by lanes"])
@pytest.mark.parametrize("cluster_size", [1, 2])
def test_a_trace_has_each_tile_once(cluster_size, exchanged, device):
    lengths = torch.tensor([300, 0, 64, 129], dtype=torch.int32)
    problem = make_problem(lengths.tolist(), 384, 128, device)
    config = BlockScaledConfig(cluster_size=cluster_size)
    launch = block_scale_steps.StepLaunch(config, problem, **exchanged, **TRACED)
    assert reference.mismatch(launch(problem), topic.expected_output(problem, "block")) is None
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


def test_the_share_of_time_between_tiles():
    ends = [(0, 0, 10), (0, 15, 20), (1, 5, 10), (1, 10, 25)]  # CTA, start, end
    tiles = [Tile(0, 0, 64, 0, cta, float(start), float(end)) for cta, start, end in ends]
    assert block_scale_diagnoses.waiting_share(tiles) == 5 / 40


def test_energy_is_measured_on_a_gpu_only(device):
    problem = make_problem([64], 128, 512, device)
    config, parts = block_scale_steps.STEPS["TMA store"]
    launch = block_scale_steps.StepLaunch(config, problem, **parts)
    energy = block_scale_diagnoses.energy_of(lambda: launch(problem), seconds=0.2)
    assert energy is None if simulator.ENABLED else energy is None or min(energy) > 0


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


def test_steps_spill_no_accumulators_in_the_main_loop():
    names = "scales of four stages", "TMA store", "256 columns, single"
    variants = {name: (name, "") for name in names}
    variants["new registers"] = ("256 columns, single", "make_multiply_halves=diagnoses.make_halves_in_new_registers")
    codes = block_scale_diagnoses.machine_code(variants)
    for name, code in codes.items():
        loop = block_scale_diagnoses.main_loop(code)
        assert code.complaints == []
        if loop is not None:
            spills = [op for op in loop if op.startswith(("STL", "LDL"))]
            assert bool(spills) == (name == "new registers"), f"{name}: {spills}"


@pytest.mark.parametrize("instruction, n", [("wgmma", 8), ("wgmma", 32), ("mma.sync", 8), ("mma.sync", 16)])
def test_products_of_ones(instruction, n, device):
    """Their time is measured: each iteration must multiply eight times, 16 elements of k each."""
    out = torch.zeros(mxfp4_steps.PRODUCT_THREADS, device=device)
    mxfp4_steps.launch_products(instruction, n, out, 3, 1)
    assert (out == 3 * 8 * 16).all()


def test_weights_in_rows_compile_without_spills():
    definition = mxfp4_steps.definition(4, "rows, by value")
    source = "from moe_numba.course.lessons.grouped_gemm_scales import mxfp4_steps"
    kernel = "mxfp4_steps.make_kernel_of(mxfp4_steps.config_of(4), 'rows, by value')"
    code = compile_apart(source, {"kernel": (kernel, W4_SIGNATURE, definition.block, True)})["kernel"]
    assert code.spilled_bytes == 0 and code.complaints == []
    assert code.opcodes is None or any(op.startswith("HGMMA") for op in code.opcodes)
