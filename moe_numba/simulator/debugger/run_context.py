"""What surrounds one run of a debugged launch: its output, its garbage, and the trace functions of the process."""

import contextlib
import gc
import io
import sys

import greenlet


@contextlib.contextmanager
def run_context(session):
    """Run a launch within this context, once."""
    traced, switched, collects = sys.gettrace(), greenlet.gettrace(), gc.isenabled()
    gc.disable()  # its callbacks would be traced as functions that a kernel calls
    try:
        with contextlib.redirect_stdout(_Output(session, sys.stdout)):
            yield
    finally:
        sys.settrace(traced)
        greenlet.settrace(switched)
        if collects:
            gc.enable()


class _Output(io.TextIOBase):
    """Standard output of kernels; what they printed before is not printed again when a launch is repeated."""

    def __init__(self, session, stream):
        self._session, self._stream = session, stream

    def write(self, text):
        session = self._session
        known = session.step < session.furthest or session.completed
        return len(text) if known else self._stream.write(text)

    def flush(self):
        self._stream.flush()
