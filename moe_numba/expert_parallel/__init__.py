"""Across GPUs: which rank each token goes to, and the exchange of tokens between ranks."""

from moe_numba.expert_parallel.api import get_dispatch_layout

__all__ = ["get_dispatch_layout"]
