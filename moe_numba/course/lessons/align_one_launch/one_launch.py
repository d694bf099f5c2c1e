"""The lesson "Alignment in one launch": inputs, launches, checks, times, and what the records say."""

import inspect
from functools import cache, partial

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda

from moe_numba.align.reference import sizes
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.latencies import latencies
from moe_numba.course.bench.timing import rotating
from moe_numba.course.draw.phases import phase_bars
from moe_numba.course.lessons.align_one_launch import sizes as own_sizes
from moe_numba.course.lessons.align_one_launch.sizes import (
    BINS,
    BLOCK,
    COLUMNS,
    CTAS,
    DECODE,
    EXPERTS,
    FOUR,
    HEADER,
    MEANINGS,
    TOKENS,
    TOPK,
)
from moe_numba.course.steps.align_runs import poisoned, random_ids, wrong
from moe_numba.course.steps.kernel_phases import phases_of, until, without_earlier
from moe_numba.course.steps.lesson import Lesson, Run, Table, factory
from moe_numba.runtime.changed_source import plain_function
from moe_numba.runtime.launch import launch
from moe_numba.simulator.core.settings import settings

DEVICE = "cpu" if simulator.ENABLED else "cuda"
# A grid of a check in the simulator: an odd number of CTAs, whose chunks fill no whole warps. Where data races are
# detected with threads, which takes long, it is smaller.
_CHECKED_CTAS, _RACED_CTAS, _RACED_THREADS = 5, 2, max(256, -(-EXPERTS // 32) * 32)


# Launches and checks


@cache
def inputs(tokens: int) -> dict[str, torch.Tensor]:
    """Return routings that an alignment may get wrong, by name."""
    torch.manual_seed(0)
    ids = random_ids(tokens, EXPERTS, TOPK, DEVICE)
    in_turn = torch.arange(tokens * TOPK, dtype=torch.int32, device=DEVICE).reshape(-1, TOPK) % EXPERTS
    return {
        "random experts": ids,
        "the same number of assignments for each expert": in_turn,
        "all tokens choose the same experts": ids[:1].repeat(tokens, 1).contiguous(),
        "three of four experts have no assignment": (ids // 4 * 4 + 3).clamp(max=EXPERTS - 1).contiguous(),
        "one token": ids[:1].contiguous(),
    }


def launches(version: tuple) -> tuple:
    """Return a version's launches: (kernel, CTAs, threads, attributes of the launch). A single one may stand bare."""
    return version if isinstance(version[0], tuple) else (version,)


def _ctas(version):
    return max(ctas for _, ctas, *_ in launches(version))


def workspace_of(ctas: int) -> torch.Tensor:
    """Return what CTAs exchange counts through, zeroed once."""
    return torch.zeros(HEADER + max(ctas * COLUMNS, BINS), dtype=torch.int32, device=DEVICE)


def run(version: tuple, ids: torch.Tensor, outputs=None, workspace=None, ctas: int = 1 << 30, threads: int = 1024):
    """Launch the kernels of a version; return the outputs and what is not promised of them.

    A kernel gets the arguments that its parameters name. ``ctas`` and ``threads`` limit the grid.
    """
    outputs = poisoned(ids, EXPERTS, BLOCK) if outputs is None else outputs
    workspace = workspace_of(_ctas(version)) if workspace is None else workspace
    values = dict(zip(("sorted_token_ids", "expert_ids", "total_tokens_post_pad"), outputs, strict=True))
    values |= dict(topk_ids=ids, workspace=workspace, cumsum=workspace, block_size=BLOCK, numel=ids.numel())
    values["length"] = len(outputs[0])
    for kernel, most_ctas, most_threads, *attributes in launches(version):
        grid, block = min(ctas, most_ctas), min(threads, most_threads)
        values["chunk"] = -(-ids.numel() // grid)
        arguments = (values[name] for name in inspect.signature(plain_function(kernel)).parameters)
        launch(kernel, grid, block, *arguments, launch_bounds=block, **dict.fromkeys(attributes, True))
    return outputs if len(launches(version)) == 1 else (*outputs, "any order", "any tail")


def check(version: tuple, tokens: int, whole_grid: bool) -> str | None:
    """Compare a version with the reference on all inputs; return the first error.

    It runs twice with the same memory, because it may leave something behind there. Where data races are detected, the
    other launch has other inputs, so that it stores other values, and precedes a dependent one only.
    """
    grid = dict(ctas=1 << 30 if whole_grid else _CHECKED_CTAS)
    if races := bool(settings["races"]) and not whole_grid:
        grid = dict(ctas=_RACED_CTAS, threads=_RACED_THREADS)
    for name, ids in list(inputs(tokens).items())[: 1 if races else None]:
        outputs, workspace = poisoned(ids, EXPERTS, BLOCK), workspace_of(_ctas(version))
        if races and any("dependent" in attributes for _, _, _, *attributes in launches(version)):
            run(version, ids.flip(0).contiguous(), outputs, workspace, **grid)  # the next launch may overlap it
        for _ in range(1 if races else 2):
            if fault := wrong(run(version, ids, outputs, workspace, **grid), ids, EXPERTS, BLOCK):
                return f"{name}: {fault}"
    return None


def once(version: tuple, tokens: int):
    """Launch a version on the inputs whose work is counted."""
    return run(version, inputs(tokens)["random experts"])


def timed(version: tuple, tokens: int) -> list:
    """Return calls with different routings, which share outputs and workspace; one small call in the simulator."""
    tokens, most = (min(tokens, DECODE), _CHECKED_CTAS) if simulator.ENABLED else (tokens, 1 << 30)
    routings = rotating(partial(random_ids, tokens, EXPERTS, TOPK, DEVICE), 4 * tokens * TOPK)
    outputs, workspace = poisoned(routings[0], EXPERTS, BLOCK), workspace_of(_ctas(version))
    return [partial(run, version, ids, outputs, workspace, most) for ids in routings]


def _lesson(name, tokens, checked, whole_grid):
    return Lesson(
        "one_launch_ladder",
        Run(
            partial(check, tokens=checked, whole_grid=whole_grid),
            partial(once, tokens=tokens),
            partial(timed, tokens=tokens),
            kernels=lambda version: tuple(kernel for kernel, *_ in launches(version)),
        ),
        f"{__name__}:{name}",
        config=dict(num_experts=EXPERTS, topk=TOPK, block_size=BLOCK),
        size=dict(tokens=tokens),
        dtype="int32",
        seeds=2,
    )


four = _lesson("four", FOUR, FOUR, True)
lesson = _lesson("lesson", TOKENS, DECODE if simulator.ENABLED else TOKENS, not simulator.ENABLED)
decode = _lesson("decode", DECODE, DECODE, not simulator.ENABLED)


# What is recorded

_ABOUT = dict(size=dict(tokens=TOKENS), config=dict(num_experts=EXPERTS, topk=TOPK, block_size=BLOCK))


@cache
def _earlier() -> dict:
    """Return the record of earlier versions of these kernels, or an empty dict if its sizes are others."""
    record = records.recorded("align_one_launch_ladder")
    return record if record and records.find(record, step="0x5", **_ABOUT) else {}


def _earlier_times(name: str, labels: dict[str, str]) -> dict[str, float]:
    """Return recorded times of earlier versions by new labels; nothing if one is missing."""
    times = _earlier().get("diagnosis", {}).get(name, {})
    return {} if set(labels.values()) - set(times) else {new: times[old] for new, old in labels.items()}


def _us(step: str) -> float | None:
    """Return what the page has measured beside its steps, now or when its times were recorded; None if it has not."""
    row = lesson.diagnosed.get(step) or records.find(
        records.recorded("one_launch_ladder") or dict(rows=[]), step=step, **_ABOUT
    )
    return row["kernel_us"]["median"] if row else None


def less(before: str, us: float | None) -> float | None:
    """Say how much a step is predicted to save; return the time that it then takes, if that of ``before`` is known."""
    if us is None:
        return print("What the prediction is made from has not been timed with these kernels and sizes.")
    print(f"We predict that it takes {us:.2f} us less than {before}.")
    step = lesson.steps.get(before)
    return step.us - us if step and step.us else None


def l2_us() -> float:
    """Return the latency of a load from the L2 in microseconds, as recorded."""
    return latencies().ns["global_load_requests"] / 1000


def sort_us() -> float | None:
    """Return what the sort kernel of 0x5 takes, as lesson 03 has recorded it."""
    record = records.recorded("align_published_ladder") or dict(rows=[])
    row = records.find(record, step="phases of 0x5: sort", **_ABOUT)
    return row["kernel_us"]["median"] if row else None


def barrier_us() -> float | None:
    """Return what a barrier of the grid takes alone."""
    alone, none = _us("barrier alone: cuda.threadfence()"), _us("barrier alone: no barrier")
    return None if alone is None or none is None else alone - none


def exchange_us() -> float | None:
    """Return what the exchange saves: the counting, minus a barrier, a store and two loads one after another."""
    counting, barrier = phase_us("counting loop", "collect"), barrier_us()
    return None if counting is None or barrier is None else counting - barrier - 3 * l2_us()


def exchanged() -> dict[str, float | str | None]:
    """Return the phases of the steps before and after the exchange, and what follows, for a sentence."""
    times = dict(
        counted=phase_us("counting loop", "publish", "collect"),
        collected=phase_us("grid barrier", "publish", "collect"),
        wrote=phase_us("counting loop", "scan", "write"),
        writes=phase_us("grid barrier", "scan", "write"),
    )
    if None in times.values():
        return times | dict(so=None)
    if times["collected"] < times["counted"]:
        return times | dict(
            so="So the exchange takes less than counting everything: the estimate charges too much for it."
        )
    so = "So the estimate is right about the exchange, which takes longer than counting everything."
    if times["writes"] < times["wrote"]:
        so += " What the step gains, it gains in `scan` and `write`, with smaller CTAs."
    return times | dict(so=so)


def start_us() -> float | None:
    """Return what a dependent launch can hide: starting and clearing, minus the time of a dependent launch."""
    start, launched = phase_us("ranks per warp", "start"), _earlier_times("basics", {"": "empty, dependent"})
    return start - launched[""] if start and launched else None


def ranks_us() -> dict[str, float | None]:
    """Return what ranking took in earlier versions: before the exchange, and between its stores and its loads."""
    find = lambda name: _earlier_times(name, {"with": "with", "without": "without"})
    first, overlapped = find("ranks"), find("overlapped ranks")
    return dict(
        first=first["with"] - first["without"] if first else None,
        overlapped=overlapped["with"] - overlapped["without"] if overlapped else None,
    )


def conflicts_us(step: str) -> float | None:
    """Return what the bank conflicts of a CTA take in a step, at one clock each."""
    if step not in lesson.steps:
        return None
    found = lesson.steps[step].score.rows["all warps", "bank conflicts"]
    return found / CTAS / chip_limits().boost_clock * 1e6


def constants() -> Table:
    """Return a table of the names that the kernels use: value and meaning."""
    numbers = lambda names: ", ".join(str(getattr(own_sizes, name)) for name in names.split(", "))
    value = lambda names: f"{own_sizes.FULL:#x}" if names == "FULL" else numbers(names)
    return Table(["name", "value", "meaning"], [[names, value(names), text] for names, text in MEANINGS.items()])


def packed(a: int, b: int) -> dict[str, int]:
    """Return the most assignments of a CTA with counts of 16 bits, and what a word returns for two counts."""
    word = (a | b << 16) & 0xFFFFFFFF
    return {"most assignments": (1 << 16) - 1, "expert 0": word & 0xFFFF, "expert 1": word >> 16}


def result() -> str:
    """Return what the lesson builds, in numbers of the records."""
    align, ours = records.recorded("align"), records.recorded("one_launch_ladder")
    rows = [row for row in (ours or {}).get("rows", ()) if row["step"].startswith(f"{_ALLOCATIONS}: ")]
    copies = [row["kernel_us"]["median"] for row in records.select(dict(rows=rows), **_ABOUT)]
    if not align or not copies or not records.find(align, step="final", **_ABOUT):
        return "no times are recorded for these sizes"
    about = lambda tokens: dict(size=dict(tokens=tokens), config=_ABOUT["config"])
    us = lambda step, tokens: records.find(align, step=step, **about(tokens))["kernel_us"]["median"]
    times = "; ".join(
        f"{tokens} tokens {us('final', tokens):.2f} against {us('peer:sglang-v2', tokens):.2f} us"
        for tokens in (FOUR, DECODE, TOKENS)
    )
    return (
        f"Recorded on an H200, {TOKENS} tokens: version 0x5 as written below takes "
        f"{min(copies):.1f} to {max(copies):.1f} us, depending on where its buffers lie.\n"
        f"In one launch, the package against SGLang's kernel v2: {times}."
    )


_divided: dict[str, dict[str, float]] = {}  # step -> phase -> microseconds, of what the page has divided so far


def show_phases(make, holes_of: dict[str, tuple]):
    """Draw steps divided into phases, below those that the page has divided before.

    Parameters
    ----------
    make : factory
        Of the kernel; its comments such as ``# scan`` begin the phases.
    holes_of : dict
        Step -> what ``make`` takes.
    """
    _divided.update({name: _phases(name, make, holes) for name, holes in holes_of.items()})
    if not (found := {name: parts for name, parts in _divided.items() if parts}):
        return print("The phases have not been timed with these kernels and sizes.")
    source = "Recorded" if simulator.ENABLED else "Timed now"
    caption = f"{source}: copies of the kernel that end after each phase."
    return phase_bars(found, f"Where the time goes, {TOKENS} tokens", caption)


def _phases(name, make, holes):
    """Return phase -> microseconds of a step: from copies of the kernel that end after each phase."""
    _, ctas, threads, *attributes = lesson.steps[name].version
    phases, names = phases_of(make), inspect.unwrap(make).__globals__
    kernels = {phase: until(make, phase, names)(*holes) for phase in phases}
    if simulator.ENABLED:
        us = {phase: lesson.recorded_us(f"phases of {name}: {phase}", [kernel]) for phase, kernel in kernels.items()}
    else:
        versions = {phase: (kernel, ctas, threads, *attributes) for phase, kernel in kernels.items()}
        us = lesson.times(f"phases of {name}", {phase: timed(each, TOKENS) for phase, each in versions.items()})
    return {} if None in us.values() else without_earlier(us, phases)


def phase_us(step: str, *phases: str) -> float | None:
    """Return what phases of a step take together, if the page has divided it."""
    parts = _divided.get(step)
    return sum(parts[phase] for phase in phases) if parts else None


_ALLOCATIONS = "0x5 in other allocations"


def show_allocations(version: tuple) -> Table:
    """Time a version with its buffers in several allocations; return the lowest and the highest time."""
    us = lesson.times(_ALLOCATIONS, {f"copy {n}": timed(version, TOKENS) for n in range(4)})
    source = "recorded" if simulator.ENABLED else "measured"
    line = [str(len(us)), *map(records.format_us, (min(us.values()), max(us.values()))), source] if us else None
    return Table(["allocations of 0x5's buffers", "lowest us", "highest us", ""], [line] if line else [])


def show_variants(title: str, versions: dict[str, tuple], of: Lesson = lesson) -> Table:
    """Return a table of versions that are no steps: their times, where they are measured or recorded."""
    us = of.times(title, {name: timed(version, of.size["tokens"]) for name, version in versions.items()})
    return Table([title, "us"], [[name, records.format_us(us[name]) if us else "not timed"] for name in versions])


@factory
def _make_alone(barrier):
    @cuda.jit
    def alone(counter):
        barrier(counter)

    return alone


@cuda.jit(device=True)
def _no_barrier(counter):
    pass


def show_fences(barriers: dict) -> Table:
    """Return a table of kernels that do nothing but wait at a barrier, by the barrier's fence."""
    ctas, threads = (2, 64) if simulator.ENABLED else (CTAS, 512)
    kernels = {"no barrier": _no_barrier} | barriers
    calls = {
        name: partial(launch, _make_alone(barrier), ctas, threads, workspace_of(1), cooperative=True)
        for name, barrier in kernels.items()
    }
    us = lesson.times("barrier alone", calls)
    return Table(["fence", "us"], [[name, records.format_us(us[name]) if us else "not timed"] for name in kernels])


_NO_GAIN = {
    "tagged counts": (
        "A word carries one count and the launch number, and a thread reads one expert",
        "The barrier is gone, but there are twice the bytes, and eight rounds of loads one after another.",
    ),
    "two slots per thread": (
        "Half the CTAs, two assignments a thread",
        "A quarter of the counts to read, but half the SMs write the padding and the tail.",
    ),
}


def show_what_did_not_pay() -> Table:
    """Return a table of changes that gained nothing, with their recorded times."""
    lines = []
    for step, (change, why) in _NO_GAIN.items():
        if row := records.find_step(_earlier().get("rows", ()), step):
            lines.append([change, *map(records.format_us, row["compared_us"]), why])
    if early := _earlier_times("dependent launches", dict(late="after the exchange", early="at once")):
        why = "scan and write are long enough for the next kernel to clear its shared memory meanwhile."
        lines.append(
            ["The next kernel may start at once", *map(records.format_us, (early["late"], early["early"])), why]
        )
    return Table(["change", "us before", "us after", "why"], lines)


_SIZES = (1, FOUR, DECODE, 1024, TOKENS, 65536)


def show_peers() -> Table:
    """Return a table of the package and the compiled kernels of others, for several inputs."""
    record = records.recorded("align")
    lines = []
    for step in ["final", *records.peers(record)] if record else []:
        rows = [
            records.find(record, step=name, size=dict(tokens=tokens), config=_ABOUT["config"])
            for name, tokens in (*((step, tokens) for tokens in _SIZES), (f"{step}, one expert", TOKENS))
        ]
        if rows[-1] is not None:
            times = [records.format_us(row["kernel_us"]["median"]) if row else "" for row in rows]
            lines.append(
                ["the package" if step == "final" else step.removeprefix("peer:"), *times, rows[0].get("version", "")]
            )
    heads = [f"{tokens} token{'s' * (tokens > 1)}, us" for tokens in _SIZES]
    return Table(["kernel", *heads, f"{TOKENS}, all to one expert", "version"], lines)


def lower_bound() -> str:
    """Return the lower bound for a prompt, in words."""
    numel, launch_us = TOKENS * TOPK, _earlier_times("basics", {"": "empty, dependent"})
    num_bytes = 4 * (numel + sum(sizes(numel, BLOCK, EXPERTS)) + 1)
    us = num_bytes / chip_limits().copy_bandwidth * 1e6
    chain = (launch_us or {"": 0.0})[""] + 4 * l2_us()
    return (
        f"{num_bytes:,} bytes take {us:.2f} us at the rate of a copy. A dependent launch and four accesses to the L2 "
        f"one after another (load an id, publish a count, load the counts, store an assignment) take {chain:.2f} us."
    )
