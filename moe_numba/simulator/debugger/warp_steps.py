"""What the lanes of a warp execute together, reconstructed from the lines that each of them executed.

The simulator runs the lanes of a warp one after another, each until it waits. A GPU executes a line for all lanes that
are at it, and after a branch lets the lanes that are behind catch up. `align` orders the lanes' lines in this way: the
lanes in the deepest call, and of these the lanes at the first line, execute next.
"""

from typing import NamedTuple


class Line(NamedTuple):
    """One line executed by one lane: the launch's step at which it did, the call that it is in, and its number."""

    step: int
    calls: tuple  # (code, instruction) of each calling function, outermost first, and then the function itself
    line: int


class WarpStep(NamedTuple):
    """A line that some lanes of a warp execute together: the step of the launch at which each of them does."""

    steps: dict[int, int]


def align(lanes: dict[int, list[Line]]) -> list[WarpStep]:
    """Return what the warp executes, in order, from the lines that each lane executed."""
    done, result = dict.fromkeys(lanes, 0), []
    while True:
        following = {lane: lines[done[lane]] for lane, lines in lanes.items() if done[lane] < len(lines)}
        if not following:
            return result
        first = min(following.values(), key=lambda line: (-len(line.calls), line.line))
        together = {n: line.step for n, line in following.items() if line[1:] == first[1:]}
        for lane in together:
            done[lane] += 1
        result.append(WarpStep(together))


def find(warp_steps, lane, step):
    """Return the number of the warp step that a lane's last line up to a step of the launch belongs to; -1 if none."""
    return max((i for i, w in enumerate(warp_steps) if w.steps.get(lane, step + 1) <= step), default=-1)
