"""A planted bug: what the mistake is, the changes of source text that plant it, and the tests that should find it."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[3]


class Change(NamedTuple):
    """A passage of a source file, which occurs ``count`` times, and its replacement."""

    file: str
    right: str
    wrong: str
    count: int = 1

    def apply(self, source):
        """Return ``source`` with all occurrences replaced."""
        found = source.count(self.right)
        if found != self.count:
            raise ValueError(f"{self.file} has {found} times, not {self.count}, the passage {self.right!r}")
        return source.replace(self.right, self.wrong)


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes
    ----------
    name : str
        Topic and number, such as "G02".
    mistake : str
        What kind of mistake it is.
    changes : tuple of Change
    tests : tuple of str
        Arguments of pytest: node ids, or files and ``-k`` with an expression. They take a few seconds.
    equivalent : str, optional
        Why the change cannot change what the kernel does.
    not_found_yet : str, optional
        What the tests or the simulator lack to find it.
    """

    name: str
    mistake: str
    changes: tuple
    tests: tuple
    equivalent: str = ""
    not_found_yet: str = ""

    @property
    def is_expected(self):
        """Whether its tests find it today."""
        return not self.equivalent and not self.not_found_yet

    def changed_sources(self, root=REPOSITORY):
        """Return {file: its source with the changes}."""
        sources = {}
        for change in self.changes:
            source = sources.get(change.file) or (root / change.file).read_text()
            sources[change.file] = change.apply(source)
        return sources

    def changes_code(self, root=REPOSITORY):
        """Return whether the changes alter the code of each file, and not just its comments or layout."""
        sources = self.changed_sources(root)
        return all(ast.dump(ast.parse(s)) != ast.dump(ast.parse((root / f).read_text())) for f, s in sources.items())


def mutant(name, mistake, tests, *changes, **reasons):
    """Make a `Mutant`; each of ``changes`` has the fields of a `Change`."""
    return Mutant(name, mistake, tuple(Change(*change) for change in changes), tests, **reasons)
