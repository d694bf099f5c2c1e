"""Tables and sentences of the lesson "One kernel": records, the model, and what starts before what ends."""

import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import takewhile

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.lessons.low_latency.model import launch
from moe_numba.course.lessons.one_kernel import model, runs
from moe_numba.course.lessons.one_kernel.runs import Version, lesson
from moe_numba.course.lessons.one_kernel.tile import ROWS, TILE_COLUMNS, WARPS
from moe_numba.course.steps.lesson import Orders, Table
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.moe_layer.expert_parallel.one_kernel import kernel as package_kernel

RECORD, MANY = "moe_layer_ranks", 4096  # tokens on each GPU
LARGEST = 8  # GPUs
PARTS = "dispatch", "experts", "combine"
BY_EXPERT = {
    "launches by expert": "launches by expert",
    "one kernel": "one kernel",
    "its GEMMs alone": "part: GEMMs by expert",
}
PACKAGE_COLUMNS = model.TILE_COLUMNS // 2, model.TILE_COLUMNS  # of the results of the package's two GEMMs
SMS = model.CTAS
NOT_RECORDED = "not recorded"


@cache
def rates() -> model.Rates:
    """Return what the records say of an H200."""
    return model.rates()


def _recorded(step, ranks, tokens=MANY, dtype="e4m3"):
    """Return recorded microseconds of a layer on several GPUs, or None."""
    row = records.find(records.read(RECORD), step=step, dtype=dtype, config={"ranks": ranks}, size={"tokens": tokens})
    return row and row["kernel_us"]["median"]


def _us(us):
    return NOT_RECORDED if us is None else records.format_us(us)


def result() -> str:
    """Return what one kernel reaches with many tokens, in numbers of the record, as far as it has them."""
    record, lines = records.read(RECORD), []
    for ranks in (1, 2, LARGEST):
        chain, kernel = model.chain_us(ranks, MANY), _recorded("one kernel", ranks)
        found = f"{kernel:.0f} us in one kernel" if kernel else "one kernel not recorded"
        if ranks > 1:  # the model is of links
            found += f" (the model says {model.one_kernel(rates(), ranks, MANY).sums:.0f})"
        lines.append(f"{ranks} GPU{'s' * (ranks > 1)}: {_us(chain)} us as a chain of launches, {found}")
    return f"{MANY} tokens on each GPU, DeepSeek-V3's experts in FP8, H200, {record['date'][:10]}. " + "; ".join(lines)


def parts() -> dict[int, dict[str, float]]:
    """Return {GPUs: {part: us}} of the recorded chain; the experts are split as on one GPU."""
    found, of = {}, rates().parts
    for ranks in (2, LARGEST):
        dispatch, experts, combine = (_recorded(f"part: {part}", ranks) for part in PARTS)
        share = experts / sum(of.values())
        names = {"group": "group_by_expert", "permute": "permute", "first GEMM": "gate_up", "second GEMM": "down"}
        inside = {name: of[part] * share for name, part in (names | {"sum": "weighted_sum"}).items()}
        found[ranks] = {"dispatch": dispatch, **inside, "combine": combine}
    return found


def show_bounds() -> Table:
    """Return a table of recorded chains beside the two GEMMs."""
    lines = []
    for ranks in (2, LARGEST):
        for tokens in (64, 512, MANY):
            gemms, chain = sum(model.gemms_us(rates(), tokens)), model.chain_us(ranks, tokens)
            lines.append([str(ranks), str(tokens), f"{gemms:.0f}", _us(chain), f"{chain / gemms:.2f}" if chain else ""])
    return Table(["GPUs", "tokens on each", "both GEMMs, us", "chain, us", "chain / GEMMs"], lines)


def show_bytes() -> Table:
    """Return a table of the bytes that a GPU sends, once per rank and once per expert, with their times."""
    lines = []
    for ranks in model.RANKS:
        sent, first = model.bytes_of(ranks, MANY), model.gemms_us(rates(), MANY)[0]
        pairs = (sent.dispatch, sent.dispatch_per_expert)
        cells = [f"{some / 1e6:.0f} MB, {some / rates().wire:.0f} us" for some in pairs]
        lines.append([str(ranks), *cells, f"{pairs[1] / pairs[0]:.1f}", f"{first:.0f} us"])
    heads = ["GPUs", "dispatch, once per rank", "once per expert", "ratio", "first GEMM"]
    about = f"{MANY} tokens on each GPU, rows in FP8 with scales, times at the best recorded push rate."
    return Table(heads, lines, about)


def _steps(ranks=LARGEST):
    return model.steps_us(rates(), ranks, MANY, launch().us)


def predict(step: str) -> str:
    """Return what the model predicts of a step: a field of `model.Steps`."""
    of = _steps()
    before, after = of[of._fields.index(step) - 1], getattr(of, step)
    return (
        f"Prediction for the package's kernels, {LARGEST} GPUs, {MANY} tokens on each: {before:.0f} us before this "
        f"step, {after:.0f} us with it ({after - before:+.0f} us)."
    )


def tail() -> str:
    """Return how long a tile of the package's first GEMM takes: what a CTA may idle between the GEMMs."""
    tiles, first = _tiles()[0], model.gemms_us(rates(), MANY)[0]
    return (
        f"The package's first GEMM has {tiles:.0f} tiles with {MANY} tokens on each GPU, {tiles / SMS:.1f} for each of "
        f"{SMS} CTAs, so one of them takes about {first / (tiles / SMS):.0f} us."
    )


def _tiles():
    """Return the tiles of the package's two GEMMs, if all experts have as many rows."""
    row_tiles = MANY * model.TOPK / model.TILE_ROWS
    first, second = (
        columns / tile for columns, tile in zip((model.INTERMEDIATE, model.HIDDEN), PACKAGE_COLUMNS, strict=True)
    )
    return row_tiles * first, row_tiles * second


def fences() -> str:
    """Return how long the package's consumers would wait for fences, one for each tile."""
    tiles, one_way = sum(_tiles()) / SMS, rates().one_way_us
    return (
        f"A CTA of the package's kernel has {tiles:.0f} tiles with {MANY} tokens on each GPU. If each fence took "
        f"as long as a flag with release takes to another GPU, {one_way:.2f} us, its consumers would wait for "
        f"{tiles * one_way:.0f} us. Fences of the first GEMM stay on one GPU, and take less."
    )


# What starts before what ends


SEEDS = 4


def show_overlap(*names: str) -> Table:
    """Return a table of steps: the shares of what is done before the part in front of it has ended."""
    lines = []
    for name in names:
        first, second, back = _shares(Version(*lesson.steps[name].version))
        lines.append([name, *(f"{share:.0%}".replace("%", " %") for share in (first, second, back))])
    heads = ["step", "first GEMM's tiles before the last row", "second GEMM's tiles before the last of the first"]
    return Table([*heads, "pieces at home before the last tile"], lines)


def _shares(version):
    if simulator.ENABLED:
        return shares_of(version)
    expression, functions = expression_of(version)
    return in_simulator(_shares_again, expression, functions=functions)


def _shares_again(version):
    return list(shares_of(eval(version, vars(sys.modules["__main__"]))))  # an expression of the page's functions


@cache
def shares_of(version: Version) -> tuple[float, float, float]:
    """Return three shares, of several runs in the simulator of the call with random experts."""
    sizes = runs.sizes_of()
    inputs, early, total = runs.random_inputs(sizes, 1), [0, 0, 0], [0, 0, 0]
    for seed in range(SEEDS):
        with simulator.seed(seed), simulator.trace(accesses=True) as events:
            runs.outputs(version, sizes, inputs)
        for rank in range(sizes.ranks):
            for i, (found, of_all) in enumerate(_early_and_all(events, sizes, rank)):
                early[i] += found
                total[i] += of_all
    first, second, back = (found / max(of_all, 1) for found, of_all in zip(early, total, strict=True))
    return first, second, back


def _early_and_all(events, sizes, rank):
    """Yield for a rank: first tiles, second tiles and returned pieces, those before the end of the part and all.

    Tiles of the second GEMM are counted by their stores, and so are pieces.
    """
    own = f"the buffer of rank {rank}"
    rows, first, second, back, last_second = [], {}, [], [], -1
    for time, event in enumerate(events):
        details = event.details if isinstance(event.details, Mapping) else {}
        buffer, index, what = details.get("buffer"), details.get("index"), event.what
        if buffer == "local":  # the argument by which a rank reaches its own
            buffer = f"the buffer of rank {event.rank}"
        if what == "global atomic" and buffer == own and sizes.arrived <= index < sizes.returned:
            rows.append(time)
        if what == "global store" and event.rank == rank and buffer == "activated":
            first[_tile(event, index, sizes.intermediate // 2)] = time
        if what == "global store" and _is_second(event, buffer, index, sizes):
            if event.warp < WARPS:
                last_second = time  # of any rank
                if event.rank == rank:
                    second.append(time)
            if buffer == own and index >= sizes.back:
                back.append(time)
    last_row, last_first = max(rows, default=-1), max(first.values(), default=-1)
    yield sum(time < last_row for time in first.values()), len(first)
    yield sum(time < last_first for time in second), len(second)
    yield sum(time < last_second for time in back), len(back)


def _tile(event, index, words):
    row, word = divmod(int(index), words)
    return event.block, row // ROWS, word // (TILE_COLUMNS // 2)


def _is_second(event, buffer, index, sizes):
    """Return whether a store is of a row of the second GEMM, in `y` or at home."""
    return isinstance(buffer, str) and buffer.startswith("the buffer of rank ") and index >= sizes.y


# Wrong versions


def brief(orders: Orders, most: int = 5) -> str:
    """Return the first lines of a report on thread orders: of the error, and of the race if there is one."""
    head = f"wrong under {orders.wrong} of {orders.seeds} thread orders"
    race = None if orders.race == orders.error else orders.race
    return "\n".join([head, *(_first_lines(text, most) for text in (orders.error, race) if text)])


def _first_lines(text, most):
    lines = text.split("\n")
    more = len(lines) - most
    return "\n".join([*lines[:most], f"  ... and {more} more lines"] if more > 0 else lines)


# Records, the model, the package


def show_records() -> Table:
    """Return a table of recorded layers: the chain, launches by expert, one kernel, its GEMMs."""
    lines = []
    for ranks in (1, *model.RANKS):
        for tokens in (8, 64, 512, MANY):
            chain = model.chain_us(ranks, tokens)
            found = [_recorded(step, ranks, tokens) for step in BY_EXPERT.values()]
            if chain or any(found):
                lines.append([str(ranks), str(tokens), _us(chain), *map(_us, found)])
    return Table(["GPUs", "tokens on each", "best chain, us", *BY_EXPERT], lines)


def show_lost() -> Table:
    """Return a table of recorded changes that gained little or nothing, and of one kernel with few tokens."""
    lines = []
    for tokens in (64, 512, MANY):
        before, after = (_recorded(step, 2, tokens) for step in ("final", "combine during the sum"))
        lines.append(["combine starts during the weighted sum", "2", str(tokens), _us(before), _us(after)])
    for tokens in (8, 64):
        before, after = model.chain_us(1, tokens), _recorded("one kernel", 1, tokens)
        lines.append(["one kernel with few tokens", "1", str(tokens), _us(before), _us(after)])
    return Table(["change", "GPUs", "tokens on each", "us before", "us after"], lines)


def show_balance() -> Table:
    """Return a table of the work of the CTA that has most, for two ways to share the tiles."""
    heads = ["tokens on each GPU", "tiles round robin: busiest CTA / mean", "tiles when ready: busiest CTA / mean"]
    about = f"Multiplications of {model.CTAS} CTAs, 32 experts on the GPU: counted; when ready: simulated by them."
    return Table(heads, model.balances(), about)


def timelines() -> dict[int, tuple[float, model.Timeline]]:
    """Return {GPUs: when the last row has arrived, and the timeline} of the model."""
    return {
        ranks: (model.arrivals_us(rates(), ranks, MANY)[-1], model.one_kernel(rates(), ranks, MANY))
        for ranks in model.RANKS
    }


def show_model() -> Table:
    """Return a table of the model's times of the lesson's steps."""
    fields = model.Steps._fields
    lines = [
        [name.replace("_", " "), *(f"{getattr(_steps(ranks), name):.0f}" for ranks in model.RANKS)] for name in fields
    ]
    gemms = sum(model.gemms_us(rates(), MANY))
    lines.append(["both GEMMs", *(f"{gemms:.0f}" for _ in model.RANKS)])
    heads = ["step, us", *(f"{ranks} GPUs" for ranks in model.RANKS)]
    return Table(heads, lines, f"{MANY} tokens on each GPU; the model has no term for steps 4 and 6.")


def rate() -> str:
    """Return the push rate that the exercise needs."""
    return f"best recorded push rate: {rates().wire / 1e3:.0f} GB/s, {rates().wire:.0f} bytes in a microsecond"


def show_code(contained: str, lines: int = 0) -> str:
    """Return lines of the package's kernel, from the first one that contains a text: of a function all of them."""
    source = inspect.getsource(package_kernel).split("\n")
    first = next(i for i, line in enumerate(source) if contained in line)
    indent = len(source[first]) - len(source[first].lstrip())
    inside = (not line or line.startswith(" " * (indent + 1)) for line in source[first + 1 :])
    count = lines or 1 + sum(1 for _ in takewhile(bool, inside))
    return "\n".join(line[indent:] for line in source[first : first + count]).rstrip()
