"""Streams of a ``Buffer``'s calls: on which stream a call runs, and after what."""

import contextlib

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.ranks.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.rings.checks import check_previous_event
from moe_numba.runtime.context import current_stream
from moe_numba.runtime.validate import check_flag

_SAME_STREAM = contextlib.nullcontext(lambda *tensors: EventOverlap())  # see `StreamOrder.on_stream`


class StreamOrder:
    """Orders a rank's calls: each runs after the one before, whatever stream that was on.

    Parameters
    ----------
    transport : see ``expert_parallel.transport``
    """

    def __init__(self, transport):
        device = transport.device
        self.transport = transport
        self.comm_stream = None if simulator.ENABLED else torch.cuda.Stream(device, priority=-1)
        self._last_stream, self._last_raw_stream, self._device_index = None, None, device.index or 0

    def on_stream(self, previous_event, async_finish, allocate_on_comm_stream):
        """Return a context that runs a call on its stream, after everything it must wait for.

        It yields a function that returns the call's event. The function takes all tensors that the call uses, and keeps
        their memory from being reused too early.
        """
        is_plain = previous_event is None and async_finish is False and allocate_on_comm_stream is False
        if is_plain and self.continues_stream():
            return _SAME_STREAM
        return self._on_other_stream(previous_event, async_finish, allocate_on_comm_stream)

    def continues_stream(self):
        """Return whether the current stream is that of the last call, so that there is nothing to wait for."""
        return self._last_raw_stream == current_stream(self._device_index)

    def launch_on_stream(self, launch, *arguments):
        """Call ``launch(stream, *arguments)`` with the current raw stream, after everything it must wait for."""
        stream = current_stream(self._device_index)
        if stream == self._last_raw_stream:
            launch(stream, *arguments)
            return
        with self._on_other_stream(None, False, False) as finish:
            launch(stream, *arguments)
            finish()

    @contextlib.contextmanager
    def _on_other_stream(self, previous_event, async_finish, allocate_on_comm_stream):
        previous, async_finish = check_previous_event(previous_event), check_flag("async_finish", async_finish)
        allocate_on_comm_stream = check_flag("allocate_on_comm_stream", allocate_on_comm_stream)
        if allocate_on_comm_stream and not (async_finish and previous_event is not None):
            raise ValueError("allocate_on_comm_stream needs previous_event and async_finish")
        if simulator.ENABLED:
            # Kernels run when their ranks wait: for the event, or here.
            event = EventHandle(lambda: self.transport.wait(lambda: True, 0))
            yield lambda *_: EventOverlap(event) if async_finish else EventOverlap(event.current_stream_wait())
            return
        device, last = self.transport.device, self._last_stream
        use_comm_stream = async_finish or previous_event is not None
        current = torch.cuda.current_stream(device)
        stream = self.comm_stream if use_comm_stream else current
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                if last is not None and last != stream:
                    stream.wait_stream(last)
                self._last_stream, self._last_raw_stream = stream, stream.cuda_stream
            if stream == current:
                yield lambda *tensors: EventOverlap()
                return
            if previous is not None:
                with torch.cuda.stream(stream):
                    previous.current_stream_wait()
            else:
                stream.wait_stream(current)

            def finish(*tensors):
                event = EventHandle()
                for tensor in tensors:
                    if tensor is not None:
                        tensor.record_stream(stream)
                        tensor.record_stream(current)
                if not async_finish:
                    current.wait_event(event._event)
                return EventOverlap(event if async_finish else None)

            with torch.cuda.stream(stream):
                yield finish
