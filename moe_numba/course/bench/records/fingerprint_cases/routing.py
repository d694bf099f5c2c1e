"""Calls that route tokens: gate, alignment, both in one, and shared experts."""

import torch


def gate():
    from moe_numba import biased_grouped_topk

    v3 = dict(topk=8, num_expert_group=8, topk_group=4)

    def call(experts, tokens, dtype=torch.float32, bias=torch.float32, pad=0, **options):
        x = torch.empty(tokens, experts + pad, dtype=dtype)[:, :experts]
        biased_grouped_topk(x, None if bias is None else torch.empty(experts, dtype=bias), **options)

    limits = {"int32": torch.zeros(1, dtype=torch.int32), "int64": torch.zeros(1, dtype=torch.int64)}
    for tokens in (1, 16384):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"{tokens} {str(dtype)[6:]}"
            yield f"deepseek_v3 {name}", lambda: call(256, tokens, dtype, **v3)
            yield f"deepseek_v3 {name}, no bias", lambda: call(256, tokens, dtype, None, **v3)
            yield f"qwen3 {name}", lambda: call(128, tokens, dtype, None, topk=8, scoring="softmax")
            yield f"qwen3_next {name}", lambda: call(512, tokens, dtype, None, topk=10, scoring="softmax")
            yield f"kimi_k2 {name}", lambda: call(384, tokens, dtype, topk=8)
            yield f"128 experts {name}", lambda: call(128, tokens, dtype, topk=4, num_expert_group=4, topk_group=2)
            yield f"160 experts {name}", lambda: call(160, tokens, dtype, topk=8)
            yield f"512 experts {name}", lambda: call(512, tokens, dtype, topk=16, num_expert_group=16, topk_group=8)
        yield f"bias of bfloat16 {tokens}", lambda: call(256, tokens, bias=torch.bfloat16, **v3)
        yield f"1024 experts {tokens}", lambda: call(1024, tokens, topk=32)
        yield f"dynamic {tokens}", lambda: call(192, tokens, topk=8, num_expert_group=96, topk_group=48)
        yield (
            f"shared experts {tokens}",
            lambda: call(256, tokens, topk=9, num_expert_group=8, topk_group=4, num_fused_shared_experts=1),
        )
        for scoring in ("softmax", "sqrtsoftplus"):
            yield f"{scoring} {tokens}", lambda: call(256, tokens, scoring=scoring, **v3)
        yield f"not renormalized {tokens}", lambda: call(256, tokens, renormalize=False, **v3)
        yield f"strided rows {tokens}", lambda: call(256, tokens, pad=1, **v3)
        for name, limit in limits.items():
            yield f"limit {name} {tokens}", lambda: call(256, tokens, num_token_non_padded=limit, **v3)
            yield (
                f"dynamic limit {name} {tokens}",
                lambda: call(192, tokens, topk=8, num_expert_group=96, topk_group=48, num_token_non_padded=limit),
            )


def align():
    from moe_numba import moe_align_block_size

    def call(slots, experts, dtype=torch.int32, with_map=False, offset=0, **options):
        expert_map = torch.empty(experts, dtype=torch.int32) if with_map else None
        ids, out = torch.empty(slots, dtype=dtype), None
        if offset:
            new = lambda n: torch.empty(n + offset, dtype=torch.int32)[offset:]
            out = new(slots * 16), new(slots * 16), new(1)
        moe_align_block_size(ids, 16, experts, expert_map, out=out, **options)

    for experts in (8, 128, 256, 384, 1024, 8192):
        for slots in (8, 512, 4096, 16384, 65536):
            yield f"{slots} slots, {experts} experts", lambda: call(slots, experts)
    for slots in (8, 512, 65536):
        yield f"{slots} slots, int64", lambda: call(slots, 256, torch.int64)
        yield f"{slots} slots, map", lambda: call(slots, 256, with_map=True)
        yield f"{slots} slots, ignore", lambda: call(slots, 256, ignore_invalid_experts=True)
        yield f"{slots} slots, map, ignore", lambda: call(slots, 256, with_map=True, ignore_invalid_experts=True)
    for dtype in (torch.uint8, torch.int16):
        for slots in (8, 512, 65536):
            yield f"{slots} slots, {str(dtype)[6:]}", lambda: call(slots, 256, dtype)
    yield "10000000 slots, 256 experts", lambda: call(10_000_000, 256, torch.uint8)
    yield "512 slots, 100000 experts", lambda: call(512, 100_000)
    yield "8 slots, unaligned", lambda: call(8, 256, offset=1)


def gate_align():
    from moe_numba import biased_grouped_topk_align

    def call(experts, tokens, dtype=torch.float32, block_size=16, **options):
        bias = torch.empty(experts, dtype=torch.float32)
        biased_grouped_topk_align(torch.empty(tokens, experts, dtype=dtype), bias, block_size=block_size, **options)

    v3 = dict(topk=8, num_expert_group=8, topk_group=4)
    for tokens in (1, 64):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"deepseek_v3 {tokens} {str(dtype)[6:]}", lambda: call(256, tokens, dtype, **v3)
            yield f"kimi_k2 {tokens} {str(dtype)[6:]}", lambda: call(384, tokens, dtype, topk=8)
        yield (
            f"shared experts {tokens}",
            lambda: call(256, tokens, topk=9, num_expert_group=8, topk_group=4, num_fused_shared_experts=1),
        )
        expert_map = torch.empty(256, dtype=torch.int32)
        yield f"map {tokens}", lambda: call(256, tokens, expert_map=expert_map, ignore_invalid_experts=True, **v3)


def shared_experts():
    from moe_numba.shared_experts import fuse_routing

    weights, ids = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.int32)
    for policy in ("all", "round_robin", "random"):
        yield policy, lambda: fuse_routing(weights, ids, 256, policy=policy)
