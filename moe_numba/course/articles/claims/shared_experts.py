"""What the article on fusing DeepSeek's shared expert into the routed ones claims."""

from moe_numba.course.articles.claims import shared_experts_checks as checks
from moe_numba.course.verdicts import (
    TOLERANCE,
    About,
    Article,
    Claim,
    Found,
    Setup,
    Threshold,
    at_least,
    at_most,
    exactly,
    faster,
    least_saving,
    saving,
)
from moe_numba.shared_experts import memory_cost

# {QPS: {metric: (before, after, percent that it is better by)}}
TABLE = {
    1: {"throughput": (483.47, 485.72, 0.5), "TTFT": (949.18, 664.25, 30.0), "ITL": (54.69, 50.20, 8.2)},
    4: {"throughput": (1088.59, 1132.73, 4.0), "TTFT": (2630.26, 2144.08, 18.5), "ITL": (156.21, 132.75, 15.0)},
    8: {"throughput": (1188.77, 1235.63, 3.9), "TTFT": (6320.67, 3443.59, 45.5), "ITL": (188.29, 178.94, 5.0)},
}
DECODE, PREFILL = (1, 8, 64, 256), (1024, 4096)  # tokens
FP8 = "float8_e4m3fn"
ONE_LAYER = "one layer with torch's grouped GEMM on one GPU; the article serves the model with SGLang's fused_moe on 8"
CONCLUSION = "with qps rising to 4 the throughput rises by 4 %, and TTFT and ITL both fall by about 15 %-20 %"
WORSE = "that case really performs worse than with tp_size copies of the shared expert, TTFT even gets longer"
EVEN_LOAD = (
    "perhaps a kind of load balancing, so that not all tokens go to one shared expert and uneven numbers of tokens "
    "make the computation inefficient"
)


def _better(qps, metric):
    before, after, _ = TABLE[qps][metric]
    return abs(100 * (after / before - 1))


def _percentages():
    cells = [(qps, metric) for qps, own in TABLE.items() for metric in own]
    right = sum(abs(_better(qps, metric) - TABLE[qps][metric][2]) <= 0.1 for qps, metric in cells)
    return Found(right, f"{right} of {len(cells)} follow from its figures")


def _at_qps_4(metric):
    better = _better(4, metric)
    return Found(better, f"{better:.2f} % by its figures")


def _explained(metric, sizes):
    """Make a measure of how much of the article's gain the layers with experts save at most, at the best size."""

    def measure(*times):
        layers = memory_cost().moe_layers
        saved = {
            tokens: (old - new) * layers / 1000 for tokens, old, new in zip(sizes, times[::2], times[1::2], strict=True)
        }
        most = max(saved, key=saved.get)
        parts = {qps: 100 * saved[most] / (own[metric][0] - own[metric][1]) for qps, own in TABLE.items()}
        shares = ", ".join(f"{part:.1f} % at QPS {qps}" for qps, part in parts.items())
        return Found(
            min(parts.values()),
            f"{layers} layers with 8 copies save at most {saved[most]:.2f} ms ({most} tokens): {shares}",
        )

    return measure


def _layers(variants, dtype, sizes):
    return tuple(f"layer, {variant}, {dtype}, {tokens}" for tokens in sizes for variant in variants)


def _longer(labels):
    """Make a measure of pairs of times: how many percent longer the first takes, at most."""

    def measure(*times):
        more = {label: 100 * (a / b - 1) for label, a, b in zip(labels, times[::2], times[1::2], strict=True)}
        return Found(max(more.values()), ", ".join(f"{value:+.1f} % for {label}" for label, value in more.items()))

    return measure


def _tokens(sizes):
    return tuple(f"{tokens} token{'s' * (tokens > 1)}" for tokens in sizes)


def _experts(most):
    return Found(most, f"a checked time with {most} experts is recorded")


SERVED = (
    Claim(
        "0x0",
        "sgl moe_align_kernel supports num_experts>256 already, so no CUDA code of sgl-kernel has to change",
        "experts that the kernel aligns",
        About.CODE,
        at_least(257),
        _experts,
        ("SGLang's alignment: most experts",),
        Setup.OTHER,
        "a later version of SGLang's kernel",
    ),
    Claim(
        "0x1",
        "Accuracy: 0.952",
        "accuracy in GSM8K",
        About.FIGURE,
        at_least(0.952),
        needs="DeepSeek-R1 served with the fusion on 8 GPUs",
    ),
    Claim(
        "0x1",
        "+0.5 %, +30.0 %, +8.2 %; +4.0 %, +18.5 %, +15.0 %; +3.9 %, +45.5 %, +5.0 %",
        "percentages that follow from the table's figures, of 9",
        About.ARITHMETIC,
        exactly(9),
        _percentages,
    ),
    Claim(
        "0x1",
        CONCLUSION,
        "throughput at QPS 4 by its table",
        About.ARITHMETIC,
        Threshold(3.5, 4.5, " %"),
        lambda: _at_qps_4("throughput"),
    ),
    *(
        Claim(
            "0x1",
            CONCLUSION,
            f"{metric} at QPS 4 by its table",
            About.ARITHMETIC,
            Threshold(15, 20, " %"),
            lambda metric=metric: _at_qps_4(metric),
        )
        for metric in ("TTFT", "ITL")
    ),
    Claim(
        "0x1",
        "total throughput +0.5 %, +4.0 %, +3.9 %",
        "gain of the served model",
        About.FIGURE,
        at_least(0.5, " %"),
        needs="DeepSeek-V3 or R1 served with 8 H200",
    ),
    *(
        Claim(
            "0x1",
            f"mean {metric} +{said[0]} %, +{said[1]} %, +{said[2]} %",
            "share of the gain that the model's layers explain, least of QPS 1, 4 and 8",
            About.FIGURE,
            at_least(100 * (1 - TOLERANCE), " %"),
            _explained(metric, sizes),
            _layers(("separate", "8 replicas"), FP8, sizes),
            Setup.OTHER,
            ONE_LAYER,
        )
        for metric, sizes, said in (
            (metric, sizes, [own[metric][2] for own in TABLE.values()])
            for metric, sizes in (("ITL", DECODE), ("TTFT", PREFILL))
        )
    ),
)

PRINCIPLE = (
    Claim(
        "0x2",
        "a simple optimisation is to merge the shared experts' computation into the FusedMoE kernel",
        "time that a layer saves with one shared expert and no copies, FP8, least of six sizes",
        About.DIRECTION,
        faster(),
        least_saving(_tokens((*DECODE, *PREFILL))),
        _layers(("separate", "1 shared"), FP8, (*DECODE, *PREFILL)),
        Setup.OTHER,
        ONE_LAYER,
    ),
    Claim(
        "0x2",
        "shared and routed experts have exactly the same architecture and shape",
        "rows of the shared expert's matrices over those of a routed one's, in DeepSeek-V3",
        About.CODE,
        exactly(1),
        checks.shared_over_routed,
    ),
    Claim(
        "0x2",
        "with adjusted weights of the 9 experts we get exactly the output of the MoE layer before",
        "difference in float64, relative to the largest output",
        About.CODE,
        at_most(1e-12),
        checks.error_of_the_fusion,
    ),
    Claim(
        "0x2",
        "the shared experts' topk_weights have to be divided by routed_scaling_factor, for numerical equivalence",
        "difference without the division, relative to the largest output",
        About.CODE,
        at_least(1e-3),
        checks.error_without_the_division,
    ),
)

DETAILS = (
    Claim(
        "0x3",
        "we always give the 9th expert of all tokens to a shared expert: topk_ids[:, -1] = torch.randint(...)",
        "other ids in this column",
        About.CODE,
        exactly(0),
        checks.ninth_outside,
    ),
    Claim(
        "0x3",
        EVEN_LOAD,
        "tokens of the fullest of 8 copies",
        About.CODE,
        at_most(25, " %, twice its share"),
        checks.fullest_replica,
    ),
    Claim(
        "0x3",
        EVEN_LOAD,
        "time that the experts' GEMMs take longer with one shared expert than with 8 copies, largest of three sizes",
        About.DIRECTION,
        faster(),
        _longer(_tokens((64, 1024, 4096))),
        tuple(f"GEMMs, {variant}, {n}" for n in (64, 1024, 4096) for variant in ("1 shared", "8 replicas")),
        Setup.OTHER,
        "torch's grouped GEMM in FP8, not SGLang's fused_moe",
    ),
    *(
        Claim(
            "0x3",
            WORSE,
            f"time that a layer takes longer with one shared expert than with 8 copies, largest of six sizes, {dtype}",
            About.DIRECTION,
            faster(),
            _longer(_tokens((*DECODE, *PREFILL))),
            _layers(("1 shared", "8 replicas"), dtype, (*DECODE, *PREFILL)),
            Setup.OTHER,
            ONE_LAYER,
        )
        for dtype in (FP8, "bfloat16")
    ),
    Claim(
        "0x3",
        WORSE,
        "time that a layer takes longer with one shared expert than without the fusion, prefill, FP8",
        About.DIRECTION,
        faster(),
        _longer(_tokens(PREFILL)),
        _layers(("1 shared", "separate"), FP8, PREFILL),
        Setup.OTHER,
        ONE_LAYER,
    ),
    Claim(
        "0x3",
        "here the superfluous weights of each layer's shared expert are also removed from the original weights",
        "tensors of shared experts that remain",
        About.CODE,
        exactly(0),
        checks.names_left,
    ),
    Claim(
        "0x3",
        "since the number of experts changes, the tuning script for fused moe has to be run",
        "time that tuning saves",
        About.DIRECTION,
        faster(),
        needs="SGLang's Triton fused_moe with 257 to 264 experts, tuned and not",
    ),
    Claim(
        "0x3",
        "the memory of each tp rank grows; in FP8 a rank has one shared expert more",
        "experts per layer added, with TP8 and 8 copies",
        About.CODE,
        exactly(1),
        checks.experts_more_on_a_rank,
    ),
    Claim(
        "0x3",
        "a shared expert is 42MB of memory in FP8 (7168 * 2048 * 3)",
        "MiB",
        About.ARITHMETIC,
        Threshold(41.5, 42.5),
        checks.expert_megabytes,
    ),
    Claim(
        "0x3",
        "(51-3)*42MB=2016MB/1024=1.96GB",
        "GiB",
        About.ARITHMETIC,
        Threshold(1.95, 1.97),
        checks.articles_gigabytes,
    ),
    Claim("0x3", "(51-3)", "layers with experts in DeepSeek-V3", About.CODE, exactly(48), checks.moe_layers),
    Claim(
        "0x3",
        "this optimisation uses 1-2GB more memory on a TP rank for the best gain",
        "GiB for DeepSeek-V3's layers, net of the share of the shared expert that each rank held before",
        About.CODE,
        Threshold(1 - TOLERANCE, 2 * (1 + TOLERANCE)),
        checks.gigabytes_more_on_a_rank,
    ),
    Claim(
        "0x3",
        "with a fused moe gate this optimisation becomes a little more useful",
        "time that the routing saves if the gate writes the ninth column",
        About.DIRECTION,
        faster(),
        saving,
        ("gate, then torch, 64", "gate, column inside, 64"),
        Setup.OTHER,
        "the package's gate, not SGLang's; 64 tokens",
    ),
)

ARTICLE = Article(
    "shared experts",
    "a trick: fuse the shared experts of DeepSeek V3 and R1 with the ordinary ones",
    "SGLang's fusion of shared experts",
    "https://github.com/sgl-project/sglang/pull/4918",
    ("04_shared_experts",),
    SERVED + PRINCIPLE + DETAILS,
)
