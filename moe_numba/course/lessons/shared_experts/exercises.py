"""Exercises of the lesson "Shared experts"; the page checks answers with ``exercises.<name>``."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.bench import records
from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import case, expect_equal, function_test
from moe_numba.course.lessons.shared_experts import answers
from moe_numba.course.lessons.shared_experts.routing import append
from moe_numba.course.lessons.shared_experts.sizes import GATE_EXPERTS, GATE_GROUPS, GATE_KEPT, GATE_TOPK
from moe_numba.course.steps.exercises import Build, Choose, Predict, is_stub
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import OPEN, RIGHT, Verdict
from moe_numba.gate.reference import biased_grouped_topk
from moe_numba.runtime.launch import launch
from moe_numba.shared_experts import reference

# Build: functions of Python


class _Function(Exercise):
    """An exercise whose answer is a function of Python."""

    def check(self, answer: Any = ...) -> Verdict:
        """Test an answer; a stub counts as none."""
        verdict = super().check(... if is_stub(answer) else answer)
        return replace(verdict, state=OPEN) if verdict.text.startswith("not answered") else verdict

    def use(self, answer: Any = ...) -> Any:
        """Display the verdict on an answer, and return what the next cells use."""
        from IPython.display import display

        verdict = self.check(answer)
        display(verdict)
        return answer if verdict.state == RIGHT else self.solution


_WEIGHTS = torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
_FACTORS = {
    f"s = {s}, renormalize = {renormalize}, scaled = {scaled}": (_WEIGHTS, s, renormalize, scaled)
    for s, renormalize, scaled in product((2.5, 1.0), (True, False), (False, True))
}
ninth_weight = _Function(
    "a function that returns nine weights",
    function_test(answers.nine_weights, _FACTORS, rtol=1e-12),
    "Without the factor in the weights, s * w9 must be 1. The sum for `renormalize` is that of the eight weights.",
    answers.nine_weights,
    "ninth weight",
)

_LOADS = [  # counts, tile_rows, across, sms
    ([64, 128, 64, 64, 128, 64, 512], 64, 1, 4),
    ([10, 300, 0, 1, 65], 64, 2, 6),
    ([16] * 32 + [512], 128, 4, 132),
    ([100] * 8, 128, 4, 8),
]
rounds = _Function(
    "a function that returns two numbers of rounds",
    function_test(answers.rounds, _LOADS),
    "An expert with r rows has ceil(r / tile_rows) tiles in each of its `across` columns. Whole columns need as many "
    "rounds as the longest one, and at least as many as single tiles.",
    answers.rounds,
    "rounds",
)


# Build: append a column

_SHARED_WEIGHT = 0.4


def _routing(tokens, topk):
    """Return weights and ids, of which some tokens are padding: the first, the sixth and the last."""
    random = np.random.default_rng(tokens)
    ids = np.stack([random.permutation(GATE_EXPERTS)[:topk] for _ in range(tokens)]).astype(np.int32)
    weights = random.random((tokens, topk), dtype=np.float32)
    padding = [0, min(5, tokens - 1), tokens - 1]
    ids[padding], weights[padding] = -1, 0
    weights[2, 0], ids[3, 1:] = 0, -1  # neither a weight of 0 nor a later id below 0 is padding
    return torch.from_numpy(weights), torch.from_numpy(ids)


def _append(answer, tokens, topk, replicas):
    weights, ids = _routing(tokens, topk)
    size = tokens, topk + 1
    out = torch.full(size, float("nan")), torch.full(size, -7, dtype=torch.int32)
    append(answer, weights, ids, out, GATE_EXPERTS, replicas, _SHARED_WEIGHT)
    return weights, ids, out


def _test_append(answer):
    for tokens, topk, replicas in ((12, 8, 8), (37, 4, 3), (15, 8, 1)):
        with case(f"{tokens} tokens of {topk} experts, {replicas} replicas"):
            weights, ids, (nine, nine_ids) = _append(answer, tokens, topk, replicas)
            right = reference.fuse_routing(
                *_routing(tokens, topk), GATE_EXPERTS, replicas, 1 / _SHARED_WEIGHT, "round_robin"
            )
            expect_equal("ids", nine_ids.numpy(), right[1].numpy())
            expect_equal("weights", nine.numpy(), right[0].float().numpy())
            expect_equal("topk_weights", weights.numpy(), _routing(tokens, topk)[0].numpy())
            expect_equal("topk_ids", ids.numpy(), _routing(tokens, topk)[1].numpy())


_PROFILED, _SECTOR_BYTES = 64, 32  # tokens; a warp's stores fill whole sectors
append_column = Build(
    "append a column",
    "a kernel that copies eight columns and appends the ninth",
    own=answers.append_column,
    test=_test_append,
    profile=lambda answer: count(answer, lambda kernel: _append(kernel, _PROFILED, GATE_TOPK, 8)),
    counter="global_store_sectors",
    unit="sectors stored",
    score=lambda counted: counted.total.global_store_sectors,
    par=2 * _PROFILED * (GATE_TOPK + 1) * 4 // _SECTOR_BYTES,
    par_is_bound=True,
    limits={"global_store_requests": (6, "a warp stores the elements of others, whose threads do nothing")},
    over_par="Does a warp store 32 adjacent elements with one instruction? Choose first, then store.",
    hint="Thread i writes element i of both outputs. Its token is i // (topk + 1), its column i % (topk + 1), in 32 "
    "bits. A padding token is one whose first id in topk_ids is negative.",
    home=f"{__name__}:append_column",
)


# Build: the hole of the gate's kernel


def _around_store(answer):
    @cuda.jit
    def checked_answer(topk_weights, topk_ids, weights, ids, tokens):
        lane, token = int32(cuda.threadIdx.x & 31), int32(cuda.grid(1) >> 5)
        if token < tokens:
            weight, expert = float32(-1), int32(-5)  # of lanes without an expert
            if lane < GATE_TOPK:
                weight, expert = topk_weights[token * GATE_TOPK + lane], topk_ids[token * GATE_TOPK + lane]
            answer(weights, ids, token, lane, weight, expert)

    return checked_answer


_STORED = 6  # tokens; the last CTA has two warps without one


def _store(kernel):
    random = np.random.default_rng(1)
    ids = np.stack([random.permutation(GATE_EXPERTS)[:GATE_TOPK] for _ in range(_STORED)]).astype(np.int32)
    weights = random.random((_STORED, GATE_TOPK), dtype=np.float32)
    out = torch.full((_STORED, GATE_TOPK + 1), float("nan")), torch.full((_STORED, GATE_TOPK + 1), -7).int()
    launch(kernel, 2, 128, torch.from_numpy(weights), torch.from_numpy(ids), *out, _STORED)
    right = np.c_[weights, np.ones((_STORED, 1), np.float32)], np.c_[ids, np.full((_STORED, 1), GATE_EXPERTS)]
    return [t.numpy() for t in out], right


def _test_store(answer):
    (weights, ids), (right_weights, right_ids) = _store(_around_store(answer))
    expect_equal("ids", ids, right_ids)
    expect_equal("weights", weights, right_weights)


store_nine = Build(
    "store nine columns",
    "the stores of a warp: eight columns that lanes have, and a ninth that none has",
    own=answers.store_nine,
    test=_test_store,
    profile=lambda answer: count(_around_store(answer), _store, answer),
    counter="global_store_requests",
    unit="store instructions of a warp",
    par=2,
    par_is_bound=True,
    over_par="Which lane is idle while eight lanes store?",
    hint="Lane 8 has no routed expert. Choose what a lane stores before the store, and let nine lanes store at once. A "
    "row of the output has nine elements.",
    home=f"{__name__}:store_nine",
)


# Predict: experts that are read


_LAYERS = {"ninth_column_64": (64, 1), "replicas_64": (64, 8), "replicas_4": (4, 8)}  # tokens, replicas


def _experts_read():
    return {name: _more_experts(*layer) for name, layer in _LAYERS.items()}


def _more_experts(tokens, replicas):
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, GATE_EXPERTS, generator=random)
    groups = dict(num_expert_group=GATE_GROUPS, topk_group=GATE_KEPT)
    routing = biased_grouped_topk(logits, torch.zeros(GATE_EXPERTS), GATE_TOPK, **groups)
    _, ids = reference.fuse_routing(*routing, GATE_EXPERTS, replicas, 2.5, "round_robin")
    return len(ids.unique()) - len(routing[1].unique()) - 1


_EXPERTS_READ = (
    "The shared expert is read either way. Replicas are other bytes for the GPU, although the numbers in them are the "
    "same: each one that a token uses is read."
)
experts_read = Predict("experts read", _experts_read, _EXPERTS_READ)


# Diagnose: what the fusion saves


def _evidence(tokens=64, dtype="float8_e4m3fn"):
    """Return bytes, operations, tiles, launches and times of both layers, from the record, in words."""
    record = records.recorded("shared_experts")
    wanted = dict(size=dict(tokens=tokens), dtype=dtype, config=dict(model="tp8"))
    rows = [record and records.find(record, step=f"layer: {name}", **wanted) for name in ("separate", "1 shared")]
    gemms = [record and records.find(record, step=f"GEMMs: {name}", **wanted) for name in ("separate", "1 shared")]
    if not all(rows + gemms):
        return "No times are recorded."
    of = lambda name: " -> ".join(f"{row[name]:,}" for row in rows)
    us, gemms_us = (
        " -> ".join(records.format_us(row["kernel_us"]["median"]) for row in pair) for pair in (rows, gemms)
    )
    return (
        f"Recorded with torch's kernels, {tokens} tokens in FP8: bytes {of('bytes')}; operations {of('flops')}; "
        f"tiles of the longest column {of('longest_column')}; launches {of('launches')}; "
        f"the layer {us} us, the GEMMs alone {gemms_us} us."
    )


_WHAT_SAVES = (
    "Bytes and operations are the same, and so are the tiles: 64 rows are one tile of 64. What is left is "
    "the launches of small operations, and the time in which the GEMMs of one expert have work for few SMs."
)
what_saves = Choose(
    "what saves",
    {
        "A": "it reads fewer weights",
        "B": "it computes less",
        "C": "it launches fewer kernels, and none of them is a GEMM that fills few SMs",
        "D": "its tiles are balanced better over the SMs",
    },
    "C",
    lambda: f"{_evidence()} {_WHAT_SAVES}",
)
