"""Wrong answers to the exercises of notebook 04: (exercise, answer, what the message must match)."""

import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.lessons.shared_experts.exercises import load_weights, nine_weights, rounds


def weight_of_the_article(weights, s, renormalize, scaled):
    ninth = weights.sum(dim=1, keepdim=True) / s
    nine = torch.cat([weights, ninth], dim=1)
    nine = nine / weights.sum(dim=1, keepdim=True) if renormalize else nine
    return nine * s if scaled else nine


def weight_one(weights, s, renormalize, scaled):
    nine = nine_weights(weights, s, renormalize, scaled)
    nine[:, 8] = 1
    return nine


def always_the_inverse(weights, s, renormalize, scaled):
    nine = nine_weights(weights, s, renormalize, scaled)
    nine[:, 8] = 1 / s
    return nine


def sum_of_nine(weights, s, renormalize, scaled):
    nine = nine_weights(weights, s, False, scaled)
    return nine / nine.sum(dim=1, keepdim=True) if renormalize else nine


def sum_of_all(weights, s, renormalize, scaled):
    return nine_weights(weights / weights.sum() if renormalize else weights, s, False, scaled)


def softmax(weights, s, renormalize, scaled):
    return nine_weights(weights.softmax(dim=1) if renormalize else weights, s, False, scaled)


def in_place(weights, s, renormalize, scaled):
    if renormalize:
        weights /= weights.sum(dim=1, keepdim=True)
    return nine_weights(weights, s, False, scaled)


@cuda.jit
def append_by_element(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            weights[token, column] = shared_weight
            ids[token, column] = num_experts + i % replicas


@cuda.jit
def append_by_element_with_padding(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
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
            ids[token, column] = int32(-1) if padding else int32(num_experts + i % replicas)


@cuda.jit
def append_to_padding(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            weights[token, column] = shared_weight
            ids[token, column] = num_experts + token % replicas


@cuda.jit
def append_weight_to_padding(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            weights[token, column] = shared_weight
            ids[token, column] = int32(-1) if topk_ids[token, 0] < 0 else int32(num_experts + token % replicas)


@cuda.jit
def append_behind_the_replicas(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            weights[token, column] = shared_weight
            ids[token, column] = num_experts + token % replicas + 1


@cuda.jit
def looks_at_the_weight(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            padding = topk_weights[token, 0] == 0
            weights[token, column] = float32(0) if padding else shared_weight
            ids[token, column] = int32(-1) if padding else int32(num_experts + token % replicas)


@cuda.jit
def looks_at_the_result(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            padding = ids[token, 0] < 0
            weights[token, column] = float32(0) if padding else shared_weight
            ids[token, column] = int32(-1) if padding else int32(num_experts + token % replicas)


@cuda.jit
def looks_at_the_own_column(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        expert = topk_ids[token, column]
        weights[token, column] = topk_weights[token, column] if column < columns - 1 else shared_weight
        ids[token, column] = expert if column < columns - 1 else int32(num_experts + token % replicas)


@cuda.jit
def clears_its_input(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        padding = topk_ids[token, 0] < 0
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
            topk_weights[token, column] = float32(0)
        else:
            weights[token, column] = float32(0) if padding else shared_weight
            ids[token, column] = int32(-1) if padding else int32(num_experts + token % replicas)


def sorts_its_input(counts, tile_rows, across, sms):
    counts.sort()
    return rounds(counts, tile_rows, across, sms)


def shares_tiles(counts, tile_rows, across, sms):
    single = -(-(-(-sum(counts) // tile_rows) * across) // sms)
    return single, max(single, -(-max(counts) // tile_rows))


def rounds_up_early(counts, tile_rows, across, sms):
    single = -(-sum(-(-rows * across // tile_rows) for rows in counts) // sms)
    return single, max(single, -(-max(counts) // tile_rows))


def longest_column_only(counts, tile_rows, across, sms):
    return rounds(counts, tile_rows, across, sms)[0], -(-max(counts) // tile_rows)


def holds_all(weights, replicas, num_experts):
    return list(load_weights(list(weights), replicas, num_experts))


def clones(weights, replicas, num_experts):
    for name, tensor in load_weights(weights, replicas, num_experts):
        yield name, tensor.clone() if ".experts.5." in name else tensor


def keeps_the_shared_one(weights, replicas, num_experts):
    for name, tensor in weights:
        yield name, tensor
        if "shared_experts" in name:
            yield from load_weights([(name, tensor)], replicas, num_experts)


def forgets_the_routed_ones(weights, replicas, num_experts):
    return load_weights((pair for pair in weights if "shared" in pair[0]), replicas, num_experts)


def only_experts(weights, replicas, num_experts):
    return load_weights((pair for pair in weights if "experts" in pair[0]), replicas, num_experts)


def shared_ones_last(weights, replicas, num_experts):
    shared = []
    for name, tensor in weights:
        if "shared" in name:
            shared.append((name, tensor))
        else:
            yield name, tensor
    yield from load_weights(shared, replicas, num_experts)


def numbers_from_one(weights, replicas, num_experts):
    return load_weights(weights, replicas, num_experts + 1)


def yields_another_layer(weights, replicas, num_experts):
    for name, tensor in load_weights(weights, replicas, num_experts):
        yield (
            name.replace("layers.2", "layers.9").replace("layers.3", "layers.2").replace("layers.9", "layers.3"),
            tensor,
        )


def same_name(weights, replicas, num_experts):
    for name, tensor in weights:
        for _ in range(replicas if "shared" in name else 1):
            yield name.replace("shared_experts", f"experts.{num_experts}"), tensor


WRONG = [
    (
        "shared_experts-1",
        weight_of_the_article,
        "renormalize = False, scaled = False: the layer multiplies the shared expert's output for token . by .* in all",
    ),
    ("shared_experts-1", weight_one, "renormalize = True, scaled = False: .* token 0 by 2.5 in all, not by 1"),
    ("shared_experts-1", always_the_inverse, "renormalize = True, scaled = True: .* token 0 by 0.4 in all, not by 1"),
    ("shared_experts-1", sum_of_nine, "weight 0 of token 0 is .*, not .*; the eight weights sum to 0.9.*, not 1"),
    ("shared_experts-1", sum_of_all, "the eight weights sum to 0.4184, not 1"),
    ("shared_experts-1", softmax, "weight 0 of token 0 is .*, not .*; the eight weights sum to 1, not 1"),
    ("shared_experts-1", in_place, "renormalize = True, scaled = False: it changes its input: weights must stay"),
    ("shared_experts-1", lambda *given: None, "the result is None, not a tensor"),
    ("shared_experts-1", lambda weights, *_: weights, r"the result has shape \(3, 8\), not \(3, 9\)"),
    ("shared_experts-2", append_by_element, "with 8 replicas, token 5 is padding, .* its ninth id is 261"),
    ("shared_experts-2", append_by_element_with_padding, r"with 3 replicas, .* have \[0, 0, 11\] rows"),
    ("shared_experts-2", append_to_padding, "with 8 replicas, token 5 is padding, .* its ninth id is 261"),
    ("shared_experts-2", append_weight_to_padding, "token 5 is padding; but its ninth weight is 0.4, not 0"),
    ("shared_experts-2", append_behind_the_replicas, "token 7 takes expert 264; the replicas are 256 to 263"),
    ("shared_experts-2", looks_at_the_weight, "token 2 gets the id -1, but is no padding: its first id is"),
    ("shared_experts-2", looks_at_the_result, "two threads race"),
    (
        "shared_experts-2",
        looks_at_the_own_column,
        r"an index is out of bounds: .* in the line `expert = topk_ids\[token, column\]`",
    ),
    ("shared_experts-2", clears_its_input, "with 8 replicas, it changes topk_weights or topk_ids, which are inputs"),
    ("shared_experts-2", nine_weights, "nine_weights is no kernel: is @cuda.jit missing before def?"),
    (
        "shared_experts-3",
        shares_tiles,
        r"\[10, 300, 0, 1, 65\] rows.*: single tiles take 3 rounds, not 2.*need \[1, 5, 0, 1, 2\] times 2 tiles",
    ),
    ("shared_experts-3", rounds_up_early, r"\[32 times 16, 512\] rows.*: single tiles take 2 rounds, not 1"),
    ("shared_experts-3", longest_column_only, r"\[100, .*: whole columns take at least 4 rounds, not 1"),
    ("shared_experts-3", sorts_its_input, "it changes its input: counts must stay as they are"),
    ("shared_experts-3", lambda *load: rounds(*load)[0], "the result is 4; two numbers are needed"),
    ("shared_experts-4", holds_all, "the names are right, but up to 17 of 17 tensors are held at once"),
    ("shared_experts-4", clones, r"model.layers.2.mlp.experts.5.up_proj.weight is a copy"),
    ("shared_experts-4", keeps_the_shared_one, "there must be no model.layers.2.mlp.shared_experts"),
    ("shared_experts-4", forgets_the_routed_ones, "model.embed_tokens.weight is missing, and 13 other tensors"),
    ("shared_experts-4", only_experts, "model.embed_tokens.weight is missing, and 1 other tensor"),
    ("shared_experts-4", shared_ones_last, "the names are right, but up to 4 of 17 tensors are held at once"),
    ("shared_experts-4", lambda *given: None, "the result is None: yield pairs"),
    ("shared_experts-4", numbers_from_one, "model.layers.2.mlp.experts.4.up_proj.weight is missing, and 2"),
    (
        "shared_experts-4",
        yields_another_layer,
        "2.mlp.experts.0.up_proj.weight is the tensor model.layers.3.mlp.experts.0.up_proj.weight, not model.layers.2",
    ),
    ("shared_experts-4", same_name, "model.layers.2.mlp.experts.4.up_proj.weight is yielded twice"),
]
