"""The lesson "Alignment as published": inputs, checks, times, exercises."""

from functools import cache, partial

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.align.reference import sizes
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.timing import rotating
from moe_numba.course.draw.phases import phase_bars
from moe_numba.course.grader import Wrong, expect_equal
from moe_numba.course.steps.align_runs import poisoned, random_ids, wrong
from moe_numba.course.steps.exercises import Break, Build
from moe_numba.course.steps.lesson import Lesson, Run, Table
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG, Verdict
from moe_numba.ptx.memory import atom_add_s32
from moe_numba.runtime.launch import launch

FULL = 0xFFFFFFFF  # all 32 lanes of a warp
EXPERTS, TOPK, BLOCK = 256, 8, 16  # DeepSeek-V3, blocks of 16 rows
THREADS = 1024  # of the main kernel's CTA
TOKENS = 4096  # of the times
_DEVICE = "cpu" if simulator.ENABLED else "cuda"
_CHECKED = 64 if simulator.ENABLED else TOKENS  # tokens of the checks
_COUNTED = TOKENS  # tokens of what the simulator counts


@cache
def inputs(tokens: int = _CHECKED) -> dict[str, torch.Tensor]:
    """Return routings that an alignment may get wrong, by name."""
    torch.manual_seed(0)
    ids = random_ids(tokens, EXPERTS, TOPK, _DEVICE)
    in_turn = torch.arange(tokens * TOPK, dtype=torch.int32, device=_DEVICE).reshape(-1, TOPK) % EXPERTS
    return {
        "random experts": ids,
        "the same number of slots for each expert": in_turn,
        "all tokens choose the same experts": ids[:1].repeat(tokens, 1).contiguous(),
        "three of four experts have no slot": (ids // 4 * 4 + 3).contiguous(),
        "one token": ids[:1].contiguous(),
    }


def run(version, ids: torch.Tensor, outputs=None, cumsum=None) -> tuple:
    """Launch the main kernel, and the sort kernel behind it; return the outputs and what is not promised of them."""
    main, sort, ctas = version
    outputs = poisoned(ids, EXPERTS, BLOCK) if outputs is None else outputs
    cumsum = torch.full((EXPERTS + 1,), -7, dtype=torch.int32, device=ids.device) if cumsum is None else cumsum
    numel, length = ids.numel(), len(outputs[0])
    launch(main, ctas, THREADS, ids, *outputs, cumsum, BLOCK, numel, length)
    launch(sort, -(-numel // 256), 256, ids, outputs[0], cumsum, numel)
    return *outputs, "any order", "any tail"


def check(version) -> str | None:
    """Compare a version with the reference on all inputs; return the first error."""
    for name, ids in inputs().items():
        if fault := wrong(run(version, ids), ids, EXPERTS, BLOCK):
            return f"{name}: {fault}"
    return None


def timed(version):
    """Return calls with different routings, each with its own outputs."""
    cumsum = torch.empty(EXPERTS + 1, dtype=torch.int32, device=_DEVICE)
    make = partial(random_ids, TOKENS, EXPERTS, TOPK, _DEVICE)
    routings = rotating(make, 4 * TOKENS * TOPK) if not simulator.ENABLED else [make()]
    outputs = poisoned(routings[0], EXPERTS, BLOCK)
    return [partial(run, version, ids, outputs, cumsum) for ids in routings]


def once(version):
    """Launch a version on the inputs whose work is counted."""
    return run(version, inputs(_COUNTED)["random experts"])


lesson = Lesson(
    "align_published_ladder",
    Run(check, once, timed, kernels=lambda version: version[:2]),
    f"{__name__}:lesson",
    config=dict(num_experts=EXPERTS, topk=TOPK, block_size=BLOCK),
    size=dict(tokens=TOKENS),
    dtype="int32",
)


# Exercises


@cuda.jit(device=True)
def warp_scan(x):
    """The lesson's own answer: the inclusive scan of a warp."""
    lane, distance = cuda.threadIdx.x & 31, 1
    while distance < 32:
        below = cuda.shfl_up_sync(FULL, x, distance)
        if lane >= distance:
            x = int32(x + below)
        distance *= 2
    return x


@cuda.jit(device=True)
def take_places(next_place, expert):
    """The lesson's own answer: one atomic operation for all lanes of a warp with the same expert."""
    lane = cuda.threadIdx.x & 31
    same = uint32(cuda.match_any_sync(FULL, expert))
    lowest = cuda.ffs(same) - 1
    first = int32(0)
    if lane == lowest:
        first = atom_add_s32(next_place, expert, int32(cuda.popc(same)))
    first = cuda.shfl_sync(FULL, first, lowest)
    return int32(first + cuda.popc(same & uint32((uint32(1) << uint32(lane)) - uint32(1))))


def _scan_kernel(answer):
    @cuda.jit
    def around(x, out):
        out[cuda.threadIdx.x] = answer(x[cuda.threadIdx.x])

    return around


def _scan(kernel, lanes=64):
    x, out = np.arange(lanes, dtype=np.int32) % 7, np.full(lanes, -7, np.int32)
    kernel[1, lanes](x, out)
    return x, out


def _test_scan(answer):
    x, out = _scan(_scan_kernel(answer))
    expect_equal("the scan", out, x.reshape(-1, 32).cumsum(1).ravel())


def _places_kernel(answer):
    @cuda.jit
    def around(ids, next_place, places):
        i = cuda.grid(1)
        places[i] = answer(next_place, ids[i])

    return around


_IDS = np.concatenate([np.arange(64) % 4, np.zeros(32), np.arange(32)]).astype(np.int32)
_FIRST = np.bincount(_IDS, minlength=32).cumsum() - np.bincount(_IDS, minlength=32)


def _take(kernel):
    places, next_place = np.full(len(_IDS), -1, np.int32), _FIRST.astype(np.int32)
    kernel[2, 64](_IDS, next_place, places)
    return places, next_place


def _test_places(answer):
    places, next_place = _take(_places_kernel(answer))
    if sorted(places) != list(range(len(_IDS))):
        place = next(p for p in range(len(_IDS)) if (places == p).sum() != 1)
        raise Wrong(f"place {place} is taken {(places == place).sum()} times, not once")
    expect_equal("the expert of each place", _IDS[np.argsort(places)], np.sort(_IDS))
    expect_equal("next_place at the end", next_place, _FIRST + np.bincount(_IDS, minlength=32))


SCAN = Build(
    "warp scan",
    "the sum of x over lanes 0 to this one",
    own=warp_scan,
    test=_test_scan,
    profile=lambda answer: count(_scan_kernel(answer), _scan, answer),
    counter="shuffles",
    par=5,
    par_is_bound=True,
    forbidden={
        "shared_load_requests": "it exchanges values through shared memory",
        "votes": "it uses votes; the exercise is about shuffles",
    },
    over_par="What could a lane learn from lane - 16 in one step?",
    hint="Add the value of the lane 1 below, then of the lane 2 below, then 4, 8 and 16: only if there is such a lane.",
    home=f"{__name__}:SCAN",
)
PLACES = Build(
    "places",
    "a place of its own for each lane, with one atomic operation per distinct expert of the warp",
    own=take_places,
    test=_test_places,
    profile=lambda answer: count(_places_kernel(answer), _take, answer),
    counter="contention",
    unit="lane of a warp adding to an address at once",
    par=1,
    forbidden={"shared_load_requests": "it uses shared memory; a warp needs none"},
    over_par="Which one lane of those with the same expert should add, and how much?",
    hint="match_any gives the lanes with my expert; the lowest of them adds popc of that mask, and shfl shares what "
    "came back. The bits below my lane are my rank.",
    home=f"{__name__}:PLACES",
)


@cuda.jit(device=True)
def sum_below(inclusive):
    """The function of the page that a barrier is removed from."""
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    if warp == 0:
        sums[lane] = warp_scan(sums[lane] if lane < warps else int32(0))
    cuda.syncthreads()
    return sums[warp - 1] if warp > 0 else int32(0)


def _below(answer, threads=128, experts=64):
    """Return whether the starts of 64 experts are right, with 128 threads."""

    @cuda.jit
    def around(x, out):
        tid = cuda.threadIdx.x
        value = x[tid] if tid < experts else int32(0)
        below = answer(warp_scan(value))
        if tid < experts:
            out[tid] = below

    x, out = np.arange(threads, dtype=np.int32), np.full(experts, -7, np.int32)
    around[1, threads](x, out)
    return bool((out == np.repeat([0, x[:32].sum()], 32)).all())


def _passes(answer, seed):
    with simulator.seed(seed):
        return _below(answer)


def _race(answer):
    try:
        with simulator.races():
            _below(answer)
    except simulator.DataRace as error:
        return str(error)
    return None


BARRIER = Break("one barrier less", sum_below, _passes, _race, home=f"{__name__}:BARRIER")


class Culprit:
    """Choose the variants of the sort kernel that are much faster, then see their times."""

    def check(self, variants: dict, choice=...) -> Verdict:
        """Time the variants, or look their times up, and compare."""
        ids = inputs(TOKENS)["random experts"]
        outputs, cumsum = poisoned(ids, EXPERTS, BLOCK), torch.zeros(33 * EXPERTS, dtype=torch.int32, device=_DEVICE)
        length = ids.numel() // (64 if simulator.ENABLED else 1)
        mask = (1 << (len(outputs[0]).bit_length() - 1)) - 1
        calls = {
            name: partial(launch, kernel, -(-length // 256), 256, ids, outputs[0], cumsum, length, mask)
            for name, kernel in variants.items()
        }
        us = lesson.times("sort kernel", calls)
        if choice is ... or not us:
            return Verdict("culprit", OPEN, "no choice yet: A, B, C, or several" if us else "no times are recorded")
        whole = us["as it is"]
        fast = "".join(name[0] for name in variants if name != "as it is" and us[name] < 0.7 * whole)
        times = ", ".join(f"{name} {us[name]:.2f} us" for name in variants)
        text = f"you chose {choice}; {fast} are much faster: {times}. " + _CULPRIT
        return Verdict("culprit", RIGHT if set(choice) == set(fast) else WRONG, text)


_CULPRIT = (
    "C has as many atomic operations and scattered stores as the kernel as it is. So neither takes the time, but that "
    "all counters lie in a few cache lines: the L2 serves the operations on a line one after another."
)


class Attack:
    """Choose the two phases to work on first, from the bars of all versions."""

    def check(self, first=..., second=...) -> Verdict:
        """Compare the choice with what the authors gained, and with what remained."""
        phases = published_phases()
        if ... in (first, second) or not phases:
            return Verdict("attack", OPEN, "no choice yet: name two of " + ", ".join(ORDER))
        if unknown := {first, second} - set(ORDER):
            return Verdict("attack", WRONG, f"{sorted(unknown)} is no phase; phases are {', '.join(ORDER)}")
        old, new = phases["0x1"], phases["0x5"]
        largest = sorted(old, key=old.get, reverse=True)
        shares = ", ".join(f"{phase} {old[phase]:.1f} -> {new.get(phase, 0):.1f} us" for phase in largest)
        state = RIGHT if [first, second] == largest[:2] else WRONG
        return Verdict("attack", state, f"the two largest are {largest[0]} and {largest[1]}. From 0x1 to 0x5: {shares}")


class exercises:
    """The exercises of the page."""

    attack, warp_scan, one_barrier_less, sort_culprit, take_places = Attack(), SCAN, BARRIER, Culprit(), PLACES


# Recorded times of the published versions

ORDER = ["fill", "count", "scan", "expert_ids", "sort"]
_VERSIONS = {
    "0x1": "0x1 baseline",
    "0x2": "0x2 padding inside",
    "0x3": "0x3 binary search",
    "0x4": "0x4 two-level scan",
    "0x5": "0x5 parallel fill",
}


@cache
def published_phases() -> dict[str, dict[str, float]]:
    """Return {version: {phase: microseconds}}, as recorded on an H200."""
    record = records.recorded("align_ladder")
    rows = {name: record and records.find(record, step=step) for name, step in _VERSIONS.items()}
    return {name: row["phases_us"] for name, row in rows.items() if row and "phases_us" in row}


def show_phases():
    """Draw the five versions, divided into phases."""
    return phase_bars(published_phases(), "Five versions: where the time goes", phases=ORDER)


_NO_GAIN = {  # step of the record -> what it changed, and why it gains nothing
    "0x2 padding inside": (
        "0x2: the main kernel fills the padding, four elements a store",
        "The launch of the fill disappears, but all stores now leave through one SM. Wide stores do not help: the "
        "lanes of a warp store to neighbouring addresses either way, so the sectors are the same.",
    ),
    "0x3 binary search": (
        "0x3: a thread per block searches its expert",
        "Eight dependent shared loads a block; it pays only if a few experts own most blocks.",
    ),
    "0x4, one pass": (
        "0x4: one scan instead of two",
        "SGLang scans twice, first for the total. By then the scan takes under 3 % of the time.",
    ),
    "0x4, filling first": (
        "0x5: fill first, in the same CTA",
        "The stores hardly overlap with counting, and no longer overlap with expert_ids.",
    ),
}


def show_what_did_not_pay() -> "Table":
    """Return a table of changes of the published versions, with their times."""
    record = records.recorded("align_ladder")
    lines = []
    for step, (change, why) in _NO_GAIN.items():
        row = record and records.find(record, step=step)
        if row and "compared_us" in row:
            lines.append([change, *map(records.format_us, row["compared_us"]), why])
    return Table(["change", "us before", "us after", "why"], lines)


def show_peers() -> "Table":
    """Return a table of the compiled kernels for the same tokens, over several allocations of their buffers."""
    record = records.recorded("align")
    wanted = dict(size=dict(tokens=TOKENS), config=dict(num_experts=EXPERTS, topk=TOPK, block_size=BLOCK))
    rows = [records.find(record, step=step, **wanted) for step in ["final", *records.peers(record)]] if record else []
    lines = [
        [
            row["step"].removeprefix("peer:"),
            records.format_us(row["kernel_us"]["median"]),
            *(records.format_us(us) for us in row.get("allocations_us", ())),
            row.get("version", ""),
        ]
        for row in rows
        if row and "kernel_us" in row
    ]
    spread = ["lowest", "highest"] if lines and len(lines[0]) == 5 else []
    return Table(["kernel", "us", *spread, "version"], lines)


def without_fill() -> float | None:
    """Return the time of version 0x4 without its phase `fill`, if both are known."""
    step, phases = lesson.steps["0x4 two levels"], published_phases()
    return step.us - phases["0x4"]["fill"] if step.us and phases else None


def result() -> str:
    """Return what the lesson builds, in numbers of the records."""
    ladder, align = records.recorded("align_ladder"), records.recorded("align")
    wanted = dict(size=dict(tokens=TOKENS), config=dict(num_experts=EXPERTS, topk=TOPK, block_size=BLOCK))
    us = lambda record, step: records.format_us(records.find(record, step=step, **wanted)["kernel_us"]["median"])
    if ladder is None or align is None:
        return "no times are recorded"
    return (
        f"On an H200, {TOKENS} tokens: version 0x1 takes {us(ladder, '0x1 baseline')} us and 0x5 "
        f"{us(ladder, '0x5 parallel fill')} us as we port them to Numba; SGLang's compiled kernel takes "
        f"{us(align, 'peer:sglang-aot')} us.\nThe {lower_bound()}. The next lesson ends at {us(align, 'final')} us."
    )


def concentrated(versions: dict) -> Table:
    """Return a table of versions that route all tokens to the same experts."""
    ids, cumsum = inputs(TOKENS)["all tokens choose the same experts"], torch.empty(EXPERTS + 1, dtype=torch.int32)
    outputs, cumsum = poisoned(ids, EXPERTS, BLOCK), cumsum.to(_DEVICE)
    if simulator.ENABLED:
        ids = ids[:64].contiguous()
    us = lesson.times("same experts", {n: partial(run, v, ids, outputs, cumsum) for n, v in versions.items()})
    return Table(["all tokens choose the same experts", "us"], [[name, records.format_us(us[name])] for name in us])


def lower_bound() -> str:
    """Return the lower bound of a step, in words."""
    numel, length = TOKENS * TOPK, sizes(TOKENS * TOPK, BLOCK, EXPERTS)[0]
    num_bytes = 4 * (numel + length + length // BLOCK + 1)
    us = num_bytes / chip_limits().copy_bandwidth * 1e6
    return f"{num_bytes:,} bytes take {us:.2f} us at the rate of a copy"
