"""Figures of the alignment in one launch: writers, ranks, the exchange of counts, who waits for whom, words."""

import numpy as np

from moe_numba.align import reference
from moe_numba.course.bench.figures.style import BLUE, COLOURS, GREY, INK, ORANGE, PALE, PURPLE, RED, SKY, WIDTH
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

EMPTY = "#F4F4F4"
_NARROW = 5.4  # inches: legible on a phone
PHASES = dict(zip(("start", "count", "exchange", "scan", "write", "sort kernel"), COLOURS, strict=False))


def two_launches():
    """Draw what the SMs do in version 0x5, with its two launches, and in one launch."""
    left, tall, each = 1.1, 0.21, 0.24
    versions = (
        (
            "0x5: two launches",
            (
                {
                    0: (("start", 0.35), ("count", 1.7), ("scan", 0.55), ("write", 0.45)),
                    1: (("start", 0.35), ("fill", 1.5)),
                },
                dict.fromkeys(range(4), (("start", 0.35), ("sort kernel", 2.1))),
            ),
        ),
        (
            "one launch",
            (
                dict.fromkeys(
                    range(4), (("start", 0.35), ("count", 0.4), ("exchange", 0.65), ("scan", 0.45), ("write", 0.55))
                ),
            ),
        ),
    )
    height = 1.0 + len(versions) * (4 * each + 0.55)
    figure, axes = canvas(7.2, height, "What the SMs do (schematic, not to scale)")
    y = height - 0.72
    for name, launches in versions:
        text(axes, 0.15, y, name, ha="left", weight="bold")
        x = left
        for launch in launches:
            for sm in range(4):
                at, low = x, y - 0.2 - (sm + 1) * each
                text(axes, left - 0.12, low + tall / 2, f"SM {sm}", size=8, colour=GREY, ha="right")
                for phase, long in launch.get(sm, ()):
                    fill = PHASES["write" if phase == "fill" else phase]
                    words = "" if phase == "start" else phase
                    colours = {"fill": fill, "edge": WHITE, "colour": ink_on(fill)}
                    box(axes, at, low, long, tall, words, size=8, label=phase, **colours)
                    at += long
            long = max(sum(long for _, long in phases) for phases in launch.values())
            for sm in set(range(4)) - set(launch):
                low = y - 0.2 - (sm + 1) * each
                box(axes, x, low, long, tall, "idle", fill=EMPTY, edge=PALE, colour=GREY, size=8, label="idle")
            x += long + 0.2
        y -= 4 * each + 0.55
    note(
        axes,
        0.15,
        0.15,
        "Blue: the launch; it begins when the one before has ended. 'exchange': CTAs exchange counts (step 3).",
    )
    return figure


def _align(topk_ids, block_size, num_experts):
    return (t.tolist() for t in reference.moe_align_block_size(topk_ids, block_size, num_experts))


def list_writers(topk_ids, block_size, num_experts, ctas):
    """List value, kind ("assignment", "padding" or "tail") and writing CTA of each element of sorted_token_ids.

    A CTA has one warp and places its chunk of the assignments. Expert e's padding falls to warp e of the grid, modulo
    the number of warps; the tail is drawn as equal parts.
    """
    sorted_ids, expert_ids, (used,) = _align(topk_ids, block_size, num_experts)
    numel, elements = topk_ids.numel(), []
    chunk, tail = -(-numel // ctas), len(sorted_ids) - used
    for i, slot in enumerate(sorted_ids):
        if slot < numel:
            elements.append((slot, "assignment", slot // chunk))
        elif i < used:
            elements.append((slot, "padding", expert_ids[i // block_size] % ctas))
        else:
            elements.append((slot, "tail", (i - used) * ctas // tail))
    return elements


def element_writers(topk_ids, block_size, num_experts, ctas):
    """Draw which CTA writes which element of sorted_token_ids, if each CTA counts all assignments."""
    check_range("ctas", ctas, 1, 4)
    check_range("the number of assignments", topk_ids.numel(), 1, 42)
    check_range("block_size", block_size, 3, 16)
    elements, chunk = list_writers(topk_ids, block_size, num_experts, ctas), -(-topk_ids.numel() // ctas)
    check_range("the length of sorted_token_ids", len(elements), 1, 126)
    _, expert_ids, (used,) = _align(topk_ids, block_size, num_experts)
    lines = -(-len(elements) // (42 // block_size * block_size))
    a_line = -(-len(elements) // (lines * block_size)) * block_size
    tall, left = 0.27, 0.15
    wide = min(0.37, (WIDTH - 2 * left) / max(a_line, topk_ids.numel()))
    height = 2.6 + 0.58 * lines
    figure, axes = canvas(WIDTH, height, f"{plural(ctas, 'CTA')}: each element has one writer")
    y = height - 1.12
    text(axes, left, y + tall + 0.31, "topk_ids", ha="left", weight="bold")
    note(
        axes,
        left + 0.8,
        y + tall + 0.31,
        "Colour: the CTA that places the assignment. Each CTA counts all assignments.",
    )
    for slot, expert in enumerate(topk_ids.flatten().tolist()):
        x = left + slot * wide
        cell(axes, x, y, wide, tall, expert, fill=lane_colour(slot // chunk), edge=WHITE, size=7.5, label="chunk")
        text(axes, x + wide / 2, y + tall + 0.09, str(slot), size=6.5, colour=GREY)
    y -= 0.25
    text(axes, left, y, "sorted_token_ids", ha="left", weight="bold")
    note(axes, left + 1.45, y, "Warp e of the grid (here: one per CTA, so modulo CTAs) writes the padding of expert e.")
    for i, (value, kind, cta) in enumerate(elements):
        colour, x, at = lane_colour(cta), left + i % a_line * wide, y - 0.67 - i // a_line * 0.58
        fill = {"assignment": colour, "padding": tint(colour, 0.35), "tail": WHITE}[kind]
        cell(axes, x + 0.012, at, wide - 0.024, tall, value, fill=fill, edge=colour, size=7.5, label=kind)
        if i % block_size == 0:
            block, end = i // block_size, x + min(block_size, len(elements) - i) * wide
            axes.plot([x + 0.03, end - 0.03], [at + tall + 0.06] * 2, color=GREY, linewidth=1)
            words = f"expert block {block}: {f'expert {expert_ids[block]}' if i < used else 'unused'}"
            size = 6.5 if wide * block_size > 1.2 else 5.5
            text(axes, (x + end) / 2, at + tall + 0.16, words, size=size, colour=GREY)
    part = ((WIDTH - 2 * left + 0.15) / ctas - 0.15) / 3
    for cta in range(ctas):
        x, colour = left + cta * (3 * part + 0.15), lane_colour(cta)
        kinds = [kind for _, kind, of in elements if of == cta]
        text(axes, x, 0.83, f"CTA {cta}: {plural(len(kinds), 'element')}", ha="left", size=8.5)
        for k, (kind, fill) in enumerate((("assignment", colour), ("padding", tint(colour, 0.35)), ("tail", WHITE))):
            words = plural(kinds.count(kind), kind) if kind == "assignment" else f"{kinds.count(kind)} {kind}"
            cell(axes, x + k * part, 0.42, part, 0.26, words, fill=fill, edge=colour, size=8 if ctas < 4 else 6.5)
    note(axes, left, 0.15, "Each element has one writer. All threads share the tail; it is drawn as equal parts.")
    return figure


def bitmask_rank(topk_ids_of_chunk, expert, word_bits=8, slot=None):
    """Draw a stable rank computed from a bitmask: the number of set bits below the assignment's own bit.

    ``slot`` is the number of the assignment in the chunk, by default the last one of the expert.
    """
    ids = [int(i) for i in topk_ids_of_chunk]
    slots = [at for at, i in enumerate(ids) if i == expert]
    check_range("the number of assignments", len(ids), 1, 32)
    check_range("word_bits", word_bits, 4, 32)
    if not slots or slot not in (None, *slots):
        raise ValueError(f"slot is {slot}, but must be one of expert {expert}'s assignments {slots}")
    slot = slots[-1] if slot is None else slot
    rank, own, words = slots.index(slot), slot // word_bits, -(-len(ids) // word_bits)
    figure, axes = canvas(WIDTH, 3.6, f"A rank from a bitmask: assignment {slot} of a chunk, routed to expert {expert}")
    left, gap, tall = 1.55, 0.2, 0.3
    wide = min(0.5, (WIDTH - left - 0.15 - gap * (words - 1)) / len(ids))
    x = [left + at * wide + at // word_bits * gap for at in range(len(ids))]
    names = "in the chunk", "topk_ids", f"mask of expert {expert}", "rank", f"those of expert {expert}"
    for y, name in zip((2.88, 2.6, 2.0, 0.77, 0.5), names, strict=True):
        text(axes, left - 0.12, y + tall / 2, name, ha="right", size=8.5)
    for at, i in enumerate(ids):
        bit, middle = i == expert, x[at] + wide / 2
        label = "bit" if not bit or at > slot else "own" if at == slot else "counted"
        colour = {"bit": GREY, "own": RED, "counted": BLUE}[label]
        text(axes, middle, 2.88 + tall / 2, str(at), size=8, colour=GREY)
        ink, fill = (INK, tint(colour)) if bit else (GREY, WHITE)
        cell(axes, x[at], 2.6, wide, tall, i, fill=fill, edge=PALE, size=8, colour=ink)
        fill, ink = (WHITE if label == "bit" else colour), (None if bit else GREY)
        cell(axes, x[at], 2.0, wide, tall, int(bit), fill=fill, edge=PALE, label=label, colour=ink)
        if bit:
            arrow(axes, (middle, 2.6), (middle, 2.0 + tall), colour=colour, label="atomicOr")
    parts = []
    for word in range(words):
        first, last = word * word_bits, min((word + 1) * word_bits, len(ids))
        label, colour = f"word {word}: not needed", GREY
        if word <= own:
            parts.append(sum(first <= at < min(slot, last) for at in slots))
            lower = f" & {(1 << slot - first) - 1:#x}" if word == own else ""
            label, colour = f"popc(word {word}{lower}) = {parts[-1]}", BLUE
        axes.plot([x[first], x[last - 1] + wide], [1.9, 1.9], color=colour, linewidth=1.6)
        text(axes, (x[first] + x[last - 1] + wide) / 2, 1.73, label, size=8.5, colour=colour)
    added = " + ".join(map(str, parts)) + (f" = {rank}" if own else "")
    text(axes, left, 1.32, f"rank of assignment {slot} = {added}", ha="left", weight="bold")
    each = min(0.5, (WIDTH - left - 0.15) / len(slots))
    for r, at in enumerate(slots):
        fill = RED if at == slot else BLUE if at < slot else WHITE
        cell(axes, left + r * each, 0.5, each, tall, at, fill=fill, edge=PALE, label="ranked", size=8)
        text(axes, left + (r + 0.5) * each, 0.92, str(r), size=8, colour=GREY)
    words = f"Words of {word_bits} bits are drawn, bit 0 on the left; the kernels have 32."
    note(axes, 0.15, 0.15, f"{words} Orange: the assignment. Blue: earlier ones of its expert.")
    return figure


def exchange_counts(ctas, experts, block_size=4, seed=0):
    """Draw the exchange of counts between CTAs, and the rows that one CTA computes for its assignments."""
    check_range("ctas", ctas, 2, 5)
    check_range("experts", experts, 2, 8)
    check_range("block_size", block_size, 1, 16)
    ids = np.random.default_rng(seed).integers(0, experts, (ctas, 2 * experts))
    counts = np.stack([np.bincount(row, minlength=experts) for row in ids])
    g = ctas // 2
    e = int(np.flatnonzero(counts[g] == counts[g].max())[-1])
    total, before = counts.sum(0), counts[:g].sum(0)
    padded = -(-total // block_size) * block_size
    start = padded.cumsum() - padded
    tall, left, wide = 0.24, 1.45, 0.46
    height = 3.5 + tall * ctas
    figure, axes = canvas(WIDTH, height, f"Exchange of counts: the rows of the assignments of CTA {g} of {ctas}")
    right, top = left + experts * wide + 0.15, height - 0.7
    below = top - ctas * tall - 0.5
    for expert in range(experts):
        x = left + expert * wide
        text(axes, x + wide / 2, top + 0.12, f"e = {expert}", size=8, colour=GREY)
        for cta in range(ctas):
            colour = BLUE if cta < g else RED if cta == g else GREY
            fill = colour if expert == e and cta <= g else tint(colour, 0.18)
            cell(axes, x, top - (cta + 1) * tall, wide, tall, counts[cta, expert], fill=fill, edge=WHITE)
        for row, numbers in enumerate((before, total, padded, start)):
            fill = WHITE if expert != e else BLUE if row == 0 else tint(ORANGE, 0.45)
            cell(axes, x, below - (row + 1) * tall, wide, tall, numbers[expert], fill=fill, edge=PALE)
    for cta in range(ctas):
        text(axes, left - 0.12, top - (cta + 0.5) * tall, f"CTA {cta}", ha="right", size=8.5)
    words = f"Each CTA counts its chunk of {ids.shape[1]} assignments, and stores its counts."
    note(axes, right, top - 0.5 * tall, words)
    axes.plot([0.15, WIDTH - 0.15], [below + 0.25] * 2, color=INK, linewidth=1.2, linestyle="--")
    note(axes, right, below + 0.42, f"Barrier of the grid: all {ctas} CTAs have stored their counts.")
    names = f"before CTA {g}", "total", "padded", "start"
    padding = f"rounded up to expert blocks of {block_size}"
    whys = "the blue counts", "all counts", padding, "exclusive scan of the padded totals"
    for row, (name, why) in enumerate(zip(names, whys, strict=True)):
        y = below - (row + 0.5) * tall
        text(axes, left - 0.12, y, name, ha="right", size=8.5)
        note(axes, right, y, why)
    first, run = int(start[e]), [cta for cta in range(ctas) for _ in range(counts[cta, e])]
    run += ["-"] * (int(padded[e]) - len(run))
    y = below - 4 * tall - 0.26
    words = f"first row = start + before = {first} + {before[e]} = {first + before[e]}"
    text(axes, left, y, f"CTA {g}, expert {e}: {words}", ha="left", weight="bold")
    y, wide = y - 0.66, min(0.37, (WIDTH - left - 0.15) / len(run))
    text(axes, left - 0.12, y + tall / 2, "written by CTA", ha="right", size=8.5)
    text(axes, left - 0.12, y + tall + 0.12, "row", ha="right", size=8.5)
    for i, cta in enumerate(run):
        fill = EMPTY if cta == "-" else BLUE if cta < g else RED if cta == g else tint(GREY, 0.18)
        cell(axes, left + i * wide, y, wide, tall, cta, fill=fill, edge=WHITE, label="written")
        text(axes, left + (i + 0.5) * wide, y + tall + 0.12, str(first + i), size=7.5, colour=GREY)
    words = f"Rows of expert {e} and the CTA that writes each; a dash is padding."
    note(axes, 0.15, 0.15, f"{words} Orange: CTA {g}. Blue: earlier CTAs. Pale yellow: expert {e}, all CTAs.")
    return figure


def count_words():
    """Draw the layout of published counts: plain, with the launch number, and two counts per word."""
    left, tall, wide = 2.0, 0.3, 1.55
    figure, axes = canvas(WIDTH, 2.75, "Layout of published counts: 16 bytes of a CTA's row")
    launch, count = tint(ORANGE, 0.45), tint(BLUE, 0.35)
    plain = [(f"expert {e}", 1, count) for e in range(4)]
    tagged = [part for e in (0, 1) for part in ((f"expert {e}", 1, count), ("launch number", 1, launch))]
    two = lambda e: [(f"expert {e}", 0.5, count), (f"expert {e + 1}", 0.5, count), ("launch number", 1, launch)]
    rows = {
        "step 3: counts": (4, plain),
        "one with the number": (2, tagged),
        "step 4: two of them": (4, [*two(0), *two(2)]),
    }
    for number, (name, (counts, parts)) in enumerate(rows.items()):
        x, y = left, 1.75 - 0.52 * number
        text(axes, left - 0.15, y + tall / 2, name, ha="right")
        for words, long, fill in parts:
            cell(axes, x, y, long * wide, tall, words, fill=fill, edge=WHITE, size=8, label="part")
            x += long * wide
        if number:
            for half in range(2):
                box(axes, left + 2 * wide * half, y, 2 * wide, tall, fill="none", edge=INK, line=1.3, label="word")
        text(axes, left + 4.06 * wide, y + tall / 2, f"{counts} counts", ha="left", size=8, colour=GREY)
    for byte in range(0, 17, 4):
        text(axes, left + byte / 4 * wide, 2.2, f"byte {byte}", size=7.5, colour=GREY)
    note(
        axes,
        0.15,
        0.35,
        "Framed: 8 bytes that are stored and loaded atomically. A reader that finds the number of this",
    )
    note(axes, 0.15, 0.16, "launch knows that the counts beside it are of this launch, too: no fence is needed.")
    return figure


def who_waits(ctas=3, late=2):
    """Draw who waits for whom in the exchange: at a barrier, and for words that carry the number of the launch.

    CTA ``late`` counts for longer than the others.
    """
    check_range("ctas", ctas, 2, 4)
    check_range("late", late, 0, ctas - 1)
    left, tall, each = 0.75, 0.25, 0.34
    told = ("store", 0.55), ("fence", 0.55), ("add", 0.5)
    parts = (
        ("step 3: all wait at a barrier", told, (("fence", 0.55), ("load", 0.5)), "the last CTA arrives"),
        ("step 4: each word says that it has arrived", told[:1], (), "the last word arrives"),
    )
    colours = {"count": BLUE, "store": ORANGE, "fence": PURPLE, "add": RED, "poll": EMPTY, "load": SKY}
    height = 0.75 + len(parts) * (ctas * each + 0.75)
    figure, axes = canvas(_NARROW, height, "Who waits for whom")
    y = height - 0.65
    for name, before, after, event in parts:
        text(axes, 0.12, y, name, ha="left", weight="bold")
        counted = [1.7 if cta == late else 0.8 for cta in range(ctas)]
        arrives = left + counted[late] + sum(wide for _, wide in before)
        for cta in range(ctas):
            low, x = y - 0.22 - cta * each - tall, left
            text(axes, left - 0.1, low + tall / 2, f"CTA {cta}", ha="right", size=8.5)
            polls = arrives + 0.18 - left - counted[cta] - sum(wide for _, wide in before)
            for what, wide in (("count", counted[cta]), *before, ("poll", polls), *after):
                words = {"fill": colours[what], "edge": WHITE, "colour": ink_on(colours[what]), "size": 8}
                box(axes, x, low, wide, tall, what if wide > 0.4 else "", label=what, **words)
                x += wide
        bottom = y - 0.22 - (ctas - 1) * each - tall
        axes.plot([arrives] * 2, [bottom - 0.08, y - 0.16], color=INK, linewidth=1.2, linestyle="--", label="arrival")
        text(axes, arrives, bottom - 0.18, event, size=8.5)
        y -= ctas * each + 0.75
    note(axes, 0.12, 0.12, f"CTA {late} is late. Ranks need no other CTA: they fit between store and poll.")
    return figure


def warp_ranks(experts_of_warps, slot=None):
    """Draw how warps rank their assignments: masks and counters for each warp and expert, sums over lower warps.

    ``experts_of_warps`` has the experts of each warp's lanes; ``slot`` is the assignment to follow, or the last one.
    """
    ids = np.array(experts_of_warps)
    warps, lanes = ids.shape
    check_range("the number of warps", warps, 2, 3)
    check_range("the number of lanes", lanes, 4, 8)
    w, lane = divmod(warps * lanes - 1 if slot is None else slot, lanes)
    e, experts = int(ids[w, lane]), int(ids.max()) + 1
    check_range("the number of experts", experts, 2, 6)
    counts = np.stack([np.bincount(row, minlength=experts) for row in ids])
    sums, below = counts.cumsum(0) - counts, int((ids[w, :lane] == e).sum())
    left, gap, tall = 0.85, 0.2, 0.24
    wide = (_NARROW - left - 0.12 - gap * (warps - 1)) / (warps * lanes)
    height = 2.45 + 2 * experts * tall
    figure, axes = canvas(_NARROW, height, f"Ranks in {warps} warps of {lanes} lanes")
    x = [left + of * (lanes * wide + gap) for of in range(warps)]

    def row(y, name, values, fill, parts, label):
        text(axes, left - 0.08, y + tall / 2, name, ha="right", size=8.5)
        for of in range(warps):
            each = lanes * wide / parts
            for at in range(parts):
                cell(
                    axes,
                    x[of] + at * each,
                    y,
                    each,
                    tall,
                    values(of, at),
                    fill=fill(of, at),
                    edge=PALE,
                    size=8,
                    label=label,
                )

    y = height - 0.95
    for of in range(warps):
        text(axes, x[of] + lanes * wide / 2, y + tall + 0.11, f"warp {of}", size=8.5, colour=GREY)
    followed = lambda of, at: (
        RED if (of, at) == (w, lane) else BLUE if ids[of, at] == e and (of, at) < (w, lane) else WHITE
    )
    row(y, "experts", lambda of, at: ids[of, at], followed, lanes, "assignment")
    text(axes, 0.12, y - 0.22, "masks: a bit for each lane", ha="left", weight="bold")
    y -= 0.36
    for expert in range(experts):
        y -= tall
        bit = lambda of, at, expert=expert: int(ids[of, at] == expert)
        own = lambda of, at, expert=expert: followed(of, at) if (of, expert) == (w, e) else WHITE
        fill = lambda of, at, bit=bit, own=own: tint(GREY) if own(of, at) == WHITE and bit(of, at) else own(of, at)
        row(y, f"expert {expert}", bit, fill, lanes, "bit")
    text(
        axes, 0.12, y - 0.22, "counters: the warp's own assignments, and those of lower warps", ha="left", weight="bold"
    )
    y -= 0.36
    for expert in range(experts):
        y -= tall
        value = lambda of, at, expert=expert: (counts, sums)[at][of, expert]
        fill = lambda of, at, expert=expert: BLUE if (of, at, expert) == (w, 1, e) else WHITE
        row(y, f"expert {expert}", value, fill, 2, "counter")
    parts = f"{sums[w, e]} in lower warps + {below} in lower lanes = rank {sums[w, e] + below}"
    text(axes, 0.12, 0.36, f"assignment {w * lanes + lane}: {parts}", ha="left", weight="bold")
    note(axes, 0.12, 0.14, "Orange: the assignment. Blue: those that its rank counts.")
    return figure
