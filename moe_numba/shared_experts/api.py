"""The public function: check, allocate, launch."""

import torch

from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.validate import as_tensor, check_device, check_out, check_out_tuple, to_caller_library
from moe_numba.shared_experts.kernel import make_fuse_kernel
from moe_numba.shared_experts.reference import POLICIES, columns

_THREADS = 128
_MOST_ELEMENTS = 1 << 30
_SIGNATURE = ("float32*", "int32*", "float32*", "int32*", *("int32",) * 5, "uint32", "uint32", "float32")


def fuse_routing(
    topk_weights,
    topk_ids,
    num_experts,
    num_fused_shared_experts=1,
    routed_scaling_factor=1.0,
    policy="all",
    seed=0,
    out=None,
):
    """Append shared experts to a routing, in one launch.

    The layer multiplies the sum over its experts by ``routed_scaling_factor``, but a shared expert's output must count
    once: so its weight is ``1 / routed_scaling_factor``. (The gate can do it in its own launch: its argument
    ``num_fused_shared_experts`` is policy "all".)

    Parameters
    ----------
    topk_weights : tensor [tokens, topk], float32
    topk_ids : tensor [tokens, topk], int32
        The routing; contiguous. A token whose first id is negative is padding, and gets id -1 and weight 0.
    num_experts : int
        Routed experts; the shared ones are numbered from there on.
    num_fused_shared_experts : int
        How many there are.
    routed_scaling_factor : float
    policy : {"all", "round_robin", "random"}
        What the shared experts are. Distinct ones ("all") are all added: each gets a column. Replicas of one, kept so
        that no expert has all tokens, are chosen between: one column, with replica ``token % replicas`` or a random
        one. All replicas give the same output, so the choice changes nothing but the load.
    seed : int
        Of the random choice, 64 bits; the same seed gives the same choice.
    out : (weights, ids), optional
        Contiguous tensors to write into; the call then neither allocates nor synchronises.

    Returns
    -------
    weights : tensor [tokens, topk + columns], float32
    ids : tensor [tokens, topk + columns], int32
        In ``topk_ids``' library: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 9.0.

    Notes
    -----
    After SGLang's shared-experts fusion (pull request 4918), where the choice is ``torch.randint``.
    """
    weights, ids = as_tensor(topk_weights, "topk_weights"), as_tensor(topk_ids, "topk_ids")
    _check(weights, ids, num_experts, num_fused_shared_experts, routed_scaling_factor, policy, seed)
    tokens, topk = ids.shape
    width = topk + columns(num_fused_shared_experts, policy)
    if tokens * width > _MOST_ELEMENTS:
        raise ValueError(f"topk_ids has {tokens} tokens; at most {_MOST_ELEMENTS // width} are allowed")
    if out is None:
        results = [torch.empty((tokens, width), dtype=t.dtype, device=ids.device) for t in (weights, ids)]
    else:
        results = check_out_tuple(out, 2)
        check_out("weights", results[0], (tokens, width), weights.dtype, ids.device)
        check_out("ids", results[1], (tokens, width), ids.dtype, ids.device)
    if tokens:
        device = ids.device.index or 0
        launcher(make_fuse_kernel(policy), _SIGNATURE, device, dependent=True)(
            -(-tokens * width // _THREADS),
            _THREADS,
            current_stream(device),
            address(weights),
            address(ids),
            *map(address, results),
            tokens * width,
            topk,
            width,
            num_experts,
            num_fused_shared_experts,
            seed & 0xFFFFFFFF,
            seed >> 32 & 0xFFFFFFFF,
            1.0 / routed_scaling_factor,
        )
    if out is not None:
        return out
    return (
        tuple(results) if isinstance(topk_ids, torch.Tensor) else tuple(to_caller_library(t, topk_ids) for t in results)
    )


def _check(weights, ids, num_experts, num_fused_shared_experts, routed_scaling_factor, policy, seed):
    for name, tensor, dtype in (("topk_weights", weights, torch.float32), ("topk_ids", ids, torch.int32)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if tensor.dim() != 2 or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, topk], contiguous")
    check_device(ids.device, (9, 0), "topk_ids")
    if weights.shape != ids.shape or weights.device != ids.device:
        raise ValueError(
            f"topk_weights is {tuple(weights.shape)} on {weights.device}; "
            f"it must be as topk_ids, {tuple(ids.shape)} on {ids.device}"
        )
    if not ids.shape[1]:
        raise ValueError("topk_ids has no column; it must have one or more")
    for name, value, most in (
        ("num_experts", num_experts, 1 << 20),
        ("num_fused_shared_experts", num_fused_shared_experts, 1 << 20),
    ):
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}; it must be an int")
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; 1 to {most} are allowed")
    if not 0 < abs(routed_scaling_factor) < float("inf"):
        raise ValueError(f"routed_scaling_factor is {routed_scaling_factor}; it must be finite and not zero")
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed!r}; it must be an int of 0 to 2**64 - 1")
