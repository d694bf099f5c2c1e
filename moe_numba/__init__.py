"""Mixture-of-Experts kernels written in Numba CUDA, and the course that leads to them.

The public names stand in the order in which a token meets them. Without a GPU the same kernels run in a simulator.
"""

from moe_numba import simulator  # first: it decides, before Numba is imported, whether there is a GPU to compile for
from moe_numba.align import moe_align_block_size
from moe_numba.gate import biased_grouped_topk
from moe_numba.gate_align import biased_grouped_topk_align
from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_pertensor_fp8,
    group_gemm_silu_and_mul_blockwise_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
)
from moe_numba.runtime.validate import UnsupportedDeviceError

__all__ = [
    "UnsupportedDeviceError",
    "biased_grouped_topk",
    "moe_align_block_size",
    "biased_grouped_topk_align",
    "group_gemm_pertensor_fp8",
    "group_gemm_blockwise_fp8",
    "group_gemm_bf16",
    "group_gemm_silu_and_mul_pertensor_fp8",
    "group_gemm_silu_and_mul_blockwise_fp8",
    "simulator",
]
