"""What ``Buffer`` refuses, each with a sentence that names the argument, what it was and what is allowed."""

import torch

from moe_numba.expert_parallel.config import Config
from moe_numba.expert_parallel.kernels.buffer_layout import MOST_CHANNELS, MOST_ROWS, MOST_TOPK
from moe_numba.expert_parallel.output_buffer import Output

_SCALE_TYPES = (torch.float32, torch.int32)


def number(name, value, least, most):
    """Refuse what is no integer in a range."""
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}; it must be an int")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; {least} to {most} are allowed")


def timeout(seconds):
    """Refuse what is no number of seconds that ends."""
    if not isinstance(seconds, (int, float)):
        raise TypeError(f"timeout is {seconds!r}; it must be a number of seconds")
    if not 0 < seconds < 1e9:
        raise ValueError(f"timeout is {seconds} seconds; it must be more than 0 and less than 1e9")


def config(given):
    """Refuse what is no `Config`; gives it."""
    if not isinstance(given, Config):
        raise TypeError(f"config is {given!r}; it must be a Config")
    return given


def pair(x):
    """Refuse a tuple that is not rows and their scales; gives it."""
    if len(x) != 2:
        raise ValueError(f"x is a tuple of {len(x)}; it must be a tensor, or values and scales")
    return x


def tensor(name, given, shape, dtype, device):
    """Refuse what is not a contiguous tensor of this shape, type and device."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} is {type(given).__name__}; it must be a tensor {shape} of {dtype}")
    if given.dtype != dtype:
        raise TypeError(f"{name} is {given.dtype}; it must be {dtype}")
    if given.shape != shape or not given.is_contiguous() or given.device != device:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}, strides {given.stride()}, on {given.device}; it must be "
            f"{shape}, contiguous, on {device}"
        )


def matrix(name, given, dtypes, device):
    """Refuse what is not a matrix of rows that bulk copies can take."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} is {type(given).__name__}; it must be a tensor")
    if given.dtype not in dtypes:
        raise TypeError(f"{name} is {given.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if given.dim() != 2 or not given.is_contiguous() or given.device != device:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}, strides {given.stride()}, on {given.device}; it must be "
            f"[tokens, hidden], contiguous, on {device}"
        )
    _row(f"{name} has", given.shape[1] * given.element_size())
    if given.data_ptr() % 16:
        raise ValueError(f"{name} starts at address {given.data_ptr():#x}; it must be a multiple of 16")


def _row(what, size_bytes):
    if size_bytes == 0 or size_bytes % 16:
        raise ValueError(f"{what} rows of {size_bytes} bytes; it must be a multiple of 16, and not 0")


def rows(x, scales, device):
    """The rows of a dispatch, and their scales."""
    if scales is None:
        matrix("x", x, (torch.bfloat16,), device)
        return
    matrix("x", x, (torch.float8_e4m3fn,), device)
    if not isinstance(scales, torch.Tensor):
        raise TypeError(f"x's scales are {type(scales).__name__}; they must be a tensor")
    if scales.dtype not in _SCALE_TYPES:
        raise TypeError(f"x's scales are {scales.dtype}; they must be torch.float32 or torch.int32")
    most = x.shape[1] // 4
    if scales.dim() != 2 or scales.shape[0] != x.shape[0] or scales.device != device or scales.shape[1] > most:
        raise ValueError(
            f"x's scales have shape {tuple(scales.shape)} on {scales.device}; they must be [{len(x)}, n], n at most "
            f"{most}, on {device}"
        )


def new_output(num_rows, hidden, dtype, num_scales, num_topk, scale_dtype):
    """What an `Output` is to be made for."""
    number("num_rows", num_rows, 1, MOST_ROWS)
    number("hidden", hidden, 1, 1 << 20)
    if dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise TypeError(f"dtype is {dtype}; it must be torch.bfloat16 or torch.float8_e4m3fn")
    _row(f"hidden is {hidden}, which makes", hidden * dtype.itemsize)
    number("num_scales", num_scales, 0, 0 if dtype == torch.bfloat16 else hidden // 4)
    if scale_dtype not in _SCALE_TYPES:
        raise TypeError(f"scale_dtype is {scale_dtype}; it must be torch.float32 or torch.int32")
    number("num_topk", num_topk, 0, MOST_TOPK)


def output(out, transport, x, scales, topk, to_come):
    """The `Output` that a dispatch is given, for so many rows if that is known."""
    if not isinstance(out, Output):
        raise TypeError(f"out is {type(out).__name__}; it must be what new_output gave")
    if out.transport is not transport or out.x is None:
        raise ValueError("out is of another buffer, or was closed; it must be what this buffer's new_output gave")
    if out.num_rows < to_come:
        raise ValueError(f"out has room for {out.num_rows} rows; {to_come} are to come")
    if out.x.dtype != x.dtype or out.x.shape[1] != x.shape[1]:
        raise ValueError(f"out has rows of {out.x.shape[1]} {out.x.dtype}; x has {x.shape[1]} {x.dtype}")
    of_out, of_x = ((s.shape[1], s.dtype) for s in (out.scales, out.scales if scales is None else scales))
    if of_out != of_x:
        raise ValueError(f"out has {of_out[0]} scales of {of_out[1]} for a row; x has {of_x[0]} of {of_x[1]}")
    if topk not in (0, out.topk_idx.shape[1]):
        raise ValueError(f"out has room for {out.topk_idx.shape[1]} experts of a row; topk_idx has {topk}")


def _columns(given):
    return given.shape[-1] if isinstance(given, torch.Tensor) and given.dim() else 0


def travellers(topk_idx, topk_weights, x):
    """What travels with the rows."""
    if (topk_idx is None) != (topk_weights is None):
        raise ValueError("topk_idx and topk_weights must be given together, or neither")
    if topk_idx is None:
        return
    shape = (x.shape[0], _columns(topk_idx))
    tensor("topk_idx", topk_idx, shape, torch.int64, x.device)
    number("topk_idx' number of columns", shape[1], 1, MOST_TOPK)
    tensor("topk_weights", topk_weights, shape, torch.float32, x.device)


def layout(per_rank, per_expert, is_in_rank, tokens, ranks, device):
    """What `get_dispatch_layout` gave."""
    tensor("num_tokens_per_rank", per_rank, (ranks,), torch.int32, device)
    tensor("is_token_in_rank", is_in_rank, (tokens, ranks), torch.bool, device)
    experts = len(per_expert) if isinstance(per_expert, torch.Tensor) and per_expert.dim() == 1 else 0
    tensor("num_tokens_per_expert", per_expert, (experts,), torch.int32, device)
    if experts == 0 or experts % ranks:
        raise ValueError(f"num_tokens_per_expert has {experts} entries; it must have a multiple of {ranks}")


def handle(given, ranks, device, tokens=None):
    """What a dispatch gave, of so many tokens if that is known."""
    if not isinstance(given, tuple) or len(given) != 6 or not all(isinstance(part, torch.Tensor) for part in given):
        raise TypeError("handle must be the tuple of 6 tensors that dispatch gave")
    rank_prefix, channel_prefix, recv_channel_prefix, source, is_in_rank, send_head = given
    tokens, channels = send_head.numel() // ranks if tokens is None else tokens, _columns(channel_prefix)
    if not 1 <= channels <= MOST_CHANNELS:
        raise ValueError(f"handle's channel_prefix_matrix has {channels} channels; 1 to {MOST_CHANNELS} are allowed")
    tensor("handle's rank_prefix_matrix", rank_prefix, (ranks, ranks), torch.int32, device)
    tensor("handle's channel_prefix_matrix", channel_prefix, (ranks, channels), torch.int32, device)
    tensor("handle's recv_channel_prefix_matrix", recv_channel_prefix, (ranks, channels), torch.int32, device)
    tensor("handle's recv_src_idx", source, (source.numel(),), torch.int32, device)
    tensor("handle's is_token_in_rank", is_in_rank, (tokens, ranks), torch.bool, device)
    tensor("handle's send_head", send_head, (tokens, ranks), torch.int32, device)


def biases(given):
    """The biases of a combine, as a tuple."""
    if given is None:
        return ()
    given = given if isinstance(given, tuple) else (given,)
    if len(given) > 2:
        raise ValueError(f"bias has {len(given)} tensors; at most 2 are allowed")
    return tuple(b for b in given if b is not None)


def returning(x, topk_weights, biases, received, tokens, device):
    """The rows of a combine, and what comes with them."""
    matrix("x", x, (torch.bfloat16,), device)
    if x.shape[0] != received:
        raise ValueError(f"x has {len(x)} rows; the handle is for {received}")
    if topk_weights is not None:
        topk = _columns(topk_weights)
        tensor("topk_weights", topk_weights, (received, topk), torch.float32, device)
        number("topk_weights' number of columns", topk, 1, MOST_TOPK)
    for i, bias in enumerate(biases):
        matrix(f"bias {i}", bias, (torch.bfloat16,), device)
        if bias.shape != (tokens, x.shape[1]):
            raise ValueError(f"bias {i} has shape {tuple(bias.shape)}; it must be {(tokens, x.shape[1])}")
