"""Checks of what the article on hpc-ops' grouped GEMM says about its code and about TMA, many in the simulator."""

import math
from functools import cache
from itertools import accumulate

import torch
from numba import cuda, int32, uint8, uint32, uint64
from torch.utils._python_dispatch import TorchDispatchMode

from moe_numba import simulator
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port import launch as hpc_ops
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.group_gemm import HpcOpsConfig
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.scheduler import select_tile_m
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.update_grouped_tma import MAP_BYTES
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.verdicts import Found
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    mbarrier_wait_parity,
)
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_gpu
from moe_numba.ptx.tma import tma_load_2d, tma_load_3d
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart
from moe_numba.runtime.tensor_map import TensorMap

E4M3, BOX_BYTES = torch.float8_e4m3fn, 8 * 128
TILES = {"a": 3, "b": 0, "c": 4, "d": 2}  # of the groups in the example of an exclusive scan


# What runs in the simulator. Results are plain, since they may come from another process.


def simulated():
    """Run the kernels of all checks in the simulator."""
    return {
        "new barrier": _new_barrier(),
        "flat box": _box((1, 8, 128)),
        "box of two groups": _box((2, 4, 128)),
        "other order": _is_refused((4, 8, 1)),
        "bytes after the copy": _box((1, 8, 128), True),
        "scan": _scan(),
        "with acquire": _loads_of_groups(True),
        "without acquire": _loads_of_groups(False),
    }


@cache
def _simulated():
    return in_simulator(simulated)


@cuda.jit
def try_new_barrier(answers):
    barriers = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(barriers, 0, 1)
        fence_mbarrier_init()
        for phase in range(2):
            answers[phase] = mbarrier_try_wait_parity(barriers, 0, uint32(phase))


def _new_barrier():
    """Return for phase 0 and 1 whether a thread may pass a new mbarrier."""
    answers = torch.full((2,), -7, dtype=torch.int32)
    launch(try_new_barrier, 1, 32, answers)
    return [bool(answer) for answer in answers]


@cuda.jit
def load_box(map_weight, out, k, n, group, bytes_after):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    if cuda.threadIdx.x == 0:
        mbarrier_init(barriers, BOX_BYTES // 8, 1)
        fence_mbarrier_init()
        if not bytes_after:
            mbarrier_arrive_expect_tx(barriers, BOX_BYTES // 8, BOX_BYTES)
        tma_load_3d(smem, 0, map_weight, 0, k, n, group, barriers, BOX_BYTES // 8)
        if bytes_after:
            mbarrier_arrive_expect_tx(barriers, BOX_BYTES // 8, BOX_BYTES)
    cuda.syncthreads()
    mbarrier_wait_parity(barriers, BOX_BYTES // 8, uint32(0))
    for i in range(cuda.threadIdx.x, BOX_BYTES, 32):
        out[i] = smem[i]


def _weight():
    return torch.randint(0, 256, (4, 64, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _box(shape, bytes_after=False, seeds=4):
    """Load a box of weight (groups, n, k) by a 3-D coordinate; return whether it is the box that PTX describes."""
    weight, right = _weight(), []
    k, n, group = 128, 40, 1
    for seed in range(seeds):
        out = torch.zeros(BOX_BYTES, dtype=torch.uint8)
        arguments = TensorMap(weight, shape), out, k, n, group, bytes_after
        with simulator.seed(seed):
            launch(load_box, 1, 32, *arguments, shared_bytes=BOX_BYTES + 8)
        box = weight[group : group + shape[0], n : n + shape[1], k : k + shape[2]]
        right.append(torch.equal(out, box.reshape(-1)))
    return all(right)


def _is_refused(shape):
    """Return why TMA refuses a box of weight, or an empty string."""
    try:
        TensorMap(_weight(), shape)
    except ValueError as error:
        return str(error)
    return ""


def _problem(seqlens, k=128, n=128):
    """Make hpc-ops' grouped GEMM of groups with these numbers of rows; x has random bytes."""
    lengths = torch.tensor(seqlens, dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(seqlens)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (sum(seqlens), k), dtype=torch.uint8, generator=generator).view(E4M3)
    weight = torch.zeros(len(seqlens), n, k, dtype=torch.uint8).view(E4M3)
    out = torch.zeros(len(x), n, dtype=torch.bfloat16)
    scale = torch.ones(len(seqlens))
    return hpc_ops.HpcOpsGroupGemm(x, weight, lengths, starts, scale, out, HpcOpsConfig(tile_m=16), 1)


def _scan():
    """Return the prefix sum of the groups' tiles that ``update_grouped_tma`` writes, and the total."""
    problem = _problem([16 * tiles for tiles in TILES.values()])
    problem.update_maps()
    *prefix, total = problem.cu_tiles.tolist()
    return [prefix, total]


@cuda.jit
def load_group(maps, out, group, acquire):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    if cuda.threadIdx.x == 0:
        mbarrier_init(barriers, 16 * 128 // 8, 1)
        fence_mbarrier_init()
        if acquire:
            fence_proxy_tensormap_acquire_gpu(maps, 2 * MAP_BYTES * group)
        mbarrier_arrive_expect_tx(barriers, 16 * 128 // 8, 16 * 128)
        tma_load_2d(smem, 0, maps, 2 * MAP_BYTES * group, 0, int32(0), barriers, 16 * 128 // 8)
    cuda.syncthreads()
    mbarrier_wait_parity(barriers, 16 * 128 // 8, uint32(0))
    for i in range(cuda.threadIdx.x, 16 * 128, 32):
        out[i] = smem[i]


def _loads_of_groups(acquire):
    """Load the first tile of each group by the map that the device made; return what is wrong with it."""
    seqlens = [5, 20, 16]
    problem = _problem(seqlens)
    problem.update_maps()
    rows = problem.x.view(torch.uint8)
    for group, length in enumerate(seqlens):
        out = torch.zeros(16 * 128, dtype=torch.uint8)
        try:
            launch(load_group, 1, 32, problem.maps, out, group, acquire, shared_bytes=16 * 128 + 8)
        except simulator.SimulatorError as error:
            return type(error).__name__
        first = int(problem.cu_seqlens[group])
        wanted = torch.zeros(16, 128, dtype=torch.uint8)
        wanted[: min(length, 16)] = rows[first : first + min(length, 16)]
        if not torch.equal(_unswizzled(out.view(16, 8, 16)), wanted):
            return f"group {group} is wrong"
    return ""


def _unswizzled(tile):
    """Undo TMA's 128-byte swizzle of rows of eight 16-byte chunks."""
    row, chunk = torch.arange(16)[:, None], torch.arange(8)
    return tile[row, chunk ^ (row % 8)].reshape(16, 128)


# The torch version


def loop_of_gemms(x, weight, seqlens, cu_seqlens, scale):
    """Multiply group by group, as the article's torch version does: a slice, a GEMM and a copy for each group."""
    y = torch.zeros(len(x), weight.shape[1], dtype=torch.bfloat16)
    for group, (start, length) in enumerate(zip(cu_seqlens.tolist(), seqlens.tolist())):
        if length:
            rows = x[start : start + length]
            y[start : start + length] = torch._scaled_mm(
                rows, weight[group].t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
            )
    return y


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@cache
def _loop():
    """Run the loop on the CPU with four groups, one of them empty; return its operations, and its scale."""
    generator = torch.Generator().manual_seed(0)
    seqlens = torch.tensor([16, 0, 32, 16])
    starts = torch.tensor([0, 16, 16, 48])
    x = torch.randn(64, 32, generator=generator).to(E4M3)
    weight = torch.randn(4, 16, 32, generator=generator).to(E4M3)
    with _Counter() as counter:
        y = loop_of_gemms(x, weight, seqlens, starts, torch.tensor(0.5))
    plain = loop_of_gemms(x, weight, seqlens, starts, torch.tensor(1.0))
    ratio = float((y.float() / plain.float()).nanmedian())
    gemms, copies = (sum(part in name for name in counter.names) for part in ("_scaled_mm", "copy_"))
    return gemms, copies, ratio


def gemms_of_the_loop() -> Found:
    gemms, _, _ = _loop()
    return Found(gemms / 3, f"{gemms} GEMMs for 3 groups with tokens and one without")


def copies_of_the_loop() -> Found:
    _, copies, _ = _loop()
    return Found(copies, f"the loop copies {copies} results into y, for 3 groups with tokens")


def scale_of_the_loop() -> Found:
    *_, ratio = _loop()
    times = math.log2(1 / ratio)
    return Found(times, f"with a scale of 0.5 the result is {ratio:g} times the unscaled one: applied {times:g} times")


# Tiles, scan, strides


def tiles_as_n() -> Found:
    """Count the kTileM of the article's table that wgmma takes as its n, and as its m."""
    tiles = sorted({select_tile_m(average) for average in range(1, 257)})
    as_n = [tile for tile in tiles if tile % 8 == 0 and 8 <= tile <= 256]
    as_m = [tile for tile in tiles if tile % 64 == 0]
    return Found(
        len(as_n), f"of kTileM {tiles} wgmma takes {len(as_n)} as n, a multiple of 8, and {len(as_m)} as m, which is 64"
    )


def exclusive_scan() -> Found:
    prefix, total = _simulated()["scan"]
    values = list(TILES.values())
    wrong = (prefix != [sum(values[:i]) for i in range(4)]) + (total != sum(values))
    return Found(int(wrong), f"{values} gives {prefix}, in all {total}")


def strides_of_groups() -> Found:
    """Compare the strides of the groups' slices of x and y."""
    x, y, starts = torch.zeros(100, 64), torch.zeros(100, 32), (0, 20, 84, 100)
    strides = {(x[a:b].stride(), y[a:b].T.stride()) for a, b in zip(starts, starts[1:])}
    return Found(len(strides), f"{sorted(strides)} for groups of {[b - a for a, b in zip(starts, starts[1:])]} rows")


# TMA and mbarriers


def new_barrier_passes_phase_0() -> Found:
    zero, one = _simulated()["new barrier"]
    may = {True: "passes", False: "waits"}
    return Found(int(zero), f"on a new barrier a thread {may[zero]} for phase 0 and {may[one]} for phase 1")


def bytes_after_the_copy() -> Found:
    right = _simulated()["bytes after the copy"]
    return Found(
        int(not right), "the box arrives, with the bytes announced after the copy" if right else "it goes wrong"
    )


def flat_box() -> Found:
    right = _simulated()["flat box"]
    return Found(
        int(not right), f"a box of (1, 8, 128) at a 3-D coordinate is {'' if right else 'not '}the expected one"
    )


def box_of_two_groups() -> Found:
    right = _simulated()["box of two groups"]
    return Found(int(not right), f"a box of (2, 4, 128) brings rows of {'two groups' if right else 'something else'}")


def box_in_the_other_order() -> Found:
    refused = _simulated()["other order"].replace("have 1 bytes", "have 1 byte")
    return Found(int(not refused), f"TMA refuses it: {refused}" if refused else "TMA takes a box of (4, 8, 1)")


def load_without_acquire() -> Found:
    simulated = _simulated()
    if simulated["with acquire"]:
        return Found(-1, f"with it too: {simulated['with acquire']}")
    said = simulated["without acquire"]
    return Found(int(bool(said)), f"without it the simulator reports {said or 'nothing'}")


_REPLACE = """
from numba import cuda
from moe_numba.ptx.intrinsic import POINTER, instruction

def no_simulation(pointer, index, value): pass

in_{name} = instruction("tensormap.replace.tile.global_address.{space}.b1024.b64 [$0], $1;", "void", POINTER, "u64",
                        simulate=no_simulation)

@cuda.jit
def replace_{name}(map, value):
    in_{name}(map, 0, value)
"""


@cache
def replace_in_global_memory() -> Found | None:
    """Compile tensormap.replace with a map in global memory, for sm_90a."""
    source = _REPLACE.format(name="global", space="global")
    request = {"global": ("replace_global", ("uint8*", "uint64"), 32, False)}
    try:
        compile_apart("from numba import cuda\n@cuda.jit\ndef empty(): pass\n", {"empty": ("empty", (), 32, False)})
    except (RuntimeError, ImportError):
        return None  # no compiler
    try:
        compile_apart(source, request)
    except RuntimeError as error:
        return Found(0, f"ptxas refuses it: {str(error).splitlines()[-1]}")
    return Found(
        1, "PTX has a form for global memory too, tensormap.replace.tile.global_address.global, and it compiles"
    )
