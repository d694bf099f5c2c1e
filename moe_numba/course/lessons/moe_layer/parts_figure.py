"""Figure and table of a call's time beside the times of its parts and a lower bound."""

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import H200
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, RED, SKY, WIDTH, Picture
from moe_numba.course.bench.records import format_us
from moe_numba.course.draw.canvas import box, canvas, check_range, ink_on, note, plural, text

_COLOURS = BLUE, SKY, ORANGE, GREEN, PURPLE, RED, GREY
EXPERTS = {  # colours of the parts of a layer's experts, in the order of their launches
    "group_by_expert": ORANGE,
    "cast": PURPLE,
    "permute": GREY,
    "gate_up": BLUE,
    "activation": RED,
    "down": SKY,
    "weighted_sum": GREEN,
}
_CHARACTER = 0.075  # inches of a character of a legend, at most


def stacked_parts(
    groups: dict, *, title: str = "", caption: str = "", whole: str = "whole layer", colours: dict | None = None
) -> Picture:
    """Draw each group's parts one after another in a bar, and below it bars of the whole and of the lower bound.

    Each group has its own scale: its longest bar fills the width.

    Parameters
    ----------
    groups : dict
        ``{label: (parts, whole, bound)}`` with parts ``{name: microseconds}``; at most 12 groups, and at most 7 names
        of parts in all of them together.
    whole : str
        What the second bar is.
    colours : dict, optional
        ``{name of a part: colour}``, in the order of the legend; by default that of the parts.
    """
    names = list(dict.fromkeys(name for parts, *_ in groups.values() for name in parts))
    order = list(colours or ())
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    check_range("the number of groups", len(groups), 1, 12)
    check_range("the number of parts", len(names), 1, len(_COLOURS))
    places = _legend(names)
    row, legend, below = 0.95, 0.28 * (1 + places[-1][1]), 0.7
    height = below + row * len(groups) + legend + 0.85
    figure, axes = canvas(WIDTH, height, title)
    colours = dict(zip(names, _COLOURS, strict=False)) | (colours or {})
    for name, (x, line) in zip(names, places, strict=True):
        y = height - 0.62 - 0.28 * line
        box(axes, x, y, 0.16, 0.16, fill=colours[name], edge="none")
        text(axes, x + 0.24, y + 0.08, name, size=8.5, ha="left")
    left, width = 1.35, WIDTH - 1.35 - 2.75
    columns = {"sum of parts": WIDTH - 1.85, whole: WIDTH - 1.05, "lower bound": WIDTH - 0.15}
    head = below + row * len(groups) + 0.1
    for name, x in columns.items():
        text(axes, x, head, name, size=8, colour=GREY, ha="right")
    for place, (label, (parts, us, bound)) in enumerate(groups.items()):
        y, total = below + row * (len(groups) - 1 - place), sum(parts.values())
        scale, x = width / max(total, us, bound), left
        text(axes, left - 0.12, y + 0.47, label, size=8.5, ha="right")
        for name, part in parts.items():
            box(axes, x, y + 0.52, part * scale, 0.3, fill=colours[name], edge="white", line=0.5, label="part")
            if part * scale > 0.36:
                text(axes, x + part * scale / 2, y + 0.67, format_us(part), size=7.5, colour=ink_on(colours[name]))
            x += part * scale
        for name, length, bottom, fill in ((whole, us, 0.29, INK), ("lower bound", bound, 0.08, PALE)):
            box(axes, left, y + bottom, length * scale, 0.19, fill=fill, edge="none", label=name)
            text(axes, left + 0.06, y + bottom + 0.09, name, size=7.5, colour=ink_on(fill), ha="left")
        for name, number in zip(columns, (total, us, bound), strict=True):
            text(axes, columns[name], y + 0.47, format_us(number), size=8.5, ha="right")
    text(axes, 0.15, 0.15, caption, size=7.5, colour=GREY, ha="left")
    note(axes, 0.15, 0.45, "Kernel time in microseconds. Each number of tokens has its own scale.")
    return figure


def _legend(names):
    """Return (x, line) of each name, in as many lines as needed."""
    places, x, line = [], 0.15, 0
    for name in names:
        wide = 0.5 + _CHARACTER * len(name)
        if x + wide > WIDTH and x > 0.15:
            x, line = 0.15, line + 1
        places.append((x, line))
        x += wide
    return places


def parts_of(record: dict, models: list[str], tokens: tuple[int, ...] = ()) -> dict:
    """Return the groups of `stacked_parts` of a record of the topic ``moe_layer``; ``tokens``: only these sizes."""
    found: dict = {}
    for row in record["rows"]:
        model, count = row["config"]["model"], row["size"]["tokens"]
        if model in models and (not tokens or count in tokens) and "kernel_us" in row:
            place = "".join(f"\n{part}" for part in model.split(", ")[1:])
            parts, whole = found.setdefault(f"{plural(count, 'token')}{place}", ({}, {}))
            us, step = row["kernel_us"]["median"], row["step"]
            if step == "final":
                whole |= dict(us=us, bound=row["floor_us"])
            elif step.startswith("part: "):
                parts[step.removeprefix("part: ")] = us
    return {label: (parts, whole["us"], whole["bound"]) for label, (parts, whole) in found.items()}


def draw_parts(record: dict, title: str, models: list[str], tokens: tuple[int, ...] = ()) -> Picture:
    """Draw `parts_of` a record of the topic ``moe_layer``."""
    caption = plots.caption(record)
    groups = parts_of(record, models, tokens)
    return stacked_parts(groups, title=f"{title}: time of each launch", caption=caption, colours=EXPERTS)


def parts_table(record: dict) -> str:
    """Return a table of the whole layer, its launches, its GEMMs and the lower bound of each row of ``moe_layer``."""
    heads = "experts", "tokens", "whole layer", "sum of launches", "GEMMs", "lower bound", "layer / bound", "limit"
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 6 + "---|"]
    for row in records.select(record, step="final"):
        model, tokens, bound = row["config"]["model"], row["size"]["tokens"], row["floor_us"]
        own = {"config": {"model": model}, "size": {"tokens": tokens}}
        median = {other["step"]: other["kernel_us"]["median"] for other in records.select(record, **own)}
        launches = sum(us for step, us in median.items() if step.startswith("part: "))
        rate = H200.tensor_flops[{"e4m3": "float8_e4m3fn"}.get(row["dtype"], "bfloat16")]
        limit = "tensor cores" if row["flops"] / rate * 1e6 > 0.999 * bound else "memory bandwidth"
        cells = [*map(format_us, (median["final"], launches, median["both GEMMs"], bound))]
        lines.append(f"| {model} | {tokens} | {' | '.join(cells)} | {median['final'] / bound:.2f} | {limit} |")
    return "\n".join([*lines, "", f"Microseconds, {plots.caption(record)}."])


def moved_bytes(config: dict, tokens: int) -> dict[str, int]:
    """Return {launch: bytes} that launches besides the GEMMs read and write; bfloat16, with a permutation."""
    x = 2 * tokens * config["hidden"]
    rows = config["topk"] * x
    activation = 2 * tokens * config["topk"] * 3 * config["intermediate"]
    return {"permute": x + rows, "activation": activation, "weighted_sum": rows + x}


def rates_table(record: dict, model: str, tokens: int) -> str:
    """Return a table of the launches of `moved_bytes`: megabytes, microseconds and rates."""
    lines = ["| launch | MB read and written | us | TB/s |", "|---|---:|---:|---:|"]
    for row in records.select(record, config={"model": model}, size={"tokens": tokens}):
        name, num_bytes = row["step"].removeprefix("part: "), moved_bytes(row["config"], tokens)
        if name in num_bytes:
            us, moved = row["kernel_us"]["median"], num_bytes[name]
            lines.append(f"| {name} | {moved / 1e6:.0f} | {format_us(us)} | {moved / us * 1e-6:.1f} |")
    return "\n".join([*lines, "", f"{model}, {plural(tokens, 'token')}."])
