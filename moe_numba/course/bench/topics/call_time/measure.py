"""Measures call times: loops over one call, interleaved with the loops over all others, timed with the host's clock."""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_numba import biased_grouped_topk, biased_grouped_topk_align, moe_align_block_size, prepare, simulator
from moe_numba.align import reference as align_reference
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.peer_calls import installed_peers
from moe_numba.course.bench.timing import launched_by, no_garbage_collection, shuffled_rounds
from moe_numba.course.bench.timing.multigpu import slowest
from moe_numba.expert_parallel import get_dispatch_layout, per_token_cast_back, per_token_cast_to_fp8
from moe_numba.expert_parallel import reference as expert_parallel_reference
from moe_numba.gate import reference as gate_reference
from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_pertensor_fp8,
    group_gemm_silu_and_mul_blockwise_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
)
from moe_numba.grouped_gemm import reference as gemm_reference
from moe_numba.moe_layer import ExpertsWorkspace, fused_experts, fused_moe, group_by_expert, weighted_sum
from moe_numba.moe_layer import reference as layer_reference
from moe_numba.quantise import reference as cast_reference
from moe_numba.shared_experts import fuse_routing
from moe_numba.shared_experts import reference as shared_experts_reference

CALLS, LOOPS, QUICK_LOOPS = 100, 30, 5  # 100 calls do not fill the driver's queue, so that no call waits for the GPU
TOKENS, HIDDEN, BLOCK_SIZE, LAYOUT_RANKS = 64, 7168, 16, 8
GATE = dict(num_experts=256, num_expert_group=8, topk_group=4, topk=8)
GEMM = dict(num_groups=32, n=512, k=512)
LAYER = dict(num_experts=128, hidden=2048, intermediate=768, topk=8)  # Qwen3-30B-A3B
LAYER_TOKENS = 1, TOKENS
ROWS_PER_GROUP = 128  # a multiple of 128, as DeepGEMM requires
DEVICE = "cpu" if simulator.ENABLED else "cuda"


class Case(NamedTuple):
    """A public function, the arguments of its calls, and how to check its outputs."""

    function: Callable
    args: tuple
    options: dict
    config: dict
    size: dict
    mismatch: Callable  # mismatch(outputs, is_peer) returns None, or what is wrong; outputs is a tuple of tensors
    workspace: Any = None  # of calls with ``out=`` and of prepared calls, for functions that have one
    detail: str = ""  # of one of several cases of a function

    @property
    def name(self):
        """The function's name, and what this case is."""
        return self.function.__name__ + (f", {self.detail}" if self.detail else "")

    @property
    def row(self):
        """The fields that the rows of this case share."""
        dtype = str(self.args[0].dtype).removeprefix("torch.")
        return dict(operation=self.name, config=self.config, size=self.size, dtype=dtype)


class Step(NamedTuple):
    """A call to measure, and the fields of its row."""

    step: str
    call: Callable
    row: dict


def loop_times(calls, synchronize, loops, *, clock=time.perf_counter_ns):
    """Measure the host time of each call in loops of `CALLS` calls, in rounds of random order.

    Every process with the same ``calls`` measures them in the same order, so that ranks make the same calls.

    Parameters
    ----------
    calls : dict of callables
    synchronize : callable
        Waits until the GPU has finished; with several ranks, until all have. Called after each loop, and not timed.
    loops : int
    clock : callable
        Returns nanoseconds.

    Returns
    -------
    dict
        ``{name: [microseconds per call of each loop]}``
    """
    for call in calls.values():
        for _ in range(3):  # compile, load, and allocate all memory
            call()
            synchronize()
    samples = {name: [] for name in calls}
    with no_garbage_collection():
        for name in shuffled_rounds(calls, loops):
            call = calls[name]
            start = clock()
            for _ in range(CALLS):
                call()
            samples[name].append((clock() - start) / 1000 / CALLS)
            synchronize()
    return samples


def measure_functions(peers, loops):
    """Return the rows of the public functions, of torch's operations, and of the peers, measured in one process."""
    cases = make_cases()
    steps = [step for case in cases.values() for step in function_steps(case)]
    steps += [*torch_steps(*cases["biased_grouped_topk"].args[::2]), *peer_steps(peers, cases)]
    calls = {i: step.call for i, step in enumerate(steps)}
    kernels = {i: launched_by(call) for i, call in calls.items()}
    times = slowest([loop_times(calls, _synchronize, loops)], kernels)
    return [records.row(step.step, call=times[i], **step.row) for i, step in enumerate(steps)]


def _synchronize():
    if not simulator.ENABLED:
        torch.cuda.synchronize()


# The public functions


def make_cases():
    """Return ``{name: Case}`` of all public functions that launch kernels."""
    cases = [*_routing_cases(), *_expert_parallel_cases(), *_gemm_cases(), *_layer_cases()]
    return {case.name: case for case in cases}


def _routing_cases():
    experts, topk = GATE["num_experts"], GATE["topk"]
    groups = {name: GATE[name] for name in ("num_expert_group", "topk_group")}
    logits, bias = torch.randn(TOKENS, experts, device=DEVICE), torch.rand(experts, device=DEVICE)
    weights, ids = gate_reference.biased_grouped_topk(logits, bias, topk, **groups)
    weights, ids, size = weights.float().contiguous(), ids.int().contiguous(), {"tokens": TOKENS}

    def gate_mismatch(outputs, is_peer=False):
        return gate_reference.mismatch(*outputs, logits, bias, topk, **groups, tolerance=1e-5)

    def align_mismatch(outputs, is_peer=False, ids=ids):
        if is_peer:  # vLLM's outputs have no room for a block of invalid ids
            outputs = *(torch.nn.functional.pad(t, (0, 2 * BLOCK_SIZE)) for t in outputs[:2]), outputs[2]
        return align_reference.mismatch(*outputs, ids, BLOCK_SIZE, experts, any_order=is_peer, any_tail=is_peer)

    def both_mismatch(outputs, is_peer=False):
        return gate_mismatch(outputs[:2]) or align_mismatch(outputs[2:], ids=outputs[1])

    block = {"block_size": BLOCK_SIZE}
    yield Case(biased_grouped_topk, (logits, bias, topk), groups, GATE, size, gate_mismatch)
    align_config = {"num_experts": experts, "topk": topk, **block}
    yield Case(moe_align_block_size, (ids, BLOCK_SIZE, experts), {}, align_config, size, align_mismatch)
    fused = (logits, bias, topk, BLOCK_SIZE)
    yield Case(biased_grouped_topk_align, fused, groups, GATE | block, size, both_mismatch)
    expected = shared_experts_reference.fuse_routing(weights, ids, experts)
    shared_config = {"num_experts": experts, "topk": topk}
    yield Case(fuse_routing, (weights, ids, experts), {}, shared_config, size, _equals(*expected))


def _expert_parallel_cases():
    experts, topk, size = GATE["num_experts"], GATE["topk"], {"tokens": TOKENS}
    ids = torch.rand(TOKENS, experts, device=DEVICE).topk(topk, dim=1).indices.contiguous()
    layout = expert_parallel_reference.dispatch_layout(ids, LAYOUT_RANKS, experts)
    config = {"num_experts": experts, "topk": topk, "num_ranks": LAYOUT_RANKS}
    yield Case(get_dispatch_layout, (ids, experts, LAYOUT_RANKS), {}, config, size, _equals(*layout))
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
    cast, config = cast_reference.per_token_cast_to_fp8(x), {"hidden": HIDDEN}
    yield Case(per_token_cast_to_fp8, (x,), {}, config, size, _equals(*cast))
    back = cast_reference.per_token_cast_back(*cast)
    yield Case(per_token_cast_back, cast, {}, config, size, _equals(back))


def _gemm_cases():
    groups, n, k = GEMM.values()
    rows = groups * ROWS_PER_GROUP
    x, weight = torch.randn(rows, k, device=DEVICE), torch.randn(groups, n, k, device=DEVICE)
    seqlens = torch.full((groups,), ROWS_PER_GROUP, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(0, rows + 1, ROWS_PER_GROUP, dtype=torch.int32, device=DEVICE)
    y_scale = torch.rand(groups, device=DEVICE) + 0.5
    (x_fp8, x_scale), (weight_fp8, w_scale) = gemm_reference.quantise_rows(x), gemm_reference.quantise_blocks(weight)
    fp8 = x_fp8, weight_fp8, seqlens, starts
    bf16 = x.bfloat16(), weight.bfloat16(), seqlens, starts
    by_tensor = gemm_reference.group_gemm(*fp8, y_scale)
    by_blocks = gemm_reference.group_gemm_blockwise(*fp8, x_scale, w_scale)

    def mismatch(expected):
        return lambda outputs, is_peer=False: gemm_reference.mismatch(*outputs, expected)

    def quantised_mismatch(expected):
        expected = gemm_reference.silu_and_mul(expected).double()

        def compare(outputs, is_peer=False):
            values, scales = outputs
            dequantised = values.float() * scales.repeat_interleave(gemm_reference.FP8_SCALE_BLOCK, 1)
            return gemm_reference.mismatch(dequantised, expected, 5e-2)  # e4m3 has a mantissa of 3 bits

        return compare

    common = {}, GEMM, {"rows": rows}
    yield Case(group_gemm_pertensor_fp8, (*fp8, y_scale), *common, mismatch(by_tensor))
    yield Case(group_gemm_blockwise_fp8, (*fp8, x_scale, w_scale), *common, mismatch(by_blocks))
    yield Case(group_gemm_bf16, bf16, *common, mismatch(gemm_reference.group_gemm(*bf16)))
    yield Case(group_gemm_silu_and_mul_pertensor_fp8, (*fp8, y_scale), *common, quantised_mismatch(by_tensor))
    arguments = *fp8, x_scale, w_scale
    yield Case(group_gemm_silu_and_mul_blockwise_fp8, arguments, *common, quantised_mismatch(by_blocks))


def _layer_cases():
    experts, hidden, intermediate, topk = LAYER.values()
    random = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    w13 = random(experts, 2 * intermediate, hidden) / hidden**0.5
    w2 = random(experts, hidden, intermediate) / intermediate**0.5

    def mismatch(expected):
        return lambda outputs, is_peer=False: gemm_reference.mismatch(*outputs, expected, 4e-3)

    for tokens in LAYER_TOKENS:
        x, logits = random(tokens, hidden), torch.randn(tokens, experts, device=DEVICE)
        weights, ids = gate_reference.biased_grouped_topk(logits, None, topk, scoring="softmax")
        weights, ids, size = weights.float().contiguous(), ids.int().contiguous(), {"tokens": tokens}
        workspace, detail = ExpertsWorkspace(tokens, topk, w13, w2), f"{tokens} token{'s' * (tokens > 1)}"
        more = LAYER, size, mismatch(layer_reference.fused_experts(x, w13, w2, weights, ids)), workspace, detail
        yield Case(fused_experts, (x, w13, w2, weights, ids), {}, *more)
        yield Case(fused_moe, (x, logits, None, w13, w2, topk), {"scoring": "softmax"}, *more)
    # Of the larger number of tokens
    config = {name: LAYER[name] for name in ("num_experts", "topk")}
    routing = layer_reference.group_by_expert(ids, experts)
    yield Case(group_by_expert, (ids, experts), {}, config, size, _equals(*routing))
    rows, indices = random(tokens * topk, hidden), routing[-1]
    total = mismatch(layer_reference.weighted_sum(rows, indices, weights))
    yield Case(weighted_sum, (rows, indices, weights), {}, {"hidden": hidden, "topk": topk}, size, total)


def _equals(*expected):
    def mismatch(outputs, is_peer=False):
        for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            if not torch.equal(output.view(torch.uint8), wanted.view(torch.uint8)):
                return f"output {i} differs from the reference"
        return None

    return mismatch


def function_steps(case):
    """Return the steps of a public function, each checked once: called, with ``out=``, and prepared."""
    call, kept = partial(case.function, *case.args, **case.options), {}
    if case.workspace is not None:
        kept["workspace"] = case.workspace
    result, prepared = call(), prepare(case.function, *case.args, **case.options, **kept)
    out = tuple(map(torch.empty_like, result)) if isinstance(result, tuple) else torch.empty_like(result)
    steps = {"final": (call, ()), "final, out=": (partial(call, **kept, out=out), out)}
    steps["final, prepared"] = prepared, prepared.result
    for name, (step, outputs) in steps.items():
        poison(outputs)
        if wrong := case.mismatch(_tuple(step()), False):
            raise AssertionError(f"{case.name}, {name}: {wrong}")
    return [Step(name, step, case.row) for name, (step, _) in steps.items()]


def poison(tensors):
    """Overwrite outputs, so that a call that does not write them is found wrong."""
    for tensor in _tuple(tensors):
        tensor.view(torch.uint8).fill_(0xCD)


def _tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


# torch and the peers


def torch_steps(logits, topk):
    """Return steps of torch operations: one launch, with and without an allocation, and two allocations alone."""
    tokens, device = len(logits), logits.device
    values, ids = torch.topk(logits, topk)
    steps = {
        "torch.sigmoid": (partial(torch.sigmoid, logits), partial(torch.sigmoid, logits, out=torch.empty_like(logits))),
        "torch.topk": (partial(torch.topk, logits, topk), partial(torch.topk, logits, topk, out=(values, ids))),
        "torch.empty, twice": (
            lambda: (
                torch.empty(tokens, topk, device=device),
                torch.empty(tokens, topk, dtype=torch.int32, device=device),
            ),
        ),
    }
    size, config = {"tokens": tokens}, {"num_experts": logits.shape[1], "topk": topk}
    return [
        Step(name, call, dict(operation=operation, config=config, size=size, dtype="float32"))
        for operation, calls in steps.items()
        for name, call in zip(("torch", "torch, out="), calls, strict=False)
    ]


def peer_steps(peers, cases):
    """Return the checked steps of the installed peers, and of the modules ``peers`` that define ``calls``."""
    found = []
    for peer in [*installed_peers(), *(peer for peer in peers if hasattr(peer, "calls"))]:
        try:
            for function, suffix, call, outputs in peer.calls(cases):
                poison(outputs or ())
                result, case = call(), cases[function]
                if wrong := case.mismatch(_tuple(result if outputs is None else outputs), True):
                    raise AssertionError(f"{function}{suffix}: {wrong}")
                found.append(Step(f"peer:{peer.NAME}{suffix}", call, case.row | {"version": peer.VERSION}))
        except Exception as error:  # the other peers are measured whatever this one raises
            print(f"peer {peer.NAME} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return found
