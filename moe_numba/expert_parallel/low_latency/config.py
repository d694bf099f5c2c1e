"""Configuration of the low-latency kernels: what they are compiled for, by sizes and options of a call."""

from dataclasses import replace

from moe_numba.expert_parallel.low_latency import checks
from moe_numba.expert_parallel.low_latency.layout import LowLatencyShape

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
