"""Figures of the alignment: inputs and outputs, scans, aggregated atomic operations."""

from moe_numba.align import reference
from moe_numba.course.bench.figures.style import GREY, INK, WIDTH
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
)
from moe_numba.course.lessons.align.draw_atomics import aggregation
from moe_numba.course.lessons.align.draw_scans import blelloch, two_level_scan

__all__ = ["aggregation", "blelloch", "problem", "two_level_scan"]

EMPTY = "#F4F4F4"


def _align(topk_ids, block_size, num_experts):
    return (t.tolist() for t in reference.moe_align_block_size(topk_ids, block_size, num_experts))


def problem(topk_ids, block_size, num_experts):
    """Draw the input (assignments by token and choice) and the output (the same in blocks of one expert)."""
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
    figure, axes = canvas(
        WIDTH, top + 0.95, f"{tokens} tokens, top-{topk}: {numel} assignments in blocks of {block_size}"
    )
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
    note(axes, left, top - tokens * token_tall - 0.22, "bold: the expert, small: the assignment")

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
            label, inside = ("assignment", fill) if slot < numel else ("padding" if b < used else "tail", EMPTY)
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
                colour=None if label == "assignment" else GREY,
                label=label,
            )
        cell(axes, right + 0.35, y, 0.5, tall, expert, fill=fill, edge=WHITE, colour=colour)
        if b < used and expert not in expert_ids[:b]:
            end = (b + expert_ids[:used].count(expert)) * block_size
            slots = sum(slot < numel for slot in sorted_ids[b * block_size : end])
            words = f"{plural(slots, 'assignment')}, {end - b * block_size - slots} padding"
            text(axes, right + 0.98, y + tall / 2, words, size=8, colour=GREY, ha="left")
    y = top - used * tall
    axes.plot([left, right + 0.85], [y, y], color=INK, linewidth=1.6, label="end of use")
    words = f"num_tokens_post_pad = {total[0]}: {plural(used, 'block')} above the line"
    text(axes, left, top - blocks * tall - 0.22, words, ha="left")
    note(axes, 0.15, 0.15, f"Colour: the expert. Pale: padding and tail; both hold {numel}, the number of assignments.")
    return figure
