"""The step ladder of a notebook: checks, times, prints, records and plots each step."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.timing import Stats, call_time, call_times, kernel_time, kernel_times
from moe_numba.course.pages.unsupported import why_not_run
from moe_numba.course.steps.prediction import Judgement
from moe_numba.runtime.recording import noted_launches
from moe_numba.runtime.validate import check_device


class WrongResult(AssertionError):
    """The outputs of a step differ from the reference; the step is not timed."""


class Ladder:
    """Checks, times, prints and records the steps of a notebook, in teaching order.

    On a GPU each step prints its measured times. In the simulator it prints that nothing was timed, and the times that
    a GPU recorded earlier, unless a reader has edited the step's kernel since. A step that the GPU cannot run prints
    why, and the recorded times.

    Parameters
    ----------
    topic : str
        Name of the record, ``docs/results/<gpu>/<topic>.json``, such as "gate_ladder". The names of bench topics are
        taken: ``python -m moe_numba bench gate`` writes "gate".
    check : callable
        ``check(outputs)`` returns None for a correct result, or a sentence that describes the error. The notebook
        poisons the outputs before a step.
    title : str, optional
        Title of the figure.
    reference_name : str
        The step that all others are compared with. Its first word labels the ratio: "x torch".
    config, size : dict, optional
        Recorded with every step that has none of its own.
    gpu : str
        The folder of ``docs/results`` whose record the simulator shows.
    root : path, optional
        The repository, if it is not the one that contains this package.
    untimed : str, optional
        Why nothing is timed although there is a GPU, such as "one GPU". Recorded times are shown instead.
    """

    def __init__(
        self,
        topic: str,
        check: Callable[[Any], str | None],
        title: str | None = None,
        reference_name: str = "torch eager",
        *,
        config: dict | None = None,
        size: dict | None = None,
        gpu: str = "h200",
        root: Path | str | None = None,
        untimed: str | None = None,
    ):
        self.topic, self.check, self.title, self.reference_name = topic, check, title or topic, reference_name
        self.config, self.size, self.root = config or {}, size or {}, root
        self.untimed = "simulator" if simulator.ENABLED else untimed
        self.rows, self.diagnosis, self._calls, self._edited = [], {}, {}, set()
        self._environment = None
        self.record = records.recorded(topic, gpu, root)

    def step(
        self,
        name: str,
        call: Callable,
        *,
        prediction_us: float | None = None,
        after: str | None = None,
        predicted_gain_us: float | None = None,
        note: str | None = None,
        size: dict | None = None,
        dtype: str = "float32",
        slower: bool = False,
        floor_us: float | None = None,
        config: dict | None = None,
        timed: Callable | list[Callable] | None = None,
        graph: bool = True,
        slow: bool = False,
        expect_wrong: bool = False,
        kernel: Callable[[], Stats | dict[str, Stats]] | None = None,
        needs: tuple[int, int] | None = None,
        **more: Any,
    ) -> None:
        """Run a step, check its result, time it on a GPU, and print one line.

        If the GPU lacks what the step needs (see `attempt`), the line says so, and nothing is compared with the step.

        Parameters
        ----------
        name : str
            Unique in the ladder. A cell that runs again replaces its step.
        call : callable
            Runs the step on torch's current stream and returns its outputs.
        prediction_us : float, optional
            The kernel time that the notebook predicted, in microseconds.
        after : str, optional
            An earlier step, which this one changes. Both are timed interleaved, and the line has these two times, and
            what the step saves beside ``predicted_gain_us`` (see `prediction.Judgement`).
        predicted_gain_us : float, optional
            The kernel time that the step saves over ``after`` by the notebook's prediction; negative for a loss.
        slower : bool
            Marks an attempt that gained nothing. It is drawn in grey, and the next step is not compared with it.
        floor_us : float, optional
            Lower bound of the kernel time, in microseconds.
        timed : callable or list of callables, optional
            What kernel time is measured of, instead of ``call``: one callable per set of inputs from ``rotating``.
        graph : bool
            False if a CUDA graph cannot capture the step, because it synchronises. It then has only a call time.
        slow : bool
            For steps of many milliseconds: kernel time is measured of five launches, and not again later.
        expect_wrong : bool
            The check must reject the step. Its reason is printed instead of raised.
        kernel : callable, optional
            Measures the kernel time itself, for example of several GPUs. The step then has no call time. With ``after``
            it returns ``{step: Stats}`` of both steps, measured interleaved, so that they can be compared.
        needs : (int, int), optional
            Least compute capability. Older GPUs then do not compile the kernel, which may take long before it fails.
        **more
            Further fields of the row: ``bytes``, ``flops``, ...

        Raises
        ------
        WrongResult
            The check rejected the outputs, or accepted those of a step with ``expect_wrong``.
        ValueError
            ``after`` is no earlier step, or only one of ``after`` and ``predicted_gain_us`` is given.
        """
        if (after is None) != (predicted_gain_us is None):
            raise ValueError(f"{name}: after and predicted_gain_us belong together")
        if after is not None and after not in (row["step"] for row in self.rows):
            raise ValueError(f"{name}: after is {after!r}; the steps so far are {[row['step'] for row in self.rows]}")
        self._forget(name)
        fields = {
            "config": config or self.config,
            "size": size or self.size,
            "dtype": dtype,
            "floor_us": floor_us,
            "prediction_us": prediction_us,
            "after": after,
            "predicted_gain_us": predicted_gain_us,
            "note": note,
            "slower": slower or None,
            **more,
        }
        with self.attempt(name, dtype):
            if needs is not None:
                check_device(torch.device("cpu" if simulator.ENABLED else "cuda"), name, needs)
            self._run(name, call, fields, timed, graph, slow, expect_wrong, kernel)
        if after is not None and name not in self._edited and (gain := self.gain(name)) is not None:
            before, now = map(records.format_us, (gain.before_us, gain.after_us))
            start = f"{'':<24}recorded:" if self.untimed else f"{name:<23}"
            print(f"{start} {before} -> {now} us; {gain}")

    @contextmanager
    def attempt(self, name: str, dtype: str = "float32") -> Iterator[None]:
        """Run what belongs to a step in a ``with`` block; if the GPU cannot, print the reason and record it.

        It may hold ``step`` itself and, before it, what the notebook checks and measures apart from that. Reasons are a
        compute capability, an instruction that ptxas refuses, too much memory, and too many blocks of a cooperative
        launch. All other errors are raised.
        """
        try:
            yield
        except Exception as error:
            if (reason := why_not_run(error)) is None:
                raise
            self._forget(name)
            self.rows.append(records.row(name, not_run=reason))
            print(f"{name:<24} not run: {reason}; {self._recorded(name, dtype)}")

    def _forget(self, name):
        self.rows = [row for row in self.rows if row["step"] != name]
        self._calls.pop(name, None)
        self._edited.discard(name)

    def _run(self, name, call, fields, timed, graph, slow, expect_wrong, kernel):
        with noted_launches() as noted:
            outputs = call()
        if not simulator.ENABLED:
            torch.cuda.synchronize()  # report an error of this step's kernel here, not in a later step
        wrong = self.check(outputs)
        del outputs
        if wrong:
            print(f"{name:<24} REFUSED: {wrong}")
            self.rows.append(records.row(name, refused=wrong, **fields))
            if not expect_wrong:
                raise WrongResult(f"{name}: {wrong}")
            return
        if expect_wrong:
            raise WrongResult(f"{name} was expected to be wrong, but the check accepted it: the check is too weak")
        if kernel is None:
            self._calls[name] = (timed or call if graph and not slow else None, call)
        if self.untimed:
            self.rows.append(records.row(name, **fields))
            if edited := records.edited(self.record or {}, noted.values()):
                self._edited.add(name)
                recorded = f"   your version of {', '.join(edited)}: no time is recorded"
            else:
                recorded = "" if fields["after"] and self.gain(name) else f"   {self._recorded(name, fields['dtype'])}"
            print(f"{name:<24} correct; not timed ({self.untimed}){recorded}")
            return
        if kernel is not None:
            measured = kernel()
            times = measured if isinstance(measured, dict) else {name: measured}
            self.rows.append(records.row(name, kernel=times[name], **fields))
            if fields["after"] in times:
                self._keep_comparison(times, fields["after"], name)
            else:
                print(self.line(self.rows[-1]))
            return
        few_launches = {"launches": 1, "replays": 5} if slow else {}
        kernel = kernel_time(timed or call, **few_launches) if graph else None
        self.rows.append(records.row(name, kernel=kernel, call=call_time(call), **fields))
        if fields["after"] is not None:
            self._compare(name, fields["after"])
        if "compared_us" not in self.rows[-1]:
            print(self.line(self.rows[-1]))

    def _compare(self, name, before):
        """Time a step and the one that it changes interleaved, and keep both medians in its row."""
        calls = {step: self._calls.get(step, (None, None))[0] for step in (before, name)}
        if None not in calls.values():
            self._keep_comparison(kernel_times(calls), before, name)

    def _keep_comparison(self, times, before, name):
        self.rows[-1]["compared_us"] = [round(times[step].median, 3) for step in (before, name)]

    def times(self, name: str, calls: dict[str, Callable | list[Callable]]) -> dict[str, float] | None:
        """Time kernels that diagnose a step, such as one without its loads, and record them; they are no steps.

        Parameters
        ----------
        name : str
            What the times belong to, unique in the ladder: "phases of 0x1".
        calls : dict
            Label -> callable, or a list of callables, one per set of inputs. Their results are not checked.

        Returns
        -------
        dict or None
            Label -> median kernel time in microseconds, all measured interleaved. If nothing is timed each runs once,
            and the recorded times are returned; None if there are none, or if the GPU cannot run one of them.
        """
        self.diagnosis.pop(name, None)
        try:
            if self.untimed:
                for call in calls.values():
                    (call[0] if isinstance(call, list) else call)()
                return (self.record or {}).get("diagnosis", {}).get(name)
            measured = kernel_times(calls)
        except Exception as error:
            if (reason := why_not_run(error)) is None:
                raise
            print(f"{name}: not run: {reason}")
            return None
        self.diagnosis[name] = {label: round(stats.median, 3) for label, stats in measured.items()}
        return self.diagnosis[name]

    def gain(self, name: str) -> Judgement | None:
        """Return what a step was predicted to save, and what it saved, now or as recorded; None if it is not known."""
        return judgement_of(self.row(name) or {})

    def line(self, row: dict) -> str:
        """Format one measured step: times, speedups over the previous step and the reference, prediction."""
        times = {
            key[:-3]: records.format_us(row[key]["median"]) + " us" if key in row else "-"
            for key in ("kernel_us", "call_us")
        }
        parts = [f"{row['step']:<24}" + "   ".join(f"{time:>8} {name}" for name, time in times.items())]
        reference = records.find_step(self.rows, self.reference_name)
        compared = {"previous": records.previous_step(self.rows, row), self.reference_name.split()[0]: reference}
        for label, other in compared.items():
            repeats = label != "previous" and other is compared["previous"]  # the second step
            if (ratio := records.speedup(other, row)) and not repeats:
                parts.append(f"x{ratio} {label}")
        if "prediction_us" in row:
            parts.append(f"(predicted {row['prediction_us']:g} us)")
        return "   ".join(parts)

    def measure_all(self, given: dict[str, Stats] | None = None) -> None:
        """Time all correct steps again, interleaved, so that clock drift affects all alike; print every line.

        ``given`` holds the kernel times of steps that measure their own, also interleaved: ``{step: Stats}``.
        """
        if self.untimed:
            print(f"not timed ({self.untimed})")
            return
        kernels = kernel_times({name: timed for name, (timed, _) in self._calls.items() if timed is not None})
        calls = call_times({name: call for name, (_, call) in self._calls.items()})
        kernels |= given or {}
        for i, row in enumerate(self.rows):
            if (name := row["step"]) in calls or name in (given or {}):
                measured = "step", "kernel_us", "call_us", "kernels"
                rest = {key: value for key, value in row.items() if key not in measured}
                self.rows[i] = records.row(name, kernel=kernels.get(name), call=calls.get(name), **rest)
                if "kernel_us" in row and name not in kernels:
                    self.rows[i]["kernel_us"] = row["kernel_us"]  # of a slow step
        self._environment = records.environment()
        for row in self.rows:
            if "refused" not in row and "not_run" not in row:
                print(self.line(row))

    @property
    def not_run(self) -> dict[str, str]:
        """The steps that this GPU cannot run, and the reason for each."""
        return {row["step"]: row["not_run"] for row in self.rows if "not_run" in row}

    def row(self, name: str) -> dict | None:
        """Return a step's row, measured now or recorded earlier on a GPU; None if this GPU cannot run it."""
        if name in self.not_run:
            return None
        rows = self.record["rows"] if self.untimed and self.record else self.rows
        return next((row for row in rows if row["step"] == name and ("kernel_us" in row or "call_us" in row)), None)

    def median_us(self, name: str, what: str = "kernel_us") -> float | None:
        """Return a step's median time in microseconds; ``what`` names the field of its row."""
        value = (self.row(name) or {}).get(what)
        return value["median"] if isinstance(value, dict) else value

    def report(
        self, name: str, before: str | None = None, predicted: float | None = None, floor_us: float | None = None
    ) -> None:
        """Print a step's time, its gain over step ``before``, and the ratio to the predicted microseconds."""
        now, earlier = self.median_us(name), self.median_us(before) if before else None
        if now is None:
            return print(f"{name}: {'not run here' if name in self.not_run else 'no time is recorded yet'}")
        text = f"{name}: {now:.1f} us"
        if floor_us:
            text += f", {now / floor_us:.1f} times the lower bound"
        if earlier:
            same = 0.98 < earlier / now < 1.02
            text += (
                f"; as fast as '{before}'"
                if same
                else f"; {records.format_slowdown(earlier / now)} times the speed of '{before}'"
            )
        if predicted:
            ratio = now / predicted
            text += "; the prediction holds" if 0.8 < ratio < 1.25 else f"; measured / predicted is {ratio:.1f}"
        print(text + ".")

    def save(self, *, results: Path | None = None) -> None:
        """Write the record; if nothing was timed, print that and write nothing."""
        if self.untimed:
            print(f"not timed ({self.untimed}): no record is written")
            return
        path = records.write(
            self.topic, self.rows, self.root, results=results, env=self._environment, diagnosis=self.diagnosis
        )
        print(f"{len(self.rows)} rows written to {path}")

    def plot(
        self, *, floor_us: float | None = None, peers: dict[str, float] | None = None, without: Collection[str] = ()
    ):
        """Draw the ladder, with lines for the lower bound and for each of ``peers``, ``{name: microseconds}``.

        The steps ``without`` are left out, such as a reference that takes so long that all others look alike.

        If nothing was timed, the figure is drawn from the record and its caption says so. Returns None if there is no
        record either.
        """
        from moe_numba.course.bench.figures import plots

        if not self.untimed:
            caption = plots.caption(self._environment or records.environment(), "measured now on")
            rows = self.rows
        elif self.record:
            caption = plots.caption(self.record, "not measured here: recorded on")
            rows = self.record["rows"]
        else:
            print(f"not timed ({self.untimed}), and there is no record {self.topic} to draw")
            return None
        rows, lines = [row for row in rows if row["step"] not in without], dict(peers or {})
        if floor_us is not None:
            lines["speed of light"] = floor_us
        return plots.ladder_figure(rows, lines=lines, title=self.title, caption=caption, reference=self.reference_name)

    def _recorded(self, name, dtype):
        row = self.record and records.find(self.record, step=name, dtype=dtype)
        if not row:
            return "no times are recorded"
        gpu = self.record["gpu"].removeprefix("NVIDIA ")
        sizes = ", ".join(f"{key}={value}" for key, value in row["size"].items())
        times = [
            f"{records.format_us(row[key]['median'])} us {key[:-3]}" for key in ("kernel_us", "call_us") if key in row
        ]
        return f"{gpu} recorded{f' ({sizes})' if sizes else ''}: {', '.join(times) or 'no time'}"


def judgement_of(row: dict) -> Judgement | None:
    """Return what the step of a row was predicted to save, and what it saved; None if they were not compared."""
    if "compared_us" not in row or not row.keys() & {"predicted_us", "predicted_gain_us"}:
        return None
    before, after = row["compared_us"]
    return Judgement(
        before, after, row["predicted_gain_us"] if "predicted_gain_us" in row else before - row["predicted_us"]
    )
