"""Chooses GPU or simulator before Numba is imported, and deselects tests that need more GPUs than there are."""

import moe_numba  # noqa: F401, I001  before Numba: this import chooses the simulator or the GPU

import os

import pytest

from moe_numba import simulator


def gpus():
    """Return the number of GPUs that tests may use: 0 in the simulator."""
    if simulator.ENABLED:
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that need more GPUs than there are; a skip would look like a problem of the machine."""
    found = gpus()

    def needs(item):
        return 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0

    beyond = [item for item in items if needs(item) > found]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if needs(item) <= found]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """For ``-n auto``: one test at a time on a GPU, so that tests do not compete for memory."""
    return len(os.sched_getaffinity(0)) if simulator.ENABLED else 0


@pytest.fixture
def device():
    """Return the device of tensors: "cuda", or "cpu" in the simulator."""
    return "cpu" if simulator.ENABLED else "cuda"
