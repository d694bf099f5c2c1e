"""Grouped GEMM for the experts: one launch for all groups of rows, in FP8, bf16 or with 4-bit weights."""

from moe_numba.grouped_gemm.api import autograd  # noqa: F401  registers the backward of group_gemm_bf16
from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.api.fp8 import group_gemm_blockwise_fp8, group_gemm_pertensor_fp8, group_gemm_rowwise_fp8
from moe_numba.grouped_gemm.api.k_grouped import k_grouped_gemm_bf16
from moe_numba.grouped_gemm.api.silu_and_mul import (
    group_gemm_silu_and_mul_bf16,
    group_gemm_silu_and_mul_blockwise_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
)
from moe_numba.grouped_gemm.api.w4 import group_gemm_mxfp4, group_gemm_silu_and_mul_mxfp4, pack_mxfp4

__all__ = [
    "group_gemm_bf16",
    "group_gemm_blockwise_fp8",
    "group_gemm_mxfp4",
    "group_gemm_pertensor_fp8",
    "group_gemm_rowwise_fp8",
    "group_gemm_silu_and_mul_bf16",
    "group_gemm_silu_and_mul_blockwise_fp8",
    "group_gemm_silu_and_mul_mxfp4",
    "group_gemm_silu_and_mul_pertensor_fp8",
    "k_grouped_gemm_bf16",
    "pack_mxfp4",
]
