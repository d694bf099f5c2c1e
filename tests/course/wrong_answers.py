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
}
