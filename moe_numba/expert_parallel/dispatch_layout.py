"""The public function: check, allocate, launch."""

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.kernels.dispatch_layout import CLUSTER, make_layout_kernel
from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.validate import as_tensor, check_device, make_outputs, to_caller_library

_THREADS = 64 if simulator.ENABLED else 1024  # of a block; simulated threads take their turns
_SIGNATURE = ("int64*", "int32*", "int32*", "uint8*", "uint32")
_MOST_EXPERTS, _MOST_RANKS, _MOST_TOPK = 1024, 8, 32
_MOST_ELEMENTS = (1 << 31) - 1  # so that a count of them has 32 bits


def get_dispatch_layout(topk_idx, num_experts, num_ranks, out=None):
    """Count the tokens that go to each rank and to each expert, and say which token goes to which rank, in one launch.

    Parameters
    ----------
    topk_idx : tensor [tokens, topk], int64
        The experts of each token, at most 32; contiguous. -1, and whatever else is not in 0..num_experts-1, is no
        expert.
    num_experts : int
        Experts of all ranks, 1 to 1024; a multiple of ``num_ranks``. They lie on the ranks in equal consecutive parts.
    num_ranks : int
        GPUs of the group, 1 to 8.
    out : (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank), optional
        Contiguous tensors to write into; the call then neither allocates nor synchronises.

    Returns
    -------
    num_tokens_per_rank : tensor [num_ranks], int32
        A token counts once for a rank, however many of its experts are there.
    num_tokens_per_expert : tensor [num_experts], int32
        An expert that a token names twice counts twice.
    is_token_in_rank : tensor [tokens, num_ranks], bool
        All in ``topk_idx``' library: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what it was and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 9.0.

    Notes
    -----
    DeepEP's ``Buffer.get_dispatch_layout`` within a node. It runs on torch's current stream, on eight multiprocessors,
    and can be captured in a CUDA graph after a call with these numbers of experts and ranks has compiled its kernel.
    """
    ids = as_tensor(topk_idx, "topk_idx")
    _check(ids, num_experts, num_ranks)
    (tokens, topk), device = ids.shape, ids.device
    wanted = (
        ("num_tokens_per_rank", (num_ranks,), torch.int32),
        ("num_tokens_per_expert", (num_experts,), torch.int32),
        ("is_token_in_rank", (tokens, num_ranks), torch.bool),
    )
    results = make_outputs(out, wanted, device)
    index = device.index or 0
    kernel = make_layout_kernel(num_experts, num_ranks, topk, _THREADS)
    launcher(kernel, _SIGNATURE, index, launch_bounds=_THREADS, cluster=CLUSTER, dependent=True)(
        CLUSTER, _THREADS, current_stream(index), address(ids), *map(address, results), tokens
    )
    if out is not None:
        return out
    return (
        tuple(results) if isinstance(topk_idx, torch.Tensor) else tuple(to_caller_library(t, topk_idx) for t in results)
    )


def _check(ids, num_experts, num_ranks):
    if ids.dtype != torch.int64:
        raise TypeError(f"topk_idx is {ids.dtype}; it must be torch.int64")
    if ids.dim() != 2 or not ids.is_contiguous():
        raise ValueError(
            f"topk_idx has shape {tuple(ids.shape)} and strides {ids.stride()}; it must be [tokens, topk], contiguous"
        )
    if not 1 <= ids.shape[1] <= _MOST_TOPK:
        raise ValueError(f"topk_idx has {ids.shape[1]} columns; 1 to {_MOST_TOPK} are allowed")
    if ids.numel() > _MOST_ELEMENTS:
        raise ValueError(f"topk_idx has {len(ids)} tokens; at most {_MOST_ELEMENTS // ids.shape[1]} are allowed")
    check_device(ids.device, (9, 0), "topk_idx")
    for name, value, most in (("num_experts", num_experts, _MOST_EXPERTS), ("num_ranks", num_ranks, _MOST_RANKS)):
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}; it must be an int")
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; 1 to {most} are allowed")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of num_ranks, {num_ranks}")
