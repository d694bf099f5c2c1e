"""Every public function has an example in its docstring, which does what it says."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import moe_numba
from moe_numba import simulator

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the examples' tensors are on the CPU")

API = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
# They come with a process group of several GPUs or from a method of another class, or docs/examples has their program.
WITHOUT = {
    "moe_numba.moe_layer.ExpertParallelMoE",
    "moe_numba.integrations.transformers.distribute_experts",
    "moe_numba.integrations.transformers.pack_mxfp4_weights",
    "moe_numba.simulator.Profile",
    "moe_numba.expert_parallel.CudaIpc",
    "moe_numba.expert_parallel.Nvshmem",
    "moe_numba.expert_parallel.SymmetricMemory",
    "moe_numba.expert_parallel.SymmetricOutput",
    "moe_numba.expert_parallel.EventOverlap",
    "moe_numba.expert_parallel.EventHandle",
    "moe_numba.expert_parallel.LowLatencyReceived",
}


def listed(page):
    """Return the names of a page with tables of functions: ``module.name``."""
    names, module = [], ""
    for line in page.splitlines():
        if found := re.match(r"\.\. currentmodule:: (\S+)", line):
            module = found[1]
        elif found := re.match(r"   (\w+)$", line):
            names.append(f"{module}.{found[1]}")
    return names


NAMES = listed(API)


def run_examples(docstring, name):
    """Run the examples of a docstring; return how many there are, and what went wrong."""
    names = {"moe_numba": moe_numba, "torch": torch}
    test = doctest.DocTestParser().get_doctest(inspect.cleandoc(docstring or ""), names, name, None, None)
    said = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    return result.attempted, "".join(said)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT])
def test_the_example_does_what_it_says(name):
    module, _, function = name.rpartition(".")
    count, problems = run_examples(getattr(__import__(module, fromlist=[function]), function).__doc__, name)
    assert problems == ""
    assert count, f"{name} has no example"


def test_the_page_lists_every_public_function():
    public = {f"moe_numba.{name}" for name in moe_numba.__all__} - {"moe_numba.simulator"}
    assert public <= set(NAMES)
    assert WITHOUT < set(NAMES) and len(NAMES) == len(set(NAMES))


def test_wrong_examples_are_rejected():
    assert run_examples("Add.\n\n    >>> 1 + 1\n    3\n", "wrong")[1]
    assert run_examples("Add.", "none") == (0, "")
