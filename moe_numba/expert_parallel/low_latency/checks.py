"""Checks of the arguments of low-latency calls. Every error names the argument, its value and what is allowed."""

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import MAX_TOPK
from moe_numba.expert_parallel.low_latency.layout import MAX_LOCAL_EXPERTS, SCALE_GROUP
from moe_numba.expert_parallel.rings.config import TOPK_IDX_POINTERS
from moe_numba.runtime.launch import address
from moe_numba.runtime.recording import current_recording
from moe_numba.runtime.validate import (
    check_aligned,
    check_choice,
    check_dtype,
    check_has_memory,
    check_int,
    check_no_grad,
    check_tensor,
)

PROTOCOLS = "lamport", "flags"
# Reasons for shapes
OF_RANKS, _AS_TOPK_IDX = ("the group has {} ranks",), ("topk_idx has {} rows", "topk_idx has {} columns")
_OF_SLOTS = "the ranks have num_max_dispatch_tokens_per_rank slots each, {} together"
_OF_EXPERT_ROWS = "a rank has {} experts", _OF_SLOTS, "hidden is {}"
_OF_SLOT_ROWS = _OF_SLOTS, "topk_idx has {} columns"
_MAX_TOKENS, _MAX_HIDDEN, _MAX_WORDS = 1 << 16, 1 << 16, (1 << 31) - 1


def check_sizes(num_ranks, max_tokens, hidden, topk, num_experts, scales, combines_fp8=False):
    """Return the sizes as ints: max_tokens, hidden, topk and num_experts."""
    max_tokens = check_int("num_max_dispatch_tokens_per_rank", max_tokens, 1, _MAX_TOKENS)
    hidden = check_int("hidden", hidden, 1, _MAX_HIDDEN)
    multiple = {None: 8, "ue8m0": 4 * SCALE_GROUP}.get(scales, SCALE_GROUP)
    if hidden % multiple:
        kind = "bfloat16" if scales is None else f"FP8 with {scales} scales"
        raise ValueError(f"hidden is {hidden}; with {kind} it must be a multiple of {multiple}")
    if combines_fp8 and hidden % SCALE_GROUP:
        raise ValueError(f"hidden is {hidden}; with sums in FP8 it must be a multiple of {SCALE_GROUP}")
    topk = check_int("topk_idx' number of columns", topk, 1, MAX_TOPK)
    num_experts = check_int("num_experts", num_experts, 1, num_ranks * MAX_LOCAL_EXPERTS)
    if num_experts % num_ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of {num_ranks}, the number of ranks")
    return max_tokens, hidden, topk, num_experts


def check_protocol(protocol):
    """Return the name of a protocol."""
    check_choice("protocol", protocol, PROTOCOLS)
    return protocol


def check_topk_idx_dtype(name, dtype):
    """Raise for what kernels cannot read experts from; ``name`` is the argument's."""
    check_dtype(name, dtype, tuple(TOPK_IDX_POINTERS))


def check_shape(shape, shared_bytes):
    """Raise for a shape whose offsets exceed 31 bits, or whose metadata exceeds shared memory."""
    if max(shape.dispatch_words, shape.combine_words) > _MAX_WORDS:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank is {shape.max_tokens}; with {shape.num_ranks} ranks and hidden "
            f"{shape.hidden} the buffer would exceed 8 GiB"
        )
    if shape.shared_bytes > shared_bytes:
        bits = 4 * shape.metadata_words * 8 + shape.local_experts  # of a token
        most = (shared_bytes - 4 * shape.topk) * 8 // (bits * shape.num_ranks * 32) * 32
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank is {shape.max_tokens}; with {shape.num_ranks} ranks and "
            f"top-{shape.topk} of {shape.num_experts} at most {most} are allowed, whose experts fit in shared memory"
        )


def _check(name, tensor, dtype, shape, device, because, alignment=4):
    """Raise for what is not a contiguous tensor of this dtype, shape and device, or requires grad.

    ``because`` has the reasons for the shape, as of `check_tensor`.
    """
    if (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.device == device
        and tensor.is_contiguous()
        and tensor.data_ptr() % alignment == 0
        and not tensor.requires_grad
    ):
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; it must be a tensor {tuple(shape)} of {dtype}")
    layout = dict(shape=tuple(shape), because=because, contiguous=True)
    check_tensor(name, tensor, dtype=dtype, device=(device, "the buffer"), **layout)
    check_has_memory(name, tensor)
    check_no_grad(name, tensor, "Buffer")
    if tensor.data_ptr() % alignment:
        check_aligned(name, tensor)


def make_addresses_of(shape, input_shape, topk_idx_dtype, has_weights, device, placeholder):
    """Make ``addresses_of(x, topk_idx, topk_weights)``: their addresses and the number of tokens.

    It returns None if an input is not a usual one: `check_dispatch` or `check_combine` then finds out why. These checks
    are most of the host time of a prepared exchange, so they are one expression, without calls of Python functions.

    Parameters
    ----------
    shape : LowLatencyShape
    input_shape : tuple of int
        Of ``x``; empty if ``x`` has a row for each token.
    """
    index = device.index if device.type == "cuda" else -1
    hidden, topk, max_tokens, tensor_type = shape.hidden, shape.topk, shape.max_tokens, torch.Tensor
    rows_dtype, weights_dtype = torch.bfloat16, torch.float32

    def addresses_of(x, topk_idx, topk_weights):
        if not (
            type(x) is tensor_type
            and type(topk_idx) is tensor_type
            and x.dtype is rows_dtype
            and topk_idx.dtype is topk_idx_dtype
            and len(size := topk_idx.shape) == 2
            and size[1] == topk
            and 0 < (tokens := size[0]) <= max_tokens
            and x.shape == (input_shape or (tokens, hidden))
            and x.get_device() == topk_idx.get_device() == index
            and x.is_contiguous()
            and topk_idx.is_contiguous()
            and not x.requires_grad
        ):
            return None
        rows, experts, weights = x.data_ptr(), topk_idx.data_ptr(), placeholder
        if has_weights:
            if not (
                type(topk_weights) is tensor_type
                and topk_weights.dtype is weights_dtype
                and topk_weights.shape == size
                and topk_weights.get_device() == index
                and topk_weights.is_contiguous()
                and not topk_weights.requires_grad
                and (weights := topk_weights.data_ptr())
            ):
                return None
        elif topk_weights is not None:
            return None
        if not rows or not experts or rows % 16 or experts % 4 or (has_weights and weights % 4):
            return None
        if simulator.ENABLED:
            return address(x), address(topk_idx), address(topk_weights) if has_weights else placeholder, tokens
        return rows, experts, weights, tokens

    return addresses_of


def check_num_tokens(exchange, name, tensor):
    """Return the number of tokens of an input; it may be 0."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; it must be a tensor")
    shape = tensor.shape
    if len(shape) != 2:
        raise ValueError(f"{name} has shape {tuple(shape)}; it must have two dimensions")
    tokens, most = shape[0], exchange.shape.max_tokens
    if tokens > most:
        raise ValueError(f"{name} has {tokens} tokens; at most {most} (num_max_dispatch_tokens_per_rank) are allowed")
    return tokens


def _check_routing(exchange, tokens, topk_idx, topk_weights, has_weights):
    shape, device = exchange.shape, exchange.transport.device
    sizes, because = (tokens, shape.topk), ("x has {} rows", "num_topk is {}")
    _check("topk_idx", topk_idx, exchange.topk_idx_dtype, sizes, device, because)
    if has_weights:
        _check("topk_weights", topk_weights, torch.float32, sizes, device, _AS_TOPK_IDX)
    else:
        check_no_weights(topk_weights, shape.expert_major)


def check_no_weights(topk_weights, expert_major):
    """Raise for weights that the other operation takes."""
    if topk_weights is not None:
        where = "combine" if expert_major else "dispatch"
        raise ValueError(f"topk_weights are given; with expert_major {expert_major} pass them to {where}")


def check_dispatch(exchange, x, topk_idx, topk_weights):
    """Check the inputs of a dispatch."""
    shape = exchange.shape
    tokens = check_num_tokens(exchange, "x", x)
    _check("x", x, torch.bfloat16, (tokens, shape.hidden), exchange.transport.device, ("", "hidden is {}"), 16)
    _check_routing(exchange, tokens, topk_idx, topk_weights, not shape.expert_major)


def check_combine(exchange, x, slot_rows, topk_idx, topk_weights):
    """Check the inputs of a combine."""
    shape, device = exchange.shape, exchange.transport.device
    tokens = check_num_tokens(exchange, "topk_idx", topk_idx)
    _check("x", x, torch.bfloat16, exchange.input_shape, device, _OF_EXPERT_ROWS[not shape.expert_major :], 16)
    sizes = shape.slots, shape.rows_per_slot
    _check("handle's slot_rows", slot_rows, torch.int32, sizes, device, _OF_SLOT_ROWS[: 1 + shape.expert_major])
    _check_routing(exchange, tokens, topk_idx, topk_weights, shape.expert_major)


def check_statistics(name, tensor, dtype, size, device, because):
    """Check an optional tensor that a call adds to."""
    if tensor is not None:
        _check(name, tensor, dtype, (size,), device, because, dtype.itemsize)


def check_mask_status(tensor, num_ranks, device):
    """Check the tensor that the mask of the ranks is written to."""
    _check("mask_status", tensor, torch.int32, (num_ranks,), device, OF_RANKS)


def check_combined(out, tokens, hidden, device):
    """Check the ``out`` of a combine."""
    _check("out", out, torch.bfloat16, (tokens, hidden), device, ("topk_idx has {} rows", "x has {} columns"), 16)


def set_received(slot_rows, is_received):
    """Note for `check_received` whether the kernel that writes the rows of a handle was launched."""
    slot_rows._is_received = is_received


def check_received(slot_rows):
    """Raise for the rows of a handle whose hook was not called: nothing has been written to them."""
    if not getattr(slot_rows, "_is_received", True):
        raise RuntimeError("handle's rows have not been received; call the hook that low_latency_dispatch returned")


def note_experts(slot_rows, topk_idx):
    """Note for `check_experts` with which experts the tokens of a handle were sent; only in the simulator.

    Not those of a prepared dispatch, which may send others unseen, nor those that a queued kernel may write.
    """
    if simulator.ENABLED and current_recording() is None and not simulator.has_queued():
        slot_rows._topk_idx = topk_idx.clone()


def check_experts(slot_rows, topk_idx, num_experts):
    """Raise for a combine with other experts than those of the dispatch that returned the handle, if they are known."""
    if (sent := getattr(slot_rows, "_topk_idx", None)) is not None:
        check_same_experts(topk_idx, sent, num_experts)


def check_same_experts(topk_idx, sent, num_experts):
    """Raise unless combine has the experts of dispatch; all ids that are no expert are alike."""
    if len(topk_idx) != len(sent):
        raise ValueError(
            f"topk_idx has {len(topk_idx)} tokens; dispatch has sent {len(sent)}, and both must be the same"
        )
    given, wanted = (ids.where((ids >= 0) & (ids < num_experts), -1) for ids in (topk_idx, sent))
    if not torch.equal(given, wanted):
        token = int((given != wanted).any(1).nonzero()[0])
        raise ValueError(
            f"topk_idx is {topk_idx[token].tolist()} for token {token}; dispatch has sent it to "
            f"{sent[token].tolist()}, and both must be the same"
        )


def check_handle(handle):
    """Return the parts of a handle of low_latency_dispatch."""
    if not (
        isinstance(handle, tuple)
        and len(handle) == 6
        and type(handle[2]) is type(handle[3]) is type(handle[4]) is int
        and isinstance(handle[5], torch.Tensor)
        and handle[5].dim() == 2
    ):
        raise ValueError(f"handle is {type(handle).__name__}; it must be the tuple of 6 from low_latency_dispatch")
    return handle
