"""``get_dispatch_layout``: checks its arguments, allocates the outputs and launches the kernel."""

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import MAX_RANKS, MAX_TOPK
from moe_numba.expert_parallel.layout.kernel import CLUSTER_SIZE, make_layout_kernel, make_single_cta_layout_kernel
from moe_numba.expert_parallel.rings.config import TOPK_IDX_POINTERS
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_device, check_int, check_tensor, make_outputs

_THREADS = 64 if simulator.ENABLED else 1024  # per CTA; the simulator runs threads one after the other
_SIGNATURES = {dtype: (pointer, "int32*", "int32*", "uint8*", "uint32") for dtype, pointer in TOPK_IDX_POINTERS.items()}
_MAX_EXPERTS = 1024
_plans: dict = {}
_MAX_ELEMENTS = (1 << 31) - 1  # counts are int32


@torch_op()
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
        The GPU is older than compute capability 7.5.

    Notes
    -----
    DeepEP's ``Buffer.get_dispatch_layout`` within a node. It runs on torch's current stream, on eight SMs (one below
    compute capability 9.0), and can be captured in a CUDA graph after a first call with these numbers of experts and
    ranks has compiled its kernel.

    Examples
    --------
    Four experts on two ranks: experts 0 and 1 are on rank 0.

    >>> topk_idx = torch.tensor([[0, 1], [1, 3], [2, 3]])
    >>> per_rank, per_expert, is_in_rank = moe_numba.get_dispatch_layout(topk_idx, num_experts=4, num_ranks=2)
    >>> per_rank.tolist(), per_expert.tolist(), is_in_rank.tolist()
    ([2, 2], [1, 2, 1, 2], [[True, False], [True, True], [False, True]])
    """
    if not type(num_experts) is type(num_ranks) is int:  # before the look-up: True would find the plan for 1
        num_experts, num_ranks = check_int("num_experts", num_experts), check_int("num_ranks", num_ranks)
    key = topk_idx.shape, topk_idx.stride(), topk_idx.dtype, topk_idx.device, num_experts, num_ranks
    start, ctas, outputs = _plans.get(key) or remember(_plans, key, _make_plan(topk_idx, num_experts, num_ranks))
    per_rank, per_expert, is_in_rank = outputs = outputs(out)
    start(
        ctas,
        _THREADS,
        None,
        address(topk_idx),
        address(per_rank),
        address(per_expert),
        address(is_in_rank),
        topk_idx.shape[0],
    )
    return tuple(outputs) if out is None else out


def _make_plan(ids, num_experts, num_ranks):
    """Check the arguments; return the launcher, the number of CTAs and the :class:`Outputs`."""
    tokens, topk = _check(ids, num_experts, num_ranks)
    if gpu_of(ids.device).has_clusters:
        make, ctas, options = make_layout_kernel, CLUSTER_SIZE, dict(cluster=CLUSTER_SIZE, dependent=True)
    else:
        make, ctas, options = make_single_cta_layout_kernel, 1, {}
    kernel, signature = make(num_experts, num_ranks, topk, _THREADS), _SIGNATURES[ids.dtype]
    start = launcher(kernel, signature, ids.device.index or 0, launch_bounds=_THREADS, **options)
    return start, ctas, Outputs(_describe_outputs(tokens, num_experts, num_ranks), ids.device)


def _check(ids, num_experts, num_ranks):
    """Check the arguments; return the number of tokens, and of experts per token."""
    check_tensor("topk_idx", ids, dtype=tuple(TOPK_IDX_POINTERS), shape=("tokens", "topk"), contiguous=True)
    check_device(ids.device, "topk_idx")
    tokens, topk = ids.shape
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk_idx has {topk} columns; 1 to {MAX_TOPK} are allowed")
    if tokens * topk > _MAX_ELEMENTS:
        raise ValueError(f"topk_idx has {tokens} tokens; at most {_MAX_ELEMENTS // topk} are allowed")
    check_int("num_experts", num_experts, 1, _MAX_EXPERTS)
    check_int("num_ranks", num_ranks, 1, MAX_RANKS)
    if num_experts % num_ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of num_ranks, {num_ranks}")
    return tokens, topk


def _describe_outputs(tokens, num_experts, num_ranks):
    return (
        ("num_tokens_per_rank", (num_ranks,), torch.int32, ("num_ranks is {}",)),
        ("num_tokens_per_expert", (num_experts,), torch.int32, ("num_experts is {}",)),
        ("is_token_in_rank", (tokens, num_ranks), torch.bool, ("topk_idx has {} rows", "num_ranks is {}")),
    )


@register_fake(get_dispatch_layout)
def _fake_layout(call):
    """Check the arguments of a call and return its outputs."""
    ids, sizes = call.topk_idx, (call.num_experts, call.num_ranks)
    _check(ids, *sizes)
    return make_outputs(call.out, _describe_outputs(ids.shape[0], *sizes), ids.device)
