"""Measures low-latency dispatch and combine with one process per GPU, beside normal mode and NCCL.

Every sample is the slowest rank's. *Kernel time* is that of a CUDA graph of `PAIRS` pairs, divided by their number. The
graph directly follows another replay of itself: pairs synchronise the ranks, so that all begin within a microsecond.
*Call time* is between CUDA events around one pair of calls, after a barrier of all ranks: it includes how far apart the
ranks leave the barrier, and that host and GPU were idle. ``loop_us`` is that of `CALLS` pairs called one after another,
divided by their number, as a model calls its layers. Peers are captured in graphs, too.

One rank alone is measured as well, without peers: it copies its own tokens, and nothing crosses NVLink.

Peers: ``low_latency_peers_measure``.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.records import progress
from moe_numba.course.bench.timing import Stats, launched_by
from moe_numba.course.bench.timing.dist import load_files, peer_files
from moe_numba.course.bench.topics.dispatch_combine.measure import BUFFER_BYTES, EXPERTS, HIDDEN, MAIN_SMS, TOPK
from moe_numba.course.bench.topics.low_latency.measure_peers import Problem, peer_pairs
from moe_numba.expert_parallel import Buffer, Config, LocalGroup
from moe_numba.expert_parallel.low_latency.config import shape_of_options
from moe_numba.expert_parallel.low_latency.exchange import exchange_kernels
from moe_numba.expert_parallel.ranks.compile_ahead import compile_ahead
from moe_numba.expert_parallel.ranks.process_group import free_port, process_group
from moe_numba.expert_parallel.rings.config import limits_of
from moe_numba.expert_parallel.rings.launch_plans import PlannedKernels
from moe_numba.runtime.device import gpu_of

TOKENS = (1, 8, 32, 128, 256)
PAIRS, CALLS = 10, 50  # in one graph, and called one after another
NORMAL_CONFIG = Config(MAIN_SMS, 6, 256)
ONE_RANK_EXPERTS = EXPERTS // 2  # as many as each of two ranks has
LOW_LATENCY = {  # step -> options of `Buffer.low_latency`, and the dtype of the rows
    ("final", "bf16"): dict(),
    ("final", "e4m3"): dict(use_fp8=True),
    ("flags", "bf16"): dict(protocol="flags"),
    ("in slots", "bf16"): dict(expert_major=False),
    ("in slots", "e4m3"): dict(expert_major=False, use_fp8=True),
    ("in slots, FP8 sums", "e4m3"): dict(expert_major=False, use_fp8=True, use_fp8_combine=True),
    ("in slots, flags", "bf16"): dict(expert_major=False, protocol="flags"),
}


def measure(numbers_of_ranks, quick=False, peers=()):
    """Return the record's rows for all group sizes for which there are enough GPUs."""
    rows, numbers_of_ranks = [], [ranks for ranks in numbers_of_ranks if ranks <= torch.cuda.device_count()]
    compile_ahead(definition for ranks in numbers_of_ranks for definition in kernels(ranks, quick))
    for ranks in numbers_of_ranks:
        if ranks == 1:
            rows += LocalGroup(1).run(lambda group: LowLatencyBench(0, 1, quick, group).rows())[0]
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            files = peer_files(peers, "plan_low_latency")
            try:
                torch.multiprocessing.spawn(_work, (ranks, free_port(), quick, files, found), nprocs=ranks)
            except Exception as error:  # a peer's kernel that aborts takes its process with it
                if not files:
                    raise
                print(f"{ranks} ranks are measured again, without peers: {error}", file=sys.stderr)
                torch.multiprocessing.spawn(_work, (ranks, free_port(), quick, [], found), nprocs=ranks)
            rows += json.loads(found.read_text())
    return rows


def kernels(ranks, quick=False):
    """Return the definitions of the kernels that are measured; the ranks would compile them one after another."""
    planned = PlannedKernels(ranks, BUFFER_BYTES, limits_of(gpu_of(0)))
    if ranks > 1:
        planned.combine(NORMAL_CONFIG, HIDDEN, TOPK, planned.dispatch(NORMAL_CONFIG, HIDDEN, topk=TOPK))
    for tokens in numbers_of_tokens(quick):
        for options in LOW_LATENCY.values():
            shape = shape_of_options(ranks, tokens, HIDDEN, _num_experts(ranks), TOPK, **options)
            planned.definitions += exchange_kernels(shape)
    return planned.definitions


def numbers_of_tokens(quick):
    """Return the numbers of tokens of a rank."""
    return (1, 128) if quick else TOKENS


def _num_experts(ranks):
    return EXPERTS // ranks * ranks if ranks > 1 else ONE_RANK_EXPERTS


def _work(rank, ranks, port, quick, files, found):
    with process_group(rank, ranks, port), progress.said(rank == 0):
        rows = LowLatencyBench(rank, ranks, quick, torch.distributed.group.WORLD, load_files(files)).rows()
        if rank == 0:
            found.write_text(json.dumps(rows))


def _repeat(call):
    for _ in range(CALLS):
        call()


class LowLatencyBench:
    """The benchmark on one rank; all steps of one number of tokens run interleaved with one another."""

    def __init__(self, rank, ranks, quick, group, peers=()):
        self.peers, self.versions = peers, {}
        self.ranks, self.quick, self.group, self.device = ranks, quick, group, torch.device("cuda", rank)
        self.experts = _num_experts(ranks)
        self.config = dict(ranks=ranks, num_experts=self.experts, topk=TOPK, hidden=HIDDEN)
        torch.manual_seed(rank)
        self.x = torch.randn(max(TOKENS), HIDDEN, device=self.device).bfloat16()
        self.topk_idx = torch.rand(max(TOKENS), self.experts, device=self.device).topk(TOPK, dim=1).indices
        self.topk_weights = torch.rand(max(TOKENS), TOPK, device=self.device)

    def rows(self):
        """Return the rows of this group size, the same on every rank."""
        rows = []
        for tokens in numbers_of_tokens(self.quick):
            self.buffer = Buffer(self.group, BUFFER_BYTES, low_latency_mode=True, timeout=20)
            rows += self._pairs(tokens)
            self.buffer.destroy()
        return rows

    def _barrier(self):
        import torch.distributed as dist

        torch.cuda.synchronize()
        if self.ranks > 1:
            dist.barrier()
            torch.cuda.synchronize()

    def _slowest(self, samples, kernels):
        """Return the statistics of the maximum over ranks of each sample."""
        import torch.distributed as dist

        samples = torch.tensor(samples, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(samples, dist.ReduceOp.MAX)
        return Stats.of(samples.cpu().numpy(), kernels)

    def _pairs(self, tokens):
        x, idx, weights = (part[:tokens].contiguous() for part in (self.x, self.topk_idx, self.topk_weights))
        plans, steps = [], {}
        for (step, dtype), options in LOW_LATENCY.items():
            plan = self.buffer.low_latency(tokens, HIDDEN, self.experts, TOPK, **options)
            plans.append(plan)
            steps[step, dtype] = self._pair(plan, x, idx, weights)
        if self.ranks > 1:
            steps["normal, graph", "bf16"] = self._normal_pair(x, idx, weights)
            for name, call in self._nccl_pairs(x).items():
                steps[f"peer:NCCL {name}", "bf16"] = call
                self.versions[f"peer:NCCL {name}"] = ".".join(map(str, torch.cuda.nccl.version()))
            steps |= peer_pairs(self, Problem(self.buffer.transport, x, idx, weights, self.experts))
        graphs = {key: self._graph_of_pairs(call) for key, call in steps.items()}
        loops = {key: partial(_repeat, call) for key, call in steps.items()}
        kernel, called = self._interleaved(graphs, PAIRS, begins_together=True), self._interleaved(steps, 1)
        looped = self._interleaved(loops, CALLS, rounds=7)
        self.buffer.check(synchronize=True)
        for plan in plans:
            plan.close()
        return [
            records.row(
                step,
                config=self.config,
                size={"tokens": tokens},
                dtype=dtype,
                operation="dispatch and combine",
                kernel=kernel[step, dtype],
                call=called[step, dtype],
                loop_us=records.times(looped[step, dtype]),
                **({"version": self.versions[step]} if step in self.versions else {}),
            )
            for step, dtype in steps
        ]

    def _pair(self, plan, x, idx, weights):
        """Return a function that dispatches and combines, after checking the sums of experts that change nothing."""
        packed = plan.shape.expert_major
        y = plan.received.x if not plan.shape.is_fp8 else torch.empty_like(plan.received.x, dtype=torch.bfloat16)

        def pair():
            plan.dispatch(x, idx, None if packed else weights)
            return plan.combine(y, idx, weights if packed else None)

        plan.dispatch(x, idx, None if packed else weights)
        rows = plan.received.x
        if plan.shape.is_fp8:
            scales = plan.received.scales.repeat_interleave(128, dim=-1)
            y.copy_((rows.float() * scales).bfloat16().nan_to_num())
        out = plan.combine(y, idx, weights if packed else None)
        # bfloat16 rounds to 8 bits, e4m3 to 4; either is rounded once for each direction.
        bound = 0.2 if plan.shape.combines_fp8 else 0.1 if plan.shape.is_fp8 else 0.02
        self.check_sums(out, x, weights.sum(1, keepdim=True) if packed else self.ranks_of(idx), bound)
        return pair

    def check_sums(self, out, x, copies, bound):
        """Check that combined tokens are the tokens times ``copies``."""
        error = ((out.float() - x.float() * copies).abs() / (x.float() * copies).abs().clamp(min=0.1)).max()
        if not error < bound:
            raise AssertionError(f"the combined rows are not the sums of the sent rows: relative error {error:.3g}")

    def _normal_pair(self, x, idx, weights):
        """Return a function that dispatches and combines in normal mode, without waiting for the counts."""
        per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(idx, self.experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        options = dict(num_worst_tokens=self.ranks * len(x), config=NORMAL_CONFIG)

        def pair():
            given = self.buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights, **options)
            return self.buffer.combine(given[0], given[4], given[2], config=options["config"])[0]

        if not torch.equal(pair(), (x.float() * self.ranks_of(idx)).bfloat16()):
            raise AssertionError("normal mode: the combined rows are not the sums of the sent rows")
        return pair

    def ranks_of(self, idx):
        """Return the number of ranks that have one of a token's experts."""
        owners = idx // (self.experts // self.ranks)
        return torch.stack([(owners == r).any(1) for r in range(self.ranks)], 1).sum(1, keepdim=True)

    def _nccl_pairs(self, x):
        """Return NCCL's pairs: every token to all ranks and back, or gathered and summed."""
        import torch.distributed as dist

        send = x.repeat(self.ranks, 1)
        got, back, out = torch.empty_like(send), torch.empty_like(send), torch.empty_like(x)

        def all_to_all():
            dist.all_to_all_single(got, send)
            dist.all_to_all_single(back, got)

        def all_gather():
            dist.all_gather_into_tensor(got, x)
            dist.reduce_scatter_tensor(out, got)

        all_to_all()
        if not torch.equal(back, send):
            raise AssertionError("NCCL all-to-all: the rows that came back are not those that were sent")
        all_gather()
        if not torch.allclose(out.float(), x.float() * self.ranks, rtol=0.02):
            raise AssertionError("NCCL reduce-scatter: the sums are not the number of ranks times the rows")
        return {"all-to-all": all_to_all, "all-gather and reduce-scatter": all_gather}

    def _graph_of_pairs(self, pair):
        """Capture `PAIRS` pairs in a CUDA graph, and return the function that replays it."""
        pair()
        self._barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(PAIRS):
                pair()
        return graph.replay

    def _interleaved(self, steps, pairs, rounds=20, begins_together=False):
        """Return the Stats of each step, in microseconds per pair; each round times every step once."""
        samples, kernels = {key: [] for key in steps}, {}
        for key, call in steps.items():
            self._barrier()
            kernels[key] = launched_by(call)
        for round_ in range(rounds + 1):
            for key, call in steps.items():
                self._barrier()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                if begins_together:
                    call()
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                if round_ >= 1:
                    samples[key].append(begin.elapsed_time(end) * 1e3 / pairs)
        return {key: self._slowest(found, kernels[key]) for key, found in samples.items()}
