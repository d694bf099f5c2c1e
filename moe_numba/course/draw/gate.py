"""Figures of the gate: the problem, split of work among lanes, shuffles, ranks, sorting and top-k."""

import numpy as np

from moe_numba.course.bench.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, WIDTH
from moe_numba.course.draw.canvas import arrow, box, canvas, ink_on, lane_colour, note, plural, text
from moe_numba.gate.reference import biased_grouped_topk

# How one warp of 32 lanes splits its work: name -> (tokens of the warp, lanes for a token)
LAYOUTS = {"a thread for a token": (32, 1), "a thread for a group": None, "a warp for a token": (1, 32)}


def problem(logits, bias, num_groups, topk_group, topk):
    """Draw one token's biased scores as bars, with the groups that are kept and the experts that are chosen."""
    choice = (logits.float().sigmoid() + bias).double()
    options = {"num_expert_group": num_groups, "topk_group": topk_group}
    weights, ids = biased_grouped_topk(logits[None].float(), bias, topk, **options)
    weight_of = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    sums = choice.view(num_groups, -1).topk(2, dim=1).values.sum(dim=1)
    kept = set(sums.sort(descending=True, stable=True).indices[:topk_group].tolist())
    size = len(choice) // num_groups
    figure, axes = canvas(
        WIDTH,
        3.95,
        f"One token: {len(choice)} experts in {num_groups} groups, {topk_group} groups kept, {topk} experts chosen",
    )
    left, bottom, width, height = 0.6, 0.95, WIDTH - 0.8, 2.0
    step, tallest = width / len(choice), float(choice.max())
    for group in range(num_groups):
        x, inside = left + group * size * step, group in kept
        fill, edge = ("#EEF5FA", BLUE) if inside else ("#F4F4F4", PALE)
        box(axes, x + 0.02, bottom, size * step - 0.04, height + 0.25, fill=fill, edge=edge)
        text(axes, x + size * step / 2, bottom - 0.17, f"group {group}", size=8.5, colour=INK if inside else GREY)
        text(axes, x + size * step / 2, bottom - 0.37, f"{sums[group]:.3f}", size=8.5, colour=BLUE if inside else GREY)
        text(
            axes,
            x + size * step / 2,
            bottom - 0.57,
            "kept" if inside else "out",
            size=8.5,
            colour=BLUE if inside else GREY,
            weight="bold" if inside else "normal",
        )
    for expert, value in enumerate(choice.tolist()):
        colour = RED if expert in weight_of else SKY if expert // size in kept else PALE
        box(axes, left + (expert + 0.1) * step, bottom, 0.8 * step, height * value / tallest, fill=colour, edge="none")
    named = []
    for expert in sorted(weight_of):
        x, y = left + (expert + 0.5) * step, bottom + height * float(choice[expert]) / tallest + 0.04
        while any(abs(x - at) < 0.13 and abs(y - up) < 0.28 for at, up in named):  # avoid the neighbour's label
            y += 0.05
        named.append((x, y))
        text(axes, x, y, str(expert), size=7, colour=RED, va="bottom", rotation=90)
    text(axes, 0.3, bottom + height / 2, "score + bias", colour=GREY, rotation=90)
    text(axes, 0.5, bottom - 0.37, "sum", size=8, colour=GREY, ha="right")
    note(axes, left, 0.14, "Bars with a number are chosen experts. Below each group: the sum of its top two.")
    return figure


def work_split(layout, num_experts=256, num_groups=8):
    """Draw which lane of a warp holds which experts of which token; ``layout`` is one of ``LAYOUTS``."""
    if layout not in LAYOUTS:
        raise ValueError(f"the layout is {layout!r}, but must be one of {', '.join(LAYOUTS)}")
    tokens, lanes = LAYOUTS[layout] or (32 // num_groups, num_groups)
    held, tall = num_experts // lanes, {32: 0.075, 1: 0.4}.get(tokens, 0.3)
    left, width, below = 1.0, WIDTH - 1.2, 0.72
    height = below + tokens * tall + 0.55
    figure, axes = canvas(WIDTH, height, f"Split of work: {layout}")
    for token in range(tokens):
        y = below + (tokens - 1 - token) * tall
        for i in range(lanes):
            lane = token * lanes + i
            words = "" if tall < 0.2 else f"lane {lane}" if held >= num_experts / 16 else str(lane)
            box(
                axes,
                left + i * width / lanes,
                y,
                width / lanes,
                tall * 0.9,
                words,
                fill=lane_colour(lane),
                edge="white",
                colour=ink_on(lane_colour(lane)),
                size=8,
                line=0.5,
                label="held",
            )
        if tall > 0.2 or token in (0, tokens - 1):
            text(axes, left - 0.08, y + tall * 0.45, f"token {token}", size=8.5, ha="right")
    for group in range(num_groups + 1):
        x = left + group * width / num_groups
        axes.plot([x, x], [below - 0.1, below + tokens * tall], color=INK, linewidth=1.1)
        if group < num_groups:
            text(axes, x + width / num_groups / 2, below - 0.15, f"group {group}", size=8, colour=GREY)
    share = f"{held} experts" if lanes != num_groups else f"one group, {held} experts"
    words = f"A warp works on {plural(tokens, 'token')}. A lane holds {share}."
    if lanes > num_groups:
        words += f" A group is {plural(lanes // num_groups, 'lane')}."
    note(axes, left, 0.2, words)
    return figure


def butterfly(values, what="highest"):
    """Draw the ``shfl_xor`` rounds after which every lane holds the lowest or highest of 2**n values."""
    choose, lanes = {"lowest": min, "highest": max}[what], len(values)
    rounds = lanes.bit_length() - 1
    title = f"A butterfly: {lanes} lanes find the {what} value in {rounds} rounds"
    figure, axes = canvas(WIDTH, 1.15 + 0.85 * rounds, title)
    left, wide = 1.5, (WIDTH - 1.8) / lanes
    x = [left + (lane + 0.5) * wide for lane in range(lanes)]
    y = [0.3 + 0.85 * (rounds - r) for r in range(rounds + 1)]
    answer, values = choose(values), list(values)
    for r in range(rounds + 1):
        text(axes, 0.15, y[r], "start" if r == 0 else f"xor {1 << r - 1}", size=9, colour=GREY, ha="left")
        for lane, value in enumerate(values):
            fill = ORANGE if value == answer else "white"
            box(axes, x[lane] - 0.27, y[r] - 0.13, 0.54, 0.26, f"{value:.2f}", fill=fill, size=8.5, label="value")
        if r == 0:
            for lane in range(lanes):
                text(axes, x[lane], y[0] + 0.27, f"lane {lane}", size=8.5, colour=GREY)
        if r < rounds:
            for lane in range(lanes):
                partner = lane ^ (1 << r)
                ends = (x[partner], y[r] - 0.14), (x[lane], y[r + 1] + 0.14)
                arrow(axes, *ends, colour=lane_colour(r), label="shuffle")
                axes.plot([x[lane]] * 2, [y[r] - 0.14, y[r + 1] + 0.14], color=PALE, linewidth=0.9, zorder=0)
            values = [choose(value, values[lane ^ (1 << r)]) for lane, value in enumerate(values)]
    return figure


def thread_model(num_experts, num_groups, warps=6):
    """Draw the thread model of SGLang's kernel: token and group of each block, warp and lane."""
    rows, held = max(1, 32 // num_groups), num_experts // num_groups
    title = f"The thread model: {num_experts} experts in {num_groups} groups"
    figure, axes = canvas(WIDTH, 0.28 * warps + 2.8, title)
    grid_y = 0.28 * warps + 1.98
    block_y = grid_y - 0.64
    text(axes, 0.15, grid_y + 0.18, "grid", ha="left", weight="bold")
    for i, words in enumerate(("block 0", "block 1", "block 2", "...")):
        fill, edge = SKY if i == 0 else "white", "white" if i == 3 else INK
        box(axes, 1.3 + i * 1.25, grid_y, 1.15, 0.36, words, fill=fill, edge=edge)
    text(axes, 6.4, grid_y + 0.18, f"a block: {warps} x {rows} = {warps * rows} tokens", ha="left", colour=GREY)
    text(axes, 0.15, block_y + 0.12, f"block (32, {warps})", ha="left", weight="bold")
    for warp in range(warps):
        y, first, row = block_y - 0.28 * warp, 32 * warp, warp * rows
        fill = ORANGE if warp == 0 else "white"
        box(axes, 1.3, y, 4.9, 0.24, f"warp {warp}: threads {first} to {first + 31}", fill=fill, size=8.5)
        note(axes, 6.4, y + 0.12, f"tokens {row} to {row + rows - 1}" if rows > 1 else f"token {row}")
    for x, end in ((1.3, 1.3), (2.45, 6.2)):
        axes.plot([x, end], [grid_y, block_y + 0.24], color=SKY, linewidth=1)
    y = block_y - 0.28 * (warps - 1) - 0.72
    text(axes, 0.15, y + 0.46, "warp 0", ha="left", weight="bold")
    wide = (WIDTH - 0.4) / 32
    for lane in range(32):
        fill, x = lane_colour(lane // num_groups), 0.2 + lane * wide
        box(axes, x, y, wide, 0.3, str(lane), fill=fill, colour=ink_on(fill), edge="white", size=7.5, label="lane")
    for row in range(rows):
        first = row * num_groups
        words = f"token {row}: lanes {first} to {first + num_groups - 1}" if rows <= 4 else f"token {row}"
        text(axes, 0.2 + (first + num_groups / 2) * wide, y - 0.15, words, size=8.5)
    note(axes, 0.2, y - 0.42, f"Each of the {num_groups} lanes of a token holds one group: {held} experts (VPT).")
    return figure


def rank_by_counting(sums, kept):
    """Draw a rank by counting: a group is kept if few groups have a higher score."""
    n = len(sums)
    cell, left = 0.42, 1.7
    height = 1.5 + cell * n
    figure, axes = canvas(WIDTH, height, f"Rank by counting: a group is kept if fewer than {kept} groups are better")
    top = height - 0.95
    text(axes, left + n * cell / 2, top + 0.42, "the group of this column is better", size=8.5, colour=GREY)
    text(axes, left + n * cell + 0.6, top + 0.16, "better", size=8.5, colour=GREY)
    for i, own in enumerate(sums):
        y = top - (i + 1) * cell
        text(axes, left + (i + 0.5) * cell, top + 0.16, str(i), size=8.5)
        better = [other > own or (other == own and j < i) for j, other in enumerate(sums)]
        is_kept = sum(better) < kept
        colour, word = (BLUE, "kept") if is_kept else (GREY, "out")
        text(axes, left - 0.12, y + cell / 2, f"group {i}: {own:.3f}", size=8.5, ha="right", colour=colour)
        for j in range(n):
            fill = "#DDDDDD" if i == j else RED if better[j] else "white"
            words, label = ("yes", "better") if better[j] else ("", "cell")
            box(axes, left + j * cell, y, cell, cell, words, fill=fill, edge=PALE, colour="white", size=8, label=label)
        text(axes, left + n * cell + 0.6, y + cell / 2, str(sum(better)), weight="bold", colour=colour)
        text(axes, left + n * cell + 1.1, y + cell / 2, word, ha="left", colour=colour)
    lanes = max(1, 32 // n)
    comparisons = -(-n // lanes)
    note(axes, left, 0.25, f"{plural(lanes, 'lane')} per row; each makes {comparisons} of its {n} comparisons.")
    return figure


FLOW = {  # each column's steps; the last of a column that loops asks whether it is done
    "prepare": (
        "Find token, group, first expert",
        "Token in range?",
        "Load logits and bias",
        "Sigmoid",
        "Add the bias",
    ),
    "choose groups": (
        "Top two of the lane's group",
        "Their sum is the group's score",
        "Lowest group, by shuffles",
        "Exclude it",
        "Enough groups excluded?",
    ),
    "choose experts": (
        "Maximum of the lane",
        "Maximum of all, by shuffles",
        "Its lane stores and clears it",
        "Add its weight to the sum",
        "All topk experts chosen?",
    ),
    "finish": ("Divide by the sum",),
}


def flow_chart():
    """Draw the phases of SGLang's kernel in columns, with its two loops."""
    figure, axes = canvas(WIDTH, 4.65, "SGLang's kernel as a flow chart")
    wide, tall, gap, top = 1.95, 0.42, 0.2, 3.22
    for column, (name, steps) in enumerate(FLOW.items()):
        x, colour = 0.2 + column * (wide + 0.33), (BLUE, GREEN, RED, INK)[column]
        text(axes, x + wide / 2, top + tall + 0.18, name, colour=colour, weight="bold")
        for i, words in enumerate(steps):
            y, question = top - i * (tall + gap), words.endswith("?") and i > 0
            fill, line = ("#F4F4F4", "--") if question else ("white", "-")
            box(axes, x, y, wide, tall, words, fill=fill, edge=colour, size=8, label="step", linestyle=line)
            if i:
                arrow(axes, (x + wide / 2, y + tall + gap), (x + wide / 2, y + tall), colour=colour)
        first, last = top + tall / 2, top - (len(steps) - 1) * (tall + gap) + tall / 2
        if steps[-1].endswith("?"):
            axes.plot([x, x - 0.1, x - 0.1], [last, last, first], color=colour, linewidth=1.1)
            arrow(axes, (x - 0.1, first), (x, first), colour=colour)
            text(axes, x + 0.02, last - 0.33, "no", size=8, colour=colour, ha="left")
            text(axes, x + wide - 0.02, last - 0.33, "yes", size=8, colour=GREY, ha="right")
        if column + 1 < len(FLOW):
            corner, next_x, high = x + wide + 0.14, x + 0.33 + 1.5 * wide, top + tall + 0.42
            axes.plot([x + wide, corner, corner, next_x], [last, last, high, high], color=GREY, linewidth=1.1)
            arrow(axes, (next_x, high), (next_x, high - 0.13), colour=GREY)
    note(
        axes,
        0.2,
        0.15,
        "If the token is out of range, a thread of SGLang's kernel returns; ours continues and stores nothing.",
    )
    return figure


def sorting_network(values, pairs):
    """Draw a sorting network: values move to the right, and a comparator puts the larger one on the upper wire."""
    n, stages, free = len(values), [], [0] * len(values)
    for i, j in pairs:  # as far left as the wires allow
        stage = max(free[i : j + 1])
        stages.append(stage)
        free[i : j + 1] = [stage + 1] * (j + 1 - i)
    count = max(stages) + 1
    figure, axes = canvas(WIDTH, 0.95 + 0.34 * n, f"Batcher's network for {n} values: {len(pairs)} comparators")
    left, right, top = 0.95, WIDTH - 0.95, 0.34 * n + 0.2
    y = [top - 0.34 * (i + 0.5) for i in range(n)]
    x = [left + (stage + 0.5) * (right - left) / count for stage in range(count)]
    now = list(values)
    for i in range(n):
        axes.plot([left, right], [y[i], y[i]], color=PALE, linewidth=1, zorder=0)
        text(axes, left - 0.08, y[i], f"{values[i]:.2f}", ha="right")
    for (i, j), stage in zip(pairs, stages, strict=True):
        swap = now[j] > now[i]
        now[i], now[j] = max(now[i], now[j]), min(now[i], now[j])
        axes.plot(
            [x[stage]] * 2,
            [y[i], y[j]],
            color=RED if swap else INK,
            linewidth=1.6,
            marker="o",
            markersize=4.5,
            label="comparator",
        )
        if swap:
            text(axes, x[stage] + 0.05, y[i] + 0.09, f"{now[i]:.2f}", size=7, colour=RED, ha="left")
    for i in range(n):
        text(axes, right + 0.08, y[i], f"{now[i]:.2f}", ha="left", weight="bold")
    note(axes, left, 0.14, "Red: the two values are swapped. The small number is the one that moves up.")
    return figure


def pick_loop(lanes, picks, title="The pick loop"):
    """Draw top-k by picks from sorted lanes: redux finds the maximum, ballot and ffs its lane, which drops it."""
    lanes, depth = [sorted(lane, reverse=True) for lane in lanes], max(map(len, lanes))
    rows, wide = len(lanes), (WIDTH - 0.4) / picks
    cell = min(0.5, (wide - 0.95) / depth)
    figure, axes = canvas(WIDTH, 1.75 + 0.3 * rows, title)
    for pick in range(picks):
        left, top = 0.3 + pick * wide, 0.3 * rows + 0.85
        fronts = [lane[0] if lane else -np.inf for lane in lanes]
        best = max(fronts)
        winner = fronts.index(best)
        votes = "".join("1" if front == best else "0" for front in reversed(fronts))
        text(axes, left, top + 0.2, f"pick {pick}: redux = {best:.2f}", ha="left", size=9, weight="bold")
        for lane, values in enumerate(lanes):
            y = top - 0.3 * (lane + 1)
            won = lane == winner
            text(axes, left + 0.55, y + 0.13, f"lane {lane}", size=8, ha="right", colour=INK if won else GREY)
            for i, value in enumerate(values):
                fill, edge = ("white", PALE) if i else (ORANGE if won else "#EEF5FA", INK)
                label = "winner" if won and i == 0 else "value"
                x = left + 0.62 + i * cell
                box(axes, x, y, cell, 0.26, f"{value:.2f}", fill=fill, edge=edge, size=8, label=label)
        text(axes, left, 0.6, f"ballot = {votes}", ha="left", size=8.5, colour=BLUE)
        text(axes, left, 0.36, f"ffs: lane {winner} wins, drops its first", ha="left", size=8.5, colour=RED)
        lanes[winner].pop(0)
    note(axes, 0.3, 0.11, "The ballot is written as a binary number: lane 0 is the last digit.")
    return figure
