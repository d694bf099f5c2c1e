"""The steps of a lesson: each is checked, counted, timed or looked up in a record, and judged.

A page has a kernel with a hole; a step fills the hole, and its cell is the function that fills it:

    @factory
    def make_align(scan):
        @cuda.jit
        def align(...): ...
        return align

    lesson.step("2 Blelloch", make_align(blelloch_scan))
"""

import functools
import html
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.timing import Stats, kernel_times
from moe_numba.course.steps import recorded
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.score import Comparison, Score, compare, score_of_launches
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.course.steps.simulate import factory as factory  # for pages
from moe_numba.runtime.recording import noted_launches
from moe_numba.simulator.compiler import process


class Run(NamedTuple):
    """What a lesson does with a version of its kernel.

    Attributes
    ----------
    check : callable
        ``check(version)`` launches it on all inputs, with poisoned outputs; it returns None or a sentence on the error.
        Inputs are random ones, some with ties, some with few values.
    once : callable
        ``once(version)`` launches it on the inputs whose work is counted, which are small enough for the simulator.
    timed : callable
        ``timed(version)`` returns calls, one per set of inputs, which a GPU times.
    kernels : callable
        ``kernels(version)`` are all that ``timed`` launches: a recorded time belongs to exactly them.
    """

    check: Callable[[Any], str | None]
    once: Callable[[Any], object]
    timed: Callable[[Any], list[Callable]]
    kernels: Callable[[Any], tuple] = lambda version: (version,)


class Lesson:
    """The steps of a page, in the order of the page.

    Parameters
    ----------
    topic : str
        Name of the record ``docs/results/<gpu>/<topic>.json``.
    run : Run
    home : str
        "module:name" of this lesson, where the simulator's process finds it.
    config, size : dict
        What the times belong to: argument -> value, "num_experts", and "tokens".
    dtype : str
    gpu : str
        Whose recorded times and latencies are shown.
    seeds : int
        Orders of threads under which the simulator checks a version.
    """

    def __init__(
        self,
        topic: str,
        run: Run,
        home: str,
        config: Mapping[str, Any],
        size: Mapping[str, int],
        dtype: str,
        gpu: str = "h200",
        seeds: int = 4,
    ):
        self.topic, self.run, self.home, self.seeds, self.gpu = topic, run, home, seeds, gpu
        self.config, self.size, self.dtype = dict(config), dict(size), dtype
        self.steps = Steps()
        self.diagnosed: dict[str, dict] = {}  # "name: label" -> row, of what `times` has timed
        if simulator.ENABLED:
            process.start()  # it imports the compiler while the reader reads

    def step(self, name: str, version: Any, *, after: str | None = None, predicted_us: float | None = None) -> "Step":
        """Check a version, count its work, time it, and return the result, which a notebook displays.

        Parameters
        ----------
        name : str
            Of the row in the record. A cell that runs again replaces its step.
        version : object
            What `Run` takes, made by a `factory`.
        after : str, optional
            The step that it changes; by default the one before it on the page.
        predicted_us : float, optional
            The kernel time that the page predicts.

        Raises
        ------
        WrongResult
            The version is wrong; the message has the racing lines if there is a race.
        ValueError
            ``after`` is no step.
        """
        names = [*(n for n in self.steps if n != name), name] if name not in self.steps else list(self.steps)
        if after is not None and after not in names[: names.index(name)]:
            known = ", ".join(map(repr, names[: names.index(name)]))
            raise ValueError(f"after is {after!r}; the steps that are right, before {name!r}, are {known or 'none'}")
        before = self.steps.get(after or (names[names.index(name) - 1] if names.index(name) else ""))
        if simulator.ENABLED:
            us, row = self._checked_and_timed(name, version, before, predicted_us)
            counted = self._score(name, version)
        else:
            with ThreadPoolExecutor(1) as pool:  # another process counts meanwhile
                counting = pool.submit(self._score, name, version)
                us, row = self._checked_and_timed(name, version, before, predicted_us)
                counted = counting.result()
        text, compared = self._time_text(name, version, us, row), self._compared(name, version, before, row)
        step = Step(name, version, counted, before, us, row, predicted_us, text, compared)
        edited = self.steps.get(name)
        step.edited_from = edited.score if edited and edited.score.rows != counted.rows else None
        self.steps[name] = step
        return step

    def fault(self, version: Any) -> str | None:
        """Return what is wrong with a version, or None. In the simulator also a race that did not spoil a result."""
        if not simulator.ENABLED:
            return self.run.check(version)
        raced = self._race(version, self.seeds)
        found = raced and next(filter(None, (self._checked(version, seed) for seed in range(self.seeds))), None)
        return f"{raced}\n{found}" if found and found != raced else raced

    def _checked(self, version, seed, races=False):
        try:
            with self.conditions(seed, races):
                return self.run.check(version)
        except simulator.SimulatorError as error:
            return f"{type(error).__name__}: {error}"

    @contextmanager
    def conditions(self, seed: int, races: bool) -> Iterator[None]:
        """Let the simulator run threads in the order of a seed, and detect races or not."""
        with simulator.seed(seed), simulator.races(races):
            yield

    def _race(self, version, seeds):
        """Return the race of a version, or another error, or None.

        An index that a race has spoiled may be out of bounds in one order of threads, where another shows the race.
        """
        other = None
        for seed in range(seeds):
            if (error := self._checked(version, seed, True)) and error.startswith("DataRace"):
                return error
            other = other or error
        return other

    def _score(self, name, version):
        if simulator.ENABLED:
            return self.count(version, name)
        expression, functions = expression_of(version)
        found = in_simulator(_count_again, self.home, name, expression, functions=functions)
        return Score(name, {(section, row): number for section, row, number in found}, self.gpu.upper())

    def count(self, version: Any, name: str) -> Score:
        """Return the score of a version; the simulator counts."""
        return score_of_launches(functools.partial(self.run.once, version), name, self.gpu.upper())

    def _checked_and_timed(self, name, version, before, predicted_us):
        """Return the kernel time, measured now or recorded for exactly this code, and the row of the record."""
        if fault := self.fault(version):
            raise WrongResult(f"{name}: {fault}")
        if not self.is_timed:
            return self.recorded_us(name, self.run.kernels(version)), None
        calls = {step.name: self.run.timed(step.version) for step in (before,) if step}
        times = self.measured(calls | {name: self.run.timed(version)})
        torch.cuda.synchronize()
        compared = [round(times[each].median, 4) for each in (*calls, name)]
        more = dict(after=before.name, compared_us=compared, predicted_us=predicted_us) if before else {}
        row = records.row(name, config=self.config, size=self.size, dtype=self.dtype, kernel=times[name], **more)
        return times[name].median, row

    @property
    def is_timed(self) -> bool:
        """Whether versions are timed here; otherwise recorded times are shown."""
        return not simulator.ENABLED

    def measured(self, calls: Mapping[str, Any]) -> dict[str, Stats]:
        """Return the kernel times of what `Run.timed` returned, measured interleaved."""
        return kernel_times(dict(calls))

    def recorded_us(self, step: str, kernels: Sequence) -> float | None:
        """Return the recorded time of a row for exactly these kernels, or None."""
        return recorded.recorded_us(self.topic, step, kernels, self.size, self.config, self.gpu)

    def _compared(self, name, version, before, row):
        """Return the times of the step before and of a step, interleaved in one run, measured now or recorded."""
        if not self.is_timed and before and before.us is not None:
            about = self.run.kernels(version), self.size, self.config, self.gpu
            row = recorded.recorded_row(self.topic, name, *about)
        return row["compared_us"] if row and before and row.get("after") == before.name else None

    def _time_text(self, name, version, us, row):
        if row is not None:
            return f"measured: {records.format_us(us)} us"
        return recorded.describe(self.topic, name, self.run.kernels(version), self.size, self.config, self.gpu)

    def times(
        self, name: str, calls: Mapping[str, Callable | list[Callable]], versions: Mapping[str, str] | None = None
    ) -> dict[str, float]:
        """Time kernels that diagnose a step, interleaved; return their medians.

        They are no steps: their rows in the record are called "name: label". A call is what `Run.timed` returns. Where
        nothing is timed, each call runs once, and the recorded times are returned, or an empty dict if a label has none
        for exactly the kernels that its call launches. ``versions`` has those of other projects' kernels, by label.
        """
        if not self.is_timed:
            found = {}
            for label, call in calls.items():
                with noted_launches() as launched:
                    self.call(call)
                found[label] = self.recorded_us(f"{name}: {label}", [each.kernel for each in launched.values()])
            return {} if None in found.values() else found
        measured = self.measured(calls)
        for label, stats in measured.items():
            step, about = f"{name}: {label}", dict(config=self.config, size=self.size, dtype=self.dtype)
            self.diagnosed[step] = records.row(step, kernel=stats, version=(versions or {}).get(label), **about)
        return {label: round(stats.median, 3) for label, stats in measured.items()}

    def call(self, call: Any) -> None:
        """Run one call of what `Run.timed` returned."""
        (call[0] if isinstance(call, list) else call)()

    def orders(self, version: Any, seeds: int = 8) -> "Orders":
        """Run a version under several thread orders, and with the race detector, in the simulator."""
        if simulator.ENABLED:
            found = [self._checked(version, seed) for seed in range(seeds)]
            wrong = next(filter(None, found), None)
            return Orders(seeds, sum(map(bool, found)), wrong, self._race(version, seeds))
        expression, functions = expression_of(version)
        return Orders(*in_simulator(_orders_again, self.home, expression, seeds, functions=functions))

    def summary(self) -> "Table":
        """Return a table of all steps: time, what each saved, the estimate, what was predicted."""
        lines = []
        for step in self.steps.values():
            us, faster = "", ""
            if step.us:
                us = records.format_us(step.us)
                faster = f"{step.times[0] / step.times[1]:.2f}" if step.times else ""
            elif found := recorded.lesson_us(self.topic, step.name, self.size, self.config, self.gpu):
                us = f"not timed (the lesson's: {records.format_us(found)})"
            estimated = "" if step.score.us is None else f"{step.score.us:.2f}"
            lines.append([step.name, us, faster, estimated, str(step.judgement or "")])
        return Table(["step", "us", "times as fast", "estimate, us", "prediction"], lines)

    def kept_rows(self) -> list[dict]:
        """Return rows of the present record that a new one keeps, because this machine does not measure them."""
        return []

    def save(self, *others: "Lesson", results: Any = None) -> None:
        """Write the record of what a GPU has timed, also in other lessons of the page, which have other sizes."""
        lessons = self, *others
        rows = [step.row for lesson in lessons for step in lesson.steps.values() if step.row]
        rows += [row for lesson in lessons for row in lesson.diagnosed.values()]
        if not rows:
            print("not timed: no record is written")
            return
        path = records.write(self.topic, [*rows, *self.kept_rows()], results=results)
        print(f"{len(rows)} rows written to {path}")


def _count_again(home, name, version):
    """Make a version again in the simulator's process; return the rows of its score."""
    module, _, attribute = home.partition(":")
    lesson, page = getattr(importlib.import_module(module), attribute), vars(sys.modules["__main__"])
    counted = lesson.count(eval(version, page), name)  # an expression of the page's functions
    return [(section, row, number) for (section, row), number in counted.rows.items()]


def _orders_again(home, version, seeds):
    module, _, attribute = home.partition(":")
    lesson = getattr(importlib.import_module(module), attribute)
    return list(lesson.orders(eval(version, vars(sys.modules["__main__"])), seeds))


class Orders(NamedTuple):
    """What several thread orders made of a kernel; ``str`` is the report."""

    seeds: int
    wrong: int
    error: str | None
    race: str | None

    def __str__(self):
        head = f"wrong under {self.wrong} of {self.seeds} thread orders"
        race = None if self.race and self.race == self.error else self.race or "no race found"
        return "\n".join(filter(None, [f"{head}: {self.error}" if self.wrong else head, race]))

    __repr__ = __str__


class Steps(dict):
    """Name -> `Step` of the steps that are right; another name raises a LookupError that says so."""

    def __missing__(self, name):
        raise LookupError(f"step {name!r} is not there yet: its cell has not run, or its kernel is not right")


@dataclass
class Step:
    """A step's result; notebooks display it.

    Attributes
    ----------
    name : str
    version : object
    score : Score
    before : Step or None
        The step that it is compared with.
    us : float or None
        Kernel time, measured or recorded for exactly this code, in microseconds.
    row : dict or None
        Of the record, if it was measured now.
    predicted_us : float or None
    time_text : str
    compared_us : sequence or None
        Kernel times of the step before and of this one, interleaved in one run; they are the ones to compare.
    edited_from : Score or None
        Of the same step before the reader's last edit.
    """

    name: str
    version: Any
    score: Score
    before: "Step | None"
    us: float | None
    row: dict | None
    predicted_us: float | None
    time_text: str
    compared_us: Sequence[float] | None = None
    edited_from: Score | None = None

    @property
    def times(self) -> Sequence[float] | None:
        """Times of the step before and of this one, if both are known."""
        if self.before is None or self.us is None or self.before.us is None:
            return None
        return self.compared_us or (self.before.us, self.us)

    @property
    def judgement(self) -> Judgement | None:
        """What the step was predicted to save of the step before, as timed there, and what it saved of it here."""
        if self.predicted_us is None or self.times is None:
            return None
        return Judgement(*self.times, self.before.us - self.predicted_us)

    @property
    def comparison(self) -> Comparison:
        """The score beside that of the step before, and of the code before an edit."""
        before = [self.before.score] if self.before else []
        if self.edited_from is not None:
            before.append(Score("before your edit", self.edited_from.rows, self.edited_from.gpu))
        return compare(*before, self.score, timed=self.times is not None and self.edited_from is None)

    def sentences(self) -> list[str]:
        """Return what is said of the times."""
        time = self.time_text
        if self.times:
            time = f"{time}, {records.format_us(self.times[0])} us before"
        if self.judgement:
            return [f"{time}; {self.judgement}"]
        if self.predicted_us is not None and "predicted" not in time:
            return [f"{time}; predicted {records.format_us(self.predicted_us)} us"]
        return [time]

    def __str__(self):
        return "\n".join([f"{self.name}: right", *self.sentences(), str(self.comparison)])

    __repr__ = __str__

    def _repr_html_(self):
        times = "".join(f"<div>{html.escape(sentence)}</div>" for sentence in self.sentences())
        return (
            f'<div style="border-left: 4px solid rgb(46, 160, 67); padding: .2em .8em">'
            f"<b>{html.escape(self.name)}: right</b>{times}{self.comparison._repr_html_()}</div>"
        )


@dataclass(frozen=True)
class Table:
    """A table, as text and as HTML: the one way in which a page shows one. ``note`` is a text below it."""

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self):
        lines = [list(self.headings), *self.lines]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headings))]
        rows = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*rows, self.note] if self.note else rows)

    __repr__ = __str__

    def _repr_html_(self):
        cells = lambda tag, texts: "<tr>" + "".join(f"<{tag}>{html.escape(t)}</{tag}>" for t in texts) + "</tr>"
        body = "".join(cells("td", line) for line in self.lines)
        style = "<style>.steps :is(td, th) { text-align: left; vertical-align: top }</style>"
        table = f"<table>{cells('th', self.headings)}{body}</table>"
        note = f"<div>{html.escape(self.note)}</div>" if self.note else ""
        return f'{style}<div class="steps" style="overflow-x: auto">{table}{note}</div>'
