"""Every public function describes its arguments and errors, and has an example, which does what it says."""

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

# A method of `Buffer` makes them.
MADE = {"moe_numba.expert_parallel.LowLatency", "moe_numba.expert_parallel.SymmetricOutput"}


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


def get(name):
    """Return the function or class of a name that the page lists."""
    module, _, function = name.rpartition(".")
    return getattr(__import__(module, fromlist=[function]), function)


def undescribed(function, anywhere=False):
    """Return the parameters that a docstring has no line for, or, with ``anywhere``, does not name."""
    text = inspect.getdoc(function) or ""
    parts = re.split(r"^(\w[\w ]*)\n---+\n", text, flags=re.M)
    lines = [text for title, text in zip(parts[1::2], parts[2::2]) if title in ("Parameters", "Attributes")]
    names = re.findall(r"^[\w,* ]+(?= :|$)", "\n".join(lines), re.M)
    described = set(re.findall(r"\w+", " ".join(names)))
    if anywhere:
        described |= set(re.findall(r"`(\w+)", text))
        if "Arguments and errors are those of" in text:
            return []
    return [n for n in inspect.signature(function).parameters if n not in {*described, "self", "cls"}]


def methods(name):
    """Return the public methods of a class that its page shows; none of a function."""
    thing = get(name)
    members = vars(thing).items() if inspect.isclass(thing) else ()
    functions = ((n, getattr(member, "__func__", member)) for n, member in members if not n.startswith("_"))
    return [(n, f) for n, f in functions if inspect.isfunction(f) and ":meta private:" not in (f.__doc__ or "")]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_errors_are_described(name):
    thing, text = get(name), inspect.getdoc(get(name))
    if not (inspect.isclass(thing) and issubclass(thing, Exception)) and name not in MADE:
        assert undescribed(thing) == []
    if inspect.isfunction(thing) and ".simulator." not in name and inspect.signature(thing).parameters:
        assert "\nRaises\n" in text or "errors" in text, "no word about errors"
    for method, function in methods(name):
        assert inspect.getdoc(function), f"{method} has no docstring"
        assert undescribed(function, anywhere=True) == [], method


def test_arguments_that_are_not_described_are_found():
    def good(x, y, z=1):
        """Add.

        Parameters
        ----------
        x, y : tensor
        z : int, optional
        """

    def bad(x, y):
        """Add ``x``.

        Parameters
        ----------
        x : tensor
            Not y, which has no line; ``x`` has one.
        """

    assert undescribed(good) == [] and undescribed(bad) == ["y"] and undescribed(bad, anywhere=True) == ["y"]
    assert undescribed(lambda x: x) == ["x"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT])
def test_the_example_does_what_it_says(name):
    count, problems = run_examples(get(name).__doc__, name)
    assert problems == ""
    assert count, f"{name} has no example"


def test_the_page_lists_every_public_function():
    public = {f"moe_numba.{name}" for name in moe_numba.__all__} - {"moe_numba.simulator"}
    assert public <= set(NAMES)
    assert WITHOUT < set(NAMES) and len(NAMES) == len(set(NAMES))


def test_wrong_examples_are_rejected():
    assert run_examples("Add.\n\n    >>> 1 + 1\n    3\n", "wrong")[1]
    assert run_examples("Add.", "none") == (0, "")
