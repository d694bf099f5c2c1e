"""``fused_experts`` and ``fused_moe`` with gradients."""

from functools import partial

import torch

from moe_numba.gate import biased_grouped_topk
from moe_numba.grouped_gemm.w4.unpacking import unpack_mxfp4
from moe_numba.moe_layer.backward.plan import BackwardPlan, BackwardTensors, TrainingPlan
from moe_numba.moe_layer.fused_experts import check_experts, fused_experts, make_plan
from moe_numba.moe_layer.fused_moe import check_layer, fused_moe, own_names
from moe_numba.moe_layer.launches import Adapters, ExpertsTensors
from moe_numba.moe_layer.weights import check_weights, check_wgmma
from moe_numba.moe_layer.workspace import describe
from moe_numba.runtime.outputs import find_plan, remember
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.torch_op import NAMESPACE, OPS, name_requiring_grad, needs_dispatch, register_differentiable
from moe_numba.runtime.validate import check_aligned, check_tensor, is_fake

_OF_CALL = "x", "w13", "w2", "topk_weights", "topk_ids", "shared", "w13_bias", "w2_bias"
_TENSORS = *_OF_CALL, "w13_a", "w13_b", "w2_a", "w2_b"
_OPTIONS = "activation", "alpha", "limit", "batch_invariant"
_plans: dict = {}
_backward_plans: dict = {}


def refuse_quantised(function, arguments):
    """Raise if weights are not in bfloat16, naming a tensor that requires grad."""
    if (dtype := arguments["w13"].dtype) != torch.bfloat16:
        name = name_requiring_grad(arguments)
        raise ValueError(
            f"{name} requires grad; {function} has a backward only with bfloat16 weights, and "
            f"w13 is {dtype}: use torch.no_grad() or detach()"
        )


class _Experts(torch.autograd.Function):
    """``fused_experts`` with gradients, and with LoRA adapters. torch.compile sees an op for each direction.

    ``forward`` also sets the context: with a ``setup_context`` torch inspects its signature in each call, for 33 us.
    """

    @staticmethod
    def forward(ctx, *arguments):
        """Compute; keep the inputs, gate and up, and the order of the rows."""
        tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
        compute = torch.ops.moe_numba.fused_experts_kept if needs_dispatch(*tensors) else _compute_and_keep
        output, *kept = compute(*arguments)
        (x, w13, w2, weights, ids, _, *others), options = arguments[: len(_TENSORS)], arguments[len(_TENSORS) :]
        ctx.options = options[:-1]
        # Of the parameters themselves: saved tensors have no attributes if activations are checkpointed.
        ctx.main_grads = {} if torch.compiler.is_dynamo_compiling() else _main_grads(w13=w13, w2=w2)
        ctx.set_materialize_grads(False)  # else each backward fills a tensor as large as gate and up with zeros
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(x, w13, w2, weights, ids, *others, *kept)
        return output, *kept

    @staticmethod
    def backward(ctx, grad, *_):
        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph is True, but fused_experts has no second derivative")
        wanted = [name for name, needed in zip(_TENSORS, ctx.needs_input_grad) if needed]  # noqa: B905  and options
        if grad is None or wanted == ["shared"]:
            found = dict(shared=grad)
        else:
            tensors = grad.contiguous(), *ctx.saved_tensors
            dispatched = needs_dispatch(*(t for t in tensors if t is not None))
            main_grads = {} if dispatched else {name: t for name, t in ctx.main_grads.items() if name in wanted}
            names = [name for name in wanted if name != "shared" and name not in main_grads]
            arguments = *tensors, " ".join(names), *ctx.options
            if dispatched:
                gradients = torch.ops.moe_numba.fused_experts_backward(*arguments)
            else:
                gradients = _gradients(*arguments, main_grads)
            found = dict(zip(names, gradients, strict=True)) | dict(shared=grad)
        return *(found.get(name) if name in wanted else None for name in _TENSORS), *(None,) * len(_OPTIONS)


def _compute_and_keep(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    w13_a: torch.Tensor | None,
    w13_b: torch.Tensor | None,
    w2_a: torch.Tensor | None,
    w2_b: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, and what a backward needs: see `TrainingPlan.compute_and_keep`."""
    refuse_recording("a tensor requires grad; a prepared call needs torch.no_grad()")
    w13, w2 = _decoded(w13, w2, activation)
    t = ExpertsTensors(x, w13, w2, topk_weights, topk_ids, shared=shared, w13_bias=w13_bias, w2_bias=w2_bias)
    options, adapters = (activation, alpha, limit, False, batch_invariant), Adapters(w13_a, w13_b, w2_a, w2_b)
    names = *t._fields, *adapters._fields
    plan, key, tensors = find_plan(_plans, (options, *map(type, options)), (*t, *adapters), names)
    t = ExpertsTensors(*tensors[: len(t)])
    if plan is None:
        plan = remember(_plans, key, make_plan(t, *options, kind=partial(TrainingPlan, adapters=adapters)))
    plan.check_alignment(*t)
    return plan.compute_and_keep(t._replace(topk_weights=t.topk_weights.contiguous()), adapters)


def _compute_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    w13_a: torch.Tensor | None,
    w13_b: torch.Tensor | None,
    w2_a: torch.Tensor | None,
    w2_b: torch.Tensor | None,
    gate_up: torch.Tensor,
    seqlens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gather_indices: torch.Tensor,
    inverse_indices: torch.Tensor,
    w13_z: torch.Tensor,
    wanted: str,
    activation: str,
    alpha: float,
    limit: float | None,
) -> list[torch.Tensor]:
    """Return the gradients of the inputs that ``wanted`` names, separated by spaces."""
    routing = seqlens, cu_seqlens, gather_indices, inverse_indices
    inputs = x, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, w13_a, w13_b, w2_a, w2_b
    return _gradients(grad, *inputs, gate_up, *routing, w13_z, wanted, activation, alpha, limit, {})


def _gradients(*arguments):
    """Return the gradients that `_compute_backward` returns; add others, by name, to main gradients."""
    *tensors, wanted, activation, alpha, limit, main_grads = arguments
    t, names = BackwardTensors(*tensors), wanted.split()
    if not len(t.x):
        return [torch.zeros_like(getattr(t, name)) for name in names]
    t, options = t._replace(topk_weights=t.topk_weights.contiguous()), (activation, alpha, limit)
    w13, w2 = _decoded(t.w13, t.w2, activation)
    t = t._replace(w13=w13, w2=w2)
    plan, key, _ = find_plan(_backward_plans, (wanted, *main_grads, options), t, t._fields)
    if plan is None:
        plan = remember(_backward_plans, key, BackwardPlan(t, {*names, *main_grads}, options))
    found = plan.compute(t, main_grads)
    return [found[name] for name in names]


def _decoded(w13, w2, activation):
    """Return MXFP4 weights as new bfloat16 tensors, with rows in the activation's order; return others as they are.

    The forward pass and the backward each decode them, and free the tensors at their end: a layer's weights are in
    bfloat16 only while it is computed. They are not in the memory of a plan, so that its launches can be repeated.
    """
    if w13.dtype != torch.uint8:
        return w13, w2
    check_weights(w13, w2)
    check_wgmma(w13, w2)
    if not is_fake(w13.device):
        check_aligned("w13", w13)
        check_aligned("w2", w2)
    return unpack_mxfp4(w13, "interleaved" if activation == "swigluoai" else "stacked"), unpack_mxfp4(w2)


def _main_grads(**weights):
    """Return the main gradients of weights that have one, as Megatron-LM's do, by name."""
    found = {name: w.main_grad for name, w in weights.items() if getattr(w, "main_grad", None) is not None}
    for name, tensor in found.items():
        wanted = dict(dtype=torch.float32, shape=tuple(weights[name].shape), contiguous=True, aligned=True)
        place = dict(device=(weights[name].device, name))
        check_tensor(f"{name}.main_grad", tensor, because=(f"{name} has {{}} experts",), **wanted, **place)
    return found


_keep = torch.library.custom_op(f"{NAMESPACE}::fused_experts_kept", _compute_and_keep, mutates_args=())
_compute = torch.library.custom_op(f"{NAMESPACE}::fused_experts_backward", _compute_backward, mutates_args=())


@_keep.register_fake
def _fake_kept(x, w13, w2, topk_weights, topk_ids, shared, w13_bias, w2_bias, *others):
    w13_a, _, _, _, activation, alpha, limit, _ = others
    w13, w2 = _decoded(w13, w2, activation)
    t = ExpertsTensors(x, w13, w2, topk_weights, topk_ids, shared=shared, w13_bias=w13_bias, w2_bias=w2_bias)
    shape, _ = check_experts(t, activation, alpha, limit)
    described = describe(shape, *topk_ids.shape)
    kept = (x.new_empty(size, dtype=dtype) for size, dtype in (*described.gate_up, *described.routing))
    z = x.new_empty(0, 1) if w13_a is None else x.new_empty(topk_ids.numel(), w13_a.shape[1])
    return torch.empty_like(x), *kept, z


@_compute.register_fake
def _fake_backward(grad, *arguments):
    (*tensors, wanted, _, _, _), names = arguments, BackwardTensors._fields[1:]
    given = dict(zip(names, tensors, strict=True))
    return [torch.empty_like(given[name]) for name in wanted.split()]


def differentiable_experts(**arguments):
    """Compute a call of ``fused_experts`` in which a tensor requires grad."""
    refuse_quantised("fused_experts", arguments)
    others = set(arguments) - {*_OF_CALL, *_OPTIONS, "workspace"}
    if any(arguments[name] is not None and arguments[name] is not False for name in others):
        with torch.no_grad():
            return fused_experts(**arguments)  # raises: weights in bfloat16 have no scales
    return _Experts.apply(*map(arguments.get, (*_TENSORS, *_OPTIONS)))[0]


def adapted_experts(**arguments):
    """Compute a call of ``fused_experts`` whose weights have LoRA adapters, with or without gradients."""
    return _Experts.apply(*map(arguments.get, (*_TENSORS, *_OPTIONS)))[0]


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
