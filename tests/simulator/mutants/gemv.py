"""Planted bugs in the matrix-vector kernels of fused_experts for a few tokens."""

from .mutant import mutant

BF16, FP8 = "moe_numba/moe_layer/gemv/bf16.py", "moe_numba/moe_layer/gemv/fp8_blocks.py"
MXFP4, TESTS = "moe_numba/moe_layer/gemv/mxfp4.py", "tests/moe_layer/test_gemv"
BF16_EQUALS = (f"{TESTS}.py::test_equals_reference[None-True-ids_dtype0-options0-shape0]",)
BF16_MANY_LOADS = (f"{TESTS}.py::test_equals_reference[None-True-ids_dtype0-options0-shape3]",)
FP8_EQUALS = (f"{TESTS}_fp8.py::test_equals_reference[True-ids_dtype0-shape0]",)
MXFP4_EQUALS = (f"{TESTS}_mxfp4.py::test_equals_reference[few warps-None-True-ids_dtype0-options0-shape0]",)
MXFP4_SPLIT = (f"{TESTS}_mxfp4.py::test_equals_reference[many warps-None-True-ids_dtype0-options0-shape0]",)

MUTANTS = [
    mutant(
        "V01",
        "dependents triggered before the kernel's own griddepcontrol.wait",
        ("tests/runtime/test_no_races.py::test_no_data_races[a layer of one token-0]",),
        (
            BF16,
            "    def decode_gate_up(x, w13, bias, topk_ids, activated, num_items, token_stride, column_stride):\n"
            "        griddepcontrol_wait()\n"
            "        griddepcontrol_launch_dependents()\n",
            "    def decode_gate_up(x, w13, bias, topk_ids, activated, num_items, token_stride, column_stride):\n"
            "        griddepcontrol_launch_dependents()\n"
            "        griddepcontrol_wait()\n",
        ),
    ),
    mutant(
        "V02",
        "shuffle from the wrong lane: all experts of a batch have the first one's weight",
        BF16_MANY_LOADS,
        (
            BF16,
            "cuda.shfl_sync(FULL_MASK, own_weight, int32(uint32(first + b) // uint32(steps_of_expert)))",
            "cuda.shfl_sync(FULL_MASK, own_weight, int32(uint32(first) // uint32(steps_of_expert)))",
        ),
    ),
    mutant(
        "V03",
        "__syncthreads() replaced by __syncwarp() after x is staged for all warps",
        MXFP4_EQUALS,
        (
            MXFP4,
            "x_words, 0, vector >> 3, vector & 7)\n            cuda.syncthreads()\n",
            "x_words, 0, vector >> 3, vector & 7)\n            cuda.syncwarp()\n",
        ),
    ),
    mutant(
        "V04",
        "__syncwarp() removed after activations are quantised for other lanes",
        FP8_EQUALS,
        (
            FP8,
            "            quantise_activations(activated, row, lane, x_words, first_word, x_scales, first_scale)\n"
            "            cuda.syncwarp()\n",
            "            quantise_activations(activated, row, lane, x_words, first_word, x_scales, first_scale)\n",
        ),
    ),
    mutant(
        "V05",
        "griddepcontrol.wait after the first read of the previous kernel's output",
        FP8_EQUALS,
        (
            FP8,
            "            load_weights(w2, w2_scale, weights, weight_scales, 0, words, scales)\n"
            "        griddepcontrol_wait()\n"
            "        griddepcontrol_launch_dependents()\n",
            "            load_weights(w2, w2_scale, weights, weight_scales, 0, words, scales)\n"
            "        griddepcontrol_launch_dependents()\n",
        ),
        (
            FP8,
            "        cuda.syncthreads()\n        if cuda.threadIdx.x < MMA_ROWS:\n            total, index",
            "        griddepcontrol_wait()\n"
            "        cuda.syncthreads()\n"
            "        if cuda.threadIdx.x < MMA_ROWS:\n"
            "            total, index",
        ),
    ),
    mutant(
        "V06",
        "barrier removed before the sums of all warps are read",
        FP8_EQUALS,
        (
            FP8,
            "        cuda.syncthreads()\n        if cuda.threadIdx.x < MMA_ROWS:\n            total, index",
            "        if cuda.threadIdx.x < MMA_ROWS:\n            total, index",
        ),
    ),
    mutant(
        "V07",
        "shuffle in a branch that only some lanes take",
        BF16_EQUALS,
        (
            BF16,
            "                expert = cuda.shfl_sync(FULL_MASK, own_expert, k)\n"
            "                vector_index = int32(lane + 32 * (first + b - k * steps_of_expert))\n"
            "                if expert >= 0 and (is_whole or vector_index < num_vectors):\n",
            "                vector_index = int32(lane + 32 * (first + b - k * steps_of_expert))\n"
            "                expert = int32(-1)\n"
            "                if is_whole or vector_index < num_vectors:\n"
            "                    expert = cuda.shfl_sync(FULL_MASK, own_expert, k)\n"
            "                if expert >= 0:\n",
        ),
    ),
    mutant(
        "V08",
        "warps that split k overwrite each other's sums",
        MXFP4_SPLIT,
        (
            MXFP4,
            "                sums[MMA_ROWS * warp + (lane >> 2)] = low\n",
            "                sums[MMA_ROWS * (warp & 3) + (lane >> 2)] = low\n",
        ),
    ),
]
