"""The public calls whose kernels are fingerprinted: every kernel that the package chooses between on an H200.

Each case is a generator of (name, call) pairs; every launch in a call is one kernel. The calls run in compile-only mode
(see ``moe_numba.runtime.device``), so the tensors are small and on the CPU. Sizes that no kernel is compiled for are
arbitrary.
"""

from types import SimpleNamespace

CASES = {}  # name -> generator function


def case(function):
    """Register a generator of (name, call) pairs."""
    CASES[function.__name__] = function
    return function


@case
def gate():
    import torch

    from moe_numba import biased_grouped_topk

    v3 = dict(topk=8, num_expert_group=8, topk_group=4)

    def call(experts, tokens, dtype=torch.float32, bias=torch.float32, pad=0, **options):
        x = torch.empty(tokens, experts + pad, dtype=dtype)[:, :experts]
        biased_grouped_topk(x, None if bias is None else torch.empty(experts, dtype=bias), **options)

    limits = {"int32": torch.zeros(1, dtype=torch.int32), "int64": torch.zeros(1, dtype=torch.int64)}
    for tokens in (1, 4096):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            name = f"{tokens} {str(dtype)[6:]}"
            yield f"deepseek_v3 {name}", lambda: call(256, tokens, dtype, **v3)
            yield f"deepseek_v3 {name}, no bias", lambda: call(256, tokens, dtype, None, **v3)
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


@case
def align():
    import torch

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


@case
def gate_align():
    import torch

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


@case
def shared_experts():
    import torch

    from moe_numba.shared_experts import fuse_routing

    weights, ids = torch.empty(4, 8), torch.empty(4, 8, dtype=torch.int32)
    for policy in ("all", "round_robin", "random"):
        yield policy, lambda: fuse_routing(weights, ids, 256, policy=policy)


@case
def grouped_gemm():
    import torch

    import moe_numba

    fp8, groups, n, k = torch.float8_e4m3fn, 2, 256, 256

    def call(scaling, average, rows="lengths", activated=False, gather=False, n=n, **options):
        dtype = torch.bfloat16 if scaling == "none" else fp8
        x, weight = torch.empty(64, k, dtype=dtype), torch.empty(groups, n, k, dtype=dtype)
        lengths = torch.empty(groups, dtype=torch.int32)
        if rows == "masked":
            x = x.view(groups, 32, k)
        given = {
            "lengths": (lengths, torch.empty(groups + 1, dtype=torch.int32)),
            "offsets": (None, None),
            "masked": (lengths, None),
        }[rows]
        scales = {
            "tensor": [torch.empty(groups)],
            "row": [torch.empty(x.shape[:-1]), torch.empty(groups, n)],
            "block": [torch.empty(*x.shape[:-1], k // 128), torch.empty(groups, n // 128, k // 128)],
            "none": [],
        }[scaling]
        name = {"tensor": "pertensor_fp8", "row": "rowwise_fp8", "block": "blockwise_fp8", "none": "bf16"}[scaling]
        function = getattr(moe_numba, f"group_gemm_{'silu_and_mul_' if activated else ''}{name}")
        function(
            x,
            weight,
            *given,
            *scales,
            num_seq_per_group_avg=average,
            offs=lengths if rows == "offsets" else None,
            gather_indices=torch.empty(64, dtype=torch.int32) if gather else None,
            **options,
        )

    def call_w4(average, x_scale=None):
        x, weight = torch.empty(64, k), torch.empty(groups, n // 64, k // 64, 2176, dtype=torch.uint8)
        given = torch.empty(groups, dtype=torch.int32), torch.empty(groups + 1, dtype=torch.int32)
        if x_scale is None:
            scale = torch.empty(groups, n // 64, k // 64, 64, dtype=torch.bfloat16)
            moe_numba.group_gemm_int4(x.bfloat16(), weight[..., :2048].contiguous(), *given, scale, average)
        else:
            options = dict(num_seq_per_group_avg=average, x_scale=x_scale)
            moe_numba.group_gemm_mxfp4(x.to(torch.float8_e4m3fn), weight.unflatten(-1, (136, 16)), *given, **options)

    def call_mxfp4(average, rows, activated=False):
        x = torch.empty(2, 32, k) if rows == "masked" else torch.empty(64, k)
        lengths, starts = torch.empty(groups, dtype=torch.int32), torch.empty(groups + 1, dtype=torch.int32)
        given = {"offsets": (None, None), "masked": (lengths, None)}.get(rows, (lengths, starts))
        options = dict(activation="swigluoai", bias=torch.empty(groups, n)) if activated else {}
        function = moe_numba.group_gemm_silu_and_mul_mxfp4 if activated else moe_numba.group_gemm_mxfp4
        function(
            x.bfloat16(),
            torch.empty(groups, n // 64, k // 64, 2176, dtype=torch.uint8),
            *given,
            num_seq_per_group_avg=average,
            offs=lengths if rows == "offsets" else None,
            gather_indices=torch.empty(64, dtype=torch.int32) if rows == "gather" else None,
            **options,
        )

    yield (
        "m_indices",
        lambda: moe_numba.group_gemm_bf16(
            torch.empty(64, k, dtype=torch.bfloat16),
            torch.empty(groups, n, k, dtype=torch.bfloat16),
            None,
            None,
            m_indices=torch.empty(64, dtype=torch.int32),
        ),
    )
    averages = (8, 32, 100, 1000)
    for average in averages:
        for scaling in ("tensor", "block", "none"):
            for rows in ("lengths", "offsets", "masked"):
                yield f"{scaling} {average} {rows}", lambda: call(scaling, average, rows)
            yield f"{scaling} {average} gather", lambda: call(scaling, average, gather=True)
        for scaling in ("tensor", "block"):
            yield f"silu {scaling} {average}", lambda: call(scaling, average, activated=True)
            yield f"silu {scaling} {average} gather", lambda: call(scaling, average, activated=True, gather=True)
    for average in averages:
        for rows in ("lengths", "offsets", "masked", "gather"):
            yield f"mxfp4 {average} {rows}", lambda: call_mxfp4(average, rows)
            if rows in ("lengths", "gather"):
                yield f"swigluoai mxfp4 {average} {rows}", lambda: call_mxfp4(average, rows, activated=True)
        yield f"int4 {average}", lambda: call_w4(average)
        for scaling, shape in (("tensor", (1,)), ("row", (64,)), ("block", (64, -(-k // 128)))):
            yield f"mxfp4 fp8 {scaling} {average}", lambda: call_w4(average, torch.empty(shape))
    for rows in ("offsets", "masked"):
        yield f"silu block 1000 {rows}", lambda: call("block", 1000, rows, activated=True)
    # Outputs and epilogues. Where no options are named, rows are biased, weighted, scattered and added to.
    bias, weights, indices = torch.empty(groups, n), torch.empty(64), torch.empty(64, dtype=torch.int32)
    added = dict(bias=bias, row_weights=weights, scatter_indices=indices, out=torch.empty(9, n), accumulate=True)
    for average in (8, 1000):
        yield f"float32 {average}", lambda: call("none", average, out_dtype=torch.float32)
        yield f"bias {average}", lambda: call("none", average, bias=bias.bfloat16())
        for scaling in ("tensor", "row", "block", "none"):
            yield f"options {scaling} {average}", lambda: call(scaling, average, **added)
        yield f"row {average}", lambda: call("row", average)
        yield f"silu bf16 {average}", lambda: call("none", average, activated=True)
        yield f"silu bf16 {average} gather", lambda: call("none", average, activated=True, gather=True)
        options = dict(activation="swigluoai", bias=bias.bfloat16())
        yield f"swigluoai bf16 {average}", lambda: call("none", average, activated=True, **options)
        yield f"swigluoai tensor {average}", lambda: call("tensor", average, activated=True, activation="swigluoai")
        yield f"silu partial {average}", lambda: call("tensor", average, activated=True, n=320)


@case
def grouped_gemm_backward():
    import torch

    from moe_numba import group_gemm_bf16, k_grouped_gemm_bf16
    from moe_numba.grouped_gemm.unused_rows import zero_unused_rows

    def sizes(rows):
        lengths, starts = torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        return {"lengths": (lengths, starts, None), "offsets": (None, None, lengths), "masked": (lengths, None, None)}[
            rows
        ]

    def dgrad(average, rows):
        x, weight = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(2, 256, 256, dtype=torch.bfloat16)
        seqlens, cu_seqlens, offs = sizes(rows)
        group_gemm_bf16(x, weight.mT, seqlens, cu_seqlens, average, offs)

    def wgrad(rows, n=256, k=256, dtype=torch.float32, accumulate=False):
        a, b = torch.empty(64, n, dtype=torch.bfloat16), torch.empty(64, k, dtype=torch.bfloat16)
        k_grouped_gemm_bf16(a, b, *sizes(rows), out=torch.empty(2, n, k, dtype=dtype), accumulate=accumulate)

    for average in (8, 32, 100, 1000):
        yield f"MN-major weight {average}", lambda: dgrad(average, "lengths")
    for rows in ("lengths", "offsets"):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"k-grouped {rows} {str(dtype)[6:]}", lambda: wgrad(rows, dtype=dtype)
        yield f"k-grouped {rows} accumulate", lambda: wgrad(rows, accumulate=True)
    yield "k-grouped, small k", lambda: wgrad("offsets", k=64)
    yield "k-grouped, small n", lambda: wgrad("offsets", n=64)
    for rows in ("lengths", "offsets", "masked"):
        x = torch.empty(64, 256, dtype=torch.bfloat16)
        x = x.view(2, 32, 256) if rows == "masked" else x
        yield f"unused rows {rows}", lambda: zero_unused_rows(x, *sizes(rows))


@case
def moe_layer():
    import torch

    from moe_numba import (
        group_by_expert,
        per_token_quant_fp8,
        permute_cast_to_fp8,
        permute_tokens,
        silu_and_mul,
        silu_and_mul_quant_fp8,
        weighted_sum,
    )

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
        yield f"{activation} 2880 limited, quantised", lambda: silu_and_mul_quant_fp8(x, **options)
    for scale in (None, torch.empty(1)):
        kind = "own" if scale is None else "given"
        yield f"silu 2880 quantised, {kind} scales", lambda: silu_and_mul_quant_fp8(x, scale, num_valid_rows=valid)
        for permute in (False, True):
            indices, tokens = torch.zeros(4, 8).int(), torch.empty(4, 7168, dtype=bf16)
            rows = "permuted" if permute else "in place"
            yield f"tokens {rows}, {kind} scales", lambda: per_token_quant_fp8(tokens, scale, indices, permute)
    for permute in (permute_cast_to_fp8, permute_tokens):
        yield permute.__name__, lambda: permute(torch.empty(4, 7168, dtype=bf16), torch.zeros(4, 8).int())


@case
def expert_parallel():
    import torch

    from moe_numba.expert_parallel import launch_plans
    from moe_numba.expert_parallel.config import HOPPER, Config
    from moe_numba.expert_parallel.dispatch_layout import get_dispatch_layout
    from moe_numba.expert_parallel.fp8_cast import per_token_cast_back, per_token_cast_to_fp8
    from moe_numba.runtime.launch import launcher

    def fake(ranks):
        def prepare_kernel(make, constants, signature, block, shared_bytes=0):
            options = dict(launch_bounds=block, shared_bytes=shared_bytes, dependent=True)
            return lambda *_: launcher(make(*constants), signature, 0, **options)(1, block, 0)

        memory, prepare = dict(rings_offset=1024, ring_words=1 << 27), dict(prepare_launch=lambda start, *_: start)
        return SimpleNamespace(num_ranks=ranks, limits=HOPPER, **memory, **prepare, prepare_kernel=prepare_kernel)

    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for experts, ranks, topk in ((256, 8, 8), (384, 8, 8), (64, 4, 6), (256, 2, 8)):
        ids = torch.empty(4, topk, dtype=torch.int64)
        yield f"layout {experts} {ranks} {topk}", lambda: get_dispatch_layout(ids, experts, ranks)
        yield f"layout {experts} {ranks} {topk} int32", lambda: get_dispatch_layout(ids.int(), experts, ranks)
    for hidden in (7168, 136):
        for dtype in (bf16, torch.float32):
            yield (
                f"cast to fp8 {hidden} {str(dtype)[6:]}",
                lambda: per_token_cast_to_fp8(torch.empty(4, hidden, dtype=dtype)),
            )
        for dtype, packed in ((torch.float32, 1), (torch.int32, 4)):
            scales = torch.empty(4, -(-hidden // (128 * packed)), dtype=dtype)
            yield (
                f"cast back {hidden} {str(dtype)[6:]}",
                lambda: per_token_cast_back(torch.empty(4, hidden, dtype=fp8), scales),
            )
    for ranks in (1, 2, 4, 8):
        yield f"notify {ranks}", lambda: launch_plans.plan_notify(fake(ranks))()
        yield f"barrier {ranks}", lambda: launch_plans.plan_barrier(fake(ranks))()
        for sms in (4, 16, 24, 48):
            for name, dtype, scales, topk, *ids_dtype in (
                ("bf16", bf16, 0, 8),
                ("fp8", fp8, 56, 8),
                ("plain", bf16, 0, 0),
                *([("bf16 int32", bf16, 0, 8, torch.int32)] if sms == 24 else []),
            ):
                given = Config(num_sms=sms), 7168, dtype, scales, topk, None, None, *ids_dtype
                yield (
                    f"dispatch {ranks} {sms} {name}",
                    lambda: launch_plans.plan_ring_dispatch(fake(ranks), *given)[1](),
                )
                yield (
                    f"dispatch, out= {ranks} {sms} {name}",
                    lambda: launch_plans.plan_direct_dispatch(fake(ranks), *given)[1](),
                )
            for topk, biases in ((8, 0), (0, 0), (8, 2)):
                given = Config(num_sms=sms), 7168, topk, 128, biases
                yield f"combine {ranks} {sms} {topk} {biases}", lambda: launch_plans.plan_combine(fake(ranks), *given)()


@case
def low_latency():
    import torch

    from moe_numba.course.bench.topics.low_latency_measure import LOW_LATENCY
    from moe_numba.expert_parallel.low_latency_base import shape_of_options
    from moe_numba.expert_parallel.low_latency_exchange import RECEIVE, SEND, exchange_kernels
    from moe_numba.runtime.launch import launcher

    def launch(kernel):
        options = dict(launch_bounds=kernel.block, shared_bytes=kernel.shared_bytes, dependent=True)
        launcher(kernel.make(*kernel.constants), kernel.signature, 0, **options)(1, kernel.block, 0)

    sizes = 7168, 256, 8  # hidden, experts, experts per token
    ue8m0 = dict(use_fp8=True, round_scale=True, use_ue8m0=True)
    for ranks in (1, 2, 8):
        for tokens in (1, 128):
            for (step, dtype), options in LOW_LATENCY.items():
                dispatch, combine = exchange_kernels(shape_of_options(ranks, tokens, *sizes, **options))
                yield f"dispatch {ranks} {tokens} {step} {dtype}", lambda: launch(dispatch)
                yield f"combine {ranks} {tokens} {step} {dtype}", lambda: launch(combine)
    packed, with_exponents = shape_of_options(8, 128, *sizes), shape_of_options(8, 128, *sizes, **ue8m0)
    for name, kernels in {
        "ue8m0": exchange_kernels(with_exponents)[:1],
        "int32": exchange_kernels(packed, torch.int32),
        "sends": exchange_kernels(packed, phase=SEND),
        "receives": exchange_kernels(packed, phase=RECEIVE),
    }.items():
        for operation, kernel in zip(("dispatch", "combine"), kernels, strict=False):
            yield f"{operation} 8 128 {name}", lambda: launch(kernel)


@case
def articles():
    import torch

    from moe_numba.course.articles.deepep import dispatch_layout, launch
    from moe_numba.course.articles.deepep.buffer_layout import DeepEPConfig
    from moe_numba.course.articles.hpc_ops import launch as group_gemm
    from moe_numba.course.articles.hpc_ops.group_gemm import HpcOpsConfig

    new = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype)

    def calls(r, to_fp8):
        ranks, tokens, rows = len(r.buffers), 4, 4
        config = DeepEPConfig(ranks, row_bytes=7168, scales=56) if to_fp8 else DeepEPConfig(ranks)
        combine_config = DeepEPConfig(ranks, chunk=4, biases=2)
        x = new(tokens, 7168, dtype=torch.float8_e4m3fn if to_fp8 else torch.bfloat16)
        x = (x, new(tokens, 56, dtype=torch.float32)) if to_fp8 else x
        is_in, prefix = new(tokens, ranks, dtype=torch.bool), new(ranks, ranks)
        layout = new(ranks), new(256), is_in
        weights = new(tokens, 8, dtype=torch.float32)
        given = prefix, new(ranks, 12), rows, new(tokens, 8, dtype=torch.int64), weights
        y = new(rows, 7168, dtype=torch.bfloat16)
        handle = launch.Handle(prefix, new(ranks, 12), new(ranks, 12), new(rows), is_in, new(tokens, ranks))
        yield "notify_dispatch", lambda: launch.notify_dispatch(r, config, layout, new(1), new(256 // ranks))
        yield "cached_notify_dispatch", lambda: launch.cached_notify_dispatch(r, config, prefix)
        yield "dispatch", lambda: launch.dispatch(r, config, x, is_in, *given)
        yield "cached_notify_combine", lambda: launch.cached_notify_combine(r, combine_config, handle)
        yield "combine", lambda: launch.combine(r, combine_config, y, handle, weights, (y, y))

    for ranks in (2, 4, 8):
        r = launch.Rank(0, new(ranks, dtype=torch.uint64), new(ranks, dtype=torch.uint64), new(8))
        for to_fp8 in (False, True):
            for name, call in calls(r, to_fp8):
                yield f"deepep {name} {ranks} {'fp8' if to_fp8 else 'bf16'}", call
    ids = new(4, 8, dtype=torch.int64)
    yield "deepep layout", lambda: dispatch_layout.get_dispatch_layout(ids, 256, 8)
    for tokens in (16, 32, 64, 128):
        for schedule in ("vertical", "horizontal"):
            for whole_x in (False, True):
                stages = 6 if tokens == 128 else 8  # of 27 to 32 KiB; a block can have 227 KiB
                config = HpcOpsConfig(tile_m=tokens, stages=stages, schedule=schedule, whole_x=whole_x)
                x, weight = new(64, 128, dtype=torch.float8_e4m3fn), new(2, 128, 128, dtype=torch.float8_e4m3fn)
                out, scale = new(64, 128, dtype=torch.bfloat16), new(2, dtype=torch.float32)
                run = lambda: group_gemm.HpcOpsGroupGemm(x, weight, new(2), new(3), scale, out, config)
                yield f"hpc_ops group_gemm {tokens} {schedule} {whole_x}", lambda: run().multiply()
        yield f"hpc_ops update_grouped_tma {tokens}", lambda: run().update_maps()
