"""The lesson "Alignment as published": inputs, check, steps, and what the page shows of recorded times."""

from functools import cache, partial

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from moe_numba.align.reference import sizes
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.timing import rotating
from moe_numba.course.draw.phases import phase_bars
from moe_numba.course.lessons.align import ports
from moe_numba.course.lessons.align.ports import PORTS
from moe_numba.course.lessons.align.sizes import BLOCK, EXPERTS, LINE, SPREAD, THREADS, TOKENS, TOPK
from moe_numba.course.steps.align_runs import poisoned, random_ids, wrong
from moe_numba.course.steps.kernel_phases import phases_of, until, without_earlier
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Lesson, Run, Table
from moe_numba.runtime.launch import launch

DEVICE = "cpu" if simulator.ENABLED else "cuda"
_CHECKED = 64 if simulator.ENABLED else TOKENS  # tokens of the checks
ABOUT = dict(config=dict(num_experts=EXPERTS, topk=TOPK, block_size=BLOCK), size=dict(tokens=TOKENS))


@cache
def inputs(tokens: int = _CHECKED) -> dict[str, torch.Tensor]:
    """Return routings that an alignment may get wrong, by name."""
    torch.manual_seed(0)
    ids = random_ids(tokens, EXPERTS, TOPK, DEVICE)
    in_turn = torch.arange(tokens * TOPK, dtype=torch.int32, device=DEVICE).reshape(-1, TOPK) % EXPERTS
    return {
        "random experts": ids,
        "the same number of assignments for each expert": in_turn,
        "all tokens choose the same experts": ids[:1].repeat(tokens, 1).contiguous(),
        "three of four experts have no assignment": (ids // 4 * 4 + 3).contiguous(),
        "one token": ids[:1].contiguous(),
    }


_COUNTERS = SPREAD + LINE * EXPERTS  # elements: the starts, and a cache line for each expert's counter


def run(version, ids: torch.Tensor, outputs=None, cumsum=None) -> tuple:
    """Launch the main kernel, and the sort kernel after it; return the outputs and what is not promised of them."""
    main, sort, ctas = version
    outputs = poisoned(ids, EXPERTS, BLOCK) if outputs is None else outputs
    cumsum = torch.full((_COUNTERS,), -7, dtype=torch.int32, device=ids.device) if cumsum is None else cumsum
    numel, length = ids.numel(), len(outputs[0])
    launch(main, ctas, THREADS, ids, *outputs, cumsum, BLOCK, numel, length)
    launch(sort, -(-numel // 256), 256, ids, outputs[0], cumsum, numel)
    return *outputs, "any order", "any tail"


def check(version, run=run) -> str | None:
    """Compare a version with the reference on all inputs; return the first error."""
    for name, ids in inputs().items():
        if fault := wrong(run(version, ids), ids, EXPERTS, BLOCK):
            return f"{name}: {fault}"
    return None


def _buffers(ids):
    """Return outputs and counters, allocated once: where they lie changes the time of a kernel."""
    return poisoned(ids, EXPERTS, BLOCK), torch.zeros(_COUNTERS, dtype=torch.int32, device=DEVICE)


@cache
def timed_buffers():
    """Return the buffers that all timed kernels of the page share."""
    return _buffers(inputs(TOKENS)["random experts"])


def timed(version):
    """Return calls with different routings and the same buffers."""
    make = partial(random_ids, TOKENS, EXPERTS, TOPK, DEVICE)
    return [partial(run, version, ids, *timed_buffers()) for ids in rotating(make, 4 * TOKENS * TOPK)]


def once(version):
    """Launch a version on the inputs whose work is counted."""
    return run(version, inputs(TOKENS)["random experts"])


lesson = Lesson(
    "align_published_ladder",
    Run(check, once, timed, kernels=lambda version: version[:2]),
    f"{__name__}:lesson",
    **ABOUT,
    dtype="int32",
)


# The ports of the published versions: timed on a GPU, otherwise recorded


def _kernel(name):
    return ports.make_port(*PORTS[name].arguments)


def run_port(name: str, ids: torch.Tensor, outputs=None, cumsum=None) -> tuple:
    """Run a published version as `run` does."""
    if PORTS[name].fill == "apart":
        outputs = poisoned(ids, EXPERTS, BLOCK) if outputs is None else outputs
        outputs[0].fill_(ids.numel())
    ctas = 2 if PORTS[name].fill == "second CTA" else 1
    return run((_kernel(name), ports.sort_slots, ctas), ids, outputs, cumsum)


def _times(name, calls, kernels):
    """Return label -> microseconds, timed now or recorded for exactly these kernels; empty if neither is known."""
    if not simulator.ENABLED:
        _check_ports()
        return lesson.times(name, calls)
    found = {label: lesson.recorded_us(f"{name}: {label}", kernels[label]) for label in calls}
    return {} if None in found.values() else found


@cache
def _check_ports():
    for name in PORTS:
        if fault := check(name, run_port):
            raise WrongResult(f"the port of {name}: {fault}")


def _main_call(kernel, routing):
    ids, (outputs, cumsum) = inputs(TOKENS)[routing], timed_buffers()
    return partial(launch, kernel, 1, THREADS, ids, *outputs, cumsum, BLOCK, ids.numel(), len(outputs[0]))


def _source():
    return "recorded" if simulator.ENABLED else "timed now"


def _phases(name):
    """Return phase -> microseconds of a version: from copies of the main kernel that end after each phase."""
    port, make, ids = PORTS[name], ports.make_port, inputs(TOKENS)["random experts"]
    absent = {"fill first": "first", "fill": "last"}
    phases = [phase for phase in phases_of(make) if absent.get(phase, port.fill) == port.fill]
    kernels = {phase: until(make, phase, vars(ports))(*port.arguments) for phase in phases}
    outputs, cumsum = timed_buffers()
    numel, mask = ids.numel(), (1 << (len(outputs[0]).bit_length() - 1)) - 1
    calls = {"apart": partial(outputs[0].fill_, numel)} if port.fill == "apart" else {}
    calls |= {phase: _main_call(kernel, "random experts") for phase, kernel in kernels.items()}
    calls["sort"] = partial(launch, ports.sort_replayed, -(-numel // 256), 256, ids, outputs[0], cumsum, numel, mask)
    if not simulator.ENABLED:
        run_port(name, ids, outputs, cumsum)  # the counters that the sort kernel starts from
    launched = {phase: [kernel] for phase, kernel in kernels.items()} | {"apart": [], "sort": [ports.sort_replayed]}
    if not (us := _times(f"phases of {name}", calls, launched)):
        return {}
    fills, parts = ("apart", "fill first", "fill"), without_earlier(us, phases)
    return {("fill" if phase in fills else phase): round(time, 2) for phase, time in parts.items()}


ORDER = ["fill", "count", "scan", "expert_ids", "sort"]
VERSIONS = "0x1", "0x2", "0x3", "0x4", "0x5"


@cache
def published_phases() -> tuple[dict[str, dict[str, float]], str]:
    """Return {version: {phase: microseconds}}, empty if one is not known, and where they come from."""
    found = {name: _phases(name) for name in VERSIONS}
    return (found if all(found.values()) else {}), _source()


def show_phases():
    """Draw the five versions, divided into phases."""
    phases, source = published_phases()
    if not phases:
        return "not timed with these sizes"
    return phase_bars(phases, f"Five versions, {TOKENS} tokens: where the time goes", source.capitalize(), ORDER)


_SAME = "all tokens choose the same experts"
_COUNTING = {  # label -> how it counts, and the routing
    "0x1": (ports.count_in_rows, "random experts"),
    _SAME: (ports.count_in_rows, _SAME),
    "no atomic additions": (ports.count_without_atomics, "random experts"),
    "an index without rows": (ports.count_without_rows, "random experts"),
    "and a thread clears each counter": (ports.count_slots, "random experts"),
}


@cache
def _counting():
    """Return {variant of the phase `count`: microseconds}, with the launch, and the source; empty if one is unknown."""
    make, rest = until(ports.make_port, "count", vars(ports)), PORTS["0x2"].arguments[1:]
    kernels = {label: make(counts, *rest) for label, (counts, _) in _COUNTING.items()}
    calls = {label: _main_call(kernels[label], ids) for label, (_, ids) in _COUNTING.items()}
    return _times("counting", calls, {label: [kernel] for label, kernel in kernels.items()}), _source()


def additions_us() -> dict[str, float | None]:
    """Return what counting takes with and without atomic additions, for a sentence."""
    us = _counting()[0]
    return dict(with_us=us.get("0x1"), without_us=us.get("no atomic additions"))


def show_counting() -> Table:
    """Return a table of variants of the phase `count`, with the launch."""
    us, source = _counting()
    lines = [[label, records.format_us(us[label]) if us else ""] for label in _COUNTING]
    return Table([f"counting ({source if us else 'not timed'})", "us"], lines)


@cache
def published_times() -> tuple[dict[str, float], str]:
    """Return {version: microseconds} of all ports, interleaved, and where they come from."""
    ids = inputs(TOKENS)["random experts"]
    calls = {name: partial(run_port, name, ids, *timed_buffers()) for name in PORTS}
    return _times("published", calls, {name: [_kernel(name), ports.sort_slots] for name in PORTS}), _source()


_NO_GAIN = {  # versions before and after -> what changes, and why it gains next to nothing
    ("0x1", "0x2"): (
        "0x2: the main kernel fills the padding, four elements a store",
        "The launch of the fill disappears, but all stores now leave through one SM. Wide stores do not help: the "
        "lanes of a warp store to neighbouring addresses either way, so the sectors are the same.",
    ),
    ("0x3 without search", "0x3"): (
        "0x3: a thread per block searches its expert",
        "Each block needs a chain of dependent shared loads, and the warps together issue far more instructions. It "
        "pays only if a few experts own most blocks.",
    ),
    ("0x4", "0x4, one pass"): (
        "0x4: one scan instead of two",
        "SGLang scans twice, first for the total. But in 0x4 the scan is the shortest phase.",
    ),
    ("0x4, one pass", "0x4, filling first"): (
        "0x5: fill first, in the same CTA",
        "The stores hardly overlap with counting, and no longer overlap with expert_ids.",
    ),
}


def show_what_did_not_pay() -> Table:
    """Return a table of changes of the published versions, with their times."""
    us, source = published_times()
    lines = [
        [change, records.format_us(us[before]), records.format_us(us[after]), why]
        for (before, after), (change, why) in _NO_GAIN.items()
        if before in us and after in us
    ]
    return Table([f"change ({source})", "us before", "us after", "why"], lines)


# The page's own versions


def concentrated(versions: dict) -> Table:
    """Return a table of versions, timed when all tokens choose the same experts, with the factor over the first."""
    ids = inputs(TOKENS)[_SAME]
    calls = {name: partial(run, version, ids, *timed_buffers()) for name, version in versions.items()}
    if simulator.ENABLED:  # one is known without the others
        us = {}
        for name, call in calls.items():
            us |= lesson.times("same experts", {name: call})
    else:
        us = lesson.times("same experts", calls)
    first = us.get(next(iter(versions)))
    lines = [
        [name, records.format_us(us[name]), f"{first / us[name]:.2f}"]
        if first and name in us
        else [name, "not timed", ""]
        for name in versions
    ]
    return Table([_SAME, "us", "times as fast"], lines)


def without_fill() -> float | None:
    """Return the time of the step before the second CTA without its phase `fill`, if both are known."""
    step, phases = lesson.steps.get("one barrier"), published_phases()[0]
    return step.us - phases["0x4"]["fill"] if step and step.us and phases else None


def with_spread_counters() -> float | None:
    """Return the time of 0x5 minus what variant C saves of the sort kernel, if all are known."""
    step, record = lesson.steps.get("0x5 second CTA"), records.recorded("align_published_ladder") or dict(rows=[])
    rows = [
        lesson.diagnosed.get(f"sort kernel: {label}") or records.find(record, step=f"sort kernel: {label}", **ABOUT)
        for label in ("as it is", "C: a cache line per counter")
    ]
    if not step or not step.us or None in rows:
        return None
    whole, spread = (row["kernel_us"]["median"] for row in rows)
    return step.us - (whole - spread)


def saved(name: str, before: str) -> str:
    """Return in words how much faster a step is than another; if a reader's answer has no time, with recorded ones."""
    us, then = (lesson.steps[each].us if each in lesson.steps else None for each in (name, before))
    whose = ""
    if not us or not then:
        us, then, whose = _recorded_us(name), _recorded_us(before), " (with the lesson's own answers)"
    if not us or not then:
        return "has not been timed"
    if abs(then - us) < 0.01 * then:
        return f"takes as long as before{whose}, {records.format_us(then)} and {records.format_us(us)} us: no gain here"
    return f"takes {records.format_us(us)} us instead of {records.format_us(then)} us{whose}"


def _recorded_us(step):
    record = records.recorded("align_published_ladder")
    row = record and records.find(record, step=step, **ABOUT)
    return row["kernel_us"]["median"] if row else None


COPIES = 8


def show_allocations(versions: dict) -> Table:
    """Return a table of versions with their buffers in several allocations: the lowest and the highest time."""
    ids, lines = inputs(TOKENS)["random experts"], []
    for name, version in versions.items():
        title, labels = f"allocations of {name}", [f"copy {n}" for n in range(COPIES)]
        if simulator.ENABLED:
            us = [lesson.recorded_us(f"{title}: {label}", version[:2]) for label in labels]
        else:
            gaps, calls = [], {}
            for number, label in enumerate(labels):
                calls[label] = partial(run, version, ids, *_buffers(ids))
                gaps.append(torch.empty((3 << 20) + 1000 * number, dtype=torch.uint8, device=DEVICE))
            us = list(lesson.times(title, calls).values())
        lines.append([name, *_range(us)])
    return Table([f"buffers in several places ({_source()})", "lowest us", "highest us"], lines)


def _range(us):
    return ("not timed", "") if not us or None in us else tuple(map(records.format_us, (min(us), max(us))))


def moved_us() -> dict[str, float | None]:
    """Return the recorded range of 0x5 with only its outputs, or only its counters, in other allocations."""
    record = records.recorded("align_one_launch_ladder")
    known = record and records.find(record, step="0x5", **ABOUT)
    times, found = record["diagnosis"]["buffers of 0x5"] if known else {}, {}
    for what in ("outputs", "counters"):
        us = [time for label, time in times.items() if label.startswith(f"{what} of")]
        found |= {f"{what}_low": min(us, default=None), f"{what}_high": max(us, default=None)}
    return found


def _peer_us(name):
    record = records.recorded("align")
    row = record and records.find(record, step=f"peer:{name}", **ABOUT)
    return row["kernel_us"]["median"] if row and "kernel_us" in row else None


def show_peers() -> Table:
    """Return a table of the compiled kernels by number of tokens and routing, with the spread over allocations."""
    record, config = records.recorded("align"), ABOUT["config"]
    lines = []
    for step in ["final", *records.peers(record)] if record else ():
        by_tokens = records.series(record, step=step, config=config)
        skewed = records.find(record, step=f"{step}, one expert", **ABOUT)
        row = records.find(record, step=step, **ABOUT)
        if row is None:
            continue
        us = [records.format_us(by_tokens[n]["median"]) if n in by_tokens else "" for n in _SWEEP]
        one = records.format_us(skewed["kernel_us"]["median"]) if skewed else ""
        spread = " to ".join(map(records.format_us, row.get("allocations_us", ())))
        name = "this package" if step == "final" else step.removeprefix("peer:")
        lines.append([name, *us, one, spread, row.get("version", "")])
    if not lines:
        return Table(["the compiled kernels and the package"], [["not timed with these sizes"]])
    spread = f"{TOKENS:,}, outputs in several places"
    headings = ["us, by tokens", *(f"{n:,}" for n in _SWEEP), f"{TOKENS:,}, one expert", spread, "version"]
    shown = [n for n, heading in enumerate(headings) if not n or any(line[n] for line in lines)]
    return Table([headings[n] for n in shown], [[line[n] for n in shown] for line in lines])


_SWEEP = 1, 64, 1024, 4096, 16384, 65536


def result() -> str:
    """Return what the lesson builds, in numbers of the records."""
    us, source = published_times()
    peer, record = _peer_us("sglang-aot"), records.recorded("align")
    final = record and records.find(record, step="final", **ABOUT)
    if not us or peer is None or final is None:
        return f"No times are recorded for these sizes. The {lower_bound()}."
    return (
        f"On an H200, {TOKENS} tokens: our ports of 0x1 and 0x5 take {records.format_us(us['0x1'])} and "
        f"{records.format_us(us['0x5'])} us ({source}). SGLang's compiled kernel, 0x5 as it is today, takes "
        f"{records.format_us(peer)} us in buffers of its own, which matters: see *Where the buffers lie*.\n"
        f"The {lower_bound()}. The next lesson ends at {records.format_us(final['kernel_us']['median'])} us."
    )


def lower_bound() -> str:
    """Return the lower bound of a step, in words."""
    numel, length = TOKENS * TOPK, sizes(TOKENS * TOPK, BLOCK, EXPERTS)[0]
    num_bytes = 4 * (numel + length + length // BLOCK + 1)
    us = num_bytes / chip_limits().copy_bandwidth * 1e6
    text = f"{num_bytes:,} bytes take {us:.2f} us at the rate of a copy"
    record = records.recorded("align")
    row = record and records.find(record, step="empty kernel", config={"dependent": False})
    return f"{text}, and two launches of an empty kernel {2 * row['kernel_us']['median']:.2f} us" if row else text
