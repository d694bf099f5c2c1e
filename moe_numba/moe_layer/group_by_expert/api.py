"""``group_by_expert``: checks its arguments, chooses the number of CTAs, and launches the kernel."""

import torch

from moe_numba import simulator
from moe_numba.align import counting_sort
from moe_numba.align.device_functions import capacity_for
from moe_numba.moe_layer.group_by_expert import kernel as kernels
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_device, check_int, check_tensor, make_outputs
from moe_numba.runtime.workspace import workspace

ID_TYPES = {torch.int32: "int32*", torch.int64: "int64*"}
_MAX_ASSIGNMENTS = 1 << 30
_COUNTER_BYTES = 32 * 1024  # limits the warps of a CTA, which have a counter per expert each

MAX_SINGLE_CTA_ASSIGNMENTS = 4096  # beyond, several CTAs and their exchange of counts take less time
_THREADS: tuple[int, ...] = (256, 512, 1024)
if simulator.ENABLED:  # fewer threads, since the simulator runs them one after another
    _THREADS = (64,)

_plans: dict = {}


@torch_op()
def group_by_expert(
    topk_ids: torch.Tensor,
    num_experts: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group assignments of tokens to experts by expert: the group sizes and row indices of a grouped GEMM.

    An assignment is an element of ``topk_ids`` (a slot in :func:`moe_numba.moe_align_block_size`). Rows of the grouped
    GEMM are the assignments in order of expert, then token, then column. An id outside of 0 to ``num_experts`` - 1,
    such as -1, gets no row.

    Parameters
    ----------
    topk_ids : tensor [tokens, topk], int32 or int64
        Any strides. At most 2**30 elements.
    num_experts : int
        1 to 512.
    out : (seqlens, cu_seqlens, gather_indices, inverse_indices), optional
        Contiguous tensors to write into, which must overlap neither an input nor each other. The call then neither
        allocates nor synchronises, except that the first call on a stream may allocate a workspace (see Notes).

    Returns
    -------
    seqlens : tensor [num_experts], int32
        Rows of each expert.
    cu_seqlens : tensor [num_experts + 1], int32
        First row of each expert; last the number of all rows.
    gather_indices : tensor [tokens * topk], int32
        Token of each row, and -1 beyond the last row.
    inverse_indices : tensor [tokens, topk], int32
        Row of each assignment; -1 if it has none.
        All outputs are in the library of ``topk_ids``: torch, or CuPy through DLPack.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    UnsupportedDeviceError
        If the GPU is older than compute capability 7.5.

    Notes
    -----
    The first three outputs are the ``seqlens``, ``cu_seqlens`` and ``gather_indices`` of
    :func:`moe_numba.group_gemm_bf16` and its relatives, the last is for :func:`moe_numba.weighted_sum`. Results are
    bit-identical from run to run. One launch; beyond 4096 assignments its CTAs exchange counts through a workspace per
    stream and capture (600 KB for 256 experts). A CUDA graph can capture the call once a call of this size has compiled
    its kernel.

    Examples
    --------
    >>> topk_ids = torch.tensor([[0, 2], [2, 0]], dtype=torch.int32)
    >>> seqlens, cu_seqlens, gather_indices, inverse_indices = moe_numba.group_by_expert(topk_ids, num_experts=3)
    >>> seqlens.tolist(), cu_seqlens.tolist()
    ([2, 0, 2], [0, 2, 2, 4])
    >>> gather_indices.tolist(), inverse_indices.tolist()
    ([0, 1, 0, 1], [[0, 2], [3, 1]])
    """
    if type(num_experts) is not int:  # True would find the plan for 1
        num_experts = check_int("num_experts", num_experts)
    key = topk_ids.shape, topk_ids.stride(), topk_ids.dtype, topk_ids.device, num_experts
    start, outputs = _plans.get(key) or remember(_plans, key, _make_plan(topk_ids, num_experts))
    results = outputs(out)
    start(address(topk_ids), *map(address, results))
    return tuple(results) if out is None else out


def _make_plan(ids, num_experts):
    """Check the arguments; return a function that launches the kernel, and the :class:`Outputs`."""
    tokens, topk = check_routing(ids, num_experts)
    one = tokens * topk <= MAX_SINGLE_CTA_ASSIGNMENTS
    start = (_plan_one_cta if one else _plan_many_ctas)(ids, num_experts)
    return start, Outputs(describe_outputs(tokens, topk, num_experts), ids.device)


def _most_threads(num_experts):
    """Return the threads of the largest CTA whose counters fit."""
    fitting = [t for t in _THREADS if 4 * kernels.counter_words(t, num_experts) <= _COUNTER_BYTES]
    return fitting[-1]


def _plan_one_cta(ids, num_experts):
    assignments, most = ids.numel(), _most_threads(num_experts)
    threads = next((t for t in _THREADS if t >= max(assignments, num_experts) and t < most), most)
    kernel = kernels.make_single_cta_kernel(num_experts, ids.shape[1], threads)
    signature = ID_TYPES[ids.dtype], *["int32*"] * 4, "int32", "int64", "int64"
    options = dict(launch_bounds=threads, shared_bytes=4 * kernels.counter_words(threads, num_experts), dependent=True)
    start, sizes = launcher(kernel, signature, ids.device.index or 0, **options), (assignments, *ids.stride())
    return lambda *pointers: start(1, threads, None, *pointers, *sizes)


def _plan_many_ctas(ids, num_experts):
    assignments, gpu, device = ids.numel(), devices.gpu_of(ids.device), ids.device.index or 0
    capacity = capacity_for(num_experts, gpu.capability)
    config = counting_sort.config_for(capacity, gpu)
    kernel = kernels.make_many_ctas_kernel(config.threads, capacity, config.slots_per_thread, ids.shape[1])
    signature = ID_TYPES[ids.dtype], *["int32*"] * 5, *["int32"] * 3, "int64", "int64"
    start = launcher(kernel, signature, device, dependent=True, **config.launch_options(capacity))
    words, (ctas, per_cta) = config.workspace_words(capacity), config.grid(assignments, capacity)
    sizes = assignments, num_experts, per_cta, *ids.stride()
    return lambda *pointers: start(ctas, config.threads, None, *pointers, address(workspace(device, words)), *sizes)


def check_routing(ids, num_experts):
    """Check the arguments; return the tokens and columns of ``topk_ids``."""
    check_tensor("topk_ids", ids, dtype=tuple(ID_TYPES), shape=("tokens", "topk"))
    check_device(ids.device, "topk_ids")
    check_int("num_experts", num_experts, 1, kernels.MAX_EXPERTS)
    tokens, topk = ids.shape
    check_int("topk, the columns of topk_ids,", topk, 1)
    if tokens * topk > _MAX_ASSIGNMENTS:
        raise ValueError(f"topk_ids has {tokens} tokens; at most {_MAX_ASSIGNMENTS // topk} are allowed")
    return tokens, topk


def describe_outputs(tokens, topk, num_experts):
    """Return name, shape, dtype and reason of each output."""
    experts = (f"num_experts is {num_experts}",)
    return [
        ("seqlens", (num_experts,), torch.int32, experts),
        ("cu_seqlens", (num_experts + 1,), torch.int32, experts),
        ("gather_indices", (tokens * topk,), torch.int32, ("topk_ids has {} elements",)),
        ("inverse_indices", (tokens, topk), torch.int32, ("topk_ids has {} rows", "topk_ids has {} columns")),
    ]


@register_fake(group_by_expert)
def _fake_group_by_expert(call):
    """Check the arguments of a call and return its outputs."""
    tokens, topk = check_routing(call.topk_ids, call.num_experts)
    return make_outputs(call.out, describe_outputs(tokens, topk, call.num_experts), call.topk_ids.device)
