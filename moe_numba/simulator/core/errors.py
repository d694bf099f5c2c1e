"""Errors that the simulator raises for faulty kernels, and how they name the place: block, warp, lanes, source line."""

import os

_SIMULATOR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Frames of these folders carry out an instruction; error messages name the kernel's line that issued it.
_INTERNAL = (_SIMULATOR + os.sep, os.path.join(os.path.dirname(_SIMULATOR), "ptx") + os.sep)


class SimulatorError(RuntimeError):
    """A kernel did something illegal or undefined, or asked for something that the simulator does not support."""


class Deadlock(SimulatorError):
    """No thread can make progress."""


class MissingLane(SimulatorError):
    """The mask of a warp operation names a lane that cannot take part, or does not name the calling lane."""


class DivergentBarrier(SimulatorError):
    """The threads of a block do not all reach the same barrier."""


class ClusterError(SimulatorError):
    """A cluster operation in the wrong state, such as access to a block that may not have started or has exited."""


class BarrierMisuse(SimulatorError):
    """An mbarrier is used before its initialisation, or receives too many arrivals or an unexpected number of bytes."""


class AsyncRace(SimulatorError):
    """Memory or an accumulator is accessed while an asynchronous copy or a wgmma may still be using it."""


class DataRace(SimulatorError):
    """Two threads access the same memory, one of them writes, and nothing orders the two accesses."""


class MissingFence(SimulatorError):
    """Data written through one proxy is read through another with no fence in between."""


class OutOfBounds(SimulatorError, IndexError):
    """An index lies outside the memory that it indexes."""


class Misaligned(SimulatorError):
    """A vector access or a copy is not aligned as the instruction requires."""


def format_ranges(numbers):
    """Format a set of numbers as ranges: {0, 1, 2, 7} is "0-2, 7"."""
    runs = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def format_lanes(mask):
    """Format the lanes that a mask names as ranges."""
    return format_ranges(lane for lane in range(32) if mask >> lane & 1)


def kernel_frame(frame):
    """Return the innermost frame that belongs to a kernel or a device function, not to the simulator."""
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return frame


class _InternalFiles(dict):
    """Whether a file belongs to the simulator, not to a kernel or a device function."""

    def __missing__(self, name):
        self[name] = name.startswith(_INTERNAL)
        return self[name]


is_internal_file = _InternalFiles()


def location_of(code, instruction):
    """Format where an instruction of a code object stands: function, file and line."""
    line = next((n for start, end, n in code.co_lines() if start <= instruction < end and n), code.co_firstlineno)
    return f"{code.co_name}, {os.path.basename(code.co_filename)}:{line}"


def source_location(frame):
    """Format where a frame stands: function, file and line."""
    frame = kernel_frame(frame)
    if frame is None:
        return "its first line"
    return f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def wait_report(threads, limit=8):
    """List what threads wait for, one line per warp and source line, ordered by block, warp and lane."""
    groups = {}
    for t in sorted(threads, key=lambda t: (t.block.index, t.thread_id)):
        text = f"{t.waits or 'ready to run'}, at {source_location(t.gr_frame)}"
        groups.setdefault((t.block, t.warp, text), []).append(t.lane)
    lines = [
        f"  {block} warp {warp} lanes {format_ranges(lanes)}: {text}" for (block, warp, text), lanes in groups.items()
    ]
    if len(lines) > limit:
        lines[limit:] = [f"  and {len(lines) - limit} more groups"]
    return "\n".join(lines)
