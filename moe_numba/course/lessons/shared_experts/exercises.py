"""Exercises of the notebook on shared experts."""

import weakref

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.draw.canvas import plural
from moe_numba.course.exercises import Exercise

# 1: the weights of a fused layer


def nine_weights(weights, s, renormalize, scaled):
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    nine = torch.cat([weights, torch.full_like(weights[:, :1], 1 / s)], dim=1)
    return nine * s if scaled else nine


def _weighs_all_nine(answer):
    weights = torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for s in (2.5, 1.0):
        for renormalize in (True, False):
            for scaled in (False, True):
                case = f"s = {s}, renormalize = {renormalize}, scaled = {scaled}"
                given = weights.clone()
                if (found := answer(given, s, renormalize, scaled)) is None:
                    return f"{case}: the result is None, not a tensor of shape (3, 9)"
                if not given.equal(weights):
                    return f"{case}: it changes its input: weights must stay as they are"
                found = torch.as_tensor(found).double()
                if found.shape != (3, 9):
                    return f"{case}: the result has shape {tuple(found.shape)}, not (3, 9)"
                wanted = nine_weights(weights, s, renormalize, scaled)
                if not torch.allclose(found[:, :8], wanted[:, :8], rtol=1e-6):
                    token, column = (~torch.isclose(found[:, :8], wanted[:, :8], rtol=1e-6)).nonzero()[0].tolist()
                    return (
                        f"{case}: weight {column} of token {token} is {float(found[token, column]):.4g}, not "
                        f"{float(wanted[token, column]):.4g}; the eight weights sum to "
                        f"{float(found[token, :8].sum()):.4g}, not {float(wanted[token, :8].sum()):.4g}"
                    )
                factor = found[:, 8] * (1 if scaled else s)
                if not torch.allclose(factor, torch.ones_like(factor), rtol=1e-6):
                    token = int((factor - 1).abs().argmax())
                    return (
                        f"{case}: the layer multiplies the shared expert's output for token {token} by "
                        f"{float(factor[token]):.4g} in all, not by 1; its eight scores sum to "
                        f"{float(weights[token].sum()):.4g}"
                    )
    return None


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


def _appends_replicas(kernel):
    random = np.random.default_rng(0)
    topk_ids = np.stack([random.permutation(_EXPERTS)[:8] for _ in range(12)]).astype(np.int32)
    topk_weights = random.random((12, 8), dtype=np.float32)
    topk_ids[_PADDING], topk_weights[_PADDING] = -1, 0
    topk_weights[2, 0] = 0  # a weight of 0 is no padding
    for replicas in (8, 1, 3):
        weights, ids = np.full((12, 9), np.nan, np.float32), np.full((12, 9), -7, np.int32)
        given = topk_weights.copy(), topk_ids.copy()
        kernel[4, 32](*given, weights, ids, _EXPERTS, replicas, _SHARED_WEIGHT)
        if (given[0] != topk_weights).any() or (given[1] != topk_ids).any():
            return f"with {plural(replicas, 'replica')}, it changes topk_weights or topk_ids, which are inputs"
        if wrong := _wrong_routing(topk_weights, topk_ids, weights, ids, replicas):
            return f"with {plural(replicas, 'replica')}, {wrong}"
    return None


def _wrong_routing(topk_weights, topk_ids, weights, ids, replicas):
    if (ids[:, :8] != topk_ids).any() or (weights[:, :8] != topk_weights).any():
        return "the first eight columns are not those of topk_ids and topk_weights"
    chosen, real = ids[:, 8] - _EXPERTS, np.arange(12) != _PADDING
    if outside := [int(token) for token in np.flatnonzero(real) if not 0 <= chosen[token] < replicas]:
        if ids[outside[0], 8] == -1:
            return f"token {outside[0]} gets the id -1, but is no padding: its first id is {topk_ids[outside[0], 0]}"
        last = _EXPERTS + replicas - 1
        return f"token {outside[0]} takes expert {ids[outside[0], 8]}; the replicas are {_EXPERTS} to {last}"
    if (chosen != np.arange(12) % replicas)[real].any():
        loads = np.bincount(chosen[real], minlength=replicas).tolist()
        balanced = np.bincount(np.arange(12)[real] % replicas, minlength=replicas).tolist()
        return (
            f"the 11 tokens take the replicas {chosen[real].tolist()}, so the replicas have {loads} rows; round-robin "
            f"gives them {balanced}"
        )
    if (wrong := np.flatnonzero(real & (weights[:, 8] != _SHARED_WEIGHT))).size:
        return f"the ninth weight of token {wrong[0]} is {weights[wrong[0], 8]:g}, not {_SHARED_WEIGHT:g}"
    if ids[_PADDING, 8] != -1:
        return f"token {_PADDING} is padding, all its ids are -1; but its ninth id is {ids[_PADDING, 8]}"
    if weights[_PADDING, 8] != 0:
        return f"token {_PADDING} is padding; but its ninth weight is {weights[_PADDING, 8]:g}, not 0"
    return None


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


def _counts_rounds(answer):
    for case in _LOADS:
        given = case[0].copy()
        found, wanted = answer(given, *case[1:]), rounds(*case)
        if given != case[0]:
            return "it changes its input: counts must stay as they are"
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            return f"the result is {found!r}; two numbers are needed: for single tiles, and for whole columns"
        if tuple(found) == wanted:
            continue
        counts, tile_rows, across, sms = case
        columns = [-(-rows // tile_rows) for rows in counts]
        given = f"{_short(counts)} rows, tiles of {tile_rows} rows, {across} side by side, {sms} SMs"
        if found[0] != wanted[0]:
            return (
                f"{given}: single tiles take {wanted[0]} rounds, not {found[0]}. A tile has rows of one expert only, "
                f"so the experts need {_short(columns)} times {across} tiles"
            )
        return (
            f"{given}: whole columns take at least {wanted[1]} rounds, not {found[1]}. The longest column has "
            f"{plural(max(columns), 'tile')}, and {sms} SMs need {wanted[0]} rounds for all tiles"
        )
    return None


def _short(counts):
    return str(counts) if len(counts) < 9 else f"[{len(counts) - 1} times {counts[0]}, {counts[-1]}]"


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

    if (pairs := answer(checkpoint(), 2, 4)) is None:
        return "the result is None: yield pairs of a name and a tensor"
    for name, tensor in pairs:
        if name in found:
            return f"{name} is yielded twice"
        if not any(original() is tensor for original in made):
            return f"{name} is a copy: yield the tensor itself; the loader copies it to the GPU"
        found[name] = _NAMES[int(tensor)]
    wanted = {new: name for name in _NAMES for new, _ in load_weights([(name, None)], 2, 4)}
    if missing := [name for name in wanted if name not in found]:
        return f"{missing[0]} is missing, and {plural(len(missing) - 1, 'other tensor')}"
    if unknown := [name for name in found if name not in wanted]:
        return f"there must be no {unknown[0]}: with 4 routed experts the replicas are experts 4 and 5"
    if wrong := [name for name in wanted if found[name] != wanted[name]]:
        return f"{wrong[0]} is the tensor {found[wrong[0]]}, not {wanted[wrong[0]]}"
    if most > _MOST_HELD:
        return f"the names are right, but up to {most} of {len(_NAMES)} tensors are held at once"
    return None


EXERCISES = {
    1: Exercise(
        "a function of the weights, s, renormalize and scaled that returns the weights of all nine columns",
        _weighs_all_nine,
        "Write the equation for each case. The factor of S(x) must be 1 in all of them; does the sum of the other "
        "weights occur in it?",
        nine_weights,
    ),
    2: Exercise(
        "a kernel that appends a replica, round-robin by token, and leaves padding as it is",
        _appends_replicas,
        "i is the number of an element, not of a token: with 9 columns, what is i % 3 in the last one? A token is "
        "padding if its first id is -1.",
        append_replica,
    ),
    3: Exercise(
        "a function that returns the rounds of single tiles, and a lower bound for whole columns",
        _counts_rounds,
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
