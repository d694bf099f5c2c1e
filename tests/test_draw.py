"""The teaching pictures: nothing is cut off, no words lie on words, and what is drawn is what is true."""

import io
import itertools

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import FancyArrowPatch

from moe_numba.course.draw import gate as draw
from moe_numba.course.draw.canvas import canvas, text
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


FIGURES = {
    **{f"problem {seed}": lambda seed=seed: draw.problem(*token(seed=seed), 8, 4, 8) for seed in range(4)},
    "problem 128/4": lambda: draw.problem(*token(128), 4, 2, 6),
    **{f"{name}": lambda name=name: draw.who_holds_what(name) for name in draw.LAYOUTS},
    "who 256/16": lambda: draw.who_holds_what("a thread for a group", 256, 16),
    "butterfly 8": lambda: draw.butterfly(VALUES, "lowest"),
    "butterfly 4": lambda: draw.butterfly(VALUES[:4], "highest"),
    "thread model 256/8": lambda: draw.thread_model(256, 8),
    "thread model 256/16": lambda: draw.thread_model(256, 16),
    "thread model 128/4": lambda: draw.thread_model(128, 4),
    "rank": lambda: draw.rank_by_counting(VALUES, 4),
    "flow chart": draw.flow_chart,
    "network": lambda: draw.sorting_network(VALUES, NETWORK),
    "picks": lambda: draw.pick_loop([VALUES[i : i + 4] for i in range(4)], 3),
    "picks of 2": lambda: draw.pick_loop([[0.9, 0.5], [0.8, 0.7]], 2),
}


def words_of(figure):
    return [t for t in figure.axes[0].texts if t.get_text()]


def said(figure):
    return [t.get_text() for t in words_of(figure)]


def labelled(figure, label):
    artists = figure.axes[0].patches + figure.axes[0].lines
    return [artist for artist in artists if artist.get_label() == label]


def problems(figure):
    """Words or shapes beyond the edge, and words on words."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, page = canvas.get_renderer(), figure.bbox
    found, boxes = [], []
    for t in words_of(figure):
        extent = t.get_window_extent(renderer)
        boxes.append((t.get_text(), extent))
    shapes = [(str(patch), patch.get_window_extent(renderer)) for patch in figure.axes[0].patches]
    for name, extent in boxes + shapes:
        if extent.x0 < 0 or extent.y0 < 0 or extent.x1 > page.x1 or extent.y1 > page.y1:
            found.append(f"{name!r} is cut off")
    for (a, one), (b, other) in itertools.combinations(boxes, 2):
        if min(one.x1, other.x1) - max(one.x0, other.x0) > 1 and min(one.y1, other.y1) - max(one.y0, other.y0) > 1:
            found.append(f"{a!r} lies on {b!r}")
    return found


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_nothing_is_cut_off_or_covered(make):
    assert problems(make()) == []


def test_cut_off_and_covered_words_are_found():
    figure, axes = canvas(4, 2, "A title")
    text(axes, 3.9, 1, "too far right")
    text(axes, 1, 1, "one"), text(axes, 1.1, 1.02, "two")
    assert problems(figure) == ["'too far right' is cut off", "'one' lies on 'two'"]


def test_a_picture_shows_itself_in_a_notebook():
    assert draw.flow_chart()._repr_png_().startswith(b"\x89PNG")
    data = io.BytesIO()
    draw.flow_chart().savefig(data, format="svg")
    assert b"<svg" in data.getvalue()


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
        ("a warp for a token", 32, "A warp works on one token. A lane holds 8 experts. A group is 4 lanes."),
    ],
)
def test_every_layout_uses_each_lane_once(layout, boxes, sentence):
    figure = draw.who_holds_what(layout)
    assert len(labelled(figure, "held")) == boxes
    assert sentence in said(figure)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'a block for a token'.*a warp for a token"):
        draw.who_holds_what("a block for a token")


def test_a_butterfly_combines_what_it_shows():
    figure = draw.butterfly(VALUES, "lowest")
    arrows = [patch for patch in labelled(figure, "shuffle") if isinstance(patch, FancyArrowPatch)]
    assert len(arrows) == 3 * 8
    numbers = [word for word in said(figure) if word.startswith("0.")]
    assert numbers[:8] == [f"{value:.2f}" for value in VALUES]
    assert numbers[8:16] == ["0.62", "0.62", "0.35", "0.35", "0.58", "0.58", "0.49", "0.49"]
    assert numbers[24:] == ["0.35"] * 8


def test_the_thread_model_is_the_articles():
    words = said(draw.thread_model(256, 8))
    assert "a block: 6 x 4 = 24 tokens" in words and "warp 5: threads 160 to 191" in words
    assert "token 3: lanes 24 to 31" in words
    assert len(labelled(draw.thread_model(256, 8), "lane")) == 32


def test_ranks_are_counted_and_ties_keep_the_lower_group():
    figure = draw.rank_by_counting([0.5, 0.9, 0.9, 0.1], 2)
    assert len(labelled(figure, "better")) == 0 + 1 + 2 + 3
    words = said(figure)
    assert [words[words.index(f"group {i}: {value:.3f}") :].index("kept") for i, value in ((1, 0.9), (2, 0.9))]
    assert words.count("kept") == 2 and words.count("out") == 2


def test_the_flow_chart_has_every_phase_and_two_loops():
    figure = draw.flow_chart()
    assert len(labelled(figure, "step")) == sum(map(len, draw.FLOW.values())) == 16
    assert said(figure).count("yes") == said(figure).count("no") == 2


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
