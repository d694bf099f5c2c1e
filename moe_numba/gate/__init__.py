"""Gate: choose the experts of each token and their weights (DeepSeek-V3's biased grouped top-k)."""

from moe_numba.gate import autograd  # noqa: F401  registers the backward of biased_grouped_topk
from moe_numba.gate.api import biased_grouped_topk
from moe_numba.gate.placement import ExpertPlacement

__all__ = ["ExpertPlacement", "biased_grouped_topk"]
