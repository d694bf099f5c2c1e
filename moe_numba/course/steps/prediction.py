"""Predicted gains of steps, judged by the saving and by the time that remains; the worse one counts.

A prediction of the total is almost always close when a step changes little, and one of the saving when a step saves
nearly everything. So a step predicts the microseconds that it saves, and the judgement compares the saving and what
remains with those that were measured, both kernels interleaved.
"""

from dataclasses import dataclass

NOISE = 0.02  # of the time before: a smaller change counts as none
TOLERANCE = 1 / 3  # of the predicted change, and of what was predicted to remain: a larger miss needs an explanation


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
    def remaining_us(self) -> float:
        """The predicted time after the step."""
        return self.before_us - self.predicted_us

    @property
    def verdict(self) -> str:
        """One of "within a third", "within the noise", "wrong sign", "not there", "overestimated", "underestimated".

        "within a third": of the saving, and of what remains. "within the noise": both changes are below it, or their
        difference is. "not there": a predicted change did not come. The last two speak of the size of a change whose
        sign was right, or for which no change was predicted.
        """
        noise = NOISE * self.before_us
        saved, predicted = abs(self.saved_us), abs(self.predicted_us)
        if max(saved, predicted) <= noise:
            return "within the noise"
        if saved <= noise:
            return "not there"
        if self.saved_us * self.predicted_us < 0:
            return "wrong sign"
        miss = abs(saved - predicted)  # which is also that of what remains
        if miss <= TOLERANCE * min(predicted, self.remaining_us):
            return "within a third"
        if miss <= noise:
            return "within the noise"
        return "overestimated" if predicted > saved else "underestimated"

    @property
    def missed(self) -> bool:
        """Whether the step needs an explanation that a cell measures."""
        return self.verdict not in ("within a third", "within the noise")

    def __str__(self):
        return f"predicted {self._text(self.remaining_us)}, measured {self._text(self.after_us)}: {self.verdict}"

    def _text(self, us):
        """Format a time and its change: "35.5 us (-26 %)"."""
        change = (us - self.before_us) / self.before_us
        return f"{us:.3g} us ({0.0 + round(change, 2):+.0%})".replace("%)", " %)")
