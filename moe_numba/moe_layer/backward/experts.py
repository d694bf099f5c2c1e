"""Training of experts: ``fused_experts`` that keeps gate and up, its backward, and ``fused_moe`` by its parts."""

from functools import partial

import torch

from moe_numba.gate import biased_grouped_topk
from moe_numba.grouped_gemm.api.autograd import transposed, weight_gradient
from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.api.k_grouped import k_grouped_gemm_bf16
from moe_numba.grouped_gemm.call.checks import has_wgmma
from moe_numba.moe_layer.backward.activation import silu_and_mul_backward
from moe_numba.moe_layer.fused_experts import ExpertsPlan, check_experts, fused_experts, make_plan
from moe_numba.moe_layer.fused_moe import check_layer, fused_moe, own_names
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.launches import ExpertsCall, ExpertsTensors, can_fuse_activation, launches_of
from moe_numba.moe_layer.permute.api import permute_tokens
from moe_numba.moe_layer.silu_and_mul.api import check_activation
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import BF16, shape_of
from moe_numba.moe_layer.workspace import describe, is_permuted
from moe_numba.runtime.outputs import find_plan, remember
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.torch_op import NAMESPACE, OPS, name_requiring_grad, register_differentiable

_TENSORS = "x", "w13", "w2", "topk_weights", "topk_ids", "shared", "w13_bias", "w2_bias"
_OPTIONS = "activation", "alpha", "limit", "batch_invariant"
_plans: dict = {}


def refuse_quantised(function, arguments):
    """Raise if weights are not in bfloat16, naming a tensor that requires grad."""
    if (dtype := arguments["w13"].dtype) != torch.bfloat16:
        name = name_requiring_grad(arguments)
        raise ValueError(
            f"{name} requires grad; {function} has a backward only with bfloat16 weights, and "
            f"w13 is {dtype}: use torch.no_grad() or detach()"
        )


class TrainingPlan(ExpertsPlan):
    """A plan whose launches keep gate and up, and the order of the rows, for a backward."""

    def compute_and_keep(self, t):
        """Return the output, gate and up of each row, and the outputs of ``group_by_expert``.

        The output has the bits of inference. With few tokens its kernels have no gate and up: those are computed
        again, from so few tokens.
        """
        described = describe(self.shape, *self.routing)
        new = lambda group: tuple(t.x.new_empty(size, dtype=dtype) for size, dtype in group)
        routing, (gate_up,), out = new(described.routing), new(described.gate_up), torch.empty_like(t.x)
        if not self.routing[0]:
            return out, gate_up, *(each.zero_() for each in routing)
        memory = self.intermediates(self.new_memory())._replace(routing=routing, gate_up=(gate_up,))
        options = self.shape, self.activation, self.fuses, self.decodes, memory
        for launch in launches_of(ExpertsCall(t, *options, keeps_gate_up=True), out).values():
            launch()
        if self.decodes:
            group_by_expert(t.topk_ids, len(t.w13), out=routing)
            group_gemm_bf16(t.x, t.w13, *routing[:2], out=gate_up, gather_indices=routing[2], bias=t.w13_bias)
            if self.fuses and self.activation.interleaved:
                gate_up.copy_(gate_up.unflatten(1, (-1, 2)).mT.flatten(1))
        return out, gate_up, *routing


@torch.library.custom_op(f"{NAMESPACE}::fused_experts_for_backward", mutates_args=())
def _op(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    refuse_recording("a tensor requires grad; a prepared call needs torch.no_grad()")
    t = ExpertsTensors(x, w13, w2, topk_weights, topk_ids, shared=shared, w13_bias=w13_bias, w2_bias=w2_bias)
    options = activation, alpha, limit, False, batch_invariant
    plan, key, t = find_plan(_plans, (options, *map(type, options)), t, t._fields)
    t = ExpertsTensors(*t)
    if plan is None:
        plan = remember(_plans, key, make_plan(t, *options, kind=TrainingPlan))
    plan.check_alignment(*t)
    return plan.compute_and_keep(t._replace(topk_weights=t.topk_weights.contiguous()))


@_op.register_fake
def _fake(x, w13, w2, topk_weights, topk_ids, shared, w13_bias, w2_bias, activation, alpha, limit, batch_invariant):
    t = ExpertsTensors(x, w13, w2, topk_weights, topk_ids, shared=shared, w13_bias=w13_bias, w2_bias=w2_bias)
    shape, _ = check_experts(t, activation, alpha, limit)
    described = describe(shape, *topk_ids.shape)
    kept = (x.new_empty(size, dtype=dtype) for size, dtype in (*described.gate_up, *described.routing))
    return torch.empty_like(x), *kept


def _setup_context(ctx, inputs, output):
    """Keep the inputs, gate and up, and the order of the rows."""
    tensors, (_, *kept) = inputs[: len(_TENSORS)], output
    ctx.needed = {name for name, t in zip(_TENSORS, tensors, strict=True) if t is not None and t.requires_grad}
    ctx.activation = inputs[len(_TENSORS) : -1]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*(t for name, t in zip(_TENSORS, tensors, strict=True) if name != "shared"), *kept)


def _backward(ctx, grad, *_):
    found = backward(ctx, grad)
    return (*map(found.get, _TENSORS), *(None,) * len(_OPTIONS))


_op.register_autograd(_backward, setup_context=_setup_context)


def backward(ctx, grad):
    """Return the gradients that are needed, by name.

    With the gradient g of a token's output, u = w2.T @ g for each of its assignments is one grouped GEMM, of which
    :func:`silu_and_mul_backward` makes the gradients of gate, up and the routing weights, and w * a for that of w2.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError("create_graph is True, but fused_experts has no second derivative")
    x, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, gate_up, *routing = ctx.saved_tensors
    seqlens, cu_seqlens, gather_indices, inverse_indices = routing
    grad, wanted = grad.contiguous(), ctx.needed
    result = {"shared": grad}
    if not len(x):
        inputs = dict(x=x, w13=w13, w2=w2, topk_weights=topk_weights, w13_bias=w13_bias, w2_bias=w2_bias)
        return {name: grad if name == "shared" else torch.zeros_like(inputs[name]) for name in wanted}
    if wanted == {"shared"}:
        return result
    groups, weights = (seqlens, cu_seqlens), topk_weights.contiguous()
    outer_products = partial(_outer_products, groups=groups, dtype=torch.bfloat16)
    grad_rows = None
    if "w2" in wanted or is_permuted(shape_of(w13, w2, BF16), len(gate_up)):
        grad_rows = permute_tokens(grad, inverse_indices)
        u = group_gemm_bf16(grad_rows, transposed(w2), *groups)
    else:
        u = group_gemm_bf16(grad, transposed(w2), *groups, gather_indices=gather_indices)
    activation = check_activation(*ctx.activation)
    tensors = ExpertsTensors(x, w13, w2, topk_weights, topk_ids)
    has_halves = not activation.interleaved or can_fuse_activation(tensors, BF16, activation)
    # Tensors of all rows are freed as soon as possible: the peak of memory is that of the last gradients.
    of_rows = silu_and_mul_backward(gate_up, u, inverse_indices, weights, *activation, has_halves)
    of_gate_up, weighted, result["topk_weights"] = of_rows
    del of_rows, u, gate_up
    if "w2" in wanted:
        result["w2"] = weight_gradient(grad_rows, weighted, w2, outer_products)
    del grad_rows, weighted
    if w2_bias is not None and "topk_weights" in wanted:
        products = grad.float() @ w2_bias.float().T  # [tokens, experts]
        is_valid = inverse_indices >= 0
        ids = torch.where(is_valid, topk_ids, 0).long()
        result["topk_weights"] = result["topk_weights"] + products.gather(1, ids) * is_valid
    if "x" in wanted:
        rows = group_gemm_bf16(of_gate_up, transposed(w13), *groups)
        result["x"] = weighted_sum(rows, inverse_indices, torch.ones_like(weights))
        del rows
    if "w13" in wanted:
        result["w13"] = weight_gradient(of_gate_up, permute_tokens(x, inverse_indices), w13, outer_products)
    if "w13_bias" in wanted:
        ones = torch.ones(len(of_gate_up), 8, dtype=torch.bfloat16, device=x.device)
        result["w13_bias"] = _outer_products(of_gate_up, ones, groups, w13_bias.dtype)[:, :, 0].to(w13_bias.dtype)
    if "w2_bias" in wanted:
        result["w2_bias"] = (_routing_matrix(topk_ids, weights, len(w13)).T @ grad.float()).to(w2_bias.dtype)
    return {name: result[name] for name in wanted}


def differentiable_experts(**arguments):
    """Compute a call of ``fused_experts`` in which a tensor requires grad."""
    refuse_quantised("fused_experts", arguments)
    others = set(arguments) - {*_TENSORS, *_OPTIONS, "workspace"}
    if any(arguments[name] is not None and arguments[name] is not False for name in others):
        with torch.no_grad():
            return fused_experts(**arguments)  # raises: weights in bfloat16 have no scales
    return _op(*(arguments[name] for name in (*_TENSORS, *_OPTIONS)))[0]


def _outer_products(a, b, groups, dtype):
    """Return the sum of the outer products of each group's rows, on GPUs without wgmma by torch, and in bfloat16."""
    if has_wgmma(a.device):
        return k_grouped_gemm_bf16(a, b, *groups, out_dtype=dtype)
    return torch.nn.functional.grouped_mm(a.mT, b, offs=groups[1][1:])


def _routing_matrix(topk_ids, weights, num_experts):
    """Return the weight of each expert for each token, [tokens, experts] in float32, added in order of the columns."""
    experts = torch.arange(num_experts, device=topk_ids.device)
    matrix = torch.zeros(len(topk_ids), num_experts, device=topk_ids.device)
    for k in range(topk_ids.shape[1]):
        matrix += (topk_ids[:, k, None] == experts) * weights[:, k, None]
    return matrix


def differentiable_moe(**arguments):
    """Compute a call of ``fused_moe`` in which a tensor requires grad, by functions that have a backward."""
    if not torch.compiler.is_dynamo_compiling():  # there the fake implementations check, under two functions' names
        check_layer(arguments)
    refuse_quantised("fused_moe", arguments)
    of_gate = {name: arguments[name] for name in OPS["biased_grouped_topk"] if name in arguments and name != "out"}
    of_gate |= dict(gating_output=arguments["router_logits"], apply_routed_scaling_factor_on_output=True)
    with own_names():
        weights, ids = biased_grouped_topk(**of_gate)
    of_experts = {name: arguments[name] for name in OPS["fused_experts"] if name in arguments and name != "workspace"}
    return fused_experts(topk_weights=weights, topk_ids=ids, **of_experts)


register_differentiable(fused_experts, differentiable_experts)
register_differentiable(fused_moe, differentiable_moe)
