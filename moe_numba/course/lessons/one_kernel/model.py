"""A model of a layer's experts on several GPUs: the chain of launches, and one kernel that overlaps its parts.

A rank has ``tokens`` tokens and 32 experts of DeepSeek-V3 in FP8 with block scales; routing is uniform. Times of GEMMs
and of passes over memory are recorded ones; bytes between GPUs take the time of the best recorded push rate.

In the kernel, a rank sends a row once for each of its experts, in the order of the experts, directly to its place among
the receiver's rows. The first GEMM computes an expert as soon as the rows of all ranks have arrived. The second one
stores its rows at the rank that has the token, which adds them up. Warps that the GEMMs do not need move the rows.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moe_numba.course.bench import link, records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import markdown_table
from moe_numba.course.lessons.moe_layer.model import HIDDEN, INTERMEDIATE, TOPK, ranks_per_token

EXPERTS = 32  # of a rank
FP8_ROW = HIDDEN + HIDDEN // 128 * 4  # bytes: elements, and a float32 scale for 128 of them
BF16_ROW = 2 * HIDDEN
RANKS, TOKENS = (2, 4, 8), (8, 64, 512, 1024, 4096)
LAUNCHES = {  # steps of layers that are chains of launches, and what the pages call them
    "final": "rings",
    "low latency": "low latency",
    "low latency, FP8 sums": "low latency, FP8 both ways",
}
ONE_WAY_US = 1.33  # of a flag that is stored with release, if lesson 11 has no record
IN_FLIGHT = 8 * 32 * 16  # bytes that a warp has in flight while it adds up 8 rows
TILE_ROWS, TILE_COLUMNS, CTAS = 128, 256, 132  # of the kernel's tiles, with gate and up in the first GEMM; of an H200


class Rates(NamedTuple):
    """What the records say of an H200.

    Attributes
    ----------
    gemms : dict
        (n, k) -> {rows: us} of the grouped GEMM with block scales and 32 groups.
    parts : dict
        Name -> us of the launches of a layer with 4,096 tokens and 32 experts.
    wire : float
        Bytes per us that a GPU pushes to others.
    sum_all, sum_warp : float
        Bytes per us that are read and written while rows are added up, by all warps of all SMs and by one warp of each.
    one_way_us : float
        Until a flag has arrived at another GPU.
    """

    gemms: dict[tuple[int, int], dict[int, float]]
    parts: dict[str, float]
    wire: float
    sum_all: float
    sum_warp: float
    one_way_us: float


def rates() -> Rates:
    """Read the records."""
    gemm, layer = records.read("grouped_gemm"), records.read("moe_layer")
    of = dict(num_groups=EXPERTS, scaling="block", routing="uniform")
    series = lambda n, k: records.series(gemm, "rows", step="final", config=of | dict(n=n, k=k))
    shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    parts = {
        row["step"].removeprefix("part: "): row["kernel_us"]["median"]
        for row in records.select(layer, config=dict(num_experts=EXPERTS, hidden=HIDDEN), size=dict(tokens=4096))
        if row["step"].startswith("part: ") and row["dtype"] == "e4m3"
    }
    summed = next(row["sum_gbps"] for row in records.read("combine_ladder")["rows"] if "sum_gbps" in row)
    # Little's law: the rate of 16 warps with one vector of each of 2 rows, on 12 SMs, is that of 16 KB in flight.
    of_warp = summed["12, 1"] / 12 * 132 * IN_FLIGHT / (16 * 32 * 16 * 2)
    return Rates(
        {shape: {rows: time["median"] for rows, time in series(*shape).items()} for shape in shapes},
        parts,
        (link.link_gbps() or 0) * 1e3,
        max(summed.values()) * 1e3,
        of_warp * 1e3,
        link.one_way_us("release") or ONE_WAY_US,
    )


class Bytes(NamedTuple):
    """Bytes of a rank: dispatch and combine between GPUs, sent once per rank and once per expert; and the sum's."""

    dispatch: float
    combine: float
    dispatch_per_expert: float
    combine_per_expert: float
    sum: float


def bytes_of(ranks: int, tokens: int) -> Bytes:
    """Return the bytes that a rank sends to others, and those that its sum of experts' rows reads and writes."""
    per_rank = tokens * ranks_per_token(EXPERTS * ranks, TOPK, ranks) * (ranks - 1) / ranks
    per_expert = tokens * TOPK * (ranks - 1) / ranks
    rows = per_rank * FP8_ROW, per_rank * BF16_ROW, per_expert * FP8_ROW, per_expert * BF16_ROW
    return Bytes(*rows, tokens * (TOPK + 1) * BF16_ROW)


def interpolate(series: dict[int, float], rows: float) -> float:
    """Return a time between those of a series, or beyond its last one on the line through the last two."""
    points = sorted(series.items())
    pair = next((pair for pair in pairwise(points) if rows <= pair[1][0]), points[-2:])
    (rows_0, us_0), (rows_1, us_1) = pair
    return us_0 + (us_1 - us_0) * (rows - rows_0) / (rows_1 - rows_0)


def gemms_us(of: Rates, tokens: int) -> tuple[float, float]:
    """Return the times of a rank's two GEMMs: it computes as many rows as its own tokens have experts."""
    first, second = of.gemms.values()
    return interpolate(first, tokens * TOPK), interpolate(second, tokens * TOPK)


class Timeline(NamedTuple):
    """When parts of the kernel end, in us: the first rows are there, the first GEMM, the second one, rows, sums."""

    first_rows: float
    first_gemm: float
    second_gemm: float
    rows_sent: float
    sums: float


def one_kernel(of: Rates, ranks: int, tokens: int, slower: float = 0.0) -> Timeline:
    """Return the timeline of the kernel; ``slower`` is how much moving rows slows the GEMMs down, such as 0.05."""
    sent, (first, second) = bytes_of(ranks, tokens), gemms_us(of, tokens)
    arrivals = arrivals_us(of, ranks, tokens)
    ends = _pipeline(arrivals, first * (1 + slower) / EXPERTS)
    done = _pipeline([ends[-1]] * EXPERTS, second * (1 + slower) / EXPERTS)
    arrived, push = 0.0, sent.combine_per_expert / of.wire / EXPERTS
    for end in done:
        arrived = max(arrived + push, end)
    return Timeline(arrivals[0], ends[-1], done[-1], arrived, _sums_us(of, sent, done, arrived) + of.one_way_us)


def arrivals_us(of: Rates, ranks: int, tokens: int) -> list[float]:
    """Return when the rows of each expert are there: after the order, the exchange of counts, and the rows before."""
    counts_us = of.parts["group_by_expert"] * tokens / 4096 + 2 * of.one_way_us
    bytes_us = bytes_of(ranks, tokens).dispatch_per_expert / of.wire
    return [counts_us + of.one_way_us + bytes_us * (e + 1) / EXPERTS for e in _experts()]


class Steps(NamedTuple):
    """When a layer ends, in us, if its parts wait for ever less, as in the steps of lesson 16."""

    launches: float  # rows in the order of the experts, then the GEMMs, then the rows' way back
    one_launch: float
    rows_of_an_expert: float  # the first GEMM of an expert waits for its rows
    rows_go_home: float  # the second GEMM stores its rows at the rank of the token


def steps_us(of: Rates, ranks: int, tokens: int, launch_us: float) -> Steps:
    """Return the times of the lesson's steps; a launch that waits for the one before costs ``launch_us``."""
    sent, (first, second) = bytes_of(ranks, tokens), gemms_us(of, tokens)
    arrivals = arrivals_us(of, ranks, tokens)
    after = sent.combine_per_expert / of.wire + of.one_way_us + sent.sum / of.sum_all
    one_launch = arrivals[-1] + first + second + after
    overlapped = _pipeline(arrivals, first / EXPERTS)[-1] + second + after
    return Steps(one_launch + 3 * launch_us, one_launch, overlapped, one_kernel(of, ranks, tokens).sums)


def _experts() -> Sequence[int]:
    return range(EXPERTS)


def _pipeline(ready: list[float], us: float) -> list[float]:
    """Return when each of several jobs ends that are done one after the other, each when it is ready."""
    ends, end = [], 0.0
    for at in ready:
        end = max(end, at) + us
        ends.append(end)
    return ends


def _sums_us(of, sent, done, arrived):
    """Return when the last token is summed. With random experts a share of (e / 32)^8 has all its rows after e experts.

    One warp of each SM adds up during the GEMMs, and all warps do afterwards.
    """
    summed, now = 0.0, done[0]
    for e, end in enumerate(done):
        ready = sent.sum * ((e + 1) / EXPERTS) ** TOPK
        summed, now = min(ready, summed + (end - now) * of.sum_warp), end
    return max(arrived, now + (sent.sum - summed) / of.sum_all)


class Balance(NamedTuple):
    """Work of the busiest CTA, relative to the mean: tiles are dealt out round robin, or taken when one is ready."""

    round_robin: float
    when_ready: float


def balance(tokens: int, seed: int = 0) -> Balance:
    """Count the multiplications of the CTAs of a rank with 32 experts; a tile with at most 64 rows has half of them."""
    random = np.random.default_rng(seed)
    chosen = random.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :TOPK]
    work = []
    for k, columns in ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)):
        for rows in np.bincount(chosen.ravel(), minlength=EXPERTS):
            tiles = [k * (1 if rows - first <= TILE_ROWS // 2 else 2) for first in range(0, int(rows), TILE_ROWS)]
            work += tiles * (columns // TILE_COLUMNS)
    loads = [0] * CTAS
    for each in work:
        heapq.heappush(loads, heapq.heappop(loads) + each)
    mean = sum(work) / CTAS
    return Balance(max(sum(work[cta::CTAS]) for cta in range(CTAS)) / mean, max(loads) / mean)


def balances() -> list[list[str]]:
    """Return the cells of a table: tokens of a rank, and `balance` with two decimals."""
    return [[f"{tokens:,}", *(f"{share:.2f}" for share in balance(tokens))] for tokens in TOKENS]


def measured(record: dict) -> str:
    """Return a Markdown table of the recorded times of one kernel, or a sentence that there is none."""
    lines = []
    for row in records.select(record, step="one kernel"):
        ranks, tokens = row["config"]["ranks"], row["size"]["tokens"]
        of = dict(config=dict(ranks=ranks), size=dict(tokens=tokens), dtype="e4m3")
        us = {each["step"]: each["kernel_us"]["median"] for each in records.select(record, **of)}
        kernel, gemms, chain = us["one kernel"], us["part: GEMMs by expert"], chain_us(ranks, tokens, record)
        names = [name for step, name in LAUNCHES.items() if us.get(step) == chain]
        times = [records.format_us(time) for time in (kernel, us["launches by expert"], chain, gemms)]
        times[2] = f"{times[2]} ({names[0]})"
        lines.append([ranks, f"{tokens:,}", *times, f"{kernel / gemms:.2f}", f"{kernel / chain:.2f}"])
    if not lines:
        return "No record has the kernel yet."
    heads = ("GPUs", "tokens on each", "one kernel", "the same as launches", "fastest other layer", "the GEMMs alone")
    heads += "one kernel / GEMMs", "one kernel / other layer"
    about = "Times in microseconds, of the slowest rank, with rows in FP8."
    return f"{markdown_table(heads, lines)}\n\n{about} {plots.provenance(record, 'Recorded on')}."


def chain_us(ranks: int, tokens: int, record: dict | None = None) -> float | None:
    """Return the recorded time of the package's fastest layer of launches that sends FP8, or None."""
    of = dict(config=dict(ranks=ranks, num_experts=EXPERTS * ranks), size=dict(tokens=tokens), dtype="e4m3")
    rows = records.select(record or records.read("moe_layer_ranks"), **of)
    times = [row["kernel_us"]["median"] for row in rows if row["step"] in LAUNCHES]
    return min(times, default=None)


def table() -> str:
    """Return a Markdown table: bytes, recorded and predicted times, and what is left beside the GEMMs."""
    of = rates()
    heads = "GPUs", "tokens on each", "dispatch, MB", "combine, MB", "GEMMs", "launches, recorded", "one kernel"
    heads += "if moving slows the GEMMs by 5 %", "one kernel / GEMMs"
    lines = [f"| {' | '.join(heads)} |", "|---:" * len(heads) + "|"]
    for ranks in RANKS:
        for tokens in TOKENS:
            sent, gemms, chain = bytes_of(ranks, tokens), sum(gemms_us(of, tokens)), chain_us(ranks, tokens)
            us, slow = one_kernel(of, ranks, tokens).sums, one_kernel(of, ranks, tokens, 0.05).sums
            moved = [f"{some / 1e6:.1f} / {all_ / 1e6:.1f}" for some, all_ in zip(sent[:2], sent[2:4], strict=True)]
            times = f"{gemms:.0f}", f"{chain:.0f}" if chain else "", f"{us:.0f}", f"{slow:.0f}", f"{us / gemms:.2f}"
            lines.append(f"| {' | '.join([str(ranks), f'{tokens:,}', *moved, *times])} |")
    return "\n".join(lines)


def text() -> str:
    """Return the table, and sentences about its last lines."""
    of, tokens = rates(), TOKENS[-1]
    ends = {ranks: one_kernel(of, ranks, tokens) for ranks in RANKS}
    parts = ", ".join(f"{name} {us:.0f}" for name, us in of.parts.items())
    sentences = [f"The launches of a layer with {tokens:,} tokens on one GPU take, in microseconds: {parts}."]
    for ranks, end in ends.items():
        waits = end.rows_sent - end.second_gemm
        sentences.append(
            f"On {ranks} GPUs the first expert's rows are there after {end.first_rows:.0f} us, the GEMMs end after "
            f"{end.second_gemm:.0f}, the last row arrives {waits:.0f} us later, and the last sum is stored at "
            f"{end.sums:.0f}."
        )
    return f"{table()}\n\n" + " ".join(sentences)
