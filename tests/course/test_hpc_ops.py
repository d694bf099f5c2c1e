"""Our Numba port of hpc-ops' grouped GEMM: schedulers, tensor maps made on the device, kernel, and wrong kernels."""

from types import SimpleNamespace

import pytest
import torch
from helpers.hopper import hopper
from helpers.wrong_kernels import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import schedule

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split

from moe_numba.course.lessons.grouped_gemm.hpc_ops_port import group_gemm, update_grouped_tma
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.group_gemm import HpcOpsConfig, SharedMemoryLayout
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.launch import HpcOpsGroupGemm
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.scheduler import host, select_tile_m, use_horizontal
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart

simulated = pytest.mark.skipif(not simulator.ENABLED, reason="undefined on a GPU: set MOE_NUMBA_SIMULATE=1")


# The schedulers


@pytest.mark.parametrize("name", ["horizontal", "vertical"])
@given(tiles=st.lists(st.integers(0, 5), min_size=1, max_size=12), n_tiles=st.integers(1, 6), blocks=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_every_tile_is_scheduled_once(name, tiles, n_tiles, blocks):
    found = sum(schedule(name, tiles, n_tiles, blocks), [])
    wanted = {(g, m, n) for g, count in enumerate(tiles) for m in range(count) for n in range(n_tiles)}
    assert len(found) == len(set(found)) and set(found) == wanted


def test_tile_order():
    """The first tiles of four CTAs: two groups of 2 and 1 tiles along m, two tiles along n."""
    assert [own[0] for own in schedule("horizontal", [2, 1], 2, 4)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [own[0] for own in schedule("vertical", [2, 1], 2, 4)] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)]


def test_hpc_ops_choices():
    averages = {0: 16, 1: 16, 16: 16, 17: 32, 32: 32, 48: 48, 49: 64, 4096: 64}
    assert {average: select_tile_m(average) for average in averages} == averages
    assert [use_horizontal(*nk) for nk in ((4096, 7168), (1024, 7168), (4096, 1024))] == [False, True, True]


@pytest.mark.parametrize("tile_m, hpc_ops", [(8, 141312), (16, 151552), (32, 172032), (48, 192512), (64, 212992)])
def test_shared_memory_is_that_of_hpc_ops(tile_m, hpc_ops):
    layout = SharedMemoryLayout(HpcOpsConfig(tile_m=tile_m))
    assert layout.full * 8 == hpc_ops  # without barriers and the scheduler's table
    assert layout.empty == layout.full + 8 and layout.tiles_offset * 4 == (layout.empty + 8) * 8
    assert layout.bytes == layout.tiles_offset * 4 + 4 * 257 <= 227 * 1024


# The kernels


def make_problem(lengths, n=128, k=256, seed=0, device="cpu"):
    """Random inputs and the expected output: NaN in rows of no group, of which there are 3 at the end."""
    torch.manual_seed(seed)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), seqlens.cumsum(0).int()])
    total = int(seqlens.sum()) + 3
    x, weight = (torch.randn(total, k) * 0.5).to(FP8), (torch.randn(len(lengths), n, k) * 0.5).to(FP8)
    y_scale = torch.rand(len(lengths)) + 0.5
    tensors = [t.to(device) for t in (x, weight, seqlens, cu_seqlens, y_scale)]
    return SimpleNamespace(
        tensors=tensors,
        out=torch.full((total, n), float("nan"), dtype=torch.bfloat16, device=device),
        expected=reference.group_gemm(x, weight, seqlens, cu_seqlens, y_scale).to(device),
    )


def run(config, p, blocks=2, seed=0):
    with simulator.seed(seed, preempt=0.2 if seed % 2 else 0.0):
        return HpcOpsGroupGemm(*p.tensors, p.out, config, blocks)()


SMALL = HpcOpsConfig(tile_m=16, stages=3, max_groups=8)
PATTERNS = {
    "empty groups": [0, 3, 0, 0, 9, 0],
    "one row": [1],
    "an exact tile, and one row more": [16, 17],
    "all in one group": [0, 40, 0],
    "no rows": [0, 0],
}


@hopper
@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_group_sizes(pattern, schedule, device):
    p = make_problem(PATTERNS[pattern], device=device)
    assert mismatch(run(SMALL._replace(schedule=schedule), p), p.expected) is None


@hopper
@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_map_for_all_rows(pattern, device):
    p = make_problem(PATTERNS[pattern], device=device)
    assert mismatch(run(SMALL._replace(whole_x=True), p), p.expected) is None


@hopper
@pytest.mark.parametrize("tile_m", [8, 24, 32, 48, 64])
def test_tile_sizes(tile_m, device):
    p = make_problem([5, 30], device=device)
    assert mismatch(run(SMALL._replace(tile_m=tile_m, stages=2), p), p.expected) is None


@hopper
@pytest.mark.parametrize("n, k", [(64, 128), (72, 320), (256, 128)])
def test_sizes_that_are_no_multiples_of_a_tile(n, k, device):
    p = make_problem([5, 0, 12], n, k, device=device)
    assert mismatch(run(SMALL, p, blocks=3), p.expected) is None


@hopper
@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("seed", range(6))
def test_result_does_not_depend_on_thread_order(seed, schedule, device):
    p = make_problem([18, 2, 30], k=512, device=device)
    first = run(SMALL._replace(schedule=schedule), p).clone()
    assert mismatch(first, p.expected) is None
    p.out.fill_(float("nan"))
    assert torch.equal(run(SMALL._replace(schedule=schedule), p, seed=seed).nan_to_num(), first.nan_to_num())


@hopper
def test_tiles_are_counted(device):
    """The maximum of 256 groups, a number that is no multiple of 8, and one group too many."""
    lengths = torch.arange(256, dtype=torch.int32) % 41
    for groups in (256, 250):
        seqlens = lengths[:groups].to(device)
        starts = torch.cat([torch.zeros(1), seqlens.cpu().cumsum(0)]).int().to(device)
        x, weight = (torch.zeros(shape, device=device).to(FP8) for shape in ((int(starts[-1]), 16), (groups, 8, 16)))
        out = torch.zeros(len(x), 64, dtype=torch.bfloat16, device=device)[:, :8].contiguous()
        made = HpcOpsGroupGemm(
            x, weight, seqlens, starts, torch.ones(groups, device=device), out, HpcOpsConfig(tile_m=16), 1
        )
        made.update_maps()
        tiles = (seqlens.cpu() + 15) // 16
        assert torch.equal(made.tiles.cpu(), tiles)
        assert torch.equal(made.cu_tiles.cpu()[1:], tiles.cumsum(0).int()) and int(made.cu_tiles[0]) == 0
    with pytest.raises(ValueError, match="weight has 257 groups"):
        HpcOpsGroupGemm(
            x, torch.zeros(257, 8, 16).to(FP8), seqlens, starts, seqlens, out, HpcOpsConfig(max_groups=512), 1
        )


# Wrong kernels

REPLACE = "                replace_rows(smem_maps, MAP_BYTES, rows)\n"
CHANGE = f"""            if lane == 1:
                tensormap_replace_global_address(smem_maps, MAP_BYTES, y, first * n)
{REPLACE}"""
SYNC = "            cuda.syncwarp()\n"
COPY = "            tensormap_cp_fenceproxy(maps, 2 * MAP_BYTES * g + MAP_BYTES, smem_maps, MAP_BYTES)\n"
PUBLISH = f"            tensormap_cp_fenceproxy(maps, 2 * MAP_BYTES * g, smem_maps, 0)\n{COPY}"
PHASE = "stage, phase = int32(0), uint32(1)\n        g, tiles_before"
WRONG = {
    "the map of x is not acquired": (
        group_gemm,
        "                    fence_proxy_tensormap_acquire_gpu(maps, td_x)\n",
        "",
    ),
    "the map of y is not acquired": (
        group_gemm,
        "                        fence_proxy_tensormap_acquire_gpu(maps, td_y)\n",
        "",
    ),
    "a map is not published": (update_grouped_tma, COPY, ""),
    "a map is published before it is changed": (update_grouped_tma, f"{CHANGE}{SYNC}{PUBLISH}", f"{PUBLISH}{CHANGE}"),
    "a map keeps its number of rows": (update_grouped_tma, REPLACE, ""),
    "a map is changed before it is copied": (update_grouped_tma, f"{SYNC}            # A map", "            # A map"),
    "the producer starts with the consumers' phase": (group_gemm, PHASE, PHASE.replace("(1)", "(0)")),
    "a stage is filled while it is read": (
        group_gemm,
        "                    mbarrier_wait_parity(barriers, empty + stage, phase)\n",
        "",
    ),
    "the output tile is stored before it is written": (
        group_gemm,
        "                fence_proxy_async_shared()\n                bar_sync(1 + warpgroup, 128)\n",
        "",
    ),
    "the output tile is overwritten while TMA reads it": (
        group_gemm,
        "                    wait_read()  # the TMA store of the previous tile has read the output tile\n",
        "                    pass\n",
    ),
    "a tile is skipped": (group_gemm, "tile = int32(cuda.blockIdx.x)", "tile = int32(cuda.blockIdx.x + 1)"),
}


@simulated
@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernels_are_rejected(what, monkeypatch):
    module, right, wrong = WRONG[what]
    made = changed(module, right, wrong)
    name = "make_kernel" if module is group_gemm else "make_update_grouped_tma"
    monkeypatch.setattr(module, name, made[name])
    for seed in range(8):
        p = make_problem([11, 21, 5], k=768)
        try:
            out = run(SMALL._replace(stages=2), p, blocks=1, seed=seed)
        except simulator.SimulatorError:
            return
        if mismatch(out, p.expected):
            return
    pytest.fail(f"the check accepts a kernel in which {what}")


@simulated
def test_a_scheduler_that_skips_a_tile_is_rejected():
    def horizontal(*arguments):
        g, tiles_before, m, n = host.horizontal(*arguments)
        return (g, tiles_before, m, n) if n or m < 1 else (g, tiles_before, m - 1, n)

    found = sum(schedule("horizontal", [2, 1], 2, 3, SimpleNamespace(horizontal=horizontal)), [])
    assert len(set(found)) < 6


# Machine code; no GPU is needed

SOURCE = "from moe_numba.course.lessons.grouped_gemm.hpc_ops_port import group_gemm, update_grouped_tma"
MAIN = ("tensormap", "tensormap", "uint8*", "int32*", "int32*", "int32*", "float32*", "int32", "int32", "int32")
UPDATE = ("tensormap",) * 2 + ("uint8*", "uint8*", "uint16*", *("int32*",) * 4, *("int32",) * 3)
CONFIGS = {
    "8": dict(tile_m=8),
    "16": dict(tile_m=16, schedule="horizontal"),
    "48": dict(tile_m=48),
    "64": dict(tile_m=64),
    "64, horizontal": dict(tile_m=64, schedule="horizontal"),
    "128": dict(tile_m=128, stages=5),
    "one map of x": dict(tile_m=64, whole_x=True),
}


@pytest.fixture(scope="module")
def reports():
    requests = {
        name: (f"group_gemm.make_kernel(group_gemm.HpcOpsConfig(**{config}))[0]", MAIN, group_gemm.THREADS, True)
        for name, config in CONFIGS.items()
    }
    update = "update_grouped_tma.make_update_grouped_tma(64)", UPDATE, update_grouped_tma.THREADS, True
    return compile_apart(SOURCE, {"update_grouped_tma": update, **requests})


def opcodes(report):
    return {opcode.split(".")[0] for opcode in report.opcodes}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_main_kernel_uses_hopper_instructions(name, reports):
    assert {"QGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "STSM", "UTMACCTL"} <= opcodes(reports[name])


def test_a_map_is_changed_by_plain_stores(reports):
    """On sm_90a ``tensormap.replace`` is a store to shared memory, and the copy to global memory a word per lane."""
    found = opcodes(reports["update_grouped_tma"])
    assert {"STS", "ATOMG", "SHFL"} <= found
    assert not any(opcode.startswith(("UTMA", "UBLKCP", "DEPBAR")) for opcode in found)


@pytest.mark.parametrize("name", ["update_grouped_tma", *CONFIGS])
def test_no_compiler_warnings_spills_or_calls(name, reports):
    assert reports[name].complaints == [] and reports[name].spilled_bytes == 0
    assert "CALL" not in opcodes(reports[name])


@simulated
def test_invalid_arguments_are_refused():
    p = make_problem([3])
    with pytest.raises(ValueError, match="weight has 1 groups; at most 0 are allowed"):
        HpcOpsGroupGemm(*p.tensors, p.out, HpcOpsConfig(max_groups=0))
    with pytest.raises(ValueError, match="launch of update_grouped_tma: no argument is a tensor"):
        launch(update_grouped_tma.make_update_grouped_tma(16), 1, 32, 5)


@pytest.mark.parametrize(
    "config, message",
    [
        (HpcOpsConfig(tile_m=20), "tile_m=20.* a multiple of 8"),
        (HpcOpsConfig(tile_m=256, stages=8), "stages=8.* fit 232448"),
    ],
)
def test_the_factory_refuses_shapes(config, message):
    with pytest.raises(ValueError, match=message):
        group_gemm.make_kernel(config)
