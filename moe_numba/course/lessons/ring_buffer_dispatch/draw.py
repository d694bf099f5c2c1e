"""Figures of our Numba port of DeepEP's dispatch: order of rows, buffer layout, and a dispatch over time."""

from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, ORANGE, RED, WIDTH
from moe_numba.course.deepep_port.buffer_layout import dispatch_offsets
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, cell, check_range, note, plural, text, tint
from moe_numba.course.lessons.dispatch_layout.draw import RANK_COLOURS
from moe_numba.course.lessons.ring_buffer_dispatch.draw_time import animation, describe, timeline

__all__ = ["animation", "row_order", "queues", "describe", "timeline"]


def row_order(is_token_in_rank, channels):
    """Draw the destinations of two ranks' tokens and the rows that each rank receives, by rank, channel and token."""
    ranks, max_tokens = len(is_token_in_rank), max(map(len, is_token_in_rank))
    (
        check_range("the number of ranks", ranks, 2, 2),
        check_range("tokens", max_tokens, 1, 8),
        check_range("channels", channels, 1, 8),
    )
    tall, group = 0.42, 1.35
    height = ranks * group + 1.0
    figure, axes = canvas(WIDTH, height, f"{ranks} ranks, {plural(channels, 'channel')}: order of the rows in recv_x")
    left, right, wide = 0.9, 4.75, 0.32
    most_rows = max(sum(chosen[r] for rows in is_token_in_rank for chosen in rows) for r in range(ranks))
    narrow = min(0.27, (WIDTH - 0.3 - right - 0.1 * channels) / max(most_rows, 1))
    shares = [-(-len(rows) // channels) for rows in is_token_in_rank]
    middles = {}
    for rank, rows in enumerate(is_token_in_rank):
        y = height - 1.25 - rank * group
        text(axes, 0.15, y + tall / 2, f"rank {rank}", ha="left", weight="bold", colour=RANK_COLOURS[rank])
        text(axes, left, y + tall + 0.14, "x: token, and its destination ranks below", size=8, colour=GREY, ha="left")
        for token, chosen in enumerate(rows):
            x = left + token * wide + token // shares[rank] * 0.08
            destinations = [r for r, is_in in enumerate(chosen) if is_in]
            cell(
                axes,
                x,
                y,
                wide,
                tall,
                token,
                " ".join(map(str, destinations)) or "-",
                fill=tint(RANK_COLOURS[rank]),
                edge=RANK_COLOURS[rank],
                label="token",
            )
        for channel in range(-(-len(rows) // shares[rank]) if rows else 0):
            count = len(rows[channel * shares[rank] : (channel + 1) * shares[rank]])
            x = left + channel * (shares[rank] * wide + 0.08)
            text(axes, x + count * wide / 2, y - 0.12, f"c{channel}", size=7.5, colour=GREY)
        middles[rank] = left + len(rows) * wide + channels * 0.08, y + tall / 2
    for rank in range(ranks):
        y, x, row = height - 1.25 - rank * group, right, 0
        text(axes, right, y + tall + 0.14, f"recv_x of rank {rank}: source.token", size=8, colour=GREY, ha="left")
        for source, rows in enumerate(is_token_in_rank):
            begin, last = x, None
            for token, chosen in enumerate(rows):
                if not chosen[rank]:
                    continue
                channel = token // shares[source]
                x += 0.05 if last not in (None, channel) else 0
                last = channel
                cell(
                    axes,
                    x,
                    y,
                    narrow,
                    tall,
                    f"{source}.{token}",
                    fill=tint(RANK_COLOURS[source]),
                    edge=RANK_COLOURS[source],
                    size=7,
                    label="row",
                )
                x, row = x + narrow, row + 1
            if x > begin:
                text(axes, (begin + x) / 2, y - 0.12, f"from {source}", size=7.5, colour=RANK_COLOURS[source])
            x += 0.1
        for source in range(ranks):
            arrow(axes, middles[source], (right - 0.1, y + tall / 2), colour=RANK_COLOURS[source], label="sent")
    note(axes, 0.15, 0.17, "Colour: the source rank of a row. Gaps separate channels.")
    return figure


def queues(config):
    """Draw a rank's buffer during a dispatch: its sections with their offsets, and each ring."""
    ranks, channels = config.ranks, config.channels
    check_range("ranks", ranks, 1, 3)
    check_range("channels", channels, 1, 4)
    at = dispatch_offsets(config)
    names = ("rank_prefix", "start", "end", "head", "tail", "x")
    figure, axes = canvas(
        WIDTH,
        3.75,
        f"A rank's buffer: {plural(ranks, 'rank')}, {plural(channels, 'channel')}, "
        f"rings of {plural(config.ring, 'row')}",
    )
    left, y, tall, small = 0.15, 2.55, 0.4, 1.02
    text(axes, left, y + tall + 0.3, "sections with their byte offsets (not to scale)", ha="left", size=8.5)
    colours = (GREY, GREEN, GREEN, ORANGE, RED, BLUE)
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        wide = small if name != "x" else WIDTH - 0.3 - 5 * small
        words = name if name != "x" else "x: the rings, then rings of src_idx, topk_idx, topk_weights, scales"
        box(axes, left + i * small, y, wide, tall, words, fill=tint(colour), edge=colour, size=8, label="section")
        text(axes, left + i * small, y + tall + 0.1, f"{getattr(at, name):,}", size=7.5, colour=GREY, ha="left")
    # Four sections have a flag per queue, the last one a ring per queue.
    total, below = channels * ranks, 1.15
    wide = min(0.8, (WIDTH - 1.4) / total)
    text(axes, left, below + 0.76, "queue", ha="left", size=8.5)
    for q in range(total):
        x = 1.2 + q * wide
        channel, source = divmod(q, ranks)
        text(axes, x + wide / 2, below + 0.98, f"c{channel}", size=7.5, colour=GREY)
        text(
            axes,
            x + wide / 2,
            below + 0.82,
            f"from {source}" if wide > 0.5 else f"r{source}",
            size=7.5,
            colour=RANK_COLOURS[source],
        )
        text(axes, x + wide / 2, below + 0.62, str(q), size=8.5)
        box(
            axes,
            x + 0.05,
            below + 0.28,
            wide - 0.1,
            0.2,
            "4 flags" if wide > 0.6 else "",
            fill=tint(ORANGE),
            edge=ORANGE,
            size=7,
            label="flags",
        )
        slots = min(config.ring, 8)
        for slot in range(slots):
            box(
                axes,
                x + 0.05,
                below + 0.12 - slot * 0.1,
                wide - 0.1,
                0.08,
                fill=tint(RANK_COLOURS[source]),
                edge=WHITE,
                line=0.4,
                label="slot",
            )
    text(axes, left, below + 0.38, "int32 each", ha="left", size=8.5)
    text(axes, left, below + 0.05, "a ring", ha="left", size=8.5)
    drawn = f" 8 of {config.ring} slots are drawn." if config.ring > 8 else ""
    note(
        axes,
        0.15,
        0.15,
        "Queue number: channel * ranks + source. The source rank writes the queue, this rank reads it." + drawn,
    )
    return figure
