"""Measures `ExpertParallelMoE` with one process per GPU, and its parts: rows of the topic `moe_layer_ranks`.

Each GPU has 32 experts of DeepSeek-V3 in FP8 with block scales, as each of 8 GPUs has. Every sample is the slowest
rank's, of a CUDA graph of `CALLS` calls, divided by their number; all steps of one number of tokens run interleaved.
"""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import nn

import moe_numba
from moe_numba.course.bench import records
from moe_numba.course.bench.records import progress
from moe_numba.course.bench.timing import Stats, launched_by, shuffled_rounds
from moe_numba.course.bench.topics.moe_layer.measure import make_weights
from moe_numba.course.lessons.one_kernel.by_launches import LaunchesByExpert
from moe_numba.expert_parallel import Buffer, get_dispatch_layout, per_token_cast_to_fp8
from moe_numba.expert_parallel.low_latency.config import shape_of_options
from moe_numba.expert_parallel.low_latency.exchange import exchange_kernels
from moe_numba.expert_parallel.ranks.compile_ahead import compile_ahead
from moe_numba.expert_parallel.ranks.process_group import free_port, process_group
from moe_numba.expert_parallel.rings.config import limits_of
from moe_numba.expert_parallel.rings.launch_plans import PlannedKernels
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.moe_layer import ExpertParallelMoE, Experts
from moe_numba.moe_layer.compile_layers import Layer, compile_layers, empty_arguments
from moe_numba.moe_layer.expert_parallel.one_kernel import OneKernel
from moe_numba.runtime.device import gpu_of

TOKENS = (8, 64, 512, 4096)
MAX_LOW_LATENCY_TOKENS = 512
LOCAL_EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 32, 7168, 2048, 8
BUFFER_BYTES, CALLS, WARM_UP_ROUNDS, ROUNDS = 1 << 30, 4, 2, 20
# Each rank's sum is rounded to bfloat16, and quantisation amplifies differences of the last bit.
BOUND, BOUND_OF_FP8_SUMS = 2e-2, 6e-2
NAIVE = "peer:NCCL all-gather and reduce-scatter"
BY_EXPERT = {"launches by expert": LaunchesByExpert, "one kernel": OneKernel}  # step -> layer; both send FP8
GEMMS = "part: GEMMs by expert", "e4m3"
WIRES = {"bf16": False, "e4m3": True}  # {dtype of the rows that dispatch sends: `fp8_dispatch`}


class SharedExpert(nn.Module):
    """DeepSeek-V3's shared expert in bfloat16, with torch."""

    def __init__(self, hidden, intermediate, device):
        super().__init__()
        make = partial(nn.Linear, bias=False, device=device, dtype=torch.bfloat16)
        self.gate_up, self.down = make(hidden, 2 * intermediate), make(intermediate, hidden)

    def forward(self, x):
        """Return silu(gate) * up, multiplied with the second weight."""
        return self.down(moe_numba.silu_and_mul(self.gate_up(x)))


class NaiveLayer:
    """A layer without dispatch: each rank gathers all tokens and computes its own experts; NCCL adds the results."""

    def __init__(self, group, rank, experts):
        self.group, self.experts, self.first = group, experts, rank * len(experts.w13)

    def __call__(self, x, weights, ids):
        """Return the sums of the experts of this rank's tokens."""
        x, weights, ids = (all_gather(self.group, tensor) for tensor in (x, weights, ids))
        return reduce_scatter(self.group, self.experts(x, weights, ids - self.first))  # other ids add nothing


def all_gather(group, x):
    """Return the rows of all ranks."""
    out = x.new_empty(len(x) * torch.distributed.get_world_size(group), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(out, x, group)
    return out


def reduce_scatter(group, x):
    """Return the sums over the ranks of this rank's share of rows."""
    out = x.new_empty(len(x) // torch.distributed.get_world_size(group), *x.shape[1:])
    torch.distributed.reduce_scatter_tensor(out, x, group=group)
    return out


def measure(numbers_of_ranks, quick=False):
    """Return the record's rows for all group sizes for which there are enough GPUs."""
    rows, token_counts = [], TOKENS[:1] if quick else TOKENS
    for ranks in numbers_of_ranks:
        if ranks > torch.cuda.device_count():
            continue
        compile_all(ranks, token_counts)
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "rows.json"
            arguments = ranks, free_port(), token_counts, found
            torch.multiprocessing.spawn(_work, arguments, nprocs=ranks)
            rows += json.loads(found.read_text())
    return rows


def compile_all(ranks, token_counts):
    """Compile all kernels in advance: those of the experts and those of the exchange at the same time."""
    layers = layer_of(1, tuple(ranks * tokens for tokens in token_counts)), layer_of(ranks, token_counts)
    others = [partial(call_others, ranks, tokens) for tokens in token_counts]
    with ThreadPoolExecutor() as pool:
        for work in (
            pool.submit(compile_layers, layers, torch.int64, others),
            pool.submit(compile_ahead, kernels(ranks, token_counts)),
        ):
            work.result()


def call_others(ranks, tokens):
    """Call what a rank's layer calls besides `layer_of`, on tensors whose memory is not touched."""
    x, local = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16), layer_of(1)
    per_token_cast_to_fp8(x)
    get_dispatch_layout(torch.empty(tokens, TOPK, dtype=torch.int64), LOCAL_EXPERTS * ranks, ranks)
    moe_numba.silu_and_mul(torch.empty(tokens, 2 * INTERMEDIATE, dtype=torch.bfloat16))
    given = empty_arguments(local, ranks * tokens, torch.int64)
    for scales in (torch.empty(ranks * tokens, HIDDEN // 128), torch.empty(HIDDEN // 128, ranks * tokens).T):
        received = dict(x=given["x"].to(torch.float8_e4m3fn), x_scale=scales)
        moe_numba.fused_experts(**given | received)


def low_latency_formats(is_fp8, tokens):
    """Return whether combine sends FP8, for each low-latency layer of a number of tokens; with FP8 dispatch both."""
    return [False] * (tokens <= MAX_LOW_LATENCY_TOKENS) + [True] * is_fp8


def layer_of(ranks, token_counts=()):
    """Return the sizes of the layer whose experts ``ranks`` GPUs have."""
    return Layer("DeepSeek-V3", LOCAL_EXPERTS * ranks, HIDDEN, INTERMEDIATE, "e4m3", token_counts, TOPK)


def kernels(ranks, token_counts):
    """Return the definitions of the kernels of dispatch and combine."""
    planned = PlannedKernels(ranks, BUFFER_BYTES, limits_of(gpu_of(0)))
    dispatch, combine = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
    for is_fp8 in WIRES.values():
        rows = dict(dtype=torch.float8_e4m3fn, scales=HIDDEN // 128) if is_fp8 else {}
        channels = planned.dispatch(dispatch, HIDDEN, topk=TOPK, **rows)
        for biases in (0, 1):
            planned.combine(combine, HIDDEN, 0, channels, biases)
        for tokens in token_counts:
            for combines_fp8 in low_latency_formats(is_fp8, tokens):
                sizes = ranks, tokens, HIDDEN, LOCAL_EXPERTS * ranks, TOPK
                options = dict(expert_major=False, use_fp8=is_fp8, use_fp8_combine=combines_fp8)
                planned.definitions += exchange_kernels(shape_of_options(*sizes, **options))
    return planned.definitions


def _work(rank, ranks, port, token_counts, found):
    with process_group(rank, ranks, port), progress.said(rank == 0):
        group, device = torch.distributed.group.WORLD, torch.device("cuda", rank)
        rows = LayerBench(rank, ranks, group, device).rows(token_counts)
        if rank == 0:
            found.write_text(json.dumps(rows))


class LayerBench:
    """The benchmark on one rank."""

    def __init__(self, rank, ranks, group, device):
        self.rank, self.ranks, self.group, self.device = rank, ranks, group, device
        sizes = layer_of(ranks)
        self.config = dict(ranks=ranks) | sizes.config
        self.weights = make_weights(sizes, device)  # the same on all ranks
        self.experts = Experts(LOCAL_EXPERTS, HIDDEN, INTERMEDIATE, torch.float8_e4m3fn, device)
        own = slice(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)
        names = "w13", "w2", "w13_scale", "w2_scale"
        self.experts.load_state_dict({n: t[own] for n, t in zip(names, self.weights, strict=True)})
        self.shared_expert = SharedExpert(HIDDEN, INTERMEDIATE, device).requires_grad_(False)

    @torch.no_grad()
    def rows(self, token_counts):
        """Return the rows of this group size, the same on every rank."""
        rows = []
        for tokens in token_counts:
            self.buffer = Buffer(self.group, BUFFER_BYTES, low_latency_mode=True, timeout=20)
            rows += self._measure(tokens)
            self.buffer.destroy()
        return rows

    def _measure(self, tokens):
        random = torch.Generator(self.device).manual_seed(1000 + self.rank)
        draw = partial(torch.rand, generator=random, device=self.device)
        x, weights = (2 * draw(tokens, HIDDEN) - 1).bfloat16(), draw(tokens, TOPK)
        ids = draw(tokens, LOCAL_EXPERTS * self.ranks).topk(TOPK).indices
        given, (layers, steps) = (x, weights, ids), self._layers(tokens)
        expected = moe_numba.fused_experts(x, *self.weights[:2], weights, ids, *self.weights[2:])
        shared = self.shared_expert(x)
        calls = {}
        for (step, wire), (layer, has_shared) in steps.items():
            calls[step, wire] = partial(layer, *given)
            wanted = expected.double() + shared.double() if has_shared else expected.double()
            if fault := mismatch(layer(*given), wanted, BOUND_OF_FP8_SUMS if "FP8 sums" in step else BOUND):
                raise AssertionError(f"{step}, {wire}, {tokens} tokens: {fault}")
        if self.ranks > 1:  # one rank would gather and add nothing
            calls[NAIVE, "bf16"] = naive = partial(NaiveLayer(self.group, self.rank, self.experts), *given)
            if fault := mismatch(naive(), expected.double(), BOUND):
                raise AssertionError(f"{NAIVE}, {tokens} tokens: {fault}")
        versions = {NAIVE: ".".join(map(str, torch.cuda.nccl.version()))}
        plain = layers["bf16"]
        calls["shared experts first", "bf16"] = lambda: plain(*given, self.shared_expert(x))
        calls["part: shared experts", "bf16"] = lambda: self.shared_expert(x)
        by_expert = next((layer for layer, _ in steps.values() if isinstance(layer, LaunchesByExpert)), None)
        if by_expert is not None:
            launches = by_expert.launches(*given, torch.empty_like(x))  # their rows are those of the last call
            calls[GEMMS] = lambda: (launches["gate and up"](), launches["down"]())
        for wire, is_fp8 in WIRES.items():
            calls |= {(f"part: {name}", wire): call for name, call in self._parts(layers[wire], given, is_fp8).items()}
        times = self._times(calls)
        self.buffer.check(synchronize=True)
        for layer, _ in steps.values():
            layer.close()
        row = partial(records.row, config=self.config, size=dict(tokens=tokens))
        return [row(step, dtype=wire, kernel=times[step, wire], version=versions.get(step)) for step, wire in calls]

    def _layers(self, tokens):
        """Return the layers with rings, by what dispatch sends, and all: {(step, dtype): (layer, has shared)}."""
        make = partial(ExpertParallelMoE, self.buffer, self.experts)
        rings = partial(make, self.ranks * tokens, low_latency_tokens=0)
        steps, layers = {}, {}
        for wire, is_fp8 in WIRES.items():
            layers[wire] = rings(fp8_dispatch=is_fp8)
            steps["final", wire] = layers[wire], False
            for combines_fp8 in low_latency_formats(is_fp8, tokens):
                layer = make(low_latency_tokens=tokens, fp8_dispatch=is_fp8, fp8_combine=combines_fp8)
                steps["low latency, FP8 sums" if combines_fp8 else "low latency", wire] = layer, False
        for step, kind in BY_EXPERT.items():
            steps[step, "e4m3"] = kind(self.buffer, self.experts, TOPK, tokens), False
        steps["shared experts beside", "bf16"] = rings(shared_experts=self.shared_expert), True
        return layers, steps

    def _parts(self, layer, given, is_fp8):
        """Return {name: call} of the parts of a layer, on what the part before has returned once."""
        x, weights, ids = given

        def dispatch():
            per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(ids, layer.num_experts)
            layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
            options = dict(topk_idx=ids, topk_weights=weights, num_worst_tokens=layer.num_worst_tokens)
            return self.buffer.dispatch(per_token_cast_to_fp8(x) if is_fp8 else x, **layout, **options)

        def compute():
            return layer.compute(rows, row_weights, row_ids)

        rows, row_ids, row_weights, _, handle, _ = dispatch()
        results = compute()
        combine = lambda: self.buffer.combine(results, handle)
        return {"dispatch": dispatch, "experts": compute, "combine": combine}

    def _barrier(self):
        torch.cuda.synchronize()
        if self.ranks > 1:
            torch.distributed.barrier()
            torch.cuda.synchronize()

    def _times(self, calls):
        """Return the Stats of the slowest rank's microseconds per call, of graphs replayed interleaved."""
        graphs, samples, memory = {}, {key: [] for key in calls}, torch.cuda.graph_pool_handle()
        kernels = {}
        for key, call in calls.items():
            kernels[key] = launched_by(call)
            call()
            self._barrier()
            graphs[key] = torch.cuda.CUDAGraph()
            # The graphs share memory, as they are replayed one after another and nothing reads their results.
            # thread_local: NCCL's watchdog may call CUDA during the capture.
            with torch.cuda.graph(graphs[key], pool=memory, capture_error_mode="thread_local"):
                for _ in range(CALLS):
                    call()
        # In random order, the same on all ranks: what runs before a step sets the GPU's power and clock, and that was
        # worth 7 % of the same GEMMs.
        for key in shuffled_rounds(graphs, WARM_UP_ROUNDS + ROUNDS):
            self._barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[key].replay()
            end.record()
            torch.cuda.synchronize()
            samples[key].append(begin.elapsed_time(end) * 1e3 / CALLS)
        return {key: self._slowest(found[WARM_UP_ROUNDS:], kernels[key]) for key, found in samples.items()}

    def _slowest(self, samples, kernels):
        samples = torch.tensor(samples, device=self.device)
        if self.ranks > 1:
            torch.distributed.all_reduce(samples, torch.distributed.ReduceOp.MAX)
        return Stats.of(samples.cpu().numpy(), kernels)
