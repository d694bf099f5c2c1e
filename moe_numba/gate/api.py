"""The public function: check, allocate, launch."""

from functools import cached_property

import torch

from moe_numba import simulator
from moe_numba.gate import kernel, kernel_4tokens, kernel_generic
from moe_numba.gate.reference import SCORINGS
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.validate import as_tensor, check_device, check_out, check_out_tuple, to_caller_library

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_LIMITS = {torch.int32: "int32*", torch.int64: "int64*"}
_MOST_EXPERTS, _MOST_TOPK, _MOST_TOKENS = 1024, 32, 1 << 30
_WARPS_A_MULTIPROCESSOR = 64  # as many as can be resident; beyond that a warp takes several tokens, one after another
_MOST_BLOCKS = 1 << 20
MANY_TOKENS = 4096  # from here on the throughput kernel is the faster one

_plans = {}


def biased_grouped_topk(
    gating_output,
    correction_bias,
    topk,
    renormalize=True,
    num_expert_group=1,
    topk_group=1,
    num_fused_shared_experts=0,
    routed_scaling_factor=1.0,
    apply_routed_scaling_factor_on_output=False,
    num_token_non_padded=None,
    scoring="sigmoid",
    out=None,
):
    """Route each token to ``topk`` experts: score, bias, group, choose and weigh, in one launch.

    A group of experts is worth the sum of its two best biased scores. The ``topk_group`` best groups stay, and of their
    experts the best by biased score are chosen, best first; their weights are the scores without the bias. All
    arithmetic is float32. A tie goes to the lower group, then the lower expert. NaN comes last, and a NaN score weighs
    0. Ids are distinct and in range whatever the input, and bit-identical from run to run, as the weights are.

    Parameters
    ----------
    gating_output : tensor [tokens, num_experts], float32, bfloat16 or float16
        Logits. Rows may be strided, columns may not. Any number of experts up to 1024.
    correction_bias : tensor [num_experts], float32, bfloat16 or float16, or None
        Added to the scores for the choice alone.
    topk : int
        Columns of the result, 1 to 32, fused shared experts included.
    renormalize : bool
        Divide the weights by the sum of the routed ones; a sum of zero divides by 1.
    num_expert_group, topk_group : int
        Groups, which must divide the experts, and how many of them a token keeps. 1 and 1: no groups.
    num_fused_shared_experts : int
        The last columns get ids num_experts, num_experts + 1, ... and weigh sum / routed_scaling_factor each, which
        renormalisation makes 1 / routed_scaling_factor.
    routed_scaling_factor : float
    apply_routed_scaling_factor_on_output : bool
        Multiply all weights by routed_scaling_factor.
    num_token_non_padded : int or tensor of one int32 or int64, optional
        Rows from this one on are padding: id -1, weight 0. A tensor is read by the kernel, so the host does not wait.
    scoring : {"sigmoid", "softmax", "sqrtsoftplus"}
    out : (weights, ids), optional
        Contiguous tensors to write into; the call then neither allocates nor synchronises.

    Returns
    -------
    topk_weights : tensor [tokens, topk], float32
    topk_ids : tensor [tokens, topk], int32
        Both in ``gating_output``'s library: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 9.0.

    Notes
    -----
    DeepSeek-V3's router, named after SGLang's ``biased_grouped_topk``. It runs on the caller's current stream and can
    be captured in a CUDA graph after one call has compiled it.
    """
    x = as_tensor(gating_output, "gating_output")
    bias = None if correction_bias is None else as_tensor(correction_bias, "correction_bias")
    limit = check_limit(num_token_non_padded, x.device)
    plan = plan_for(
        x,
        bias,
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        scoring,
        num_token_non_padded,
    )
    tokens, device = x.shape[0], x.device
    if out is None:
        weights = torch.empty((tokens, topk), dtype=torch.float32, device=device)
        ids = torch.empty((tokens, topk), dtype=torch.int32, device=device)
    else:
        weights, ids = check_out_tuple(out, 2)
        check_out("weights", weights, (tokens, topk), torch.float32, device)
        check_out("ids", ids, (tokens, topk), torch.int32, device)
    if tokens:
        plan.start(x, x if bias is None else bias, weights, ids, tokens, limit)
    if out is not None:
        return out
    return (
        (weights, ids)
        if x is gating_output
        else (to_caller_library(weights, gating_output), to_caller_library(ids, gating_output))
    )


def plan_for(x, bias, *options):
    """The plan for these tensors; ``options`` are :func:`biased_grouped_topk`'s from topk on, in this order:

    topk, renormalize, num_expert_group, topk_group, num_fused_shared_experts, routed_scaling_factor,
    apply_routed_scaling_factor_on_output, scoring, num_token_non_padded.
    """
    topk, _, num_expert_group, topk_group, shared, *_, limit = options
    _check_ints(topk, num_expert_group, topk_group, shared)  # now: 8.0 would find the plan for 8, and True that for 1
    key = (
        x.shape[1:],
        x.stride(),
        x.dtype,
        x.device,
        x.data_ptr() & 15,
        bias is None or (bias.shape, bias.stride(), bias.dtype, bias.device, bias.data_ptr() & 15),
        *options[:-1],
        type(limit) is torch.Tensor and limit.dtype,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _Plan(x, bias, *key[6:])
    return plan


class _Plan:
    """What a call needs that shapes, types and options decide: checked once; a kernel is compiled when first needed."""

    def __init__(
        self,
        x,
        bias,
        topk,
        renormalize,
        num_expert_group,
        topk_group,
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        scoring,
        limit_dtype,
    ):
        num_experts = _check_tensors(x, bias)
        _check_options(
            num_experts, topk, num_expert_group, topk_group, num_fused_shared_experts, routed_scaling_factor, scoring
        )
        renormalize = bool(renormalize)
        dtype, bias_dtype = _DTYPES[x.dtype], None if bias is None else _DTYPES[bias.dtype]
        self.row_stride, self.device = x.stride(0), x.device.index or 0
        output_scale = float(routed_scaling_factor) if apply_routed_scaling_factor_on_output else 1.0
        self.tail = (1.0 / routed_scaling_factor, output_scale)
        self.signature = (
            *(_pointer(dtype), _pointer(bias_dtype or dtype), "float32*", "int32*", "int32", "int64"),
            *(_LIMITS[limit_dtype] if limit_dtype else "int32", "float32", "float32"),
        )
        self.shape = (num_experts, num_expert_group, topk_group, topk, num_fused_shared_experts)
        lanes, values = kernel.layout(num_experts, num_expert_group)
        self.constants = None  # where a group has too few lanes, the dynamic kernel takes them as numbers
        if lanes:
            group_size = num_experts // num_expert_group
            words = _word_bytes(x, values, group_size), 4 if bias is None else _word_bytes(bias, values, group_size)
            self.constants = kernel.Constants(*self.shape, renormalize, scoring, dtype, bias_dtype, *words)
        else:
            self.tail += (*self.shape[:4], topk - num_fused_shared_experts, int(renormalize))
        self.types = scoring, dtype, bias_dtype
        self.limit_on_device = bool(limit_dtype)

    @cached_property
    def few(self):
        if self.constants:
            made = kernel.make_kernel(self.constants, self.limit_on_device)
            return self._variant(made, self.signature, kernel.WARPS)
        made = kernel_generic.make_dynamic_kernel(*self.types, self.limit_on_device)
        shared_bytes = kernel_generic.shared_bytes(*self.shape[:2])
        return self._variant(made, (*self.signature, *("int32",) * 6), 1, shared_bytes=shared_bytes)

    @cached_property
    def many(self):
        if not self.constants or not kernel_4tokens.serves(*self.shape):
            return self.few
        return self._variant(
            kernel_4tokens.make_throughput_kernel(self.constants, self.limit_on_device),
            self.signature,
            kernel_4tokens.WARPS,
            tokens_a_warp=kernel_4tokens.TOKENS,
            launch_bounds=kernel_4tokens.LAUNCH_BOUNDS,
        )

    def _variant(self, made, signature, warps, tokens_a_warp=1, **options):
        """A kernel ready to start, and the shape of its launches."""
        start = launcher(made, signature, self.device, dependent=True, **options)
        most_blocks = _MOST_BLOCKS
        if tokens_a_warp == 1 and not simulator.ENABLED:
            multiprocessors = devices.gpu_of(self.device).sm_count
            most_blocks = multiprocessors * _WARPS_A_MULTIPROCESSOR // warps
        return start, 32 * warps, warps * tokens_a_warp, most_blocks

    def start(self, x, bias, weights, ids, tokens, limit):
        launch, block, tokens_a_block, most_blocks = self.many if tokens >= MANY_TOKENS else self.few
        launch(
            min(-(-tokens // tokens_a_block), most_blocks),
            block,
            current_stream(self.device),
            address(x),
            address(bias),
            address(weights),
            address(ids),
            tokens,
            self.row_stride,
            limit,
            *self.tail,
        )


def _pointer(dtype):
    return "float32*" if dtype == "float32" else "uint16*"


def _word_bytes(tensor, values, group_size):
    """The widest load that every lane's part of every row is aligned for."""
    item = tensor.element_size()
    distances = [tensor.data_ptr(), values * item, group_size * item] + [s * item for s in tensor.stride()[:-1]]
    return next(w for w in (16, 8, 4, 2) if all(d % w == 0 for d in distances))


def _check_tensors(x, bias):
    if x.dim() != 2:
        raise ValueError(f"gating_output has shape {tuple(x.shape)}; it must be [tokens, num_experts]")
    if x.dtype not in _DTYPES:
        raise TypeError(f"gating_output is {x.dtype}; it must be float32, bfloat16 or float16")
    check_device(x.device, (9, 0), "gating_output")
    num_experts = x.shape[1]
    if not 1 <= num_experts <= _MOST_EXPERTS:
        raise ValueError(f"gating_output has {num_experts} experts; 1 to {_MOST_EXPERTS} are allowed")
    if x.shape[0] > _MOST_TOKENS:
        raise ValueError(f"gating_output has {x.shape[0]} tokens; at most {_MOST_TOKENS} are allowed")
    if num_experts > 1 and x.stride(1) != 1:
        raise ValueError(f"gating_output has column stride {x.stride(1)}; it must be 1 (rows may be strided)")
    if bias is None:
        return num_experts
    if bias.dtype not in _DTYPES:
        raise TypeError(f"correction_bias is {bias.dtype}; it must be float32, bfloat16 or float16")
    if tuple(bias.shape) != (num_experts,):
        raise ValueError(f"correction_bias has shape {tuple(bias.shape)}; it must be ({num_experts},), one an expert")
    if num_experts > 1 and bias.stride(0) != 1:
        raise ValueError(f"correction_bias has stride {bias.stride(0)}; it must be contiguous")
    if bias.device != x.device:
        raise ValueError(f"correction_bias is on {bias.device}; it must be where gating_output is, on {x.device}")
    return num_experts


def _check_ints(*values):
    names = ("topk", "num_expert_group", "topk_group", "num_fused_shared_experts")
    for name, value in zip(names, values, strict=True):
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}; it must be an int")


def _check_options(num_experts, topk, num_expert_group, topk_group, shared, routed_scaling_factor, scoring):
    if not 1 <= topk <= _MOST_TOPK:
        raise ValueError(f"topk is {topk}; 1 to {_MOST_TOPK} are allowed")
    if not 1 <= num_expert_group <= num_experts or num_experts % num_expert_group:
        raise ValueError(f"num_expert_group is {num_expert_group}; it must divide the {num_experts} experts")
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(f"topk_group is {topk_group}; 1 to num_expert_group ({num_expert_group}) are allowed")
    if not 0 <= shared < topk:
        raise ValueError(f"num_fused_shared_experts is {shared}; 0 to topk - 1 ({topk - 1}) are allowed")
    candidates = topk_group * (num_experts // num_expert_group)
    if topk - shared > candidates:
        raise ValueError(f"topk asks for {topk - shared} routed experts; the groups that are kept have {candidates}")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring is {scoring!r}; it must be one of {', '.join(SCORINGS)}")
    if not 0 < abs(routed_scaling_factor) < float("inf"):
        raise ValueError(f"routed_scaling_factor is {routed_scaling_factor}; it must be finite and not zero")


def check_limit(limit, device):
    """What the kernel takes for num_token_non_padded: a number, or the address of one."""
    if limit is None:
        return _MOST_TOKENS
    if type(limit) is int:
        if limit < 0:
            raise ValueError(f"num_token_non_padded is {limit}; it may not be negative")
        return min(limit, _MOST_TOKENS)
    if type(limit) is not torch.Tensor or limit.dtype not in _LIMITS or limit.numel() != 1:
        raise TypeError("num_token_non_padded must be an int, or a tensor of one int32 or int64")
    if limit.device != device:
        raise ValueError(f"num_token_non_padded is on {limit.device}; it must be where gating_output is, on {device}")
    return address(limit)
