"""Errors that the simulator raises for faulty kernels, and how they name the place: block, warp, lanes, source line."""

import functools
import os
import types

_SIMULATOR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Frames of these folders carry out an instruction; error messages name the kernel's line that issued it.
_INTERNAL = _SIMULATOR + os.sep, *(os.path.join(os.path.dirname(_SIMULATOR), p) + os.sep for p in ("ptx", "runtime"))

_MOST_ELEMENTS = 4  # that a report names of those that a warp polls


class SimulatorError(RuntimeError):
    """A kernel did something illegal or undefined, or asked for something that the simulator does not support."""


class CompileError(SimulatorError):
    """A kernel uses something that Numba does not compile for a GPU."""


class Deadlock(SimulatorError):
    """No thread can make progress."""


class MissingLane(SimulatorError):
    """The mask of a warp operation names a lane that cannot take part, or does not name the calling lane."""


class DivergentBarrier(SimulatorError):
    """Threads do not reach the same barrier together, or the lanes of a warp not the same `.aligned` instruction."""


class ClusterError(SimulatorError):
    """A cluster operation in the wrong state, such as access to a block that may not have started or has exited."""


class BarrierMisuse(SimulatorError):
    """An mbarrier is used before its initialisation, or receives too many arrivals or an unexpected number of bytes."""


class AsyncRace(SimulatorError):
    """Memory or an accumulator is accessed while an asynchronous copy or a wgmma may still be using it."""


class DataRace(SimulatorError):
    """Two threads access the same memory, one of them writes, and nothing orders the two accesses."""


class UninitializedRead(SimulatorError):
    """A kernel reads global memory that nothing has written, or depends on such a value of shared or local memory."""


class MissingFence(SimulatorError):
    """Data written through one proxy is read through another with no fence in between."""


class OutOfBounds(SimulatorError, IndexError):
    """An index lies outside the memory that it indexes."""


class Misaligned(SimulatorError):
    """A vector access or a copy is not aligned as the instruction requires."""


class ShortTraceback:
    """Context that removes the frames of the simulator from an error's traceback, which then ends at the kernel's line.

    Every function of the simulator between the reader's call and the kernel has one. An error that is no SimulatorError
    and is raised by the simulator keeps all frames.
    """

    def __enter__(self):
        return self

    def __exit__(self, _, error, tb):
        frames = []
        while tb is not None:
            frames.append(tb)
            tb = tb.tb_next
        internal = [is_internal_file[frame.tb_frame.f_code.co_filename] for frame in frames]
        if not frames or (internal[-1] and not isinstance(error, SimulatorError)):
            return
        for frame in (frame for frame, own in zip(reversed(frames), reversed(internal)) if not own):
            tb = types.TracebackType(tb, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = tb


# What to do about a warp-wide operation that some lanes of its mask do not reach, and about such a block-wide barrier.
ALL_LANES = (
    "every lane that the mask names must execute it: "
    "move it out of the `if` or loop, or name only the lanes that reach it"
)
ALL_THREADS = "all threads of the block that have not exited must reach the same one: move it out of the `if` or loop"
ALIGNED = (
    "all lanes of a warp must execute the same one together, by the same calls and in the same iterations of loops: "
    "move it out of the `if` or loop"
)
ALL_OF_THE_GRID = "the first thread of each block must reach it: let it not return before"


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
    while frame is not None and is_internal_file[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


class _InternalFiles(dict):
    """Whether a file belongs to the simulator, not to a kernel or a device function."""

    def __missing__(self, name):
        self[name] = name.startswith(_INTERNAL)
        return self[name]


is_internal_file = _InternalFiles()


@functools.cache
def file_name(path):
    """Return the name that messages show for a source file; cells of a notebook have made-up names."""
    return "cell" if "ipykernel_" in os.path.dirname(path) else os.path.basename(path)


def format_place(code, line):
    """Format a place in the source: function, file and line."""
    return f"{code.co_name}, {file_name(code.co_filename)}:{line}"


def line_of(code, instruction):
    """Return the line of an instruction of a code object."""
    return next((n for start, end, n in code.co_lines() if start <= instruction < end and n), code.co_firstlineno)


def location_of(code, instruction):
    """Format where an instruction of a code object stands: function, file and line."""
    return format_place(code, line_of(code, instruction))


def plain_index(index):
    """Return an index as messages show it: NumPy's numbers in a tuple become Python's."""
    return tuple(getattr(part, "item", lambda part=part: part)() for part in index) if type(index) is tuple else index


def source_location(frame):
    """Format where a frame stands: function, file and line."""
    frame = kernel_frame(frame)
    if frame is None:
        return "its first line"
    return format_place(frame.f_code, frame.f_lineno)


def wait_report(threads, limit=8):
    """List what threads wait for, one line per warp and source line, ordered by block, warp and lane."""
    groups = {}
    for t in sorted(threads, key=lambda t: (t.block.index, t.thread_id)):
        text = f"{t.waits or 'ready to run'}, at {source_location(t.gr_frame)}"
        lanes, polled = groups.setdefault((t.block, t.warp, text), ([], {}))
        lanes.append(t.lane)
        if (element := getattr(t.waits, "element", None)) is not None:
            polled[element()] = None
    lines = []
    for (block, warp, text), (lanes, polled) in groups.items():
        elements = [*polled][:_MOST_ELEMENTS] + ["..."] * (len(polled) > _MOST_ELEMENTS)
        text += f", polls {', '.join(elements)}" if polled else ""
        lines.append(f"  {block} warp {warp} lanes {format_ranges(lanes)}: {text}")
    if len(lines) > limit:
        lines[limit:] = [f"  and {len(lines) - limit} more groups"]
    return "\n".join(lines)
