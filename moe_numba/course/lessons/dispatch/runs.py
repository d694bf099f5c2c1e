"""The lesson "Dispatch": inputs, check, launches on all ranks, predictions, and tables of times from records."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda

from moe_numba.course.bench import records
from moe_numba.course.bench.timing.multigpu import outputs_of, settle
from moe_numba.course.deepep_port import launch as port
from moe_numba.course.deepep_port import polling
from moe_numba.course.deepep_port.buffer_layout import SIGNALS_BYTES, DeepEPConfig, min_buffer_bytes
from moe_numba.course.deepep_port.dispatch import make_dispatch as make_port
from moe_numba.course.deepep_port.notify import make_cached_notify_dispatch
from moe_numba.course.lessons.dispatch import model, sizes
from moe_numba.course.lessons.dispatch.sizes import RANKS
from moe_numba.course.steps import recorded
from moe_numba.course.steps.ladder import WrongResult
from moe_numba.course.steps.lesson import Run, Table
from moe_numba.course.steps.ranks import RankLesson
from moe_numba.course.steps.score import TOTAL, Score
from moe_numba.expert_parallel import reference
from moe_numba.expert_parallel.buffer import Buffer
from moe_numba.expert_parallel.common.buffer_layout import align_words
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.expert_parallel.rings.config import Config
from moe_numba.quantise.reference import per_token_cast_to_fp8

SMALL = simulator.ENABLED
EXPERTS, TOPK = (sizes.SMALL_EXPERTS, sizes.SMALL_TOPK) if SMALL else (sizes.EXPERTS, sizes.TOPK)
TOKENS, HIDDEN = (sizes.SMALL_TOKENS, sizes.SMALL_HIDDEN) if SMALL else (sizes.TOKENS, sizes.HIDDEN)
THREADS = 64 if SMALL else 1024  # of CTAs of the naive kernel
_DEVICES = None if SMALL else [0] * RANKS if sizes.reachable_gpus() < RANKS else list(range(RANKS))
GROUP = LocalGroup(RANKS, _DEVICES)


# What kernels of the page use


class Board(NamedTuple):
    """Where the warps of a CTA post what a signalling warp publishes, in shared memory."""

    posts: Any  # 64-bit words
    words: Any  # the same memory in 32-bit words
    posted: Any  # index of the first post: channel + 1 in the upper half, the number of rows in the lower one
    published: Any  # index of the first post as it was published
    done: Any  # index in `words` of the first warp's flag: it posts nothing more
    warps: Any  # that post
    items: Any  # posts: one for each warp and rank
    ranks: Any


class Shape(NamedTuple):
    """Sizes that a kernel is compiled for; offsets in words of 4 bytes unless stated otherwise."""

    ranks: int
    warps: int  # of a CTA, which copy rows
    channels: int
    slots: int  # of a ring
    chunk: int  # rows of a ring that are sent without a look at its head
    row_words: int
    scale_words: int  # that travel with a row
    slot_words: int
    tail: int  # in the memory of each rank: tails of the rings that come here, [channels, ranks]
    head: int  # heads: of rings that come here, or of those that leave
    numbers: int  # the tokens' numbers, of slots or of rows
    rings: int  # [channels, ranks, slots]
    words: int  # of that memory
    sent: int  # in the memory of this rank alone: rows sent by each ring in all launches, [channels, ranks]
    received: int
    taken: int  # channels that were taken from the counter of a role in this launch, [2]
    stage_words: int  # in shared memory: of a warp's buffer for a row
    bars: int  # mbarriers, in words of 8 bytes, as the next two
    posted: int
    published: int
    done: int
    share: int  # where a team's first warp writes how many rows have arrived
    shared_bytes: int


class Version(NamedTuple):
    """A way to dispatch.

    Attributes
    ----------
    make : callable
        ``make(shape, ...)`` returns the kernel; the torch version is a function of its own.
    signal : device function, optional
        Of a CTA's last warp, which stores the flags for the others.
    take : device function, optional
        Returns the next channel: there are four for each warp.
    head_at_sender, warp_per_token, tma, own_rows, helping : bool
        Switches of the page's kernel.
    clear : kernel, optional
        Launched before, by all ranks.
    barrier : kernel, optional
    fp8 : bool
        Rows are FP8, with scales.
    senders : int
        CTAs that send; 0: as many as the lesson has.
    kind : str
        "ring", "direct", "naive", "copies", "notify", or "package".
    """

    make: Any
    signal: Any = None
    take: Any = None
    head_at_sender: bool = False
    warp_per_token: bool = False
    tma: bool = False
    own_rows: bool = False
    helping: bool = False
    clear: Any = None
    barrier: Any = None
    fp8: bool = False
    senders: int = 0
    kind: str = "ring"


# Inputs, and the right result


class Problem(NamedTuple):
    """Tensors of all ranks, lists by rank."""

    x: list  # [tokens, hidden], bfloat16
    other: list  # rows of an earlier call: they must not be found in the result
    chosen: list  # [tokens, ranks], bool: whether a token goes to a rank
    layouts: list  # what lesson 10 computes
    want: list  # `reference.Received`
    fp8: list  # (values, scales)
    want_fp8: list


def route(tokens: int, skew: str, seed: int, experts: int, topk: int) -> torch.Tensor:
    """Return the experts of tokens, [tokens, topk]; with skew "zipf" expert e is wanted 1 / (e + 1) as often."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(experts) if skew == "uniform" else 1 / torch.arange(1, experts + 1)
    return torch.multinomial(weights.expand(tokens, experts), topk, generator=generator)


@cache
def problem(skew: str = "uniform") -> Problem:
    """Return the inputs of all ranks and the right result."""
    torch.manual_seed(0)
    ids = [route(TOKENS, skew, seed, EXPERTS, TOPK) for seed in range(RANKS)]
    home = [layout for layout in (reference.dispatch_layout(each, RANKS, EXPERTS) for each in ids)]
    x = [torch.randn(TOKENS, HIDDEN).bfloat16() for _ in range(RANKS)]
    put = lambda tensors: [t.to(device) for t, device in zip(tensors, GROUP.devices, strict=True)]
    first = GROUP.devices[0]
    on_ranks = put(x)
    fp8 = [tuple(t.to(each.device) for t in per_token_cast_to_fp8(each.cpu())) for each in on_ranks]
    chosen = [layout[2] for layout in home]
    on_first = lambda tensors: [t.to(first) for t in tensors]
    want_fp8 = reference.dispatch([tuple(on_first(pair)) for pair in fp8], on_first(chosen))
    return Problem(
        on_ranks,
        [each.roll(1, dims=0) for each in on_ranks],
        put(chosen),
        [tuple(t.to(device) for t in layout) for layout, device in zip(home, GROUP.devices, strict=True)],
        reference.dispatch(on_first(x), on_first(chosen)),
        fp8,
        want_fp8,
    )


@cache
def shape(version: Version, small: bool = SMALL) -> Shape:
    """Return the sizes of a version's kernel: those of the simulator, or those whose times are recorded."""
    v = Version(*version)
    hidden, capacity = (sizes.SMALL_HIDDEN, sizes.SMALL_TOKENS) if small else (sizes.HIDDEN, sizes.TOKENS)
    row_words, scale_words, capacity = hidden // 2, 0, RANKS * capacity
    if v.fp8:
        row_words, scale_words = hidden // 4, hidden // 128
    senders = senders_of(v, small)
    if v.warp_per_token or v.kind == "direct":
        warps = sizes.SMALL_WARPS if small else sizes.WARPS
        channels = senders * warps * (4 if v.take else 1)
    else:
        warps, channels = sizes.SMALL_TEAM * RANKS if small else sizes.TEAM_WARPS // RANKS * RANKS, senders
    slots = max(2, (sizes.SMALL_RING_ROWS if small else sizes.RING_ROWS) * senders // channels)
    chunk = max(1, min(slots // (2 if small else 4), 24 if RANKS == 2 else 6))
    slot_words = align(row_words + scale_words + 1, 4) if v.tma else row_words
    flags = align(channels * RANKS, 32)
    if v.kind in ("naive", "direct"):
        numbers, rings = capacity * row_words, 0
        words = numbers + capacity
    else:
        numbers = 2 * flags
        rings = numbers + align(channels * RANKS * slots, 32)
        words = rings + channels * RANKS * slots * slot_words
    stage_words = align_words(align(row_words + scale_words + 1, 4)) if v.tma or v.kind == "direct" else 0
    bars = warps * stage_words // 2
    posted = bars + warps
    published = posted + warps * RANKS
    done = 2 * (published + warps * RANKS)
    share = done + warps
    return Shape(
        *(RANKS, warps, channels, slots, chunk, row_words, scale_words, slot_words),
        *(0, flags, numbers, rings, words, 0, flags, 2 * flags),
        *(stage_words, bars, posted, published, done, share, 4 * (share + RANKS)),
    )


def senders_of(v: Version, small: bool = SMALL) -> int:
    """Return how many CTAs send."""
    if small:
        return sizes.SMALL_SENDERS
    return v.senders or (sizes.DIRECT_SENDERS if v.kind == "direct" else sizes.SENDERS)


def align(words: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-words // multiple) * multiple


def prefixes(rank: int, channels: int, given: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what notify computes: rank_prefix [ranks, ranks], and rows of channels 0 to c, sent and received."""
    share = -(-TOKENS // channels)
    counts = torch.zeros(RANKS, RANKS, channels, dtype=torch.int64)  # from, to, channel
    for source, chosen in enumerate(given.chosen):
        of = torch.arange(TOKENS) // share
        counts[source].index_add_(1, of, chosen.T.long().cpu())
    device = GROUP.devices[rank]
    of_channels = counts.cumsum(2).int()
    rank_prefix = counts.sum(2).cumsum(0).int()
    found = rank_prefix, of_channels[rank], of_channels[:, rank]
    return tuple(t.contiguous().to(device) for t in found)  # type: ignore[return-value]


# Launches


def kernel_of(version: Version, small: bool = SMALL) -> Any:
    """Return the kernel of a version, for the sizes of the simulator or those whose times are recorded."""
    v = Version(*version)
    switches = v.signal, v.take, v.head_at_sender, v.warp_per_token, v.tma, v.own_rows, v.helping
    given = {"ring": switches, "direct": (v.take,)}.get(v.kind, ())
    return v.make if v.kind == "notify" else v.make(shape(v, small), *given)


def dispatch(version: Version, skew: str = "uniform") -> Any:
    """Return ``make(transport)``, a context manager that yields ``step(x)``; see `multigpu`."""
    v = Version(*version)
    given = problem(skew)
    makers = {"copies": _copies, "notify": _notify, "package": _package, "port": _port}
    return makers.get(v.kind, _kernels)(v, given)


def _new_outputs(v, given, rank):
    """Return poisoned recv_x, recv_scales and recv_src."""
    rows, device = len(given.want[rank].src_idx), GROUP.devices[rank]
    width = HIDDEN if v.fp8 else 2 * HIDDEN
    recv_x = torch.full((rows, width), 0x7F, dtype=torch.uint8, device=device)
    scales = torch.full((rows, HIDDEN // 128), float("nan"), device=device)
    return recv_x, scales, torch.full((rows,), -7, dtype=torch.int32, device=device)


def _row_type(v, recv_x):
    return recv_x.view(torch.float8_e4m3fn if v.fp8 else torch.bfloat16)


@contextmanager
def _barriers(transport, kernel) -> Iterator:
    """Yield ``meet()``: launch a barrier of all ranks."""
    shared, times = transport.allocate(1024), [0]
    local = shared.local.view(torch.int32)

    def meet():
        times[0] += 1
        transport.launch(kernel, 1, 32, shared.addresses, local, transport.rank, RANKS, times[0])

    yield meet
    settle(transport)
    shared.close()


def _kernels(v, given):
    """Return ``make(transport)`` of a version that is a kernel."""
    of, kernel, senders = shape(v), kernel_of(v), senders_of(v)

    @contextmanager
    def make(transport):
        rank, device, start = transport.rank, transport.device, transport.launch
        shared = transport.allocate(4 * of.words)
        local = shared.local.view(torch.int32)
        local[of.numbers if v.kind == "ring" else 0 :] = 0x7F7F7F7F
        state = torch.zeros(of.taken + 2, dtype=torch.int32, device=device)
        counts, place = prefixes(rank, of.channels, given), places(rank, given)
        recv_x, recv_scales, recv_src = _new_outputs(v, given, rank)
        no_scales, options = torch.zeros(1, device=device), dict(shared_bytes=of.shared_bytes)
        meeting = _barriers(transport, v.barrier) if v.barrier else None
        meet = meeting.__enter__() if meeting else None
        calls, flags = [0], transport.allocate(1024) if v.clear else None
        settle(transport)

        def step(x=(given.fp8 if v.fp8 else given.x)[rank]):
            x, scales = x if v.fp8 else (x, no_scales)
            words = x.view(torch.int32).view(-1)
            scales = scales.contiguous().view(torch.int32).view(-1)
            if v.kind == "naive":
                arguments = words, place, shared.addresses, local, TOKENS
                start(kernel, ctas_of_naive(v), THREADS, *arguments, launch_bounds=THREADS)
                meet()
                return local_rows(local, of, len(recv_src))
            if v.kind == "direct":
                meet()
                arguments = words, scales, given.chosen[rank], TOKENS, *counts[:2]
                threads, ctas = 32 * of.warps, senders
                where = shared.addresses, local, state, rank
                start(kernel, ctas, threads, *arguments, *where, launch_bounds=threads, **options)
                meet()
                return local_rows(local, of, len(recv_src))
            if v.clear:
                calls[0] += 2
                given_flags = flags.addresses, flags.local.view(torch.int32), rank, RANKS, calls[0]
                start(v.clear, 1, 64 if SMALL else 1024, *given_flags, local, 2 * of.head, state)
            threads = 32 * (of.warps + (v.signal is not None))
            received = recv_x.view(torch.int32).view(-1), recv_scales.view(torch.int32).view(-1), recv_src
            arguments = words, scales, given.chosen[rank], TOKENS, *counts, *received
            where = shared.addresses, local, state, rank
            start(kernel, 2 * senders, threads, *arguments, *where, launch_bounds=threads, **options)
            rows = _row_type(v, recv_x)
            return (rows, recv_scales, recv_src) if v.fp8 else (rows, recv_src)

        yield step
        settle(transport)
        if meeting:
            meeting.__exit__(None, None, None)
        if flags:
            flags.close()
        shared.close()

    return make


def ctas_of_naive(v):
    """Return the CTAs of the naive kernel: a CTA per SM, unless the version says how many."""
    return v.senders or (2 if SMALL else torch.cuda.get_device_properties(0).multi_processor_count)


def local_rows(local, of, rows):
    """Return the rows and the tokens' numbers of an output in memory that all ranks access."""
    x = local[: rows * of.row_words].view(torch.bfloat16).view(rows, HIDDEN)
    return x, local[of.numbers : of.numbers + rows]


def places(rank: int, given: Problem) -> torch.Tensor:
    """Return the row of each token of a rank at each rank, or -1, [tokens, ranks]: the host knows all counts."""
    chosen, prefix = given.chosen[rank], given.want[0].rank_prefix_matrix
    before = prefix[rank - 1] if rank else torch.zeros_like(prefix[0])
    return (chosen.cumsum(dim=0).int() - 1 + before.to(chosen.device)).where(chosen, -1).int().contiguous()


def _copies(v, given):
    """Return ``make(transport)`` of copies by torch."""

    @contextmanager
    def make(transport):
        rank = transport.rank
        recv_x, _, recv_src = _new_outputs(v, given, rank)
        everywhere = transport.gather((_row_type(v, recv_x), recv_src))  # one process: the peers' tensors themselves
        prefix, chosen = given.want[0].rank_prefix_matrix.tolist(), given.chosen[rank]
        tokens_for = [chosen[:, to].nonzero().flatten() for to in range(RANKS)]
        places = []
        for to, tokens in enumerate(tokens_for):
            first = prefix[rank - 1][to] if rank else 0
            places.append(tuple(t[first : first + len(tokens)] for t in everywhere[to]))

        def step(x=given.x[rank]):
            v.make(x, tokens_for, places)
            meet()
            return everywhere[rank]

        with _barriers(transport, v.barrier) as meet:
            yield step

    return make


def _notify(v, given):
    """Return ``make(transport)`` of notify, for the channels of a ring with a warp per token."""
    channels, kernel = shape(Version(None, warp_per_token=True)).channels, v.make
    threads, width = (64 if SMALL else 1024), RANKS + channels

    @contextmanager
    def make(transport):
        rank, device, calls = transport.rank, transport.device, [0]
        shared = transport.allocate(4 * (RANKS + 2 * RANKS * width))
        local = shared.local.view(torch.int32)
        local[RANKS:] = 0x7F7F7F7F
        settle(transport)
        new = lambda *size: torch.full(size, -7, dtype=torch.int32, device=device)
        outputs = new(RANKS, RANKS), new(RANKS, channels), new(RANKS, channels)
        per_rank, _, chosen = given.layouts[rank]

        def step(x=None):
            calls[0] += 1
            where = shared.addresses, local, rank, RANKS, calls[0]
            arguments = chosen, per_rank, TOKENS, channels, *where, *outputs
            transport.launch(kernel, RANKS + 1, threads, *arguments, shared_bytes=4 * channels, launch_bounds=threads)
            return outputs

        yield step
        settle(transport)
        shared.close()

    return make


def _package(v, given):
    """Return ``make(transport)`` of the package's dispatch, with a handle."""
    direct, senders = v.make == "direct", senders_of(v._replace(kind="ring"))
    config = Config(2 * senders, 6, 64 if SMALL else sizes.RING_ROWS)
    size = 1 << 18 if SMALL else align(config.get_nvl_buffer_size_hint(2 * HIDDEN, RANKS), 256)

    @contextmanager
    def make(transport):
        rank = transport.rank
        buffer = Buffer(transport, size, timeout=10.0)
        per_rank, per_expert, chosen = given.layouts[rank]
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=chosen)
        out = buffer.new_output(RANKS * TOKENS, HIDDEN) if direct else None
        x = (given.fp8 if v.fp8 else given.x)[rank]
        handle = buffer.dispatch(x, **layout, config=config, out=out)[4]

        def step(x=x):
            got = buffer.dispatch(x, handle=handle, config=config, out=out)
            return (*got[0], got[4][3]) if v.fp8 else (got[0], got[4][3])

        yield step
        if out is not None:
            out.close()
        buffer.destroy()

    return make


def _port(v, given):
    """Return ``make(transport)`` of our whole port of DeepEP's kernels, with a handle."""
    senders, warps = senders_of(v), sizes.SMALL_TEAM if SMALL else sizes.TEAM_WARPS // RANKS
    ring, chunk = (4, 1) if SMALL else (sizes.RING_ROWS, 24 if RANKS == 2 else 6)
    config = DeepEPConfig(RANKS, senders, ring, chunk, 2 * HIDDEN, 0, 0, EXPERTS, warps)
    for make_kernel in (make_cached_notify_dispatch, make_port):
        make_kernel(config)  # before the ranks' threads start, each of which would make its own

    @contextmanager
    def make(transport):
        rank, size = transport.rank, min_buffer_bytes(config)
        shared = transport.allocate(size + SIGNALS_BYTES)
        signals = (shared.addresses.view(torch.int64) + size).view(torch.uint64)
        status = torch.zeros(polling.STATUS_WORDS, dtype=torch.int32, device=transport.device)
        r = port.Rank(rank, shared.addresses, signals, status, start=transport.launch)
        rank_prefix, sent, _ = prefixes(rank, senders, given)
        rows = len(given.want[rank].src_idx)

        def step(x=given.x[rank]):
            port.cached_notify_dispatch(r, config, rank_prefix)
            recv_x, _, _, handle = port.dispatch(r, config, x, given.chosen[rank], rank_prefix, sent, rows)
            return recv_x, handle.recv_src_idx

        yield step
        settle(transport)
        if (error := polling.explain(status)) is not None:
            raise WrongResult(error)
        shared.close()

    return make


# Check and count


@cuda.jit
def _read(source, target, words):
    """Copy an output: a kernel that follows in the rank's stream reads what has arrived by then."""
    for i in range(cuda.grid(1), words, cuda.gridsize(1)):
        target[i] = source[i]


def check(version) -> str | None:
    """Compare what all ranks receive in the second of two calls, into poisoned outputs, with the reference.

    The first call dispatches other rows. The host does not wait between the calls, nor before a kernel reads the
    outputs: what keeps ranks apart are the version's own flags and barriers.
    """
    v, given = Version(*version), problem()
    make, own = dispatch(v), v.kind not in ("package", "port")

    @contextmanager
    def twice(transport):
        def read(outputs):
            if not own:
                settle(transport)
                return tuple(t.clone() for t in outputs)
            copies = tuple(t.clone() for t in outputs)
            for source, target in zip(outputs, copies, strict=True):
                source, target = (t.view(torch.int32).view(-1) for t in (source, target))
                transport.launch(_read, *((1, 64) if SMALL else (264, 512)), source, target, len(target))
            return copies

        with make(transport) as step:

            def run():
                before = step(_other(v, given, transport.rank))
                if v.kind != "naive":  # which has no barrier before its stores
                    read(before)
                outputs = read(step())
                settle(transport)
                return outputs

            yield run

    for rank, found in enumerate(outputs_of(GROUP, twice)):
        if error := wrong(found, _wanted(v, given, rank), rank):
            return error
    return None


def _other(v, given, rank):
    """Return rows that must not be found in the result of a later call."""
    if not v.fp8:
        return given.other[rank]
    return tuple(t.view(torch.uint8).roll(1, dims=0).view(t.dtype) for t in given.fp8[rank])  # CUDA rolls no FP8


def _wanted(v, given, rank):
    if v.kind == "notify":
        channels = shape(Version(None, warp_per_token=True)).channels
        names = "rank_prefix", "sent_prefix", "received_prefix"
        return dict(zip(names, prefixes(rank, channels, given), strict=True))
    if v.fp8:
        want = given.want_fp8[rank]
        return {"recv_x": want.x[0], "recv_scales": want.x[1], "recv_src": want.src_idx}
    return {"recv_x": given.want[rank].x, "recv_src": given.want[rank].src_idx}


def wrong(found, wanted, rank) -> str | None:
    """Return None, or which rows of a rank are wrong."""
    for (name, right), tensor in zip(wanted.items(), found, strict=True):
        if tensor.shape != right.shape:
            return f"{name} of rank {rank} is {tuple(tensor.shape)}, not {tuple(right.shape)}"
        rows = lambda t: t.cpu().contiguous().view(torch.uint8).view(len(t), -1)
        differ = (rows(tensor) != rows(right)).any(dim=1)
        if differ.any():
            first = int(differ.nonzero()[0])
            return (
                f"{name} of rank {rank}: {int(differ.sum())} of {len(right)} rows are wrong, the first is row {first}"
            )
    return None


def once(version) -> object:
    """Run a version once."""
    return outputs_of(GROUP, dispatch(version))


def kernels(version) -> tuple:
    """Return the kernels that a version launches."""
    v = Version(*version)
    found = [v.clear, v.barrier]
    if v.kind not in ("copies", "package", "port"):
        found.append(kernel_of(v, small=False))
    return tuple(filter(None, found))


class _Lesson(RankLesson):
    def fault(self, version):
        """Return what is wrong with a version, or None.

        The simulator detects races in the first of several orders, of two ranks: more ranks need the same orders.
        """
        if not simulator.ENABLED:
            return self.run.check(version)
        own = Version(*version).kind not in ("package", "port")  # these have tests of their own
        found = (self._checked(version, seed, races=own and seed == 0 and RANKS == 2) for seed in range(self.seeds))
        return next(filter(None, found), None)

    def count(self, version, name):
        """Return the score of a version: bytes by where they go, and signals. A GPU alone knows the time."""
        with simulator.profile() as profile:
            self.run.once(version)
        return Score(name, rows_of_kernels(profile.kernels), self.gpu.upper())

    def summary(self):
        """Return a table of all steps: times with all numbers of ranks that are recorded, and predictions."""
        lines = []
        for step in self.steps.values():
            us = step.us or self._recorded_us(step.name, RANKS)
            bound = model.lower_bound_us(RANKS)
            times = f"{us / bound:.2f}" if us and bound and not Version(*step.version).fp8 else ""
            faster = f"{step.times[0] / step.times[1]:.2f}" if step.times else ""
            others = [_us_text(self._recorded_us(step.name, ranks)) for ranks in _OTHER_RANKS]
            said = str(step.judgement or "") or (f"{step.predicted_us:.0f} us" if step.predicted_us else "")
            lines.append([step.name, _us_text(us), faster, times, *others, said])
        heads = "step", f"us, {RANKS} ranks", "times as fast", "times the lower bound"
        return Table([*heads, *(f"us, {ranks} ranks" for ranks in _OTHER_RANKS), "prediction"], lines)

    def _recorded_us(self, step, ranks):
        return recorded.lesson_us(self.topic, step, self.size, self.config | {"ranks": ranks}, self.gpu)

    def save(self, *others, results=None):
        """Write the record; rows of other numbers of ranks, which were measured before, stay in it."""
        earlier = records.recorded(self.topic)
        if self.is_timed and earlier:
            of_others = lambda row: row["config"]["ranks"] != RANKS
            for row in records.carried_over(earlier, of_others, records.environment()):
                self.diagnosed[f"{row['config']['ranks']} ranks: {row['step']}"] = row
        super().save(*others, results=results)


_OTHER_RANKS = [ranks for ranks in (2, 4, 8) if ranks != RANKS]


def rows_of_kernels(kernels) -> dict:
    """Return rows of a score: what the kernels of all ranks do in one dispatch."""
    lines = [line for kernel in kernels for line in kernel.lines]
    polled = [
        line for line in lines if line.peers and not line.global_store_requests
    ]  # nothing else loads over the link
    total = lambda name: sum(getattr(kernel.total, name) for kernel in kernels)
    return {
        (TOTAL, "launches"): sum(len(kernel.launches) for kernel in kernels),
        (TOTAL, "loads from other ranks"): sum(line.global_load_requests for line in polled),
        (TOTAL, "bytes, other ranks"): total("peer_bytes"),
        (TOTAL, "bytes, global memory"): total("requested_bytes"),
        (TOTAL, "bytes, asynchronous copies"): total("async_bytes"),
    }


lesson = _Lesson(
    "dispatch_ladder",
    Run(check, once, dispatch, kernels),
    f"{__name__}:lesson",
    config={"num_experts": sizes.EXPERTS, "topk": sizes.TOPK, "ranks": RANKS},
    size={"tokens": sizes.TOKENS, "hidden": sizes.HIDDEN},
    dtype="bfloat16",
    seeds=2 if RANKS == 2 else 1,
    group=GROUP,
)


# Tables

EARLIER = "ring_buffer_dispatch_ladder"  # the record of an earlier version of this lesson
BENCH = "dispatch_combine"  # the record of the bench topic


def here() -> str:
    """Return where the ranks run."""
    where = "in the simulator" if SMALL else f"on {len(set(GROUP.devices))} of {torch.cuda.device_count()} GPUs"
    timed = "timed" if lesson.is_timed else "virtual ranks: steps are checked, and recorded times are shown"
    return f"{RANKS} ranks {where}; {timed}"


def result() -> str:
    """Return the lower bound, and where the lesson starts and ends, in numbers of a record."""
    about = f"{sizes.TOKENS} tokens of {2 * sizes.HIDDEN} bytes on each of {RANKS} ranks"
    about = f"{about}: {model.wire_bytes(RANKS) / 1e6:.1f} MB leave a rank."
    if (bound := model.lower_bound_us(RANKS)) is None:
        return about
    about = f"{about}\nAt the best push rate that lesson 11 has measured, that takes {bound:.0f} us: the lower bound."
    found = {}
    for name, (step, earlier) in _SHOWN.items():
        us = recorded.lesson_us(lesson.topic, step, lesson.size, lesson.config) or earlier_us(earlier)
        if us is not None:
            found[name] = records.format_us(us)
    text = ", ".join(f"{name} {us} us" for name, us in found.items())
    return f"{about}\nRecorded on H200s: {text}." if found else about


_SHOWN = {  # name -> step, and step of the earlier version
    "copies by torch": ("torch", "torch"),
    "our port of DeepEP's ring": ("our port of DeepEP's ring", "DeepEP's ring"),
    "the package's rings": ("the package's rings", "final"),
    "direct writes": ("direct writes", "direct writes"),
}


def earlier_us(step: str, ranks: int = RANKS) -> float | None:
    """Return the time of a step of the earlier version of this lesson."""
    row = _earlier(step, ranks)
    return row and row["kernel_us"]["median"]


def _earlier(step, ranks=RANKS):
    record = records.recorded(EARLIER)
    return record and records.find(record, step=step, config={"ranks": ranks}, size={"tokens": sizes.TOKENS})


_BENCH_ROWS = {  # step of the bench record -> what it is
    "NCCL all_to_all_single": "NCCL alone, rows in order",
    "index_select and NCCL": "index_select, then NCCL",
    "counts, index_select and NCCL": "counts, index_select, NCCL",
    "final": "the package's rings",
    "final, with notify": "the package's rings, and notify",
    "to output": "the package's direct writes",
    "to output, with notify": "the package's direct writes, and notify",
}


def show_ranks(*steps: str) -> Table:
    """Return a table of recorded times with 2, 4 and 8 ranks: the bench topic's rows, on 2 SENDERS SMs, and peers."""
    record = records.recorded(BENCH)
    found = records.select(record, size={"tokens": sizes.TOKENS}, dtype="bf16", operation="dispatch") if record else []
    found = [row for row in found if row["config"].get("num_sms", 2 * sizes.SENDERS) == 2 * sizes.SENDERS]
    names = {name: _BENCH_ROWS[name] for name in steps or _BENCH_ROWS}
    if not steps:
        names |= {row["step"]: f"{row['step'][5:]}, compiled" for row in found if row["step"].startswith("peer:")}
    ranks = [n for n in (2, 4, 8) if any(row["config"]["ranks"] == n for row in found)] or [2]
    lines = []
    for step, name in names.items():
        of = {row["config"]["ranks"]: row for row in found if row["step"] == step}
        if of:
            lines.append([name, *(records.format_us(of[n]["kernel_us"]["median"]) if n in of else "" for n in ranks)])
    bounds = [model.lower_bound_us(n) for n in ranks]
    lines.append(["lower bound", *("" if us is None else records.format_us(us) for us in bounds)])
    return Table(["recorded, us", *(f"{n} ranks" for n in ranks)], lines)


def show_prefixes(example: list, channels: int) -> Table:
    """Return a table of the rows of each channel of an example, with the two counts that they follow from."""
    lines, counts = [], torch.tensor(example).transpose(1, 2)  # from, to, token
    share = -(-counts.shape[2] // channels)
    for to in range(counts.shape[1]):
        rows = 0
        for source in range(len(counts)):
            lower = rows
            for channel in range(channels):
                number = int(counts[source, to, share * channel : share * (channel + 1)].sum())
                found = f"{rows} to {rows + number - 1}" if number else "none"
                lines.append([f"rank {to}", f"rank {source}", str(channel), str(lower), str(rows - lower), found])
                rows += number
    heads = "to", "from", "channel", "rows of lower ranks", "of lower channels", "rows in recv_x"
    return Table(heads, lines)


def show_notify(kernel) -> Table:
    """Check notify; return a table with its time, beside that of a dispatch with it."""
    version = Version(kernel, kind="notify")
    if fault := lesson.fault(version):
        raise WrongResult(f"notify: {fault}")
    channels = shape(Version(None, warp_per_token=True), small=False).channels
    return _times("notify", {f"{channels} channels, {sizes.TOKENS} tokens": dispatch(version)}, "notify: right")


def show_earlier() -> Table | None:
    """Return a table of steps that an earlier record has, with 2 ranks, until this page's are recorded; then None."""
    if any(_lesson_us(step) for step in lesson.steps):
        return None
    lines = []
    for step, name in _EARLIER_STEPS.items():
        row = _earlier(step, 2)
        if row:
            lines.append([name, str(row.get("num_sms", "")), records.format_us(row["kernel_us"]["median"])])
    final = _earlier("final", 2)
    if final and "fp8" in final:
        lines.append(["the package's rings, FP8", str(final["num_sms"]), records.format_us(final["fp8"]["us"])])
    return Table(["recorded of other versions of these kernels, 2 ranks", "SMs", "us"], lines)


_EARLIER_STEPS = {
    "torch": "copies by torch",
    "index_select and NCCL": "index_select and NCCL",
    "naive, all SMs": "naive, all SMs",
    "naive, few SMs": "naive, few SMs",
    "DeepEP's ring": "our port of DeepEP's ring",
    "final": "the package's rings",
    "direct writes": "the package's direct writes",
}


def show_multicast() -> Table:
    """Return a table of the MB that leave a rank and arrive at it, now and if each row is multicast to all ranks."""
    lines = []
    for ranks in (2, 4, 8):
        sent, row = model.wire_bytes(ranks), model.ROW_BYTES
        once = model.leaving_tokens(ranks) * row  # each token that leaves its rank leaves it once
        megabytes = sent, sent, once, (ranks - 1) * once
        bound, best = model.lower_bound_us(ranks), model.push_gbps(ranks)
        us = ["", ""] if bound is None else [bound, max(once, (ranks - 1) * once) / max(best.values()) / 1e3]
        lines.append([str(ranks), *(f"{n / 1e6:.0f}" for n in megabytes), *map(_us_text, us)])
    ways = "each rank apart", "multicast to all"
    heads = [f"{way}: {what}" for way in ways for what in ("MB that leave", "MB that arrive")]
    return Table(["ranks", *heads, *(f"{way}: us" for way in ways)], lines)


def describe_rings(*versions) -> str:
    """Return how many channels versions have, and how many rows fit into a ring and a chunk, at the recorded sizes."""
    texts = []
    for version in versions:
        of = shape(Version(*version), small=False)
        rows = "row" if of.chunk == 1 else "rows"
        texts.append(f"{of.channels} channels: rings of {of.slots} slots, chunks of {of.chunk} {rows}")
    return "\n".join(texts)


def show_port(version) -> Table:
    """Return a table: the page's ring beside our whole port, which also sends experts and weights, and has timeouts."""
    versions = {"this page's": Version(*version), "the whole port": Version("port", kind="port")}
    return _times("port", {name: dispatch(v) for name, v in versions.items()}, "ring of our port")


def _times(name, calls, heading):
    us = lesson.times(name, calls)
    if not us:  # the simulator runs other sizes than those of the record
        us = {label: _lesson_us(f"{name}: {label}") for label in calls}
    text = lambda label: "runs; not timed" if us[label] is None else records.format_us(us[label])
    return Table([heading, "us"], [[label, text(label)] for label in calls])


def _lesson_us(step):
    return recorded.lesson_us(lesson.topic, step, lesson.size, lesson.config)


def show_sweep(rings, direct) -> Table:
    """Return a table of times by the number of SMs: half of them send through rings, all of them send directly."""
    columns, lines = [2 * senders for senders in sizes.SWEEP], []
    versions = {"the rings of this page": (Version(*rings), 2), "direct writes": (Version(*direct), 1)}
    for name, (v, per) in versions.items():
        labels = {f"{name}, {sms} SMs": v._replace(senders=sms // per) for sms in columns}
        us = _measured_or_recorded("sweep", {label: dispatch(each) for label, each in labels.items()})
        lines.append([name, *map(_us_text, us.values())])
    for step, field in (("final", "sms_us"), ("final", "direct_sms_us")):
        row = _earlier(step)
        if row and field in row:
            name = "the package's rings, recorded" if field == "sms_us" else "its direct writes, recorded"
            lines.append([name, *(_us_text(row[field].get(str(sms))) for sms in columns)])
    return Table(["us by SMs", *map(str, columns)], lines)


def _us_text(us):
    return "" if us is None else records.format_us(us)


def _measured_or_recorded(name, calls):
    if lesson.is_timed:
        return lesson.times(name, calls)
    return {label: _lesson_us(f"{name}: {label}") for label in calls}


def show_skew(versions: dict) -> Table:
    """Return a table of versions with tokens that want some experts more often (Zipf), beside uniform ones."""
    lines = []
    for name, version in versions.items():
        calls = {f"{name}, {skew}": dispatch(version, skew) for skew in ("uniform", "zipf")}
        lines.append([name, *map(_us_text, _measured_or_recorded("skew", calls).values())])
    for ranks in (2, 4, 8):
        megabytes = [f"{bytes_received(skew, ranks) / 1e6:.0f}" for skew in ("uniform", "zipf")]
        lines.append([f"MB into the busiest of {ranks} ranks", *megabytes])
    return Table(["us, or MB", "uniform", "Zipf"], lines)


def bytes_received(skew: str, ranks: int) -> int:
    """Return the most bytes that a rank receives from others, at the recorded sizes."""
    ids = [route(sizes.TOKENS, skew, seed, sizes.EXPERTS, sizes.TOPK) for seed in range(ranks)]
    rows = torch.stack([reference.dispatch_layout(each, ranks, sizes.EXPERTS)[0] for each in ids])
    return int((rows.sum(0) - rows.diagonal()).max()) * 2 * sizes.HIDDEN


def show_what_did_not_pay() -> Table:
    """Return a table of recorded changes that gained little or nothing."""
    lines, final = [], _earlier("final") or {}
    rings, direct = final.get("sms_us", {}), final.get("direct_sms_us", {})
    changes = [
        (
            "rings on 48 SMs instead of 24",
            rings.get("24"),
            rings.get("48"),
            "The link is full: more SMs take turns on it.",
        ),
        (
            "direct writes on 48 SMs instead of 16",
            direct.get("16"),
            direct.get("48"),
            "The same; the SMs are missing elsewhere.",
        ),
        (
            "our port on 48 SMs instead of the package's rings on 24",
            rings.get("24"),
            earlier_us("DeepEP's ring, more SMs"),
            "Twice the SMs do not make up for rows that are loaded once per rank and wait for a team.",
        ),
        (
            "the naive kernel on all SMs instead of direct writes on 16",
            direct.get("16"),
            earlier_us("naive, all SMs"),
            "A little faster, but no SM is left to compute, and the host must know all counts.",
        ),
    ]
    for change, before, after, why in changes:
        lines.append([change, _us_text(before), _us_text(after), why])
    return Table(["change", "us before", "us after", "why"], lines)


def show_package(rings, direct) -> Table:
    """Return a table of this page's last kernels beside the package's, interleaved."""
    versions = {
        "this page's rings": Version(*rings),
        "the package's rings": Version("rings", kind="package"),
        "this page's direct writes": Version(*direct),
        "the package's direct writes": Version("direct", kind="package"),
    }
    return _times("package", {name: dispatch(v) for name, v in versions.items()}, "kernel")
