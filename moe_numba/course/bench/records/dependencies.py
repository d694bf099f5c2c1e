"""Finds the package's files that a measurement depends on; a change of one of them makes its results stale."""

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import moe_numba
from moe_numba.course.bench import records
from moe_numba.course.bench.records.code_hash import code_cells, hash_file

TIMING = "moe_numba.course.bench.timing"
TOPICS = "moe_numba/course/bench/topics/"
LEFT_OUT = (  # these files draw, record or simulate: they cannot change what was measured
    "moe_numba/simulator",
    "moe_numba/course/draw",
    "moe_numba/course/exercises.py",
    "moe_numba/course/pages",
    "moe_numba/course/steps",
    TOPICS,  # only a topic's own record depends on it: see topic_sources
    "moe_numba/course/bench/__init__.py",
    "moe_numba/course/bench/figures",
    "moe_numba/course/bench/records",
    "moe_numba/runtime/sass.py",
)
_DRAWING = re.compile(r"moe_numba/course/lessons/\w+/(draw|exercises|\w+_figure)")


def package_sources(code: str, root: Path | str | None = None) -> list[str]:
    """Return the package's files that the results of ``code`` depend on, by following imports from file to file.

    ``from moe_numba import name`` leads to the file that defines ``name``, not to everything that moe_numba exports.
    """
    root = records.repository(root)
    code = re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE)  # Jupyter commands
    found, todo = _files(TIMING, root), list(_imports(code, "", root))
    while todo:
        for file in _files(todo.pop(), root):
            if file not in found and not file.startswith(LEFT_OUT) and not _DRAWING.match(file):
                found.add(file)
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                package = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
                todo += _imports((root / file).read_text(), package, root)
    return sorted(found)


def notebook_sources(path: str, root: Path | str | None = None) -> list[str]:
    """Return the sources of a notebook's record: its code cells, and the package's files that they depend on."""
    root = records.repository(root)
    code = "\n".join(code_cells((root / path).read_text()))
    return [f"{path}#code", *package_sources(code, root)]


def topic_sources(name: str, root: Path | str | None = None) -> list[str]:
    """Return the sources of a topic's record: modules of topics, and the package's files that they depend on.

    The modules are the topic's own, and those of other topics that they import.
    """
    root = records.repository(root)
    modules = sorted((root / TOPICS / name).glob("*.py")) or [root / TOPICS / f"{name}.py"]
    own = [path.relative_to(root).as_posix() for path in modules]
    for path in own:  # it grows meanwhile
        for module in _imports((root / path).read_text(), "", root):
            own += [file for file in _files(module, root) if file.startswith(TOPICS) and file not in own]
    code = "\n".join((root / path).read_text() for path in own)
    return [*own, *package_sources(code, root)]


def result_sources(record: dict, root: Path | str | None = None) -> list[str]:
    """Return the current sources of a record or of an executed notebook's metadata."""
    notebook = next((name.removesuffix("#code") for name in record["sources"] if name.endswith("#code")), None)
    if notebook is None:
        return topic_sources(record["topic"], root)
    return notebook_sources(notebook, root) if (records.repository(root) / notebook).is_file() else []


def all_results(root: Path | str | None = None) -> Iterator[tuple[Path, dict]]:
    """Yield (path, record) of every record and (path, metadata) of every executed notebook."""
    root = records.repository(root)
    for path in sorted(root.glob("docs/results/*/*.json")):
        yield path, json.loads(path.read_text())
    for path in sorted(root.glob("notebooks/*.ipynb")):
        about = json.loads(path.read_text())["metadata"].get("moe_numba", {})
        yield path, {"topic": path.name, "commit": "unknown", "sources": {}, **about}


def stale_results(root: Path | str | None = None) -> Iterator[str]:
    """Yield a sentence for each record and executed notebook that is older than its sources."""
    root = records.repository(root)
    for _, record in all_results(root):
        now = {name: hash_file(root, name) for name in record["sources"]}
        changed = [name for name, old in record["sources"].items() if now.get(name) != old]
        changed += [name for name in result_sources(record, root) if name not in record["sources"]]
        if changed or not record["sources"]:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = f"measured at commit {record['commit'][:7]}, code changed since: {', '.join(changed[:3])}{more}"
            yield f"{record['topic']}: " + (what if record["sources"] else "names no sources")


def _files(module, root):
    """Return the file of a module of moe_numba as a set, empty if there is none."""
    path = module.replace(".", "/")
    names = (f"{path}.py", f"{path}/__init__.py") if module.split(".")[0] == "moe_numba" else ()
    return {name for name in names if (root / name).is_file()}


def _imports(code, package, root):
    """Return the modules of moe_numba that code imports, at any level."""
    return [module if name is None else _origin(module, name, root) for module, name in _imported(code, package)]


@functools.cache  # many results depend on the same files
def _imported(code, package):
    """Return (module, name or None) for each ``import module`` and ``from module import name``, once."""
    nodes = list(ast.walk(ast.parse(code)))
    found, aliases = {}, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "moe_numba":
                    aliases.add(name.asname or name.name)
                else:
                    found[name.name, None] = True
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                found[_absolute(node, package), name.name] = True
    for node in nodes:  # moe_numba.name
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            found["moe_numba", node.attr] = True
    return tuple(found)


def _absolute(node, package):
    """Return the absolute name of the module of an ImportFrom node."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def _origin(module, name, root):
    """Return the module that defines ``name`` in ``from module import name``: a submodule, or a package's source."""
    if _files(f"{module}.{name}", root):
        return f"{module}.{name}"
    for file in _files(module, root):
        if file.endswith("/__init__.py") and name in (given := _reexports((root / file).read_text(), module)):
            return _origin(*given[name], root)
    if module == "moe_numba":  # lazily loaded names are found through the object itself
        return getattr(getattr(moe_numba, name, None), "__module__", module)
    return module


@functools.cache
def _reexports(code, package):
    """Return {name: (module, its name there)} of what a package imports from other modules; the first import counts."""
    found = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (module := _absolute(node, package)) != package:
            for name in node.names:
                found.setdefault(name.asname or name.name, (module, name.name))
    return found
