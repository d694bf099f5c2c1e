"""Kernels of a notebook, or of a program, by their source."""

import ast


def kernels_of(source):
    """Return name -> text of the kernels that Python source defines at its top level."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: ast.unparse(node) for node in functions if [*map(ast.unparse, node.decorator_list)] == ["cuda.jit"]
    }
