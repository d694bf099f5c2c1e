"""What a step changes: a diff of two kernels in colours. Also listings of source, and a counter of torch operations."""

import ast
import difflib
import html
import re
import textwrap
from collections.abc import Callable, Iterator

from IPython.display import Markdown
from torch.utils._python_dispatch import TorchDispatchMode

from moe_numba.runtime.changed_source import source_of

_STYLE = """
.step-diff pre { font: 12px/1.45 ui-monospace, Menlo, Consolas, monospace; margin: .4em 0; overflow-x: auto }
.step-diff .line { display: block; white-space: pre; padding: 0 .5em }
.step-diff .added { background: rgba(46, 160, 67, .2) }
.step-diff .removed { background: rgba(248, 81, 73, .2) }
.step-diff .hunk { opacity: .6 }
.step-diff summary { cursor: pointer }
""".strip()
_KINDS = {"+": "added", "-": "removed", "@": "hunk"}


class Change:
    """The difference between two kernels: notebooks display it in colours, ``str`` is the unified diff."""

    def __init__(self, old: str, new: str, name: str, context: int):
        self.new, self.name = new, name
        self.lines = list(_unified(old.splitlines(), new.splitlines(), context))

    def __str__(self):
        return "\n".join(self.lines)

    def _repr_html_(self):
        lines = "".join(
            f'<span class="{" ".join(filter(None, ("line", _KINDS.get(line[:1]))))}">{html.escape(line) or " "}</span>'
            for line in self.lines
        )
        name, code = html.escape(self.name), html.escape(self.new)
        folded = f"<details><summary>the whole of {name}</summary><pre>{code}</pre></details>"
        return f'<div class="step-diff"><style>{_STYLE}</style><pre>{lines}</pre>{folded}</div>'

    def _repr_markdown_(self):
        """Return the form that viewers show which remove styles from HTML."""
        return (
            f"```diff\n{self}\n```\n<details><summary>the whole of {html.escape(self.name)}</summary>\n\n"
            f"```python\n{self.new}\n```\n</details>"
        )

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": str(self), "text/html": self._repr_html_(), "text/markdown": self._repr_markdown_()}


def change(old: Callable, new: Callable, context: int = 2) -> Change:
    """Return what a step changes: the lines in which two functions or kernels differ, apart from their names.

    Parameters
    ----------
    old, new : function or kernel
        Their sources must be available, as those of notebook cells are.
    context : int
        Unchanged lines shown before and after each change.

    Raises
    ------
    ValueError
        The two do not differ.
    """
    name = new.__name__
    made = Change(re.sub(rf"\b{old.__name__}\b", name, source_of(old).rstrip()), source_of(new).rstrip(), name, context)
    if not made.lines:
        raise ValueError(f"{made.name} has the same source as the function that it is compared with")
    return made


def _unified(old: list[str], new: list[str], context: int) -> Iterator[str]:
    """Yield the lines of a unified diff, whose hunks begin with the line numbers of the new function."""
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        first, last = group[0][3] + 1, group[-1][4]
        yield f"@@ lines {first} to {last} @@"
        for kind, a, b, c, d in group:
            if kind == "equal":
                yield from (f"  {line}" for line in old[a:b])
            else:
                yield from (f"- {line}" for line in old[a:b])
                yield from (f"+ {line}" for line in new[c:d])


def listing(*functions: Callable | tuple[Callable, str]) -> Markdown:
    """Return the source of functions or kernels as a listing; ``(factory, name)`` is a function that a factory makes.

    Raises
    ------
    ValueError
        The factory defines no function of this name.
    """
    sources = [_nested(*f) if isinstance(f, tuple) else source_of(f).rstrip() for f in functions]
    return Markdown("```python\n{}\n```".format("\n\n\n".join(sources)))


def passage(function: Callable, first: str, last: str) -> Markdown:
    """Return a listing of a passage: from the first line that contains ``first`` to the next that contains ``last``.

    Raises
    ------
    ValueError
        There are no such lines.
    """
    lines = source_of(function).splitlines()
    begin = next((n for n, line in enumerate(lines) if first in line), len(lines))
    end = next((n for n in range(begin, len(lines)) if last in lines[n]), None)
    if end is None:
        raise ValueError(f"{function.__name__} has no passage from {first!r} to {last!r}")
    return Markdown("```python\n{}\n```".format(textwrap.dedent("\n".join(lines[begin : end + 1]))))


def _nested(factory, name):
    """Return the source of a function that another one defines, with its decorators, not indented."""
    source = source_of(factory)
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.FunctionDef) and node.name == name and node.col_offset > 0:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
    raise ValueError(f"{factory.__name__} defines no function {name}")


def diff(old: Callable, new: Callable) -> None:
    """Print the lines in which two functions or kernels differ."""
    sources = [source_of(f).splitlines() for f in (old, new)]
    changed = [line for line in difflib.unified_diff(*sources, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")]
    print("\n".join(changed))


class OpCounter(TorchDispatchMode):
    """Collects the names of torch operations that compute something, without views (``names``)."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "_unsafe_view" not in str(function):
            self.names.append(str(function).removeprefix("aten.").split(".")[0])
        return function(*args, **(kwargs or {}))
