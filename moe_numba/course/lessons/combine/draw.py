"""Figures of combine: placement of a token's rows, rounding of the sum, gaps in the heads, and deadlocks."""

import math

import torch

from moe_numba.course.bench.figures.style import GREEN, GREY, ORANGE, PALE, RED, SKY, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, cell, check_range, note, plural, text, tint
from moe_numba.course.lessons.dispatch_layout.draw import RANK_COLOURS
from moe_numba.expert_parallel import reference

__all__ = ["wait_cycle", "head_gaps", "problem", "deadlocked_ring", "sum_in_steps"]


def problem(is_token_in_rank, home=0):
    """Draw the rows that two or three ranks received, and which of them belong to each token of rank ``home``."""
    ranks = len(is_token_in_rank)
    check_range("the number of ranks", ranks, 2, 3)
    check_range("home", home, 0, ranks - 1)
    for chosen in is_token_in_rank:
        check_range("tokens", len(chosen), 1, 5)
    received = reference.dispatch([chosen[:, :1] for chosen in is_token_in_rank], is_token_in_rank)
    check_range("rows of a rank", max(len(result.src_idx) for result in received), 1, 11)
    tokens, tall, wide, step = len(is_token_in_rank[home]), 0.32, 0.42, 0.78
    height = 1.45 + max(ranks * step, (tokens + 1) * tall + 0.4)
    figure, axes = canvas(WIDTH, height, f"The tokens of rank {home}: their rows on {plural(ranks, 'rank')}")
    top, table = height - 0.78, WIDTH - 0.35 - (ranks + 1) * 0.62
    places = torch.full((tokens, ranks), -1)
    for rank, result in enumerate(received):
        y = top - rank * step - tall
        text(axes, 0.15, y + tall + 0.13, f"rank {rank} received", ha="left", size=8.5, colour=RANK_COLOURS[rank])
        ends = [0, *result.rank_prefix_matrix[:, rank].tolist()]
        for row, token in enumerate(result.src_idx.tolist()):
            source = next(s for s in range(ranks) if row < ends[s + 1])
            local = source == home
            if local:
                places[token, rank] = row
            cell(
                axes,
                0.15 + row * wide,
                y,
                wide,
                tall,
                f"{source}:{token}",
                fill=RANK_COLOURS[source] if local else WHITE,
                edge=WHITE if local else PALE,
                colour=None if local else GREY,
                size=8,
                label="own row" if local else "row",
            )
        if ends[home] < ends[home + 1]:
            first, last = 0.15 + ends[home] * wide, 0.15 + ends[home + 1] * wide
            axes.plot(
                [first + 0.03, last - 0.03], [y - 0.07] * 2, color=RANK_COLOURS[home], linewidth=2.2, label="section"
            )
            end = 0.15 + len(result.src_idx) * wide
            arrow(
                axes,
                (end + 0.08, y + tall / 2),
                (table - 0.05, top - (tokens + 1) * tall / 2 - 0.12 * rank),
                colour=RANK_COLOURS[home],
                label="home",
            )
    text(axes, table + 0.3, top + 0.15, "token", size=8, colour=GREY)
    for rank in range(ranks):
        text(axes, table + (rank + 1.5) * 0.62, top + 0.15, f"rank {rank}", size=8, colour=RANK_COLOURS[rank])
    for token in range(tokens):
        y = top - (token + 1) * tall
        text(axes, table + 0.3, y + tall / 2, str(token), size=8.5)
        for rank in range(ranks):
            row = int(places[token, rank])
            cell(
                axes,
                table + (rank + 1) * 0.62,
                y,
                0.62,
                tall,
                row if row >= 0 else "-",
                edge=PALE,
                fill=tint(RANK_COLOURS[home]) if row >= 0 else WHITE,
                colour=None if row >= 0 else GREY,
                label="place",
            )
    text(axes, table + (1 + ranks / 2) * 0.62, top - tokens * tall - 0.16, "row index on the rank", size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.17,
        "A row is source:token. Rows are ordered by source rank, so those of one source are contiguous.",
    )
    return figure


def sum_in_steps(values):
    """Draw a sum accumulated in bfloat16, with a rounding per step, and in float32, with one rounding at the end."""
    check_range("the number of values", len(values), 2, 8)
    rows = torch.tensor(values).bfloat16()
    narrow, wide, steps = rows[0], rows[0].float(), []
    steps.append((rows[0].item(), narrow.item(), wide.item()))
    for value in rows[1:]:
        narrow, wide = (narrow.float() + value.float()).bfloat16(), wide + value.float()
        steps.append((value.item(), narrow.item(), wide.item()))
    exact, rounded = rows.double().sum().item(), wide.bfloat16().item()
    tall, height = 0.29, 1.75 + 0.29 * len(steps)
    figure, axes = canvas(WIDTH, height, f"One element of {len(steps)} rows: rounded at each step, or once")
    top, columns = height - 0.85, ((2.0, "value of the row"), (4.3, "sum in bfloat16"), (6.7, "sum in float32"))
    for x, words in columns:
        text(axes, x + 0.75, top + 0.14, words, size=8.5, colour=GREY)
    for i, step in enumerate(steps):
        y = top - (i + 1) * tall
        text(axes, 1.85, y + tall / 2, f"rank {i}", ha="right", size=8.5)
        for (x, _), value, colour, label in zip(
            columns, step, (WHITE, tint(ORANGE), tint(SKY)), ("value", "narrow", "wide"), strict=True
        ):
            cell(axes, x, y, 1.5, tall, f"{value:.7g}", fill=colour, edge=PALE, label=label, size=8.5)
    y = top - len(steps) * tall - 0.38
    text(axes, 1.85, y + tall / 2, f"exact: {exact:.8g}", ha="right", size=8.5)
    for x, value, label in ((4.3, narrow.item(), "narrow result"), (6.7, rounded, "rounded once")):
        cell(axes, x, y, 1.5, tall, f"{value:.7g}", fill=WHITE, label=label)
    note(
        axes,
        0.15,
        0.17,
        f"Bottom: both as bfloat16. Errors: {abs(narrow.item() - exact):.3g} rounded at each step, "
        f"{abs(rounded - exact):.3g} rounded once.",
    )
    return figure


def head_gaps(before, after, none):
    """Draw one rank's column of send_head for a channel, before and after its gaps are filled.

    ``none`` encodes that no row follows.
    """
    check_range("the number of tokens", len(before), 2, 14)
    wide, tall, left = min(0.62, 7.4 / len(before)), 0.36, 1.6
    figure, axes = canvas(WIDTH, 2.65, "Filling gaps in send_head, from the last token to the first")
    x = [left + (i + 0.5) * wide for i in range(len(before))]
    upper, lower = 1.5, 0.6
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        text(axes, x[i], upper + tall + 0.12, str(i), size=8, colour=GREY)
        cell(
            axes,
            x[i] - 0.46 * wide,
            upper,
            0.92 * wide,
            tall,
            old,
            fill=tint(SKY) if old >= 0 else WHITE,
            edge=PALE,
            label="before",
            size=8.5,
        )
        value = "none" if new == -none - 1 else new
        cell(
            axes,
            x[i] - 0.46 * wide,
            lower,
            0.92 * wide,
            tall,
            value,
            edge=PALE,
            label="after",
            size=8.5,
            fill=tint(SKY) if old >= 0 else tint(ORANGE),
        )
        if old < 0:
            source = next((j for j in range(i + 1, len(before)) if before[j] >= 0), None)
            if source is not None:
                arrow(axes, (x[source], upper - 0.02), (x[i], lower + tall + 0.02), colour=ORANGE, label="filled")
    for y, words in ((upper, "send_head"), (lower, "with gaps filled")):
        text(axes, left - 0.1, y + tall / 2, words, ha="right", size=8.5)
    text(axes, left - 0.1, upper + tall + 0.12, "token", ha="right", size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.17,
        "Blue: the row's position in the queue. Orange: -n - 1, where n is the position of the next row. "
        "none: no row follows.",
    )
    return figure


def deadlocked_ring(ring, chunk, head, tail, warps, tokens):
    """Draw a deadlocked ring. ``warps`` lists for each reducing warp the slots it has read and the one it waits for."""
    check_range("ring", ring, 2, 10)
    check_range("the number of warps", len(warps), 1, 6)
    wide, tall, left = 0.62, 0.42, 1.75
    height = 2.75 + 0.36 * len(warps)
    free = ring - (tail - head)
    title = f"A ring of {ring} rows, chunks of {chunk}, {plural(len(warps), 'reducing warp')}"
    figure, axes = canvas(WIDTH, height, title)
    y = height - 1.3
    for slot in range(ring):
        place = next((p for p in range(head, tail) if p % ring == slot), None)
        fill = WHITE if place is None else tint(RED)
        cell(
            axes,
            left + slot * wide,
            y,
            wide,
            tall,
            "free" if place is None else place,
            fill=fill,
            colour=GREY if place is None else None,
            label="slot",
        )
        text(axes, left + (slot + 0.5) * wide, y + tall + 0.13, str(slot), size=7.5, colour=GREY)
    text(axes, left - 0.12, y + tall / 2, "the ring's slots", ha="right", size=8.5)
    text(axes, left + ring * wide + 0.2, y + tall / 2, f"head {head}, tail {tail}: {free} free", ha="left", size=9)
    text(axes, left - 0.12, y - 0.35, "the sender", ha="right", size=8.5)
    text(
        axes,
        left,
        y - 0.35,
        f"needs {min(chunk, tokens - tail)} free slots and waits for the head to advance",
        ha="left",
        size=9,
        colour=RED,
    )
    for i, (read, waits) in enumerate(warps):
        row = y - 0.85 - 0.36 * i
        text(axes, left - 0.12, row + 0.14, f"reducing warp {i + 1}", ha="right", size=8.5)
        needs = read[-1] + 1 if read else 0
        words = f"has read {', '.join(map(str, read[-3:]))}" if read else "has read nothing yet"
        text(axes, left, row + 0.14, words, ha="left", size=9)
        least = f"needs no position below {needs}" + (": the minimum" if needs == head else "")
        text(axes, left + 2.1, row + 0.14, least, ha="left", size=9, colour=RED if needs == head else GREEN)
        if waits is not None:
            text(axes, WIDTH - 0.15, row + 0.14, f"waits for position {waits}", ha="right", size=9)
    note(axes, 0.15, 0.17, "All red slots have been read, but the head is the minimum of the warps' positions.")
    return figure


def wait_cycle(waits):
    """Draw a cycle of waits: each of ``waits``, pairs (name, reason), waits for the next, the last for the first."""
    check_range("the number of waits", len(waits), 3, 8)
    height, n = 3.75, len(waits)
    figure, axes = canvas(WIDTH, height, "A cycle of waits")
    middle, across, up = (WIDTH / 2, 1.75), 3.35, 1.15
    wide, tall = 1.5, 0.4
    spots = [
        (middle[0] + across * math.sin(2 * math.pi * i / n), middle[1] + up * math.cos(2 * math.pi * i / n))
        for i in range(n)
    ]
    for i, (name, why) in enumerate(waits):
        (x, y), (to_x, to_y) = spots[i], spots[(i + 1) % n]
        box(
            axes,
            x - wide / 2,
            y - tall / 2,
            wide,
            tall,
            name,
            fill=tint(ORANGE if "sends" in name else SKY),
            label="waiter",
            size=9,
        )
        length = math.hypot(to_x - x, to_y - y)
        cut = 0.06 + min(0.5 * wide * length / max(abs(to_x - x), 1e-9), 0.5 * tall * length / max(abs(to_y - y), 1e-9))
        start = x + (to_x - x) * cut / length, y + (to_y - y) * cut / length
        end = to_x - (to_x - x) * cut / length, to_y - (to_y - y) * cut / length
        arrow(axes, start, end, colour=RED if "space" in why else GREY, label="waits")
        inside = 0.36
        at = (x + to_x) / 2, (y + to_y) / 2
        text(
            axes,
            at[0] + (middle[0] - at[0]) * inside,
            at[1] + (middle[1] - at[1]) * inside,
            why,
            size=8.5,
            colour=RED if "space" in why else GREY,
        )
    note(axes, 0.15, 0.17, "Each waits for the one that its arrow points to.")
    return figure
