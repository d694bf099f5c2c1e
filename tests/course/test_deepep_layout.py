"""Our port of DeepEP's kernel for the dispatch layout gives the reference's results; wrong ones are rejected."""

import pytest
import torch
from helpers.layout_checks import TOKENS, check, reject, skewed, some, with_invalid_experts
from helpers.wrong_kernels import changed

from moe_numba import simulator
from moe_numba.course.deepep_port import dispatch_layout
from moe_numba.runtime.sass import compile_apart

function = dispatch_layout.get_dispatch_layout


@pytest.mark.parametrize("topk", [1, 2, 8])
@pytest.mark.parametrize("experts, ranks", [(e, r) for e in (8, 24, 256) for r in (1, 2, 3, 4, 8) if e % r == 0])
def test_the_reference_bit_for_bit(experts, ranks, topk, device):
    for tokens in TOKENS if topk == 8 else TOKENS[:-1]:
        check(some(tokens, topk, experts, device, seed=tokens), experts, ranks, function)


@pytest.mark.parametrize(
    "experts, ranks, topk", [(5, 5, 3), (7, 7, 32), (12, 6, 5), (1024, 8, 32), (1, 1, 1), (33, 1, 17)]
)
def test_odd_and_maximum_sizes(experts, ranks, topk, device):
    for tokens in (1, 70):
        check(some(tokens, topk, experts, device), experts, ranks, function)


def test_skewed_routings_and_invalid_experts(device):
    for ids in skewed():
        check(ids.to(device), 256, 8, function)
    check(with_invalid_experts().to(device), 24, 8, function)


@pytest.mark.parametrize("seed, preempt", [(0, 0), (1, 0), (2, 0), (3, 0.02)])
def test_any_order_of_the_threads(seed, preempt, device):
    with simulator.seed(seed, preempt=preempt):
        check(some(70, 8, 24, device, seed=seed), 24, 8, function)


WRONG = {
    "columns are summed before they are complete": ("        cuda.syncthreads()\n", ""),
    "a flag is a count": ("int32(1) if is_in_rank[j] > 0 else int32(0)", "is_in_rank[j]"),
    "all threads share a row": ("rows[t, int32", "rows[0, int32"),
}


@pytest.mark.parametrize("what", WRONG if simulator.ENABLED else ["a flag is a count"])
def test_wrong_kernels_are_rejected(what, device):
    """On a GPU the others may produce right results by chance."""
    made = changed(dispatch_layout, *WRONG[what])
    reject(made["get_dispatch_layout"], what, device, preempt=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4095, 65536])
def test_many_tokens(tokens):
    for experts, ranks, topk in ((256, 8, 8), (64, 4, 6), (1024, 8, 32), (7, 7, 1)):
        for invalid in (0.0, 0.3, 1.0):
            check(some(tokens, topk, experts, "cuda", invalid), experts, ranks, function)
    check(torch.full((tokens, 8), 255, device="cuda"), 256, 8, function)


def test_machine_code():
    """It keeps a token's flags, indexed by rank, in local memory, as in DeepEP."""
    source = "from moe_numba.course.deepep_port.dispatch_layout import make_layout_kernel"
    signature = ("int64*", "int32*", "int32*", "uint8*", *["int32"] * 4)
    report = compile_apart(source, {"deepep": ("make_layout_kernel(256)", signature, 256, True)})["deepep"]
    assert report.spilled_bytes == 0 and report.stack_bytes <= 32
