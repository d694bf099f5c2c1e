"""``fused_moe``: an MoE layer on one GPU, given its router's logits: the gate, then the experts."""

import contextlib
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from moe_numba.gate.api import GateOptions, biased_grouped_topk, fake_topk, get_plan, limit_argument
from moe_numba.gate.placement import TENSORS, ExpertPlacement, as_placement
from moe_numba.moe_layer.fused_experts import ExpertsPlan, fake_experts, make_plan
from moe_numba.moe_layer.launches import ExpertsTensors
from moe_numba.moe_layer.silu_and_mul.api import ALPHA
from moe_numba.moe_layer.weights import check_scaled_weights
from moe_numba.moe_layer.workspace import ExpertsWorkspace, describe
from moe_numba.runtime.outputs import find_plan, remember
from moe_numba.runtime.torch_op import OPS, register_fake, torch_op
from moe_numba.runtime.validate import check_int, check_tensor

_LOGITS = torch.float32, torch.bfloat16, torch.float16
_CHECKED = "x", "router_logits", "w13", "w2", "w13_scale"
_COUNTS = "topk", "num_fused_shared_experts", "placement"
_plans: dict = {}


@torch_op(in_place=("x", "shared"))
def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk: int,
    renormalize: bool = True,
    num_expert_group: int = 1,
    topk_group: int = 1,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = 1.0,
    num_token_non_padded: int | torch.Tensor | None = None,
    scoring: str = "sigmoid",
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: ExpertsWorkspace | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
    alpha: float = ALPHA,
    limit: float | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
    batch_invariant: bool = False,
    renormalize_epsilon: float = 0.0,
    is_padding: torch.Tensor | None = None,
    placement: ExpertPlacement | None = None,
) -> torch.Tensor:
    """Route each token, then compute its experts and the weighted sum of their outputs.

    The gate is :func:`moe_numba.biased_grouped_topk`, the rest :func:`moe_numba.fused_experts`. DeepSeek-V3 and
    GLM-4-MoE: ``scoring="sigmoid"`` with a bias, groups and a scaling factor. Qwen3-MoE, Mixtral and OLMoE:
    ``scoring="softmax"`` without them; ``renormalize`` is their ``norm_topk_prob`` (Mixtral: True). gpt-oss, whose
    softmax is over the chosen experts only: ``scoring="softmax"`` with ``renormalize``.

    Parameters
    ----------
    x : tensor [tokens, hidden], bfloat16
        Contiguous, 16-byte aligned.
    router_logits : tensor [tokens, routed experts], float32, bfloat16 or float16
        Rows may be strided, columns may not.
    correction_bias : tensor [routed experts], float32, bfloat16 or float16, or None
        Added to the scores to choose experts, but not to the weights.
    w13, w2 : tensor, bfloat16, float8_e4m3fn or uint8
        Weights as for :func:`moe_numba.fused_experts`. The number of experts is that of routed experts, with
        ``placement`` of physical ones, plus ``num_fused_shared_experts``, whose weights come last.
    topk : int
        Experts per token, 1 to 32, including fused shared experts.
    renormalize : bool
        Divide the routed experts' weights by their sum.
    num_expert_group, topk_group : int
        Number of groups of experts, and number of groups kept per token. 1 and 1: no groups.
    num_fused_shared_experts : int
        Shared experts that every token uses. With ``renormalize`` their weight is 1.
    routed_scaling_factor : float or None
        Multiplies the routed experts' weights. Finite and not zero in float32, as is its reciprocal. None is 1.
    num_token_non_padded : int or tensor of one int32 or int64, optional
        Rows from this one on are padding: no expert is computed for them. The kernel reads a tensor, so the host does
        not wait.
    scoring : {"sigmoid", "softmax", "sqrtsoftplus"}
        As for :func:`moe_numba.biased_grouped_topk`.
    w13_scale, w2_scale : tensor, float32, optional
        Scales of FP8 weights, as for :func:`moe_numba.fused_experts`.
    shared : tensor [tokens, hidden], bfloat16, optional
        Added to the sum: the output of shared experts that are not fused. Contiguous, 16-byte aligned.
    out : tensor [tokens, hidden], bfloat16, optional
        Contiguous, 16-byte aligned, to write into; it may be ``x`` or ``shared``, but must not overlap an input
        otherwise.
    workspace : ExpertsWorkspace, optional
        Memory for intermediate results. With it and ``out`` the call neither allocates nor synchronises. Without it
        the call allocates one buffer for all intermediate results, beside its output, and frees it. It is not an
        argument of the op: under torch.compile it is not used.
    w13_bias, w2_bias, activation, alpha, limit, a1_scale, a2_scale, use_fast_accum, batch_invariant : optional
        As for :func:`moe_numba.fused_experts`.
    renormalize_epsilon, is_padding, placement : optional
        As for :func:`moe_numba.biased_grouped_topk`. Each seed of a placement has a launch plan of its own. Under
        torch.compile ``placement.load`` must be None.

    Returns
    -------
    tensor [tokens, hidden], bfloat16
        From the library that ``x`` is from.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed. ValueError also if a
        tensor requires grad and the weights are not bfloat16, or ``out`` or ``placement`` is given: then there is no
        backward.
    UnsupportedDeviceError
        If the GPU is older than compute capability 8.0, or has no wgmma (compute capability 9.0) and the weights need
        it: MXFP4 and transposed weights.

    Notes
    -----
    Gradients are those of :func:`moe_numba.biased_grouped_topk` and :func:`moe_numba.fused_experts`.

    Named after vLLM's ``fused_moe``. Results are bit-identical from run to run. No step waits for the host, so a CUDA
    graph that captures the call can be replayed with other logits. The gate is a launch of its own; the launches after
    it are those of :func:`moe_numba.fused_experts`.

    Examples
    --------
    >>> x, logits = torch.ones(2, 64).bfloat16(), torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0]])
    >>> w13 = torch.full((4, 2 * 64, 64), 1 / 64, dtype=torch.bfloat16)
    >>> w2 = torch.full((4, 64, 64), 1 / 64, dtype=torch.bfloat16)
    >>> moe_numba.fused_moe(x, logits, None, w13, w2, topk=2)[:, 0].tolist()
    [0.73046875, 0.73046875]
    """
    return _compute(locals())


class _Tensors(NamedTuple):
    """The tensors of a call, with their names in messages."""

    x: Any
    w13: Any
    w2: Any
    w13_scale: Any
    w2_scale: Any
    shared: Any
    w13_bias: Any
    w2_bias: Any
    a1_scale: Any
    a2_scale: Any
    router_logits: Any
    correction_bias: Any
    is_padding: Any
    num_token_non_padded: Any  # None if it is a number
    placement_physical_ids: Any = None
    placement_num_replicas: Any = None
    placement_load: Any = None

    def of_experts(self, topk_weights, topk_ids):
        """Return the tensors of ``fused_experts``."""
        x, w13, w2, w13_scale, w2_scale, shared, w13_bias, w2_bias, a1_scale, a2_scale, *_ = self
        rest = w13_scale, w2_scale, shared, w13_bias, w2_bias, a1_scale, a2_scale
        return ExpertsTensors(x, w13, w2, topk_weights, topk_ids, *rest)


# Options of the layer that it passes on to the gate.
_NO_OPTIONS = *_Tensors._fields, "placement", "out"
_GATE_OPTIONS = [n for n in OPS["biased_grouped_topk"] if n in OPS["fused_moe"] and n not in _NO_OPTIONS]
_EXPERTS_OPTIONS = "activation", "alpha", "limit", "use_fast_accum", "batch_invariant"
_select_tensors = itemgetter(*(n for n in _Tensors._fields if n not in _Tensors._field_defaults))
_select_options = itemgetter(*_GATE_OPTIONS, *_EXPERTS_OPTIONS)


def _compute(arguments):
    """Check the arguments of ``fused_moe``, by name, and launch its kernels."""
    tensors, options = _select_tensors(arguments), _select_options(arguments)
    limit, launch = tensors[-1], None
    is_number = limit is not None and not hasattr(limit, "__dlpack__")
    if is_number:
        tensors = *tensors[:-1], None
    key = *options, *map(type, options)  # 1, 1.0 and True are equal
    if (placement := arguments["placement"]) is not None:
        physical_ids, num_replicas, *placed, load = as_placement(placement)
        tensors, key = (*tensors, physical_ids, num_replicas, load), (*key, *placed, *map(type, placed))
    plan, key, t = find_plan(_plans, key, tensors, _Tensors._fields[: len(tensors)])
    if plan is None:
        plan = remember(_plans, key, _make_plan(_Tensors(*t), arguments))
    if is_number:  # an argument of the gate's kernel, which may differ from call to call
        with own_names():
            limit_argument(limit, t[0].device)
        launch = partial(plan.launch_with_number, limit)
    return plan.compute(t, arguments["out"], arguments["workspace"], launch)


class _Plan(ExpertsPlan):
    """An `ExpertsPlan` of calls whose launches begin with the gate's; ``gate_options`` are its arguments by name."""

    names = _Tensors._fields

    def __init__(self, gate_options, placement, *of_experts):
        super().__init__(*of_experts)
        self.gate_options, self.placement = gate_options, placement and placement._asdict()

    def launch_with_number(self, num_token_non_padded, *arguments):
        """Launch the kernels of a call with this number of tokens."""
        self.check_alignment(*arguments)
        *tensors, buffer, out = arguments
        self.launch_in(*_Tensors(*tensors)._replace(num_token_non_padded=num_token_non_padded), buffer, out)

    def launch_in(self, *arguments):
        *tensors, buffer, out = arguments
        t, memory = _Tensors(*tensors), self.intermediates(buffer)
        options = {n: getattr(t, n) for n in ("correction_bias", "num_token_non_padded", "is_padding")}
        if self.placement is not None:
            of_call = dict(zip(TENSORS, t[-3:], strict=True))
            options["placement"] = ExpertPlacement(**self.placement | of_call)
        with own_names():
            routed = biased_grouped_topk(t.router_logits, out=memory.topk, **options, **self.gate_options)
        self.launch(t.of_experts(*routed), memory, out)


def _make_plan(t, arguments):
    """Check the arguments of a call, and return its plan."""
    options, of_experts = [{n: arguments[n] for n in names} for names in (_GATE_OPTIONS, _EXPERTS_OPTIONS)]
    options["apply_routed_scaling_factor_on_output"] = True
    placement = arguments["placement"] and as_placement(arguments["placement"])
    shape = check_layer(arguments | {name: getattr(t, name) for name in _CHECKED} | dict(placement=placement))
    with own_names():
        _, limit_dtype = limit_argument(t.num_token_non_padded, t.x.device)
        of_gate = tuple(options[name] for name in GateOptions._fields)
        get_plan(t.router_logits, t.correction_bias, limit_dtype, of_gate, t.is_padding, placement)
    routing = describe(shape, len(t.x), options["topk"]).topk
    routed = (torch.empty(size, dtype=dtype, device=t.x.device) for size, dtype in routing)
    return make_plan(t.of_experts(*routed), *of_experts.values(), shape, partial(_Plan, options, placement))


@contextlib.contextmanager
def own_names():
    """Let the gate's errors call the logits by this function's name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("gating_output", "router_logits")) from None


def check_layer(arguments):
    """Check what neither the gate nor the experts can, or under another name; return the sizes of the experts.

    ``arguments``: those of a call, by name.
    """
    x, router_logits, w13, w2, w13_scale = (arguments[name] for name in _CHECKED)
    topk, num_fused_shared_experts, placement = (arguments[name] for name in _COUNTS)
    check_tensor("x", x, shape=("tokens", "hidden"))
    shape = check_scaled_weights(w13, w2, w13_scale)
    check_int("topk", topk, 1, 32)
    num_shared = check_int("num_fused_shared_experts", num_fused_shared_experts, 0, topk - 1)
    if len(w13) - num_shared < 1:
        raise ValueError(f"w13 has {len(w13)} experts; {num_shared} of them are shared, and 1 or more must be routed")
    of_experts = f"w13 has {len(w13)} experts" + (f", {num_shared} of them shared" if num_shared else "")
    num_experts = len(w13) - num_shared
    if placement is not None:
        if placement.num_physical_experts != num_experts:
            raise ValueError(
                f"placement.num_physical_experts is {placement.num_physical_experts}; it must be {num_experts}, as "
                f"{of_experts}"
            )
        num_experts = "num_experts"
    wanted = dict(shape=(x.shape[0], num_experts), because=("x has {} rows", of_experts), device=(x.device, "x"))
    check_tensor("router_logits", router_logits, dtype=_LOGITS, **wanted)
    if router_logits.shape[1] > 1 and router_logits.stride(1) != 1:
        raise ValueError(f"router_logits has strides {router_logits.stride()}; its columns must be contiguous")
    return shape


@register_fake(fused_moe)
def _fake_fused_moe(call):
    """Check the arguments of a call and return its output; the gate's and the experts' fakes do most of it."""
    shape = check_layer(vars(call))
    scaled = dict(apply_routed_scaling_factor_on_output=True, out=None)
    with own_names():
        weights, ids = fake_topk(call.replace(gating_output=call.router_logits, **scaled))
    return fake_experts(call.replace(topk_weights=weights, topk_ids=ids, x_scale=None), shape)
