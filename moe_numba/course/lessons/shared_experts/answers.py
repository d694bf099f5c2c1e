"""The lesson's own answers to the exercises of "Shared experts"."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import torch
from numba import cuda, float32, int32, uint32

from moe_numba.course.lessons.shared_experts.sizes import GATE_EXPERTS, GATE_TOPK


def nine_weights(weights, s, renormalize, scaled):
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    nine = torch.cat([weights, torch.full_like(weights[:, :1], 1 / s)], dim=1)
    return nine * s if scaled else nine


def rounds(counts, tile_rows, across, sms):
    columns = [-(-rows // tile_rows) for rows in counts]
    single = -(-sum(columns) * across // sms)
    return single, max(single, max(columns))


@cuda.jit
def append_column(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    i = int32(cuda.grid(1))
    token = int32(uint32(i) // uint32(topk + 1))
    column = int32(i - token * (topk + 1))
    if token < tokens:
        weight, expert = shared_weight, int32(num_experts + int32(uint32(token) % uint32(replicas)))
        if column < topk:
            weight, expert = topk_weights[token * topk + column], topk_ids[token * topk + column]
        elif topk_ids[token * topk] < 0:
            weight, expert = float32(0), int32(-1)
        weights[i] = weight
        ids[i] = expert


@cuda.jit(device=True)
def store_nine(weights, ids, token, lane, weight, expert):
    if lane < GATE_TOPK + 1:
        shared = lane == GATE_TOPK
        weights[token * (GATE_TOPK + 1) + lane] = float32(1) if shared else weight
        ids[token * (GATE_TOPK + 1) + lane] = int32(GATE_EXPERTS) if shared else expert
