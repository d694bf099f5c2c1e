"""The pictures of combine: what is drawn agrees with the references."""

import pytest
import torch
from helpers.figures import labelled, said, values_of

from moe_numba.course.draw import combine as draw
from moe_numba.expert_parallel import reference

NONE = 1 << 25
BEFORE = [0, -1, -1, 1, 2, -1, 3, -1, -1]
AFTER = [0, -2, -2, 1, 2, -4, 3, -NONE - 1, -NONE - 1]
ROUND = [(f"rank {r} {what}", why) for r in (0, 2, 1) for what, why in (("sends", "no space"), ("receives", "no row"))]


def chosen(ranks, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(tokens, ranks, generator=generator) < 0.6 for _ in range(ranks)]


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
    figure = draw.head_gaps(BEFORE, AFTER, NONE)
    assert values_of(figure, "before") == [str(n) for n in BEFORE]
    assert values_of(figure, "after") == ["0", "-2", "-2", "1", "2", "-4", "3", "none", "none"]
    assert len(labelled(figure, "filled")) == 3


def test_a_stuck_ring_names_the_least():
    figure = draw.deadlocked_ring(3, 2, 0, 2, [([0], 3), ([1], 4), ([], 2)], 9)
    assert values_of(figure, "slot") == ["0", "1", "free"]
    assert "head 0, tail 2: 1 free" in said(figure)
    assert sum("this is the least" in words for words in said(figure)) == 1


def test_the_cycle_shows_every_wait():
    figure = draw.wait_cycle(ROUND)
    assert values_of(figure, "waiter") == [who for who, _ in ROUND] and len(labelled(figure, "waits")) == 6
