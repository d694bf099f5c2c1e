"""Rules that keep a lesson true: checks of a notebook's source for typed measurements and missed predictions.

``python -m moe_numba.course.pages.lesson notebooks/01_gate_prompt.py`` prints the faults of a notebook.
"""

import ast
import re
import sys
from pathlib import Path

from moe_numba.course.bench.records.code_hash import is_exercise
from moe_numba.course.pages import executed
from moe_numba.course.steps.ladder import judgement_of

# A measurement that is typed instead of interpolated. Quoted passages, which begin with ">", are an article's.
_UNIT = r"(?:us|µs|ms|ns|microseconds?|milliseconds?|%|percent|[GTM]B/s|TFLOP/s)"
_MEASUREMENT = re.compile(rf"\d(?:[\d.,]*\d)?\s*{_UNIT}(?![\w/])")
_EXPLANATION = "**Explanation"
_MEASURES = {"times", "instruction_mix", "in_simulator", "profile", "step", "phases"}


def problems(notebook, record: dict | None = None) -> list[str]:
    """Return a sentence for each rule that a notebook breaks; ``record`` is its ladder's, if there is one."""
    return [*_typed_measurements(notebook), *_uses_of_exercises(notebook), *_unexplained(notebook, record)]


def _typed_measurements(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if not line.lstrip().startswith(">") and (found := _MEASUREMENT.search(line)):
                    yield f"a typed measurement, {found[0]!r}: {line.strip()[:70]}"


def _uses_of_exercises(notebook):
    """Find cells that depend on what a reader changes, and on what is not hashed: on names of an exercise."""
    names = {}
    for cell in executed.code_cells(notebook):
        tree = _parsed(cell.source)
        if is_exercise(cell.source):
            names |= dict.fromkeys(_bound(tree), _last_line(cell))
        else:
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            yield from (
                f"a cell uses {name!r} of {names[name]}: {_first_line(cell)}" for name in sorted(used & set(names))
            )


def _bound(tree):
    """Return the names that a cell binds."""
    names = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.alias):
                names.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def _unexplained(notebook, record):
    """Find steps whose predicted gain was missed, and which no cell explains before the next heading."""
    cells = notebook.cells
    code = [number for number, cell in enumerate(cells) if cell.cell_type == "code"]
    for row in record["rows"] if record else ():
        judgement = judgement_of(row)
        if judgement is None or not judgement.missed:
            continue
        steps = [number for number in code if _names_step(cells[number].source, row["step"])]
        if not steps:
            yield f"no cell has the step {row['step']!r} of the record"
        elif not _explains(cells[steps[-1] + 1 :]):
            yield f"step {row['step']!r}: {judgement}, and no cell measures an explanation"


def _names_step(source, name):
    """Whether a cell passes the name of a step to a function, together with a prediction."""
    calls = [node for node in ast.walk(_parsed(source)) if isinstance(node, ast.Call) and node.args]
    return any(
        isinstance(call.args[0], ast.Constant)
        and call.args[0].value == name
        and any(keyword.arg in ("predicted_us", "predicted_gain_us") for keyword in call.keywords)
        for call in calls
    )


def _explains(cells):
    """Whether prose that begins with "**Explanation" and a cell that measures come before the next heading."""
    announced = False
    for cell in cells:
        if cell.cell_type == "markdown":
            if re.match(r"#+ ", cell.source):
                return False
            announced = announced or _EXPLANATION in cell.source
        elif announced and _MEASURES & _called(cell.source):
            return True
    return False


def _called(source):
    functions = [node.func for node in ast.walk(_parsed(source)) if isinstance(node, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", None)) for function in functions}


def _parsed(source):
    return ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.M))


def _first_line(cell):
    return next(line for line in cell.source.splitlines() if line.strip())


def _last_line(cell):
    return cell.source.rstrip().rpartition("\n")[2]


def main(paths: list[str]) -> int:
    from moe_numba.course.bench import records
    from moe_numba.course.pages.topics import TOPICS

    found = 0
    for path in map(Path, paths):
        notebook = executed.read(path)
        print(path.stem)
        topics = [records.recorded(name) for topic in TOPICS if topic.notebook == path.stem for name in topic.records]
        for record in topics or [None]:
            for problem in problems(notebook, record):
                found += 1
                print(f"  {problem}")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
