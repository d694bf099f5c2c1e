"""Figures of the lesson "The gate, for a prompt": which lane holds what, and where the time goes."""

from collections.abc import Mapping, Sequence

from moe_numba.course.draw.drawing import WIDTH, Drawing
from moe_numba.course.draw.launch_timeline import is_search
from moe_numba.course.lessons.gate.exercises import ranks
from moe_numba.course.lessons.gate.sizes import CANDIDATES, EXPERTS, GROUPS, KEPT, PAIRS, SHARE, SIZE, TOPK
from moe_numba.gate.reference import biased_grouped_topk

_TOKENS = "blue", "orange", "green", "purple"  # a colour per token


def problem(logits, bias) -> Drawing:
    """Draw one token's biased scores as bars, with the groups that are kept and the experts that are chosen."""
    choice = (logits.float().sigmoid() + bias).double()
    ids = biased_grouped_topk(logits[None].float(), bias, TOPK, num_expert_group=GROUPS, topk_group=KEPT)[1][0].tolist()
    sums = choice.view(GROUPS, -1).topk(2, dim=1).values.sum(dim=1)
    kept = set(sums.sort(descending=True, stable=True).indices[:KEPT].tolist())
    drawing = Drawing(f"One token: {EXPERTS} experts, {KEPT} of {GROUPS} groups, {TOPK} experts")
    left, gap, top, tall = 8.0, 4.0, 54.0, 110.0
    wide, largest = (WIDTH - 16 - gap * (GROUPS - 1)) / EXPERTS, float(choice.max())
    at = lambda expert: left + expert * wide + expert // SIZE * gap
    labels = _apart([at(expert) + wide / 2 for expert in sorted(ids)], 24, 16, WIDTH - 16)
    for expert, label in zip(sorted(ids), labels, strict=True):
        x, y = at(expert) + wide / 2, top + tall * (1 - float(choice[expert]) / largest)
        drawing.line((x, y), (x, top - 4), (label, top - 10))
        drawing.text(label, top - 13, str(expert), anchor="middle")
    for expert, value in enumerate(choice.tolist()):
        kind = "orange" if expert in ids else "sky" if expert // SIZE in kept else "pale"
        high = tall * value / largest
        drawing.box(at(expert), top + tall - high, max(wide - 0.3, 0.5), high, kind)
    for group in range(GROUPS):
        x, kind = at(group * SIZE) + SIZE * wide / 2, "ink" if group in kept else "quiet"
        words = f"group {group}", f"{sums[group]:.3f}", "kept" if group in kept else "dropped"
        for row, word in enumerate(words):
            drawing.text(x, top + tall + 14 + 13 * row, word, size=10, anchor="middle", kind=kind, bold=group in kept)
    y = top + tall + 58
    drawing.note(8, y, "Bars: score + bias. The number below a group is the sum of its two best.")
    return drawing


def _apart(places, distance, low, high):
    """Move sorted places apart to at least a distance, within limits."""
    for number in range(1, len(places)):
        places[number] = max(places[number], places[number - 1] + distance)
    places[-1] = min(places[-1], high)
    for number in reversed(range(len(places) - 1)):
        places[number] = max(low, min(places[number], places[number + 1] - distance))
    return places


def torch_kernels(calls: Mapping[str, Sequence[tuple[str, float, float]]]) -> Drawing:
    """Draw the kernels of calls one after another, without the gaps between them, to scale."""
    drawing, y = Drawing("The kernels of one call, without gaps"), 30.0
    total = {name: sum(us for *_, us in kernels) for name, kernels in calls.items()}
    scale = (WIDTH - 16) / max(total.values())
    for name, kernels in calls.items():
        count = "1 kernel" if len(kernels) == 1 else f"{len(kernels)} kernels"
        drawing.text(8, y + 8, f"{name}: {count}, {total[name]:.3g} us")
        x = 8.0
        for kernel, _, us in kernels:
            words = ("sort" if "sort" in kernel.lower() else "topk") if is_search(kernel) and scale * us > 24 else ""
            drawing.box(x, y + 14, max(scale * us - 0.6, 0.8), 20, "orange" if is_search(kernel) else "blue", words)
            x += scale * us
        y += 48
    drawing.legend(y + 4, [("orange", "kernels that select or sort"), ("blue", "all others")])
    return drawing


_LAYOUTS = {  # name -> (tokens of a warp, lanes of a token)
    "a thread per token": (32, 1),
    "a thread per group": (SHARE, GROUPS),
    "a warp per token": (1, 32),
}


def lanes(*names: str) -> Drawing:
    """Draw which lane of a warp holds which experts, and what one 16-byte load of the warp touches."""
    drawing, y = Drawing("Which lane holds which experts"), 30.0
    left, wide = 58.0, WIDTH - 66.0
    for name in names:
        tokens, parts = _LAYOUTS[name]
        held, shown = EXPERTS // parts, min(tokens, 4)
        drawing.text(8, y + 10, f"{name}: a lane holds {held} experts", bold=True)
        y += 18
        for token in range(shown):
            row = token if token < 3 else tokens - 1
            if row > token:  # rows are left out
                for dot in range(3):
                    drawing.box(left - 22, y + 3 * dot, 1.5, 1.5, "ink")
                y += 12
            drawing.text(left - 6, y + 13, f"token {row}", size=10, anchor="end", kind="quiet")
            for part in range(parts):
                lane, each = row * parts + part, wide / parts
                kind = ("sky", "pale")[(part * GROUPS // parts if parts > 1 else row) % 2]
                words = f"lane {lane}" if parts == 1 else str(lane)
                if each < 20 and lane % 2:
                    words = ""  # the numbers would touch
                drawing.box(left + part * each, y, each - 0.8, 18, kind, words, size=8 if each < 20 else 10)
                drawing.box(left + part * each, y + 18, wide * 4 / EXPERTS - 0.4, 5, "orange")
            y += 28
        y += 8
    drawing.note(8, y + 2, "Orange: what one 16-byte load of the warp reads, four experts per lane.")
    return drawing


def visits() -> Drawing:
    """Draw which load reads which bytes of the cache line of a lane, with 4 and with 16 bytes per load."""
    drawing = Drawing("A lane's 128-byte line: which load reads what")
    wide = (WIDTH - 16) / 32
    for row, (words, each) in enumerate((("4 bytes per load", 1), ("16 bytes per load", 4))):
        y = 32.0 + 48 * row
        drawing.text(8, y + 8, f"{words}: the lane comes back for the line {32 // each} times")
        for load in range(32 // each):
            kind = "sky" if load % 2 else "pale"
            drawing.box(8 + load * each * wide, y + 14, each * wide - 0.8, 18, kind, str(load), size=8)
    for sector in range(5):
        drawing.line((8 + sector * 8 * wide, 128), (8 + sector * 8 * wide, 134))
    for sector in range(4):
        drawing.text(8 + (sector + 0.5) * 8 * wide, 138, f"sector {sector}", size=10, anchor="middle", kind="quiet")
    return drawing


def rank_by_counting(sums: Sequence[float]) -> Drawing:
    """Draw the comparisons of all groups with each other: which lane makes which, and what each group counts."""
    drawing, found = Drawing(f"Kept: fewer than {KEPT} groups are better"), ranks(sums)
    left, top, cell = 108.0, 52.0, 24.0
    drawing.note(left, top - 18, "compared with group")
    for j in range(GROUPS):
        drawing.text(left + (j + 0.5) * cell, top - 5, str(j), anchor="middle")
    for i, own in enumerate(sums):
        y, is_kept = top + i * cell, found[i] < KEPT
        drawing.text(left - 8, y + 16, f"group {i}: {own:.3f}", anchor="end", bold=is_kept)
        for j, other in enumerate(sums):
            better = other > own or (other == own and j < i)
            drawing.box(left + j * cell, y, cell - 1, cell - 1, "orange" if better else "pale", str(4 * i + j % 4))
        words = f"{found[i]}: {'kept' if is_kept else 'dropped'}"
        drawing.text(left + GROUPS * cell + 8, y + 16, words, bold=is_kept)
    y = top + GROUPS * cell + 16
    drawing.legend(y, [("orange", "better than the row's group"), ("pale", "not better")])
    drawing.note(8, y + 16, "Numbers: the lane that compares. Each lane does two comparisons.")
    return drawing


def network(values: Sequence[float]) -> Drawing:
    """Draw Batcher's network: each bar puts the larger of two values on the upper wire."""
    drawing, n = Drawing(f"Sorting {len(values)} keys of a lane: {len(PAIRS)} compare-exchanges"), len(values)
    depth, columns = [0] * n, []  # column -> pairs that do not overlap
    for i, j in PAIRS:
        column = max(depth[i : j + 1])
        columns += [[] for _ in range(column + 1 - len(columns))]
        columns[column].append((i, j))
        depth[i : j + 1] = [column + 1] * (j + 1 - i)
    left, right, top, tall = 56.0, WIDTH - 56.0, 38.0, 20.0
    step, now = (right - left) / (len(columns) + 1), list(values)
    for i in range(n):
        drawing.text(left - 6, top + i * tall + 4, f"{values[i]:.3f}", anchor="end")
        drawing.line((left, top + i * tall), (right, top + i * tall), width=0.7)
    for number, pairs in enumerate(columns):
        x = left + (number + 1) * step
        for i, j in pairs:
            swap = now[j] > now[i]
            now[i], now[j] = max(now[i], now[j]), min(now[i], now[j])
            drawing.box(x - 1.5, top + i * tall - 2, 3, (j - i) * tall + 4, "orange" if swap else "blue")
    for i in range(n):
        drawing.text(right + 6, top + i * tall + 4, f"{now[i]:.3f}", bold=True)
    drawing.legend(top + n * tall + 8, [("orange", "the two are swapped"), ("blue", "they stay")])
    return drawing


def four_tokens(kept: Sequence[Sequence[int]]) -> Drawing:
    """Draw how a warp hands the keys of the kept groups from the lanes that score to the lanes that pick."""
    drawing = Drawing("A warp with four tokens: which lane holds what")
    wide = (WIDTH - 16) / 32
    drawing.text(8, 40, "1. Score: 32 lanes, one token after another", bold=True)
    for lane in range(32):
        drawing.box(8 + lane * wide, 46, wide - 0.6, 18, "sky" if lane // 4 % 2 else "pale", str(lane), size=8)
    for group in range(GROUPS):
        drawing.text(8 + (group + 0.5) * 4 * wide, 77, f"group {group}", size=9, anchor="middle", kind="quiet")
    drawing.text(8, 98, "2. Keys in shared memory", bold=True)
    drawing.text(216, 98, "3. Pick: all tokens at once", bold=True)
    cell, per_group = 19.0, SIZE // CANDIDATES
    for token, groups in enumerate(kept):
        y, groups = 106.0 + 26 * token, sorted(groups)
        drawing.note(8, y + 14, f"token {token}")
        for group in range(GROUPS):
            inside = group in groups
            drawing.box(48 + group * cell, y, cell - 1, 20, _TOKENS[token] if inside else "pale", f"g{group}", size=9)
        drawing.line((202, y + 10), (214, y + 10))
        drawing.line((210, y + 7), (214, y + 10), (210, y + 13))
        for lane in range(8):
            drawing.box(
                222 + lane * cell + 2 * (lane // per_group),
                y,
                cell - 1,
                20,
                _TOKENS[token],
                f"g{groups[lane // per_group]}",
                size=9,
            )
    for lane in range(8):
        drawing.text(231 + lane * cell + 2 * (lane // per_group), 222, str(lane), size=9, anchor="middle", kind="quiet")
    drawing.note(8, 222, "lanes 8 t to 8 t + 7 pick for token t; t = 0:")
    drawing.note(8, 240, f"Grey: dropped groups. A lane on the right sorts {CANDIDATES} keys of a kept group.")
    return drawing


def chart(steps: Sequence[tuple[str, float, float, float | None]]) -> Drawing:
    """Draw each step's times: measured, estimated, and of the estimate its slowest pipe.

    Parameters
    ----------
    steps : sequence of (name, estimate, slowest pipe, measured or None)
        Times in microseconds. Steps that take much longer than the others are drawn to a scale of their own.
    """
    drawing = Drawing("Time of each step, us")
    most = lambda step: max(step[1], step[3] or 0)
    longest = sorted(map(most, steps))[-2]
    left, y = 128.0, 32.0
    for step in steps:
        name, estimate, pipe, us = step
        is_cut = most(step) > longest
        scale = (WIDTH - left - 44) / max(longest, most(step))
        drawing.text(left - 6, y + 16, name, size=10, anchor="end")
        for row, (value, kind) in enumerate(((us, "blue"), (estimate, "pale"))):
            if value:
                drawing.box(left, y + 12 * row, scale * value, 10, kind)
                kind = "quiet" if row else "ink"
                drawing.text(left + scale * value + 3, y + 12 * row + 9, f"{value:.3g}", size=10, kind=kind)
        drawing.box(left, y + 15, scale * pipe, 4, "orange")
        if is_cut:  # an axis break, which only bars of another scale have
            drawing.box(left + 10, y, 4, 22, "paper")
        y += 30
    drawing.legend(y + 6, [("blue", "measured"), ("pale", "estimate"), ("orange", "of the estimate: the slowest pipe")])
    if most(max(steps, key=most)) > longest:
        drawing.note(8, y + 24, "The row with a gap has a scale of its own.")
    return drawing
