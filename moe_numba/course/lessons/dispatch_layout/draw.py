"""Figures of the dispatch layout: token destinations, private counters, shared-memory banks, the buffer."""

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, cell, check_range, note, plural, text, tint
from moe_numba.expert_parallel import reference

__all__ = ["banks", "buffer_map", "buffer_parts", "private_counters", "problem", "wavefronts"]

RANK_COLOURS = (BLUE, ORANGE, GREEN)
PEERS = 8  # GPUs of a node, the most that DeepEP's buffer supports


def problem(topk_idx_of_ranks, num_experts):
    """Draw tokens of two or three ranks, their experts, each rank's layout and the number of tokens per destination."""
    ranks, (tokens, topk) = len(topk_idx_of_ranks), topk_idx_of_ranks[0].shape
    (
        check_range("the number of ranks", ranks, 2, 3),
        check_range("tokens", tokens, 1, 6),
        check_range("topk", topk, 1, 3),
    )
    check_range("num_experts", num_experts, ranks, 8)
    each, tall = num_experts // ranks, 0.26
    group = max(tokens, 3) * tall + 0.98
    height = ranks * group + 0.85
    figure, axes = canvas(WIDTH, height, f"{ranks} ranks, {num_experts} experts: destinations of the tokens")
    places = [(height - 0.75 - (r + 0.5) * group + 0.3) for r in range(ranks)]
    for rank, topk_idx in enumerate(topk_idx_of_ranks):
        per_rank, per_expert, is_in = (t.tolist() for t in reference.dispatch_layout(topk_idx, ranks, num_experts))
        top = height - 0.85 - rank * group - 0.2
        text(axes, 0.15, top + 0.3, f"rank {rank}", ha="left", weight="bold", colour=RANK_COLOURS[rank])
        left, wide = 1.05, 0.36
        flags, middle = left + topk * wide + 0.55, top - tokens * tall / 2
        text(axes, left + topk * wide / 2, top + 0.12, "topk_idx", size=8, colour=GREY)
        text(axes, flags + ranks * wide / 2, top + 0.12, "is_token_in_rank", size=8, colour=GREY)
        for token, (experts, flags_of_token) in enumerate(zip(topk_idx.tolist(), is_in, strict=True)):
            y = top - (token + 1) * tall
            text(axes, left - 0.08, y + tall / 2, f"token {token}", size=8, colour=GREY, ha="right")
            for k, expert in enumerate(experts):
                fill = RANK_COLOURS[expert // each] if 0 <= expert < num_experts else WHITE
                cell(axes, left + k * wide, y, wide, tall, expert, fill=fill, edge=WHITE, label="choice", size=8.5)
            for to, is_in in enumerate(flags_of_token):
                fill = RANK_COLOURS[to] if is_in else WHITE
                cell(
                    axes,
                    flags + to * wide,
                    y,
                    wide,
                    tall,
                    int(is_in),
                    fill=fill,
                    edge=PALE,
                    label="flag",
                    size=8.5,
                    colour=None if is_in else GREY,
                )
        low = top - tokens * tall - 0.32
        text(axes, flags - 0.1, low + tall / 2, "num_tokens_per_rank", size=8, colour=GREY, ha="right")
        for to, number in enumerate(per_rank):
            cell(
                axes,
                flags + to * wide,
                low,
                wide,
                tall,
                number,
                fill=tint(RANK_COLOURS[to]),
                edge=RANK_COLOURS[to],
                label="per rank",
            )
        experts_left, narrow = flags + ranks * wide + 0.35, min(0.36, 2.2 / num_experts)
        text(axes, experts_left, top - 0.42, "num_tokens_per_expert", size=8, colour=GREY, ha="left")
        for expert, number in enumerate(per_expert):
            colour, x = RANK_COLOURS[expert // each], experts_left + expert * narrow
            text(axes, x + narrow / 2, top - 0.6, str(expert), size=7, colour=GREY)
            cell(axes, x, top - 0.95, narrow, tall, number, fill=tint(colour), edge=colour, label="per expert")
        start, end = max(experts_left + num_experts * narrow, experts_left + 1.5) + 0.1, WIDTH - 1.45
        for to, number in enumerate(per_rank):
            y = middle + 0.18 * ((ranks - 1) / 2 - to)
            target = places[to] - 0.14 + 0.18 * ((ranks - 1) / 2 - rank)
            if number:
                arrow(axes, (start, y), (end, target), colour=RANK_COLOURS[to], label="sent")
                at = 0.14 + 0.1 * to
                text(
                    axes,
                    start + at * (end - start),
                    y + at * (target - y),
                    str(number),
                    size=8.5,
                    weight="bold",
                    colour=RANK_COLOURS[to],
                    bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 1},
                )
    for rank, y in enumerate(places):
        box(axes, WIDTH - 1.42, y - 0.5, 1.27, 0.72, fill=tint(RANK_COLOURS[rank]), edge=RANK_COLOURS[rank])
        text(axes, WIDTH - 0.785, y + 0.02, f"to rank {rank}", weight="bold", size=8.5)
        last = (rank + 1) * each - 1
        words = f"expert{'s' * (each > 1)} {rank * each}" + f" to {last}" * (each > 1)
        text(axes, WIDTH - 0.785, y - 0.2, words, size=8)
        arrivals = sum(int(reference.dispatch_layout(i, ranks, num_experts)[0][rank]) for i in topk_idx_of_ranks)
        text(axes, WIDTH - 0.785, y - 0.38, f"receives {arrivals}", size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.17,
        "Colour: the rank that holds the expert. A token is sent once to each rank that holds any of its experts.",
    )
    return figure


def private_counters(topk_idx, num_experts, experts_of_block, threads, block=0):
    """Draw DeepEP's counting: each thread counts its tokens in a private row, then the columns are summed."""
    tokens, topk = topk_idx.shape
    check_range("tokens", tokens, 1, 12)
    check_range("topk", topk, 1, 4)
    check_range("threads", threads, 2, 6)
    check_range("experts_of_block", experts_of_block, 1, 8)
    check_range("num_experts", num_experts, 1, 64)
    begin = block * experts_of_block
    experts = list(range(begin, min(begin + experts_of_block, num_experts)))
    check_range("the number of the block's experts", len(experts), 1, 8)
    rows = [[0] * len(experts) for _ in range(threads)]
    for token, ids in enumerate(topk_idx.tolist()):
        for expert in ids:
            if expert in experts:
                rows[token % threads][expert - begin] += 1
    tall, rounds = 0.3, -(-tokens // threads)
    height = 1.75 + threads * tall + 0.55
    title = f"Block {block} counts experts {experts[0]} to {experts[-1]}: one row of counters per thread"
    figure, axes = canvas(WIDTH, height, title)
    top, left = height - 0.95, 1.15
    wide = min(0.34, 3.6 / (rounds * topk))
    text(axes, left, top + 0.15, "experts of its tokens", ha="left", size=8.5, colour=GREY)
    counters = left + rounds * (topk * wide + 0.12) + 0.75
    column = min(0.5, (WIDTH - counters - 1.9) / len(experts))
    text(axes, counters, top + 0.36, "its counters in shared memory", ha="left", size=8.5, colour=GREY)
    for j, expert in enumerate(experts):
        text(axes, counters + (j + 0.5) * column, top + 0.12, str(expert), size=8, colour=GREY)
    for thread in range(threads):
        y = top - (thread + 1) * tall
        text(axes, left - 0.1, y + tall / 2, f"thread {thread}", ha="right", size=8.5)
        for r in range(rounds):
            token = r * threads + thread
            for k, expert in enumerate(topk_idx[token].tolist() if token < tokens else ()):
                counted = expert in experts
                cell(
                    axes,
                    left + r * (topk * wide + 0.12) + k * wide,
                    y + 0.02,
                    wide,
                    tall - 0.04,
                    expert,
                    fill=SKY if counted else WHITE,
                    edge=PALE,
                    size=8,
                    colour=None if counted else GREY,
                    label="choice",
                )
        arrow(axes, (counters - 0.6, y + tall / 2), (counters - 0.12, y + tall / 2), colour=GREY)
        for j, number in enumerate(rows[thread]):
            cell(
                axes,
                counters + j * column,
                y + 0.02,
                column,
                tall - 0.04,
                number,
                fill=tint(SKY) if number else WHITE,
                edge=PALE,
                label="counter",
            )
    y = top - threads * tall
    for j in range(len(experts)):
        x = counters + (j + 0.5) * column
        arrow(axes, (x, y - 0.06), (x, y - 0.36), colour=ORANGE, label="add up")
        cell(
            axes,
            counters + j * column,
            y - 0.7,
            column,
            tall,
            sum(row[j] for row in rows),
            fill=tint(ORANGE),
            edge=ORANGE,
            label="sum",
        )
    text(axes, counters - 0.12, y - 0.55, "num_tokens_per_expert", ha="right", size=8.5)
    note(axes, counters + len(experts) * column + 0.12, y - 0.21, "one thread per column")
    note(
        axes,
        0.15,
        0.17,
        "Blue: an expert that this block counts. Every block reads all tokens; no two threads touch the same counter.",
    )
    return figure


def wavefronts(words, banks=32):
    """Count the wavefronts of a shared-memory access: the maximum number of distinct words in one bank."""
    found = [0] * banks
    for word in set(words):
        found[word % banks] += 1
    return max(found)


def banks(num_banks=8, widths=(8, 9), column=2):
    """Draw the bank of each thread's counters for the given row widths, in words; one column is marked."""
    check_range("num_banks", num_banks, 4, 8)
    check_range("the number of widths", len(widths), 1, 2)
    for width in widths:
        check_range("a width", width, column + 1, 9)
    tall, wide = 0.28, 0.36
    height = 1.75 + num_banks * tall
    figure, axes = canvas(WIDTH, height, f"{num_banks} banks, {num_banks} threads: the bank of each counter")
    top = height - 1.0
    for side, width in enumerate(widths):
        left = 1.05 + side * (WIDTH / 2)
        needed = wavefronts([thread * width + column for thread in range(num_banks)], num_banks)
        text(axes, left, top + 0.37, f"rows of {width} words", ha="left", weight="bold")
        for j in range(width):
            text(axes, left + (j + 0.5) * wide, top + 0.12, str(j), size=7.5, colour=GREY)
        for thread in range(num_banks):
            y = top - (thread + 1) * tall
            text(axes, left - 0.1, y + tall / 2, f"thread {thread}", ha="right", size=8.5)
            for j in range(width):
                fill = (RED if needed > 1 else GREEN) if j == column else WHITE
                cell(
                    axes,
                    left + j * wide,
                    y,
                    wide,
                    tall,
                    (thread * width + j) % num_banks,
                    fill=fill,
                    edge=PALE,
                    size=8.5,
                    label="marked" if j == column else "word",
                    colour=None if j == column else GREY,
                )
        words = f"all threads at column {column}: {plural(needed, 'wavefront')}"
        text(axes, left, top - num_banks * tall - 0.2, words, ha="left", size=8.5)
    note(
        axes,
        0.15,
        0.15,
        "A bank delivers one word per wavefront. Bank of a word: its index modulo the number of banks.",
    )
    return figure


def buffer_parts(num_nvl_bytes):
    """Return the parts of DeepEP's allocation on each of eight GPUs of a node: ``{name: (offset, bytes)}``."""
    parts, offset = {}, 0
    sizes = {
        "data": num_nvl_bytes,
        "barrier signals": 4 * PEERS,
        "buffer_ptrs": 8 * PEERS,
        "barrier_signal_ptrs": 8 * PEERS,
    }
    for name, size in sizes.items():
        parts[name] = offset, size
        offset += size
    return parts


def buffer_map(num_nvl_bytes):
    """Draw the allocation to scale, and its last bytes enlarged."""
    check_range("num_nvl_bytes", num_nvl_bytes, 128, (1 << 31) - 1)
    parts = buffer_parts(num_nvl_bytes)
    small = {name: part for name, part in parts.items() if name != "data"}
    total, rest = sum(size for _, size in parts.values()), sum(size for _, size in small.values())
    figure, axes = canvas(WIDTH, 3.35, f"The buffer of one GPU: one allocation of {total:,} bytes")
    left, wide, tall = 0.15, WIDTH - 0.3, 0.42
    y = 2.25
    part = wide * num_nvl_bytes / total
    box(
        axes,
        left,
        y,
        part,
        tall,
        f"data: {num_nvl_bytes:,} bytes, written by the other GPUs",
        fill=tint(BLUE),
        edge=BLUE,
        label="data",
    )
    axes.plot([left + part] * 2, [y - 0.08, y + tall + 0.08], color=RED, linewidth=1.4, label="end of data")
    text(axes, left, y + tall + 0.15, "0", size=7.5, colour=GREY, ha="left")
    text(axes, left + wide, y + tall + 0.15, f"{num_nvl_bytes:,}", size=7.5, colour=GREY, ha="right")
    low, colours = 0.95, (RED, ORANGE, GREEN)
    axes.plot([left + part, left], [y - 0.08, low + tall + 0.42], color=PALE, linewidth=1)
    axes.plot([left + wide, left + wide], [y - 0.08, low + tall + 0.42], color=PALE, linewidth=1)
    text(axes, left, low + tall + 0.33, f"the last {rest} bytes, enlarged", size=8.5, ha="left")
    contents = {"barrier signals": "int32 x 8", "buffer_ptrs": "pointers x 8", "barrier_signal_ptrs": "pointers x 8"}
    for (name, (offset, size)), colour in zip(small.items(), colours, strict=True):
        x, own = left + wide * (offset - num_nvl_bytes) / rest, wide * size / rest
        box(axes, x, low, own, tall, fill=tint(colour), edge=colour, label="part")
        text(axes, x + own / 2, low + 0.28, name, size=8.5)
        text(axes, x + own / 2, low + 0.12, f"{size} bytes: {contents[name]}", size=7.5, colour=INK)
        text(axes, x, low + tall + 0.1, f"+{offset - num_nvl_bytes}", size=7.5, colour=GREY, ha="left")
        each = own / PEERS
        for peer in range(PEERS):
            box(axes, x + peer * each, low - 0.3, each, 0.26, str(peer), edge=colour, size=7.5, label="entry")
    note(
        axes,
        left,
        0.17,
        "Below: one entry per GPU of the node. "
        "The host obtains the pointers by opening the IPC handles of the other GPUs.",
    )
    return figure
