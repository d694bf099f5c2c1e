"""Kernels of the lesson "Shared experts": what the gate with a hole is made of, its inputs, check and launches."""

from functools import cache, partial

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from moe_numba.course.bench.timing import rotating
from moe_numba.course.lessons.shared_experts.layers import TOPIC
from moe_numba.course.lessons.shared_experts.sizes import (
    DEVICE,
    GATE_EXPERTS,
    GATE_GROUPS,
    GATE_KEPT,
    GATE_TOKENS,
    GATE_TOPK,
    SCALE,
    WARPS,
)
from moe_numba.course.steps.lesson import Lesson, Run
from moe_numba.gate.one_token_per_warp import GateConfig, make_router
from moe_numba.gate.reference import mismatch
from moe_numba.runtime.launch import launch

# What lessons 01 and 02 built, as device functions: a warp routes a token.
lane_slice, fetch, unpack, load_bias, route, HELD, WORDS = make_router(
    GateConfig(GATE_EXPERTS, GATE_GROUPS, GATE_KEPT, GATE_TOPK)
)
_THREADS = 128  # of a CTA that appends
_CHECKED = 9  # tokens: neither a multiple of the warps of a CTA, nor of anything in the append


def append(kernel, topk_weights, topk_ids, out, num_experts: int, replicas: int, shared_weight: float):
    """Launch a kernel that appends a column: a thread for each element of the output."""
    (tokens, topk), (weights, ids) = topk_ids.shape, out
    numbers = tokens, topk, num_experts, replicas, shared_weight
    launch(kernel, -(-ids.numel() // _THREADS), _THREADS, topk_weights, topk_ids, weights, ids, *numbers)
    return out


def with_column(kernel, weights, ids, num_experts: int, replicas: int = 1, shared_weight: float = 1.0):
    """Return weights and ids with one column more, which a kernel appends."""
    return append(kernel, weights, ids, _outputs(*ids.shape, extra=1, fill=False), num_experts, replicas, shared_weight)


def _outputs(tokens, columns, extra=0, fill=True):
    size = tokens, columns + extra
    if not fill:
        return torch.empty(size, device=DEVICE), torch.empty(size, dtype=torch.int32, device=DEVICE)
    return (torch.full(size, float("nan"), device=DEVICE), torch.full(size, -7, dtype=torch.int32, device=DEVICE))


def run(version: tuple, logits: torch.Tensor, bias: torch.Tensor, out=None, eight=None) -> tuple:
    """Launch a version: a gate that writes nine columns, or one that writes eight, and the kernel that appends."""
    gate, *appends = version
    tokens = len(logits)
    out = out or _outputs(tokens, GATE_TOPK + 1)
    first = (eight or _outputs(tokens, GATE_TOPK)) if appends else out
    launch(gate, -(-tokens // WARPS), 32 * WARPS, logits, bias, *first, tokens)
    if appends:
        append(appends[0], *first, out, GATE_EXPERTS, 1, 1.0)
    return out


@cache
def _inputs(tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return sets of logits that are timed in turn, and a bias."""
    torch.manual_seed(1)
    make = lambda: torch.randn(tokens, GATE_EXPERTS, device=DEVICE)
    return rotating(make, 4 * tokens * GATE_EXPERTS), torch.rand(GATE_EXPERTS, device=DEVICE) * 0.2


OPTIONS = dict(
    num_expert_group=GATE_GROUPS,
    topk_group=GATE_KEPT,
    num_fused_shared_experts=1,
    routed_scaling_factor=SCALE,
    apply_routed_scaling_factor_on_output=True,
)


def check(version: tuple) -> str | None:
    """Compare a version with the reference."""
    sets, bias = _inputs(_CHECKED if simulator.ENABLED else GATE_TOKENS)
    return mismatch(*run(version, sets[0], bias), sets[0], bias, GATE_TOPK + 1, **OPTIONS)


def once(version: tuple):
    """Launch a version on the inputs whose work is counted."""
    sets, bias = _inputs(GATE_TOKENS)
    return run(version, sets[0], bias)


def timed(version: tuple) -> list:
    """Return calls with different logits."""
    sets, bias = _inputs(GATE_TOKENS)
    out, eight = _outputs(GATE_TOKENS, GATE_TOPK + 1), _outputs(GATE_TOKENS, GATE_TOPK)
    return [partial(run, version, logits, bias, out, eight) for logits in sets]


routing = Lesson(
    TOPIC,
    Run(check, once, timed, kernels=lambda version: version),
    f"{__name__}:routing",
    config=dict(num_experts=GATE_EXPERTS, num_expert_group=GATE_GROUPS, topk_group=GATE_KEPT, topk=GATE_TOPK),
    size=dict(tokens=GATE_TOKENS),
    dtype="float32",
)
