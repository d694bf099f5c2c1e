"""Kernel factories refuse shapes that their kernels do not support, in words that name the shape.

Those of the gate and the alignment are tested beside their kernels.
"""

import pytest

from moe_numba.expert_parallel.layout.kernel import make_layout_kernel
from moe_numba.expert_parallel.rings.channels import RingShape
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
from moe_numba.grouped_gemm.wgmma.config import GemmConfig
from moe_numba.grouped_gemm.wgmma.kernel import make_kernel
from moe_numba.quantise.fp8_cast_kernels import make_cast_back, make_cast_to_fp8


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (make_layout_kernel, (64, 9, 8, 128), "64 experts, 9 ranks, top-8.* 1 to 8"),
        (make_layout_kernel, (65, 8, 8, 128), "65 experts, 8 ranks"),
        (make_layout_kernel, (64, 8, 33, 128), "top-33"),
        (make_layout_kernel, (64, 8, 8, 100), "100 threads"),
        (RingShape, (9, 4, 8, TokenSlot(64)), "num_ranks=9.* 1 to 8 ranks"),
        (RingShape, (8, 32, 8, TokenSlot(64)), "warps=32.* 1 to 31 warps"),
        (RingShape, (8, 4, 8, TokenSlot(64, topk=33)), "topk=33.* at most 32 experts"),
        (make_cast_to_fp8, ("bfloat16", 132), "hidden is 132; it must be a multiple of the 8 elements"),
        (make_cast_back, (129, False), "hidden is 129; it must be a multiple of the 8 elements"),
    ],
)
def test_factories_refuse_shapes(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(*arguments)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mma_n=(96,)), r"mma_n is \(96,\); it must descend from subtile_m \(128\)"),
        (dict(mma_n=(128, 132)), r"mma_n is \(128, 132\)"),
        (dict(mma_n=(128, 100)), r"mma_n is \(128, 100\).* multiples of 8"),
        (dict(m_subtiles=3), "m_subtiles is 3; it must be 1 or 2"),
        (dict(silu_and_mul=True, m_subtiles=2), "m_subtiles is 2; .* with silu_and_mul 1"),
        (dict(cluster_size=4), "cluster_size is 4; it must be 1 or 2"),
        (dict(cluster_size=2, subtile_m=24, mma_n=(24,)), "subtile_m is 24; with cluster_size 2"),
        (dict(stages=8), "needs .* bytes of shared memory; a CTA has 232448"),
    ],
)
def test_grouped_gemm_refuses_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        make_kernel(GemmConfig()._replace(**change))
