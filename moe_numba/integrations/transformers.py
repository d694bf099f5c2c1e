"""Experts and routers of transformers 5 on the package's kernels.

One line makes the implementation known, and one selects it::

    moe_numba.integrations.transformers.register()
    model.set_experts_implementation("moe_numba")  # or from_pretrained(..., experts_implementation="moe_numba")
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moe_numba.expert_parallel import Buffer
from moe_numba.extras import missing_extra
from moe_numba.gate import biased_grouped_topk
from moe_numba.moe_layer import ExpertParallelMoE, Experts, fused_experts, fused_experts_lora
from moe_numba.moe_layer.router import router_logits
from moe_numba.moe_layer.warm_up import distributed_layers, warm_up_parts
from moe_numba.moe_layer.weights import check_weights
from moe_numba.runtime.validate import check_flag, check_int, check_no_grad

try:
    from transformers.integrations import finegrained_fp8, moe

    from moe_numba.integrations.transformers_layout import NAME, arguments_of, check_attributes, check_silu, kind_of
    from moe_numba.integrations.transformers_mxfp4 import pack_mxfp4_weights
except ImportError as error:
    raise missing_extra(error, "moe_numba.integrations.transformers") or error from None

__all__ = [
    "NAME",
    "NAME_EP",
    "distribute_experts",
    "ep_experts_forward",
    "experts_forward",
    "fp8_experts_forward",
    "fuse_routers",
    "pack_mxfp4_weights",
    "register",
    "unfuse_routers",
]

NAME_EP = "moe_numba_ep"
_EXPERTS_OPTIONS = "activation", "alpha", "limit", "batch_invariant"  # of `Experts`
_SIGMOID_ROUTERS = {"DeepseekV3TopkRouter", "Glm4MoeTopkRouter"}
_SOFTMAX_ROUTERS = {
    "GptOssTopKRouter",
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
}
_LAYER = "_moe_numba_expert_parallel"  # of a distributed module of experts: (ExpertParallelMoE,)
_SAVED = "_moe_numba_forward"  # of a fused router: the forward that its instance had before, or None
_HOOKS = "_moe_numba_hooks"  # of a model whose fused routers skip padding: handles of its hooks
_EPSILON = 1e-20  # which routers with sigmoid add to the sum of the weights


def register(warm_up: bool = False, batch_invariant: bool = False) -> None:
    """Register the implementation "moe_numba" of experts with transformers, for bfloat16, FP8 and MXFP4 weights.

    A model selects it by ``set_experts_implementation("moe_numba")``. It computes in bfloat16, and has gradients if the
    weights are bfloat16. Ids outside of 0 to num_experts - 1, such as the sentinels of expert parallelism, add nothing.
    "moe_numba_ep", for several ranks, is registered, too: see :func:`distribute_experts`.

    Parameters
    ----------
    warm_up : bool
        Compile all kernels for all numbers of tokens before the first call of a module of experts, in parallel
        processes and with a progress bar, once for modules of the same sizes. No later call then waits for the
        compiler. A call under ``torch.compile`` does not do so. :func:`moe_numba.warm_up` does the same when it is
        called, also for the routers of :func:`fuse_routers`.
    batch_invariant : bool
        Compute experts so that a token's result has the same bits in every batch, see :func:`moe_numba.fused_experts`;
        "moe_numba_ep" has this option in :func:`distribute_experts`. Other layers of a model, and its routers, are not
        changed: torch's GEMMs are not batch-invariant by themselves.

    Raises
    ------
    TypeError
        If an argument is not True or False.

    Notes
    -----
    Supported: SwiGLU experts with ``gate_up_proj`` [experts, 2 * intermediate, hidden] and ``down_proj`` [experts,
    hidden, intermediate] in bfloat16, also transposed and with biases; or in float8_e4m3fn with float32 ``*_scale_inv``
    per 128 x 128 block and dynamic scales of activations. Activations are the plain ``silu(gate) * up``, and in
    bfloat16 those of gpt-oss, and of DeepSeek-V4, GLM-5-Next and HunYuan-V4, which limit gate and up. gpt-oss also in
    MXFP4: see :func:`pack_mxfp4_weights`. Sizes as for :func:`moe_numba.fused_experts`. The first call of a module with
    another layout raises a ValueError that names the attribute.

    Examples
    --------
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> from moe_numba.integrations import transformers as integration
    >>> integration.register()
    >>> config = Qwen3MoeConfig(
    ...     vocab_size=32, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
    ... )
    >>> model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    >>> model.set_experts_implementation("moe_numba")
    >>> with torch.no_grad():
    ...     model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 32])
    """
    wrap = _warm_up_first if check_flag("warm_up", warm_up) else lambda forward: forward
    forward, fp8_forward = experts_forward, fp8_experts_forward
    if check_flag("batch_invariant", batch_invariant):
        forward, fp8_forward = (partial(f, batch_invariant=True) for f in (forward, fp8_forward))
    moe.ExpertsInterface.register(NAME, wrap(forward))
    moe.ExpertsInterface.register(NAME_EP, wrap(ep_experts_forward))
    finegrained_fp8.FP8ExpertsInterface.register(NAME, wrap(fp8_forward))


_warm_modules: WeakSet[torch.nn.Module] = WeakSet()  # not an attribute of the module, which can be saved
_warm_sizes: set[tuple] = set()


def _warm_up_first(forward: Callable) -> Callable:
    """Return an implementation that compiles all kernels of a module before its first call."""

    @wraps(forward)
    def warm_forward(self, hidden_states, top_k_index, top_k_weights):
        is_traced = torch.compiler.is_compiling() or isinstance(hidden_states, FakeTensor)
        if not is_traced and self not in _warm_modules:
            _warm_up(partial(forward, self), self, (hidden_states, top_k_index, top_k_weights))
            _warm_modules.add(self)
        return forward(self, hidden_states, top_k_index, top_k_weights)

    return warm_forward


def _warm_up(forward, module, given):
    """Compile all kernels of calls like this one, unless those of a module of the same sizes are compiled."""
    layers = distributed_layers(module)
    tensors = *(t for t in module._parameters.values() if t is not None), *(t[:0] for t in given)
    described = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    sizes = type(module), described, tuple((id(layer.buffer), layer.extra_repr()) for layer in layers)

    def parts(tokens):
        yield forward, tuple(t.new_empty(tokens, *t.shape[1:]) for t in given)

    if sizes not in _warm_sizes:
        warm_up_parts(parts, None, layers)
        _warm_sizes.add(sizes)


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Compute a module of experts in bfloat16 or packed MXFP4; see :func:`register`.

    Parameters
    ----------
    self : torch.nn.Module
        With ``gate_up_proj`` and ``down_proj``.
    hidden_states : tensor [tokens, hidden], bfloat16
    top_k_index : tensor [tokens, topk], int32 or int64
    top_k_weights : tensor [tokens, topk], any floating-point dtype
    batch_invariant : bool
        As for :func:`moe_numba.fused_experts`.

    Returns
    -------
    tensor [tokens, hidden], bfloat16

    Raises
    ------
    ValueError
        If the module's layout or activation is not supported; the message names the attribute and what is allowed. Also
        if a tensor requires grad and the weights are packed MXFP4, as hidden_states of a model outside of
        ``torch.no_grad()``: then there is no backward.
    TypeError
        If hidden_states is not bfloat16, or the weights are neither that nor packed MXFP4.
    """
    if hasattr(self, _LAYER):
        raise ValueError(f"{type(self).__name__} is distributed; {NAME_EP} is the only implementation that is allowed")
    arguments = arguments_of(self) | dict(batch_invariant=batch_invariant)
    return _run(self, hidden_states, top_k_index, top_k_weights, arguments)


def fp8_experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Compute a module of FP8 experts with a scale per 128 x 128 block; see :func:`experts_forward`.

    Raises
    ------
    ValueError, TypeError
        As :func:`experts_forward`; TypeError if the weights are not float8_e4m3fn, or their scales not float32.
    """
    check_attributes(self)
    check_attributes(self, [("has_bias", False, False), ("is_transposed", False, False)])
    check_silu(self)
    if self.gate_up_proj.dtype != torch.float8_e4m3fn:  # first: a module in bfloat16 has none of what follows
        raise TypeError(f"gate_up_proj is {self.gate_up_proj.dtype}; {NAME} supports torch.float8_e4m3fn only")
    block_size, scheme = self.block_size, self.activation_scheme
    if block_size is None or tuple(block_size) != (128, 128):
        raise ValueError(f"block_size is {block_size}; {NAME} supports (128, 128) only")
    if scheme != "dynamic":
        raise ValueError(f"activation_scheme is {scheme!r}; {NAME} supports 'dynamic' only")
    if self.swiglu_alpha is not None:
        raise ValueError(f"swiglu_alpha is {self.swiglu_alpha}; {NAME} supports None only")
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        if getattr(self, name).dtype != torch.float32:
            raise TypeError(f"{name} is {getattr(self, name).dtype}; {NAME} supports torch.float32 only")
    weights = dict(w13=self.gate_up_proj, w2=self.down_proj)
    scales = dict(w13_scale=self.gate_up_proj_scale_inv, w2_scale=self.down_proj_scale_inv)
    arguments = weights | scales | dict(batch_invariant=batch_invariant)
    return _run(self, hidden_states, top_k_index, top_k_weights, arguments)


def distribute_experts(
    model: torch.nn.Module, buffer: Buffer, num_worst_tokens: int = 0, batch_invariant: bool = False
) -> int:
    """Keep only this rank's experts of a model, for the implementation "moe_numba_ep".

    Of the E experts of a module, rank r of n keeps experts r * E / n to (r + 1) * E / n - 1; the memory of the others
    is released. Each rank has its own tokens, as in data parallelism, and all ranks must call the model the same number
    of times. Call :func:`register` first, and ``model.set_experts_implementation("moe_numba_ep")`` after this function.

    Parameters
    ----------
    model : torch.nn.Module
        With all experts, in bfloat16 or packed MXFP4, the same on all ranks.
    buffer : moe_numba.Buffer
    num_worst_tokens : int
        As for :class:`moe_numba.moe_layer.ExpertParallelMoE`, which chooses low latency by it.
    batch_invariant : bool
        As for :func:`moe_numba.fused_experts`.

    Returns
    -------
    int
        Number of modules of experts that were changed.

    Raises
    ------
    ValueError
        If the model has no module of such experts, if one is distributed already, if its layout is not supported,
        or if the number of ranks does not divide the number of experts. No module has then been changed.
    TypeError
        If ``buffer`` is not a Buffer, ``num_worst_tokens`` not an int, or the weights have another dtype.
    """
    if not isinstance(buffer, Buffer):
        raise TypeError(f"buffer is {type(buffer).__name__}; it must be a moe_numba.Buffer")
    num_worst_tokens = check_int("num_worst_tokens", num_worst_tokens, 0)
    check_flag("batch_invariant", batch_invariant)
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "_apply_gate")]
    if not modules:
        raise ValueError(f"model is a {type(model).__name__} without modules of experts")
    for module in modules:
        if hasattr(module, _LAYER):
            raise ValueError("model is distributed already; distribute_experts is allowed once")
        arguments_of(module)
        if len(module.gate_up_proj) % buffer.group_size:
            count = len(module.gate_up_proj)
            raise ValueError(f"model has {count} experts; {buffer.group_size} ranks must divide their number")
    for module in modules:
        local = len(module.gate_up_proj) // buffer.group_size
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            if getattr(module, name, None) is not None:
                kept = getattr(module, name).detach()[buffer.rank * local :][:local].clone()
                setattr(module, name, torch.nn.Parameter(kept, requires_grad=False))
        # In a tuple, so that the layer is no submodule, and its parameters are not twice in the state_dict.
        experts = _experts_of(arguments_of(module) | dict(batch_invariant=batch_invariant))
        setattr(module, _LAYER, (ExpertParallelMoE(buffer, experts, num_worst_tokens),))
    return len(modules)


def ep_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute a module of experts that :func:`distribute_experts` has distributed; see :func:`experts_forward`."""
    if not hasattr(self, _LAYER):
        raise ValueError(f"{type(self).__name__} is not distributed; {NAME_EP} needs distribute_experts(model, buffer)")
    if hidden_states.dtype != torch.bfloat16:
        raise TypeError(f"hidden_states is {hidden_states.dtype}; {NAME_EP} needs a model in torch.bfloat16")
    _check_no_grad(self, NAME_EP, hidden_states=hidden_states, top_k_weights=top_k_weights)
    (layer,) = getattr(self, _LAYER)
    return layer(hidden_states.contiguous(), top_k_weights.float().contiguous(), top_k_index.contiguous())


def _experts_of(arguments):
    """Return the arguments of `fused_experts` as a module that shares their memory."""
    w13, w2 = arguments["w13"], arguments["w2"]
    shape, has_bias = check_weights(w13, w2), "w13_bias" in arguments
    options = {name: value for name, value in arguments.items() if name in _EXPERTS_OPTIONS}
    experts = Experts(*shape[:3], w13.dtype, "meta", has_bias=has_bias, **options)
    for name in ("w13", "w2", "w13_bias", "w2_bias"):
        if name in arguments:
            setattr(experts, name, torch.nn.Parameter(arguments[name].detach(), requires_grad=False))
    return experts


def _run(module, hidden_states, ids, weights, arguments):
    if hidden_states.dtype != torch.bfloat16:
        raise TypeError(f"hidden_states is {hidden_states.dtype}; {NAME} needs a model in torch.bfloat16")
    if arguments["w13"].dtype != torch.bfloat16:
        _check_no_grad(module, NAME, hidden_states=hidden_states, top_k_weights=weights)
    weights, function = weights.float().contiguous(), fused_experts
    if "w13_a" in arguments or "w2_a" in arguments:  # batch-invariant as it is
        function = fused_experts_lora
        arguments = {name: value for name, value in arguments.items() if name != "batch_invariant"}
    # Without a workspace: it would save one of two allocations, 0.6 us of the 21 us that the host takes for a call.
    return function(hidden_states.contiguous(), topk_weights=weights, topk_ids=ids, **arguments)


def _check_no_grad(module, function, **tensors):
    """Raise if these tensors or a parameter require grad: the function's own check has other names for them."""
    if torch.is_grad_enabled():
        for name, tensor in (tensors | module._parameters).items():
            if tensor is not None:
                check_no_grad(f"{name} of {type(module).__name__}", tensor, function)


class _Padding:
    """The rows of the current call of a model that are padding, or None; its hooks set it and its routers read it."""

    rows = None


def _note_padding(padding, model, args, kwargs):
    """Note which tokens of a call are padding, by the last columns of a mask [batch, tokens and cached tokens]."""
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    tokens = next((t for t in given if t is not None), None)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and tokens is not None:
        padding.rows = (mask[:, -tokens.shape[1] :] == 0).reshape(-1)


def _forget_padding(padding, *_):
    padding.rows = None


def fuse_routers(model: torch.nn.Module, skip_padding: bool = False) -> int:
    """Let the routers of a model choose experts by :func:`moe_numba.biased_grouped_topk`, in one launch.

    Supported: the routers of DeepSeek-V3, GLM-4-MoE, gpt-oss, Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE. Modules and
    parameters remain as they are; :func:`unfuse_routers` undoes the change. Outputs are logits, weights and int64 ids
    as before. On a GPU, logits in float32 are sums of the same products in another order, so that their last bits
    can differ, and of experts whose scores differ by no more than that, another can be chosen. Gradients reach the
    router's weight through the weights of the chosen experts.
    Copies of the model, also by ``pickle`` and ``torch.save``, have fused routers of their own.
    Outputs have a row per token. Those of gpt-oss' router do without this function only for hidden states
    [tokens, hidden], which the model passes.

    Parameters
    ----------
    model : torch.nn.Module
    skip_padding : bool
        Give tokens at which the model's ``attention_mask`` [batch, tokens] is 0 id -1 and weight 0, so that no expert
        is computed for them. Their hidden states then differ; those of other tokens do not. Select the experts'
        implementation "moe_numba", because others do not take the id -1. Masks of other shapes are ignored. It is the
        module ``model`` that must be called with the mask.

    Returns
    -------
    int
        Number of routers that were changed. Those that were fused before do not count.

    Raises
    ------
    ValueError
        If the model has no router of a supported class.
    TypeError
        If ``skip_padding`` is not True or False.

    Examples
    --------
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> from moe_numba.integrations import transformers as integration
    >>> integration.register()
    >>> config = Qwen3MoeConfig(
    ...     vocab_size=32, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
    ... )
    >>> model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    >>> model.set_experts_implementation("moe_numba")
    >>> integration.fuse_routers(model)
    1
    >>> integration.unfuse_routers(model)
    1
    """
    check_flag("skip_padding", skip_padding)
    routers = [module for module in model.modules() if kind_of(module) in _SIGMOID_ROUTERS | _SOFTMAX_ROUTERS]
    if not routers:
        names = ", ".join(sorted(_SIGMOID_ROUTERS | _SOFTMAX_ROUTERS))
        raise ValueError(f"model is a {type(model).__name__} without routers that can be fused: {names}")
    changed = [router for router in routers if _SAVED not in vars(router)]
    padding = _Padding()
    if skip_padding and changed:
        noted = model.register_forward_pre_hook(partial(_note_padding, padding), with_kwargs=True)
        setattr(
            model, _HOOKS, [noted, model.register_forward_hook(partial(_forget_padding, padding), always_call=True)]
        )
    for router in changed:
        forward = _sigmoid_forward if kind_of(router) in _SIGMOID_ROUTERS else _softmax_forward
        setattr(router, _SAVED, vars(router).get("forward"))
        # A bound method would be pickled as the name of an attribute, which the router does not have.
        router.forward = partial(forward, router, padding)  # type: ignore[method-assign]
    return len(changed)


def unfuse_routers(model: torch.nn.Module) -> int:
    """Undo :func:`fuse_routers`; return the number of routers that were changed.

    Parameters
    ----------
    model : torch.nn.Module
        A model without fused routers stays as it is, and raises no errors: the result is 0.

    Examples
    --------
    >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    >>> from moe_numba.integrations import transformers as integration
    >>> integration.register()
    >>> config = Qwen3MoeConfig(
    ...     vocab_size=32, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
    ... )
    >>> model = Qwen3MoeForCausalLM(config).bfloat16().eval()
    >>> model.set_experts_implementation("moe_numba")
    >>> integration.fuse_routers(model)
    1
    >>> integration.unfuse_routers(model)
    1
    """
    for module in model.modules():
        for hook in vars(module).pop(_HOOKS, ()):
            hook.remove()
    fused = [module for module in model.modules() if _SAVED in vars(module)]
    for router in fused:
        before = vars(router).pop(_SAVED)
        if before is None:
            del router.forward
        else:
            router.forward = before  # type: ignore[method-assign]
    return len(fused)


def _sigmoid_forward(self, padding, hidden_states):
    """Route as DeepSeek-V3: float32 logits, groups, a bias, a scaling factor."""
    hidden_states = hidden_states.view(-1, self.hidden_dim)
    logits = router_logits(hidden_states, self.weight)
    groups = self.norm_topk_prob, self.num_group, self.topk_group, 0, self.routed_scaling_factor, True
    options = dict(renormalize_epsilon=_EPSILON, is_padding=padding.rows)
    weights, ids = biased_grouped_topk(logits, self.e_score_correction_bias, self.top_k, *groups, **options)
    return logits, weights, ids.long()


def _softmax_forward(self, padding, hidden_states):
    """Route as Qwen3-MoE or gpt-oss, whose weights have the dtype of the logits, or as Mixtral, with float32 weights.

    gpt-oss and Mixtral divide by the sum of the chosen probabilities.
    """
    bias, is_mixtral = getattr(self, "bias", None), kind_of(self) == "MixtralTopKRouter"
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight, bias)
    renormalize = getattr(self, "norm_topk_prob", True)
    options = dict(scoring="softmax", is_padding=padding.rows)
    weights, ids = biased_grouped_topk(logits, None, self.top_k, renormalize, **options)
    return logits, weights if is_mixtral else weights.to(logits.dtype), ids.long()
