"""Predicted gains of steps, judged by the change: its sign first, then its size.

A prediction of the total is almost always close when a step changes little. So a step predicts the microseconds that it
saves, and the judgement compares this with the saving that was measured, both kernels interleaved.
"""

from dataclasses import dataclass

NOISE = 0.02  # of the time before: a smaller change counts as none
TOLERANCE = 1 / 3  # of the predicted change: a larger miss needs an explanation


@dataclass(frozen=True)
class Judgement:
    """What a step was predicted to save, and what it saved, in microseconds; negative numbers are losses."""

    before_us: float
    after_us: float
    predicted_us: float

    def __post_init__(self):
        if self.before_us <= 0 or self.after_us <= 0:
            raise ValueError(f"times must be above zero, not {self.before_us} and {self.after_us} us")

    @property
    def saved_us(self) -> float:
        return self.before_us - self.after_us

    @property
    def verdict(self) -> str:
        """One of "within a third", "within the noise", "wrong sign", "no change", "overestimated", "underestimated".

        "within the noise": both changes are below it, or their difference is, though it is over a third. "no change": a
        predicted change did not show. The last two speak of the size of a change whose sign was right, or for which no
        change was predicted.
        """
        noise = NOISE * self.before_us
        saved, predicted = abs(self.saved_us), abs(self.predicted_us)
        if max(saved, predicted) <= noise:
            return "within the noise"
        if saved <= noise:
            return "no change"
        if self.saved_us * self.predicted_us < 0:
            return "wrong sign"
        if abs(saved - predicted) <= TOLERANCE * predicted:
            return "within a third"
        if abs(saved - predicted) <= noise:
            return "within the noise"
        return "overestimated" if predicted > saved else "underestimated"

    @property
    def missed(self) -> bool:
        """Whether the step needs an explanation that a cell measures."""
        return self.verdict not in ("within a third", "within the noise")

    def __str__(self):
        return f"predicted {self._change(self.predicted_us)}, measured {self._change(self.saved_us)}: {self.verdict}"

    def _change(self, saved_us):
        """Format a saving as the change of the time: "-12.7 us (-26 %)"."""
        change_us = 0.0 - saved_us  # and no negative zero
        number = f"{change_us:+.3g}" if abs(change_us) < 1000 else f"{change_us:+.0f}"
        return f"{number} us ({change_us / self.before_us:+.0%})".replace("%)", " %)")
