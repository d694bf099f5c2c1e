"""Planted bugs in the grouped GEMM with MXFP4 weights, and in the kernel that decodes them."""

from .mutant import mutant

KERNEL = "moe_numba/grouped_gemm/w4/kernel.py"
UNPACKING = "moe_numba/grouped_gemm/w4/unpacking.py"
TESTS = "tests/grouped_gemm/test_grouped_gemm_w4.py"
UNPACKED = ("tests/grouped_gemm/test_grouped_gemm_w4_unpacking.py", "-k", "not rejected and not machine_code")
MMA_SYNC = (f"{TESTS}::test_group_sizes[empty groups-mma.sync]",)
ONE_TILE = (f"{TESTS}::test_group_sizes[empty groups-one tile]",)
TWO_TILES = (f"{TESTS}::test_group_sizes[empty groups-two tiles]",)
PART_OF_A_TILE = (f"{TESTS}::test_sizes_that_are_no_multiples_of_a_tile[32-32-two tiles]",)
GATHERED = (f"{TESTS}::test_gather[mma.sync]",)
EARLY = (f"{TESTS}::test_early_weights[mma.sync-few stages]",)
# Why no test of the loops of wgmma that fills a stage twice can find a race of its own:
UNORDERED = (
    "without a planted bug, races are reported in the loops of wgmma once a stage is filled again: no __syncwarp() "
    "orders the lanes' loads of codes before lane 0 releases the stage"
)

MUTANTS = [
    mutant(
        "W01",
        "gathered rows are not awaited before their barrier's arrival",
        GATHERED,
        (
            KERNEL,
            "                            wait_rows()\n                            cuda.syncwarp()\n",
            "                            cuda.syncwarp()\n",
        ),
    ),
    mutant(
        "W02",
        "stage overwritten before it is empty (tile info)",
        EARLY,
        (
            KERNEL,
            "                        mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n"
            "                        publish_tile",
            "                        publish_tile",
        ),
    ),
    mutant(
        "W03",
        "full barrier expects the bytes of a whole stage at the end of k",
        PART_OF_A_TILE,
        (KERNEL, "warpgroups * tiles * TILE_BYTES", "warpgroups * stage_tiles * TILE_BYTES"),
    ),
    mutant(
        "W04",
        "__syncwarp() removed before lane 0 releases a stage that all lanes read",
        EARLY,
        (
            KERNEL,
            "            cuda.syncwarp()\n            if lane == 0:\n                mbarrier_arrive",
            "            if lane == 0:\n                mbarrier_arrive",
        ),
    ),
    mutant(
        "W05",
        "__syncwarp() removed after tile info is read",
        ONE_TILE,
        (KERNEL, "                cuda.syncwarp()  # lane 0 releases the stage for all lanes\n", ""),
        not_found_yet="the loop of mma.sync has a __syncwarp() of its own; " + UNORDERED,
    ),
    mutant(
        "W06",
        "registers of A overwritten, and their stage released, while wgmma reads them",
        TWO_TILES,
        (KERNEL, "            wait_tile(a_1)\n", ""),
        not_found_yet="the simulator copies registers of A when a wgmma is issued; " + UNORDERED,
    ),
    mutant(
        "W07",
        "full barrier expects one arrival of two (gathered rows)",
        GATHERED,
        (
            KERNEL,
            "mbarrier_init(smem.barriers, full + stage, 1 + gather)",
            "mbarrier_init(smem.barriers, full + stage, 1)",
        ),
    ),
    mutant(
        "W08",
        "out of bounds: weight tiles beyond n are not clamped",
        PART_OF_A_TILE,
        (KERNEL, "min(int32(info.n_tile * warpgroups + w), int32(n_tiles - 1))", "int32(info.n_tile * warpgroups + w)"),
    ),
    mutant(
        "W09",
        "__syncwarp() removed before one lane arrives for its warp",
        GATHERED,
        (
            KERNEL,
            "                            cuda.syncwarp()\n                            if lane == 0:\n",
            "                            if lane == 0:\n",
        ),
    ),
    mutant("W10", "fence.mbarrier_init removed", MMA_SYNC, (KERNEL, "            fence_mbarrier_init()\n", "")),
    mutant(
        "W11",
        "phase of an early stage: the first wait skips no stage that has its weights",
        EARLY,
        (
            KERNEL,
            "                            early = int32(early - 1)\n",
            "                            early = int32(0)\n",
        ),
    ),
    mutant(
        "W12",
        "decoded numbers keep the scale at which the grouped GEMM multiplies them",
        UNPACKED,
        (UNPACKING, "(127 + RESULT_EXPONENT << 7) * 0x10001", "(127 << 7) * 0x10001"),
    ),
    mutant(
        "W13",
        "decoded rows of up begin after those of gate of all experts",
        UNPACKED,
        (UNPACKING, "* warp + group * to_other", "* warp"),
    ),
]
