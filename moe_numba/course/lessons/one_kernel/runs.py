"""The lesson "One kernel": inputs, checks, launches, and tables.

All calls of a check are queued at once, so that a rank runs ahead of the others as far as the kernels let it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.bench.timing.multigpu import outputs_of, settle
from moe_numba.course.lessons.one_kernel import sizes as chosen
from moe_numba.course.lessons.one_kernel.tile import THREADS, TILE_COLUMNS, TOGETHER, WARPS, Memory
from moe_numba.course.steps.lesson import Run
from moe_numba.course.steps.ranks import RankLesson
from moe_numba.course.steps.score import PATH, TOTAL, Score
from moe_numba.expert_parallel.common.buffer_layout import align_words
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.ptx.arithmetic import int_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.runtime.device import persistent_ctas

__all__ = ["Memory", "Sizes", "Version", "lesson"]
TOPIC, BOUND = "one_kernel_ladder", 1e-2


class Sizes(NamedTuple):
    """What kernels are compiled for. A token's ``topk`` experts are distinct.

    A rank's shared memory has these sections, in words: flags of the exchange of counts; counts of two calls; counters
    of arrived and of returned rows; rows of x and where they come from; rows of the second GEMM; rows that came back.
    """

    ranks: int
    experts: int  # of each rank
    tokens: int  # of each rank
    hidden: int
    intermediate: int
    topk: int

    @property
    def all_experts(self):
        return self.ranks * self.experts

    @property
    def assignments(self):
        """Most rows that a rank sends."""
        return self.tokens * self.topk

    @property
    def capacity(self):
        """Most rows that a rank receives."""
        return self.ranks * self.assignments

    @property
    def words(self):
        """Words of a row of x, and of a result."""
        return self.hidden // 2

    @property
    def pieces(self):
        """Pieces in which a row comes back: one for each warp's tile of columns."""
        return -(-self.hidden // TILE_COLUMNS) * WARPS

    @property
    def counts(self):
        return align_words(self.ranks)

    @property
    def arrived(self):
        return self.counts + align_words(2 * self.ranks * self.all_experts)

    @property
    def returned(self):
        return self.arrived + align_words(self.experts)

    @property
    def rows(self):
        return self.returned + align_words(1)

    @property
    def origins(self):
        return self.rows + self.capacity * self.words

    @property
    def y(self):
        return self.origins + align_words(self.capacity)

    @property
    def back(self):
        return self.y + self.capacity * self.words

    @property
    def shared_words(self):
        return self.back + self.assignments * self.words


class Version(NamedTuple):
    """The kernels of a step: ``exchange(sizes)`` and ``kernel(sizes)`` make them; which parts each launch does."""

    exchange: Any
    kernel: Any
    launches: tuple = TOGETHER


# Inputs


class Call(NamedTuple):
    """The inputs of one call of the layer, a list entry for each rank."""

    x: list  # [tokens, hidden], bfloat16
    topk_ids: list  # [tokens, topk]
    topk_weights: list  # [tokens, topk], float32


class Inputs(NamedTuple):
    w13: list  # of each rank: [experts, 2 * intermediate, hidden], bfloat16
    w2: list  # [experts, hidden, intermediate]
    calls: list


def random_inputs(sizes: Sizes, calls: int, seed: int = 0) -> Inputs:
    """Draw the weights, and the inputs of several calls.

    In the first call all sets of experts are equally likely. In the second one the tokens of each rank have its own
    experts, so that no rank waits for another one's rows. Then all tokens have the first experts: the first rank has
    all rows, and others have none.
    """
    random, each = torch.Generator().manual_seed(seed), range(sizes.ranks)
    draw = lambda *shape: torch.randn(shape, generator=random)
    w13 = [(draw(sizes.experts, 2 * sizes.intermediate, sizes.hidden) / sizes.hidden**0.5).bfloat16() for _ in each]
    w2 = [(draw(sizes.experts, sizes.hidden, sizes.intermediate) / sizes.intermediate**0.5).bfloat16() for _ in each]

    def ids(call, rank):
        if call == 0:
            return torch.rand(sizes.tokens, sizes.all_experts, generator=random).topk(sizes.topk).indices
        first = rank * sizes.experts if call == 1 else 0
        return (torch.arange(first, first + sizes.topk) % sizes.all_experts).repeat(sizes.tokens, 1)

    found = []
    for call in range(calls):
        x = [draw(sizes.tokens, sizes.hidden).bfloat16() for _ in each]
        weights = [torch.rand(sizes.tokens, sizes.topk, generator=random) for _ in each]
        found.append(Call(x, [ids(call, rank) for rank in each], weights))
    return Inputs(w13, w2, found)


def order_of(topk_ids: torch.Tensor, all_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's rows in the order of the experts: ends of experts, tokens of rows, rows of assignments."""
    flat, topk = topk_ids.flatten(), topk_ids.shape[1]
    order = flat.argsort(stable=True)
    first_rows = torch.zeros(all_experts + 1, dtype=torch.int32, device=flat.device)
    first_rows[1:] = torch.bincount(flat, minlength=all_experts).cumsum(0)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=flat.device)
    return first_rows, (order // topk).int(), rows.view(topk_ids.shape).int()


def reference(inputs: Inputs, call: Call, rank: int) -> torch.Tensor:
    """Return the sums of a rank's tokens, as torch computes them."""
    w13, w2 = torch.cat(inputs.w13).float(), torch.cat(inputs.w2).float()
    out = torch.zeros(call.x[rank].shape)
    for k in range(call.topk_ids[rank].shape[1]):
        ids = call.topk_ids[rank][:, k]
        gate, up = torch.einsum("th,tnh->tn", call.x[rank].float(), w13[ids]).chunk(2, dim=1)
        activated = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        rows = torch.einsum("ti,thi->th", activated, w2[ids]).bfloat16().float()
        out += call.topk_weights[rank][:, k : k + 1] * rows
    return out


# Launches


@cuda.jit
def sum_rows(local, back, words, topk, rows, weights, out):
    """Add up the rows of a token, times their weights, in the order of its experts."""
    token = int32(cuda.blockIdx.x)
    for i in range(int32(cuda.threadIdx.x), words, int32(cuda.blockDim.x)):
        low, high = float32(0), float32(0)
        for k in range(topk):
            word = uint32(local[back + rows[token * topk + k] * words + i])
            weight = weights[token * topk + k]
            low += weight * int_as_float(int32(word << uint32(16)))
            high += weight * int_as_float(int32(word & uint32(0xFFFF0000)))
        out[token * words + i] = int32(cvt_rn_bf16x2_f32(high, low))


class _OnRank:
    """The memory of a rank, and the launches of a version."""

    def __init__(self, transport, version, sizes, inputs):
        self.transport, self.version, self.sizes = transport, version, sizes
        rank, device = transport.rank, transport.device
        self.shared = transport.allocate(4 * sizes.shared_words)
        self.local = self.shared.local.view(torch.int32)
        words = lambda *shape: torch.full(shape, -7, dtype=torch.int32, device=device)
        self.weights = [w[rank].to(device).view(torch.int32) for w in (inputs.w13, inputs.w2)]
        self.activated = words(sizes.capacity, sizes.intermediate // 2)
        self.places, self.lengths, self.starts = words(sizes.all_experts), words(sizes.experts), words(sizes.experts)
        self.done = words(2 * sizes.experts)
        self.state = torch.zeros(2 + sizes.experts, dtype=torch.int32, device=device)
        self.kernels = version.exchange(sizes), version.kernel(sizes)
        self.ctas = chosen.SMALL_CTAS
        if not simulator.ENABLED:
            self.ctas = persistent_ctas(device, 1) // (sizes.ranks if transport.group.is_shared else 1)
        settle(transport)

    def prepare(self, call: Call) -> tuple:
        """Return the inputs of this rank, in the order of the experts, and a poisoned output."""
        rank, device = self.transport.rank, self.transport.device
        x, ids, weights = (of_ranks[rank].to(device) for of_ranks in call)
        out = torch.full((self.sizes.tokens, self.sizes.hidden), float("nan"), dtype=torch.bfloat16, device=device)
        return x, weights, order_of(ids, self.sizes.all_experts), out

    def start(self, prepared: tuple) -> torch.Tensor:
        """Launch a call: the exchange of counts, the kernel, and the sum."""
        x, weights, (first_rows, tokens, rows), out = prepared
        sizes, common = self.sizes, (self.local, self.shared.addresses, self.state, self.transport.rank)
        counted = self.places, self.lengths, self.starts, self.done
        self.transport.launch(self.kernels[0], 1, 32, *common, first_rows, *counted)
        how = {} if simulator.ENABLED else {"launch_bounds": THREADS}
        for parts in self.version.launches:
            given = x.view(torch.int32), tokens, first_rows, *counted, *self.weights, self.activated
            self.transport.launch(self.kernels[1], self.ctas, THREADS, *common, parts, *given, **how)
        given = rows, weights, out.view(torch.int32)
        threads = min(256, -(-sizes.words // 32) * 32)
        self.transport.launch(sum_rows, sizes.tokens, threads, self.local, sizes.back, sizes.words, sizes.topk, *given)
        return out

    def close(self):
        settle(self.transport)
        self.shared.close()


def group_of(ranks: int) -> LocalGroup:
    """Return the ranks; where there is no GPU, and no simulator either, kernels are only compiled."""
    has_device = simulator.ENABLED or torch.cuda.is_available()
    return LocalGroup(ranks, None if has_device else [0] * ranks)


def outputs(version, sizes: Sizes, inputs: Inputs) -> list[list]:
    """Run all calls, queued at once; return the outputs by call and rank."""

    def work(transport):
        on_rank = _OnRank(transport, Version(*version), sizes, inputs)
        prepared = [on_rank.prepare(call) for call in inputs.calls]
        settle(transport)
        found = [on_rank.start(given) for given in prepared]
        on_rank.close()
        return [out.cpu() for out in found]

    return [list(of_ranks) for of_ranks in zip(*group_of(sizes.ranks).run(work), strict=True)]


@cache
def _inputs_and_references(sizes, calls):
    inputs = random_inputs(sizes, calls)
    return inputs, [[reference(inputs, call, rank) for rank in range(sizes.ranks)] for call in inputs.calls]


def check(version) -> str | None:
    """Compare a version with torch: several calls, queued at once, into poisoned outputs."""
    sizes = sizes_of()
    inputs, expected = _inputs_and_references(sizes, chosen.ROUNDS)
    for number, (found, wanted) in enumerate(zip(outputs(version, sizes, inputs), expected, strict=True), start=1):
        for rank in range(sizes.ranks):
            if fault := mismatch(found[rank], wanted[rank], BOUND):
                return f"call {number}, rank {rank}: {fault}"
    return None


@contextmanager
def _ready(version, sizes, transport) -> Iterator:
    inputs = random_inputs(sizes, 1)
    on_rank = _OnRank(transport, Version(*version), sizes, inputs)
    prepared = on_rank.prepare(inputs.calls[0])
    settle(transport)
    yield lambda: on_rank.start(prepared)
    on_rank.close()


# The lesson


def timed_sizes(ranks: int | None = None) -> Sizes:
    """Return the sizes of recorded times."""
    return Sizes(
        ranks or chosen.RANKS, chosen.LOCAL_EXPERTS, chosen.TOKENS, chosen.HIDDEN, chosen.INTERMEDIATE, chosen.TOPK
    )


def sizes_of(ranks: int | None = None) -> Sizes:
    """Return the sizes with which kernels run here."""
    if not simulator.ENABLED:
        return timed_sizes(ranks)
    return Sizes(
        ranks or chosen.RANKS,
        chosen.SMALL_LOCAL_EXPERTS,
        chosen.SMALL_TOKENS,
        chosen.SMALL_HIDDEN,
        chosen.SMALL_INTERMEDIATE,
        chosen.SMALL_TOPK,
    )


def timed(version):
    """Return ``make(transport)`` of a version, as `RankLesson` times it."""
    return partial(_ready, Version(*version), sizes_of())


def _kernels(version):
    version = Version(*version)
    return version.exchange(timed_sizes()), version.kernel(timed_sizes()), sum_rows


_COUNTED = (
    *((PATH, row) for row in ("global stores", "global atomics")),
    *((TOTAL, row) for row in ("sectors stored", "global atomics", "bytes, other ranks", "launches")),
)


class _Lesson(RankLesson):
    """Its scores leave out what depends on how often a kernel polls, and so the estimate of its time."""

    def count(self, version, name):
        found = super().count(version, name)
        return Score(name, {row: found.rows[row] for row in _COUNTED if row in found.rows}, found.gpu)


lesson = _Lesson(
    TOPIC,
    Run(check, lambda version: outputs_of(group_of(chosen.RANKS), timed(version)), timed, _kernels),
    f"{__name__}:lesson",
    config=dict(ranks=chosen.RANKS, num_experts=chosen.RANKS * chosen.LOCAL_EXPERTS, topk=chosen.TOPK)
    | dict(hidden=chosen.HIDDEN, intermediate=chosen.INTERMEDIATE),
    size=dict(tokens=chosen.TOKENS),
    dtype="bf16",
    seeds=2,
    group=group_of(chosen.RANKS),
)
