"""Repeated launches of a call, in a process whose driver executes nothing; the checks are in ``replayed_calls.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CHECKS = (
    "other_addresses_and_streams",
    "a_workspace_of_another_size_and_a_call_without",
    "outputs_that_are_inputs",
    "alignments",
    "refusals_of_later_calls",
    "the_gate_and_the_experts",
    "the_grouped_gemm",
    "prepared_calls",
    "threads",
    "no_tensor_is_kept",
    "errors_of_the_driver",
)


@pytest.fixture(scope="module")
def done():
    """Execute all checks."""
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(TESTS), str(TESTS / "moe_layer")])
    command = [sys.executable, TESTS / "helpers/replayed_calls.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", CHECKS)
def test_repeated_launches(name, done):
    assert name in done.stdout.split(), done.stderr


def test_all_checks_are_named(done):
    assert tuple(done.stdout.split()) == CHECKS, done.stderr
