"""The frames of a simulated thread, its place in the source, and expressions that are evaluated on its behalf."""

import contextlib
import linecache
import sys
from typing import NamedTuple

import greenlet
import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.engine import Thread
from moe_numba.simulator.core.errors import file_name, is_internal_file
from moe_numba.simulator.profiler.control_flow import belongs_to_kernel


class CommandError(Exception):
    """A command that cannot be carried out; its text is one sentence for the user."""


class Hit(NamedTuple):
    """A breakpoint or a watchpoint that stops a launch, as text; `thread` becomes the focus."""

    thread: Thread | None
    text: str


class ThreadName(NamedTuple):
    """A thread, in any repetition of a launch: the number of its grid, and its block and its index in the block."""

    grid: int
    block: tuple[int, int, int]
    thread: int


def block_at(grid, index):
    """Return the block of a grid with this index."""
    size = grid.grid_dim
    if any(not 0 <= i < n for i, n in zip(index, size)):
        raise CommandError(f"block {tuple(index)} is outside the grid, whose size is {tuple(size)}")
    return grid.blocks[index[0] + size.x * (index[1] + size.y * index[2])]


class KernelCode:
    """Which code objects belong to a kernel and its device functions: those whose lines the debugger shows."""

    def __init__(self, kernel):
        self.file, self._known = kernel.__code__.co_filename, {}

    def __contains__(self, code):
        # By id, since hashing code is slow; the value keeps the code object alive.
        known = self._known.get(id(code))
        if known is None:
            belongs = not is_internal_file[code.co_filename] and belongs_to_kernel(code, self)
            known = self._known[id(code)] = code, belongs
        return known[1]


def chain(frame, codes):
    """Return the frames of a kernel and its device functions, from `frame` outwards."""
    frames = []
    while frame is not None:
        if frame.f_code in codes:
            frames.append(frame)
        frame = frame.f_back
    return frames


def frames_of_error(error):
    """Return the thread that raised an error, or None, and the frames of its traceback, innermost first."""
    thread, frames, tb = None, [], error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code is Thread.run.__code__:
            thread, frames = tb.tb_frame.f_locals["self"], []
        frames.append(tb.tb_frame)
        tb = tb.tb_next
    return (None, []) if thread is None else (thread, frames[::-1])


def format_place(code, line):
    """Format a place in the source: function, file and line."""
    return f"{code.co_name}, {file_name(code.co_filename)}:{line}"


def source_line(path, number):
    """Return one line of source with its number."""
    return f"{number}\t{linecache.getline(path, number).rstrip()}"


class _Evaluation(greenlet.greenlet):
    """Evaluates an expression as a thread: `cuda.threadIdx` is the thread's. Its loads count for nothing."""

    def __init__(self, thread, evaluate):
        super().__init__(evaluate)
        self.current_thread = thread
        if thread is not None and thread.grid.world.memory_model is not None:
            self.grid, self.block = thread.grid, thread.block  # a load depends on what the block sees


@contextlib.contextmanager
def _unobserved(world):
    """Let memory accesses affect neither the order of threads nor what is recorded of them."""
    names = "preempt", "races", "profile", "observers", "events"
    kept, loads_left = {name: getattr(world, name) for name in names}, memory.loads_left
    world.preempt, world.races, world.profile, world.observers, world.events = 0, None, None, [], None
    memory.loads_left = sys.maxsize  # they are no polls
    try:
        yield
    finally:
        vars(world).update(kept)
        memory.loads_left = loads_left


def evaluate(expression, thread, frame):
    """Return the value of an expression (text or code) in a frame of a thread; the expression's errors propagate."""

    def run():
        # As one dictionary, so that comprehensions see local variables.
        return eval(expression, {**frame.f_globals, **frame.f_locals})

    with _unobserved(thread.grid.world), np.errstate(all="ignore"):
        return _Evaluation(thread, run).switch()


def describe(value):
    """Format a variable's value in one line."""
    if isinstance(value, (memory.Array, memory.Pointer)):
        text = np.array2string(value.array, threshold=8, edgeitems=3, separator=" ")
        return f"{value:}: {' '.join(text.split())}"
    text = str(value) if isinstance(value, (np.generic, int, float)) else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def show(value):
    """Format the value of an expression: arrays with their elements, NumPy's scalars as numbers."""
    if type(value) is tuple:
        return f"({', '.join(map(show, value))}{',' * (len(value) == 1)})"
    return repr(value) if isinstance(value, str) else str(value)


def parse_count(text, what="the count"):
    """Return the number that a command takes, 1 if there is none."""
    if not text:
        return 1
    if not text.isdecimal() or not int(text):
        raise CommandError(f"{what} is {text!r}, but must be a number from 1 on")
    return int(text)
