"""Zero-initialised workspaces of launches; launches that may run at the same time use different ones."""

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.context import current_stream
from moe_numba.runtime.recording import bind_recording_to_stream

_POOL_BYTES = 16 << 20  # preallocated for captures, per device and size
_MAX_POOL_WORKSPACES = 64

_workspaces: dict = {}
_pools: dict = {}


def workspace(device, num_elements, purpose="align"):
    """Return a workspace of int32 for a launch on the current stream of a device.

    Launches on one stream are ordered and share a workspace. Graphs may be replayed concurrently, so each capture gets
    its own workspace per stream, which is never freed. Workspaces come from a pool that the first call outside of
    captures fills: zeroing a new one during a capture would add a node to the graph, and one that is allocated while
    torch.compile prepares a CUDA graph would belong to the graph's memory.

    Parameters
    ----------
    device : int
        Device index.
    num_elements : int
        Rounded up to a multiple of 4, so that workspaces are 16-byte aligned.
    purpose : str
        Launches for different purposes use different workspaces; what one leaves behind, the next of its kind finds.
    """
    bind_recording_to_stream()
    num_elements = -(-num_elements // 4) * 4
    stream = current_stream(device)
    on_gpu = not simulator.ENABLED and not devices.target()
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    key = device, stream, num_elements, purpose, _capture_id(stream) if capturing else None
    pool = _pools.get((device, num_elements))
    if key not in _workspaces:
        _workspaces[key] = pool.pop() if pool else _zeros(device, num_elements)
    if on_gpu and not capturing and not pool:
        count = max(1, min(_MAX_POOL_WORKSPACES, _POOL_BYTES // (4 * num_elements)))
        _pools[device, num_elements] = list(_zeros(device, count * num_elements).view(count, num_elements))
        torch.cuda.current_stream(device).synchronize()  # streams that replay graphs are not ordered with this one
    return _workspaces[key]


def _capture_id(stream):
    from cuda.bindings import driver

    # Older bindings have the query that supports programmatic dependent launches under a separate name.
    query = getattr(driver, "cuStreamGetCaptureInfo_v3", driver.cuStreamGetCaptureInfo)
    error, _, capture, *_ = query(stream)
    if error:
        raise RuntimeError(f"cannot query the capture of stream {stream:#x}: {error.name}")
    return int(capture)


def _zeros(device, num_elements):
    on_cpu = simulator.ENABLED or devices.target()
    return torch.zeros(num_elements, dtype=torch.int32, device="cpu" if on_cpu else f"cuda:{device}")
