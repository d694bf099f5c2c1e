"""Inputs of notebook 01: logits in rotating sets, outputs, the check of a routing, and the phases of a kernel."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from numba import cuda

from moe_numba import simulator
from moe_numba.course.bench.timing import rotating
from moe_numba.course.steps.ladder import Ladder
from moe_numba.gate import reference


class Routing(NamedTuple):
    """Outputs of a gate, and the logits that they belong to."""

    weights: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    any_order: bool = False  # of the experts of a token, as torch.topk(sorted=False) returns them


class GateRuns:
    """Random logits and biases of a gate, and calls of kernels on them.

    Parameters
    ----------
    tokens, num_experts, num_expert_group, topk_group, topk : int
    dtype : torch.dtype
        Of the logits; the bias is float32.
    """

    def __init__(self, tokens, num_experts, num_expert_group, topk_group, topk, dtype=torch.float32):
        self.tokens, self.topk = tokens, topk
        self.groups = {"num_expert_group": num_expert_group, "topk_group": topk_group}
        self.device = "cpu" if simulator.ENABLED else "cuda"
        torch.manual_seed(0)
        make = lambda: torch.randn(tokens, num_experts, device=self.device).to(dtype)
        self.sets = rotating(make, tokens * num_experts * dtype.itemsize)
        self.logits, self.bias = self.sets[0], torch.rand(num_experts, device=self.device) * 0.2

    def poisoned(self, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs that no kernel leaves as they are: weights of NaN and ids of -7."""
        shape = tokens or self.tokens, self.topk
        weights = torch.full(shape, float("nan"), device=self.device)
        return weights, torch.full(shape, -7, dtype=torch.int32, device=self.device)

    def calls(
        self, run: Callable, tokens: int | None = None, any_order: bool = False
    ) -> tuple[Callable, list[Callable]]:
        """Return a call whose `Routing` can be checked, and one call per set of logits to be timed.

        Parameters
        ----------
        run : callable
            ``run(logits, weights, ids)`` writes the outputs, which are poisoned once and the same in all calls, or
            returns (weights, ids) of its own.
        tokens : int, optional
            Only the first tokens are routed.
        any_order : bool
            See `Routing`.
        """
        weights, ids = self.poisoned(tokens)
        sets = [logits[:tokens] for logits in self.sets]

        def call():
            return Routing(*(run(sets[0], weights, ids) or (weights, ids)), sets[0], any_order)

        return call, [lambda logits=logits: run(logits, weights, ids) for logits in sets]

    def check(self, routing: Routing) -> str | None:
        """Return what is wrong with a routing, or None: experts, their order by biased score, or weights."""
        weights, ids, logits, any_order = routing
        if any_order:
            weights, ids = self._best_first(weights, ids, logits)
        return reference.mismatch(weights, ids, logits, self.bias, self.topk, **self.groups)

    def _best_first(self, weights, ids, logits):
        """Sort the experts of each token as the reference does: by biased score, the lower id first."""
        order = ids.argsort(dim=1)
        weights, ids = weights.gather(1, order), ids.gather(1, order)
        order = (logits.sigmoid() + self.bias).gather(1, ids.long()).argsort(dim=1, descending=True, stable=True)
        return weights.gather(1, order), ids.gather(1, order)


def numba_stream():
    """Return torch's current stream for ``kernel[grid, block, stream]``; Numba's own default is another stream."""
    return 0 if simulator.ENABLED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)


def resident_ctas(registers: int, warps: int) -> int:
    """Return how many CTAs of this many warps an SM with 65,536 registers and room for 64 warps can hold.

    A quarter of the registers belongs to each of four schedulers, and a warp gets a multiple of 8 per thread.
    """
    per_scheduler = 16384 // (32 * (-(-registers // 8) * 8))
    return min(64, 4 * per_scheduler) // warps


def phases(
    ladder: Ladder, runs: GateRuns, name: str, run_of: Callable[[int, int], Callable]
) -> dict[str, float] | None:
    """Time a kernel without its group phase, and with one pick; return what each phase takes, in microseconds.

    The phases of different warps overlap, so the times are what the kernel gains without a phase.

    Parameters
    ----------
    ladder : Ladder
        Records the times under ``f"phases of {name}"``.
    run_of : callable
        ``run_of(topk_group, topk)`` returns ``run(logits, weights, ids)`` of one kernel, which keeps ``topk_group``
        groups and picks ``topk`` experts. If all groups are kept, it must leave out the group phase.

    Returns
    -------
    dict of phase -> us, or None if nothing is measured or recorded
    """
    groups, kept = runs.groups["num_expert_group"], runs.groups["topk_group"]
    sizes = {"all": (kept, runs.topk), "no group phase": (groups, runs.topk), "one pick": (kept, 1)}
    times = ladder.times(f"phases of {name}", {label: runs.calls(run_of(*size))[1] for label, size in sizes.items()})
    if times is None:
        return None
    choose_groups = max(0.0, times["all"] - times["no group phase"])
    picks = max(0.0, (times["all"] - times["one pick"]) * runs.topk / (runs.topk - 1))
    load = max(0.0, times["all"] - choose_groups - picks)
    return {"load, sigmoid, bias": load, "choose groups": choose_groups, "choose experts": picks}


def shared_bytes_of(ctas: int) -> int:
    """Return the most bytes of shared memory per CTA with which this many CTAs fit on an SM; 0 in the simulator."""
    if simulator.ENABLED:
        return 0
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    system_bytes = 1024  # of each CTA, from compute capability 8.0 on: an SM has one CTA's most and its system bytes
    return ((most + system_bytes) // ctas - system_bytes) // 128 * 128
