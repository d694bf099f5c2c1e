"""Machine code of notebook 14's kernels, which run in the simulator only; no GPU is needed."""

import re
from pathlib import Path

import pytest
from helpers.machine_code import compiler_before

from moe_numba.course.bench.records import code_hash
from moe_numba.runtime.sass import compile_apart

TEXT = (Path(__file__).parents[2] / "notebooks" / "14_low_latency.py").read_text()
CELLS = [cell for cell in code_hash.code_cells(TEXT) if re.search(r"^@cache|^def wait_vector", cell, re.M)]
IMPORTS = re.search(r"^import warnings$.*?(?=^warnings)", TEXT, re.M | re.S)[0]
COMMON = ("int32*", "uint64*", "int32*", "int32")
DISPATCH = (*COMMON, "int32*", "int64*", "int32*", "int32*")
KERNELS = {
    "make_flags": DISPATCH,
    "make_lamport": DISPATCH,
    "make_combine": (*COMMON, "int32*", "int32*", "int64*", "int32*"),
    "make_packed": DISPATCH,
}


@pytest.fixture(scope="module")
def reports():
    if compiler_before(13, 5):
        pytest.skip("the compiler of CUDA 13.0 takes minutes for each of these kernels")
    source = "\n".join(["import moe_numba", IMPORTS, *CELLS])
    return compile_apart(
        source, {name: (f"{name}(Sizes(2, 128, 7168, 8, 128))", types, 32, False) for name, types in KERNELS.items()}
    )


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_spills(name, reports):
    report = reports[name]
    assert report.spilled_bytes == report.stack_bytes == 0 and not report.complaints


def test_only_flags_after_data_need_a_system_fence(reports):
    fences = {name: report.count("MEMBAR.ALL.SYS") for name, report in reports.items()}
    assert (
        fences == {"make_flags": 1, "make_lamport": 0, "make_combine": 0, "make_packed": 0} or None in fences.values()
    )


def test_all_kernels_of_the_notebook_are_compiled():
    made = set(re.findall(r"^def (make_\w+)\(sizes\)", "\n".join(CELLS), re.M))
    assert made == set(KERNELS)
