"""Shared-experts fusion: treat shared experts as routed experts, so that one grouped GEMM computes both."""

from moe_numba.shared_experts.api import fuse_routing
from moe_numba.shared_experts.checkpoint import fuse_checkpoint
from moe_numba.shared_experts.memory_estimate import memory_cost

__all__ = ["fuse_checkpoint", "fuse_routing", "memory_cost"]
