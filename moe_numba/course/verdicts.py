"""The rule that gives a claim of an article its verdict.

A claim is data: what the article says and where, the quantity that decides it, a threshold, how the quantity is
measured or checked here, and how far that is what the article speaks of. It holds no verdict: `verdict` computes it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from moe_numba.course.steps.prediction import NOISE

TOLERANCE = 0.1  # share by which a figure may be missed: "about 10 %" is met from 9 % on
CLEAR = 0.1  # share of a time that counts as clear, or as not small
SEPARATE_NOISE = 0.05  # share of a time by which measurements of one kernel may differ that are not interleaved
NOT_MEASURED, DIFFERENT_SETUP = "not measured", "different setup"


class About(enum.Enum):
    """What a claim speaks of."""

    FIGURE = "a number that the article measured"
    DIRECTION = "which of two is larger or faster, without a number"
    ARITHMETIC = "what follows from the article's own numbers"
    CODE = "a property of the code that the article prints or describes"


class Setup(enum.Enum):
    """What was measured or checked here."""

    SAME = "yes"  # the article's own code, under all conditions that it names; or its numbers, or its listing
    PORT = "Numba port"  # a kernel of this course that follows the article's listing statement by statement
    OTHER = "no"  # another kernel, model, size, GPU or kind of time


# {what a claim speaks of: verdict if the threshold is met, verdict if it is not}
_VERDICTS = {
    About.FIGURE: ("reproduced", "not reproduced"),
    About.DIRECTION: ("reproduced", "not reproduced"),
    About.ARITHMETIC: ("arithmetic holds", "arithmetic does not hold"),
    About.CODE: ("holds for the code", "does not hold for the code"),
}
VERDICTS = tuple(
    dict.fromkeys([name for pair in _VERDICTS.values() for name in pair] + [DIFFERENT_SETUP, NOT_MEASURED])
)


class Found(NamedTuple):
    """What a measurement or a check found."""

    value: float  # compared with the threshold
    text: str  # for the table, with all numbers


class Threshold(NamedTuple):
    """The values with which a claim is met; both ends belong to them."""

    least: float = -inf
    most: float = inf
    unit: str = ""  # with a blank in front

    def is_met(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self):
        if self.least == self.most:
            return f"{self.least:g}{self.unit}"
        if self.least == -inf:
            return f"at most {self.most:g}{self.unit}"
        if self.most == inf:
            return f"at least {self.least:g}{self.unit}"
        return f"{self.least:g} to {self.most:g}{self.unit}"


def exactly(value: float, unit: str = "") -> Threshold:
    """Make a threshold that one value meets."""
    return Threshold(value, value, unit)


def at_least(value: float, unit: str = "") -> Threshold:
    return Threshold(least=value, unit=unit)


def at_most(value: float, unit: str = "") -> Threshold:
    return Threshold(most=value, unit=unit)


def figure(least: float, unit: str = " %") -> Threshold:
    """Make a threshold for "about 10 %" or "10 to 20 %": the smaller number, less a tenth of it."""
    return at_least((1 - TOLERANCE) * least, unit)


def percentage(value: float) -> Threshold:
    """Make a threshold for a percentage with one decimal: it may differ by one in the last digit."""
    return Threshold(round(value - 0.1, 3), round(value + 0.1, 3), " %")


def noise(interleaved: bool) -> float:
    """Return the share of a time by which measurements of one kernel may differ (see `claims.are_interleaved`)."""
    return NOISE if interleaved else SEPARATE_NOISE


def faster(interleaved: bool = True) -> Threshold:
    """Make a threshold for percent of a time saved: more than measurements of one kernel differ by."""
    return at_least(100 * noise(interleaved), " %")


def no_cost(interleaved: bool = True) -> Threshold:
    """Make a threshold for percent of a time added: no more than measurements of one kernel differ by."""
    return at_most(100 * noise(interleaved), " %")


def clear() -> Threshold:
    """Make a threshold for "clear" and "not small": percent of a time."""
    return at_least(100 * CLEAR, " %")


@dataclass(frozen=True)
class Claim:
    """One claim of an article.

    Attributes
    ----------
    section : str
        Where the article says it.
    quote : str
        What it says, in a short English translation.
    quantity : str
        What decides the claim.
    about : About
    threshold : Threshold
        Of the quantity.
    measure : callable or None
        Returns ``Found``, or None if it cannot be found on this machine; gets the values of ``lookups``. None if
        nothing here measures or checks the claim.
    lookups : tuple of str
        Names of ``claims.LOOKUPS``. If one finds nothing, nothing is measured.
    setup : Setup
    differs : str
        What differs from the article, if ``setup`` is not SAME.
    needs : str
        What a measurement would need. Required without ``measure``.
    """

    section: str
    quote: str
    quantity: str
    about: About
    threshold: Threshold
    measure: Callable[..., Found | None] | None = None
    lookups: tuple[str, ...] = ()
    setup: Setup = Setup.SAME
    differs: str = ""
    needs: str = ""

    @property
    def is_like_for_like(self) -> bool:
        """Whether a result judges the claim; a port judges no figure, which depends on the compiler."""
        return self.setup is Setup.SAME or (self.setup is Setup.PORT and self.about is not About.FIGURE)


def verdict(claim: Claim, found: Found | None) -> str:
    """Return the verdict on a claim, one of `VERDICTS`.

    In this order: without a result it is "not measured". If the result is not like for like it is "different setup".
    If the threshold is met the claim holds. A port that misses it does not count against the claim, since the article's
    own kernel may differ: "different setup". Otherwise the claim is not reproduced, its arithmetic does not hold, or it
    does not hold for the code.
    """
    if found is None:
        return NOT_MEASURED
    if not claim.is_like_for_like:
        return DIFFERENT_SETUP
    holds, fails = _VERDICTS[claim.about]
    if claim.threshold.is_met(found.value):
        return holds
    return DIFFERENT_SETUP if claim.setup is Setup.PORT else fails


class Article(NamedTuple):
    """An article and its claims."""

    name: str  # a key
    title: str  # translated
    about: str  # the code that it describes
    code: str  # a link to it
    notebooks: tuple[str, ...]  # that follow it
    claims: tuple[Claim, ...]
    link: str = ""  # to the article, if it is known


# How a measured number is computed from times. Each returns Found, or takes the place of `Claim.measure`.


def saving(old: float, new: float, what: str = "") -> Found:
    """Compare two times in microseconds: percent of the first that the second saves."""
    saved = 100 * (1 - new / old)
    change = f"{abs(saved):.3g} % {'less' if saved >= 0 else 'more'}"
    return Found(saved, f"{what}{old:.4g} -> {new:.4g} us, {change}")


def least_saving(labels: tuple[str, ...]) -> Callable[..., Found]:
    """Make a measure of pairs of times, old and new, one pair per label: the smallest of their savings."""

    def measure(*times):
        found = [saving(*pair, f"{label}: ") for label, pair in zip(labels, zip(times[::2], times[1::2]), strict=True)]
        return Found(min(f.value for f in found), "; ".join(f.text for f in found))

    return measure


def share(part: float, total: float, what: str) -> Found:
    """Return percent of the total."""
    return Found(100 * part / total, f"{what} {part:.4g} of {total:.4g} us, {100 * part / total:.1f} %")
