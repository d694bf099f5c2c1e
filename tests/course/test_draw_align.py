"""The pictures of the alignment: what is drawn agrees with the references."""

import re

import numpy as np
import pytest
import torch
from helpers.figures import colours_of, labelled, said, values_of

from moe_numba.align import reference
from moe_numba.course.draw import align as draw
from moe_numba.course.draw import scans

VALUES = [3, 1, 7, 0, 4, 1, 6, 3]  # the document's
EXCLUSIVE = [0, 3, 4, 11, 11, 15, 16, 22]
CHUNK = [2, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 0, 1, 2, 2, 1]


def routing(tokens=6, topk=2, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]).int()


@pytest.mark.parametrize("seed", range(4))
def test_the_problem_shows_what_the_reference_says(seed):
    ids = routing(seed=seed)
    figure = draw.problem(ids, 4, 4)
    right, expert_ids, total = (t.tolist() for t in reference.moe_align_block_size(ids, 4, 4))
    slots = [slot for slot in right if slot < 12]
    assert values_of(figure, "slot") == [str(slot) for slot in slots]
    assert len(labelled(figure, "padding")) == total[0] - 12
    assert len(labelled(figure, "tail")) == len(right) - total[0]
    choices = colours_of(figure, "choice")
    assert colours_of(figure, "slot") == [choices[slot] for slot in slots]
    assert f"num_tokens_post_pad = {total[0]}: {total[0] // 4} blocks above the line" in said(figure)
    assert values_of(figure, "cell") == [str(expert) for expert in expert_ids]
    (line,) = labelled(figure, "end of use")
    used = labelled(figure, "slot") + labelled(figure, "padding")
    lowest, highest = min(box.get_y() for box in used), max(box.get_y() for box in labelled(figure, "tail"))
    assert highest < line.get_ydata()[0] == pytest.approx(lowest)
    count = int((ids == 3).sum())
    assert f"{count} slot{'s' * (count > 1)}, {-count % 4} padding" in said(figure)


def test_blellochs_sweeps_are_the_documents():
    up, down = scans.blelloch_steps(VALUES)
    assert [numbers for _, numbers, _, _ in up] == [
        VALUES,
        [3, 4, 7, 7, 4, 5, 6, 9],
        [3, 4, 7, 11, 4, 5, 6, 14],
        [3, 4, 7, 11, 4, 5, 6, 25],
    ]
    assert [numbers for _, numbers, _, _ in down] == [
        [3, 4, 7, 11, 4, 5, 6, 0],
        [3, 4, 7, 0, 4, 5, 6, 11],
        [3, 0, 7, 4, 4, 11, 6, 16],
        EXCLUSIVE,
    ]
    assert [name for name, *_ in up] == ["start", "up 1", "up 2", "up 4"]
    assert [name for name, *_ in down] == ["zero the last", "down 4", "down 2", "down 1"]
    assert [pairs for _, _, pairs, _ in down[1:3]] == [[(3, 7)], [(1, 3), (5, 7)]]


def test_a_warps_scan_is_the_documents():
    steps = scans.warp_scan_steps(VALUES)
    assert [numbers for _, numbers, _, _ in steps] == [
        VALUES,
        [3, 4, 8, 7, 4, 5, 7, 9],
        [3, 4, 11, 11, 12, 12, 11, 14],
        [3, 4, 11, 11, 15, 16, 22, 25],
        EXCLUSIVE,
    ]
    figure = draw.warp_scan(VALUES)
    assert len(labelled(figure, "shuffle")) == 7 + 6 + 4
    assert said(figure).count("-") == 1 + 2 + 4
    assert values_of(figure, "cell")[-8:] == [str(value) for value in EXCLUSIVE]


@pytest.mark.parametrize("values", [[5, 6], [1, 2, 3, 4], VALUES])
def test_both_scans_agree_with_cumsum(values):
    exclusive = (np.cumsum(values) - values).tolist()
    assert scans.blelloch_steps(values)[1][-1][1] == exclusive
    assert scans.warp_scan_steps(values)[-1][1] == exclusive


@pytest.mark.parametrize("warps, lanes, seed", [(4, 4, 0), (3, 8, 1), (2, 2, 2)])
def test_two_levels_make_one_scan(warps, lanes, seed):
    figure = draw.two_level_scan(warps, lanes, seed)
    values = np.random.default_rng(seed).integers(1, 10, warps * lanes)
    assert [int(v) for v in values_of(figure, "result")] == (values.cumsum() - values).tolist()
    assert len(labelled(figure, "barrier")) == 2
    assert len(labelled(figure, "sum")) == len(labelled(figure, "before")) == warps


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_each_element_has_its_one_writer(blocks):
    ids = routing(12, 2, 6, seed=blocks)
    elements = draw.list_writers(ids, 4, 6, blocks)
    right, expert_ids, total = (t.tolist() for t in reference.moe_align_block_size(ids, 4, 6))
    assert [value for value, _, _ in elements] == right
    chunk = -(-24 // blocks)
    for i, (value, kind, block) in enumerate(elements):
        assert 0 <= block < blocks
        assert kind == ("slot" if value < 24 else "padding" if i < total[0] else "tail")
        if kind == "slot":
            assert block * chunk <= value < (block + 1) * chunk
        if kind == "padding":
            assert block == expert_ids[i // 4] % blocks
    tail = [block for _, kind, block in elements if kind == "tail"]
    shares = [tail.count(block) for block in range(blocks)]
    assert tail == sorted(tail) and max(shares) - min(shares) <= 1


def test_the_picture_of_writers_adds_up():
    ids = routing(12, 2, 6)
    figure, elements = draw.element_writers(ids, 4, 6, 3), draw.list_writers(ids, 4, 6, 3)
    for kind in ("slot", "padding", "tail"):
        drawn = [value for value, of, _ in elements if of == kind]
        assert values_of(figure, kind) == [str(value) for value in drawn]
    owners = [block for _, kind, block in elements if kind == "slot"]
    assert colours_of(figure, "slot") == [draw.lane_colour(block).lower() for block in owners]
    counts = [re.fullmatch(r"block \d: (\d+) elements", words) for words in said(figure)]
    assert sum(int(match[1]) for match in counts if match) == len(elements)


@pytest.mark.parametrize("word_bits", [4, 8, 32])
def test_a_rank_counts_the_slots_before(word_bits):
    for slot, expert in enumerate(CHUNK):
        figure = draw.bitmask_rank(CHUNK, expert, word_bits, slot)
        rank = CHUNK[:slot].count(expert)
        assert len(labelled(figure, "counted")) == rank and len(labelled(figure, "own")) == 1
        (words,) = [words for words in said(figure) if words.startswith(f"rank of slot {slot} = ")]
        assert words.endswith(f" = {rank}")
        parts = [int(part) for part in words.split(" = ")[1].split(" + ")]
        assert sum(parts) == rank and len(parts) == slot // word_bits + 1
        masked = sum(CHUNK[at] == expert for at in range(slot // word_bits * word_bits, slot))
        lower = (1 << slot % word_bits) - 1
        assert f"popc(word {slot // word_bits} & {lower:#x}) = {masked}" in said(figure)
        assert values_of(figure, "ranked")[rank] == str(slot)


@pytest.mark.parametrize("blocks, experts, block_size, seed", [(4, 6, 4, 0), (2, 2, 1, 1), (5, 8, 16, 2), (3, 4, 3, 5)])
def test_a_handed_over_place_is_the_references(blocks, experts, block_size, seed):
    figure = draw.exchange_counts(blocks, experts, block_size, seed)
    ids = np.random.default_rng(seed).integers(0, experts, (blocks, 2 * experts))
    right = reference.moe_align_block_size(torch.from_numpy(ids), block_size, experts)[0].tolist()
    (words,) = [words for words in said(figure) if "place = " in words]
    g, e, place = (int(n) for n in re.fullmatch(r"Block (\d+), expert (\d+): .* = (\d+)", words).groups())
    slots = np.flatnonzero(ids.ravel() == e)
    mine = slots[slots // (2 * experts) == g]
    assert right[place] == mine[0]
    written = [block for block in values_of(figure, "written") if block != "-"]
    assert written == [str(slot // (2 * experts)) for slot in slots]
    assert len(labelled(figure, "written")) % block_size == 0
