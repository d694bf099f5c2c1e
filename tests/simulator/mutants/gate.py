"""Planted bugs in the gate's kernels."""

from .mutant import mutant

KERNEL, FOUR_TOKENS = "moe_numba/gate/one_token_per_warp.py", "moe_numba/gate/four_tokens_per_warp.py"
TESTS = "tests/gate/test_gate.py"
LOOPS = TESTS, "-k", "test_warps_route_several_tokens and None-41"
WEIGHTS = TESTS, "-k", "test_weights and 0-False"
TIES = TESTS, "-k", "test_tied_groups"
PARTLY_FILLED = (f"{TESTS}::test_constant_rows_in_partly_filled_lanes[nan-None]",)
COLUMNS, PACKED = "moe_numba/gate/device_functions.py", "moe_numba/gate/packed_keys.py"
WITH_GATE = "moe_numba/align/with_gate.py"
PLACEMENT = "tests/gate/test_placement.py"
BY_HAND = (f"{PLACEMENT}::test_by_hand",)
WRONG_TABLES = (f"{PLACEMENT}::test_wrong_tables_are_not_followed",)
ALIGNED = PLACEMENT, "-k", "test_gate_and_alignment and round_robin-8"
LATE_INPUTS = ("tests/runtime/test_dependent_launch.py::test_inputs_are_read_after_the_wait[gate]",)

MUTANTS = [
    mutant(
        "G01",
        "__syncwarp() before redux.sync removed",
        LOOPS,
        (KERNEL, "cuda.syncwarp()  # redux.sync needs", "pass  # redux.sync needs", 2),
        equivalent="redux.sync waits for the lanes of its mask; for a warp that may have diverged, the compiler adds a "
        "slower path (BRA.DIV), so that only time and code size change",
    ),
    mutant(
        "G02",
        "shuffle with half of the lanes in its mask",
        WEIGHTS,
        (
            KERNEL,
            "other_second = cuda.shfl_xor_sync(FULL_MASK, second",
            "other_second = cuda.shfl_xor_sync(0xFFFF, second",
        ),
    ),
    mutant(
        "G03",
        "shuffle in a short circuit",
        WEIGHTS,
        (
            KERNEL,
            "rival_key = cuda.shfl_sync(FULL_MASK, group_key, rival_group * lanes_per_group)\n"
            "            is_better = rival_group < num_expert_group and (\n"
            "                rival_key > group_key or (rival_key == group_key and rival_group < group)\n"
            "            )",
            "is_better = rival_group < num_expert_group and (\n"
            "                cuda.shfl_sync(FULL_MASK, group_key, rival_group * lanes_per_group) > group_key or (\n"
            "                    cuda.shfl_sync(FULL_MASK, group_key, rival_group * lanes_per_group) == group_key\n"
            "                    and rival_group < group\n"
            "                )\n"
            "            )",
        ),
    ),
    mutant(
        "G04",
        "the tie goes to the highest lane",
        TIES,
        (
            KERNEL,
            "uint32(ballot & lower_lanes) == uint32(0)",
            "uint32(ballot & ~lower_lanes & ~uint32(1 << lane)) == uint32(0)",
        ),
    ),
    mutant(
        "G05",
        "several lanes win a pick with equal keys",
        TIES,
        (KERNEL, "is_ambiguous | (uint32(ballot & uint32(ballot - uint32(1))) != uint32(0))", "is_ambiguous"),
    ),
    mutant(
        "G06",
        "out of bounds by one row (padding)",
        WEIGHTS,
        (KERNEL, "elif token < num_tokens:  # a padding", "elif token <= num_tokens:  # a padding"),
    ),
    mutant(
        "G07",
        "out of bounds by one column",
        WEIGHTS,
        (
            KERNEL,
            "        if lane < topk:\n            weight, expert = finish_column(weight, expert, token, F",
            "        if lane <= topk:\n            weight, expert = finish_column(weight, expert, token, F",
        ),
    ),
    mutant(
        "G08",
        "reduction by shuffles is one step short",
        WEIGHTS,
        (KERNEL, "for s in range(sum_steps):", "for s in range(sum_steps - 1):"),
    ),
    mutant("G09", "griddepcontrol.wait removed", LATE_INPUTS, (KERNEL, "griddepcontrol_wait()\n", "pass\n", 4)),
    mutant(
        "G10",
        "stale prefetch: the next row is loaded too early",
        LOOPS,
        (
            KERNEL,
            "            unpack(raw, num_valid, scores)\n"
            "            next_token = int32(token + token_stride)\n"
            "            if next_token < num_unpadded:  # load the next row while this one is routed\n"
            "                fetch(x, int64(next_token) * row_stride + first_expert, num_valid, raw)\n",
            "            next_token = int32(token + token_stride)\n"
            "            if next_token < num_unpadded:  # load the next row while this one is routed\n"
            "                fetch(x, int64(next_token) * row_stride + first_expert, num_valid, raw)\n"
            "            unpack(raw, num_valid, scores)\n",
        ),
    ),
    mutant(
        "G12",
        "uninitialised local array read by lanes that hold fewer experts",
        PARTLY_FILLED,
        (KERNEL, "            if not all_lanes_full and j >= num_valid:\n                keys[j] = EXCLUDED\n", ""),
    ),
    mutant(
        "G13",
        "__syncwarp() removed before lanes read the keys of others from shared memory",
        WEIGHTS,
        (
            FOUR_TOKENS,
            "& lower_group_lanes))] = group\n            cuda.syncwarp()\n",
            "& lower_group_lanes))] = group\n",
        ),
    ),
    mutant(
        "G15",
        "tie between groups ignores a bit",
        TIES,
        (
            FOUR_TOKENS,
            "tie_break = group_bit2 if i >= 4 else (group_bit1 if i >= 2 else group_bit0)",
            "tie_break = group_bit2 if i >= 4 else group_bit0",
        ),
    ),
    mutant(
        "G16",
        "loop over repeats runs below the first column",
        WEIGHTS,
        (FOUR_TOKENS, "and column > 0 and column < routed", "and column < routed"),
    ),
    mutant(
        "G17",
        "the replica is chosen among the columns of the table, not among an expert's replicas",
        BY_HAND,
        (COLUMNS, "uint32(token) % uint32(num_replicas)", "uint32(token) % uint32(optional[MAX_REPLICAS])"),
    ),
    mutant(
        "G18",
        "the random replica does not depend on the expert",
        (f"{PLACEMENT}::test_random_replicas_of_two_experts_are_independent",),
        (COLUMNS, "uint32(word + uint32(expert))", "uint32(word)"),
    ),
    mutant(
        "G19",
        "physical ids out of range are returned",
        WRONG_TABLES,
        (COLUMNS, "physical >= 0 and physical < optional[NUM_PHYSICAL]", "physical >= 0"),
    ),
    mutant(
        "G20",
        "the number of replicas is not limited to the columns of the table",
        WRONG_TABLES,
        (
            COLUMNS,
            "min(max(optional[NUM_REPLICAS][expert], 1), optional[MAX_REPLICAS])",
            "max(optional[NUM_REPLICAS][expert], 1)",
        ),
    ),
    mutant(
        "G21",
        "fused shared experts have ids of physical experts",
        BY_HAND,
        (COLUMNS, "expert = int32(expert + (optional[NUM_PHYSICAL] - optional[NUM_EXPERTS]))", "expert = expert"),
    ),
    mutant(
        "G22",
        "fused shared experts are counted, out of bounds",
        BY_HAND,
        (COLUMNS, "if expert >= 0 and expert < optional[NUM_PHYSICAL]:", "if expert >= 0:"),
    ),
    mutant(
        "G23",
        "tokens are counted without an atomic operation",
        (PLACEMENT, "-k", "test_placements and static and packed"),
        (
            COLUMNS,
            "red_add_relaxed_gpu_s32(optional[LOAD], expert, int32(1))",
            "optional[LOAD][expert] = int32(optional[LOAD][expert] + 1)",
        ),
    ),
    mutant(
        "G24",
        "the mask replaces the number of tokens",
        (PLACEMENT, "-k", "test_padding_anywhere and packed"),
        (COLUMNS, "is_padding or optional[IS_PADDING][token] != 0", "optional[IS_PADDING][token] != 0"),
    ),
    mutant(
        "G25",
        "the epsilon is added to a sum that is no sum of probabilities",
        (PLACEMENT, "-k", "test_epsilon and packed"),
        (PACKED, "(not renormalize or features.adds_epsilon)", "not renormalize"),
    ),
    mutant(
        "G26",
        "every CTA counts the tokens",
        ALIGNED,
        (WITH_GATE, "if has_result and cuda.blockIdx.x < 1:", "if has_result:"),
    ),
]
