"""Wrong answers to the exercises of notebook 01: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32

PAIRS = ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2))


@cuda.jit
def max_of_the_warp(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    for r in range(5):
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << r))
    out[lane] = value


@cuda.jit
def max_in_two_branches(x, out):
    lane = cuda.threadIdx.x
    value, half = x[lane], lane // 16
    if half == 0:
        for r in range(4):
            value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << r))
    else:
        for r in range(4):
            value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << r))
    out[lane] = value


@cuda.jit
def max_in_eight_rounds(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    for r in range(8):
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << (r % 4)))
    out[lane] = value


@cuda.jit
def sort_four_with_or(keys, slots):
    row = cuda.threadIdx.x
    key, slot = cuda.local.array(4, int32), cuda.local.array(4, int32)
    for i in range(4):
        key[i], slot[i] = keys[row, i], slots[row, i]
    for step in range(5):
        i, j = PAIRS[step]
        swap = key[j] > key[i] or (key[j] == key[i] and slot[j] < slot[i])
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    for i in range(4):
        keys[row, i], slots[row, i] = key[i], slot[i]


@cuda.jit
def sort_four_with_inner_and(keys, slots):
    row = cuda.threadIdx.x
    key, slot = cuda.local.array(4, int32), cuda.local.array(4, int32)
    for i in range(4):
        key[i], slot[i] = keys[row, i], slots[row, i]
    for step in range(5):
        i, j = PAIRS[step]
        swap = (key[j] > key[i]) | (key[j] == key[i] and slot[j] < slot[i])
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    for i in range(4):
        keys[row, i], slots[row, i] = key[i], slot[i]


@cuda.jit
def sort_four_without_parentheses(keys, slots):
    row = cuda.threadIdx.x
    key, slot = cuda.local.array(4, int32), cuda.local.array(4, int32)
    for i in range(4):
        key[i], slot[i] = keys[row, i], slots[row, i]
    for step in range(5):
        i, j = PAIRS[step]
        swap = key[j] > key[i] | (key[j] == key[i] & slot[j] < slot[i])
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    for i in range(4):
        keys[row, i], slots[row, i] = key[i], slot[i]


@cuda.jit
def sort_four_without_ties(keys, slots):
    row = cuda.threadIdx.x
    key, slot = cuda.local.array(4, int32), cuda.local.array(4, int32)
    for i in range(4):
        key[i], slot[i] = keys[row, i], slots[row, i]
    for step in range(5):
        i, j = PAIRS[step]
        swap = key[j] > key[i]
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    for i in range(4):
        keys[row, i], slots[row, i] = key[i], slot[i]


@cuda.jit
def sort_four_keys_only(keys, slots):
    row = cuda.threadIdx.x
    key = cuda.local.array(4, int32)
    for i in range(4):
        key[i] = keys[row, i]
    for step in range(5):
        i, j = PAIRS[step]
        key[i], key[j] = max(key[i], key[j]), min(key[i], key[j])
    for i in range(4):
        keys[row, i] = key[i]


WRONG = [
    ("gate-1", max_of_the_warp, "lane 16 has 31; the maximum of lanes 16 to 31 is 30"),
    ("gate-1", max_in_two_branches, "a shuffle is in a branch that only some lanes take"),
    ("gate-1", max_in_eight_rounds, "the result is right after 8 shuffles; 16 lanes need 4"),
    ("gate-2", [...] * 8, "not answered yet"),
    ("gate-2", [9, 8, 7, 6, 4, 3, 2, 1], "4 groups are kept, as they should be"),
    ("gate-2", [9, 9, 9, 6, 5, 3, 2, 1], "4 groups are kept, as they should be"),
    ("gate-2", [float("nan")] * 8, "eight finite numbers"),
    ("gate-2", [5, 5], "the answer has 2 numbers; one for each of 8 groups is needed"),
    ("gate-3", lambda bits: ..., "not answered yet: return an int"),
    ("gate-3", lambda bits: None, "the key of bits -8388608 is None, which is no integer"),
    ("gate-3", lambda bits: bits, "-inf < -3.40282e.38, but their keys are"),
    ("gate-3", lambda bits: bits ^ (bits >> 31), "-inf < -3.40282e.38, but their keys are|-1e-30 < 0"),
    ("gate-3", lambda bits: -bits, r"which is no int32|but their keys are"),
    ("gate-4", sort_four_with_or, "it sorts, but its machine code has [1-9][0-9]* branch instructions"),
    ("gate-4", sort_four_with_inner_and, "branch instructions|an `and` or `or` is left"),
    ("gate-4", sort_four_without_parentheses, "put each comparison in parentheses"),
    ("gate-4", sort_four_without_ties, "of equal keys the lower slot must come first"),
    ("gate-4", sort_four_keys_only, r"the keys \[.*\] become the \(key, slot\) pairs|the lower slot must come first"),
]
