"""The playground's examples, and its programs, run under CPython as they do in a browser.

`make test-browser` runs them in the page itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.notebook_kernels import kernels_of

from moe_numba import simulator
from moe_numba.simulator.browser import programs

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/playground/examples"
EXAMPLES = json.loads((FOLDER / "examples.json").read_text())
EDITED = [example for example in EXAMPLES if "edit" in example]


def source_of(example):
    return (FOLDER / example["file"]).read_text()


def named(examples):
    return {"argvalues": examples, "ids": [example["file"] for example in examples]}


def check(example, result, printed, source):
    error = result["error"]
    assert (error and error["kind"]) == example.get("error"), error
    assert example.get("prints", "") in printed
    marked = [source.splitlines()[number - 1] for number in error["lines"]] if error else []
    assert bool(marked) == ("lines" in example)
    assert all(any(text in line for line in marked) for text in example.get("lines", ())), marked


@pytest.mark.parametrize("example", **named(EXAMPLES))
def test_examples_end_as_they_should(example, tmp_path, capsys):
    source = source_of(example)
    check(example, programs.run(source, tmp_path), capsys.readouterr().out, source)


@pytest.mark.parametrize("example", **named(EDITED))
def test_the_edit_that_an_example_proposes_has_the_effect_that_it_says(example, tmp_path):
    edit, source = example["edit"], source_of(example)
    assert edit["replace"] in source
    error = programs.run(source.replace(edit["replace"], edit["by"]), tmp_path)["error"]
    assert (error and error["kind"]) == edit["error"], error


def test_every_faulty_example_has_an_edit_and_every_example_is_listed():
    assert {e["file"] for e in EXAMPLES if "error" in e} <= {e["file"] for e in EDITED}
    assert sorted(e["file"] for e in EXAMPLES) == sorted(path.name for path in FOLDER.glob("*.py"))


def test_the_examples_of_the_first_group_have_the_kernels_of_the_first_notebook():
    notebook = kernels_of((ROOT / "notebooks/00_start_here.py").read_text())
    found = {}
    for example in EXAMPLES:
        if example["group"] == "Start here":
            found |= kernels_of(source_of(example))
    assert len(found) == 9 and found == {name: notebook.get(name) for name in found}


# Before the simulator is imported, the names that stand for Numba in a browser take Numba's place.
STAND_INS = """
import io, json, runpy, sys
from contextlib import redirect_stdout
runpy.run_path(sys.argv[2])["install"]()
from moe_numba.simulator.browser import programs
import numba
assert "browser" in numba.__doc__ and "llvmlite" not in sys.modules
for path in sys.argv[3:]:
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = programs.run(open(path).read(), sys.argv[1])
    print(json.dumps([result, printed.getvalue()]))
"""


def test_examples_run_with_the_browsers_names_of_numba(tmp_path):
    files = [str(FOLDER / example["file"]) for example in EXAMPLES]
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    names = ROOT / "moe_numba/simulator/browser/numba_names.py"
    command = [sys.executable, "-c", STAND_INS, str(tmp_path), str(names), *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(EXAMPLES), done.stderr
    for example, line in zip(EXAMPLES, lines):
        check(example, *json.loads(line), source_of(example))


def test_a_profile_shows_the_conflicts_that_a_longer_row_removes(tmp_path):
    source = (FOLDER / "transpose.py").read_text()
    for pitch, conflicts in (("32", 992), ("33", 0)):
        edited = source.replace("ROW_PITCH = 32", f"ROW_PITCH = {pitch}")
        (kernel,) = programs.run(edited, tmp_path, profile=True)["profile"]
        assert sum(line["bank_conflicts"] for line in kernel["lines"]) == conflicts
        assert kernel["launch"] == "1 blocks of 32 x 32 threads"
        assert set(programs.COUNTERS) < set(kernel["lines"][0])


@pytest.mark.parametrize(
    "source, kind, lines",
    [
        ("x = 1\ndef f(:\n", "SyntaxError", [2]),
        ("x = 1\n1 / 0\n", "ZeroDivisionError", [2]),
        ("import sys\nsys.exit(3)\n", "SystemExit", []),
    ],
)
def test_errors_of_python_mark_their_line(source, kind, lines, tmp_path):
    error = programs.run(source, tmp_path)["error"]
    assert (error["kind"], error["lines"]) == (kind, lines)


def test_what_the_page_loads_is_complete_and_the_same_each_time(tmp_path):
    packed = []
    for name in ("first.zip", "second.zip"):
        command = [sys.executable, "-m", "moe_numba.simulator.browser", str(tmp_path / name)]
        subprocess.run(command, cwd=ROOT, check=True)
        packed.append((tmp_path / name).read_bytes())
    assert packed[0] == packed[1]
    program = "import moe_numba, moe_numba.ptx.atomics, moe_numba.simulator.profiler.report; print(moe_numba.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "first.zip"), "MOE_NUMBA_SIMULATE": "1"}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "first.zip" in done.stdout, done.stderr
