"""Thread block clusters: special registers, the cluster barrier, and distributed shared memory.

A block may access another block's shared memory only while that block runs. This needs a cluster barrier before the
access, since the block may not have started, and one after it, since the block may exit.
"""

import numpy as np
from numba import uint32

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction


def _first():
    return uint32(0)


def _one():
    return uint32(1)


def cluster_ctarank():
    """``%cluster_ctarank``: this block's rank in its cluster, x varying fastest; 0 in a grid without clusters."""
    return np.uint32(simulator.thread().block.rank)


def cluster_nctarank():
    """``%cluster_nctarank``: the number of blocks in the cluster; 1 in a grid without clusters."""
    return np.uint32(len(simulator.thread().block.cluster.blocks))


cluster_ctarank = instruction(
    "mov.u32 $0, %cluster_ctarank;", "u32", simulate=cluster_ctarank, side_effect=False, fallback=_first
)
cluster_nctarank = instruction(
    "mov.u32 $0, %cluster_nctarank;", "u32", simulate=cluster_nctarank, side_effect=False, fallback=_one
)


def barrier_cluster_arrive():
    """``barrier.cluster.arrive.release.aligned``: arrive at the cluster barrier without waiting.

    All threads of the warp must execute it, once per wait. The barrier does not wait for warps that have exited.
    """
    simulator.cluster.arrive()


def barrier_cluster_wait():
    """``barrier.cluster.wait.acquire.aligned``: wait until all threads of the cluster have arrived.

    All threads of the warp must execute it. Writes that the cluster's threads made to shared and global memory before
    they arrived are visible afterwards.
    """
    simulator.cluster.wait()


barrier_cluster_arrive = instruction("barrier.cluster.arrive.release.aligned;", "void", simulate=barrier_cluster_arrive)
barrier_cluster_wait = instruction("barrier.cluster.wait.acquire.aligned;", "void", simulate=barrier_cluster_wait)


def st_cluster_s32(array, index, rank, value):
    """``st.shared::cluster.s32``: store 4 bytes at element ``index`` of block ``rank``'s instance of a shared array."""
    simulator.cluster.remote(array, rank).store_vector(index, (value,), np.int32)


def ld_cluster_s32(array, index, rank):
    """``ld.shared::cluster.s32``: load 4 bytes at element ``index`` of block ``rank``'s instance of a shared array."""
    return simulator.cluster.remote(array, rank).load_vector(index, np.int32, 1)[0]


def st_cluster_s32x4(array, index, rank, a, b, c, d):
    """``st.shared::cluster.v4.s32``: store 16 bytes, 16-byte aligned, at ``index`` of block ``rank``'s array."""
    simulator.cluster.remote(array, rank).store_vector(index, (a, b, c, d), np.int32)


def ld_cluster_s32x4(array, index, rank):
    """``ld.shared::cluster.v4.s32``: load 16 bytes, 16-byte aligned, at ``index`` of block ``rank``'s array."""
    return simulator.cluster.remote(array, rank).load_vector(index, np.int32, 4)


st_cluster_s32 = instruction(
    "{ .reg .u32 a; mapa.shared::cluster.u32 a, $0, $1; st.shared::cluster.s32 [a], $2; }",
    "void",
    SHARED,
    "u32",
    "s32",
    simulate=st_cluster_s32,
)
ld_cluster_s32 = instruction(
    "{ .reg .u32 a; mapa.shared::cluster.u32 a, $1, $2; ld.shared::cluster.s32 $0, [a]; }",
    "s32",
    SHARED,
    "u32",
    simulate=ld_cluster_s32,
)
st_cluster_s32x4 = instruction(
    "{ .reg .u32 a; mapa.shared::cluster.u32 a, $0, $1; st.shared::cluster.v4.s32 [a], {$2, $3, $4, $5}; }",
    "void",
    SHARED,
    "u32",
    "s32",
    "s32",
    "s32",
    "s32",
    simulate=st_cluster_s32x4,
)
ld_cluster_s32x4 = instruction(
    "{ .reg .u32 a; mapa.shared::cluster.u32 a, $4, $5; ld.shared::cluster.v4.s32 {$0, $1, $2, $3}, [a]; }",
    "s32 x 4",
    SHARED,
    "u32",
    simulate=ld_cluster_s32x4,
)
