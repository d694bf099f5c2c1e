"""The score of a step without a GPU: what the simulator counts, before and after.

A score has no single number. The critical path comes first: from barrier to barrier, what the warp does that has most
to do, and what a model makes of it, with its error. Then come totals of all warps, which the schedulers and the memory
must serve.

    before, after = (score(make_kernel(hole), run, hole) for hole in (one_thread, tree))
    compare(before, after)          # a table, also as HTML
"""

import contextlib
import html
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moe_numba import simulator
from moe_numba.course.steps.estimate import NoCompiler, describe_error, error_factor, estimate_of, part_us
from moe_numba.simulator.core.typed_code import reachable
from moe_numba.simulator.profiler.report import KernelProfile, Part

PATH, TOTAL, MODEL, COMPILER = "critical path", "all warps", "model", "compiler"
_PATH_ROWS = {
    "global_load_requests": "global loads",
    "global_store_requests": "global stores",
    "global_atomic_requests": "global atomics",
    "shared_load_requests": "shared loads",
    "shared_store_requests": "shared stores",
    "shared_atomic_requests": "shared atomics",
    "bank_conflicts": "bank conflicts",
    "shuffles": "shuffles",
    "votes": "votes",
    "matches": "matches",
    "reductions": "reductions",
    "syncwarps": "syncwarps",
    "barriers": "barriers",
    "executions": "source lines",
}
_TOTAL_ROWS = {
    "executions": "source lines",
    "global_load_sectors": "sectors loaded",
    "global_store_sectors": "sectors stored",
    "shared_load_wavefronts": "wavefronts, shared loads",
    "shared_store_wavefronts": "wavefronts, shared stores",
    "bank_conflicts": "bank conflicts",
    "global_atomic_requests": "global atomics",
    "shared_atomic_requests": "shared atomics",
    "warp_contention": "atomics on one address",
    "requested_bytes": "bytes, global memory",
    "shared_bytes": "bytes, shared memory",
    "distributed_shared_bytes": "bytes, other CTAs' shared memory",
    "async_bytes": "bytes, asynchronous copies",
    "peer_bytes": "bytes, other ranks",
}
_CONTENTION = _TOTAL_ROWS["warp_contention"]
_EXPLANATIONS = {
    PATH: "between two barriers, of the warp that has most to do, summed over all of them",
    TOTAL: "what the schedulers must issue and the memory must serve",
    MODEL: "what `estimate` makes of the machine code and these counts",
    COMPILER: "what the compiler made of the kernel",
}


@dataclass(frozen=True)
class Score:
    """What a kernel, or the functions of a hole in it, do in one run.

    Attributes
    ----------
    name : str
        Heads the column of a table.
    rows : dict
        (section, row) -> number; a section is `PATH`, `TOTAL`, `MODEL` or `COMPILER`. All rows, zeros included.
    gpu : str
        Whose time the model estimates.
    """

    name: str
    rows: dict[tuple[str, str], float]
    gpu: str = "H200"

    def __getitem__(self, row: str) -> float:
        """Return a number of the critical path by its row, such as "shuffles"."""
        if (PATH, row) not in self.rows:
            raise KeyError(f"a critical path has no row {row!r}; rows are {', '.join(_PATH_ROWS.values())}")
        return self.rows[PATH, row]

    @property
    def us(self) -> float | None:
        """The estimated time in microseconds: of all launches, or of one block where only a part of a kernel counts.

        None if a lesson's score has no such estimate.
        """
        return self.rows.get((MODEL, "time"))

    def __str__(self):
        return str(compare(self))

    def _repr_html_(self):
        return compare(self)._repr_html_()


def count(
    kernel: Any, run: Callable[[Any], object], hole: Callable | None = None, gpu: str | None = None
) -> KernelProfile | Part:
    """Profile a kernel, or only what a device function in it and those that it calls do.

    Parameters
    ----------
    kernel : Kernel
    run : callable
        ``run(kernel)`` launches it, on small inputs.
    hole : device function, optional
    gpu : str, optional
        Compile for this GPU, too, which takes some seconds.

    Raises
    ------
    RuntimeError
        Kernels run on a GPU here: call this by ``steps.simulate.in_simulator``.
    ValueError
        ``run`` did not launch the kernel, or that did not call ``hole``.
    """
    if not simulator.ENABLED:
        raise RuntimeError(
            "the simulator counts, and kernels run on a GPU here: call this by steps.simulate.in_simulator"
        )
    with simulator.profile(gpu) as profile:
        run(kernel)
    if kernel.__name__ not in [each.name for each in profile.kernels]:
        raise ValueError(f"run did not launch kernel {kernel.__name__}, so there is nothing to count")
    counted = profile[kernel.__name__]
    if hole is None:
        return counted
    inside = {function.__name__ for function in reachable(hole)}
    if hole.__name__ not in counted.functions:
        raise ValueError(f"kernel {kernel.__name__} did not call {hole.__name__}")
    return counted.part(*(name for name in counted.functions if name in inside))


def score(
    kernel: Any, run: Callable[[Any], object], hole: Callable | None = None, name: str = "", gpu: str = "H200"
) -> Score:
    """Count what a kernel does, or the functions of a hole in it; parameters and errors are those of `count`.

    ``name`` heads the column, by default the name of the hole or the kernel. The kernel is compiled for ``gpu``. The
    total of instructions is wrong for loops that the compiler unrolls; the time takes account of that.
    """
    return Score(name or (hole or kernel).__name__, _rows(count(kernel, run, hole, gpu), gpu), gpu)


def score_of_launches(run: Callable[[], object], name: str, gpu: str = "H200") -> Score:
    """Count what all kernels do that ``run()`` launches one after another: critical paths and estimates add up."""
    with simulator.profile(gpu) as profile:
        run()
    return score_of_kernels(profile.kernels, name, gpu)


def score_of_kernels(
    kernels: Iterable[KernelProfile], name: str, gpu: str = "H200", *, cold: bool = False, bounds: bool = False
) -> Score:
    """Return the score of kernels that were profiled for a GPU; if only some blocks ran, totals are for all.

    With ``cold`` their inputs come from DRAM. With ``bounds`` the model also has a row for each resource.
    """
    kernels, rows = list(kernels), {}
    for counted in kernels:
        share = sum(launch["blocks"] for launch in counted.launches) / sum(
            math.prod(launch["grid"]) for launch in counted.launches
        )
        for key, number in _rows(counted, gpu).items():
            if key[0] == TOTAL and key[1] not in (_CONTENTION, "launches"):
                number = round(number / share)
            before = rows.get(key, 0)
            rows[key] = max(before, number) if key == (TOTAL, _CONTENTION) else before + number
    model = {}
    with contextlib.suppress(NoCompiler):
        estimate = estimate_of(kernels, gpu, cold)
        model = {(MODEL, "time"): estimate.us} | {(MODEL, row): us for row, us in estimate.bounds.items() if bounds}
    paths = {key: number for key, number in rows.items() if key[0] == PATH}
    return Score(name, paths | model | {key: number for key, number in rows.items() if key[0] == TOTAL}, gpu)


def _rows(counted, gpu):
    path, total = counted.critical_path, counted.total
    rows: dict[tuple[str, str], float] = {(PATH, row): getattr(path, name) for name, row in _PATH_ROWS.items()}
    with contextlib.suppress(NoCompiler):
        rows[MODEL, "time"] = part_us(counted, gpu)
    rows[TOTAL, "instructions"] = counted.estimated_instructions or 0
    rows |= {(TOTAL, row): getattr(total, name) for name, row in _TOTAL_ROWS.items()}
    rows[TOTAL, "launches"] = len(counted.kernel.launches)
    return rows


@dataclass(frozen=True)
class Comparison:
    """A table of scores, one column each, as text and as HTML; with two of them it says where they disagree.

    It does not say so of scores whose kernels are ``timed``: there a GPU has decided.
    """

    scores: tuple[Score, ...]
    timed: bool = False

    def rows(self) -> Iterator[tuple[str, str, list[float]]]:
        """Yield (section, row, numbers) of rows in which a score is not zero; of several scores those that differ."""
        for section, row in self.scores[0].rows:
            numbers = [each.rows.get((section, row), 0) for each in self.scores]
            if any(numbers) and (len(numbers) == 1 or len(set(numbers)) > 1):
                yield section, row, numbers

    @property
    def notes(self) -> list[str]:
        """Sentences below the table: rows that do not differ, the model's error, and what only a GPU decides."""
        if len(self.scores) == 1:
            return [describe_error(self.scores[0].gpu)] if self.scores[0].us is not None else []
        same: dict[str, list[str]] = {}
        for (section, row), number in self.scores[0].rows.items():
            if number and all(each.rows.get((section, row)) == number for each in self.scores):
                same.setdefault(section, []).append(f"{row} {_text(section, number)}")
        unchanged = "; ".join(f"{section}: {', '.join(rows)}" for section, rows in same.items())
        estimated = None not in (each.us for each in self.scores[-2:])
        verdict = [self._verdict(*self.scores[-2:])] if estimated and not self.timed else []
        return [*([f"Unchanged: {unchanged}."] if unchanged else []), *verdict]

    def _verdict(self, before, after):
        """Say whether the estimate and the executed lines agree, and whether the difference is beyond the error."""
        gain = before.us / after.us if after.us else float("inf")
        lines = after.rows[TOTAL, "source lines"] / max(before.rows[TOTAL, "source lines"], 1)
        if gain > 1 and lines > 1:
            agree = "The estimate is shorter, but all warps together execute more source lines"
        elif gain < 1 and lines < 1:
            agree = "The estimate is longer, but all warps together execute fewer source lines"
        elif max(gain, 1 / gain) <= error_factor(after.gpu):
            agree = "The estimates differ by less than the model's error"
        else:
            what = "faster" if gain > 1 else "slower"
            return f"The estimate and the executed source lines agree: {what}, by more than the model's error."
        return f"{agree}: only a GPU decides."

    def __str__(self):
        names, lines, section = [each.name for each in self.scores], [], None
        width = max(12, *(len(name) + 2 for name in names))
        lines.append(" " * 34 + "".join(name.rjust(width) for name in names))
        for of, row, numbers in self.rows():
            if of != section:
                section = of
                lines.append(f"{of}: {_EXPLANATIONS[of]}")
            lines.append(f"  {row:<32}" + "".join(_text(of, number).rjust(width) for number in numbers))
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self):
        cells = lambda tag, texts: "".join(f"<{tag}>{text}</{tag}>" for text in texts)
        rows, section = ["<tr>" + cells("th", ["", *(html.escape(each.name) for each in self.scores)]) + "</tr>"], None
        for of, row, numbers in self.rows():
            if of != section:
                section, columns = of, 1 + len(self.scores)
                rows.append(f'<tr><th colspan="{columns}" title="{_EXPLANATIONS[of]}">{of}</th></tr>')
            texts = [_text(of, number) for number in numbers]
            if len(numbers) > 1 and numbers[-1] != numbers[-2]:
                texts[-1] = f'<b class="{"up" if numbers[-1] > numbers[-2] else "down"}">{texts[-1]}</b>'
            rows.append("<tr>" + cells("td", [row, *texts]) + "</tr>")
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f'<style>{_STYLE}</style><div class="score"><table>{"".join(rows)}</table>{notes}</div>'


_STYLE = """
.score { font: 14px/1.5 system-ui, sans-serif; max-width: 46em; overflow-x: auto }
.score table { border-collapse: collapse; margin: .3em 0 }
.score :is(td, th) { padding: .05em .8em .05em 0; text-align: right; font-variant-numeric: tabular-nums; border: 0 }
.score :is(td, th):first-child { text-align: left }
.score b.up { color: rgb(200, 100, 0) } .score b.down { color: rgb(46, 140, 67) }
""".strip()


def compare(*scores: Score, timed: bool = False) -> Comparison:
    """Return a table of scores: the steps before, and last the step that they are compared with."""
    if not scores:
        raise ValueError("compare needs a score")
    return Comparison(scores, timed)


def _text(section, number):
    return f"{number:.2f} us" if section == MODEL else f"{number:,g}" if number % 1 else f"{int(number):,}"
