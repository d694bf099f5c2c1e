"""Figures of the dispatch layout: the problem, private counters, time lines, a cluster's sum, lanes and ids."""

from collections.abc import Mapping

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.figures.style import BLUE, GREEN, ORANGE
from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.lessons.dispatch_layout.sizes import EXPERTS, EXPERTS_PER_CTA, LANES, RANKS, RANKS_PER_CTA, TOPK
from moe_numba.expert_parallel import reference

__all__ = ["cluster_sum", "ctas", "lanes", "loads", "private_counters", "problem"]

RANK_COLOURS = (BLUE, ORANGE, GREEN)  # lessons 12 and 13 draw ranks in these colours
_KINDS = "blue", "orange"  # of two ranks
_IDS = ([[0, 3], [1, 0], [2, 3], [3, 1]], [[2, 1], [3, 2], [0, 2], [2, 3]])  # of two ranks' tokens, four experts
_MOST_BOXES = 8


def problem() -> Drawing:
    """Draw tokens of two ranks, their experts, and the layout of each rank."""
    drawing, side = Drawing("Two ranks, four experts: who gets which token?"), 19.0
    drawing.legend(36, [("blue", "rank 0: experts 0, 1"), ("orange", "rank 1: experts 2, 3")])
    for rank, ids in enumerate(_IDS):
        per_rank, per_expert, flags = (
            each.int().tolist() for each in reference.dispatch_layout(torch.tensor(ids), num_ranks=2, num_experts=4)
        )
        top = 62.0 + rank * 128
        drawing.text(8, top, f"rank {rank}", bold=True)
        drawing.note(62, top, "topk_idx")
        drawing.note(140, top, "is_in_rank")
        drawing.note(262, top, "counts")
        for token, (experts, of_ranks) in enumerate(zip(ids, flags, strict=True)):
            y = top + 8 + token * (side + 2)
            drawing.note(8, y + 13, f"token {token}")
            for k, expert in enumerate(experts):
                drawing.box(62 + k * (side + 2), y, side, side, _KINDS[expert // 2], str(expert), size=11)
            for to, flag in enumerate(of_ranks):
                drawing.box(146 + to * (side + 2), y, side, side, _KINDS[to] if flag else "pale", str(flag), size=11)
        drawing.note(216, top + 30, "expert")
        for expert, number in enumerate(per_expert):
            x = 262 + expert * (side + 6)
            drawing.note(x + 6, top + 14, str(expert))
            drawing.box(x, top + 18, side, side, _KINDS[expert // 2], str(number), size=11)
        drawing.note(216, top + 74, "rank")
        for to, number in enumerate(per_rank):
            x = 262 + to * (side + 6)
            drawing.note(x + 6, top + 58, str(to))
            drawing.box(x, top + 62, side, side, _KINDS[to], str(number), size=11)
    drawing.note(8, 316, "Rank 0's token 1 has both experts on rank 0: it is sent there once,")
    drawing.note(8, 330, "and counts once for the rank.")
    return drawing


def private_counters() -> Drawing:
    """Draw the port: a table of counters with a row for each thread, whose columns are then added up."""
    drawing, side, ids = Drawing("A CTA of the port: experts 0 to 3, four threads"), 21.0, [*_IDS[0], *_IDS[1]]
    ids = [[expert * 2 + k for k, expert in enumerate(experts)] for experts in ids]  # of eight experts
    drawing.note(66, 40, "experts of its tokens")
    drawing.note(232, 40, "its row: 0, 1, 2, 3")
    rows = [[0] * 4 for _ in range(4)]
    for token, experts in enumerate(ids):
        for k, expert in enumerate(experts):
            if expert < 4:
                rows[token % 4][expert] += 1
            x = 66 + (token // 4) * (2 * side + 12) + k * (side + 2)
            kind = "sky" if expert < 4 else "pale"
            drawing.box(x, 48 + (token % 4) * (side + 3), side, side, kind, str(expert), size=11)
    for thread, row in enumerate(rows):
        y = 48 + thread * (side + 3)
        drawing.note(8, y + 15, f"thread {thread}")
        drawing.line((184, y + 10), (224, y + 10), width=1.3)
        for column, number in enumerate(row):
            drawing.box(232 + column * (side + 3), y, side, side, "sky" if number else "pale", str(number), size=11)
    y = 48 + 4 * (side + 3) + 10
    for column in range(4):
        x = 232 + column * (side + 3)
        drawing.line((x + side / 2, y - 10), (x + side / 2, y - 1), width=1.3)
        drawing.box(x, y, side, side, "orange", str(sum(row[column] for row in rows)), size=11)
    drawing.note(40, y + 14, "one thread adds up each column")
    drawing.legend(y + 44, [("sky", "an expert that this CTA counts"), ("pale", "not this CTA's")])
    return drawing


def ctas(found: Mapping[str, Mapping[str, float | None]]) -> Drawing:
    """Draw time lines of the port's CTAs from what `runs.apart` found of the experts' CTAs, and of the ranks'.

    The dark part of a bar is what a single token takes too. Without times the bars are executed lines.
    """
    _, experts, ranks = found.values()
    timed = None not in (experts["us"], experts["one_us"], ranks["us"], ranks["one_us"])
    whole, single = ("us", "one_us") if timed else ("lines", "one_lines")
    drawing = Drawing("Time lines of the port's CTAs" if timed else "What each CTA of the port executes")
    of_experts, of_ranks = -(-EXPERTS // EXPERTS_PER_CTA), -(-RANKS // RANKS_PER_CTA)
    bars = [(f"experts {i * EXPERTS_PER_CTA}…", experts, "sky") for i in range(of_experts)][:_MOST_BOXES]
    bars += [("ranks", ranks, "orange")] * of_ranks
    scale, y = (WIDTH - 150) / max(each[whole] for _, each, _ in bars), 32.0
    for label, each, kind in bars:
        fixed = min(each[single], each[whole])
        drawing.note(8, y + 11, label)
        drawing.box(88, y, fixed * scale, 14, "purple")
        drawing.box(88 + fixed * scale, y, max(each[whole] - fixed, 0) * scale, 14, kind)
        text = f"{records.format_us(each[whole])} us" if timed else f"{each[whole]:,.0f}"
        drawing.note(92 + each[whole] * scale, y + 11, text)
        y += 19
    drawing.legend(y + 14, [("purple", "as with one token"), ("sky", "loop, experts"), ("orange", "loop, ranks")])
    source = (
        "Experts and ranks timed apart; experts' CTAs are drawn alike."
        if timed
        else "Source lines of the longest warp."
    )
    drawing.note(8, y + 32, source)
    return drawing


def cluster_sum() -> Drawing:
    """Draw how three CTAs add up six counters: each stores shares of its counts in the others' shared memory."""
    drawing, side, sums = Drawing("Three CTAs add up six counters"), 20.0, 3
    counts = [[2, 0, 1, 3, 0, 1], [1, 1, 0, 2, 2, 0], [0, 3, 1, 0, 1, 1]]
    kinds = "sky", "orange", "green"
    for cta in range(sums):
        top = 44.0 + cta * 78
        drawing.text(8, top, f"CTA {cta}", bold=True)
        drawing.note(8, top + 22, "its counts")
        for i, number in enumerate(counts[cta]):
            drawing.box(70 + i * (side + 2), top + 8, side, side, kinds[i // 2], str(number), size=11)
        drawing.note(224, top, "shares: from 0, 1, 2")
        for other in range(sums):
            for i in range(2):
                x = 224 + other * 48 + i * (side + 2)
                drawing.box(x, top + 8, side, side, kinds[cta], str(counts[other][2 * cta + i]), size=11)
        for i in range(2):
            total = sum(counts[other][2 * cta + i] for other in range(sums))
            drawing.box(320 + i * (side + 2), top + 36, side, side, kinds[cta], str(total), size=11)
        drawing.note(224, top + 50, f"adds up {2 * cta} and {2 * cta + 1}:")
    drawing.note(8, 44 + sums * 78 + 2, "Colour: the CTA that adds a counter up. Counts travel once, to that CTA.")
    return drawing


def loads(lanes_of_token: int, tokens: int = 4) -> Drawing:
    """Draw which ids a warp loads with one instruction: a lane for each token, or several."""
    each = "one lane" if lanes_of_token == 1 else f"{lanes_of_token} lanes"
    drawing = Drawing(f"One load of a warp, {each} for each token")
    _ids(drawing, lanes_of_token, 40, tokens)
    return drawing


def _ids(drawing, lanes_of_token, top, tokens):
    """Draw rows of ids; those that the first load of a warp reads carry the number of the lane."""
    columns = min(TOPK, 16)
    wide = min(30.0, (WIDTH - 70) / columns)
    for token in range(tokens):
        y = top + token * 22
        drawing.note(8, y + 14, f"token {token}")
        for k in range(columns):
            lane = token * lanes_of_token + k if k < lanes_of_token else None
            kind = "pale" if lane is None else _lane_kind(token)
            drawing.box(62 + k * wide, y, wide - 2, 18, kind, "" if lane is None else str(lane), size=9)
    y = top + tokens * 22 + 12
    drawing.note(8, y, "A box is an id of 8 bytes, and its number is the lane that loads it.")


def _lane_kind(token):
    return ("sky", "orange", "green", "purple")[token % 4]


def lanes() -> Drawing:
    """Draw what the lanes of a group do in the last steps: an id each, then a rank each."""
    drawing, shown = Drawing(f"Groups of {LANES} lanes: an id each, then a rank each"), min(32 // LANES, 4)
    drawing.text(8, 40, "load: lane m of a group loads id m of its token", size=10)
    _ids(drawing, LANES, 48, shown)
    y = 48 + shown * 22 + 34
    drawing.text(8, y, "or: after some exchanges each lane has the token's ranks", size=10)
    drawing.text(8, y + 20, "store: lane m writes the flag of rank m, and counts it", size=10)
    wide = min(30.0, (WIDTH - 70) / max(RANKS, 2))
    for token in range(shown):
        top = y + 28 + token * 22
        drawing.note(8, top + 14, f"token {token}")
        for rank in range(RANKS):
            drawing.box(62 + rank * wide, top, wide - 2, 18, _lane_kind(token), str(token * LANES + rank), size=9)
    drawing.note(8, y + 28 + shown * 22 + 12, "A box is a flag of one byte, and its number is the lane that stores it.")
    return drawing
