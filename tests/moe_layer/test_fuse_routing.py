"""Test fuse_routing: its policies, and that the output of the layer does not change."""

import numpy as np
import pytest
import torch

import moe_numba
from moe_numba import simulator
from moe_numba.shared_experts import fuse_routing, kernel, reference

EXPERTS, TOPK = 16, 4
POLICIES = reference.POLICIES


def routing(tokens, device, experts=EXPERTS, topk=TOPK, seed=0):
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=random).argsort(dim=1)[:, :topk].to(torch.int32)
    weights = torch.rand(tokens, topk, generator=random)
    return (weights / weights.sum(dim=1, keepdim=True)).to(device), ids.to(device)


def poisoned(expected):
    """Return poisoned outputs in the middle of larger poisoned buffers, and the buffers."""
    buffers = [torch.full((t.numel() + 10,), -7, dtype=t.dtype, device=t.device) for t in expected]
    return [b[5:-5].view(t.shape) for b, t in zip(buffers, expected, strict=True)], buffers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens, shared, scale", [(0, 2, 1.0), (1, 1, 2.5), (7, 3, 2.5), (70, 8, 16.0)])
def test_equals_reference(policy, tokens, shared, scale, device):
    weights, ids = routing(tokens, device)
    if tokens > 5:
        ids[5] = -1
    for seed in (0, 1, 2**64 - 1):
        expected = reference.fuse_routing(weights, ids, EXPERTS, shared, scale, policy, seed)
        out, buffers = poisoned(expected)
        given = fuse_routing(weights, ids, EXPERTS, shared, scale, policy, seed, out=out)
        assert given is out and all(map(torch.equal, out, expected))
        assert all((b[:5] == -7).all() and (b[-5:] == -7).all() for b in buffers)
        assert all(map(torch.equal, fuse_routing(weights, ids, EXPERTS, shared, scale, policy, seed), expected))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_id_types(dtype, device):
    weights, ids = routing(7, device)
    ids = ids.to(dtype)
    if dtype != torch.uint8:
        ids[5] = -1
    if dtype == torch.int64:  # truncated to 32 bits these would be experts 3, 0 and 11
        ids[0, 1:] = torch.tensor([2**32 + 3, 2**40, -(2**32) + 11])
    expected = reference.fuse_routing(weights, ids, EXPERTS, 2, 2.5)
    given = fuse_routing(weights, ids, EXPERTS, 2, 2.5)
    assert all(map(torch.equal, given, expected)) and given[1].dtype == torch.int32
    assert dtype != torch.int64 or given[1][0, 1:4].tolist() == [-1, -1, -1]


def test_numpy_numbers(device):
    weights, ids = routing(7, device)
    expected = fuse_routing(weights, ids, EXPERTS, 2, 1.0, "random", 3)
    given = fuse_routing(weights, ids, np.int64(EXPERTS), np.int32(2), None, "random", np.uint64(3))
    assert all(map(torch.equal, given, expected))


def test_factory_refuses_policies():
    with pytest.raises(ValueError, match="policy is 'some'; it must be one of all, round_robin, random"):
        kernel.make_fuse_kernel("some")


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_random_replicas_are_spread_and_reproducible(replicas, device):
    weights, ids = routing(800, device)
    first, again, other = (fuse_routing(weights, ids, EXPERTS, replicas, 1.0, "random", s)[1][:, -1] for s in (3, 3, 4))
    assert torch.equal(first, again) and (replicas == 1 or not torch.equal(first, other))
    counts = torch.bincount(first.long().cpu() - EXPERTS, minlength=replicas)
    assert len(counts) == replicas and (counts - 800 / replicas).abs().max() < 5 * (800 / replicas) ** 0.5


def test_round_robin_is_balanced(device):
    _, ids = fuse_routing(*routing(101, device), EXPERTS, 8, policy="round_robin")
    counts = torch.bincount(ids[:, -1].long().cpu())[EXPERTS:]
    assert counts.max() - counts.min() == 1


def matrices(count, hidden=12, wide=8, seed=1):
    random = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    return [(matrix(wide, hidden), matrix(wide, hidden), matrix(hidden, wide)) for _ in range(count)]


@pytest.mark.parametrize("scale", [1.0, 2.5, 16.0])
@pytest.mark.parametrize(
    "policy, shared, replicas",
    [
        *[("all", shared, 1) for shared in (1, 2)],
        *[(policy, 1, replicas) for policy in ("round_robin", "random") for replicas in (1, 2, 8)],
    ],
)
@pytest.mark.parametrize("tokens", [0, 9])
def test_layer_output_is_unchanged(tokens, policy, shared, replicas, scale, device):
    x = torch.randn(tokens, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights, ids = routing(tokens, "cpu")
    matrices_of_all = matrices(EXPERTS + shared)
    before = reference.forward_normal(x, weights, ids, matrices_of_all[:EXPERTS], matrices_of_all[EXPERTS:], scale)
    fused = fuse_routing(weights.to(device), ids.to(device), EXPERTS, shared * replicas, scale, policy)
    replicated = matrices_of_all[:EXPERTS] + [m for m in matrices_of_all[EXPERTS:] for _ in range(replicas)]
    after = reference.moe_experts(x, *(t.cpu() for t in fused), replicated) * scale
    # 1 / scale is rounded to float32 once.
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6 * float(before.abs().max()) if tokens else 0)


def test_a_wrong_weight_changes_the_layer(device):
    """Without the division by the scaling factor the output differs."""
    x = torch.randn(9, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights, ids = routing(9, "cpu")
    every = matrices(EXPERTS + 1)
    before = reference.forward_normal(x, weights, ids, every[:EXPERTS], every[EXPERTS:], 2.5)
    fused = fuse_routing(weights.to(device), ids.to(device), EXPERTS, 1, 1.0)
    after = reference.moe_experts(x, *(t.cpu() for t in fused), every) * 2.5
    assert (after - before).abs().max() > 0.1


@pytest.mark.parametrize("shared", [1, 2])
def test_gate_with_fused_shared_experts(shared, device):
    random = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(9, 64, generator=random).to(device), torch.rand(64, generator=random).to(device)
    options = dict(num_expert_group=8, topk_group=4, routed_scaling_factor=2.5)
    expected = fuse_routing(*moe_numba.biased_grouped_topk(logits, bias, 4, **options), 64, shared, 2.5)
    given = moe_numba.biased_grouped_topk(logits, bias, 4 + shared, num_fused_shared_experts=shared, **options)
    assert torch.equal(given[1], expected[1])
    torch.testing.assert_close(given[0], expected[0], rtol=1e-6, atol=0)


@pytest.mark.skipif(not simulator.ENABLED, reason="replaces a device function in the simulator")
def test_checker_rejects_a_weaker_hash(device, monkeypatch):
    monkeypatch.setattr(kernel, "murmur3_finalizer", kernel.cuda.jit(device=True)(lambda word: word))
    kernel.make_fuse_kernel.cache_clear()
    weights, ids = routing(70, device)
    given = fuse_routing(weights, ids, EXPERTS, 8, 1.0, "random")
    kernel.make_fuse_kernel.cache_clear()
    assert not torch.equal(given[1], reference.fuse_routing(weights, ids, EXPERTS, 8, 1.0, "random")[1])


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(topk_weights=torch.zeros(3, 4).double()), TypeError, "topk_weights is torch.float64"),
        (dict(topk_ids=torch.zeros(3, 4).char()), TypeError, "topk_ids is torch.int8; it must be torch.uint8 or"),
        (dict(topk_weights=torch.zeros(3, 5)), ValueError, r"topk_weights has shape \(3, 5\).*; it must be \[3, 4\]"),
        (dict(topk_ids=torch.zeros(12).int()), ValueError, "topk_ids has shape"),
        (dict(num_experts=0), ValueError, "num_experts is 0"),
        (dict(num_fused_shared_experts=1.0), TypeError, "num_fused_shared_experts is 1.0"),
        (dict(routed_scaling_factor=0.0), ValueError, "routed_scaling_factor is 0.0"),
        (dict(routed_scaling_factor=[1]), TypeError, r"routed_scaling_factor is \[1\]; it must be a number"),
        (dict(policy=None), TypeError, "policy is None; it must be one of all"),
        (dict(policy="some"), ValueError, "policy is 'some'; it must be one of all, round_robin, random"),
        (dict(seed=-1), ValueError, "seed is -1"),
        (dict(out=[torch.zeros(3, 4), torch.zeros(3, 4)]), ValueError, "out's weights"),
        (dict(out=[]), ValueError, "out is 0 of them"),
    ],
)
def test_invalid_arguments(change, error, message, device):
    arguments = dict(topk_weights=torch.zeros(3, 4), topk_ids=torch.zeros(3, 4).int(), num_experts=8) | change
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(error, match=message):
        fuse_routing(**arguments)
