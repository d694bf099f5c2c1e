"""Runs the kernels of the notebook on low-latency dispatch and combine on virtual ranks, in the simulator.

All rounds are queued at once, so that a rank runs ahead of the others as far as the kernels let it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_numba import simulator
from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.ranks.local_group import LocalGroup


class Sizes(NamedTuple):
    """What the kernels are compiled for. ``topk`` experts of a token are distinct."""

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
    def metadata_words(self):
        """Words of the metadata of both halves, which the rows of dispatch follow: whole 16-byte vectors."""
        return -(-2 * self.slots * self.topk // 4) * 4


class Round(NamedTuple):
    """The inputs of one dispatch and combine, a list entry for each rank."""

    x: list  # [tokens, hidden], bfloat16
    topk_idx: list  # [tokens, topk], int64
    y: list  # [slots, hidden], bfloat16: the results of the rank's experts


def random_rounds(sizes: Sizes, count: int, seed: int) -> list[Round]:
    """Draw the inputs of several rounds."""
    generator, experts = torch.Generator().manual_seed(seed), sizes.ranks * sizes.local_experts
    rows = lambda n: torch.randn(n, sizes.hidden, generator=generator).bfloat16()
    chosen = lambda: torch.rand(sizes.tokens, experts, generator=generator).topk(sizes.topk).indices
    each = range(sizes.ranks)
    return [
        Round([rows(sizes.tokens) for _ in each], [chosen() for _ in each], [rows(sizes.slots) for _ in each])
        for _ in range(count)
    ]


def run_rounds(
    sizes: Sizes, rounds: list[Round], dispatch: Any, combine: Any = None, packed: bool = False, operations: int = 0
) -> list[list[dict[str, torch.Tensor]]]:
    """Run a dispatch, and after it a combine if there is one, per round; return the outputs by round and rank.

    Each kernel has a CTA of one warp per token and takes (local, peers, epochs, rank, inputs, outputs): ``dispatch``
    x, topk_idx, recv_x and has_row, or counts if ``packed``, and ``combine`` y, has_row, topk_idx and out. Bfloat16
    tensors are passed as words. All outputs are poisoned first. ``operations`` is the count in ``epochs`` before
    the first round.
    """
    words = sizes.hidden // 2

    def on_rank(transport):
        rank, found = transport.rank, []
        shared = [transport.allocate(4 * n) for n in (sizes.metadata_words + 2 * sizes.slots * words,) * 2]
        local = [memory.local.view(torch.int32) for memory in shared]
        local[0][sizes.metadata_words :] = SENTINEL
        local[1].fill_(SENTINEL)
        epochs = [torch.full((sizes.tokens,), operations, dtype=torch.int32) for _ in shared]
        transport.gather(None)

        def start(number, kernel, *arguments):
            given = [t.view(torch.int32) if t.dtype == torch.bfloat16 else t for t in arguments]
            common = local[number], shared[number].addresses, epochs[number], rank
            transport.launch(kernel, sizes.tokens, 32, *common, *given)

        for each in rounds:
            rows = (sizes.local_experts, sizes.slots) if packed else (sizes.slots,)
            got = {"recv_x": torch.full((*rows, sizes.hidden), float("nan"), dtype=torch.bfloat16)}
            name, length = ("counts", sizes.local_experts) if packed else ("has_row", sizes.slots)
            got[name] = torch.full((length,), -7, dtype=torch.int32)
            start(0, dispatch, each.x[rank], each.topk_idx[rank], got["recv_x"], got[name])
            if combine is not None:
                got["out"] = torch.full((sizes.tokens, sizes.hidden), float("nan"), dtype=torch.bfloat16)
                start(1, combine, each.y[rank], got["has_row"], each.topk_idx[rank], got["out"])
            found.append(got)
        settle(transport)
        for memory in shared:
            memory.close()
        return found

    by_rank = LocalGroup(sizes.ranks).run(on_rank)
    return [list(outputs) for outputs in zip(*by_rank, strict=True)]


def first_error(
    sizes: Sizes,
    check: Callable[[Round, list], str | None],
    dispatch: Any,
    combine: Any = None,
    packed: bool = False,
    seeds: int = 6,
    count: int = 4,
) -> str | None:
    """Run rounds in weak memory under several seeds; return what is wrong first, or None.

    ``check(inputs, outputs)`` returns what is wrong with the outputs of a round, or None.
    """
    for seed in range(seeds):
        rounds = random_rounds(sizes, count, seed)
        try:
            with simulator.seed(seed), simulator.weak_memory():
                found = run_rounds(sizes, rounds, dispatch, combine, packed)
        except simulator.SimulatorError as error:
            return f"seed {seed}: {str(error).splitlines()[0]}"
        for number, (inputs, outputs) in enumerate(zip(rounds, found, strict=True), start=1):
            if wrong := check(inputs, outputs):
                return f"seed {seed}, round {number}: {wrong}"
    return None
