"""Preallocated intermediate results of ``fused_experts`` and ``fused_moe``."""

from typing import NamedTuple

import torch

from moe_numba.runtime.outputs import remember
from moe_numba.runtime.validate import check_int, check_tensor

FP8, BLOCK = torch.float8_e4m3fn, 128
# With more rows per expert on average, tokens are stored in the order of the experts for the first grouped GEMM, which
# then takes less time than if it gathers them. On an H200 both are equal with this average.
MAX_GATHERED_AVERAGE = 64
_MAX_TOKENS, _MAX_TOPK = 1 << 30, 64


class ExpertsShape(NamedTuple):
    """Sizes of the experts of a layer."""

    num_experts: int
    hidden: int
    intermediate: int
    dtype: torch.dtype  # of the weights
    device: torch.device

    def __str__(self):
        return (
            f"{self.num_experts} experts of hidden {self.hidden} and intermediate {self.intermediate} in {self.dtype} "
            f"on {self.device}"
        )


class Intermediates(NamedTuple):
    """Intermediate results of a call."""

    topk: tuple[torch.Tensor, torch.Tensor]  # weights and ids, outputs of the gate of `fused_moe`
    routing: tuple[torch.Tensor, ...]  # outputs of `group_by_expert`
    x: tuple[torch.Tensor, ...]  # x in FP8 and its scales, permuted or not; or x in bfloat16, if it is permuted
    gate_up: torch.Tensor | None  # None for FP8, whose first grouped GEMM includes the activation
    activated: tuple[torch.Tensor, ...]  # with scales for FP8
    rows: torch.Tensor


def is_permuted(shape: ExpertsShape, rows: int) -> bool:
    """Return whether a call with this many assignments stores tokens in the order of the experts."""
    return rows > MAX_GATHERED_AVERAGE * shape.num_experts


def shape_of(w13, w2) -> ExpertsShape:
    """Return the sizes of experts with these weights."""
    return ExpertsShape(len(w13), w13.shape[2], w2.shape[2], w13.dtype, w13.device)


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
    w13 : tensor [experts, 2 * intermediate, hidden], bfloat16 or float8_e4m3fn
    w2 : tensor [experts, hidden, intermediate], same dtype
        Weights of a layer; only their shapes, dtype and device matter.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.
    """

    def __init__(self, max_tokens: int, topk: int, w13: torch.Tensor, w2: torch.Tensor):
        self.max_tokens = check_int("max_tokens", max_tokens, 0, _MAX_TOKENS)
        self.topk = check_int("topk", topk, 1, _MAX_TOPK)
        check_weights(w13, w2)
        self.shape = shape_of(w13, w2)
        self._whole = self._allocate()
        self._views: dict = {}

    def _allocate(self):
        experts, hidden, intermediate, dtype, device = self.shape
        tokens, rows = self.max_tokens, self.max_tokens * self.topk

        def new(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=device)

        sizes = (experts,), (experts + 1,), (rows,), (tokens, self.topk)
        routing = tuple(new(*size, dtype=torch.int32) for size in sizes)
        topk = new(tokens, self.topk, dtype=torch.float32), new(tokens, self.topk, dtype=torch.int32)
        if dtype != FP8:
            x = (new(rows, hidden),) if is_permuted(self.shape, rows) else ()
            gate_up, activated = new(rows, 2 * intermediate), (new(rows, intermediate),)
            return Intermediates(topk, routing, x, gate_up, activated, new(rows, hidden))

        def quantised(rows, columns):
            return new(rows, columns, dtype=FP8), new(rows, -(-columns // BLOCK), dtype=torch.float32)

        x = quantised(rows if is_permuted(self.shape, rows) else tokens, hidden)
        activated = quantised(rows, intermediate)
        return Intermediates(topk, routing, x, None, activated, new(rows, hidden))

    def check(self, tokens: int, topk: int, shape: ExpertsShape) -> None:
        """Refuse a call that the workspace is not for."""
        if shape != self.shape:
            raise ValueError(f"workspace is for {self.shape}; the call has {shape}")
        if topk != self.topk or tokens > self.max_tokens:
            raise ValueError(
                f"workspace is for up to {self.max_tokens} tokens with {self.topk} experts each; the call has {tokens} "
                f"tokens with {topk}"
            )

    def intermediates(self, tokens: int) -> Intermediates:
        """Return the memory for a call with ``tokens`` tokens: the beginning of each tensor."""
        if tokens == self.max_tokens:
            return self._whole
        return self._views.get(tokens) or remember(self._views, tokens, self._view(tokens))

    def _view(self, tokens):
        whole, rows = self._whole, tokens * self.topk
        seqlens, cu_seqlens, gather_indices, inverse_indices = whole.routing
        return Intermediates(
            (whole.topk[0][:tokens], whole.topk[1][:tokens]),
            (seqlens, cu_seqlens, gather_indices[:rows], inverse_indices[:tokens]),
            tuple(tensor[: rows if is_permuted(self.shape, rows) else tokens] for tensor in whole.x),
            None if whole.gate_up is None else whole.gate_up[:rows],
            tuple(tensor[:rows] for tensor in whole.activated),
            whole.rows[:rows],
        )


def check_workspace(workspace, tokens, topk, shape):
    """Refuse a ``workspace`` argument that is none, or that the call does not fit."""
    if not isinstance(workspace, ExpertsWorkspace):
        raise TypeError(f"workspace is {type(workspace).__name__}; it must be an ExpertsWorkspace or None")
    workspace.check(tokens, topk, shape)


def check_weights(w13, w2):
    """Check dtypes, shapes and strides of the weights."""
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name} is {type(weight).__name__}; it must be a tensor")
        if weight.dtype not in (torch.bfloat16, FP8):
            raise TypeError(
                f"{name} is {weight.dtype}; it must be torch.bfloat16, or {FP8} with a scale per 128 x 128 block"
            )
    check_tensor("w13", w13, shape=("experts", "2 * intermediate", "hidden"), contiguous=True)
    experts, twice, hidden = w13.shape
    step = 128 if w13.dtype == FP8 else 64
    if not 1 <= experts <= 512:
        raise ValueError(f"w13 has {experts} experts; 1 to 512 are allowed")
    if not twice or twice % (2 * step):
        raise ValueError(f"w13 has {twice} rows, gate and up; with {w13.dtype} they must be a multiple of {2 * step}")
    if not hidden or hidden % 64:
        raise ValueError(f"w13's hidden is {hidden}; it must be a multiple of 64")
    shape = experts, hidden, twice // 2
    check_tensor("w2", w2, dtype=w13.dtype, shape=shape, contiguous=True, device=(w13.device, "w13"))
