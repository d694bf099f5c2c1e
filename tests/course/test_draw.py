"""The teaching pictures: what is drawn agrees with the references."""

import io

import pytest
import torch
from helpers.figures import labelled, said, words_of
from matplotlib.patches import FancyArrowPatch

from moe_numba.course.draw import gate as draw
from moe_numba.course.draw.canvas import check_range
from moe_numba.gate.reference import biased_grouped_topk

NETWORK = [  # Batcher's for 8 values
    (0, 1),
    (2, 3),
    (4, 5),
    (6, 7),
    (0, 2),
    (1, 3),
    (4, 6),
    (5, 7),
    (1, 2),
    (5, 6),
    (0, 4),
    (1, 5),
    (2, 6),
    (3, 7),
    (2, 4),
    (3, 5),
    (1, 2),
    (3, 4),
    (5, 6),
]
VALUES = [0.62, 0.91, 0.35, 0.77, 0.58, 0.83, 0.49, 0.70]


def token(experts=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(experts, generator=generator), torch.rand(experts, generator=generator) * 0.2


def test_a_picture_shows_itself_in_a_notebook():
    assert draw.flow_chart()._repr_png_().startswith(b"\x89PNG")
    data = io.BytesIO()
    draw.flow_chart().savefig(data, format="svg")
    assert b"<svg" in data.getvalue()


@pytest.mark.parametrize("value", [1, 9])
def test_values_that_a_picture_cannot_show_are_refused(value):
    with pytest.raises(ValueError, match=f"warps is {value}; this picture can show 2 to 8"):
        check_range("warps", value, 2, 8)


@pytest.mark.parametrize(
    "make", [draw.flow_chart, lambda: draw.thread_model(256, 8), lambda: draw.thread_model(128, 4)]
)
def test_pictures_without_data_can_be_drawn(make):
    assert len(make().axes[0].patches) > 16


def test_the_problem_names_the_experts_that_the_reference_chooses():
    logits, bias = token()
    _, ids = biased_grouped_topk(logits[None], bias, 8, num_expert_group=8, topk_group=4)
    words = said(draw.problem(logits, bias, 8, 4, 8))
    assert sorted(int(word) for word in words if word.isdigit()) == sorted(ids[0].tolist())
    assert words.count("kept") == 4 and words.count("out") == 4


@pytest.mark.parametrize(
    "layout, boxes, sentence",
    [
        ("a thread for a token", 32, "A warp works on 32 tokens. A lane holds 256 experts."),
        ("a thread for a group", 32, "A warp works on 4 tokens. A lane holds one group, 32 experts."),
        ("a warp for a token", 32, "A warp works on 1 token. A lane holds 8 experts. A group is 4 lanes."),
    ],
)
def test_every_layout_uses_each_lane_once(layout, boxes, sentence):
    figure = draw.work_split(layout)
    assert len(labelled(figure, "held")) == boxes
    assert sentence in said(figure)


def test_a_butterfly_combines_what_it_shows():
    figure = draw.butterfly(VALUES, "lowest")
    arrows = [patch for patch in labelled(figure, "shuffle") if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 3 * 8
    numbers = [word for word in said(figure) if word.startswith("0.")]
    assert numbers[:8] == [f"{value:.2f}" for value in VALUES]
    assert numbers[8:16] == ["0.62", "0.62", "0.35", "0.35", "0.58", "0.58", "0.49", "0.49"]
    assert numbers[24:] == ["0.35"] * 8


def test_ranks_are_counted_and_ties_keep_the_lower_group():
    figure = draw.rank_by_counting([0.5, 0.9, 0.9, 0.1], 2)
    assert len(labelled(figure, "better")) == 0 + 1 + 2 + 3
    words = said(figure)
    assert [words[words.index(f"group {i}: {value:.3f}") :].index("kept") for i, value in ((1, 0.9), (2, 0.9))]
    assert words.count("kept") == 2 and words.count("out") == 2


def test_a_network_is_drawn_whole_and_sorts():
    figure = draw.sorting_network(VALUES, NETWORK)
    assert len(labelled(figure, "comparator")) == 19
    right = [t.get_text() for t in words_of(figure) if t.get_weight() == "bold" and t.get_text().startswith("0.")]
    assert right == [f"{value:.2f}" for value in sorted(VALUES, reverse=True)]


def test_a_tie_between_lanes_goes_to_the_lower_lane():
    words = said(draw.pick_loop([[0.5, 0.4], [0.9, 0.5], [0.9, 0.1]], 2))
    assert "ballot = 110" in words and "ffs: lane 1 wins, drops its first" in words
    assert "ballot = 100" in words and "ffs: lane 2 wins, drops its first" in words
    assert len(labelled(draw.pick_loop([[0.5, 0.4], [0.9, 0.5]], 2), "winner")) == 2
