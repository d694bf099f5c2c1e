"""Figures of the lesson "Dispatch": the order of rows, roles of warps, and a token's slot."""

from moe_numba.course.bench.figures.style import BLUE, GREY, ORANGE, PALE, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, cell, check_range, note, plural, text, tint
from moe_numba.course.lessons.dispatch_layout.draw import RANK_COLOURS


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


def roles():
    """Draw who does what in a CTA: teams of warps for a rank, and a warp for a whole token with a signalling warp."""
    figure, axes = canvas(WIDTH, 4.55, "Roles of CTAs and warps, with two ranks")
    middle = WIDTH / 2
    axes.plot([middle, middle], [0.55, 4.1], color=PALE, linewidth=1)
    for left, name in ((0.15, "as in DeepEP: a CTA is a channel"), (middle + 0.15, "at the end: a warp is a channel")):
        text(axes, left, 4.02, name, ha="left", weight="bold")
    wide = middle - 0.4
    for left, ends in ((0.15, False), (middle + 0.15, True)):
        for y, who, verb in ((2.35, "sending CTA", "to"), (0.65, "receiving CTA", "from")):
            box(axes, left, y, wide, 1.42, edge=GREY, fill=WHITE, label="cta")
            text(axes, left + 0.08, y + 1.27, who, ha="left", size=8.5, colour=GREY)
            if not ends:
                for team in range(2):
                    x = left + 0.1 + team * (wide - 0.1) / 2
                    fill = tint(RANK_COLOURS[team])
                    box(axes, x, y + 0.42, (wide - 0.3) / 2, 0.66, fill=fill, edge=RANK_COLOURS[team], label="team")
                    text(axes, x + (wide - 0.3) / 4, y + 0.86, "12 warps, one ring", size=8)
                    text(axes, x + (wide - 0.3) / 4, y + 0.62, f"{verb} rank {team}", size=8)
                words = "a barrier of the team, then one thread stores the " + ("tail" if verb == "to" else "head")
                text(axes, left + wide / 2, y + 0.2, words, size=7.5)
            else:
                for warp in range(3):
                    x = left + 0.1 + warp * 0.78 + (0.22 if warp == 2 else 0)
                    box(axes, x, y + 0.42, 0.7, 0.66, fill=tint(BLUE), edge=BLUE, label="warp")
                    text(axes, x + 0.35, y + 0.92, f"warp {warp if warp < 2 else 14}", size=8)
                    text(axes, x + 0.35, y + 0.74, "a channel,", size=7)
                    text(axes, x + 0.35, y + 0.58, f"{verb} all ranks", size=7)
                text(axes, left + 0.1 + 1.63, y + 0.75, "...", size=8)
                x = left + wide - 1.02
                box(axes, x, y + 0.42, 0.94, 0.66, fill=tint(ORANGE), edge=ORANGE, label="signaller")
                text(axes, x + 0.47, y + 0.86, "last warp:", size=8)
                text(axes, x + 0.47, y + 0.64, "stores all " + ("tails" if verb == "to" else "heads"), size=7)
                text(axes, left + wide / 2, y + 0.18, "warps post their progress in shared memory", size=7.5)
                arrow(axes, (x - 0.14, y + 0.75), (x, y + 0.75), colour=ORANGE)
    note(
        axes,
        0.15,
        0.25,
        "Left: each warp of both teams visits every token. Right: one warp loads a token once, for all ranks.",
    )
    return figure


def slots():
    """Draw a token in a ring: its row and its number in two arrays, and packed."""
    figure, axes = canvas(WIDTH, 2.2, "A token in a ring")
    for y, name, packed in ((1.25, "apart", False), (0.55, "packed", True)):
        text(axes, 0.15, y + 0.17, name, ha="left", size=9, weight="bold")
        box(axes, 0.95, y, 3.3, 0.34, "row: 14,336 bytes", fill=tint(BLUE), edge=BLUE, label="row")
        x = 4.25 if packed else 5.2
        box(axes, x, y, 0.8, 0.34, "number", fill=tint(ORANGE), edge=ORANGE, size=8, label="number")
        words = "one bulk copy, one slot" if packed else "two arrays: two stores"
        text(axes, WIDTH - 0.15, y + 0.17, words, ha="right", size=8, colour=GREY)
    note(
        axes,
        0.15,
        0.2,
        "With FP8 the scales travel between row and number. The package also packs experts and weights.",
    )
    return figure
