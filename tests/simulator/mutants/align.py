"""Planted bugs in the alignment, in the fused gate and alignment, and in the kernel that appends shared experts."""

from .mutant import mutant

SHARED, LARGE = "moe_numba/align/device_functions.py", "moe_numba/align/large.py"
SORT = "moe_numba/align/counting_sort.py"
FEW, MEDIUM = "moe_numba/align/one_expert_per_warp.py", "moe_numba/align/medium.py"
GATE_ALIGN, FUSE = "moe_numba/align/with_gate.py", "moe_numba/shared_experts/kernel.py"
TESTS = "tests/align/test_align.py"
ORDERS = TESTS, "-k", "test_thread_orders and large"
FEW_ORDERS = TESTS, "-k", "test_thread_orders and few"
SORT_ORDERS = TESTS, "-k", "test_thread_orders and counting_sort"
LATE_INPUTS = ("tests/runtime/test_dependent_launch.py::test_inputs_are_read_after_the_wait[align, medium]",)
SHAPES = TESTS, "-k", "test_shapes and large and (1025 or 8192)"
PUBLISHED = TESTS, "-k", "test_counts_are_published_with_their_launch_number"
NEW_WORKSPACE = (f"{TESTS}::test_a_new_workspace_is_zeroed",)
TILES = (f"{TESTS}::test_tiles_of_8192_slots",)
FUSED = ("tests/align/test_gate_align.py::test_thread_orders[0]",)
ROUTING = "tests/moe_layer/test_fuse_routing.py", "-k", "test_equals_reference and 7-3"

MUTANTS = [
    mutant(
        "A02",
        "barrier removed in the scan",
        ORDERS,
        (
            SHARED,
            "            warp_sums[warp] = inclusive\n        cuda.syncthreads()",
            "            warp_sums[warp] = inclusive",
        ),
    ),
    mutant(
        "A04",
        "counter not reset between calls",
        ORDERS,
        (
            LARGE,
            "            st_relaxed_gpu_s32(workspace, CTAS_DONE, 0)  # the last CTA: all counts have been read\n",
            "",
        ),
    ),
    mutant(
        "A06",
        "barrier removed before the counter of finished CTAs",
        ORDERS,
        (
            LARGE,
            "sum_counts(workspace, launch_number, counts)\n        cuda.syncthreads()",
            "sum_counts(workspace, launch_number, counts)",
        ),
    ),
    mutant(
        "A07",
        "flag published before its data: two 32-bit stores in place of one of 64 bits",
        PUBLISHED,
        (
            LARGE,
            "                st_relaxed_gpu_u64(workspace, row + 2 * i, (uint64(launch_number) << uint64(32)) | "
            "uint64(word))",
            "                workspace[row + 2 * i + 1] = int32(launch_number)\n"
            "                workspace[row + 2 * i] = int32(word)",
        ),
    ),
    mutant(
        "A09",
        "barrier removed before a tile's memory is reused (write after read)",
        SORT_ORDERS,
        (SORT, "                break\n            cuda.syncthreads()\n", "                break\n"),
    ),
    mutant(
        "A10",
        "__syncwarp() removed between reads and writes of counters",
        ORDERS,
        (LARGE, "earlier = counters[counter]\n                cuda.syncwarp()\n", "earlier = counters[counter]\n"),
    ),
    mutant(
        "A11",
        "padding starts one element late",
        ORDERS,
        (
            SHARED,
            "counts[uint32(bucket + uint32(capacity))] + lane\n",
            "counts[uint32(bucket + uint32(capacity))] + lane + 1\n",
        ),
    ),
    mutant(
        "A12", "bit field one bit too narrow for the largest tiles", TILES, (SHARED, "SLOT_BITS = 13", "SLOT_BITS = 12")
    ),
    mutant(
        "A15",
        "workspace not zeroed at first",
        NEW_WORKSPACE,
        ("moe_numba/runtime/workspace.py", "return torch.zeros(num_elements", "return torch.empty(num_elements"),
    ),
    mutant(
        "A16",
        "clearing shared memory leaves the last 16 bytes",
        SHAPES,
        (SHARED, "if i < uint32(num_vectors):", "if i < uint32(num_vectors - 1):"),
    ),
    mutant("A17", "griddepcontrol.wait removed", LATE_INPUTS, (MEDIUM, "        griddepcontrol_wait()\n", "")),
    mutant(
        "A18",
        "__syncwarp() removed after counters are stored",
        SHAPES,
        (
            LARGE,
            "counters[counter] = int32(earlier + int32(cuda.popc(same_bucket)))\n                cuda.syncwarp()\n",
            "counters[counter] = int32(earlier + int32(cuda.popc(same_bucket)))\n",
        ),
    ),
    mutant(
        "A19",
        "barrier removed after the first rows are computed",
        ORDERS,
        (LARGE, "counts[i] - places[i])\n        cuda.syncthreads()\n", "counts[i] - places[i])\n"),
    ),
    mutant(
        "A20",
        "barrier removed before a tile's rows are stored, and before the next tile overwrites them",
        SORT_ORDERS,
        (
            SORT,
            "            cuda.syncthreads()\n\n            for k in range(slots_per_thread):\n                j =",
            "\n            for k in range(slots_per_thread):\n                j =",
        ),
    ),
    mutant(
        "A21",
        "number of launches not stored",
        SORT_ORDERS,
        (SORT, "st_relaxed_gpu_s32(workspace, LAUNCH_COUNT, int32(launch_number))", "pass"),
    ),
    mutant(
        "A22",
        "barrier removed after the sums of all CTAs are received",
        SORT_ORDERS,
        (
            SORT,
            "receive_sums(num_experts, workspace, launch_number, counts)\n                cuda.syncthreads()",
            "receive_sums(num_experts, workspace, launch_number, counts)",
        ),
    ),
    mutant(
        "A23",
        "flag published before its number: two 32-bit stores in place of one of 64 bits",
        PUBLISHED,
        (
            SORT,
            "        st_relaxed_gpu_u64(workspace, int64(HEADER_WORDS) + 2 * int64(position), word)",
            "        workspace[int64(HEADER_WORDS) + 2 * int64(position) + 1] = int32(launch_number)\n"
            "        workspace[int64(HEADER_WORDS) + 2 * int64(position)] = int32(value)",
        ),
    ),
    mutant(
        "A24",
        "__syncwarp() removed between the atomics of a warp and its reads",
        SORT_ORDERS,
        (SORT, "counter, int32(1))\n                        cuda.syncwarp()\n", "counter, int32(1))\n"),
    ),
    mutant(
        "A25",
        "__syncwarp() removed between reads of counters and the next atomics",
        SORT_ORDERS,
        (
            SORT,
            "next_place[k] = counters[counter]\n                        cuda.syncwarp()\n",
            "next_place[k] = counters[counter]\n",
        ),
    ),
    mutant(
        "A26",
        "barrier removed before the counts of a tile are scanned",
        SORT_ORDERS,
        (SORT, "            cuda.syncthreads()\n            is_first =", "            is_first ="),
    ),
    mutant(
        "C04",
        "barrier removed between the counting and the alignment's loads",
        FUSED,
        (GATE_ALIGN, "        cuda.syncthreads()\n        griddepcontrol_launch", "        griddepcontrol_launch"),
    ),
    mutant(
        "C05",
        "__syncwarp() in place of a barrier",
        FEW_ORDERS,
        (
            FEW,
            "        cuda.syncthreads()\n        griddepcontrol_launch",
            "        cuda.syncwarp()\n        griddepcontrol_launch",
        ),
    ),
    mutant(
        "S01",
        "out of bounds by one element",
        ROUTING,
        (FUSE, "if element < num_elements:", "if element <= num_elements:"),
    ),
    mutant(
        "S02",
        "32-bit product in an address",
        ROUTING,
        (FUSE, "routing_row = int64(token) * topk", "routing_row = int32(token * topk)"),
        equivalent="the output has at most 2**31 - 1 elements, and more columns than the routing: the product is at "
        "most the number of an output element, which is an int32",
    ),
]
