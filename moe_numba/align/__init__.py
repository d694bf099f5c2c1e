"""Alignment: sort slots by expert and pad each expert to whole tiles of the grouped GEMM."""

from moe_numba.align.api import moe_align_block_size

__all__ = ["moe_align_block_size"]
