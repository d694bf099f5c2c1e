"""Exercises of the notebooks: a reader's answer is run in the simulator, and the message says what is wrong with it.

A module per notebook, such as ``start``, has a dict ``EXERCISES`` of `Exercise` by number. In a notebook,
``exercise("start-1").check(answer)`` ends the cell of the stub. It displays a sentence, the hint and the solution, both
folded. A wrong answer raises no error, so that a notebook with all its stubs runs to its end.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_numba import simulator
from moe_numba.course.grader import fault, is_kernel
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG, Verdict

__all__ = ["Exercise", "exercise"]


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes
    ----------
    task : str
        What the answer is, a noun phrase: "a kernel that reverses 64 elements".
    test : callable
        ``test(answer)`` raises an error if the answer is wrong; `course.grader` makes tests. If the answer is a kernel,
        it runs in the simulator.
    hint : str
    solution : function, kernel or str
        Its source is shown.
    """

    task: str
    test: Callable[[Any], None]
    hint: str
    solution: Any
    name: str = ""

    def check(self, answer: Any = ...) -> Verdict:
        """Test an answer. ``...``, which stubs contain, counts as none."""
        if answer is ... or (isinstance(answer, (tuple, list)) and any(part is ... for part in answer)):
            return self._verdict(OPEN, f"not answered yet: the answer is {self.task}")
        if callable(self.solution) and not is_kernel(self.solution) and not callable(answer):
            return self._verdict(WRONG, f"the answer must be a function, not {answer!r}")
        wrong = self._wrong(answer)
        return self._verdict(WRONG if wrong else RIGHT, wrong or "right")

    def _verdict(self, state, text):
        return Verdict(self.name, state, text, hint=self.hint, solution=self.solution)

    def _wrong(self, answer):
        if not is_kernel(answer):
            if is_kernel(self.solution):
                return f"{getattr(answer, '__name__', repr(answer))} is no kernel: is @cuda.jit missing before def?"
            return fault(self.test, answer)
        if simulator.ENABLED:
            return run_kernel(self.name, answer)
        return in_simulator(_run_by_name, self.name, answer.__name__, functions=[answer])


def numbered(topic: str) -> dict[int, Exercise]:
    """Return the exercises of a topic that have numbers; those of lessons of the second edition have names instead."""
    try:
        return getattr(importlib.import_module(f"moe_numba.course.lessons.{topic}.exercises"), "EXERCISES", {})
    except ModuleNotFoundError:
        return {}


def exercise(name: str) -> Exercise:
    """Return an exercise by its name, such as "gate-3"; raise a ValueError with the known names if there is none."""
    topic, _, number = name.rpartition("-")
    exercises = numbered(topic) if topic else {}
    if not number.isdigit() or int(number) not in exercises:
        known = ", ".join(f"{topic}-{n}" for n in exercises) or "those in moe_numba/course/lessons"
        raise ValueError(f"there is no exercise {name!r}; there are {known}")
    found = exercises[int(number)]
    return Exercise(found.task, found.test, found.hint, found.solution, name)


def _run_by_name(name, kernel):
    return run_kernel(name, getattr(sys.modules["__main__"], kernel))  # where `in_simulator` copies it


def run_kernel(name: str, kernel: Any) -> str | None:
    """Test a kernel in the simulator, and detect races; return what is wrong, or None."""
    with simulator.races():
        return fault(exercise(name).test, kernel)
