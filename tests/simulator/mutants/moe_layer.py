"""Planted bugs in the small kernels of a layer, from sorting to quantising tokens, and in cutting its weights."""

from .mutant import mutant

LAYER, TESTS = "moe_numba/moe_layer", "tests/moe_layer"
GROUP_BY_EXPERT, PERMUTE = f"{LAYER}/group_by_expert/kernel.py", f"{LAYER}/permute/kernel.py"
SORT = "moe_numba/align/counting_sort.py"  # of group_by_expert
WEIGHTED_SUM, SILU_AND_MUL = f"{LAYER}/weighted_sum/kernel.py", f"{LAYER}/silu_and_mul/kernel.py"
QUANT, CAST = f"{LAYER}/per_token_quant/kernel.py", "moe_numba/quantise/fp8_cast_kernels.py"
ACTIVATION_BACKWARD = f"{LAYER}/backward/activation_kernel.py"
SHARED_EXPERTS = "moe_numba/shared_experts/kernel.py"
SHARDS, WEIGHTS = f"{LAYER}/shards.py", f"{LAYER}/weights.py"

# Tests of wrong kernels and of machine code look for passages of the sources that a bug may replace.
RESULTS = "-k", "not rejected and not rejects and not machine_code"
GROUPS, PERMUTATIONS = (f"{TESTS}/test_group_by_expert.py", *RESULTS), (f"{TESTS}/test_permute.py", *RESULTS)
SUMS = f"{TESTS}/test_weighted_sum.py", *RESULTS  # of silu_and_mul, too
ROW_SCALES, CASTS = (f"{TESTS}/test_per_token_quant.py", *RESULTS), ("tests/quantise/test_fp8_cast.py", *RESULTS)
GRADIENTS = f"{TESTS}/test_backward.py", "-k", "test_gradients_are and not rejected"
ROUTINGS = f"{TESTS}/test_fuse_routing.py", *RESULTS
SUMS_OF_RANKS = f"{TESTS}/test_shards.py", "-k", "all_columns"


def late_inputs(kernel):
    """Return the test in which the inputs of a kernel arrive at its griddepcontrol.wait."""
    return (f"tests/runtime/test_dependent_launch.py::test_inputs_are_read_after_the_wait[{kernel}]",)


MUTANTS = [
    mutant(
        "ML01",
        "sizes of groups are the assignments of lower CTAs only",
        GROUPS,
        (GROUP_BY_EXPERT, "int32(counts[expert + 1] + counts[expert + 1 + capacity])", "counts[expert + 1]"),
    ),
    mutant(
        "ML02",
        "lanes with the same expert lose counts: no atomic addition",
        GROUPS,
        (
            GROUP_BY_EXPERT,
            "cuda.atomic.add(counters, int32(row + experts[k]), int32(1))",
            "counters[int32(row + experts[k])] += int32(1)",
        ),
    ),
    mutant(
        "ML03",
        "warps take their shares in reverse order, so that the sort is not stable",
        GROUPS,
        (
            GROUP_BY_EXPERT,
            "start = int32(first + warp * share)",
            "start = int32(first + (num_warps - 1 - warp) * share)",
        ),
    ),
    mutant(
        "ML04",
        "__syncwarp() removed between updating counters and their next reads",
        GROUPS,
        (
            GROUP_BY_EXPERT,
            "                cuda.syncwarp()\n                if assignment < warp_end:\n",
            "                if assignment < warp_end:\n",
        ),
    ),
    mutant(
        "ML05",
        "the number of all rows is not stored",
        GROUPS,
        (GROUP_BY_EXPERT, "while expert <= num_experts:", "while expert < num_experts:"),
    ),
    mutant(
        "ML06",
        "an int64 id is narrowed before it is compared, and wraps around to a valid one",
        GROUPS,
        (
            GROUP_BY_EXPERT,
            "expert = topk_ids[int64(token) * token_stride + int64(column) * column_stride]\n                if",
            "expert = int32(topk_ids[int64(token) * token_stride + int64(column) * column_stride])\n                if",
        ),
    ),
    mutant(
        "ML07",
        "assignments with id -1 keep what was in the output",
        GROUPS,
        (
            GROUP_BY_EXPERT,
            "                if assignment < warp_end:\n                    inverse_indices[assignment] = position\n"
            "                if position >= 0:\n",
            "                if position >= 0:\n                    inverse_indices[assignment] = position\n",
        ),
    ),
    mutant(
        "ML08",
        "assignments with id -1 get a row",
        GROUPS,
        (SORT, "int32(-1) if buckets[k] == uint32(drop_bucket) else row", "row"),
    ),
    mutant(
        "ML09",
        "shuffle that the lanes beyond hidden do not take part in",
        PERMUTATIONS,
        (
            PERMUTE,
            "        amax = largest_magnitude(words)\n",
            "        amax = float32(0)\n        if inside:\n            amax = largest_magnitude(words)\n",
        ),
    ),
    mutant(
        "ML10",
        "the scale of a partial group is written to the next row",
        PERMUTATIONS,
        (
            PERMUTE,
            "scales_per_row, load_rows = -(-hidden // FP8_SCALE_BLOCK)",
            "scales_per_row, load_rows = hidden // FP8_SCALE_BLOCK",
            2,
        ),
    ),
    mutant(
        "ML11",
        "the last batch has one index of the next token",
        PERMUTATIONS,
        (PERMUTE, "if first + k < topk:", "if first + k <= topk:"),
    ),
    mutant(
        "ML12",
        "scales of tokens in FP8 are read as if they were contiguous",
        PERMUTATIONS,
        (
            PERMUTE,
            "x_scale[int64(token) * token_stride + int64(group) * group_stride]",
            "x_scale[int64(token) * scales_per_row + group]",
        ),
    ),
    mutant(
        "ML13",
        "the sum is rounded to bfloat16 before the shared experts' output is added",
        SUMS,
        (
            WEIGHTED_SUM,
            "                add_row(words, 0, float32(1), sums)\n",
            "                for i in range(VECTOR):\n"
            "                    sums[i] = uint_as_float(uint32(cvt_rn_bf16x2_f32(sums[i], float32(0))))\n"
            "                add_row(words, 0, float32(1), sums)\n",
        ),
    ),
    mutant(
        "ML14",
        "a row that was not loaded is added: an index is compared with the number of rows only once",
        SUMS,
        (
            WEIGHTED_SUM,
            "                    if row[k] >= 0 and row[k] < num_rows:\n                        add_row",
            "                    if row[k] >= 0:\n                        add_row",
        ),
    ),
    mutant(
        "ML15",
        "32-bit offset of a row",
        SUMS,
        (WEIGHTED_SUM, "int64(row[k]) * hidden + column", "int32(row[k] * hidden + column)"),
    ),
    mutant(
        "ML16",
        "limit clamps up from above only",
        SUMS,
        (SILU_AND_MUL, "silu_and_mul_f32(gate, least if up < least else up)", "silu_and_mul_f32(gate, up)"),
    ),
    mutant(
        "ML17",
        "silu(gate) is rounded to bfloat16 before it is multiplied by up",
        SUMS,
        (
            SILU_AND_MUL,
            "    return gate * rcp_approx(float32(1) + ex2_approx(gate * float32(-LOG2_E))) * up\n",
            "    silu = gate * rcp_approx(float32(1) + ex2_approx(gate * float32(-LOG2_E)))\n"
            "    return high_half(uint32(cvt_rn_bf16x2_f32(silu, float32(0)))) * up\n",
        ),
    ),
    mutant(
        "ML18",
        "the largest magnitude of the first half of a wide row",
        ROW_SCALES,
        (QUANT, "for i in range(count):  # compared as integers", "for i in range(VECTOR):  # compared as integers"),
    ),
    mutant(
        "ML19",
        "the last warp's largest magnitude is left out",
        ROW_SCALES,
        (QUANT, "for warp in range(warps):", "for warp in range(warps - 1):"),
    ),
    mutant(
        "ML20",
        "griddepcontrol.wait removed",
        late_inputs("quantised tokens"),
        (
            QUANT,
            "        griddepcontrol_wait()\n        griddepcontrol_launch_dependents()\n        token, thread",
            "        griddepcontrol_launch_dependents()\n        token, thread",
        ),
    ),
    mutant(
        "ML21",
        "a partial group goes on in the next token",
        CASTS,
        (CAST, "            inside = inside and column < hidden\n", ""),
    ),
    mutant(
        "ML22",
        "packed exponents are read as signed bytes: the highest bit is lost",
        CASTS,
        (CAST, "uint32(8 * (column & 3)) & uint32(0xFF))", "uint32(8 * (column & 3)) & uint32(0x7F))"),
    ),
    mutant(
        "ML23",
        "griddepcontrol.wait removed",
        late_inputs("cast back"),
        (
            CAST,
            "        griddepcontrol_wait()\n"
            "        lane = int32(cuda.threadIdx.x & 31)\n"
            "        first = (int64(cuda.blockIdx.x) * _WARPS + (cuda.threadIdx.x >> 5)) * GROUPS_PER_WARP_BACK",
            "        lane = int32(cuda.threadIdx.x & 31)\n"
            "        first = (int64(cuda.blockIdx.x) * _WARPS + (cuda.threadIdx.x >> 5)) * GROUPS_PER_WARP_BACK",
        ),
    ),
    mutant(
        "ML24",
        "a token is padding if its last id is negative, not its first",
        ROUTINGS,
        (SHARED_EXPERTS, "padding = topk_ids[routing_row] < 0", "padding = topk_ids[routing_row + topk - 1] < 0"),
    ),
    mutant(
        "ML25",
        "the product that chooses a replica overflows 32 bits",
        ROUTINGS,
        (SHARED_EXPERTS, "uint64(word) * uint64(num_shared)", "uint64(uint32(word * uint32(num_shared)))"),
    ),
    mutant(
        "ML26",
        "a shard that begins in the middle of a scale's block has its zeros at the end: its blocks are not the layer's",
        SUMS_OF_RANKS,
        (SHARDS, "front = begin % block  #", "front = 0  #"),
    ),
    mutant(
        "ML27",
        "codes of w2 begin with the shard, but their scales with a block",
        SUMS_OF_RANKS,
        (
            SHARDS,
            'shard.in_units(_CODES_PER_BYTE).cut(whole["w2"].flatten(2), 2)',
            'shard._replace(front=0).in_units(_CODES_PER_BYTE).cut(whole["w2"].flatten(2), 2)',
        ),
    ),
    mutant(
        "ML28",
        "rows that alternate between gate and up are cut as if those of gate came first",
        SUMS_OF_RANKS,
        (SHARDS, "else ((-1, 2), 1)", "else ((2, -1), 2)"),
    ),
    mutant(
        "ML29",
        "each rank adds the bias of the output",
        SUMS_OF_RANKS,
        (SHARDS, 'if "w2_bias" in whole and rank == 0:', 'if "w2_bias" in whole:'),
    ),
    mutant(
        "ML30",
        "packed gate and up are padded before their first row",
        (f"{TESTS}/test_shards.py::test_packing_pads_whole_blocks[stacked]",),
        (WEIGHTS, "(0, 0, 0, 0, 0, 0, 0, 1)", "(0, 0, 0, 0, 0, 0, 1, 0)"),
    ),
    mutant(
        "ML31",
        "__syncwarp() removed between reading counters and updating them",
        GROUPS,
        (
            GROUP_BY_EXPERT,
            "                cuda.syncwarp()\n                if expert >= 0 and lower_lanes == uint32(0):\n",
            "                if expert >= 0 and lower_lanes == uint32(0):\n",
        ),
    ),
    mutant(
        "ML32",
        "the sum over a row leaves out a warp",
        (f"{TESTS}/test_backward.py::test_gradients_are_summed_over_all_warps",),
        (ACTIVATION_BACKWARD, "sums[0] + sums[1] + sums[2] + sums[3]", "sums[0] + sums[1] + sums[2]"),
    ),
    mutant(
        "ML33",
        "warps read the partial sums before all have stored them",
        GRADIENTS,
        (ACTIVATION_BACKWARD, "        cuda.syncthreads()\n", ""),
    ),
    mutant(
        "ML34",
        "a gate that is clamped has a gradient",
        GRADIENTS,
        (ACTIVATION_BACKWARD, "by_gate if free_gate else float32(0)", "by_gate"),
    ),
    mutant(
        "ML35",
        "an assignment without a row reads and writes one",
        GRADIENTS,
        (ACTIVATION_BACKWARD, "if 0 <= row and row < num_rows:", "if row < num_rows:"),
    ),
    mutant(
        "ML36",
        "the routing weight is missing in the gradient of up",
        GRADIENTS,
        (ACTIVATION_BACKWARD, "weight * grads[i] * by_up", "grads[i] * by_up"),
    ),
    mutant(
        "ML37",
        "gates and ups that were kept are read in the order of w13's rows",
        GRADIENTS,
        (
            ACTIVATION_BACKWARD,
            "make_access(columns, interleaved and not has_halves)[0]",
            "make_access(columns, interleaved)[0]",
        ),
    ),
    mutant(
        "ML38",
        "all of a token's routing weights have the bias term of its first expert",
        GRADIENTS,
        (ACTIVATION_BACKWARD, "choice * choice_stride", "0 * choice_stride"),
    ),
]
