"""Runs that deadlock, in the simulator: our port of DeepEP's rings with short rings, and a cycle of three ranks."""

import sys
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_numba import simulator
from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.deepep_port import launch, simulate
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig, combine_offsets, min_buffer_bytes
from moe_numba.course.deepep_port.combine import hold_nothing, make_combine
from moe_numba.course.lessons.combine.inputs import handles_of, rows_of, sums_of
from moe_numba.course.steps.lesson import Table
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.expert_parallel.ranks.local_group import LocalGroup

_RANKS, _HIDDEN = 2, 8


class Stuck(NamedTuple):
    """How a run of the port ended: whether it deadlocked, rank 0's head and tail of rank 1's ring, wrong tokens."""

    hung: bool
    head: int
    tail: int
    wrong: int


def run_port(chunk: int, ring: int, warps: int, hold: Any = hold_nothing, weak: bool = False) -> Stuck:
    """Combine on two ranks through one channel; each CTA has ``2 * warps`` warps, one of which sums nothing."""
    tokens = 2 * (_RANKS * warps - 1) + 1
    config = DeepEPConfig(_RANKS, 1, ring, chunk, 2 * _HIDDEN, 0, 0, _RANKS, warps, fault="short ring")
    is_in = [torch.ones(tokens, _RANKS, dtype=torch.bool)] * _RANKS
    handles, generator = handles_of(is_in, 1), torch.Generator().manual_seed(1)
    y = [torch.randn(len(rows_of(is_in, r).home), _HIDDEN, generator=generator).bfloat16() for r in range(_RANKS)]

    def start(rank):
        launch.cached_notify_combine(rank, config, handles[rank.rank])
        return _combine(rank, config, hold, y[rank.rank], handles[rank.rank])

    memory = simulator.weak_memory() if weak else nullcontext()
    with simulate.virtual_ranks(_RANKS, min_buffer_bytes(combine=config)) as ranks, memory:
        try:
            found = simulate.on_all(ranks, start)
            pairs = zip(found, sums_of(y, is_in), strict=True)
            wrong = sum(int((a.view(torch.int16) != b.view(torch.int16)).any(1).sum()) for a, b in pairs)
            hung = False
        except simulator.Deadlock:
            hung, wrong = True, 0
        buffer, like = int(ranks[0].buffers[0]), simulator.pointer(torch.zeros(1, dtype=torch.int32))
        flags = [int(simulator.ranks.pointer_at(buffer + at, like)[1]) for at in combine_offsets(config)[:2]]
    return Stuck(hung, *flags, wrong)


def _combine(rank, config, hold, y, handle):
    """Launch the port's combine with another ``hold``, as `launch.combine` does."""
    tokens, words = len(handle.send_head), lambda tensor: tensor.reshape(-1).view(torch.int32)
    out, unused = torch.full((tokens, _HIDDEN), float("nan"), dtype=torch.bfloat16), torch.empty(8, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.float32)
    matrices = handle.rank_prefix_matrix, handle.recv_channel_prefix_matrix, handle.send_head
    given = words(y), none, handle.recv_src_idx, *matrices, words(out), none, unused, unused, tokens
    rest = rank.buffers, rank.rank, np.int64(rank.timeout_ns), rank.status
    rank.start(make_combine(config, hold), 2, config.threads, *given, *rest, cooperative=True)
    return out


_CASES = [  # chunk, rows of a ring, and half of a CTA's warps
    (chunk, ring, warps)
    for warps, chunk in ((2, 2), (2, 3), (3, 2))
    for ring in range(chunk + 1, chunk + 2 * warps - 1)
] + [(4, 13, 6), (4, 14, 6)]


def _all_runs(cases):
    return [[*case, *run_port(*case)] for case in cases]


class ShortRings:
    """Runs of our port with rings of several lengths; a notebook displays the table."""

    def __init__(self):
        self.runs = [(*run[:3], Stuck(*run[3:])) for run in in_simulator(_all_runs, _CASES)]

    @property
    def table(self) -> Table:
        """What happened, by chunk, number of summing warps, and ring."""
        lines = []
        for chunk, ring, warps, stuck in self.runs:
            lines.append([str(2 * warps - 1), str(chunk), str(ring), "deadlocks" if stuck.hung else "right"])
        return Table(["R, summing warps", "chunk", "rows of a ring", "result"], lines)

    def _repr_html_(self):
        return self.table._repr_html_()

    def __repr__(self):
        return str(self.table)

    def stuck(self) -> tuple[int, int, int, Stuck]:
        """Return the chunk, ring and warps of a deadlock with the longest ring that has one, and how it ended."""
        hung = [run for run in self.runs if run[3].hung and run[2] == 2]
        return max(hung, key=lambda run: (run[0], run[1]))


# Three ranks

SLOTS, THREE = 2, 3  # rows of a ring, ranks
TAIL, HEAD, RING = 0, 3, 6  # words of a rank's memory: [rank that sends], [rank that receives], [rank that sends, slot]


def routing_of_the_cycle(tokens: int = 3) -> list[torch.Tensor]:
    """Return a routing: the first tokens of rank r have rows only on rank r + 1, the others on all; then again."""
    is_in = []
    for rank in range(THREE):
        early = torch.zeros(tokens, THREE, dtype=torch.bool)
        early[:, (rank + 1) % THREE] = True
        is_in.append(torch.cat([early, torch.ones(tokens, THREE, dtype=torch.bool)]).repeat(2, 1))
    return is_in


class ThreeRanks:
    """Rows of one word of three ranks, for a kernel with rings of two slots, and the right sums."""

    def __init__(self, is_in: list[torch.Tensor]):
        values = np.random.default_rng(2).integers(1, 1 << 20, (THREE, THREE, len(is_in[0])))
        values = torch.from_numpy(values).int()  # [rank with the row, home rank, token]
        self.y, self.first, self.position, self.right = [], [], [], []
        for rank in range(THREE):
            chosen = [is_in[home][:, rank] for home in range(THREE)]
            self.y.append(torch.cat([values[rank, home][chosen[home]] for home in range(THREE)]))
            counts = torch.stack([each.sum() for each in chosen])
            self.first.append(torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int())
            own = is_in[rank].int()
            self.position.append((own.cumsum(0) - 1).where(own > 0, -1).int().contiguous())
            self.right.append((values[:, rank].T * is_in[rank]).sum(1).int())
        self.memory: list = [None] * THREE

    def run(self, kernel: Any) -> list[torch.Tensor]:
        """Return what the ranks' kernels sum; rows of rings, and sums, are poisoned before."""
        outs = [torch.full_like(right, -7) for right in self.right]

        def work(transport):
            r, shared = transport.rank, transport.allocate(4 * (RING + SLOTS * THREE))
            self.memory[r] = local = shared.local.view(torch.int32)
            local[RING:] = -9  # rows that have not come
            given = self.y[r], self.first[r], self.position[r], len(self.right[r]), outs[r]
            transport.launch(kernel, 1, 64, local, shared.addresses, r, *given)
            settle(transport)
            shared.close()

        with simulator.weak_memory():
            LocalGroup(THREE).run(work)
        return outs

    def cycle(self) -> list[tuple[str, str]] | None:
        """Follow the waits of a deadlock from rank 0's sender on, by the heads and tails that it left behind.

        Returns pairs (who waits, for what), each of which waits for the next, and the last for the first; None if there
        is no cycle.
        """
        memory, chain, rank, sends = [each.tolist() for each in self.memory], [], 0, True
        while len(chain) < 2 * THREE + 1 and (not chain or (rank, sends) != chain[0][0]):
            others = [other for other in range(THREE) if other != rank]
            if sends:
                found = [to for to in others if memory[to][TAIL + rank] - memory[rank][HEAD + to] == SLOTS]
                why = "its ring to rank {} is full"
            else:
                tails = {source: memory[rank][TAIL + source] for source in others}
                lacking = ([s for s in others if token[s] >= tails[s]] for token in self.position[rank].tolist())
                found, why = next(filter(None, lacking), []), "no row from rank {}"
            if not found:
                return None
            chain.append(((rank, sends), why.format(found[0])))
            rank, sends = found[0], not sends
        return [(f"rank {rank} {'sends' if sends else 'sums'}", why) for (rank, sends), why in chain]


def _run_cycle(kernel):
    ranks = ThreeRanks(routing_of_the_cycle())
    try:
        outs = ranks.run(kernel)
    except simulator.Deadlock as error:
        return str(error), ranks.cycle()
    right = all(torch.equal(out, sums) for out, sums in zip(outs, ranks.right, strict=True))
    return "all sums are right" if right else "some sums are wrong", None


def _run_cycle_by_name(name):
    return _run_cycle(getattr(sys.modules["__main__"], name))


def wait_for_each_other(kernel: Any) -> tuple[str, list | None]:
    """Run the kernel of three ranks in the simulator; return a sentence on the result, and the cycle, if any."""
    if simulator.ENABLED:
        return _run_cycle(kernel)
    return tuple(in_simulator(_run_cycle_by_name, kernel.__name__, functions=[kernel]))
