"""Figures of a dispatch over time, from the events that ``draw.ring_trace`` records in the simulator."""

import base64
import tempfile
from pathlib import Path

import matplotlib
from matplotlib.animation import FuncAnimation, PillowWriter

from moe_numba.course.bench.figures.style import GREY, INK, PALE, RED, SKY, STYLE, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, check_range, note, plural, text, tint
from moe_numba.course.lessons.dispatch_layout.draw import RANK_COLOURS
from moe_numba.course.lessons.ring_buffer_dispatch.draw_ring_trace import replay

__all__ = ["animation", "describe", "timeline"]

STATES = {"free": WHITE, "written": tint(RED, 0.35), "full": tint(SKY, 0.7)}


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
