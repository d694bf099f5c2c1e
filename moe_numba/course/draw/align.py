"""Figures of the alignment: inputs and outputs, writers, ranks from bitmasks, the exchange of counts, scans."""

import numpy as np

from moe_numba.align import reference
from moe_numba.course.bench.style import BLUE, GREY, INK, ORANGE, PALE, RED, WIDTH
from moe_numba.course.draw.canvas import (
    WHITE,
    arrow,
    box,
    canvas,
    cell,
    check_range,
    ink_on,
    lane_colour,
    note,
    plural,
    text,
    tint,
)
from moe_numba.course.draw.scans import blelloch, two_level_scan, warp_scan

__all__ = [
    "bitmask_rank",
    "blelloch",
    "exchange_counts",
    "problem",
    "two_level_scan",
    "warp_scan",
    "element_writers",
    "list_writers",
]

EMPTY = "#F4F4F4"


def _align(topk_ids, block_size, num_experts):
    return (t.tolist() for t in reference.moe_align_block_size(topk_ids, block_size, num_experts))


def problem(topk_ids, block_size, num_experts):
    """Draw the input (slots by token and choice) and the output (the same slots in blocks of one expert)."""
    tokens, topk = topk_ids.shape
    (
        check_range("the number of tokens", tokens, 1, 12),
        check_range("topk", topk, 1, 4),
        check_range("block_size", block_size, 1, 8),
    )
    sorted_ids, expert_ids, total = map(list, _align(topk_ids, block_size, num_experts))
    numel, used, blocks = topk_ids.numel(), total[0] // block_size, len(expert_ids)
    check_range("the number of blocks", blocks, 1, 14)
    tall, token_tall = min(0.36, 2.6 / blocks), min(0.36, 2.6 / tokens)
    top = max(tall * blocks, token_tall * tokens) + 0.78
    figure, axes = canvas(WIDTH, top + 0.95, f"{tokens} tokens, top-{topk}: {numel} slots in blocks of {block_size}")
    colour_of = lambda expert: lane_colour(expert) if 0 <= expert < num_experts else GREY

    left, wide = 0.85, 0.62
    text(axes, left + topk * wide / 2, top + 0.37, "topk_ids", weight="bold")
    for token, ids in enumerate(topk_ids.tolist()):
        y = top - (token + 1) * token_tall
        text(axes, left - 0.08, y + token_tall / 2, f"token {token}", size=8.5, colour=GREY, ha="right")
        for choice, expert in enumerate(ids):
            x, fill = left + choice * wide, colour_of(expert)
            box(axes, x, y, wide, token_tall, fill=fill, edge=WHITE, label="choice")
            text(axes, x + 0.16, y + token_tall / 2, str(token * topk + choice), size=6.5, colour=ink_on(fill))
            text(axes, x + 0.38, y + token_tall / 2, str(expert), colour=ink_on(fill), weight="bold")
            if token == 0:
                text(axes, x + wide / 2, top + 0.13, f"choice {choice}", size=7.5, colour=GREY)
    note(axes, left, top - tokens * token_tall - 0.22, "bold: the expert, small: the slot")

    start, y = left + topk * wide + 0.2, top - min(tall * blocks, token_tall * tokens) / 2
    arrow(axes, (start, y), (start + 0.95, y), colour=INK)
    text(axes, start + 0.45, y + 0.13, "sort by expert", size=8, colour=GREY)
    text(axes, start + 0.45, y - 0.13, "pad to blocks", size=8, colour=GREY)
    left = start + 1.75
    wide = min(0.65, (WIDTH - left - 2.35) / block_size)
    right = left + max(block_size * wide, 1.4)
    text(axes, left, top + 0.2, "sorted_token_ids", ha="left", weight="bold")
    text(axes, right + 0.6, top + 0.2, "expert_ids", weight="bold")
    for b, expert in enumerate(expert_ids):
        y, fill, colour = top - (b + 1) * tall, *((colour_of(expert), None) if b < used else (EMPTY, GREY))
        text(axes, left - 0.08, y + tall / 2, f"block {b}", size=8.5, colour=GREY, ha="right")
        for i, slot in enumerate(sorted_ids[b * block_size : (b + 1) * block_size]):
            label, inside = ("slot", fill) if slot < numel else ("padding" if b < used else "tail", EMPTY)
            cell(
                axes,
                left + i * wide,
                y,
                wide,
                tall,
                slot,
                fill=inside,
                edge=WHITE,
                size=9 if wide > 0.3 else 7,
                colour=None if label == "slot" else GREY,
                label=label,
            )
        cell(axes, right + 0.35, y, 0.5, tall, expert, fill=fill, edge=WHITE, colour=colour)
        if b < used and expert not in expert_ids[:b]:
            end = (b + expert_ids[:used].count(expert)) * block_size
            slots = sum(slot < numel for slot in sorted_ids[b * block_size : end])
            words = f"{plural(slots, 'slot')}, {end - b * block_size - slots} padding"
            text(axes, right + 0.98, y + tall / 2, words, size=8.5, colour=GREY, ha="left")
    y = top - used * tall
    axes.plot([left, right + 0.85], [y, y], color=INK, linewidth=1.6, label="end of use")
    words = f"num_tokens_post_pad = {total[0]}: {plural(used, 'block')} above the line"
    text(axes, left, top - blocks * tall - 0.22, words, ha="left")
    note(axes, 0.15, 0.15, f"Colour: the expert. Pale: padding and tail; both hold {numel}, the number of slots.")
    return figure


def list_writers(topk_ids, block_size, num_experts, blocks):
    """List value, kind ("slot", "padding" or "tail") and writing thread block of each element of sorted_token_ids.

    A block places its chunk of the slots; expert e's padding falls to block e % blocks; the tail is split evenly.
    """
    sorted_ids, expert_ids, (used,) = _align(topk_ids, block_size, num_experts)
    numel, elements = topk_ids.numel(), []
    chunk, tail = -(-numel // blocks), len(sorted_ids) - used
    for i, slot in enumerate(sorted_ids):
        if slot < numel:
            elements.append((slot, "slot", slot // chunk))
        elif i < used:
            elements.append((slot, "padding", expert_ids[i // block_size] % blocks))
        else:
            elements.append((slot, "tail", (i - used) * blocks // tail))
    return elements


def element_writers(topk_ids, block_size, num_experts, blocks):
    """Draw which thread block of the medium kernel writes which element of sorted_token_ids."""
    check_range("blocks", blocks, 1, 4)
    check_range("the number of slots", topk_ids.numel(), 1, 42)
    check_range("block_size", block_size, 3, 16)
    elements, chunk = list_writers(topk_ids, block_size, num_experts, blocks), -(-topk_ids.numel() // blocks)
    check_range("the length of sorted_token_ids", len(elements), 1, 126)
    _, expert_ids, (used,) = _align(topk_ids, block_size, num_experts)
    lines = -(-len(elements) // (42 // block_size * block_size))
    a_line = -(-len(elements) // (lines * block_size)) * block_size
    tall, left = 0.27, 0.15
    wide = min(0.37, (WIDTH - 2 * left) / max(a_line, topk_ids.numel()))
    height = 2.6 + 0.58 * lines
    figure, axes = canvas(WIDTH, height, f"{blocks} thread blocks: each element has one writer")
    y = height - 1.12
    text(axes, left, y + tall + 0.31, "topk_ids", ha="left", weight="bold")
    note(axes, left + 0.8, y + tall + 0.31, "Every block counts all slots, and places those of its own chunk.")
    for slot, expert in enumerate(topk_ids.flatten().tolist()):
        x = left + slot * wide
        cell(axes, x, y, wide, tall, expert, fill=lane_colour(slot // chunk), edge=WHITE, size=7.5, label="chunk")
        text(axes, x + wide / 2, y + tall + 0.09, str(slot), size=6.5, colour=GREY)
    y -= 0.25
    text(axes, left, y, "sorted_token_ids", ha="left", weight="bold")
    note(axes, left + 1.45, y, f"Block e % {blocks} writes the padding of expert e. The tail is split evenly.")
    for i, (value, kind, block) in enumerate(elements):
        colour, x, at = lane_colour(block), left + i % a_line * wide, y - 0.67 - i // a_line * 0.58
        fill = {"slot": colour, "padding": tint(colour, 0.35), "tail": WHITE}[kind]
        cell(axes, x + 0.012, at, wide - 0.024, tall, value, fill=fill, edge=colour, size=7.5, label=kind)
        if i % block_size == 0:
            end = x + min(block_size, len(elements) - i) * wide
            axes.plot([x + 0.03, end - 0.03], [at + tall + 0.06] * 2, color=GREY, linewidth=1)
            words = f"expert {expert_ids[i // block_size]}" if i < used else "tail"
            text(axes, (x + end) / 2, at + tall + 0.16, words, size=7.5, colour=GREY)
    part = ((WIDTH - 2 * left + 0.15) / blocks - 0.15) / 3
    for block in range(blocks):
        x, colour = left + block * (3 * part + 0.15), lane_colour(block)
        kinds = [kind for _, kind, of in elements if of == block]
        text(axes, x, 0.83, f"block {block}: {plural(len(kinds), 'element')}", ha="left", size=8.5)
        for k, (kind, fill) in enumerate((("slot", colour), ("padding", tint(colour, 0.35)), ("tail", WHITE))):
            words = plural(kinds.count(kind), kind) if kind == "slot" else f"{kinds.count(kind)} {kind}"
            cell(axes, x + k * part, 0.42, part, 0.26, words, fill=fill, edge=colour, size=8)
    note(axes, left, 0.15, "Each element has one writer, so no fill is overwritten and no block waits for another.")
    return figure


def bitmask_rank(topk_ids_of_chunk, expert, word_bits=8, slot=None):
    """Draw a stable rank computed from a bitmask: the number of set bits below the slot's own bit.

    ``slot`` defaults to the last slot of the expert.
    """
    ids = [int(i) for i in topk_ids_of_chunk]
    slots = [at for at, i in enumerate(ids) if i == expert]
    check_range("the number of slots", len(ids), 1, 32)
    check_range("word_bits", word_bits, 4, 32)
    if not slots or slot not in (None, *slots):
        raise ValueError(f"slot is {slot}, but must be one of expert {expert}'s slots {slots}")
    slot = slots[-1] if slot is None else slot
    rank, own, words = slots.index(slot), slot // word_bits, -(-len(ids) // word_bits)
    figure, axes = canvas(WIDTH, 3.6, f"A rank from a bitmask: slot {slot} of a chunk, routed to expert {expert}")
    left, gap, tall = 1.55, 0.2, 0.3
    wide = min(0.5, (WIDTH - left - 0.15 - gap * (words - 1)) / len(ids))
    x = [left + at * wide + at // word_bits * gap for at in range(len(ids))]
    names = "slot of the chunk", "topk_ids", f"mask of expert {expert}", "rank", f"slots of expert {expert}"
    for y, name in zip((2.88, 2.6, 2.0, 0.77, 0.5), names, strict=True):
        text(axes, left - 0.12, y + tall / 2, name, ha="right", size=8.5)
    for at, i in enumerate(ids):
        bit, middle = i == expert, x[at] + wide / 2
        label = "bit" if not bit or at > slot else "own" if at == slot else "counted"
        colour = {"bit": GREY, "own": RED, "counted": BLUE}[label]
        text(axes, middle, 2.88 + tall / 2, str(at), size=8, colour=GREY)
        cell(
            axes,
            x[at],
            2.6,
            wide,
            tall,
            i,
            fill=tint(colour) if bit else WHITE,
            edge=PALE,
            size=8,
            colour=INK if bit else GREY,
        )
        cell(
            axes,
            x[at],
            2.0,
            wide,
            tall,
            int(bit),
            fill=WHITE if label == "bit" else colour,
            edge=PALE,
            label=label,
            colour=None if bit else GREY,
        )
        if bit:
            arrow(axes, (middle, 2.6), (middle, 2.0 + tall), colour=colour, label="atomicOr")
    parts = []
    for word in range(words):
        first, last = word * word_bits, min((word + 1) * word_bits, len(ids))
        label, colour = f"word {word}: above", GREY
        if word <= own:
            parts.append(sum(first <= at < min(slot, last) for at in slots))
            lower = f" & {(1 << slot - first) - 1:#x}" if word == own else ""
            label, colour = f"popc(word {word}{lower}) = {parts[-1]}", BLUE
        axes.plot([x[first], x[last - 1] + wide], [1.9, 1.9], color=colour, linewidth=1.6)
        text(axes, (x[first] + x[last - 1] + wide) / 2, 1.73, label, size=8.5, colour=colour)
    added = " + ".join(map(str, parts)) + (f" = {rank}" if own else "")
    text(axes, left, 1.32, f"rank of slot {slot} = {added}", ha="left", weight="bold")
    each = min(0.5, (WIDTH - left - 0.15) / len(slots))
    for r, at in enumerate(slots):
        fill = RED if at == slot else BLUE if at < slot else WHITE
        cell(axes, left + r * each, 0.5, each, tall, at, fill=fill, edge=PALE, label="ranked", size=8)
        text(axes, left + (r + 0.5) * each, 0.92, str(r), size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.15,
        "Bit 0 of a word is on the left. "
        "The mask, and with it the rank, does not depend on the order in which threads set bits.",
    )
    return figure


def exchange_counts(blocks, experts, block_size=4, seed=0):
    """Draw the exchange of counts in the large kernel, and the places that one block computes for its slots."""
    (
        check_range("blocks", blocks, 2, 5),
        check_range("experts", experts, 2, 8),
        check_range("block_size", block_size, 1, 16),
    )
    ids = np.random.default_rng(seed).integers(0, experts, (blocks, 2 * experts))
    counts = np.stack([np.bincount(row, minlength=experts) for row in ids])
    g = blocks // 2
    e = int(np.flatnonzero(counts[g] == counts[g].max())[-1])
    total, before = counts.sum(0), counts[:g].sum(0)
    padded = -(-total // block_size) * block_size
    start = padded.cumsum() - padded
    tall, left, wide = 0.24, 1.45, 0.46
    height = 3.5 + tall * blocks
    figure, axes = canvas(WIDTH, height, f"Exchange of counts: the places of the slots of block {g} of {blocks}")
    right, top = left + experts * wide + 0.15, height - 0.7
    below = top - blocks * tall - 0.5
    for expert in range(experts):
        x = left + expert * wide
        text(axes, x + wide / 2, top + 0.12, f"e = {expert}", size=8, colour=GREY)
        for block in range(blocks):
            colour = BLUE if block < g else RED if block == g else GREY
            fill = colour if expert == e and block <= g else tint(colour, 0.18)
            cell(axes, x, top - (block + 1) * tall, wide, tall, counts[block, expert], fill=fill, edge=WHITE)
        for row, numbers in enumerate((before, total, padded, start)):
            fill = WHITE if expert != e else BLUE if row == 0 else tint(ORANGE, 0.45)
            cell(axes, x, below - (row + 1) * tall, wide, tall, numbers[expert], fill=fill, edge=PALE)
    for block in range(blocks):
        text(axes, left - 0.12, top - (block + 0.5) * tall, f"block {block}", ha="right", size=8.5)
    note(
        axes,
        right,
        top - 0.5 * tall,
        f"Each block counts its chunk of {ids.shape[1]} slots, and stores a row of counts.",
    )
    axes.plot([0.15, WIDTH - 0.15], [below + 0.25] * 2, color=INK, linewidth=1.2, linestyle="--")
    note(axes, right, below + 0.56, "Grid-wide barrier: each block adds 1 to a counter (release),")
    note(axes, right, below + 0.38, f"and waits until all {blocks} have (acquire).")
    names = f"before block {g}", "total", "padded", "start"
    whys = "the blue rows", "all rows", f"rounded up to blocks of {block_size}", "exclusive scan of the padded totals"
    for row, (name, why) in enumerate(zip(names, whys, strict=True)):
        y = below - (row + 0.5) * tall
        text(axes, left - 0.12, y, name, ha="right", size=8.5)
        note(axes, right, y, why)
    first, run = int(start[e]), [block for block in range(blocks) for _ in range(counts[block, e])]
    run += ["-"] * (int(padded[e]) - len(run))
    y = below - 4 * tall - 0.26
    words = f"place = start + before = {first} + {before[e]} = {first + before[e]}"
    text(axes, left, y, f"Block {g}, expert {e}: {words}", ha="left", weight="bold")
    y, wide = y - 0.66, min(0.37, (WIDTH - left - 0.15) / len(run))
    text(axes, left - 0.12, y + tall / 2, "written by block", ha="right", size=8.5)
    text(axes, left - 0.12, y + tall + 0.12, "place", ha="right", size=8.5)
    for i, block in enumerate(run):
        fill = EMPTY if block == "-" else BLUE if block < g else RED if block == g else tint(GREY, 0.18)
        cell(axes, left + i * wide, y, wide, tall, block, fill=fill, edge=WHITE, label="written")
        text(axes, left + (i + 0.5) * wide, y + tall + 0.12, str(first + i), size=7.5, colour=GREY)
    note(
        axes,
        0.15,
        0.15,
        f"The places of expert {e} and the block that writes each; a dash is padding. "
        "The places do not depend on the order in which blocks run.",
    )
    return figure
