"""Public function that appends shared experts to a routing: checks its arguments and launches the kernel."""

import torch

from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.recording import refuse_recording
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_choice, check_device, check_factor, check_int, check_tensor, make_outputs
from moe_numba.shared_experts.kernel import make_fuse_kernel
from moe_numba.shared_experts.reference import POLICIES, num_columns

_THREADS = 128
_MAX_ELEMENTS, _MAX_EXPERTS, _MAX_SEED = 1 << 30, 1 << 20, 2**64 - 1
_ID_TYPES = {torch.uint8: "uint8*", torch.int16: "int16*", torch.int32: "int32*", torch.int64: "int64*"}
_NUMBERS = *("int32",) * 5, "uint32", "uint32", "float32"
_plans: dict = {}


@torch_op()
def fuse_routing(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    num_fused_shared_experts: int = 1,
    routed_scaling_factor: float | None = 1.0,
    policy: str = "all",
    seed: int = 0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append shared experts to a routing, in one launch.

    The layer multiplies the sum over its experts by ``routed_scaling_factor``. The output of a shared expert must not
    be scaled, so its weight is ``1 / routed_scaling_factor``. The gate can append the columns of policy "all" in its
    own launch: see ``num_fused_shared_experts`` of :func:`moe_numba.biased_grouped_topk`.

    Parameters
    ----------
    topk_weights : tensor [tokens, topk], float32
    topk_ids : tensor [tokens, topk], uint8, int16, int32 or int64
        The routing. Any strides; what is not contiguous is copied first. A token whose first id is negative is padding,
        and gets id -1 and weight 0.
    num_experts : int
        Number of routed experts. Shared experts have the ids from ``num_experts`` on.
    num_fused_shared_experts : int
        Number of distinct shared experts, or of replicas of one shared expert.
    routed_scaling_factor : float or None
        Finite and not zero in float32, as is its reciprocal. None is 1.
    policy : {"all", "round_robin", "random"}
        "all": the shared experts are distinct; append one column for each. "round_robin" and "random": they are
        replicas of one expert, which share its load; append one column with replica ``token % replicas`` or a random
        replica. Replicas compute the same output, so the choice affects only the load.
    seed : int
        Seed of the random choice, 0 to 2**64 - 1, of the op (``torch.ops``, ``torch.compile``) to 2**63 - 1. Equal
        seeds make equal choices.
    out : (weights, ids), optional
        Contiguous tensors to write into, which must overlap neither an input nor each other. The call then neither
        allocates nor synchronises.

    Returns
    -------
    weights : tensor [tokens, topk + columns], float32
    ids : tensor [tokens, topk + columns], int32
        Both in the library of ``topk_weights``: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    After SGLang's shared-experts fusion (pull request 4918), which chooses replicas with ``torch.randint``.

    Examples
    --------
    Two experts of 8 for each token, and a shared expert of which there are two replicas, experts 8 and 9:

    >>> weights, ids = torch.full((2, 2), 0.5), torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
    >>> weights, ids = moe_numba.fuse_routing(
    ...     weights, ids, 8, 2, routed_scaling_factor=2.0, policy="round_robin"
    ... )
    >>> ids.tolist(), weights[0].tolist()
    ([[3, 1, 8], [0, 7, 9]], [0.5, 0.5, 0.5])
    """
    weights, ids = topk_weights, as_tensor(topk_ids, "topk_ids")
    # Check types before the look-up: True would find the plan for 1.
    if not (type(num_experts) is type(num_fused_shared_experts) is type(seed) is int and type(policy) is str):
        check_choice("policy", policy, POLICIES)
        num_experts, seed = check_int("num_experts", num_experts), check_int("seed", seed)
        num_fused_shared_experts = check_int("num_fused_shared_experts", num_fused_shared_experts)
    if type(routed_scaling_factor) is not float:
        routed_scaling_factor = check_factor("routed_scaling_factor", routed_scaling_factor)
    options = num_experts, num_fused_shared_experts, routed_scaling_factor, policy
    key = (
        *(weights.shape, weights.stride(), weights.dtype, weights.device),
        *(ids.shape, ids.stride(), ids.dtype, ids.device),
        *options,
    )
    plan = _plans.get(key) or remember(_plans, key, _make_plan(weights, ids, *options))
    start, ctas, sizes, shared_weight, outputs, copied = plan
    if not 0 <= seed <= _MAX_SEED:
        check_int("seed", seed, 0, _MAX_SEED)
    results = outputs(out)
    if copied:
        refuse_recording(f"{copied} are not contiguous; for a prepared call they must be")
        weights, ids = weights.contiguous(), ids.contiguous()
    if ctas:
        pointers = address(weights), address(ids), address(results[0]), address(results[1])
        start(ctas, _THREADS, None, *pointers, *sizes, seed & 0xFFFFFFFF, seed >> 32, shared_weight)
    return tuple(results) if out is None else out


def _make_plan(weights, ids, num_experts, num_fused_shared_experts, routed_scaling_factor, policy):
    """Check the arguments; return launcher, CTAs, the kernel's sizes and weight, `Outputs`, and what is copied."""
    width = _check(weights, ids, num_experts, num_fused_shared_experts, routed_scaling_factor, policy)[0]
    tokens, topk = ids.shape
    signature = "float32*", _ID_TYPES[ids.dtype], "float32*", "int32*", *_NUMBERS
    kernel = make_fuse_kernel(policy, ids.dtype == torch.int64)
    start = launcher(kernel, signature, ids.device.index or 0, dependent=True) if tokens else None
    sizes = tokens * width, topk, width, num_experts, num_fused_shared_experts
    outputs = Outputs(_describe_outputs(ids, width), ids.device)
    copied = " and ".join(n for n, t in (("topk_weights", weights), ("topk_ids", ids)) if not t.is_contiguous())
    return start, -(-tokens * width // _THREADS), sizes, 1.0 / routed_scaling_factor, outputs, copied


def _describe_outputs(ids, width):
    tokens, topk = ids.shape
    because = "topk_ids has {} rows", f"topk_ids has {topk} columns, and shared experts {width - topk}"
    return ("weights", (tokens, width), torch.float32, because), ("ids", (tokens, width), torch.int32, because)


def _check(weights, ids, num_experts, num_fused_shared_experts, routed_scaling_factor, policy, seed=0):
    """Check the arguments; return the columns of the results, and the numbers as Python's."""
    check_tensor("topk_ids", ids, dtype=tuple(_ID_TYPES), shape=("tokens", "topk"))
    check_device(ids.device, "topk_ids")
    because = "topk_ids has {} rows", "topk_ids has {} columns"
    wanted = dict(shape=tuple(ids.shape), because=because, device=(ids.device, "topk_ids"))
    check_tensor("topk_weights", weights, dtype=torch.float32, **wanted)
    tokens, topk = ids.shape
    check_int("topk, the columns of topk_ids,", topk, 1)
    num_experts = check_int("num_experts", num_experts, 1, _MAX_EXPERTS)
    num_fused_shared_experts = check_int("num_fused_shared_experts", num_fused_shared_experts, 1, _MAX_EXPERTS)
    routed_scaling_factor = check_factor("routed_scaling_factor", routed_scaling_factor)
    check_choice("policy", policy, POLICIES)
    seed = check_int("seed", seed, 0, _MAX_SEED)
    width = topk + num_columns(num_fused_shared_experts, policy)
    if tokens * width > _MAX_ELEMENTS:
        raise ValueError(f"topk_ids has {tokens} tokens; at most {_MAX_ELEMENTS // width} are allowed")
    return width, num_experts, num_fused_shared_experts, routed_scaling_factor, seed


@register_fake(fuse_routing)
def _fake_fuse_routing(call):
    """Check the arguments of a call and return its outputs."""
    ids, scale = call.topk_ids, call.routed_scaling_factor
    experts = call.num_experts, call.num_fused_shared_experts
    width = _check(call.topk_weights, ids, *experts, scale, call.policy, call.seed)[0]
    return make_outputs(call.out, _describe_outputs(ids, width), ids.device)
