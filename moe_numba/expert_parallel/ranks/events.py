"""CUDA events between streams, with DeepEP's names."""

from collections.abc import Callable

import torch

from moe_numba import simulator


def is_capturing() -> bool:
    """Return whether the current stream is captured in a CUDA graph."""
    return not simulator.ENABLED and torch.cuda.is_current_stream_capturing()


class EventHandle:
    """An event recorded on the current stream, such as ``Buffer.capture`` records.

    Parameters
    ----------
    run : callable
        In the simulator, which has no streams: runs the pending kernels when a stream waits for the event.
    """

    def __init__(self, run: Callable[[], object] = lambda: None):
        self._run, self._event = run, None
        if not simulator.ENABLED:
            self._event = torch.cuda.current_stream().record_event()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self._event is None:
            self._run()
        else:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The event that a call returns; ``with event:`` runs the body and then makes the current stream wait for it.

    Parameters
    ----------
    event : EventHandle, optional
        None: the call was made without ``async_finish``.
    extra_tensors : tuple of torch.Tensor, optional
        Kept as long as this object, as in DeepEP.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None):
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event.

        Raises
        ------
        ValueError
            There is no event.
        """
        if self.event is None:
            raise ValueError("this EventOverlap has no event: the call that returned it did not have async_finish")
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *_) -> None:
        if self.event is not None:
            self.current_stream_wait()
