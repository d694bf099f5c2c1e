"""The lesson "Dispatch layout": inputs, launches, check, what the simulator counts, times, and what the records say."""

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.latencies import latencies
from moe_numba.course.bench.topics.dispatch_layout import layout_bytes, uniform_routing
from moe_numba.course.lessons.dispatch_layout import sizes as own_sizes
from moe_numba.course.lessons.dispatch_layout.answers import ranks_of_a_token
from moe_numba.course.lessons.dispatch_layout.sizes import (
    CHECKED,
    COUNTERS,
    EACH,
    EXPERTS,
    LANES,
    RANKS,
    SWEEP,
    TOKENS,
    TOPK,
)
from moe_numba.course.steps import recorded
from moe_numba.course.steps.estimate import require_compiler
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Lesson, Run, Table
from moe_numba.course.steps.score import COMPILER, TOTAL, Score, score_of_kernels
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.expert_parallel import get_dispatch_layout, reference
from moe_numba.runtime.changed_source import plain_function
from moe_numba.runtime.launch import launch
from moe_numba.simulator.core.settings import settings

DEVICE = "cpu" if simulator.ENABLED else "cuda"
TOPIC, EARLIER = "dispatch_count_ladder", "dispatch_layout_ladder"
CONFIG = dict(num_experts=EXPERTS, topk=TOPK, ranks=RANKS)
POISON, POISONED_FLAG = -7, 0xCD  # no count, and no flag
_FEW_THREADS, _FEW_CTAS = 64, 16  # of a check in the simulator
PER_LOAD, VOTES = "sectors of a load", "votes"
_OPCODES = {  # row of a score -> instructions of the machine code
    VOTES: ("VOTE", "VOTEU"),
    "global loads": ("LDG",),
    "global atomics": ("REDG", "RED", "ATOMG", "ATOM"),
    "shared atomics": ("ATOMS",),
}
SLOW_CTA = "the CTA that counts ranks"  # title of its variants
PLACES, PLACES_TITLE = 4, "counters elsewhere"  # where counters lie in global memory


class Launch(NamedTuple):
    """How to launch a kernel; a version of the lesson's kernel is a launch, or a tuple of launches.

    Attributes
    ----------
    kernel : kernel
        It gets the arguments that its parameters name: topk_idx, counts, is_in_rank, tokens, topk, ranks, experts.
    ctas : int or None
        None: a thread for each token.
    threads : int
        Of a CTA.
    cluster : int
        CTAs of a cluster.
    dependent : bool
        The launch may begin before the kernel before it has ended.
    columns : bool
        topk_idx is [topk, tokens].
    any_threads : bool
        The kernel is right with fewer threads, too, which the simulator then runs.
    """

    kernel: Any
    ctas: int | None
    threads: int
    cluster: int = 1
    dependent: bool = False
    columns: bool = False
    any_threads: bool = True


def launches(version: tuple) -> tuple[Launch, ...]:
    """Return a version's launches; a single one may stand bare."""
    return tuple(Launch(*each) for each in (version if isinstance(version[0], tuple) else (version,)))


# Inputs, check, launches


def skewed_routing(tokens: int, device: str = DEVICE) -> torch.Tensor:
    """Return a routing in which all tokens choose the same experts, those that the ranks hold last."""
    experts = (torch.arange(TOPK, device=device) * EACH + EACH - 1) % EXPERTS
    if TOPK > RANKS:  # further experts of the same ranks
        experts = (experts - torch.arange(TOPK, device=device) // RANKS) % EXPERTS
    return experts.repeat(tokens, 1).contiguous()


@cache
def inputs(tokens: int) -> dict[str, torch.Tensor]:
    """Return routings that a layout may get wrong, by name: int64, [tokens, topk]."""
    torch.manual_seed(0)
    holes = uniform_routing(tokens, EXPERTS, TOPK, DEVICE)
    holes.view(-1)[::5] = -1
    holes[1 % tokens] = -1
    holes[2 % tokens, 0], holes[3 % tokens, 0] = EXPERTS, (1 << 32) + 1  # neither is an expert
    return {
        "with ids that are no expert": holes,
        "random experts": uniform_routing(tokens, EXPERTS, TOPK, DEVICE),
        "all tokens choose the same experts": skewed_routing(tokens),
        "one token": uniform_routing(1, EXPERTS, TOPK, DEVICE),
    }


def poisoned(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs that no kernel leaves as they are: counts of experts and then ranks, and flags."""
    counts = torch.full((COUNTERS,), POISON, dtype=torch.int32, device=DEVICE)
    return counts, torch.full((tokens, RANKS), POISONED_FLAG, dtype=torch.uint8, device=DEVICE)


def right(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the right outputs, by the package's reference in torch."""
    per_rank, per_expert, flags = reference.dispatch_layout(ids, RANKS, EXPERTS)
    return torch.cat([per_expert, per_rank]), flags.to(torch.uint8)


def wrong(outputs: Sequence[torch.Tensor], ids: torch.Tensor) -> str | None:
    """Compare counts and flags with the reference; return None, or a sentence on the first error."""
    for name, given, wanted in zip(("counts", "is_in_rank"), outputs, right(ids), strict=True):
        if given.shape != wanted.shape:
            return f"{name} has the shape {tuple(given.shape)}, not {tuple(wanted.shape)}"
        if len(at := (given.to(wanted.dtype) != wanted).nonzero()):
            place = tuple(at[0].tolist())
            counter = place[0] if name == "counts" else -1
            of = f" (expert {counter})" if 0 <= counter < EXPERTS else f" (rank {counter - EXPERTS})"
            return (
                f"{name}{list(place)}{of if counter >= 0 else ''} is {given[place].item()}, not "
                f"{wanted[place].item()}; {len(at)} of {wanted.numel()} are wrong"
            )
    return None


def run(version: tuple, ids: torch.Tensor, outputs=None, few: bool = False, columns: torch.Tensor | None = None):
    """Launch the kernels of a version; return the outputs.

    ``few`` limits the threads and CTAs. ``columns`` are the ids as [topk, tokens], if a launch needs them.
    """
    outputs = poisoned(len(ids)) if outputs is None else outputs
    if columns is None and any(each.columns for each in launches(version)):
        columns = ids.T.contiguous()
    values = dict(counts=outputs[0], is_in_rank=outputs[1], tokens=len(ids), topk=TOPK, ranks=RANKS, experts=EXPERTS)
    for each in launches(version):
        threads = min(each.threads, _FEW_THREADS) if few and each.any_threads else each.threads
        ctas = each.ctas or -(-len(ids) // threads)
        if few and each.cluster == 1 and each.any_threads:
            ctas = min(ctas, _FEW_CTAS)
        values["topk_idx"] = columns if each.columns else ids
        names = inspect.signature(plain_function(each.kernel)).parameters
        options = dict(launch_bounds=threads, dependent=each.dependent)
        if each.cluster > 1:
            options["cluster"] = each.cluster
        launch(each.kernel, ctas, threads, *(values[name] for name in names), **options)
    return outputs


def check(version: tuple) -> str | None:
    """Compare a version with the reference on all inputs; return the first error.

    It runs twice with the same memory, because what it leaves there may spoil the next launch.
    """
    tokens, races = CHECKED if simulator.ENABLED else TOKENS, bool(settings["races"])
    for name, ids in list(inputs(tokens).items())[: 1 if races else None]:
        outputs = poisoned(len(ids))
        if races and any(each.dependent for each in launches(version)):
            run(version, ids.flip(0).contiguous(), outputs, simulator.ENABLED)  # the next launch may overlap it
        for _ in range(1 if races else 2):
            if fault := wrong(run(version, ids, outputs, simulator.ENABLED), ids):
                return f"{name}: {fault}"
    return None


def once(version: tuple) -> Sequence[torch.Tensor]:
    """Launch a version on the inputs whose work is counted."""
    return run(version, inputs(TOKENS)["random experts"])


def timed(version: tuple, tokens: int = TOKENS, skewed: bool = False, place: int = 0) -> list[Callable]:
    """Return calls with different routings; a small one in the simulator.

    All versions share their outputs; ``place`` chooses the counters.
    """
    routings = _routings(tokens, skewed)
    outputs = _timed_outputs(len(routings[0]), place)
    columns = {True: [ids.T.contiguous() for ids in routings], False: [None] * len(routings)}
    given = zip(routings, columns[any(each.columns for each in launches(version))], strict=True)
    return [partial(run, version, ids, outputs, simulator.ENABLED, turned) for ids, turned in given]


@cache
def _timed_counts():
    """Return counters of timed versions at several places: the address decides which slices of the L2 add to them."""
    far = 1 << 14  # words
    memory = torch.full((PLACES * far,), POISON, dtype=torch.int32, device=DEVICE)
    return [memory[place * far : place * far + COUNTERS] for place in range(PLACES)]


@cache
def _timed_flags(tokens):
    return poisoned(tokens)[1]


def _timed_outputs(tokens, place=0):
    return _timed_counts()[place], _timed_flags(tokens)


@cache
def _routings(tokens, skewed):
    torch.manual_seed(1)
    if simulator.ENABLED:
        tokens = min(tokens, CHECKED)
    return [skewed_routing(tokens) if skewed else uniform_routing(tokens, EXPERTS, TOPK, DEVICE) for _ in range(4)]


class _Lesson(Lesson):
    """Its scores also say how many sectors a load of a warp touches, and what the machine code has of some kinds."""

    def count(self, version: Any, name: str) -> Score:
        """Return the score of a version; the simulator counts."""
        require_compiler()
        with simulator.profile(self.gpu.upper()) as profile:
            self.run.once(version)
        score = score_of_kernels(profile.kernels, name, self.gpu.upper())
        opcodes = Counter(code["opcode"].split(".")[0] for each in profile.kernels for code in each.static.sass or ())
        compiled = {(COMPILER, row): sum(opcodes[name] for name in names) for row, names in _OPCODES.items()}
        return Score(name, score.rows | {(TOTAL, PER_LOAD): _sectors_of_a_load(profile)} | compiled, score.gpu)

    def scores(self, versions: Mapping[str, Any]) -> dict[str, Score]:
        """Return the scores of versions that are no steps, wherever kernels run."""
        found = self._in_simulator("rows", versions)
        rows = {name: {(section, row): number for section, row, number in each} for name, each in found.items()}
        return {name: Score(name, each, self.gpu.upper()) for name, each in rows.items()}

    def counted(self, versions: Mapping[str, Any]) -> dict[str, list[float]]:
        """Return the source lines of the warp that has most to do, and the sectors of a load, wherever kernels run."""
        return self._in_simulator("lines", versions)

    def rows(self, version: Any) -> list:
        """Return the rows of a version's score, in the simulator."""
        return [(*key, number) for key, number in self.count(version, "").rows.items()]

    def lines(self, version: Any) -> list[float]:
        """Return the numbers of `counted` for a version, in the simulator."""
        with simulator.profile() as profile:
            self.run.once(version)
        return [sum(each.critical_path.executions for each in profile.kernels), _sectors_of_a_load(profile)]

    def _in_simulator(self, method, versions):
        if simulator.ENABLED:
            return {name: getattr(self, method)(version) for name, version in versions.items()}
        made = {name: expression_of(version) for name, version in versions.items()}
        functions = [function for _, several in made.values() for function in several]
        expressions = {name: expression for name, (expression, _) in made.items()}
        return in_simulator(_again, self.home, method, expressions, functions=functions)


def _again(home, method, expressions):
    """Make versions again in the simulator's process; return what a method of the lesson says of each."""
    module, _, attribute = home.partition(":")
    of, names = getattr(importlib.import_module(module), attribute), vars(sys.modules["__main__"])
    return {name: getattr(of, method)(eval(expression, names)) for name, expression in expressions.items()}


def _sectors_of_a_load(profile):
    requests, sectors = (
        sum(getattr(each.total, f"global_load_{of}") for each in profile.kernels) for of in ("requests", "sectors")
    )
    return round(sectors / max(requests, 1), 1)


def _lesson(name, tokens):
    ids = lambda: inputs(tokens)["random experts" if tokens > 1 else "one token"]
    return _Lesson(
        TOPIC,
        Run(
            check,
            lambda version: run(version, ids()),
            partial(timed, tokens=tokens),
            kernels=lambda version: tuple(each.kernel for each in launches(version)),
        ),
        f"{__name__}:{name}",
        config=CONFIG,
        size=dict(tokens=tokens),
        dtype="int64",
        seeds=2,
    )


lesson, one = _lesson("lesson", TOKENS), _lesson("one", 1)


# Recorded times, and predictions in microseconds (None where a time that they start from is not known)


def _recorded_us(topic, step, **about):
    record = records.recorded(topic)
    row = records.find(record, step=step, **about) if record else None
    return row["kernel_us"]["median"] if row and "kernel_us" in row else None


def empty_us(dependent: bool = False) -> float:
    """Return what a kernel that does nothing takes, as recorded: alone, or started before the last one has ended."""
    return _recorded_us("dispatch_layout", "empty kernel", config=dict(dependent=dependent)) or 0.5


def cluster_barrier_us() -> float:
    """Return the latency of a cluster barrier, as a chain of them was recorded."""
    chains = (records.recorded("gate_align_ladder") or {}).get("diagnosis", {}).get("cluster barriers")
    return (chains["64"] - chains["32"]) / 32 if chains else 0.25


def _ns(counter):
    return latencies().ns[counter]


def load_us() -> float:
    """Return the latency of a load from the L2, as recorded."""
    return _ns("global_load_requests") / 1000


def chain() -> str:
    """Return the latencies that the predictions use, in words."""
    return (
        f"a load from the L2 {load_us():.2f} us, a global atomic {_ns('global_atomic_requests') / 1000:.2f} us, a "
        f"shared atomic {_ns('shared_atomic_requests') / 1000:.2f} us, a cluster barrier {cluster_barrier_us():.2f} "
        f"us, an empty kernel {empty_us():.2f} us"
    )


def on_a_rank() -> float:
    """Return the tokens that go to a rank, on average."""
    return TOKENS * ranks_of_a_token(EXPERTS, TOPK, RANKS) / RANKS


def global_us() -> float:
    """Return a model of the first step: two launches, loads one after another, and the additions to a sector.

    The model: the L2 adds once in a nanosecond to the same sector of eight counters.
    """
    return 2 * empty_us() + TOPK * load_us() + (_ns("global_atomic_requests") + additions_to_a_sector()) / 1000


def additions_to_a_sector() -> float:
    """Return how often the first step adds to a sector of eight counters, on average."""
    return TOKENS * (TOPK + RANKS / 32) * 8 / COUNTERS


def _after(step, change):
    found = lesson.steps.get(step)
    return None if found is None or found.us is None else max(found.us + change, empty_us())


def ballot_us() -> float | None:
    """Return the time of a step that adds as often to each counter as before."""
    return _after("global atomics", 0)


def shared_us() -> float:
    """Return the time of a step that adds in shared memory: two launches, loads, atomics of both kinds."""
    atomics = (TOPK + 1) * _ns("shared_atomic_requests") + _ns("global_atomic_requests")
    return 2 * empty_us() + TOPK * load_us() + atomics / 1000


def private_us() -> float:
    """Return a model of the port: clear, walk over all tokens, a load at a time, and add up a column."""
    clock = chip_limits().boost_clock / 1e6  # per microsecond
    clear, column = own_sizes.EXPERTS_PER_CTA * own_sizes.PORT_THREADS / clock, own_sizes.PORT_THREADS * 4 / clock
    return empty_us() + clear + -(-TOKENS // own_sizes.PORT_THREADS) * TOPK * load_us() + column


def cluster_us() -> float | None:
    """Return the time of a step without the launch that clears, but with two cluster barriers."""
    return _after("shared atomics", 2 * cluster_barrier_us() - empty_us())


def groups_us() -> float | None:
    """Return the time of a step in which the ids of a token are loaded at once, for fewer tokens at a time."""
    at_once = own_sizes.CLUSTER * own_sizes.CLUSTER_THREADS
    rounds = lambda lanes: -(-TOKENS * lanes // at_once)
    return _after("one cluster", (rounds(LANES) - rounds(1) * TOPK) * load_us())


def four_us() -> float | None:
    """Return the time of a step that loads for four tokens at once."""
    rounds = -(-TOKENS * LANES // (own_sizes.CLUSTER * own_sizes.CLUSTER_THREADS))
    return _after("a group of lanes", (-(-rounds // 4) - rounds) * load_us())


def dependent_us() -> float | None:
    """Return the time of a step that may start early: an empty kernel saves this much."""
    return _after("four tokens at once", empty_us(True) - empty_us())


# What the page says and shows


def constants() -> Table:
    """Return a table of the names that the kernels use: value and meaning."""
    value = lambda names: ", ".join(
        f"{own_sizes.FULL:#x}" if name == "FULL" else str(getattr(own_sizes, name)) for name in names.split(", ")
    )
    return Table(
        ["name", "value", "meaning"], [[names, value(names), text] for names, text in own_sizes.MEANINGS.items()]
    )


def lower_bound() -> str:
    """Return the lower bound in words: bytes at the rate of a copy, and the time of an empty kernel."""
    num_bytes = layout_bytes(TOKENS, TOPK, EXPERTS, RANKS)
    us = num_bytes / chip_limits().copy_bandwidth * 1e6
    return (
        f"{TOKENS} tokens: {num_bytes:,} bytes take {us:.2f} us at the measured rate of a copy. A kernel that does "
        f"nothing takes {empty_us():.2f} us, and {empty_us(True):.2f} us if it may start before the last one has ended."
    )


def _package(ids, outputs):
    counts, flags = outputs
    return get_dispatch_layout(ids, EXPERTS, RANKS, out=(counts[EXPERTS:], counts[:EXPERTS], flags.view(torch.bool)))


def result() -> str:
    """Return what the lesson is about, in numbers of the records."""
    about = dict(config=CONFIG, size=dict(tokens=TOKENS))
    found = {
        "torch": _recorded_us(TOPIC, "reference: torch", **about) or _recorded_us(EARLIER, "torch", **about),
        "our port of DeepEP's kernel": _recorded_us(TOPIC, "private counters", **about)
        or _recorded_us("dispatch_layout", "port", **about),
        "the package's kernel": _recorded_us("dispatch_layout", "final", **about),
    }
    times = ", ".join(f"{name} {records.format_us(us)} us" for name, us in found.items() if us)
    return f"{TOKENS} tokens, {TOPK} of {EXPERTS} experts, {RANKS} ranks." + (
        f" Recorded on an H200: {times}." if times else " No times are recorded for these sizes."
    )


def show_reference(layout: Callable) -> Table:
    """Check the page's torch function, and return a table of its time."""
    for name, ids in inputs(CHECKED).items():
        if fault := wrong(layout(ids), ids):
            raise WrongResult(f"torch, {name}: {fault}")
    ids = inputs(CHECKED if simulator.ENABLED else TOKENS)["random experts"]
    us = lesson.times("reference", {"torch": [partial(layout, ids)]})
    line = us.get("torch") or _recorded_us(EARLIER, "torch", config=CONFIG, size=dict(tokens=TOKENS))
    return Table(["reference", "us"], [["torch", records.format_us(line) if line else "not timed"]])


def show_ranks_per_token() -> str:
    """Return how many ranks a token visits, counted and expected."""
    ids = inputs(TOKENS)["random experts"]
    counted = int(right(ids)[0][EXPERTS:].sum()) / TOKENS
    expected = ranks_of_a_token(EXPERTS, TOPK, RANKS)
    return (
        f"counted: {counted:.3f} ranks for each token, expected: {expected:.3f}. A copy for each expert would send "
        f"{TOPK}; one for each rank saves {100 * (1 - expected / TOPK):.0f} %."
    )


def who_votes(step: str) -> str:
    """Return what the compiler made of the additions for ranks, in words."""
    votes, warps = lesson.steps[step].score.rows[COMPILER, VOTES], -(-TOKENS // 32)
    if votes:
        return (
            f"The machine code has {votes} votes, and the source has none: the compiler has seen that all lanes add "
            "to the same counter. A warp votes, and one lane adds the number of votes. So a rank's counter gets "
            f"{warps:,} additions, one for each warp, and not {on_a_rank():,.0f}."
        )
    return f"The machine code has no votes. A rank's counter gets about {on_a_rank():,.0f} additions."


def what_an_addition_costs(step: str) -> str:
    """Return what an addition in the L2 takes, if additions explain all of a step's time that nothing else does."""
    us, additions = lesson.steps[step].us, additions_to_a_sector()
    text = (
        f"The step adds {additions:,.0f} times to a sector, and the prediction allows a nanosecond for each addition."
    )
    if us is None:
        return f"{text} Not timed yet with these kernels."
    rest = us - (global_us() - additions / 1000)
    return (
        f"{text} It takes {us:.1f} us. If the additions are the reason for all {rest:.1f} us that launches, loads and "
        f"the latency of an atomic do not explain, each of them takes {1000 * rest / additions:.1f} ns. We have not "
        "isolated that."
    )


def show_places(versions: Mapping[str, tuple]) -> Table:
    """Return a table of the times of versions whose counters lie at several places in global memory."""
    calls = {
        f"{name}, place {place}": timed(version, place=place)
        for name, version in versions.items()
        for place in range(PLACES)
    }
    us = lesson.times(PLACES_TITLE, calls)
    at = lambda name, place: us.get(f"{name}, place {place}")
    found = {name: [at(name, place) for place in range(PLACES)] for name in versions}
    _us_of[PLACES_TITLE] = found if us else {}
    text = lambda each: records.format_us(each) if each else "not timed"
    lines = [[name, *map(text, times)] for name, times in found.items()]
    return Table(["us, counters at place", *map(str, range(PLACES))], lines)


def same_additions(before: str, step: str) -> str:
    """Return what fewer instructions for the same additions save, wherever the counters lie, in words."""
    instructions = [lesson.steps[name].score.rows[TOTAL, "global atomics"] for name in (step, before)]
    text = "Each counter gets as many additions, from {:,} instructions instead of {:,}.".format(*instructions)
    if not (us := _us_of.get(PLACES_TITLE)):
        return f"{text} Not timed yet with these kernels."
    first, second = us.values()
    changes = [100 * (after / us - 1) for us, after in zip(first, second, strict=True)]
    text += (
        f" Depending on the place, the first kernel takes {min(first):.1f} to {max(first):.1f} us, and the second one "
        f"{min(second):.1f} to {max(second):.1f} us."
    )
    if max(map(abs, changes)) < 10:
        return (
            f"{text} At the same place both take about as long: the L2 is busy with additions, not with instructions."
        )
    if max(changes) < 0:
        return (
            f"{text} The second kernel is the faster one at each place: an instruction whose lanes add to {RANKS} "
            f"counters of a sector costs less than {RANKS} instructions."
        )
    return f"{text} Neither kernel is the faster one at all places."


def why_one_cluster(before: str, step: str) -> str:
    """Return how the tokens are spread over the CTAs of a cluster, and of the step before it, in words."""
    threads, ctas = own_sizes.CLUSTER_THREADS, own_sizes.CLUSTER
    spread = lambda threads: (-(-TOKENS // threads), min(TOKENS, threads))
    busy, most = min(ctas, spread(threads)[0]), spread(threads)[1]
    before_ctas, before_most = spread(own_sizes.THREADS)
    texts = [
        f"Thread i takes token i. So {busy} of the cluster's {ctas} CTAs have tokens, up to {most:,} each",
        f"the step before has {before_ctas} CTAs of up to {before_most} tokens",
        f"an SM of the cluster looks up {most / before_most:.0f} times as many sectors",
    ]
    times = lesson.steps[step].times
    if times is None:
        measured = "Not timed yet with these kernels"
    else:
        measured = f"With {TOKENS} tokens {before} takes {times[0]:.2f} us, and {step} {times[1]:.2f} us"
    return f"{'; '.join(texts)}. {measured}."


# The port, taken apart


def apart(versions: Mapping[str, tuple]) -> dict[str, dict[str, float | None]]:
    """Return label -> numbers of a part of the port: us and one_us (of one token), lines and one_lines, per_load.

    ``us`` are times, measured or recorded; ``lines`` are the source lines that the warp with most to do executes.
    """
    counted, counted_one = lesson.counted(versions), one.counted(versions)
    us = lesson.times("CTAs apart", {label: timed(version) for label, version in versions.items()})
    one_us = one.times("CTAs apart", {label: timed(version, 1) for label, version in versions.items()})
    found = {}
    for label, (lines, per_load) in counted.items():
        one_lines, _ = counted_one[label]
        times = dict(us=us.get(label), one_us=one_us.get(label))
        found[label] = dict(times, lines=lines, one_lines=one_lines, per_load=per_load)
    return found


def show_apart(found: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Return a table of the parts of the port."""
    us = lambda each, name: records.format_us(each[name]) if each[name] else "not timed"
    lines = [
        [label, us(each, "us"), us(each, "one_us"), f"{each['lines']:,}", f"{each['per_load']:g}"]
        for label, each in found.items()
    ]
    heads = f"{TOKENS} tokens, us", "1 token, us", "lines of the longest warp", PER_LOAD
    return Table(["CTAs that run", *heads], lines)


def who_is_last(found: Mapping[str, Mapping[str, float | None]]) -> str:
    """Return which CTAs the port waits for, in words: by times if there are any, otherwise by executed lines."""
    whole, experts, ranks = found.values()
    unit = "lines" if None in (whole["us"], experts["us"], ranks["us"]) else "us"
    waits = max((experts[unit], "the CTAs that count experts"), (ranks[unit], "the CTA that counts ranks"))[1]
    if unit == "us":
        text = (
            f"All CTAs together take {whole['us']:.1f} us, those that count experts alone {experts['us']:.1f} us, "
            f"the one that counts ranks alone {ranks['us']:.1f} us. So the kernel waits for {waits}."
        )
    else:
        text = (
            f"Not timed yet with these kernels. A CTA that counts experts executes {experts['lines']:,} lines, and one "
            f"that counts ranks {ranks['lines']:,}: the kernel probably waits for {waits}."
        )
    if waits == "the CTA that counts ranks":
        text += " More CTAs for the experts cannot help then."
    return text


_us_of: dict[str, dict[str, Any]] = {}  # title of a table of variants -> their times, if there are any


def show_variants(title: str, versions: Mapping[str, tuple], tokens: int = TOKENS) -> Table:
    """Return a table of versions that are no steps: their times, and what the simulator counts for `TOKENS` tokens.

    Raises `WrongResult` if a version writes a wrong count or flag; it need not write all of them.
    """
    for name, version in versions.items():
        _check_what_is_written(name, version)
    scores = lesson.scores(versions) if tokens == TOKENS else {}
    us = _us_of[title] = lesson.times(title, {name: timed(version, tokens) for name, version in versions.items()})
    lines = [
        [name, records.format_us(us[name]) if us else "not timed", *_counted(scores.get(name))] for name in versions
    ]
    heads = ["estimate, us", "instructions", PER_LOAD] if scores else []
    return Table([f"{title}, {tokens} tokens", "us", *heads], lines)


def _check_what_is_written(name, version):
    ids = inputs(CHECKED if simulator.ENABLED else TOKENS)["random experts"]
    outputs = run(version, ids, few=simulator.ENABLED)
    written = [given != poison for given, poison in zip(outputs, (POISON, POISONED_FLAG), strict=True)]
    if not any(each.any() for each in written):
        raise WrongResult(f"{name} writes nothing")
    given = [torch.where(where, out, wanted) for where, out, wanted in zip(written, outputs, right(ids), strict=True)]
    if fault := wrong(given, ids):
        raise WrongResult(f"{name}: {fault}")


def _counted(score):
    if score is None:
        return []
    return [f"{score.us:.1f}", f"{score.rows[TOTAL, 'instructions']:,}", f"{score.rows[TOTAL, PER_LOAD]:g}"]


def what_is_left(versions: Mapping[str, tuple]) -> str:
    """Return what the changes of the port's slow CTA save, in words."""
    us = _us_of.get(SLOW_CTA)
    if not us:
        return (
            "Not timed yet with these kernels. The estimates are those of a model that knows instructions and "
            "latencies, but nothing of sectors that the L1 must look up: only a GPU decides."
        )
    whole, *_, all_of_them = us.values()
    single = {name: whole - time for name, time in us.items() if name not in (list(us)[0], list(us)[-1])}
    best = max(single, key=single.get)
    kept = [f"'{name}' {us[name]:.1f} us" for name in single]
    return (
        f"Of {whole:.1f} us are left: {', '.join(kept)}; all of them {all_of_them:.1f} us. '{best}' alone saves most, "
        f"{100 * single[best] / whole:.0f} % of the time, and all of them {100 * (whole - all_of_them) / whole:.0f} %."
    )


_NO_GAIN = {  # step of the earlier version -> what changed, and what follows
    "rows of 33 words": (
        "a row of the port's table has a word more, so that a column lies in all banks",
        "Clearing has no bank conflicts any more. The loop over the tokens loads the same ids in the same way.",
    ),
    "the same with atomics": (
        "one row of counters for each CTA, with shared atomics",
        "Nothing to clear or to add up, which matters for few tokens only; the loop is the same.",
    ),
    "4 experts per CTA": (
        "65 CTAs instead of 9, as a later version of DeepEP has",
        "Each CTA still walks over all tokens, and one CTA still counts the ranks.",
    ),
}


def show_what_did_not_pay() -> Table:
    """Return a table of changes to the port that an earlier version timed: few tokens, many tokens."""
    record, lines = records.recorded(EARLIER), []
    about = dict(config=CONFIG, size=dict(tokens=TOKENS))
    before = record and records.find(record, step="private counters", **about)
    for step, (change, why) in _NO_GAIN.items():
        if before and (row := records.find(record, step=step, **about)):
            times = [*row["compared_us"], before["few_us"], row["few_us"]]
            lines.append([change, *map(records.format_us, times), why])
    heads = [f"us before, {TOKENS} tokens", "after", "us before, 64 tokens", "after", "why"]
    return Table(["change of our port", *heads], lines)


# The sweep


def _inputs_of_sweep():
    return [(tokens, skewed) for tokens in SWEEP for skewed in (False, True) if tokens > 1 or not skewed]


def _title(tokens, skewed):
    return f"{tokens} token{'s' * (tokens > 1)}{', the same experts' if skewed else ''}"


@cache
def _earlier_sweep():
    """Return input -> label -> microseconds of an earlier version of these kernels, or an empty dict."""
    record = records.recorded(EARLIER)
    steps = {"torch": "torch", "global atomics": "global atomics", "shared atomics": "shared atomics"}
    steps |= {"our port of DeepEP's": "private counters", "one cluster": "one cluster", "the package": "final"}
    names = {"one_us": (1, False), "few_us": (64, False), "kernel_us": (4096, False), "many_us": (65536, False)}
    names |= {"skewed_us": (4096, True)}
    found = {}
    for name, given in names.items() if record else ():
        for label, step in steps.items():
            row = records.find(record, step=step, config=CONFIG, size=dict(tokens=4096))
            us = row and row.get(name)
            if us:
                found.setdefault(given, {})[label] = us["median"] if isinstance(us, dict) else us
    return found


def sweep(versions: Mapping[str, tuple], layout: Callable) -> dict[tuple[int, bool], dict[str, float]]:
    """Time versions, the package's kernel and torch for several inputs; return (tokens, skewed) -> label -> us.

    Where nothing is timed and nothing is recorded for these kernels, the times are those of an earlier version.
    """
    found = {}
    for tokens, skewed in _inputs_of_sweep():
        name, routings = f"sweep, {_title(tokens, skewed)}", _routings(tokens, skewed)
        calls = {label: timed(version, tokens, skewed) for label, version in versions.items()}
        outputs = _timed_outputs(len(routings[0]))
        own = {"the package": [partial(_package, ids, outputs) for ids in routings], "torch": []}
        own["torch"] = [partial(layout, ids) for ids in routings]
        for label, (call, *_) in own.items():
            for output, poison in zip(outputs, (POISON, POISONED_FLAG), strict=True):
                output.fill_(poison)
            call = call()
            given = outputs if label == "the package" else call
            if fault := wrong(given, routings[0]):
                raise WrongResult(f"{label}, {name}: {fault}")
        if lesson.is_timed:
            found[tokens, skewed] = lesson.times(name, calls | own)
        elif us := lesson.times(name, calls):  # the package's kernel has fewer threads in the simulator
            others = {label: recorded.lesson_us(TOPIC, f"{name}: {label}", lesson.size, CONFIG) for label in own}
            found[tokens, skewed] = us | {label: time for label, time in others.items() if time}
    return found or _earlier_sweep()


def fastest(times: Mapping[str, float]) -> str:
    """Return the labels that are within 3 % of the shortest time."""
    shortest = min(times.values())
    return ", ".join(label for label, us in times.items() if us <= 1.03 * shortest)


def show_sweep(found: Mapping[tuple[int, bool], Mapping[str, float]]) -> Table:
    """Return a table of the sweep: kernels as columns, inputs as lines, and the fastest."""
    labels = list(dict.fromkeys(label for times in found.values() for label in times))
    lines = [
        [
            _title(*given),
            *(records.format_us(times[label]) if label in times else "" for label in labels),
            fastest(times),
        ]
        for given, times in found.items()
    ]
    source = "us"
    if found is _earlier_sweep():
        source = "us, of an earlier version of these kernels"
    return Table([source, *labels, "fastest"], lines)


def who_wins(found: Mapping[tuple[int, bool], Mapping[str, float]]) -> str:
    """Return where the package's kernel is not the fastest one, in words."""
    if not found:
        return "The sweep has not been timed with these sizes."
    beaten = [
        f"with {_title(*given)} {fastest(times)} takes {min(times.values()):.1f} us, and the package's kernel "
        f"{times['the package']:.1f} us"
        for given, times in found.items()
        if "the package" in times and "the package" not in fastest(times)
    ]
    if not beaten:
        return "The package's kernel is the fastest one, or about as fast, for all these inputs."
    return f"The package's kernel is not the fastest one everywhere: {'; '.join(beaten)}."


MANY = SWEEP[-1]


_MANY_TITLE = "many tokens"


def show_many(versions: Mapping[str, tuple]) -> Table:
    """Return a table of versions for the most tokens of the sweep."""
    return show_variants(_MANY_TITLE, versions, MANY)


def why_many() -> str:
    """Return whether the number of SMs explains why the grid of step 3 is faster for many tokens, in words."""
    us = _us_of.get(_MANY_TITLE)
    if not us:
        earlier = _earlier_sweep().get((MANY, False), {})
        if not {"shared atomics", "the package"} <= earlier.keys():
            return "Not timed yet with these kernels."
        return (
            f"Not timed yet with these kernels. Of an earlier version, step 3 took {earlier['shared atomics']:.1f} "
            f"us for {MANY} tokens, and the package's kernel {earlier['the package']:.1f} us."
        )
    grid, few, cluster, wide = us.values()
    if few > cluster:
        why = "On equally many SMs the cluster is the faster one, so what step 3 gains here is the other SMs"
    else:
        why = "Even on equally many SMs step 3 is not slower, so the number of SMs alone is not the reason"
    return (
        f"With {MANY} tokens step 3 takes {grid:.1f} us, and on {own_sizes.CLUSTER} CTAs {few:.1f} us; the cluster "
        f"of step 7 takes {cluster:.1f} us. {why}. Step 7's walk with step 3's sum takes {wide:.1f} us."
    )


def lower_bound_of_many() -> str:
    """Return the lower bound for the most tokens of the sweep, in words."""
    num_bytes = layout_bytes(MANY, TOPK, EXPERTS, RANKS)
    return f"{MANY} tokens: {num_bytes:,} bytes, {num_bytes / chip_limits().copy_bandwidth * 1e6:.2f} us"
