"""Fences between proxies (generic and async), and between threads of a GPU or of the system.

Threads' loads and stores go through the generic proxy, TMA copies and wgmma operands through the async proxy.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def fence_proxy_async_shared():
    """``fence.proxy.async.shared::cta``: make this thread's stores to shared memory visible to the async proxy.

    The writing thread must execute this fence, then synchronize, before another thread issues the copy or the wgmma.
    """
    simulator.race_detector.fence(simulator.thread(), shared_only=True)


def fence_proxy_async():
    """``fence.proxy.async``: make this thread's stores to shared and global memory visible to the async proxy."""
    simulator.race_detector.fence(simulator.thread())


def fence_acq_rel_gpu():
    """``fence.acq_rel.gpu``: order this thread's earlier accesses before its later ones, for all threads of a GPU."""
    simulator.scoped_access.fence("gpu")


def fence_acq_rel_sys():
    """``fence.acq_rel.sys``: order this thread's accesses for all threads of all GPUs and for the host."""
    simulator.scoped_access.fence("sys")


fence_proxy_async_shared = instruction("fence.proxy.async.shared::cta;", "void", simulate=fence_proxy_async_shared)
fence_proxy_async = instruction("fence.proxy.async;", "void", simulate=fence_proxy_async)
fence_acq_rel_gpu = instruction("fence.acq_rel.gpu;", "void", simulate=fence_acq_rel_gpu)
fence_acq_rel_sys = instruction("fence.acq_rel.sys;", "void", simulate=fence_acq_rel_sys)
