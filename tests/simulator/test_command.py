"""The simulator without the rest of the package, and ``python -m moe_numba.simulator run``."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from moe_numba import extras, simulator
from moe_numba.simulator import command
from moe_numba.simulator.core import kernel as core_kernel

# isort: split
from numba import cuda

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

ROOT = Path(__file__).parents[2]
ALONE = ROOT / "tests/helpers/simulator_alone.py"

RACE = """
import sys
import numpy as np
from numba import cuda, int32

@cuda.jit
def reverse(x):
    tile = cuda.shared.array(64, int32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    {barrier}
    x[i] = tile[63 - i]

x = cuda.to_device(np.arange(64, dtype=np.int32))
reverse[1, 64](x)
assert (x.copy_to_host() == np.arange(64)[::-1]).all(), "not reversed"
print("arguments", *sys.argv[1:], __name__)
"""


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a program to a file."""

    def write(text):
        (tmp_path / "program.py").write_text(text)
        return "program.py"

    return write


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the command with these arguments in the folder of `script`."""

    def run(*arguments, **environment):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MOE_NUMBA") and "CUDASIM" not in k}
        # Even where a GPU is present, the command simulates.
        environment = kept | {"MOE_NUMBA_SIMULATE": "0"} | environment
        command = [sys.executable, "-m", "moe_numba.simulator", "run", *map(str, arguments)]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)

    return run


def run_alone(path, *options):
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    return subprocess.run([sys.executable, path, *options], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("options", [(), ("--as-on-macos",), ("--without-cuda",)])
def test_the_simulator_needs_no_extra(options):
    done = run_alone(ALONE, *options)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("moe_numba.biased_grouped_topk needs torch, which is not installed: pip install")
    assert second == "the simulator works alone"


def test_an_import_of_an_extra_would_fail_that_test(tmp_path):
    text = ALONE.read_text().replace("_find_spec =", "import matplotlib  # noqa\n\n_find_spec =")
    (tmp_path / "wrong.py").write_text(text)
    assert "AssertionError: ['matplotlib']" in run_alone(tmp_path / "wrong.py").stderr


@pytest.mark.parametrize(
    "module, extra", [("torch", "kernels"), ("safetensors.torch", "kernels"), ("nvshmem.core", "nvshmem")]
)
def test_a_missing_module_is_reported_with_its_extra(module, extra):
    error = extras.missing_extra(ModuleNotFoundError("No module named ...", name=module), "moe_numba.Buffer")
    assert f"moe_numba.Buffer needs {module.split('.')[0]}" in str(error) and f"moe_numba[{extra}]" in str(error)


def test_other_missing_modules_are_not_explained():
    assert extras.missing_extra(ModuleNotFoundError(name="numpy"), "x") is None
    assert extras.missing_extra(ImportError("cannot import name 'x'"), "x") is None


def test_a_program_runs_as_with_python(run, script):
    done = run(script(RACE.format(barrier="cuda.syncthreads()")), "--seed", "7")
    assert (done.returncode, done.stdout) == (0, "arguments --seed 7 __main__\n"), done.stderr


def test_a_traceback_starts_at_the_programs_frames(run, script):
    done = run("--no-races", script(RACE.format(barrier="")))
    assert done.returncode == 1
    assert done.stderr.splitlines()[1].startswith('  File "program.py", line 16')
    assert done.stderr.endswith("AssertionError: not reversed\n")


@pytest.mark.parametrize(
    "options, environment, reported",
    [((), {}, True), ((), {"MOE_NUMBA_RACES": "0"}, False), (["--no-races"], {"MOE_NUMBA_RACES": "1"}, False)]
    + [(["--races"], {"MOE_NUMBA_RACES": "0"}, True), (["--seeds", "2", "--no-races"], {}, False)],
)
def test_races_are_reported_by_default(options, environment, reported, run, script):
    program = RACE.format(barrier="").replace("assert", "pass; ")
    done = run(*options, script(program), **environment)
    assert done.returncode == int(reported) and ("DataRace: block (0, 0, 0) warp" in done.stderr) == reported


def test_the_first_seed_that_fails_is_named(run, script):
    program = "import os, sys\nsys.exit(3 if os.environ['MOE_NUMBA_SEED'] == '2' else None)"
    done = run("--seeds", 5, script(program))
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "moe_numba.simulator: 1 of 5 seeds passed",
        "moe_numba.simulator: 2 of 5 seeds passed",
        "moe_numba.simulator: seed 2 failed with exit code 3, after 2 seeds that passed; run it again with --seed 2 "
        "instead of --seeds 5",
    ]
    passed = run("--seeds", 4, script("pass")).stderr.splitlines()
    assert [line.split()[1:3] for line in passed] == [["1", "of"], ["2", "of"], ["4", "seeds"]], "1, 2, 4, 8, ..."


def test_options_reach_the_simulator(run, script):
    program = (
        "from moe_numba import simulator\n"
        "world = simulator.World()\n"
        "print(simulator.REASON, simulator.capability.SIMULATED, world.preempt, world.slow_warp)\n"
        "print(world.memory_model is not None)\n"
        "print(simulator.settings.settings['races'], simulator.settings.settings['seed'])"
    )
    options = ("--arch", "80", "--preempt", "0.25", "--slow-warp", "2", "--weak-memory", "--races", "--seed", "9")
    done = run(*options, script(program))
    assert done.stdout == "python -m moe_numba.simulator (8, 0) 0.25 2\nTrue\nTrue 9\n", done.stderr


KERNELS = """
import sys
import threading
from collections import namedtuple
import numpy as np
from numba import cuda

Pair, live = namedtuple("Pair", "a b"), threading.Lock()

def make(factor, table):
    @cuda.jit(device=True)
    def scaled(v):
        return v * factor + table[0]

    @cuda.jit
    def closure(x):
        x[0] = scaled(x[0])
    return closure

@cuda.jit(device=True)
def last(x):
    n = len(x)
    return x[n - 1.0] if n > 9 else x[0]

@cuda.jit
def indexes_by_a_float(x):
    x[0] = last(x)

@cuda.jit
def syncs_the_grid(x):
    cuda.cg.this_grid().sync()
    x[0, 0] = 1

@cuda.jit
def adds(x, pair):
    x[0] = pair[0] + pair[1]

x = np.zeros(4, np.float32)
{calls}
print("ended")
"""
OF_A_LINE_THAT_DOES_NOT = (
    "kernel indexes_by_a_float(float32[:]) does not compile: program.py:23: No implementation of function "
    "Function(<built-in function getitem>) found for signature: >>> getitem(array(float32, 1d, C), float64)\n"
    "    return x[n - 1.0] if n > 9 else x[0]"
)
COMPILED = [  # calls, the exit code, and messages
    ("t = np.ones(2); make(2, t)[1, 1](x); make(3, t)[1, 1](x); make(3, t)[1, 1](x)", 0, ["2 kernels compiled"]),
    ("adds[1, 1](x, (1, 2.5)); adds[2, 1](x, (3, 0.5)); adds[1, 1](x, (1, 2))", 0, ["2 kernels compiled"]),
    (
        "syncs_the_grid[1, 1](np.zeros((2, 2)).T); syncs_the_grid[1, 1](np.zeros((4, 4))[::2])",
        0,
        ["2 kernels compiled"],
    ),
    ("indexes_by_a_float[1, 1](x); syncs_the_grid[1, 1](x[None])", 1, [OF_A_LINE_THAT_DOES_NOT, "1 kernel compiled"]),
    ("indexes_by_a_float[1, 1](x); sys.exit(3)", 3, [OF_A_LINE_THAT_DOES_NOT]),
    ("adds[1, 1](x, Pair(1, 2))", 0, ["kernel adds was not compiled: program.py:35: an argument is of type Pair"]),
]


@pytest.mark.parametrize("calls, code, messages", COMPILED, ids=[calls for calls, _, _ in COMPILED])
def test_launched_kernels_are_compiled_at_the_end(calls, code, messages, run, script):
    done = run("--compile", script(KERNELS.format(calls=calls)))
    assert done.returncode == code and (code == 3 or done.stdout == "ended\n"), done.stderr
    assert done.stderr.count("moe_numba.simulator: ") == len(messages), done.stderr
    for message in messages:
        assert f"moe_numba.simulator: {message}" in done.stderr, done.stderr
    assert "compile" not in run(script(KERNELS.format(calls=calls))).stderr


@pytest.mark.parametrize("calls, code, messages", [COMPILED[0], COMPILED[3]], ids=["compiled", "refused"])
def test_the_environment_lets_a_program_compile_its_kernels(calls, code, messages, script, tmp_path):
    program = "import atexit; atexit.register(print, 'exits')\nfrom moe_numba import simulator\n"
    script(program + KERNELS.format(calls=calls))
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1", "MOE_NUMBA_COMPILE": "1"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code and done.stdout.startswith("ended\n"), done.stderr
    assert done.stderr.count("moe_numba.simulator: ") == len(messages), done.stderr


@pytest.mark.parametrize(
    "options, environment, said",
    [
        (("--arch", "77"), {}, "--arch is '77'; it must be one of 75, 80"),
        (("--preempt", "2"), {}, "--preempt is 2.0, but must lie between 0 and 1"),
        (("--slow-warp", "-1"), {}, "--slow-warp is -1, but must be 0 or more"),
        (("--seeds", "0"), {}, "--seeds is 0, but must be at least 1"),
        ((), {"MOE_NUMBA_SEED": "abc"}, "MOE_NUMBA_SEED is 'abc'; it must be an integer"),
        (("--seeds", "2"), {"MOE_NUMBA_WEAK_MEMORY": "x"}, "MOE_NUMBA_WEAK_MEMORY is 'x'; it must be 0 or 1"),
    ],
)
def test_wrong_options_are_one_sentence(options, environment, said, run, script):
    done = run(*options, script("pass"), **environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"moe_numba.simulator: {said}") and done.stderr.count("\n") == 1


def test_a_missing_program_is_one_sentence(run, script, tmp_path):
    said = "moe_numba.simulator: {} is not a file{}\n"
    assert run("absent.py").stderr == said.format("absent.py", "")
    script("pass")
    assert run("programm.py").stderr == said.format("programm.py", "; did you mean program.py?")
    assert run("x.py").stderr == said.format("x.py", f"; {tmp_path.resolve()} has program.py")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("rnu program.py", "there is no command 'rnu' (did you mean run?); there are debug, run"),
        ("run --sede=3 program.py", "there is no option '--sede' (did you mean --seed?); there are --arch, "),
        ("debug --report program.py", "there is no option '--report'"),
        ("run", "the following arguments are required: script.py, [arguments]; see `python -m moe_numba.simulator run"),
    ],
)
def test_wrong_names_are_one_sentence_with_the_nearest(arguments, said, capsys):
    assert command.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"moe_numba.simulator: {said}") and error.count("\n") == 1


def test_without_a_command_the_help_is_printed(capsys):
    assert command.main([]) == 2
    assert "run my_kernel.py" in " ".join(capsys.readouterr().err.split())


def test_the_report_is_written_to_a_file(run, script, tmp_path):
    program = script(RACE.format(barrier="cuda.syncthreads()"))
    done = run("--report-to", "counters.json", program)
    assert done.returncode == 0 and done.stdout == "arguments __main__\n", done.stderr
    (kernel,) = json.loads((tmp_path / "counters.json").read_text())["kernels"]
    assert kernel["name"] == "reverse"
    done = run("--report-to", "absent/counters.json", program)
    assert done.returncode == 2 and done.stderr.endswith("but absent is not a folder\n")


def test_a_kernel_that_takes_long_is_named():
    @cuda.jit
    def counts(x):
        for k in range(5000):
            x[cuda.threadIdx.x] += k

    said = []
    with command.reported_while_it_runs(said.append, 1e-4):
        core_kernel.run(counts, 1, 32, [np.zeros(32)])
    assert said[0].endswith("running kernel counts, 1 blocks of 32 threads")
    ended, number = threading.Event(), len(said)
    with command.reported_while_it_runs(said.append, 1e-4):
        ended.wait(0.05)
    assert len(said) == number, "nothing runs"


def test_a_program_that_has_loaded_numba_cuda_cannot_switch():
    code = "import numba.cuda; from moe_numba import simulator; simulator.enable()"
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "RuntimeError: import moe_numba before numba.cuda" in done.stderr
