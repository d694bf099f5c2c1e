"""The pictures of combine: nothing is cut off, no words lie on words, and what is drawn is what is true."""

import pytest
import torch
from test_draw import labelled, problems, said
from test_draw_align import spills, values_of

from moe_numba.course.draw import combine as draw
from moe_numba.expert_parallel import reference

NONE = 1 << 25
BEFORE = [0, -1, -1, 1, 2, -1, 3, -1, -1]
AFTER = [0, -2, -2, 1, 2, -4, 3, -NONE - 1, -NONE - 1]
ROUND = [(f"rank {r} {what}", why) for r in (0, 2, 1) for what, why in (("sends", "no space"), ("receives", "no row"))]


def chosen(ranks, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(tokens, ranks, generator=generator) < 0.6 for _ in range(ranks)]


FIGURES = {
    **{f"problem {seed}": lambda seed=seed: draw.problem(chosen(2, 4, seed)) for seed in range(3)},
    "problem of 3 ranks": lambda: draw.problem(chosen(3, 4), 1),
    "problem of 3 ranks, the last": lambda: draw.problem(chosen(3, 3, 1), 2),
    "sum": lambda: draw.sum_in_steps([1.0, 300.0, 0.01, -299.0]),
    "sum of 8": lambda: draw.sum_in_steps(torch.randn(8, generator=torch.Generator().manual_seed(0)).tolist()),
    "gaps": lambda: draw.gaps(BEFORE, AFTER, NONE),
    "no gaps": lambda: draw.gaps([0, 1], [0, 1], NONE),
    "many gaps": lambda: draw.gaps([-1] * 13 + [0], [-1] * 13 + [0], NONE),
    "stuck": lambda: draw.stuck(3, 2, 0, 2, [([0], 3), ([1], 4), ([], 2)], 9),
    "stuck later": lambda: draw.stuck(8, 4, 8, 12, [([5, 10], 15), ([6, 11], 16), ([7], 12), ([8], 13), ([9], 14)], 30),
    "circle": lambda: draw.circle(ROUND),
    "circle of three": lambda: draw.circle(ROUND[:3]),
    "circle of four": lambda: draw.circle(ROUND[:4]),
}


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_nothing_is_cut_off_or_covered(make):
    figure = make()
    assert problems(figure) == []
    assert spills(figure) == []
    assert figure.get_size_inches()[0] == draw.WIDTH and figure.get_size_inches()[1] <= 8.2


@pytest.mark.parametrize("ranks, home, seed", [(2, 0, 0), (3, 1, 0), (3, 2, 1)])
def test_the_problem_names_the_rows_of_each_token(ranks, home, seed):
    tokens = chosen(ranks, 4, seed)
    figure = draw.problem(tokens, home)
    received = reference.dispatch([t[:, :1] for t in tokens], tokens)
    wanted = []
    for token in range(4):
        for rank, there in enumerate(received):
            first = int(there.rank_prefix_matrix[home - 1, rank]) if home else 0
            rows = there.src_idx.tolist()[first : int(there.rank_prefix_matrix[home, rank])]
            wanted.append(str(first + rows.index(token)) if token in rows else "-")
    assert values_of(figure, "place") == wanted
    assert len(values_of(figure, "own row")) == int(tokens[home].sum())
    assert len(labelled(figure, "home")) == int((tokens[home].sum(dim=0) > 0).sum())


def test_a_sum_shows_both_ways():
    figure = draw.sum_in_steps([1.0, 256.0, 1.0, -256.0])  # 257 is no bfloat16
    assert values_of(figure, "narrow") == ["1", "256", "256", "0"]
    assert values_of(figure, "wide") == ["1", "257", "258", "2"]
    assert values_of(figure, "narrow result") == ["0"] and values_of(figure, "rounded once") == ["2"]
    assert any("Errors: 2 rounded at each step, 0 rounded once" in words for words in said(figure))


def test_the_gaps_show_what_follows():
    figure = draw.gaps(BEFORE, AFTER, NONE)
    assert values_of(figure, "before") == [str(n) for n in BEFORE]
    assert values_of(figure, "after") == ["0", "-2", "-2", "1", "2", "-4", "3", "none", "none"]
    assert len(labelled(figure, "filled")) == 3


def test_a_stuck_ring_names_the_least():
    figure = FIGURES["stuck"]()
    assert values_of(figure, "slot") == ["0", "1", "free"]
    assert "head 0, tail 2: 1 free" in said(figure)
    assert sum("this is the least" in words for words in said(figure)) == 1


def test_all_who_wait_stand_in_the_circle():
    figure = draw.circle(ROUND)
    assert values_of(figure, "who") == [who for who, _ in ROUND] and len(labelled(figure, "waits")) == 6


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: draw.problem(chosen(4, 2)), "number of ranks is 4"),
        (lambda: draw.problem(chosen(2, 6)), "tokens is 6"),
        (lambda: draw.sum_in_steps([1.0]), "number of values is 1"),
        (lambda: draw.gaps([0], [0], NONE), "number of tokens is 1"),
        (lambda: draw.stuck(11, 1, 0, 0, [([], 0)], 1), "ring is 11"),
        (lambda: draw.circle(ROUND[:1]), "number of those who wait is 1"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
