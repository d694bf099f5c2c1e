"""Checks of the arguments of ``Buffer``. Every error names the argument, its value and what is allowed.

Every call makes these checks, so each tests all that is usual in one expression, and looks for the words only after
that has failed.
"""

import torch
import torch.distributed as dist

from moe_numba.expert_parallel import reference
from moe_numba.expert_parallel.common.buffer_layout import MAX_CHANNELS, MAX_ROWS, MAX_TOPK
from moe_numba.expert_parallel.ranks.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.ranks.transport import Transport
from moe_numba.expert_parallel.rings.config import TOPK_IDX_POINTERS, Config
from moe_numba.expert_parallel.rings.output_buffer import SymmetricOutput
from moe_numba.runtime.validate import (
    check_aligned,
    check_dtype,
    check_has_memory,
    check_int,
    check_no_grad,
    check_tensor,
    reasons,
)

_FP8, _SCALE_TYPES = torch.float8_e4m3fn, (torch.float32, torch.int32)
_BOOL, _INT32, _FLOAT32, _TOPK_IDX = (torch.bool,), (torch.int32,), (torch.float32,), tuple(TOPK_IDX_POINTERS)
# Reasons for shapes. They are constants, so that a call costs nothing more.
_PER_TOKEN, _PER_RANK = ("x has {} rows",), ("the group has {} ranks",)
_TOKENS_RANKS, _SENT_RANKS = _PER_TOKEN + _PER_RANK, ("handle's send_head has {} rows", *_PER_RANK)
_RANKS_RANKS, _RANKS_CHANNELS = _PER_RANK * 2, (*_PER_RANK, "handle's channel_prefix_matrix has {} columns")
_AS_TOPK_IDX = "topk_idx has {} rows", "topk_idx has {} columns"


def check_group(group):
    """Raise for what is neither a process group nor a transport."""
    if isinstance(group, Transport) or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    if group is None:
        raise ValueError("group is None; it must be a ProcessGroup or a transport")
    raise TypeError(f"group is {type(group).__name__}; it must be a ProcessGroup or a transport")


def check_timeout(seconds):
    """Raise for a timeout that is not a finite positive number of seconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout is {seconds!r}; it must be a number of seconds")
    if not 1e-9 <= seconds < 1e9:  # kernels count nanoseconds
        raise ValueError(f"timeout is {seconds} seconds; it must be at least 1e-9 and less than 1e9")


def check_config(config):
    """Raise for what is not a `Config`."""
    if not isinstance(config, Config):
        raise TypeError(f"config is {config!r}; it must be a Config")


def check_previous_event(previous_event):
    """Return the `EventHandle` to wait for, or None."""
    if isinstance(previous_event, EventOverlap):
        return previous_event.event
    if previous_event is not None and not isinstance(previous_event, EventHandle):
        found = type(previous_event).__name__
        raise TypeError(f"previous_event is {found}; it must be an EventOverlap, an EventHandle or None")
    return previous_event


def _check(name, tensor, shape, dtypes, device, because):
    """Raise for what is not a contiguous tensor of this shape, one of these dtypes and this device.

    ``because`` has the reasons for the shape, as of `check_tensor`.
    """
    if not (
        type(tensor) is torch.Tensor
        and tensor.dtype in dtypes
        and tensor.shape == shape
        and tensor.device == device
        and tensor.is_contiguous()
    ):
        if not isinstance(tensor, torch.Tensor):
            wanted = " or ".join(map(str, dtypes))
            raise TypeError(f"{name} is {type(tensor).__name__}; it must be a tensor {shape} of {wanted}")
        layout = dict(shape=shape, because=because, contiguous=True)
        check_tensor(name, tensor, dtype=dtypes, device=(device, "the buffer"), **layout)
        check_has_memory(name, tensor)


def _check_rows(name, tensor, dtype, device):
    """Raise for what is not a contiguous matrix whose rows consist of 16-byte vectors; return its shape."""
    if not (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.dim() == 2
        and tensor.device == device
        and tensor.is_contiguous()
    ):
        wanted = ("tokens", "hidden")
        check_tensor(name, tensor, dtype=dtype, shape=wanted, contiguous=True, device=(device, "the buffer"))
        check_has_memory(name, tensor)
    if tensor.requires_grad:
        check_no_grad(name, tensor, "Buffer")
    rows, hidden = tensor.shape
    size_bytes = hidden * dtype.itemsize
    if size_bytes % 16 or not size_bytes or tensor.data_ptr() % 16:
        _check_row_bytes(f"{name} has", size_bytes)
        check_aligned(name, tensor)
    return rows, hidden


def _check_row_bytes(subject, size_bytes):
    if size_bytes == 0 or size_bytes % 16:
        raise ValueError(f"{subject} rows of {size_bytes} bytes; it must be a multiple of 16, and not 0")


def check_scaled_pair(x):
    """Raise for a tuple that is not (values, scales)."""
    if len(x) != 2:
        raise ValueError(f"x is a tuple of {len(x)}; it must be a tensor, or values and scales")


def check_dispatch_input(x, scales, device):
    """Check the rows of a dispatch, and their scales; return the number of rows, and their size in elements."""
    if scales is None:
        return _check_rows("x", x, torch.bfloat16, device)
    tokens, hidden = _check_rows("x", x, _FP8, device)
    if not isinstance(scales, torch.Tensor):
        raise TypeError(f"x's scales are {type(scales).__name__}; they must be a tensor")
    if scales.dtype not in _SCALE_TYPES:
        raise TypeError(f"x's scales are {scales.dtype}; they must be torch.float32 or torch.int32")
    max_scales = hidden // 4
    if scales.dim() != 2 or scales.shape[0] != tokens or scales.device != device or scales.shape[1] > max_scales:
        raise ValueError(
            f"x's scales have shape {tuple(scales.shape)} on {scales.device}; they must be [{tokens}, n], n at most "
            f"{max_scales}, on {device}, as x has {tokens} rows and {hidden} columns"
        )
    if scales.requires_grad:
        check_no_grad("x's scales", scales, "Buffer")
    if type(scales) is not torch.Tensor:
        check_has_memory("x's scales", scales)
    return tokens, hidden


def check_new_output(num_rows, hidden, dtype, num_scales, num_topk, scale_dtype, topk_idx_dtype):
    """Check the arguments of ``new_output``; return its numbers as ints: num_rows, hidden, num_scales, num_topk."""
    num_rows = check_int("num_rows", num_rows, 1, MAX_ROWS)
    hidden = check_int("hidden", hidden, 1, 1 << 20)
    check_dtype("dtype", dtype, (torch.bfloat16, _FP8))
    _check_row_bytes(f"hidden is {hidden}, which makes", hidden * dtype.itemsize)
    num_scales = check_int("num_scales", num_scales, 0, 0 if dtype == torch.bfloat16 else hidden // 4)
    check_dtype("scale_dtype", scale_dtype, _SCALE_TYPES)
    check_dtype("topk_idx_dtype", topk_idx_dtype, _TOPK_IDX)
    return num_rows, hidden, num_scales, check_int("num_topk", num_topk, 0, MAX_TOPK)


def check_output(out, transport, x, scales, topk_idx, num_rows):
    """Check the `SymmetricOutput` of a dispatch; ``num_rows`` is 0 if the number of rows is not known."""
    if not isinstance(out, SymmetricOutput):
        raise TypeError(f"out is {type(out).__name__}; it must be a SymmetricOutput from new_output")
    if out.transport is not transport or out.x is None:
        raise ValueError("out belongs to another buffer, or was closed; it must be from this buffer's new_output")
    if out.num_rows < num_rows:
        raise ValueError(f"out has capacity for {out.num_rows} rows; {num_rows} will arrive")
    if out.x.dtype != x.dtype or out.x.shape[1] != x.shape[1]:
        raise ValueError(f"out has rows of {out.x.shape[1]} {out.x.dtype}; x has {x.shape[1]} {x.dtype}")
    of_out, of_x = ((s.shape[1], s.dtype) for s in (out.scales, out.scales if scales is None else scales))
    if of_out != of_x:
        raise ValueError(f"out has {of_out[0]} scales of {of_out[1]} per row; x has {of_x[0]} of {of_x[1]}")
    ids = out.topk_idx if topk_idx is None else topk_idx
    if (out.topk_idx.shape[1], out.topk_idx.dtype) != (ids.shape[1], ids.dtype):
        raise ValueError(
            f"out has space for {out.topk_idx.shape[1]} experts per row, of {out.topk_idx.dtype}; topk_idx has "
            f"{ids.shape[1]} of {ids.dtype}"
        )


def _num_columns(tensor):
    return tensor.shape[-1] if isinstance(tensor, torch.Tensor) and tensor.dim() else 0


def check_topk(topk_idx, topk_weights, tokens, device):
    """Check the experts and weights of a dispatch; return the number of experts per token, 0 if none are given."""
    if topk_idx is None and topk_weights is None:
        return 0
    if topk_idx is None or topk_weights is None:
        raise ValueError("topk_idx and topk_weights must be given together, or neither")
    topk = _num_columns(topk_idx)
    shape = tokens, topk
    _check("topk_idx", topk_idx, shape, _TOPK_IDX, device, _PER_TOKEN)
    check_int("topk_idx' number of columns", topk, 1, MAX_TOPK)
    _check_weights(topk_weights, shape, device, _AS_TOPK_IDX)
    return topk


def _check_weights(topk_weights, shape, device, because):
    _check("topk_weights", topk_weights, shape, _FLOAT32, device, because)
    if topk_weights.requires_grad:
        check_no_grad("topk_weights", topk_weights, "Buffer")


def check_layout(per_rank, per_expert, is_in_rank, tokens, ranks, device):
    """Check the results of `get_dispatch_layout`; return the number of experts of a rank."""
    experts = _num_columns(per_expert)
    _check("num_tokens_per_rank", per_rank, (ranks,), _INT32, device, _PER_RANK)
    _check("is_token_in_rank", is_in_rank, (tokens, ranks), _BOOL, device, _TOKENS_RANKS)
    _check("num_tokens_per_expert", per_expert, (experts,), _INT32, device, ())
    if experts == 0 or experts % ranks:
        raise ValueError(
            f"num_tokens_per_expert has {experts} entries; it must have a multiple of {ranks}, the number of ranks"
        )
    return experts // ranks


def check_layout_of(topk_idx, per_rank, per_expert, is_in_rank):
    """Raise for a layout that is not that of ``topk_idx``. It reads the tensors, so only the simulator calls it."""
    right = reference.dispatch_layout(topk_idx, per_rank.numel(), per_expert.numel())
    for name, what, given, wanted in (
        ("is_token_in_rank", "token", is_in_rank, right[2]),
        ("num_tokens_per_expert", "expert", per_expert, right[1]),
        ("num_tokens_per_rank", "rank", per_rank, right[0]),
    ):
        if not torch.equal(given, wanted):
            first = int((given != wanted).view(len(given), -1).any(1).nonzero()[0])
            raise ValueError(
                f"{name} is {given[first].tolist()} for {what} {first}; by topk_idx it is {wanted[first].tolist()}: "
                "num_tokens_per_rank, num_tokens_per_expert and is_token_in_rank must be the layout of topk_idx, from "
                "get_dispatch_layout"
            )


def check_handle(handle, ranks, device, tokens=None):
    """Check the handle of a dispatch of ``tokens`` tokens, if their number is known; return tokens, channels, rows."""
    try:
        rank_prefix, channel_prefix, recv_channel_prefix, src_idx, is_in_rank, send_head = handle
        channels, rows, sent = _num_columns(channel_prefix), src_idx.numel(), send_head.numel() // ranks
    except (TypeError, ValueError, AttributeError):
        raise TypeError("handle must be the tuple of 6 tensors that dispatch returned") from None
    if tokens is not None and tokens != sent:
        raise ValueError(
            f"x has {tokens} tokens; handle is from a dispatch of {sent}: its is_token_in_rank has shape "
            f"{(sent, ranks)}"
        )
    tokens = sent
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"handle's channel_prefix_matrix has {channels} channels; 1 to {MAX_CHANNELS} are allowed")
    per_channel, per_token = (ranks, channels), (tokens, ranks)
    _check("handle's rank_prefix_matrix", rank_prefix, (ranks, ranks), _INT32, device, _RANKS_RANKS)
    _check("handle's channel_prefix_matrix", channel_prefix, per_channel, _INT32, device, _PER_RANK)
    _check("handle's recv_channel_prefix_matrix", recv_channel_prefix, per_channel, _INT32, device, _RANKS_CHANNELS)
    _check("handle's recv_src_idx", src_idx, (rows,), _INT32, device, ())
    _check("handle's is_token_in_rank", is_in_rank, per_token, _BOOL, device, _SENT_RANKS)
    _check("handle's send_head", send_head, per_token, _INT32, device, _SENT_RANKS)
    return tokens, channels, rows


def as_biases(bias):
    """Return the biases of a combine as a tuple of 0 to 2 tensors."""
    if bias is None:
        return ()
    biases = bias if isinstance(bias, tuple) else (bias,)
    if len(biases) > 2:
        raise ValueError(f"bias has {len(biases)} tensors; at most 2 are allowed")
    return tuple(b for b in biases if b is not None)


def check_combine_input(x, topk_weights, biases, num_rows, tokens, device):
    """Check the rows, weights and biases of a combine; return the elements of a row, and the weights per row."""
    rows, hidden = _check_rows("x", x, torch.bfloat16, device)
    if rows != num_rows:
        raise ValueError(f"x has {rows} rows; the handle is for {num_rows}")
    topk = 0
    if topk_weights is not None:
        topk = _num_columns(topk_weights)
        _check_weights(topk_weights, (num_rows, topk), device, _PER_TOKEN)
        check_int("topk_weights' number of columns", topk, 1, MAX_TOPK)
    for i, bias in enumerate(biases):
        if _check_rows(f"bias {i}", bias, torch.bfloat16, device) != (tokens, hidden):
            why = reasons(bias.shape, (tokens, hidden), ("handle is of {} tokens", "x has {} columns"))
            raise ValueError(f"bias {i} has shape {tuple(bias.shape)}; it must be {(tokens, hidden)}{why}")
    return hidden, topk
