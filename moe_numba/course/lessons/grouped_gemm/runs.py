"""The lesson "Grouped GEMM": problems, check, launches, what the compiler makes of each step, models and tables."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import H200, chip_limits
from moe_numba.course.bench.topics.grouped_gemm.measure import (
    SETS,
    make_problem,
    random_lengths,
    random_weight,
    scaled_mm_loop,
)
from moe_numba.course.lessons.grouped_gemm.sizes import (
    BLOCK_K,
    BUFFER_BYTES,
    FEW,
    GROUPS,
    HEAD_BYTES,
    MANY,
    MAP_BYTES,
    MAPS_BYTES,
    MMA_WARPS,
    ROW_BYTES,
    ROWS,
    SMALL_K,
    SMALL_LENGTHS,
    SMALL_N,
    SMALL_SMS,
    THREADS,
    TILE_N,
    W_BYTES,
    K,
    N,
)
from moe_numba.course.lessons.hopper.runs import (
    LOOP,
    REGISTERS,
    SPILLED,
    STORES,
    CompiledLesson,
    byte_rows,
    compiled_rows,
    main_loop,
)
from moe_numba.course.steps import lesson as steps
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Run
from moe_numba.course.steps.peers import about_peers, beside_peers
from moe_numba.course.steps.score import COMPILER, TOTAL, Score
from moe_numba.grouped_gemm import reference
from moe_numba.grouped_gemm.api.fp8 import group_gemm_pertensor_fp8
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

DEVICE = "cpu" if simulator.ENABLED else "cuda"
CONFIG = {"num_groups": GROUPS, "n": N, "k": K}
TOPIC, SWEEP, EARLIER = "grouped_gemm_lesson_ladder", "grouped_gemm", "grouped_gemm_ladder"
UNIFORM = "uniform"
SPARE = 16  # rows of no group behind the last one, in the simulator


# What kernels of the page use


class Table(NamedTuple):
    """The table of the groups' first tiles: that of group g is ``words[at + g]``, and behind the last there are all."""

    words: Any  # shared memory, int32
    at: Any
    groups: Any


class Tile(NamedTuple):
    """A tile of the output: rows of a group, by ``TILE_N`` of its columns."""

    group: Any
    row: Any  # its first row, counted from that of the group
    rows: Any
    n: Any  # tiles of columns before it


class Version(NamedTuple):
    """A kernel, and how it is launched.

    Attributes
    ----------
    kernel : kernel
        ``kernel(x, map_w, y, scales, lengths, starts, first, groups, n_tiles, k_blocks)``.
    way : str
        How it gets at the rows of groups: a launch and maps made by the host for each group ("loop"), one map of padded
        rows ("padded"), maps per group that ``update`` makes ("maps"), or one map of x and a pointer to y ("one map").
    tokens : int
        Rows of x in a tile.
    stages : int
    transposed : bool
        Whether rows of x are the second operand of wgmma, so that a warpgroup stores its tile together.
    subtiles : int
        Loads of x in a stage; each takes its part of ``tokens``.
    update : kernel, optional
        ``update(map_x, map_y, maps, x, y, lengths, starts, first, groups, n, k)``.
    """

    kernel: Any
    way: str = "loop"
    tokens: int = 128
    stages: int = 6
    transposed: bool = False
    subtiles: int = 1
    update: Any = None


# Problems and check


@cache
def _weights():
    """Return two sets of weights on a GPU, so that none of a set is left in the L2 cache."""
    if simulator.ENABLED:
        torch.manual_seed(0)
        return [random_weight(len(SMALL_LENGTHS), SMALL_N, SMALL_K, device=DEVICE)]
    return [random_weight(GROUPS, N, K) for _ in range(SETS)]


def lengths_of(rows: int, routing: str = UNIFORM, groups: int = GROUPS) -> torch.Tensor:
    """Return the number of rows of each group, as the records have them."""
    return random_lengths(groups, rows, routing)


@cache
def problems(rows: int, routing: str = UNIFORM, groups: int = GROUPS) -> list[SimpleNamespace]:
    """Return problems with different weights, and the right result in ``right``; in the simulator a small one."""
    if simulator.ENABLED:
        p = make_problem(_weights()[0], torch.tensor([*SMALL_LENGTHS, SPARE], dtype=torch.int32))
        p.seqlens, p.cu_seqlens = p.seqlens[:-1].contiguous(), p.cu_seqlens[:-1].contiguous()
        made, p.lengths = [p], list(SMALL_LENGTHS)
    else:
        lengths = lengths_of(rows, routing, groups)
        made = [make_problem(weight[:groups], lengths) for weight in _weights()]
        for p in made:
            p.lengths = lengths.tolist()
    for p in made:
        p.prepared = {}
    p = made[0]
    p.right = reference.group_gemm(p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale)
    return made


def wrong(out: torch.Tensor, right: torch.Tensor) -> str | None:
    """Return None, or what is wrong; tensor cores add up FP8 products with fewer bits than float32."""
    return reference.mismatch(out, right, 2.3e-3 if simulator.ENABLED else 1e-2)


def check(version, rows: int = ROWS, routing: str = UNIFORM, groups: int = GROUPS) -> str | None:
    """Compare a version with the reference."""
    p = problems(rows, routing, groups)[0]
    p.out.fill_(float("nan"))
    return wrong(multiply(version, p), p.right)


# Launches


def _sms():
    return SMALL_SMS if simulator.ENABLED else torch.cuda.get_device_properties(0).multi_processor_count


def store_bytes(version: Version) -> int:
    """Return what a CTA needs of shared memory to store a tile."""
    if version.way == "one map":
        return 2 * 2 * BUFFER_BYTES  # two buffers of each warpgroup
    return 2 * version.tokens * ROW_BYTES if version.transposed else 2 * MMA_WARPS * BUFFER_BYTES


def shared_bytes(version: Version) -> int:
    """Return the dynamic shared memory of a CTA: stages, barriers and table, and what stores need."""
    return version.stages * (W_BYTES + version.tokens * BLOCK_K) + HEAD_BYTES + store_bytes(version)


def _map_x(version, x):
    return TensorMap(x, (version.tokens // version.subtiles, BLOCK_K), swizzle=128)


def _maps(version, x, y):
    """Return maps of rows of x, and of y."""
    return _map_x(version, x), TensorMap(y, (version.tokens if version.transposed else 16, 64), swizzle=128)


def _launch(version, ctas, p, x, y, *tables, weight=None):
    weight = p.weight if weight is None else weight
    groups, n, k = weight.shape
    sizes, shared = (groups, n // TILE_N, k // BLOCK_K), shared_bytes(version)
    map_w = TensorMap(weight, (1, TILE_N, BLOCK_K), swizzle=128)
    launch(version.kernel, ctas, THREADS, x, map_w, y, *tables, *sizes, shared_bytes=shared)


def multiply(version, p) -> torch.Tensor:
    """Compute the output of a problem by a version of the kernel, and of what it needs before and after it."""
    version = Version(*version)
    _WAYS[version.way](version, p)
    return p.out


def _by_loop(version, p):
    """Launch the kernel once per group; the host knows the lengths."""
    key = "loop", version.tokens
    if key not in p.prepared:
        counts = [-(-length // version.tokens) for length in p.lengths]
        tables = torch.tensor([[0, count] for count in counts], dtype=torch.int32, device=p.x.device)
        p.prepared[key] = counts, tables, torch.zeros(1, dtype=torch.int32, device=p.x.device)
    counts, tables, zero = p.prepared[key]
    start = 0
    for g, length in enumerate(p.lengths):
        rows = slice(start, start + length)
        start += length
        if length:
            ctas = min(counts[g] * (p.weight.shape[1] // TILE_N), _sms())
            maps = _maps(version, p.x[rows], p.out[rows])
            given = p.y_scale[g : g + 1], p.seqlens[g : g + 1], zero, tables[g]
            _launch(version, ctas, p, *maps, *given, weight=p.weight[g : g + 1])


def _padded(version, p):
    """Copy the rows of each group to a multiple of ``tokens``, multiply, and copy the results back."""
    size, (groups, n, k), device = version.tokens, p.weight.shape, p.x.device
    if ("padded", size) not in p.prepared:
        most = (len(p.x) // size + groups) * size
        x = torch.zeros(most, k, dtype=torch.uint8, device=device)
        y = torch.empty(most, n, dtype=torch.bfloat16, device=device)
        owned = torch.arange(sum(p.lengths), dtype=torch.int32, device=device)
        p.prepared["padded", size] = x, y, owned, torch.zeros_like(p.cu_seqlens)
    x, y, owned, first = p.prepared["padded", size]
    first[1:] = ((p.seqlens + (size - 1)) // size).cumsum(0)
    starts = first[:-1] * size
    group = torch.searchsorted(p.cu_seqlens[1:], owned, right=True)
    place = (owned + (starts - p.cu_seqlens[:-1])[group]).long()
    x.index_copy_(0, place, p.x.view(torch.uint8)[: len(owned)])
    maps = _maps(version, x.view(torch.float8_e4m3fn), y)
    _launch(version, _sms(), p, *maps, p.y_scale, p.seqlens, starts, first)
    torch.index_select(y, 0, place, out=p.out[: len(owned)])


def update_maps(version, p):
    """Launch ``update``; return the maps of all groups, and the first tile of each."""
    version = Version(*version)
    if "maps" not in p.prepared:
        groups = len(p.weight)
        maps = torch.zeros((2 * groups + 1) * MAP_BYTES, dtype=torch.uint8, device=p.x.device)
        maps = maps[-maps.data_ptr() % MAP_BYTES :][: groups * MAPS_BYTES]
        p.prepared["maps"] = maps, torch.zeros_like(p.cu_seqlens)
    maps, first = p.prepared["maps"]
    groups, n, k = p.weight.shape
    templates, tensors = _maps(version, p.x, p.out), (p.x, p.out, p.seqlens, p.cu_seqlens, first)
    launch(version.update, groups + 1, 32, *templates, maps, *tensors, groups, n, k, shared_bytes=MAPS_BYTES)
    return maps, first


def _with_maps(version, p):
    maps, first = update_maps(version, p)
    _launch(version, _sms(), p, maps, maps, p.y_scale, p.seqlens, p.cu_seqlens, first)


def _one_map(version, p):
    map_x = _map_x(version, p.x)
    _launch(version, _sms(), p, map_x, p.out.view(torch.int32), p.y_scale, p.seqlens, p.cu_seqlens, p.cu_seqlens)


_WAYS = {"loop": _by_loop, "padded": _padded, "maps": _with_maps, "one map": _one_map}


# Steps

BLOCK = "instructions for a block of k"
_SHOWN = REGISTERS, SPILLED, BLOCK, STORES


class _Lesson(CompiledLesson):
    """Its scores count launches, too: of the kernel that multiplies, and of the one that makes maps."""

    def fault(self, version):
        """Return what is wrong with a version, or None; tables do not check again what is right."""
        if (found := super().fault(version)) is None:
            _checked.add(_key(version, (ROWS,)))
        return found

    def count(self, version, name):
        """Return the score of a version; the simulator counts."""
        with simulator.profile(self.gpu.upper()) as profile:
            self.run.once(version)
        version, main = Version(*version), profile[version[0].__name__]
        launches = {(TOTAL, "launches of these kernels"): sum(len(kernel.launches) for kernel in profile.kernels)}
        rows = {**launches, **byte_rows(main), **compiled_rows(main)}
        first, last = main_loop(main.static.sass or ())
        multiplies = sum(code["opcode"].startswith("QGMMA") for code in (main.static.sass or ())[first:last])
        blocks = max(
            multiplies // (4 * version.subtiles), 1
        )  # of k, in an iteration of the loop that the compiler made
        rows[COMPILER, BLOCK] = rows.pop((COMPILER, LOOP)) // blocks
        return Score(name, rows, self.gpu.upper())

    def summary(self):
        """Return a table of all steps: times, and what the compiler made of each."""
        lines = []
        for step in self.steps.values():
            faster = step.times and f"{step.times[0] / step.times[1]:.2f}"
            us = [records.format_us(step.us), faster or ""] if step.us else ["", ""]
            facts = [f"{step.score.rows[COMPILER, row]:,}" for row in _SHOWN]
            lines.append([step.name, *us, *facts, str(step.judgement or "")])
        return steps.Table(["step", "us", "times as fast", *_SHOWN, "prediction"], lines)


def _calls(version, rows=ROWS, routing=UNIFORM, groups=GROUPS):
    return [partial(multiply, version, p) for p in problems(rows, routing, groups)]


def _kernels(version):
    version = Version(*version)
    return (version.kernel, version.update) if version.update else (version.kernel,)


lesson = _Lesson(
    TOPIC,
    Run(check, lambda version: multiply(version, problems(ROWS)[0]), _calls, kernels=_kernels),
    f"{__name__}:lesson",
    config=CONFIG,
    size={"rows": ROWS},
    dtype="float8_e4m3fn",
    seeds=2,
)


def _times(name, versions, *size) -> dict[str, float]:
    """Check versions and time them interleaved with a number of rows; {} if their times are not recorded."""
    for label, version in versions.items():
        if fault := _fault_once(version, *size):
            raise WrongResult(f"{label}: {fault}")
    if simulator.ENABLED:
        found = {
            label: lesson.recorded_us(f"{name}: {label}", _kernels(version)) for label, version in versions.items()
        }
        return {} if None in found.values() else found
    return lesson.times(name, {label: _calls(version, *size) for label, version in versions.items()})


_checked: set[tuple] = set()


def _key(version, size):
    return tuple(version), () if simulator.ENABLED else size


def _fault_once(version, *size):
    if _key(version, size) in _checked:
        return None
    if (fault := check(version, *size)) is None:
        _checked.add(_key(version, size))
    return fault


# Models, in microseconds


class Limits(NamedTuple):
    """What a grouped GEMM needs of each unit, in microseconds."""

    dram: float
    l2: float
    tensor: float

    @property
    def us(self):
        """The longest of them."""
        return max(self)

    @property
    def name(self):
        """The unit that takes longest."""
        return dict(zip(self, ("DRAM", "L2", "tensor cores")))[max(self)]


def _chip():
    """Return the limits of this GPU, or of an H200 where there is none."""
    return chip_limits() if torch.cuda.is_available() else H200


@cache
def l2_rate() -> float:
    """Return the bytes per second that L2 delivers to TMA, as lesson 06 recorded it, or a published rate."""
    row = _find("hopper_gemm_ladder", "parts: without MMAs")
    if row is None:
        return _chip().l2_bandwidth
    m, n, k = (row["size"][name] for name in "mnk")
    return (m // 128) * (n // 128) * k * (128 + 128) / row["kernel_us"]["median"] * 1e6


def _find(topic, step, **wanted):
    record = records.recorded(topic)
    return record and records.find(record, step=step, **wanted)


def tiles_of(lengths: Sequence[int], tokens: int) -> int:
    """Return the number of tiles of ``tokens`` rows that groups have."""
    return sum(-(-int(length) // tokens) for length in lengths)


def work(lengths: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that must move and the operations: weights of groups with rows, rows of x and of y."""
    rows, used = int(lengths.sum()), int((lengths > 0).sum())
    return used * N * K + rows * (K + 2 * N), 2 * rows * N * K


def bounds_us(lengths: torch.Tensor) -> tuple[float, float]:
    """Return the times of the bytes at the rate of a copy, and of the operations at the peak, in microseconds."""
    moved, operations = work(lengths)
    return moved / _chip().copy_bandwidth * 1e6, operations / _chip().tensor_flops["float8_e4m3fn"] * 1e6


def limits(rows: int, tokens: int, mma_rows: int | None = None, routing: str = UNIFORM) -> Limits:
    """Return what tiles of ``tokens`` rows need: bytes from DRAM and L2, and MMAs of the SM with most tiles.

    ``mma_rows`` is what an MMA multiplies for a tile, if that is more than its rows.
    """
    lengths, chip = lengths_of(rows, routing), _chip()
    tiles, columns = tiles_of(lengths, tokens), N // TILE_N
    dram = work(lengths)[0] / chip.copy_bandwidth
    l2 = tiles * columns * (TILE_N + tokens) * K / l2_rate()
    waves = math.ceil(tiles * columns / chip.sm_count)
    tensor = waves * 2 * (mma_rows or tokens) * TILE_N * K / 8192 / chip.tensor_clock
    return Limits(*(1e6 * seconds for seconds in (dram, l2, tensor)))


def copies_us(rows: int = ROWS) -> float:
    """Return what it takes to copy all rows of x and of y once, at the rate of a large copy."""
    return rows * (2 * K + 2 * 2 * N) / _chip().copy_bandwidth * 1e6


def changed_by(before: str, us: float | None) -> float | None:
    """Return the time of a step plus ``us``, or None if one of them is not known."""
    step = lesson.steps[before]
    return None if step.us is None or us is None else step.us + us


def without_update(before: str, version) -> float | None:
    """Return the time of a step less that of the kernel that makes its maps, which is timed alone."""
    version = Version(*version)
    if lesson.steps[before].us is None:
        return None
    if simulator.ENABLED:
        us = lesson.recorded_us("parts: maps alone", (version.update,))
        return changed_by(before, us and -us)
    calls = [partial(update_maps, version, p) for p in problems(ROWS)]
    return changed_by(before, -lesson.times("parts", {"maps alone": calls})["maps alone"])


# Tables


def result() -> str:
    """Return what the lesson builds, and where it ends, in numbers of records."""
    bound, (count, flops) = max(bounds_us(lengths_of(ROWS))), work(lengths_of(ROWS))
    lines = [f"{GROUPS} groups, N = {N}, K = {K}; the steps have {ROWS} rows in all groups together."]
    lines.append(f"They move {count / 1e6:.0f} MB and take {flops / 1e9:.0f} GFLOP: at least {bound:.0f} us.")
    for routing, rows in ((UNIFORM, ROWS), (UNIFORM, MANY), ("zipf", MANY), ("one", ROWS)):
        loop, final = (_swept(step, rows, routing) for step in ("torch, loop", "final"))
        if loop and final:
            words = f"{rows} rows, {_ROUTINGS[routing]}: a loop over cuBLAS {records.format_us(loop)} us"
            lines.append(f"Recorded on an H200, {words}, the package's grouped GEMM {records.format_us(final)} us.")
    return "\n".join(lines)


_ROUTINGS = {UNIFORM: "spread evenly", "zipf": "by Zipf's law", "one": "all in one group"}


def _swept(step, rows, routing=UNIFORM, groups=GROUPS):
    config = {"num_groups": groups, "n": N, "k": K, "scaling": "tensor", "routing": routing}
    row = _find(SWEEP, step, size={"rows": rows}, config=config)
    return row["kernel_us"]["median"] if row else None


def show_bounds(rows: Sequence[int] = (FEW, 512, ROWS, MANY, 32768)) -> steps.Table:
    """Return a table of lower bounds: bytes, operations, and which of both takes longer."""
    lines = []
    for count in rows:
        lengths = lengths_of(count)
        memory, tensor = bounds_us(lengths)
        limit = "memory" if memory >= tensor else "tensor cores"
        used = f"{int((lengths > 0).sum())}"
        lines.append([f"{count:,}", f"{count / GROUPS:.0f}", used, f"{memory:.0f}", f"{tensor:.0f}", limit])
    heads = (
        "rows",
        "rows of a group",
        "groups with rows",
        "us for the bytes, as a copy",
        "us for the MMAs, at the peak",
        "limit",
    )
    return steps.Table(heads, lines)


def show_loop(version) -> steps.Table:
    """Return a table of the loop beside cuBLAS', for several numbers of rows."""
    lines = []
    for rows in (FEW, ROWS, MANY):
        us = _interleaved(f"{rows} rows, loop", {"this kernel": version}, rows)
        known = bool(us)
        times = [records.format_us(us[label]) if known else "" for label in ("this kernel", "cuBLAS")]
        recorded = _swept("torch, loop", rows)
        used = int((lengths_of(rows) > 0).sum())
        lines.append([f"{rows:,}", f"{used}", *times, records.format_us(recorded) if recorded else ""])
    return steps.Table(["rows", "launches", "this kernel, us", "cuBLAS, us", "cuBLAS, us, as recorded"], lines)


def _interleaved(name, versions, rows, routing=UNIFORM, groups=GROUPS, others=("cuBLAS",), calls=(), of_peers=None):
    """Return times of versions, of others and of peers' calls, interleaved on a GPU; {} where they are not known.

    ``calls`` are those of peers by label, and ``of_peers`` their versions.
    """
    if simulator.ENABLED:
        found = _times(name, versions)
        for label in others:
            row = _find(TOPIC, f"{name}: {label}", size={"rows": ROWS}, config=CONFIG)
            found |= {label: row["kernel_us"]["median"]} if row and found else {}
        return found if len(found) == len(versions) + len(others) else {}
    for label, version in versions.items():
        if fault := _fault_once(version, rows, routing, groups):
            raise WrongResult(f"{label}: {fault}")
    given = problems(rows, routing, groups)
    own = {label: _calls(version, rows, routing, groups) for label, version in versions.items()}
    own |= {label: [partial(_OTHERS[label], p) for p in given] for label in others}
    return lesson.times(name, own | dict(calls), of_peers)


def cublas_loop(p) -> torch.Tensor:
    """Run the article's loop, with lengths that the host knows."""
    ends = torch.tensor(p.lengths).cumsum(0).tolist()
    return scaled_mm_loop(p, list(zip([0, *ends], ends, strict=False)))


def package(p, use_fast_accum=False) -> torch.Tensor:
    """Call the package's function."""
    given = p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.average
    return group_gemm_pertensor_fp8(*given, out=p.out, use_fast_accum=use_fast_accum)


_OTHERS: dict[str, Callable] = {
    "cuBLAS": cublas_loop,
    "the package": package,
    "the package, fast accumulation": partial(package, use_fast_accum=True),
}


def show_padding(rows: int = ROWS, tokens: int = 128) -> steps.Table:
    """Return a table of what padding adds: rows, and tiles, for several numbers of rows."""
    lines = []
    for count in (FEW, rows, MANY):
        lengths = lengths_of(count)
        tiles = tiles_of(lengths, tokens)
        lines.append([f"{count:,}", f"{tiles}", f"{tiles * tokens:,}", f"{1 - count / (tiles * tokens):.0%}"])
    return steps.Table(["rows", f"tiles of {tokens} rows", "rows that the MMAs multiply", "of them padding"], lines)


def show_sizes(name: str, versions: dict, rows: Sequence[int] = (FEW, ROWS, MANY)) -> steps.Table:
    """Return a table of versions for several numbers of rows, each column timed interleaved."""
    columns = [_times(f"{count} rows, {name}", versions, count) for count in rows]
    cells = lambda label: [records.format_us(us[label]) if us else "not timed" for us in columns]
    lines = [[label, *cells(label)] for label in versions]
    return steps.Table(["version", *(f"{count:,} rows, us" for count in rows)], lines)


def show_tile_sizes(versions: dict[int, Any], rows: Sequence[int] = (FEW, ROWS, MANY)) -> steps.Table:
    """Return a table of rows per tile: what the models say, and times."""
    named = {f"{tokens}": version for tokens, version in versions.items()}
    columns, lines = {count: _times(f"{count} rows, rows of a tile", named, count) for count in rows}, []
    for tokens in versions:
        line = [f"{tokens}"]
        for count in rows:
            found, us = limits(count, tokens), columns[count]
            measured = records.format_us(us[f"{tokens}"]) if us else "not timed"
            line += [f"{tiles_of(lengths_of(count), tokens)}", f"{found.us:.0f}, {found.name}", measured]
        lines.append(line)
    heads = [head for count in rows for head in (f"{count:,} rows: tiles", "model, us", "measured, us")]
    return steps.Table(["rows of a tile", *heads], lines)


def show_variants(name: str, versions: dict, rows: Sequence[int] = (ROWS, MANY)) -> steps.Table:
    """Return a table of changes, each of one thing: times, and what the compiler made of them."""
    columns = [_times(f"{count} rows, {name}", versions, count) for count in rows]
    lines = []
    for label in versions:
        lines.append([label, *(records.format_us(us[label]) if us else "not timed" for us in columns)])
    return steps.Table(["version", *(f"{count:,} rows, us" for count in rows)], lines)


_NO_GAIN = {  # step of the earlier version -> what changed, and why it gained nothing
    "PDL": (
        "programmatic dependent launch of the kernel behind the one that makes maps",
        "It can save at most the two microseconds of the small kernel. It was slower, and we do not know why.",
    ),
    "one tensor map for X": (
        "one map of x, with maps of y per group as before",
        "It saves an acquire per tile. With 32 rows it was slower, and we do not know why.",
    ),
}


def show_what_did_not_pay() -> steps.Table:
    """Return a table of changes that an earlier version of this lesson timed, and that gained nothing."""
    lines = []
    for after, (change, why) in _NO_GAIN.items():
        row = _find(EARLIER, after, config=CONFIG, size={"rows": ROWS})
        us = [records.format_us(each) for each in row["compared_us"]] if row else ["", ""]
        lines.append([change, *us, why])
    return steps.Table(["change (recorded with an earlier kernel)", "us before", "us after", "why"], lines)


_SWEEP = [
    *((UNIFORM, GROUPS, rows) for rows in (32, 128, 512, 2048, 8192, 32768)),
    *(("zipf", GROUPS, rows) for rows in (512, 2048, 8192)),
    ("one", GROUPS, 2048),
    (UNIFORM, 8, 8192),
    *((UNIFORM, 256, rows) for rows in (1024, 16384)),
]


def show_last(version) -> steps.Table:
    """Return a table of the last step beside cuBLAS' loop, the package and `steps.peers`, timed interleaved."""
    found = {size: _last(version, *size) for size in ((UNIFORM, GROUPS, FEW), *_SKEWED)}
    labels = dict.fromkeys(["this lesson", *_OTHERS, *(label for timed in found.values() for label in timed.versions)])
    lines = []
    for (routing, groups, rows), timed in found.items():
        bound = max(bounds_us(lengths_of(rows, routing, groups)))
        known = [records.format_us(timed.us[label]) if label in timed.us else "" for label in labels]
        cells = known if timed.us else ["not timed", *known[1:]]
        lines.append([f"{rows:,} in {groups} groups, {_ROUTINGS[routing]}", *cells, f"{bound:.0f}"])
    heads = ["rows", *(f"{label}, us" for label in labels), "lower bound, us"]
    return steps.Table(heads, lines, about_peers(*found.values()))


def _last(version, routing, groups, rows):
    name, p = f"{rows} rows, {groups} groups, {routing}", problems(rows, routing, groups)[0]
    owned = sum(p.lengths)  # rows of no group may have any result
    return beside_peers(
        lesson,
        name,
        lambda calls, versions: _interleaved(
            name, {"this lesson": version}, rows, routing, groups, tuple(_OTHERS), calls, versions
        ),
        "tensor",
        problems(rows, routing, groups),
        lambda out: wrong(out[:owned], p.right[:owned]),
    )


_SKEWED = (
    *((UNIFORM, GROUPS, rows) for rows in (ROWS, MANY)),
    *(("zipf", GROUPS, rows) for rows in (ROWS, MANY)),
    ("one", GROUPS, ROWS),
    (UNIFORM, min(8, GROUPS), MANY),
)


def show_sweep() -> steps.Table:
    """Return a table of the record of the package and of all peers, with even and skewed routing."""
    record = records.recorded(SWEEP)
    peers = [f"peer:{name}" for name in records.peers_of(record)]
    shown = {"final": "this package", "torch, loop": "cuBLAS, loop", "torch": "torch, grouped"}
    shown |= {peer: peer.removeprefix("peer:") for peer in peers}
    found = {
        (routing, groups, rows): {step: _swept(step, rows, routing, groups) for step in shown}
        for routing, groups, rows in _SWEEP
    }
    shown = {step: label for step, label in shown.items() if any(us[step] for us in found.values())}
    lines = []
    for (routing, groups, rows), us in found.items():
        known = [each for each in us.values() if each]
        cells = [
            f"{records.format_us(us[step])}{' *' if us[step] == min(known) else ''}" if us[step] else ""
            for step in shown
        ]
        lines.append([f"{rows:,} in {groups} groups, {_ROUTINGS[routing]}", *cells])
    return steps.Table(["rows", *(f"{label}, us" for label in shown.values())], lines)


def _starred(us, best):
    return "" if us is None else records.format_us(us) + " *" * (us == best)


def losses() -> str:
    """Return where the record has a loop over cuBLAS in front of the package's kernel."""
    lost = []
    for routing, groups, rows in _SWEEP:
        loop, final = (_swept(step, rows, routing, groups) for step in ("torch, loop", "final"))
        if loop and final and loop < final:
            size = f"{rows:,} rows in {groups} groups, {_ROUTINGS[routing]}"
            lost.append(f"{size}: {records.format_us(loop)} against {records.format_us(final)} us")
    count = sum(bool(_swept("final", rows, routing, groups)) for routing, groups, rows in _SWEEP)
    return f"In {len(lost)} of {count} recorded cases the loop over cuBLAS is faster. " + "; ".join(lost)
