"""The steps of a notebook: each checked, timed and told in one line; in the end all are drawn and recorded."""

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.timing import call_time, call_times, kernel_time, kernel_times


class WrongResult(AssertionError):
    """A step's output is not the reference's: the step has no time."""


class Ladder:
    """Measures the steps of one notebook, in teaching order.

    On a GPU a line tells what was measured here and now. In the simulator it says that nothing was timed and shows
    the recorded GPU's figures, called recorded.

    Parameters
    ----------
    topic : str
        Names the record, ``docs/results/<gpu>/<topic>.json``: one of its own, such as "gate_ladder", because
        ``python -m moe_numba bench gate`` writes "gate".
    check : callable
        ``check(outputs)`` gives None for a right result, or a sentence saying what is wrong with it. Poisoning the
        outputs before a step is the notebook's part.
    title : str
        Of the figure.
    reference_name : str
        The step that the others are compared with; by its first word, as "x torch".
    config, size : dict
        Recorded with every step that gives none of its own.
    gpu : str
        Whose record the simulator shows: a folder of ``docs/results``.
    root : path, optional
        The repository, when it is not the one this package lies in.
    untimed : str, optional
        Why nothing is timed here, though there is a GPU: "one GPU". Figures are then shown as in the simulator.
    """

    def __init__(
        self,
        topic,
        check,
        title=None,
        reference_name="torch eager",
        *,
        config=None,
        size=None,
        gpu="h200",
        root=None,
        untimed=None,
    ):
        self.topic, self.check, self.title, self.reference_name = topic, check, title or topic, reference_name
        self.config, self.size, self.root = config or {}, size or {}, root
        self.untimed = "simulator" if simulator.ENABLED else untimed
        self.rows, self._calls = [], {}
        self._environment = None
        self.record = records.recorded(topic, gpu, root)

    def step(
        self,
        name,
        call,
        *,
        prediction_us=None,
        note=None,
        size=None,
        dtype="float32",
        slower=False,
        floor_us=None,
        config=None,
        timed=None,
        graph=True,
        slow=False,
        expect_wrong=False,
        kernel=None,
        **more,
    ):
        """Run one step, check it, time it (on a GPU) and print one line.

        Parameters
        ----------
        name : str
            Unique in the ladder.
        call : callable
            Runs the step on torch's current stream and returns its outputs.
        prediction_us : float
            The kernel time that the notebook predicted, microseconds.
        lost : bool
            An attempt that did not pay: drawn in grey, and not what the next step is compared with.
        timed : callable or list of callables
            What kernel time is taken of, in place of ``call``: one for each of ``rotating``'s sets of inputs.
        graph : bool
            False for a step that a CUDA graph cannot hold, because it waits for the GPU: it has only a call time.
        slow : bool
            A step of many milliseconds: kernel time is taken of five launches, once and for all.
        expect_wrong : bool
            The step is there to be refused. It prints why instead of raising; a check that lets it pass raises.
        kernel : callable, optional
            Gives the kernel time itself, as ``Stats``: of several GPUs, say. The step then has no call time.
        **more
            Further fields of the row: ``bytes``, ``flops``, ...

        Raises
        ------
        WrongResult
            The check found fault with the outputs.
        """
        self.rows = [row for row in self.rows if row["step"] != name]  # a cell that is run again replaces its step
        self._calls.pop(name, None)
        fields = {
            "config": config or self.config,
            "size": size or self.size,
            "dtype": dtype,
            "floor_us": floor_us,
            "prediction_us": prediction_us,
            "note": note,
            "slower": slower or None,
            **more,
        }
        outputs = call()
        if not simulator.ENABLED:
            import torch

            torch.cuda.synchronize()  # a fault in this step's kernel surfaces here, not in a later one
        wrong = self.check(outputs)
        del outputs
        if wrong:
            print(f"{name:<24} REFUSED: {wrong}")
            self.rows.append(records.row(name, refused=wrong, **fields))
            if not expect_wrong:
                raise WrongResult(f"{name}: {wrong}")
            return
        if expect_wrong:
            raise WrongResult(f"{name} was expected to be wrong, and the check let it pass: the check is too weak")
        if kernel is None:
            self._calls[name] = (timed or call if graph and not slow else None, call)
        if self.untimed:
            self.rows.append(records.row(name, **fields))
            print(f"{name:<24} right; {self.untimed}: ran, not timed   {self._recorded(name, dtype)}")
            return
        if kernel is not None:
            self.rows.append(records.row(name, kernel=kernel(), **fields))
            print(self.line(self.rows[-1]))
            return
        often = {"launches": 1, "replays": 5} if slow else {}
        kernel = kernel_time(timed or call, **often) if graph else None
        self.rows.append(records.row(name, kernel=kernel, call=call_time(call), **fields))
        print(self.line(self.rows[-1]))

    def line(self, row):
        """One measured step: its times, what they gain, what was predicted. Ratios compare kernel times."""
        times = {
            key[:-3]: records.format_us(row[key]["median"]) + " us" if key in row else "-"
            for key in ("kernel_us", "call_us")
        }
        parts = [f"{row['step']:<24}" + "   ".join(f"{time:>8} {name}" for name, time in times.items())]
        reference = records.find_step(self.rows, self.reference_name)
        compared = {"previous": records.previous_step(self.rows, row), self.reference_name.split()[0]: reference}
        for label, other in compared.items():
            if ratio := records.speedup(other, row):
                parts.append(f"x{ratio} {label}")
        if "prediction_us" in row:
            parts.append(f"(predicted {row['prediction_us']:g} us)")
        return "   ".join(parts)

    def measure_all(self, given=None):
        """Time all right steps again, by turns, so that they share the clock's drift; print every line anew.

        ``given``, ``{step: Stats}``, are kernel times of steps that give their own, taken by turns as well.
        """
        if self.untimed:
            print(f"{self.untimed}: ran, not timed")
            return
        kernels = kernel_times({name: timed for name, (timed, _) in self._calls.items() if timed is not None})
        calls = call_times({name: call for name, (_, call) in self._calls.items()})
        kernels |= given or {}
        for i, row in enumerate(self.rows):
            if (name := row["step"]) in calls or name in (given or {}):
                rest = {key: value for key, value in row.items() if key not in ("step", "kernel_us", "call_us")}
                self.rows[i] = records.row(name, kernel=kernels.get(name), call=calls.get(name), **rest)
                if "kernel_us" in row and name not in kernels:
                    self.rows[i]["kernel_us"] = row["kernel_us"]  # a slow step's
        self._environment = records.environment()
        for row in self.rows:
            if "refused" not in row:
                print(self.line(row))

    def row(self, name):
        """A step's row: measured just now, or recorded earlier on a GPU, or None."""
        rows = self.record["rows"] if self.untimed and self.record else self.rows
        return next((row for row in rows if row["step"] == name and ("kernel_us" in row or "call_us" in row)), None)

    def median_us(self, name, what="kernel_us"):
        """A step's median time, in microseconds, or None; ``what`` names the field of its row."""
        value = (self.row(name) or {}).get(what)
        return value["median"] if isinstance(value, dict) else value

    def report(self, name, before=None, predicted=None, floor_us=None):
        """Say in one sentence what a step gained, and how far off the prediction (microseconds) was."""
        now, then = self.median_us(name), self.median_us(before) if before else None
        if now is None:
            return print(f"{name}: no figure is recorded yet")
        text = f"{name}: {now:.1f} us"
        if floor_us:
            text += f", {now / floor_us:.1f} times the lower bound"
        if then:
            same = 0.98 < then / now < 1.02
            text += (
                f"; as fast as '{before}'"
                if same
                else f"; {records.format_slowdown(then / now)} times the speed of '{before}'"
            )
        if predicted:
            ratio = now / predicted
            text += "; the prediction was good" if 0.8 < ratio < 1.25 else f"; measured / predicted is {ratio:.1f}"
        print(text + ".")

    def save(self, sources, *, results=None):
        """Write the record, with the hashes of ``sources``; in the simulator say that nothing is written."""
        if self.untimed:
            print(f"{self.untimed}: nothing was timed, so nothing is written")
            return
        path = records.write(self.topic, self.rows, sources, self.root, results=results, env=self._environment)
        print(f"{len(self.rows)} rows written to {path}")

    def plot(self, *, floor_us=None, peers=None):
        """The step ladder as a figure, with a line for the floor and one for each of ``peers``, ``{name: us}``.

        In the simulator it is drawn from the record; the caption says which. None when there is neither.
        """
        from moe_numba.course.bench import plots

        if not self.untimed:
            caption = plots.caption(self._environment or records.environment(), "measured now on")
            rows = self.rows
        elif self.record:
            caption = plots.caption(self.record, "not measured here: recorded on", self.root)
            rows = self.record["rows"]
        else:
            print(f"{self.untimed}: nothing was timed, and {self.topic} has no record to draw from")
            return None
        lines = dict(peers or {})
        if floor_us is not None:
            lines["speed of light"] = floor_us
        return plots.ladder_figure(rows, lines=lines, title=self.title, caption=caption, reference=self.reference_name)

    def _recorded(self, name, dtype):
        row = self.record and records.find(self.record, step=name, dtype=dtype)
        if not row:
            return "no GPU's figures are recorded"
        gpu = self.record["gpu"].removeprefix("NVIDIA ")
        sizes = ", ".join(f"{key}={value}" for key, value in row["size"].items())
        times = [
            f"{records.format_us(row[key]['median'])} us {key[:-3]}" for key in ("kernel_us", "call_us") if key in row
        ]
        return f"{gpu} recorded{f' ({sizes})' if sizes else ''}: {', '.join(times) or 'refused'}"
