"""Runs and checks kernels of the notebook on a layer's experts that group assignments by expert."""

from collections.abc import Callable
from typing import Any

import torch

from moe_numba.runtime.launch import launch

NAMES = "seqlens", "cu_seqlens", "gather_indices", "inverse_indices"


def groups_mismatch(outputs: Any, right: Any) -> str | None:
    """Return None, or which output of ``group_by_expert`` differs from the reference, and where."""
    for name, out, wanted in zip(NAMES, outputs, right, strict=True):
        if not torch.equal(out, wanted):
            return f"{name} differs at {(out != wanted).nonzero()[0].tolist()}"
    return None


def poisoned_groups(ids: torch.Tensor, num_experts: int) -> list[torch.Tensor]:
    """Return outputs of ``group_by_expert`` filled with -7."""
    sizes = (num_experts,), (num_experts + 1,), (ids.numel(),), tuple(ids.shape)
    return [torch.full(size, -7, dtype=torch.int32, device=ids.device) for size in sizes]


def group_by(kernel: Any, threads: int, ids: torch.Tensor, num_experts: int) -> Callable:
    """Return a call that launches one CTA of a kernel and returns its outputs, which were poisoned once."""
    outputs = poisoned_groups(ids, num_experts)

    def call():
        launch(kernel, 1, threads, ids, *outputs, ids.numel())
        return outputs

    return call
