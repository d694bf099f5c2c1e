"""Planted bugs in the gate's kernels."""

from .mutant import mutant

KERNEL, FOUR_TOKENS = "moe_numba/gate/one_token_per_warp.py", "moe_numba/gate/four_tokens_per_warp.py"
TESTS = "tests/gate/test_gate.py"
LOOPS = TESTS, "-k", "test_warps_route_several_tokens and None-41"
WEIGHTS = TESTS, "-k", "test_weights and 0-False"
TIES = TESTS, "-k", "test_tied_groups"
PARTLY_FILLED = (f"{TESTS}::test_constant_rows_in_partly_filled_lanes[nan-None]",)
LATE_INPUTS = ("tests/runtime/test_dependent_launch.py::test_inputs_are_read_after_the_wait[gate]",)

MUTANTS = [
    mutant(
        "G01",
        "__syncwarp() before redux.sync removed",
        LOOPS,
        (KERNEL, "cuda.syncwarp()  # redux.sync needs", "pass  # redux.sync needs"),
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
        "G06",
        "out of bounds by one row (padding)",
        WEIGHTS,
        (KERNEL, "while token < num_tokens:  # padding", "while token <= num_tokens:  # padding"),
    ),
    mutant(
        "G07",
        "out of bounds by one column",
        WEIGHTS,
        (
            KERNEL,
            "            if lane < topk:\n                weights[int64(token) * topk + lane] = weight",
            "            if lane <= topk:\n                weights[int64(token) * topk + lane] = weight",
        ),
    ),
    mutant(
        "G08",
        "reduction by shuffles is one step short",
        WEIGHTS,
        (KERNEL, "for s in range(sum_steps):", "for s in range(sum_steps - 1):"),
    ),
    mutant("G09", "griddepcontrol.wait removed", LATE_INPUTS, (KERNEL, "        griddepcontrol_wait()\n", "")),
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
        "__syncwarp() between iterations removed (write after read in shared memory)",
        LOOPS,
        (
            FOUR_TOKENS,
            "        while token < num_tokens:\n            cuda.syncwarp()\n",
            "        while token < num_tokens:\n",
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
]
