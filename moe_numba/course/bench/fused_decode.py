"""Measures decode with kernels that are fused across the exchange of tokens, on two GPUs: two tables.

    python -m moe_numba.course.bench.fused_decode

The tables are part of docs/expert_parallel.md. A step is gate, dispatch and combine, or dispatch, experts and combine,
in bfloat16. Steps run interleaved, in CUDA graphs; ``topics.low_latency_measure`` says how the ranks' times are taken.
The fused kernels are those of ``fused_decode_kernels``. What they write must be equal bit for bit.

The down projection that is also combine is a longer kernel, in which the compiler unrolls no loop, and of which an SM
holds fewer CTAs. To compare like with like, both are compiled for `CTAS_PER_SM` CTAs per SM.
"""

import sys
from types import SimpleNamespace

import torch

from moe_numba.course.bench.dist import free_port, process_group
from moe_numba.course.bench.fused_decode_kernels import (
    DOWN_COMBINE_SIGNATURE,
    make_down_combine,
    make_gate_dispatch,
    make_rows_early,
)
from moe_numba.course.bench.topics.low_latency_measure import (
    BUFFER_BYTES,
    EXPERTS,
    HIDDEN,
    PAIRS,
    TOPK,
    LowLatencyBench,
)
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.compile_ahead import KernelDefinition
from moe_numba.expert_parallel.kernels.low_latency_layout import CTA_STATE
from moe_numba.expert_parallel.launch_plans import Kernel
from moe_numba.expert_parallel.low_latency_exchange import BOTH
from moe_numba.gate.api import GatePlan, check_options
from moe_numba.moe_layer.decode import decode_down, decode_gate_up
from moe_numba.moe_layer.kernel_decode import DecodeShape, make_decode_down_kernel
from moe_numba.runtime.launch import address, launcher

RANKS, ROUNDS, CTAS_PER_SM = 2, 3, 10
GATE = check_options(TOPK, True, 8, 4, 0, 2.5, True, "sigmoid")
GATES = (
    "dispatch and combine",
    "with the gate",
    "dispatch loads rows and state early",
    "gate and dispatch in one kernel",
)
ENDS = (
    "dispatch and experts",
    "with combine",
    f"with combine, {CTAS_PER_SM} CTAs per SM",
    f"down projection feeds combine, {CTAS_PER_SM} CTAs per SM",
)
LAYOUTS = {"in slots": False, "packed by expert": True}  # -> expert_major
MODELS = {"DeepSeek-V3": (EXPERTS, HIDDEN, 2048), "Qwen3-30B-A3B": (128, 2048, 768)}


class _Step:
    """Launches of fixed tensors on the current stream."""

    def __init__(self, buffer, x, ids, weights, num_experts, expert_major, options):
        sizes, options = (*x.shape, num_experts, ids.shape[1]), options | dict(expert_major=expert_major)
        self.plan = buffer.low_latency(*sizes, topk_idx_dtype=ids.dtype, **options)
        self.x, self.ids, self.weights, self.out = x, ids, weights, torch.empty_like(x)
        self.dispatch_weights, self.combine_weights = (None, weights) if expert_major else (weights, None)
        self.written = [self.out]  # by a call

    def _dispatch(self):
        self.plan._dispatch.launch(self.x, self.ids, self.dispatch_weights, self.plan.received)

    def _combine(self, y):
        self.plan._combine.launch(y, self.plan.received.slot_rows, self.ids, self.combine_weights, self.out)


class GateStep(_Step):
    """Gate, dispatch and combine; ``kind`` is one of `GATES`."""

    def __init__(self, buffer, kind, x, logits, bias, expert_major, **options):
        ids = torch.empty(len(x), GATE.topk, dtype=torch.int32, device=x.device)
        super().__init__(buffer, x, ids, torch.empty_like(ids).float(), logits.shape[1], expert_major, options)
        self.kind, self.logits, self.bias = GATES.index(kind), logits, bias
        self.gate = GatePlan(logits, bias, GATE, False)
        self.pointers = buffer._runtime.pointers
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
        if self.kind:
            self.written += [self.weights, self.ids, *(t for t in self.plan.received if t is not None)]

    def _route(self):
        self.gate.launch(self.logits, self.bias, self.weights, self.ids, len(self.x))

    def __call__(self):
        dispatch, received = self.plan._dispatch, self.plan.received
        if self.kind == 3:
            inputs = *self.pointers(self.x, self.ids, self.weights), len(self.x)
            others = map(address, (dispatch.total_counts, dispatch.wait_ns, self.logits, self.bias))
            dispatch.start(BOTH, *inputs, *dispatch._outputs(received), *others, *self.gate.trailing_arguments)
        else:
            if self.kind:
                self._route()
            self._dispatch()
        self._combine(received.x)


class ExpertsStep(_Step):
    """Dispatch, experts in two kernels, and combine; ``kind`` is one of `ENDS`."""

    def __init__(self, buffer, kind, x, ids, weights, w13, w2, **options):
        super().__init__(buffer, x, ids, weights, RANKS * len(w2), False, options)
        self.kind, got, (local_experts, hidden, intermediate) = ENDS.index(kind), self.plan.received, w2.shape
        self.written = self.written if self.kind else []
        tensors = dict(x=got.x, topk_ids=got.topk_idx, topk_weights=got.topk_weights, w13=w13, w2=w2)
        self.t = SimpleNamespace(**tensors, w13_bias=None, w2_bias=None, shared=None)
        self.y, self.activated = torch.empty_like(got.x), w2.new_empty(got.topk_idx.numel(), intermediate)
        shape = DecodeShape(local_experts, hidden, intermediate, ids.shape[1], "", 2)
        self.items, self.threads = got.x.numel() // shape.columns, 32 * shape.warps
        self.ctas, combine = self.items // shape.warps, self.plan._combine
        if self.kind == 2:
            pointers = "uint16*", "uint16*", "uint16*", "int32*", "float32*", "uint16*", "uint16*"
            made, bounds = make_decode_down_kernel(shape, False), (self.threads, CTAS_PER_SM)
            signature = *pointers, "int32", "int64", "int64"
            self.down = launcher(made, signature, x.device.index or 0, launch_bounds=bounds, dependent=True)
        elif self.kind == 3:
            combine.state = torch.zeros(CTA_STATE + 2 * self.ctas, dtype=torch.int32, device=x.device)
            local, peers, _, status = combine._common_arguments
            combine._common_arguments = local, peers, address(combine.state), status
            constants = ((combine.shape, shape),), DOWN_COMBINE_SIGNATURE, self.threads, 0, CTAS_PER_SM
            self.down = Kernel(combine, KernelDefinition(make_down_combine, *constants))

    def __call__(self):
        t, numbers = self.t, (self.items, *self.t.topk_ids.stride())
        self._dispatch()
        decode_gate_up(t, ("silu",), self.activated)
        if self.kind < 2:
            decode_down(t, self.activated, self.y)
        elif self.kind == 2:
            pointers = map(address, (self.activated, t.w2, t.w2, t.topk_ids, t.topk_weights, self.y, self.y))
            self.down(self.ctas, self.threads, None, *pointers, *numbers)
        else:
            pointers = map(address, (self.activated, t.w2, t.topk_ids, t.topk_weights, self.ids))
            mask, out = self.plan._combine.mask_ptr, address(self.out)
            self.down(self.ctas, mask, *pointers, len(self.x), out, *numbers)
        if self.kind in (1, 2):
            self._combine(self.y)


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


class FusedDecodeBench(LowLatencyBench):
    """The benchmark on one rank."""

    def tables(self):
        """Return two tables in Markdown."""
        gates = {
            f"{layout}, {tokens}": self._gates(tokens, expert_major)
            for layout, expert_major in LAYOUTS.items()
            for tokens in (1, 8, 32, 128)
        }
        experts = {}
        for name, (num_experts, hidden, intermediate) in MODELS.items():
            sizes = (2 * intermediate, hidden), (hidden, intermediate)
            weights = [self._normal(num_experts // RANKS, *size).mul_(0.02) for size in sizes]
            experts |= {f"{name}, {tokens}": self._experts(tokens, num_experts, *weights) for tokens in (1, 4, 8)}
        return table(gates), table(experts)

    def _normal(self, *size):
        return torch.randn(size, dtype=torch.bfloat16, device=self.device)

    def _gates(self, tokens, expert_major):
        x, logits, bias = self._normal(tokens, HIDDEN), self._normal(tokens, EXPERTS).float(), self._normal(EXPERTS)

        def draw():
            x.normal_()
            logits.normal_()

        return self._measure(GATES, draw, GateStep, x, logits, bias.float(), expert_major)

    def _experts(self, tokens, num_experts, w13, w2):
        x, weights = self._normal(tokens, w2.shape[1]), torch.rand(tokens, TOPK, device=self.device)
        ids = torch.empty(tokens, TOPK, dtype=torch.int32, device=self.device)

        def draw():
            x.normal_()
            ids.copy_(torch.rand(tokens, num_experts, device=self.device).topk(TOPK, dim=1).indices)

        return self._measure(ENDS, draw, ExpertsStep, x, ids, weights, w13, w2)

    def _measure(self, kinds, draw, make, *inputs):
        """Return {kind: Stats} of steps, after checking what they write."""
        self.buffer = Buffer(self.group, BUFFER_BYTES, low_latency_mode=True, timeout=20)
        steps = {kind: make(self.buffer, kind, *inputs) for kind in kinds}
        for _ in range(ROUNDS):
            draw()
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
        tables = FusedDecodeBench(rank, RANKS, False, torch.distributed.group.WORLD).tables()
        if rank == 0:
            print("\n\n".join(tables))


if __name__ == "__main__":
    if torch.cuda.device_count() < RANKS:
        sys.exit(f"{RANKS} GPUs are needed")
    torch.multiprocessing.spawn(_work, (free_port(),), nprocs=RANKS)
