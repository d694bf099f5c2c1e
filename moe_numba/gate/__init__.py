"""The gate: which experts a token goes to, and with what weights (DeepSeek-V3's biased grouped top-k)."""

from moe_numba.gate.api import biased_grouped_topk

__all__ = ["biased_grouped_topk"]
