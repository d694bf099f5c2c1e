"""The pictures of expert parallelism: what is drawn agrees with the references."""

import pytest
import torch
from helpers.figures import labelled, said, values_of

from moe_numba.course.draw import dispatch_layout as draw
from moe_numba.expert_parallel import reference


def routing(tokens=4, topk=2, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :topk].contiguous()


def two(seed=0, **shape):
    return [routing(seed=2 * seed + rank, **shape) for rank in range(2)]


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
    figure = draw.problem([torch.tensor([[0, -1], [-1, -1]]), torch.tensor([[3, 1], [2, 3]])], 4)
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


def test_wavefronts_of_bank_conflicts():
    assert draw.wavefronts(range(32)) == 1 and draw.wavefronts([5] * 32) == 1, (
        "the same word goes to all lanes in one turn"
    )
    assert draw.wavefronts(range(0, 32 * 32, 32)) == 32 and draw.wavefronts(range(0, 33 * 32, 33)) == 1
    assert draw.wavefronts(range(0, 64, 2)) == 2 and draw.wavefronts([0, 8, 16, 1], banks=8) == 3


def test_the_banks_are_named():
    figure = draw.banks()
    assert values_of(figure, "marked") == ["2"] * 8 + ["2", "3", "4", "5", "6", "7", "0", "1"]
    assert {"all threads at column 2: 8 wavefronts", "all threads at column 2: 1 wavefront"} <= set(said(figure))


def test_the_buffers_parts_follow_each_other():
    parts = draw.buffer_parts(1 << 20)
    assert list(parts.values()) == [(0, 1 << 20), (1 << 20, 32), ((1 << 20) + 32, 64), ((1 << 20) + 96, 64)]
    figure = draw.buffer_map(1 << 20)
    widths = [box.get_width() for box in labelled(figure, "part")]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 2, 2])
    (whole,) = labelled(figure, "data")
    assert whole.get_width() / sum(widths) == pytest.approx((1 << 20) / ((1 << 20) + 160))
    assert len(labelled(figure, "entry")) == 3 * 8
