"""What the Hopper kernels share: scales in global memory, releasing a stage, and launching dependent kernels."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from moe_numba.ptx.cluster import cluster_ctarank
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_release_cta_cluster
from moe_numba.ptx.memory import griddepcontrol_launch_dependents


class OperandMaps(NamedTuple):
    """Tensor maps of the operands. Without ``GemmConfig.low_rank`` there is no second pair."""

    x: Any
    weight: Any
    x_low: Any
    weight_low: Any
    rank: Any  # int32: k of the second pair


class Scales(NamedTuple):
    """Scales in global memory: block scales of x and weight, or one scale per group in ``weight``."""

    x: Any  # float32 pointer, or int32 if packed, as `block_scales.py` says
    weight: Any


class ScaleStrides(NamedTuple):
    """Strides of the scales of x, in elements; a masked x has ``capacity`` rows per group."""

    row: Any
    k_block: Any
    group: Any  # int64: from one group to the next, beyond ``capacity`` rows; else 0
    weight_rows: Any  # of a group, used with packed scales of weight only


@cache
def make_release_stage(cluster_size):
    """Make ``release_stage(barriers, empty)``: arrive at a stage's empty barrier, in all CTAs of the cluster."""
    if cluster_size == 1:
        return mbarrier_arrive

    @cuda.jit(device=True)
    def release_stage(barriers, empty):
        mbarrier_arrive(barriers, empty)
        # Relaxed, because this warp only read: a release at cluster scope compiles to a GPU-wide MEMBAR.
        mbarrier_arrive_release_cta_cluster(barriers, empty, uint32(cluster_ctarank() ^ uint32(1)))

    return release_stage


CLUSTER_MASK = 0b11  # multicast to both CTAs of a cluster


@cuda.jit(device=True)
def allow_dependents(stage, phase):
    """Allow the next kernel to start its CTAs, once the consumers have released the first stage.

    They begin on each SM when the CTA of this kernel has ended there. To allow it earlier saves no time. Kernels with
    tiles of 128 rows or more allow it at their end: those that allowed it early took 1 % to 2 % more time on an H200,
    for a reason that was not found.
    """
    if stage == 0 and phase == 0:
        griddepcontrol_launch_dependents()
