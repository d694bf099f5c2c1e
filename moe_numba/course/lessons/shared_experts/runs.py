"""Tables, texts and predictions of the lesson "Shared experts"."""

from collections.abc import Callable
from functools import cache

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.baselines.torch_layer import NAMES, SMALL, Layer, mismatch
from moe_numba.course.draw.canvas import plural
from moe_numba.course.lessons.shared_experts import draw
from moe_numba.course.lessons.shared_experts.layers import MAIN, TOPIC, Layers, batch, wrong
from moe_numba.course.lessons.shared_experts.layers import layers as layers_of
from moe_numba.course.lessons.shared_experts.routing import routing
from moe_numba.course.lessons.shared_experts.sizes import (
    ALL_TOKENS,
    DECODE,
    DEVICE,
    DTYPES,
    FP8,
    GATE_EXPERTS,
    GATE_GROUPS,
    GATE_KEPT,
    GATE_TOKENS,
    GATE_TOPK,
    SCALE,
    TIMED,
)
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Table
from moe_numba.gate.reference import biased_grouped_topk
from moe_numba.shared_experts import memory_cost, reference

WITH_TORCH = "shared_experts"  # the record of the same layers with torch's grouped GEMMs
TORCH_STEPS = {"separate": "separate", "ninth column": "1 shared", "8 replicas": "8 replicas"}  # ours -> theirs
_BYTES = {FP8: 1, torch.bfloat16: 2}  # of a weight
layers = Layers()


def with_torch_us(step: str, tokens: int, dtype: str, what: str = "layer", model: str = "tp8") -> float | None:
    """Return a recorded time of a layer with torch's kernels, or None."""
    row = _torch_row(step, tokens, dtype, what, model)
    return row["kernel_us"]["median"] if row else None


def _torch_row(step, tokens, dtype, what="layer", model="tp8"):
    record = records.recorded(WITH_TORCH)
    about = dict(size=dict(tokens=tokens), dtype=NAMES[DTYPES[dtype]], config=dict(model=model))
    return record and records.find(record, step=f"{what}: {step}", **about)


def _text(us):
    return "not timed" if us is None else records.format_us(us)


# The problem


@cache
def many_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids of 4096 tokens that are routed by DeepSeek-V3's rule from random logits."""
    random = torch.Generator().manual_seed(0)
    logits, bias = (torch.randn(4096, GATE_EXPERTS, generator=random), torch.rand(GATE_EXPERTS, generator=random) * 0.1)
    groups = dict(num_expert_group=GATE_GROUPS, topk_group=GATE_KEPT)
    return biased_grouped_topk(logits, bias, GATE_TOPK, **groups)


def result() -> str:
    """Return what the lesson builds, in numbers of records."""
    texts = []
    rows = [_torch_row(step, 64, MAIN) for step in ("separate", "1 shared")]
    if all(rows):
        before, after = (
            f"{row['launches']} launches and {records.format_us(row['kernel_us']['median'])} us" for row in rows
        )
        texts.append(f"with torch's GEMMs, 64 tokens in FP8: separate {before}, fused {after}")
    found = [_recorded_us(name) for name in ("separate", "column in the gate")]
    if all(found):
        before, after = map(records.format_us, found)
        texts.append(f"with this package's, {DECODE} tokens in FP8: separate {before} us, fused {after} us")
    return "\n".join(f"Recorded on an H200 {text}" for text in texts) or "no times are recorded"


def _recorded_us(step):
    record = records.recorded(TOPIC)
    row = record and records.find(record, step=step, size=dict(tokens=DECODE), dtype=NAMES[DTYPES[MAIN]])
    return row and row["kernel_us"]["median"]


# The ninth weight


def show_ninth_weight(nine_weights: Callable) -> Table:
    """Return a table of errors of fused layers in float64, by their ninth weight; raise if the checks are wrong."""
    layer = Layer(SMALL, torch.float64, DEVICE, replicas=8)
    x = layer.tokens(9)
    weights, ids = layer.route(x)
    nine = nine_weights(weights.double().cpu(), SCALE, False, False).to(DEVICE)  # answers are tested on the CPU
    right, first = layer.expected(x), SMALL.num_experts
    one = torch.cat([ids, torch.full_like(ids[:, :1], first)], dim=1)
    in_turn = one + torch.arange(len(x), device=DEVICE)[:, None] % 8 * (one == first)
    every = reference.fuse_routing(weights.double(), ids, first, 8, SCALE, "all")
    cases = {
        "nine_weights": (nine, one),
        "the ninth weight is 1": (torch.cat([nine[:, :-1], torch.ones_like(nine[:, :1])], dim=1), one),
        "the ninth weight is 0": (torch.cat([nine[:, :-1], torch.zeros_like(nine[:, :1])], dim=1), one),
        "nine_weights, one of 8 replicas for each token": (nine, in_turn),
        "all of 8 replicas for each token": every,
    }
    lines = []
    for name, routing_ in cases.items():
        out = layer.fused(x, *(t.to(i.dtype) for t, i in zip(routing_, (nine, one), strict=True)))
        error = float((out - right).norm() / right.norm())
        lines.append([name, f"{error:.1e}", mismatch(out, right, torch.float64) or "right"])
    return Table(["fused layer", "relative error", ""], lines)


# The lower bound


@cache
def experts_read(tokens: int) -> int:
    """Return how many experts the first of `many_tokens` need, with the shared one."""
    return len(many_tokens()[1][:tokens].unique()) + 1


def weights_us(experts: float, dtype: str = MAIN) -> float:
    """Return the microseconds to read the weights of some experts at the rate of a copy."""
    return experts * TIMED.expert_weights * _BYTES[DTYPES[dtype]] / chip_limits().copy_bandwidth * 1e6


def lower_bound_us(tokens: int, dtype: str = MAIN, read: int | None = None) -> float:
    """Return the microseconds to read the weights of some experts once or to compute, whichever takes longer."""
    flops = 2 * tokens * (TIMED.topk + 1) * TIMED.expert_weights
    computed = flops / chip_limits().tensor_flops[NAMES[DTYPES[dtype]]] * 1e6
    return max(weights_us(experts_read(tokens) if read is None else read, dtype), computed)


def show_lower_bound() -> Table:
    """Return a table: experts that are read, the shared expert's part, and the lower bound."""
    lines = []
    for tokens in ALL_TOKENS:
        read = experts_read(tokens)
        bounds = [f"{lower_bound_us(tokens, dtype):.1f}" for dtype in DTYPES]
        lines.append([f"{tokens:,}", f"{read}", f"{1 / read:.1%}", *bounds])
    heads = ["tokens", "experts read", "the shared expert's part of the bytes"]
    return Table([*heads, *(f"lower bound, {dtype}, us" for dtype in DTYPES)], lines)


# Predictions for FP8 and DECODE tokens, in microseconds; None if the time that they start from is not known


@cache
def _small_table():
    return torch.ones(DECODE, TIMED.topk + 1, device=DEVICE)


def small_operation(layer, x):
    """Execute an operation of torch on a small table."""
    return torch.mul(_small_table(), 1.0)


def parts(shared_expert: Callable) -> dict[str, float]:
    """Print and return times of parts of a layer: the shared expert alone, and a small operation of torch."""
    us = layers.times("part", {"the shared expert": shared_expert, "a small operation": small_operation}, MAIN)
    found = dict(us) | {"reading an expert's weights": weights_us(1)}
    print("; ".join(f"{name}: {records.format_us(each)} us" for name, each in found.items()))
    if not us:
        print("the shared expert and a small operation are not timed")
    return found


def _predicted(before, change):
    us = layers.steps[before].us.get(MAIN)
    try:
        return us and us + change()
    except KeyError:  # a part is not timed
        return None


def by_torch(before: str, found: dict, operations: int) -> float | None:
    """Return the time without the shared expert's kernels, but with its weights and some small operations."""
    names = "the shared expert", "reading an expert's weights", "a small operation"
    shared, weights, small = (found.get(name) for name in names)
    return (
        None if shared is None or small is None else _predicted(before, lambda: weights - shared + operations * small)
    )


def fewer_operations(before: str, found: dict, fewer: int) -> float | None:
    """Return the time with so many small operations less."""
    return _predicted(before, lambda: -fewer * found["a small operation"])


def more_experts(before: str, experts: int) -> float | None:
    """Return the time with the weights of more experts to read."""
    return _predicted(before, lambda: weights_us(experts))


def launch_us(before: str | None = None) -> float | None:
    """Return what an empty kernel takes in a graph, as recorded; or the time of a step of the routing without it."""
    record = records.recorded(WITH_TORCH)
    row = record and records.find(record, step="empty kernel", config=dict(dependent=False))
    us = row["kernel_us"]["median"] if row else None
    if before is None:
        return us
    known = routing.steps[before].us
    return known - us if known and us else None


def without_launch(before: str) -> float | None:
    """Return the time of a layer without an empty kernel."""
    us = launch_us()
    return None if us is None else _predicted(before, lambda: -us)


# Replicas


def loads() -> dict[str, list[int]]:
    """Return the rows of each expert for 4096 tokens: name of the routing -> counts."""
    found = {}
    for name, replicas in (("one shared expert", 1), ("8 replicas", 8)):
        ids = reference.fuse_routing(*many_tokens(), GATE_EXPERTS, replicas, SCALE, "round_robin")[1]
        found[name] = torch.bincount(ids.flatten().long(), minlength=GATE_EXPERTS + replicas).tolist()
    return found


def show_load():
    """Draw the rows of each expert with one shared expert and with 8 replicas."""
    return draw.load(loads(), GATE_EXPERTS, tile_rows=128)


def show_rounds(rounds: Callable, across: int = 4) -> Table:
    """Return a table of the rounds for 4096 tokens; the first GEMM is 512 wide, or four tiles of 128."""
    lines = []
    for tile_rows in (64, 128):
        for name, counts in loads().items():
            tiles = draw.tiles_per_expert(counts, tile_rows)
            single, whole = rounds(counts, tile_rows, across, chip_limits().sm_count)
            lines.append([name, str(tile_rows), str(max(tiles)), str(sum(tiles)), str(single), str(whole)])
    heads = ["rows of a tile", "tiles of the longest column", "all tiles", "rounds, single tiles"]
    return Table(["", *heads, "rounds, whole columns, at least"], lines)


# All sizes


def show_sizes(separate: Callable, ninth_column: Callable, replicas: Callable) -> Table:
    """Return one table of all numbers of tokens: both layers and replicas, with torch's kernels and this package's.

    On a GPU the package's layers are checked and timed, otherwise their times are read from the record.
    """
    forwards = dict(zip(TORCH_STEPS, (separate, ninth_column, replicas), strict=True))
    lines = []
    for dtype in DTYPES:
        for tokens, alike in (*((tokens, False) for tokens in ALL_TOKENS), (64, True)):
            if not simulator.ENABLED:
                for name, forward in forwards.items():
                    if fault := wrong(forward, dtype, tokens, alike):
                        raise WrongResult(f"{name}: {fault}")
            ours = layers.times("sizes", forwards, dtype, tokens, alike)
            theirs = [None if alike else with_torch_us(step, tokens, dtype) for step in TORCH_STEPS.values()]
            times = ["" if us is None else records.format_us(us) for us in (*theirs, *map(ours.get, TORCH_STEPS))]
            read = _experts_of_layer(tokens, dtype, alike)
            name = f"{tokens:,}{', all alike' if alike else ''}"
            lines.append([name, dtype, *times, str(read), f"{lower_bound_us(tokens, dtype, read):.0f}"])
    heads = [f"{whose}: {name}" for whose in ("torch", "package") for name in TORCH_STEPS]
    return Table(["tokens", "weights", *heads, "experts read", "lower bound"], lines)


def _experts_of_layer(tokens, dtype, alike):
    """Return how many experts the timed layer reads, with the shared one: counted on a GPU, otherwise as recorded."""
    if alike:
        return TIMED.topk + 1
    if not simulator.ENABLED:
        return len(layers_of(dtype)[0].route(batch(dtype, tokens)[0])[1].unique()) + 1
    row = _torch_row("separate", tokens, dtype)
    return row["experts"] if row else experts_read(tokens)


def saved(whose: str, tokens: int, dtype: str = MAIN, step: str = "ninth column") -> float | None:
    """Return the microseconds that a fused layer saves, with the kernels of "torch" or "package"; None if not timed."""
    if whose == "torch":
        pair = [with_torch_us(TORCH_STEPS[name], tokens, dtype) for name in ("separate", step)]
    else:
        pair = [_size_us(name, tokens, dtype) for name in ("separate", step)]
    return None if None in pair else pair[0] - pair[1]


def _size_us(name, tokens, dtype):
    row = layers.rows.get((f"sizes: {name}", dtype, tokens, False))
    if row is None:
        record = records.recorded(TOPIC)
        about = dict(size=dict(tokens=tokens), dtype=NAMES[DTYPES[dtype]])
        row = record and records.find(record, step=f"sizes: {name}", **about)
    return row["kernel_us"]["median"] if row else None


def show_saved_per_launch(separate: str, fused: str) -> Table:
    """Return a table of the launches and the time that the fusion saves with few tokens."""
    lines = []
    for dtype in DTYPES:
        rows = [_torch_row(step, 64, dtype) for step in ("separate", "1 shared")]
        before, after = (layers.steps[name].launches[dtype] for name in (separate, fused))
        fewer = {"torch": rows[0]["launches"] - rows[1]["launches"]} if all(rows) else {}
        for whose, launches in (fewer | {"package": before - after}).items():
            us = [saved(whose, tokens, dtype) for tokens in (1, 8, 64)]
            each = [_text(None) if t is None else f"{t:+.1f}" for t in us]
            per_launch = [_text(None) if t is None else f"{t / launches:+.1f}" for t in us[1:2]]
            lines.append([whose, dtype, str(launches), *each, *per_launch])
    heads = [f"us saved, {plural(tokens, 'token')}" for tokens in (1, 8, 64)]
    return Table(["kernels", "weights", "launches saved", *heads, "of a launch, 8 tokens"], lines)


def show_dense() -> Table:
    """Return a table of recorded layers whose separate shared expert is a dense GEMM, and of the fused ones."""
    lines = []
    for tokens in ALL_TOKENS:
        us = [with_torch_us(step, tokens, "bfloat16") for step in ("separate, own GEMM", "1 shared, own GEMM")]
        if None not in us:
            lines.append([f"{tokens:,}", *map(records.format_us, us), f"{us[0] - us[1]:+.1f}"])
    return Table(["tokens, bfloat16", "us, a dense GEMM beside", "us, fused", "saved"], lines)


def torch_tiles() -> str:
    """Return the rows of the tiles of torch's grouped GEMM before and after the fusion, in words."""
    texts = []
    for tokens in ALL_TOKENS:
        rows = [_torch_row(step, tokens, MAIN) for step in ("separate", "1 shared")]
        if all(rows):
            texts.append(f"{plural(tokens, 'token')} {' -> '.join(str(row['tile_rows']) for row in rows)}")
    return f"rows of a tile in FP8, separate -> fused: {'; '.join(texts) or 'not recorded'}"


# What a layer can explain

THEIRS = {  # the article's end-to-end results: queries per second -> before and after, in milliseconds
    1: {"TTFT": (949.18, 664.25), "ITL": (54.69, 50.20)},
    4: {"TTFT": (2630.26, 2144.08), "ITL": (156.21, 132.75)},
    8: {"TTFT": (6320.67, 3443.59), "ITL": (188.29, 178.94)},
}
_SIZES = {"ITL": (1, 8, 64, 256), "TTFT": (1024, 4096)}


def show_explained() -> Table:
    """Return a table of the article's gains, and what 58 layers save, at the number of tokens where they save most."""
    moe_layers, lines = memory_cost().moe_layers, []
    for queries, metrics in THEIRS.items():
        for metric, (before, after) in metrics.items():
            cells = [str(queries), metric, f"{before - after:.1f}"]
            for whose in ("torch", "package"):
                found = [saved(whose, tokens, step="8 replicas") for tokens in _SIZES[metric]]
                ms = max((us * moe_layers / 1000 for us in found if us is not None), default=None)
                cells.append(_share(ms, before - after))
            cells.append(_share(_saved_calls_ms(moe_layers), before - after) if metric == "TTFT" else "")
            lines.append(cells)
    heads = ["queries per second", "", "the article's gain, ms", "58 layers save, torch's kernels, ms"]
    return Table([*heads, "this package's kernels, ms", "on the CPU, torch's layer, ms"], lines)


def _share(ms, gain):
    return _text(None) if ms is None else f"{ms:.1f} ({ms / gain:.0%})"


def _saved_calls_ms(moe_layers):
    """Return the milliseconds of the CPU that layers save, which does not depend on the number of tokens."""
    rows = [_torch_row(step, 64, MAIN) for step in ("separate", "8 replicas")]
    us = [row["call_us"]["median"] for row in rows if row]
    return (us[0] - us[1]) * moe_layers / 1000 if len(us) == 2 else None


# What did not pay


def show_what_did_not_pay() -> Table:
    """Return a table of changes, recorded times before and after, and why they gain little or nothing."""
    table = []
    for change, before, after, why in (
        (
            "8 replicas instead of one shared expert (torch, FP8, 64 tokens)",
            with_torch_us("1 shared", 64, "FP8"),
            with_torch_us("8 replicas", 64, "FP8"),
            "Seven more experts are read, and single tiles were balanced before.",
        ),
        (
            "the same, 4096 tokens",
            with_torch_us("1 shared", 4096, "FP8"),
            with_torch_us("8 replicas", 4096, "FP8"),
            "Every expert is read anyway, and single tiles were balanced before.",
        ),
        (
            "the fusion in bfloat16, 4096 tokens (torch)",
            with_torch_us("separate", 4096, "bfloat16"),
            with_torch_us("1 shared", 4096, "bfloat16"),
            "A few launches are nothing beside milliseconds, and the shared expert's GEMMs have tiles for all SMs.",
        ),
        (
            "the fusion with whole experts, 32 on each of 8 GPUs (torch, bfloat16, 4096 tokens)",
            with_torch_us("separate", 4096, "bfloat16", model="ep8"),
            with_torch_us("1 shared", 4096, "bfloat16", model="ep8"),
            "Probably because a GEMM of a whole expert has tiles for all SMs by itself.",
        ),
        (
            f"the column in torch instead of in the gate ({GATE_TOKENS} tokens, gate and column alone)",
            _gate_us("gate, column inside"),
            _gate_us("gate, then torch"),
            "Each of the operations is a launch.",
        ),
        (
            "a dependent launch that appends, instead of the gate",
            _gate_us("gate, column inside"),
            _gate_us("gate, then fuse_routing"),
            "The launch is hidden in part, the loads and stores of its kernel are not.",
        ),
    ):
        table.append([change, _text(before), _text(after), why])
    return Table(["change", "us before", "us after", "why"], table)


def _gate_us(step):
    record = records.recorded(WITH_TORCH)
    row = record and records.find(record, step=step, size=dict(tokens=GATE_TOKENS))
    return row["kernel_us"]["median"] if row else None


# Next


def lower_bound_of_overlap() -> str:
    """Return the bound to beat by a shared expert that runs beside the gate, in words."""
    gate = _gate_us("gate alone")
    text = f"reading the shared expert's weights, {weights_us(1):.1f} us in FP8"
    if gate:
        text += f" (the gate alone, which leaves DRAM idle, takes {gate:.1f} us for {GATE_TOKENS} tokens)"
    bound = lower_bound_us(DECODE, MAIN, _experts_of_layer(DECODE, MAIN, False))
    return f"{text}. The lower bound of the timed layer with {DECODE} tokens stays {bound:.0f} us."


def save() -> None:
    """Write the record of what a GPU has timed: the layers, and the kernels of the routing."""
    rows = [*layers.rows.values(), *(step.row for step in routing.steps.values() if step.row)]
    if not rows:
        print("not timed: no record is written")
        return
    print(f"{len(rows)} rows written to {records.write(TOPIC, rows)}")
