"""Aligning a routing to the blocks of a grouped GEMM: slots sorted by expert, each expert padded to whole blocks."""

from moe_numba.align.api import moe_align_block_size

__all__ = ["moe_align_block_size"]
