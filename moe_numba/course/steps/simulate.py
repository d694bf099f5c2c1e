"""Runs functions of a notebook in the simulator.

On a GPU the simulator needs a process of its own, because the first import of moe_numba chooses the mode for the whole
process. `in_simulator` starts that process and copies into it the function, the notebook functions that it uses, and
their imports.
"""

import contextlib
import functools
import inspect
import io
import json
import os
import subprocess
import symtable
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_numba import simulator
from moe_numba.runtime.changed_source import SourceLoader, plain_function, source_of
from moe_numba.simulator import capability

_PLAIN = (str, bool, int, float, type(None))


_made: dict[int, tuple] = {}  # id of what a factory has made -> factory, arguments, and the thing, which keeps the id


def factory(make: Callable) -> Callable:
    """Cache what a function makes, and remember how: the simulator's process makes it again where a GPU runs kernels.

    Its arguments are functions and kernels of the page, which other factories may have made, and plain constants.
    """
    cached = functools.cache(make)

    @functools.wraps(make)
    def made(*arguments):
        result = cached(*arguments)
        _made[id(result)] = made, arguments, result
        return result

    return made


def in_simulator(
    function: Callable,
    *arguments: Any,
    functions: Iterable[Callable] = (),
    constants: Mapping[str, Any] | None = None,
    setup: str = "",
) -> Any:
    """Run ``function(*arguments)`` in the simulator, print what it prints, and return its result.

    Where kernels run in the simulator anyway, this is a plain call. On a GPU a new process runs the function. It gets
    the source of ``function`` and, recursively, of the functions and kernels of the notebook that their source names,
    together with their imports and their plain constants (strings, numbers, and lists, tuples and dicts of them).

    Parameters
    ----------
    function : callable
        A function of a notebook cell or of a module.
    *arguments
        Passed as JSON, so tuples arrive as lists.
    functions : iterable of callables, optional
        Further notebook functions to copy: those that are only named by strings.
    constants : dict, optional
        Global names of the new process that differ from the notebook's, such as ``{"DEVICE": "cpu"}``.
    setup : str, optional
        Python code that the new process runs after the imports, for globals that cannot be copied.

    Returns
    -------
    The function's result after a round trip through JSON. Values that JSON lacks become strings.

    Raises
    ------
    RuntimeError
        The new process failed; the message ends with its traceback.
    """
    text = json.dumps(arguments)
    if simulator.ENABLED:
        return _as_json(function(*json.loads(text)))
    job = {
        "constants": {name: repr(value) for name, value in (constants or {}).items()},
        "setup": setup,
        "function": function.__name__,
        "arguments": text,
    }
    job["imports"], job["sources"] = _dependencies([function, *functions], set(constants or {}))
    package_root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {
        "MOE_NUMBA_SIMULATE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
    }
    for name in ("NUMBA_ENABLE_CUDASIM", capability.VARIABLE):  # a demonstration may use any instruction
        environment.pop(name, None)
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the simulator's process failed:\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    print(answer["printed"], end="")
    return answer["result"]


def expression_of(thing: Any) -> tuple[str, list[Callable]]:
    """Return Python that makes a thing again, and the functions that it names; `in_simulator` copies these.

    Raises
    ------
    TypeError
        The thing is no constant, no function of a page or module, and no `factory` has made it.
    """
    if id(thing) in _made:
        make, arguments, _ = _made[id(thing)]
        return _call_of(make, arguments, {})
    if isinstance(thing, _PLAIN):
        return _literal(thing), []
    if isinstance(thing, tuple):
        parts = [expression_of(each) for each in thing]
        return f"({' '.join(text + ',' for text, _ in parts)})", [f for _, functions in parts for f in functions]
    name = getattr(plain_function(thing), "__name__", None)
    if not name or not (_is_of_notebook(thing) or _import_line(name, thing)):
        if made_by := getattr(thing, "made_by", None):
            return _call_of(*_maker(made_by))
        raise TypeError(f"{thing!r} cannot be made again in the simulator: mark what makes it with @factory")
    return name, [thing]


def _call_of(make, arguments, options):
    """Return Python that calls a maker with arguments, and the functions that it names."""
    parts = [expression_of(argument) for argument in arguments]
    named = {name: expression_of(option) for name, option in options.items()}
    texts = [text for text, _ in parts] + [f"{name}={text}" for name, (text, _) in named.items()]
    functions = [function for _, found in [*parts, *named.values()] for function in found]
    return f"{make.__name__}({', '.join(texts)})", [make, *functions]


def _maker(made_by):
    """Return a maker of `ptx.intrinsic.factory`, and its arguments, from what it left in the thing that it made."""
    module, name, arguments, options = made_by
    return getattr(sys.modules[module], name), arguments, options


def source_with_dependencies(functions: Iterable[Callable]) -> str:
    """Return Python that defines notebook functions and kernels, what their sources name, and the imports of these."""
    imports, sources = _dependencies(list(functions), set())
    return "\n".join([*imports, *sources])


def _is_of_notebook(thing):
    """Whether a function, kernel or class was defined by a notebook cell, not by another function."""
    thing = plain_function(thing)
    defined = inspect.isfunction(thing) or inspect.isclass(thing)
    return defined and thing.__module__ == "__main__" and "<locals>" not in thing.__qualname__


def _dependencies(functions, skip):
    """Import lines, and {name: source} of notebook functions and constants, in the order of definition."""
    imports, sources = {}, {}

    def visit(name, value):
        if name in skip or name in imports or name in sources:
            return
        if _is_of_notebook(value):
            sources[name] = None  # stops a recursion
            source = source_of(value)
            scope = vars(sys.modules["__main__"])
            for other in sorted(_global_names(source) & scope.keys()):
                visit(other, scope[other])
            del sources[name]  # after everything that its decorators may need
            own_name = plain_function(value).__name__
            sources[name] = source if own_name == name else f"{source.rstrip()}\n\n\n{name} = {own_name}\n"
        elif id(value) in _made:
            make_again(name, value)
        elif _is_plain(value):
            imports["numpy"] = "import numpy"
            sources[name] = f"{name} = {_literal(value)}"
        elif line := _import_line(name, value):
            imports[name] = line
        elif hasattr(value, "made_by"):
            make_again(name, value)

    def make_again(name, value):
        sources[name] = None  # the factory's own function may have this name
        text, made_from = expression_of(value)
        for other in made_from:
            visit(other.__name__, other)
        del sources[name]
        sources[name] = f"{name} = {text}"

    for function in functions:
        visit(function.__name__, function)
    return list(imports.values()), list(sources.values())


def _global_names(source):
    """Return the names that definitions look up in their module: not those of their parameters and variables."""
    module = symtable.symtable(source, "cell", "exec")
    names, inside = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_referenced()}, [module]
    while inside:
        table = inside.pop()
        inside += table.get_children()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names


def _is_plain(value):
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.generic)


def _literal(value):
    """Return Python for a plain value; that of NumPy's scalars names numpy."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    return f"numpy.{value.dtype}({value.item()!r})" if isinstance(value, np.generic) else repr(value)


def _import_line(name, value):
    """The line that imports a module or an object under this name; None for what no module holds."""
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}"
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    own_name = getattr(value, "__name__", name)
    if home and home.__name__ != "__main__" and getattr(home, own_name, None) is value:
        return f"from {home.__name__} import {own_name} as {name}"
    modules = [m for key, m in list(sys.modules.items()) if getattr(m, "__name__", "__main__") == key != "__main__"]
    for module in sorted(modules, key=lambda m: not m.__name__.startswith(("moe_numba.", "numba"))):
        for other, found in list(vars(module).items()):
            if found is value:
                return f"from {module.__name__} import {other} as {name}"
    return None


def _as_json(value):
    return json.loads(json.dumps(value, default=str))


def _serve():
    """Run the job that standard input describes, and write what it printed and returned as one line of JSON."""
    import moe_numba  # noqa: F401  chooses the simulator

    job, notebook = json.load(sys.stdin), types.ModuleType("__main__")
    sys.modules["__main__"] = notebook
    constants = [f"{name} = {value}" for name, value in job["constants"].items()]
    pieces = ["\n".join(job["imports"]), "\n".join(constants), job["setup"], *job["sources"]]
    for number, source in enumerate(pieces):
        # The simulator's messages show the base name: the line number then counts from the function's first line.
        SourceLoader(source, f"{number}/cell").exec_module(notebook)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = getattr(notebook, job["function"])(*json.loads(job["arguments"]))
    print(json.dumps({"printed": printed.getvalue(), "result": result}, default=str))


if __name__ == "__main__":
    _serve()
