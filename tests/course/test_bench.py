"""Timing with a fake clock, the ladder, figures and the doctor."""

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch
from helpers.figures import misplaced
from matplotlib.text import Text

import moe_numba
import moe_numba.course.bench as bench
from moe_numba import __main__ as cli
from moe_numba import doctor, simulator
from moe_numba.course.bench import Stats, records, timing
from moe_numba.course.bench.figures import plots
from moe_numba.course.steps import ladder
from moe_numba.course.steps.ladder import Ladder, WrongResult
from moe_numba.runtime.compilers import version
from moe_numba.runtime.device import UnsupportedDeviceError
from moe_numba.runtime.launch import launch
from moe_numba.runtime.recording import noted_launches

# isort: split
from numba import cuda


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr(simulator, "ENABLED", True)


@pytest.fixture
def measured(monkeypatch):
    """Replace the GPU and its timing: a step takes the microseconds that it declares."""
    import torch

    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    stats = lambda call: Stats(call.us, 0.9 * call.us, 1.2 * call.us)
    slower = lambda call: Stats(call.us + 10, call.us + 9, call.us + 12)
    monkeypatch.setattr(ladder, "kernel_time", stats)
    monkeypatch.setattr(ladder, "call_time", slower)
    monkeypatch.setattr(ladder, "kernel_times", lambda named: {name: stats(call) for name, call in named.items()})
    monkeypatch.setattr(ladder, "call_times", lambda named: {name: slower(call) for name, call in named.items()})
    monkeypatch.setattr(records, "environment", lambda: dict(ENVIRONMENT))


ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.95",
    "versions": {"numba-cuda": "0.30.4", "torch": "2.11.0"},
    "commit": "1a2b3c4d",
    "date": "2026-11-20T10:00:00Z",
}


class Step:
    """A call that returns ``outputs`` and is reported to take ``us`` microseconds."""

    def __init__(self, outputs, us=1.0):
        self.outputs, self.us, self.runs = outputs, us, 0

    def __call__(self):
        self.runs += 1
        return self.outputs


def check(outputs):
    if np.isnan(outputs).any():
        return "an output is NaN"
    wrong = np.flatnonzero(outputs != [1, 2, 3])
    return f"{wrong.size} of 3 outputs differ, the first at {wrong[0]}" if wrong.size else None


RIGHT = np.array([1.0, 2, 3])


# Timing


def test_stats_are_median_and_percentiles():
    stats = Stats.of(range(101))
    assert (stats.median, stats.p10, stats.p90) == (50, 10, 90)


def test_call_times_are_measured_in_interleaved_batches():
    now, log = [0], []

    def call(name, us):
        now[0] += us * 1000
        log.append(name)

    named = {"fast": lambda: call("fast", 5), "slow": lambda: call("slow", 2000)}
    found = timing._call_times(named, 40, 50, lambda: log.append("synchronize"), lambda: now[0])
    assert found == {"fast": Stats(5, 5, 5), "slow": Stats(2000, 2000, 2000)}
    batches = [list(group) for name, group in itertools.groupby(log) if name != "synchronize"]
    sizes = {name: {len(batch) for batch in batches[4:] if batch[0] == name} for name in named}
    assert sizes == {"fast": {50}, "slow": {12}}, "batches of a slow call are shorter: a second in total"
    order = "".join(batch[0][0] for batch in batches[4:])
    assert all(set(order[i : i + 2]) == {"f", "s"} for i in range(0, len(order), 2)), "each round times both"
    assert order != "fs" * 40, "their order varies"


def test_garbage_collection_is_off_while_timing():
    import gc

    seen = []
    clock = itertools.count(step=1000).__next__
    timing._call_times({"": lambda: seen.append(gc.isenabled())}, 2, 3, lambda: None, clock)
    assert seen[-6:] == [False] * 6 and gc.isenabled()


class FakeGPU:
    """Replaces torch.cuda: a kernel takes its declared time, a graph launch 3 us, an eager call nothing."""

    def __init__(self, monkeypatch):
        import torch

        self.now, self.capturing, self.replays = 0.0, None, []
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now

            def elapsed_time(self, end):
                return (end.at - self.at) / 1000  # milliseconds, as torch's

        class CUDAGraph:
            def replay(self):
                gpu.now += 3 + sum(us for us, _ in self.launches)
                gpu.replays.append([name for _, name in self.launches])

        @contextlib.contextmanager
        def graph(target, capture_error_mode):
            gpu.capturing = target.launches = []
            yield
            gpu.capturing = None

        class Stream:
            def wait_stream(self, other):
                pass

        fakes = {
            "Event": Event,
            "CUDAGraph": CUDAGraph,
            "graph": graph,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(simulator, "ENABLED", False)

    def kernel(self, name, us):
        return lambda: self.capturing is not None and self.capturing.append((us, name))


def test_kernel_times_are_measured_in_interleaved_graphs(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    named = {"short": [gpu.kernel(f"set {i}", 2.0) for i in range(4)], "long": gpu.kernel("long", 1000.0)}
    found = bench.kernel_times(named)
    assert {name: stats.median for name, stats in found.items()} == pytest.approx({"short": 2, "long": 1000}, rel=0.01)
    timed = gpu.replays[-60:]
    assert all({replay[0] for replay in timed[i : i + 2]} == {"set 0", "long"} for i in range(0, 60, 2)), "interleaved"
    (short,) = {len(replay) for replay in timed if replay[0] == "set 0"}
    assert short == 500 and timed[0][:5] in (["set 0", "set 1", "set 2", "set 3", "set 0"], ["long"] * 5)
    assert bench.kernel_time(gpu.kernel("", 5.0), launches=10, replays=3).median == pytest.approx(5.3)


@pytest.mark.parametrize(
    ("us", "sets", "launches"),
    [
        (2.5, 1, 500),
        (10, 1, 150),
        (1000, 1, 20),
        (10, 64, 192),
        (2.5, 64, 448),
        (1000, 64, 64),
        (1000, 7, 21),
        (0, 3, 498),
    ],
)
def test_number_of_launches_in_a_graph(us, sets, launches):
    assert timing._choose_launches(us, sets) == launches


def test_number_of_rotating_input_sets():
    assert timing._sets(2**20, 128 * 2**20) == 64
    assert timing._sets(50 * 2**20, 128 * 2**20) == 3
    assert timing._sets(2**30, 128 * 2**20) == 1


def test_simulator_runs_once_and_times_nothing(simulated):
    one, other = Step(RIGHT), Step(RIGHT)
    assert bench.kernel_time(one) is None and bench.call_time(one) is None and one.runs == 2
    assert bench.kernel_times({"a": [one, other], "b": other}) == {"a": None, "b": None}
    assert bench.call_times({"a": one}) == {"a": None}
    assert (one.runs, other.runs) == (4, 2)
    assert bench.rotating(lambda: "inputs", 1) == ["inputs"]


@pytest.mark.gpu
def test_times_of_copies_are_plausible():
    import torch

    def copy(size):
        source = torch.zeros(size, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    small, large = copy(1024), bench.rotating(lambda: copy(64 << 20), 128 << 20)
    assert 1 <= len(large) <= 4
    times = bench.kernel_times({"small": small, "large": large})
    assert 0.5 < times["small"].median < 10
    assert 10 < times["large"].median < 1000, "128 MB at some TB/s"
    assert times["small"].p10 <= times["small"].median <= times["small"].p90
    assert 0.5 < bench.call_time(small).median < 100
    assert bench.kernel_time(small, launches=20, replays=3).median < 10


# The ladder


def test_simulated_steps_print_the_recorded_times(simulated, tmp_path, capsys):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    row = records.row(
        "wide loads", size={"tokens": 4096}, dtype="float32", kernel=Stats(12.4, 12, 13), call=Stats(18, 17, 19)
    )
    records.write("gate_ladder", [row], tmp_path, env=ENVIRONMENT)
    steps = Ladder("gate_ladder", check, root=tmp_path)
    steps.step("wide loads", Step(RIGHT), size={"tokens": 4}, prediction_us=14)
    steps.step("narrow loads", Step(RIGHT))
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == (
        "wide loads correct; not timed (simulator) H200 recorded (tokens=4096): 12.4 us kernel, 18.0 us call".split()
    )
    assert "correct; not timed (simulator)" in second and "no times are recorded" in second
    steps.measure_all()
    steps.save()
    assert "no record is written" in capsys.readouterr().out
    assert "not measured here: recorded on NVIDIA H200" in all_text(steps.plot())
    assert "changed since" not in all_text(steps.plot())
    steps.record["functions"] = {"kernel": ["make_kernel 00000000"]}
    assert "changed since" in all_text(steps.plot())
    assert Ladder("unknown", check, root=tmp_path).plot() is None


@pytest.mark.skipif(not simulator.ENABLED, reason="a GPU times an edited kernel")
def test_an_edited_kernel_is_not_shown_with_a_recorded_time(tmp_path, capsys):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    out = torch.zeros(32, dtype=torch.int32)
    with noted_launches() as noted:
        launch(make_fill(3), 1, 32, out)
    row = records.row("fill", dtype="float32", kernel=Stats(12.4, 12, 13, tuple(noted.values())))
    records.write("ladder", [row], tmp_path, env=ENVIRONMENT)
    steps = Ladder("ladder", lambda _: None, root=tmp_path)
    for kernel in (make_fill(3), make_fill(4), make_edited_fill(3)):
        steps.step("fill", lambda kernel=kernel: launch(kernel, 1, 32, out))
    own, other_value, edited = capsys.readouterr().out.splitlines()
    assert "H200 recorded: 12.4 us kernel" in own and "12.4" in other_value, "the simulator runs smaller sizes"
    assert "your version of make_edited_fill: no time is recorded" in edited and "12.4" not in edited


def make_fill(value):
    @cuda.jit
    def fill(out):
        out[cuda.threadIdx.x] = value

    return fill


def make_edited_fill(value):
    @cuda.jit
    def fill(out):
        out[cuda.threadIdx.x] = value + 1

    return fill


@pytest.mark.parametrize(
    ("outputs", "why"), [([1, 2, 4], "1 of 3 outputs differ, the first at 2"), ([1, np.nan, 3], "an output is NaN")]
)
def test_wrong_results_are_refused(measured, capsys, outputs, why):
    steps = Ladder("gate", check)
    with pytest.raises(WrongResult, match=why):
        steps.step("broken", Step(np.array(outputs)))
    assert "REFUSED" in capsys.readouterr().out
    steps.step("broken", Step(np.array(outputs)), expect_wrong=True)
    line = capsys.readouterr().out
    assert "REFUSED" in line and why in line and " us " not in line
    (row,) = steps.rows
    assert why in row["refused"] and "kernel_us" not in row and "call_us" not in row
    with pytest.raises(WrongResult, match="too weak"):
        steps.step("right", Step(RIGHT), expect_wrong=True)


def test_lines_and_record_of_a_measured_ladder(measured, tmp_path, capsys):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    steps = Ladder("gate", check, "Gate", root=tmp_path, size={"tokens": 4096})
    steps.step("torch eager", Step(RIGHT, 600.0))
    steps.step("one thread", Step(RIGHT, 60.0))
    steps.step("narrow tiles", Step(RIGHT, 90.0), slower=True)
    steps.step("broken", Step(0 * RIGHT), expect_wrong=True)
    steps.step("wide loads", Step(RIGHT, 12.4), prediction_us=14, bytes=1000)
    steps.step("synchronises", Step(RIGHT, 5.0), graph=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "torch eager 600 us kernel 610 us call"
    assert lines[2] == "narrow tiles 90.0 us kernel 100 us call x0.67 previous x6.7 torch"
    assert lines[4] == "wide loads 12.4 us kernel 22.4 us call x4.8 previous x48 torch (predicted 14 us)"
    assert lines[5] == "synchronises - kernel 15.0 us call"
    steps.step("wide loads", Step(RIGHT, 10.0), prediction_us=14, bytes=1000)  # the cell is executed again
    assert [row["step"] for row in steps.rows].count("wide loads") == 1
    steps.measure_all()
    steps.save()
    record = records.read("gate", root=tmp_path)
    assert records.find(record, step="wide loads")["kernel_us"]["median"] == 10
    assert records.find(record, step="wide loads")["bytes"] == 1000
    assert records.find(record, step="narrow tiles")["slower"] and "refused" in records.find(record, step="broken")
    figure = steps.plot(floor_us=2.0, peers={"triton": 11.0})
    assert "measured now on NVIDIA H200" in all_text(figure) and "speed of light 2.00" in all_text(figure)
    assert "× torch" in all_text(figure) and "refused" in all_text(figure)
    text = all_text(steps.plot(without=["torch eager", "broken"]))
    assert not any(left_out in text for left_out in ("torch eager", "× torch", "refused", "broken"))


def test_diagnostic_times_are_recorded_beside_the_steps(measured, tmp_path, capsys, monkeypatch):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    steps = Ladder("gate", check, root=tmp_path)
    steps.step("pointers", Step(RIGHT, 48.0))
    assert steps.times("phases", {"loads": Step(None, 30.5), "all": Step(None, 48.0)}) == {"loads": 30.5, "all": 48.0}
    steps.save()
    record = records.read("gate", root=tmp_path)
    assert record["diagnosis"] == {"phases": {"loads": 30.5, "all": 48.0}} and len(record["rows"]) == 1
    monkeypatch.setattr(simulator, "ENABLED", True)
    steps, loads = Ladder("gate", check, root=tmp_path), Step(None, 1.0)
    assert steps.times("phases", {"loads": loads, "of each set": [loads, loads]}) == record["diagnosis"]["phases"]
    assert loads.runs == 2, "each kernel runs once, and of several sets of inputs the first"
    assert steps.times("unknown", {}) is None


def test_diagnostic_kernels_that_a_gpu_cannot_run_have_no_times(measured, monkeypatch, capsys):
    def refuse(named):
        raise UnsupportedDeviceError("loads needs compute capability 9.0")

    steps = Ladder("gate", check)
    monkeypatch.setattr(ladder, "kernel_times", refuse)
    assert steps.times("phases", {"loads": Step(None, 1.0)}) is None and steps.diagnosis == {}
    assert "phases: not run: loads needs compute capability 9.0" in capsys.readouterr().out


def test_diagnostic_kernels_that_the_simulator_refuses_have_no_times(simulated, capsys):
    def refused():
        raise UnsupportedDeviceError("loads needs compute capability 9.0")

    assert Ladder("gate", check).times("phases", {"loads": refused}) is None
    assert "phases: not run: loads needs compute capability 9.0" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        Ladder("gate", check).times("phases", {"loads": lambda: 1 / 0})


# The figures


def all_text(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def some_rows(low=6.9):
    def row(step, us, **more):
        return records.row(step, kernel=Stats(us, 0.9 * us, 1.3 * us), call=Stats(us + 20, us, us + 40), **more)

    return [
        row("torch eager", 178.0),
        row("1 one thread per token", 96.0),
        row("2 one warp per token, registers only", 31.2),
        row("3 two tokens per warp", 39.9, slower=True),
        records.row("missing barrier", refused="wrong result"),
        records.row("synchronises with the host", call=Stats(30, 29, 31)),
        row("final", low),
    ]


CAPTION = plots.caption(ENVIRONMENT, "not measured here: recorded on") + "; kernels changed since"


@pytest.mark.parametrize(
    "lines",
    [
        {},
        {"speed of light": 2.0, "triton": 10.3},
        {"speed of light": 6.0, "SGLang Triton": 6.5, "FlashInfer": 7.0, "SGLang": 7.2, "torch.compile": 150.0},
    ],
)
def test_ladder_figure_shows_times_and_ratios(lines):
    figure = plots.ladder_figure(some_rows(), lines=lines, title="Gate, 4096 tokens", caption=CAPTION)
    assert misplaced(figure) == []
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] > axes.get_ylim()[1], "top to bottom"
    shown = all_text(figure)
    assert "refused: wrong result" in shown and "no kernel time" in shown and "torch eager 178" in shown
    for number in ("6.90", "4.5", "26"):  # us, x previous (the slower step does not count), x torch
        assert number in shown.splitlines()
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [dot.get_color() for dot in dots] == [plots.ORANGE, plots.BLUE, plots.BLUE, plots.PALE, plots.BLUE]
    assert not axes.patches, "the length of a bar on a logarithmic axis means nothing"
    assert "grey: not faster than an earlier step" in " ".join(shown.split())
    vertical = [line for line in axes.lines if len(set(line.get_xdata())) == 1 and len(line.get_xdata()) == 2]
    for words in (t for t in axes.texts if t.get_text() in ("refused: wrong result", "no kernel time")):
        box = words.get_window_extent(figure.canvas.get_renderer())
        xs = [axes.transData.transform((line.get_xdata()[0], 1))[0] for line in vertical]
        assert vertical and not any(box.x0 < x < box.x1 for x in xs), "no line crosses the text"


def test_lines_of_peers_differ_in_colour_and_dashes():
    peers = {"speed of light": 2.0, "sglang": 10.0, "sglang-v2": 8.0, "vllm": 19.0}
    figure = plots.ladder_figure(some_rows(), lines=peers)
    vertical = {line.get_xdata()[0]: line for line in figure.axes[0].lines if line.get_xdata()[0] in peers.values()}
    colours = {name: vertical[us].get_color() for name, us in peers.items()}
    assert len(set(colours.values())) == 4 and colours["speed of light"] == plots.GREEN
    assert len({str(vertical[us]._unscaled_dash_pattern) for name, us in peers.items() if name[0] in "sv"}) >= 3
    names = {text.get_text().rpartition(" ")[0]: text.get_color() for text in figure.axes[0].texts}
    assert {name: names[name] for name in peers} == colours, "a name has the colour of its line"


def test_ladder_figure_has_bars_from_zero_within_a_factor_of_ten():
    rows = [*some_rows(low=20.0)[1:], records.row("longer again", kernel=Stats(21.0, 20.0, 22.0))]
    figure = plots.ladder_figure(rows, lines={"triton": 50.0}, caption=CAPTION)
    axes = figure.axes[0]
    assert axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0 and misplaced(figure) == []
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in axes.patches]
    assert colours == [plots.BLUE, plots.BLUE, plots.PALE, plots.BLUE, plots.PALE], "a longer step is grey"


def test_split_figure_has_no_overlapping_text():
    assert misplaced(plots.split_figure(some_rows(), title="Python and the GPU", caption=CAPTION)) == []


@pytest.mark.parametrize("sizes", [[1, 64, 1024, 4096, 16384, 65536], [2**i for i in range(17)]])
def test_sweep_figure_names_its_lines(sizes):
    lines = {
        "torch eager": (36, 28),
        "torch.compile": (27, 28),
        "SGLang AOT": (11, 400),
        "FlashInfer": (3.3, 401),
        "SGLang Triton": (3.4, 402),
        "moe_numba": (2.3, 3000),
        "a seventh": (40, 28),
    }
    series = {
        name: {size: {"median": us, "p10": 0.9 * us, "p90": 1.1 * us} for size in sizes for us in [start + size / rate]}
        for name, (start, rate) in lines.items()
    }
    floor = {size: max(1.8, size / 4000) for size in sizes}
    figure = plots.sweep_figure(series, floor=floor, title="Gate over tokens", caption=CAPTION)
    assert misplaced(figure) == [] and figure.axes[0].get_legend() is None
    assert all(name in all_text(figure).splitlines() for name in [*series, "speed of light", "µs", "64k"])


def test_overlapping_and_cut_off_texts_are_found():
    figure = plots.ladder_figure(some_rows(), caption=CAPTION)
    figure.text(0.05, 0.02, "over the caption")
    figure.text(0.99, 0.5, "cut off")
    found = misplaced(figure)
    assert found[0] == "cut off" and len(found) > 1 and all("over the caption" in pair for pair in found[1:])


def test_saved_figures_are_reproducible_and_leave_rcparams_unchanged(tmp_path):
    before = dict(matplotlib.rcParams)
    for name in "ab":
        written = plots.save(plots.ladder_figure(some_rows(), caption=CAPTION), tmp_path / name)
        assert [path.suffix for path in written] == [".svg", ".png"]
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "prefers-color-scheme: dark" in plots.split_figure(some_rows())._repr_svg_()
    assert dict(matplotlib.rcParams) == before


# The doctor


def test_doctor_on_this_machine():
    found = doctor.examine()
    lines = doctor.describe(found)
    assert lines[0] == found["summary"] and [line.split()[0] for line in lines[2:6]] == [
        "GPU",
        "compiler",
        "versions",
        "runs",
    ]
    assert lines[4].split()[1:3] == ["moe_numba", f"{moe_numba.__version__},"]
    assert "sm_90a" in lines[3] and "bytes of machine code" in lines[3], "the toolkit's wheels are part of the tests"
    if simulator.ENABLED:
        assert found["status"] == "simulator" and "not launched" in lines[3] and "recorded on an H200" in lines[5]
    assert max(map(len, lines)) < 200 and not any("record" in line and "changed" in line for line in lines)


def test_doctor_uses_the_compiler_that_is_chosen(monkeypatch):
    monkeypatch.setenv("MOE_NUMBA_COMPILER", "mlir")
    found = doctor.examine()
    line = doctor.describe(found)[3]
    assert found["compiler"] == "numba-cuda-mlir" and "numba-cuda-mlir (MOE_NUMBA_COMPILER)" in line
    installed = version("numba-cuda-mlir") is not None
    assert ("bytes of machine code" if installed else "pip install 'moe_numba[mlir]'") in line
    monkeypatch.setenv("MOE_NUMBA_COMPILER", "gcc")
    with pytest.raises(ValueError, match="MOE_NUMBA_COMPILER is 'gcc'; allowed are numba-cuda, mlir"):
        doctor.examine()


def test_doctor_prints_json_and_one_line_of_progress(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probing", lambda: contextlib.nullcontext(lambda: T4 | {"driver": [12, 4]}))
    monkeypatch.setattr(simulator, "ENABLED", False)
    assert cli.main(["doctor", "--json"]) == 1, "a GPU that kernels cannot use"
    out, progress = capsys.readouterr()
    found = json.loads(out)
    assert found["status"] == "broken" and found["summary"].endswith("pip install 'moe_numba[cu12]'")
    assert progress == "compiling a small kernel ...\n"
    assert cli.main(["doctor"]) == 1 and capsys.readouterr().out.startswith(found["summary"] + "\n")


H200 = {"gpus": [["NVIDIA H200", [9, 0]]], "torch": True, "arch": "sm_90a", "cubin_bytes": 9, "launched": True}
A10 = H200 | {"gpus": [["A10", [8, 6]]], "arch": "sm_86"}
T4 = {"gpus": [["T4", [7, 5]]], "torch": False, "error": "no NVVM"}
NOT_ON_IT = "There is a GPU, but kernels do not run on it: "


@pytest.mark.parametrize(
    ("found", "simulated", "status", "summary", "expected"),
    [
        (
            H200,
            False,
            "gpu",
            "Kernels run on the GPU: NVIDIA H200",
            ["9.0", "the result is right", "kernels, lessons, bench, pytest -m gpu;", "TMA, wgmma and clusters"],
        ),
        (H200 | {"gpus": H200["gpus"] * 2}, False, "gpu", "Kernels run on the GPU", ["-m multigpu"]),
        (
            H200 | {"launched": False},
            False,
            "broken",
            "There is a GPU, but a trial kernel fails on it: its result is WRONG",
            ["the result is WRONG"],
        ),
        (H200 | {"torch": False}, False, "broken", "There is a GPU, but torch cannot use it: is this a CPU build", []),
        (H200, True, "simulator", "Kernels run in the simulator, although there is a GPU: ", []),
        (
            A10,
            False,
            "gpu",
            "Kernels run on the GPU: A10",
            ["sm_86: ", "the result is right", "compute capability 8.6", "one CTA instead of a cluster", "mma.sync"],
        ),
        (
            {name: value for name, value in A10.items() if name != "launched"} | {"error": "no context"},
            False,
            "broken",
            "There is a GPU, but a trial kernel fails on it: no context",
            ["8.6", "not launched: no context"],
        ),
        (
            {"gpus": [], "error": "no NVVM"},
            True,
            "simulator",
            "No GPU was found: kernels run in the simulator",
            ["CUDA's compiler is not installed", "[cu13]'", "[cu12]'"],
        ),
        ({"gpus": [], "error": "no NVVM"}, False, "broken", "No GPU was found, and the simulator is off", []),
        (T4 | {"driver": [12, 4]}, False, "broken", NOT_ON_IT, ["not installed: pip install 'moe_numba[cu12]'"]),
        (T4 | {"driver": [14, 0]}, False, "broken", NOT_ON_IT, ["not installed: pip install 'moe_numba[cu13]'"]),
        (
            T4 | {"driver": [12, 4], "toolkit": [13, 5]},
            False,
            "broken",
            NOT_ON_IT + "the compiler is for CUDA 13.5",
            ["but the driver supports CUDA 12.4: pip install 'moe_numba[cu12]'"],
        ),
        (
            {"gpus": H200["gpus"], "driver": [13, 0], "toolkit": [13, 0], "error": "pip install 'moe_numba[mlir]'"},
            False,
            "broken",
            "There is a GPU, but no kernel can be compiled for it: pip install 'moe_numba[mlir]'",
            [],
        ),
    ],
)
def test_doctor_report(monkeypatch, found, simulated, status, summary, expected):
    monkeypatch.setattr(doctor, "probing", lambda: contextlib.nullcontext(lambda: found))
    monkeypatch.setattr(simulator, "ENABLED", simulated)
    monkeypatch.delenv("MOE_NUMBA_ARCH", raising=False)
    examined = doctor.examine()
    text = "\n".join(doctor.describe(examined))
    assert examined["status"] == status and text.startswith(summary), text
    assert all(part in text for part in expected), text


def test_doctor_compiles_for_the_gpus_own_architecture():
    code = (
        "import moe_numba; from moe_numba import doctor; print([len(doctor._compile(arch).code.code) for arch in {}])"
    )
    archs = [(7, 5), (8, 6), (9, 0, "a"), (12, 0)]
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    command = [sys.executable, "-c", code.format(archs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert all(size > 1000 for size in json.loads(done.stdout)), done.stderr[-2000:]


@pytest.mark.parametrize("driver, compiler", [([13, 0], [13, 5]), ([13, 0], [12, 9]), ([12, 0], [12, 9])])
def test_a_compiler_of_the_drivers_major_version_or_older_is_no_problem(driver, compiler):
    assert doctor._compiler_problem({"driver": driver, "toolkit": compiler}) is None


def test_doctor_reports_a_failed_compiler_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with doctor.probing() as trial:
        assert trial() == {"gpus": [], "error": "exit code 1"}


def test_doctor_ends_a_trial_that_takes_too_long():
    with doctor.probing(timeout_s=0.01) as trial:
        assert trial() == {"gpus": [], "error": "the trial did not finish within 0.01 s"}


def test_doctor_needs_no_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "moe_numba.course.pages.gpu_support", None)  # its import fails
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(doctor, "probing", lambda: contextlib.nullcontext(lambda: H200))
    lines = doctor.report()
    assert lines[0].endswith("this package's own kernels also need torch: pip install 'moe_numba[kernels]'")
    assert any(line.endswith("python -m moe_numba.simulator run PROGRAM") for line in lines)


def test_doctor_needs_no_cuda_on_macos(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a trial was started"))
    monkeypatch.setattr(simulator, "ENABLED", True)
    lines = doctor.report()
    assert lines[0].startswith("No GPU was found: kernels run in the simulator") and "cu13" not in "".join(lines)
    assert "there is no CUDA for macOS" in lines[3]
