"""Which edits of a kernel make the results that it was measured with stale."""

import importlib
import json
import linecache
import sys

import pytest
from bench_topics import ENVIRONMENT

import moe_numba
from moe_numba.course.bench import Stats, records
from moe_numba.course.bench.records import kernel_hash, staleness
from moe_numba.ptx import cuda_cpp
from moe_numba.runtime.changed_source import changed_module
from moe_numba.runtime.recording import Launched

# isort: split
from numba import cuda

# A part of the package that exists only in these tests.
FILES = {
    "__init__.py": "",
    "constants.py": "OFFSET = 3\nUNUSED = 1\n",
    "helpers.py": '''
from numba import cuda

from moe_numba.planted.constants import OFFSET


def make_scale(factor):
    @cuda.jit(device=True)
    def scale(x):
        """Scale."""
        return x * factor + OFFSET

    return scale


def unrelated(x):
    return x + 1
''',
    "kernel.py": '''"""A kernel."""

from numba import cuda

from moe_numba.planted.helpers import make_scale
from moe_numba.ptx.memory import griddepcontrol_wait

LIMIT = 7  # of the elements


def make_kernel(size):
    rows = 2
    scale = make_scale(rows)

    @cuda.jit
    def kernel(x):
        """Scale an array."""
        griddepcontrol_wait()
        i = cuda.threadIdx.x  # in the block
        if i < LIMIT * rows:
            x[i] = scale(x[i]) + size

    return kernel


def plan():
    return make_kernel(4)
''',
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Add ``moe_numba.planted``; return a function that edits one of its files and returns its kernel."""
    folder = tmp_path_factory.mktemp("package") / "planted"
    folder.mkdir()

    def edit(name="kernel.py", old="", new=""):
        assert FILES[name].count(old) == 1 or not old
        for file, text in FILES.items():
            (folder / file).write_text(text.replace(old, new) if file == name and old else text)
        forget()
        return importlib.import_module("moe_numba.planted.kernel").plan()

    def forget():
        for module in [module for module in sys.modules if module.startswith("moe_numba.planted")]:
            del sys.modules[module]
        for file in FILES:
            linecache.cache.pop(str(folder / file), None)
        importlib.invalidate_caches()
        kernel_hash._defined_now.cache_clear()
        kernel_hash._definitions.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_numba, "__path__", [*moe_numba.__path__, str(folder.parent)])
        patch.setattr(sys, "dont_write_bytecode", True)  # a file that changes within a second keeps its bytecode
        edit()
        kernel_hash._homes.cache_clear()
        yield edit
        forget()
        kernel_hash._homes.cache_clear()


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def write_record(repository, kernel):
    timed = Stats(2.0, 1.0, 3.0, (Launched(kernel, None, {}),))
    rows = [records.row("final", call=timed), records.row("peer:triton", call=Stats(2.0, 1.0, 3.0))]
    return records.write("gate", rows, repository, env=ENVIRONMENT)


def write_notebook(repository, kernel):
    """Write a notebook, and its copy as one that has launched the kernel."""
    source = repository / "notebooks" / "01_gate_prompt.py"
    source.write_text("# %%\nx = 1\n")
    code = staleness.hash_cells(source.read_text())
    functions = {"kernel": kernel_hash.functions(kernel)}
    copy = {"metadata": {"moe_numba": ENVIRONMENT | {"code": code, "kernels": [], "functions": functions}}}
    source.with_suffix(".ipynb").write_text(json.dumps(copy))
    return source


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("kernel.py", "+ size", "- size", "make_kernel"),
        ("kernel.py", "        griddepcontrol_wait()\n", "", "make_kernel"),
        ("kernel.py", "rows = 2", "rows = 3", "make_kernel"),
        ("kernel.py", "LIMIT = 7", "LIMIT = 8", "make_kernel"),
        ("helpers.py", "x * factor", "x / factor", "make_scale"),
        ("constants.py", "OFFSET = 3", "OFFSET = 4", "make_scale"),
        ("kernel.py", '        """Scale an array."""\n', "", None),
        ("kernel.py", '"""A kernel."""', '"""The kernel\nof the tests."""', None),
        ("kernel.py", "  # in the block", "  # within its block\n", None),
        ("kernel.py", "def kernel(x):", 'def kernel(x: "an array") -> None:', None),
        ("kernel.py", "def make_kernel(size):", "def make_kernel(size: int) -> object:", None),
        ("kernel.py", "scale(x[i]) + size", "(scale(x[i])\n                + size)", None),
        ("helpers.py", "return x + 1", "return x + 2", None),
        ("helpers.py", "def make_scale", "def another():\n    pass\n\n\ndef make_scale", None),
        ("constants.py", "UNUSED = 1", "UNUSED = 2", None),
    ],
)
def test_edits_that_may_change_machine_code_make_results_stale(planted, repository, file, old, new, changed):
    kernel = planted()
    path, notebook = write_record(repository, kernel), write_notebook(repository, kernel)
    assert records.stale(json.loads(path.read_text())) == [] == staleness.stale_notebook(notebook)
    edited = planted(file, old, new)
    since = f"with kernels that have changed since: kernel ({changed})"
    stale = [f"1 of 2 rows were measured at commit 1a2b3c4 {since}"] if changed else []
    assert records.stale(json.loads(path.read_text())) == stale
    assert staleness.stale_notebook(notebook) == ([f"executed at commit 1a2b3c4 {since}"] if changed else [])
    assert (kernel_hash.ast_hash(edited) != kernel_hash.ast_hash(kernel)) == bool(changed)


def test_a_value_that_a_plan_passes_changes_only_the_hash_of_values(planted, repository):
    kernel = planted()
    path = write_record(repository, kernel)
    other = planted("kernel.py", "make_kernel(4)", "make_kernel(8)")
    assert records.stale(json.loads(path.read_text())) == [], "no function of the kernel has changed"
    before, after = kernel_hash.ast_hash(kernel), kernel_hash.ast_hash(other)
    assert before[:8] == after[:8] and before[8:] != after[8:]


def test_a_module_with_replaced_passages_is_not_the_package(planted):
    """A notebook makes one to show what a passage does; no later edit can bring its functions into the package."""
    planted()
    kernel = changed_module(sys.modules["moe_numba.planted.kernel"], ("+ size", "- size")).plan()
    functions = kernel_hash.functions(kernel)
    assert "cells.make_kernel" in [function.split()[0] for function in functions]
    assert kernel_hash.changed_functions(functions) == []


def test_a_function_that_is_gone_is_changed(planted):
    functions = kernel_hash.functions(planted())
    assert kernel_hash.changed_functions(functions) == []
    moved = FILES["helpers.py"].partition("\n\n\ndef unrelated")[0]
    planted("helpers.py", moved, "make_scale = lambda factor: factor")
    assert kernel_hash.changed_functions(functions) == ["make_scale"]
    assert kernel_hash.changed_functions(["no_such_function 00000000"]) == ["no_such_function"]


def test_all_stale_results_are_listed(planted, repository):
    path, notebook = write_record(repository, kernel := planted()), write_notebook(repository, kernel)
    assert list(staleness.stale_results(repository)) == []
    planted("constants.py", "OFFSET = 3", "OFFSET = 4")
    (record, (rows,)), (copy, (executed,)) = staleness.stale_results(repository)
    assert record == "h200/gate" and rows.startswith("1 of 2 rows")
    assert copy == "01_gate_prompt.ipynb" and executed.startswith("executed at commit 1a2b3c4")
    notebook.write_text("# %%\nx = 2\n")
    _, (_, (cells, kernels)) = staleness.stale_results(repository)
    assert "its code cells have changed since" in cells and "kernel (make_scale)" in kernels
    record = json.loads(path.read_text())
    path.write_text(records.dump({name: value for name, value in record.items() if name != "functions"}))
    assert next(staleness.stale_results(repository)) == (
        "h200/gate",
        ["measured at commit 1a2b3c4, before kernels were hashed"],
    )


def test_a_pointer_that_a_kernel_passes_to_cuda_cpp_is_no_instruction():
    """The object that makes it comes from cffi on a GPU, and from `cuda_cpp` in the simulator."""

    @cuda.jit
    def kernel(x):
        cuda_cpp.ffi.from_buffer(x)

    assert len(kernel_hash.functions(kernel)) == 1
