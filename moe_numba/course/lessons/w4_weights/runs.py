"""The lesson "4-bit weights": packing, inputs, check, launches, what the compiler makes of each step, and tables."""

from collections import Counter
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.lessons.hopper.runs import CompiledLesson, main_loop
from moe_numba.course.lessons.w4_weights.sizes import (
    CODE_BYTES,
    EXPERTS,
    EXPONENT_OFFSET,
    SMALL_EXPERTS,
    SMALL_K,
    SMALL_N,
    SMALL_SMS,
    STAGE_TILES,
    TILE,
    TILE_BYTES,
    TOKENS,
    X_BYTES,
    K,
    N,
)
from moe_numba.course.steps.estimate import require_compiler
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Run, Table
from moe_numba.course.steps.peers import about_peers, beside_peers
from moe_numba.course.steps.score import COMPILER, PATH, Score
from moe_numba.grouped_gemm import group_gemm_bf16, group_gemm_mxfp4, pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4
from moe_numba.ptx.mma import make_ldmatrix_x4, make_mma
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

DEVICE = "cpu" if simulator.ENABLED else "cuda"
SIZE = dict(n=N, k=K, tokens=TOKENS)
EARLIER, GROUPED = "grouped_gemm_mxfp4_ladder", "grouped_gemm"  # records of 32 groups, 4 tokens each


class Version(NamedTuple):
    """A kernel, and how it is launched.

    Attributes
    ----------
    kernel : kernel
        ``kernel(map_x, weight, out, tiles_of_expert, tiles, k_stages, n)``.
    warpgroups, stages : int
        Warpgroups that decode and multiply, 64 rows of a weight each, and stages of the ring.
    """

    kernel: Any
    warpgroups: int = 2
    stages: int = 12


class First(NamedTuple):
    """A kernel that decodes all weights to bfloat16, ``kernel(blocks, scales, out, words)``, before a bfloat16 GEMM."""

    kernel: Any


load_rows, mma = make_ldmatrix_x4(), make_mma("bf16", 16, 8)  # what `multiply` of step 5 is made of


# Packing, inputs, check, launches


def pack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack weights in tiles: 16 bytes of codes for each thread of a warpgroup, in the order of its registers of A.

    Parameters
    ----------
    blocks : tensor [experts, n, k / 2], uint8
        Two e2m1 codes per byte, the first in the low half.
    scales : tensor [experts, n, k / 32], uint8
        Byte s, 32 to 161, is 2**(s - 127).

    Returns
    -------
    tensor [experts, n / 64, k / 64, 2176], uint8
        Nibble ``4 half + 2 h + r`` of word ``s`` of a thread has the column ``16 s + 8 h + 2 (l % 4) + half`` of row
        ``16 w + l // 4 + 8 r``. Then come scales, as exponents of a bfloat16: byte ``2 block + r`` of a row's word.
    """
    if ((scales < 32) | (scales > 255 - EXPONENT_OFFSET)).any():
        raise ValueError(f"scales has bytes from {scales.min()} to {scales.max()}; 32 to 161 fit this packing")
    experts, n, half_k = blocks.shape
    shape = experts, n // TILE, half_k * 2 // TILE
    codes = torch.stack([blocks & 15, blocks >> 4], -1).view(experts, n // TILE, 4, 2, 8, shape[2], 4, 2, 4, 2)
    # expert, tile row, warp, r, row of 8, tile column, s, h, lane of 4, half -> ..., warp, row, lane, s, half, h, r
    nibbles = codes.permute(0, 1, 5, 2, 4, 8, 6, 9, 7, 3).reshape(*shape, CODE_BYTES, 2)
    words = (scales + (EXPONENT_OFFSET)).view(experts, n // TILE, 4, 2, 8, shape[2], 2).permute(0, 1, 5, 2, 4, 6, 3)
    return torch.cat([nibbles[..., 0] | nibbles[..., 1] << 4, words.reshape(*shape, TILE_BYTES - CODE_BYTES)], -1)


class Problem(NamedTuple):
    """Tokens [experts, 8, k], weights as a checkpoint has them and packed, and y [experts, 8, n] in float64."""

    x: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor
    packed: torch.Tensor
    right: torch.Tensor


@cache
def inputs(experts: int, n: int, k: int) -> Problem:
    """Return random tokens and weights, with scales from 1/4 to 2."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = partial(torch.randint, dtype=torch.uint8, device=DEVICE, generator=generator)
    blocks, scales = draw(0, 256, (experts, n, k // 2)), draw(125, 129, (experts, n, k // 32))
    x = torch.randn(experts, TOKENS, k, device=DEVICE, generator=generator).bfloat16()
    of = lambda e: x[e].double() @ dequantise_mxfp4(blocks[e], scales[e]).T
    return Problem(x, blocks, scales, pack(blocks, scales), torch.stack([of(e) for e in range(experts)]))


def _shape():
    return (SMALL_EXPERTS, SMALL_N, SMALL_K) if simulator.ENABLED else (EXPERTS, N, K)


def _ctas():
    return SMALL_SMS if simulator.ENABLED else torch.cuda.get_device_properties(0).multi_processor_count


def stage_bytes(warpgroups: int) -> int:
    """Return the bytes of a stage: tokens, then weight tiles; tokens must be aligned to 1024 bytes."""
    return -(-STAGE_TILES * (X_BYTES + warpgroups * TILE_BYTES) // 1024) * 1024


@cache
def _decoded(experts, n, k):
    return torch.empty(experts, n, k, dtype=torch.bfloat16, device=DEVICE)


def gemm(version, problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """Compute y by a version; out is bfloat16 [experts, 8, n]."""
    (experts, _, n), k = out.shape, problem.x.shape[2]
    if isinstance(version, First) or len(version) == 1:
        decode(version, problem, _decoded(experts, n, k))
        return _bf16(problem, _decoded(experts, n, k), out)
    version = Version(*version)
    tiles_of_expert = n // (TILE * version.warpgroups)
    tiles = experts * tiles_of_expert
    x = problem.x.view(-1, k).view(torch.uint8)
    given = TensorMap(x, (TOKENS, 2 * TILE), swizzle=128), problem.packed.view(-1), out
    sizes = tiles_of_expert, tiles, k // (STAGE_TILES * TILE), n
    shared = version.stages * (stage_bytes(version.warpgroups) + 16)
    threads = 128 * version.warpgroups + 32
    launch(version.kernel, min(tiles, _ctas()), threads, *given, *sizes, shared_bytes=shared)
    return out


def decode(version, problem: Problem, out: torch.Tensor) -> None:
    """Decode all weights of a problem to bfloat16."""
    words = problem.blocks.numel() // 4
    blocks = problem.blocks.view(torch.int32)
    launch(version[0], -(-words // 256), 256, blocks, problem.scales, out.view(torch.int32), words)


def _bf16(problem, weight, out):
    experts, tokens, k = problem.x.shape
    lengths = torch.full((experts,), tokens, dtype=torch.int32, device=DEVICE)
    ends = torch.arange(experts + 1, dtype=torch.int32, device=DEVICE) * tokens
    given = problem.x.view(-1, k), weight, lengths, ends, tokens
    group_gemm_bf16(*given, out=out.view(-1, out.shape[2]))
    return out


def wrong(out: torch.Tensor, right: torch.Tensor) -> str | None:
    """Return None, or which element is wrong: weights are exact, so only sums and the last rounding differ."""
    bad = ~((out.double() - right).abs() <= right.abs() * 2**-8 + 0.005 * right.square().mean().sqrt())
    if not bad.any():
        return None
    e, token, row = (int(index) for index in bad.nonzero()[0])
    found, should = float(out[e, token, row]), float(right[e, token, row])
    text = (
        f"y[{e}, {token}, {row}] is {found:.4g}, not {should:.4g}; {int(bad.sum())} of {bad.numel()} elements are wrong"
    )
    return f"{text}, of which {int(out.isnan().sum())} were never written" if out.isnan().any() else text


def _poisoned(*shape):
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)


def _out(problem):
    return _poisoned(*problem.right.shape)


def check(version) -> str | None:
    """Compare a version with the reference."""
    problem = inputs(*_shape())
    return wrong(gemm(version, problem, _out(problem)), problem.right)


def once(version):
    """Launch a version on the inputs whose work is counted."""
    problem = inputs(SMALL_EXPERTS, SMALL_N, SMALL_K)
    if len(version) == 1:
        return decode(version, problem, _decoded(SMALL_EXPERTS, SMALL_N, SMALL_K))
    return gemm(version, problem, _out(problem))


def timed(version) -> list:
    """Return the call that is timed."""
    problem = inputs(*_shape())
    return [partial(gemm, version, problem, _out(problem))]


REGISTERS, SPILLED, LOOP = "registers of a thread", "bytes spilled", "instructions for 32 weights"
CONVERSIONS, LOGIC, MULTIPLIES = "conversions", "shifts and logic", "multiplications"
SHOWN = REGISTERS, SPILLED, LOOP, CONVERSIONS, LOGIC, MULTIPLIES
_CLASSES = {
    CONVERSIONS: ("F2F", "F2FP", "I2F", "I2FP", "F2I"),
    LOGIC: ("SHF", "LOP3", "PRMT", "SGXT", "BFE", "LEA", "IMAD.SHL"),
    MULTIPLIES: ("FMUL", "HMUL2", "IMAD", "HFMA2"),
}
_IMADS = "IMAD.SHL", "IMAD.MOV"  # which only shift or copy
MMAS_OF_TILE = 4


def _name(code):
    """Return the instruction of machine code without its modifiers, but with those of `_IMADS`."""
    return next((name for name in _IMADS if code["opcode"].startswith(name)), code["opcode"].split(".")[0])


class _Lesson(CompiledLesson):
    """Its scores say what a thread does for 32 weights, its share of a weight tile."""

    shown, flops = SHOWN, 2 * EXPERTS * TOKENS * N * K

    def count(self, version, name):
        """Return the score of a version; the simulator counts."""
        with simulator.profile(self.gpu.upper()) as profile:
            self.run.once(version)
        kernel = profile[version[0].__name__]
        rows = {(PATH, "barriers"): kernel.critical_path.barriers, **self.rows(kernel)}
        return Score(name, rows, self.gpu.upper())

    def rows(self, kernel):
        """Return rows of what the compiler made of a profiled kernel; a thread of the first step decodes 8 weights."""
        require_compiler()
        sass = kernel.static.sass or ()
        loop = [_name(code) for code in sass[slice(*main_loop(sass))]]
        tiles = sum(name in ("HGMMA", "HMMA") for name in loop) / MMAS_OF_TILE or 8 / 32
        names = Counter(loop or map(_name, sass))
        numbers = [kernel.static.registers or 0, kernel.static.spilled_bytes or 0, round(names.total() / tiles)]
        numbers += [round(sum(names[each] for each in group) / tiles) for group in _CLASSES.values()]
        return {(COMPILER, row): number for row, number in zip(SHOWN, numbers, strict=True)}

    def fault(self, version):
        """Return what is wrong with a version, or None. Threads of the first step share nothing that could race."""
        if simulator.ENABLED and isinstance(version, First):
            return self._checked(version, 0)
        return super().fault(version)

    def _score(self, name, version):
        if version not in _counted:
            _counted[version] = super()._score(name, version)
        return Score(name, _counted[version].rows, self.gpu.upper())


_counted: dict[Any, Score] = {}  # a prediction counts a version, too
lesson = _Lesson(
    "w4_weights_ladder",
    Run(check, once, timed, kernels=lambda version: version[:1]),
    f"{__name__}:lesson",
    config={"num_experts": EXPERTS},
    size=SIZE,
    dtype="mxfp4",
    seeds=2,
)


# Bounds and predictions, in microseconds


WEIGHTS = EXPERTS * N * K
CODES = WEIGHTS * TILE_BYTES // TILE**2  # bytes


def copy_us(bytes_: float) -> float:
    """Return the time of moving bytes at the rate of a copy."""
    return bytes_ / chip_limits().copy_bandwidth * 1e6


def lower_bound() -> str:
    """Return the lower bound in words."""
    return (
        f"{EXPERTS} weights of {N} x {K} have {CODES / 1e6:.0f} MB of codes and scales. To read them takes "
        f"{copy_us(CODES):.0f} us at the rate of a copy; in bfloat16 it would be {copy_us(2 * WEIGHTS):.0f} us"
    )


def result() -> str:
    """Return where the lesson starts and ends, in numbers of records."""
    record = records.recorded("w4_weights_ladder")
    us = {row["step"]: row["kernel_us"]["median"] for row in records.select(record, size=SIZE)} if record else {}
    named = {"dequantise first": "The first version", "mma.sync": "the last one"}
    found = [f"{words} {records.format_us(us[name])} us" for name, words in named.items() if name in us]
    return lower_bound() + "." + (f"\nRecorded on an H200: {', '.join(found)}." if found else "")


def two_passes() -> float:
    """Return the time of reading codes, writing bfloat16 and reading it again at the rate of a copy."""
    return copy_us(CODES + 4 * WEIGHTS)


def issue_us(version) -> float:
    """Return the time of issuing a version's main loops, one instruction per clock and scheduler."""
    limits = chip_limits()
    instructions = lesson._score("", version).rows[COMPILER, LOOP]
    warps = 4 * WEIGHTS // TILE**2  # four warps decode a weight tile
    return instructions * warps / (4 * limits.sm_count * limits.boost_clock) * 1e6


def by_instructions(version) -> float:
    """Return the longer one of reading the codes and issuing the instructions."""
    return max(copy_us(CODES), issue_us(version))


def show_limits(versions: dict) -> Table:
    """Return a table: instructions for 32 weights, the time of issuing them, and that of reading the codes."""
    lines = []
    for name, version in versions.items():
        count = lesson._score(name, version).rows[COMPILER, LOOP]
        lines.append([name, f"{count}", records.format_us(issue_us(version)), records.format_us(copy_us(CODES))])
    return Table(["kernel", LOOP, "to issue them, us", "to read the codes, us"], lines)


def with_all_codes_read(before: str, share: float = 0.0) -> float | None:
    """Return the time of a step less all of what it takes beyond reading the codes, or leave a share of that."""
    us, least = lesson.steps[before].us, copy_us(CODES)
    return None if us is None else least + share * (us - least)


# Tables


def show_parts(versions: dict) -> Table:
    """Return a table of times of kernels that leave a part out, beside the whole one, interleaved."""
    us = lesson.times("parts", {name: timed(version) for name, version in versions.items()})
    lines = [[name, records.format_us(us[name]) if us else "not timed"] for name in versions]
    return Table(
        ["kernel", "us"], [*lines, ["reading the codes at the rate of a copy", records.format_us(copy_us(CODES))]]
    )


def columns_found(version, packed=None, count: int = 16) -> list[int]:
    """Return which column of the weight comes out for a token that is 1 in column c and 0 elsewhere, for each c.

    Row i of the weight is one in column i, and packed by `pack`, or by another function.
    """
    blocks = torch.zeros(1, 256, STAGE_TILES * TILE // 2, dtype=torch.uint8)
    for i in range(count):
        blocks[0, i, i // 2] = 2 << 4 * (i % 2)  # e2m1 code 2 is the number 1
    scales = torch.full((1, 256, STAGE_TILES * TILE // 32), 127, dtype=torch.uint8)
    x = torch.zeros(1, TOKENS, STAGE_TILES * TILE, dtype=torch.bfloat16)
    found = []
    blocks, scales = blocks.to(DEVICE), scales.to(DEVICE)
    packed = (packed or pack)(blocks, scales)
    for first in range(0, count, TOKENS):
        x.zero_()
        for token in range(TOKENS):
            x[0, token, first + token] = 1
        problem = Problem(x.to(DEVICE), blocks, scales, packed, torch.zeros(1, TOKENS, 256))
        y = gemm(version, problem, _poisoned(1, TOKENS, 256))
        found += [int(each.argmax()) for each in y[0].float()]
    return found


def show_columns(version, packed) -> Table:
    """Return a table of `columns_found`."""
    found = columns_found(version, packed)
    return Table(["column that is asked for", *map(str, range(len(found)))], [["column that comes", *map(str, found)]])


def in_rows(problem: Problem) -> SimpleNamespace:
    """Return a problem as grouped GEMMs take it: the tokens of all experts are rows of one matrix."""
    experts, tokens, k = problem.x.shape
    return SimpleNamespace(
        x=problem.x.view(-1, k),
        blocks=problem.blocks,
        scales=problem.scales,
        seqlens=torch.full((experts,), tokens, dtype=torch.int32, device=DEVICE),
        cu_seqlens=torch.arange(experts + 1, dtype=torch.int32, device=DEVICE) * tokens,
        average=tokens,
    )


def show_peers(version) -> Table:
    """Return a table of the last step beside others' kernels, timed interleaved.

    They are the package's, torch's with bfloat16 weights and those of `steps.peers`.
    """
    problem = inputs(*_shape())
    p, packed, out = in_rows(problem), pack_mxfp4(problem.blocks, problem.scales), _out(problem)
    given = p.x, packed, p.seqlens, p.cu_seqlens, p.average
    package = partial(group_gemm_mxfp4, *given, out=out.view(-1, out.shape[2]))
    decoded = torch.stack([dequantise_mxfp4(b, s).bfloat16() for b, s in zip(problem.blocks, problem.scales)])
    calls = {
        "this lesson": timed(version)[0],
        "the package's kernel": package,
        "torch.bmm, bfloat16 weights": partial(torch.bmm, problem.x, decoded.transpose(1, 2)),
    }
    for name, call in calls.items():
        if fault := wrong(call().view(problem.right.shape), problem.right):
            raise WrongResult(f"{name}: {fault}")
    own = {name: [call] for name, call in calls.items()}
    time = lambda others, versions: lesson.times("peers", own | others, versions)
    fault = lambda out: wrong(out.view(problem.right.shape), problem.right)
    found = beside_peers(lesson, "peers", time, "mxfp4", [p], fault)
    rate = lambda name: f"{CODES / found.us[name] / 1e6:.2f}" if name in found.us and "bfloat16" not in name else ""
    lines = [[name, found.cell(name), rate(name)] for name in (*calls, *found.versions)]
    return Table(["kernel", "us", "codes and scales, TB/s"], lines, about_peers(found))


_FORMATS = {"mxfp4": "MXFP4", "block": "FP8, block scales", "none": "bfloat16"}


def show_rows() -> Table:
    """Return a table of recorded grouped GEMMs of the package by number of tokens and format of the weights."""
    record, lines = records.recorded(GROUPED), []
    of = lambda scaling, rows: records.find(
        record,
        step="final",
        config=dict(scaling=scaling, num_groups=32, n=4096, k=7168, routing="uniform"),
        size=dict(rows=rows),
    )
    for rows in (32, 128, 512, 2048, 8192) if record else ():
        found = [of(scaling, rows) for scaling in _FORMATS]
        lines.append([f"{rows:,}", *(records.format_us(r["kernel_us"]["median"]) if r else "" for r in found)])
    return Table(["tokens, 32 experts", *(f"{name}, us" for name in _FORMATS.values())], lines)


_NO_GAIN = {
    "order of fragments": (
        "codes in the order of registers, while they are decoded by value",
        "Decoding takes nearly all of the time, so the loads do not matter. We do not know why it became slower.",
    )
}


def show_what_did_not_pay() -> Table:
    """Return a table of changes that an earlier version timed, and that gained nothing."""
    lines, record = [], records.recorded(EARLIER)
    for after, (change, why) in _NO_GAIN.items():
        row = record and records.find(record, step=after)
        lines.append([change, *([records.format_us(us) for us in row["compared_us"]] if row else ["", ""]), why])
    us = (record or {}).get("diagnosis", {}).get("products", {})
    if us:
        lines.append(
            [
                "wgmma with 8 instead of 32 columns, in a kernel that does nothing else",
                *(records.format_us(us[f"wgmma, {n} columns"]) for n in (32, 8)),
                "A quarter of the work, for far more than a quarter of the time: 64 rows of A come from registers "
                "in both cases.",
            ]
        )
    return Table(
        ["change (recorded by an earlier version, 4 tokens per expert)", "us before", "us after", "why"], lines
    )
