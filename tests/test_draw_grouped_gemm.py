"""The pictures of the grouped GEMM: nothing is cut off, no words lie on words, and what is drawn is what is true."""

import pytest
from test_draw import labelled, problems
from test_draw_align import spills
from test_hpc_ops import schedule

from moe_numba.course.draw import grouped_gemm as draw


def schedules(tiles, across, blocks):
    found = {name: schedule(name, tiles, across, blocks) for name in ("horizontal", "vertical")}
    return draw.schedules(found, len(tiles))


FIGURES = {
    "problem": lambda: draw.problem([5, 0, 9, 3]),
    "problem of two": lambda: draw.problem([1, 1]),
    "problem of six": lambda: draw.problem([4, 8, 1, 2, 6, 5]),
    "tiles of 4": lambda: draw.tile_starts([5, 3, 9, 2], 4),
    "tiles of 16": lambda: draw.tile_starts([1, 1, 17], 16),
    "swapped": lambda: draw.swapped([1, 8, 16, 32, 48, 64, 100, 128]),
    "swapped, one": lambda: draw.swapped([3]),
    "schedules": lambda: schedules([2, 1, 3], 4, 5),
    "schedules of eight": lambda: schedules([1, 0, 2, 1, 1, 3], 3, 8),
    "schedules of one": lambda: schedules([1], 1, 1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_covered(name):
    figure = FIGURES[name]()
    assert problems(figure) == [] == spills(figure)


def test_the_boxes_are_the_rows_and_tiles():
    assert len(labelled(FIGURES["problem"](), "row")) == 2 * 17 and len(labelled(FIGURES["problem"](), "weight")) == 4
    figure = FIGURES["tiles of 4"]()
    assert len(labelled(figure, "mixed")) == 2  # rows 4 to 7, and 16 to 18
    assert len(labelled(figure, "tile")) == 3 + 7 + 7
    assert len(labelled(figure, "row")) == 19 + 28 + 19


def test_every_tile_is_drawn_and_so_is_who_idles():
    figure = FIGURES["schedules"]()
    assert len(labelled(figure, "tile")) == 2 * 24 and len(labelled(figure, "idle")) == 2


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: draw.problem([1]), "the number of groups is 1"),
        (lambda: draw.tile_starts([100], 4), "rows is 100"),
        (lambda: draw.schedules({"one": [[]] * 9}, 1), "blocks is 9"),
    ],
)
def test_what_has_no_room_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
