"""Public function of the gate: checks its arguments, chooses a kernel and launches it."""

import math
from functools import cached_property
from numbers import Integral, Real
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.gate import four_tokens_per_warp, generic, merged_keys, one_token_per_warp, packed_keys
from moe_numba.gate.device_functions import Features, optional_types
from moe_numba.gate.one_token_per_warp import check_groups
from moe_numba.gate.placement import (
    TABLE_TYPES,
    ExpertPlacement,
    as_placement,
    check_apart,
    check_placement,
    placement_key,
    placement_values,
)
from moe_numba.gate.reference import SCORINGS
from moe_numba.runtime import device as devices
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember, tensor_key
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import (
    check_choice,
    check_device,
    check_factor,
    check_flag,
    check_int,
    check_tensor,
    make_outputs,
)

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_LIMIT_TYPES = {torch.int32: "int32*", torch.int64: "int64*"}
_MAX_EXPERTS, _MAX_TOPK, _MAX_TOKENS = 1024, 32, 1 << 30
_WARPS_PER_SM = 64  # as many as can be resident; with more tokens each warp of a loop routes several
_SIMULATED_WARPS = 4  # so few that small inputs reach the second iteration of a loop over tokens
# Percentage of the L1 cache that is shared memory, for kernels that use none: then the alignment, which uses some, can
# start on SMs that still run the gate (1,024 tokens of DeepSeek-V3: both take 5.7 instead of 8.1 us).
_CARVEOUT = 50
MANY_TOKENS = 4096  # from here on kernels whose warps route several tokens may be faster

_OPTION_TYPES = int, bool, int, int, int, float, bool, str, float
_MAX_EPSILON = torch.finfo(torch.float32).max

_plans: dict = {}


class GateOptions(NamedTuple):
    """Options of :func:`biased_grouped_topk` that a launch plan depends on."""

    topk: int
    renormalize: bool
    num_expert_group: int
    topk_group: int
    num_fused_shared_experts: int
    routed_scaling_factor: float
    apply_routed_scaling_factor_on_output: bool
    scoring: str
    renormalize_epsilon: float = 0.0


@torch_op()
def biased_grouped_topk(
    gating_output: torch.Tensor,
    correction_bias: torch.Tensor | None,
    topk: int,
    renormalize: bool = True,
    num_expert_group: int = 1,
    topk_group: int = 1,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    num_token_non_padded: int | torch.Tensor | None = None,
    scoring: str = "sigmoid",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    renormalize_epsilon: float = 0.0,
    is_padding: torch.Tensor | None = None,
    placement: ExpertPlacement | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route each token to ``topk`` experts with DeepSeek-V3's biased grouped top-k, in one launch.

    Experts are scored, and a group's score is the sum of its two best biased scores (in a group of one expert, its only
    one). The ``topk_group`` best groups are kept. Of their experts, those with the best biased scores are chosen, in
    descending order. Their weights are the scores without the bias. Without bias and groups the experts with the best
    logits are chosen: scores rise with the logits, but far from 0 different logits have equal scores.

    Parameters
    ----------
    gating_output : tensor [tokens, num_experts], float32, bfloat16 or float16
        Logits. Rows may be strided, columns may not. 1 to 1024 experts.
    correction_bias : tensor [num_experts], float32, bfloat16 or float16, or None
        Added to the scores to choose experts, but not to the weights. It gets no gradient, so it may require grad.
    topk : int
        Columns of the result, 1 to 32, including fused shared experts. Without these at most
        ``topk_group * num_experts / num_expert_group``, the experts of the groups that are kept.
    renormalize : bool
        Divide the weights by the sum of the routed weights, unless the sum is zero.
    num_expert_group, topk_group : int
        Number of groups, which must divide the number of experts, and number of groups kept per token. 1 and 1: no
        groups.
    num_fused_shared_experts : int
        Shared experts appended as the last columns, 0 to topk - 1. Their ids are num_experts, num_experts + 1, ... With
        ``placement`` they begin at its num_physical_experts. The weight of each is the sum of the routed weights
        divided by routed_scaling_factor, so with ``renormalize`` it is 1 / routed_scaling_factor.
        ``apply_routed_scaling_factor_on_output`` then multiplies it like the others.
    routed_scaling_factor : float or None
        Finite and not zero in float32, as is its reciprocal. None is 1.
    apply_routed_scaling_factor_on_output : bool
        Multiply all weights by routed_scaling_factor.
    num_token_non_padded : int or tensor of one int32 or int64, optional
        Rows from this one on are padding: id -1, weight 0. The kernel reads a tensor, so the host does not wait.
    scoring : {"sigmoid", "softmax", "sqrtsoftplus"}
        Score of a logit: its sigmoid; its softmax over all experts; or ``sqrt(log(1 + exp(logit)))``.
    out : (topk_weights, topk_ids), optional
        Contiguous tensors to write into, which must overlap neither an input nor each other. The call then neither
        allocates nor synchronises.
    renormalize_epsilon : float
        Added to the sum by which ``renormalize`` divides. DeepSeek-V3 in transformers, and FlashInfer, add 1e-20, which
        changes only weights whose sum is below about 1e-13. 0 or more, and finite in float32.
    is_padding : tensor [tokens], bool, optional
        Rows that are padding wherever they are, beside those of ``num_token_non_padded``: id -1, weight 0. Contiguous.
    placement : ExpertPlacement, optional
        Return ids of physical experts, replicas of those that are chosen, and count the tokens of each: see
        :class:`moe_numba.ExpertPlacement`.

    Returns
    -------
    topk_weights : tensor [tokens, topk], float32
    topk_ids : tensor [tokens, topk], int32
        Both in the library of ``gating_output``: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed. ValueError also if the
        logits require grad and ``out`` or ``placement`` is given: then there is no backward.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    The weights have a gradient with respect to the logits; the choice of experts has none.

    Named after SGLang's ``biased_grouped_topk``. All arithmetic is float32. Ties go to the lower group, then to the
    lower expert. NaN scores rank last and have weight 0; a softmax leaves NaN logits out, so that the other experts
    keep their weights, and counts +inf as the largest float32. Ids are distinct and in range for any input. Weights and
    ids are bit-identical from run to run. The kernel runs on the caller's current stream. A CUDA graph can capture the
    call once an earlier call has compiled the kernel.

    Examples
    --------
    Two groups of four experts, of which each token uses one group:

    >>> logits = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]])
    >>> weights, ids = moe_numba.biased_grouped_topk(logits, None, topk=2, num_expert_group=2, topk_group=1)
    >>> ids.tolist()
    [[7, 6], [0, 1]]
    >>> weights.sum(dim=1).tolist()
    [1.0, 1.0]
    """
    options = (
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        scoring,
        renormalize_epsilon,
    )
    if is_padding is not None:
        is_padding = as_tensor(is_padding, "is_padding")
    if placement is not None:
        placement = as_placement(placement)
    limit, limit_dtype = limit_argument(num_token_non_padded, gating_output.device)
    plan, bias = get_plan(gating_output, correction_bias, limit_dtype, options, is_padding, placement)
    weights, ids = plan.outputs(gating_output.shape[0])(out)
    plan.launch(gating_output, bias, weights, ids, limit, is_padding, placement)
    return (weights, ids) if out is None else out


def check_options(options):
    """Return the options of a call, or :class:`GateOptions`, as :class:`GateOptions` of Python's types."""
    check_choice("scoring", options.scoring, SCORINGS)
    return GateOptions(
        check_int("topk", options.topk, 1, _MAX_TOPK),
        check_flag("renormalize", options.renormalize),
        check_int("num_expert_group", options.num_expert_group),
        check_int("topk_group", options.topk_group),
        check_int("num_fused_shared_experts", options.num_fused_shared_experts),
        check_factor("routed_scaling_factor", options.routed_scaling_factor),
        check_flag("apply_routed_scaling_factor_on_output", options.apply_routed_scaling_factor_on_output),
        options.scoring,
        _check_epsilon(options.renormalize_epsilon),
    )


def get_plan(x, bias, limit_dtype, options, is_padding=None, placement=None):
    """Return the cached :class:`GatePlan` for these tensors and the fields of :class:`GateOptions`, and the bias.

    ``limit_dtype`` is what :func:`limit_argument` returns.
    """
    bias = None if bias is None else as_tensor(bias, "correction_bias")
    # Python's types need no check before the look-up; others do, because 8.0 would find the plan for 8.
    if tuple(map(type, options)) != _OPTION_TYPES:
        options = check_options(GateOptions(*options))
    key = (
        x.shape[1:],
        x.stride(),
        x.dtype,
        x.device,
        x.data_ptr() & 15,
        bias is None or (bias.shape, bias.stride(), bias.dtype, bias.device, bias.data_ptr() & 15),
        options,
        limit_dtype,
        is_padding is not None and (x.shape[:1] == is_padding.shape, *tensor_key(is_padding)[1:]),
        placement is not None and placement_key(placement),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = GatePlan(x, bias, check_options(GateOptions(*options)), limit_dtype, is_padding, placement)
    return plan, bias


class GatePlan:
    """Launch plan for given shapes, dtypes and options: arguments are checked once, kernels compiled on first use."""

    def __init__(self, x, bias, options, limit_dtype, is_padding, placement):
        _check_tensors(x, bias, is_padding, placement)
        num_experts = x.shape[1]
        check_groups(num_experts, options)
        topk, num_groups, shared = options.topk, options.num_expert_group, options.num_fused_shared_experts
        scale, renormalize = options.routed_scaling_factor, options.renormalize
        dtype, bias_dtype = _DTYPES[x.dtype], None if bias is None else _DTYPES[bias.dtype]
        self.row_stride, self._device, self.device = x.stride(0), x.device, x.device.index or 0
        output_scale = scale if options.apply_routed_scaling_factor_on_output else 1.0
        self.trailing_arguments = (1.0 / scale, output_scale)
        self.signature = (
            *(_pointer(dtype), _pointer(bias_dtype or dtype), "float32*", "int32*", "int32", "int64"),
            *(_LIMIT_TYPES[limit_dtype] if limit_dtype else "int32", "float32", "float32"),
        )
        self.shape = (num_experts, num_groups, options.topk_group, topk, shared)
        self.config = None  # only the generic kernel, which takes shapes as arguments, supports this shape
        if one_token_per_warp.supports(num_experts, num_groups, devices.gpu_of(x.device).capability):
            _, experts_per_lane = one_token_per_warp.lane_layout(num_experts, num_groups)
            group_size = num_experts // num_groups
            load_bytes = _load_bytes(x, experts_per_lane, group_size)
            bias_load_bytes = 4 if bias is None else _load_bytes(bias, experts_per_lane, group_size)
            self.config = one_token_per_warp.GateConfig(
                *self.shape, renormalize, options.scoring, dtype, bias_dtype, load_bytes, bias_load_bytes
            )
        else:
            self.trailing_arguments += (*self.shape[:4], topk - shared, int(renormalize))
        self.packed_configs = _packed_configs(x, bias, options)
        self.kernel_types = options.scoring, dtype, bias_dtype
        adds_epsilon = renormalize and options.renormalize_epsilon > 0
        how, load = (None, None) if placement is None else (placement.how, placement.load)
        self.limit_on_device = bool(limit_dtype)
        self.features = Features(is_padding is not None, how, load is not None, adds_epsilon)
        table = "int32*" if placement is None else TABLE_TYPES[placement.physical_ids.dtype]
        self.optional_types, self.epsilon = optional_types(self.features, table), options.renormalize_epsilon
        self.num_experts = num_experts if placement is None else placement.num_physical_experts
        self._outputs, self._launches = {}, {}

    def outputs(self, tokens):
        """Return the :class:`Outputs` for a number of tokens."""
        return self._outputs.get(tokens) or remember(self._outputs, tokens, self._outputs_for(tokens))

    def _outputs_for(self, tokens):
        return Outputs(_describe_outputs(tokens, self.shape[3]), self._device)

    @cached_property
    def _resident_warps(self):
        return _SIMULATED_WARPS if simulator.ENABLED else devices.gpu_of(self.device).sm_count * _WARPS_PER_SM

    @property
    def many_tokens(self):
        """The number of tokens from which on the kernel for large batches is faster."""
        if self.packed_configs:
            return packed_keys.MANY_TOKENS_PER_PICK * self.packed_configs[0].routed + 1
        if self.config and not four_tokens_per_warp.supports(*self.shape):
            return max(MANY_TOKENS, self._resident_warps + 1)  # before, each warp has at most one token
        return MANY_TOKENS

    @cached_property
    def for_few_tokens(self):
        """Launcher and launch shape of the kernel for small batches."""
        if self.packed_configs:
            return self._packed(self.packed_configs[0])
        if self.config:
            made = one_token_per_warp.make_kernel(self.config, self.limit_on_device, self.features)
            return self._launch_shape(made, (), one_token_per_warp.WARPS_PER_BLOCK, carveout=_CARVEOUT)
        made = generic.make_generic_kernel(*self.kernel_types, self.limit_on_device, self.features)
        shared_bytes = generic.shared_bytes(*self.shape[:2])
        options = dict(most_blocks=self._resident_warps, shared_bytes=shared_bytes)
        return self._launch_shape(made, ("int32",) * 6, 1, **options)

    @cached_property
    def for_many_tokens(self):
        """Launcher and launch shape of the kernel for large batches."""
        if self.packed_configs:
            return self._packed(self.packed_configs[1])
        if not self.config:
            return self.for_few_tokens
        if not four_tokens_per_warp.supports(*self.shape):
            made, warps = one_token_per_warp.make_loop_kernel, one_token_per_warp.WARPS_PER_BLOCK
            made = made(self.config, self.limit_on_device, self.features)
            options = dict(most_blocks=-(-self._resident_warps // warps), carveout=_CARVEOUT)
            return self._launch_shape(made, (), warps, **options)
        return self._launch_shape(
            four_tokens_per_warp.make_4tokens_kernel(self.config, self.limit_on_device, self.features),
            (),
            four_tokens_per_warp.WARPS_PER_BLOCK,
            tokens_per_warp=four_tokens_per_warp.TOKENS_PER_WARP,
            launch_bounds=four_tokens_per_warp.launch_bounds(devices.gpu_of(self.device).capability),
        )

    def _packed(self, config):
        warps, tokens_per_warp = packed_keys.WARPS_PER_BLOCK, 32 // config.lanes
        if merged_keys.supports(config.num_experts, config.routed, config.lanes):
            made = merged_keys.make_merged_kernel(config, self.limit_on_device, self.features)
            bounds = dict(launch_bounds=merged_keys.LAUNCH_BOUNDS)
            return self._launch_shape(made, (), warps, tokens_per_warp, carveout=_CARVEOUT, **bounds)
        made = packed_keys.make_packed_kernel(config, self.limit_on_device, self.features)
        return self._launch_shape(made, (), warps, tokens_per_warp, carveout=_CARVEOUT)

    def _launch_shape(self, made, shape_types, warps, tokens_per_warp=1, most_blocks=None, carveout=None, **options):
        """Return (launcher, threads per block, tokens per block, most blocks) of a kernel.

        ``most_blocks`` is None for a kernel that has no loop over tokens.
        """
        signature = *self.signature, *shape_types, *self.optional_types
        start = launcher(made, signature, self.device, dependent=True, carveout=carveout, **options)
        return start, 32 * warps, warps * tokens_per_warp, most_blocks

    def optional_values(self, x, bias, weights, ids, is_padding, placement):
        """Return the optional arguments of a kernel, see `optional_types`."""
        if placement is not None:
            outputs = dict(topk_weights=weights, topk_ids=ids)
            check_apart(placement, gating_output=x, correction_bias=bias, is_padding=is_padding, **outputs)
        mask = address(ids if is_padding is None else is_padding)
        return mask, *placement_values(placement, self.shape[0], address(ids)), self.epsilon

    def launch(self, x, bias, weights, ids, limit, is_padding=None, placement=None):
        """Launch the kernel for the number of tokens in ``x``, if there are any."""
        num_tokens = x.shape[0]
        launch = self._launches.get(num_tokens) or remember(self._launches, num_tokens, self._launch_for(num_tokens))
        start, grid, threads = launch
        if not num_tokens:
            return
        start(
            grid,
            threads,
            None,
            address(x),
            address(x if bias is None else bias),
            address(weights),
            address(ids),
            num_tokens,
            self.row_stride,
            limit,
            *self.trailing_arguments,
            *(self.optional_values(x, bias, weights, ids, is_padding, placement) if self.optional_types else ()),
        )

    def _launch_for(self, num_tokens):
        """Return (launcher, blocks, threads per block) for a number of tokens."""
        if num_tokens > _MAX_TOKENS:
            raise ValueError(f"gating_output has {num_tokens} tokens; at most {_MAX_TOKENS} are allowed")
        shape = self.for_many_tokens if num_tokens >= self.many_tokens else self.for_few_tokens
        start, threads, tokens_per_block, most_blocks = shape
        blocks = -(-num_tokens // tokens_per_block)
        return start, min(blocks, most_blocks) if most_blocks else blocks, threads


def _pointer(dtype):
    return "float32*" if dtype == "float32" else "uint16*"


def _packed_configs(x, bias, options):
    """Return the configurations of the kernel with packed keys for few and for many tokens, or None."""
    if bias is not None or options.num_expert_group > 1 or x.dtype == torch.float32:
        return None
    if devices.gpu_of(x.device).capability < (9, 0):  # `add.rn.bf16x2`
        return None
    routed, found = options.topk - options.num_fused_shared_experts, []
    for many_tokens in (False, True):
        lanes = many_tokens and merged_keys.select_lanes(x.shape[1], routed)
        lanes = lanes or packed_keys.select_lanes(x.shape[1], routed, many_tokens)
        load_bytes = lanes and packed_keys.load_bytes_of(x.shape[1] // lanes, math.gcd(x.data_ptr(), 2 * x.stride(0)))
        if not load_bytes:
            return None
        found.append(
            packed_keys.PackedConfig(
                x.shape[1],
                options.topk,
                lanes,
                options.num_fused_shared_experts,
                options.renormalize,
                options.scoring,
                _DTYPES[x.dtype],
                load_bytes,
            )
        )
    return found


def _load_bytes(tensor, experts_per_lane, group_size):
    """Return the widest load for which every lane's part of every row is aligned."""
    item = tensor.element_size()
    offsets = [tensor.data_ptr(), experts_per_lane * item, group_size * item] + [s * item for s in tensor.stride()[:-1]]
    return next(w for w in (16, 8, 4, 2) if all(offset % w == 0 for offset in offsets))


def _describe_outputs(tokens, topk):
    shape, because = (tokens, topk), ("gating_output has {} rows", "topk is {}")
    return ("topk_weights", shape, torch.float32, because), ("topk_ids", shape, torch.int32, because)


def _check_epsilon(value):
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"renormalize_epsilon is {value!r}; it must be a number")
    if not 0 <= value <= _MAX_EPSILON:
        raise ValueError(f"renormalize_epsilon is {value}; it must be 0 or more, and finite in float32")
    return float(value)


def _check_tensors(x, bias, is_padding, placement):
    check_tensor("gating_output", x, dtype=tuple(_DTYPES), shape=("tokens", "num_experts"))
    check_device(x.device, "gating_output")
    num_experts = x.shape[1]
    if not 1 <= num_experts <= _MAX_EXPERTS:
        raise ValueError(f"gating_output has {num_experts} experts; 1 to {_MAX_EXPERTS} are allowed")
    if num_experts > 1 and x.stride(1) != 1:
        raise ValueError(f"gating_output has column stride {x.stride(1)}; it must be 1 (rows may be strided)")
    if bias is not None:
        wanted = dict(
            shape=(num_experts,), because=("gating_output has {} columns",), device=(x.device, "gating_output")
        )
        check_tensor("correction_bias", bias, dtype=tuple(_DTYPES), contiguous=True, **wanted)
    if is_padding is not None:
        wanted = dict(shape=(x.shape[0],), because=("gating_output has {} rows",), device=(x.device, "gating_output"))
        check_tensor("is_padding", is_padding, dtype=torch.bool, contiguous=True, **wanted)
    if placement is not None:
        check_placement(placement, num_experts, x.device)


def limit_argument(num_token_non_padded, device):
    """Return the kernel argument for ``num_token_non_padded``: a number and None, or a tensor's address and dtype."""
    limit = num_token_non_padded
    if limit is None:
        return _MAX_TOKENS, None
    if isinstance(limit, Integral):
        return min(check_int("num_token_non_padded", limit, 0), _MAX_TOKENS), None
    if hasattr(limit, "__dlpack__"):
        limit = as_tensor(limit, "num_token_non_padded")
    is_tensor = isinstance(limit, torch.Tensor)
    if not is_tensor or limit.dtype not in _LIMIT_TYPES or limit.numel() != 1:
        given = f"{limit.dtype} {tuple(limit.shape)}" if is_tensor else type(limit).__name__
        raise TypeError(f"num_token_non_padded is {given}; it must be an int, or a tensor of one int32 or int64")
    check_tensor("num_token_non_padded", limit, device=(device, "gating_output"))
    return address(limit), limit.dtype


@register_fake(biased_grouped_topk)
def fake_topk(call):
    """Check the arguments of a call and return its outputs."""
    x, limit = call.gating_output, call.num_token_non_padded
    _check_tensors(x, call.correction_bias, call.is_padding, call.placement)
    check_groups(x.shape[1], check_options(call))
    if limit is not None:
        check_tensor("num_token_non_padded", limit, dtype=tuple(_LIMIT_TYPES), device=(x.device, "gating_output"))
    return make_outputs(call.out, _describe_outputs(x.shape[0], call.topk), x.device)
