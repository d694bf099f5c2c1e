"""The document's grouped GEMM: its schedulers, the maps that it makes on the device, its kernel, and wrong ones."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.hopper import hopper
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_kernels import changed

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split

from moe_numba.course.articles.hpc_ops import group_gemm, update_grouped_tma
from moe_numba.course.articles.hpc_ops.group_gemm import Constants, Layout
from moe_numba.course.articles.hpc_ops.launch import Run
from moe_numba.course.articles.hpc_ops.scheduler import host, tokens_of_tile, use_horizontal
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart

ROOT = Path(__file__).parents[1]
simulated = pytest.mark.skipif(not simulator.ENABLED, reason="a GPU leaves this undefined: set MOE_NUMBA_SIMULATE=1")


# The schedulers


def walk(name, tiles, across, blocks, schedulers=host):
    """Each block's tiles, (group, m, n), in its order."""
    table, groups = list(tiles), len(tiles)
    if name == "vertical":
        table = [sum(tiles[:g]) for g in range(groups + 1)]
    found = []
    for first in range(blocks):
        block, g, before, mine = first, 0, 0, []
        while g < groups:
            g, before, m, n = getattr(schedulers, name)([-1, *table], 1, groups, across, block, g, before)
            if g < groups:
                mine.append((int(g), int(m), int(n)))
            block += blocks
        found.append(mine)
    return found


@pytest.mark.parametrize("name", ["horizontal", "vertical"])
@given(tiles=st.lists(st.integers(0, 5), min_size=1, max_size=12), across=st.integers(1, 6), blocks=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_every_tile_once(name, tiles, across, blocks):
    found = sum(walk(name, tiles, across, blocks), [])
    wanted = {(g, m, n) for g, count in enumerate(tiles) for m in range(count) for n in range(across)}
    assert len(found) == len(set(found)) and set(found) == wanted


def test_who_computes_neighbours():
    """Four blocks, two groups of 2 and 1 tiles of tokens, two tiles of weights."""
    assert [own[0] for own in walk("horizontal", [2, 1], 2, 4)] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [own[0] for own in walk("vertical", [2, 1], 2, 4)] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1)]


def test_the_documents_choices():
    averages = {0: 16, 1: 16, 16: 16, 17: 32, 32: 32, 48: 48, 49: 64, 4096: 64}
    assert {average: tokens_of_tile(average) for average in averages} == averages
    assert [use_horizontal(*nk) for nk in ((4096, 7168), (1024, 7168), (4096, 1024))] == [False, True, True]


@pytest.mark.parametrize("tokens, documented", [(8, 141312), (16, 151552), (32, 172032), (48, 192512), (64, 212992)])
def test_shared_memory_is_that_of_hpc_ops(tokens, documented):
    layout = Layout(Constants(tokens=tokens))
    assert layout.readable * 8 == documented  # without barriers and the scheduler's table
    assert layout.writable == layout.readable + 8 and layout.tiles_at * 4 == (layout.writable + 8) * 8
    assert layout.bytes == layout.tiles_at * 4 + 4 * 257 <= 227 * 1024


# The kernels


def case(lengths, n=128, k=256, seed=0, device="cpu"):
    """Random inputs; right is NaN in rows of no group, of which there are 3 at the end."""
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
        right=reference.group_gemm(x, weight, seqlens, cu_seqlens, y_scale).to(device),
    )


def run(constants, given, blocks=2, seed=0):
    with simulator.seed(seed, preempt=0.2 if seed % 2 else 0.0):
        return Run(*given.tensors, given.out, constants, blocks)()


SMALL = Constants(tokens=16, stages=3, groups=8)
PATTERNS = {
    "empty groups": [0, 3, 0, 0, 9, 0],
    "one row": [1],
    "an exact tile, and one row more": [16, 17],
    "all in one group": [0, 40, 0],
    "no row at all": [0, 0],
}


@hopper
@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_groups_of_all_sizes(pattern, schedule, device):
    given = case(PATTERNS[pattern], device=device)
    assert mismatch(run(SMALL._replace(schedule=schedule), given), given.right) is None


@hopper
@pytest.mark.parametrize("pattern", PATTERNS)
def test_one_map_of_all_tokens(pattern, device):
    given = case(PATTERNS[pattern], device=device)
    assert mismatch(run(SMALL._replace(whole_x=True), given), given.right) is None


@hopper
@pytest.mark.parametrize("tokens", [8, 24, 32, 48, 64])
def test_tiles_of_all_sizes(tokens, device):
    given = case([5, 30], device=device)
    assert mismatch(run(SMALL._replace(tokens=tokens, stages=2), given), given.right) is None


@hopper
@pytest.mark.parametrize("n, k", [(64, 128), (72, 320), (256, 128)])
def test_sizes_that_are_no_multiples_of_a_tile(n, k, device):
    given = case([5, 0, 12], n, k, device=device)
    assert mismatch(run(SMALL, given, blocks=3), given.right) is None


@hopper
@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_things_does_not_matter(seed, schedule, device):
    given = case([18, 2, 30], k=512, device=device)
    first = run(SMALL._replace(schedule=schedule), given).clone()
    assert mismatch(first, given.right) is None
    given.out.fill_(float("nan"))
    assert torch.equal(run(SMALL._replace(schedule=schedule), given, seed=seed).nan_to_num(), first.nan_to_num())


@hopper
def test_tiles_are_counted(device):
    """256 groups, the most that there may be; 250; and the maps are used again for other lengths."""
    lengths = torch.arange(256, dtype=torch.int32) % 41
    for groups in (256, 250):
        seqlens = lengths[:groups].to(device)
        starts = torch.cat([torch.zeros(1), seqlens.cpu().cumsum(0)]).int().to(device)
        x, weight = (torch.zeros(shape, device=device).to(FP8) for shape in ((int(starts[-1]), 16), (groups, 8, 16)))
        out = torch.zeros(len(x), 64, dtype=torch.bfloat16, device=device)[:, :8].contiguous()
        made = Run(x, weight, seqlens, starts, torch.ones(groups, device=device), out, Constants(tokens=16), 1)
        made.update()
        tiles = (seqlens.cpu() + 15) // 16
        assert torch.equal(made.tiles.cpu(), tiles)
        assert torch.equal(made.cu_tiles.cpu()[1:], tiles.cumsum(0).int()) and int(made.cu_tiles[0]) == 0
    with pytest.raises(ValueError, match="weight has 257 groups"):
        Run(x, torch.zeros(257, 8, 16).to(FP8), seqlens, starts, seqlens, out, Constants(groups=512), 1)


# The checks must be able to fail

REPLACE = "                replace_rows(copies, MAP, rows)\n"
CHANGE = f"""            if lane == 1:
                tensormap_replace_global_address(copies, MAP, y, first * n)
{REPLACE}"""
MEET = "            cuda.syncwarp()\n"
CP = "            tensormap_cp_fenceproxy(maps, 2 * MAP * g + MAP, copies, MAP)\n"
PUBLISH = f"            tensormap_cp_fenceproxy(maps, 2 * MAP * g, copies, 0)\n{CP}"
ACQUIRE = "                    fence_proxy_tensormap_acquire_gpu(maps, td_x)\n"
PHASE = "stage, phase = int32(0), uint32(1)\n        g, before"
WRONG = {
    "the map of x is not acquired": (group_gemm, ACQUIRE, ""),
    "the map of y is not acquired": (
        group_gemm,
        "                        fence_proxy_tensormap_acquire_gpu(maps, td_y)\n",
        "",
    ),
    "a map is not published": (update_grouped_tma, CP, ""),
    "a map is published before it is changed": (update_grouped_tma, f"{CHANGE}{MEET}{PUBLISH}", f"{PUBLISH}{CHANGE}"),
    "a map keeps its rows": (update_grouped_tma, REPLACE, ""),
    "a map is changed before it is there": (
        update_grouped_tma,
        f"{MEET}            rows, first",
        "            rows, first",
    ),
    "the producer starts with the consumers' phase": (group_gemm, PHASE, PHASE.replace("(1)", "(0)")),
    "a stage is filled while it is read": (
        group_gemm,
        "                    mbarrier_wait_parity(bars, writable + stage, phase)\n",
        "",
    ),
    "results are stored before they are written": (
        group_gemm,
        "                fence_proxy_async_shared()\n                bar_sync(1 + half, 128)\n",
        "",
    ),
    "a tile is overwritten while it is stored": (
        group_gemm,
        "                    wait_read()  # of the tile before\n",
        "                    pass\n",
    ),
    "a tile is skipped": (group_gemm, "block = int32(cuda.blockIdx.x)", "block = int32(cuda.blockIdx.x + 1)"),
}


@simulated
@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernels_are_rejected(what, monkeypatch):
    module, right, wrong = WRONG[what]
    made = changed(module, right, wrong)
    for name in ("make_kernel", "make_update_grouped_tma"):
        if name in made:
            monkeypatch.setattr(group_gemm if module is group_gemm else update_grouped_tma, name, made[name])
    for seed in range(8):
        given = case([11, 21, 5], k=768)
        try:
            out = run(SMALL._replace(stages=2), given, blocks=1, seed=seed)
        except simulator.SimulatorError:
            return
        if mismatch(out, given.right):
            return
    pytest.fail(f"the check let a kernel pass in which {what}")


@simulated
def test_a_scheduler_that_skips_a_tile_is_rejected():
    def horizontal(tiles, at, groups, across, block, g, before):
        g, before, m, n = host.horizontal(tiles, at, groups, across, block, g, before)
        return (g, before, m, n) if n or m < 1 else (g, before, m - 1, n)

    found = sum(walk("horizontal", [2, 1], 2, 3, SimpleNamespace(horizontal=horizontal)), [])
    assert len(set(found)) < 6


# What the compiler makes of it; no GPU is needed

SOURCE = "from moe_numba.course.articles.hpc_ops import group_gemm, update_grouped_tma"
MAIN = ("tensormap", "tensormap", "uint8*", "int32*", "int32*", "int32*", "float32*", "int32", "int32", "int32")
UPDATE = ("tensormap",) * 2 + ("uint8*", "uint8*", "uint16*", *("int32*",) * 4, *("int32",) * 3)
FORMS = {
    "8": dict(tokens=8),
    "16": dict(tokens=16, schedule="horizontal"),
    "48": dict(tokens=48),
    "64": dict(tokens=64),
    "64, horizontal": dict(tokens=64, schedule="horizontal"),
    "128": dict(tokens=128, stages=5),
    "one map of x": dict(tokens=64, whole_x=True),
}


@pytest.fixture(scope="module")
def reports():
    requests = {
        form: (f"group_gemm.make_kernel(group_gemm.Constants(**{constants}))[0]", MAIN, group_gemm.THREADS, True)
        for form, constants in FORMS.items()
    }
    update = "update_grouped_tma.make_update_grouped_tma(64)", UPDATE, update_grouped_tma.THREADS, True
    return compile_apart(SOURCE, {"update_grouped_tma": update, **requests})


def opcodes(report):
    return {opcode.split(".")[0] for opcode in report.opcodes}


@pytest.mark.parametrize("form", FORMS)
def test_the_main_kernel_has_hoppers_instructions(form, reports):
    assert {"QGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG", "STSM", "UTMACCTL"} <= opcodes(reports[form])


def test_a_map_is_changed_by_plain_stores(reports):
    """On sm_90a ``tensormap.replace`` is a store to shared memory, and the copy to global memory a word a lane."""
    found = opcodes(reports["update_grouped_tma"])
    assert {"STS", "ATOMG", "SHFL"} <= found
    assert not any(opcode.startswith(("UTMA", "UBLKCP", "DEPBAR")) for opcode in found)


@pytest.mark.parametrize("form", ["update_grouped_tma", *FORMS])
def test_the_compiler_gave_nothing_up(form, reports):
    assert reports[form].complaints == [] and reports[form].spilled_bytes == 0
    assert "CALL" not in opcodes(reports[form])


@simulated
def test_what_cannot_be_is_refused():
    given = case([3])
    with pytest.raises(ValueError, match="weight has 1 groups; 0 are allowed"):
        Run(*given.tensors, given.out, Constants(groups=0))
    with pytest.raises(ValueError, match="launch of update_grouped_tma: no argument is a tensor"):
        launch(update_grouped_tma.make_update_grouped_tma(16), 1, 32, 5)
