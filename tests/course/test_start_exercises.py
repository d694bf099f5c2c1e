"""The exercise of notebook 00 that chooses a repair: the counts of all decide, after a choice."""

import sys
import types
from pathlib import Path

import pytest
from helpers.notebook_kernels import kernels_of

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32

from moe_numba.course.lessons.start.exercises import repair
from moe_numba.runtime.changed_source import define

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="another process counts on a GPU")


@pytest.fixture
def notebook(monkeypatch):
    """Return a module that stands for the notebook in which the kernels are defined."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_repair_is_judged_by_the_counts_of_all(notebook):
    kernels = kernels_of((Path(__file__).parents[2] / "notebooks/00_start_here.py").read_text())
    names = "count_rows", "side_by_side", "rows_by_warps", "one_lane_adds"
    text = "\n\n".join(kernels[name] for name in names)
    vars(notebook).update(define(text, {"cuda": cuda, "float32": float32, "FULL": 0xFFFFFFFF}, "repairs.py"))
    kernel, *repairs = (vars(notebook)[name] for name in names)
    check = lambda *choice: repair.check(kernel, dict(zip("ABC", repairs, strict=True)), *choice)
    assert check().state == "open" and check().table is None
    assert check("D").state == "wrong" and "choices are A, B, C" in check("D").text
    assert check("A").state == check("C").state == "wrong" and "B leaves the fewest" in check("A").text
    assert check("A").text == "wrong, you chose A: B leaves the fewest transactions"
    assert check("B").text == "right: B leaves the fewest transactions" and len(check("B").table.lines) == 4
    assert check("B").state == "right"
    edited = text.replace("sums[t] > 0", "sums[t] > 1")
    vars(notebook).update(define(edited, {"cuda": cuda, "float32": float32, "FULL": 0xFFFFFFFF}, "edited.py"))
    assert "A does not count" in repair.check(kernel, {"A": notebook.side_by_side}, "A").text
