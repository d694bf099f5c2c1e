"""Recording of launches: what ``prepare`` repeats of a call, and which kernels a measurement launched."""

import contextlib
import threading
from typing import Any, NamedTuple

from moe_numba import simulator

recordings: dict = {}  # thread -> _Recording; _ALL_THREADS -> the kernels that `noted_launches` collects
_ALL_THREADS = None
_launched: dict = {}  # what `launched_kernels` returns
_SIMULATED = simulator.ENABLED


class _Recording(list):
    """The launches of a call, as functions that launch them again on the current stream.

    ``executes`` is whether they are also executed; ``kept`` is memory that they use, beside the call's arguments.
    """

    stream_bound = False  # whether the call uses memory that belongs to its stream
    stream = 0  # of the last launch
    device = 0

    def __init__(self, executes):
        super().__init__()
        self.executes, self.kept = executes, []


class RecordedLaunch(NamedTuple):
    """A launch, which a call repeats on the current stream."""

    launcher: Any
    grid: Any
    block: Any
    values: tuple

    def __call__(self):
        self.launcher(self.grid, self.block, None, *self.values)


class Launched(NamedTuple):
    """A kernel that was launched, or at least loaded."""

    kernel: Any  # a ``@cuda.jit`` function
    cubin: bytes | None  # None in the simulator
    options: dict  # of the launcher


@contextlib.contextmanager
def noted_launches():
    """Collect the kernels that all threads launch meanwhile: yield a dict that has them as its values."""
    outer = recordings.get(_ALL_THREADS)
    recordings[_ALL_THREADS] = noted = {}
    try:
        with _launches_by_numba(noted):
            yield noted
    finally:
        _launched.update(noted)
        if outer is None:
            del recordings[_ALL_THREADS]
        else:
            recordings[_ALL_THREADS] = outer
            outer.update(noted)


@contextlib.contextmanager
def _launches_by_numba(noted):
    """Collect what ``kernel[grid, block](...)`` launches, which passes no launcher of this package."""
    if _SIMULATED:
        from moe_numba.simulator.core.kernel import Kernel as kind

        method, describe = "_launch", lambda kernel: Launched(kernel, None, {})
    else:
        from numba.cuda.dispatcher import _Kernel as kind

        method, describe = "launch", lambda kernel: Launched(kernel, _cubin_of(kernel), {})
    launch = getattr(kind, method)

    def launch_and_note(kernel, *args, **kwargs):
        if id(kernel) not in noted:
            noted[id(kernel)] = describe(kernel)
        return launch(kernel, *args, **kwargs)

    setattr(kind, method, launch_and_note)
    try:
        yield
    finally:
        setattr(kind, method, launch)


def _cubin_of(kernel):
    cubin = kernel.library.get_cubin()
    return getattr(cubin, "code", cubin)


def launched_kernels():
    """Return the kernels that this process has loaded with a launcher, or that `noted_launches` has collected."""
    return list(_launched.values())


def note_loaded(launcher):
    """Note that a launcher's kernel, ``launcher.launched``, was loaded."""
    _launched[id(launcher.launched)] = launcher.launched


def note(launcher):
    """Note a launch, if `noted_launches` collects them."""
    if (noted := recordings.get(_ALL_THREADS)) is not None:
        noted[id(launcher.launched)] = launcher.launched


@contextlib.contextmanager
def recording(executes=True):
    """Collect the launches of this thread, which are also executed, or only collected."""
    thread = threading.get_ident()
    recordings[thread] = launches = _Recording(executes)
    try:
        yield launches
    finally:
        del recordings[thread]


def current_recording():
    """Return the recording of this thread, or None."""
    return recordings.get(threading.get_ident())


def wrap_recorded(wrap):
    """Replace the launch that was recorded last, ``launch``, by ``wrap(launch)``."""
    if recordings and (launches := current_recording()):
        launches[-1] = wrap(launches[-1])


def refuse_recording(reason):
    """Raise ValueError if the call is being recorded."""
    if recordings and current_recording() is not None:
        raise ValueError(reason)


def keep_recorded(memory):
    """Keep memory that is no argument alive with the call that is being recorded."""
    if recordings and (launches := current_recording()) is not None:
        launches.kept.append(memory)


def bind_recording_to_stream():
    """Note that the call which is being recorded uses memory that belongs to its stream."""
    if recordings and (launches := current_recording()) is not None:
        launches.stream_bound = True


def record(launcher, grid, block, stream, values):
    """Note a launch, and collect it if the call is being recorded; return whether it is only collected."""
    launches = current_recording()
    if launches is None or launches.executes:
        note(launcher)
    if launches is None:
        return False
    launches.stream, launches.device = stream, launcher.device
    launches.append(RecordedLaunch(launcher, grid, block, values))
    return not launches.executes
