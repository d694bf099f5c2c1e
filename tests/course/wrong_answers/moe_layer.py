"""Wrong answers to the exercises of notebook 11: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32


@cuda.jit
def sum_by_atomics(rows, inverse, weights, out):
    token, k = cuda.blockIdx.x, cuda.threadIdx.x
    out[token, k] = 0
    cuda.syncthreads()
    if k < inverse.shape[1]:
        for column in range(out.shape[1]):
            cuda.atomic.add(out, (token, column), weights[token, k] * rows[inverse[token, k], column])


@cuda.jit
def sum_from_the_end(rows, inverse, weights, out):
    token, column = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0)
    for k in range(inverse.shape[1] - 1, -1, -1):
        total += weights[token, k] * rows[inverse[token, k], column]
    out[token, column] = total


@cuda.jit
def no_weights(rows, inverse, weights, out):
    token, column = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0)
    for k in range(inverse.shape[1]):
        total += rows[inverse[token, k], column]
    out[token, column] = total


WRONG = [
    ("moe_layer-1", lambda e, k, size, bandwidth, rate: e * size * rate / bandwidth, "the two must be equal"),
    ("moe_layer-1", lambda e, k, size, bandwidth, rate: e * size * rate / (k * bandwidth), "top-8 and 1 bytes"),
    ("moe_layer-1", lambda *given: 64, "you find 64 tokens"),
    ("moe_layer-2", sum_by_atomics, r"but the sum in the order of k is"),
    ("moe_layer-2", sum_from_the_end, r"out\[0, \d\] is .*elements differ"),
    ("moe_layer-2", no_weights, "elements differ"),
    ("moe_layer-3", lambda experts, topk, ranks: min(topk, ranks), "top-2 you find 2 ranks per token"),
    ("moe_layer-3", lambda e, k, ranks: ranks * (1 - (1 - 1 / ranks) ** k), "the expected number is"),
]
