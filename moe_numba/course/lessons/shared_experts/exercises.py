"""Exercises of the notebook on shared experts."""

import weakref
from itertools import product

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, Wrong, expect_between, function_test, kernel_test

# 1: the weights of a fused layer


def nine_weights(weights, s, renormalize, scaled):
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    nine = torch.cat([weights, torch.full_like(weights[:, :1], 1 / s)], dim=1)
    return nine * s if scaled else nine


_WEIGHTS = torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
_FACTORS = {
    f"s = {s}, renormalize = {renormalize}, scaled = {scaled}": (_WEIGHTS, s, renormalize, scaled)
    for s, renormalize, scaled in product((2.5, 1.0), (True, False), (False, True))
}


# 2: a column for replicas


@cuda.jit
def append_replica(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            padding = topk_ids[token, 0] < 0
            weights[token, column] = float32(0) if padding else shared_weight
            ids[token, column] = int32(-1) if padding else int32(num_experts + token % replicas)


_EXPERTS, _PADDING = 256, 5  # token 5 is padding
_SHARED_WEIGHT = np.float32(0.4)


def _append(replicas):
    random, tokens = np.random.default_rng(0), np.arange(12)
    topk_ids = np.stack([random.permutation(_EXPERTS)[:8] for _ in tokens]).astype(np.int32)
    topk_weights = random.random((12, 8), dtype=np.float32)
    topk_ids[_PADDING], topk_weights[_PADDING] = -1, 0
    topk_weights[2, 0] = 0  # a weight of 0 is no padding
    ninth_ids = np.where(tokens == _PADDING, -1, _EXPERTS + tokens % replicas)
    ninth_weights = np.where(tokens == _PADDING, 0, _SHARED_WEIGHT)
    inputs = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    outputs = {"weights": np.full((12, 9), np.nan, np.float32), "ids": np.full((12, 9), -7, np.int32)}
    constants = {"num_experts": _EXPERTS, "replicas": replicas, "shared_weight": _SHARED_WEIGHT}
    wanted = {"weights": np.c_[topk_weights, ninth_weights], "ids": np.c_[topk_ids, ninth_ids]}
    return Run(
        (4, 32), inputs | outputs | constants, inputs | wanted, f"{replicas} replicas, token {_PADDING} is padding"
    )


# 3: what an uneven load costs


def rounds(counts, tile_rows, across, sms):
    columns = [-(-rows // tile_rows) for rows in counts]
    single = -(-sum(columns) * across // sms)
    return single, max(single, max(columns))


_LOADS = [  # counts, tile_rows, across, sms
    ([64, 128, 64, 64, 128, 64, 512], 64, 1, 4),
    ([10, 300, 0, 1, 65], 64, 2, 6),
    ([16] * 32 + [512], 128, 4, 132),
    ([100] * 8, 128, 4, 8),
]


# 4: a checkpoint as a stream


def load_weights(weights, replicas, num_experts):
    for name, tensor in weights:
        if ".shared_experts." not in name:
            yield name, tensor
            continue
        for replica in range(replicas):
            yield name.replace(".shared_experts.", f".experts.{num_experts + replica}."), tensor


_PARTS = [*(f"experts.{expert}" for expert in range(4)), "shared_experts"]
_NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",  # a dense layer
    *(f"model.layers.{layer}.mlp.{part}.up_proj.weight" for layer in range(2, 5) for part in _PARTS),
]
_MOST_HELD = 3  # variables of two loops, and the next tensor


def _streams(answer):
    held, most, made, found = set(), 0, [], {}

    def checkpoint():
        nonlocal most
        for number, name in enumerate(_NAMES):
            tensor = torch.tensor([number])
            held.add(number)
            most = max(most, len(held))
            weakref.finalize(tensor, held.discard, number)
            made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    for name, tensor in answer(checkpoint(), 2, 4):
        if name in found:
            raise Wrong(f"{name} is yielded twice")
        if not any(original() is tensor for original in made):
            raise Wrong(f"{name} is a copy: yield the tensor itself; the loader copies it to the GPU")
        found[name] = _NAMES[int(tensor)]
    wanted = {new: name for name in _NAMES for new, _ in load_weights([(name, None)], 2, 4)}
    for name in wanted | found:
        if found.get(name) != wanted.get(name):
            raise Wrong(f"the tensor of {name} is {found.get(name)}, not {wanted.get(name)}")
    expect_between(f"of {len(_NAMES)} tensors held at once", most, most=_MOST_HELD)


EXERCISES = {
    1: Exercise(
        "a function of the weights, s, renormalize and scaled that returns the weights of all nine columns",
        function_test(nine_weights, _FACTORS, rtol=1e-6),
        "Write the equation for each case. The factor of S(x) must be 1 in all of them; does the sum of the other "
        "weights occur in it?",
        nine_weights,
    ),
    2: Exercise(
        "a kernel that appends a replica, round-robin by token, and leaves padding as it is",
        kernel_test(_append(8), _append(1), _append(3)),
        "i is the number of an element, not of a token: with 9 columns, what is i % 3 in the last one? A token is "
        "padding if its first id is -1.",
        append_replica,
    ),
    3: Exercise(
        "a function that returns the rounds of single tiles, and a lower bound for whole columns",
        function_test(rounds, _LOADS),
        "Round up twice: rows to tiles for each expert, and all tiles to rounds. An SM processes a column in as many "
        "rounds as the column has tiles.",
        rounds,
    ),
    4: Exercise(
        "a generator of the weights, the number of replicas and that of the routed experts",
        _streams,
        "Loop over the iterator once. A shared tensor is yielded once for each replica, under another name each time.",
        load_weights,
    ),
}
