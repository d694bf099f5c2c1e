"""The pictures of the alignment: nothing is cut off, no words lie on words, and what is drawn is what is true."""

import re

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from test_draw import labelled, problems, said, words_of

from moe_numba.align import reference
from moe_numba.course.draw import align as draw
from moe_numba.course.draw import scans
from moe_numba.course.draw.canvas import box, canvas

VALUES = [3, 1, 7, 0, 4, 1, 6, 3]  # the document's
EXCLUSIVE = [0, 3, 4, 11, 11, 15, 16, 22]
CHUNK = [2, 0, 1, 2, 3, 2, 1, 0, 1, 2, 3, 0, 1, 2, 2, 1]


def routing(tokens=6, topk=2, experts=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]).int()


FIGURES = {
    **{f"problem {seed}": lambda seed=seed: draw.problem(routing(seed=seed), 4, 4) for seed in range(4)},
    "problem 12 tokens": lambda: draw.problem(routing(12, 3, 6), 8, 6),
    "problem wide": lambda: draw.problem(routing(7, 4, 6), 8, 6),
    "problem invalid": lambda: draw.problem(torch.tensor([[0, -1], [9, 2]]), 3, 4),
    "problem tiny": lambda: draw.problem(torch.tensor([[0]]), 1, 1),
    "blelloch 8": lambda: draw.blelloch(VALUES),
    "blelloch 4": lambda: draw.blelloch([128, 0, 256, 384]),
    "blelloch 2": lambda: draw.blelloch([5, 6]),
    "warp scan 8": lambda: draw.warp_scan(VALUES),
    "warp scan 16": lambda: draw.warp_scan(VALUES + VALUES),
    "warp scan 2": lambda: draw.warp_scan([1, 2]),
    **{f"two levels {w}x{n}": lambda w=w, n=n: draw.two_level_scan(w, n) for w, n in ((4, 4), (2, 2), (3, 8), (2, 4))},
    **{f"who writes {b}": lambda b=b: draw.who_writes(routing(12, 2, 6), 4, 6, b) for b in (1, 2, 3, 4)},
    "who writes in one line": lambda: draw.who_writes(routing(7), 4, 4, 2),
    "who writes much": lambda: draw.who_writes(routing(9, 4, 11), 8, 11, 4),
    "bitmask 2 words": lambda: draw.bitmask_rank(CHUNK, 2),
    "bitmask first word": lambda: draw.bitmask_rank(CHUNK, 2, slot=3),
    "bitmask 4 bits": lambda: draw.bitmask_rank(CHUNK, 1, word_bits=4),
    "bitmask 32 slots": lambda: draw.bitmask_rank(CHUNK + CHUNK, 2),
    "bitmask all one": lambda: draw.bitmask_rank([7] * 32, 7, word_bits=32),
    **{f"hand over {b}x{e}": lambda b=b, e=e: draw.hand_over(b, e) for b, e in ((4, 6), (2, 2), (5, 8), (3, 4))},
    "hand over block 16": lambda: draw.hand_over(5, 8, block_size=16, seed=3),
}


def spills(figure):
    """Words in the middle of a box that are wider or higher than the box."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, found = canvas.get_renderer(), []
    boxes = [p.get_window_extent(renderer) for p in figure.axes[0].patches if isinstance(p, Rectangle)]
    for t in words_of(figure):
        words = t.get_window_extent(renderer)
        x, y = (words.x0 + words.x1) / 2, (words.y0 + words.y1) / 2
        for b in boxes:
            inside = b.x0 < x < b.x1 and b.y0 < y < b.y1
            if inside and (words.width > b.width + 1 or words.height > b.height + 1):
                found.append(t.get_text())
    return found


def values_of(figure, label):
    """What stands in the boxes of a label, in the order in which they were drawn."""
    found = []
    for patch in labelled(figure, label):
        (x0, y0), (x1, y1) = patch.get_xy(), (patch.get_x() + patch.get_width(), patch.get_y() + patch.get_height())
        inside = [t for t in words_of(figure) if x0 < t.get_position()[0] < x1 and y0 < t.get_position()[1] < y1]
        found.append(inside[0].get_text())
    return found


def colours_of(figure, label):
    return [to_hex(patch.get_facecolor()) for patch in labelled(figure, label)]


@pytest.mark.parametrize("make", FIGURES.values(), ids=FIGURES)
def test_nothing_is_cut_off_or_covered(make):
    figure = make()
    assert problems(figure) == []
    assert spills(figure) == []
    assert figure.get_size_inches()[0] == draw.WIDTH and figure.get_size_inches()[1] <= 4.8


def test_words_that_spill_out_of_a_box_are_found():
    figure, axes = canvas(4, 2, "A title")
    box(axes, 1, 1, 0.3, 0.3, "too wide"), box(axes, 2, 1, 1, 0.05, "high"), box(axes, 2, 0.3, 1, 0.3, "fits")
    assert spills(figure) == ["too wide", "high"]


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


def test_invalid_ids_have_blocks_of_their_own():
    figure = draw.problem(torch.tensor([[0, -1], [9, 2]]), 3, 4)
    assert values_of(figure, "slot") == ["1", "2", "0", "3"]
    assert "2 slots, 1 padding" in said(figure)


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


def test_blellochs_picture_names_pairs_and_what_is_stored():
    figure = draw.blelloch(VALUES)
    assert len(labelled(figure, "add")) == 2 * 7 + 2 * 7 and len(labelled(figure, "copy")) == 7
    assert len(labelled(figure, "stored")) == 7 + 1 + 14
    words = said(figure)
    assert words.count("(1,3) (5,7)") == 2 and words.count("(0,1) (2,3)\n(4,5) (6,7)") == 2
    assert {"11 + 14", "a[7]", "5 + 11", "zero"} <= set(words)


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
    elements = draw.writers(ids, 4, 6, blocks)
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
    figure, elements = draw.who_writes(ids, 4, 6, 3), draw.writers(ids, 4, 6, 3)
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


def test_a_rank_is_that_of_the_last_slot_unless_one_is_named():
    assert "rank of slot 14 = 3 + 2 = 5" in said(draw.bitmask_rank(CHUNK, 2))


@pytest.mark.parametrize("blocks, experts, block_size, seed", [(4, 6, 4, 0), (2, 2, 1, 1), (5, 8, 16, 2), (3, 4, 3, 5)])
def test_a_handed_over_place_is_the_references(blocks, experts, block_size, seed):
    figure = draw.hand_over(blocks, experts, block_size, seed)
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


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: draw.problem(routing(13), 4, 4), "number of tokens is 13.*1 to 12"),
        (lambda: draw.problem(routing(12), 1, 4), "number of blocks is 24"),
        (lambda: draw.blelloch([1, 2, 3]), "values has 3 numbers, but must have 2, 4 or 8"),
        (lambda: draw.warp_scan([1] * 17), "number of values is 17"),
        (lambda: draw.two_level_scan(5, 4), "warps is 5.*2 to 4"),
        (lambda: draw.who_writes(routing(), 4, 4, 5), "blocks is 5.*1 to 4"),
        (lambda: draw.bitmask_rank(CHUNK, 9), "slot is None, but must be one of expert 9's"),
        (lambda: draw.bitmask_rank(CHUNK, 2, slot=1), r"slot is 1, but .* \[0, 3, 5, 9, 13, 14\]"),
        (lambda: draw.hand_over(6, 4), "blocks is 6.*2 to 5"),
    ],
)
def test_what_does_not_fit_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
