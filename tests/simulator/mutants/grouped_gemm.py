"""Planted bugs in the grouped GEMM."""

from .mutant import mutant

KERNEL, EPILOGUE = "moe_numba/grouped_gemm/wgmma/kernel.py", "moe_numba/grouped_gemm/wgmma/epilogue.py"
STORE_TILE = "moe_numba/grouped_gemm/common/store_tile.py"
GATHER, SCHEDULER = "moe_numba/grouped_gemm/common/gather.py", "moe_numba/grouped_gemm/common/scheduler.py"
TESTS = "tests/grouped_gemm/test_grouped_gemm_kernel.py"
SIZES = TESTS, "-k", "test_group_sizes and empty"
FULL_TILES = (f"{TESTS}::test_group_sizes[an exact tile, and one row more-block]",)
ONE_GROUP = (f"{TESTS}::test_group_sizes[all in one group-tensor, two subtiles]",)
EDGES = (f"{TESTS}::test_sizes_that_are_no_multiples_of_a_tile[192-320-block, two subtiles, cluster]",)
GATHERED = TESTS, "-k", "test_gather and empty"
SILU = ("tests/grouped_gemm/test_grouped_gemm.py::test_silu_and_mul[16-pertensor]",)
FAR = (f"{TESTS}::test_rows_beyond_2_31_elements",)
GATE_AND_UP = "tests/moe_layer/test_backward.py", "-k", "stores_gate_and_up and sizes1 and silu"
LAYOUTS = (f"{TESTS}::test_row_layouts",)
LOW_RANK = "tests/grouped_gemm/test_grouped_gemm_low_rank.py"
TWO_BLOCKS = LOW_RANK, "-k", "test_shapes and blocks and small and k-major"

MUTANTS = [
    mutant(
        "M01",
        "empty barrier expects one arrival too few",
        FULL_TILES,
        (KERNEL, "CONSUMER_WARPS * cluster)", "CONSUMER_WARPS * cluster - 1)"),
    ),
    mutant(
        "M04",
        "full barrier expects one arrival of two",
        SIZES,
        (KERNEL, "full + i, 2 if has_aux else 1)", "full + i, 1)"),
    ),
    mutant("M05", "wgmma.wait_group removed", SIZES, (KERNEL, "                product = wait(product)\n", "")),
    mutant(
        "M06",
        "__syncwarp() removed before a stage is released",
        SIZES,
        (
            KERNEL,
            "                if by_block:  # all lanes have read their scales, which are part of the stage\n"
            "                    cuda.syncwarp()\n",
            "",
        ),
    ),
    mutant(
        "M07",
        "__syncwarp() removed before one lane arrives for its warp",
        GATHERED,
        (
            KERNEL,
            "                            cuda.syncwarp()\n                            if lane == 0:\n",
            "                            if lane == 0:\n",
        ),
    ),
    mutant(
        "M08",
        "stage overwritten before it is empty (scales)",
        SIZES,
        (
            KERNEL,
            "                            mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n"
            "                            if gather:",
            "                            if gather:",
        ),
    ),
    mutant(
        "M10",
        "barrier removed before shared memory is reused in the epilogue",
        SILU,
        (
            EPILOGUE,
            "        bar_sync(ALL_CONSUMERS, 32 * CONSUMER_WARPS)  # all warps have read the previous rows\n",
            "",
        ),
    ),
    mutant(
        "M11",
        "barrier removed after rows are staged in the epilogue",
        SILU,
        (
            EPILOGUE,
            "        bar_sync(ALL_CONSUMERS, 32 * CONSUMER_WARPS)  # all warps have written their columns\n",
            "",
        ),
    ),
    mutant(
        "M13",
        "barrier removed in the scan over groups",
        LAYOUTS,
        (
            SCHEDULER,
            "                smem.i32[uint32(warp_sums + warp)] = inclusive\n            cuda.syncthreads()\n",
            "                smem.i32[uint32(warp_sums + warp)] = inclusive\n",
        ),
    ),
    mutant(
        "M14",
        "last cluster barrier removed: a peer may have exited",
        SIZES,
        (
            KERNEL,
            "        if cluster == 2:  # the other CTA may still multicast into this one's shared memory\n"
            "            cuda.syncwarp()\n"
            "            barrier_cluster_arrive()\n"
            "            barrier_cluster_wait()\n",
            "",
        ),
    ),
    mutant("M15", "fence.mbarrier_init removed", SIZES, (KERNEL, "            fence_mbarrier_init()\n", "")),
    mutant(
        "M16",
        "first cluster barrier removed: a peer may not have started",
        SIZES,
        (
            KERNEL,
            "        if cluster == 2:  # the other CTA arrives at these barriers, too\n"
            "            cuda.syncwarp()\n"
            "            barrier_cluster_arrive()\n"
            "            barrier_cluster_wait()\n"
            "        if not early",
            "        if not early",
        ),
    ),
    mutant(
        "M18",
        "32-bit product in the output's address",
        FAR,
        (
            STORE_TILE,
            "(int64(tile.row) + t) * pitch + ((column >> 1) + vector * 4)",
            "int32(int32(tile.row + t) * pitch + ((column >> 1) + vector * 4))",
        ),
        (
            STORE_TILE,
            "subtile_pitch = int64(tile.subtile_rows) * pitch",
            "subtile_pitch = int32(tile.subtile_rows * pitch)",
        ),
    ),
    mutant(
        "M19",
        "a tile has one row too many",
        SIZES,
        (
            SCHEDULER,
            "int32(min(subtile_rows * m_subtiles, int32(count - begin)))",
            "int32(min(subtile_rows * m_subtiles, int32(count - begin + 1)))",
        ),
    ),
    mutant(
        "M20",
        "stage overwritten before it is empty (tile info)",
        ONE_GROUP,
        (
            KERNEL,
            "mbarrier_wait_parity(smem.barriers, empty + stage, phase)\n                        publish_tile",
            "publish_tile",
        ),
    ),
    mutant("M22", "cp.async.commit_group removed", GATHERED, (GATHER, "        cp_async_commit_group()\n", "")),
    mutant(
        "M23",
        "__syncwarp() removed after indices are written to shared memory",
        GATHERED,
        (
            GATHER,
            "index if index < source.x_rows else int32(-1)\n        cuda.syncwarp()\n",
            "index if index < source.x_rows else int32(-1)\n",
        ),
    ),
    mutant(
        "M26",
        "offset in a matrix descriptor is wrong",
        SILU,
        (KERNEL, "uint64(WEIGHT_TILE_BYTES >> 4)", "uint64(WEIGHT_TILE_BYTES >> 5)"),
    ),
    mutant(
        "M27",
        "tile info read before its stage is full",
        SIZES,
        (
            KERNEL,
            "                mbarrier_wait_parity(smem.barriers, full + stage, phase)\n                row, rows",
            "                row, rows",
        ),
    ),
    mutant(
        "M28",
        "flag before data: tile info stored after the barrier's arrival",
        EDGES,
        (
            KERNEL,
            "                        publish_tile(smem, scales, tile, stage)\n                    is_single",
            "                    is_single",
        ),
        (
            KERNEL,
            "                            mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes)\n",
            "                            mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes)\n"
            "                            if k_block == 0:\n"
            "                                publish_tile(smem, scales, tile, stage)\n",
        ),
    ),
    mutant(
        "M29",
        "one warp does not release its stage",
        SIZES,
        (KERNEL, "stage, lane == 0 and not two)", "stage, lane == 0 and not two and warp != 0)"),
    ),
    mutant(
        "M30",
        "up is stored over gate",
        GATE_AND_UP,
        (KERNEL, "int32(tile.column + n), tile.scale", "int32(tile.column), tile.scale"),
    ),
    mutant(
        "M31",
        "the gates of a tile's columns beyond y are stored over ups",
        GATE_AND_UP,
        (KERNEL, "                    if tile.column + int32(warp >> 2) * 64 < n:\n", "                    if True:\n"),
    ),
    mutant(
        "M32",
        "k blocks of the second pair are read where those of the first ended",
        TWO_BLOCKS,
        (KERNEL, "int32((k_block - first_low) * block_k)", "int32(k_block * block_k)"),
    ),
    mutant(
        "M33",
        "the last k block of the second pair is left out",
        TWO_BLOCKS,
        (KERNEL, "((maps.rank + block_k - 1) >> block_k_shift)", "(maps.rank >> block_k_shift)"),
    ),
    mutant(
        "M34",
        "a stage's barrier does not expect the bytes that TMA fills with zeros",
        TWO_BLOCKS,
        (
            KERNEL,
            "mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes)",
            "mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes >> 1 if k_block > first_low else num_bytes)",
        ),
    ),
    mutant(
        "M35",
        "weights of the second pair that are loaded early are those of the first",
        (LOW_RANK, "-k", "test_early_weights and cluster and few"),
        (
            KERNEL,
            "_, map_weight, at_k = operands_of(maps, k_block, first_low)",
            "map_weight, at_k = maps.weight, int32(k_block * block_k)",
        ),
    ),
]
