"""Figures of the gate: the problem, the thread model, ranks, sorting, picks and redistribution."""

from collections.abc import Sequence

import numpy as np

from moe_numba.course.bench.figures.style import BLUE, GREY, INK, ORANGE, PALE, SKY, WIDTH
from moe_numba.course.draw.canvas import arrow, box, canvas, ink_on, lane_colour, note, plural, text
from moe_numba.course.draw.player import Box, Frame, Label
from moe_numba.gate.reference import biased_grouped_topk


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
        4.0,
        f"One token: {len(choice)} experts in {num_groups} groups, {topk_group} groups kept, {topk} experts chosen",
    )
    left, bottom, width, height = 0.95, 0.95, WIDTH - 1.15, 2.0
    gap = 0.08  # inches between groups
    step, tallest = (width - gap * num_groups) / len(choice), float(choice.max())
    at = lambda place: left + place * step + gap * (int(place) // size + 0.5)  # of an expert, in its group's frame
    high = lambda value: bottom + height * value / tallest
    for tick in range(int(tallest / 0.5) + 1):
        text(axes, left - 0.08, high(tick / 2), f"{tick / 2:.1f}", size=8, colour=GREY, ha="right")
        axes.plot([left - 0.04, left], [high(tick / 2)] * 2, color=GREY, linewidth=0.8)
    for group in range(num_groups):
        x, inside = at(group * size), group in kept
        fill, edge, colour = ("#EEF5FA", BLUE, BLUE) if inside else ("#F4F4F4", PALE, GREY)
        box(axes, x - 0.02, bottom, size * step + 0.04, height + 0.08, fill=fill, edge=edge)
        text(axes, x + size * step / 2, bottom - 0.17, f"group {group}", size=8.5, colour=colour)
        text(axes, x + size * step / 2, bottom - 0.37, f"{sums[group]:.3f}", size=8.5, colour=colour)
        word, weight = ("kept", "bold") if inside else ("dropped", "normal")
        text(axes, x + size * step / 2, bottom - 0.57, word, size=8.5, colour=colour, weight=weight)
    for expert, value in enumerate(choice.tolist()):
        colour = BLUE if expert in weight_of else SKY if expert // size in kept else PALE
        box(axes, at(expert + 0.1), bottom, 0.8 * step, high(value) - bottom, fill=colour, edge="none")
    chosen, above = sorted(weight_of), bottom + height + 0.3
    places = _spread([at(expert + 0.5) for expert in chosen], 0.27, left, left + width)
    for expert, place in zip(chosen, places, strict=True):
        x, y = at(expert + 0.5), high(float(choice[expert])) + 0.02
        axes.plot([x, x, place], [y, above - 0.16, above - 0.08], color=BLUE, linewidth=0.7)
        text(axes, place, above, str(expert), size=8, colour=BLUE)
    text(axes, 0.3, bottom + height / 2, "score + bias", colour=GREY, rotation=90)
    text(axes, left - 0.08, bottom - 0.37, "sum", size=8, colour=GREY, ha="right")
    note(axes, left, 0.14, "Numbered bars: chosen experts. Below each group: the sum of its two best.")
    return figure


def _spread(places, distance, low, high):
    """Move sorted places apart to at least a distance, within limits."""
    for number in range(1, len(places)):
        places[number] = max(places[number], places[number - 1] + distance)
    places[-1] = min(places[-1], high)
    for number in reversed(range(len(places) - 1)):
        places[number] = max(low, min(places[number], places[number + 1] - distance))
    return places


def thread_model(num_experts, num_groups, warps=6):
    """Draw the thread model of SGLang's kernel: token and group of each CTA, warp and lane; a colour per token."""
    rows, held = max(1, 32 // num_groups), num_experts // num_groups
    title = f"The thread model: {num_experts} experts in {num_groups} groups"
    figure, axes = canvas(WIDTH, 0.28 * warps + 2.8, title)
    grid_y = 0.28 * warps + 1.98
    block_y = grid_y - 0.64
    text(axes, 0.15, grid_y + 0.18, "grid", ha="left", weight="bold")
    for i, words in enumerate(("CTA 0", "CTA 1", "CTA 2", "...")):
        fill, edge = PALE if i == 0 else "white", "white" if i == 3 else INK
        box(axes, 1.3 + i * 1.25, grid_y, 1.15, 0.36, words, fill=fill, edge=edge)
    text(axes, 6.4, grid_y + 0.18, f"a CTA: {warps} x {rows} = {warps * rows} tokens", ha="left", colour=GREY)
    text(axes, 0.15, block_y + 0.12, f"CTA (32, {warps})", ha="left", weight="bold")
    for warp in range(warps):
        y, first, row = block_y - 0.28 * warp, 32 * warp, warp * rows
        fill = PALE if warp == 0 else "white"
        box(axes, 1.3, y, 4.9, 0.24, f"warp {warp}: threads {first} to {first + 31}", fill=fill, size=8.5)
        note(axes, 6.4, y + 0.12, f"tokens {row} to {row + rows - 1}" if rows > 1 else f"token {row}")
    for x, end in ((1.3, 1.3), (2.45, 6.2)):
        axes.plot([x, end], [grid_y, block_y + 0.24], color=GREY, linewidth=1)
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
        colour, word = (BLUE, "kept") if is_kept else (GREY, "dropped")
        text(axes, left - 0.12, y + cell / 2, f"group {i}: {own:.3f}", size=8.5, ha="right", colour=colour)
        for j in range(n):
            fill = "#DDDDDD" if i == j else ORANGE if better[j] else "white"
            words, label = ("yes", "better") if better[j] else ("", "cell")
            box(axes, left + j * cell, y, cell, cell, words, fill=fill, edge=PALE, colour=INK, size=8, label=label)
        text(axes, left + n * cell + 0.6, y + cell / 2, str(sum(better)), weight="bold", colour=colour)
        text(axes, left + n * cell + 1.1, y + cell / 2, word, ha="left", colour=colour)
    lanes = max(1, 32 // n)
    comparisons = -(-n // lanes)
    note(axes, left, 0.25, f"{plural(lanes, 'lane')} per row; each makes {comparisons} of its {n} comparisons.")
    return figure


def sorting_network(values, pairs):
    """Draw a sorting network: values move to the right, and a compare-exchange puts the larger one on the upper wire.

    Steps of one level have no wire in common, so none of them waits for another.
    """
    n, depth, levels = len(values), [0] * len(values), {}
    for pair in pairs:
        level = max(depth[wire] for wire in pair)
        levels.setdefault(level, []).append(pair)
        for wire in pair:
            depth[wire] = level + 1
    columns = {level: _columns(of_level) for level, of_level in levels.items()}
    title = f"Batcher's network for {n} values: {len(pairs)} compare-exchange steps"
    figure, axes = canvas(WIDTH, 1.15 + 0.34 * n, title)
    left, right, top = 0.95, WIDTH - 0.95, 0.34 * n + 0.3
    y = [top - 0.34 * (i + 0.5) for i in range(n)]
    gap = 0.14
    wide = (right - left - gap * (len(levels) + 1)) / sum(map(len, columns.values()))
    now, x = list(values), left + gap
    for i in range(n):
        axes.plot([left, right], [y[i], y[i]], color=PALE, linewidth=1, zorder=0)
        text(axes, left - 0.08, y[i], f"{values[i]:.3f}", ha="right")
    for level, of_level in columns.items():
        width = wide * len(of_level)
        box(axes, x, top - 0.34 * n, width, 0.34 * n, fill="#F4F4F4", edge="none", label="level", zorder=-1)
        text(axes, x + width / 2, top + 0.14, f"level {level + 1}", size=8, colour=GREY)
        for number, of_column in enumerate(of_level):
            at = x + wide * (number + 0.5)
            for i, j in of_column:
                swap = now[j] > now[i]
                now[i], now[j] = max(now[i], now[j]), min(now[i], now[j])
                style = {"color": ORANGE if swap else INK, "linewidth": 1.6, "marker": "o", "markersize": 4.5}
                axes.plot([at] * 2, [y[i], y[j]], label="compare-exchange", **style)
        x += width + gap
    for i in range(n):
        text(axes, right + 0.08, y[i], f"{now[i]:.3f}", ha="left", weight="bold")
    note(axes, left, 0.14, "Orange: the two values are swapped. Steps of one level do not wait for each other.")
    return figure


def _columns(pairs):
    """Distribute the comparators of a level over columns in which they do not overlap."""
    columns = []
    for i, j in sorted(pairs):
        free = (column for column in columns if all(b < i or j < a for a, b in column))
        column = next(free, None)
        if column is None:
            columns.append(column := [])
        column.append((i, j))
    return columns


def redistribution(kept, num_groups):
    """Draw how a warp redistributes the candidates of its tokens: from lanes of all groups to lanes of kept groups.

    Parameters
    ----------
    kept : list of lists of int
        The kept groups of each of the four tokens.
    num_groups : int
    """
    tall, left, half = 0.4, 0.95, (WIDTH - 2.4) / 2
    figure, axes = canvas(WIDTH, 1.75 + tall * len(kept), "Redistributing the candidates of four tokens")
    top, middle = tall * len(kept) + 0.62, left + half + 1.25
    text(axes, left + half / 2, top + 0.36, "1. choose groups: 32 lanes, one token after another", colour=GREY)
    text(axes, middle + half / 2, top + 0.36, "2. choose experts: 8 lanes per token, all at once", colour=GREY)
    for group in range(num_groups):
        first, last = group * 32 // num_groups, (group + 1) * 32 // num_groups - 1
        text(axes, left + (group + 0.5) * half / num_groups, top + 0.12, f"{first}-{last}", size=7.5, colour=GREY)
    text(axes, left - 0.12, top + 0.12, "lanes", size=7.5, colour=GREY, ha="right")
    for token, groups in enumerate(kept):
        y, colour = top - tall * (token + 1), lane_colour(token)
        text(axes, left - 0.12, y + tall / 2, f"token {token}", ha="right", size=8.5)
        for group in range(num_groups):
            inside = group in groups
            x, wide = left + group * half / num_groups, half / num_groups
            style = {"fill": colour, "colour": ink_on(colour)} if inside else {"fill": "#EEEEEE", "colour": GREY}
            box(axes, x, y + 0.03, wide, tall - 0.06, f"g{group}", edge="white", size=8, **style)
        arrow(axes, (left + half + 0.1, y + tall / 2), (middle - 0.85, y + tall / 2))
        text(axes, middle - 0.08, y + tall / 2, f"lanes {8 * token}-{8 * token + 7}", size=7.5, colour=GREY, ha="right")
        for lane in range(8):
            group, wide = sorted(groups)[lane * len(groups) // 8], half / 8
            words = {"fill": colour, "colour": ink_on(colour), "label": "candidates"}
            box(axes, middle + lane * wide, y + 0.03, wide, tall - 0.06, f"g{group}", edge="white", size=8, **words)
    note(axes, 0.2, 0.4, "Grey: dropped groups. Their lanes would have nothing to do while the experts are chosen.")
    note(axes, 0.2, 0.16, "A colour is a token. Each lane on the right holds an equal part of a kept group (g).")
    return figure


def picks_of(events, warp=0):
    """Return the picks of a warp in a trace (`simulator.trace`), as `pick_frames` takes them.

    Each pick is a ``redux.sync.max`` of the lanes' best keys, followed by a ballot. A key is the bits of a float32 with
    the magnitude of negative floats flipped; the least int32 stands for a lane without a key.
    """
    fronts, ballots = [], []
    for event in (event for event in events if event.warp == warp):
        if event.what.startswith("redux"):
            if not fronts or len(fronts[-1]) == 32:
                fronts.append({})
            fronts[-1][event.lane] = int(event.details["value"])
        elif event.what == "ballot_sync" and len(ballots) < len(fronts) and event.lane == 0:
            ballots.append(int(event.details["result"]) & 0xFFFFFFFF)
    return [([_float_of(keys[lane]) for lane in range(32)], ballot) for keys, ballot in zip(fronts, ballots)]


def _float_of(key):
    """Return the float of a key, or None for that of no expert."""
    bits = np.int32(key ^ ((key >> 31) & 0x7FFFFFFF))
    return None if key == -(1 << 31) else float(bits.view(np.float32))


def pick_frames(picks: Sequence[tuple[list[float | None], int]], num_groups: int):
    """Return a frame for each pick from sorted lanes: redux finds the maximum, a ballot the lane that drops it.

    Parameters
    ----------
    picks : sequence of (fronts, ballot)
        The best remaining value of each lane, None for a lane of a dropped group, and the ballot of the lanes that
        hold the maximum.
    num_groups : int

    Returns
    -------
    list of Frame, and the width and height of the drawing in pixels.
    """
    lanes = 32 // num_groups  # of a group
    wide, tall, left, top = 700 // num_groups, 26, 60, 40
    frames = []
    for fronts, ballot in picks:
        best = max(value for value in fronts if value is not None)
        winner = (ballot & -ballot).bit_length() - 1
        shapes = [Label(left + wide * (g + 0.5), 14, f"group {g}", centred=True) for g in range(num_groups)]
        for lane, value in enumerate(fronts):
            group, row = divmod(lane, lanes)
            kind = "active" if lane == winner else "plain"
            words = f"{lane}: dropped" if value is None else f"{lane}: {value:.4f}"
            where = left + wide * group, top - 12 + tall * row, wide - 6, tall - 4
            shapes.append(Box(*where, words, kind, group=f"lane {lane}"))
        chosen = "that of" if ballot.bit_count() == 1 else "ffs selects the lowest,"
        says = (
            f"redux.sync.max returns the key of {best:.4f}. The ballot has {plural(ballot.bit_count(), 'bit')}: "
            f"{chosen} lane {winner}, which drops its first value."
        )
        frames.append(Frame(says, shapes))
    return frames, left + wide * num_groups, top + tall * lanes
