"""Figures of a layer's experts: assignments grouped by expert and summed by token, and the counters of the sort."""

from moe_numba.course.bench.figures.style import COLOURS, GREY, INK, PALE, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, canvas, cell, check_range, ink_on, note, plural, text, tint
from moe_numba.course.draw.drawing import Drawing
from moe_numba.course.lessons.moe_layer.model import experts_used
from moe_numba.moe_layer import reference

__all__ = ["counting_sort", "layer", "tensors"]

_LEFT, _RIGHT = 1.25, 2.0  # inches beside the strips of a layer


def layer(topk_ids, num_experts):
    """Draw the assignments of up to 16 tokens, the rows of the grouped GEMMs, and the tokens' sums.

    Colours are experts. At most 18 assignments, and at most 7 experts.
    """
    tokens, topk = topk_ids.shape
    check_range("num_experts", num_experts, 1, len(COLOURS))
    check_range("the number of assignments", tokens * topk, 1, 18)
    seqlens, starts, gather, inverse = (t.tolist() for t in reference.group_by_expert(topk_ids, num_experts))
    wide, tall = (WIDTH - _LEFT - _RIGHT) / (tokens * topk), 0.32
    figure, axes = canvas(WIDTH, 4.05, "The experts of a layer: group by expert, compute, sum by token")
    tops = {"assignments": 3.05, "rows": 1.85, "tokens": 0.65}
    ids = topk_ids.tolist()
    middle = lambda index: _LEFT + (index + 0.5) * wide
    for token in range(tokens):
        first = _LEFT + token * topk * wide
        text(axes, first + topk * wide / 2, tops["assignments"] + tall + 0.12, f"token {token}", size=8, colour=GREY)
        for k in range(topk):
            expert, x = ids[token][k], first + k * wide
            fill = COLOURS[expert]
            cell(axes, x, tops["assignments"], wide, tall, expert, fill=fill, edge=WHITE, label="assignment")
            row = inverse[token][k]
            start, end = (x + wide / 2, tops["assignments"]), (middle(row), tops["rows"] + tall)
            arrow(axes, start, end, colour=fill, line=0.9, label="to row")
            end = middle((token + 0.5) * topk - 0.5), tops["tokens"] + tall
            arrow(axes, (middle(row), tops["rows"]), end, colour=GREY, line=0.7, label="to sum")
        cell(axes, first + 0.04, tops["tokens"], topk * wide - 0.08, tall, f"token {token}", fill=tint(GREY), edge=PALE)
    for row, token in enumerate(gather):
        if token >= 0:
            expert = next(e for e in range(num_experts) if starts[e] <= row < starts[e + 1])
            x = _LEFT + row * wide
            cell(axes, x, tops["rows"], wide, tall, token, fill=COLOURS[expert], edge=WHITE, label="row")
    for name, words in (("assignments", "topk_ids"), ("rows", "gather_indices"), ("tokens", "out")):
        text(axes, _LEFT - 0.1, tops[name] + tall / 2, words, ha="right", size=8.5)
    stages = {2.6: "group_by_expert", 2.01: "two grouped GEMMs,\nactivation in between", 1.4: "weighted_sum"}
    for y, words in stages.items():
        text(axes, WIDTH - _RIGHT + 0.15, y, words, ha="left", size=8.5, weight="bold")
    groups = ", ".join(f"{plural(n, 'row')} of expert {e}" for e, n in enumerate(seqlens))
    note(axes, 0.15, 0.35, f"Numbers: the expert of each assignment, and the token of each row; {groups}.")
    note(axes, 0.15, 0.13, "Rows of an expert are in the order of their tokens: the sort is stable.")
    return figure


def counting_sort(topk_ids, num_experts, warps):
    """Draw the counters of a counting sort whose warps count chunks of 32 assignments: counts, and after the scan.

    At most 7 experts, which have a colour each, and 4 warps.
    """
    check_range("num_experts", num_experts, 1, len(COLOURS))
    check_range("the number of warps", warps, 1, 4)
    flat = topk_ids.flatten().tolist()
    check_range("the number of assignments", len(flat), 1, 32 * warps)
    chunks = [flat[32 * warp : 32 * (warp + 1)] for warp in range(warps)]
    counts = [[chunk.count(expert) for expert in range(num_experts)] for chunk in chunks]
    lower = [[sum(row[expert] for row in counts[:warp]) for expert in range(num_experts)] for warp in range(warps)]
    totals = [sum(row[expert] for row in counts) for expert in range(num_experts)]
    starts = [sum(totals[:expert]) for expert in range(num_experts)]
    tall, gap, left = 0.3, 0.75, 1.05
    wide = (WIDTH - 2 * left - gap - 0.15) / (2 * num_experts)
    height = 2.0 + tall * warps
    figure, axes = canvas(WIDTH, height, f"{len(flat)} assignments, {plural(warps, 'warp')}: counters in shared memory")
    right = left + num_experts * wide + gap + left - 0.15
    tables = ((left, "counts of each warp", counts), (right, "after the scan: counts of lower warps", lower))
    top = height - 0.95
    for x, title, table in tables:
        text(axes, x + num_experts * wide / 2, top + 0.35, title, size=8.5)
        text(axes, x - 0.08, top + 0.12, "expert", ha="right", size=8, colour=GREY)
        for expert in range(num_experts):
            text(axes, x + (expert + 0.5) * wide, top + 0.12, str(expert), size=8, colour=GREY)
        for warp, row in enumerate(table):
            y = top - (warp + 1) * tall
            text(axes, x - 0.08, y + tall / 2, f"warp {warp}", ha="right", size=8, colour=GREY)
            for expert, number in enumerate(row):
                fill = tint(COLOURS[expert])
                label = "count" if table is counts else "lower"
                cell(axes, x + expert * wide, y, wide, tall, number, fill=fill, edge=WHITE, size=8.5, label=label)
    y = top - warps * tall - 0.5
    rows = ((left, "seqlens", totals, "total"), (right, "offset", starts, "start"))
    for x, name, numbers, label in rows:
        text(axes, x - 0.08, y + tall / 2, name, ha="right", size=8, colour=GREY)
        for expert, number in enumerate(numbers):
            fill = COLOURS[expert]
            cell(
                axes, x + expert * wide, y, wide, tall, number, fill=fill, edge=WHITE, colour=ink_on(fill), label=label
            )
    middle = y + tall / 2
    arrow(axes, (left + num_experts * wide + 0.1, middle), (right - 0.75, middle), colour=INK, label="scan")
    note(
        axes,
        0.15,
        0.15,
        "Row of an assignment: offset of its expert + count of lower warps + equal experts in lower lanes.",
    )
    return figure


def tensor_bytes(tokens: int, num_experts: int, topk: int, hidden: int, intermediate: int) -> dict[str, float]:
    """Return the bytes of the tensors of a layer in bfloat16, in the order of its stages, and of weights."""
    rows, weights = tokens * topk, experts_used(tokens, num_experts, topk) * hidden * intermediate * 2
    return {
        "x": tokens * hidden * 2,
        "w13": 2 * weights,
        "gate and up": rows * 2 * intermediate * 2,
        "activated": rows * intermediate * 2,
        "w2": weights,
        "rows": rows * hidden * 2,
        "out": tokens * hidden * 2,
    }


_STAGES = {"gate and up": "first GEMM", "activated": "SwiGLU", "rows": "second GEMM", "out": "weighted sum"}


def tensors(few: int, many: int, num_experts: int, topk: int, hidden: int, intermediate: int) -> Drawing:
    """Draw the tensors of a layer with few and with many tokens, in megabytes; bars have the scale of their column."""
    drawing, left, wide = Drawing("Tensors and megabytes along the stages"), 84.0, 96.0
    columns = {tokens: tensor_bytes(tokens, num_experts, topk, hidden, intermediate) for tokens in (few, many)}
    for place, tokens in enumerate(columns):
        drawing.text(left + 150 * place, 42, plural(tokens, "token"), bold=True)
    y = 54.0
    for name in columns[few]:
        if name in _STAGES:
            drawing.note(8, y + 11, f"→ {_STAGES[name]}")
            y += 17
        drawing.text(8, y + 12, name, size=10)
        for place, of in enumerate(columns.values()):
            length, x = wide * of[name] / max(of.values()), left + 150 * place
            kind = "orange" if name.startswith("w") else "sky"
            drawing.box(x, y, max(length, 1.0), 15, kind)
            drawing.text(x + max(length, 1.0) + 4, y + 11.5, f"{of[name] / 1e6:.3g}", size=10)
        y += 21
    drawing.legend(y + 10, (("sky", "activations"), ("orange", "weights of experts that have a token")))
    return drawing
