"""Notebook files: sources, executed copies, and checks that the two agree.

``notebooks/NN_topic.py`` (py:percent) is the source. ``notebooks/NN_topic.ipynb`` is its copy, executed on a GPU and
committed with its outputs; its metadata contains the GPU, the versions and the hashes of the executed cells and of the
kernels that they launched. Functions that end in ``_problems`` return a sentence per problem.
"""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

import jupytext
import nbformat

from moe_numba.course.bench import records
from moe_numba.course.bench.records.code_hash import hash_cells, is_exercise, without_exercises
from moe_numba.course.bench.records.staleness import stale_notebook

NOT_EXECUTED = "not_executed"  # in the metadata of cells whose code was not executed on a GPU
BINARY = ("image/png", "image/jpeg", "application/pdf")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp|home|Users)\b[^\s\"'<>]*")


class NotebookFailed(Exception):
    """A notebook failed; the message contains the cell and the traceback."""


def find(root: Path | str | None = None, only: Sequence[str] = ()) -> list[Path]:
    """Return the sources ``notebooks/*.py``, sorted; with ``only``, those whose names begin with one of these."""
    paths = sorted((records.repository(root) / "notebooks").glob("*.py"))
    return [path for path in paths if not only or path.stem.startswith(tuple(only))]


def read(path: Path):
    """Read a py:percent source as a notebook without outputs; fixed cell ids keep diffs small."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python", "file_extension": ".py", "pygments_lexer": "ipython3"},
        }
    )
    return notebook


def code_cells(notebook):
    """Return the non-empty code cells."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def save_executed(notebook, path: Path) -> None:
    """Write the executed copy next to its source, with the environment and the hashes of the cells and the kernels.

    In the simulator, all cells are marked as not executed on a GPU.
    """
    kernels = notebook.metadata.get("moe_numba", {})  # see `execute`
    notebook.metadata.moe_numba = {
        **records.environment(),
        "code": hash_cells(path.read_text(encoding="utf-8")),
        **kernels,
    }
    if notebook.metadata.moe_numba["gpu"] == records.SIMULATOR:
        _mark(notebook)
    nbformat.write(notebook, path.with_suffix(".ipynb"))


def save_simulated(notebook, path: Path) -> None:
    """Write the copy with the outputs of a run in the simulator, which shows the times of the records.

    All cells are marked as not executed on a GPU. Environment and hashes remain those of the last execution on one, so
    that the copy is stale until the notebook is executed again.
    """
    _mark(notebook)
    notebook.metadata = nbformat.read(path.with_suffix(".ipynb"), as_version=4).metadata
    nbformat.write(notebook, path.with_suffix(".ipynb"))


def _mark(notebook):
    for cell in code_cells(notebook):
        cell.metadata[NOT_EXECUTED] = True


def update_prose(path: Path, with_code: bool = False) -> None:
    """Copy new prose and new exercises into the committed copy and keep its outputs.

    New and changed exercises have no outputs until :func:`update_exercises`. ``with_code`` also copies other changed
    code: new and changed cells have no outputs and are marked as not executed. The hashes of the executed code remain,
    so that the copy is stale until it is executed again. Raises ``NotebookFailed`` if code has changed without
    ``with_code``.
    """
    old, new = nbformat.read(path.with_suffix(".ipynb"), as_version=4), read(path)
    before, after = code_cells(old), code_cells(new)
    measured = [[source for cell in cells if (source := without_exercises(cell.source))] for cells in (before, after)]
    if measured[0] != measured[1] and not with_code:
        raise NotebookFailed(f"{path.stem}: its code cells have changed too: {_refresh(path.stem)}")
    sources = [[without_exercises(cell.source) or cell.source for cell in cells] for cells in (before, after)]
    blocks = SequenceMatcher(None, *sources, autojunk=False).get_matching_blocks()
    kept = {block.b + i: before[block.a + i] for block in blocks for i in range(block.size)}
    for number, cell in enumerate(after):
        executed = kept.get(number)
        if executed is not None:
            cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
        if executed is None or executed.metadata.get(NOT_EXECUTED):
            cell.metadata[NOT_EXECUTED] = True
    new.metadata = old.metadata
    nbformat.write(new, path.with_suffix(".ipynb"))


def update_exercises(path: Path, simulated) -> None:
    """Copy outputs from an execution of the notebook in the simulator: to exercises, and changed cells, without one.

    On a GPU the simulator tests the answers as well, so their outputs are the same. Changed cells remain marked as not
    executed; they show the times of the records.
    """
    copy = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    found = {cell.source: cell.outputs for cell in code_cells(simulated)}
    for cell in code_cells(copy):
        if not cell.outputs and (is_exercise(cell.source) or cell.metadata.get(NOT_EXECUTED)):
            cell.outputs = found[cell.source]
    nbformat.write(copy, path.with_suffix(".ipynb"))


# Checks of the committed copies


def pair_problems(path: Path) -> list[str]:
    """Check that the committed copy has the cells of its source."""
    copy = path.with_suffix(".ipynb")
    if not copy.is_file():
        return [f"{path.stem} has no executed copy: {_refresh(path.stem)}"]
    source, copy = read(path), nbformat.read(copy, as_version=4)
    if [cell.source for cell in code_cells(source)] != [cell.source for cell in code_cells(copy)]:
        return [f"{path.stem}: the code cells of the .py and of the .ipynb differ: {_refresh(path.stem)}"]
    if [cell.source for cell in source.cells] != [cell.source for cell in copy.cells]:
        return [f"{path.stem}: the .ipynb has older prose: run `python -m moe_numba.course.pages.execute prose`"]
    return []


def stale_problems(path: Path) -> list[str]:
    """Check that the committed copy was executed with the current cells and kernels."""
    return [f"{path.stem}: {problem}: {_refresh(path.stem)}" for problem in stale_notebook(path)]


def format_problems(notebook) -> list[str]:
    """Check that an executed notebook may be committed: run once, without errors or local paths.

    If no GPU has run it yet, its cells say so.
    """
    problems, cells = [], code_cells(notebook)
    is_marked = "moe_numba" in notebook.metadata and all(cell.metadata.get(NOT_EXECUTED) for cell in cells)
    if notebook.metadata.get("moe_numba", {}).get("gpu", records.SIMULATOR) == records.SIMULATOR and not is_marked:
        problems.append("the metadata names no GPU, and cells are not marked as not executed on one")
    executed = [cell for cell in cells if not cell.metadata.get(NOT_EXECUTED)]
    counts = [cell.execution_count for cell in executed]
    # Behind cells that were not executed, or were removed, the numbers of an earlier execution have gaps.
    is_whole, numbers = len(executed) == len(cells), sorted({count for count in counts if count})
    if counts != (list(range(1, len(cells) + 1)) if is_whole else numbers):
        problems.append("the cells were not executed once each, from top to bottom")
    for number, cell in enumerate(cells, start=1):
        if "execution" in cell.metadata:
            problems.append(f"cell {number} contains execution times, which change on every run")
        for output in cell.outputs:
            if output.output_type == "error":
                problems.append(f"cell {number} ended in {output.ename}")
            texts = [output.get("text", "")]
            texts += [str(value) for kind, value in output.get("data", {}).items() if kind not in BINARY]
            for place in MACHINE_PATH.findall("\n".join(texts)):
                problems.append(f"cell {number} contains a path of the machine it ran on: {place}")
    return problems


def _refresh(name):
    return f"on a GPU, run `python -m moe_numba.course.pages.execute execute --in-place --only {name}`"
