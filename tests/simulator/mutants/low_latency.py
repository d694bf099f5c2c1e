"""Planted bugs in the low-latency kernels. Their tests run with CTAs of two warps, so that barriers matter."""

from .mutant import mutant

KERNELS = "moe_numba/expert_parallel/low_latency/"
DISPATCH, COMBINE = KERNELS + "dispatch.py", KERNELS + "combine.py"
PROTOCOL, QUANTIZE = KERNELS + "protocol.py", KERNELS + "quantize.py"

TESTS = "tests/expert_parallel/test_low_latency.py"
PAIR_AHEAD = (f"{TESTS}::test_a_rank_that_runs_ahead[lamport-exchange_ahead]",)
PAIR_WITH_FLAGS_AHEAD = (f"{TESTS}::test_a_rank_that_runs_ahead[flags-exchange_ahead]",)
DISPATCH_AHEAD = (f"{TESTS}::test_a_rank_that_runs_ahead[lamport-dispatch_ahead]",)
DISPATCH_WITH_FLAGS_AHEAD = (f"{TESTS}::test_a_rank_that_runs_ahead[flags-dispatch_ahead]",)
COMBINE_AHEAD = (f"{TESTS}::test_a_rank_that_runs_ahead[lamport-combine_ahead]",)
COMBINE_WITH_FLAGS_AHEAD = (f"{TESTS}::test_a_rank_that_runs_ahead[flags-combine_ahead]",)
TWO_SENDS = (f"{TESTS}::test_two_combines_before_their_hooks",)
PACKED = (f"{TESTS}::test_rows_packed_by_expert[lamport-2-1]",)
MANY_EXPERTS = (f"{TESTS}::test_numbers_of_experts[32-40-id_dtype4]",)
NANS = (f"{TESTS}::test_not_a_number",)
LATE_RANK = (f"{TESTS}::test_a_timeout_is_an_error_without_enable_shrink[lamport]",)
EXPONENTS = (f"{TESTS}::test_deepeps_calls[2-False-ue8m0]",)
ROUNDED_SCALES = (f"{TESTS}::test_deepeps_calls[2-False-rounded]",)
FP8_SUMS = (f"{TESTS}::test_sums_in_slots_in_fp8",)

MUTANTS = [
    mutant(
        "LL01",
        "fence removed between a row and its metadata",
        DISPATCH_WITH_FLAGS_AHEAD,
        (DISPATCH, "                            fence_acq_rel_sys()  # on behalf of the CTA\n", ""),
    ),
    mutant(
        "LL02",
        "__syncthreads() weakened before the fence on behalf of the CTA (combine)",
        COMBINE_WITH_FLAGS_AHEAD,
        (
            COMBINE,
            "cuda.syncthreads()\n                                if tid == 0:\n",
            "cuda.syncwarp()\n                                if tid == 0:\n",
        ),
    ),
    mutant(
        "LL03",
        "a slot not reset after it was read",
        DISPATCH_AHEAD,
        (
            DISPATCH,
            "                                st_relaxed_sys_s32x4(local, row + 4 * i, empty, empty, empty, empty)\n",
            "",
        ),
    ),
    mutant(
        "LL04",
        "double buffer of the metadata reduced to one",
        DISPATCH_AHEAD,
        (DISPATCH, "int32(int32(number & 1) * metadata_half + (slot", "int32((slot"),
        (DISPATCH, "int32(half * metadata_half + slot", "int32(slot", 2),
    ),
    mutant(
        "LL05",
        "relaxed load in place of an acquire (number of an operation)",
        COMBINE_WITH_FLAGS_AHEAD,
        (
            PROTOCOL,
            "    found = ld_acquire_sys_s32(ctx.local, offset)\n    while",
            "    found = ld_relaxed_sys_s32(ctx.local, offset)\n    while",
        ),
        (
            PROTOCOL,
            "        found = ld_acquire_sys_s32(ctx.local, offset)\n    return not",
            "        found = ld_relaxed_sys_s32(ctx.local, offset)\n    return not",
        ),
    ),
    mutant(
        "LL06",
        "__syncthreads() weakened before another slot's rows replace those in shared memory",
        PAIR_AHEAD,
        (DISPATCH, "cuda.syncthreads()  # before another", "cuda.syncwarp()  # before another"),
    ),
    mutant(
        "LL07",
        "relaxed store in place of a release (combine has started)",
        COMBINE_WITH_FLAGS_AHEAD,
        (
            COMBINE,
            "                    st_release_sys_s32(remote, rank, number)",
            "                    st_relaxed_sys_s32(remote, rank, number)",
        ),
    ),
    mutant(
        "LL08",
        "an operation counted before all threads of the CTA have read its number",
        DISPATCH_AHEAD,
        (PROTOCOL, "    cuda.syncthreads()  # all threads have read the state\n", ""),
    ),
    mutant(
        "LL09",
        "__syncthreads() weakened before slots are added to the sets",
        MANY_EXPERTS,
        (
            DISPATCH,
            "            shared[sets_offset + i] = int32(0)\n        cuda.syncthreads()\n",
            "            shared[sets_offset + i] = int32(0)\n        cuda.syncwarp()\n",
        ),
    ),
    mutant(
        "LL10",
        "__syncthreads() weakened before the sets of slots are read",
        PAIR_AHEAD,
        (
            DISPATCH,
            "                wait_ns[peer] = waited + int64(globaltimer() - start)\n        cuda.syncthreads()\n",
            "                wait_ns[peer] = waited + int64(globaltimer() - start)\n        cuda.syncwarp()\n",
        ),
    ),
    mutant(
        "LL11",
        "__syncthreads() weakened after the rows of a slot are placed",
        PAIR_AHEAD,
        (
            DISPATCH,
            "                    cuda.syncthreads()\n                    for k in range(topk):\n",
            "                    cuda.syncwarp()\n                    for k in range(topk):\n",
        ),
    ),
    mutant(
        "LL12",
        "a payload word that equals the sentinel is sent",
        NANS,
        (DISPATCH, "clean(a), clean(b), clean(c), clean(d), clean(scale)", "a, b, c, d, scale"),
    ),
    mutant(
        "LL13",
        "only one word of a vector is polled",
        PAIR_AHEAD,
        (
            PROTOCOL,
            "return (a != SENTINEL) & (b != SENTINEL) & (c != SENTINEL) & (d != SENTINEL)",
            "return a != SENTINEL",
        ),
    ),
    mutant(
        "LL14",
        "double buffer of the weights reduced to one",
        TWO_SENDS,
        (COMBINE, "weights_offset + half * weights_half", "weights_offset", 2),
    ),
    mutant(
        "LL15",
        "a slot counts itself among the earlier ones",
        PACKED,
        (DISPATCH, "uint32(uint32(1 << (token & 31)) - uint32(1))", "uint32(uint32(2 << (token & 31)) - uint32(1))"),
    ),
    mutant(
        "LL16",
        "fence removed before a CTA counts itself as done",
        LATE_RANK,
        (PROTOCOL, "        fence_acq_rel_gpu()\n        if atom", "        if atom"),
    ),
    mutant(
        "LL17",
        "the exponents of a lane's own scale packed in place of those of four groups",
        EXPONENTS,
        (DISPATCH, "cuda.shfl_sync(FULL_MASK, scale, 8 * j)", "cuda.shfl_sync(FULL_MASK, scale, j)"),
    ),
    mutant(
        "LL18",
        "a scale rounded down to a power of two",
        ROUNDED_SCALES,
        (QUANTIZE, "int32((bits + 0x7FFFFF) >> 23)", "int32(bits >> 23)"),
    ),
    mutant(
        "LL19",
        "combine does not wait for all ranks to start",
        COMBINE_AHEAD,
        (COMBINE, "                wait_number(ctx, tid, number, STARTED, tid, int32(-1))\n", ""),
    ),
    mutant(
        "LL20",
        "the next item overwrites a row before it is sent",
        DISPATCH_AHEAD,
        (
            DISPATCH,
            "int32(item + senders), items, num_tokens, following)",
            "int32(item + senders), items, num_tokens, loaded)",
        ),
        (DISPATCH, "loaded[j] = following[j]", "pass"),
    ),
    mutant(
        "LL21",
        "the maximum of half of a group (sums in FP8)",
        FP8_SUMS,
        (QUANTIZE, "for step in (1, 2, 4, 8):", "for step in (1, 2, 4):"),
    ),
    mutant(
        "LL22",
        "a masked or late rank's sum counts as 0",
        (f"{TESTS}::test_a_masked_rank",),
        (
            COMBINE,
            "                            if targets >> uint32(r) & uint32(1) != uint32(0):\n"
            "                                if reads_own_rows",
            "                            if (targets & ~missing) >> uint32(r) & uint32(1) != uint32(0):\n"
            "                                if reads_own_rows",
        ),
    ),
]
