"""The lesson "Talk to a peer": ranks, launches, checks, what is counted and timed, records and tables."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from moe_numba.course.bench import link, records
from moe_numba.course.bench.link import BULK, PUSH_ROWS, STORES, link_gbps, one_way_us, push_gbps, signal_ns
from moe_numba.course.bench.timing.multigpu import outputs_of, settle
from moe_numba.course.lessons.talk_to_a_peer.answers import Queue as Queue  # for the page
from moe_numba.course.lessons.talk_to_a_peer.answers import rows_in_flight
from moe_numba.course.lessons.talk_to_a_peer.sizes import (
    CHANNELS,
    DATA,
    FLAG,
    HEAD,
    PUSH_CTAS,
    PUSH_WARPS,
    RANKS,
    RING,
    ROUNDS,
    ROW_BYTES,
    ROWS,
    SEEDS,
    SLOTS,
    SMALL_CHANNELS,
    SMALL_PUSH_CTAS,
    SMALL_PUSH_ROWS,
    SMALL_PUSH_WARPS,
    SMALL_ROUNDS,
    SMALL_ROW_BYTES,
    SMALL_ROWS,
    TAIL,
)
from moe_numba.course.pages.sizes import reachable_gpus
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Orders, Run, Table
from moe_numba.course.steps.ranks import RankLesson
from moe_numba.course.steps.score import TOTAL, Score
from moe_numba.course.steps.simulate import expression_of, in_simulator
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.runtime.changed_source import source_of
from moe_numba.runtime.launch import launch

TOPIC = link.RECORD
SIMULATED = simulator.ENABLED
NVLINK_GBPS = 450  # each way, of an H200: data sheet
SMS = 132  # of an H200
OTHER_RANKS = [ranks for ranks in (2, 4, 8) if ranks != RANKS]  # recorded numbers are shown beside
DEVICES = None if SIMULATED else list(range(RANKS)) if reachable_gpus() >= RANKS else [0] * RANKS
GROUP = LocalGroup(RANKS, DEVICES)
CONFIG = dict(ranks=RANKS)
SIZE = dict(rows=ROWS, row_bytes=ROW_BYTES, rounds=ROUNDS)
MESSAGE = 64  # words, one for each thread
LAUNCHES = 25  # of a message on GPUs, to count torn ones
THREADS = 64 if SIMULATED else 1024  # of a CTA that writes as much as it can
ROUNDS_HERE = SMALL_ROUNDS if SIMULATED else ROUNDS


def describe_ranks() -> str:
    """Return where the ranks are, and whether anything is timed."""
    where = ", ".join(str(device) for device in GROUP.devices)
    return f"{RANKS} ranks on {where}; " + ("timed" if lesson.is_timed else "virtual ranks: recorded times are shown")


# An address in a peer's memory

PEERS = 8  # the most GPUs of a node, as in DeepEP


def buffer_parts(num_nvl_bytes: int) -> dict[str, tuple[int, int]]:
    """Return the parts of a rank's allocation, as in DeepEP: name -> (offset, bytes)."""
    sizes = {"data": num_nvl_bytes, "barrier signals": 4 * PEERS}
    sizes |= {"buffer_ptrs": 8 * PEERS, "barrier_signal_ptrs": 8 * PEERS}
    parts, offset = {}, 0
    for name, size in sizes.items():
        parts[name] = offset, size
        offset += size
    return parts


_BUFFER = 1024  # bytes of data
_SECOND_PROCESS = """
import sys
import moe_numba, cupy, torch
from numba import cuda, int32
from moe_numba.runtime.launch import launch
from moe_numba.ptx.memory import pointer_from_address

exec(compile({kernel!r}, "page", "exec"))
mine = torch.zeros(8, dtype=torch.int32, device="cuda")
address = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
buffer_ptrs = torch.tensor([address, mine.data_ptr()], dtype=torch.uint64, device="cuda")
launch({name}, 1, 8, buffer_ptrs, mine, 0, 100)
torch.cuda.synchronize()
cupy.cuda.runtime.ipcCloseMemHandle(address)
"""


def show_second_process(kernel: Any) -> None:
    """Let another process, or another rank of the simulator, store into a buffer of this one, and print what it did."""
    if SIMULATED:
        return _across_simulated_ranks(kernel)
    try:
        import cupy
    except ImportError:
        print("CuPy, which has the functions for IPC handles, is not installed: this cell does nothing")
        return None
    try:
        _across_processes(kernel, cupy)
    except RuntimeError as error:  # CUDA's own error is one, too
        print("this system does not share memory between processes:", str(error).strip().splitlines()[-1])


def _across_processes(kernel, cupy):
    runtime, size = cupy.cuda.runtime, sum(size for _, size in buffer_parts(_BUFFER).values())
    address = runtime.malloc(size)
    runtime.memset(address, 0, size)
    runtime.deviceSynchronize()
    handle = runtime.ipcGetMemHandle(address)
    print(f"a handle has {len(bytes(handle))} bytes")
    try:
        runtime.ipcCloseMemHandle(runtime.ipcOpenMemHandle(handle))
        print("this process has opened its own handle")
    except runtime.CUDARuntimeError as error:
        print(f"this process may not open its own handle; CUDA says: {error}")
    program = _SECOND_PROCESS.format(kernel=source_of(kernel), name=kernel.__name__)
    done = subprocess.run([sys.executable, "-c", program, bytes(handle).hex()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, size, None), 0)
    _show_words("the second process", cupy.ndarray(8, cupy.int32, memory).get().tolist())
    runtime.free(address)


def _across_simulated_ranks(kernel):
    parts = buffer_parts(_BUFFER)
    buffers = [torch.zeros(sum(size for _, size in parts.values()) // 4, dtype=torch.int32) for _ in range(2)]
    addresses = [simulator.register(buffer, f"the buffer of rank {rank}", rank) for rank, buffer in enumerate(buffers)]
    offset, size = parts["buffer_ptrs"]
    buffer_ptrs = buffers[1][offset // 4 : (offset + size) // 4].view(torch.uint64)
    buffer_ptrs.view(torch.int64)[:2] = torch.tensor(addresses)
    try:
        with simulator.together(), simulator.on_rank(1):
            launch(kernel, 1, 8, buffer_ptrs, buffers[1], 0, 100)
        _show_words("rank 1", buffers[0][:8].tolist())
        try:
            with simulator.together(), simulator.on_rank(1):
                launch(kernel, 1, 8, buffer_ptrs, buffers[1], 7, 100)
        except simulator.OutOfBounds as error:
            print("and for rank 7, which does not exist:", str(error).splitlines()[0])
    finally:
        for address in addresses:
            simulator.forget(address)


def _show_words(who, words):
    if words != list(range(100, 108)):
        raise WrongResult(f"{who} should have stored 100 to 107 into the buffer of rank 0, which has {words}")
    print(f"{who} has stored into the buffer of rank 0: {words}")


# Messages


def private(rank: int, count: int) -> torch.Tensor:
    """Return words that only this rank has: no other rank can compute them."""
    return torch.randint(1, 1 << 30, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(rank + 11))


def neighbours(transport: Any) -> tuple[int, int]:
    """Return the rank that a rank sends to, and the one that it receives from."""
    return (transport.rank + 1) % transport.num_ranks, (transport.rank - 1) % transport.num_ranks


def message(kernel: Any) -> Callable:
    """Return ``make(transport)``: each rank sends a message to the next one, and returns what it has received."""

    @contextmanager
    def make(transport):
        rank, (to, _), number = transport.rank, neighbours(transport), [0]
        shared = transport.allocate(4 * (DATA + MESSAGE))
        local, x = shared.local.view(torch.int32), private(rank, MESSAGE).to(transport.device)
        out = torch.full_like(x, -7)

        def step():
            number[0] += 1
            transport.launch(kernel, 1, MESSAGE, shared.addresses, local, x, out, to, number[0])
            return out

        step.x = x
        yield step
        settle(transport)
        shared.close()

    return make


def check_message(kernel: Any, group: LocalGroup = GROUP, messages: int = 1) -> str | None:
    """Return None if each rank has received what the rank before it sent, or a sentence on what it read instead.

    The last of one or two ``messages`` is looked at; the first of two has other words.
    """
    make = message(kernel)
    for rank, out in enumerate(outputs_of(group, make if messages == 1 else _twice(make))):
        before = (rank - 1) % group.num_ranks
        wrong = (out.cpu() != private(before, MESSAGE)).nonzero().flatten().tolist()
        if wrong:
            return f"rank {rank} read {len(wrong)} of {MESSAGE} words before rank {before} had written them"
    return None


messages = RankLesson(
    TOPIC,
    Run(check_message, lambda kernel: outputs_of(GROUP, message(kernel)), message, lambda kernel: (kernel,)),
    f"{__name__}:messages",
    config=CONFIG,
    size=dict(words=MESSAGE),
    dtype="int32",
    group=GROUP,
)


def show_orders(kernels: Mapping[str, Any], seeds: int = SEEDS) -> Table:
    """Return a table: under how many seeds a message was torn, in weak memory, and whether a race was found.

    On GPUs a further column counts messages that were torn there.
    """
    lines = []
    orders = _in_simulator(_orders_of, list(kernels.values()), seeds)
    for (name, kernel), each in zip(kernels.items(), orders, strict=True):
        found = Orders(*each)
        race = (
            "none found" if found.race is None else "found" if "DataRace" in found.race else found.race.split("\n")[0]
        )
        here = [] if SIMULATED else [f"{sum(check_message(kernel) is not None for _ in range(LAUNCHES))} of {LAUNCHES}"]
        lines.append([name, f"{found.wrong} of {found.seeds}", race, *here])
    here = [] if SIMULATED else ["wrong launches on this GPU" if GROUP.is_shared else "wrong launches on these GPUs"]
    return Table(["message", "wrong under so many seeds", "race", *here], lines)


def _orders_of(kernels, seeds):
    return [list(messages.orders(kernel, seeds)) for kernel in kernels]


def show_torn(kernel: Any) -> str:
    """Return what the simulator says of one message."""
    return str(messages.orders(kernel, SEEDS))


# Ping-pong


def ping_pong(kernel: Any) -> Callable:
    """Return ``make(transport)``: ranks 0 and 1, 2 and 3 ... pass a flag back and forth."""

    @contextmanager
    def make(transport):
        shared, before = transport.allocate(4 * DATA), [0]
        local = shared.local.view(torch.int32)

        def step():
            transport.launch(kernel, 1, 1, shared.addresses, local, transport.rank, ROUNDS_HERE, before[0])
            before[0] += ROUNDS_HERE

        yield step
        settle(transport)
        if int(local[FLAG]) != before[0]:
            raise WrongResult(f"the flag of rank {transport.rank} is {int(local[FLAG])}, not {before[0]}")
        shared.close()

    return make


def show_ping_pong(kernels: Mapping[str, Any]) -> Table:
    """Return a table of one-way times: half of a round trip."""
    us = lesson.times("ping-pong", {kind: ping_pong(kernel) for kind, kernel in kernels.items()})
    ranks = _recorded_ranks(*(partial(one_way_us, kind) for kind in kernels))
    found = {kind: us[kind] / (2 * ROUNDS) if us else one_way_us(kind, ranks) for kind in kernels}
    text = lambda us: "ran; no time is recorded yet" if us is None else records.format_us(us)
    return Table(
        ["the flag is stored by", f"one way, us, {_source(ranks)}"],
        [[f"st.{kind}", text(us)] for kind, us in found.items()],
    )


def _source(ranks):
    return "measured here" if lesson.is_timed else f"recorded on {ranks} H200s"


def _recorded_ranks(*numbers):
    """Return the number of ranks whose records are shown: `RANKS` if they have one of the numbers, otherwise two."""
    return RANKS if any(number(ranks=RANKS) is not None for number in numbers) else 2


def _row(step, ranks, gpu="h200"):
    record = records.recorded(TOPIC, gpu)
    return record and records.find(record, step=step, config={"ranks": ranks})


def show_counter(kernel: Any, number: int = 1234) -> None:
    """Let a kernel store a number to pinned host memory while the host polls it, and print how often it polled."""
    counter = torch.full((1,), -1, dtype=torch.int32, pin_memory=not SIMULATED)
    launch(kernel, 1, 1, counter, number)
    polls = 1
    while int(counter[0]) == -1 and polls < 1_000_000:
        polls += 1
    print(f"the host read {int(counter[0])} after {'one poll' if polls == 1 else 'several polls'}")
    if int(counter[0]) != number:
        raise WrongResult(f"the host should have read {number}")


# The push rate


def push(kernel: Any, ctas: int, bulk: bool) -> Callable:
    """Return ``make(transport)``: each rank writes rows into the memory of the next one."""
    rows, words = (SMALL_PUSH_ROWS, SMALL_ROW_BYTES // 4) if SIMULATED else (PUSH_ROWS, ROW_BYTES // 4)
    warps = SMALL_PUSH_WARPS if SIMULATED else PUSH_WARPS
    threads = 32 * warps if bulk else THREADS
    options = dict(launch_bounds=threads) | (dict(shared_bytes=warps * (4 * words + 8)) if bulk else {})

    @contextmanager
    def make(transport):
        rank, (to, _) = transport.rank, neighbours(transport)
        shared = transport.allocate(4 * rows * words)
        local = shared.local.view(torch.int32)
        index = torch.arange(len(local), dtype=torch.int32, device=transport.device)

        def step():
            transport.launch(kernel, ctas, threads, shared.addresses, local, index, rows, words, to, **options)

        yield step
        settle(transport)
        wrong = int((local != (index if bulk else index // 4)).sum())
        if wrong:
            raise WrongResult(f"{wrong} of {len(local)} words have not arrived at rank {rank}")
        shared.close()

    return make


_PUSHERS = {STORES: "1024 threads of a CTA", BULK: f"{PUSH_WARPS} threads of a CTA"}


def show_push(stores: Any, bulk: Any) -> Table:
    """Return a table of push rates in GB/s, by the number of CTAs, for both methods."""
    of, numbers = {STORES: stores, BULK: bulk}, SMALL_PUSH_CTAS if SIMULATED else PUSH_CTAS
    calls = {
        f"{method}, {ctas} CTAs": push(kernel, ctas, method == BULK)
        for method, kernel in of.items()
        for ctas in numbers
    }
    us = lesson.times("push", calls)
    rates = {name: PUSH_ROWS * ROW_BYTES / each / 1e3 for name, each in us.items()}
    if not us:
        rates = {f"{method}, {ctas} CTAs": rate for (method, ctas), rate in push_gbps(RANKS).items()}
    text = lambda rate: "" if rate is None else f"{rate:.0f}"
    lines = [
        [f"{method}, by {_PUSHERS[method]}", *(text(rates.get(f"{method}, {ctas} CTAs")) for ctas in PUSH_CTAS)]
        for method in of
    ]
    for ranks in OTHER_RANKS:
        other = push_gbps(ranks)
        lines += [[f"{m}, {ranks} ranks", *(text(other.get((m, c))) for c in PUSH_CTAS)] for m in of if other]
    if not rates:
        return Table(["both methods ran; no rates are recorded"], [])
    source = "measured here" if lesson.is_timed else "recorded on H200s"
    return Table([f"GB/s of each of {RANKS} ranks, {source}; CTAs:", *map(str, PUSH_CTAS)], lines)


def lower_bound_us() -> float | None:
    """Return the time in which the rows of a rank pass its link at the best push rate."""
    rate = link_gbps(_recorded_ranks(link_gbps))
    return rate and ROWS * ROW_BYTES / rate / 1e3


# What a signal costs

NOBODY, SAME_WARP, SAME_SM, OTHER_SMS = range(4)
WHO = {
    NOBODY: link.NOBODY,
    SAME_WARP: "the same warp, a row each time",
    SAME_SM: link.OTHER_WARPS,
    OTHER_SMS: "other SMs",
}
WRITING_CTAS = 1 if SIMULATED else 24


def signals(kernel: Any, busy: int) -> Callable:
    """Return ``make(transport)``: a thread of each rank signals to the next rank again and again."""
    threads = THREADS if busy >= SAME_SM else 32
    ctas, words = 1 + (WRITING_CTAS if busy == OTHER_SMS else 0), _row_words()

    @contextmanager
    def make(transport):
        rank, (to, _), launched = transport.rank, neighbours(transport), [0]
        shared = transport.allocate(4 * (2 * DATA + ctas * threads // 32 * words))
        local = shared.local.view(torch.int32)
        x = private(rank, words).to(transport.device)

        def step():
            launched[0] += 1
            given = shared.addresses, local, x, words, ROUNDS_HERE, launched[0], to
            transport.launch(kernel, ctas, threads, *given, launch_bounds=threads)

        yield step
        settle(transport)
        shared.close()

    return make


def show_signals(make: Callable, kinds: Mapping[str, Any]) -> Table:
    """Return a table: what each kind of signal costs, in ns, while nobody, the same warp or others write."""
    calls = {
        f"{kind}, {who}": signals(make(store, busy), busy) for kind, store in kinds.items() for busy, who in WHO.items()
    }
    us = lesson.times("signal", calls)
    ranks = _recorded_ranks(*(partial(signal_ns, kind, who) for kind in kinds for who in WHO.values()))
    ns = lambda kind, who: us[f"{kind}, {who}"] / ROUNDS * 1e3 if us else signal_ns(kind, who, ranks)
    lines, names = [], list(kinds)
    for who in WHO.values():
        found = [ns(kind, who) for kind in names]
        more = "" if None in found else f"{found[-1] - found[0]:.0f}"
        lines.append([who, *("" if each is None else f"{each:.0f}" for each in found), more])
    lines = [[line[0], *(cell or "ran, not timed" for cell in line[1:-1]), line[-1]] for line in lines]
    return Table([f"ns, {_source(ranks)}; who writes to the peer meanwhile", *names, "difference"], lines)


# Rings of rows


class Version(NamedTuple):
    """A kernel, and how it is launched: slots of a ring, and rings of a rank."""

    kernel: Any
    slots: int = SLOTS
    channels: int = 1


def _row_words():
    return (SMALL_ROW_BYTES if SIMULATED else ROW_BYTES) // 4


def ring(version, rows: int | None = None, row_words: int | None = None, block: int = 32, **options) -> Callable:
    """Return ``make(transport)``: each rank sends rows to the next one; ``step()`` returns what has arrived."""
    kernel, slots, channels = Version(*version)
    if SIMULATED and rows is None:
        channels = min(channels, SMALL_CHANNELS)
    count = rows or (SMALL_ROWS if SIMULATED else ROWS)
    words, share = row_words or _row_words(), -(-count // channels)

    @contextmanager
    def make(transport):
        rank, (to, source), launched = transport.rank, neighbours(transport), [0]
        shared = transport.allocate(4 * channels * (RING + slots * words))
        local, x = shared.local.view(torch.int32), private(rank, count * words).to(transport.device)
        out = torch.full_like(x, -7)

        def step():
            given = shared.addresses, local, x, out, count, share, words, slots, launched[0], to, source
            transport.launch(kernel, 2 * channels, block, *given, **options)
            launched[0] += 1
            return out

        step.x = x
        yield step
        settle(transport)
        shared.close()

    return make


def _twice(make):
    """Return ``make(transport)``: a first launch sends other data, and poisons nothing that the second may rely on."""

    @contextmanager
    def again(transport):
        with make(transport) as step:

            def run():
                step.x.add_(1)
                out = step()
                settle(transport)
                step.x.sub_(1)
                out.fill_(-9)
                settle(transport)
                return step()

            yield run

    return again


def check_ring(version, group: LocalGroup = GROUP, **options) -> str | None:
    """Return None if each rank has received the rows of the rank before it, in a second launch, or a sentence."""
    words = options.get("row_words") or _row_words()
    for rank, out in enumerate(outputs_of(group, _twice(ring(version, **options)))):
        before, out = (rank - 1) % group.num_ranks, out.cpu()
        wrong = (out != private(before, len(out))).view(-1, words).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            first = out.view(-1, words)[wrong[0]]
            what = "has not been written" if (first == -9).all() else "has other words than the sender's"
            return f"rank {rank}: {len(wrong)} of {len(out) // words} rows are wrong; row {wrong[0]} {what}"
    return None


class RingLesson(RankLesson):
    """A `RankLesson` whose score is what crosses the link: bytes, signals, and rows in flight."""

    def count(self, version, name):
        """Return the score of a version, of rank 0; the simulator counts."""
        with simulator.seed(0), simulator.profile() as profile:
            outputs_of(GROUP, ring(version))
        with simulator.seed(0), simulator.trace() as events:
            outputs_of(GROUP, ring(version))
        rows = {(TOTAL, "rows that a rank sends"): SMALL_ROWS}
        rows[TOTAL, "bytes to other ranks, of a rank"] = profile.kernels[0].total.peer_bytes // RANKS
        tails, heads, flight = _signals(events)
        rows[TOTAL, "signals of senders, of a rank"] = tails
        rows[TOTAL, "signals of receivers, of a rank"] = heads
        rows[TOTAL, "rows in a ring, at most"] = flight
        return Score(name, rows, self.gpu.upper())


def _signals(events):
    """Return how many signals rank 0's senders and receivers store, and the most rows in a ring of rank 0."""
    tails = heads = most = 0
    sent: dict[int, int] = {}  # where a ring begins -> its tail, and its head, as stored last
    taken: dict[int, int] = {}
    for event in events:
        if event.what != "store":
            continue
        counter, value = event.details["index"] % RING, event.details["value"]
        begin = event.details["index"] - counter
        tails += counter == TAIL and event.rank == 0
        heads += counter == HEAD and event.rank == 0
        if counter == HEAD and event.rank == 1:
            taken[begin] = value
        elif counter == TAIL and event.rank == 0:
            sent[begin] = value
            most = max(most, value - taken.get(begin, 0))
    return tails, heads, most


lesson = RingLesson(
    TOPIC,
    Run(
        check_ring, lambda version: outputs_of(GROUP, ring(version)), ring, lambda version: (Version(*version).kernel,)
    ),
    f"{__name__}:lesson",
    config=CONFIG,
    size=SIZE,
    dtype="int32",
    seeds=2,
    group=GROUP,
)


def one_slot(kernel: Any) -> Version:
    """Return a version whose ring has a single slot."""
    return Version(kernel, slots=1)


# Predictions


def _predicted(before, change):
    us = lesson.steps[before].us
    return None if us is None else change(us)


def without_waits(before: str) -> float | None:
    """Return the time of a step whose sender no longer waits for two signals per row, one each way."""
    one_way = one_way_us("release")
    return None if one_way is None else _predicted(before, lambda us: us - 2 * one_way * ROWS)


def as_before(before: str) -> float | None:
    """Return the time of a step, for one that is predicted to change nothing."""
    return _predicted(before, lambda us: us)


def with_fewer_signals(before: str, rows_per_signal: int) -> float | None:
    """Return the time of a step that pays for a release once for several rows."""
    relaxed, release = (signal_ns(kind, WHO[SAME_WARP]) for kind in ("st.relaxed", "st.release"))
    if relaxed is None or release is None:
        return None
    saved = ROWS * (1 - 1 / rows_per_signal) * (release - relaxed) / 1e3
    return _predicted(before, lambda us: us - saved)


def by_channels(before: str, channels: int = CHANNELS) -> float | None:
    """Return the time of a step whose rows pass several rings at once, until the link is the limit."""
    return _predicted(before, lambda us: max(us / channels, lower_bound_us() or 0))


def slots_needed(step: str) -> str:
    """Return how many rows must be in flight for the rate of a step's ring, and of the whole link, in words."""
    one_way, link, us = one_way_us("release"), link_gbps(_recorded_ranks(link_gbps)), lesson.steps[step].us
    if one_way is None or link is None:
        return "No rates are recorded yet: put those of a warp and of a link into your formula."
    rows = lambda rate: rows_in_flight(rate, one_way, ROW_BYTES)
    texts = [f"A whole link of {link:.0f} GB/s needs {rows(link)} rows in flight"]
    if us is not None:
        rate = ROWS * ROW_BYTES / us / 1e3
        texts.append(f"one warp copies {rate:.1f} GB/s through this ring, and needs {rows(rate)}")
    return f"{'; '.join(texts)}. This ring has {SLOTS} slots, and {CHANNELS} such rings have {CHANNELS * SLOTS}."


# Rings that deadlock


def _in_simulator(function, versions, *arguments):
    """Return ``function(versions, *arguments)``, from a process with the simulator where kernels run on a GPU."""
    if SIMULATED:
        return function(versions, *arguments)
    expression, functions = expression_of(tuple(versions))
    return in_simulator(_again, function.__name__, expression, list(arguments), functions=functions)


def _again(function, versions, arguments):
    return globals()[function](eval(versions, vars(sys.modules["__main__"])), *arguments)


def _outcomes(versions, rows, row_words, block, shared_bytes):
    """Return for each version whether it is right, wrong, or deadlocks, with the simulator's first sentence."""
    found, options = [], dict(shared_bytes=shared_bytes) if shared_bytes else {}
    for version in versions:
        try:
            wrong = check_ring(version, LocalGroup(2), rows=rows, row_words=row_words, block=block, **options)
            found.append(("wrong: " + wrong if wrong else "right", ""))
        except simulator.Deadlock as error:
            found.append(("deadlock", str(error)))
    return found


def deadlocks(make: Callable, cases: list[tuple[int, int, int]]) -> list[str]:
    """Return what the simulator finds for each (chunk, batch, slots): "right", or "deadlock"."""
    versions = [Version(make(chunk, batch), slots) for chunk, batch, slots in cases]
    return [state for state, _ in _in_simulator(_outcomes, versions, 40, 128, 32, 0)]


def show_deadlock(make: Callable, chunk: int, batch: int, slots: int) -> str:
    """Return what the simulator says of a ring that deadlocks: which thread waits where."""
    ((state, text),) = _in_simulator(_outcomes, [Version(make(chunk, batch), slots)], 40, 128, 32, 0)
    return text or state


def show_deadlocks(make: Callable, chunk: int, batch: int, slots: range) -> Table:
    """Return a table: whether the rows of a sender arrive, by the number of slots."""
    found = deadlocks(make, [(chunk, batch, each) for each in slots])
    return Table([f"slots, chunk {chunk}, batch {batch}", *map(str, slots)], [["", *found]])


RESIDENT_BYTES = 200_000  # of shared memory: an SM holds one such CTA


def show_residency(kernels: Mapping[str, Any]) -> Table:
    """Return a table: kernels with twice as many CTAs as a GPU holds at once, on two ranks with a GPU each."""
    versions = [Version(kernel, 1, SMS) for kernel in kernels.values()]
    found = _in_simulator(_outcomes, versions, 2 * SMS, 4, 1, RESIDENT_BYTES)
    lines = [[name, state, text.split("\n")[0]] for name, (state, text) in zip(kernels, found, strict=True)]
    return Table([f"{2 * SMS} CTAs of a rank, of which {SMS} are resident", "", "the simulator says"], lines)


# Variants, a sweep, and a peer


def show_variants(kernels: Mapping[str, Any]) -> Table:
    """Return a table of times of rings with one channel, interleaved; each is checked as a step is."""
    for name, kernel in kernels.items():
        if wrong := _fault_of_variant(Version(kernel)):
            raise WrongResult(f"{name}: {wrong}")
    us = lesson.times("variant", {name: ring(Version(kernel)) for name, kernel in kernels.items()})
    return Table(
        ["ring", "us"], [[name, records.format_us(us[name]) if us else "right, not timed"] for name in kernels]
    )


def _fault_of_variant(version):
    """Return what is wrong with a ring; the simulator checks two ranks and short rows as it checks a step."""
    if not SIMULATED:
        return lesson.run.check(version)
    for seed in range(lesson.seeds):
        try:
            with lesson.conditions(seed, races=True):
                wrong = check_ring(version, LocalGroup(2), row_words=128)
        except simulator.SimulatorError as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return wrong
    return None


SWEEP = (1, 4, 16, CHANNELS)
COPY_ENGINE = "copy engine"


def copy_engine(transport):
    """Let each rank copy its rows into the memory of the next one without a kernel."""
    (to, source), count = neighbours(transport), (SMALL_ROWS if SIMULATED else ROWS) * _row_words()
    shared = transport.allocate(4 * count)
    x = private(transport.rank, count).to(transport.device)
    there = transport.gather(shared.local.view(torch.int32))[to]

    def step():
        there.copy_(x, non_blocking=True)
        return shared.local

    yield step
    settle(transport)
    if not torch.equal(shared.local.view(torch.int32).cpu(), private(source, count)):
        raise WrongResult(f"rank {transport.rank} has not received the rows of rank {source}")
    shared.close()


def show_sweep(kernel: Any) -> Table:
    """Return a table of times and rates of a ring, by channels, and of the copy engine, interleaved."""
    calls = {f"channels: {channels}": ring(Version(kernel, channels=channels)) for channels in SWEEP}
    us = lesson.times("sweep", calls | {COPY_ENGINE: contextmanager(copy_engine)})
    lines = []
    for name in [*calls, COPY_ENGINE]:
        rate = f"{ROWS * ROW_BYTES / us[name] / 1e3:.0f}" if us else ""
        lines.append([name, records.format_us(us[name]) if us else "right, not timed", rate])
    if bound := lower_bound_us():
        name = f"lower bound: the best push of {_recorded_ranks(link_gbps)} ranks"
        lines.append([name, records.format_us(bound), f"{ROWS * ROW_BYTES / bound / 1e3:.0f}"])
    return Table([f"{RANKS} ranks, {ROWS} rows of {ROW_BYTES:,} bytes", "us", "GB/s"], lines)


def show_ranks() -> Table:
    """Return a table of recorded times of all steps, by the number of ranks, as far as there are records."""
    found = {ranks: {name: _row(name, ranks) for name in lesson.steps} for ranks in (2, 4, 8)}
    ranks = [ranks for ranks, rows in found.items() if any(rows.values())]
    if not ranks:
        return Table(["no times of these steps are recorded yet"], [])
    text = lambda row: records.format_us(row["kernel_us"]["median"]) if row else ""
    lines = [[name, *(text(found[number][name]) for number in ranks)] for name in lesson.steps]
    bounds = [f"{ROWS * ROW_BYTES / rate / 1e3:.0f}" if (rate := link_gbps(number)) else "" for number in ranks]
    return Table(["recorded, us", *(f"{number} ranks" for number in ranks)], [*lines, ["lower bound", *bounds]])


def lower_bound() -> str:
    """Return the lower bound of the rows in words."""
    us = lower_bound_us()
    text = f"{ROWS} rows of {ROW_BYTES:,} bytes are {ROWS * ROW_BYTES / 1e6:.1f} MB"
    return text if us is None else f"{text}; the best push takes {us:.0f} us"


# What the page says of the whole


def result() -> str:
    """Return what the lesson measures, in numbers of records."""
    texts = [f"{RANKS} ranks: each sends {ROWS} rows of {ROW_BYTES:,} bytes to the next one."]
    found = {kind: one_way_us(kind, RANKS) for kind in ("relaxed", "release")}
    texts += [f"A flag that is stored by st.{kind} takes {us:.2f} us." for kind, us in found.items() if us]
    if rate := link_gbps(RANKS):
        texts.append(f"A rank pushes {rate:.0f} GB/s at most, of {NVLINK_GBPS} GB/s in the data sheet.")
    if rate and (us := lower_bound_us()):
        texts.append(f"So the rows take at least {us:.0f} us.")
    return "\n".join([texts[0], *(f"Recorded on H200s: {text}" for text in texts[1:])])
