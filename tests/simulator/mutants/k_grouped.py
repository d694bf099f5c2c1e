"""Planted bugs in the k-grouped GEMM."""

from .mutant import mutant

KERNEL = "moe_numba/grouped_gemm/k_grouped/kernel.py"
TESTS = "tests/grouped_gemm/test_k_grouped_gemm_kernel.py"
SMALLEST = (f"{TESTS}::test_results[smallest]",)
FULL_STAGES = (f"{TESTS}::test_results[one group of full stages]",)
EMPTY = (f"{TESTS}::test_results[more empty groups than stages]",)
SEVERAL_TILES = (f"{TESTS}::test_results[n and k beyond a tile]",)
BANDS = (f"{TESTS}::test_results[bands]",)
CLUSTER = (f"{TESTS}::test_results[cluster]",)
BFLOAT16 = (f"{TESTS}::test_results[bfloat16]",)
ACCUMULATED = (f"{TESTS}::test_results[accumulate, offsets]",)
OTHER_ROWS = (f"{TESTS}::test_rows_of_other_groups_are_no_part_of_the_sum[nan]",)
CLUSTER_BARRIER = (
    "            cuda.syncwarp()\n            barrier_cluster_arrive()\n            barrier_cluster_wait()\n"
)

MUTANTS = [
    mutant(
        "K01",
        "proxy fence removed after rows are masked",
        SMALLEST,
        (
            KERNEL,
            "                        fence_proxy_async_shared()  # wgmma reads the zeros",
            "                        #",
        ),
    ),
    mutant(
        "K02",
        "proxy fence removed before the TMA store",
        SMALLEST,
        (
            KERNEL,
            "        write_rows(smem, offset, values)\n        fence_proxy_async_shared()\n",
            "        write_rows(smem, offset, values)\n",
        ),
    ),
    mutant(
        "K03",
        "wrong phase: the ring of masked barriers never flips",
        BANDS,
        (KERNEL, "mask, mask_phase = advance(mask, mask_phase)", "mask, _ = advance(mask, mask_phase)"),
    ),
    mutant(
        "K04",
        "staging buffer reused one store too early",
        SEVERAL_TILES,
        (KERNEL, "(1 if block_k // columns % 2 == 0 else 0)", "(2 if block_k // columns % 2 == 0 else 1)"),
    ),
    mutant(
        "K05",
        "empty barrier expects one arrival too few",
        SEVERAL_TILES,
        (KERNEL, "CONSUMER_WARPS * cluster)", "CONSUMER_WARPS * cluster - 1)"),
    ),
    mutant(
        "K06",
        "masked barrier expects one arrival too few",
        SMALLEST,
        (KERNEL, "masked + stage, MASKING_WARPS)", "masked + stage, MASKING_WARPS - 1)"),
    ),
    mutant(
        "K07",
        "__syncwarp() removed before one lane arrives for its warp's zeros",
        SMALLEST,
        (
            KERNEL,
            "                        cuda.syncwarp()\n"
            "                        if lane == 0:\n"
            "                            mbarrier_arrive(barriers, masked",
            "                        if lane == 0:\n                            mbarrier_arrive(barriers, masked",
        ),
    ),
    mutant(
        "K08",
        "__syncwarp() removed before a stage is released (tile info)",
        EMPTY,
        (KERNEL, "                cuda.syncwarp()  # lane 0 releases", "                #"),
    ),
    mutant(
        "K09",
        "multicast to one CTA of two",
        CLUSTER,
        (KERNEL, "full + stage, CLUSTER_MASK, policy", "full + stage, 0b01, policy"),
    ),
    mutant(
        "K10",
        "first cluster barrier removed: a peer may not have started",
        CLUSTER,
        (KERNEL, f"        if cluster == 2:\n{CLUSTER_BARRIER}        else:", "        if cluster == 1:"),
    ),
    mutant(
        "K11",
        "last cluster barrier removed: a peer may have exited",
        CLUSTER,
        (
            KERNEL,
            "        if cluster == 2:  # the other CTA may still multicast into this one's shared memory\n"
            f"{CLUSTER_BARRIER}",
            "",
        ),
    ),
    mutant("K12", "fence.mbarrier_init removed", SMALLEST, (KERNEL, "            fence_mbarrier_init()\n", "")),
    mutant(
        "K13",
        "stage overwritten before it is empty (tile info)",
        EMPTY,
        (
            KERNEL,
            "                    mbarrier_wait_parity(barriers, empty + stage, phase)\n"
            "                    st_shared_s32x4(smem_i32, int32(tile_info",
            "                    st_shared_s32x4(smem_i32, int32(tile_info",
        ),
    ),
    mutant(
        "K14",
        "a stage is released to one CTA of two",
        CLUSTER,
        (KERNEL, "make_release_stage(cluster)", "make_release_stage(1)"),
    ),
    mutant(
        "K15",
        "wgmma.wait_group removed",
        FULL_STAGES,
        (KERNEL, "acc = wait(wgmma(acc, a, b))", "acc = wgmma(acc, a, b)", 2),
    ),
    mutant(
        "K16",
        "the CTA ends before its stores have read shared memory",
        SMALLEST,
        (KERNEL, "                wait_for_stores()", "                pass"),
    ),
    mutant(
        "K17",
        "both CTAs of a cluster load the same half of b",
        CLUSTER,
        (KERNEL, "box = int32(rank * boxes_per_cta + i)", "box = int32(i)"),
    ),
    mutant(
        "K18",
        "the last band is as wide as the others",
        BANDS,
        (KERNEL, "int32(min(int32(band_tiles), int32(n_tiles - band * band_tiles)))", "int32(band_tiles)"),
    ),
    mutant(
        "K19",
        "the output is overwritten instead of added to",
        ACCUMULATED,
        (KERNEL, "tma_reduce_add_3d if config.accumulate else tma_store_3d", "tma_store_3d"),
    ),
    mutant(
        "K20",
        "full barrier expects a box too few",
        FULL_STAGES,
        (KERNEL, "full + stage, stage_bytes)", "full + stage, stage_bytes - BOX_BYTES)"),
    ),
    mutant(
        "K21",
        "off by one: the first row behind a group is not masked",
        OTHER_ROWS,
        (KERNEL, "rows_to_keep * VECTORS_PER_ROW", "(rows_to_keep + 1) * VECTORS_PER_ROW"),
    ),
    mutant(
        "K22",
        "masked rows read before all of them are zeros",
        SMALLEST,
        (KERNEL, "                    mbarrier_wait_parity(barriers, masked + mask, mask_phase)\n", ""),
    ),
    mutant(
        "K23",
        "the swizzle of rows in bfloat16 is left out",
        BFLOAT16,
        (KERNEL, "((vector ^ (row & 7)) << 4)", "(vector << 4)"),
    ),
    mutant(
        "K24",
        "a stage without rows is not released",
        EMPTY,
        (
            KERNEL,
            "                if rows == 0:\n"
            "                    if lane == 0:\n"
            "                        release_stage(barriers, empty + stage)\n",
            "                if rows == 0:\n",
        ),
    ),
]
