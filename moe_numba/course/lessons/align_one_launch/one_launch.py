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
from moe_numba.course.lessons.align_one_launch.sizes import (
    BINS,
    BLOCK,
    COLUMNS,
    CTAS,
    DECODE,
    EXPERTS,
    FOUR,
    HEADER,
    TOKENS,
    TOPK,
)
from moe_numba.course.steps.align_runs import poisoned, random_ids, wrong
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


def _difference(name, longer, shorter):
    """Return the difference of two recorded times in microseconds; 0 if they are not recorded."""
    times = _earlier_times(name, dict(longer=longer, shorter=shorter))
    return times["longer"] - times["shorter"] if times else 0.0


def less(before: str, us: float) -> float | None:
    """Say how much a step is predicted to save; return the time that it then takes, if that of ``before`` is known."""
    print(f"We predict that it takes {us:.2f} us less than {before}.")
    step = lesson.steps.get(before)
    return step.us - us if step and step.us else None


def l2_us() -> float:
    """Return the latency of a load from the L2 in microseconds, as recorded."""
    return latencies().ns["global_load_requests"] / 1000


def sort_us() -> float:
    """Return what the sort kernel of 0x5 takes, as lesson 03 has recorded it; 0 if it has not."""
    record = records.recorded("align_published_ladder") or {}
    row = record and records.find(record, step="phases of 0x5: sort", **_ABOUT)
    return row["kernel_us"]["median"] if row else 0.0


def count_us() -> float:
    """Return what counting all ids takes in a loop such as that of step 2, as recorded."""
    return _difference("phases of drop bin", "count", "start")


def barrier_us() -> float:
    """Return what a barrier of the grid takes alone, as recorded."""
    return _difference("barrier alone", "barrier", "empty")


def start_us() -> float:
    """Return what a dependent launch can hide, as recorded: launch and clearing, minus the time of the launch."""
    started, launched = (
        _earlier_times("phases of ranks per warp", {"": "start"}),
        _earlier_times("basics", {"": "empty, dependent"}),
    )
    return started[""] - launched[""] if started and launched else 0.0


def conflicts_us(step: str) -> float:
    """Return what the bank conflicts of a CTA take in a step, at one clock each."""
    found = lesson.steps[step].score.rows["all warps", "bank conflicts"] if step in lesson.steps else 0
    return found / CTAS / chip_limits().boost_clock * 1e6


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


_PHASES = ("start", "count", "exchange", "scan", "write", "sort kernel")  # as in `draw.PHASES`
_DIVIDED = {  # step of this page -> of the record of earlier versions
    "0x5": "0x5",
    "one launch": "one launch",
    "counting loop": "drop bin",
    "grid barrier": "grid-wide barrier",
    "numbered counts": "packed counts",
    "ranks per warp": "ranks per warp",
}


def show_phases():
    """Draw the steps, divided into phases, as recorded of earlier versions; None if nothing is recorded."""
    found = {}
    for name, step in _DIVIDED.items():
        times, before = _earlier().get("diagnosis", {}).get(f"phases of {step}", {}), 0.0
        found[name] = {}
        for phase, until in times.items():
            found[name][phase], before = max(until - before, 0.0), max(until, before)
    if not all(found.values()):
        return print("no phases are recorded for these sizes")
    found["0x5"]["sort kernel"] = max(_difference("kernels of 0x5", "both", "main"), 0.0)
    caption = f"Recorded on {_earlier()['date'][:10]} of earlier versions of these kernels. "
    caption += "Not divided: the dependent launch, whose start overlaps with the kernel before it."
    return phase_bars(found, "Where the time goes in each step", caption, _PHASES)


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
