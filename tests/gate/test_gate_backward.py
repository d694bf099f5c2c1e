"""The gradient of the gate's logits against torch's of the float64 reference."""

import itertools

import pytest
import torch

import moe_numba
from moe_numba.gate import autograd, reference
from moe_numba.gate.placement import ExpertPlacement

OPTIONS = [
    dict(scoring=scoring, renormalize=renormalize) | shared
    for scoring, renormalize, shared in itertools.product(
        ("sigmoid", "softmax", "sqrtsoftplus"),
        (True, False),
        (
            dict(topk=4),
            dict(topk=5, num_fused_shared_experts=1, routed_scaling_factor=2.5),
            dict(topk=4, routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=True),
        ),
    )
]


def gradients(options, device, dtype=torch.float32, groups=(4, 2), limit=5):
    """Return the gradients of the kernel and of the reference, for six tokens, of which the last are padding."""
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(6, 16, generator=generator).to(dtype), torch.randn(16, generator=generator) / 10
    options = options | dict(num_expert_group=groups[0], topk_group=groups[1], num_token_non_padded=limit)
    own = logits.clone().to(device).requires_grad_()
    weights, ids = moe_numba.biased_grouped_topk(own, bias.to(device), **options)
    grad = torch.randn(weights.shape, generator=generator)
    weights.backward(grad.to(device))
    wanted = logits.double().requires_grad_()
    expected, expected_ids = reference.biased_grouped_topk(wanted, bias, dtype=torch.float64, **options)
    expected.backward(grad)
    assert torch.equal(ids.cpu(), expected_ids) and not ids.requires_grad
    return own.grad.cpu(), wanted.grad


def error(own, wanted):
    return float((own.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_gradient_is_that_of_the_reference(options, device):
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
        own, wanted = gradients(options, device, dtype)
        assert own.dtype == dtype and error(own, wanted) < bound and not own[5].any()
    own, wanted = gradients(options, device, groups=(1, 1), limit=6)
    assert error(own, wanted) < 1e-5


def test_a_wrong_gradient_is_rejected(device, monkeypatch):
    right = autograd.logits_gradient
    unscaled = lambda logits, ids, grad, options: right(logits, ids, grad, options._replace(renormalize=False))
    monkeypatch.setattr(autograd, "logits_gradient", unscaled)
    assert error(*gradients(OPTIONS[0], device)) > 0.1


def test_a_bias_that_requires_grad_changes_nothing(device):
    logits, bias = torch.randn(3, 8, device=device), torch.nn.Parameter(torch.zeros(8, device=device))
    weights, _ = moe_numba.biased_grouped_topk(logits, bias, 2)
    assert not weights.requires_grad
    assert moe_numba.biased_grouped_topk(logits.requires_grad_(), bias, 2)[0].requires_grad


def test_a_placement_has_no_backward(device):
    ids = torch.arange(8, dtype=torch.int32, device=device)[:, None]
    placement = ExpertPlacement(ids, torch.ones(8, dtype=torch.int32, device=device), 8)
    logits = torch.randn(3, 8, device=device)
    assert moe_numba.biased_grouped_topk(logits, None, 2, placement=placement)[1].shape == (3, 2)
    with pytest.raises(ValueError, match="gating_output requires grad; .* only without placement"):
        moe_numba.biased_grouped_topk(logits.requires_grad_(), None, 2, placement=placement)


def test_special_logits_have_finite_gradients(device):
    for scoring in ("sigmoid", "softmax", "sqrtsoftplus"):
        logits = torch.tensor([[float("nan"), 1, 2, 3], [float("inf"), 0, 0, 0], [float("-inf")] * 4], device=device)
        weights, _ = moe_numba.biased_grouped_topk(logits.requires_grad_(), None, 2, scoring=scoring)
        weights.sum().backward()
        assert logits.grad.isfinite().all(), scoring
