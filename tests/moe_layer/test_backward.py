"""Gradients of ``fused_experts``, ``fused_moe`` and ``MoELayer`` against torch's of a float64 reference."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_numba
from moe_numba import simulator
from moe_numba.gate.reference import biased_grouped_topk as reference_topk
from moe_numba.gate.reference import expert_scores, expert_weights
from moe_numba.grouped_gemm.api import autograd
from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.call.plan import group_gemm
from moe_numba.moe_layer import workspace
from moe_numba.moe_layer.backward import experts as backward_experts
from moe_numba.moe_layer.backward import plan as backward_plan
from moe_numba.moe_layer.backward.activation import silu_and_mul_backward
from moe_numba.moe_layer.weights import BF16

NAMES = "x", "w13", "w2", "topk_weights", "w13_bias", "w2_bias", "shared"
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 5, 64, 128, 4
IDS = [[0, 2], [1, 3], [2, -1], [2, 0], [0, 0]]  # a masked one, and one expert twice
EMPTY = [[2, 2], [2, -1], [5, 2], [-1, -1], [2, 2]]  # of one expert only


def activate(gate_up, activation, limit):
    """Return the activation of float64 gate and up, rounded as the layer stores them; gradients ignore the rounding."""
    gate_up = gate_up + (gate_up.detach().bfloat16() - gate_up.detach())
    if activation == "silu":
        gate, up = gate_up.chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return torch.nn.functional.silu(gate) * up
    gate, up = gate_up[..., 0::2], gate_up[..., 1::2]
    limit = 7.0 if limit is None else limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def reference(ids, activation, limit, x, w13, w2, topk_weights, w13_bias=None, w2_bias=None, shared=None):
    """Return the output of the experts in float64."""
    rows = []
    for t in range(len(x)):
        row = torch.zeros_like(x[t]) if shared is None else shared[t]
        for k, e in enumerate(ids[t].tolist()):
            if 0 <= e < len(w13):
                gate_up = w13[e] @ x[t] + (0 if w13_bias is None else w13_bias[e])
                y = w2[e] @ activate(gate_up, activation, limit) + (0 if w2_bias is None else w2_bias[e])
                row = row + topk_weights[t, k] * y
        rows.append(row)
    return torch.stack(rows)


def inputs(device, has_bias=False, has_shared=False, seed=0):
    """Return the floating-point arguments of a call, by name."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape, scale=1.0: torch.randn(*shape, generator=generator) * scale
    given = dict(
        x=draw(TOKENS, HIDDEN).bfloat16(),
        w13=draw(EXPERTS, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5).bfloat16(),
        w2=draw(EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5).bfloat16(),
        topk_weights=torch.rand(TOKENS, 2, generator=generator),
    )
    if has_bias:
        given |= dict(w13_bias=draw(EXPERTS, 2 * INTERMEDIATE).bfloat16(), w2_bias=draw(EXPERTS, HIDDEN))
    if has_shared:
        given["shared"] = draw(TOKENS, HIDDEN).bfloat16()
    return {name: tensor.to(device) for name, tensor in given.items()}


def with_grad(given, names=NAMES):
    return {name: t.detach().clone().requires_grad_(name in names) for name, t in given.items()}


def error(result, wanted):
    """Return the relative error, or the norm of the result where zeros are wanted."""
    return (
        float((result.double() - wanted).norm() / max(float(wanted.norm()), 1e-30)) if wanted.any() else result.norm()
    )


@pytest.mark.parametrize(
    "activation, limit, has_bias, ids",
    [
        ("silu", None, False, IDS),
        ("silu", 0.5, False, IDS),
        ("swigluoai", None, True, IDS),
        ("swigluoai", 0.5, True, EMPTY),
        ("silu", None, True, EMPTY),
    ],
)
@pytest.mark.parametrize("transposed", (False, True))
def test_gradients_are_those_of_the_reference(activation, limit, has_bias, ids, transposed, device):
    given, ids = inputs(device, has_bias, has_shared=True), torch.tensor(ids, dtype=torch.int32, device=device)
    if transposed:
        given |= {name: given[name].mT.contiguous().mT for name in ("w13", "w2")}
        ids = ids.long().mT.contiguous().mT
    own, wanted = with_grad(given), with_grad({name: t.double() for name, t in given.items()})
    grad = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    moe_numba.fused_experts(**own, topk_ids=ids, activation=activation, limit=limit).backward(grad)
    reference(ids, activation, limit, **wanted).backward(grad.double())
    for name in given:
        result = own[name].grad
        assert result.shape == given[name].shape and result.dtype == given[name].dtype, name
        assert error(result, wanted[name].grad) < 0.01, name


@pytest.mark.parametrize("activation, has_bias", (("silu", False), ("swigluoai", True)))
@pytest.mark.parametrize("how", ("few tokens", "few tokens, batch invariant", "tokens in order", "w13 transposed"))
def test_the_output_has_the_bits_of_inference(activation, has_bias, how, device, monkeypatch):
    """And gate and up those of a grouped GEMM alone: a gradient is the same however they were made."""
    given, ids = inputs(device, has_bias, has_shared=True), torch.tensor(IDS, dtype=torch.int32, device=device)
    options = dict(activation=activation, batch_invariant=how == "few tokens, batch invariant")
    if how == "tokens in order":  # of the experts, as with many rows for each
        monkeypatch.setitem(workspace.MAX_GATHERED_AVERAGE, BF16, 0)
        ids, given["x"] = ids.repeat(13, 1), given["x"].repeat(13, 1)
        given |= dict(topk_weights=given["topk_weights"].repeat(13, 1), shared=given["shared"].repeat(13, 1))
    if how == "w13 transposed":
        given["w13"] = given["w13"].mT.contiguous().mT
    own = with_grad(given)
    y = moe_numba.fused_experts(**own, topk_ids=ids, **options)
    assert torch.equal(y, moe_numba.fused_experts(**given, topk_ids=ids, **options))
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    kept = next(t for t in saved if t.shape == (ids.numel(), 2 * INTERMEDIATE))
    _, _, gather, inverse = routing = moe_numba.group_by_expert(ids, EXPERTS)
    wanted = group_gemm_bf16(given["x"], given["w13"], *routing[:2], gather_indices=gather, bias=given.get("w13_bias"))
    if activation == "swigluoai" and how != "w13 transposed":
        wanted = torch.cat((wanted[:, 0::2], wanted[:, 1::2]), dim=1)
    rows = inverse[inverse >= 0].long()
    assert torch.equal(kept[rows], wanted[rows])


@pytest.mark.parametrize("sizes", ((3, 1, 0, 2), (0, 40, 1, 200)))
@pytest.mark.parametrize("activation", ("silu", "swigluoai"))
@pytest.mark.parametrize("average", (1, 30, 100, 200))
def test_the_grouped_gemm_stores_gate_and_up(sizes, activation, average, device):
    """Of 192 columns, so that the second of two tiles, or of two CTAs in a cluster, has 64 columns or none."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(device)
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    x, weight, bias = draw(sum(sizes), 64), draw(4, 2 * 192, 64), draw(4, 2 * 192)
    given = dict(x=x, weight=weight, seqlens=None, cu_seqlens=None, offs=ends, bias=bias, num_seq_per_group_avg=average)
    guard = torch.full((sum(sizes) + 1, 2 * 192), 7.0, device=device).bfloat16()
    out = torch.empty(sum(sizes), 192, device=device).bfloat16(), guard[:-1]
    group_gemm("none", given | dict(activation=activation), silu_and_mul=True, store_gate_up=True, out=out)
    assert torch.equal(out[0], group_gemm("none", given | dict(activation=activation), silu_and_mul=True))
    gate_up = group_gemm_bf16(**given)
    if activation == "swigluoai":
        gate_up = torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1)
    assert torch.equal(out[1], gate_up) and bool((guard[-1] == 7).all())


def test_gate_and_up_are_stored_of_whole_tiles_only(device):
    x, weight = torch.zeros(2, 64, device=device).bfloat16(), torch.zeros(1, 96, 64, device=device).bfloat16()
    given = dict(x=x, weight=weight, offs=torch.tensor([2], dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="weight's n is 96; with store_gate_up it must be a multiple of 128"):
        group_gemm("none", given, silu_and_mul=True, store_gate_up=True)


def test_gradients_are_the_same_without_wgmma(device, monkeypatch):
    """On older GPUs, which have no k-grouped GEMM, and whose grouped GEMM takes no transposed view."""
    monkeypatch.setattr(backward_experts, "_backward_plans", {})
    for module in (backward_plan, autograd):
        monkeypatch.setattr(module, "has_wgmma", lambda device: False)
    monkeypatch.setattr(backward_plan, "k_grouped_gemm_bf16", None)
    test_gradients_are_those_of_the_reference("swigluoai", 0.5, True, EMPTY, False, device)


def test_gradients_are_summed_over_all_warps(device):
    """Rows of more columns than a CTA's threads have, so that each thread has some, and some have more."""
    columns, generator = 1088, torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    gate_up, u, indices = draw(3, 2 * columns), draw(3, columns), torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32)
    weights = torch.rand(2, 2, generator=generator)
    given = [t.to(device) for t in (gate_up, u, indices, weights)]
    of_gate_up, weighted, of_weights = (t.cpu() for t in silu_and_mul_backward(*given, "silu", 1.702, None))
    exact = gate_up.double().requires_grad_()
    a = activate(exact, "silu", None)
    row_weights = torch.stack([weights[0, 1], weights[1, 1], weights[0, 0]])[:, None].double()
    (row_weights * a * u).sum().backward()
    assert error(of_gate_up, exact.grad) < 0.004 and error(weighted, row_weights * a.detach()) < 0.004
    products = (a.detach() * u).sum(dim=1)
    wanted = torch.stack([products[2], products[0], torch.zeros(()), products[1]]).view(2, 2)
    assert error(of_weights, wanted) < 1e-5


def test_a_wrong_gradient_is_rejected(device, monkeypatch):
    """The weight of an assignment left out of the gradient of gate and up."""
    right = backward_plan.silu_and_mul_backward
    ones = lambda gate_up, u, inverse, weights, *rest, out: right(
        gate_up, u, inverse, torch.ones_like(weights), *rest, out=out
    )
    monkeypatch.setattr(backward_plan, "silu_and_mul_backward", ones)
    monkeypatch.setattr(backward_experts, "_backward_plans", {})
    with pytest.raises(AssertionError, match="^x"):
        test_gradients_are_those_of_the_reference("silu", None, False, IDS, False, device)


def test_gradients_are_bit_identical_from_run_to_run(device):
    ids = torch.tensor(IDS, device=device)
    results = []
    for _ in range(2):
        own = with_grad(inputs(device, has_bias=True))
        moe_numba.fused_experts(**own, topk_ids=ids).float().sum().backward()
        results.append([t.grad for t in own.values()])
    assert all(map(torch.equal, *results))


def test_training_is_bit_identical_from_run_to_run(device):
    """Losses of thousands of steps on a GPU, each with another routing: the gate has gradients, too."""
    runs = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        layer = moe_numba.moe_layer.MoELayer(EXPERTS, HIDDEN, INTERMEDIATE, 2, scoring="softmax", device=device)
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        optimizer = torch.optim.SGD(layer.requires_grad_(True).parameters(), 0.01)
        x, wanted = (torch.randn(64, HIDDEN, generator=generator).bfloat16().to(device) for _ in range(2))
        losses = []
        for step in range(3 if simulator.ENABLED else 3000):
            rows = slice(8 * (step % 8), 8 * (step % 8) + 8)
            loss = (layer(x[rows]) - wanted[rows]).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        runs.append(torch.stack(losses))
    assert torch.equal(*runs) and runs[0].isfinite().all() and runs[0][-1] != runs[0][0]


@pytest.mark.parametrize("name", NAMES)
def test_only_gradients_that_are_needed_are_computed(name, device, monkeypatch):
    own = with_grad(inputs(device, has_bias=True, has_shared=True), (name,))
    called = []

    def counted(name):
        function = getattr(backward_plan, name)
        return lambda *args, **kwargs: called.append(name) or function(*args, **kwargs)

    for function in ("k_grouped_gemm_bf16", "permute_tokens"):
        monkeypatch.setattr(backward_plan, function, counted(function))
    monkeypatch.setattr(backward_experts, "_backward_plans", {})
    moe_numba.fused_experts(**own, topk_ids=torch.tensor(IDS, device=device)).float().sum().backward()
    assert [n for n, t in own.items() if t.grad is not None] == [name]
    assert ("k_grouped_gemm_bf16" in called) == (name in ("w13", "w2", "w13_bias"))
    assert ("permute_tokens" in called) == (name in ("w13", "w2"))


@pytest.mark.parametrize("how", ("plain", "checkpointed", "without wgmma"))
def test_gradients_are_added_to_main_gradients(how, device, monkeypatch):
    """In float32, as Megatron-LM's; then a weight's own gradient is None, as if it had none."""
    given, ids = inputs(device), torch.tensor(IDS, device=device)
    wanted, own = with_grad(given), with_grad(given)
    for name in ("w13", "w2"):
        own[name].main_grad = torch.full(own[name].shape, 0.5, device=device)
    if how == "without wgmma":
        monkeypatch.setattr(backward_experts, "_backward_plans", {})
        monkeypatch.setattr(backward_plan, "has_wgmma", lambda device: False)
    for _ in range(2):
        moe_numba.fused_experts(**wanted, topk_ids=ids).float().sum().backward()
        call = lambda: moe_numba.fused_experts(**own, topk_ids=ids)
        y = checkpoint(call, use_reentrant=False) if how == "checkpointed" else call()
        y.float().sum().backward()
    for name, tensor in own.items():
        if name in ("w13", "w2"):
            assert tensor.grad is None and error(tensor.main_grad - 0.5, wanted[name].grad.double()) < 0.005, name
        else:
            assert error(tensor.grad, wanted[name].grad.double()) < 1e-6, name


def test_a_main_gradient_of_another_shape_is_refused(device):
    own = with_grad(inputs(device))
    own["w2"].main_grad = torch.zeros(EXPERTS, INTERMEDIATE, HIDDEN, device=device)
    with pytest.raises(ValueError, match=r"w2.main_grad has shape \(4, 128, 64\)"):
        moe_numba.fused_experts(**own, topk_ids=torch.tensor(IDS, device=device))


def test_no_tokens_have_zero_gradients(device):
    given = inputs(device) | {name: inputs(device)[name][:0] for name in ("x", "topk_weights")}
    own = with_grad(given)
    moe_numba.fused_experts(**own, topk_ids=torch.zeros(0, 2, dtype=torch.int32, device=device)).sum().backward()
    assert all(not t.grad.any() and t.grad.shape == t.shape for t in own.values())


def routed(logits, scoring, renormalize, topk=3):
    """Return weights and ids of a float64 reference whose weights are differentiable."""
    ids = reference_topk(logits.detach(), None, topk, scoring=scoring, dtype=torch.float64)[1]
    return expert_weights(expert_scores(logits, scoring).gather(1, ids.long()), renormalize=renormalize), ids


@pytest.mark.parametrize("scoring, renormalize", (("softmax", False), ("sigmoid", True)))
def test_gradients_reach_the_router(scoring, renormalize, device):
    given = inputs(device)
    given |= dict(router_logits=torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)).to(device))
    del given["topk_weights"]
    own, wanted = with_grad(given, given), with_grad({n: t.double() for n, t in given.items()}, given)
    y = moe_numba.fused_moe(**own, correction_bias=None, topk=3, scoring=scoring, renormalize=renormalize)
    y.float().sum().backward()
    logits = wanted.pop("router_logits")
    weights, ids = routed(logits, scoring, renormalize)
    reference(ids, "silu", None, topk_weights=weights, **wanted).sum().backward()
    for name, tensor in (wanted | dict(router_logits=logits)).items():
        assert error(own[name].grad, tensor.grad) < 0.01, name


@pytest.mark.parametrize("how", ("compiled", "checkpointed"))
def test_compiled_and_checkpointed_layers_have_the_same_gradients(how, device):
    layer = moe_numba.moe_layer.MoELayer(EXPERTS, HIDDEN, INTERMEDIATE, 2, scoring="softmax", device=device)
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    layer.requires_grad_(True)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    if how == "checkpointed":
        call = lambda x: checkpoint(layer, x, use_reentrant=False)
    gradients = []
    for function in (layer, call):
        x = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16().to(device).requires_grad_()
        function(x).float().pow(2).sum().backward()
        gradients.append([x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
    assert all(map(torch.equal, *gradients)) and all(g.any() for g in gradients[0])


def test_what_has_no_gradient_is_refused(device):
    given = inputs(device)
    ids = torch.tensor(IDS, device=device)
    own = with_grad(given)
    with pytest.raises(ValueError, match="x requires grad; fused_experts has a backward only without out"):
        moe_numba.fused_experts(**own, topk_ids=ids, out=torch.empty_like(given["x"]))
    y = moe_numba.fused_experts(**own, topk_ids=ids)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(y.float().sum(), own["x"], create_graph=True)
    quantised = {n: given[n].to(torch.float8_e4m3fn) for n in ("w13", "w2")}
    scales = dict(w13_scale=torch.ones(EXPERTS, device=device), w2_scale=torch.ones(EXPERTS, device=device))
    with pytest.raises(ValueError, match="x requires grad; fused_experts has a backward only with bfloat16 weights"):
        moe_numba.fused_experts(**own | quantised | scales, topk_ids=ids)
