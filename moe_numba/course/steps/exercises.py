"""Kinds of exercises that a lesson asks: build, predict, choose, diagnose, break.

A lesson's module defines them as data; a cell of the page checks an answer, and displays the `Verdict`:

    warp_scan = SCAN.use(my_warp_scan)      # displays the verdict; returns the lesson's own function for a stub
    guess = predict("2 Blelloch", barriers=..., bank_conflicts=...)
    guess.judge(score_of_step_2)
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from moe_numba import simulator
from moe_numba.course.grader import Wrong, fault
from moe_numba.course.steps.score import Score, compare
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG, Verdict
from moe_numba.simulator.core.kernel import Kernel
from moe_numba.simulator.profiler.phases import COUNTERS
from moe_numba.simulator.profiler.report import Counted

_MOST_ALONE = 8  # lines that one lane may execute while the others of its warp wait, before it does the task alone


class Refused(Wrong):
    """An answer is right, but avoids what the exercise asks; the message says how."""


@dataclass(frozen=True)
class Build:
    """Write a device function or a kernel from its contract.

    Attributes
    ----------
    name, task : str
        ``task`` says what the answer must do, and ends the sentence on a stub.
    own : function or kernel
        The lesson's own answer; the next cells use it until the reader's is right.
    test : callable
        ``test(answer)`` raises `course.grader.Wrong` if the answer is wrong. It runs with several thread orders, and
        with races detected.
    profile : callable
        ``profile(answer)`` returns what `simulator.profile` counted of the answer; see `score.count`.
    counter : str
        Counter of the critical path that is compared with par, such as "shuffles", or of all warps.
    par : int
    unit : str
        What the counter counts, in words and in the plural; by default its name.
    score : callable, optional
        ``score(counted)`` is compared with par instead of the counter of a path.
    par_is_bound : bool
        No answer can need less, so one that does is refused.
    forbidden : dict
        Counter of the total -> what the answer does instead of the task, "it accesses shared memory".
    limits : dict
        Counter of the critical path -> the most that an answer needs, and what one that needs more does instead.
    needs : tuple, optional
        Counters of the total of which one must not be zero, and what an answer with zeros lacks: it must have its
        result from somewhere else than from the other threads.
    most_alone : int, optional
        Most lines that one lane of a warp may execute alone; None if the task is one for a single lane.
    over_par : str
        A question that leads from a right answer to one at par.
    hint : str
    seeds : int
    home : str, optional
        "module:name" of this exercise. Where kernels run on a GPU, a process with the simulator finds it there.
    """

    name: str
    task: str
    own: Any
    test: Callable[[Any], None]
    profile: Callable[[Any], Counted]
    counter: str
    par: int
    par_is_bound: bool = False
    forbidden: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    needs: tuple[tuple[str, ...], str] | None = None
    most_alone: int | None = _MOST_ALONE
    over_par: str = ""
    hint: str = ""
    seeds: int = 4
    home: str = ""
    unit: str = ""
    score: Callable[[Counted], float] | None = None

    def check(self, answer: Any = ...) -> Verdict:
        """Test an answer; ``...``, or a function that only returns a constant, counts as none."""
        if answer is ... or is_stub(answer):
            return self._verdict(OPEN, f"not answered yet: write {self.task}")
        return self._verdict(*_in_simulator(self, answer), answer)

    def judge(self, answer: Any) -> tuple[str, str, float | None]:
        """Return the state, a sentence and the score of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        profiles: list[Counted] = []
        if (wrong := fault(lambda answer: profiles.append(self.profile(answer)), answer)) is not None:
            return WRONG, wrong, None
        (counted,) = profiles
        counters = counted.critical_path if self.counter in COUNTERS else counted.total
        score = self.score(counted) if self.score else getattr(counters, self.counter)
        amount = _amount(score, self.unit or _words(self.counter))
        if (reason := self._avoids(counted, score, amount)) is not None:
            return REFUSED, f"the result is right, but {reason}", None
        if score > self.par:
            return OVER_PAR, f"right, with {amount}; par is {self.par}. {self.over_par}".rstrip(), score
        return RIGHT, f"right, with {amount}; par is {self.par}", score

    def use(self, answer: Any = ...) -> Any:
        """Display the verdict on an answer, and return what the next cells use."""
        from IPython.display import display

        verdict = self.check(answer)
        display(verdict)
        return verdict.answer

    def _wrong(self, answer):
        """Return why an answer is wrong, or None."""
        if isinstance(answer, Kernel) != isinstance(self.own, Kernel):
            return _OTHER_KIND[isinstance(self.own, Kernel)]
        return fault(self._test, answer)

    def _test(self, answer):
        for seed in range(self.seeds):
            with simulator.seed(seed), simulator.races():
                self.test(answer)

    def _avoids(self, counted, score, amount):
        """Return how an answer avoids the task, or None."""
        total = counted.total
        path = counted.critical_path
        for counter, reason in self.forbidden.items():
            if count := getattr(total, counter):
                of_a_warp = getattr(path, counter) if counter in COUNTERS else 0
                return f"{reason} ({_amount(of_a_warp or count, _words(counter))})"
        for counter, (most, reason) in self.limits.items():
            if (count := getattr(counted.critical_path, counter)) > most:
                return f"{reason} ({_amount(count, _words(counter))}; {most} suffice)"
        if self.needs and not any(getattr(total, counter) for counter in self.needs[0]):
            return f"{self.needs[1]} (no {', no '.join(map(_words, self.needs[0]))})"
        by_one = (line for line in counted.lines if line.active_lanes == line.executions)
        alone = max((counted.phases.critical_path([line]).executions for line in by_one), default=0)
        if self.most_alone is not None and alone > self.most_alone:
            return f"one lane executes a line {alone} times alone, while the 31 others of its warp wait"
        if self.par_is_bound and score < self.par:
            return f"it has {amount}, and {self.par} is a lower bound of what was asked: it takes another way"
        return None

    def _verdict(self, state, text, score=None, answer=None):
        goes_on = state in (RIGHT, OVER_PAR)
        notes = () if goes_on else ("The next cells use the lesson's own answer.",)
        answer = answer if goes_on else self.own
        return Verdict(self.name, state, text, score, answer, None, notes, self.hint, self.own)


_OTHER_KIND = {  # whether a kernel is asked for -> what an answer of the other kind lacks
    True: "this is no kernel: write @cuda.jit before its definition, and no device=True",
    False: "this is a kernel, and a kernel cannot call it: write @cuda.jit(device=True) before its definition",
}


def _words(counter):
    """Return the name of a counter in words: "shared loads" of "shared_load_requests"."""
    return counter.replace("_requests", "s").replace("_", " ")


def _amount(number, unit):
    """Return a number and what it counts, whose first plural becomes a singular after 1."""
    return f"{number} {re.sub(_PLURAL, '', unit, count=1) if number == 1 else unit}"


_PLURAL = re.compile(r"((?<=ch)e)?s\b")


@dataclass(frozen=True)
class Prediction:
    """Numbers of a step's score that the reader predicts before it runs; ``...`` is no guess yet."""

    name: str
    guesses: Mapping[str, Any]

    def judge(self, score: Score) -> Verdict:
        """Compare the guesses with the critical path of a score; the numbers appear only beside a guess."""
        if all(guess is ... for guess in self.guesses.values()):
            return Verdict(self.name, OPEN, "no prediction yet")
        texts, state = [], RIGHT
        for row, guess in self.guesses.items():
            found = score[row.replace("_", " ")]
            if guess is ...:
                texts.append(f"you made no prediction of {row.replace('_', ' ')}")
            elif not isinstance(guess, Real):
                texts.append(f"{guess!r} is no number of {row.replace('_', ' ')}: write one without quotes")
                state = WRONG
            elif guess == found:
                texts.append(f"you predicted {guess} {row.replace('_', ' ')}: exactly right")
            else:
                texts.append(f"you predicted {guess} {row.replace('_', ' ')}; it is {found:g}")
                state = WRONG
        return Verdict(self.name, state, "; ".join(texts), answer=score)


def predict(name: str, **guesses: Any) -> Prediction:
    """Return a prediction of rows of a score's critical path: ``predict("2 Blelloch", barriers=19)``."""
    return Prediction(name, guesses)


def as_one_of(choice: Any, known: Iterable[str]) -> Any:
    """Return the one of ``known`` that a reader has chosen in lower or upper case, otherwise the choice itself."""
    return next((name for name in known if str(choice).lower() == name.lower()), choice)


@dataclass(frozen=True)
class Diagnose:
    """Choose among candidates for the next step before their scores appear.

    Attributes
    ----------
    name : str
    before : Score
        Of the step that they would replace.
    candidates : dict
        Choice, such as "A" -> function or kernel.
    measure : callable
        ``measure(candidate)`` returns its `Score`; it raises `course.grader.Wrong` if the candidate is wrong.
    why : dict
        Choice -> a sentence on it, which appears with the scores.
    """

    name: str
    before: Score
    candidates: Mapping[str, Any]
    measure: Callable[[Any], Score]
    why: Mapping[str, str]

    def check(self, choice: Any = ...) -> Verdict:
        """Run all candidates, and compare the choice with that of the shortest critical path."""
        choice = as_one_of(choice, self.candidates)
        if choice not in self.candidates:
            known = ", ".join(self.candidates)
            if choice is ...:
                return Verdict(self.name, OPEN, f"no choice yet ({known}); the scores appear with it")
            return Verdict(self.name, WRONG, f"you chose {choice!r}; the choices are {known}")
        scores = {name: self.measure(candidate) for name, candidate in self.candidates.items()}
        best = min(scores, key=lambda name: scores[name].us)
        shortest = f"{'It' if choice == best else best} has the shortest critical path."
        return Verdict(
            self.name,
            RIGHT if choice == best else WRONG,
            f"you chose {choice}. {shortest}",
            answer=self.candidates[best],
            table=compare(self.before, *scores.values()),
            notes=tuple(f"{name}: {self.why[name]}" for name in self.candidates),
        )


@dataclass(frozen=True)
class Choose:
    """Choose the answer to a question; its explanation appears only with the verdict.

    Attributes
    ----------
    name : str
    choices : dict
        Choice, such as "A" -> what it says.
    right : str
    why : str or callable
        The explanation, or ``why(*evidence)`` returns it.
    """

    name: str
    choices: Mapping[str, str]
    right: str
    why: str | Callable[..., str]

    def check(self, choice: Any = ..., *evidence: Any) -> Verdict:
        """Compare a choice with the right one; ``evidence`` is what `why` needs, such as scores of steps."""
        choice, known = (
            as_one_of(choice, self.choices),
            "; ".join(f"{name}: {text}" for name, text in self.choices.items()),
        )
        if choice not in self.choices:
            text = f"no choice yet. {known}" if choice is ... else f"you chose {choice!r}; {known}"
            return Verdict(self.name, OPEN if choice is ... else WRONG, text)
        why = self.why(*evidence) if callable(self.why) else self.why
        says = "right" if choice == self.right else f"it is {self.right}"
        return Verdict(self.name, RIGHT if choice == self.right else WRONG, f"you chose {choice}: {says}. {why}")


@dataclass(frozen=True)
class Predict:
    """Predict numbers that can be worked out beforehand; the right ones appear only beside a guess.

    Attributes
    ----------
    name : str
    right : dict or callable
        What is asked -> its number, or ``right(*evidence)`` returns that.
    why : str or callable
        The explanation, or ``why(*evidence)`` returns it.
    within : dict
        What is asked -> by how much a guess may be off; 0 by default.
    """

    name: str
    right: Mapping[str, float] | Callable[..., Mapping[str, float]]
    why: str | Callable[..., str]
    within: Mapping[str, float] = field(default_factory=dict)

    def check(self, *evidence: Any, **guesses: Any) -> Verdict:
        """Compare guesses, by what is asked, with the right numbers; ``...`` is no guess yet."""
        right = self.right(*evidence) if callable(self.right) else self.right
        if unknown := set(guesses) - set(right):
            return Verdict(self.name, WRONG, f"{', '.join(sorted(unknown))} is not asked; {', '.join(right)} are")
        guesses = {asked: guess for asked, guess in guesses.items() if guess is not ...}
        if not guesses:
            return Verdict(self.name, OPEN, "no prediction yet")
        if odd := [f"{asked}={guess!r}" for asked, guess in guesses.items() if not isinstance(guess, Real)]:
            return Verdict(self.name, WRONG, f"{', '.join(odd)} is no number: write one without quotes")
        texts = [
            f"{asked.replace('_', ' ')}: you predicted {guess}, it is {right[asked]:g}"
            for asked, guess in guesses.items()
        ]
        met = all(abs(right[asked] - guess) <= self.within.get(asked, 0) for asked, guess in guesses.items())
        why = self.why(*evidence) if callable(self.why) else self.why
        texts[0] = f"{'right' if met else 'wrong'}: {texts[0]}"
        return Verdict(self.name, RIGHT if met else WRONG, f"{'; '.join(texts)}. {why}")


@dataclass(frozen=True)
class Formula:
    """Write a formula as a Python function, which is checked by its results alone.

    Attributes
    ----------
    name : str
    task : str
        What the function must return; it ends the sentence on a stub.
    own : function
        The lesson's own formula.
    test : callable
        ``test(answer)`` raises `course.grader.Wrong` if a result is wrong.
    praise : str
        What a right formula has.
    hint : str
    """

    name: str
    task: str
    own: Callable
    test: Callable[[Callable], None]
    praise: str
    hint: str = ""

    def check(self, answer: Any = ...) -> Verdict:
        """Test an answer; ``...``, or a function that only returns a constant, counts as none."""
        state, text = RIGHT, f"right: {self.praise}"
        if answer is ... or is_stub(answer):
            state, text = OPEN, f"not answered yet: write {self.task}"
        elif (wrong := fault(self.test, answer)) is not None:
            state, text = OPEN if wrong.startswith("not answered") else WRONG, wrong
        used = answer if state == RIGHT else self.own
        return Verdict(self.name, state, text, answer=used, hint=self.hint, solution=self.own)


@dataclass(frozen=True)
class Break:
    """Remove one barrier of a function, so that it is right in all thread orders and the race detector still objects.

    Attributes
    ----------
    name : str
    original : device function
    passes : callable
        ``passes(answer, seed)``: whether the kernel with this function returns the right result in one thread order.
    race : callable
        ``race(answer)`` returns the race detector's message, or None.
    barrier : str
        The statement that may be missing once.
    seeds : int
    home : str, optional
        As for `Build`.
    """

    name: str
    original: Any
    passes: Callable[[Any, int], bool]
    race: Callable[[Any], str | None]
    barrier: str = "cuda.syncthreads()"
    seeds: int = 8
    home: str = ""

    def check(self, answer: Any = ...) -> Verdict:
        """Judge an answer: exactly one barrier less, right under all thread orders, and a race."""
        if answer is ... or _text(tree_of(answer)) == _text(tree_of(self.original)):
            return Verdict(self.name, OPEN, "nothing is removed yet")
        if _text(tree_of(answer)) not in self._with_one_barrier_less():
            text = f"only one `{self.barrier}` of the original may be missing; everything else must stay"
            return Verdict(self.name, REFUSED, text)
        state, text, _ = _in_simulator(self, answer)
        return Verdict(self.name, state, text, answer=answer if state == RIGHT else self.original)

    def judge(self, answer: Any) -> tuple[str, str, None]:
        """Return the state and a sentence of an answer that lacks one barrier, in the simulator."""
        found = self.race(answer)
        if found is None:
            return WRONG, "the race detector finds nothing: that barrier was not needed", None
        passed = [self.passes(answer, seed) for seed in range(self.seeds)]
        if not all(passed):
            wrong = f"wrong under {passed.count(False)} of {self.seeds} thread orders: a test may find this one"
            return WRONG, f"{wrong}\n{found}", None
        return RIGHT, f"right under all {self.seeds} thread orders, and still:\n{found}", None

    def _with_one_barrier_less(self):
        """Return the trees that are left if one barrier is taken out."""
        count = sum(ast.unparse(n) == self.barrier for n in ast.walk(tree_of(self.original)) if isinstance(n, ast.Expr))
        return {_text(_Remover(self.barrier, number).visit(tree_of(self.original))) for number in range(count)}


def _in_simulator(exercise, answer):
    """Return ``exercise.judge(answer)``, from a process with the simulator where kernels run on a GPU."""
    if simulator.ENABLED:
        return exercise.judge(answer)
    if not exercise.home:
        raise ValueError(f"exercise {exercise.name} has no home, by which a process with the simulator finds it")
    return in_simulator(_judge_by_name, exercise.home, answer.__name__, functions=[answer])


def _judge_by_name(home, answer):
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name).judge(getattr(sys.modules["__main__"], answer))


def is_stub(answer: Any) -> bool:
    """Return whether a function's body is a docstring or a constant that it returns, as that of a stub."""
    function = getattr(answer, "py_func", answer)
    if not inspect.isfunction(function):
        return False
    body = getattr(tree_of(function), "body", [answer])
    return all(
        isinstance(statement, ast.Pass)
        or isinstance(statement, ast.Expr | ast.Return)
        and (statement.value is None or isinstance(statement.value, ast.Constant))
        for statement in body
    )


def tree_of(function: Any) -> ast.AST:
    """Return a function's syntax tree without its name, decorators and docstring."""
    source = inspect.getsource(getattr(function, "py_func", function))
    tree = ast.parse(textwrap.dedent(source)).body[0]
    if not isinstance(tree, ast.FunctionDef):  # a lambda's statement
        return tree
    tree.name, tree.decorator_list = "f", []
    if ast.get_docstring(tree) is not None:
        tree.body[:1] = [] if len(tree.body) > 1 else [ast.Pass()]
    return tree


def _text(tree):
    return ast.dump(tree)


class _Remover(ast.NodeTransformer):
    """Removes one of the statements that read `text`."""

    def __init__(self, text, number):
        self.text, self.left = text, number

    def visit_Expr(self, node):
        if ast.unparse(node) != self.text:
            return node
        self.left -= 1
        return None if self.left == -1 else node
