"""The structure of the package: import cycles, layers, private names and generated code."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USERS_OF_COURSE = {"moe_numba.__main__", "moe_numba.doctor"}  # they import it inside functions


@cache
def modules():
    """Map every module of the package to its syntax tree."""
    found = {}
    for path in sorted((ROOT / "moe_numba").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def package_of(module):
    is_package = (ROOT / module.replace(".", "/") / "__init__.py").is_file()
    return module if is_package else module.rpartition(".")[0]


def statements(tree, nested):
    """Yield the import statements that run when the module is imported; with ``nested`` those of functions too."""
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]


def imports(module, nested=False):
    """Yield (module, name or None) for what a module imports from the package."""
    for node in statements(modules()[module], nested):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "moe_numba")
            continue
        base = package_of(module).split(".")
        base = base[: len(base) - node.level + 1] if node.level else []
        source = ".".join([*base, *filter(None, [node.module])])
        if source.split(".")[0] == "moe_numba":
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield (submodule, None) if submodule in modules() else (source, alias.name)


def ancestors(module):
    """Return the packages of a module, which Python imports before it."""
    parts = module.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def find_cycle(graph):
    """Return the modules of an import cycle, in order, or None."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            path.append(module)
            for target in sorted(graph.get(module, ())):
                if cycle := visit(target):
                    return cycle
            done.add(path.pop())
        return None

    return next(filter(None, map(visit, graph)), None)


@pytest.mark.each_commit("any import can close a circle, and no other test notices")
def test_there_is_no_import_cycle():
    """Imports inside functions count."""
    assert find_cycle({m: {target for target, _ in imports(m, nested=True)} - {m} for m in modules()}) is None


def test_each_module_can_be_imported_first():
    """Importing a module also runs the __init__.py of its packages, unless they are running already."""
    graph = {}
    for module in modules():
        targets = {target for target, _ in imports(module)}
        graph[module] = targets.union(*map(ancestors, targets)) - ancestors(module) - {module}
    assert find_cycle(graph) is None


def test_cycles_are_found():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_the_simulator_imports_nothing_of_the_rest():
    """Imports inside functions count, and imports of modules by their names."""
    inside = [module for module in modules() if module.split(".")[:2] == ["moe_numba", "simulator"]]
    assert len(inside) > 80
    for module in inside:
        assert {t for t, _ in imports(module, nested=True) if not t.startswith("moe_numba.simulator")} == set(), module
        calls = [node for node in ast.walk(modules()[module]) if isinstance(node, ast.Call)]
        named = [
            a.value
            for node in calls
            for a in node.args
            if "import_module" in ast.unparse(node.func) and isinstance(a, ast.Constant)
        ]
        assert not any(name.startswith("moe_numba") for name in named), (module, named)


def test_only_the_course_imports_the_course():
    for module in modules():
        if not module.startswith("moe_numba.course"):
            uses = {target for target, _ in imports(module, nested=True) if target.startswith("moe_numba.course")}
            assert not uses or module in USERS_OF_COURSE, (module, uses)
            assert not any(target.startswith("moe_numba.course") for target, _ in imports(module)), module


def test_tests_of_the_package_do_not_import_the_course():
    """Those of the course are in tests/course; tests/*.py are about the whole repository."""
    for folder in (ROOT / "tests").iterdir():
        for path in folder.rglob("*.py") if folder.name != "course" else ():
            assert "moe_numba.course" not in path.read_text(), path


def private_uses(module):
    """Yield the private names of other modules of the package that a module imports or accesses."""
    aliases = {}
    for node in statements(modules()[module], nested=True):
        for alias in node.names:
            aliases[alias.asname or alias.name] = alias.name
    found = {(target, name) for target, name in imports(module, nested=True)}
    for target, name in found:
        if name and name.startswith("_") and not name.startswith("__"):
            yield f"{module}: {target}.{name}"
    named = {
        name: target for target, name in ((t, t.rpartition(".")[2]) for t, n in found if n is None) if target != module
    }
    named |= {alias: named[name] for alias, name in aliases.items() if name in named}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in named:
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                yield f"{module}: {named[node.value.id]}.{node.attr}"


def test_no_private_name_is_used_by_another_module():
    assert {use for module in modules() for use in private_uses(module)} == set()


# ``torch_op`` generates wrappers of public functions: one with ``*args, **kwargs`` costs 0.7 us per call.
# ``corrections`` replaces passages of another compiler's functions.
GENERATES_TEXT = {"moe_numba.runtime.torch_op", "moe_numba.runtime.mlir.corrections"}


def test_no_other_module_runs_generated_text():
    calls = {
        module: {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        for module, tree in modules().items()
    }
    assert {module for module, names in calls.items() if "exec" in names} == GENERATES_TEXT


# Code, MOE_NUMBA_SIMULATE, and what it must not import: torch and numba take seconds.
NOT_IMPORTED = [
    ("", "0", "torch numba numba_cuda llvmlite cuda rich moe_numba.runtime moe_numba.gate moe_numba.course"),
    ("", "1", "torch rich cuda.core moe_numba.runtime moe_numba.ptx moe_numba.gate moe_numba.course"),
    ("moe_numba.fused_experts, moe_numba.fused_moe, moe_numba.warm_up", "0", "moe_numba.expert_parallel rich"),
    ("moe_numba.fused_experts, moe_numba.Buffer, moe_numba.prepare", "0", "torch._dynamo torch._inductor transformers"),
    ("moe_numba.biased_grouped_topk", "0", "moe_numba.grouped_gemm moe_numba.moe_layer moe_numba.align"),
    ("moe_numba.get_dispatch_layout, moe_numba.per_token_cast_to_fp8", "0", "moe_numba.moe_layer moe_numba.course"),
]


@pytest.mark.parametrize(("code", "simulate", "names"), NOT_IMPORTED)
def test_an_import_does_without(code, simulate, names):
    program = f"import sys, moe_numba; {code or 'pass'}; print(*set({names.split()!r}).intersection(sys.modules))"
    env = os.environ | {"MOE_NUMBA_SIMULATE": simulate}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "\n", done.stdout + done.stderr


def test_names_that_load_on_first_use_are_listed():
    program = (
        "import moe_numba, moe_numba.moe_layer as layer; from moe_numba.moe_layer import *; "
        "assert ExpertParallelMoE is layer.ExpertParallelMoE and fused_experts is layer.fused_experts; "
        "assert callable(layer.group_by_expert) and callable(moe_numba.weighted_sum); "
        "assert set(layer.__all__) <= set(dir(layer)) and set(moe_numba.__all__) <= set(dir(moe_numba)); "
        "assert all(hasattr(moe_numba, name) for name in moe_numba.__all__); print('all')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "all\n", done.stderr
