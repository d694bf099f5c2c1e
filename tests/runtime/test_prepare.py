"""Prepared calls of public functions: equal to calls, with new inputs and without new outputs."""

import pytest
import torch

from moe_numba import (
    biased_grouped_topk,
    biased_grouped_topk_align,
    group_gemm_bf16,
    k_grouped_gemm_bf16,
    moe_align_block_size,
    pack_mxfp4,
    per_token_cast_to_fp8,
    prepare,
    simulator,
)
from moe_numba.moe_layer import MoELayer
from moe_numba.runtime import prepare as prepared_calls


def arguments(function, device, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 16, generator=generator).to(device)
    rows, weight = torch.randn(8, 64, generator=generator), torch.randn(2, 64, 64, generator=generator)
    seqlens, cu_seqlens = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([0, 3, 8], dtype=torch.int32)
    ids = torch.randint(0, 16, (5, 4), dtype=torch.int32, generator=generator)
    return {
        biased_grouped_topk: (logits, None, 4),
        biased_grouped_topk_align: (logits, None, 4, 16),
        moe_align_block_size: (ids.to(device), 16, 16),
        per_token_cast_to_fp8: (rows.bfloat16().to(device),),
        group_gemm_bf16: tuple(t.to(device) for t in (rows.bfloat16(), weight.bfloat16(), seqlens, cu_seqlens)),
    }[function]


FUNCTIONS = biased_grouped_topk, biased_grouped_topk_align, moe_align_block_size, per_token_cast_to_fp8, group_gemm_bf16


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_prepared_calls_compute_with_the_inputs_of_now(function, device):
    given, later = (arguments(function, device, seed) for seed in (0, 1))
    prepared = prepare(function, *given)
    first = prepared()
    given[0].copy_(later[0])
    result, expected = prepared(), function(given[0], *given[1:])
    assert result is first is prepared.result
    for tensor, wanted in zip(*[r if isinstance(r, tuple) else (r,) for r in (result, expected)], strict=True):
        assert torch.equal(tensor.float(), wanted.float())


def test_memory_that_a_tensor_loses_stays_alive_and_is_noticed(device, monkeypatch):
    """`w.data = ...` gives a tensor other memory, as a reload of weights does."""
    experts = MoELayer(4, 64, 64, 2).to(device).requires_grad_(False).experts
    experts.w13.fill_(0.1)
    experts.w2.fill_(1)
    given = arguments(group_gemm_bf16, device, 0)
    x, ids = given[0].new_ones(3, 64), torch.zeros(3, 2, dtype=torch.int32, device=device)
    routed = x, torch.ones(3, 2, device=device), ids
    calls = {
        "weight": prepare(group_gemm_bf16, *given),
        "w2": prepare(experts, *routed, workspace=experts.workspace(3, 2)),
    }
    moved = {"weight": given[1], "w2": experts.w2}
    before = {name: call().clone() for name, call in calls.items()}
    for name, call in calls.items():
        moved[name].data = torch.zeros_like(moved[name])
        monkeypatch.setattr(prepared_calls, "_CHECKS_MEMORY", True)
        with pytest.raises(RuntimeError, match=f"^{name} has other memory than when the call was prepared"):
            call()
        monkeypatch.setattr(prepared_calls, "_CHECKS_MEMORY", False)
        assert torch.equal(call(), before[name])


def test_what_torch_computes_is_not_prepared(device):
    layer, x = MoELayer(4, 64, 64, 2).to(device), torch.zeros(3, 64, device=device).bfloat16()
    with torch.no_grad(), pytest.raises(ValueError, match="a prepared call does not repeat the router's GEMM"):
        prepare(layer, x, layer.experts.workspace(3, 2))
    layer, routed = MoELayer(4, 64, 64, 2, reference={"activation"}).to(device), torch.ones(3, 2, device=device)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"reference has \['activation'\], which a prepared call does"),
    ):
        prepare(layer.experts, x, routed, routed.int())


def test_a_call_that_copies_is_not_prepared(device):
    ids = torch.zeros(8, 4, dtype=torch.int32, device=device).T
    with pytest.raises(ValueError, match="topk_ids has strides .* for a prepared call it must be contiguous"):
        prepare(moe_align_block_size, ids, 16, 16)
    moe_align_block_size(ids, 16, 16)


def test_a_call_that_launches_nothing_is_not_prepared(device):
    """Its result would never change. A function that launches kernels has nothing to do with empty inputs."""
    blocks = torch.zeros(1, 32, 16, dtype=torch.uint8, device=device)
    scales = torch.zeros(1, 32, 1, dtype=torch.uint8, device=device)
    for function, *given in ((pack_mxfp4, blocks, scales), (torch.add, scales, 1)):
        with pytest.raises(ValueError, match=f"function is {function.__name__}, which launched no kernel"):
            prepare(function, *given)
    no_rows = torch.zeros(0, 64, dtype=torch.bfloat16, device=device)
    assert prepare(per_token_cast_to_fp8, no_rows)()[0].shape == (0, 64)
    offs = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="a has 0 rows; for a prepared call"):  # torch fills the output with zeros
        prepare(k_grouped_gemm_bf16, no_rows, no_rows, None, None, offs)


@pytest.mark.gpu
def test_a_prepared_call_with_a_workspace_keeps_its_stream():
    prepared = prepare(moe_align_block_size, torch.zeros(20000, dtype=torch.int32, device="cuda"), 16, 16)
    prepared()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="was prepared on stream"):
        prepared()


@pytest.mark.skipif(not simulator.ENABLED, reason="the simulator has one stream")
def test_a_workspace_in_the_simulator(monkeypatch):
    from moe_numba.align import api

    monkeypatch.setattr(api, "FEW_SLOTS", range(0))
    monkeypatch.setattr(api, "MEDIUM_MAX_SLOTS", 0)
    ids = torch.randint(0, 16, (40,), dtype=torch.int32)
    prepared = prepare(moe_align_block_size, ids, 4, 16)
    assert all(map(torch.equal, prepared(), moe_align_block_size(ids, 4, 16)))
