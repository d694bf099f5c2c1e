"""Consecutive calls and kernels over time."""

import pytest
from helpers.figures import misplaced
from matplotlib.text import Text

from moe_numba.course.lessons.start.draw import call_timeline, schedule


@pytest.mark.parametrize(
    "call_us, kernel_us, expected",
    [
        (9, 6, [(9, 15), (18, 24), (27, 33)]),  # the GPU waits for the CPU
        (4, 6, [(4, 10), (10, 16), (16, 22)]),  # the CPU runs ahead
        (None, 6, [(0, 6), (6, 12), (12, 18)]),  # a graph
    ],
)
def test_a_kernel_starts_after_its_call_and_the_previous_kernel(call_us, kernel_us, expected):
    assert schedule(call_us, kernel_us, 3) == expected


def test_the_figure_shows_the_time_per_call_in_a_long_run():
    figure = call_timeline({"few": (9, 6), "few, CUDA graph": (None, 6), "many": (9, 60)}, "caption", calls=4)
    shown = [text.get_text().strip() for text in figure.findobj(Text)]
    assert misplaced(figure) == []
    assert {f"{us} µs per call in a long run" for us in ("9.0", "6.0", "60.0")} | {"few:  CPU", "caption"} <= set(shown)
