"""Model of what an expert-parallel layer gains if communication and experts overlap: a table.

    python -m moe_numba.course.bench.overlap_model

The table is part of docs/expert_parallel.md. DeepSeek-V3's experts in FP8 with block scales, 32 on each GPU, top-8;
dispatch in FP8, combine in bfloat16. Times come from the records of the grouped GEMM and the layer (H100) and of
dispatch and combine (2 H200).
"""

from typing import NamedTuple

import numpy as np

from moe_numba.course.bench import records
from moe_numba.course.exercises.moe_layer import ranks_per_token

TOKENS, RANKS = (64, 512, 4096), (2, 8)
LOCAL_EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 32, 7168, 2048, 8
SMS, LINK_SMS = 132, 16  # of the GPU, and of a dispatch that saturates the link
MANY_ROWS = 64  # per expert, from which on a grouped GEMM of gathered rows takes longer than permuting them saves
# Of the first grouped GEMM of Qwen3-30B-A3B with 4096 tokens in bfloat16, measured on an H100: of rows in order, and of
# gathered ones.
IN_ORDER_US, GATHERED_US = 424, 510
GEMM_GPU, LINK_GPU = "h100-80gb-hbm3", "h200"


class Times(NamedTuple):
    """Microseconds of the parts of a layer with ``tokens`` tokens on each of ``ranks`` GPUs."""

    dispatch: float  # of rows that leave the GPU, without the exchange of counts
    gate_up: float
    down: float
    permute: float
    weighted_sum: float
    combine: float
    rows_per_expert: float

    @property
    def total(self):
        """The layer, one part after another."""
        return sum(self[:-1])


def times_of(tokens, ranks):
    """Return the parts' times, scaled from the records by rows, or interpolated between measured numbers of rows."""
    rows = tokens * TOPK
    remote = remote_rows(ranks) / remote_rows(2)
    layer = {row["step"]: row["kernel_us"]["median"] for row in _layer_rows()}
    share = rows / 32768  # of the rows of the recorded layer
    return Times(
        _link_us("to output", "dispatch", "e4m3") * tokens / 4096 * remote,
        _gemm_us(2 * INTERMEDIATE, HIDDEN, rows),
        _gemm_us(HIDDEN, INTERMEDIATE, rows),
        layer["part: permute"] * share,
        layer["part: weighted_sum"] * share,
        _link_us("final", "combine", "bf16") * tokens / 4096 * remote,
        rows / LOCAL_EXPERTS,
    )


def remote_rows(ranks):
    """Return to how many other GPUs a token is sent on average."""
    return ranks_per_token(LOCAL_EXPERTS * ranks, TOPK, ranks) * (ranks - 1) / ranks


def _layer_rows():
    return records.select(records.read("moe_layer", GEMM_GPU), config={"model": "DeepSeek-V3, 1 of 8 GPUs"})


def _link_us(step, operation, dtype):
    config = {"ranks": 2, "num_sms": 24}
    rows = records.select(records.read("dispatch_combine", LINK_GPU), step=step, dtype=dtype, config=config)
    (found,) = (row for row in rows if row["operation"] == operation and row["size"]["tokens"] == 4096)
    return found["kernel_us"]["median"]


def _gemm_us(n, k, rows):
    config = {"num_groups": LOCAL_EXPERTS, "n": n, "k": k, "scaling": "block", "routing": "uniform"}
    found = records.select(records.read("grouped_gemm", GEMM_GPU), step="final", config=config)
    known = {row["size"]["rows"]: row["kernel_us"]["median"] for row in found}
    sizes = sorted(known)
    return float(np.interp(rows, sizes, [known[size] for size in sizes]))


def left_out_sms(t, gemms_us):
    """Return by how much grouped GEMMs take longer if they leave SMs to the communication.

    Tiles are shared by all CTAs at the launch, so a CTA that waits for its SM would end last: the SMs stay free for the
    whole GEMM. That costs nothing if it only waits for weights from DRAM.
    """
    reads_weights = t.gate_up < 1.5 * _gemm_us(2 * INTERMEDIATE, HIDDEN, 512)
    return 0 if reads_weights else gemms_us * LINK_SMS / (SMS - LINK_SMS)


def by_tile(t):
    """Return the gain if tiles of the first grouped GEMM start when their rows have arrived.

    Dispatch is hidden, and nothing is permuted; in return the grouped GEMM gathers rows.
    """
    gathering = (GATHERED_US / IN_ORDER_US - 1) * t.gate_up if t.rows_per_expert > MANY_ROWS else t.permute
    return t.dispatch + t.permute - gathering - left_out_sms(t, t.gate_up)


def by_half(t, half):
    """Return the gain of two micro-batches: half of dispatch and combine hidden, but weights read twice."""
    gemms, halves = t.gate_up + t.down, 2 * (half.gate_up + half.down)
    return (t.dispatch + t.combine) / 2 - (halves - gemms) - left_out_sms(t, halves)


def by_expert_row(t, ranks):
    """Return the gain if the second grouped GEMM stored each row to the token's GPU, which then sums.

    Its rows are then not stored and read again on the way, but all of a token's expert rows cross the link, instead of
    one sum per GPU. The sum remains, on the token's GPU.
    """
    return t.combine - t.combine * TOPK * (ranks - 1) / ranks / remote_rows(ranks)


def by_sum(t):
    """Return the most that is gained if combine sends rows while the weighted sum computes others: the shorter one."""
    return min(t.weighted_sum, t.combine)


GAINS = "first GEMM by tile", "two micro-batches", "second GEMM sends rows", "combine during the sum"


def gains(tokens, ranks):
    """Return the layer's microseconds, and {way to overlap: microseconds gained}."""
    t, half = times_of(tokens, ranks), times_of(tokens // 2, ranks)
    return t, dict(zip(GAINS, (by_tile(t), by_half(t, half), by_expert_row(t, ranks), by_sum(t)), strict=True))


def table():
    """Return the table in Markdown."""
    lines = [f"| GPUs, tokens on each | layer | dispatch | combine | {' | '.join(GAINS)} |", "|---|" + "---:|" * 7]
    for ranks in RANKS:
        for tokens in TOKENS:
            t, found = gains(tokens, ranks)
            cells = [f"{us:.0f}" for us in (t.total, t.dispatch, t.combine)]
            cells += [f"{us:+.0f} ({100 * us / t.total:+.1f} %)" for us in found.values()]
            lines.append(f"| {ranks}, {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
