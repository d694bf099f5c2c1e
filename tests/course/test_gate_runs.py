"""Inputs, checks and phases of the gate notebook: `moe_numba.course.lessons.gate.runs`."""

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.lessons.gate.runs import GateRuns, Routing, phases, resident_ctas
from moe_numba.course.steps.ladder import Ladder
from moe_numba.gate.reference import biased_grouped_topk

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="runs in the simulator")
SHAPE = 32, 8, 4, 4


@pytest.fixture
def runs():
    return GateRuns(6, *SHAPE)


def route(runs, logits, topk=4):
    return biased_grouped_topk(logits, runs.bias, topk, **runs.groups)


def write(runs, change=lambda weights, ids: None):
    def run(logits, weights, ids):
        for to, result in zip((weights, ids), route(runs, logits)):
            to.copy_(result)
        change(weights, ids)

    return run


def test_a_right_routing_is_accepted(runs):
    call, timed = runs.calls(write(runs))
    assert runs.check(call()) is None and len(timed) == 1 and timed[0]() is None
    assert runs.check(runs.calls(write(runs), tokens=3)[0]()) is None


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights, ids: ids[2, 1].copy_(ids[2, 1] ^ 1), "token 2"),
        (lambda weights, ids: weights[5].mul_(1.1), "token 5"),
        (lambda weights, ids: weights[3].fill_(float("nan")), "token 3 has a weight that is not finite"),
    ],
)
def test_a_wrong_routing_is_rejected(runs, change, message):
    assert message in runs.check(runs.calls(write(runs, change))[0]())


def test_outputs_that_are_not_written_are_rejected(runs):
    assert "not finite" in runs.check(runs.calls(lambda *_: None)[0]())


def test_order_is_only_checked_where_it_is_defined(runs):
    backwards = lambda logits, *_: tuple(output.flip(1) for output in route(runs, logits))
    assert runs.check(runs.calls(backwards, any_order=True)[0]()) is None
    assert "order" in runs.check(runs.calls(backwards)[0]())
    other = lambda logits, *_: (route(runs, logits)[0], route(runs, logits)[1].roll(1, 0))
    assert runs.check(runs.calls(other, any_order=True)[0]()) is not None


def test_logits_may_be_bfloat16():
    runs = GateRuns(3, *SHAPE, dtype=torch.bfloat16)
    assert runs.logits.dtype == torch.bfloat16
    assert runs.check(Routing(*route(runs, runs.logits), runs.logits)) is None


def test_phases_are_differences_of_variants(runs, monkeypatch):
    asked, ladder = [], Ladder("gate_trial", runs.check)
    times = {"all": 40.0, "no group phase": 33.0, "one pick": 26.0}
    monkeypatch.setattr(Ladder, "times", lambda self, name, calls: (asked.append((name, list(calls))), times)[1])
    run_of = lambda kept, topk: asked.append((kept, topk)) or write(runs)
    found = phases(ladder, runs, "x", run_of)
    assert asked == [(4, 4), (8, 4), (4, 1), ("phases of x", list(times))]
    assert found["choose groups"] == 7 and found["choose experts"] == pytest.approx(14 * 4 / 3)
    assert sum(found.values()) == pytest.approx(40)


@pytest.mark.parametrize("registers, ctas", [(32, 10), (51, 6), (62, 5), (80, 4), (83, 3), (101, 2), (255, 1)])
def test_ctas_per_sm_follow_from_registers(registers, ctas):
    assert resident_ctas(registers, 6) == ctas


def test_without_times_there_are_no_phases(runs):
    assert phases(Ladder("gate_trial", runs.check), runs, "x", lambda kept, topk: write(runs)) is None
