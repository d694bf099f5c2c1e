"""Measures low-latency dispatch that is closer connected with the gate before it, on two GPUs: a table.

    python -m moe_numba.course.bench.gate_dispatch

The table is part of docs/expert_parallel.md. A step is gate, dispatch and combine with DeepSeek-V3's sizes in bfloat16.
Steps run interleaved, in CUDA graphs; ``topics.low_latency_measure`` says how the ranks' times are taken. The kernels
are those of ``gate_dispatch_kernels``. What they write must be equal bit for bit.
"""

import sys

import torch

from moe_numba.course.bench.gate_dispatch_kernels import make_gate_dispatch, make_rows_early
from moe_numba.course.bench.timing.dist import free_port, process_group
from moe_numba.course.bench.topics.low_latency.measure import (
    BUFFER_BYTES,
    EXPERTS,
    HIDDEN,
    PAIRS,
    TOPK,
    LowLatencyBench,
)
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.low_latency.exchange import BOTH
from moe_numba.expert_parallel.rings.launch_plans import Kernel
from moe_numba.gate.api import GatePlan, check_options
from moe_numba.runtime.launch import address

RANKS, TOKENS, ROUNDS = 2, (1, 8, 32, 128), 3
GATE = check_options(TOPK, True, 8, 4, 0, 2.5, True, "sigmoid")
KINDS = (
    "dispatch and combine",
    "with the gate",
    "dispatch loads rows and state early",
    "gate and dispatch in one kernel",
)
LAYOUTS = {"in slots": False, "packed": True}  # -> expert_major


class Step:
    """Gate, dispatch and combine of fixed tensors; a call launches them on the current stream. ``kind``: of `KINDS`."""

    def __init__(self, buffer, kind, x, logits, bias, expert_major, **options):
        (tokens, hidden), num_experts = x.shape, logits.shape[1]
        options |= dict(expert_major=expert_major, topk_idx_dtype=torch.int32)
        self.plan = buffer.low_latency(tokens, hidden, num_experts, GATE.topk, **options)
        self.kind, self.x, self.logits, self.bias, self.out = KINDS.index(kind), x, logits, bias, torch.empty_like(x)
        self.ids = torch.empty(tokens, GATE.topk, dtype=torch.int32, device=x.device)
        self.weights = torch.empty_like(self.ids, dtype=torch.float32)
        self.dispatch_weights, self.combine_weights = (None, self.weights) if expert_major else (self.weights, None)
        self.gate, self.pointers = GatePlan(logits, bias, GATE, False), buffer._runtime.pointers
        dispatch = self.plan._dispatch
        definition = dispatch._kernels[BOTH].definition
        if self.kind == 2:
            dispatch._kernels[BOTH] = Kernel(dispatch, definition._replace(make=make_rows_early))
        elif self.kind == 3:
            signature = *definition.signature, "float32*", "float32*", "float32", "float32"
            constants = ((*definition.constants, self.gate.config),)
            definition = definition._replace(make=make_gate_dispatch, constants=constants, signature=signature)
            dispatch._kernels[BOTH] = Kernel(dispatch, definition)
        self._route()
        written = self.out, self.weights, self.ids, *self.plan.received
        self.written = [tensor for tensor in written if tensor is not None] if self.kind else []  # by a call

    def _route(self):
        self.gate.launch(self.logits, self.bias, self.weights, self.ids, len(self.x))

    def __call__(self):
        dispatch, combine, received = self.plan._dispatch, self.plan._combine, self.plan.received
        if self.kind == 3:
            inputs = *self.pointers(self.x, self.ids, self.weights), len(self.x)
            others = map(address, (dispatch.total_counts, dispatch.wait_ns, self.logits, self.bias))
            dispatch.start(BOTH, *inputs, *dispatch._outputs(received), *others, *self.gate.trailing_arguments)
        else:
            if self.kind:
                self._route()
            dispatch.launch(self.x, self.ids, self.dispatch_weights, received)
        combine.launch(received.x, received.slot_rows, self.ids, self.combine_weights, self.out)


def check_equal(steps, run):
    """Run steps, {name: step}, by ``run(step)``, and raise an error if what they write differs in a bit."""
    wanted = None
    for name, step in steps.items():
        for tensor in step.written:
            tensor.fill_(-7)
        run(step)
        found = [tensor.clone().view(torch.uint8) for tensor in step.written]
        if step.kind:
            wanted = wanted or found
            if not all(map(torch.equal, found, wanted)):
                raise AssertionError(f"{name}: an output differs")


class GateDispatchBench(LowLatencyBench):
    """The benchmark on one rank."""

    def rows(self):
        """Return {layout and tokens: {kind: Stats}}."""
        sizes = [(layout, tokens) for layout in LAYOUTS for tokens in TOKENS]
        return {f"{layout}, {tokens}": self._measure(tokens, LAYOUTS[layout]) for layout, tokens in sizes}

    def _measure(self, tokens, expert_major):
        """Return {kind: Stats}, after checking what steps write."""
        normal = lambda *size: torch.randn(size, device=self.device)
        x, logits, bias = normal(tokens, HIDDEN).bfloat16(), normal(tokens, EXPERTS), normal(EXPERTS)
        self.buffer = Buffer(self.group, BUFFER_BYTES, low_latency_mode=True, timeout=20)
        steps = {kind: Step(self.buffer, kind, x, logits, bias, expert_major) for kind in KINDS}
        for _ in range(ROUNDS):
            x.normal_()
            logits.normal_()
            check_equal(steps, self._run)
        graphs = {kind: self._graph_of_pairs(step) for kind, step in steps.items()}
        times = self._interleaved(graphs, PAIRS, begins_together=True)
        self.buffer.check(synchronize=True)
        for step in steps.values():
            step.plan.close()
        self.buffer.destroy()
        return times

    def _run(self, step):
        self._barrier()
        step()
        self._barrier()


def table(found):
    """Format {column: {line: Stats}} in Markdown: medians, in microseconds."""
    columns, names = found.values(), next(iter(found.values()))
    lines = [[name, *(f"{times[name].median:.2f}" for times in columns)] for name in names]
    heads = [["", *found], ["---", *["---:"] * len(found)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in heads + lines)


def _work(rank, port):
    with process_group(rank, RANKS, port):
        rows = GateDispatchBench(rank, RANKS, False, torch.distributed.group.WORLD).rows()
        if rank == 0:
            print(table(rows))


if __name__ == "__main__":
    if torch.cuda.device_count() < RANKS:
        sys.exit(f"{RANKS} GPUs are needed")
    torch.multiprocessing.spawn(_work, (free_port(),), nprocs=RANKS)
