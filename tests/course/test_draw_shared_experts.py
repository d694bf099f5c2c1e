"""The pictures of the shared expert: what is drawn agrees with the references."""

import pytest
import torch
from helpers.figures import labelled, said

from moe_numba.course.bench.layer_figure import layer_bars
from moe_numba.course.draw import shared_experts as draw
from moe_numba.gate.reference import biased_grouped_topk
from moe_numba.shared_experts import memory_cost, reference

GIBI = 1 << 30


def routing(tokens=300, experts=256, groups=8, topk=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(tokens, experts, generator=generator), torch.rand(experts, generator=generator) * 0.1
    return biased_grouped_topk(logits, bias, topk, num_expert_group=groups, topk_group=max(groups // 2, 1))


def loads(*replicas, experts=256, tokens=300, groups=8, topk=8):
    weights, ids = routing(tokens, experts, groups, topk)
    named = {"apart": torch.bincount(ids.flatten().long(), minlength=experts).tolist()} if 0 in replicas else {}
    for count in filter(None, replicas):
        fused = reference.fuse_routing(weights, ids, experts, count, 2.5, "random")[1]
        named[f"{count} replicas"] = torch.bincount(fused.flatten().long(), minlength=experts + count).tolist()
    return named


def problem(seed=0, **shape):
    weights, ids = routing(1, seed=seed, **shape)
    return draw.problem(weights[0], ids[0], shape.get("experts", 256), 2.5)


def times(sizes=(1, 64, 1024), variants=("apart", "one", "eight"), factors=(100.0, 80.0, 131.0)):
    return {size: dict(zip(variants, factors, strict=True)) for size in sizes}


EXTRA = {replicas: memory_cost(replicas, tensor_parallel_size=8).extra_bytes / GIBI for replicas in range(1, 9)}
MARKS = {
    "the article's 51 layers": memory_cost(num_hidden_layers=51).replicas_bytes / GIBI,
    "58 layers, one whole expert each": memory_cost().replicas_bytes / GIBI,
}
CAPTION = "recorded on NVIDIA H200, driver 580.159.04, numba-cuda 0.30.4, torch 2.11.0, commit a335406, 2026-11-21"


@pytest.mark.parametrize("seed", range(3))
def test_the_problem_shows_the_references_experts(seed):
    weights, ids = routing(1, seed=seed)
    figure = problem(seed)
    words = said(figure)
    assert len(labelled(figure, "chosen")) == 2 * 8 and len(labelled(figure, "expert")) == 2 * 248
    assert len(labelled(figure, "shared")) == 1 and len(labelled(figure, "separate")) == 1
    assert len(labelled(figure, "weight")) == 8 + 9 and len(labelled(figure, "add")) == 1
    for expert, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
        assert words.count(str(expert)) == 2 and words.count(f"{weight:.3f}") >= 2
    assert words.count("256") == 1 and "0.400" in words and words.count("× 2.5") == 2


def test_columns_are_whole_tiles():
    assert draw.tiles_per_expert([0, 1, 64, 65, 128], 64) == [0, 1, 1, 2, 2]


def test_the_load_names_the_fullest_expert():
    named = loads(1, 8, tokens=4096)
    figure = draw.load(named, 256, 128)
    words = said(figure)
    assert "4096 rows, 32 tiles" in words and "fullest: expert 256" in words
    counts = named["8 replicas"]
    fullest = counts.index(max(counts))
    assert fullest >= 256 and f"fullest: expert {fullest}" in words
    assert f"{max(counts)} rows, {-(-max(counts) // 128)} tiles" in words
    assert len(labelled(figure, "shared")) == 1 + 8 and len(labelled(figure, "routed")) == 2 * 256
    heights = [bar.get_height() for bar in labelled(figure, "shared")[1:]]
    assert heights == pytest.approx([1.25 * rows / 4096 for rows in counts[256:]])
    assert f"tiles of all: {sum(draw.tiles_per_expert(counts, 128))}" in words


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tiles, workers", [([1, 2, 1, 1, 2, 1, 8], 4), ([0, 5, 0, 1], 2), ([3], 3), ([1] * 7, 3)])
def test_every_tile_is_dealt_once(tiles, workers, whole):
    pieces = draw.list_schedule(tiles, workers, whole)
    for expert, column in enumerate(tiles):
        mine = [length for _, _, length, of in pieces if of == expert]
        assert sum(mine) == column and (not whole or len(mine) <= 1)
    for worker in range(workers):
        spans = sorted((start, start + length) for of, start, length, _ in pieces if of == worker)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    end = max(start + length for _, start, length, _ in pieces)
    assert end >= max(tiles) if whole else end == -(-sum(tiles) // workers)


def test_the_schedules_say_how_long_they_take():
    figure = draw.schedules([1, 2, 1, 1, 2, 1, 8], 4, shared={6})
    assert "an expert's column at once: 9 units of time" in said(figure)
    assert "tile by tile: 4 units of time" in said(figure)
    assert len(labelled(figure, "tile")) == 2 * 16


def test_the_memory_is_the_packages_count():
    figure = draw.memory(EXTRA, MARKS)
    assert {"0.00", "2.08", "1.97: the article's 51 layers"} <= set(said(figure))
    heights = [bar.get_height() for bar in labelled(figure, "extra")]
    assert heights[7] / heights[1] == pytest.approx(7)


def test_bars_are_parts_of_the_base():
    figure = layer_bars(times(), "apart", title="The layer", caption=CAPTION)
    heights = [bar.get_height() for bar in labelled(figure, "part")]
    (line,) = labelled(figure, "base")
    base = line.get_ydata()[0] - 0.95
    assert [height / base for height in heights] == pytest.approx([0.8, 1.31] * 3)
    assert said(figure).count("-20.0") == 3 and said(figure).count("+31.0") == 3 and "100 us" in said(figure)
