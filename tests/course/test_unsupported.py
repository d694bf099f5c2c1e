"""Steps that the GPU cannot run are left out of a notebook's ladder; wrong steps and other errors stop it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from moe_numba import simulator
from moe_numba.course.bench import Stats, records
from moe_numba.course.bench.figures import plots
from moe_numba.course.pages.unsupported import why_not_run
from moe_numba.course.steps.ladder import Ladder, WrongResult
from moe_numba.runtime import device as devices
from moe_numba.runtime.device import UnsupportedDeviceError
from moe_numba.simulator.capability import UnsupportedInstruction

ENVIRONMENT = {"gpu": "NVIDIA T4", "driver": "1", "versions": {}, "commit": "1a2b3c4d", "date": "2026-11-20T10:00:00Z"}
RIGHT = np.array([1.0, 2, 3])
PTXAS = """ERROR_PTX_COMPILE (4)
nvJitLink error log: ptxas application ptx input, line 28; error   : {}
ptxas fatal   : Ptx assembly aborted due to errors
"""
REASONS = {
    "T4 has compute capability 7.5; 9.0 or newer is needed": UnsupportedDeviceError,
    "``redux.sync`` needs compute capability 8.0; the simulated GPU has 7.5": UnsupportedInstruction,
    "CUDA out of memory": torch.OutOfMemoryError,
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (too many blocks): launch of count with grid 64, block 1024": RuntimeError,
    "[701] Call to cuLaunchKernel results in CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": RuntimeError,
    "shared_bytes is 233472, more than a block of this GPU can have: CUDA_ERROR_INVALID_VALUE": ValueError,
    "Feature 'redux' requires .target sm_80 or higher": lambda text: Exception(PTXAS.format(text)),
    "Instruction 'wgmma.fence' not supported on .target 'sm_80'": lambda text: Exception(PTXAS.format(text)),
}
OTHERS = [
    ValueError("topk is 9; 1 to 8 are allowed"),
    simulator.Deadlock("no thread can make progress"),
    RuntimeError("CUDA_ERROR_INVALID_VALUE (invalid argument): launch of gate with grid 1, block 2048"),
    RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS"),
    Exception(PTXAS.format("Unexpected instruction types specified for 'mad'")),
]


def refuse(reason):
    """A call that raises the error with this text."""

    def call():
        raise REASONS[reason](reason)

    return call


def check(outputs):
    return None if np.array_equal(outputs, RIGHT) else "the outputs differ"


@pytest.fixture
def measured(monkeypatch):
    """A GPU on which every step takes 20 us, and a call 30 us."""
    from moe_numba.course.steps import ladder

    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name, us in (("kernel_time", 20), ("call_time", 30)):
        stats = Stats(us, us - 1, us + 1)
        monkeypatch.setattr(ladder, name, lambda call, stats=stats: stats)
        monkeypatch.setattr(ladder, f"{name}s", lambda named, stats=stats: dict.fromkeys(named, stats))
    monkeypatch.setattr(records, "environment", lambda: dict(ENVIRONMENT))


@pytest.fixture
def root(tmp_path):
    """A repository with an H200's record of three steps."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    rows = [records.row(name, dtype="float32", kernel=Stats(5, 4, 6)) for name in ("torch eager", "cluster", "final")]
    records.write("ladder", rows, tmp_path, env=ENVIRONMENT | {"gpu": "NVIDIA H200"})
    return tmp_path


@pytest.mark.parametrize("reason", REASONS)
def test_reasons_of_gpus_are_recognised(reason):
    with pytest.raises(Exception) as caught:
        refuse(reason)()
    assert why_not_run(caught.value) == reason


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_no_reason(error):
    assert why_not_run(error) is None


def test_ptxas_names_the_instruction():
    code = """
from numba import cuda
from moe_numba.course.pages.unsupported import why_not_run
from moe_numba.ptx.cp_async import cp_async_commit_group
from moe_numba.runtime.compile import compile_kernel

@cuda.jit
def kernel(out):
    cp_async_commit_group()
    out[0] = 1

try:
    compile_kernel(kernel, ("int32*",), arch=(7, 5))
except Exception as error:
    print(why_not_run(error))
"""
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    code = "import moe_numba\n" + code  # before Numba
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "'cp.async.commit_group' requires .target sm_80 or higher" in done.stdout, done.stderr[-2000:]


def test_a_step_that_the_gpu_cannot_run_is_left_out(measured, root, capsys):
    steps, reason = Ladder("ladder", check, root=root), next(iter(REASONS))
    steps.step("torch eager", lambda: RIGHT)
    steps.step("cluster", refuse(reason))
    steps.step("final", lambda: RIGHT)
    steps.report("cluster")
    steps.report("final", "cluster")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == f"cluster not run: {reason}; H200 recorded: 5.00 us kernel"
    assert lines[2] == "final 20.0 us kernel 30.0 us call x1.0 previous"
    assert lines[3:] == ["cluster: not run here", "final: 20.0 us."]
    assert steps.not_run == {"cluster": reason} and steps.row("cluster") is steps.median_us("cluster") is None
    steps.measure_all()
    assert "cluster" not in capsys.readouterr().out
    steps.save()
    record = records.read("ladder", "t4", root)
    assert records.invalid(record) == [] and records.find(record, step="cluster")["not_run"] == reason
    figure = steps.plot()
    assert "not run on this GPU" in [text.get_text() for text in figure.findobj(Text)]
    assert len(figure.axes[0].patches) == 2
    assert plots.split_figure(record["rows"]) is not None


def test_a_step_runs_again_on_a_gpu_that_can(measured, root, capsys):
    steps = Ladder("ladder", check, root=root)
    steps.step("cluster", refuse(next(iter(REASONS))))
    steps.step("cluster", lambda: RIGHT)
    assert not steps.not_run and steps.median_us("cluster") == 20


@pytest.mark.parametrize("enabled", [False, True])
def test_a_need_is_checked_before_the_kernel_is_compiled(measured, monkeypatch, root, capsys, enabled):
    monkeypatch.setattr(simulator, "ENABLED", enabled)
    monkeypatch.setattr(devices, "gpu_of", lambda device: devices.gpu_like((8, 0), "A100"))
    steps, calls = Ladder("ladder", check, root=root), []
    steps.step("cluster", lambda: calls.append(1) or RIGHT, needs=(9, 0))
    assert "not run: A100 has compute capability 8.0; 9.0 or newer is needed; H200" in capsys.readouterr().out
    assert not calls and steps.row("cluster") is None
    steps.step("final", lambda: calls.append(1) or RIGHT, needs=(8, 0))
    assert calls and not steps.not_run.get("final")


def test_an_attempt_holds_what_a_notebook_checks_apart(measured, root, capsys):
    steps = Ladder("ladder", check, root=root)
    with steps.attempt("cluster"):
        refuse(next(iter(REASONS)))()
        steps.step("cluster", lambda: RIGHT)
    assert "cluster" in steps.not_run and capsys.readouterr().out.count("cluster") == 1


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_raised(measured, root, error):
    def call():
        raise error

    steps = Ladder("ladder", check, root=root)
    with pytest.raises(type(error)):
        steps.step("final", call)
    with pytest.raises(type(error)), steps.attempt("final"):
        call()


def test_wrong_results_are_raised_in_an_attempt(measured, root):
    steps = Ladder("ladder", check, root=root)
    with pytest.raises(WrongResult), steps.attempt("final"):
        steps.step("final", lambda: 2 * RIGHT)
    assert records.find_step(steps.rows, "final")["refused"]
