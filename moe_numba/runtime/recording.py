"""Recording of launches: what ``prepare`` repeats of a call."""

import contextlib
import threading

import torch

from moe_numba import simulator
from moe_numba.runtime.context import current_stream

recordings: dict = {}  # thread -> _Recording
# In the simulator the ranks of a group are greenlets of one thread.
if simulator.ENABLED:
    from greenlet import getcurrent as _current_thread
else:
    _current_thread = threading.get_ident


class _Recording(list):
    """The launches of a call, as functions that launch them again on the current stream."""

    stream_bound = False  # whether the call uses memory that belongs to its stream


@contextlib.contextmanager
def recording():
    """Collect the launches of this thread, which are also executed."""
    thread = _current_thread()
    recordings[thread] = launches = _Recording()
    try:
        yield launches
    finally:
        del recordings[thread]


def current_recording():
    """Return the recording of this thread, or None."""
    return recordings.get(_current_thread())


def wrap_recorded(wrap):
    """Replace the launch that was recorded last, ``launch``, by ``wrap(launch)``."""
    if recordings and (launches := current_recording()):
        launches[-1] = wrap(launches[-1])


def refuse_recording(reason):
    """Raise ValueError if the call is being recorded."""
    if recordings and current_recording() is not None:
        raise ValueError(reason)


def bind_recording_to_stream():
    """Note that the call which is being recorded uses memory that belongs to its stream."""
    if recordings and (launches := current_recording()) is not None:
        launches.stream_bound = True


def record(launcher, grid, block, stream, values):
    launches = current_recording()
    if launches is None:
        return
    start, device = launcher.prepare(grid, block, *values), launcher.device

    def launch_again():
        now = current_stream(device)
        # Stream 0, which is also the simulator's, cannot be captured.
        if launches.stream_bound and (now != stream or (now and torch.cuda.is_current_stream_capturing())):
            raise RuntimeError(
                f"this call was prepared on stream {stream:#x} and uses that stream's workspace; it cannot run on "
                f"stream {now:#x} or in a capture"
            )
        start(now)

    launches.append(launch_again)
