"""Figures of shared-expert fusion: the layer before and after, load per expert, and schedules."""

from moe_numba.course.bench.figures.style import BLUE, GREY, INK, ORANGE, RED, SKY, WIDTH
from moe_numba.course.draw.canvas import WHITE, arrow, box, canvas, check_range, ink_on, note, plural, text, tint
from moe_numba.course.draw.drawing import Drawing

__all__ = ["tiles_per_expert", "list_schedule", "appended", "lanes", "load", "problem", "schedules"]


def problem(topk_weights, topk_ids, num_experts, scale):
    """Draw one token in the layer: first a separate MLP beside the routed experts, then one sum over all experts."""
    pairs = sorted((int(i), float(w)) for i, w in zip(topk_ids, topk_weights, strict=True))
    check_range("topk", len(pairs), 1, 8)
    check_range("num_experts", num_experts, len(pairs), 512)
    figure, axes = canvas(WIDTH, 4.6, f"One token, {plural(len(pairs), 'routed expert')} and the shared expert")
    _variant(axes, 2.3, "before", pairs, num_experts, scale, separate=True)
    _variant(axes, 0.55, "after", pairs, num_experts, scale, separate=False)
    note(
        axes,
        0.15,
        0.17,
        "A thin box is an expert. The chosen experts have their number and weight below. "
        f"After: the shared expert is expert {num_experts}, with weight 1 / {scale:g}.",
    )
    return figure


def _variant(axes, y, name, pairs, num_experts, scale, separate):
    """Draw one variant of the layer; ``y`` is the lower edge of the boxes with the weights."""
    left, wide, tall, strip = 1.55, 5.1, 0.3, 0.34
    experts = num_experts + (not separate)
    chosen = dict(pairs) | ({} if separate else {num_experts: 1 / scale})
    top, middle = y + 0.72, y + 0.89
    text(axes, 0.15, middle + 0.32, name, ha="left", weight="bold", colour=BLUE)
    box(axes, 0.15, middle - 0.17, 0.85, 0.34, "token", fill=tint(GREY))
    arrow(axes, (1.0, middle), (left - 0.06, middle))
    cell = wide / (experts + 2 * (not separate))  # the shared expert's box is three times as wide
    places = {}
    for expert in range(experts):
        shared = expert == num_experts
        x, own = left + expert * cell, cell * (3 if shared else 1)
        fill = ORANGE if shared else BLUE if expert in chosen else tint(GREY, 0.15)
        label = "shared" if shared else "chosen" if expert in chosen else "expert"
        box(axes, x, top, own, strip, fill=fill, edge=WHITE, line=0.2 if experts > 40 else 0.8, label=label)
        places[expert] = x + own / 2
    words = f"{num_experts} routed experts" + ("" if separate else " and the shared expert")
    text(axes, left, top + strip + 0.13, f"{words}: {len(chosen)} chosen", ha="left", size=8.5, colour=GREY)
    each = wide / 9
    for place, (expert, weight) in enumerate(chosen.items()):
        colour = ORANGE if expert == num_experts else BLUE
        x = left + place * each
        axes.plot([places[expert], x + each / 2 - 0.02], [top, y + tall + 0.02], color=tint(colour, 0.6), linewidth=0.9)
        box(axes, x, y, each - 0.04, tall, fill=tint(colour), edge=colour, label="weight")
        text(axes, x + each / 2 - 0.02, y + 0.2, str(expert), size=8, weight="bold")
        text(axes, x + each / 2 - 0.02, y + 0.08, f"{weight:.3f}", size=7)
    end = left + wide
    arrow(axes, (end + 0.05, middle), (end + 0.3, middle))
    box(axes, end + 0.3, middle - 0.17, 0.6, 0.34, f"× {scale:g}", fill=tint(SKY))
    out = WIDTH - 0.75
    if not separate:
        arrow(axes, (end + 0.9, middle), (out, middle))
    else:
        plus = out - 0.42
        arrow(axes, (end + 0.9, middle), (plus - 0.12, middle))
        box(axes, plus - 0.12, middle - 0.12, 0.24, 0.24, "+", fill=tint(SKY), label="add")
        arrow(axes, (plus + 0.12, middle), (out, middle))
        high = y + 1.55
        axes.plot([0.85, 0.85], [middle + 0.17, high], color=GREY, linewidth=1.1)
        arrow(axes, (0.85, high), (left, high))
        box(axes, left, high - 0.15, 3.2, 0.3, "the shared expert, a separate MLP", fill=ORANGE, label="separate")
        axes.plot([left + 3.2, plus], [high, high], color=GREY, linewidth=1.1)
        arrow(axes, (plus, high), (plus, middle + 0.12))
    box(axes, out, middle - 0.17, 0.6, 0.34, "out", fill=tint(GREY))


def tiles_per_expert(counts, tile_rows):
    """Return the number of tiles of each expert."""
    return [-(-int(rows) // tile_rows) for rows in counts]


def load(panels, num_experts, tile_rows):
    """Draw the rows of each expert as bars, one panel per routing: ``{name: counts}``, shared experts last.

    The dashed line marks the routed expert with the most rows.
    """
    check_range("the number of panels", len(panels), 1, 3)
    tall, left, right = 1.25, 0.75, 2.75
    height = 0.5 + len(panels) * (tall + 0.62)
    figure, axes = canvas(WIDTH, height, f"Rows and tiles of each expert, {tile_rows} rows per tile")
    largest = max(max(counts) for counts in panels.values())
    width = WIDTH - left - right
    for panel, (name, counts) in enumerate(panels.items()):
        counts = [int(rows) for rows in counts]
        y = height - 0.5 - (panel + 1) * (tall + 0.62) + 0.4
        routed, shared = counts[:num_experts], counts[num_experts:]
        thin = width / (len(routed) + 5 * max(len(panel) - num_experts for panel in panels.values()) + 3)
        axes.plot([left, left + width], [y, y], color=INK, linewidth=0.8)
        text(axes, left, y + tall + 0.13, name, ha="left", weight="bold")
        for expert, rows in enumerate(counts):
            extra = expert >= num_experts
            x = left + (len(routed) + 3 + 5 * (expert - num_experts) if extra else expert) * thin
            box(
                axes,
                x,
                y,
                (4 if extra else 0.8) * thin,
                tall * rows / largest,
                fill=ORANGE if extra else BLUE,
                edge="none",
                label="shared" if extra else "routed",
            )
        for rows in (0, largest):
            text(axes, left - 0.07, y + tall * rows / largest, str(rows), size=7.5, colour=GREY, ha="right")
        line = y + tall * max(routed) / largest
        axes.plot([left, left + width], [line, line], color=RED, linewidth=0.9, linestyle="--", label="most routed")
        text(axes, left, y - 0.13, f"expert 0 to {num_experts - 1}", size=8, colour=GREY, ha="left")
        text(axes, left + width, y - 0.13, "shared", size=8, colour=GREY, ha="right")
        tiles = tiles_per_expert(counts, tile_rows)
        largest_expert = counts.index(max(counts))
        lines = [
            f"most rows: expert {largest_expert}",
            f"{max(counts)} rows, {plural(tiles[largest_expert], 'tile')}",
            f"routed: at most {max(routed)} rows, {plural(max(tiles[:num_experts]), 'tile')}",
            f"total: {plural(sum(tiles), 'tile')}",
        ]
        for place, words in enumerate(lines):
            text(
                axes,
                left + width + 0.15,
                y + tall - 0.1 - 0.27 * place,
                words,
                ha="left",
                size=8.5,
                colour=(INK, INK, RED, GREY)[place],
                weight="bold" if place == 1 else "normal",
            )
        if not shared:
            text(axes, left + width, y + 0.2, "none", size=8, colour=GREY, ha="right")
    return figure


def list_schedule(tiles, workers, whole_columns):
    """List (worker, start, length, expert) of each work item; the next item goes to the first free worker.

    An item is an expert's whole column of tiles, or one tile; all tiles take one unit of time.
    """
    free, items = [0] * workers, []
    for expert, column in enumerate(tiles):
        for length in [column] if whole_columns and column else [1] * (0 if whole_columns else column):
            worker = free.index(min(free))
            items.append((worker, free[worker], length, expert))
            free[worker] += length
    return items


def schedules(tiles, workers, shared=()):
    """Draw two schedules of the same tiles: whole columns per SM, and single tiles per SM."""
    check_range("workers", workers, 2, 8)
    check_range("the number of tiles", sum(tiles), 1, 64)
    figure, axes = canvas(WIDTH, 1.5 + 0.34 * workers, "Makespan of two schedules of the same tiles")
    variants = {"whole columns per SM": True, "single tiles per SM": False}
    both = {name: list_schedule(tiles, workers, whole) for name, whole in variants.items()}
    ends = {name: max(start + length for _, start, length, _ in items) for name, items in both.items()}
    unit = (WIDTH - 0.3 - 2 * 0.8 - 0.3) / 2 / max(ends.values())
    for side, (name, items) in enumerate(both.items()):
        left, top = 0.85 + side * (WIDTH / 2), 0.55 + 0.34 * workers
        text(axes, left, top + 0.22, f"{name}: {ends[name]} units of time", ha="left", weight="bold")
        for worker in range(workers):
            text(axes, left - 0.08, top - 0.34 * worker - 0.17, f"SM {worker}", size=8.5, colour=GREY, ha="right")
        for worker, start, length, expert in items:
            fill = ORANGE if expert in shared else tint(BLUE if expert % 2 else SKY, 0.55)
            for tile in range(length):
                box(
                    axes,
                    left + (start + tile) * unit,
                    top - 0.34 * worker - 0.31,
                    unit,
                    0.28,
                    str(expert),
                    fill=fill,
                    edge=WHITE,
                    colour=ink_on(fill),
                    size=7.5,
                    label="tile",
                )
        x = left + ends[name] * unit
        axes.plot([x, x], [top + 0.05, top - 0.34 * workers], color=RED, linewidth=1.3, label="end")
    note(axes, 0.15, 0.17, "A box is a tile, its number the expert. Orange: shared.")
    return figure


def appended(tokens=4, topk=8, padding=2):
    """Draw which thread writes which element of the output: a row for each token, whose last column is new."""
    check_range("tokens", tokens, 1, 8)
    check_range("topk", topk, 1, 8)
    figure = Drawing("A thread for each element of ids, row by row")
    width, left, top = 30, 62, 34
    for token in range(tokens):
        y = top + 26 * token
        figure.text(left - 6, y + 14, f"token {token}", size=10, kind="quiet", anchor="end")
        for column in range(topk + 1):
            thread = token * (topk + 1) + column
            is_new, is_padding = column == topk, token == padding
            kind = "pale" if is_padding else "orange" if is_new else "blue" if thread < 32 else "sky"
            figure.box(left + width * column, y, width - 2, 22, kind, f"{thread}")
    y = top + 26 * tokens + 12
    figure.legend(
        y, [("blue", "warp 0 copies"), ("sky", "warp 1 copies"), ("orange", "shared expert"), ("pale", "padding")]
    )
    figure.note(8, y + 16, "The numbers are those of the threads.")
    return figure


def lanes(topk=8):
    """Draw the lanes of a warp of the gate, and the columns that they store."""
    check_range("topk", topk, 1, 12)
    figure = Drawing("What the lanes of a warp hold after routing")
    width, left, top = 11.6, 9, 34
    for lane in range(32):
        kind = "blue" if lane < topk else "orange" if lane == topk else "pale"
        figure.box(left + width * lane, top, width - 1.5, 20, kind, str(lane) if lane <= topk else "", size=8)
    wide, below = 30, top + 58
    for column in range(topk + 1):
        x = left + wide * column
        middle = left + width * (column + 0.45)
        figure.line((middle, top + 22), (x + wide / 2 - 1, below - 3))
        kind = "orange" if column == topk else "blue"
        figure.box(x, below, wide - 2, 22, kind, "256" if column == topk else f"id {column}", size=9)
    figure.legend(below + 40, [("blue", "a routed expert"), ("orange", "idle so far"), ("pale", "idle")])
    return figure
