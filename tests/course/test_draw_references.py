"""Figures of computed results: the drawn values equal those of the references, the scans and the PTX layouts."""

import re

import numpy as np
import pytest
import torch
from helpers.figures import colours_of, labelled, texts, values_of

from moe_numba import simulator
from moe_numba.align import reference as alignment
from moe_numba.course.lessons.align import draw as align
from moe_numba.course.lessons.align import draw_scans as scans
from moe_numba.course.lessons.align_one_launch import draw as align_one_launch
from moe_numba.course.lessons.dispatch import draw as dispatch
from moe_numba.course.lessons.hopper import draw as hopper
from moe_numba.course.lessons.shared_experts import draw as shared_experts
from moe_numba.gate.reference import biased_grouped_topk

COUNTS = [3, 1, 7, 0, 4, 1, 6, 3]  # the article's
CHUNK = [2, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 0, 1, 2, 2, 1]


def routing(tokens=4, topk=2, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :topk].int().contiguous()


# Gate and shared experts


def token(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(256, generator=generator), torch.rand(256, generator=generator) * 0.2
    return (logits, bias), [t[0] for t in biased_grouped_topk(logits[None], bias, 8, num_expert_group=8, topk_group=4)]


def check_fusion(figure, _, routing):
    words, count = texts(figure), lambda label: len(labelled(figure, label))
    assert (count("chosen"), count("expert"), count("weight"), count("add")) == (2 * 8, 2 * 248, 8 + 9, 1)
    for weight, expert in zip(*(t.tolist() for t in routing)):
        assert words.count(str(expert)) == 2 and words.count(f"{weight:.3f}") >= 2
    assert words.count("256") == count("shared") == 1 and "0.400" in words and words.count("× 2.5") == 2


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tiles, workers", [([1, 2, 1, 1, 2, 1, 8], 4), ([0, 5, 0, 1], 2), ([3], 3), ([1] * 7, 3)])
def test_list_schedule_runs_every_tile_once(tiles, workers, whole):
    pieces = shared_experts.list_schedule(tiles, workers, whole)
    for expert, column in enumerate(tiles):
        lengths = [length for _, _, length, of in pieces if of == expert]
        assert sum(lengths) == column and (not whole or len(lengths) <= 1)
    for worker in range(workers):
        spans = sorted((start, start + length) for of, start, length, _ in pieces if of == worker)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    end = max(start + length for _, start, length, _ in pieces)
    assert end >= max(tiles) if whole else end == -(-sum(tiles) // workers)


# Alignment


def check_scan(figure, warps, lanes, seed):
    values = np.random.default_rng(seed).integers(1, 10, warps * lanes)
    assert values_of(figure, "result") == [str(value) for value in values.cumsum()]


def check_alignment(figure, ids, *sizes):
    right, expert_ids, (total,) = (t.tolist() for t in alignment.moe_align_block_size(ids, *sizes))
    slots, choices = [slot for slot in right if slot < 12], colours_of(figure, "choice")
    assert values_of(figure, "assignment") == [str(slot) for slot in slots]
    assert colours_of(figure, "assignment") == [choices[slot] for slot in slots]
    assert values_of(figure, "cell") == [str(expert) for expert in expert_ids]
    assert len(labelled(figure, "padding")) == total - 12 and len(labelled(figure, "tail")) == len(right) - total
    count = int((ids == 3).sum())
    words = f"{count} assignment{'s' * (count > 1)}, {-count % 4} padding"
    assert {words, f"num_tokens_post_pad = {total}: {total // 4} blocks above the line"} <= set(texts(figure))
    (line,) = labelled(figure, "end of use")
    assert min(box.get_y() for box in labelled(figure, "assignment")) == pytest.approx(line.get_ydata()[0])


@pytest.mark.parametrize("values", [[5, 6], [1, 2, 3, 4], COUNTS])
def test_blellochs_scan_equals_an_exclusive_cumsum(values):
    assert scans.blelloch_steps(values)[1][-1][1] == (np.cumsum(values) - values).tolist()


def test_scans_have_the_articles_intermediate_sums():
    up, down = scans.blelloch_steps(COUNTS)
    rows = lambda steps: [" ".join(map(str, numbers)) for _, numbers, *_ in steps]
    assert rows(up[1:]) == ["3 4 7 7 4 5 6 9", "3 4 7 11 4 5 6 14", "3 4 7 11 4 5 6 25"]
    assert rows(down[:3]) == ["3 4 7 11 4 5 6 0", "3 4 7 0 4 5 6 11", "3 0 7 4 4 11 6 16"]
    warp, sums = np.array(COUNTS), []
    for distance in (1, 2, 4):
        warp[distance:] += warp[:-distance].copy()
        sums.append(" ".join(map(str, warp)))
    assert sums == ["3 4 8 7 4 5 7 9", "3 4 11 11 12 12 11 14", "3 4 11 11 15 16 22 25"]


@pytest.mark.parametrize("ctas", [1, 2, 3, 4])
def test_every_element_has_one_writer(ctas):
    ids, chunk = routing(12, 2, 6, seed=ctas), -(-24 // ctas)
    elements, figure = align_one_launch.list_writers(ids, 4, 6, ctas), align_one_launch.element_writers(ids, 4, 6, ctas)
    right, expert_ids, (total,) = (t.tolist() for t in alignment.moe_align_block_size(ids, 4, 6))
    assert [value for value, *_ in elements] == right
    for i, (value, kind, cta) in enumerate(elements[:total]):
        assert (kind, cta) == (("assignment", value // chunk) if value < 24 else ("padding", expert_ids[i // 4] % ctas))
    tail = [cta for _, kind, cta in elements[total:] if kind == "tail"]
    assert tail == [i * ctas // len(tail) for i in range(len(right) - total)]
    for kind in ("assignment", "padding", "tail"):
        assert values_of(figure, kind) == [str(value) for value, of, _ in elements if of == kind]
    assert colours_of(figure, "assignment") == [
        align_one_launch.lane_colour(c).lower() for _, kind, c in elements if kind == "assignment"
    ]


@pytest.mark.parametrize("word_bits", [4, 8, 32])
def test_bitmask_rank_counts_the_earlier_slots(word_bits):
    for slot, expert in enumerate(CHUNK):
        figure, rank = align_one_launch.bitmask_rank(CHUNK, expert, word_bits, slot), CHUNK[:slot].count(expert)
        assert len(labelled(figure, "counted")) == rank and values_of(figure, "ranked")[rank] == str(slot)
        (words,) = [words for words in texts(figure) if words.startswith(f"rank of assignment {slot} = ")]
        parts = [int(part) for part in words.split(" = ")[1].split(" + ")]
        assert words.endswith(f" = {rank}") and sum(parts) == rank and len(parts) == slot // word_bits + 1
        masked = CHUNK[slot // word_bits * word_bits : slot].count(expert)
        assert f"popc(word {slot // word_bits} & {(1 << slot % word_bits) - 1:#x}) = {masked}" in texts(figure)


@pytest.mark.parametrize("ctas, experts, block_size, seed", [(4, 6, 4, 0), (2, 2, 1, 1), (5, 8, 16, 2), (3, 4, 3, 5)])
def test_exchanged_counts_place_slots_as_the_reference(ctas, experts, block_size, seed):
    figure = align_one_launch.exchange_counts(ctas, experts, block_size, seed)
    ids = np.random.default_rng(seed).integers(0, experts, (ctas, 2 * experts))
    right = alignment.moe_align_block_size(torch.from_numpy(ids), block_size, experts)[0].tolist()
    (words,) = [words for words in texts(figure) if "first row = " in words]
    cta, expert, place = map(int, re.search(r"(\d+), expert (\d+): .* = (\d+)$", words).groups())
    slots, written = np.flatnonzero(ids.ravel() == expert), values_of(figure, "written")
    assert right[place] == slots[slots // (2 * experts) == cta][0] and len(written) % block_size == 0
    assert [c for c in written if c != "-"] == [str(slot // (2 * experts)) for slot in slots]


@pytest.mark.parametrize("slot", range(16))
def test_ranks_of_warps_are_stable(slot):
    ids = np.array(CHUNK[:16]).reshape(2, 8)
    rank = CHUNK[:slot].count(CHUNK[slot])
    (words,) = [
        words for words in texts(align_one_launch.warp_ranks(ids, slot)) if words.startswith(f"assignment {slot}: ")
    ]
    warps, lanes = map(int, re.findall(r"(\d+) in", words))
    assert words.endswith(f" = rank {rank}") and warps + lanes == rank


# Dispatch and combine


def check_rows(figure, in_rank, _):
    right = [f"{s}.{t}" for r in range(2) for s in range(2) for t, to in enumerate(in_rank[s]) if to[r]]
    assert values_of(figure, "row") == right


ROWS = [[[1, 0], [0, 1], [0, 1], [1, 1], [1, 0]], [[0, 1], [1, 0], [1, 1], [1, 0], [0, 1], [1, 0], [1, 0], [1, 1]]]
PROBLEMS = [  # draw, check, arguments, other arguments
    *((lambda _, r: shared_experts.problem(*r, 256, 2.5), check_fusion, token(s), token(s + 1)) for s in range(3)),
    *((align.problem, check_alignment, (routing(6, seed=s), 4, 4), (routing(6, seed=s + 1), 4, 4)) for s in range(4)),
    *((align.two_level_scan, check_scan, sizes, (4, 4, 3)) for sizes in ((4, 4, 0), (3, 8, 1), (2, 2, 2))),
    *((dispatch.row_order, check_rows, (ROWS, channels), (ROWS[::-1], channels)) for channels in (1, 2, 8)),
    (dispatch.row_order, check_rows, ([ROWS[0], []], 2), ([[[1, 1]] * 8] * 2, 2)),
]


@pytest.mark.parametrize("draw, check, right, other", PROBLEMS)
def test_figure_shows_the_reference_values(draw, check, right, other):
    check(draw(*right), *right)
    with pytest.raises(AssertionError):
        check(draw(*other), *right)


# Hopper


def test_swizzle_equals_the_simulators():
    figure, chunks = hopper.swizzle(16), simulator.tensor_map.swizzled_chunks(0, 16 * 128, 128)
    places = [(-round(box.get_y(), 3), round(box.get_x(), 3)) for box in labelled(figure, "after")]
    by_place = sorted(zip(places, map(int, values_of(figure, "after"))))
    assert [chunk for _, chunk in by_place] == (chunks % 8).tolist()
    assert all((len(hopper.banks(c, False)), len(hopper.banks(c, True))) == (4, 32) for c in range(8))


def test_descriptor_shows_bits_and_fields():
    value = 1 << 62 | 64 << 32 | 1 << 16 | 0x2400 >> 4
    bits = "".join(values_of(hopper.descriptor(value), "bit"))
    assert int("".join(bits[half : half + 32][::-1] for half in (0, 32)), 2) == value
    fields = {name: meaning for name, *_, meaning in hopper.descriptor_fields(value)}
    assert fields == {"address": 0x2400, "leading bytes": 16, "stride bytes": 1024, "base": 0, "swizzle": "128 bytes"}


def test_fragment_equals_the_simulators():
    row, column = simulator.fragments.accumulator_coordinates(16)
    for thread, index in np.ndindex(128, 8):
        assert hopper.holder(int(row[thread, index]), int(column[thread, index])) == (thread, index)
