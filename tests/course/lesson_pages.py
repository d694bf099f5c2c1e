"""What the tests of lessons share: what a page defines, with a passage replaced, and a page with other sizes."""

import ast
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

from moe_numba import simulator
from moe_numba.runtime.changed_source import define

ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count()


def definitions(notebook, own, left_out, right="", wrong=""):
    """Return what the cells of a page define, with a passage replaced, and its steps: name -> version as Python.

    ``own`` has the lesson's answers by name. Assignments in which the pattern ``left_out`` is found are not executed,
    nor those to the environment, which would stay for other tests of this process.
    """
    source = notebook.read_text()
    assert not right or source.count(right) == 1, right
    tree, steps = ast.parse(source.replace(right, wrong) if right else source), {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "step":
            steps[node.value.args[0].value] = ast.unparse(node.value.args[1])
    keep = lambda node: (
        isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
        or isinstance(node, ast.Assign)
        and not re.search(rf"os\.environ|{left_out}", ast.unparse(node))
    )
    text = "\n\n".join(ast.unparse(node) for node in tree.body if keep(node))
    names = {"__name__": f"{notebook.stem}_{next(_numbers)}", **own}
    return define(text, names, f"{names['__name__']}.py"), steps


def fault_of(run, version):
    """Return what a lesson's check says of a version in one thread order, or what the simulator does."""
    try:
        return run.check(version)
    except simulator.SimulatorError as error:
        return str(error)


_WITH_SIZES = """
import sys, types
import moe_numba
from moe_numba.course.lessons.{lesson} import sizes
vars(sizes).update({sizes!r})
from moe_numba.course.steps.judge_estimates import cells_of
from moe_numba.runtime.changed_source import SourceLoader
sys.modules["__main__"] = page = types.ModuleType("__main__")
for number, cell in enumerate(cells_of(open(sys.argv[1]).read())):
    SourceLoader(cell, f"page/cell_{{number}}.py").exec_module(page)
    if number == 0:
        lesson = getattr(page, "lesson", None) or page.layers
        lesson.seeds = 1
print(lesson.summary())
"""


def run_with_sizes(notebook, lesson, **sizes):
    """Run a page in the simulator with other sizes of its lesson; return what it prints."""
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    command = [sys.executable, "-c", _WITH_SIZES.format(lesson=lesson, sizes=sizes), notebook]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout
