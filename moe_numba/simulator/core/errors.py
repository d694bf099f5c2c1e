"""What can go wrong in a simulated kernel, and the words that say where: block, warp, lanes, source line."""

import os

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the simulator
# Frames of these folders carry out an instruction; the line a reader wants is the kernel's that asked for it.
_MACHINERY = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "ptx") + os.sep)


class SimulatorError(RuntimeError):
    """A kernel did what it must not do, or the simulator was asked for what it cannot do."""


class Deadlock(SimulatorError):
    """No thread can ever run again."""


class MissingLane(SimulatorError):
    """A warp operation names a lane that cannot come, or is called by a lane that it does not name."""


class DivergentBarrier(SimulatorError):
    """The threads of a block do not all reach the same barrier."""


class ClusterError(SimulatorError):
    """A block's cluster is not in the state that an operation on it needs."""


class BarrierMisuse(SimulatorError):
    """An mbarrier is used before it is one, gets an arrival too many, or other bytes than it was told to expect."""


class AsyncRace(SimulatorError):
    """Memory, or an accumulator, is touched while a copy or a wgmma that was started has yet to be done with it."""


class MissingFence(SimulatorError):
    """What was written one way is read another way, with no fence between the two."""


class OutOfBounds(SimulatorError, IndexError):
    """An index lies outside the memory that it indexes."""


class Misaligned(SimulatorError):
    """A vector access, or what a copy takes, is not aligned as it must be."""


def ranges(numbers):
    """Numbers in words: {0, 1, 2, 7} is "0-2, 7"."""
    runs = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def lanes_of(mask):
    """The lanes that a mask names, in words."""
    return ranges(lane for lane in range(32) if mask >> lane & 1)


def kernel_frame(frame):
    """The innermost frame that belongs to a kernel, or to a device function, rather than to the simulator."""
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return frame


def place(frame):
    """Where a frame stands, in words: function, file and line."""
    frame = kernel_frame(frame)
    if frame is None:
        return "its first line"
    return f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def standing(threads, limit=8):
    """Who waits where, one line for each warp and place, in the order of blocks, warps and lanes."""
    groups = {}
    for t in sorted(threads, key=lambda t: (t.block.index, t.thread_id)):
        text = f"{t.waits or 'ready to run'}, at {place(t.gr_frame)}"
        groups.setdefault((t.block, t.warp, text), []).append(t.lane)
    lines = [f"  {block} warp {warp} lanes {ranges(lanes)}: {text}" for (block, warp, text), lanes in groups.items()]
    if len(lines) > limit:
        lines[limit:] = [f"  and {len(lines) - limit} more groups"]
    return "\n".join(lines)
