"""Planted bugs in the grouped GEMM with mma.sync."""

from .mutant import mutant

KERNEL = "moe_numba/grouped_gemm/mma_sync/kernel.py"
EPILOGUE = "moe_numba/grouped_gemm/mma_sync/epilogue.py"
TESTS = "tests/grouped_gemm/test_grouped_gemm_mma.py"
ORDER = (f"{TESTS}::test_result_does_not_depend_on_thread_order[bf16-1]",)
CONVERTED = (f"{TESTS}::test_result_does_not_depend_on_thread_order[block, converted-1]",)
EDGES = (f"{TESTS}::test_sizes_that_are_no_multiples_of_a_tile[208-144-bf16]",)
BANDS = (f"{TESTS}::test_bands",)
GATHERED = (f"{TESTS}::test_gathered_rows_and_strides[sm_80-bf16]",)
GATHERED_BLOCKS = (f"{TESTS}::test_gather[lengths0-block]",)
NARROW_STAGES = (f"{TESTS}::test_sizes_that_are_no_multiples_of_a_tile[64-64-bf16, 64 bytes of k]",)
SILU = (f"{TESTS}::test_silu_and_mul[sm_80-20-pertensor]",)

MUTANTS = [
    mutant(
        "Y01",
        "cp.async.commit_group of the first stages removed",
        ORDER,
        (KERNEL, "            cp_async_commit_group()\n            ahead = ", "            ahead = "),
    ),
    mutant(
        "Y02",
        "cp.async.wait_group leaves one group too many",
        ORDER,
        (KERNEL, "make_cp_async_wait_group(stages - 2)", "make_cp_async_wait_group(stages - 1)"),
    ),
    mutant(
        "Y03",
        "wrong swizzle of every other 16 rows of weight",
        ORDER,
        (KERNEL, "flip = (4 if layout.vectors == 8 else 2) << 4 if rows_per_pass == 16 else 0", "flip = 0"),
    ),
    mutant(
        "Y04",
        "barrier weakened to a warp's: all threads' copies have arrived",
        ORDER,
        (KERNEL, "cuda.syncthreads()  # all threads' copies", "cuda.syncwarp()  # all threads' copies"),
    ),
    mutant(
        "Y05",
        "barrier removed after the first stage's copies",
        ORDER,
        (KERNEL, "        wait_for_next_stage()\n        cuda.syncthreads()\n\n", "        wait_for_next_stage()\n\n"),
    ),
    mutant(
        "Y06",
        "a stage is overwritten while warps read it",
        ORDER,
        (KERNEL, "for _ in range(stages - 1):", "for _ in range(stages):"),
    ),
    mutant(
        "Y08",
        "the last step loads fragments of the same stage",
        ORDER,
        (
            KERNEL,
            "next_a = load_a(smem.u8, int32(next_stage + x_fragment))",
            "next_a = load_a(smem.u8, int32(stage + x_fragment))",
        ),
    ),
    mutant(
        "Y09",
        "out of bounds: rows beyond the last one of weight",
        EDGES,
        (
            KERNEL,
            "row = int32(min(int32(info.n_tile * columns + t), int32(operands.n - 1)))",
            "row = int32(info.n_tile * columns + t)",
        ),
    ),
    mutant(
        "Y10",
        "out of bounds: reads behind the end of k",
        EDGES,
        (KERNEL, "ahead.tile < tiles and begin < operands.k_bytes", "ahead.tile < tiles"),
    ),
    mutant(
        "Y11",
        "a tile stores the next one's rows",
        BANDS,
        (EPILOGUE, "if row < rows and COLUMN_GROUP", "if COLUMN_GROUP"),
    ),
    mutant(
        "Y12",
        "the phase of four vectors per row is that of eight",
        NARROW_STAGES,
        (KERNEL, "phase_shift = 0 if vectors == 8 else 1", "phase_shift = 0"),
    ),
    mutant(
        "Y13",
        "rows that are not in x are read",
        GATHERED,
        (KERNEL, "if row >= 0 and row < operands.x_rows else uint32(NO_ROW)", "if row >= 0 else uint32(NO_ROW)"),
    ),
    mutant(
        "Y14",
        "stale scales: the factors of the stage before",
        CONVERTED,
        (KERNEL, "                    factors = next_factors\n", ""),
    ),
    mutant(
        "Y15",
        "the second step's product is left out",
        ORDER,
        (
            KERNEL,
            "                    product, a, b = step_1(smem, product, a, b, x_at, weight_at, copy)\n",
            "                    _, a, b = step_1(smem, product, a, b, x_at, weight_at, copy)\n",
        ),
    ),
    mutant(
        "Y16",
        "barrier removed before shared memory is reused in the epilogue",
        SILU,
        (KERNEL, "                cuda.syncthreads()  # all warps have read the maxima of the previous tile\n", ""),
        equivalent="the stages of the next tile have barriers, too",
    ),
    mutant(
        "Y17",
        "barrier removed after the maxima are written",
        SILU,
        (KERNEL, "lane, d, scale)\n                cuda.syncthreads()\n", "lane, d, scale)\n"),
    ),
    mutant(
        "Y18",
        "the scales of rows are not gathered",
        GATHERED_BLOCKS,
        (KERNEL, "                        scale_row = row_indices[scale_row]\n", ""),
    ),
    mutant(
        "Y19",
        "maxima of a row: the second exchange between lanes is left out",
        SILU,
        (EPILOGUE, "        largest = max(largest, cuda.shfl_xor_sync(FULL_MASK, largest, 2))\n", ""),
    ),
    mutant(
        "Y20",
        "the slots of tile descriptions are one too few",
        BANDS,
        ("moe_numba/grouped_gemm/mma_sync/config.py", "return self.config.stages + 1", "return self.config.stages - 1"),
    ),
]
