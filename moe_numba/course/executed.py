"""The notebooks as files: the sources, their executed copies, and whether the two still belong together.

``notebooks/NN_topic.py`` (py:percent) is what is written and reviewed. ``notebooks/NN_topic.ipynb`` is made from it on
a GPU and committed with its outputs. Its metadata says which GPU, which versions, and the SHA-256 of the code it ran.
The functions that end in ``_problems`` return sentences, an empty list when all is well: tests hold them.
"""

import re

import jupytext
import nbformat

from moe_numba.course.bench import records
from moe_numba.course.bench.sources import package_sources

BINARY = ("image/png", "image/jpeg", "application/pdf")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|tmp|home|Users)\b[^\s\"'<>]*")


class NotebookFailed(Exception):
    """A notebook that did not run to its end; the message shows where and why."""


def find(root=None, only=()):
    """The sources ``notebooks/*.py``, sorted; with ``only``, those whose names begin with one of these."""
    paths = sorted((records.repository(root) / "notebooks").glob("*.py"))
    return [path for path in paths if not only or path.stem.startswith(tuple(only))]


def read(path):
    """A py:percent source as a notebook without outputs. The cells' ids are fixed, so that diffs stay small."""
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
    """The code cells that have something to run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def keep(notebook, path, root=None):
    """Write the committed copy beside its source, with what it was executed on and the hashes of what it ran."""
    root = records.repository(root)
    name = f"{path.relative_to(root).as_posix()}#code"
    paths = [name, *package_sources("\n".join(cell.source for cell in code_cells(notebook)), root)]
    notebook.metadata.moe_numba = {**records.environment(), "sources": records.sources(paths, root)}
    nbformat.write(notebook, path.with_suffix(".ipynb"))


def renew_prose(path, with_code=False):
    """Take new prose into the committed copy and keep its outputs; ``NotebookFailed`` when the code changed too.

    Changed code is taken ``with_code``, if the number of code cells is the same. The hashes of what was executed stay,
    so that the copy is stale until it is executed again.
    """
    old, new = nbformat.read(path.with_suffix(".ipynb"), as_version=4), read(path)
    sources = [[cell.source for cell in code_cells(notebook)] for notebook in (old, new)]
    if len(sources[0]) != len(sources[1]) or (sources[0] != sources[1] and not with_code):
        raise NotebookFailed(f"{path.stem}: its code cells have changed too: {_refresh(path.stem)}")
    for before, after in zip(code_cells(old), code_cells(new), strict=True):
        after.outputs, after.execution_count = before.outputs, before.execution_count
    new.metadata = old.metadata
    nbformat.write(new, path.with_suffix(".ipynb"))


# Judging the committed copies


def pair_problems(path):
    """Whether the committed copy has the cells of its source."""
    copy = path.with_suffix(".ipynb")
    if not copy.is_file():
        return [f"{path.stem} has no executed copy: {_refresh(path.stem)}"]
    source, copy = read(path), nbformat.read(copy, as_version=4)
    if [cell.source for cell in code_cells(source)] != [cell.source for cell in code_cells(copy)]:
        return [f"{path.stem}: the code cells of the .py and of the .ipynb differ: {_refresh(path.stem)}"]
    if [cell.source for cell in source.cells] != [cell.source for cell in copy.cells]:
        return [f"{path.stem}: the .ipynb has older prose: run `python -m moe_numba.course.execute prose`"]
    return []


def stale_problems(path, root=None):
    """Whether the committed copy was executed with the code that stands here now."""
    about = nbformat.read(path.with_suffix(".ipynb"), as_version=4).metadata.get("moe_numba", {})
    if f"notebooks/{path.name}#code" not in about.get("sources", {}):
        return [f"{path.stem} does not say which code it was executed with: {_refresh(path.stem)}"]
    record = {"topic": path.stem, "date": about.get("date", "date unknown"), "sources": about["sources"]}
    return [f"{problem}: {_refresh(path.stem)}" for problem in records.stale(record, root)]


def format_problems(notebook):
    """Whether an executed notebook is fit to be committed."""
    problems, cells = [], code_cells(notebook)
    if notebook.metadata.get("moe_numba", {}).get("gpu", records.SIMULATOR) == records.SIMULATOR:
        problems.append("the metadata names no GPU: the committed outputs come from one")
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        problems.append("the cells were not executed once each, from top to bottom")
    for number, cell in enumerate(cells, start=1):
        if "execution" in cell.metadata:
            problems.append(f"cell {number} carries the times of its execution, which change at every run")
        for output in cell.outputs:
            if output.output_type == "error":
                problems.append(f"cell {number} ended in {output.ename}")
            texts = [output.get("text", "")]
            texts += [str(value) for kind, value in output.get("data", {}).items() if kind not in BINARY]
            for place in MACHINE_PATH.findall("\n".join(texts)):
                problems.append(f"cell {number} shows a folder of the machine it ran on: {place}")
    return problems


def _refresh(name):
    return f"on a GPU, run `python -m moe_numba.course.execute execute --in-place --only {name}`"
