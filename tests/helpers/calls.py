"""A call of every public function in the simulator, with small inputs: together they launch all kernels."""

import pytest
import torch

import moe_numba
from helpers.expert_parallel import NUM_BYTES, SMALL, make_inputs, new_output, send
from helpers.grouped_gemm import FUNCTIONS, SILU, inputs
from helpers.low_latency import SMS, experts_result, make_round, run, synchronize
from moe_numba.expert_parallel import Buffer
from moe_numba.expert_parallel.low_latency import config as low_latency_config
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.grouped_gemm.reference import quantise_blocks
from moe_numba.grouped_gemm.w4.reference import quantise_mxfp4


def gate(experts=256, groups=8, kept=4, **options):
    generator = torch.Generator().manual_seed(experts)
    x, bias = torch.randn(9, experts, generator=generator), torch.randn(experts, generator=generator)
    return lambda: moe_numba.biased_grouped_topk(x, bias, 6, True, groups, kept, **options)


def align(tokens, experts=64, **options):
    ids = torch.randint(-1, experts, (tokens, 4), generator=torch.Generator().manual_seed(tokens), dtype=torch.int32)
    return lambda: moe_numba.moe_align_block_size(ids, 16, experts, **options)


def gate_align(tokens):
    x, bias = torch.randn(tokens, 64), torch.randn(64)
    return lambda: moe_numba.biased_grouped_topk_align(x, bias, 4, 16, num_expert_group=4, topk_group=2)


def grouped_gemm(functions, kind):
    arguments = inputs(n=256 if functions is SILU else 128)[kind]
    return lambda: functions[kind][0](*arguments)


def mxfp4_gemm(gather):
    x, _, seqlens, cu_seqlens = inputs(n=96)["bf16"]
    blocks, scales = quantise_mxfp4(torch.randn(3, 96, 192, generator=torch.Generator().manual_seed(2)))
    weight, indices = moe_numba.pack_mxfp4(blocks, scales), torch.arange(len(x) - 1, -1, -1, dtype=torch.int32)
    options = dict(gather_indices=indices) if gather else {}
    return lambda: moe_numba.group_gemm_mxfp4(x, weight, seqlens, cu_seqlens, n=96, **options)


def mxfp4_activation():
    x, _, seqlens, cu_seqlens = inputs(n=128)["bf16"]
    blocks, scales = quantise_mxfp4(torch.randn(3, 128, 192, generator=torch.Generator().manual_seed(2)))
    weight, bias = moe_numba.pack_mxfp4(blocks, scales, "interleaved"), torch.linspace(-1, 1, 3 * 128).view(3, 128)
    arguments = x, weight, seqlens, cu_seqlens
    return lambda: moe_numba.group_gemm_silu_and_mul_mxfp4(*arguments, bias=bias, activation="swigluoai")


def backward():
    x, weight, seqlens, cu_seqlens = inputs((3, 0, 70), 80, 64)["bf16"]

    def call():
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = moe_numba.group_gemm_bf16(a, b, seqlens, cu_seqlens)
        return torch.autograd.grad(y, (a, b), torch.ones_like(y))

    return call


def k_grouped_gemm():
    x, _, seqlens, cu_seqlens = inputs((3, 0, 70), 80, 64)["bf16"]
    total = torch.ones(3, 64, 64)
    return lambda: moe_numba.k_grouped_gemm_bf16(x, x, seqlens, cu_seqlens, out=total.clone(), accumulate=True)


def casts():
    x = torch.randn(5, 256).bfloat16()

    def call():
        quantised = moe_numba.per_token_cast_to_fp8(x)
        return *quantised, moe_numba.per_token_cast_back(*quantised)

    return call


def shared_experts():
    weights, ids = torch.rand(7, 4), torch.randint(0, 16, (7, 4), dtype=torch.int32)
    return lambda: moe_numba.fuse_routing(weights, ids, 16, 2, 2.5)


def moe_layer(fp8):
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(-1, 4, (5, 2), generator=random)
    w13, w2 = torch.randn(4, 256, 128, generator=random), torch.randn(4, 128, 128, generator=random)
    (w13, w13_scale), (w2, w2_scale) = quantise_blocks(w13), quantise_blocks(w2)
    if not fp8:
        w13, w2, w13_scale, w2_scale = w13.bfloat16(), w2.bfloat16(), None, None
    x, weights = torch.randn(5, 128, generator=random).bfloat16(), torch.rand(5, 2, generator=random)
    return lambda: moe_numba.fused_experts(x, w13, w2, weights, ids, w13_scale, w2_scale, shared=x)


def moe_layer_with_scales_per_expert():
    random = torch.Generator().manual_seed(5)
    ids, weights = torch.randint(-1, 4, (5, 2), generator=random), torch.rand(5, 2, generator=random)
    w13, w2 = (torch.randn(4, n, 64, generator=random).to(torch.float8_e4m3fn) for n in (128, 64))
    x, scales = torch.randn(5, 64, generator=random).bfloat16(), torch.full((4,), 0.1)
    return lambda: moe_numba.fused_experts(x, w13, w2, weights, ids, scales, scales)


def layer_of_one_token():
    """The gate and two matrix-vector kernels, the last of which reads the gate's experts early."""
    random = torch.Generator().manual_seed(8)
    x, logits = torch.randn(1, 64, generator=random).bfloat16(), torch.randn(1, 8, generator=random)
    w13, w2 = (torch.randn(8, n, 64, generator=random).bfloat16() for n in (128, 64))
    return lambda: moe_numba.fused_moe(x, logits, None, w13, w2, 2, scoring="softmax")


def long_rows():
    """Rows of two warps."""
    x = torch.randn(3, 1152, generator=torch.Generator().manual_seed(7)).bfloat16()
    return lambda: (*moe_numba.per_token_quant_fp8(x), *moe_numba.silu_and_mul_quant_fp8(x))


def many_assignments():
    ids = torch.randint(-1, 16, (1100, 8), generator=torch.Generator().manual_seed(6))
    return lambda: moe_numba.group_by_expert(ids, 16)


def dispatch_layout():
    idx = torch.randint(-1, 16, (50, 4))
    return lambda: moe_numba.get_dispatch_layout(idx, 16, 4)


def dispatch_and_combine(uses_tma=None):
    given = make_inputs([7, 9, 4])

    def on_rank(transport):
        buffer = Buffer(transport, NUM_BYTES)
        x, idx, weights, _, handle, _ = send(buffer, transport.rank, given)
        combined = buffer.combine(x, handle, weights, config=SMALL)[:2]
        buffer.destroy()
        return x, idx, weights, *combined

    def call():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Buffer, "_uses_tma", uses_tma)
            return [tensor for tensors in LocalGroup(3).run(on_rank) for tensor in tensors]

    return call


def dispatch_to_output(fp8):
    given = make_inputs([7, 9, 4], fp8=fp8)

    def on_rank(transport):
        buffer = Buffer(transport, NUM_BYTES)
        out = new_output(buffer, sum(map(len, given.topk_idx)), fp8)
        for _ in range(2):
            x, idx, weights, *_ = send(buffer, transport.rank, given, out=out)
        copies = [t.clone() for t in (*(x if fp8 else (x,)), idx, weights)]
        buffer.destroy()
        return copies

    return lambda: [tensor for tensors in LocalGroup(3).run(on_rank) for tensor in tensors]


def low_latency(expert_major):
    """With rows of 1024 elements, a CTA of two warps has a half of one."""
    hidden = 1024
    x, ids, weights = make_round([3, 2], 0, hidden=hidden)

    def on_rank(buffer, rank):
        plan = buffer.low_latency(4, hidden, 4, 2, expert_major=expert_major, num_sms=SMS)
        results = []
        for _ in range(2):
            if expert_major:
                got = plan.dispatch(x[rank], ids[rank])
                synchronize(buffer)
                results.append(plan.combine(experts_result(got.x, got.counts), ids[rank], weights[rank]))
            else:
                got = plan.dispatch(x[rank], ids[rank], weights[rank])
                results.append(plan.combine(got.x.where((got.topk_idx >= 0).any(1)[:, None], 0), ids[rank]))
            synchronize(buffer)
        plan.close()
        return results

    def call():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(low_latency_config, "default_parts", lambda max_tokens: 2)
            return [tensor for results in run(2, on_rank) for tensor in results]

    return call


def gathered_rows(kind):
    x, *arguments = inputs(n=128)[kind]
    indices = torch.arange(len(x) - 1, -1, -1, dtype=torch.int32)
    return lambda: FUNCTIONS[kind][0](x, *arguments, gather_indices=indices)


def rows_of_groups(kind):
    x, weight, _, _, *scales = inputs(n=128)[kind]
    m_indices = torch.tensor([-1] * 2 + [2] * 9 + [-1] * 3 + [0] * 6, dtype=torch.int32)
    return lambda: FUNCTIONS[kind][0](x, weight, None, None, *scales, m_indices=m_indices)


def scattered_rows():
    x, *arguments = inputs(n=128)["bf16"]
    rows, weights = torch.arange(len(x) - 1, -1, -1, dtype=torch.int32), torch.linspace(0, 1, len(x))
    options = dict(bias=torch.ones(3, 128), row_weights=weights, scatter_indices=rows, accumulate=True)
    return lambda: moe_numba.group_gemm_bf16(x, *arguments, out=torch.ones(len(x) + 1, 128), **options)


def activated_rows(activation):
    arguments = inputs(n=96)["bf16"]
    return lambda: moe_numba.group_gemm_silu_and_mul_bf16(*arguments, activation=activation)


CALLS = {
    "gate": gate(),
    "gate, softmax": gate(128, 1, 1, scoring="softmax"),
    "gate, many experts": gate(1024, 64, 8),
    "gate, 4 tokens": lambda: moe_numba.biased_grouped_topk(
        torch.randn(300, 256, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 256), 8, True, 8, 4
    ),
    "align, small": align(4),
    "align, few": align(30),
    "align, medium": align(200),
    "align, large": align(1500, 256),
    "gate and align": gate_align(3),
    "gate and align, two launches": gate_align(40),
    "shared experts": shared_experts(),
    "dispatch layout": dispatch_layout(),
    "FP8 casts": casts(),
    **{f"grouped GEMM, {kind}": grouped_gemm(FUNCTIONS, kind) for kind in FUNCTIONS},
    **{f"grouped GEMM with activation, {kind}": grouped_gemm(SILU, kind) for kind in SILU},
    "grouped GEMM of the rows that m_indices name, bf16": rows_of_groups("bf16"),
    "grouped GEMM of gathered rows, pertensor": gathered_rows("pertensor"),
    "grouped GEMM with MXFP4 weights": mxfp4_gemm(False),
    "grouped GEMM with MXFP4 weights of gathered rows": mxfp4_gemm(True),
    "grouped GEMM with MXFP4 weights and activation": mxfp4_activation(),
    "grouped GEMM, backward": backward(),
    "k-grouped GEMM, accumulated": k_grouped_gemm(),
    "grouped GEMM of scattered rows, bf16": scattered_rows(),
    "grouped GEMM with activation, bf16": activated_rows("silu"),
    "grouped GEMM with swigluoai, bf16": activated_rows("swigluoai"),
    "experts of a layer": moe_layer(False),
    "experts of a layer, FP8": moe_layer(True),
    "experts of a layer, FP8 with a scale per expert": moe_layer_with_scales_per_expert(),
    "a layer of one token": layer_of_one_token(),
    "rows in FP8, a scale per row": long_rows(),
    "assignments by expert, many CTAs": many_assignments(),
    "dispatch to an output": dispatch_to_output(False),
    "FP8 dispatch to an output": dispatch_to_output(True),
    "dispatch and combine": dispatch_and_combine(),
    "dispatch and combine without TMA": dispatch_and_combine(False),
    "low latency, packed by expert": low_latency(True),
    "low latency, in slots": low_latency(False),
}
