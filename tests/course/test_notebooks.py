"""Every notebook runs, and every committed copy was executed on a GPU with the current code."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from moe_numba.course.pages import execute, executed

ROOT = Path(__file__).parents[2]
SOURCES = executed.find(ROOT)

every_notebook = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)


# The project's notebooks


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_runs_in_the_simulator(path):
    execute.execute(path, env={"MOE_NUMBA_SIMULATE": "1"})


@every_notebook
def test_copy_has_the_cells_of_its_source(path):
    assert executed.pair_problems(path) == []


@every_notebook
def test_copy_has_the_committed_format(path):
    assert executed.format_problems(nbformat.read(path.with_suffix(".ipynb"), as_version=4)) == []


@every_notebook
def test_issue_numbers_are_not_headings(path):
    """Markdown renders a line that begins with "#4530" as a heading."""
    for cell in executed.read(path).cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"^[>\s]*#+\d", cell.source, re.M), cell.source


def test_every_copy_has_a_source():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {path.stem for path in SOURCES}


# Execution and its checks, in a small temporary repository

NOTEBOOK = """\
# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # A small notebook

# %%
from pathlib import Path

import matplotlib.pyplot as plt

print("run in", Path.cwd())

# %% [markdown]
# ## Step 1: a figure [in brackets]

# %%
plt.plot([1, 2])
plt.show()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
1 + 1
"""
WITH_KERNEL = """\
# %%
import moe_numba

import torch
from numba import cuda

from moe_numba.ptx.memory import griddepcontrol_wait
from moe_numba.runtime.launch import launch


@cuda.jit
def add_one(x):
    griddepcontrol_wait()
    x[cuda.threadIdx.x] += 1


launch(add_one, 1, 32, torch.zeros(32, dtype=torch.int32))
"""
ABOUT = {"gpu": "NVIDIA H200", "driver": "1", "versions": {}, "commit": "c", "date": "2026-01-01T00:00:00Z"}


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_small.py").write_text(NOTEBOOK)
    return tmp_path


@pytest.fixture
def source(repository):
    return repository / "notebooks" / "01_small.py"


@pytest.fixture
def committed(source, repository, monkeypatch):
    """A valid committed copy, made without running anything."""
    notebook = executed.read(source)
    for count, cell in enumerate(executed.code_cells(notebook), start=1):
        cell.execution_count = count
    notebook.metadata.moe_numba = {"kernels": [], "functions": {}}
    monkeypatch.setattr(execute.records, "environment", lambda: dict(ABOUT))
    executed.save_executed(notebook, source)
    return source.with_suffix(".ipynb")


def problems_of(path):
    return executed.format_problems(nbformat.read(path, as_version=4))


def rewrite(path, change):
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


def main(repository, *arguments):
    """Return the exit status of the command line, without a process for it: imports take longer than the tests."""
    return execute.main([*arguments, "--root", str(repository)])


def test_execute_writes_pages_and_figures_and_prints_their_paths(repository):
    old = repository / "build" / "01_small_figures" / "cell_09_0.png"
    old.parent.mkdir(parents=True)
    old.touch()
    command = [sys.executable, "-m", "moe_numba.course.pages.execute", "execute", "--out", str(repository / "build")]
    done = subprocess.run([*command, "--root", str(repository)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "01_small  cell 2/3  'Step 1: a figure [in brackets]'" in done.stderr
    assert f"{repository}/build/01_small.html" in done.stdout
    page = (repository / "build" / "01_small.html").read_text()
    assert "data:image/png;base64" in page and "<title>A small notebook</title>" in page
    assert not re.search(r"""<link|(src|href)=["'](?!data:|\w+\.html|#)""", page), "it loads nothing"
    assert "prefers-color-scheme: dark" in page
    assert page.count('<details class="folded">') == 1, "a folded cell keeps its code below a summary line"
    assert [path.name for path in (repository / "build" / "01_small_figures").iterdir()] == ["cell_02_0.png"]
    page = nbformat.read(repository / "build" / "01_small.ipynb", as_version=4)
    assert "run in notebooks" in executed.code_cells(page)[0].outputs[0].text  # not the absolute path
    assert page.metadata.kernelspec == {"name": "python3", "display_name": "Python 3", "language": "python"}


def test_pages_link_to_one_another_and_a_failed_one_is_named(repository, source):
    links = "# Second\n\n[first](01_small.ipynb) [part](01_small.ipynb#step) [code](01_small.py) [none](other.ipynb)"
    text = "# %% [markdown]\n" + "".join(f"# {line}\n" for line in links.split("\n"))
    (repository / "notebooks" / "02_links.py").write_text(text)
    (repository / "notebooks" / "03_fails.py").write_text("# %% [markdown]\n# # Third\n# %%\n1 / 0\n")
    assert main(repository, "execute", "--only", "02", "03", "--out", str(repository / "build")) == 1
    page = (repository / "build" / "02_links.html").read_text()
    found = re.findall(r'href="([^"#]\S*)"', page)
    assert found[3:7] == ["01_small.html", "01_small.html#step", "01_small.html", "other.ipynb"]
    assert found[:3] == ["01_small.html", "index.html", "03_fails.html"] == found[7:]
    index = (repository / "build" / "index.html").read_text()
    assert '<a href="02_links.html">Second</a>' in index and "Third <" in index and "failed" in index
    assert not (repository / "build" / "03_fails.html").exists() and "A small notebook <" in index


def test_execute_in_place_makes_a_copy_that_is_valid_on_a_gpu(repository, source):
    assert main(repository, "execute", "--in-place") == 0
    assert executed.pair_problems(source) == [] == problems_of(source.with_suffix(".ipynb"))
    copy = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    simulated = copy.metadata.moe_numba.gpu == "simulator"
    assert ["no GPU has executed it" in problem for problem in executed.stale_problems(source)] == [True] * simulated
    assert {cell.metadata.get(executed.NOT_EXECUTED, False) for cell in executed.code_cells(copy)} == {simulated}


def test_a_failing_cell_is_printed_and_the_exit_status_is_1(repository, source, capsys):
    source.write_text(NOTEBOOK.replace("1 + 1", "one = 1\none / 0  # never works"))
    assert main(repository, "execute", "--out", str(repository / "build")) == 1
    printed = capsys.readouterr().err
    assert "01_small: cell 3/3 'Step 1: a figure [in brackets]' failed" in printed
    assert "    one / 0  # never works" in printed
    assert printed.strip().endswith("ZeroDivisionError: division by zero")


def test_a_kernel_process_that_exits_is_reported(source, repository):
    source.write_text("# %%\nimport os\n\nos._exit(3)\n")
    with pytest.raises(executed.NotebookFailed, match="cell 1/1 'start' failed"):
        execute.execute(source, repository)


def test_an_unknown_notebook_is_refused(repository, capsys):
    assert main(repository, "execute", "--only", "09") == 1
    assert "no notebooks 09" in capsys.readouterr().err


def test_a_valid_copy_is_accepted(source, committed, repository):
    assert executed.pair_problems(source) == []
    assert executed.stale_problems(source) == []
    assert problems_of(committed) == []


def test_a_missing_copy_is_reported(source):
    assert "has no executed copy" in executed.pair_problems(source)[0]


def test_changed_code_is_reported_with_the_command_to_execute(source, committed, repository):
    source.write_text(NOTEBOOK.replace("1 + 1", "1 + 2"))
    assert "code cells" in executed.pair_problems(source)[0]
    problem = executed.stale_problems(source)[0]
    assert "executed at commit c; its code cells have changed since" in problem
    assert "--in-place --only 01_small" in problem
    with pytest.raises(executed.NotebookFailed, match="code cells have changed"):
        executed.update_prose(source)
    executed.update_prose(source, with_code=True)
    assert executed.pair_problems(source) == [] and executed.stale_problems(source) == [problem]
    assert problems_of(committed) == []


def test_changed_cells_of_a_copy_have_no_outputs_of_older_code(source, committed, repository):
    *same, last = executed.code_cells(nbformat.read(committed, as_version=4))
    source.write_text(NOTEBOOK.replace(last.source, f"{last.source}  # changed") + "\n# %%\n3\n")
    executed.update_prose(source, with_code=True)
    assert executed.pair_problems(source) == [] == problems_of(committed) and executed.stale_problems(source)
    cells = executed.code_cells(nbformat.read(committed, as_version=4))
    assert [cell.execution_count for cell in cells] == [*range(1, len(same) + 1), None, None]
    assert [bool(cell.outputs) for cell in cells[-2:]] == [False, False]
    source.write_text(source.read_text().replace("# changed", "# again"))
    executed.update_prose(source, with_code=True)  # they stay marked
    assert problems_of(committed) == []
    rewrite(committed, lambda notebook: executed.code_cells(notebook)[0].update(execution_count=None))
    assert "not executed once each" in problems_of(committed)[0]


EXERCISE = """
# %%
from moe_numba.course.exercises import exercise

# %%
answer = ..., ...
exercise("start-4").check(answer)
"""


def test_exercises_are_executed_in_the_simulator(source, committed, repository):
    """They come with their outputs, and without making the copy stale; other cells keep theirs."""
    counts = [cell.execution_count for cell in executed.code_cells(nbformat.read(committed, as_version=4))]
    first, *rest = NOTEBOOK.split("# %%\nfrom pathlib")
    import_line = "from moe_numba.course.exercises import exercise\n"
    source.write_text(
        f"{first}# %%\n{import_line}from pathlib{rest[0]}\n{EXERCISE.partition(import_line)[2].strip()}\n"
    )
    assert main(repository, "exercises") == 0
    assert executed.pair_problems(source) == [] == problems_of(committed)
    assert executed.stale_problems(source) == []
    *cells, stub = executed.code_cells(nbformat.read(committed, as_version=4))
    assert [cell.execution_count for cell in cells] == counts
    assert "not answered yet" in stub.outputs[0].data["text/plain"] and stub.metadata[executed.NOT_EXECUTED]


def test_a_copy_of_the_simulator_has_outputs_and_is_stale(source, committed, repository):
    about = nbformat.read(committed, as_version=4).metadata
    source.write_text(NOTEBOOK + "\n# %%\n3\n")
    notebook = executed.read(source)
    for count, cell in enumerate(executed.code_cells(notebook), start=1):
        cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", text=f"{count}")], count
    executed.save_simulated(notebook, source)
    assert executed.pair_problems(source) == [] == problems_of(committed)
    assert executed.stale_problems(source) != []
    source.write_text(source.read_text().replace("a figure", "one figure"))
    executed.update_prose(source)  # keeps the outputs, and the mark
    copy = nbformat.read(committed, as_version=4)
    assert copy.metadata == about and all(
        cell.outputs and cell.metadata[executed.NOT_EXECUTED] for cell in executed.code_cells(copy)
    )


def test_changed_prose_is_reported_and_updated_without_a_gpu(source, committed, repository):
    source.write_text(NOTEBOOK.replace("a figure", "one figure"))
    assert "older prose" in executed.pair_problems(source)[0]
    assert executed.stale_problems(source) == []
    assert main(repository, "prose") == 0
    assert executed.pair_problems(source) == [] == problems_of(committed)


def test_a_copy_keeps_the_kernels_that_it_launched(source, monkeypatch):
    """And it is stale as soon as a function of the package that they consist of has changed."""
    source.write_text(WITH_KERNEL)
    notebook = execute.execute(source, env={"MOE_NUMBA_SIMULATE": "1"})
    assert "launched" not in json.dumps(notebook.cells), "what asks for the kernels is removed"
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in executed.read(source).cells]
    monkeypatch.setattr(execute.records, "environment", lambda: dict(ABOUT))
    executed.save_executed(notebook, source)
    about = nbformat.read(source.with_suffix(".ipynb"), as_version=4).metadata.moe_numba
    assert [kernel["name"] for kernel in about.kernels] == ["add_one"] and "code" not in about.kernels[0]
    names = [function.split()[0] for function in about.functions["add_one"]]
    assert names == ["cells.add_one", "griddepcontrol_wait"]
    assert executed.stale_problems(source) == []

    def change(notebook):
        functions = notebook.metadata.moe_numba.functions["add_one"]
        notebook.metadata.moe_numba.functions["add_one"] = [functions[0], f"{names[1]} 00000000"]

    rewrite(source.with_suffix(".ipynb"), change)
    assert "kernels that have changed since: add_one (griddepcontrol_wait)" in executed.stale_problems(source)[0]


def test_a_copy_without_hashes_is_reported(source, committed):
    rewrite(committed, lambda notebook: notebook.metadata.moe_numba.pop("functions"))
    assert "before kernels were hashed" in executed.stale_problems(source)[0]
    rewrite(committed, lambda notebook: notebook.metadata.moe_numba.pop("code"))
    assert "does not say which code" in executed.stale_problems(source)[0]


def stream(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def wrong_order(notebook):
    executed.code_cells(notebook)[0].execution_count = 7


def missing_count(notebook):
    executed.code_cells(notebook)[2].execution_count = None


def simulated(notebook):
    notebook.metadata.moe_numba.gpu = "simulator"


def no_metadata(notebook):
    del notebook.metadata["moe_numba"]


def execution_times(notebook):
    executed.code_cells(notebook)[0].metadata["execution"] = {"iopub.status.busy": "2026-01-01"}


def error_output(notebook):
    executed.code_cells(notebook)[1].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="")]


def local_path(notebook):
    executed.code_cells(notebook)[1].outputs = [stream("loaded /home/someone/kernel.py\n")]


def local_link(notebook):
    data = {"text/html": "<a href='/tmp/trace.json'>trace</a>"}
    executed.code_cells(notebook)[1].outputs = [nbformat.v4.new_output("display_data", data=data)]


@pytest.mark.parametrize(
    "fault, message",
    [
        (wrong_order, "not executed once each"),
        (missing_count, "not executed once each"),
        (simulated, "names no GPU"),
        (no_metadata, "names no GPU"),
        (execution_times, "contains execution times"),
        (error_output, "ended in ValueError"),
        (local_path, "/home/someone/kernel.py"),
        (local_link, "/tmp/trace.json"),
    ],
)
def test_invalid_copies_are_reported(committed, fault, message):
    rewrite(committed, fault)
    problems = problems_of(committed)
    assert len(problems) == 1 and message in problems[0]


def test_urls_and_images_are_not_local_paths(committed):
    def change(notebook):
        data = {"text/plain": "https://host.org/home/x and a/tmp", "image/png": "+/tmp/x"}
        executed.code_cells(notebook)[1].outputs = [nbformat.v4.new_output("display_data", data=data)]

    rewrite(committed, change)
    assert problems_of(committed) == []


def test_the_committed_json_is_valid(committed):
    nbformat.validate(json.loads(committed.read_text()))
