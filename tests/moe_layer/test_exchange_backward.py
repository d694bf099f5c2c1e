"""Gradients of ``ExpertParallelMoE`` on several ranks against those of all experts on one."""

from functools import partial

import pytest
import torch
from helpers.expert_parallel import NUM_BYTES, SMALL, engine
from torch.utils.checkpoint import checkpoint

import moe_numba
from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.grouped_gemm.reference import FP8
from moe_numba.moe_layer import ExpertParallelMoE, Experts
from moe_numba.moe_layer.backward import exchange

HIDDEN, INTERMEDIATE, PER_RANK, TOPK = 64, 128, 2, 3
NAMES = "x", "topk_weights", "shared", "w13", "w2"
FEW = [3, 4]


def inputs(tokens, seed=0):
    """Return the tensors of all ranks by name, with those of rank r behind those of rank r - 1, and ids."""
    generator, experts = torch.Generator().manual_seed(seed), PER_RANK * len(tokens)
    draw = lambda *shape, scale=1.0: (torch.randn(shape, generator=generator) * scale).bfloat16()
    given = dict(x=draw(sum(tokens), HIDDEN), topk_weights=torch.rand(sum(tokens), TOPK, generator=generator))
    given["shared"] = draw(sum(tokens), HIDDEN)
    given["w13"] = draw(experts, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
    given["w2"] = draw(experts, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
    return given, torch.randint(-1, experts + 1, (sum(tokens), TOPK), generator=generator), draw(sum(tokens), HIDDEN)


def run(tokens, given, ids, grad, names=NAMES, call=lambda layer: layer, **options):
    """Return the outputs of all ranks, those of inference, and the gradients by name, in the order of `inputs`."""

    def work(transport):
        rank, device, buffer = transport.rank, transport.device, Buffer(transport, NUM_BYTES)
        rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        own = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        experts = Experts(PER_RANK, HIDDEN, INTERMEDIATE, device=device)
        experts.load_state_dict({name: given[name][own] for name in ("w13", "w2")})
        layer = ExpertParallelMoE(buffer, experts, config=SMALL, **options)
        leaves = {name: given[name][rows].to(device).requires_grad_(name in names) for name in NAMES[:3]}
        for name in ("w13", "w2"):
            leaves[name] = getattr(experts, name).requires_grad_(name in names)
        arguments = leaves["x"], leaves["topk_weights"], ids[rows].to(device), leaves["shared"]
        y = call(layer)(*arguments)
        y.backward(grad[rows].to(device))
        with torch.no_grad():
            inference = layer(*arguments)
        layer.close()
        buffer.destroy()
        gradients = {name: t.grad for name, t in leaves.items()}
        return [t if t is None else t.detach().cpu() for t in (y, inference, *gradients.values())]

    with engine(0):
        results = zip(*LocalGroup(len(tokens)).run(work), strict=True)
    y, inference, *found = (None if parts[0] is None else torch.cat(parts) for parts in results)
    return y, inference, dict(zip(NAMES, found, strict=True))


def wanted(given, ids, grad):
    """Return the gradients of all experts on one GPU."""
    device = "cpu" if simulator.ENABLED else "cuda"
    leaves = {name: t.to(device, copy=True).requires_grad_() for name, t in given.items()}
    ids = torch.where(ids < len(given["w13"]), ids, -1).to(device)
    moe_numba.fused_experts(**leaves, topk_ids=ids).backward(grad.to(device))
    return {name: t.grad.cpu() for name, t in leaves.items()}


def differing(found, expected, names=NAMES):
    """Return the first gradient that differs; a token's is rounded on each rank before ranks are added."""
    for name in names:
        if not (found[name] - expected[name]).float().norm() <= 0.01 * expected[name].float().norm():
            return name
    return None


@pytest.mark.parametrize(
    "tokens, options",
    (([5], {}), ([3], dict(num_worst_tokens=4)), ([5, 3], {}), ([4, 0, 2], {}), ([3, 5], dict(num_worst_tokens=9))),
)
def test_gradients_are_those_of_one_gpu(tokens, options):
    """With worst-case tokens inference has the low-latency exchange, whose sums of ranks have the same bits."""
    given = inputs(tokens)
    y, inference, found = run(tokens, *given, **options)
    assert torch.equal(y, inference) and differing(found, wanted(*given)) is None


@pytest.mark.parametrize("names", (("x",), ("topk_weights",), ("shared",), ("w13", "w2")))
def test_only_some_tensors_require_grad(names):
    given = inputs(FEW)
    _, _, found = run(FEW, *given, names=names)
    assert [name for name, gradient in found.items() if gradient is not None] == list(names)
    assert differing(found, wanted(*given), names) is None


def test_gradients_of_a_checkpointed_layer_are_the_same():
    given = inputs(FEW)
    checkpointed = lambda layer: partial(checkpoint, layer, use_reentrant=False)
    first, again = run(FEW, *given)[2], run(FEW, *given, call=checkpointed)[2]
    assert all(torch.equal(first[name], again[name]) for name in NAMES)


@pytest.mark.parametrize("part", ("weights", "rows"))
def test_wrong_gradients_are_rejected(part, monkeypatch):
    """Routing weights whose gradients stay on the rank of the expert; rows that have another token's gradient."""
    given = inputs(FEW)
    if part == "weights":
        right = exchange.Dispatch.backward
        wrong = lambda ctx, grad, grad_weights, *others: right(ctx, grad, 0 * grad_weights, *others)
        monkeypatch.setattr(exchange.Dispatch, "backward", staticmethod(wrong))
    else:
        right = exchange.Combine.backward
        wrong = lambda ctx, grad: right(ctx, grad.roll(1, 0))
        monkeypatch.setattr(exchange.Combine, "backward", staticmethod(wrong))
    assert differing(run(FEW, *given)[2], wanted(*given)) == ("topk_weights" if part == "weights" else "x")


def test_what_has_no_gradient_is_refused():
    def work(transport):
        device = transport.device
        x = torch.ones(2, 128, device=device).bfloat16().requires_grad_()
        given = torch.ones(2, 1, device=device), torch.zeros(2, 1, dtype=torch.int32, device=device)
        for options, num_bytes, dtype, match in (
            (dict(fp8_dispatch=True), NUM_BYTES, torch.bfloat16, "fp8_dispatch is True; it must be False"),
            ({}, NUM_BYTES, FP8, "w13 is torch.float8_e4m3fn; it must be torch.bfloat16"),
            (dict(low_latency_tokens=2), 0, torch.bfloat16, "the buffer's num_nvl_bytes is 0; it must have rings"),
        ):
            buffer = Buffer(transport, num_bytes, low_latency_mode=not num_bytes)
            layer = ExpertParallelMoE(buffer, Experts(PER_RANK, 128, 128, dtype, device), **options)
            with pytest.raises(ValueError, match=f"x requires grad, and {match} for a backward"):
                layer(x, *given)
            buffer.destroy()

    LocalGroup(1).run(work)
