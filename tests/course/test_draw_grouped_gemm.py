"""The pictures of the grouped GEMM: what is drawn agrees with the references."""

from helpers.figures import labelled
from helpers.schedules import schedule

from moe_numba.course.draw import grouped_gemm as draw


def schedules(tiles, across, blocks):
    found = {name: schedule(name, tiles, across, blocks) for name in ("horizontal", "vertical")}
    return draw.schedules(found, len(tiles))


def test_the_boxes_are_the_rows_and_tiles():
    assert (
        len(labelled(draw.problem([5, 0, 9, 3]), "row")) == 2 * 17
        and len(labelled(draw.problem([5, 0, 9, 3]), "weight")) == 4
    )
    figure = draw.tile_starts([5, 3, 9, 2], 4)
    assert len(labelled(figure, "mixed")) == 2  # rows 4 to 7, and 16 to 18
    assert len(labelled(figure, "tile")) == 3 + 7 + 7
    assert len(labelled(figure, "row")) == 19 + 28 + 19


def test_every_tile_is_drawn_and_so_is_who_idles():
    figure = schedules([2, 1, 3], 4, 5)
    assert len(labelled(figure, "tile")) == 2 * 24 and len(labelled(figure, "idle")) == 2
