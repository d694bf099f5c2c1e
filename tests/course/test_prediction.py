"""Judgement of predicted gains: `moe_numba.course.steps.prediction`."""

import json

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.bench import Stats, records
from moe_numba.course.steps import ladder
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import Judgement

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580",
    "versions": {},
    "commit": "1a2b3c4d",
    "date": "2026-11-23T10:00:00Z",
}


class Step:
    """A call that is reported to take ``us`` microseconds, and ``interleaved_us`` if it is timed beside another."""

    def __init__(self, us, interleaved_us=None):
        self.us, self.interleaved_us = us, interleaved_us or us

    def __call__(self):
        return torch.ones(1)


@pytest.fixture
def measured(monkeypatch):
    stats = lambda us: Stats(us, us, us)
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ladder, "kernel_time", lambda call: stats(call.us))
    monkeypatch.setattr(ladder, "call_time", lambda call: stats(call.us))
    monkeypatch.setattr(
        ladder, "kernel_times", lambda named: {name: stats(call.interleaved_us) for name, call in named.items()}
    )
    monkeypatch.setattr(records, "environment", lambda: dict(ENVIRONMENT))


def accept(outputs):
    return None


def test_a_step_is_compared_with_the_one_that_it_changes(measured, tmp_path, capsys, monkeypatch):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "source.py").write_text("x = 1\n")
    steps = Ladder("trial", accept, root=tmp_path)
    steps.step("pointers", Step(50, interleaved_us=48))
    steps.step("wide loads", Step(37, interleaved_us=36), after="pointers", predicted_gain_us=16)
    line = "48.0 -> 36.0 us; predicted 32 us (-33 %), measured 36 us (-25 %): within a third"
    assert capsys.readouterr().out.splitlines()[1:] == [f"{'wide loads':<24}{line}"], "only the interleaved times"
    steps.save()
    (row,) = [
        row for row in json.loads((tmp_path / "docs/results/h200/trial.json").read_text())["rows"] if "after" in row
    ]
    assert (row["after"], row["compared_us"], row["predicted_gain_us"]) == ("pointers", [48, 36], 16)

    capsys.readouterr()
    monkeypatch.setattr(simulator, "ENABLED", True)
    steps = Ladder("trial", accept, root=tmp_path)
    steps.step("pointers", Step(0))
    steps.step("wide loads", Step(0), after="pointers", predicted_gain_us=16)
    assert capsys.readouterr().out.splitlines()[-1].strip() == f"recorded: {line}"


def test_what_a_step_is_compared_with_must_exist(measured):
    steps = Ladder("trial", accept)
    with pytest.raises(ValueError, match="belong together"):
        steps.step("wide loads", Step(1), after="pointers")
    with pytest.raises(ValueError, match="after is 'pointers'; the steps so far are \\[\\]"):
        steps.step("wide loads", Step(1), after="pointers", predicted_gain_us=1)


@pytest.mark.parametrize(
    "before, after, predicted, verdict",
    [
        (48.2, 35.5, 16, "within a third"),  # missed by a quarter
        (48.2, 35.5, 12, "within a third"),
        (48.2, 35.5, 20, "overestimated"),
        (48.2, 35.5, 5, "underestimated"),
        (20.0, 21.6, 0.4, "wrong sign"),
        (20.0, 18.4, -0.5, "wrong sign"),
        (20.0, 19.9, 4, "not there"),
        (20.0, 19.9, 0, "within the noise"),
        (20.0, 20.0, 0, "within the noise"),
        (20.0, 19.8, 0.2, "within the noise"),
        (20.0, 20.3, 0.3, "within the noise"),
        (20.0, 19.2, 0.5, "within the noise"),  # missed by over a third, but by less than the noise
        (20.0, 20.8, 0.1, "wrong sign"),
        (20.0, 21.0, 0, "underestimated"),  # a loss that was not predicted
        (20.0, 24.0, -4, "within a third"),  # a loss as predicted
        (20.0, 24.0, -9, "overestimated"),
        (195.0, 47.1, 175.4, "overestimated"),  # within a third of the saving, but 2.4 times what was to remain
        (100.0, 40.0, 65.0, "within a third"),
    ],
)
def test_verdicts(before, after, predicted, verdict):
    judgement = Judgement(before, after, predicted)
    assert judgement.verdict == verdict
    assert judgement.missed == (not verdict.startswith("within"))


def test_a_close_total_does_not_excuse_a_wrong_change():
    """The total was predicted to 10 %, the change not at all."""
    assert Judgement(20.0, 20.8, 1.0).verdict == "wrong sign"


def test_the_text_names_both_times_and_changes():
    assert str(Judgement(48.2, 35.5, 16)) == "predicted 32.2 us (-33 %), measured 35.5 us (-26 %): within a third"
    assert str(Judgement(20.0, 20.0, 0.0)) == "predicted 20 us (+0 %), measured 20 us (+0 %): within the noise"
    assert str(Judgement(20.0, 21.6, 0.4)) == "predicted 19.6 us (-2 %), measured 21.6 us (+8 %): wrong sign"


def test_times_must_be_positive():
    with pytest.raises(ValueError, match="times must be above zero, not 0 and 3 us"):
        Judgement(0, 3, 1)
