"""Exercises of the notebook on the experts of a layer."""

from math import comb

import numpy as np

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, function_test, kernel_test

# 1: from which number of tokens on tensor cores are the limit

_LAYERS = [  # num_experts, topk, bytes of a weight, bytes per second, operations per second
    (256, 8, 1, 4.8e12, 1979e12),
    (128, 8, 2, 4.8e12, 989e12),
    (8, 2, 2, 2.0e12, 312e12),
]


def tokens_that_fill(num_experts, topk, weight_bytes, bandwidth, rate):
    return num_experts * weight_bytes * rate / (2 * topk * bandwidth)


# 2: a sum whose order does not depend on when threads run


@cuda.jit
def sum_in_order(rows, inverse, weights, out):
    token, column = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0)
    for k in range(inverse.shape[1]):
        total += weights[token, k] * rows[inverse[token, k], column]
    out[token, column] = total


def _sums():
    random = np.random.default_rng(0)
    inverse = random.permutation(12).astype(np.int32).reshape(4, 3)
    rows = random.standard_normal((12, 8)).astype(np.float32)
    # Large terms that cancel: each order of the sum gives other bits.
    rows[inverse[:, 0]] += 4096
    rows[inverse[:, 2]] -= 4096
    weights = np.array([[1, 0.25, 1], [0.5, 3, 0.5], [1, 1, 1], [2, 0.75, 2]], np.float32)
    wanted = np.zeros((4, 8), np.float32)
    for k in range(3):
        wanted += weights[:, k, None] * rows[inverse[:, k]]
    out = np.full((4, 8), np.nan, np.float32)
    return Run((4, 8), {"rows": rows, "inverse": inverse, "weights": weights, "out": out}, {"out": wanted})


# 3: how many ranks a token is sent to


def ranks_per_token(num_experts, topk, ranks):
    others = comb(num_experts - num_experts // ranks, topk)  # choices without an expert of a given rank
    return ranks * (1 - others / comb(num_experts, topk))


_SIZES = (8, 1, 2), (8, 2, 1), (8, 2, 2), (256, 8, 8), (256, 8, 64), (128, 8, 4)


EXERCISES = {
    1: Exercise(
        "a function of the experts, topk, bytes per weight, bandwidth and operations per second",
        function_test(tokens_that_fill, _LAYERS, rtol=1e-3),
        "Both times are proportional to the weights of one expert, so these cancel. A token multiplies topk experts' "
        "weights once each, and a multiplication with its addition counts as two operations.",
        tokens_that_fill,
    ),
    2: Exercise(
        "a kernel that sums each token's rows in the order of k",
        kernel_test(_sums(), seeds=4),
        "Give each element of out to one thread, which loops over k. The launch has a CTA per token and a thread per "
        "column.",
        sum_in_order,
    ),
    3: Exercise(
        "a function of the experts, topk and the number of ranks",
        function_test(ranks_per_token, _SIZES, rtol=1e-6),
        "A rank receives no row if all topk experts are among those of other ranks. Count such choices with math.comb; "
        "the expected number of ranks is the sum of the ranks' probabilities.",
        ranks_per_token,
    ),
}
