"""``get_dispatch_layout``: checks its arguments, allocates the outputs and launches the kernel."""

from functools import cache

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.config import TOPK_IDX_POINTERS
from moe_numba.expert_parallel.kernels.buffer_layout import MAX_RANKS, MAX_TOPK
from moe_numba.expert_parallel.kernels.dispatch_layout import CLUSTER_SIZE, make_layout_kernel
from moe_numba.expert_parallel.transport import COMPILE_LOCK
from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.validate import (
    as_tensor,
    check_device,
    check_has_memory,
    check_int,
    check_tensor,
    make_outputs,
    return_outputs,
)

_THREADS = 64 if simulator.ENABLED else 1024  # per CTA; the simulator runs threads one after the other
_SIGNATURES = {dtype: (pointer, "int32*", "int32*", "uint8*", "uint32") for dtype, pointer in TOPK_IDX_POINTERS.items()}
_MAX_EXPERTS = 1024
_MAX_ELEMENTS = (1 << 31) - 1  # counts are int32


def get_dispatch_layout(
    topk_idx: torch.Tensor,
    num_experts: int,
    num_ranks: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count the tokens that go to each rank and to each expert, in one launch.

    Parameters
    ----------
    topk_idx : torch.Tensor [tokens, topk], int64 or int32
        The experts of each token, at most 32; contiguous. -1, and any other value outside 0..num_experts-1, is no
        expert.
    num_experts : int
        Experts of all ranks, 1 to 1024; a multiple of ``num_ranks``. Each rank holds an equal range of consecutive
        experts.
    num_ranks : int
        Ranks of the group, 1 to 8.
    out : (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank), optional
        Contiguous tensors to write into; the call then neither allocates nor synchronises.

    Returns
    -------
    num_tokens_per_rank : torch.Tensor [num_ranks], int32
        A token counts once per rank, even if several of its experts are on that rank.
    num_tokens_per_expert : torch.Tensor [num_experts], int32
        An expert that a token lists twice counts twice.
    is_token_in_rank : torch.Tensor [tokens, num_ranks], bool
        All three are arrays of ``topk_idx``' library: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        An argument is invalid; the message names it, its value and what is allowed.
    UnsupportedDeviceError
        The GPU is older than compute capability 9.0.

    Notes
    -----
    DeepEP's ``Buffer.get_dispatch_layout`` within a node. It runs on torch's current stream, on eight SMs, and can be
    captured in a CUDA graph after a first call with these numbers of experts and ranks has compiled its kernel.
    """
    ids = as_tensor(topk_idx, "topk_idx")
    tokens, topk = _check_topk_idx(ids)
    num_experts = check_int("num_experts", num_experts, 1, _MAX_EXPERTS)
    num_ranks = check_int("num_ranks", num_ranks, 1, MAX_RANKS)
    if num_experts % num_ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of num_ranks, {num_ranks}")
    wanted = (
        ("num_tokens_per_rank", (num_ranks,), torch.int32),
        ("num_tokens_per_expert", (num_experts,), torch.int32),
        ("is_token_in_rank", (tokens, num_ranks), torch.bool),
    )
    per_rank, per_expert, is_in_rank = results = make_outputs(out, wanted, ids.device)
    index = ids.device.index or 0
    _prepare(make_layout_kernel(num_experts, num_ranks, topk, _THREADS), ids.dtype, index)(
        CLUSTER_SIZE,
        _THREADS,
        current_stream(index),
        address(ids),
        address(per_rank),
        address(per_expert),
        address(is_in_rank),
        tokens,
    )
    return return_outputs(results, out, topk_idx)


@cache
def _prepare(kernel, dtype, device):
    """Compile the kernel for experts of a dtype; return its launcher."""
    with COMPILE_LOCK:
        return launcher(
            kernel, _SIGNATURES[dtype], device, launch_bounds=_THREADS, cluster=CLUSTER_SIZE, dependent=True
        )


def _check_topk_idx(ids):
    """Check the experts; return the number of tokens, and of experts per token."""
    is_plain = type(ids) is torch.Tensor
    if not (is_plain and ids.dtype in TOPK_IDX_POINTERS and ids.dim() == 2 and ids.is_contiguous()):
        check_tensor("topk_idx", ids, dtype=tuple(TOPK_IDX_POINTERS), shape=("tokens", "topk"), contiguous=True)
    check_device(ids.device, (9, 0), "topk_idx")
    if not is_plain:
        check_has_memory("topk_idx", ids)
    tokens, topk = ids.shape
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk_idx has {topk} columns; 1 to {MAX_TOPK} are allowed")
    if tokens * topk > _MAX_ELEMENTS:
        raise ValueError(f"topk_idx has {tokens} tokens; at most {_MAX_ELEMENTS // topk} are allowed")
    return tokens, topk
