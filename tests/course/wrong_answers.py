"""Wrong answers to the exercises of the notebooks, and what the messages must match.

A row is ``(right, wrong, message)``: the solution's source with one passage replaced, which must occur once. Or it is
``(answer, message)`` with the text of another answer, which may name what the module of the exercises contains.
"""

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
    "low_latency-1": [
        ("epoch[0] % 2", "0", "threads wait for ever"),
        ("    st_relaxed_sys_s32(local, half, SENTINEL)\n", "", r"^thread order \d: rank .'s words\[\d\] is \d+, not"),
        ("while word == SENTINEL", "while False", r"^thread order \d: rank .'s words\[0\] is .*, not \d00"),
    ],
    "low_latency-2": [
        (".tril(-1)", ".tril()", r"^experts = .*: the result\[\d, \d\] is 1, not 0; "),
        ("flat >= 0", "flat >= -1", r"the result\[\d, \d\] is \d, not -1"),
        ("lambda experts: place_rows(experts)[:, 0]", r"the result has the shape \(5,\), not \(5, 2\)"),
    ],
    "low_latency-3": [("(2 * row_bytes)", "row_bytes", r"^model = PairModel\(.*: the result is .*, not ")],
    "moe_layer-1": [
        ("(2 * topk * bandwidth)", "(topk * bandwidth)", "^num_experts = 256, topk = 8, .*: the result is .*, not 659"),
        ("lambda *given: None", "the result is None, not "),
    ],
    "moe_layer-2": [
        (
            "range(inverse.shape[1])",
            "range(inverse.shape[1] - 1, -1, -1)",
            r"^thread order 0: out\[0, \d\] is .* are wrong",
        ),
        ("weights[token, k] * ", "", "^thread order 0: out.* of 32 are wrong"),
    ],
    "moe_layer-3": [("lambda experts, topk, ranks: min(topk, ranks)", "topk = 2, ranks = 2: the result is 2, not 1.5")],
}
