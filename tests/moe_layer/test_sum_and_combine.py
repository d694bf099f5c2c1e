"""Test the weighted sum that runs while combine sends its rows, against one after the other."""

import pytest
import torch
from helpers.expert_parallel import (
    HIDDEN,
    NUM_BYTES,
    SCALE,
    SHORT_TIMEOUT,
    SMALL,
    bitwise_equal,
    engine,
    make_inputs,
    send,
)
from helpers.thirds import take_third
from helpers.wrong_kernels import changed, is_rejected

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.expert_parallel.rings import combine
from moe_numba.moe_layer import reference
from moe_numba.moe_layer.expert_parallel import kernel_sum_for_combine
from moe_numba.moe_layer.expert_parallel.sum_and_combine import SumAndCombine

SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="needs the simulator's weak memory")


def exchange(transport, inputs, calls=3, hidden=HIDDEN):
    """Dispatch once, then sum and combine several times with other weights; return how results differ, or None."""
    buffer = Buffer(transport, NUM_BYTES)
    x, ids, weights, _, handle, _ = send(buffer, transport.rank, inputs, SMALL)
    both = SumAndCombine(buffer, None, SMALL)
    both._new_sums = lambda rows, shape: torch.full(shape, float("nan"), dtype=rows.dtype, device=rows.device)
    random, wrong = torch.Generator().manual_seed(transport.rank), None
    _, _, gathered, indices = reference.group_by_expert(ids, 2)
    for call in range(calls):
        rows = torch.randn(len(gathered), hidden, generator=random).bfloat16().to(x.device)
        factors = torch.rand(weights.shape, generator=random).to(x.device)
        shared = torch.randn(len(inputs.x[transport.rank]), hidden, generator=random).bfloat16().to(x.device)
        both._run_experts = lambda *_, rows=rows: (rows, indices)
        result = both(x, None, factors, ids, handle, shared)
        expected = buffer.combine(reference.weighted_sum(rows, indices, factors), handle, bias=shared, config=SMALL)[0]
        if not bitwise_equal(result, expected):
            wrong = f"call {call}: the result is not that of a sum before combine"
        if both._ready[: len(x)].any():
            wrong = f"call {call}: flags are left"
    buffer.check()
    buffer.destroy()
    return wrong


def run(tokens, seed=0, **options):
    inputs = make_inputs([SCALE * n for n in tokens], seed)
    with engine(seed):
        found = LocalGroup(len(tokens)).run(lambda transport: exchange(transport, inputs, **options))
    return next((wrong for wrong in found if wrong), None)


@pytest.mark.parametrize("tokens", [[5, 9], [4, 0, 7], [6], [0, 0]])
def test_equals_a_sum_before_combine(tokens):
    assert run(tokens) is None


@SIMULATED
@pytest.mark.parametrize("seed", range(1, 5))
def test_any_order_of_threads(seed):
    assert run([5, 9], seed) is None


WRONG = {
    "a sender does not wait": (combine, "can_send = can_send and computed", "pass"),
    "a receiver does not wait": (combine, "start, computed = uint64(0), own < 0", "start, computed = uint64(0), True"),
    "flags are polled without acquire": (combine, "ld_acquire_sys_s32(ready, row) != 0", "ready[row] != 0"),
    "flags are not cleared": (combine, "        ready[row] = int32(0)\n", "        pass\n"),
    "flags are stored without release": (
        kernel_sum_for_combine,
        "st_release_sys_s32(ready, token, int32(1))",
        "ready[token] = int32(1)",
    ),
    "a flag is stored before its row": (kernel_sum_for_combine, "            cuda.syncthreads()\n", ""),
}


@SIMULATED
@pytest.mark.parametrize("name", take_third(WRONG))
def test_wrong_kernels_are_rejected(name, monkeypatch):
    module, right, wrong = WRONG[name]
    make = "make_combine" if module is combine else "make_sum_for_combine_kernel"
    monkeypatch.setattr(module, make, changed(module, right, wrong)[make])
    assert is_rejected(lambda seed: run([5, 9], seed))


@SIMULATED
def test_a_sum_that_is_missing_times_out(monkeypatch):
    monkeypatch.setattr(SumAndCombine, "_launch_sum", lambda *_: None)

    def work(transport):
        buffer = Buffer(transport, NUM_BYTES, timeout=SHORT_TIMEOUT)
        x, ids, weights, _, handle, _ = send(buffer, transport.rank, inputs, SMALL)
        both = SumAndCombine(buffer, None, SMALL)
        both._run_experts = lambda *_: (x, torch.zeros_like(ids).int())
        result = both(x, None, weights, ids, handle, None)
        assert result.isnan().all()
        with pytest.raises(TimeoutError, match="combine: rank ., channel . waited for"):
            buffer.check()

    inputs = make_inputs([5, 9])
    with engine(0):
        LocalGroup(2).run(work)


def test_invalid_flags():
    def work(transport):
        buffer = Buffer(transport, NUM_BYTES)
        x, _, weights, _, handle, _ = send(buffer, 0, inputs, SMALL)
        flags = torch.zeros(len(x), dtype=torch.int32, device=x.device)
        with pytest.raises(ValueError, match="ready is given, and so is topk_weights; only one of them is allowed"):
            buffer.combine(x, handle, weights, ready=flags)
        with pytest.raises(TypeError, match="ready is torch.int64; it must be torch.int32"):
            buffer.combine(x, handle, ready=flags.long())
        with pytest.raises(
            ValueError, match=f"ready has shape .*; it must have one dimension and {len(x)} rows or more"
        ):
            buffer.combine(x, handle, ready=flags[1:])
        buffer.destroy()

    inputs = make_inputs([SCALE * 4])
    LocalGroup(1).run(work)
