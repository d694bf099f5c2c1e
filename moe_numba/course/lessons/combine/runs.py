"""What the lesson "Combine" does with a version: it launches it on all ranks, checks and times it, and predicts."""

import itertools
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import cache
from math import comb
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.bench import link, records
from moe_numba.course.bench.baselines.limits import H200  # rates of records are an H200's
from moe_numba.course.bench.timing.multigpu import outputs_of, settle
from moe_numba.course.deepep_port import combine as port
from moe_numba.course.deepep_port import launch as port_launch
from moe_numba.course.deepep_port import notify as port_notify
from moe_numba.course.deepep_port.buffer_layout import SIGNALS_BYTES, DeepEPConfig, min_buffer_bytes, min_ring_slots
from moe_numba.course.deepep_port.polling import STATUS_WORDS, explain
from moe_numba.course.lessons.combine import sizes
from moe_numba.course.lessons.combine.inputs import channels_of, handles_of, random_routing, rows_of, sums_of
from moe_numba.course.lessons.combine.sizes import EXPERTS, RANKS
from moe_numba.course.pages.sizes import reachable_gpus
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Run, Table
from moe_numba.course.steps.ranks import RankLesson
from moe_numba.course.steps.score import TOTAL, Score
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.expert_parallel.buffer import Buffer
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.expert_parallel.rings.config import Config
from moe_numba.expert_parallel.rings.progress import make_publish as _make_publish
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address

TOPIC, EARLIER, DISPATCH = "combine_steps_ladder", "combine_ladder", "ring_buffer_dispatch_ladder"
SIMULATED = simulator.ENABLED
if SIMULATED:
    TOKENS, HIDDEN, TOPK = sizes.SMALL_TOKENS, sizes.SMALL_HIDDEN, sizes.SMALL_TOPK
    SMS, WARPS, RING_ROWS, CHUNK, PUSH_CTAS = sizes.SMALL_SMS, sizes.SMALL_WARPS, sizes.SMALL_RING_ROWS, 2, 2
    DEVICES, PORT_WARPS, PORT_ROWS = None, 2 if RANKS == 2 else 1, 24
else:
    TOKENS, HIDDEN, TOPK = sizes.TOKENS, sizes.HIDDEN, sizes.TOPK
    WARPS, RING_ROWS, CHUNK, PUSH_CTAS = sizes.WARPS, sizes.RING_ROWS, sizes.CHUNKS.get(RANKS, 4), 132
    DEVICES = list(range(RANKS)) if reachable_gpus() >= RANKS else [0] * RANKS
    # A CTA of our kernels has an SM of its own, and CTAs of all ranks wait for one another.
    SMS = sizes.SMS if len(set(DEVICES)) == RANKS else min(sizes.SMS, 128 // RANKS // 2 * 2)
    PORT_WARPS, PORT_ROWS = 24 // RANKS, RING_ROWS
GROUP = LocalGroup(RANKS, DEVICES)
CONFIG = {"num_experts": EXPERTS, "topk": sizes.TOPK, "ranks": RANKS, "num_sms": sizes.SMS}
SIZE = {"tokens": sizes.TOKENS, "hidden": sizes.HIDDEN}

# What the page's kernels need to know when they are compiled

ROW_WORDS = HIDDEN // 2  # of 4 bytes, two elements of bfloat16 each
VECTORS = max(
    1, 8 // RANKS
)  # of 16 bytes of each row that a lane keeps in flight: with those of all ranks 32 registers
MOST_CHANNELS = 64 if SIMULATED else 1536  # of 48 SMs, with four for each warp
# Words of a rank's shared memory. TAILS: [channel, rank that sends]. HEADS: [channel, the other rank].
TAILS, HEADS, BARRIERS = 0, MOST_CHANNELS * RANKS, 2 * MOST_CHANNELS * RANKS
ROWS = BARRIERS + 32
# Words of a rank's private state. SENT and RECEIVED have a counter for each [channel, rank].
NEXT_CHANNEL, GAVE_UP, SENT, RECEIVED = 0, 2, 32, 32 + MOST_CHANNELS * RANKS
_STATE_WORDS = 32 + 2 * MOST_CHANNELS * RANKS
_MOST_POLLS = 1 << 22  # some seconds


class Switches(NamedTuple):
    """What a version of the ring kernel does; each step turns one of them."""

    counters_go_on: bool = False  # from launch to launch; otherwise two barriers and a kernel clear them
    head_at_sender: bool = False  # the receiver stores the head in the sender's memory, otherwise in its own
    signalling_warp: bool = False  # one warp of a CTA publishes for all; otherwise each warp releases
    bulk_send: bool = False  # the sender copies rows by TMA, otherwise through registers
    own_rings: bool = True  # a rank's own rows also pass through a ring, to itself
    bulk_receive: bool = False  # TMA loads the own row, and stores the sum
    balance: bool = False  # four channels for each warp, which takes the next one from a counter

    @property
    def channels(self) -> int:
        """Channels of a rank."""
        return SMS // 2 * WARPS * (4 if self.balance else 1)

    @property
    def slots(self) -> int:
        """Rows that fit into one ring: a power of two."""
        rows = max(1, RING_ROWS * SMS // 2 // self.channels)
        return 1 << rows.bit_length() - 1

    @property
    def staging(self) -> int:
        """Where the rows of a CTA's warps begin in its shared memory, in words of 4 bytes."""
        return -(-(2 * (WARPS + 2 * WARPS * RANKS) + WARPS + 1) // 32) * 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return 4 * (self.staging + (WARPS * ROW_STRIDE if self.bulk_send or self.bulk_receive else 0))


ROW_STRIDE = -(-ROW_WORDS // 32) * 32  # of rows in shared memory
# Shared memory before the rows: an mbarrier of each warp; the progress of each warp on each ring, and what of it has
# been published (offsets in words of 8 bytes); a flag of each warp that it is done (4 bytes).
MBARRIER, PROGRESS, PUBLISHED, DONE = 0, WARPS, WARPS + WARPS * RANKS, 2 * (WARPS + 2 * WARPS * RANKS)


class _Shape(NamedTuple):
    num_ranks: int
    warps: int
    progress_offset: int
    published_offset: int
    done_offset: int


def make_publish() -> Any:
    """Make the signalling warp of lesson 12, for this lesson's shared memory."""
    return _make_publish(_Shape(RANKS, WARPS, PROGRESS, PUBLISHED, DONE))


class Call(NamedTuple):
    """The arguments of the ring kernel that its device functions take as one."""

    local: Any  # int32*, this rank's shared memory
    peers: Any  # uint64* [ranks], the address of each rank's shared memory
    rank: Any
    state: Any  # int32*, private
    y: Any  # int32*, the rows to return
    row_start: Any  # int32*, see `inputs.Channels`
    position: Any  # int32*
    tokens: Any
    share: Any  # tokens of a channel
    channels: Any
    out: Any  # int32*


class Rows(NamedTuple):
    """Where the rows of a token are."""

    local: Any  # this rank's shared memory, with rings or a buffer
    y: Any  # this rank's own rows, if they pass through no ring
    smem: Any  # int32, shared memory of the CTA
    staging: Any  # where in it the warp's row begins
    rank: Any


@cuda.jit(device=True)
def give_up(state, polls):
    """Return whether a wait has lasted for seconds, here or elsewhere on this rank. A wrong kernel then ends."""
    if polls & 1023 != 1023:
        return False
    if polls > _MOST_POLLS:
        st_release_sys_s32(state, GAVE_UP, int32(1))
    return ld_volatile_s32(state, GAVE_UP) != 0


@cuda.jit
def barrier(local, peers, state, rank, number):
    """All ranks meet: a warp stores a number in each rank's memory, and waits for those of all ranks."""
    lane, polls = int32(cuda.threadIdx.x), int32(0)
    if lane < RANKS:
        st_release_sys_s32(pointer_from_address(peers[lane], local), BARRIERS + rank, number)
        while int32(uint32(ld_acquire_sys_s32(local, BARRIERS + lane)) - uint32(number)) < 0:
            polls = int32(polls + 1)
            if give_up(state, polls):
                break


@cuda.jit
def clear(local):
    """Set all heads and tails of this rank's memory to 0."""
    i = int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    while i < BARRIERS:
        local[i] = int32(0)
        i = int32(i + cuda.gridDim.x * cuda.blockDim.x)


class Version(NamedTuple):
    """A step, and how it is launched.

    Attributes
    ----------
    way : str
        "push" (``kernel`` pushes, ``then`` sums), "port" (our port of DeepEP's kernels) or "rings" (``kernel``).
    kernel, then : kernel, optional
    switches : Switches
    """

    way: str
    kernel: Any = None
    then: Any = None
    switches: Switches = Switches()


# Inputs


class Inputs(NamedTuple):
    """Routing, rows and right sums of all ranks."""

    is_in: list
    y: list
    other: list  # rows that each check combines first, so that stale rows are wrong
    right: list


@cache
def inputs(kind: str = "uniform", seed: int = 0) -> Inputs:
    """Return inputs with a kind of routing, on the ranks' devices."""
    is_in = random_routing(TOKENS, EXPERTS, TOPK, RANKS, kind, seed)
    y, other = ([_random_rows(len(rows_of(is_in, r).home), r, seed + n) for r in range(RANKS)] for n in (100, 200))
    right = list(sums_of(y, is_in))
    for device in () if SIMULATED else set(GROUP.devices):  # ranks have streams of their own
        torch.cuda.synchronize(device)
    return Inputs(is_in, y, other, right)


def _random_rows(count, rank, seed):
    device = GROUP.devices[rank]
    generator = torch.Generator(device).manual_seed(seed + rank)
    return torch.randn(count, HIDDEN, generator=generator, device=device).bfloat16()


# Launches


def timed(version, given: Inputs | None = None, sms: int = SMS) -> Callable:
    """Return ``make(transport)``, which yields ``step(y)``: one combine of this rank."""
    version = Version(*version)
    return {"push": _push, "port": _port, "rings": _rings}[version.way](
        version._replace(switches=Switches(*version.switches)), given or inputs(), sms
    )


def kernels_of(version) -> tuple:
    """Return all kernels that a version launches."""
    version = Version(*version)
    if version.way == "port":
        config = port_config()
        return port_notify.make_cached_notify_combine(config), port.make_combine(config)
    if version.way == "push":
        return barrier, version.kernel, version.then
    return (version.kernel,) if Switches(*version.switches).counters_go_on else (barrier, clear, version.kernel)


@contextmanager
def _shared(transport, words):
    """Yield this rank's shared memory, all ranks' addresses, its state, and a function that launches a barrier."""
    shared, numbers = transport.allocate(4 * words), itertools.count(1)
    local = shared.local.view(torch.int32)
    local[ROWS:] = -1  # NaNs: rows that have not come
    state = torch.zeros(_STATE_WORDS, dtype=torch.int32, device=transport.device)
    _synchronize(transport)

    def meet():
        transport.launch(barrier, 1, 32, local, shared.addresses, state, transport.rank, next(numbers))

    yield local, shared.addresses, state, meet
    settle(transport)
    if int(state[GAVE_UP]):
        raise WrongResult(f"rank {transport.rank} has waited for seconds, and gave up: a row or a slot never came")
    shared.close()


def _synchronize(transport):
    if not SIMULATED:
        torch.cuda.synchronize(transport.device)


def _words(tensor):
    return tensor.reshape(-1).view(torch.int32)


def _push(version, given, _):
    @contextmanager
    def make(transport):
        r, device = transport.rank, transport.device
        home, token = (each.to(device) for each in rows_of(given.is_in, r))
        is_in = given.is_in[r].to(device).view(torch.uint8)
        out = torch.full((TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
        with _shared(transport, ROWS + TOKENS * RANKS * ROW_WORDS) as (local, addresses, _, meet):

            def step(y=given.y):
                meet()  # all ranks have summed their rows of the last step
                transport.launch(
                    version.kernel, PUSH_CTAS, _threads(), _words(y[r]), home, token, len(y[r]), addresses, r
                )
                meet()  # all rows have come
                transport.launch(version.then, PUSH_CTAS, _threads(), local, is_in, TOKENS, _words(out))
                return out

            yield step

    return make


def _threads():
    return 64 if SIMULATED else 512


def _rings(version, given, sms):
    switches = version.switches

    @contextmanager
    def make(transport):
        r, device, numbers = transport.rank, transport.device, itertools.count()
        channels = sms // 2 * WARPS * (4 if switches.balance else 1)
        share, row_start, position = channels_of(given.is_in, r, channels)
        row_start, position = row_start.to(device), position.to(device)
        rows = channels * RANKS * switches.slots
        out = torch.full((TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
        with _shared(transport, ROWS + rows * ROW_WORDS) as (local, addresses, state, meet):

            def step(y=given.y):
                if not switches.counters_go_on:
                    meet()
                    transport.launch(clear, 1 if SIMULATED else 8, 256, local)
                    meet()
                of_rank = local, addresses, r, state, _words(y[r]), row_start, position
                rest = TOKENS, share, channels, next(numbers), _words(out)
                shared = switches.shared_bytes
                transport.launch(version.kernel, sms, 32 * (WARPS + 1), *of_rank, *rest, shared_bytes=shared)
                return out

            yield step

    return make


@cache
def port_config(sms: int = SMS, **changes) -> DeepEPConfig:
    """Return the configuration of our port of DeepEP's combine."""
    config = DeepEPConfig(RANKS, sms // 2, PORT_ROWS, CHUNK, 2 * HIDDEN, 0, 0, EXPERTS, PORT_WARPS, **changes)
    return config._replace(ring=max(config.ring, min_ring_slots(config)))


def _port(_, given, sms):
    config = port_config(sms)

    @contextmanager
    def make(transport):
        r, device = transport.rank, transport.device
        size = min_buffer_bytes(combine=config)
        shared = transport.allocate(size + SIGNALS_BYTES)
        shared.local[:size] = 0xFF
        signals = (shared.addresses.view(torch.int64) + size).view(torch.uint64)
        status = torch.zeros(STATUS_WORDS, dtype=torch.int32, device=device)
        _synchronize(transport)
        rank = port_launch.Rank(r, shared.addresses, signals, status, 0 if SIMULATED else 10**10, transport.launch)
        handle = port_launch.Handle(*(each.to(device) for each in handles_of(given.is_in, config.channels)[r]))

        def step(y=given.y):
            port_launch.cached_notify_combine(rank, config, handle)
            return port_launch.combine(rank, config, y[r], handle)[0]

        yield step
        settle(transport)
        if message := explain(status.cpu()):
            raise WrongResult(message)
        shared.close()

    return make


def torch_combine(given: Inputs | None = None) -> Callable:
    """Return ``make(transport)`` of the reference in torch: each rank pulls rows and adds them."""
    given = given or inputs()

    @contextmanager
    def make(transport):
        r, device, parts = transport.rank, transport.device, []
        for peer in range(RANKS):
            rows = rows_of(given.is_in, peer)
            own = (rows.home == r).nonzero().flatten()
            if len(own):
                parts.append((peer, slice(int(own[0]), int(own[-1]) + 1), rows.token[own].long().to(device)))

        def step(y=given.y):
            total = torch.zeros(TOKENS, HIDDEN, device=device)
            for peer, rows, tokens in parts:
                total.index_add_(0, tokens, y[peer][rows].to(device, non_blocking=True).float())
            return total.bfloat16()

        yield step

    return make


def package(given: Inputs | None = None, sms: int = SMS) -> Callable:
    """Return ``make(transport)`` of the package's `Buffer.combine`, after a dispatch."""
    given, config = given or inputs(), Config(sms, CHUNK, 256)

    @contextmanager
    def make(transport):
        r, device = transport.rank, transport.device
        buffer = Buffer(transport, config.get_nvl_buffer_size_hint(2 * HIDDEN, RANKS), timeout=20.0)
        is_in = given.is_in[r].to(device)
        handle = buffer.dispatch(
            torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device),
            num_tokens_per_rank=is_in.sum(0, dtype=torch.int32),
            num_tokens_per_expert=torch.zeros(EXPERTS, dtype=torch.int32, device=device),
            is_token_in_rank=is_in,
            config=config,
        )[4]
        yield lambda y=given.y: buffer.combine(y[r], handle, config=config)[0]
        settle(transport)
        buffer.destroy()

    return make


# Checks


def wrong(outputs: list, right: list) -> str | None:
    """Return None, or a sentence on the first rank and token whose bits are wrong."""
    for rank, (out, sums) in enumerate(zip(outputs, right, strict=True)):
        if len(rows := (out.view(torch.int16) != sums.view(torch.int16)).any(1).nonzero()):
            token = int(rows[0])
            column = int((out[token].view(torch.int16) != sums[token].view(torch.int16)).nonzero()[0])
            found, wanted = float(out[token, column]), float(sums[token, column])
            return (
                f"rank {rank}: {len(rows)} of {len(sums)} tokens are wrong; element {column} of token {token} is "
                f"{found:g}, not {wanted:g}"
            )
    return None


def error_of(make: Callable, given: Inputs | None = None) -> str | None:
    """Run a step on all ranks, on other rows and then on those that are compared; return what is wrong, or None."""
    given = given or inputs()

    @contextmanager
    def twice(transport):
        with make(transport) as step:

            def run():
                step(given.other)
                return step(given.y)

            yield run

    return wrong(outputs_of(GROUP, twice), given.right)


def check(version) -> str | None:
    """Compare all ranks' sums with the right ones, bit for bit, in the second of two launches."""
    return error_of(timed(version))


def once(version) -> list:
    """Launch a version once; its work is counted."""
    return outputs_of(GROUP, timed(version))


class _Lesson(RankLesson):
    """Its scores say what all ranks move: by loads and stores of lanes, by bulk copies, between ranks."""

    @contextmanager
    def conditions(self, seed, races):
        """As those of lessons between ranks, but with many ranks, whose polls take long, without weak memory."""
        if RANKS <= 4:
            with super().conditions(seed, races):
                yield
        else:
            with simulator.seed(seed), simulator.races(races):
                yield

    def fault(self, version):
        """Return what is wrong with a version, or None. The simulator detects races in the first of its orders."""
        if not SIMULATED:
            return self.run.check(version)
        return next(filter(None, (self._checked(version, seed, seed == 0) for seed in range(self.seeds))), None)

    def count(self, version, name):
        """Return the score of a version, of one combine on all ranks; the simulator counts."""
        with simulator.seed(0), simulator.profile() as profile:
            self.run.once(version)
        with simulator.seed(0), simulator.trace() as events:  # apart: together they take five times as long
            self.run.once(version)
        totals = [kernel.total for kernel in profile.kernels]
        wide = {way: sum(_requests(total, way) for total in totals) for way in ("load", "store")}
        signals = [e for e in events if e.what == "store" and str(e.details.get("buffer", "")).startswith("the buffer")]
        rows = {
            "launches of a rank": sum(len(kernel.launches) for kernel in profile.kernels) // RANKS,
            "loads of 16 bytes a lane": wide["load"],
            "stores of 16 bytes a lane": wide["store"],
            "bytes, bulk copies": sum(total.async_bytes for total in totals),
            "bytes, other ranks": sum(total.peer_bytes for total in totals),
            "signals to peers, signalling warp apart": sum(
                event.warp < WARPS or version[0] == "port" for event in signals
            ),
        }
        return Score(name, {(TOTAL, row): number for row, number in rows.items()}, self.gpu.upper())


def _requests(total, way):
    return sum(
        found.requests
        for (space, of, size), found in total.accesses.items()
        if (space, of, size) == ("global", way, 16)
    )


lesson = _Lesson(
    TOPIC,
    Run(check, once, timed, kernels_of),
    f"{__name__}:lesson",
    config=CONFIG,
    size=SIZE,
    dtype="bfloat16",
    seeds=2 if RANKS == 2 else 1,
    group=GROUP,
    launches=1 if SIMULATED else 8,
    samples=1 if SIMULATED else 12,
)


# Bytes, rates, lower bounds


def ranks_of_a_token(ranks: int, experts: int = EXPERTS, topk: int = sizes.TOPK) -> float:
    """Return how many ranks a token visits on average, if all experts are equally likely."""
    others = experts - experts // ranks
    return ranks * (1 - comb(others, topk) / comb(experts, topk))


def share_with_two_rows(ranks: int, experts: int = EXPERTS, topk: int = sizes.TOPK) -> float:
    """Return the share of tokens that have at most two rows, if all experts are equally likely."""
    of = lambda n: comb(n * (experts // ranks), topk) / comb(experts, topk)  # all experts on n given ranks
    return comb(ranks, 2) * of(2) - ranks * (ranks - 2) * of(1) if ranks > 1 else 1.0


class Bytes(NamedTuple):
    """What a rank sends, and what its sum reads and writes, in bytes."""

    wire: float
    own: float  # rows that stay
    sum: float


def bytes_of(ranks: int = RANKS) -> Bytes:
    """Return a rank's bytes with the sizes of the record."""
    row = 2 * sizes.HIDDEN
    rows = sizes.TOKENS * ranks_of_a_token(ranks) * row
    return Bytes(rows * (ranks - 1) / ranks, rows / ranks, rows + sizes.TOKENS * row)


def push_rates() -> dict[str, float]:
    """Return the recorded rates of pushing rows to a peer, "way: CTAs" -> GB/s (lesson 11)."""
    if found := link.push_gbps():
        return {f"{way}: {ctas}": rate for (way, ctas), rate in found.items()}
    raise LookupError(f"neither {link.RECORD} nor {link.EARLIER} has recorded how fast rows are pushed")


def push_rate() -> float:
    """Return the best recorded rate in bytes per second: NVLink's lower bound, here as in lesson 12."""
    return 1e9 * max(push_rates().values())


def wire_us(ranks: int = RANKS) -> float:
    """Return the lower bound: all bytes that leave a rank at the best push rate."""
    return bytes_of(ranks).wire / push_rate() * 1e6


def lower_bound() -> Table:
    """Return a table of bytes and lower bounds by number of ranks."""
    lines, memory = [], H200.copy_bandwidth
    for ranks in sorted({2, 4, 8, RANKS}):
        of = bytes_of(ranks)
        moved = of.wire + of.sum
        line = f"{ranks_of_a_token(ranks):.2f}", f"{of.wire / 1e6:.1f}", f"{wire_us(ranks):.0f}"
        lines.append([str(ranks), *line, f"{moved / 1e6:.0f}", f"{moved / memory * 1e6:.0f}"])
    heads = (
        "ranks",
        "rows of a token",
        "MB that leave a rank",
        "us at the push rate",
        "MB of its memory",
        "us of a copy",
    )
    return Table(heads, lines)


def result() -> str:
    """Return where the lesson starts and ends, in numbers of records."""
    where = "each rank has a GPU" if lesson.is_timed else "virtual ranks: nothing is timed between them"
    rows = f"{sizes.TOKENS} tokens of {sizes.HIDDEN} elements on each of {RANKS} ranks, top {sizes.TOPK} of {EXPERTS}"
    text = f"{rows} experts; {where}. Sizes: moe_numba/course/lessons/combine/sizes.py.\n"
    text += f"Lower bound: {bytes_of().wire / 1e6:.1f} MB leave each rank, {wire_us():.0f} us at the best push rate."
    for topic, first, last, of in (
        (TOPIC, "push, then sum", "balanced", "this lesson"),
        (EARLIER, "push, then sum", "final", "an earlier version"),
    ):
        us = {step: recorded_us(topic, step) for step in (first, last)}
        if all(us.values()):
            ends = f"first {us[first]:.0f} us on all SMs, at the end {us[last]:.0f} us on {sizes.SMS} SMs"
            return f"{text}\nRecorded on H200s, {of}: {ends}."
    return text


def recorded_us(topic: str, step: str, **where: Any) -> float | None:
    """Return a recorded time for the record's sizes and `RANKS`, whatever its code, or None."""
    about = dict(config={"ranks": RANKS}, size=SIZE) | where
    row = records.find(records.recorded(topic) or {"rows": []}, step=step, **about)
    return row and row["kernel_us"]["median"]


# Predictions: microseconds, or None where the time that they start from is not known


def _earlier(name):
    row = records.find(records.recorded(EARLIER) or {"rows": []}, step="final", config={"ranks": RANKS}, size=SIZE)
    return row and row.get(name)


def launches_us(launches: int, barriers: int) -> float:
    """Return what launches and barriers of all ranks take: an empty kernel, and a recorded flag."""
    empty = records.find(records.recorded("align"), step="empty kernel", config={"dependent": False})
    flag = link.one_way_us("release") or 0
    return launches * empty["kernel_us"]["median"] + barriers * flag


def predict_push(vectors: int = 1) -> float:
    """Return the time of pushing at the push rate, summing, four launches and two barriers."""
    rate = (_earlier("sum_gbps") or {}).get(f"132, {vectors}")
    rate = 1e9 * rate if rate and vectors > 1 else H200.copy_bandwidth
    return wire_us() + bytes_of().sum / rate * 1e6 + launches_us(4, 2)


def after_sum(before: str, vectors: int) -> float | None:
    """Return the time of a step whose sum reads at another recorded rate."""
    us, rates = lesson.steps[before].us, _earlier("sum_gbps") or {}
    if us is None or not {"132, 1", f"132, {vectors}"} <= rates.keys():
        return None
    return us - bytes_of().sum * (1 / rates["132, 1"] - 1 / rates[f"132, {vectors}"]) / 1000


def latency_ns() -> float | None:
    """Return the latency of a load under load: by Little's law from the recorded sum on 12 CTAs with one vector."""
    rate = (_earlier("sum_gbps") or {}).get("12, 1")
    if not rate:
        return None
    of = bytes_of()
    in_flight = 12 * 512 * 16 * (of.wire + of.own) / (sizes.TOKENS * 2 * sizes.HIDDEN)
    return in_flight / (rate * (of.wire + of.own) / of.sum)


def reading_us(vectors: int, warps: int = sizes.WARPS) -> float | None:
    """Return the time in which the receiving SMs read and sum all rows, by the recorded sum on 12 CTAs of 16 warps."""
    rate = (_earlier("sum_gbps") or {}).get(f"12, {vectors}")
    return rate and bytes_of().sum / (rate * (sizes.SMS // 2 / 12) * (warps / 16)) / 1000


def sending_us(way: str, own: bool = True) -> float | None:
    """Return the time in which the sending SMs copy rows, by recorded rates of one CTA and of all of them."""
    rates, ctas = push_rates(), sizes.SMS // 2
    if not {f"{way}: 1", f"{way}: {ctas}"} <= rates.keys():
        return None
    of = bytes_of()
    copied = of.wire + (of.own if own else 0)
    return max(copied / (ctas * rates[f"{way}: 1"]), of.wire / rates[f"{way}: {ctas}"]) / 1000


def releases_us(own: bool = True) -> float | None:
    """Return what the releases of one sending warp take, if each of its rows needs one: recorded beside stores."""
    ns = link.signal_ns("st.release", link.OTHER_WARPS)
    of = bytes_of()
    rows = (of.wire + (of.own if own else 0)) / (2 * sizes.HIDDEN) / (sizes.SMS // 2 * sizes.WARPS)
    return ns and rows * ns / 1000


def slower_of(*parts: float | None) -> float | None:
    """Return the largest time, or None if one is not known."""
    return None if None in parts else max(parts)


def less(before: str, *parts: float | None) -> float | None:
    """Return the time of a step less the parts that disappear, but not less than the lower bound."""
    us = lesson.steps[before].us
    return None if us is None or None in parts else max(wire_us(), us - sum(parts))


def _difference(a, b):
    return None if a is None or b is None else a - b


def added(*parts: float | None) -> float | None:
    """Return the sum of times, or None if one is not known."""
    return None if None in parts else sum(parts)


def without_own_rows(before: str, vectors: int) -> float | None:
    """Return the time of a step whose senders copy only rows that leave the rank, while the receivers read all."""
    way, reads = "bulk copies after bulk loads", reading_us(vectors)
    sides = [slower_of(reads, sending_us(way, own)) for own in (True, False)]
    return less(before, _difference(*sides))


def evened(before: str) -> float | None:
    """Return the time of a step whose last warp finishes with the mean, by an earlier version's recorded ends."""
    ends = _earlier("equal_shares_us")
    return less(before, ends and ends[2] - ends[1])


# Tables and cells that explain


def show_rates() -> str:
    """Return Little's law for a sum, computed from recorded rates, and these rates."""
    latency, rate = latency_ns(), H200
    if latency is None:
        return "no rate of a sum with few CTAs is recorded for these sizes"
    needed = rate.copy_bandwidth * latency * 1e-9
    lines = [
        f"latency under load, from the recorded sum on 12 CTAs with 1 vector of each row: {latency:.0f} ns",
        f"{rate.copy_bandwidth / 1e12:.1f} TB/s x {latency:.0f} ns = {needed / 1e6:.2f} MB in flight in the GPU, "
        f"{needed / rate.sm_count / 1024:.0f} KB in each of {rate.sm_count} SMs",
    ]
    rates = _earlier("sum_gbps") or {}
    for vectors in (1, 2, 4, 8):
        found = [(ctas, rates.get(f"{ctas}, {vectors}")) for ctas in (12, rate.sm_count)]
        recorded = ", ".join(f"{gbps:.0f} GB/s on {ctas} SMs" for ctas, gbps in found if gbps)
        lines.append(
            f"{vectors} x 16 bytes of {RANKS} rows, 512 threads: {vectors * RANKS * 8:.0f} KB in an SM; "
            f"the sum reads and writes {recorded}"
        )
    return "\n".join(lines)


def _interleaved(given, rank):
    """Return an order of a rank's rows in which their home ranks alternate."""
    home = rows_of(given.is_in, rank).home
    turn = torch.zeros_like(home)
    for source in range(RANKS):
        turn[home == source] = torch.arange(int((home == source).sum()), dtype=torch.int32)
    return (turn.long() * RANKS + home).argsort()


def _push_alone(version, keep):
    """Return ``make(transport)`` of the push alone, of rows that ``keep(given, rank)`` selects, in its order."""
    version, given = Version(*version), inputs()

    @contextmanager
    def make(transport):
        r, device = transport.rank, transport.device
        chosen = keep(given, r)
        home, token = (each[chosen].to(device) for each in rows_of(given.is_in, r))
        y = _words(given.y[r][chosen.to(device)])
        with _shared(transport, ROWS + TOKENS * RANKS * ROW_WORDS) as (_, addresses, __, meet):

            def step():
                meet()
                transport.launch(version.kernel, PUSH_CTAS, _threads(), y, home, token, len(home), addresses, r)

            yield step

    return make


def show_push_orders(version) -> Table:
    """Return a table of the push alone: rows in their order, with home ranks alternating, and without own rows."""
    orders = {
        "own rows in one block": lambda given, r: torch.arange(len(given.y[r])),
        "home ranks alternate": _interleaved,
        "no own rows": lambda given, r: (rows_of(given.is_in, r).home != r).nonzero().flatten(),
    }
    us = lesson.times("push", {name: _push_alone(version, keep) for name, keep in orders.items()})
    wire = bytes_of().wire
    lines = [
        [name, *([records.format_us(us[name]), f"{wire / us[name] / 1000:.0f}"] if us else ["not timed", ""])]
        for name in orders
    ]
    for label, step in (("recorded: the push of an earlier version", "push_us"),):
        if found := _earlier(step):
            lines.append([label, records.format_us(found), f"{wire / found / 1000:.0f}"])
    naive = recorded_us(DISPATCH, "naive, all SMs")
    if naive:
        lines.append(
            ["recorded: lesson 12's naive dispatch, all SMs", records.format_us(naive), f"{wire / naive / 1000:.0f}"]
        )
    return Table(["push alone, all SMs", "us", "GB/s on the wire"], [*lines, ["lower bound", f"{wire_us():.0f}", ""]])


def explain_push_orders() -> str:
    """Return what the times of `show_push_orders` say, computed."""
    block, alternate = (_diagnosed_us(f"push: {name}") for name in ("own rows in one block", "home ranks alternate"))
    if block is None or alternate is None:
        return "These kernels have not been timed on two GPUs yet, so this page cannot answer the question."
    if alternate < 0.95 * block:
        return (
            f"Yes: in one block {block:.0f} us, alternating {alternate:.0f} us. The rings of step 4 need no such "
            "order, since a sending warp serves all ranks in turn."
        )
    return f"No: in one block {block:.0f} us, alternating {alternate:.0f} us."


def _diagnosed_us(label):
    """Return the time of a row that `Lesson.times` has measured here, or that is recorded, or None."""
    row = lesson.diagnosed.get(label)
    return row["kernel_us"]["median"] if row else recorded_us(TOPIC, label)


def explain_port() -> str | None:
    """Return what the port's time says beside that of dispatch, or None if one is not known."""
    us, dispatch = _step_us("our port of DeepEP's rings"), recorded_us(DISPATCH, "DeepEP's ring")
    if us is None or dispatch is None:
        return None
    if us < 1.2 * dispatch:
        return f"It takes {us:.0f} us, and the port's dispatch {dispatch:.0f} us: waiting for all rows costs little."
    return (
        f"The port's combine takes {us:.0f} us, and its dispatch {dispatch:.0f} us. The bytes are the same, so the "
        "difference is in what combine does besides: it waits for whole tokens, loads rows for sums, and computes "
        "heads. The next two steps change the heads, and then the loads."
    )


def _step_us(name):
    step = lesson.steps.get(name)
    return (step and step.us) or recorded_us(TOPIC, name)


def explain_ways() -> str | None:
    """Return what the three switches on the way of a row have gained, or None if a time is not known."""
    before, after = _step_us("a signalling warp"), _step_us("bulk copies receive")
    reads, sends = reading_us(VECTORS), sending_us("bulk copies after bulk loads", own=False)
    if before is None or after is None:
        return None
    if after < 0.97 * before:
        return f"Together the three switches bring {before:.0f} us to {after:.0f} us."
    text = f"Together the three switches gain nothing: {before:.0f} us before them, {after:.0f} us after them."
    if reads is None or sends is None or reads < sends:
        return f"{text} We do not know why."
    return (
        f"{text} They take work from the senders. But these are the faster side: by recorded rates they need "
        f"{sends:.0f} us for the rows that leave, and the receivers need {reads:.0f} us for their reads."
    )


def sum_that_shows_us() -> float | None:
    """Return how much longer the last kernel takes than one without sums, or None if one is not known."""
    return _difference(_diagnosed_us("parts: balanced"), _diagnosed_us("parts: no sums"))


def half(us: float | None) -> float | None:
    """Return half of a time, or None if it is not known."""
    return us and us / 2


def explain_parts() -> str | None:
    """Return whether the sum is hidden, or None if the times are not known."""
    whole, none = _diagnosed_us("parts: balanced"), _diagnosed_us("parts: no sums")
    if whole is None or none is None:
        return None
    if none > 0.95 * whole:
        return f"The sum is hidden behind the rows' way: {none:.0f} us without it, {whole:.0f} us with it."
    return (
        f"The sum is not hidden: {none:.0f} us without it, {whole:.0f} us with it. So the warps that sum are the "
        "slower side, and what takes work from them pays."
    )


def compare_with_package() -> str | None:
    """Return the times of the package's kernel and of this lesson's last one, or None if they are not known."""
    ours, package_us = (_diagnosed_us(f"routing uniform: {name}") for name in ("this lesson", "the package"))
    if ours is None or package_us is None:
        return None
    text = f"With uniform routing the package's kernel takes {package_us:.0f} us, and this lesson's {ours:.0f} us."
    if package_us > 0.95 * ours:
        return text
    return (
        f"{text} The package's keeps more vectors of a row in flight, reads the positions of the next token while it "
        "handles this one, and with two ranks uses packed additions. We did not isolate which of these counts."
    )


def sampled_share(ranks: int) -> float:
    """Return the share of tokens with at most two rows in a sample of uniform routing."""
    is_in = torch.cat(random_routing(sizes.TOKENS, EXPERTS, sizes.TOPK, ranks))
    return (is_in.sum(1) <= 2).double().mean().item()


def show_sms(version) -> Table:
    """Return a table of times by number of SMs: this lesson's last step, its port, and what records have."""
    here = (SMS,) if SIMULATED else [n for n in (4, 8, 12, 16, 24, 32, 48) if n <= (48 if lesson.is_timed else SMS)]
    for sms in here:
        if fault := error_of(timed(version, sms=sms)):
            raise WrongResult(f"{sms} SMs: {fault}")
    us = lesson.times("SMs", {str(sms): timed(version, sms=sms) for sms in here})
    lines = []
    for sms in (4, 8, 12, 16, 24, 32, 48):
        line = [str(sms), records.format_us(us[str(sms)]) if str(sms) in us else ""]
        for ranks in (2, 4, 8):
            row = _package_row(ranks, sms)
            line.append(records.format_us(row["kernel_us"]["median"]) if row else "")
        lines.append(line)
    heads = "SMs", "this lesson, us", *(f"the package, {ranks} ranks, recorded" for ranks in (2, 4, 8))
    lines.append(["lower bound", f"{wire_us():.0f}", *(f"{wire_us(ranks):.0f}" for ranks in (2, 4, 8))])
    keep = [i for i in range(len(heads)) if i == 0 or any(line[i] for line in lines[:-1])]
    return Table([heads[i] for i in keep], [[line[i] for i in keep] for line in lines])


def _package_row(ranks, sms):
    record = records.recorded("dispatch_combine") or {"rows": []}
    about = dict(config=dict(ranks=ranks, num_sms=sms, num_experts=256), size={"tokens": 4096})
    return records.find(record, step="final", operation="combine", dtype="bf16", **about)


def show_peers(version) -> Table:
    """Return a table of the last step, the package and torch, with uniform and skewed routing, timed interleaved."""
    lines = []
    for kind in ("uniform", "Zipf", "one rank"):
        given = inputs(kind)
        makes = {"this lesson": timed(version, given), "the package": package(given), "torch": torch_combine(given)}
        for name, make in makes.items():
            if (kind != "uniform" or not SIMULATED) and (fault := error_of(make, given)):
                raise WrongResult(f"{name}, {kind}: {fault}")
        us = lesson.times(f"routing {kind}", makes) if lesson.is_timed else {}
        lines.append([kind, *([records.format_us(us[name]) for name in makes] if us else ["not timed"] * 3)])
    return Table(["routing", "this lesson, us", "the package, us", "torch, us"], lines)


def show_parts(versions: Mapping[str, Any]) -> Table:
    """Return a table of times of a version and of one that leaves something out, and is therefore wrong."""
    us = lesson.times("parts", {name: timed(version) for name, version in versions.items()})
    lines = [[name, records.format_us(us[name]) if us else "not timed"] for name in versions]
    earlier = ("no sums", _earlier("no_summation_us")), ("with sums", recorded_us(EARLIER, "final"))
    lines += [[f"recorded of another version: {name}", records.format_us(found)] for name, found in earlier if found]
    return Table(["kernel", "us"], [*lines, ["lower bound", records.format_us(wire_us())]])


def show_orders(version, seeds: int = 3) -> str:
    """Return what further thread orders in weak memory make of a version, in the simulator."""
    if not SIMULATED:
        expression, functions = expression_of(version)
        return in_simulator(_show_orders_again, expression, seeds, functions=functions)
    faults = [lesson._checked(version, seed) for seed in range(1, 1 + seeds)]
    first = next(filter(None, faults), "")
    return f"wrong under {len(list(filter(None, faults)))} of {seeds} further orders. {first}".rstrip()


def _show_orders_again(expression, seeds):
    return show_orders(eval(expression, vars(sys.modules["__main__"])), seeds)


def about_deepep() -> str:
    """Return what records say of DeepEP's compiled kernel, or that they say nothing of combine alone."""
    rows = (records.recorded("dispatch_combine") or {"rows": []})["rows"]
    found = [row for row in rows if row["step"].startswith("peer:DeepEP") and row.get("operation") == "combine"]
    ours = {row["config"]["ranks"]: _package_row(row["config"]["ranks"], row["config"].get("num_sms")) for row in found}
    lines = [
        f"{row['step'][5:]}, {row['config']['ranks']} ranks, {row['size']['tokens']} tokens: "
        f"{row['kernel_us']['median']:.0f} us; the package {ours[row['config']['ranks']]['kernel_us']['median']:.0f} us"
        for row in found
        if ours[row["config"]["ranks"]]
    ]
    return "\n".join(lines) or (
        "No record has a time of DeepEP's compiled combine alone, so this lesson makes no claim about it: "
        "its rows are about our port."
    )


def show_earlier() -> Table | None:
    """Return a table of an earlier version's recorded steps, until this lesson's are recorded."""
    if any(recorded_us(TOPIC, step) for step in lesson.steps):
        return None
    record, lines = records.recorded(EARLIER) or {"rows": []}, []
    for row in records.select(record, config={"ranks": RANKS}, size=SIZE):
        before, now = row.get("compared_us", ("", row["kernel_us"]["median"]))
        lines.append([row["step"], before and records.format_us(before), records.format_us(now)])
    return Table(["an earlier version's step, recorded", "us before", "us"], lines) if lines else None


def show_what_did_not_pay() -> Table:
    """Return a table of changes that an earlier version timed, and that gained little, nothing, or lost."""
    lines, loads, us = [], _earlier("loads_us") or {}, lambda step: recorded_us(EARLIER, step)
    if {"4", "8"} <= loads.keys():
        text = "Each lane needs twice as many registers for its loads. We did not isolate why that costs time."
        lines.append(["8 instead of 4 vectors of each row in flight", loads["4"], loads["8"], text])
    if us("final") and _earlier("with_all_us"):
        row = 2 * sizes.HIDDEN * sizes.TOKENS
        apart = 4 * row / H200.copy_bandwidth * 1e6  # read the sums and two biases, write the sums
        text = (
            f"Receivers must load them, and packed additions are off. A separate kernel that adds both to the sums "
            f"moves {4 * row / 1e6:.0f} MB, {apart:.0f} us at the rate of a copy: it is cheaper by up to "
            f"{_earlier('with_all_us') - us('final') - apart:.0f} us. The API keeps biases because DeepEP's has them."
        )
        lines.append(["weights and two biases in combine", us("final"), _earlier("with_all_us"), text])
    few, many = (_package_row(RANKS, sms) for sms in (24, 48))
    if few and many:
        before, after = (row["kernel_us"]["median"] for row in (few, many))
        text = f"With 24 SMs it takes {before / wire_us():.2f} times the lower bound, and SMs are not what it lacks."
        lines.append(["the package with 48 SMs", before, after, text])
    table = [[what, *(records.format_us(value) for value in (a, b)), why] for what, a, b, why in lines]
    return Table(["change (recorded, an earlier version)", "us before", "us after", "why"], table)
