"""What an exercise says of an answer: a state, a sentence, a score, and the function that the lesson goes on with."""

import html
from dataclasses import dataclass
from typing import Any

from moe_numba.runtime.changed_source import source_of

OPEN, WRONG, REFUSED, OVER_PAR, RIGHT = "open", "wrong", "refused", "over par", "right"
_STYLE = """
.exercise { border-left: 4px solid rgb(150, 150, 150); padding: .2em .8em; font: 14px/1.5 system-ui, sans-serif }
.exercise.right { border-color: rgb(46, 160, 67) }
.exercise:is(.wrong, .refused, .over) { border-color: rgb(230, 130, 13) }
.exercise pre { font: 12px/1.45 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto }
.exercise summary { cursor: pointer }
""".strip()


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer; notebooks display it, and ``str`` is its sentence.

    Attributes
    ----------
    name : str
        Of the exercise.
    state : str
        "open" (not answered yet), "wrong", "refused" (it avoids the task), "over par" (right, with more than is needed)
        or "right".
    text : str
        A sentence.
    score : float, optional
        What is compared with par, of a right answer.
    answer : object
        What the next cells use: the reader's answer if it is right, otherwise the lesson's own.
    table : object, optional
        A `score.Comparison` that explains the verdict.
    notes : tuple of str
        Sentences behind it.
    hint : str
        Folded.
    solution : function, kernel or str, optional
        Its source, folded.
    """

    name: str
    state: str
    text: str
    score: float | None = None
    answer: Any = None
    table: Any = None
    notes: tuple[str, ...] = ()
    hint: str = ""
    solution: Any = None

    @property
    def wrong(self) -> str | None:
        """What is wrong with the answer, or that there is none; None if it is right, also over par."""
        return None if self.state in (RIGHT, OVER_PAR) else self.text

    def __str__(self):
        table = [str(self.table)] if self.table is not None else []
        return "\n".join([f"{self.name}: {self.text}", *table, *self.notes])

    __repr__ = __str__

    def _repr_html_(self):
        first, *rest = self.text.split("\n")
        parts = [f"<b>Exercise {html.escape(self.name)}:</b> {html.escape(first)}"]
        parts += [f"<pre>{html.escape(chr(10).join(rest))}</pre>"] if rest else []
        parts += [self.table._repr_html_()] if self.table is not None else []
        parts += [f"<div>{html.escape(note)}</div>" for note in self.notes]
        if self.hint:
            parts.append(f"<details><summary>Hint</summary>{html.escape(self.hint)}</details>")
        if self.solution is not None:
            source = html.escape(source_of(self.solution).rstrip())
            parts.append(f"<details><summary>Solution</summary><pre>{source}</pre></details>")
        return f'<div class="exercise {self.state.split()[0]}"><style>{_STYLE}</style>{"".join(parts)}</div>'
