"""Planted bugs in the block-scaled grouped GEMM."""

from .mutant import mutant

KERNEL = "moe_numba/grouped_gemm/block_scaled/kernel.py"
EPILOGUE = "moe_numba/grouped_gemm/block_scaled/epilogue.py"
TESTS = "tests/grouped_gemm/test_grouped_gemm_block_scaled.py"
SIZES = (f"{TESTS}::test_group_sizes[empty groups]",)
EARLY = (f"{TESTS}::test_early_test_of_the_next_stage[lengths0]",)
PAIRS = (f"{TESTS}::test_pairs_of_tiles[lengths2-192]",)
GATHERED = (f"{TESTS}::test_gather_with_sizes_that_are_no_multiples_of_a_tile[lengths-64-64]",)
SILU = (f"{TESTS}::test_silu_and_mul[128-320-lengths0-False]",)

MUTANTS = [
    mutant(
        "B01",
        "wrong phase: early test of the stage that was just released",
        EARLY,
        (
            KERNEL,
            "                        stage, phase = advance(stage, phase)\n                        if tests_early:\n",
            "                        if tests_early:\n",
        ),
        (
            KERNEL,
            "ready = mbarrier_test_wait_parity(smem.barriers, full + stage, phase)\n",
            "ready = mbarrier_test_wait_parity(smem.barriers, full + stage, phase)\n"
            "                        stage, phase = advance(stage, phase)\n",
        ),
    ),
    mutant(
        "B02",
        "a TMA store still reads shared memory when the CTA ends",
        PAIRS,
        (
            KERNEL,
            "            if lane == 0:  # TMA may still read the warp's epilogue buffers\n"
            "                bulk_wait()\n",
            "",
        ),
    ),
    mutant(
        "B03",
        "missing barrier: other warps read the number of tiles",
        SIZES,
        (
            KERNEL,
            "            smem.i32[uint32(tiles_offset)] = tiles\n        cuda.syncthreads()\n",
            "            smem.i32[uint32(tiles_offset)] = tiles\n        cuda.syncwarp()\n",
        ),
    ),
    mutant(
        "B04",
        "missing proxy fence before TMA stores a buffer",
        PAIRS,
        (EPILOGUE, "    fence_proxy_async_shared()\n", ""),
    ),
    mutant(
        "B05",
        "stale buffer: a tile is described before its stage is empty",
        SILU,
        (
            KERNEL,
            "                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n"
            "                    published",
            "                    published",
        ),
    ),
    mutant(
        "B06",
        "wrong lane: a pair of FP8 columns comes from two lanes away",
        SILU,
        (EPILOGUE, "int32(first if odd else second), 1))", "int32(first if odd else second), 2))"),
    ),
    mutant(
        "B07",
        "__syncwarp() removed before a stage is released",
        SIZES,
        (
            KERNEL,
            "                        cuda.syncwarp()\n"
            "                        if lane == 0:\n"
            "                            release_stage(smem.barriers, empty + stage)\n"
            "                        stage, phase = advance(stage, phase)\n"
            "                        if tests_early",
            "                        if lane == 0:\n"
            "                            release_stage(smem.barriers, empty + stage)\n"
            "                        stage, phase = advance(stage, phase)\n"
            "                        if tests_early",
        ),
    ),
    mutant(
        "B08",
        "gathered rows are not awaited and fenced before the arrival",
        GATHERED,
        (KERNEL, "                                wait_rows()\n", ""),
    ),
    mutant(
        "B09",
        "first cluster barrier removed: a peer may not have initialised its barriers",
        PAIRS,
        (
            KERNEL,
            "        if pairs:\n"
            "            cuda.syncwarp()\n"
            "            barrier_cluster_arrive()\n"
            "            barrier_cluster_wait()\n"
            "        griddepcontrol_wait()",
            "        griddepcontrol_wait()",
        ),
    ),
]
