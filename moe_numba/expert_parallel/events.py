"""Events: what one stream waits for on another, with DeepEP's names."""

import torch

from moe_numba import simulator


class EventHandle:
    """A point on the stream that is current when it is made; in the simulator, what lets the kernels run."""

    def __init__(self, run=lambda: None):
        self._run, self._event = run, None
        if not simulator.ENABLED:
            self._event = torch.cuda.current_stream().record_event()

    def current_stream_wait(self):
        """What is launched on the current stream from now on waits for this point."""
        if self._event is None:
            self._run()
        else:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An event that a call gives back; ``with event:`` runs the body first and then lets the stream wait for it."""

    def __init__(self, event=None):
        self.event = event

    def current_stream_wait(self):
        """What is launched on the current stream from now on waits for the event."""
        if self.event is None:
            raise ValueError("this EventOverlap has no event: the call that gave it was not made with async_finish")
        self.event.current_stream_wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.event is not None:
            self.current_stream_wait()
