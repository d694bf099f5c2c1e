"""What notes the kernels that a measurement launches."""

import threading

import numpy as np
import pytest
import torch

import moe_numba
from moe_numba import simulator
from moe_numba.runtime.launch import launch
from moe_numba.runtime.recording import launched_kernels, noted_launches, recordings

# isort: split
from numba import cuda

DEVICE = "cpu" if simulator.ENABLED else "cuda"


def make(value):
    @cuda.jit
    def add(x):
        x[cuda.threadIdx.x] += value

    return add


def names(noted):
    return sorted(launched.kernel.py_func.__name__ for launched in noted.values())


def test_all_ways_to_launch_are_noted():
    x, weights = torch.zeros(32, dtype=torch.int32, device=DEVICE), torch.zeros(4, 8, device=DEVICE)
    ids = torch.zeros(4, 8, dtype=torch.int32, device=DEVICE)
    prepared, own, by_numba = moe_numba.prepare(moe_numba.fuse_routing, weights, ids, 256), make(1), make(2)
    launch(own, 1, 32, x)
    calls = {
        "a launcher": lambda: launch(own, 1, 32, x),
        "Numba": lambda: by_numba[1, 32](np.zeros(32, np.int32)),
        "a prepared call": prepared,
        "another thread": lambda: run_in_thread(lambda: launch(own, 1, 32, x)),
    }
    for how, call in calls.items():
        with noted_launches() as noted:
            call()
            call()
        assert len(noted) == 1, how
        (launched,) = noted.values()
        assert launched in launched_kernels() and (launched.cubin is None) == simulator.ENABLED, how
    assert not recordings
    launch(make(3), 1, 32, x)
    assert len(noted) == 1, "nothing is noted afterwards"


def test_notes_nest_and_end_after_errors():
    x = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    with noted_launches() as outer:
        launch(make(1), 1, 32, x)
        with pytest.raises(ZeroDivisionError), noted_launches() as inner:
            launch(make(2), 1, 32, x)
            raise ZeroDivisionError
        make(3)[1, 32](np.zeros(32, np.int32))
    assert names(inner) == ["add"] and names(outer) == ["add"] * 3 and not recordings


def run_in_thread(function):
    if simulator.ENABLED:  # whose threads are those of kernels
        return function()
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
