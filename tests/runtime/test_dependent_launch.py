"""Programmatic dependent launch: before griddepcontrol.wait no kernel reads what the kernel before it may still write.

The simulator starts a kernel after the one before it. Here the inputs arrive when a thread calls griddepcontrol_wait.
"""

import pytest
import torch
from helpers.expert_parallel import (
    SMALL,
    check_combined,
    check_received,
    make_inputs,
    new_output,
    reference_dispatch,
    run,
    send,
)
from helpers.grouped_gemm import inputs as gemm_inputs

from moe_numba import (
    biased_grouped_topk,
    biased_grouped_topk_align,
    moe_align_block_size,
    per_token_cast_back,
    per_token_cast_to_fp8,
    per_token_quant_fp8,
    silu_and_mul_quant_fp8,
    simulator,
)
from moe_numba.align import api as align_api
from moe_numba.align import counting_sort, large, medium, one_expert_per_warp, small
from moe_numba.align import reference as align_reference
from moe_numba.align import with_gate as gate_align
from moe_numba.expert_parallel import get_dispatch_layout
from moe_numba.expert_parallel import reference as layout_reference
from moe_numba.expert_parallel.layout import kernel as dispatch_layout
from moe_numba.expert_parallel.rings import checks, combine, dispatch, dispatch_direct, notify
from moe_numba.gate import api as gate_api
from moe_numba.gate import four_tokens_per_warp, generic, one_token_per_warp
from moe_numba.gate.reference import mismatch
from moe_numba.grouped_gemm import group_gemm_pertensor_fp8
from moe_numba.grouped_gemm import reference as gemm_reference
from moe_numba.grouped_gemm.call import plan as gemm_launch
from moe_numba.grouped_gemm.common import group_starts
from moe_numba.grouped_gemm.w4 import unpacking
from moe_numba.grouped_gemm.w4.packing import pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import quantise_mxfp4
from moe_numba.grouped_gemm.wgmma import kernel as grouped_gemm
from moe_numba.moe_layer import group_by_expert, permute_cast_to_fp8, permute_tokens, silu_and_mul, weighted_sum
from moe_numba.moe_layer import reference as layer_reference
from moe_numba.moe_layer import reference_mxfp4 as mxfp4_reference
from moe_numba.moe_layer.group_by_expert import api as group_by_expert_api
from moe_numba.moe_layer.group_by_expert import kernel as kernel_group_by_expert
from moe_numba.moe_layer.per_token_quant import kernel as kernel_per_token_quant
from moe_numba.moe_layer.permute import kernel as kernel_permute
from moe_numba.moe_layer.silu_and_mul import kernel as kernel_silu_and_mul
from moe_numba.moe_layer.weighted_sum import kernel as kernel_weighted_sum
from moe_numba.ptx.intrinsic import simulated
from moe_numba.quantise import fp8_cast_kernels
from moe_numba.quantise import reference as quantise_reference
from moe_numba.shared_experts import fuse_routing
from moe_numba.shared_experts import kernel as fuse_kernel
from moe_numba.shared_experts import reference as fuse_reference

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a function of the simulator")


class LateInputs:
    """Tensors that a kernel before is still writing: poisoned until they arrive."""

    def __init__(self):
        self.values = []

    def __call__(self, *tensors):
        """Poison tensors, and return copies of what they will hold."""
        copies = [tensor.clone() for tensor in tensors]
        self.values += zip(tensors, copies, strict=True)
        for tensor in tensors:
            tensor.view(torch.uint8).fill_(0xFF)
        return copies

    def arrive(self):
        for tensor, value in self.values:
            tensor.copy_(value)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def route(late, experts=256, groups=8, topk_group=4):
    logits, bias = random(5, experts), random(experts, seed=1)
    expected, options = late(logits, bias), dict(num_expert_group=groups, topk_group=topk_group)
    assert mismatch(*biased_grouped_topk(logits, bias, 8, **options), *expected, 8, **options) is None


def align(late, tokens=12):
    ids = random(64, tokens).argsort(0)[:8].T.int().contiguous()
    (expected,) = late(ids)
    assert align_reference.mismatch(*moe_align_block_size(ids, 4, 64), expected, 4, 64) is None


def route_and_align(late):
    logits = random(3, 64)
    (expected,) = late(logits)
    weights, ids, *aligned = biased_grouped_topk_align(logits, None, 4, 4)
    assert mismatch(weights, ids, expected, None, 4) is None
    assert align_reference.mismatch(*aligned, ids, 4, 64) is None


def append_shared_experts(late):
    weights, ids = random(7, 4), random(16, 7).argsort(0)[:4].T.int().contiguous()
    expected = fuse_reference.fuse_routing(*late(weights, ids), 16, 2, 2.5, "all", 0)
    assert all(map(torch.equal, fuse_routing(weights, ids, 16, 2, 2.5), expected))


def count_tokens(late):
    ids = random(24, 40).argsort(0)[:8].T.contiguous()
    expected = layout_reference.dispatch_layout(*late(ids), 8, 24)
    assert all(map(torch.equal, get_dispatch_layout(ids, 24, 8), expected))


def group(late):
    ids = random(24, 40).argsort(0)[:8].T.int().contiguous()
    expected = layer_reference.group_by_expert(*late(ids), 24)
    assert all(map(torch.equal, group_by_expert(ids, 24), expected))


def sum_rows(late):
    rows, weights, indices = random(9, 64).bfloat16(), random(5, 2), random(9, 5).argsort(0)[:2].T.int().contiguous()
    expected = layer_reference.weighted_sum(*late(rows, indices, weights))
    assert torch.equal(weighted_sum(rows, indices, weights), expected)


def activate(late):
    x = random(5, 32).bfloat16()
    expected = layer_reference.silu_and_mul(*late(x))
    torch.testing.assert_close(silu_and_mul(x), expected.bfloat16(), rtol=2**-7, atol=0)


def permute(late, casts):
    x, indices = random(5, 128).bfloat16(), random(10).argsort().int().view(5, 2)
    right, right_indices = late(x, indices)
    right = quantise_reference.per_token_cast_to_fp8(right) if casts else [right]
    given = permute_cast_to_fp8(x, indices) if casts else [permute_tokens(x, indices)]
    assert all(torch.equal(a.float()[right_indices[:, 0].long()], b.float()) for a, b in zip(given, right, strict=True))


def quantise(late):
    x = random(5, 64).bfloat16()
    values, scales = layer_reference.quantise_rows(late(x)[0].float())
    given, given_scales = per_token_quant_fp8(x)
    assert torch.equal(given.float(), values.float()) and torch.equal(given_scales, scales)


def activate_and_quantise(late):
    x = random(5, 64).bfloat16()
    _, scales = layer_reference.quantise_rows(layer_reference.silu_and_mul(*late(x)))
    torch.testing.assert_close(silu_and_mul_quant_fp8(x)[1], scales, rtol=2**-15, atol=0)


def cast(late):
    x = random(5, 128)
    values, scales = quantise_reference.per_token_cast_to_fp8(*late(x))
    given, given_scales = per_token_cast_to_fp8(x)
    assert torch.equal(given.float(), values.float()) and torch.equal(given_scales, scales)


def cast_back(late):
    values, scales = quantise_reference.per_token_cast_to_fp8(random(5, 128))
    expected = quantise_reference.per_token_cast_back(*late(values, scales))
    assert torch.equal(per_token_cast_back(values, scales), expected)


def multiply(late):
    x, weight, seqlens, cu_seqlens, scale = gemm_inputs()["pertensor"]
    expected = gemm_reference.group_gemm(x, weight, seqlens, cu_seqlens, scale)
    late(x, seqlens, cu_seqlens, scale)
    assert gemm_reference.mismatch(group_gemm_pertensor_fp8(x, weight, seqlens, cu_seqlens, scale), expected) is None


def multiply_with_early_weights(late):
    """Only x is late: the group sizes are those of an earlier kernel."""
    x, weight, seqlens, cu_seqlens, scale = gemm_inputs()["pertensor"]
    expected = gemm_reference.group_gemm(x, weight, seqlens, cu_seqlens, scale)
    late(x)
    given = dict(x=x, weight=weight, seqlens=seqlens, cu_seqlens=cu_seqlens, y_scale=scale)
    y = gemm_launch.group_gemm("tensor", given, early_weight=True)
    assert gemm_reference.mismatch(y, expected) is None


def multiply_rows_of_groups(late):
    x, weight, seqlens, cu_seqlens, scale = gemm_inputs((5, 3))["pertensor"]
    expected = gemm_reference.group_gemm(x, weight, seqlens, cu_seqlens, scale)
    m_indices = torch.tensor([0] * 5 + [1] * 3, dtype=torch.int32)
    late(m_indices)
    out = torch.full_like(expected, float("nan"), dtype=torch.bfloat16)
    group_gemm_pertensor_fp8(x, weight, None, None, scale, m_indices=m_indices, out=out)
    assert gemm_reference.mismatch(out, expected) is None


def unpack(late):
    packed = pack_mxfp4(*quantise_mxfp4(random(2, 64, 64)))
    (given,) = late(packed)
    expected = torch.stack([mxfp4_reference.unpack(weight) for weight in given]).bfloat16()
    assert torch.equal(unpacking.unpack_mxfp4(packed), expected)


def exchange(late, what):
    """Dispatch and combine on two ranks; ``what`` is late."""
    inputs = make_inputs([4, 5])
    right = reference_dispatch(inputs)
    if what in ("rows", "rows of direct dispatch"):
        late(*inputs.x)

    def work(buffer, rank):
        if what == "rows of direct dispatch":
            out = new_output(buffer, 9)
            check_received(send(buffer, rank, inputs, out=out), right[rank], rank, inputs.experts // 2)
            out.close()
            return None
        idx = inputs.topk_idx[rank]
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        if what == "layout":
            late(*layout.values())
            patch.setattr(checks, "check_layout_of", lambda *_: None)  # the host would read them too early
        tokens = dict(topk_idx=idx, topk_weights=inputs.topk_weights[rank], config=SMALL)
        given = buffer.dispatch(inputs.x[rank], **layout, **tokens)
        check_received(given, right[rank], rank, inputs.experts // 2)
        if what == "rows of combine":
            buffer.check(synchronize=True)
            buffer.transport.gather(None)
            late(given[0])
        return buffer.combine(given[0], given[4], given[2], config=SMALL)[:2]

    with pytest.MonkeyPatch.context() as patch:
        sums = run(2, work, timeout=4e-3)
    if what != "rows of direct dispatch":
        check_combined(sums, inputs, right, [r.x for r in right], [r.topk_weights for r in right])


CASES = {  # name: (module of the kernel, call that checks its result, limits of the api)
    "gate": (one_token_per_warp, route, {}),
    "gate, four tokens": (four_tokens_per_warp, route, {(gate_api, "MANY_TOKENS"): 1}),
    "gate, generic": (generic, lambda late: route(late, 561, 17, 5), {}),
    "align, small": (small, lambda late: align(late, 2), {}),
    "align, few": (one_expert_per_warp, align, {}),
    "align, medium": (medium, align, {(align_api, "FEW_SLOTS"): range(0)}),
    "align, large": (
        large,
        align,
        {(align_api, "FEW_SLOTS"): range(0), (align_api, "SMALL_MAX_SLOTS"): 0, (align_api, "MEDIUM_MAX_SLOTS"): 0},
    ),
    "align, counting sort": (
        counting_sort,
        align,
        {
            (align_api, "FEW_SLOTS"): range(0),
            **{(align_api, f"{kernel}_MAX_SLOTS"): 0 for kernel in ("SMALL", "MEDIUM", "LARGE")},
        },
    ),
    "gate and align": (gate_align, route_and_align, {}),
    "shared experts": (fuse_kernel, append_shared_experts, {}),
    "dispatch layout": (dispatch_layout, count_tokens, {}),
    "assignments by expert": (kernel_group_by_expert, group, {}),
    "assignments by expert, many CTAs": (
        counting_sort,
        group,
        {(group_by_expert_api, "MAX_SINGLE_CTA_ASSIGNMENTS"): 0},
    ),
    "weighted sum": (kernel_weighted_sum, sum_rows, {}),
    "activation": (kernel_silu_and_mul, activate, {}),
    "permutation": (kernel_permute, lambda late: permute(late, casts=False), {}),
    "permutation and cast": (kernel_permute, lambda late: permute(late, casts=True), {}),
    "quantised tokens": (kernel_per_token_quant, quantise, {}),
    "quantised activation": (kernel_per_token_quant, activate_and_quantise, {}),
    "cast to FP8": (fp8_cast_kernels, cast, {}),
    "cast back": (fp8_cast_kernels, cast_back, {}),
    "grouped GEMM": (grouped_gemm, multiply, {}),
    # The wait of the thread that loads weights: the other threads of a CTA wait earlier.
    "grouped GEMM, early weights": (grouped_gemm, multiply_with_early_weights, {}),
    "rows of groups": (group_starts, multiply_rows_of_groups, {}),
    "unpacked weights": (unpacking, unpack, {}),
    "notify": (notify, lambda late: exchange(late, "layout"), {}),
    "dispatch": (dispatch, lambda late: exchange(late, "rows"), {}),
    "direct dispatch": (dispatch_direct, lambda late: exchange(late, "rows of direct dispatch"), {}),
    "combine": (combine, lambda late: exchange(late, "rows of combine"), {}),
}


@pytest.fixture
def check(monkeypatch):
    """Return the call of a case, which ends with an error if the result is wrong; limits and waits are replaced."""

    def prepare(name, wait):
        module, call, limits = CASES[name]
        for (owner, limit), value in limits.items():
            monkeypatch.setattr(owner, limit, value)
        late, griddepcontrol_wait = LateInputs(), module.griddepcontrol_wait

        def arrive():
            late.arrive()
            griddepcontrol_wait()  # orders the launches of one call

        monkeypatch.setattr(module, "griddepcontrol_wait", simulated(arrive if wait else lambda: None, ""))
        return lambda: call(late)

    return prepare


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_read_after_the_wait(name, check):
    check(name, wait=True)()


@pytest.mark.parametrize("name", CASES)
def test_kernels_without_the_wait_are_rejected(name, check):
    with pytest.raises((AssertionError, ValueError, TimeoutError, simulator.SimulatorError)):
        check(name, wait=False)()
