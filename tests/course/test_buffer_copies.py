"""What runs with copies of buffers conclude: `moe_numba.course.lessons.align_one_launch.buffer_copies`."""

import pytest

from moe_numba.course.lessons.align_one_launch.buffer_copies import conclude, of

FAST, SLOW = 13.4, 17.8
NO_DIFFERENCE = "the buffers make no difference"
NO_SINGLE = "no single buffer is the cause"


def times(first, copies, outputs, counters):
    """Seven copies and mixes; a number stands for all seven."""
    found = {"copy 0": first}
    for label, given in {"copy": copies, "outputs of copy": outputs, "counters of copy": counters}.items():
        found |= {f"{label} {n}": us for n, us in enumerate(given if isinstance(given, list) else [given] * 7, 1)}
    return found


@pytest.mark.parametrize(
    "first, copies, outputs, counters, expected",
    [
        # with other outputs it is as fast: the counters of copy 0 are enough
        (FAST, SLOW, FAST, SLOW, "the counters make the difference"),
        (FAST, SLOW, SLOW, FAST, "the outputs make the difference"),
        (SLOW, FAST, FAST, SLOW, "the outputs make the difference"),
        (FAST, SLOW, FAST, FAST, "so do its counters alone: no single buffer is the cause; the time is longer"),
        (SLOW, FAST, SLOW, SLOW, "so do its counters alone: no single buffer is the cause; the time is shorter"),
        (FAST, SLOW, SLOW, SLOW, NO_SINGLE),
        (FAST, SLOW, 15.5, SLOW, NO_SINGLE),
        (FAST, SLOW, [FAST] * 6 + [SLOW], SLOW, NO_SINGLE),
        (FAST, [SLOW] * 6 + [FAST], FAST, SLOW, "do not isolate a buffer"),
        (FAST, [SLOW] * 6 + [10.0], FAST, SLOW, "do not isolate a buffer"),
        (FAST, 13.9, 13.1, FAST, NO_DIFFERENCE),
        (FAST, FAST, SLOW, FAST, NO_SINGLE),
    ],
)
def test_the_buffer_that_keeps_the_time_is_the_cause(first, copies, outputs, counters, expected):
    sentence = conclude(times(first, copies, outputs, counters), ladder_us=first)
    assert expected in sentence
    others = {NO_DIFFERENCE, NO_SINGLE, "the outputs make", "the counters make", "do not isolate"}
    assert sum(text in sentence for text in others) == 1
    assert "In the ladder" not in sentence


def test_buffers_that_were_faster_in_the_ladder_do_not_explain_it():
    sentence = conclude(times(17.847, 17.775, 17.8, 17.75), ladder_us=13.439)
    assert NO_DIFFERENCE in sentence
    assert sentence.endswith("In the ladder the same buffers take 13.4 us, so they do not explain that time.")


def test_copy_0_is_not_among_the_other_copies():
    found = times(FAST, SLOW, 15.0, 16.0)
    assert (
        of(found, "copy") == [SLOW] * 7 and of(found, "outputs") == [15.0] * 7 and of(found, "counters") == [16.0] * 7
    )
