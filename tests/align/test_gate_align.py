"""Test that the fused gate and alignment return bit-identical results to the two functions."""

import itertools

import numpy as np
import pytest
import torch

from moe_numba import biased_grouped_topk, biased_grouped_topk_align, moe_align_block_size, simulator
from moe_numba.align import api as align_api
from moe_numba.align import with_gate as gate_align
from moe_numba.gate.one_token_per_warp import GateConfig
from moe_numba.gate.reference import mismatch

DEEPSEEK_V3_GROUPS = dict(num_expert_group=8, topk_group=4)


def make_inputs(tokens, experts, device, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=random).to(device, dtype)
    return logits, torch.rand(experts, generator=random).to(device)


def make_map(experts, device):
    ids = torch.arange(experts, device=device)
    return torch.where(ids % 3 == 0, ids // 3, -1)


def poisoned(expected):
    """Return poisoned outputs in the middle of larger poisoned buffers, and the buffers."""
    buffers = [torch.full((tensor.numel() + 16,), -7, dtype=tensor.dtype, device=tensor.device) for tensor in expected]
    return [b[8:-8].view(tensor.shape) for b, tensor in zip(buffers, expected, strict=True)], buffers


def two_calls(logits, bias, topk, block_size, gate, align):
    experts = logits.shape[1] + gate.get("num_fused_shared_experts", 0)
    weights, ids = biased_grouped_topk(logits, bias, topk, **gate)
    return weights, ids, *moe_align_block_size(ids, block_size, experts, **align)


def check(logits, bias, topk, block_size, gate=None, align=None):
    gate, align = gate or {}, align or {}
    expected = two_calls(logits, bias, topk, block_size, gate, align)
    out, buffers = poisoned(expected)
    biased_grouped_topk_align(logits, bias, topk, block_size, **gate, **align, out=out)
    assert [torch.equal(a, b) for a, b in zip(out, expected, strict=True)] == [True] * 5
    assert all((b[:8] == -7).all() and (b[-8:] == -7).all() for b in buffers)


@pytest.mark.parametrize("tokens, block_size", [(0, 16), (1, 16), (5, 1), (8, 128), (9, 16), (33, 16)])
def test_deepseek_v3(tokens, block_size, device):
    check(*make_inputs(tokens, 256, device), 8, block_size, DEEPSEEK_V3_GROUPS)


@pytest.mark.parametrize("tokens, dtype", [(3, torch.float32), (7, torch.bfloat16), (3, torch.float16)])
@pytest.mark.parametrize("shape", [(160, 1, 1, 8), (7, 7, 3, 3), (1, 1, 1, 1), (96, 48, 20, 8)], ids=str)
def test_shapes(shape, tokens, dtype, device):
    experts, groups, kept, topk = shape
    check(*make_inputs(tokens, experts, device, dtype), topk, 16, dict(num_expert_group=groups, topk_group=kept))


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("shape", [(960, 6, 3, 8), (561, 17, 5, 8), (1024, 64, 5, 8)], ids=str)
def test_more_experts_than_a_warp_can_hold(shape, tokens, device):
    """More than 32 experts per lane, or more than 32 groups: two launches."""
    experts, groups, kept, topk = shape
    options = dict(num_expert_group=groups, topk_group=kept)
    logits, bias = make_inputs(tokens, experts, device)
    check(logits, bias, topk, 16, options)
    weights, ids, *_ = biased_grouped_topk_align(logits, bias, topk, 16, **options)
    assert mismatch(weights, ids, logits, bias, topk, **options) is None


def test_numpy_numbers(device):
    logits, bias = make_inputs(4, 64, device)
    expected = biased_grouped_topk_align(logits, bias, 4, 16, **DEEPSEEK_V3_GROUPS)
    groups = {name: np.int32(value) for name, value in DEEPSEEK_V3_GROUPS.items()}
    options = dict(routed_scaling_factor=None, num_token_non_padded=np.int64(4), ignore_invalid_experts=np.bool_(False))
    given = biased_grouped_topk_align(logits, bias, np.int64(4), np.int64(16), **groups, **options)
    assert all(map(torch.equal, given, expected))


def test_rows_beyond_32_bits_take_two_launches(device, monkeypatch):
    """With the limit lowered; the alignment then uses its kernel with 64-bit row numbers."""
    for module in (gate_align, align_api):
        monkeypatch.setattr(module, "MAX_NARROW_ELEMENTS", 100)
    check(*make_inputs(7, 64, device), 4, 16, DEEPSEEK_V3_GROUPS)
    monkeypatch.setattr(gate_align, "moe_align_block_size", None)
    with pytest.raises(TypeError, match="not callable"):
        biased_grouped_topk_align(*make_inputs(7, 64, device), 4, 16)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda config: gate_align.make_kernel(config, False, 1056, False, False), "960 experts, 6 groups"),
        (
            lambda _: gate_align.make_kernel(GateConfig(256, 8, 4, 8), False, 98, False, False),
            "capacity is 98; it must be a multiple of 4",
        ),
    ],
)
def test_factories_refuse_shapes(make, message):
    with pytest.raises(ValueError, match=message):
        make(GateConfig(960, 6, 3, 8))


@pytest.mark.parametrize("tokens", [3, 8])
@pytest.mark.parametrize("scoring", ["softmax", "sqrtsoftplus"])
def test_scorings_and_weights(scoring, tokens, device):
    wide, _ = make_inputs(tokens, 72, device)
    gate = dict(scoring=scoring, renormalize=False, routed_scaling_factor=2.5)
    check(wide[:, 4:68], None, 4, 16, gate | {"apply_routed_scaling_factor_on_output": True})


@pytest.mark.parametrize("tokens, ignore, has_map", list(itertools.product((3, 8), (False, True), (True,))))
def test_padding_tokens_shared_experts_and_maps(tokens, ignore, has_map, device):
    for limit in (2, torch.tensor([tokens - 1], dtype=torch.int32, device=device)):
        gate = dict(
            DEEPSEEK_V3_GROUPS, num_fused_shared_experts=2, routed_scaling_factor=2.5, num_token_non_padded=limit
        )
        align = dict(ignore_invalid_experts=ignore, expert_map=make_map(66, device) if has_map else None)
        check(*make_inputs(tokens, 64, device), 10, 8, gate, align | {"pad_sorted_ids": not ignore})


@pytest.mark.skipif(not simulator.ENABLED, reason="seeds are the simulator's")
@pytest.mark.parametrize("seed", range(3))
def test_thread_orders(seed, device):
    with simulator.seed(seed):
        check(*make_inputs(8, 64, device, seed=seed), 4, 4, DEEPSEEK_V3_GROUPS)
        check(*make_inputs(2, 64, device, seed=seed), 4, 4, DEEPSEEK_V3_GROUPS)


@pytest.mark.skipif(not simulator.ENABLED, reason="only the simulator makes a kernel without the function")
def test_checker_rejects_counts_that_are_not_cleared(monkeypatch, device):
    monkeypatch.setattr(gate_align, "make_clear", lambda *shape: lambda array: None)
    gate_align.make_kernel.cache_clear()
    try:
        with pytest.raises((AssertionError, simulator.SimulatorError)):
            check(*make_inputs(3, 60, device), 4, 4)
    finally:
        gate_align.make_kernel.cache_clear()


@pytest.mark.parametrize("experts, shared", [(64, 0), (383, 1)])
def test_one_launch(experts, shared, device, monkeypatch):
    """Up to 8 tokens and 384 experts, the alignment is not called separately."""
    logits, bias = make_inputs(8, experts, device)
    gate = dict(num_fused_shared_experts=shared)
    expected = two_calls(logits, bias, 4, 16, gate, {})
    monkeypatch.setattr(gate_align, "moe_align_block_size", None)
    given = biased_grouped_topk_align(logits, bias, 4, 16, **gate)
    assert all(map(torch.equal, given, expected))


@pytest.mark.parametrize("tokens, experts, shared", [(9, 64, 0), (1, 385, 0), (1, 384, 1)])
def test_two_launches(tokens, experts, shared, device, monkeypatch):
    """With more tokens or experts, where one launch was not faster."""
    logits, bias = make_inputs(tokens, experts, device)
    check(logits, bias, 4, 16, dict(num_fused_shared_experts=shared))
    monkeypatch.setattr(gate_align, "moe_align_block_size", None)
    with pytest.raises(TypeError, match="not callable"):
        biased_grouped_topk_align(logits, bias, 4, 16, num_fused_shared_experts=shared)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(topk=0), ValueError, "topk is 0"),
        (dict(block_size=0), ValueError, "block_size is 0"),
        (dict(block_size=16.0), TypeError, "block_size is 16.0"),
        (dict(topk=4.0), TypeError, "topk is 4.0; it must be an int"),
        (dict(pad_sorted_ids=None), TypeError, "pad_sorted_ids is None; it must be True or False"),
        (dict(ignore_invalid_experts=0.0), TypeError, "ignore_invalid_experts is 0.0; it must be True or False"),
        (dict(expert_map=torch.zeros(3, dtype=torch.int32)), ValueError, "expert_map"),
        (dict(num_token_non_padded=-1), ValueError, "num_token_non_padded"),
        (dict(out=[torch.zeros(1) for _ in range(5)]), ValueError, "out's topk_weights"),
        (dict(out=[torch.zeros(1) for _ in range(4)]), ValueError, "out is 4 of them; it must be a tuple of 5 tensors"),
    ],
)
def test_invalid_arguments(change, error, message, device):
    logits, bias = make_inputs(4, 64, device)
    arguments = dict(topk=4, block_size=16)
    biased_grouped_topk_align(logits, bias, **arguments)
    if "expert_map" in change:
        change = dict(expert_map=change["expert_map"].to(device))
    with pytest.raises(error, match=message):
        biased_grouped_topk_align(logits, bias, **arguments | change)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_graphs(tokens):
    logits, bias = make_inputs(tokens, 256, "cuda")
    expected = two_calls(logits, bias, 8, 16, DEEPSEEK_V3_GROUPS, {})
    out, _ = poisoned(expected)
    biased_grouped_topk_align(logits, bias, 8, 16, **DEEPSEEK_V3_GROUPS, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            biased_grouped_topk_align(logits, bias, 8, 16, **DEEPSEEK_V3_GROUPS, out=out)
    for repeat in range(20):
        logits.copy_(torch.randn(tokens, 256, generator=torch.Generator().manual_seed(repeat)))
        expected = two_calls(logits, bias, 8, 16, DEEPSEEK_V3_GROUPS, {})
        graph.replay()
        assert all(map(torch.equal, out, expected))
