"""Chooses the mode first of all, and leaves out the tests that this machine cannot run."""

import moe_numba  # noqa: F401, I001  before anything imports Numba: this chooses the simulator or the GPU

import os

import pytest

from moe_numba import simulator


def gpus():
    """How many GPUs the tests may use: none in the simulator."""
    if simulator.ENABLED:
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(config, items):
    """Deselect what needs more GPUs than there are: not skipped, for nobody here can do anything about it."""
    found = gpus()

    def needs(item):
        return 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0

    beyond = [item for item in items if needs(item) > found]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if needs(item) <= found]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """For ``-n auto``: on a GPU the tests run one by one, so that they do not spoil each other's times and memory."""
    return len(os.sched_getaffinity(0)) if simulator.ENABLED else 0


@pytest.fixture
def device():
    """Where tensors live: "cuda", or "cpu" in the simulator."""
    return "cpu" if simulator.ENABLED else "cuda"
