"""Memory that the blocks of one launch share, zero before its first use; no two launches may use it at once."""

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import current_stream

_STOCK_BYTES = 16 << 20  # of workspaces that wait for captures, for each device and size
_MOST_IN_STOCK = 64

_workspaces, _stock = {}, {}


def workspace(device, numbers):
    """So many int32 for a launch on the current stream of a device (an index).

    Launches on one stream follow each other and share one. What is captured gets one for each capture and stream of it,
    for good: graphs may be replayed side by side. It comes from a stock that calls outside of captures fill, since what
    is allocated and zeroed within a capture would be one more node of the graph; that happens only with no stock left.
    """
    numbers = -(-numbers // 4) * 4  # each starts at 16 bytes
    stream = current_stream(device)
    on_gpu = not simulator.ENABLED and not devices.target()
    captures = on_gpu and torch.cuda.is_current_stream_capturing()
    key = device, stream, numbers, _capture_id(stream) if captures else None
    if key not in _workspaces:
        stock = _stock.get((device, numbers))
        _workspaces[key] = stock.pop() if captures and stock else _zeros(device, numbers)
    if on_gpu and not captures and not _stock.get((device, numbers)):
        count = max(1, min(_MOST_IN_STOCK, _STOCK_BYTES // (4 * numbers)))
        _stock[device, numbers] = list(_zeros(device, count * numbers).view(count, numbers))
        torch.cuda.current_stream(device).synchronize()  # a replay's stream knows nothing of this one
    return _workspaces[key]


def _capture_id(stream):
    from cuda.bindings import driver

    # Older bindings have the query that understands programmatic dependent launches under a name of its own.
    query = getattr(driver, "cuStreamGetCaptureInfo_v3", driver.cuStreamGetCaptureInfo)
    error, _, capture, *_ = query(stream)
    if error:
        raise RuntimeError(f"the stream's capture could not be looked up: {error.name}")
    return int(capture)


def _zeros(device, numbers):
    on_cpu = simulator.ENABLED or devices.target()
    return torch.zeros(numbers, dtype=torch.int32, device="cpu" if on_cpu else f"cuda:{device}")
