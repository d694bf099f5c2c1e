"""Wrong answers to the exercises of the notebooks, and what the messages must match.

A row is ``(right, wrong, message)``: the solution's source with one passage replaced, which must occur once. Or it is
``(answer, message)`` with the text of another answer, which may name what the module of the exercises contains.
"""

FIRST_BARRIER = "    barrier_cluster_arrive()\n    barrier_cluster_wait()  # all CTAs have started\n"
LAST_BARRIER = "    barrier_cluster_arrive()\n    barrier_cluster_wait()  # all CTAs have stored\n"
SUM_OF_CTAS = (
    "    parts = cuda.shared.array(8, int32)\n    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())\n"
)
READ_ROW, STORE_HEAD = (
    "            out[n] = local[RING + n % SLOTS]\n",
    "            st_release_sys_s32(local, HEAD, int32(n + 1))\n",
)

WRONG = {
    "start-1": [
        ("    cuda.syncthreads()\n", "", "^two threads race: .* it needs cuda.syncthreads"),
        ("    cuda.sync", "    if i < 32:\n        cuda.sync", "not all threads reach the barrier|two threads race"),
        ("63 - i", "64 - i", "^an index is out of bounds: .* index 64 is outside the shared array"),
        ("tile[63 - i]", "tile[i]", r"^out\[0\] is 0.*, not 63.*; 64 of 64 are wrong"),
        ("= x[i]", "= y[i]", "^NameError: name 'y' is not defined; in the line `tile"),
        (
            "= tile[63 - i]",
            "= x[63 - i]",
            "^right, but with 0 loads of a warp from shared memory; at least 2 are needed",
        ),
    ],
    "start-2": [
        (
            "cuda.atomic.add(count, 0, int32(1))",
            "count[0] += 1",
            "^256 numbers: two threads race: .* an atomic operation",
        ),
        ("i < len(x) and ", "", r"^250 numbers: an index is out of bounds: .* index 25\d "),
        ("cuda.grid(1)", "cuda.threadIdx.x + 64 * 0 * cuda.grid(1)", r"^256 numbers: count\[0\] is 84, not 85"),
        (
            "    if i < len(x) and x[i] > 0:\n        cuda.atomic.add(count, 0, int32(1))",
            "    if i == 0:\n        for k in range(len(x)):\n            if x[k] > 0:\n                count[0] += 1",
            "^250 numbers: right, but with 333 loaded sectors; at most 40 are needed",
        ),
    ],
    "start-4": [
        ("9", "^2 numbers are needed, in parentheses"),
        ("(9, 4.5)", "^number 2, 4.5, is wrong$"),
        ("(6, 6)", "^number 1, 6, is wrong$"),
        ("(9.75, 7.125)", "^number 1, 9.75, and number 2, 7.125, are wrong$"),
        ("(9, ...)", "^not answered yet: the answer is two numbers, in microseconds"),
    ],
    "start-5": [
        ("lambda a, b: not ((a - b).abs() > 1e-3).any()", "never written: it is NaN: the result is True, not False"),
        ("lambda a, b: bool((a == b).all())", "largest error is 0.0001: the result is False, not True"),
        ("lambda a, b: bool((a - b <= 1e-3).all())", "^a result that is too small: the result is True, not False"),
        ("lambda a, b: (a - b).abs().mean() <= 1e-3", "wrong by 0.002: the result is True, not False"),
        ("lambda a, b: True", "one element is wrong by 1: the result is True, not False"),
    ],
    "dispatch_layout-1": [
        (
            "seen = int32(seen | bit)",
            "seen = bit",
            r"^a token with the experts \[2, 5, 1, 12\]: per_rank\[0\] is 2, not 1; ",
        ),
        (
            "if not seen & bit",
            "if True",
            r"^a token with the experts \[0, 1, 2, 3\]: per_rank\[0\] is 4, not 1; 1 of 4",
        ),
        (
            "cuda.atomic.add(per_rank, expert // experts_per_rank, int32(1))",
            "per_rank[expert // experts_per_rank] += 1",
            "^64 tokens: two threads race: .*per_rank",
        ),
        ("expert >= 0", "expert > 0", r"per_rank\[0\] is 0, not 1"),
    ],
    "dispatch_layout-2": [
        (
            "if lane == 0:\n            cuda.atomic.add(per_rank, rank, count)",
            "if flag:\n            cuda.atomic.add(per_rank, rank, 1)",
            r"^104 tokens: right, but with \d+ global atomics; at most 32",
        ),
        (
            "        count = cuda.popc(uint32(cuda.ballot_sync",
            "        count = flag and cuda.popc(uint32(cuda.ballot_sync",
            "a lane is missing",
        ),
        ("token < flags.shape[0] and ", "", "^104 tokens: an index is out of bounds: .* outside flags"),
        ("cuda.atomic.add(per_rank, rank, count)", "per_rank[rank] += count", "two threads race"),
        ("if lane == 0", "if cuda.threadIdx.x == 0", r"^128 tokens: per_rank\[0\] is 64, not 128"),
    ],
    "dispatch_layout-3": [
        (
            "rows[2 * i + t // 32, t % 32] =",
            "rows[t, i] =",
            "^right, but with 1984 bank conflicts; at most 0 are needed",
        ),
        ("(64, 32)", "(64, 33)", "^right, but with 8448 bytes of shared memory; at most 8192"),
        (
            "    rows = cuda.shared.array((64, 32), int32)\n    t = cuda.threadIdx.x\n",
            "    t = cuda.threadIdx.x\n    if t < 32:\n        per_expert[t] = 0\n        for i in range(64):\n"
            "            per_expert[t] += ids[i] == t\n    return\n    rows = cuda.shared.array((64, 32), int32)\n",
            "^right, but with 0 bytes of shared memory; at least 8192 are needed",
        ),
        ("int32(0)\n    cuda.syncthreads()\n", "int32(0)\n", "^two threads race"),
        ("rows[2 * i + t // 32, t", "rows[i, t", r"^per_expert\[0\] is -?\d+, not 13|it reads memory that nothing"),
    ],
    "dispatch_layout-4": [
        (FIRST_BARRIER, "", "^thread order 0: the CTAs of a cluster are not synchronised: .* may not have started"),
        (LAST_BARRIER, "    cuda.syncthreads()\n", "^thread order 0: it reads memory that nothing has written"),
        ("arrive()\n    barrier_cluster_wait()  # all CTAs have started", "wait()", "arrived"),
        ("parts, cta, t, counts", "parts, t, cta, counts", r"^thread order 0: sums\[0\] is \d+, not \d+; "),
        (
            SUM_OF_CTAS,
            SUM_OF_CTAS + "    if t == 0:\n        sums[cta] = 0\n        for other in range(8):\n"
            "            sums[cta] += counts[8 * other + cta]\n    return\n",
            "^right, but with 0 bytes stored to other CTAs; at least 224 are needed",
        ),
    ],
    "ring_buffer_dispatch-1": [
        (
            "lambda ranks, cta, link: -(-link // cta)",
            "^ranks = 2, cta_gbps = 50, link_gbps = 350: the result is 7, not 14",
        ),
        ("lambda ranks, cta, link: None", "the result is None, not 14"),
    ],
    "ring_buffer_dispatch-2": [
        (" if source else 0", "", "source = 0, rank = 0: the result is .*, not 0"),
        ("- start - 1", "+ start", "start = -1, source = 0, rank = 0: the result is -1, not 0"),
    ],
    "ring_buffer_dispatch-3": [
        (">= SLOTS", "> SLOTS", r"^11 rows, thread order \d: (out\[0\] is 104, not 100|two threads race)"),
        (READ_ROW + STORE_HEAD, STORE_HEAD + READ_ROW, "^11 rows, thread order .: two threads race"),
        (STORE_HEAD, "", "^11 rows, thread order 0: threads wait for ever"),
        ("HEAD, int32(n + 1)", "HEAD, int32(n)", "^11 rows, thread order 0: HEAD is 10, not 11"),
        (">= SLOTS", ">= SLOTS - 1", "^rank 1 receives nothing, and 4 rows fit, thread order 0: threads wait for ever"),
    ],
    "ring_buffer_dispatch-4": [
        ("            cuda.syncwarp()\n", "", "^thread order .: two threads race"),
        ("            fence_acq_rel_sys()\n", "", "^thread order .: two threads race"),
        ("st_release_cta_shared_s32(posted, warp, 1)", "posted[warp] = 1", "two threads race: .*shared array"),
        ("elif lane < 2", "elif lane < 1", "threads wait for ever"),
        (
            "                st_release_cta_shared_s32(posted, warp, 1)\n        elif lane < 2:",
            "                st_release_sys_s32(remote, warp, 1)\n        elif lane < 0:",
            r"^right, but with \d+ flags that warps 0 and 1 store; at most 0",
        ),
    ],
    "combine-1": [
        ("(..., ..., ...)", "^not answered yet"),
        ("(1, 1, 256)", "^the sum is 258 in both cases"),
        ("(257, 1, 1)", "^257 is no bfloat16 number; the nearest is 256"),
        ("(1, float('inf'), 0)", "^three finite numbers are needed"),
        ("(256, 1)", "^three finite numbers are needed"),
        ("None", "^TypeError: 'NoneType' object is not iterable"),
    ],
    "combine-2": [
        ("    if later == uint32(0):\n        following = int32(NO_HEAD)\n", "", r"filled\[\d+\] is .*, not -"),
        ("following = cuda.shfl_sync(", "following = 0 if position >= 0 else cuda.shfl_sync(", "a lane is missing"),
        (" >> uint32(1)", "", r"filled\[0\] is .*, not -1; "),
    ],
    "combine-3": [
        ("ceil(", "(", "the result is 1.1.*, not 2"),
        ("* rows * 16", "* 16", "^bandwidth = 4.2e.12, latency_ns = 600, .* rows = 2: the result is 3, not 2"),
    ],
    "combine-4": [
        ("< SLOTS", "<= SLOTS", r"^sources is \[\[2, 2.*, thread order 0: out\[0, 0\] is 116, not 114"),
        ("< SLOTS", "< SLOTS - 1", "^rank 0 has 2 rows for each rank, and no rank receives, .*: threads wait for ever"),
        ("rows[0] or tail", "rows[0] and tail", "threads wait for ever"),
        ("tail[to] < rows[to] and ", "", "an index is out of bounds"),
    ],
}
