"""Inputs of notebook 13: handles computed in torch, bitwise sums, sizes for the available GPUs."""

from types import SimpleNamespace

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig, min_buffer_bytes
from moe_numba.course.deepep_port.simulate import dispatch_all, virtual_ranks
from moe_numba.course.lessons.combine import combine_inputs as inputs
from moe_numba.expert_parallel import reference


@pytest.mark.skipif(not simulator.ENABLED, reason="these ranks are simulated: set MOE_NUMBA_SIMULATE=1")
@pytest.mark.parametrize("num_tokens, channels", [([9, 5], 2), ([4, 0, 7], 3), ([6], 1)])
def test_handles_equal_those_of_deepeps_dispatch(num_tokens, channels):
    ranks = len(num_tokens)
    topk_idx = inputs.random_routing(num_tokens, 4 * ranks, 2, seed=1, holes=0.2)
    chosen = [layout[2] for layout in inputs.layouts_of(topk_idx, 4 * ranks)]
    c = DeepEPConfig(ranks, channels, 4, 2, 32, 0, 0, 4 * ranks, 2)
    with virtual_ranks(ranks, min_buffer_bytes(c)) as all_ranks:
        x = [torch.randn(tokens, 16).bfloat16() for tokens in num_tokens]
        got = [result[3] for result in dispatch_all(all_ranks, c, x, chosen)]
    for expected, given in zip(got, inputs.handles_of(chosen, channels), strict=True):
        for name, right, found in zip(expected._fields, expected, given, strict=True):
            assert found.dtype == right.dtype and torch.equal(found, right), name


def test_sums_are_the_reference_rounded_once():
    topk_idx = inputs.random_routing([7, 5], 8, 2, holes=0.3)
    received = inputs.received_by([layout[2] for layout in inputs.layouts_of(topk_idx, 8)])
    y = [torch.randn(len(result.src_idx), 16).bfloat16() for result in received]
    biases = [(torch.randn(tokens, 16).bfloat16(),) for tokens in (7, 5)]
    for given in (None, biases):
        for sums, (total, _) in zip(
            inputs.sums_of(y, received, [7, 5], given), reference.combine(y, received, [7, 5], None, given), strict=True
        ):
            assert torch.allclose(sums.double(), total, rtol=2**-8, atol=1e-5)


def test_random_routing_has_unused_choices():
    whole, holed = (inputs.random_routing([50], 16, 4, holes=part)[0] for part in (0, 0.5))
    assert not (whole < 0).any() and (holed < 0).any()
    assert all(len(set(row)) == 4 for row in whole.tolist())


def test_ranges_cover_all_tokens():
    for tokens in (0, 1, 7, 12):
        assert [t for part in inputs.channel_ranges(tokens, 5) for t in part] == list(range(tokens))


@pytest.mark.parametrize(
    "gpus, peer_access, ranks, devices",
    [(1, True, 2, [0, 0]), (2, True, 2, [0, 1]), (2, False, 2, [0, 0]), (3, True, 2, [0, 1]), (5, True, 4, range(4))],
)
def test_each_rank_has_a_gpu_if_peer_access_is_possible(gpus, peer_access, ranks, devices, monkeypatch):
    monkeypatch.setattr(inputs, "simulator", SimpleNamespace(ENABLED=False))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: peer_access)
    sizes = inputs.combine_sizes()
    assert (sizes.ranks, sizes.devices, sizes.warps * ranks) == (ranks, list(devices), 24)
