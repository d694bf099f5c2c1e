"""Notebook functions run in the simulator's process, and variants of modules."""

import colorsys
import os
import subprocess
import sys

import pytest

from moe_numba import simulator
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.runtime.changed_source import changed_module, changed_source, define, source_of

NOTEBOOK = """
import moe_numba
from functools import cache
import torch as t
from numba import cuda, int32 as i32
from moe_numba import simulator
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.runtime.launch import launch

DEVICE, LANES = "cuda", 32

@cache
def make_kernel(number):
    @cuda.jit
    def store(out, count):
        out[cuda.threadIdx.x + count] = i32(number)
    return store

make_it = make_kernel  # an answer that the next cells use under another name

def work(number, count):
    assert simulator.ENABLED and simulator.capability.SIMULATED == (9, 0)  # a demonstration may use any instruction
    out = t.zeros(LANES, dtype=t.int32, device=DEVICE)
    print("runs", LANES, "lanes")
    try:
        launch(make_it(number), 1, LANES, out, count)
    except simulator.SimulatorError as error:
        print(error)
    return {"last": int(out[-1]), "dtype": out.dtype}

for count in (0, 1):
    print(in_simulator(work, 7, count, constants={"DEVICE": "cpu"}))
"""


def test_a_notebook_function_runs_in_a_separate_process(tmp_path):
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0"}
    environment |= {"MOE_NUMBA_ARCH": "75"}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    command = [sys.executable, str(tmp_path / "notebook.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = "{'last': 7, 'dtype': 'torch.int32'}"
    first, second, third, error, _ = done.stdout.splitlines()
    assert (first, second, third) == ("runs 32 lanes", result, "runs 32 lanes")
    assert "index 32 is outside out" in error


@pytest.mark.skipif(not simulator.ENABLED, reason="on a GPU the call starts a process")
def test_the_simulator_calls_the_function_itself():
    assert in_simulator(lambda pair: {"pair": pair, "type": int}, (1, 2)) == {"pair": [1, 2], "type": "<class 'int'>"}


def test_changed_module_runs_the_new_source():
    changed = changed_module(colorsys, ("def rgb_to_yiq(r, g, b):", "def rgb_to_yiq(g, r, b):"))
    assert changed.rgb_to_yiq(1, 0, 0) == colorsys.rgb_to_yiq(0, 1, 0) != colorsys.rgb_to_yiq(1, 0, 0)
    assert source_of(changed.rgb_to_yiq).startswith("def rgb_to_yiq(g, r, b):")
    with pytest.raises(ValueError, match="has no passage 'nowhere'"):
        changed_module(colorsys, ("nowhere", ""))


def add(a, b):
    return a + b


def test_changed_source_replaces_the_one_occurrence():
    source = changed_source(add, "a + b", "a - b", "subtract")
    assert define(source, {"unused": 1})["subtract"](5, 3) == 2 and changed_source(source, "-", "*").endswith("a * b\n")
    with pytest.raises(ValueError, match="occurs 2 times"):
        changed_source(add, "b", "c")
