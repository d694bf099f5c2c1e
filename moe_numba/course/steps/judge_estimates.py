"""Compares estimates with the recorded times of one-GPU lessons' steps.

    python -m moe_numba.course.steps.judge_estimates            print the recorded comparison
    python -m moe_numba.course.steps.judge_estimates run NAME   estimate a lesson's steps again, and record them

`run` executes the cells of a lesson in the simulator with the sizes of the GPU, and estimates each step instead of
checking it. Cells that fail or take too long, such as those of figures, are left out; so are steps whose sizes are not
those of the record. A page with a `Ladder` takes from ten minutes to an hour, one with a `Lesson` a minute.
"""

import argparse
import ast
import contextlib
import json
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe_numba.course.bench import records
from moe_numba.course.pages.topics import FIRST_EDITION
from moe_numba.course.steps import estimate
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.lesson import Lesson, Step
from moe_numba.runtime.changed_source import SourceLoader

GPU = "H200"
# Lesson -> about how many blocks of larger grids run (None for all, which blocks that wait for one another need), and
# the names that keep their sizes of the simulator.
LESSONS = {
    "01_gate_prompt": (8, ()),
    "02_gate_decode": (None, ()),
    "03_align_published": (None, ()),
    "04_align_one_launch": (None, ()),
    "10_dispatch_layout": (None, ()),
}
_CELL_S, _STEP_S = 60, 900  # longest time of a cell, and of a step
_SIMULATED = "SIMULATED", "simulator.ENABLED"


class _TooLong(Exception):
    pass


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raise `_TooLong` after so many seconds; the limit around it starts anew."""

    def stop(*_):
        raise _TooLong(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(_CELL_S if before not in (signal.SIG_DFL, signal.SIG_IGN) else 0)


class _GPUSizes(ast.NodeTransformer):
    """Replaces `NAME = small if SIMULATED else large` by `NAME = large`, but for some names and for devices."""

    def __init__(self, kept):
        self.kept = {"DEVICE", *kept}

    def visit_Assign(self, node):
        names = {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        value = node.value
        if isinstance(value, ast.IfExp) and ast.unparse(value.test) in _SIMULATED and not names & self.kept:
            if "torch.cuda" not in ast.unparse(value.orelse):
                node.value = value.orelse
        return node


def cells_of(source: str, kept: tuple = ()) -> list[str]:
    """Return the code cells of a py:percent notebook, with the sizes of the GPU but for the ``kept`` names."""
    cells = (cell.partition("\n") for cell in re.split(r"^# %%", source, flags=re.MULTILINE)[1:])
    code = [body for head, _, body in cells if "[markdown]" not in head and body.strip()]
    changed = lambda cell: ast.unparse(_GPUSizes(kept).visit(ast.parse(cell)))
    return [changed(cell) if any(name in cell for name in _SIMULATED) else cell for cell in code]


class _Steps:
    """Estimates steps of ladders and lessons instead of running them; its `rows` are those of the comparison."""

    def __init__(self, blocks):
        self.blocks, self.rows = blocks, []

    def step(
        self, ladder: Ladder, name: str, call: Callable, *, timed: Any = None, size=None, config=None, **_
    ) -> None:
        """Stand in for `Ladder.step`."""
        ladder.rows = [row for row in ladder.rows if row["step"] != name] + [records.row(name)]
        row = records.find_step((ladder.record or {}).get("rows", ()), name) or {}
        if name.startswith("final"):
            print(f"{name:<24} left out: the package plans its launch for the simulated GPU, with fewer blocks")
            return
        if row.get("size") != (size or ladder.size) or row.get("config") != (config or ladder.config):
            print(f"{name:<24} left out: it was recorded with other sizes, or not at all")
            return
        if "kernel_us" in row:  # inputs that rotate among several sets come from DRAM
            self._compare(ladder.topic, name, row["kernel_us"]["median"], call, isinstance(timed, list))

    def step_of_lesson(self, lesson: Lesson, name: str, version: Any, **_) -> Step:
        """Stand in for `Lesson.step`."""
        us = lesson.recorded_us(name, lesson.run.kernels(version))
        step = lesson.steps[name] = Step(name, version, None, None, us, None, None, "")
        if us is None:
            print(f"{name:<24} left out: this code was not recorded with these sizes")
        else:
            self._compare(lesson.topic, name, us, lambda: lesson.run.once(version))
        return step

    def _compare(self, topic, step, recorded_us, call, cold=False):
        try:
            with _limit(_STEP_S):
                found = estimate.estimate(call, GPU, cold=cold, blocks=self.blocks)
        except Exception as error:  # a step of torch alone launches no kernel that the simulator counts
            print(f"{step:<24} left out: {type(error).__name__}: {error}")
            return
        times = {"recorded_us": recorded_us, "estimated_us": round(found.us, 3)}
        self.rows.append({"topic": topic, "step": step, **times, "limited_by": found.limited_by})
        print(table(self.rows[-1:]), flush=True)


def run(lesson: str) -> list[dict]:
    """Return the comparison of a lesson's steps; raise a ValueError for a lesson that is not in `LESSONS`."""
    if lesson not in LESSONS:
        raise ValueError(f"lesson is {lesson!r}; it must be one of {', '.join(LESSONS)}")
    blocks, kept = LESSONS[lesson]
    steps, page = _Steps(blocks), types.ModuleType("__main__")
    Ladder.step = lambda ladder, *args, **options: steps.step(ladder, *args, **options)
    Ladder.times = lambda ladder, name, calls: (ladder.record or {}).get("diagnosis", {}).get(name)
    Ladder.measure_all = Ladder.save = lambda *_, **__: None
    Lesson.step = lambda lesson, *args, **options: steps.step_of_lesson(lesson, *args, **options)
    Lesson.times, Lesson.save = lambda *_: {}, lambda *_, **__: None
    sys.modules["__main__"], page.display = page, lambda *_, **__: None
    source = (records.repository() / "notebooks" / f"{lesson}.py").read_text()
    for number, cell in enumerate(cells_of(source, kept)):
        try:
            with _limit(_CELL_S):
                SourceLoader(cell, f"{lesson}/cell_{number}.py").exec_module(page)
        except Exception as error:
            print(f"cell {number} left out: {type(error).__name__}: {error}"[:160], flush=True)
    return steps.rows


def table(rows: list[dict]) -> str:
    """Return the comparison as text: recorded and estimated microseconds, their ratio, and what limits."""
    line = "{topic:<26}{step:<26}{recorded_us:>10.2f}{estimated_us:>10.2f}{ratio:>7.2f}  {limited_by}"
    return "\n".join(line.format(ratio=row["estimated_us"] / row["recorded_us"], **row) for row in rows)


def path() -> Path:
    """Return the file with the comparison of all lessons."""
    return records.repository() / "docs" / "results" / "estimates.json"


def save(rows: list[dict]) -> None:
    """Replace the steps of the rows' topics in the recorded comparison."""
    gpu, topics = GPU.lower(), {row["topic"] for row in rows}
    known = json.loads(path().read_text()) if path().is_file() else {}
    kept = [row for row in known.get(gpu, ()) if row["topic"] not in topics | FIRST_EDITION.keys()]
    known[gpu] = sorted([*kept, *rows], key=lambda row: row["topic"])
    lines = {name: ",\n".join(f"  {json.dumps(row)}" for row in each) for name, each in known.items()}
    path().write_text("{\n" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in lines.items()) + "\n}\n")
    estimate.judged.cache_clear()


def main(arguments: list[str] | None = None) -> None:
    """Print the recorded comparison, after running lessons if ``arguments`` name some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("run").add_argument("lesson", choices=[*LESSONS])
    options = parser.parse_args(arguments)
    if options.command:
        save(run(options.lesson))
    print(table(estimate.judged(GPU)))
    print(estimate.describe_error(GPU))


if __name__ == "__main__":
    main()
