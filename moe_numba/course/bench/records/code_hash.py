"""Syntax trees as text without what cannot change a measurement, and the hash of a notebook's code cells.

Docstrings, comments, formatting and the type hints of functions are left out, and so are the cells of exercises. So
documentation may be edited freely.
"""

import ast
import hashlib
import re


def hash_cells(text: str) -> str:
    """Return the SHA-256 of the code cells of a py:percent notebook, without those of exercises."""
    cells = filter(None, map(without_exercises, code_cells(text)))
    return hashlib.sha256("\n# %%\n".join(map(canonical, cells)).encode()).hexdigest()


def canonical(code: str) -> str:
    """Return text that is equal for code with the same AST, in all Python versions."""
    # Jupyter commands are not Python: keep each as a string.
    code = re.sub(r"^(\s*)([%!].*)$", lambda m: f"{m[1]}{m[2]!r} + ''", code, flags=re.MULTILINE)
    return dump(ast.parse(code))


def dump(node: ast.AST | list) -> str:
    """Return a syntax tree as text, without docstrings and the type hints of functions."""
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value is not None and value != []}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        fields["body"] = [child for child in node.body if not _is_docstring(child)]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        fields.pop("returns", None)
    if isinstance(node, ast.arg):
        fields.pop("annotation", None)
    if isinstance(node, ast.Constant):
        fields.pop("kind", None)
    if isinstance(node, ast.JoinedStr):  # from Python 3.12 on, one that ends with a field may end with an empty string
        fields["values"] = [child for child in node.values if not _is_empty_string(child)]
    inside = ",".join(f"{name}={dump(value)}" for name, value in sorted(fields.items()))
    return f"{type(node).__name__}({inside})"


def _is_empty_string(node):
    return isinstance(node, ast.Constant) and node.value == ""


def _is_docstring(node):
    """Return whether a statement is only a string, which has no effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_cells(text: str) -> list[str]:
    """Return the code cells of a py:percent notebook, without header, markers, prose and blank ends."""
    lines = text.splitlines()
    if lines and lines[0] == "# ---":  # jupytext's header
        lines = lines[lines.index("# ---", 1) + 1 :]
    cells, kind = [[]], "code"
    for line in lines:
        if line.startswith("# %%"):
            kind = "prose" if re.search(r"\[(markdown|md|raw)\]", line) else "code"
            cells.append([])
        elif kind == "code":
            cells[-1].append(line.rstrip())
    return [cell for cell in ("\n".join(lines).strip("\n") for lines in cells) if cell]


def is_exercise(code: str) -> bool:
    """Whether a cell is the stub of an exercise: its last line is ``exercise("topic-1").check(answer)``."""
    return re.match(r'exercise\("[\w-]+"\)\.check\(', code.rstrip().rpartition("\n")[2]) is not None


def without_exercises(code: str) -> str:
    """Return a cell's code without the import of ``exercise``; of an exercise, nothing."""
    if is_exercise(code):
        return ""
    return re.sub(r"^from moe_numba\.course\.exercises import exercise\n?", "", code, flags=re.MULTILINE)
