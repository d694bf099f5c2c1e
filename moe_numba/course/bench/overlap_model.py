"""Model of what an expert-parallel layer gains if communication and experts overlap: a table.

    python -m moe_numba.course.bench.overlap_model

The table is part of docs/expert_parallel.md. The layer is that of the topic `moe_layer_ranks`, DeepSeek-V3's experts in
FP8 with block scales, 32 on each GPU, top-8; dispatch sends FP8, combine bfloat16. Times of dispatch, experts and
combine come from that topic's record, those of the experts' launches from the record `moe_layer` of the same GPU.
"""

from typing import NamedTuple

import numpy as np

from moe_numba.course.bench import records
from moe_numba.course.bench.topics.moe_layer_ranks import show as moe_layer_ranks
from moe_numba.course.bench.topics.moe_layer_ranks.show import PARTS, remote_rows

GPU, WIRE = "h200", "e4m3"
TOKENS, RANKS, TOPK = (64, 512, 4096), (2, 8), 8
SMS, LINK_SMS = 132, 24  # of the GPU, and of a dispatch or combine
FP8_SUM = (7168 + 4 * 56) / (2 * 7168)  # bytes of a sum in FP8 with its scales, of one in bfloat16
MANY_ROWS = 64  # per expert, from which on a grouped GEMM of gathered rows takes longer than permuting them saves
# Of the first grouped GEMM of Qwen3-30B-A3B with 4096 tokens in bfloat16, measured on an H100: of rows in order, and of
# gathered ones.
IN_ORDER_US, GATHERED_US = 424, 510
COMPUTE_BOUND_ROWS = 256  # per expert, from which on grouped GEMMs wait for tensor cores, and not for weights


class Times(NamedTuple):
    """Microseconds of the parts of a layer."""

    dispatch: float
    experts: float
    combine: float
    fixed_dispatch: float  # with hardly any rows: what the exchange of counts and the launches take
    fixed_combine: float
    gate_up: float  # of the experts, in proportion
    permute: float
    weighted_sum: float
    rows_per_expert: float

    @property
    def total(self):
        """The layer, one part after another."""
        return self.dispatch + self.experts + self.combine


def times_of(tokens, ranks):
    """Return the parts' times, interpolated between the recorded numbers of tokens."""
    found = moe_layer_ranks.medians(records.read("moe_layer_ranks", GPU), ranks)
    sizes = sorted(found)
    parts = [float(np.interp(tokens, sizes, [found[size][part, WIRE] for size in sizes])) for part in PARTS]
    fixed = [found[sizes[0]][part, WIRE] for part in (PARTS[0], PARTS[2])]
    config = {"model": "DeepSeek-V3, 1 of 8 GPUs"}
    layer = {row["step"]: row["kernel_us"]["median"] for row in records.select(_layer(), config=config)}
    scale = tokens / 4096
    gate_up = parts[1] * layer["part: gate_up"] / layer["final"]
    return Times(
        *parts, *fixed, gate_up, layer["part: permute"] * scale, layer["part: weighted_sum"] * scale, tokens / 4
    )


def _layer():
    return records.read("moe_layer", GPU)


def left_out_sms(t, gemms_us):
    """Return by how much grouped GEMMs take longer if they leave SMs to the communication.

    Tiles are shared by all CTAs at the launch, so a CTA that waits for its SM would end last: the SMs stay free for the
    whole GEMM. That costs nothing if it only waits for weights from DRAM.
    """
    return gemms_us * LINK_SMS / (SMS - LINK_SMS) if t.rows_per_expert >= COMPUTE_BOUND_ROWS else 0


def by_tile(t):
    """Return the gain if tiles of the first grouped GEMM start when their rows have arrived.

    The rows' part of dispatch is hidden, and nothing is permuted; in return the grouped GEMM gathers rows.
    """
    gathering = (GATHERED_US / IN_ORDER_US - 1) * t.gate_up if t.rows_per_expert > MANY_ROWS else t.permute
    return t.dispatch - t.fixed_dispatch + t.permute - gathering - left_out_sms(t, t.gate_up)


def by_half(t, half):
    """Return the gain of two micro-batches: one dispatch and one combine are hidden, but weights are read twice.

    Only the first grouped GEMM of each leaves SMs: the transfers are shorter than it.
    """
    return t.total - (half.dispatch + 2 * half.experts + half.combine) - left_out_sms(half, 2 * half.gate_up)


def by_expert_row(t, ranks):
    """Return the gain if the second grouped GEMM stored each row to the token's GPU, which then sums.

    Its rows are then not stored and read again on the way, but all of a token's expert rows cross the link, instead of
    one sum per GPU. The sum remains, on the token's GPU.
    """
    return (t.combine - t.fixed_combine) * (1 - TOPK * (ranks - 1) / ranks / remote_rows(ranks))


def by_sum(t):
    """Return the most that is gained if combine sends rows while the weighted sum computes others: the shorter one."""
    return min(t.weighted_sum, t.combine - t.fixed_combine)


def by_fp8_sums(t):
    """Return the gain if combine sends FP8: nothing overlaps, but the rows' part of combine has fewer bytes."""
    return (t.combine - t.fixed_combine) * (1 - FP8_SUM)


GAINS = "first GEMM by tile", "two micro-batches", "second GEMM sends rows", "combine during the sum", "sums in FP8"


def measured_gains(tokens, ranks):
    """Return {way to overlap: microseconds gained} of those that the topic has measured, with FP8 dispatch.

    Sums in FP8 are compared with the low-latency layer, or where that has too many tokens with the other one.
    """
    steps = moe_layer_ranks.medians(records.read("moe_layer_ranks", GPU), ranks).get(tokens, {})
    plain, low_latency = steps.get(("final", WIRE)), steps.get(("low latency", WIRE))
    found = {}
    if plain and (us := steps.get((GAINS[3], WIRE))):
        found[GAINS[3]] = plain - us
    if (before := low_latency or plain) and (us := steps.get(("low latency, FP8 sums", WIRE))):
        found[GAINS[4]] = before - us
    return found


def gains(tokens, ranks):
    """Return the layer's microseconds, and {way to overlap: microseconds gained}."""
    t, half = times_of(tokens, ranks), times_of(tokens // 2, ranks)
    found = by_tile(t), by_half(t, half), by_expert_row(t, ranks), by_sum(t), by_fp8_sums(t)
    return t, dict(zip(GAINS, found, strict=True))


def table():
    """Return the table in Markdown."""
    names = "dispatch", "experts", "combine", *GAINS
    lines = [f"| GPUs, tokens on each | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for ranks in RANKS:
        for tokens in TOKENS:
            t, found = gains(tokens, ranks)
            cells = [f"{us:.0f}" for us in t[:3]]
            measured = measured_gains(tokens, ranks)
            for name, us in found.items():
                cell = f"{us:+.0f} ({100 * us / t.total:+.1f} %)"
                cells.append(cell + (f", measured {measured[name]:+.0f}" if name in measured else ""))
            lines.append(f"| {ranks}, {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
