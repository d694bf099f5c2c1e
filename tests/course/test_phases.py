"""The figure of phases: `moe_numba.course.draw.phases`."""

import pytest
from helpers.figures import misplaced
from matplotlib.patches import Rectangle

from moe_numba.course.draw.phases import phase_bars

VERSIONS = {
    "0x1": {"serial scan": 15.6, "counting": 7.3, "fill": 1.2, "sort kernel": 10.1},
    "0x5": {"serial scan": 3.6, "counting": 3.9, "sort kernel": 10.1},
}


def test_bars_are_to_scale_and_phases_keep_their_colours():
    figure = phase_bars(VERSIONS, "Where the time goes", "recorded on an H200")
    axes = figure.axes[0]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_height() > 0.2]
    widths = [bar.get_width() for bar in bars]
    assert len(bars) == 7 and widths[0] / widths[3] == pytest.approx(15.6 / 10.1)
    assert bars[3].get_facecolor() == bars[6].get_facecolor() != bars[0].get_facecolor()
    words = [text.get_text() for text in axes.texts]
    assert {"0x1", "0x5", "34.2 µs", "17.6 µs", "sort kernel", "15.6"} <= set(words)
    assert not misplaced(figure)


def test_colours_follow_a_given_order():
    few = {"small": {"counting": 3.1, "column sums": 2.0, "sort kernel": 1.0}}
    figures = [phase_bars(v, "x", phases=["counting", "sort kernel"]).axes[0] for v in (few, {"large": few["small"]})]
    bars = [[p.get_facecolor() for p in axes.patches if p.get_height() > 0.2] for axes in figures]
    default = [p.get_facecolor() for p in phase_bars(few, "x").axes[0].patches if p.get_height() > 0.2]
    assert bars[0] == bars[1] and bars[0][0] == default[0] and bars[0][2] == default[1] and bars[0][1] == default[2]


@pytest.mark.parametrize(
    "versions, message",
    [
        ({}, "the number of versions is 0"),
        ({"a": {str(k): 1 for k in range(8)}}, "the number of phases is 8"),
        ({"a": {"scan": -1}}, "scan of a takes -1 us; a phase takes zero or more"),
        ({"a": {"scan": 0}}, "no phase takes any time"),
    ],
)
def test_wrong_times_are_refused(versions, message):
    with pytest.raises(ValueError, match=message):
        phase_bars(versions, "x")
