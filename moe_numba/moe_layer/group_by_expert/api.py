"""``group_by_expert``: checks its arguments, chooses one launch or three, and launches the kernels."""

from functools import partial

import torch

from moe_numba import simulator
from moe_numba.moe_layer.group_by_expert import kernel as kernels
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import Outputs, remember
from moe_numba.runtime.torch_op import register_fake, torch_op
from moe_numba.runtime.validate import check_device, check_int, check_tensor, make_outputs

ID_TYPES = {torch.int32: "int32*", torch.int64: "int64*"}
_MAX_ASSIGNMENTS = 1 << 30
_COUNTER_BYTES = 32 * 1024  # limits the warps of a CTA, which have a counter per expert each

# Up to this number one CTA takes less time than two more launches.
MAX_SINGLE_CTA_ASSIGNMENTS = 4096
_THREADS: tuple[int, ...] = (256, 512, 1024)
_MIN_CHUNK, _MAX_CHUNKS = 2048, 128
if simulator.ENABLED:  # fewer threads, since the simulator runs them one after another
    _THREADS, _MIN_CHUNK = (64,), 128

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
        allocates nor synchronises.

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
    bit-identical from run to run. One launch up to 4096 assignments, three beyond. A CUDA graph can capture the call
    once a call of this size has compiled its kernels.
    """
    if type(num_experts) is not int:  # True would find the plan for 1
        num_experts = check_int("num_experts", num_experts)
    key = topk_ids.shape, topk_ids.stride(), topk_ids.dtype, topk_ids.device, num_experts
    start, outputs = _plans.get(key) or remember(_plans, key, _make_plan(topk_ids, num_experts))
    results = outputs(out)
    start(address(topk_ids), *map(address, results))
    return tuple(results) if out is None else out


def _make_plan(ids, num_experts):
    """Check the arguments; return a function that launches the kernels, and the :class:`Outputs`."""
    tokens, topk = check_routing(ids, num_experts)
    # Three launches need at least one chunk.
    one = tokens * topk <= max(MAX_SINGLE_CTA_ASSIGNMENTS, _MIN_CHUNK - 1, num_experts - 1)
    start = (_plan_one_launch if one else _plan_three_launches)(ids, num_experts)
    return start, Outputs(describe_outputs(tokens, topk, num_experts), ids.device)


def _most_threads(num_experts):
    """Return the threads of the largest CTA whose counters fit."""
    fitting = [t for t in _THREADS if 4 * kernels.counter_words(t, num_experts) <= _COUNTER_BYTES]
    return fitting[-1]


def _launcher(kernel, signature, device, threads, words=0):
    options = dict(launch_bounds=threads, shared_bytes=4 * words, dependent=True)
    return launcher(kernel, signature, device.index or 0, **options)


def _plan_one_launch(ids, num_experts):
    assignments, most = ids.numel(), _most_threads(num_experts)
    threads = next((t for t in _THREADS if t >= max(assignments, num_experts) and t < most), most)
    kernel = kernels.make_single_cta_kernel(num_experts, ids.shape[1], threads)
    signature = ID_TYPES[ids.dtype], *["int32*"] * 4, "int32", "int64", "int64"
    start = _launcher(kernel, signature, ids.device, threads, kernels.counter_words(threads, num_experts))
    sizes = assignments, *ids.stride()
    return lambda *pointers: start(1, threads, None, *pointers, *sizes)


def _plan_three_launches(ids, num_experts):
    assignments, topk, threads = ids.numel(), ids.shape[1], _most_threads(num_experts)
    chunk = max(_MIN_CHUNK, num_experts, -(-assignments // _MAX_CHUNKS))
    num_chunks = assignments // chunk
    id_type, strides, start = ID_TYPES[ids.dtype], ("int64", "int64"), partial(_launcher, device=ids.device)
    count = start(
        kernels.make_count_chunks_kernel(num_experts, topk, threads),
        (id_type, "int32*", "int32", "int32", *strides),
        threads=threads,
        words=-(-num_experts // 4) * 4,
    )
    scan = start(
        kernels.make_scan_chunks_kernel(num_experts, threads), (*["int32*"] * 3, "int32", "int32"), threads=threads
    )
    assign = start(
        kernels.make_assign_chunks_kernel(num_experts, topk, threads),
        (id_type, *["int32*"] * 3, "int32", "int32", *strides),
        threads=threads,
        words=kernels.counter_words(threads, num_experts),
    )
    sizes = assignments, chunk, *ids.stride()

    def launch(ids, seqlens, cu_seqlens, gather_indices, inverse_indices):
        count(num_chunks, threads, None, ids, inverse_indices, *sizes)
        scan(1, threads, None, inverse_indices, seqlens, cu_seqlens, num_chunks, chunk)
        assign(num_chunks, threads, None, ids, cu_seqlens, gather_indices, inverse_indices, *sizes)

    return launch


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
