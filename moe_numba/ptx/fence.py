"""Fences: between the ways in which memory is reached (the proxies), and between threads of a GPU or of a system.

Threads' own loads and stores go through the generic proxy; TMA copies and wgmma's operands through the async proxy.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def fence_proxy_async_shared():
    """``fence.proxy.async.shared::cta``: what this thread wrote to shared memory may be read by copies and by wgmma.

    Who wrote fences; then a barrier; then another thread may start the copy.
    """
    simulator.race_detector.fence(simulator.thread())


def fence_proxy_async():
    """``fence.proxy.async``: the same for shared and global memory."""
    simulator.race_detector.fence(simulator.thread())


def fence_acq_rel_gpu():
    """``fence.acq_rel.gpu``: orders this thread's accesses before it and after it, for all threads of this GPU."""
    simulator.scoped.fence()


def fence_acq_rel_sys():
    """``fence.acq_rel.sys``: the same for all threads of all GPUs, and for the host."""
    simulator.scoped.fence()


fence_proxy_async_shared = instruction("fence.proxy.async.shared::cta;", "void", simulate=fence_proxy_async_shared)
fence_proxy_async = instruction("fence.proxy.async;", "void", simulate=fence_proxy_async)
fence_acq_rel_gpu = instruction("fence.acq_rel.gpu;", "void", simulate=fence_acq_rel_gpu)
fence_acq_rel_sys = instruction("fence.acq_rel.sys;", "void", simulate=fence_acq_rel_sys)
