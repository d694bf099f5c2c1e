"""Figures of our Numba port of DeepEP's dispatch: order of rows, buffer layout, and a dispatch over time.

``draw.ring_trace`` runs a dispatch in the simulator and records its events, which this module draws.
"""

import base64
import tempfile
from pathlib import Path

import matplotlib
from matplotlib.animation import FuncAnimation, PillowWriter

from moe_numba.course.articles.deepep.buffer_layout import dispatch_offsets
from moe_numba.course.bench.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, SKY, STYLE, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, cell, check_range, note, plural, text, tint
from moe_numba.course.draw.dispatch_layout import RANK_COLOURS
from moe_numba.course.draw.ring_trace import replay

__all__ = ["animation", "row_order", "queues", "describe", "timeline"]

STATES = {"free": WHITE, "written": tint(RED, 0.35), "full": tint(SKY, 0.7)}


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


def timeline(played):
    """Draw tail and head of each ring over the order of events; the rows between the two are in the ring."""
    moments = played["moments"]
    keys = sorted({tuple(m[1:4]) for m in moments})
    check_range("the number of rings", len(keys), 1, 8)
    check_range("the number of moments", len(moments), 1, 400)
    tall, left = 0.62, 1.75
    height = 1.35 + len(keys) * tall
    title = f"A dispatch over time: rings of {plural(played['ring'], 'row')}, chunks of {played['chunk']}"
    figure, axes = canvas(WIDTH, height, title)
    scale = (WIDTH - left - 0.3) / len(moments)
    lines = {key: {"tail": [], "head": [], "row": []} for key in keys}
    for i, (moment, shown) in enumerate(replay(played)):
        for key, line in lines.items():
            line["tail"].append(shown[key].tail), line["head"].append(shown[key].head)
        if moment.what == "row":
            rows = lines[moment[1:4]]["row"]
            rows.append((i, len(rows) + 1))
    for place, (rank, source, channel) in enumerate(keys):
        line, y = lines[rank, source, channel], height - 0.62 - (place + 1) * tall
        max_tokens = max(*line["tail"], 1)
        up = (tall - 0.16) / max_tokens
        text(
            axes,
            0.15,
            y + 0.32,
            f"rank {source} to {rank}",
            ha="left",
            size=8.5,
            weight="bold",
            colour=RANK_COLOURS[source],
        )
        text(axes, 0.15, y + 0.14, f"channel {channel}, {plural(max_tokens, 'row')}", ha="left", size=8, colour=GREY)
        axes.plot([left, WIDTH - 0.3], [y, y], color=PALE, linewidth=0.8)
        xs = [left + i * scale for i in range(len(moments))]
        tail, head = ([y + value * up for value in line[name]] for name in ("tail", "head"))
        axes.fill_between(xs, head, tail, step="post", color=STATES["full"], linewidth=0)
        for values, name, colour in ((tail, "tail", RED), (head, "head", INK)):
            axes.plot(xs, values, drawstyle="steps-post", color=colour, linewidth=1.4, label=name)
        for i, value in line["row"]:
            axes.plot([left + i * scale], [y + value * up], marker=".", color=GREY, markersize=3.5, label="row")
    arrow(axes, (left, 0.6), (WIDTH - 0.3, 0.6))
    text(axes, WIDTH - 0.3, 0.46, "order of events", ha="right", size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.17,
        "Red: tail. Black: head. Blue: rows in the ring. Dot: a row is written; the next tail publishes it.",
    )
    return figure


def describe(moment):
    """Describe a moment in one sentence."""
    sender = f"rank {moment.source}, channel {moment.channel}"
    if moment.what == "row":
        return f"{sender}: token {moment.token} is written to slot {moment.value} at rank {moment.rank}"
    if moment.what == "head":
        return f"rank {moment.rank}, channel {moment.channel}: publishes head {moment.value} at rank {moment.source}"
    if moment.what == "tail":
        return f"{sender}: publishes tail {moment.value} at rank {moment.rank}"
    return f"{sender}: {moment.what} {moment.value} at rank {moment.rank} encodes {-moment.value - 1}"


def _snapshots(played):
    """Return for each frame of the animation a sentence, the ring that changed, and all rings as plain values."""
    for moment, rings in replay(played):
        shown = {
            key: (
                [(ring.slots[i], ring.state(i)) for i in range(played["ring"])],
                ring.head,
                ring.tail,
                ring.start,
                ring.end,
            )
            for key, ring in rings.items()
        }
        yield describe(moment), (moment.rank, moment.source, moment.channel), shown


def _draw_snapshot(axes, played, snapshot, number, total):
    sentence, changed, shown = snapshot
    height = axes.get_ylim()[1]
    half = WIDTH / 2
    wide = min(0.34, 1.9 / played["ring"])
    for rank in range(2):
        x0 = 0.15 + rank * half
        text(
            axes,
            x0,
            height - 0.62,
            f"in the buffer of rank {rank}",
            ha="left",
            size=9.5,
            weight="bold",
            colour=RANK_COLOURS[rank],
        )
        rows = sorted(key for key in shown if key[0] == rank)
        for i, key in enumerate(rows):
            slots, head, tail, start, end = shown[key]
            y = height - 1.08 - i * 0.4
            text(
                axes,
                x0,
                y + 0.14,
                f"c{key[2]} from {key[1]}",
                ha="left",
                size=8.5,
                colour=RANK_COLOURS[key[1]],
                weight="bold" if key == changed else "normal",
            )
            for slot, (token, state) in enumerate(slots):
                box(
                    axes,
                    x0 + 0.85 + slot * wide,
                    y,
                    wide,
                    0.28,
                    "" if state == "free" else str(token),
                    fill=STATES[state],
                    edge=RED if key == changed else PALE,
                    size=8.5,
                    label=state,
                )
            x = x0 + 0.95 + len(slots) * wide
            text(
                axes,
                x,
                y + 0.14,
                f"head {head}  tail {tail}  rows {_range(start, end)}",
                ha="left",
                size=8,
                colour=INK if key == changed else GREY,
            )
    text(axes, 0.15, 0.42, sentence, ha="left", size=9.5)
    note(
        axes, 0.15, 0.16, f"{number + 1} of {total}.  Pale red: written, not published. Blue: published, not yet read."
    )


def _range(start, end):
    """Return the row range of a channel from its flags: counts are encoded as -n - 1; 0 means "not written yet"."""
    return f"{-start - 1}..{-end - 1}" if start and end else "?"


def animation(played, seconds=0.45, dpi=72):
    """Return an HTML image with an animated GIF of the rings, one frame per moment, for two ranks."""
    check_range("ranks", played["ranks"], 2, 2)
    check_range("the number of moments", len(played["moments"]), 1, 160)
    check_range("ring", played["ring"], 1, 6)
    shots = list(_snapshots(played))
    height = 1.6 + 0.4 * len(shots[0][2]) / 2
    with matplotlib.rc_context(STYLE):
        figure, axes = canvas(
            WIDTH,
            height,
            f"Two ranks, {plural(played['channels'], 'channel')}, rings of "
            f"{plural(played['ring'], 'row')}: token numbers in their slots",
        )
        still = len(axes.texts)

        def show(i):
            for artist in [*axes.texts[still:], *axes.patches]:
                artist.remove()
            _draw_snapshot(axes, played, shots[i], i, len(shots))

        moving = FuncAnimation(figure, show, frames=len(shots), init_func=lambda: None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rings.gif"
            moving.save(path, writer=PillowWriter(fps=1 / seconds), dpi=dpi)
            data = base64.b64encode(path.read_bytes()).decode()
    return f'<img src="data:image/gif;base64,{data}" alt="animation of the rings" />'
