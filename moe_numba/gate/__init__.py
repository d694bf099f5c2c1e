"""Gate: choose the experts of each token and their weights (DeepSeek-V3's biased grouped top-k)."""

from moe_numba.gate.api import biased_grouped_topk

__all__ = ["biased_grouped_topk"]
