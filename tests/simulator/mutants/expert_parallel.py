"""Planted bugs in dispatch and combine between ranks, and in the kernels before them."""

from .mutant import mutant

KERNELS = "moe_numba/expert_parallel/rings/"
NOTIFY, CHANNELS = KERNELS + "notify.py", KERNELS + "channels.py"
DISPATCH, COMBINE, DIRECT = KERNELS + "dispatch.py", KERNELS + "combine.py", KERNELS + "dispatch_direct.py"
PROGRESS, TOKEN_SLOT, PIPELINE = KERNELS + "progress.py", KERNELS + "token_slot.py", KERNELS + "bulk_pipeline.py"

BUFFER = "tests/expert_parallel/test_buffer.py"
EXCHANGE = (f"{BUFFER}::test_dispatch_and_combine[None-0-two]",)
LONG_ROWS = (f"{BUFFER}::test_dispatch_and_combine[None-0-long]",)
MANY_EXPERTS = (f"{BUFFER}::test_dispatch_and_combine[None-0-many experts]",)
SHORT_RINGS = (f"{BUFFER}::test_rings_of_one_slot[None-0]",)
AHEAD = (f"{BUFFER}::test_counts_are_not_overwritten_while_they_are_read[0]",)
WRAP_AROUND = (f"{BUFFER}::test_counters_wrap_around[int32]",)
MANY_CHANNELS = ("tests/expert_parallel/test_channels.py::test_several_channels_per_warp[2-0]",)
WRONG_HANDLES = (
    "tests/expert_parallel/test_buffer_faults.py",
    "-k",
    "test_a_corrupted_handle and out-rank_prefix-highest",
)
DIRECT_OUTPUT = ("tests/expert_parallel/test_dispatch_direct.py::test_dispatch_to_an_output[2-0-None-bf16]",)

MUTANTS = [
    mutant(
        "E01",
        "fence.proxy.async removed after a head is acquired",
        SHORT_RINGS,
        (
            DISPATCH,
            "head = uint32(ld_acquire_sys_s32(local, head_offset + channel * ranks + peer))\n"
            "                                pipeline.fence_acquired()\n",
            "head = uint32(ld_acquire_sys_s32(local, head_offset + channel * ranks + peer))\n",
        ),
    ),
    mutant(
        "E02",
        "fence.proxy.async removed after a tail is acquired",
        SHORT_RINGS,
        (
            DISPATCH,
            "if mask != uint32(0):\n                            pipeline.fence_acquired()\n",
            "if mask != uint32(0):\n",
        ),
    ),
    mutant(
        "E03",
        "fence.proxy.async.shared::cta removed (metadata of a token)",
        EXCHANGE,
        (
            TOKEN_SLOT,
            "            smem_i32[int32(staging + source_offset)] = token\n        pipeline.fence_staging()\n",
            "            smem_i32[int32(staging + source_offset)] = token\n",
        ),
    ),
    mutant(
        "E04",
        "fence.proxy.async.shared::cta removed (weights of combine)",
        EXCHANGE,
        (
            COMBINE,
            "topk_weights[from_row * topk + i]\n                                pipeline.fence_staging()\n",
            "topk_weights[from_row * topk + i]\n",
        ),
    ),
    mutant(
        "E05",
        "fence.proxy.async.shared::cta removed (sum of combine)",
        EXCHANGE,
        (
            COMBINE,
            "                        pipeline.fence_staging()\n                        cuda.syncwarp()  # all lanes",
            "                        cuda.syncwarp()  # all lanes",
        ),
    ),
    mutant(
        "E06",
        "system-scope fence before the flags removed",
        EXCHANGE,
        (PROGRESS, "                fence_acq_rel_sys()\n", ""),
    ),
    mutant(
        "E08",
        "plain store in place of a release in shared memory (progress)",
        EXCHANGE,
        (PROGRESS, "    st_release_cta_shared_u64(smem_u64, slot, uint64(", "    smem_u64[slot] = (uint64("),
    ),
    mutant(
        "E10",
        "progress overwritten before it is published",
        MANY_CHANNELS,
        (CHANNELS, "    if has_ring:\n        wait_published(smem_u64, progress_slot, published_slot)\n", ""),
    ),
    mutant(
        "E11",
        "__syncwarp() removed after cp.async.bulk.wait_group.read",
        EXCHANGE,
        (
            PIPELINE,
            "    wait_read()  # the lane that stored the previous row has read it\n    cuda.syncwarp()\n",
            "    wait_read()  # the lane that stored the previous row has read it\n",
        ),
    ),
    mutant(
        "E14",
        "a ring takes one row more than it has slots",
        LONG_ROWS,
        (PIPELINE, "        capacity = uint32(slots)\n", "        capacity = uint32(slots + 1)\n"),
    ),
    mutant(
        "E15",
        "only the sender counts one slot more",
        LONG_ROWS,
        (DISPATCH, "uint32(tail - base) % uint32(slots)", "uint32(tail - base) % uint32(slots + 1)"),
        (COMBINE, "uint32(tail - base) % uint32(slots)", "uint32(tail - base) % uint32(slots + 1)"),
    ),
    mutant(
        "E16",
        "phase of an mbarrier is not flipped",
        EXCHANGE,
        (PIPELINE, "return uint32(phase ^ uint32(1))", "return phase"),
    ),
    mutant(
        "E17",
        "an mbarrier expects too few bytes",
        EXCHANGE,
        (
            PIPELINE,
            "mbarrier_arrive_expect_tx(smem_u64, barrier, size_bytes)",
            "mbarrier_arrive_expect_tx(smem_u64, barrier, size_bytes - 16)",
        ),
    ),
    mutant(
        "E18",
        "an mbarrier expects one arrival too many",
        EXCHANGE,
        (PIPELINE, "mbarrier_init(smem_u64, barrier_offset + w, 1)", "mbarrier_init(smem_u64, barrier_offset + w, 2)"),
    ),
    mutant("E19", "fence.mbarrier_init removed", EXCHANGE, (PIPELINE, "        fence_mbarrier_init()\n", "")),
    mutant(
        "E20",
        "barrier removed after shared memory is initialised",
        DIRECT_OUTPUT,
        (
            PROGRESS,
            "        smem_i32[int32(done_offset + thread)] = int32(0)\n    cuda.syncthreads()\n",
            "        smem_i32[int32(done_offset + thread)] = int32(0)\n",
        ),
    ),
    mutant(
        "E22",
        "fences removed around the counter of finished CTAs",
        MANY_CHANNELS,
        (CHANNELS, "        fence_acq_rel_gpu()\n        if atom", "        if atom"),
        (CHANNELS, "            fence_acq_rel_gpu()\n            state", "            state"),
    ),
    mutant(
        "E24",
        "double buffer reduced to one",
        AHEAD,
        (NOTIFY, "(sequence & 1) * num_ranks + rank)", "(sequence & 0) * num_ranks + rank)"),
        (NOTIFY, "(sequence & 1) * num_ranks)", "(sequence & 0) * num_ranks)"),
    ),
    mutant(
        "E25",
        "barrier removed before the flag of the counts",
        EXCHANGE,
        (
            NOTIFY,
            "            cuda.syncthreads()\n\n            # ---- Raise the flag",
            "            # ---- Raise the flag",
        ),
    ),
    mutant(
        "E27",
        "sequence numbers compared without wrap-around",
        WRAP_AROUND,
        (NOTIFY, "while int32(found - expected) < 0:", "while found < expected:"),
    ),
    mutant(
        "E30",
        "cp.async.bulk.wait_group.read removed before shared memory is reused (combine)",
        EXCHANGE,
        (COMBINE, "pipeline.wait_read()  # the store of the previous sum", "pass  # the store of the previous sum"),
    ),
    mutant(
        "E31",
        "__syncwarp() removed after one lane's acquire",
        EXCHANGE,
        (COMBINE, "cuda.syncwarp()  # makes the rows", "pass  # makes the rows"),
    ),
    mutant(
        "E32",
        "out of bounds by one row",
        WRONG_HANDLES,
        (DIRECT, "selected and sent < max_rows", "selected and sent <= max_rows"),
    ),
    mutant(
        "E33",
        "volatile load of a head in place of an acquire (dispatch)",
        SHORT_RINGS,
        (
            DISPATCH,
            "head = uint32(ld_acquire_sys_s32(local, head_offset",
            "head = uint32(ld_volatile_s32(local, head_offset",
        ),
    ),
    mutant(
        "E34",
        "volatile load of a head in place of an acquire (combine)",
        SHORT_RINGS,
        (
            COMBINE,
            "head = uint32(ld_acquire_sys_s32(local, head_offset",
            "head = uint32(ld_volatile_s32(local, head_offset",
        ),
    ),
    mutant(
        "E36",
        "counters in shared memory not cleared",
        EXCHANGE,
        (
            NOTIFY,
            "                counts[c] = int32(0)\n            cuda.syncthreads()\n",
            "                pass\n            cuda.syncthreads()\n",
        ),
    ),
    mutant(
        "E37",
        "barrier removed after counters are cleared",
        EXCHANGE,
        (
            NOTIFY,
            "                counts[c] = int32(0)\n            cuda.syncthreads()\n",
            "                counts[c] = int32(0)\n",
        ),
    ),
    mutant(
        "E39",
        "cp.async.bulk.wait_group leaves one store too many",
        EXCHANGE,
        (PIPELINE, "wait_all_but_one = make_bulk_wait_group(1)", "wait_all_but_one = make_bulk_wait_group(2)"),
    ),
    mutant(
        "E40",
        "cp.async.bulk.wait_group.read in place of wait_group: rows read, but not yet written",
        EXCHANGE,
        (PIPELINE, "wait_all = make_bulk_wait_group(0)", "wait_all = make_bulk_wait_group_read(0)"),
        (PIPELINE, "wait_all_but_one = make_bulk_wait_group(1)", "wait_all_but_one = make_bulk_wait_group_read(1)"),
    ),
    mutant(
        "E43",
        "plain store in place of a release in shared memory (done flag)",
        EXCHANGE,
        (
            DISPATCH,
            "st_release_cta_shared_s32(smem_i32, done_offset + warp, 1)",
            "smem_i32[int32(done_offset + warp)] = int32(1)",
        ),
    ),
    mutant(
        "E44",
        "__syncwarp() removed before the done flag",
        MANY_EXPERTS,
        (
            DISPATCH,
            "            cuda.syncwarp()\n            if lane == 0:\n                st_release",
            "            if lane == 0:\n                st_release",
        ),
    ),
]
