"""Run each example of docs/examples, and check what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_numba import simulator

ROOT = Path(__file__).parents[2]
# Lines with a relative difference from another computation.
LINES = {
    "transformers_generation.py": 1,
    "fine_tune.py": 1,
    "fine_tune_lora.py": 2,
    "gpt_oss_mxfp4.py": 2,
    "expert_parallel.py": 2,
    "cupy_routing.py": 1,
    "experts_on_one_gpu.py": 1,
    "linked_cuda_cpp.py": 2,
    "shared_expert_weights.py": 1,
}
BOUNDS = {"experts_on_one_gpu.py": 0.1}  # weights, x and activations in FP8


def differences(output):
    return [float(number) for number in re.findall(r"relative difference.*? (\d+\.\d+)$", output, re.M)]


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "docs" / "examples").glob("*.py")} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_example(name):
    if name.startswith(("transformers", "gpt_oss", "fine_tune")):
        pytest.importorskip("transformers")
    if name == "fine_tune_lora.py":
        pytest.importorskip("peft")
        pytest.importorskip("accelerate")
    if name.startswith("cupy") and not simulator.ENABLED:
        pytest.importorskip("cupy")
    env = os.environ | ({"MOE_NUMBA_SIMULATE": "1"} if simulator.ENABLED else {})
    command = [sys.executable, ROOT / "docs" / "examples" / name]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = differences(done.stdout)
    assert len(found) == LINES[name] and max(found) < BOUNDS.get(name, 0.02), done.stdout


def test_a_wrong_result_is_seen():
    assert differences("rank 0: relative difference 0.5000\n") == [0.5]
