"""Figures of the notebooks with fixed examples: all text is inside the canvas, and the drawn values are right."""

from xml.etree import ElementTree

import pytest
import torch
from helpers.figures import cut_off, labelled, texts, values_of

from moe_numba.course.draw.canvas import check_range, text
from moe_numba.course.draw.launch_timeline import is_search, launch_timeline
from moe_numba.course.lessons.align import draw as align
from moe_numba.course.lessons.align_one_launch import draw as align_one_launch
from moe_numba.course.lessons.dispatch import draw as dispatch
from moe_numba.course.lessons.hopper import draw as hopper
from moe_numba.course.lessons.low_latency import draw as low_latency
from moe_numba.course.lessons.moe_layer import draw as moe_layer
from moe_numba.course.lessons.shared_experts import draw as shared_experts
from moe_numba.course.lessons.shared_experts.layer_figure import layer_bars

COUNTS = [3, 1, 7, 0, 4, 1, 6, 3]
LOAD = {"separate": [4] * 256, "8 replicas": [4] * 256 + [99, 70, 80, 64, 65, 66, 67, 68]}
TIMES = {size: {"separate": 100.0, "one": 80.0, "eight": 131.0} for size in (1, 64, 1024)}
LARGEST = "most rows: expert 0", "most rows: expert 256", "99 rows, 2 tiles", "total: 256 tiles"
MAKESPANS = "whole columns per SM: 9 units of time", "single tiles per SM: 4 units of time"
KERNELS = [("sigmoid", 0.0, 8.0), ("gatherTopK", 10.0, 250.0), ("bitonicSort", 260.0, 122.0)]
EXPERT = [f"expert {e}" for e in range(4)]
WORDS = [
    *EXPERT,
    EXPERT[0],
    "launch number",
    EXPERT[1],
    "launch number",
    *EXPERT[:2],
    "launch number",
    *EXPERT[2:],
    "launch number",
]

PACKED = {
    "slot": ["0:0", "0:1", "1:0", "1:1"],
    "row": ["0:1", "1:0", "1:1", "0:1"],
}  # rows of expert 0, then of expert 1
IDS = torch.tensor([[1, 0], [1, 2]])
LAYER = {"assignment": [1, 0, 1, 2], "row": [0, 0, 1, 1], "to row": 4, "to sum": 4}
SORT = {"count": [1, 2, 1], "lower": [0, 0, 0], "total": [1, 2, 1], "start": [0, 1, 3]}

FIGURES = {  # name: function, arguments, {label: number of shapes, or the values inside them}, texts
    "launch timeline": (launch_timeline, ({"a": KERNELS, "b": KERNELS[:1]}, "x"), {"kernel": 4}, "3 kernels, 380 µs"),
    "Blelloch's scan": (align.blelloch, (COUNTS,), {"copy": 7, "add": 2 * 14}, "start"),
    "aggregated atomics": (align.aggregation, ([2, 0, 2, 3, 0, 2, 1, 2],), {"lane": 16, "add": 8 + 4}, "+4"),
    "two-level scan": (align.two_level_scan, (), {"barrier": 2, "sum": 4, "before": 4}, "barrier"),
    "two launches": (align_one_launch.two_launches, (), {"count": 5, "sort kernel": 4, "idle": 2}, "SM 0", "exchange"),
    "writers": (
        align_one_launch.element_writers,
        (torch.arange(8).view(4, 2), 4, 8, 3),
        {"assignment": range(8), "padding": 24},
        "expert block 7: expert 7",
    ),
    "words of counts": (align_one_launch.count_words, (), {"word": 4, "part": WORDS}, "2 counts", "byte 12"),
    "who waits": (align_one_launch.who_waits, (), {"arrival": 2, "add": 3, "poll": 6}, "the last word arrives"),
    "ranks of warps": (
        align_one_launch.warp_ranks,
        ([[2, 0, 2, 1], [1, 2, 0, 2]],),
        {"assignment": 8, "bit": 24},
        "warp 1",
    ),
    "roles of warps": (dispatch.roles, (), {"cta": 4, "team": 4, "warp": 6, "signaller": 2}, "warp 14", "sending CTA"),
    "a token's slot": (dispatch.slots, (), {"row": 2, "number": 2}, "packed", "one bulk copy, one slot"),
    "packed rows": (low_latency.packed_rows, ([[[0, 1], [2, 3]], [[1, 2], [2, 0]]], 1, 2), PACKED, "no row", "0, 1"),
    "experts of a layer": (moe_layer.layer, (IDS, 3), LAYER, "weighted_sum", "token 1"),
    "counting sort": (moe_layer.counting_sort, (IDS, 3, 1), SORT, "counts of each warp", "seqlens"),
    "Hopper": (hopper.problem, (), {"direct": 1}, "TMA"),
    "swizzle": (hopper.swizzle, (), {"before": [*range(8)] * 8}, "chunk 0 of 8 rows: 4 of 32 banks, 8 wavefronts"),
    "accumulator fragment": (hopper.fragment, (7,), {"held": 8}, "4 warps"),
    "load": (shared_experts.load, (LOAD, 256, 64), {"shared": 8, "routed": 2 * 256}, *LARGEST),
    "column schedules": (shared_experts.schedules, ([1, 2, 1, 1, 2, 1, 8], 4, {6}), {"tile": 2 * 16}, *MAKESPANS),
    "layer bars": (layer_bars, (TIMES, "separate"), {"part": ["-20.0", "+31.0"] * 3}, "100 us"),
}


def check_values(figure, shapes, *words):
    for label, expected in shapes.items():
        drawn = len(labelled(figure, label)) if isinstance(expected, int) else values_of(figure, label)
        assert drawn == (expected if isinstance(expected, int) else [str(value) for value in expected]), label
    assert set(words) <= set(texts(figure))


@pytest.mark.parametrize("draw, arguments, expected", [(d, a, e) for d, a, *e in FIGURES.values()], ids=FIGURES)
def test_figure_shows_its_values_inside_the_canvas(draw, arguments, expected):
    figure = draw(*arguments)
    check_values(figure, *expected)
    assert cut_off(figure) == []


@pytest.mark.parametrize("draw, arguments, expected", [(d, a, e) for d, a, *e in FIGURES.values()], ids=FIGURES)
def test_missing_shapes_and_other_texts_are_rejected(draw, arguments, expected):
    without_shape, with_other_texts = draw(*arguments), draw(*arguments)
    labelled(without_shape, next(iter(expected[0])))[-1].remove()
    for drawn in with_other_texts.axes[0].texts:
        drawn.set_text("?")
    for wrong in (without_shape, with_other_texts):
        with pytest.raises(AssertionError):
            check_values(wrong, *expected)


def test_text_outside_the_canvas_is_found():
    figure = align_one_launch.two_launches()
    text(figure.axes[0], 9.1, 1, "beyond the right edge")
    text(figure.axes[0], 1, 0, "below the lower edge")
    assert cut_off(figure) == ["beyond the right edge", "below the lower edge"]


@pytest.mark.parametrize(
    "label, values, draw, arguments",
    [
        ("kernel", [8, 250, 122, 8], launch_timeline, ({"a": KERNELS, "b": KERNELS[:1]}, "x")),
        ("shared", LOAD["8 replicas"][256:], shared_experts.load, (LOAD, 256, 64)),
        ("part", [80, 131] * 3, layer_bars, (TIMES, "separate")),
    ],
)
def test_bars_are_to_scale(label, values, draw, arguments):
    sizes = [box.get_width() * box.get_height() for box in labelled(draw(*arguments), label)]
    assert sizes == pytest.approx([sizes[0] * value / values[0] for value in values])


def test_notebooks_show_figures_for_light_and_dark():
    svg = align_one_launch.two_launches()._repr_svg_()
    assert svg.startswith('<svg class="picture"') and "prefers-color-scheme: dark" in svg
    assert any(each.tag.endswith("}text") for each in ElementTree.fromstring(svg).iter())


@pytest.mark.parametrize("value", [1, 9])
def test_values_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=f"warps is {value}; this figure can show 2 to 8"):
        check_range("warps", value, 2, 8)


def test_searches_are_told_apart_by_name():
    searches = ["gatherTopK", "bitonicSortKVInPlace", "radixFindKthValues", "DeviceRadixSortOnesweepKernel"]
    others = [
        "vectorized_elementwise_kernel",
        "vectorized_gather_kernel",
        "reduce_kernel",
        "triton_poi_fused_add_sigmoid_0",
    ]
    assert all(map(is_search, searches)) and not any(map(is_search, others))
