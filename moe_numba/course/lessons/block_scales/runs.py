"""The lesson "Block scales": inputs, check, launches, what the compiler makes of each step, and tables."""

from collections import Counter
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, int64

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.latencies import latencies
from moe_numba.course.lessons.block_scales.sizes import (
    A_BYTES,
    BLOCK_K,
    MMA_WARPS,
    ROWS,
    SCALE_BYTES,
    SMALL_K,
    SMALL_M,
    SMALL_N,
    SMALL_SMS,
    K,
    M,
    N,
)
from moe_numba.course.lessons.hopper.answers import store_four
from moe_numba.course.lessons.hopper.runs import CompiledLesson, main_loop, poisoned, shape, wrong
from moe_numba.course.steps.estimate import require_compiler
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Run, Table, factory
from moe_numba.course.steps.peers import about_peers, beside_peers
from moe_numba.course.steps.power import power_table
from moe_numba.course.steps.score import COMPILER
from moe_numba.grouped_gemm import group_gemm_blockwise_fp8
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

__all__ = ["Ring", "Scales", "Version", "lesson", "shape"]
DEVICE = "cpu" if simulator.ENABLED else "cuda"
E4M3 = torch.float8_e4m3fn
SIZE = dict(m=M, n=N, k=K)
EARLIER, GROUPED = "grouped_gemm_block_scales_ladder", "grouped_gemm"  # records of 32 groups
CONSUMERS_PER_SCHEDULER = MMA_WARPS // 4


# What kernels of the page use


class Ring(NamedTuple):
    """A ring of stages in shared memory, and its two barriers per stage."""

    smem: Any  # bytes; a stage has A, B and then scales
    floats: Any  # the same memory as float32
    words: Any  # the same memory as int32
    barriers: Any  # the same memory as mbarriers
    full: Any  # index of the first full barrier
    empty: Any
    stages: Any
    stage_floats: Any  # of 4 bytes
    scales: Any  # index of the first scale of stage 0 among the floats


class Scales(NamedTuple):
    """Scales in global memory."""

    x: Any  # float32 [k / 128, m]: a scale of each row for each 128 elements of k
    w: Any  # float32 [n / 128, k / 128]: a scale of each 128 rows for each 128 elements of k
    rows: Any  # m
    k_blocks: Any  # k / 128


@factory
def make_store(columns):
    """Make the unrolled stores of lesson 06: ``store(out, acc, row, column, pitch)``."""
    store_all = make_for_each_chunk(columns // 2, 4, store_four)

    @cuda.jit(device=True)
    def store(out, acc, row, column, pitch):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
        offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))
        store_all(acc, out, offset, pitch)

    return store


class Version(NamedTuple):
    """A kernel, and how it is launched.

    Attributes
    ----------
    kernel : kernel
        ``kernel(map_a, map_b, x_scale, w_scale, out, tiles_m, tiles, k_blocks, m, pitch)``.
    columns, stages : int
        Columns of a tile, whose rows are 128, and stages of the ring.
    transposed : bool
        Rows of w are the rows of a tile, and the kernel stores the transpose of D.
    scaled : bool
        Whether the kernel applies scales; otherwise its result is that of scales of 1.
    """

    kernel: Any
    columns: int = 128
    stages: int = 6
    transposed: bool = False
    scaled: bool = True


# Inputs, check, launches


class Problem(NamedTuple):
    """x [m, k] and w [n, k] in FP8, their scales as in `Scales`, and D in float64, scaled and not."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    right: torch.Tensor
    unscaled: torch.Tensor


@cache
def inputs(m: int, n: int, k: int) -> Problem:
    """Return random operands whose scales differ by up to a factor of 8."""
    torch.manual_seed(0)
    x, w = (torch.randn(rows, k, device=DEVICE).to(E4M3) for rows in (m, n))
    x_scale, w_scale = (
        torch.exp2(3 * torch.rand(*size, device=DEVICE) - 1.5) for size in ((k // BLOCK_K, m), (n // 128, k // BLOCK_K))
    )
    right, unscaled = (torch.zeros(m, n, dtype=torch.float64, device=DEVICE) for _ in range(2))
    for block in range(k // BLOCK_K):
        at = slice(block * BLOCK_K, (block + 1) * BLOCK_K)
        part = x[:, at].float() @ w[:, at].float().T
        unscaled += part
        right += part * x_scale[block, :, None].double() * w_scale[:, block].repeat_interleave(128)
    return Problem(x, w, x_scale, w_scale, right, unscaled)


def _shape():
    return (SMALL_M, SMALL_N, SMALL_K) if simulator.ENABLED else (M, N, K)


def _ctas():
    return SMALL_SMS if simulator.ENABLED else torch.cuda.get_device_properties(0).multi_processor_count


def gemm(version, problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """Compute D by a version of the kernel, or its transpose; out is bfloat16."""
    version, a, b = Version(*version), problem.x, problem.w
    if version.transposed:
        a, b = b, a
    tiles_m, k_blocks = len(a) // ROWS, a.shape[1] // BLOCK_K
    tiles = tiles_m * (len(b) // version.columns)
    boxes = (a, ROWS), (b, version.columns)
    maps = [TensorMap(t.view(torch.uint8), (rows, BLOCK_K), swizzle=128) for t, rows in boxes]
    shared = version.stages * (A_BYTES + version.columns * BLOCK_K + SCALE_BYTES + 16)
    given = *maps, problem.x_scale, problem.w_scale, out.view(torch.int32)
    sizes = tiles_m, tiles, k_blocks, len(problem.x), len(b) // 2
    launch(version.kernel, min(tiles, _ctas()), 32 * MMA_WARPS + 128, *given, *sizes, shared_bytes=shared)
    return out


def _out(version, problem):
    right = problem.right.T if Version(*version).transposed else problem.right
    return poisoned(*right.shape)


def check(version) -> str | None:
    """Compare a version with the reference."""
    problem = inputs(*_shape())
    right = problem.right if Version(*version).scaled else problem.unscaled
    out = gemm(version, problem, _out(version, problem))
    return wrong(out, right.T if Version(*version).transposed else right)


def once(version) -> torch.Tensor:
    """Launch a version on the inputs whose work is counted."""
    columns = Version(*version).columns
    problem = inputs(SMALL_M, -(-SMALL_N // columns) * columns, SMALL_K)  # a multiple of any tile's columns
    return gemm(version, problem, _out(version, problem))


def timed(version) -> list:
    """Return the call that is timed."""
    problem = inputs(*_shape())
    return [partial(gemm, version, problem, _out(version, problem))]


REGISTERS, SPILLED, LOOP = "registers of a thread", "bytes spilled", "instructions of the main loop"
LOADS, MULTIPLIES, FMAS = "loads from shared memory", "multiplications", "additions and multiply-adds"
SHOWN = REGISTERS, SPILLED, LOOP, LOADS, MULTIPLIES, FMAS


class _Lesson(CompiledLesson):
    """Its scores say what the main loop of a consumer does besides its MMAs."""

    shown, flops = SHOWN, 2 * M * N * K

    def rows(self, kernel):
        """Return rows of what the compiler made of a profiled kernel."""
        require_compiler()
        sass = kernel.static.sass or ()
        loop = sass[slice(*main_loop(sass))]
        count = Counter(code["opcode"].split(".")[0] for code in loop)
        numbers = (
            kernel.static.registers or 0,
            kernel.static.spilled_bytes or 0,
            len(loop),
            count["LDS"],
            count["FMUL"],
            count["FFMA"] + count["FADD"],
        )
        return {(COMPILER, row): number for row, number in zip(SHOWN, numbers, strict=True)}


lesson = _Lesson(
    "block_scales_ladder",
    Run(check, once, timed, kernels=lambda version: version[:1]),
    f"{__name__}:lesson",
    config={},
    size=SIZE,
    dtype="float8_e4m3fn",
    seeds=2,
)


# Lower bound, result, predictions in microseconds (None where the time that they start from is not known)


def peak_us() -> float:
    """Return the lower bound: all operations at the data sheet's peak rate."""
    return 2 * M * N * K / chip_limits().tensor_flops["float8_e4m3fn"] * 1e6


def lower_bound() -> str:
    """Return the lower bound in words: operations and bytes."""
    limits, scales = chip_limits(), 4 * (M * K // BLOCK_K + N * K // BLOCK_K // 128)
    copy_us = (M * K + N * K + 2 * M * N + scales) / limits.copy_bandwidth * 1e6
    return (
        f"{2 * M * N * K / 1e9:.0f} GFLOP take {peak_us():.1f} us at the data sheet's FP8 peak; reading x, w and "
        f"{scales / 1e6:.1f} MB of scales once and writing D takes {copy_us:.1f} us at the rate of a copy"
    )


def result() -> str:
    """Return where the lesson starts and ends, in numbers of records."""
    text = f"D is {M} x {N}, and K is {K}. {lower_bound()}."
    record = records.recorded("block_scales_ladder")
    us = {row["step"]: row["kernel_us"]["median"] for row in records.select(record, size=SIZE)} if record else {}
    named = {"no scales": "Without scales", "scale per column": "first version", "barrier tested early": "last version"}
    found = [f"{words} {records.format_us(us[name])} us" for name, words in named.items() if name in us]
    return text + (f"\nRecorded on an H200, in short bursts: {', '.join(found)}." if found else "")


def _predicted(before, change):
    us = lesson.steps[before].us
    return None if us is None else change(us)


def with_instructions(before: str, more: int, columns: int = 128) -> float | None:
    """Return the time of a step with more instructions per stage, which nothing hides.

    A scheduler issues one per clock, and has two consumer warps.
    """
    limits = chip_limits()
    stages = M * N * K / (ROWS * columns * BLOCK_K) / limits.sm_count
    us = stages * CONSUMERS_PER_SCHEDULER * more / limits.tensor_clock * 1e6
    return _predicted(before, lambda time: time + us)


def by_busiest_unit(before: str, old: int, new: int) -> float | None:
    """Return the time of a step if it changes as the clocks that the busiest unit needs per MMA."""
    clocks = lambda of: max(of.tensor, of.shared) / of.tensor
    return _predicted(before, lambda us: us * clocks(shape(ROWS, new)) / clocks(shape(ROWS, old)))


def without_round_trip(before: str, columns: int) -> float | None:
    """Return the time of a step without the latency of one shared-memory access per stage."""
    stages = M * N * K / (ROWS * columns * BLOCK_K) / chip_limits().sm_count
    us = stages * latencies(lesson.gpu.upper()).ns["shared_load_requests"] / 1000
    return _predicted(before, lambda time: time - us)


# Diagnosis


def ratios(version) -> torch.Tensor:
    """Return found by right elements of D, [m, n], of ones: the scales of a row and of a block are powers of two."""
    m, n, version = 2 * ROWS, 2 * 384, Version(*version)
    ones = [torch.ones(rows, BLOCK_K, device=DEVICE).to(E4M3) for rows in (m, n)]
    x_scale = torch.exp2(torch.arange(m, device=DEVICE) % 16 / 1.0)[None]
    w_scale = torch.exp2(-torch.arange(n // 128, device=DEVICE) / 1.0)[:, None]
    right = BLOCK_K * x_scale[0][:, None].double() * w_scale[:, 0].double().repeat_interleave(128)
    out = gemm(version, Problem(*ones, x_scale.contiguous(), w_scale, right, right), poisoned(m, n))
    return out.double() / right


def show_ratios(version) -> Table:
    """Return a table of `ratios`: the rows of a warp's tile, and blocks of 64 columns."""
    found = ratios(version)
    blocks = range(0, found.shape[1], 64)
    lines = []
    for first, last in ((0, 7), (8, 15), (ROWS, ROWS + 7)):
        same = [found[first : last + 1, at : at + 64].unique() for at in blocks]
        lines.append([f"{first} to {last}", *(", ".join(f"{value:g}" for value in each.tolist()) for each in same)])
    return Table(["rows", *(f"columns {at} on" for at in blocks)], lines)


# Times of parts, power, peers


def show_parts(versions: dict) -> Table:
    """Return a table of times of kernels that leave a part out, beside the whole one, interleaved."""
    us = lesson.times("parts", {name: timed(version) for name, version in versions.items()})
    lines = [[name, records.format_us(us[name]) if us else "not timed"] for name in versions]
    return Table(["kernel", "us"], [*lines, ["all MMAs at the peak rate", records.format_us(peak_us())]])


def show_power(versions: dict) -> Table:
    """Return a table of kernels: time in short bursts, and time, clock, power and energy under sustained load."""
    return power_table(lesson, {name: timed(version)[0] for name, version in versions.items()})


def of_one_group(problem: Problem) -> SimpleNamespace:
    """Return a problem as grouped GEMMs take it, with one group and the scales of x row by row."""
    rows = len(problem.x)
    return SimpleNamespace(
        x=problem.x,
        weight=problem.w[None],
        seqlens=torch.tensor([rows], dtype=torch.int32, device=DEVICE),
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
        x_scale=problem.x_scale.T.contiguous(),
        w_scale=problem.w_scale[None],
        average=rows,
    )


def _package(p, out):
    given = p.x, p.weight, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale, p.average
    return partial(group_gemm_blockwise_fp8, *given, out=out)


def _cublas(problem, out):
    """Return a call of cuBLAS, whose scales of x are column-major, and those of w the transpose of ours."""
    x_scale, w_scale = problem.x_scale.T, problem.w_scale.T

    def multiply():
        given = dict(scale_a=x_scale, scale_b=w_scale, out_dtype=torch.bfloat16, out=out)
        return torch._scaled_mm(problem.x, problem.w.T, **given)

    return multiply


def show_peers(version) -> Table:
    """Return a table of the last step beside others' kernels, for one group, timed interleaved.

    They are the package's, cuBLAS' and those of `steps.peers`.
    """
    problem, lines = inputs(*_shape()), []
    grouped, calls = of_one_group(problem), {"this lesson": timed(version)[0]}
    calls["the package's kernel"] = _package(grouped, poisoned(*problem.right.shape))
    if not simulator.ENABLED:
        calls["cuBLAS"] = _cublas(problem, poisoned(*problem.right.shape))
    unsupported = {}
    for name, call in list(calls.items()):
        try:
            fault = wrong(call(), problem.right)
        except (RuntimeError, ValueError, TypeError) as error:  # a version of torch without block scales
            fault = str(error).split("\n")[0][:90]
        if fault and name == "cuBLAS":
            unsupported[name] = fault
            del calls[name]
        elif fault:
            raise WrongResult(f"{name}: {fault}")
    own = {name: [call] for name, call in calls.items()}

    def time(others, versions):
        us = lesson.times("peers", own | others, versions)
        if us and simulator.ENABLED and (recorded := lesson.recorded_us("peers: cuBLAS", ())):
            us["cuBLAS"] = recorded
        return us

    found = beside_peers(lesson, "peers", time, "block", [grouped], lambda out: wrong(out, problem.right))
    for name in dict.fromkeys([*calls, *found.us, *found.versions]):
        us = found.us.get(name)
        lines.append([name, found.cell(name), f"{2 * M * N * K / us / 1e6:.0f}" if us else ""])
    lines += [[name, "not timed: " + text, ""] for name, text in unsupported.items()]
    return Table(["kernel", "us", "TFLOP/s"], lines, about_peers(found))


_PEERS = {"final": "the package", "peer:deepgemm-contiguous": "DeepGEMM, contiguous"}
_PEERS |= {"peer:deepgemm-masked": "DeepGEMM, masked", "peer:hpc-ops": "hpc-ops"}


_ROUTINGS = {"uniform": "spread evenly", "zipf": "by Zipf's law", "one": "all in one group"}


def show_grouped() -> Table:
    """Return a table of recorded grouped GEMMs with block scales: the package and peers, by distribution of rows."""
    record, lines = records.recorded(GROUPED), []
    found = records.select(record, config=dict(scaling="block", n=4096, k=7168)) if record else []
    cases = dict.fromkeys((r["config"]["num_groups"], r["size"]["rows"], r["config"]["routing"]) for r in found)
    for groups, rows, routing in cases:
        if groups != 32 or rows not in (128, 2048, 8192, 32768):
            continue
        of = dict(
            config=dict(scaling="block", n=4096, k=7168, num_groups=groups, routing=routing), size=dict(rows=rows)
        )
        us = [r and r["kernel_us"]["median"] for r in (records.find(record, step=step, **of) for step in _PEERS)]
        least = min(filter(None, us))
        cells = [f"{records.format_us(each)}{' *' if each == least else ''}" if each else "" for each in us]
        lines.append([f"{rows:,}", _ROUTINGS.get(routing, routing), *cells])
    return Table(["rows, 32 groups", "routing", *(f"{name}, us" for name in _PEERS.values())], lines)


_NO_GAIN = {  # step of the earlier version -> what changed, and why it gained nothing
    "pairs of tiles": (
        "clusters of two CTAs share the loads of w",
        "CTAs no longer drift apart and L2 delivers less, but loads were not the limit.",
    ),
    "scales of four stages": (
        "one load of 16 bytes fetches the scales of four stages",
        "A quarter of the loads, but each begins later; we did not isolate more.",
    ),
    "look-up ahead": ("the next tile's group is looked up early", "CTAs waited for it 0.5 % of the time."),
    "TMA store": ("TMA stores D, with four stages instead of five", "A stage less costs what the faster stores gain."),
    "final": (
        "a tile of 128 x 256, in two halves that share the registers of their result",
        "Fewer bytes, but two waits for MMAs per stage: hardly any gain, for a kernel of twice the length.",
    ),
}


def show_what_did_not_pay() -> Table:
    """Return a table of changes that an earlier version timed, and that gained little or nothing."""
    lines, record = [], records.recorded(EARLIER)
    for after, (change, why) in _NO_GAIN.items():
        row = record and records.find(record, step=after, size={"rows": 8192})
        lines.append([change, *([records.format_us(us) for us in row["compared_us"]] if row else ["", ""]), why])
    return Table(["change (32 groups, 8192 rows, recorded at the power limit)", "us before", "us after", "why"], lines)
