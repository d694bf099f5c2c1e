"""Calls of the MoE layer: the kernels beside its grouped GEMMs, and those for a few tokens."""

import torch


def moe_layer():
    from moe_numba import (
        fused_experts,
        group_by_expert,
        per_token_quant_fp8,
        permute_cast_to_fp8,
        permute_tokens,
        silu_and_mul,
        silu_and_mul_quant_fp8,
        weighted_sum,
    )
    from moe_numba.moe_layer.backward.activation import silu_and_mul_backward

    bf16 = torch.bfloat16
    for experts in (8, 256, 512):
        for tokens in (1, 64, 4096):
            yield (
                f"group {experts} {tokens}",
                lambda: group_by_expert(torch.empty(tokens, 8, dtype=torch.int32), experts),
            )
    for tokens in (1, 4096):
        yield f"group 256 {tokens} int64", lambda: group_by_expert(torch.empty(tokens, 8, dtype=torch.int64), 256)
    for hidden in (7168, 136):
        for topk in (1, 8, 9):
            indices, weights = torch.empty(4, topk, dtype=torch.int32), torch.empty(4, topk)
            rows, shared = torch.empty(4, hidden, dtype=bf16), torch.empty(4, hidden, dtype=bf16)
            yield f"sum {hidden} {topk}", lambda: weighted_sum(rows, indices, weights)
            yield f"sum {hidden} {topk} shared", lambda: weighted_sum(rows, indices, weights, shared)
        x = torch.empty(4, 2 * hidden, dtype=bf16)
        yield f"silu {hidden}", lambda: silu_and_mul(x)
        limit = torch.empty(1, dtype=torch.int32)
        yield f"silu {hidden} limit", lambda: silu_and_mul(x, num_valid_rows=limit)
    x, valid = torch.empty(4, 5760, dtype=bf16), torch.empty(1, dtype=torch.int32)
    for activation, limit in (("silu", 7.0), ("swigluoai", 7.0)):
        options = dict(num_valid_rows=valid, activation=activation, limit=limit)
        yield f"{activation} 2880 limited", lambda: silu_and_mul(x, **options)
        of_rows = x, x[:, :2880].contiguous(), torch.zeros(1, 4).int(), torch.zeros(1, 4)
        yield f"{activation} 2880 backward", lambda: silu_and_mul_backward(*of_rows, activation, 1.702, limit)
        terms = torch.zeros(1, 4).int(), torch.zeros(1, 32)
        yield (
            f"{activation} 2880 backward, w2_bias",
            lambda: silu_and_mul_backward(*of_rows, activation, 1.702, limit, bias_terms=terms),
        )
        yield f"{activation} 2880 limited, quantised", lambda: silu_and_mul_quant_fp8(x, **options)
    tokens, w13, w2 = (torch.empty(size, dtype=bf16) for size in ((512, 2048), (8, 1536, 2048), (8, 2048, 768)))
    routing = torch.zeros(512, 2), torch.zeros(512, 2).int()
    for activation in ("silu", "swigluoai"):
        yield (
            f"{activation} 768 with gate and up for a backward",
            lambda: fused_experts(tokens.requires_grad_(), w13, w2, *routing, activation=activation),
        )
    for scale in (None, torch.empty(1)):
        kind = "own" if scale is None else "given"
        yield f"silu 2880 quantised, {kind} scales", lambda: silu_and_mul_quant_fp8(x, scale, num_valid_rows=valid)
        for permute in (False, True):
            indices, tokens = torch.zeros(4, 8).int(), torch.empty(4, 7168, dtype=bf16)
            rows = "permuted" if permute else "in place"
            yield f"tokens {rows}, {kind} scales", lambda: per_token_quant_fp8(tokens, scale, indices, permute)
    for permute in (permute_cast_to_fp8, permute_tokens):
        yield permute.__name__, lambda: permute(torch.empty(4, 7168, dtype=bf16), torch.zeros(4, 8).int())


def decode():
    """The kernels of ``fused_experts`` for a few tokens, in bfloat16, FP8 blocks and MXFP4."""
    from moe_numba import fused_experts
    from moe_numba.moe_layer.weights import packed_shape

    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn

    def call(
        tokens, experts, topk, hidden, intermediate, dtype=bf16, shared=False, bias=None, ids=torch.int32, **options
    ):
        sizes = {"w13": (2 * intermediate, hidden), "w2": (hidden, intermediate)}
        given = {name: torch.empty(experts, *size, dtype=dtype) for name, size in sizes.items()}
        for name, (n, k) in sizes.items():
            if dtype == torch.uint8:
                given[name] = torch.empty(packed_shape(name, experts, n, k), dtype=dtype)
            if dtype == fp8:
                given[f"{name}_scale"] = torch.empty(experts, n // 128, k // 128)
            if bias:
                given[f"{name}_bias"] = torch.empty(experts, n, dtype=bias)
        x = torch.empty(tokens, hidden, dtype=bf16)
        given |= dict(topk_weights=torch.empty(tokens, topk), topk_ids=torch.empty(tokens, topk, dtype=ids))
        fused_experts(x, **given, shared=x if shared else None, **options)

    # Experts, topk, hidden, intermediate: of few enough bytes of weights for these kernels.
    biased, fp8_blocks = (32, 4, 2880, 1408), (64, 8, 4096, 1024)
    for bias in (None, bf16, torch.float32):
        name = "no bias" if bias is None else f"bias of {str(bias)[6:]}"
        yield f"bf16 {name}", lambda: call(1, *biased, bias=bias, activation="swigluoai")
        yield f"mxfp4 {name}", lambda: call(1, 32, 4, 2880, 2880, torch.uint8, bias=bias, activation="swigluoai")
    for ids in (torch.int32, torch.int64):
        for shared in (False, True):
            name = f"{str(ids)[6:]}{', shared' * shared}"
            yield f"bf16 {name}", lambda: call(1, 128, 8, 2048, 768, shared=shared, ids=ids)
            yield f"fp8 {name}", lambda: call(1, *fp8_blocks, fp8, shared=shared, ids=ids)
