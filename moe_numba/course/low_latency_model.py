"""Latencies on two H200s, measured before the low-latency kernels were written, and a model of the pair's time.

Measured on 2026-11-22 on two H200s of one node, hidden 7168, top-8 of 256 experts, in CUDA graphs. The primitives and
the prototype are CUDA C++ programs. These are no records: the programs are not part of the repository. All times are
microseconds.
"""

from math import comb

MEASURED = "two NVIDIA H200s of one node, 2026-11-22"
ONE_WAY_US = 0.73  # half of a ping-pong between flags in the peers' memory, over NVLink
FENCED_WAY_US = 1.33  # the same with fence.sys before each flag
TWO_EMPTY_KERNELS_US, TWO_DEPENDENT_KERNELS_US = 1.14, 0.91  # nodes of a graph; with programmatic dependent launch

# Normal dispatch and combine through ring buffers, one token: the kernels, and the pair. Dispatch starts early, under
# notify, by programmatic dependent launch.
NORMAL_KERNELS_US = {"notify": 7.8, "dispatch": 16.5, "combine": 10.8}
NORMAL_PAIR_US = 33.7

# A prototype of the pair without packing, by tokens of a rank.
PROTOTYPE_US = {
    "flags after data": {1: 10.7, 8: 11.2, 32: 13.5, 128: 21.8, 256: 34.0},
    "data as its own flag": {1: 9.3, 8: 9.6, 32: 11.1, 128: 20.3, 256: 32.1},
}

# The model: a constant for all latencies of a pair, and the bytes of each way at the bandwidth that the prototype got.
MODEL_US, MODEL_GBPS = 9.7, 355


def bytes_each_way(ranks: int, tokens: int, hidden: int = 7168, topk: int = 8, num_experts: int = 256) -> float:
    """Return the bfloat16 bytes that a rank sends to other ranks in a dispatch, or receives in a combine.

    All sets of experts are equally likely; a row is sent once to each rank that has one of the token's experts.
    """
    elsewhere = comb(num_experts - num_experts // ranks, topk) / comb(num_experts, topk)
    return tokens * (ranks - 1) * (1 - elsewhere) * 2 * hidden


def pair_us(ranks: int, tokens: int, hidden: int = 7168, topk: int = 8, num_experts: int = 256) -> float:
    """Return the model's time of a dispatch and a combine in bfloat16, in microseconds."""
    return MODEL_US + 2 * bytes_each_way(ranks, tokens, hidden, topk, num_experts) / (MODEL_GBPS * 1e3)
