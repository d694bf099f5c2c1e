"""Launches of expert parallelism: layout, dispatch and combine, the low-latency pair, and one kernel for a layer."""

from types import SimpleNamespace

import torch


def expert_parallel():
    from moe_numba.expert_parallel.layout.api import get_dispatch_layout
    from moe_numba.expert_parallel.rings import launch_plans
    from moe_numba.expert_parallel.rings.config import HOPPER, Config
    from moe_numba.quantise.fp8_cast import per_token_cast_back, per_token_cast_to_fp8
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


def _launch(kernel):
    from moe_numba.runtime.launch import launcher

    options = dict(launch_bounds=kernel.block, shared_bytes=kernel.shared_bytes, dependent=True)
    launcher(kernel.make(*kernel.constants), kernel.signature, 0, **options)(1, kernel.block, 0)


def low_latency():
    from moe_numba.course.bench.topics.low_latency.measure import LOW_LATENCY
    from moe_numba.expert_parallel.low_latency.config import shape_of_options
    from moe_numba.expert_parallel.low_latency.exchange import RECEIVE, SEND, exchange_kernels

    sizes = 7168, 256, 8  # hidden, experts, experts per token
    ue8m0 = dict(use_fp8=True, round_scale=True, use_ue8m0=True)
    for ranks in (1, 2, 8):
        for tokens in (1, 128):
            for (step, dtype), options in LOW_LATENCY.items():
                dispatch, combine = exchange_kernels(shape_of_options(ranks, tokens, *sizes, **options))
                yield f"dispatch {ranks} {tokens} {step} {dtype}", lambda: _launch(dispatch)
                yield f"combine {ranks} {tokens} {step} {dtype}", lambda: _launch(combine)
    packed, with_exponents = shape_of_options(8, 128, *sizes), shape_of_options(8, 128, *sizes, **ue8m0)
    for name, kernels in {
        "ue8m0": exchange_kernels(with_exponents)[:1],
        "int32": exchange_kernels(packed, torch.int32),
        "sends": exchange_kernels(packed, phase=SEND),
        "receives": exchange_kernels(packed, phase=RECEIVE),
    }.items():
        for operation, kernel in zip(("dispatch", "combine"), kernels, strict=False):
            yield f"{operation} 8 128 {name}", lambda: _launch(kernel)


def one_kernel():
    from moe_numba.moe_layer.expert_parallel.one_kernel.layer import kernels_of
    from moe_numba.moe_layer.expert_parallel.one_kernel.sizes import Sizes

    experts, hidden, intermediate, topk, tokens = 32, 7168, 2048, 8, 4096  # on each rank
    for ranks in (1, 2, 8):
        for name, row_words, scale_words in (("fp8", hidden // 4, hidden // 128), ("bf16", hidden // 2, 0)):
            sizes = Sizes(ranks, experts, hidden, topk, tokens, row_words, scale_words)
            for kernel in kernels_of(sizes, intermediate):
                yield f"{kernel.make.__name__.removeprefix('make_')} {ranks} {name}", lambda: _launch(kernel)
