"""The steps of a lesson: each is checked, counted, timed or looked up in a record, and judged.

A page has a kernel with a hole; a step fills the hole, and its cell is the function that fills it:

    @factory
    def make_align(scan):
        @cuda.jit
        def align(...): ...
        return align

    lesson.step("2 Blelloch", make_align(blelloch_scan), hole=blelloch_scan)
"""

import functools
import html
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.records.kernel_hash import ast_hash
from moe_numba.course.bench.timing import kernel_times
from moe_numba.course.steps import recorded
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.score import Comparison, Score, compare, score
from moe_numba.course.steps.simulate import in_simulator

_made: dict[int, tuple] = {}  # id of what a factory has made -> factory, arguments, and the thing, which keeps the id


def factory(make: Callable) -> Callable:
    """Cache what a function makes, and remember how: the simulator's process makes it again where a GPU runs kernels.

    Its arguments are functions and kernels of the page, which other factories may have made, and plain constants.
    """
    cached = functools.cache(make)

    @functools.wraps(make)
    def made(*arguments):
        result = cached(*arguments)
        _made[id(result)] = make, arguments, result
        return result

    return made


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
    kernel : callable
        ``kernel(version)`` is the kernel of a version whose work is counted.
    kernels : callable
        ``kernels(version)`` are all that ``timed`` launches: a recorded time belongs to exactly them.
    """

    check: Callable[[Any], str | None]
    once: Callable[[Any], object]
    timed: Callable[[Any], list[Callable]]
    kernel: Callable[[Any], Any] = lambda version: version
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
        self.steps: dict[str, Step] = {}

    def step(
        self, name: str, version: Any, *, hole: Any = None, after: str | None = None, predicted_us: float | None = None
    ) -> "Step":
        """Check a version, count its work, time it, compare it with the step before, and display the result.

        Parameters
        ----------
        name : str
            Of the row in the record. A cell that runs again replaces its step.
        version : object
            What `Run` takes, made by a `factory`.
        hole : device function, optional
            Count only what it does, and the functions that it calls.
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
            raise ValueError(f"after is {after!r}; the steps before {name!r} are {names[: names.index(name)]}")
        before = self.steps.get(after or (names[names.index(name) - 1] if names.index(name) else ""))
        if fault := self.fault(version):
            raise WrongResult(f"{name}: {fault}")
        us, row = self._times(name, version, before, predicted_us)
        counted = self._score(name, version, hole)
        step = Step(name, version, counted, before, us, row, predicted_us, self._time_text(name, version, us, row))
        edited = self.steps.get(name)
        step.edited_from = edited.score if edited and edited.score.rows != counted.rows else None
        self.steps[name] = step
        _display(step)
        return step

    def fault(self, version: Any) -> str | None:
        """Return what is wrong with a version, or None. In the simulator also a race that did not spoil a result."""
        if not simulator.ENABLED:
            return self.run.check(version)
        found = next(filter(None, (self._checked(version, seed) for seed in range(self.seeds))), None)
        raced = next(filter(None, (self._checked(version, seed, True) for seed in range(self.seeds))), None)
        if found and raced and raced != found:
            return f"{found}\n{raced}"
        return found or raced

    def _checked(self, version, seed, races=False):
        try:
            with simulator.seed(seed), simulator.races(races):
                return self.run.check(version)
        except simulator.SimulatorError as error:
            return f"{type(error).__name__}: {error}"

    def _score(self, name, version, hole):
        if simulator.ENABLED:
            return self.count(version, hole, name)
        expression, functions = _expression(version)
        of, more = _expression(hole) if hole is not None else ("", [])
        found = in_simulator(_count_again, self.home, name, expression, of, functions=[*functions, *more])
        return Score(name, {(section, row): number for section, row, number in found}, self.gpu.upper())

    def count(self, version: Any, hole: Any = None, name: str = "") -> Score:
        """Return the score of a version, or of a hole in it; the simulator counts."""
        run = lambda _: self.run.once(version)
        return score(self.run.kernel(version), run, hole, name, self.gpu.upper())

    def _times(self, name, version, before, predicted_us):
        """Return the kernel time, measured now or recorded for exactly this code, and the row of the record."""
        if simulator.ENABLED:
            us = [recorded.recorded_us(self.topic, name, k, self.size, self.gpu) for k in self.run.kernels(version)]
            return (us[0] if None not in us else None), None
        calls = {step.name: self.run.timed(step.version) for step in (before,) if step}
        times = kernel_times(calls | {name: self.run.timed(version)})
        torch.cuda.synchronize()
        compared = [round(times[each].median, 3) for each in (*calls, name)]
        more = dict(after=before.name, compared_us=compared, predicted_us=predicted_us) if before else {}
        row = records.row(name, config=self.config, size=self.size, dtype=self.dtype, kernel=times[name], **more)
        return times[name].median, row

    def _time_text(self, name, version, us, row):
        if row is not None:
            return f"measured: {records.format_us(us)} us"
        kernels = self.run.kernels(version)
        texts = [recorded.describe(self.topic, name, kernel, self.size, self.gpu) for kernel in kernels]
        return next((text for text in texts if not text.startswith("recorded")), texts[0])

    def summary(self) -> "Summary":
        """Return a table of all steps."""
        return Summary(list(self.steps.values()))

    def save(self, *, results: Any = None) -> None:
        """Write the record of the steps that a GPU has timed."""
        rows = [step.row for step in self.steps.values() if step.row]
        if not rows:
            print("not timed: no record is written")
            return
        print(f"{len(rows)} rows written to {records.write(self.topic, rows, results=results)}")


def _count_again(home, name, version, hole):
    """Make a version again in the simulator's process; return the rows of its score."""
    module, _, attribute = home.partition(":")
    lesson, page = getattr(importlib.import_module(module), attribute), vars(sys.modules["__main__"])
    counted = lesson.count(eval(version, page), eval(hole, page) if hole else None, name)  # names of the page's functions
    return [(section, row, number) for (section, row), number in counted.rows.items()]


def _expression(thing):
    """Return Python that makes a thing again, and the functions of the page that it names."""
    if id(thing) in _made:
        make, arguments, _ = _made[id(thing)]
        parts = [_expression(argument) for argument in arguments]
        text = f"{make.__name__}({', '.join(text for text, _ in parts)})"
        return text, [make, *(function for _, functions in parts for function in functions)]
    if isinstance(thing, str | int | float | bool | None):
        return repr(thing), []
    if isinstance(thing, tuple):
        parts = [_expression(each) for each in thing]
        return f"({' '.join(text + ',' for text, _ in parts)})", [f for _, functions in parts for f in functions]
    if not hasattr(thing, "__name__"):
        raise TypeError(f"{thing!r} cannot be made again in the simulator: mark what makes it with @factory")
    return thing.__name__, [thing]


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
    edited_from: Score | None = None

    @property
    def judgement(self) -> Judgement | None:
        """The prediction beside what came, if both times are known."""
        if self.predicted_us is None or self.before is None or self.us is None or self.before.us is None:
            return None
        before, now = self.row["compared_us"] if self.row else (self.before.us, self.us)
        return Judgement(before, now, before - self.predicted_us)

    @property
    def comparison(self) -> Comparison:
        """The score beside that of the step before, and of the code before an edit."""
        before = [self.before.score] if self.before else []
        if self.edited_from is not None:
            before.append(Score("before your edit", self.edited_from.rows, self.edited_from.gpu))
        return compare(*before, self.score)

    def sentences(self) -> list[str]:
        """Return what is said of the times."""
        time = self.time_text
        if self.us is not None and self.before and self.before.us is not None:
            time = f"{time}, {records.format_us(self.before.us)} us before"
        if self.judgement:
            return [f"{time}; {self.judgement}"]
        if self.predicted_us is not None:
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
class Summary:
    """A table of steps: time, what each saved, what was predicted."""

    steps: Sequence[Step]

    def rows(self) -> list[list[str]]:
        """Return the cells of each step."""
        found = []
        for step in self.steps:
            us = "" if step.us is None else records.format_us(step.us)
            model = f"{step.score.chain_us:.2f}"
            ratio = "" if None in (step.us, step.before and step.before.us) else f"{step.before.us / step.us:.2f}"
            found.append([step.name, us, ratio, model, str(step.judgement or "")])
        return found

    _HEADINGS = "step", "us", "times as fast", "model, us", "prediction"

    def __str__(self):
        lines = [list(self._HEADINGS), *self.rows()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self._HEADINGS))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self):
        cells = lambda tag, texts: "<tr>" + "".join(f"<{tag}>{html.escape(t)}</{tag}>" for t in texts) + "</tr>"
        body = "".join(cells("td", line) for line in self.rows())
        return f'<div style="overflow-x: auto"><table>{cells("th", self._HEADINGS)}{body}</table></div>'


def _display(step):
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(step)
    else:
        display(step)
