"""The lesson "A Hopper GEMM": inputs, check, launches, what the compiler makes of each step, and tables."""

import sys
from collections import Counter
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.latencies import latencies
from moe_numba.course.lessons.hopper import draw_time
from moe_numba.course.lessons.hopper.sizes import (
    A_BYTES,
    BARRIER_BYTES,
    BLOCK_K,
    BUFFER_BYTES,
    MMA_WARPS,
    ROWS,
    SMALL_K,
    SMALL_M,
    SMALL_N,
    SMALL_SMS,
    K,
    M,
    N,
)
from moe_numba.course.steps.estimate import require_compiler
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Lesson, Run, Table
from moe_numba.course.steps.power import power_table
from moe_numba.course.steps.score import COMPILER, PATH, TOTAL, Score
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.ptx.cp_async import make_bulk_wait_group_read
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

DEVICE = "cpu" if simulator.ENABLED else "cuda"
E4M3 = torch.float8_e4m3fn
SIZE = dict(m=M, n=N, k=K)
EARLIER = "hopper_ladder"  # the record of an earlier version of this lesson


# What kernels of the page use


class Ring(NamedTuple):
    """A ring of stages in shared memory, and its two barriers per stage."""

    smem: Any  # bytes; stage s begins at s * stage_bytes with A, and B follows
    barriers: Any  # the same memory as mbarriers
    full: Any  # index of the first full barrier
    empty: Any
    stages: Any
    stage_bytes: Any


@cuda.jit(device=True)
def advance(ring, stage, phase):
    """Return the stage that follows, and the parity of its current phase: after the last stage the parity changes."""
    following = int32(stage + 1)
    if following == ring.stages:
        return int32(0), uint32(phase ^ uint32(1))
    return following, phase


_one_group_reads, _no_group_reads = make_bulk_wait_group_read(1), make_bulk_wait_group_read(0)


@cuda.jit(device=True)
def wait_for_buffer():
    """Let the lane that issues a warp's TMA stores wait until at most the latest of them still reads its buffer."""
    if elect_sync(FULL_MASK):
        _one_group_reads()


@cuda.jit(device=True)
def wait_for_stores():
    """Let the lane that issues a warp's TMA stores wait until none of them reads shared memory any more."""
    if elect_sync(FULL_MASK):
        _no_group_reads()


class Version(NamedTuple):
    """A kernel, and how it is launched.

    Attributes
    ----------
    kernel : kernel
        ``kernel(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch)``.
    columns : int
        Of a tile, whose rows are 128.
    stages : int
    threads : int
        Of a CTA.
    persistent : bool
        A CTA per SM; otherwise one per tile.
    cluster : int
        CTAs of a cluster.
    tma_store : bool
        ``out`` is a tensor map, and shared memory has buffers for what TMA stores; otherwise it is a pointer.
    """

    kernel: Any
    columns: int = 128
    stages: int = 1
    threads: int = 32 * MMA_WARPS
    persistent: bool = False
    cluster: int = 1
    tma_store: bool = False


# Inputs, check, launches


@cache
def _inputs(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A, B and the right result, added up over 128 elements of k in float32, and then in float64."""
    torch.manual_seed(0)
    a, b = (torch.randn(rows, k, device=DEVICE).to(E4M3) for rows in (m, n))
    right = torch.zeros(m, n, dtype=torch.float64, device=DEVICE)
    for at in range(0, k, BLOCK_K):
        right += a[:, at : at + BLOCK_K].float() @ b[:, at : at + BLOCK_K].float().T
    return a, b, right


def _shape():
    return (SMALL_M, SMALL_N, SMALL_K) if simulator.ENABLED else (M, N, K)


def _sms():
    return SMALL_SMS if simulator.ENABLED else torch.cuda.get_device_properties(0).multi_processor_count


def shared_bytes(version: Version) -> int:
    """Return the dynamic shared memory of a CTA: stages, barriers, and two buffers of each warp for TMA stores."""
    stages = version.stages * (A_BYTES + version.columns * BLOCK_K)
    return stages + BARRIER_BYTES + 2 * MMA_WARPS * BUFFER_BYTES * version.tma_store


def gemm(version, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute ``out = a @ b.T`` by a version of the kernel; out is bfloat16."""
    version, (m, k), n = Version(*version), a.shape, len(b)
    tiles_m, tiles = m // ROWS, m // ROWS * (n // version.columns)
    ctas = min(tiles, _sms() // version.cluster * version.cluster) if version.persistent else tiles
    boxes = (a, ROWS), (b, version.columns // version.cluster)
    maps = [TensorMap(t.view(torch.uint8), (rows, BLOCK_K), swizzle=128) for t, rows in boxes]
    target = TensorMap(out, (16, 64), swizzle=128) if version.tma_store else out.view(torch.int32)
    options = {"cluster": version.cluster} if version.cluster > 1 else {}
    sizes = tiles_m, tiles, k // BLOCK_K, n // 2
    shared = shared_bytes(version)
    launch(version.kernel, ctas, version.threads, *maps, target, *sizes, shared_bytes=shared, **options)
    return out


def poisoned(m: int, n: int) -> torch.Tensor:
    """Return an output in which elements that a kernel does not write are NaN."""
    return torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=DEVICE)


def relative_error(out: torch.Tensor, right: torch.Tensor) -> float:
    """Return the norm of the error over the norm of the result."""
    return float((out.double() - right).norm() / right.norm())


def wrong(out: torch.Tensor, right: torch.Tensor) -> str | None:
    """Return None, or which element is wrong.

    Tensor cores add FP8 products with fewer bits than float32. The bound allows for that and for rounding to bfloat16.
    """
    bound = right.abs() * 2**-8 + 0.05 * right.square().mean().sqrt()
    bad = ~((out.double() - right).abs() <= bound)
    if not bad.any():
        return None
    row, column = (int(index) for index in bad.nonzero()[0])
    found, should = float(out[row, column]), float(right[row, column])
    text = f"D[{row}, {column}] is {found:.4g}, not {should:.4g}; {int(bad.sum())} of {bad.numel()} elements are wrong"
    return f"{text}, of which {int(out.isnan().sum())} were never written" if out.isnan().any() else text


def check(version) -> str | None:
    """Compare a version with the reference."""
    a, b, right = _inputs(*_shape())
    return wrong(gemm(version, a, b, poisoned(len(a), len(b))), right)


def once(version) -> torch.Tensor:
    """Launch a version on the inputs whose work is counted."""
    a, b, _ = _inputs(SMALL_M, SMALL_N, SMALL_K)
    return gemm(version, a, b, poisoned(SMALL_M, SMALL_N))


def timed(version, m: int = M) -> list:
    """Return the call that is timed."""
    m, n, k = (m, N, K) if not simulator.ENABLED else _shape()
    a, b, _ = _inputs(m, n, k)
    return [partial(gemm, version, a, b, poisoned(m, n))]


# What is counted: the compiler's code, and bytes


class CompiledLesson(Lesson):
    """Its scores say what the compiler made of a kernel; it has no model of kernels whose warps differ.

    A subclass has ``rows(kernel)``, rows of a score of a profiled kernel, and the attributes ``shown``, which of them
    the summary shows, and ``flops`` of a launch.
    """

    def fault(self, version):
        """Return what is wrong with a version, or None. The simulator detects races in the first of several orders.

        Each detected order takes ten times as long as one without, and orders differ little in the races they show.
        """
        if not simulator.ENABLED:
            return self.run.check(version)
        found = (self._checked(version, seed, races=seed == 0) for seed in range(self.seeds))
        return next(filter(None, found), None)

    def count(self, version, name):
        """Return the score of a version; the simulator counts."""
        with simulator.profile(self.gpu.upper()) as profile:
            self.run.once(version)
        (kernel,) = profile.kernels
        rows = {(PATH, "barriers"): kernel.critical_path.barriers, **self.rows(kernel)}
        return Score(name, rows, self.gpu.upper())

    def summary(self):
        """Return a table of all steps: times, rates, and what the compiler made of each."""
        lines = []
        for step in self.steps.values():
            faster = step.times and f"{step.times[0] / step.times[1]:.2f}"
            us = (
                [records.format_us(step.us), f"{self.flops / step.us / 1e6:.0f}", faster or ""] if step.us else [""] * 3
            )
            facts = [f"{step.score.rows[COMPILER, row]:,}" for row in self.shown]
            lines.append([step.name, *us, *facts, str(step.judgement or "")])
        return Table(["step", "us", "TFLOP/s", "times as fast", *self.shown, "prediction"], lines)


REGISTERS, CTAS, LOOP = "registers of a thread", "CTAs per SM", "instructions of the main loop"
STORES, COMPARES = "store instructions", "integer compares"
SPILLED, ALL = "bytes spilled", "instructions"
SHOWN = REGISTERS, SPILLED, CTAS, LOOP, STORES, COMPARES
_LOADED, _STORED = "bytes from L2 to shared memory", "sectors stored by threads"


def compiled_rows(kernel):
    """Return rows of what the compiler made of a profiled kernel."""
    require_compiler()
    static, names = kernel.static, [code["opcode"].split(".")[0] for code in kernel.static.sass or ()]
    count, (first, last) = Counter(names), main_loop(kernel.static.sass or ())
    return {
        (COMPILER, REGISTERS): static.registers or 0,
        (COMPILER, SPILLED): static.spilled_bytes or 0,
        (COMPILER, CTAS): static.occupancy[0].blocks_per_sm if static.registers else 0,
        (COMPILER, LOOP): last - first,
        (COMPILER, ALL): len(names),
        (COMPILER, STORES): count["STG"] + count["UTMASTG"],
        (COMPILER, COMPARES): count["ISETP"],
    }


def main_loop(sass) -> tuple[int, int]:
    """Return the first instruction of the innermost loop that has tensor core instructions, and the one behind it."""
    loops = [
        (code["target"], n + 1) for n, code in enumerate(sass) if code["target"] is not None and code["target"] <= n
    ]
    multiplies = lambda loop: any(code["opcode"].startswith(("QGMMA", "HGMMA", "HMMA")) for code in sass[slice(*loop)])
    return min(filter(multiplies, loops), key=lambda loop: loop[1] - loop[0], default=(0, 0))


def _machine_code(version):
    """Return the lines of a version's machine code up to the first store to global memory."""
    with simulator.profile("H200") as profile:
        once(version)
    sass, lines = profile.kernels[0].static.sass or [], []
    for number, code in enumerate(sass):
        to = "" if code["target"] is None else f" to {code['target']}"
        lines.append(f"{number:>6}  {'if ' if code['predicated'] else '   '}{code['opcode']}{to}")
        if code["opcode"].startswith(("STG", "UTMASTG")):
            break
    return lines


def byte_rows(kernel):
    """Return rows of the bytes that a profiled kernel moves. A multicast reads once what lands in several CTAs."""
    loaded = sum(
        operation.bytes * min(1, line.executions / operation.count)
        for line in kernel.lines
        for name, operation in line.operations.items()
        if "to shared memory" in name
    )
    return {(TOTAL, _LOADED): round(loaded), (TOTAL, _STORED): kernel.total.global_store_sectors}


class _Lesson(CompiledLesson):
    shown, flops = SHOWN, 2 * M * N * K

    def rows(self, kernel):
        return {**compiled_rows(kernel), **byte_rows(kernel)}


lesson = _Lesson(
    "hopper_gemm_ladder",
    Run(check, once, timed, kernels=lambda version: version[:1]),
    f"{__name__}:lesson",
    config={},
    size=SIZE,
    dtype="float8_e4m3fn",
)


# Tables


class Shape(NamedTuple):
    """Clocks of an SM for a tile and 128 elements of k, and bytes from L2 per clock at the tensor cores' rate."""

    tensor: float
    shared: float
    l2_bytes: float


def shape(rows: int, columns: int, multicast: int = 1) -> Shape:
    """Return what a tile asks of an SM; ``multicast`` CTAs share its columns of B.

    TMA writes both operands to shared memory, and each warpgroup reads its 64 rows of A and all columns of B, at 128
    bytes per clock.
    """
    tensor = 2 * rows * columns * BLOCK_K / 8192  # FP8 operations per clock of an SM
    shared = (rows + columns + rows // 64 * (64 + columns)) * BLOCK_K / 128
    return Shape(tensor, shared, (rows + columns / multicast) * BLOCK_K / tensor)


def show_shapes() -> Table:
    """Return a table of tiles: clocks of the units, and what L2 must deliver."""
    tiles = [(64, 64, 1), (128, 128, 1), (128, 256, 1), (128, 256, 2)]
    lines = []
    for rows, columns, multicast in tiles:
        of = shape(rows, columns, multicast)
        share = of.tensor / max(of.tensor, of.shared)
        name = f"{rows} x {columns}" + (f", B multicast to {multicast} CTAs" if multicast > 1 else "")
        lines.append([name, f"{of.tensor:.0f}", f"{of.shared:.0f}", f"{share:.0%}", f"{of.l2_bytes:.0f}"])
    clocks = "clocks of the tensor cores", "clocks of shared memory"
    return Table(["tile", *clocks, "of the peak at most", "bytes from L2 per clock"], lines)


def peak_us() -> float:
    """Return the lower bound: all operations at the data sheet's peak rate."""
    return 2 * M * N * K / chip_limits().tensor_flops["float8_e4m3fn"] * 1e6


def lower_bound() -> str:
    """Return the lower bound in words."""
    return f"{2 * M * N * K / 1e9:.0f} GFLOP take {peak_us():.1f} us at the data sheet's FP8 peak"


def result() -> str:
    """Return where the lesson starts and ends, in numbers of its record."""
    text = f"D is {M} x {N}, and K is {K}. {lower_bound()}."
    record = records.recorded(lesson.topic)
    if record is None:
        return text
    steps = {"one stage": "one stage", "TMA stores": "TMA stores", f"{M} rows: cuBLAS": "cuBLAS"}
    rows = {name: records.find(record, step=step, size=SIZE) for step, name in steps.items()}
    if None in rows.values():  # nothing is recorded with these sizes
        return text
    found = ", ".join(f"{name} {records.format_us(row['kernel_us']['median'])} us" for name, row in rows.items())
    return f"{text}\nRecorded on an H200: {found}."


def _recorded():
    record = records.recorded("hopper_gemm_ladder")
    rows = records.select(record, size=SIZE) if record else []
    return [row for row in rows if "kernel_us" in row and ": " not in row["step"]]


# Predictions, in microseconds; None where the time that they start from is not known


def _predicted(before, change):
    us = lesson.steps[before].us
    return None if us is None else change(us)


def without_waiting(before: str) -> float | None:
    """Return the time of a step if loads and MMAs, which alternated in it, overlap completely."""
    return _predicted(before, lambda us: max(us - peak_us(), peak_us()))


def without_first_loads(before: str, tiles: int) -> float | None:
    """Return the time of a step if only the first of an SM's tiles waits for the latency of its first load."""
    latency_us = latencies(lesson.gpu.upper()).ns["global_load_requests"] / 1000
    return _predicted(before, lambda us: us - (tiles / chip_limits().sm_count - 1) * latency_us)


def with_bare_ends_of_tiles(before: str, tiles: int) -> float | None:
    """Return the time of a step if an SM has one CTA at a time: nothing hides its stores and its first load."""
    latency_us = latencies(lesson.gpu.upper()).ns["global_load_requests"] / 1000
    stores_us, tiles_of_sm = _stores_us(), tiles / chip_limits().sm_count
    return _predicted(before, lambda us: us + stores_us + tiles_of_sm * latency_us)


def by_busiest_unit(before: str, old: Shape, new: Shape) -> float | None:
    """Return the time of a step if it changes as the clocks that the busiest unit needs per MMA."""
    clocks = lambda of: max(of.tensor, of.shared) / of.tensor
    return _predicted(before, lambda us: us * clocks(new) / clocks(old))


def without_stores(before: str) -> float | None:
    """Return the time of a step less that of storing D at the rate of a copy."""
    return _predicted(before, lambda us: us - _stores_us())


def _stores_us():
    return 2 * M * N / chip_limits().copy_bandwidth * 1e6


def with_additions(before: str) -> float | None:
    """Return the time of a step and half of that of adding every accumulator in float32 after each stage."""

    def slower(us):
        limits = chip_limits()
        return us + M * N * K / BLOCK_K / (128 * limits.sm_count * limits.tensor_clock) * 1e6 / 2

    return _predicted(before, slower)


# Times of parts, power, variants and peers


def show_power(version) -> Table:
    """Return a table of the clock and the power of a version and of cuBLAS under sustained load."""
    a, b, _ = _inputs(M, N, K) if not simulator.ENABLED else _inputs(*_shape())
    calls = {"TMA stores": timed(version)[0], "cuBLAS": partial(_cublas, a, b)}
    return power_table(lesson, calls, 2.0 * M * N * K)


def say_parts() -> str:
    """Return what the times of the parts say, from this run or the record."""
    us = _parts_us
    if not us:
        return "The parts were not timed."
    mmas, loads, whole = us["without loads"], us["without MMAs"], us["all"]
    return (
        f"MMAs alone take {mmas / whole:.0%} of the whole kernel's time, and loads alone {loads / whole:.0%}. So they "
        "overlap: a better ring has little to gain. But MMAs alone also take "
        f"{mmas / peak_us():.1f} times as long as at the peak rate, though nothing but the stores keeps the tensor "
        "cores waiting. So the tensor cores themselves are slower than the data sheet says. The section on power, "
        "after step 9, measures why."
    )


_parts_us: dict[str, float] = {}


def show_parts(versions: dict) -> Table:
    """Return a table of times of kernels that leave a part out, and of the whole one."""
    us = lesson.times("parts", {name: timed(version) for name, version in versions.items()})
    _parts_us.update(us)
    lines = [[name, records.format_us(us[name]) if us else "not timed"] for name in versions]
    return Table(["kernel", "us"], [*lines, ["all MMAs at the peak rate", records.format_us(peak_us())]])


def show_errors(versions: dict) -> Table:
    """Return a table of relative errors, and cuBLAS' with and without fast accumulation, on a GPU."""
    a, b, right = _inputs(*_shape())
    errors = {"rounding to bfloat16 alone": relative_error(right.bfloat16(), right)}
    errors |= {name: relative_error(gemm(v, a, b, poisoned(len(a), len(b))), right) for name, v in versions.items()}
    if not simulator.ENABLED:
        errors |= {
            f"cuBLAS, use_fast_accum={fast}": relative_error(_cublas(a, b, fast), right) for fast in (True, False)
        }
    where = "" if not simulator.ENABLED else ", in the simulator, which adds in float32"
    return Table(["relative error" + where, ""], [[name, f"{error:.2e}"] for name, error in errors.items()])


def _cublas(a, b, fast=True):
    if simulator.ENABLED:
        return (a.float() @ b.float().T).bfloat16()
    one = torch.ones((), device=DEVICE)
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def show_variants(last, others: dict) -> Table:
    """Return a table of changes of a step: times, and what the compiler made of them."""
    versions = {"the step": last} | others
    us = lesson.times("variants", {name: timed(version) for name, version in versions.items()})
    lines = []
    for name, version in versions.items():
        facts = _simulated(_facts, version)
        lines.append([name, records.format_us(us[name]) if us else "not timed", *(f"{facts[row]:,}" for row in SHOWN)])
    return Table(["version", "us", *SHOWN], lines)


def _facts(version):
    return {row: number for (section, row), number in lesson.count(version, "").rows.items() if section == COMPILER}


def show_first_store(version, before: int = 16) -> None:
    """Print the machine code of a version that leads to its first store to global memory."""
    print("\n".join(_simulated(_machine_code, version)[-before:]))


def show_peers(version, rows: tuple[int, ...] = (512, 1024, 2048, M, 2 * M)) -> Table:
    """Return a table of the last step beside cuBLAS, for several numbers of rows of A, timed interleaved."""
    lines = []
    for m in rows if not simulator.ENABLED else (M,):
        a, b, right = _inputs(m, N, K) if not simulator.ENABLED else _inputs(*_shape())
        if fault := wrong(gemm(version, a, b, poisoned(len(a), len(b))), right):
            raise WrongResult(f"{m} rows: {fault}")
        us = lesson.times(f"{m} rows", {"this lesson": timed(version, m), "cuBLAS": [partial(_cublas, a, b)]})
        if us:
            rates = [f"{2 * m * N * K / us[name] / 1e6:.0f}" for name in us]
            lines.append([f"{m:,}", *(records.format_us(each) for each in us.values()), *rates])
    if not lines:
        lines = [[f"{M:,}", "not timed", *[""] * 3]]
    return Table(["rows of A", "this lesson, us", "cuBLAS, us", "this lesson, TFLOP/s", "cuBLAS, TFLOP/s"], lines)


_NO_GAIN = {  # step of an earlier version of this lesson -> what changed, and why it gained nothing
    "ring of 4 stages": (
        "a ring of four stages with a tile of 64 x 64",
        "Eight small CTAs per SM overlapped each other already; with four stages each, only three fit.",
    ),
    "linked CUDA C++": (
        "wgmma from linked CUDA C++, launched by Numba",
        "The MMA is the same machine code, but Numba's launch passes 64-bit sizes, and maps in global memory.",
    ),
    "tile of 128 x 256": (
        "a tile of 128 x 256 whose stores stay a loop",
        "You have found the cause above: each accumulator is searched for.",
    ),
}


def show_what_did_not_pay() -> Table:
    """Return a table of changes that an earlier version of this lesson timed, and that gained nothing."""
    lines = []
    for after, (change, why) in _NO_GAIN.items():
        record = records.recorded(EARLIER)
        row = record and records.find(record, step=after, size=SIZE)
        us = [records.format_us(each) for each in row["compared_us"]] if row else ["", ""]
        lines.append([change, *us, why])
    return Table(["change (of an earlier version of this lesson)", "us before", "us after", "why"], lines)


# Traces of the simulator


def show_barrier(kernel):
    """Draw the phases of the mbarrier by which a kernel ``kernel(map_x, out, boxes)`` loads two boxes, one by one."""
    return draw_time.barrier_life(_traced(_barrier_events, kernel), 0, 1)


def _barrier_events(kernel):
    x, out = (torch.arange(12 * 128) % 251).to(torch.uint8).view(12, 128), torch.zeros(2 * 1024, dtype=torch.uint8)
    with simulator.trace() as events:
        launch(kernel, 1, 64, TensorMap(x, (8, 128)), out, 2)
    return [event._asdict() for event in events]


def show_ring(version):
    """Draw the loads and uses of the stages of a version that computes one tile, of seven blocks of k."""
    version = Version(*version)
    full = version.stages * (A_BYTES + version.columns * BLOCK_K) // 8
    events = _traced(_ring_events, version)
    return draw_time.ring(events, full, full + version.stages, version.stages)


def _ring_events(version):
    a, b = (torch.ones(rows, 7 * BLOCK_K).to(E4M3) for rows in (ROWS, version[1]))
    with simulator.seed(3), simulator.trace() as events:
        gemm(version, a, b, poisoned(ROWS, version[1]))
    return [event._asdict() for event in events]


def _traced(trace, version):
    """Return the events of ``trace(version)``."""
    kept = [each for each in _simulated(trace, version) if "mbarrier" in each["what"] or "copy" in each["what"]]
    return [_Event(each["what"], each["block"], each["warp"], each["lane"], each["details"]) for each in kept]


class _Event(NamedTuple):
    what: str
    block: Any
    warp: int
    lane: int
    details: dict


def _simulated(function, version):
    """Return ``function(version)``, from a process with the simulator where kernels run on a GPU."""
    if simulator.ENABLED:
        return function(version)
    expression, functions = expression_of(version)
    return in_simulator(_again, function.__name__, expression, functions=functions)


def _again(function, version):
    return globals()[function](eval(version, vars(sys.modules["__main__"])))
