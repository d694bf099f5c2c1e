"""The lesson "Low-latency dispatch and combine": inputs, checks, launches, predictions and tables.

All operations of a check are queued at once, so that a rank runs ahead of the others as far as the kernels let it.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.timing.multigpu import outputs_of, settle
from moe_numba.course.draw.player import Player
from moe_numba.course.lessons.low_latency import draw, model
from moe_numba.course.lessons.low_latency import sizes as chosen
from moe_numba.course.lessons.moe_layer.model import ranks_per_token
from moe_numba.course.steps.lesson import Run, Table
from moe_numba.course.steps.ranks import RankLesson
from moe_numba.course.steps.score import PATH, TOTAL, Score
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.ranks.local_group import LocalGroup

__all__ = ["Memory", "Sizes", "Version", "lesson", "many", "ranks_of"]
TOPIC, PACKAGE = "low_latency_ladder", "low_latency"  # records of this lesson, and of `bench low_latency`


class Sizes(NamedTuple):
    """What kernels are compiled for. A token's ``topk`` experts are distinct."""

    ranks: int
    tokens: int  # of each rank
    hidden: int
    topk: int
    local_experts: int  # of each rank

    @property
    def slots(self):
        """Slots of a half, on each rank: one for each token of each rank."""
        return self.ranks * self.tokens

    @property
    def words(self):
        """Words of a row of bfloat16."""
        return self.hidden // 2

    @property
    def metadata_words(self):
        """Words of the flags or metadata of both halves, which the rows of dispatch follow: whole vectors."""
        return -(-2 * self.slots * self.topk // 4) * 4

    @property
    def threads(self):
        """Threads of a CTA that has one for each vector of a row."""
        return -(-self.words // 128) * 32


class Memory(NamedTuple):
    """What kernels know of the memory of the ranks; indices are in words."""

    local: Any  # this rank's
    peers: Any  # addresses of all ranks'
    rows: Any  # where rows begin, behind flags or metadata
    words: Any  # of a row
    ranks: Any


class Version(NamedTuple):
    """The kernels of a step: ``dispatch(sizes)`` and ``combine(sizes)`` make them.

    Attributes
    ----------
    dispatch, combine : function of `Sizes`
        Without a combine the dispatch runs alone.
    packed : bool
        The dispatch packs rows by expert.
    warps : int
        Of a CTA; 0 is a thread for each vector of a row.
    """

    dispatch: Any
    combine: Any = None
    packed: bool = False
    warps: int = 0


@cuda.jit(device=True)
def ranks_of(topk_idx, token, topk, local_experts):
    """Return the mask of the ranks that have one of a token's experts."""
    mask = int32(0)
    for k in range(topk):
        mask = int32(mask | 1 << (topk_idx[token * topk + k] // local_experts))
    return mask


def group_of(ranks: int) -> LocalGroup:
    """Return the ranks; where there is no GPU, and no simulator either, kernels are only compiled."""
    has_device = simulator.ENABLED or torch.cuda.is_available()
    return LocalGroup(ranks, None if has_device else [0] * ranks)


# Inputs


SENTINEL_WORD = 1  # of some rows: it equals the sentinel


class Round(NamedTuple):
    """The inputs of one dispatch and combine, a list entry for each rank."""

    x: list  # [tokens, hidden], bfloat16
    topk_idx: list  # [tokens, topk], int64
    y: list  # [slots, hidden], bfloat16: the results of the rank's experts


def random_rounds(sizes: Sizes, count: int, seed: int = 0) -> list[Round]:
    """Draw the inputs of several rounds.

    In the first one all sets of experts are equally likely. Then all tokens have the same experts: the first ones in
    two rounds, in which the first rank has everything to read and the others run ahead, and the last ones from the
    fourth on, whose rows are elsewhere than two rounds before. Rows of these rounds have a word that equals the
    sentinel: two NaNs.
    """
    generator, experts = torch.Generator().manual_seed(seed), sizes.ranks * sizes.local_experts
    rows = lambda n: torch.randn(n, sizes.hidden, generator=generator).bfloat16()
    choose = lambda: torch.rand(sizes.tokens, experts, generator=generator).topk(sizes.topk).indices
    each = range(sizes.ranks)
    rounds = [
        Round([rows(sizes.tokens) for _ in each], [choose() for _ in each], [rows(sizes.slots) for _ in each])
        for _ in range(count)
    ]
    for number in range(1, count):
        first = 0 if number < 3 else experts - sizes.topk
        same = torch.arange(first, first + sizes.topk).repeat(sizes.tokens, 1)
        rounds[number] = rounds[number]._replace(topk_idx=[same for _ in each])
        for rows in (*rounds[number].x, *rounds[number].y) if number >= 3 else ():
            rows.view(torch.int32)[:, SENTINEL_WORD] = SENTINEL
    return rounds


# Launches


class _OnRank:
    """The memory of a rank, and the launches of a version."""

    def __init__(self, transport, version, sizes, operations=0):
        self.transport, self.version, self.sizes = transport, version, sizes
        lengths = (sizes.metadata_words + 2 * sizes.slots * sizes.words, 2 * sizes.slots * sizes.words)
        self.shared = [transport.allocate(4 * n) for n in lengths]
        self.local = [memory.local.view(torch.int32) for memory in self.shared]
        self.local[0][sizes.metadata_words :] = SENTINEL
        self.local[1].fill_(SENTINEL)
        full = partial(torch.full, (sizes.tokens,), operations, dtype=torch.int32, device=transport.device)
        self.epochs = [full() for _ in self.shared]
        self.threads = 32 * version.warps or sizes.threads
        self.kernels = version.dispatch(sizes), version.combine and version.combine(sizes)
        settle(transport)

    def prepare(self, inputs: Round) -> tuple[list, dict]:
        """Return the inputs of this rank and poisoned outputs."""
        rank, sizes, device = self.transport.rank, self.sizes, self.transport.device
        given = [of_ranks[rank].to(device) for of_ranks in inputs]
        poison = lambda *shape: torch.full((*shape, sizes.hidden), float("nan"), dtype=torch.bfloat16, device=device)
        words = lambda n: torch.full((n,), -7, dtype=torch.int32, device=device)
        if self.version.packed:
            out = {"recv_x": poison(sizes.local_experts, sizes.slots), "counts": words(sizes.local_experts)}
        else:
            out = {"recv_x": poison(sizes.slots), "has_row": words(sizes.slots)}
        if self.version.combine:
            out["out"] = poison(sizes.tokens)
        return given, out

    def start(self, given: list, out: dict) -> dict:
        """Launch a dispatch, and a combine if there is one."""
        (x, topk_idx, y), (recv_x, found, *combined) = given, out.values()
        self._launch(0, x, topk_idx, recv_x, found)
        if combined:
            self._launch(1, y, found, topk_idx, *combined)
        return out

    def _launch(self, number, *tensors):
        words = [t.view(torch.int32) if t.dtype == torch.bfloat16 else t for t in tensors]
        given = self.local[number], self.shared[number].addresses, self.epochs[number], self.transport.rank, *words
        how = {} if simulator.ENABLED else {"launch_bounds": self.threads}
        self.transport.launch(self.kernels[number], self.sizes.tokens, self.threads, *given, **how)

    def close(self):
        settle(self.transport)
        for memory in self.shared:
            memory.close()


def outputs(version, sizes: Sizes, rounds: list[Round], operations: int = 0) -> list[list[dict]]:
    """Run all rounds, queued at once; return the outputs by round and rank.

    ``operations`` is the number of the last operation before the first round.
    """

    def work(transport):
        on_rank = _OnRank(transport, Version(*version), sizes, operations)
        prepared = [on_rank.prepare(each) for each in rounds]
        settle(transport)
        found = [on_rank.start(given, out) for given, out in prepared]
        on_rank.close()
        return [{name: tensor.cpu() for name, tensor in out.items()} for out in found]

    return [list(of_ranks) for of_ranks in zip(*group_of(sizes.ranks).run(work), strict=True)]


# Reference and check


def combine_reference(y: list, masks: list, sizes: Sizes) -> torch.Tensor:
    """Return the sums [source rank, token, hidden] of the results of each rank, in rank order, rounded once."""
    total = torch.zeros(sizes.ranks, sizes.tokens, sizes.hidden)
    for rows, mask in zip(y, masks, strict=True):
        total += torch.where(mask[..., None], rows.view(total.shape).float(), 0)
    return total.bfloat16()


def same_elements(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return which elements have the same bits, or are both NaN, whose bits kernels may change."""
    return (found.view(torch.int16) == wanted.view(torch.int16)) | found.isnan() & wanted.isnan()


def wrong_slots(inputs: Round, found: list, sizes: Sizes) -> str | None:
    """Return what is wrong with rows in slots, and with sums, or None."""
    x, owners = torch.stack(inputs.x), torch.stack(inputs.topk_idx) // sizes.local_experts
    masks = [(owners == rank).any(dim=-1) for rank in range(sizes.ranks)]  # [source rank, token]: it sends a row
    sums = combine_reference(inputs.y, masks, sizes)
    for rank, (got, mask) in enumerate(zip(found, masks, strict=True)):
        if not torch.equal(got["has_row"].view(mask.shape), mask.int()):
            return f"rank {rank}: has_row is wrong"
        wrong = ~same_elements(got["recv_x"].view(x.shape), x).all(dim=-1) & mask
        if wrong.any():
            return f"rank {rank}: {int(wrong.sum())} of {int(mask.sum())} rows are wrong"
        if "out" in got and not same_elements(got["out"], sums[rank]).all():
            return f"rank {rank}: the sums are wrong"
    return None


def wrong_packed(inputs: Round, found: list, sizes: Sizes) -> str | None:
    """Return what is wrong with rows that are packed by expert, or None."""
    for rank, got in enumerate(found):
        for e, count in enumerate(got["counts"].tolist()):
            has_expert = (torch.stack(inputs.topk_idx) == rank * sizes.local_experts + e).any(dim=-1)
            rows = torch.stack(inputs.x)[has_expert]  # by source rank, then by token
            if count != len(rows) or not same_elements(got["recv_x"][e, :count], rows).all():
                return f"rank {rank}: the rows of expert {e} are wrong"
    return None


def check(version, tokens: int) -> str | None:
    """Compare a version with the reference: several operations, queued at once, into poisoned outputs."""
    sizes, version = sizes_of(tokens), Version(*version)
    rounds = random_rounds(sizes, chosen.ROUNDS)
    for number, (inputs, found) in enumerate(zip(rounds, outputs(version, sizes, rounds), strict=True), start=1):
        if wrong := (wrong_packed if version.packed else wrong_slots)(inputs, found, sizes):
            return f"operation {number}: {wrong}"
    return None


@contextmanager
def _ready(version, sizes, transport) -> Iterator:
    on_rank = _OnRank(transport, Version(*version), sizes)
    given, out = on_rank.prepare(random_rounds(sizes, 1)[0])
    settle(transport)
    yield lambda: on_rank.start(given, out)
    on_rank.close()


@cuda.jit
def _nothing(rank):
    pass


@contextmanager
def _ready_empty(transport) -> Iterator:
    yield lambda: transport.launch(_nothing, 1, 32, transport.rank)


# Lessons: steps 1 to 4, steps 5 and 6, and one rank alone


def timed_sizes(tokens: int, ranks: int = chosen.RANKS) -> Sizes:
    """Return the sizes of recorded times; one rank alone has as many experts as each of several."""
    return Sizes(ranks, tokens, chosen.HIDDEN, chosen.TOPK, chosen.EXPERTS // chosen.RANKS)


def sizes_of(tokens: int, ranks: int = chosen.RANKS) -> Sizes:
    """Return the sizes with which kernels run here."""
    if not simulator.ENABLED:
        return timed_sizes(tokens, ranks)
    small = chosen.SMALL_HIDDEN, chosen.SMALL_TOPK, chosen.SMALL_LOCAL_EXPERTS
    return Sizes(ranks, chosen.SMALL_TOKENS, *small)


def timed(version, tokens: int, ranks: int = chosen.RANKS):
    """Return ``make(transport)`` of a version, as `RankLesson` times it."""
    return partial(_ready, Version(*version), sizes_of(tokens, ranks))


def _kernels(version, tokens, ranks=chosen.RANKS):
    version = Version(*version)
    return tuple(make(timed_sizes(tokens, ranks)) for make in (version.dispatch, version.combine) if make)


_COUNTED = (
    *((PATH, row) for row in ("global stores", "shared loads", "barriers")),
    *((TOTAL, row) for row in ("sectors stored", "bytes, other ranks", "launches")),
)


class _Lesson(RankLesson):
    """Its scores leave out what depends on how often a kernel polls, and so the estimate of its time."""

    def count(self, version, name):
        found = super().count(version, name)
        return Score(name, {row: found.rows[row] for row in _COUNTED if row in found.rows}, found.gpu)


def _lesson(name, tokens, ranks=chosen.RANKS):
    once = lambda version: outputs_of(group_of(ranks), timed(version, tokens, ranks))
    run = Run(
        lambda version: check(version, tokens),
        once,
        lambda version: timed(version, tokens, ranks),
        lambda version: _kernels(version, tokens, ranks),
    )
    return _Lesson(
        TOPIC,
        run,
        f"{__name__}:{name}",
        config=dict(ranks=ranks, num_experts=chosen.EXPERTS, topk=chosen.TOPK, hidden=chosen.HIDDEN),
        size=dict(tokens=tokens),
        dtype="bf16",
        seeds=2,
        group=group_of(ranks),
    )


lesson, many, alone = _lesson("lesson", chosen.TOKENS), _lesson("many", chosen.MANY), _lesson("alone", chosen.TOKENS, 1)


def show_launch() -> str:
    """Time an empty kernel as the steps are timed; say what predictions use."""
    us = lesson.times("launch", {"an empty kernel": _ready_empty})
    if lesson.is_timed:
        return f"an empty kernel takes {us['an empty kernel']:.2f} us here"
    return "the ranks have no GPU each: times below are recorded ones" if not us else f"recorded: {us}"


# Records and predictions


@cache
def package_record() -> dict:
    """Return the record of the package's kernels and of others."""
    return records.read(PACKAGE)


def times_of(step: str, ranks: int, dtype: str = "bf16") -> dict[int, float]:
    """Return {tokens: median microseconds} of a pair in that record; empty if it has none for these ranks."""
    series = records.series(package_record(), step=step, dtype=dtype, config={"ranks": ranks})
    return {tokens: stats["median"] for tokens, stats in series.items()}


def recorded_ranks() -> list[int]:
    """Return the numbers of ranks, above one, of that record."""
    return sorted({row["config"]["ranks"] for row in package_record()["rows"]} - {1})


def _us(us):
    return "" if us is None else records.format_us(us)


NAMES = {
    "in slots": "the package, in slots",
    "final": "the package, packed by expert",
    "normal, graph": "the package's ring buffers (lessons 12, 13)",
}


def show_pairs() -> Table:
    """Return a table of recorded pairs, ours and others', by ranks and tokens, with the lower bound."""
    lines, tokens = [], sorted(times_of("in slots", 2))
    for ranks in recorded_ranks():
        bound = {n: model.lower_bound_us(ranks, n) for n in tokens}
        named = NAMES | {step: step.removeprefix("peer:") for step in records.peers(package_record())}
        found = {name: times_of(step, ranks) for step, name in named.items()} | {"lower bound": bound}
        for name, us in found.items():
            if us:
                lines.append([str(ranks), name, *(_us(us.get(n)) for n in tokens)])
    return Table(["GPUs", "dispatch and combine, us", *(f"{n} token{'s' * (n > 1)}" for n in tokens)], lines)


def result() -> str:
    """Return what is reached with one token, in numbers of the record."""
    record, one = package_record(), lambda step: times_of(step, 2).get(1)
    versions = {row["step"][5:].split()[0]: row["version"] for row in record["rows"] if "version" in row}
    others = {step.removeprefix("peer:"): one(step) for step in records.peers(record) if one(step)}
    text = (
        f"2 GPUs, 1 token each, recorded on an H200 on {record['date'][:10]}: {one('in slots'):.1f} us in slots and "
        f"{one('final'):.1f} us packed by expert; {one('normal, graph'):.1f} us through the ring buffers of lessons 12 "
        "and 13"
    )
    for name, us in others.items():
        text += f"; {us:.1f} us with {name}"
    return f"{text} ({', '.join(f'{name} {version}' for name, version in versions.items())})."


def show_latencies() -> Table:
    """Return a table of the latencies that predictions start from."""
    rows = {
        "an empty kernel": model.launch(),
        "a load from L2 that depends on the one before": model.load(),
        "one way over NVLink: a flag is stored, a poll of the peer reads it": model.one_way("relaxed"),
        "the same, with a release before": model.one_way("release"),
    }
    return Table(["latency", "us", "record"], [[name, f"{us:.2f}", source] for name, (us, source) in rows.items()])


def chain_us(loads: float, order: str, launches: int = 1) -> float:
    """Return the time of a chain: launches, dependent loads, and for each launch one way over NVLink."""
    return launches * (model.launch().us + model.one_way(order).us) + loads * model.load().us


def loads_of(threads: int) -> int:
    """Return how many vectors of a row a thread moves, one after the other."""
    return -(-chosen.HIDDEN // 8 // threads)


def rows_each_way() -> float:
    """Return how many rows a CTA sends on average, and receives: as many as ranks have one of a token's experts."""
    return ranks_per_token(chosen.EXPERTS, chosen.TOPK, chosen.RANKS)


def _predicted(of, before, change):
    us = of.steps[before].us
    return None if us is None else change(us)


def after(before: str, change_us: float) -> float | None:
    """Return the time of a step that adds microseconds to one before, or None if that has no time."""
    return _predicted(lesson, before, lambda us: us + change_us)


def packed_us(before: str, instructions: int) -> float | None:
    """Return the predicted time of packing: copies of rows for each expert, and counting earlier entries, one by one.

    A warp counts alone on its scheduler, so an instruction takes it at least a clock.
    """
    sizes, limits = timed_sizes(chosen.MANY), chip_limits()
    copies = sizes.slots * sizes.topk // sizes.ranks  # rows that a rank writes, on average
    us = copies * 2 * sizes.hidden / limits.copy_bandwidth * 1e6
    return _predicted(many, before, lambda time: time + us + _count_us(sizes, instructions, limits))


def counted_us(before: str, instructions: int) -> float | None:
    """Return the predicted time if 32 lanes count what one counted."""
    sizes, limits = timed_sizes(chosen.MANY), chip_limits()
    return _predicted(many, before, lambda time: time - _count_us(sizes, instructions, limits) * 31 / 32)


def most_counted(sizes: Sizes | None = None) -> int:
    """Return how many entries the warp that has most to count goes through, if all are experts of this rank."""
    sizes = sizes or timed_sizes(chosen.MANY)
    ranks, tokens, topk, warps = sizes.ranks, sizes.tokens, sizes.topk, sizes.threads // 32

    def counted(token, warp):
        places = sum((j // topk * tokens + token) * topk + j % topk for j in range(warp, ranks * topk, warps))
        experts = range(token * warps + warp, sizes.local_experts, tokens * warps)
        return places + len(experts) * sizes.slots * topk

    return max(counted(token, warp) for token in range(tokens) for warp in range(warps))


def _count_us(sizes, instructions, limits):
    return most_counted(sizes) * instructions / limits.tensor_clock * 1e6


# Diagnoses and tables


def show_parts(versions: Mapping[str, Any]) -> Table:
    """Return a table of dispatches that leave something out, timed interleaved."""
    us = lesson.times("parts", {name: timed(version, chosen.TOKENS) for name, version in versions.items()})
    return Table(["dispatch", "us"], [[name, _us(us[name]) if us else "not timed"] for name in versions])


def show_alone(versions: Mapping[str, Any]) -> Table:
    """Return a table of versions: several ranks, one rank alone, and what several take beyond that, in ways."""
    several = lesson.times("together", {name: timed(v, chosen.TOKENS) for name, v in versions.items()})
    one = alone.times("alone", {name: timed(v, chosen.TOKENS, 1) for name, v in versions.items()})
    lines, way = [], model.one_way("relaxed").us
    for name in versions:
        if several and one:
            more = several[name] - one[name]
            lines.append([name, _us(several[name]), _us(one[name]), _us(more), f"{more / way:.1f}"])
        else:
            lines.append([name, "not timed", *[""] * 3])
    return Table(
        ["step", f"{chosen.RANKS} ranks, us", "one rank alone, us", "difference, us", "in one-way latencies"], lines
    )


_NO_GAIN = (  # before, after: step and dtype; tokens; what changes, and why it gains nothing
    (("in slots", "bf16"), ("in slots", "e4m3"), 1, "rows in FP8", "A row's bytes take no time; casting does."),
    (("final", "bf16"), ("final", "e4m3"), 1, "rows in FP8, packed", "As above."),
    (("in slots", "e4m3"), ("in slots, FP8 sums", "e4m3"), 1, "sums in FP8, too", "As above, in the other direction."),
    (("in slots", "bf16"), ("in slots, FP8 sums", "e4m3"), 256, "rows and sums in FP8", "Here bytes take the time."),
    (("final", "bf16"), ("flags", "bf16"), 128, "flags after data, packed", "A fence per row instead of none."),
)


def show_what_did_not_pay() -> Table:
    """Return a table of recorded variants of the package's kernels."""
    lines = []
    for (before, first), (now, second), tokens, what, why in _NO_GAIN:
        us = times_of(before, 2, first).get(tokens), times_of(now, 2, second).get(tokens)
        lines.append([what, str(tokens), *map(_us, us), why])
    return Table(["change", "tokens", "us before", "us after", "why"], lines)


def fitted() -> model.PairModel:
    """Return the model of pairs in slots, fitted to the record of two ranks."""
    return model.fit(2, times_of("in slots", 2))


def show_model() -> Table:
    """Return a table of recorded pairs in slots beside a model that is fitted to two ranks."""
    recorded, of_two, columns = times_of("in slots", 2), fitted(), {}
    for ranks in (2, 4, 8):
        if ranks in recorded_ranks():
            columns[f"{ranks} GPUs, recorded"] = times_of("in slots", ranks)
        kind = "fitted" if ranks == 2 else "extrapolated"
        columns[f"{ranks} GPUs, {kind}"] = {tokens: of_two.pair_us(ranks, tokens) for tokens in recorded}
    lines = [[str(tokens), *(_us(us.get(tokens)) for us in columns.values())] for tokens in recorded]
    return Table(["tokens", *columns], lines)


def describe_model() -> str:
    """Return the fitted model in words."""
    of_two = fitted()
    deviation = of_two.deviation(2, times_of("in slots", 2))
    return (
        f"{of_two.latency_us:.1f} us + bytes of both directions / {of_two.gbps:.0f} GB/s; largest deviation from the "
        f"record {100 * deviation:.0f} %; measured push rate {model.push_gbps():.0f} GB/s"
    )


# What happens in slots, as a player; the package's interface

SHOWN = Sizes(2, 2, 8, 1, 1)  # one expert on each rank
SHOWN_EXPERTS = [[[0], [1]], [[0], [0]]], [[[1], [0]], [[0], [1]]]  # by operation, rank and token


def play(version, data_is_flag: bool) -> Player:
    """Run two operations in the simulator, and return a player of what happened in the slots of two ranks."""
    if simulator.ENABLED:
        return Player.from_dict(_play(version, data_is_flag))
    expression, functions = expression_of(version)
    return Player.from_dict(in_simulator(_play_again, expression, data_is_flag, functions=functions))


def _play_again(version, data_is_flag):
    return _play(eval(version, vars(sys.modules["__main__"])), data_is_flag)  # an expression of the page's functions


def _play(version, data_is_flag):
    rows = torch.ones(4, 8).bfloat16()
    rounds = [Round([rows[:2]] * 2, [torch.tensor(ids) for ids in experts], [rows] * 2) for experts in SHOWN_EXPERTS]
    with simulator.seed(1), simulator.trace(accesses=True) as events:
        outputs(Version(*version)._replace(combine=None), SHOWN, rounds)
    title = "Data as its own flag" if data_is_flag else "Flags after data"
    return Player(*draw.slot_frames(events, SHOWN, data_is_flag), f"{title}: slots of two ranks").as_dict()


def strip(player: Player, *frames: tuple[str, ...]):
    """Draw the first frames whose sentences contain these words."""
    notes = [frame.note for frame in player.frames]
    return player.strip([next(n for n, note in enumerate(notes) if all(w in note for w in words)) for words in frames])


def show_package() -> str:
    """Run the package's pair on virtual ranks: dispatch, an expert that multiplies, combine; return what came out."""
    small, large = Sizes(chosen.RANKS, 2, 64, 2, 2), Sizes(chosen.RANKS, 8, 7168, 8, chosen.EXPERTS // chosen.RANKS)
    sizes, num_sms = (small, 3) if simulator.ENABLED else (large, None)
    inputs, num_experts = random_rounds(sizes, 1)[0], sizes.ranks * sizes.local_experts
    weights = [torch.rand(sizes.tokens, sizes.topk) for _ in range(sizes.ranks)]

    def decode_step(transport):
        given = inputs.x[transport.rank], inputs.topk_idx[transport.rank], weights[transport.rank]
        x, topk_idx, of_rank = (tensor.to(transport.device) for tensor in given)
        buffer = Buffer(transport, low_latency_mode=True)
        pair = buffer.low_latency(sizes.tokens, sizes.hidden, num_experts, sizes.topk, num_sms=num_sms)
        received = pair.dispatch(x, topk_idx)
        out = pair.combine((2 * received.x.float()).bfloat16(), topk_idx, of_rank).clone()
        buffer.check(synchronize=True)  # raises the error of a timeout
        pair.close()
        buffer.destroy()
        return out.cpu()

    lines = []
    for rank, out in enumerate(group_of(sizes.ranks).run(decode_step)):
        expected = 2 * inputs.x[rank].double() * weights[rank].double().sum(1, keepdim=True)
        is_right = ((out - expected).abs() <= 2**-6 * expected.abs()).all()
        lines.append(f"rank {rank}: {'right' if is_right else 'WRONG'}, {len(out)} tokens to {num_experts} experts")
    return "\n".join(lines)
