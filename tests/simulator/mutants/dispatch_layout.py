"""Planted bugs in the dispatch layout."""

from .mutant import mutant

LAYOUT = "moe_numba/expert_parallel/layout/kernel.py"
TESTS = "tests/expert_parallel/test_dispatch_layout.py"
ORDERS = TESTS, "-k", "test_any_order_of_the_threads"
BAD_IDS = (f"{TESTS}::test_invalid_experts_are_not_counted",)

MUTANTS = [
    mutant(
        "L01",
        "addition in shared memory is not atomic",
        ORDERS,
        (LAYOUT, "cuda.atomic.add(counts, chosen[k], int32(1))", "counts[chosen[k]] = int32(counts[chosen[k]] + 1)"),
    ),
    mutant(
        "L02",
        "peers are written before their wait for the cluster",
        ORDERS,
        (
            LAYOUT,
            "        cuda.syncthreads()\n        barrier_cluster_wait()\n        for v",
            "        cuda.syncthreads()\n        for v",
        ),
        (
            LAYOUT,
            "        cuda.syncwarp()\n        barrier_cluster_arrive()\n        barrier_cluster_wait()\n",
            "        cuda.syncwarp()\n        barrier_cluster_wait()\n"
            "        barrier_cluster_arrive()\n        barrier_cluster_wait()\n",
        ),
    ),
    mutant(
        "L04",
        "id cut to 32 bits before its range is checked",
        BAD_IDS,
        (
            LAYOUT,
            "expert = topk_idx[int64(token) * topk + int64(member)]",
            "expert = int32(topk_idx[int64(token) * topk + int64(member)])",
        ),
    ),
    mutant(
        "L05",
        "__syncwarp() before shuffles removed",
        ORDERS,
        (
            LAYOUT,
            "            cuda.syncwarp()\n            for s in range(lane_bits):",
            "            for s in range(lane_bits):",
        ),
        equivalent="shfl.sync with a full mask waits for the warp itself, and no lane then reads memory that another "
        "one wrote before",
    ),
]
