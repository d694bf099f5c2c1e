"""Configuration of the low-latency kernels: what they are compiled for, by sizes and options of a call."""

from dataclasses import replace

from moe_numba.expert_parallel.low_latency import checks
from moe_numba.expert_parallel.low_latency.layout import LowLatencyShape
from moe_numba.runtime.validate import check_flag

_PARTS = (4, 7), (16, 4), (33, 2)  # maximum number of tokens, CTAs that share a row
_CTAS_PER_SENDER = 3  # the others receive, and copy the rank's own rows
_THREADS_PER_SM, _MAX_CTAS_PER_SM = 896, 2  # 72 registers for each thread


def default_parts(max_tokens: int) -> int:
    """Return how many CTAs share a row: with few tokens more, so that enough SMs take part."""
    return next((parts for tokens, parts in _PARTS if max_tokens <= tokens), 1)


def make_shape(
    num_ranks,
    max_tokens,
    hidden,
    topk,
    num_experts,
    *,
    scales=None,
    expert_major=True,
    protocol="lamport",
    combines_fp8=False,
) -> LowLatencyShape:
    """Check the sizes, and choose the number of CTAs and threads; ``scales`` is None for bfloat16."""
    max_tokens, hidden, topk, num_experts = checks.check_sizes(
        num_ranks, max_tokens, hidden, topk, num_experts, scales, combines_fp8
    )
    shape = LowLatencyShape(
        num_ranks,
        max_tokens,
        hidden,
        topk,
        num_experts,
        dtype="bfloat16" if scales is None else "float8_e4m3fn",
        scales=scales or "float32",
        expert_major=expert_major,
        combines_fp8=combines_fp8,
        data_is_flag=checks.check_protocol(protocol) == "lamport",
        parts=default_parts(max_tokens),
        ctas_per_sender=_CTAS_PER_SENDER,
    )
    return with_threads(shape, shape.row_words)


def scales_format(use_fp8, round_scale, use_ue8m0):
    """Return the name of the scales' format, None for bfloat16."""
    use_fp8, round_scale, use_ue8m0 = (
        check_flag(name, value)
        for name, value in (("use_fp8", use_fp8), ("round_scale", round_scale), ("use_ue8m0", use_ue8m0))
    )
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 is True and round_scale is False; exponents alone need round_scale=True")
    if round_scale and not use_fp8:
        raise ValueError("round_scale is True and use_fp8 is False; only FP8 rows have scales")
    return None if not use_fp8 else "ue8m0" if use_ue8m0 else "rounded" if round_scale else "float32"


def shape_of_options(
    num_ranks,
    num_max_dispatch_tokens_per_rank,
    hidden,
    num_experts,
    num_topk,
    *,
    use_fp8=False,
    round_scale=False,
    use_ue8m0=False,
    expert_major=True,
    protocol="lamport",
    use_fp8_combine=False,
):
    """Return what `Buffer.low_latency` compiles its kernels for; parameters as there."""
    scales = scales_format(use_fp8, round_scale, use_ue8m0)
    sizes = num_max_dispatch_tokens_per_rank, hidden, num_topk, num_experts
    expert_major = check_flag("expert_major", expert_major)
    return make_shape(
        num_ranks,
        *sizes,
        scales=scales,
        expert_major=expert_major,
        protocol=protocol,
        combines_fp8=check_flag("use_fp8_combine", use_fp8_combine),
    )


def sizes_of(shape):
    """Return the sizes for which calls are made, by the names of their arguments."""
    return {
        "num_max_dispatch_tokens_per_rank": shape.max_tokens,
        "hidden": shape.hidden,
        "num_experts": shape.num_experts,
        "num_topk (the columns of topk_idx)": shape.topk,
    }


def formats_of(shape):
    """Return the options of `scales_format`, by name."""
    return dict(use_fp8=shape.is_fp8, round_scale=shape.scales != "float32", use_ue8m0=shape.scales == "ue8m0")


def with_threads(shape, row_words):
    """Choose the threads of a CTA, one for each vector of its part of a row, and the CTAs of an SM."""
    threads = min(_THREADS_PER_SM, max(32, -(-row_words // (4 * 32 * shape.parts)) * 32))
    return replace(shape, threads=threads, ctas_per_sm=min(_MAX_CTAS_PER_SM, _THREADS_PER_SM // threads))


def dispatched(shape):
    """Return the shape of dispatch, which does not depend on the format of sums."""
    return replace(shape, combines_fp8=False)


def combined(shape):
    """Return the shape of combine: whatever dispatch sends, the rows to sum are bfloat16."""
    combined = replace(shape, dtype="bfloat16", scales="float32")
    return with_threads(combined, combined.combined_words)
