"""Which of the package's files a piece of code depends on: the ones whose change makes its recorded results old."""

import ast
import json
import re

import moe_numba
from moe_numba.course.bench import records
from moe_numba.course.bench.code_hash import code_cells, hash_file

TIMING = "moe_numba.course.bench.timing"
_BENCH = ("__init__", "code_hash", "layer_figure", "plots", "records", "sources", "style")
_COURSE = ("__init__", "executed", "execute", "ladder", "simulate", "source_diff")
LEFT_OUT = (  # these files draw, record or simulate: they cannot change what was measured
    "moe_numba/simulator",
    "moe_numba/course/draw",
    "moe_numba/course/bench/topics/",  # only a topic's own record depends on it: see topic_sources
    *(f"moe_numba/course/bench/{name}.py" for name in _BENCH),
    *(f"moe_numba/course/{name}.py" for name in _COURSE),
    "moe_numba/runtime/sass.py",
)


def package_sources(code, root=None):
    """The package's files that this code's results depend on, found by following imports from file to file.

    ``from moe_numba import name`` leads to the file that ``name`` comes from, not to all that moe_numba exports.
    """
    root = records.repository(root)
    code = re.sub(r"^(\s*)[%!].*$", r"\1pass", code, flags=re.MULTILINE)  # Jupyter's own commands
    found, todo = _files(TIMING, root), list(_imports(code, "", root))
    while todo:
        for file in _files(todo.pop(), root):
            if file not in found and not file.startswith(LEFT_OUT):
                found.add(file)
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                package = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
                todo += _imports((root / file).read_text(), package, root)
    return sorted(found)


def notebook_sources(path, root=None):
    """What a notebook's record is measured with: its code cells, and the package's files that these depend on."""
    root = records.repository(root)
    code = "\n".join(code_cells((root / path).read_text()))
    return [f"{path}#code", *package_sources(code, root)]


def topic_sources(name, root=None):
    """What a topic's record is measured with: its module, and the package's files that this depends on."""
    root = records.repository(root)
    own = f"moe_numba/course/bench/topics/{name}.py"
    return [own, *package_sources((root / own).read_text(), root)]


def result_sources(record, root=None):
    """What a record, or an executed notebook's metadata, depends on now: that of its notebook or else of its topic."""
    notebook = next((name.removesuffix("#code") for name in record["sources"] if name.endswith("#code")), None)
    if notebook is None:
        return topic_sources(record["topic"], root)
    return notebook_sources(notebook, root) if (records.repository(root) / notebook).is_file() else []


def all_results(root=None):
    """(path, record) of every record, and (path, metadata) of every executed notebook."""
    root = records.repository(root)
    for path in sorted(root.glob("docs/results/*/*.json")):
        yield path, json.loads(path.read_text())
    for path in sorted(root.glob("notebooks/*.ipynb")):
        about = json.loads(path.read_text())["metadata"].get("moe_numba", {})
        yield path, {"topic": path.name, "commit": "unknown", "sources": {}, **about}


def stale_results(root=None):
    """One sentence for each record and executed notebook that is older than the code it depends on."""
    root = records.repository(root)
    for _, record in all_results(root):
        now = {name: hash_file(root, name) for name in record["sources"]}
        changed = [name for name, old in record["sources"].items() if now.get(name) != old]
        changed += [name for name in result_sources(record, root) if name not in record["sources"]]
        if changed or not record["sources"]:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = f"measured at commit {record['commit'][:7]}, code changed since: {', '.join(changed[:3])}{more}"
            yield f"{record['topic']}: " + (what if record["sources"] else "does not say which code it depends on")


def _files(module, root):
    """The file of one of moe_numba's modules, as a set of none or one."""
    path = module.replace(".", "/")
    names = (f"{path}.py", f"{path}/__init__.py") if module.split(".")[0] == "moe_numba" else ()
    return {name for name in names if (root / name).is_file()}


def _imports(code, package, root):
    """The modules of moe_numba that code imports by name, wherever in it the import stands."""
    tree, aliases = ast.parse(code), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "moe_numba":
                    aliases.add(name.asname or name.name)
                else:
                    yield name.name
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield _origin(_absolute(node, package), name.name, root)
    for node in ast.walk(tree):  # moe_numba.name
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield _origin("moe_numba", node.attr, root)


def _absolute(node, package):
    """The module that an ImportFrom names."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def _origin(module, name, root):
    """The module that ``from module import name`` really reads: a submodule, or where a package has the name from."""
    if _files(f"{module}.{name}", root):
        return f"{module}.{name}"
    for file in _files(module, root):
        if file.endswith("/__init__.py"):
            for node in ast.walk(ast.parse((root / file).read_text())):
                if isinstance(node, ast.ImportFrom):
                    for given in node.names:
                        if name == (given.asname or given.name) and _absolute(node, module) != module:
                            return _origin(_absolute(node, module), given.name, root)
    if module == "moe_numba":  # it may load its names on first use: then only the name itself knows
        return getattr(getattr(moe_numba, name, None), "__module__", module)
    return module
