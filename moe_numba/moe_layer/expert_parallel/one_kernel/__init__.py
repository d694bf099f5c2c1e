"""Experts of several GPUs in one persistent kernel: dispatch, both grouped GEMMs, and the way back.

`OneKernel` is what ``ExpertParallelMoE(..., fused=True)`` calls.
"""

from moe_numba.moe_layer.expert_parallel.one_kernel.layer import OneKernel as OneKernel
