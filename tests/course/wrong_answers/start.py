"""Wrong answers to the exercises of notebook 00: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32


@cuda.jit
def no_barrier(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    out[i] = tile[63 - i]


@cuda.jit
def half_a_barrier(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    if i < 32:
        cuda.syncthreads()
    out[i] = tile[63 - i]


@cuda.jit
def one_too_far(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    out[i] = tile[64 - i]


@cuda.jit
def copies(x, out):
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@cuda.jit
def misspelt(x, out):
    out[cuda.threadIdx.x] = y[cuda.threadIdx.x]  # noqa: F821


@cuda.jit
def plain_count(x, count):
    i = cuda.grid(1)
    if i < len(x) and x[i] > 0:
        count[0] = count[0] + 1


@cuda.jit
def no_guard(x, count):
    if x[cuda.grid(1)] > 0:
        cuda.atomic.add(count, 0, 1)


@cuda.jit
def first_block_only(x, count):
    i = cuda.threadIdx.x
    if i < len(x) and x[i] > 0 and cuda.blockIdx.x == 0:
        cuda.atomic.add(count, 0, 1)


WRONG = [
    ("start-3", 9, "two numbers are needed"),
    ("start-1", no_barrier, "two threads race: .* it needs cuda.syncthreads"),
    ("start-1", half_a_barrier, "not all threads reach the barrier|two threads race"),
    ("start-1", one_too_far, "an index is out of bounds: .* index 64 is outside the shared array"),
    ("start-1", copies, r"out\[0\] is 0, not 63; 64 of 64 elements are wrong"),
    ("start-1", misspelt, "NameError: name 'y' is not defined"),
    ("start-2", plain_count, "two threads race: .* it needs an atomic operation"),
    ("start-2", no_guard, r"an index is out of bounds: .* index 25\d "),
    ("start-2", first_block_only, "of 256 numbers 85 are positive; the kernel counts 21"),
    ("start-3", (9, 4.5), "the second number is wrong"),
    ("start-3", (4.5, 6), "the first number is wrong"),
    ("start-3", (9.75, 7.125), "the first and the second number is wrong"),
    ("start-4", lambda a, b: not ((a - b).abs() > 1e-3).any(), "never written: it is still NaN"),
    ("start-4", lambda a, b: bool((a == b).all()), "rejects a result whose largest error is 0.0001"),
    ("start-4", lambda a, b: bool((a - b <= 1e-3).all()), "accepts a result that is too small"),
    ("start-4", lambda a, b: bool((a - b).abs().mean() <= 1e-3), "wrong by 0.002: each error counts"),
    ("start-4", lambda a, b: not ((a.nan_to_num() - b).abs() > 1e-3).any(), "never written"),
    ("start-4", lambda a, b: True, "accepts a result of which one element is wrong by 1"),
    ("start-3", (9, ...), "not answered yet: the answer is two numbers, in microseconds"),
]
