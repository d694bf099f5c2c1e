"""The pictures of expert parallelism: nothing is cut off, no words lie on words, and what is drawn is what is true."""

import pytest
import torch
from test_draw import labelled, problems, said
from test_draw_align import spills, values_of

from moe_numba.course.draw import dispatch_layout as draw
from moe_numba.expert_parallel import reference


def routing(tokens=4, topk=2, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :topk].contiguous()


def two(seed=0, **shape):
    return [routing(seed=2 * seed + rank, **shape) for rank in range(2)]


FIGURES = {
    **{f"problem {seed}": lambda seed=seed: draw.problem(two(seed), 4) for seed in range(3)},
    "problem of 8 experts": lambda: draw.problem(two(tokens=6, topk=3, experts=8), 8),
    "problem of one token": lambda: draw.problem(two(tokens=1, topk=1, experts=2), 2),
    "problem of 3 ranks": lambda: draw.problem([routing(5, 3, 6, seed) for seed in range(3)], 6),
    "problem with -1": lambda: draw.problem([torch.tensor([[0, -1], [-1, -1]]), torch.tensor([[3, 1], [2, 3]])], 4),
    "private counters": lambda: draw.private_counters(routing(8, 2, 8), 8, 4, 4),
    "private counters, block 1": lambda: draw.private_counters(routing(12, 4, 16), 16, 8, 6, 1),
    "private counters, the last block": lambda: draw.private_counters(routing(5, 1, 6), 6, 4, 2, 1),
    "banks": draw.banks,
    "banks of 4": lambda: draw.banks(4, (4, 5), 1),
    "banks, one width": lambda: draw.banks(8, (4,)),
    "buffer": lambda: draw.buffer_map(2 * 10**9),
    "small buffer": lambda: draw.buffer_map(1 << 20),
}


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_nothing_is_cut_off_or_covered(make):
    figure = make()
    assert problems(figure) == []
    assert spills(figure) == []
    assert figure.get_size_inches()[0] == draw.WIDTH and figure.get_size_inches()[1] <= 8.2


@pytest.mark.parametrize("seed", range(3))
def test_the_problem_shows_what_the_reference_says(seed):
    tokens = two(seed)
    figure = draw.problem(tokens, 4)
    layouts = [reference.dispatch_layout(ids, 2, 4) for ids in tokens]
    for label, at in (("per rank", 0), ("per expert", 1), ("flag", 2)):
        wanted = [str(int(n)) for layout in layouts for n in layout[at].flatten()]
        assert values_of(figure, label) == wanted, label
    assert values_of(figure, "choice") == [str(n) for ids in tokens for n in ids.flatten().tolist()]
    assert len(labelled(figure, "sent")) == sum(int((layout[0] > 0).sum()) for layout in layouts)
    for rank in range(2):
        assert f"receives {sum(int(layout[0][rank]) for layout in layouts)}" in said(figure)
    assert "experts 0 to 1" in said(figure) and "experts 2 to 3" in said(figure)


def test_nothing_is_sent_where_nothing_goes():
    figure = FIGURES["problem with -1"]()
    assert len(labelled(figure, "sent")) == 3 and "receives 2" in said(figure)


@pytest.mark.parametrize(
    "tokens, topk, experts, of_block, threads, block", [(8, 2, 8, 4, 4, 0), (12, 4, 16, 8, 6, 1), (5, 1, 6, 4, 2, 1)]
)
def test_private_counters_add_up(tokens, topk, experts, of_block, threads, block):
    ids = routing(tokens, topk, experts)
    figure = draw.private_counters(ids, experts, of_block, threads, block)
    mine = slice(block * of_block, min((block + 1) * of_block, experts))
    right = reference.dispatch_layout(ids, 1, experts)[1][mine].tolist()
    assert values_of(figure, "sum") == [str(n) for n in right]
    counters = torch.tensor([int(n) for n in values_of(figure, "counter")]).view(threads, -1)
    assert counters.sum(dim=0).tolist() == right
    assert counters.sum(dim=1).tolist() == [
        int(((ids[t::threads] >= mine.start) & (ids[t::threads] < mine.stop)).sum()) for t in range(threads)
    ]


def test_turns_of_the_banks():
    assert draw.turns(range(32)) == 1 and draw.turns([5] * 32) == 1, "the same word goes to all lanes in one turn"
    assert draw.turns(range(0, 32 * 32, 32)) == 32 and draw.turns(range(0, 33 * 32, 33)) == 1
    assert draw.turns(range(0, 64, 2)) == 2 and draw.turns([0, 8, 16, 1], banks=8) == 3


def test_the_banks_are_named():
    figure = draw.banks()
    assert values_of(figure, "marked") == ["2"] * 8 + ["2", "3", "4", "5", "6", "7", "0", "1"]
    assert {"all threads at column 2: 8 turns", "all threads at column 2: 1 turn"} <= set(said(figure))


def test_the_buffers_parts_follow_each_other():
    parts = draw.buffer_parts(1 << 20)
    assert list(parts.values()) == [(0, 1 << 20), (1 << 20, 32), ((1 << 20) + 32, 64), ((1 << 20) + 96, 64)]
    figure = draw.buffer_map(1 << 20)
    widths = [box.get_width() for box in labelled(figure, "part")]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 2, 2])
    (whole,) = labelled(figure, "data")
    assert whole.get_width() / sum(widths) == pytest.approx((1 << 20) / ((1 << 20) + 160))
    assert len(labelled(figure, "entry")) == 3 * 8


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: draw.problem([routing()], 4), "number of ranks is 1"),
        (lambda: draw.problem(two(tokens=7), 4), "tokens is 7"),
        (lambda: draw.private_counters(routing(), 4, 4, 7), "threads is 7"),
        (lambda: draw.banks(16), "num_banks is 16"),
        (lambda: draw.banks(8, (10,)), "a width is 10"),
        (lambda: draw.buffer_map(1 << 31), "num_nvl_bytes is"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
