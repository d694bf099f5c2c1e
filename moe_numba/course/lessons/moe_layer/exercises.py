"""Exercises of the notebook on the experts of a layer."""

from math import comb

import numpy as np

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, float32

from moe_numba.course.exercises import Exercise

_SEEDS = 4


# 1: from which number of tokens on tensor cores are the limit

_LAYERS = [  # num_experts, topk, bytes of a weight, bytes per second, operations per second
    (256, 8, 1, 4.8e12, 1979e12),
    (128, 8, 2, 4.8e12, 989e12),
    (8, 2, 2, 2.0e12, 312e12),
]


def tokens_that_fill(num_experts, topk, weight_bytes, bandwidth, rate):
    return num_experts * weight_bytes * rate / (2 * topk * bandwidth)


def _fills(answer):
    for given in _LAYERS:
        found, wanted = answer(*given), tokens_that_fill(*given)
        if not abs(found - wanted) <= 1e-3 * wanted:
            experts, topk, size, bandwidth, rate = given
            read, one = experts * size / bandwidth, 2 * topk / rate
            return (
                f"with {experts} experts, top-{topk} and {size} bytes per weight you find {found:.4g} tokens. Per "
                f"weight of an expert, reading all experts takes {read:.3g} s, and {found:.4g} tokens compute for "
                f"{one * found:.3g} s; the two must be equal"
            )
    return None


# 2: a sum whose order does not depend on when threads run


@cuda.jit
def sum_in_order(rows, inverse, weights, out):
    token, column = cuda.blockIdx.x, cuda.threadIdx.x
    total = float32(0)
    for k in range(inverse.shape[1]):
        total += weights[token, k] * rows[inverse[token, k], column]
    out[token, column] = total


def _sums_in_order(kernel):
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
    for seed in range(_SEEDS):
        out = np.full((4, 8), np.nan, np.float32)
        with simulator.seed(seed):
            kernel[4, 8](rows, inverse, weights, out)
        if (wrong := np.argwhere(out != wanted)).size:
            token, column = wrong[0]
            return (
                f"with the thread order of seed {seed}, out[{token}, {column}] is {out[token, column]!s}, but the sum "
                f"in the order of k is {wanted[token, column]!s}; {len(wrong)} of 32 elements differ"
            )
    return None


# 3: how many ranks a token is sent to


def ranks_per_token(num_experts, topk, ranks):
    others = comb(num_experts - num_experts // ranks, topk)  # choices without an expert of a given rank
    return ranks * (1 - others / comb(num_experts, topk))


def _counts_ranks(answer):
    for given in ((8, 1, 2), (8, 2, 1), (8, 2, 2), (256, 8, 8), (256, 8, 64), (128, 8, 4)):
        found, wanted = answer(*given), ranks_per_token(*given)
        if not abs(found - wanted) <= 1e-6 * wanted:
            experts, topk, ranks = given
            return (
                f"with {experts} experts on {ranks} ranks and top-{topk} you find {found:.6g} ranks per token; the "
                f"expected number is {wanted:.6g}"
            )
    return None


EXERCISES = {
    1: Exercise(
        "a function of the experts, topk, bytes per weight, bandwidth and operations per second",
        _fills,
        "Both times are proportional to the weights of one expert, so these cancel. A token multiplies topk experts' "
        "weights once each, and a multiplication with its addition counts as two operations.",
        tokens_that_fill,
    ),
    2: Exercise(
        "a kernel that sums each token's rows in the order of k",
        _sums_in_order,
        "Give each element of out to one thread, which loops over k. The launch has a CTA per token and a thread per "
        "column.",
        sum_in_order,
    ),
    3: Exercise(
        "a function of the experts, topk and the number of ranks",
        _counts_ranks,
        "A rank receives no row if all topk experts are among those of other ranks. Count such choices with math.comb; "
        "the expected number of ranks is the sum of the ranks' probabilities.",
        ranks_per_token,
    ),
}
