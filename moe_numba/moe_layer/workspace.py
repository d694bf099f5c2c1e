"""Preallocated intermediate results of ``fused_experts`` and ``fused_moe``."""

import math
from typing import Any, NamedTuple

import torch

from moe_numba import simulator
from moe_numba.moe_layer.weights import BF16, FP8, FP8_BLOCK, FP8_TENSOR, MXFP4, ExpertsShape, check_weights
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.validate import check_int

# With more rows per expert on average, tokens are stored in the order of the experts for the first grouped GEMM, which
# then takes less time than if it gathers them. Measured on an H200; with block scales CTAs share weights in pairs only
# if they do not gather, and permuting is as fast from 4 rows on.
MAX_GATHERED_AVERAGE = {BF16: 64, FP8_BLOCK: 2, FP8_TENSOR: 64, MXFP4: 12}
_MAX_TOKENS, _MAX_TOPK = 1 << 30, 64
_ALIGNMENT = 256  # bytes, of the intermediate results in their buffer


class Intermediates(NamedTuple):
    """Intermediate results of a call: tuples of tensors, or of their shapes and dtypes."""

    topk: Any  # weights and ids, outputs of the gate of `fused_moe`
    routing: Any  # outputs of `group_by_expert`
    x: Any  # x in FP8 and its scales, permuted or not; or x in bfloat16, if it is permuted
    gate_up: Any  # none if only an epilogue computes the activation; overwritten by ``rows``
    activated: Any  # with scales for FP8
    rows: Any  # one tensor, outputs of the experts

    @classmethod
    def within(cls, buffer: torch.Tensor, shape: ExpertsShape, tokens: int, topk: int) -> "Intermediates":
        """Return tensors for a call in a buffer of `num_bytes` bytes. ``gate_up`` and ``rows`` share memory."""
        described, places = describe(shape, tokens, topk), _places(shape, tokens, topk)[0]
        groups = (
            tuple(_view(buffer, place, *tensor) for tensor, place in zip(group, of_group, strict=True))
            for group, of_group in zip(described, places, strict=True)
        )
        return cls(*groups)


def num_bytes(shape: ExpertsShape, tokens: int, topk: int) -> int:
    """Return the bytes of a buffer for the intermediate results of a call; it grows with ``tokens``."""
    return _places(shape, tokens, topk)[1]


def _places(shape, tokens, topk):
    """Return the first byte of each intermediate result in a buffer, grouped as `Intermediates`, and all bytes."""
    described, places, first = describe(shape, tokens, topk)._asdict(), {}, 0
    shared = described.pop("gate_up"), described.pop("rows")  # at the end: the former is read before the latter
    for name, group in described.items():
        starts = []
        for tensor in group:
            starts.append(first)
            first += _bytes_of(*tensor)
        places[name] = tuple(starts)
    places["gate_up"], places["rows"] = ((first,) * len(group) for group in shared)
    return Intermediates(**places), first + max(_bytes_of(*tensor) for group in shared for tensor in group)


def _bytes_of(size, dtype):
    return -(-math.prod(size) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _view(buffer, first, size, dtype):
    """Return a tensor in a buffer of bytes; in the simulator, which then sees its bounds, with a storage of its own."""
    memory = buffer[first : first + math.prod(size) * dtype.itemsize]
    if simulator.ENABLED:
        memory = torch.from_numpy(memory.numpy())
    return memory.view(dtype).view(size)


def is_permuted(shape: ExpertsShape, rows: int) -> bool:
    """Return whether a call with this many assignments stores tokens in the order of the experts."""
    return rows > MAX_GATHERED_AVERAGE[shape.format] * shape.num_experts


def describe(shape: ExpertsShape, tokens: int, topk: int) -> Intermediates:
    """Return (shape, dtype) of each intermediate result of a call."""
    experts, hidden, intermediate, format_, _ = shape
    rows, bf16, f32, i32 = tokens * topk, torch.bfloat16, torch.float32, torch.int32
    permutes = is_permuted(shape, rows)
    x_rows = rows if permutes else tokens
    outputs_of_gate: Any = ((tokens, topk), f32), ((tokens, topk), i32)
    routing: Any = tuple((size, i32) for size in ((experts,), (experts + 1,), (rows,), (tokens, topk)))
    x: Any = (((rows, hidden), bf16),) if permutes else ()
    activated: Any = (((rows, intermediate), bf16),)
    gate_up: Any = (((rows, 2 * intermediate), bf16),) if format_ in (BF16, FP8_TENSOR) else ()
    if format_ == FP8_BLOCK:
        x = ((x_rows, hidden), FP8), ((x_rows, -(-hidden // FP8_SCALE_BLOCK)), f32)
        activated = ((rows, intermediate), FP8), ((rows, -(-intermediate // FP8_SCALE_BLOCK)), f32)
    elif format_ == FP8_TENSOR:
        x, activated = (((x_rows, hidden), FP8), ((rows,), f32)), (((rows, intermediate), FP8), ((rows,), f32))
    return Intermediates(outputs_of_gate, routing, x, gate_up, activated, (((rows, hidden), bf16),))


class ExpertsWorkspace:
    """Memory for the intermediate results of :func:`moe_numba.fused_experts` and :func:`moe_numba.fused_moe`.

    With a workspace and ``out`` a call neither allocates nor synchronises, so that a CUDA graph or
    :func:`moe_numba.prepare` can record it. Calls that use one workspace must be ordered, for example on one stream.
    Layers with weights of the same shapes can share a workspace.

    Parameters
    ----------
    max_tokens : int
        Most tokens of a call, 0 or more. The memory is proportional to ``max_tokens * topk``.
    topk : int
        Experts per token of every call, 1 to 64.
    w13, w2 : tensor
        Weights of a layer, as for :func:`moe_numba.fused_experts`; only their shapes, dtype and device matter.
    scaling : {"block", "tensor"}
        Of FP8 weights: whether they have a scale per 128 x 128 block or one per expert.

    Attributes
    ----------
    buffer : tensor [bytes], uint8
        The memory. A call with fewer tokens uses its beginning.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Examples
    --------
    >>> w13, w2 = torch.zeros(4, 2 * 64, 64).bfloat16(), torch.zeros(4, 64, 64).bfloat16()
    >>> workspace = moe_numba.ExpertsWorkspace(8, 2, w13, w2)  # for calls with up to 8 tokens
    >>> x, out = torch.ones(3, 64).bfloat16(), torch.empty(3, 64).bfloat16()
    >>> ids, weights = torch.tensor([[0, 1]] * 3, dtype=torch.int32), torch.full((3, 2), 0.5)
    >>> y = moe_numba.fused_experts(x, w13, w2, weights, ids, out=out, workspace=workspace)
    >>> y.abs().max().item()
    0.0
    """

    def __init__(self, max_tokens: int, topk: int, w13: torch.Tensor, w2: torch.Tensor, scaling: str = "block"):
        self.max_tokens = check_int("max_tokens", max_tokens, 0, _MAX_TOKENS)
        self.topk = check_int("topk", topk, 1, _MAX_TOPK)
        self.shape = check_weights(w13, w2, scaling)
        size = num_bytes(self.shape, self.max_tokens, self.topk)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=self.shape.device)
        self._views: dict = {}

    def check(self, tokens: int, topk: int, shape: ExpertsShape) -> None:
        """Raise for a call that the workspace is not for.

        :meta private:
        """
        if shape != self.shape:
            raise ValueError(f"workspace is for {self.shape}; the call has {shape}")
        if topk != self.topk or tokens > self.max_tokens:
            raise ValueError(
                f"workspace is for up to {self.max_tokens} tokens with {self.topk} experts each; the call has {tokens} "
                f"tokens with {topk}"
            )

    def intermediates(self, tokens: int) -> Intermediates:
        """Return the memory of a call with ``tokens`` tokens.

        :meta private:
        """
        return Intermediates.within(self.buffer, self.shape, tokens, self.topk)


def check_workspace(workspace, tokens, topk, shape):
    """Raise for a ``workspace`` argument that is none, or that the call does not fit."""
    if not isinstance(workspace, ExpertsWorkspace):
        raise TypeError(f"workspace is {type(workspace).__name__}; it must be an ExpertsWorkspace or None")
    workspace.check(tokens, topk, shape)
