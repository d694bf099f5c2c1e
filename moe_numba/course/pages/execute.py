"""Executes the notebooks: as pages to read, or as the committed copies (see ``executed``).

python -m moe_numba.course.pages.execute execute                        write pages of all notebooks to build/
python -m moe_numba.course.pages.execute execute --in-place --only 01   write the committed copy (without a GPU: stale)
python -m moe_numba.course.pages.execute prose                     update the prose of the committed copies
python -m moe_numba.course.pages.execute exercises --only 01            also execute new exercises, which needs no GPU
"""

import argparse
import asyncio
import base64
import json
import os
import re
import shutil
import sys
import sysconfig
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import nbformat

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.pages.executed import (
    BINARY,
    NotebookFailed,
    code_cells,
    find,
    read,
    save_executed,
    save_simulated,
    update_exercises,
    update_prose,
)
from moe_numba.course.pages.html import index_of, page_of, title_of
from moe_numba.runtime.compile_calls import usable_cores

CELL_LIMIT_S = 600
TRACEBACK_LINES = 25
# Executed behind the last cell, and removed: prints the kernels that the notebook launched.
LAUNCHED = """
import json
import sys

launched = {"kernels": [], "functions": {}}
if "moe_numba.runtime.recording" in sys.modules:
    from moe_numba.course.bench import records

    launched = records.launched_here()
print(json.dumps(launched))
"""


# Running


def execute(path, root=None, *, report=None, env=None):
    """Run one notebook from top to bottom in a new Jupyter kernel of this interpreter.

    Parameters
    ----------
    path : path of a py:percent notebook
    root : path, optional
        The repository; its path is removed from the outputs.
    report : callable, optional
        ``report(name, done, total, text)``, called before each code cell and at the end.
    env : dict, optional
        Environment variables of the kernel, in addition to this process's.

    Returns
    -------
    The executed notebook. Its metadata has the kernels that it launched, and their functions, as a record does.

    Raises
    ------
    NotebookFailed
        A cell failed.
    """
    return asyncio.run(_execute(Path(path), records.repository(root), report or (lambda *_: None), env or {}))


async def _execute(path, root, report, env):
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    notebook, started = read(path), time.monotonic()
    numbers = {cell.id: number for number, cell in enumerate(code_cells(notebook), start=1)}
    total, current = len(numbers), {}
    launched = nbformat.v4.new_code_cell(LAUNCHED)
    notebook.cells.append(launched)

    def before(cell, cell_index):
        if cell is launched:
            return
        current.update(cell=cell, number=numbers[cell.id], heading=_heading(notebook, cell_index))
        report(path.stem, current["number"] - 1, total, f"cell {current['number']}/{total}  '{current['heading']}'")

    # Without folders to search, "python3" is this interpreter.
    specs = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs),
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
        timeout=CELL_LIMIT_S,
        record_timing=False,
        on_cell_execute=before,
    )
    try:
        await client.async_execute(env=_kernel_environment(env), cleanup_kc=True)
    except (CellExecutionError, CellTimeoutError, RuntimeError) as error:  # RuntimeError: dead kernel
        if not current:
            raise NotebookFailed(f"{path.stem}: the kernel did not start: {error}") from error
        report(path.stem, current["number"] - 1, total, f"cell {current['number']}/{total} failed")
        traces = [output.traceback for output in current["cell"].outputs if output.output_type == "error"]
        lines = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traces[-1] if traces else [str(error)])).strip().splitlines()
        raise NotebookFailed(
            f"{path.stem}: cell {current['number']}/{total} '{current['heading']}' failed\n\n"
            + textwrap.indent(current["cell"].source, "    ")
            + "\n\n"
            + "\n".join(lines[-TRACEBACK_LINES:])
        ) from error
    report(path.stem, total, total, f"{total} cells in {time.monotonic() - started:.0f} s")
    notebook.cells.remove(launched)
    printed = "".join(output.text for output in launched.outputs if output.get("name") == "stdout")
    notebook.metadata.moe_numba = json.loads(printed)
    notebook.metadata.language_info.pop("version", None)  # already in the metadata's "versions"
    return _without_machine(notebook, root)


def _kernel_environment(extra):
    env = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline", **extra}
    # The kernel chooses GPU or simulator itself, as in a reader's Jupyter; only MOE_NUMBA_SIMULATE=1 is passed on.
    env.pop("NUMBA_ENABLE_CUDASIM", None)
    if simulator.ENABLED:
        env["MOE_NUMBA_SIMULATE"] = "1"
    package = str(Path(__file__).resolve().parents[3])  # it may not be installed
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # silences a warning of the debugger
    return env


def _heading(notebook, index):
    """Return the nearest heading at or above a cell."""
    for cell in reversed(notebook.cells[: index + 1]):
        if cell.cell_type == "markdown":
            if found := re.findall(r"^#{1,6}\s+(.+?)\s*$", cell.source, re.MULTILINE):
                return found[-1]
    return "start"


def _without_machine(notebook, root):
    """Remove this machine's paths from the outputs."""
    names = [
        (re.escape(str(root)) + r"\b/?", ""),
        (r"/tmp/ipykernel_\d+/\d+\.py", "cell"),
        (re.escape(sysconfig.get_paths()["purelib"]), "site-packages"),
    ]
    if len(str(Path.home())) > 1:
        names.append((re.escape(str(Path.home())) + r"\b", "~"))

    def cleaned(text):
        for pattern, name in names:
            text = re.sub(pattern, name, text)
        return text

    for cell in code_cells(notebook):
        for output in cell.outputs:
            if "text" in output:
                output.text = cleaned(output.text)
            for kind, value in output.get("data", {}).items():
                if isinstance(value, str) and kind not in BINARY:
                    output.data[kind] = cleaned(value)
    return notebook


@contextmanager
def progress():
    """Yield ``report`` for ``execute``: a progress bar per notebook in a terminal, a line per cell in a log."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        Console = None  # progress bars are optional
    if Console is None or not Console(stderr=True).is_terminal:
        yield lambda name, done, total, text: print(f"{name}  {text}", file=sys.stderr, flush=True)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}", markup=False)
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def report(name, done, total, text):
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total, text="")
            bars.update(tasks[name], completed=done, text=text)

        yield report


def write_page(notebook, name, out, titles):
    """Write the executed copy, its figures and a self-contained HTML page; return the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out / f"{name}.ipynb")
    (out / f"{name}.html").write_text(page_of(notebook, name, titles), encoding="utf-8")
    figures = out / f"{name}_figures"
    shutil.rmtree(figures, ignore_errors=True)  # of an earlier execution
    for number, cell in enumerate(code_cells(notebook), start=1):
        for place, output in enumerate(cell.outputs):
            for kind, ending in (("image/svg+xml", "svg"), ("image/png", "png")):
                if value := output.get("data", {}).get(kind):
                    figures.mkdir(exist_ok=True)
                    data = value.encode() if ending == "svg" else base64.b64decode(value)
                    (figures / f"cell_{number:02d}_{place}.{ending}").write_bytes(data)
                    break  # one file per figure
    return out / f"{name}.html"


# The command line


async def _execute_all(paths, root, report, jobs, done):
    """Execute notebooks; ``done(path, notebook)`` is called as soon as one has ended, with None if it has failed."""
    free, failed = asyncio.Semaphore(jobs), []

    async def one(path):
        async with free:
            try:
                notebook = await _execute(path, root, report, {})
            except NotebookFailed as error:
                failed.append(error)
                notebook = None
            done(path, notebook)

    await asyncio.gather(*map(one, paths))
    return failed


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_numba.course.pages.execute", description=__doc__.split("\n")[0]
    )
    parser.add_argument("command", choices=["execute", "prose", "exercises"])
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="notebooks whose names begin with NAME")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the executed copies and pages")
    parser.add_argument("--in-place", action="store_true", help="write notebooks/NN_topic.ipynb, and no pages")
    parser.add_argument("--with-code", action="store_true", help="prose: also update changed code; it stays stale")
    parser.add_argument("--root", type=Path, help="the repository (default: the one that contains this package)")
    options = parser.parse_args(argv)

    root = records.repository(options.root)
    paths = find(root, options.only)
    if not paths:
        print(f"no notebooks {' '.join(options.only)} in {root / 'notebooks'}", file=sys.stderr)
        return 1
    if options.command in ("prose", "exercises"):
        try:
            for path in paths:
                update_prose(path, options.with_code)
                if options.command == "exercises":
                    update_exercises(path, execute(path, root, env={"MOE_NUMBA_SIMULATE": "1"}))
        except NotebookFailed as error:
            print(error, file=sys.stderr)
            return 1
        return 0

    # One notebook per core in the simulator; one at a time on a GPU, so that they do not disturb each other's times.
    jobs = usable_cores() if simulator.ENABLED else 1
    titles = {path.stem: title_of(read(path), path.stem) for path in find(root, ())}
    states = {name: "" for name in titles if not (options.out / f"{name}.html").is_file()}
    states |= {path.stem: "is being executed" for path in paths}
    pages = []

    def write_index():
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "index.html").write_text(index_of(titles, states), encoding="utf-8")

    def done(path, notebook):
        states[path.stem] = "failed"
        if notebook is not None and options.in_place:
            if simulator.ENABLED and path.with_suffix(".ipynb").is_file():
                save_simulated(notebook, path)
            else:
                save_executed(notebook, path)
            pages.append(path.with_suffix(".ipynb"))
        elif notebook is not None:
            pages.append(write_page(notebook, path.stem, options.out, titles))
            del states[path.stem]
        if not options.in_place:
            write_index()

    if not options.in_place:
        write_index()
    with progress() as report:
        failed = asyncio.run(_execute_all(paths, root, report, jobs, done))
    for error in failed:
        print(f"\n{error}", file=sys.stderr)
    if pages:
        print(f"\nExecuted {'in the simulator, at small sizes' if simulator.ENABLED else 'on the GPU'}. Pages:")
        print(*(f"  {page}" for page in sorted(pages)), sep="\n")
        if not options.in_place:
            print(f"All lessons: {options.out / 'index.html'}. The executed notebooks and their figures are beside it.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
