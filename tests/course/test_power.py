"""The table of clock and power: without a GPU it shows what a record has."""

import pytest

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.steps import power
from moe_numba.course.steps.lesson import Lesson, Run

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="a GPU measures what these tests look up")
ENERGY = dict(launch_us=180.0, launch_mj=120.0, sm_mhz=1400.0, watts=690.0, limit_watts=700.0)


@pytest.fixture
def lesson(monkeypatch):
    """A lesson whose record has the power of one kernel."""
    rows = [{"step": "power: gemm", "size": {"n": 1}, "config": {}, "kernel_us": {"median": 150.0}, "energy": ENERGY}]
    others = records.recorded
    monkeypatch.setattr(records, "recorded", lambda topic, *gpu: {"rows": rows} if topic == "sums" else others(topic))
    return Lesson("sums", Run(lambda v: None, lambda v: None, lambda v: []), "", config={}, size={"n": 1}, dtype="fp8")


def test_energy_is_measured_on_a_gpu_only():
    assert power.energy_of(lambda: None) is None


def test_recorded_power_is_shown_with_the_share_of_the_peak_at_that_clock(lesson, monkeypatch):
    monkeypatch.setattr(lesson, "times", lambda name, calls: {"gemm": 150.0})
    flops = 8192 * 132 * 1400e6 * 90e-6  # what the tensor cores of an H200 do in 90 us at that clock
    (line,) = power.power_table(lesson, {"gemm": lambda: None}, flops).lines
    assert line == ["gemm", "150", "180", "1400", "690 of 700", "120", "50%"]
    assert len(power.power_table(lesson, {"gemm": lambda: None}).lines[0]) == 6


def test_what_is_not_timed_has_no_power(lesson):
    (line,) = power.power_table(lesson, {"another": lambda: None}, 1.0).lines
    assert line == ["another", "not timed", "", "", "", "", ""]
