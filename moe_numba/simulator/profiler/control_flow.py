"""Control flow of a kernel: which functions belong to it, and in which iterations of its loops a line is executed.

Python's bytecode gives the loops of a function; the offsets of a lane's line events tell when an iteration begins.
"""

import ast
import dis
import functools
import importlib.util
import itertools
import linecache
import os

from moe_numba import simulator
from moe_numba.simulator.core import kernel
from moe_numba.simulator.core.errors import is_internal_file
from moe_numba.simulator.core.source import NoSource, definition, instruction_starts, written


def belongs_to_kernel(code, profiled):
    """Return whether a function belongs to a profiled kernel: not to the simulator, PTX instructions or a library."""
    path = code.co_filename
    if path == profiled.file:
        return True
    if path.startswith("<"):  # generated code, unless a notebook has registered it
        return path in linecache.cache
    if path.startswith(_STANDARD_LIBRARY):
        return "site-packages" in path
    return not is_internal_file[path] and not path.startswith(_LIBRARIES)


def passes_calls_on(code):
    """Return whether a function that is none of the kernel's calls device functions: instructions that ptx makes."""
    path = code.co_filename
    return path == _KERNEL_FILE or path.startswith(_PTX)


def _folders_of(*names):
    """Return the folders of those packages that are installed."""
    found = filter(None, map(importlib.util.find_spec, names))
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in found if spec.origin)


_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_KERNEL_FILE = kernel.__file__
_PTX = os.path.join(os.path.dirname(simulator.__path__[0]), "ptx") + os.sep
_LIBRARIES = _folders_of("numpy", "numba", "numba_cuda", "greenlet")


@functools.lru_cache(maxsize=1024)
def statements(code):
    """Return, for each line of a function's statements, the first line of its innermost statement.

    The lines of a compound statement such as `if` are those of its header. A statement on the line of the one before,
    as in `if x: y = 1`, has no line of its own. Empty for a function whose source is not known.
    """
    try:
        tree = definition(written.get(code, code))
    except NoSource:
        return {}
    found = {}
    for node in ast.walk(tree):  # outer statements first
        if isinstance(node, ast.stmt) and node is not tree:
            end = max(node.lineno, node.body[0].lineno - 1) if hasattr(node, "body") else node.end_lineno
            first = found.get(node.lineno, node.lineno)
            found.update(dict.fromkeys(range(node.lineno, end + 1), first))
    return found


class FunctionCode:
    """The loops and the line counters of one function of a kernel."""

    def __init__(self, code, kernel):
        self.code, self._kernel, self._lines, self._moves = code, kernel, {}, {}
        self._loops, self._instructions, self._statements = _loops(code), instruction_starts(code), statements(code)

    def counters(self, line):
        if line not in self._lines:
            self._lines[line] = self._kernel.line(self.code, line)
        return self._lines[line]

    def instruction(self, frame):
        """Return the bytecode offset of the instruction that a frame executes."""
        return self._instructions[frame.f_lasti]

    def move(self, frame, before, iteration):
        """Return the counters of a frame's new line and of its statement, and the iterations of the loops around it.

        The numbers of the iterations start with the outermost loop. `iteration` are those of the lane's last line
        event, which was at bytecode offset `before`.
        """
        after = frame.f_lasti
        move = self._moves.get((before, after))
        if move is None:
            line = frame.f_lineno
            counters = self.counters(line), self.counters(self._statements.get(line, line))
            move = self._moves[before, after] = *counters, *self._loop_changes(before, after)
        counters, statement, kept, repeats, entered = move
        if repeats:
            iteration = (*iteration[: kept - 1], iteration[kept - 1] + 1)
        elif kept < len(iteration):
            iteration = iteration[:kept]
        return counters, statement, iteration + entered

    def _loop_changes(self, before, after):
        """Return the number of loops that are not left, whether the innermost of them repeats, and a 0 per new loop."""
        around = [loop for loop in self._loops if after in loop.body]
        kept = [loop for loop in around if before in loop.body]
        repeats = bool(kept) and kept[-1].repeats(before, after)
        return len(kept), repeats, (0,) * (len(around) - len(kept))


class _Loop:
    """The bytecode offsets of a loop, and those of a second copy of its condition at its end, if it has one to mind.

    Python tests the condition of a `while` loop before the loop and again at its end. With `continue`, which jumps to
    the first test, both belong to the loop, and the second one to the next iteration.
    """

    def __init__(self, start, end, latch):
        self.body, self._latch = range(start, end + 1), latch

    def repeats(self, before, after):
        """Return whether a move between two offsets of the loop begins an iteration."""
        if after >= self._latch:
            return before < self._latch
        return after <= before < self._latch


def _loops(code):
    """Return the loops of a function, outermost first."""
    jumps, ends = {*dis.hasjrel, *dis.hasjabs}, {}
    for instruction in dis.get_instructions(code):
        if instruction.opcode in jumps and instruction.argval <= instruction.offset:
            ends[instruction.argval] = instruction.offset  # the last jump back to it
    lines = [(next(run)[0], line) for line, run in itertools.groupby(code.co_lines(), lambda entry: entry[2])]
    loops = []
    for start, end in sorted(ends.items()):
        latch = end + 1
        while loops and loops[-1].body.start < start < loops[-1].body.stop <= end:
            start = loops.pop().body.start
            header = next(line for first, line in reversed(lines) if first <= start)
            latch = max(first for first, line in lines if line == header and start < first <= end)
        loops.append(_Loop(start, end, latch))
    for loop in loops:
        loop.body = range(loop.body.start, _end_with_break(code, lines, loop.body))
    return loops


def _end_with_break(code, lines, body):
    """Return the offset behind a loop and what Python 3.14 puts behind its jump back: a `break` that ends its body."""
    header = next(line for first, line in reversed(lines) if first <= body.start)
    around = [(first, last) for first, last in _lines_of_loops(code) if first <= (header or 0) <= last]
    if around:
        first_line, last_line = min(around, key=lambda lines: lines[1] - lines[0])
        for offset, line in lines:
            if offset >= body.stop and not first_line < (line or 0) <= last_line:
                return offset
    return body.stop


@functools.lru_cache(maxsize=1024)
def _lines_of_loops(code):
    """Return the first and the last line of each loop's header and body; none if the source is not known."""
    try:
        tree = definition(written.get(code, code))
    except NoSource:
        return []
    loops = (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While)))
    return [(loop.lineno, loop.body[-1].end_lineno) for loop in loops]
