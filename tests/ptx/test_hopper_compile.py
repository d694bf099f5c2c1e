"""Compile Hopper kernels without a GPU: each instruction is emitted, and nothing is serialised or spilled."""

from functools import cache

import numpy as np
import pytest
from helpers.hopper_compile import TESTS, compile_whole
from helpers.hopper_gemm import SIGNATURE

from moe_numba import simulator  # noqa: F401  before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int64, uint8, uint32, uint64

from moe_numba.ptx.accumulators import make_fma, make_fma_columns
from moe_numba.ptx.matrix import make_load_shared
from moe_numba.ptx.mbarrier import (
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait_parity,
    mbarrier_wait_parity_cluster,
)
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_sys
from moe_numba.ptx.tma import createpolicy_evict_first, tma_load_2d, tma_load_2d_multicast_hint
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_sync, elect_sync
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor


@cache
def make_blockwise(n, steps_of_k):
    """Make the main loop of a GEMM whose partial sums are scaled per column and accumulated in float32."""
    tile, wait, fma = make_wgmma_tile(n, "e4m3"), make_wgmma_wait(n, 0), make_fma_columns(n)
    load = make_load_shared(n)
    zeros = (np.float32(0),) * (n // 2)

    @cuda.jit(launch_bounds=(384, 1))
    def blockwise(out):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(2, uint64)
        scales = cuda.shared.array(n, float32, 16)
        total = zeros
        for k in range(steps_of_k):
            mbarrier_wait_parity(barriers, 0, uint32(k & 1))
            acc = wait(tile(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, 8192)))
            total = fma(total, acc, load(scales, n // 4 * (cuda.threadIdx.x % 4)))
            if cuda.laneid == 0:
                mbarrier_arrive(barriers, 1)
        first = int64(cuda.threadIdx.x) * (n // 2)
        for j in range(n // 8):
            out[first + 4 * j], out[first + 4 * j + 1] = total[4 * j], total[4 * j + 1]
            out[first + 4 * j + 2], out[first + 4 * j + 3] = total[4 * j + 2], total[4 * j + 3]

    return blockwise


@cache
def make_early_reader(touch):
    """Make a kernel that reads accumulators before the wait (`touch`), or does not."""
    tile, wait, fma = make_wgmma_tile(64, "e4m3"), make_wgmma_wait(64, 0), make_fma(64)
    zeros = (np.float32(0),) * 32

    @cuda.jit(launch_bounds=(128, 1))
    def early_reader(out, k):
        smem = cuda.shared.array(0, uint8, 1024)
        total = zeros
        for i in range(k):
            acc = tile(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, 8192))
            if touch:
                total = fma(total, acc, float32(i))
            acc = wait(acc)
            total = fma(total, acc, float32(i))
        for j in range(8):
            out[j] = total[4 * j]

    return early_reader


@cuda.jit(launch_bounds=(128, 1))
def multicast_load(map, x):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(2, uint64)
    fence_proxy_tensormap_acquire_sys(map, 0)
    if cuda.threadIdx.x < 32 and elect_sync(FULL_MASK):
        policy = createpolicy_evict_first()
        mbarrier_arrive_expect_tx(barriers, 0, x)
        tma_load_2d(smem, 0, map, 0, x, 0, barriers, 0)
        tma_load_2d_multicast_hint(smem, 0, map, 0, x, 0, barriers, 0, 3, policy)
    mbarrier_wait_parity_cluster(barriers, 0, 0)


@cuda.jit
def barrier_between_branches(out, limit):
    """A compiler that ignores convergence could duplicate the barrier into both branches."""
    x = out[cuda.threadIdx.x]
    large = False
    if x > limit:
        x = out[x]
        large = True
    bar_sync(1, 128)
    if large:
        out[cuda.threadIdx.x] = x + 1


CONFORMANCE = {
    # kernel: its signature, and instructions that its machine code must contain
    "bulk_copies": (["float32*", "float32*", "int32"], ["UBLKCP.S.G", "UBLKCP.G.S", "FENCE.VIEW.ASYNC.S"]),
    "step_through_phases": (["int32*"], ["SYNCS.PHASECHK.TRANS64.TRYWAIT", "SYNCS.ARRIVE.TRANS64", "SYNCS.CCTL.IV"]),
    "load_box_2d": (["uint8*", "uint8*", *["int32"] * 4], ["UTMALDG.2D"]),
    "load_box_3d": (["uint8*", "uint8*", *["int32"] * 5], ["UTMALDG.3D"]),
    "store_box_2d": (["uint8*", "uint8*", *["int32"] * 3], ["UTMASTG.2D", "UTMACMDFLUSH"]),
    "store_box_3d": (["uint8*", "uint8*", *["int32"] * 4], ["UTMASTG.3D"]),
    "add_box_3d": (["float32*", "uint8*", *["int32"] * 4], ["UTMAREDG.3D.ADD"]),
    "store_float_rows": (["float32*", "float32*"], ["STS.64"]),
    "multicast_loads": (["uint8*", "uint8*", "uint8*", "int32"], ["UTMALDG.2D.MULTICAST", "UCGABAR_WAIT"]),
    "store_groups": (["uint32*", "uint32*", "uint8*", "uint8*", *["int32*"] * 3], ["UTMACCTL.IV"]),
    "store_matrices": (
        ["uint16*", "uint32*", "int32"],
        [f"STSM.16.{kind}{size}" for kind in ("M88", "MT88") for size in (".2", ".4")],
    ),
    "convert": (
        ["uint32*", "uint32*", "float32*", "float32*"],
        ["F2FP.BF16.F32.PACK_AB", "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", "F2FP.F16.E4M3.UNPACK_B"],
    ),
    "ping_pong": (["int32*"], ["BAR.ARV", "USETMAXREG.DEALLOC.CTAPOOL", "USETMAXREG.TRY_ALLOC.CTAPOOL"]),
    "elect_lane": (["int32*"], ["ELECT", "MEMBAR.ALL.SYS"]),
}
KERNELS = {
    "gemm": ("helpers.hopper_gemm", "make_gemm(4)", SIGNATURE),
    "blockwise_64": ("test_hopper_compile", "make_blockwise(64, 56)", ["float32*"]),
    "blockwise_128": ("test_hopper_compile", "make_blockwise(128, 56)", ["float32*"]),
    "early_reader": ("test_hopper_compile", "make_early_reader(True)", ["float32*", "int32"]),
    "waiting_reader": ("test_hopper_compile", "make_early_reader(False)", ["float32*", "int32"]),
    "multicast_load": ("test_hopper_compile", "multicast_load", ["uint8*", "int32"]),
    "barrier_between_branches": ("test_hopper_compile", "barrier_between_branches", ["int32*", "int32"]),
}


def _module(kernel):
    """Return the name of the test file that defines a kernel."""
    files = (TESTS / "simulator").glob("test_hopper_conformance*.py")
    return next(file.stem for file in files if f"def {kernel}(" in file.read_text())


@pytest.fixture(scope="module")
def reports():
    return compile_whole({name: (_module(name), name, types) for name, (types, _) in CONFORMANCE.items()} | KERNELS)


@pytest.mark.parametrize("name", CONFORMANCE)
def test_each_kernel_contains_its_instructions(name, reports):
    for instruction in CONFORMANCE[name][1]:
        assert reports[name].count(instruction), f"{instruction} is not in {sorted(set(reports[name].opcodes))}"
    assert reports[name].spilled_bytes == reports[name].stack_bytes == 0


def test_loads_by_an_elected_thread_have_no_loop(reports):
    """Where the compiler does not know that one thread executes a load, it adds a loop over the active threads."""
    report = reports["multicast_load"]
    assert report.count("UTMALDG") == 2 and report.count("BRA.U.ANY") == 0
    assert report.opcodes.count("UTMALDG.2D.MULTICAST") == 1
    assert reports["load_box_2d"].count("BRA.U.ANY") > 0


def test_the_gemm_has_its_instructions_and_no_spills(reports):
    report = reports["gemm"]
    assert report.complaints == [] and report.spilled_bytes == report.stack_bytes == 0 and report.registers == 168
    assert report.count("QGMMA") == 4
    for instruction in ("UTMALDG.2D", "UTMASTG.2D", "SYNCS", "USETMAXREG.DEALLOC.CTAPOOL", "STSM.16.M88.4"):
        assert report.count(instruction), instruction
    assert report.count("USETMAXREG") == 2 and report.count("FFMA") == 32


@pytest.mark.parametrize("name, max_registers", [("blockwise_64", 128), ("blockwise_128", 168)])
def test_promotion_stays_in_registers(name, max_registers, reports):
    report = reports[name]
    n = int(name.rpartition("_")[2])
    assert (
        report.complaints == []
        and report.spilled_bytes == report.stack_bytes == 0
        and report.registers <= max_registers
    )
    assert report.count("FFMA") % (n // 2) == 0 and report.count("LDS.128") % (n // 16) == 0


def test_a_named_barrier_is_one_instruction(reports):
    assert reports["barrier_between_branches"].count("BAR.SYNC") == 1


def test_reading_accumulators_early_makes_the_compiler_wait(reports):
    """The compiler inserts the wait that the kernel omits, and ptxas warns of it."""
    assert reports["early_reader"].complaints == ["C7517"]  # "wgmma.wait_group is injected"
    assert reports["waiting_reader"].complaints == []
