"""What the article on SGLang's `moe_fused_gate` claims."""

from moe_numba.course.articles.claims import gate_checks as checks
from moe_numba.course.verdicts import About, Article, Claim, Found, Setup, at_least, exactly, figure, percentage

TOKENS = (1, 64, 256, 1024, 4096, 16384, 65536)
THROUGHPUT = {4: (1176.43, 1246.88, 5.9), 8: (1374.09, 1449.89, 5.5), 16: (1458.38, 1576.61, 8.1)}  # total, main and pr
# vLLM's repetition of the pull request's benchmark on an H200 (vllm PR 21107): {tokens: us before and after}
REPEATED = {5000: (208.9, 25.8), 10000: (400, 35.9), 20000: (719, 52.6), 40000: (1354, 83.4)}
BOTH = tuple(f"gate: {kernel}, {tokens}" for tokens in TOKENS for kernel in ("torch.compile", "moe_fused_gate"))
PREFACE, PROFILE, END_TO_END = "0x0", "0x1, torch profile", "0x1, end to end on H200"
HOST, HELPERS, KERNEL = "0x2.1, a comment", "0x2.3, a comment", "0x2.4, a comment"


def _gain(qps):
    main, pr, _ = THROUGHPUT[qps]
    gain = 100 * (pr / main - 1)
    return Found(gain, f"{main} -> {pr} tokens per second, +{gain:.2f} %")


def _least_gain():
    gains = [_gain(qps).value for qps in THROUGHPUT]
    return Found(min(gains), f"{min(gains):.1f} to {max(gains):.1f} % in its table")


def _times_as_fast(*times):
    ratios = [compiled / fused for compiled, fused in zip(times[::2], times[1::2], strict=True)]
    each = ", ".join(f"{ratio:.1f} for {tokens}" for ratio, tokens in zip(ratios, TOKENS, strict=True))
    return Found(min(ratios), f"times as fast: {each} tokens")


def _beside_the_repetition(*times):
    ratios = [before / after for before, after in REPEATED.values()]
    found, sizes = _times_as_fast(*times), f"{min(REPEATED)} to {max(REPEATED)} tokens"
    others = f"{min(ratios):.1f} to {max(ratios):.1f} times for {sizes} (vllm PR 21107)"
    return Found(found.value, f"{found.text}; vLLM repeated the benchmark on an H200: {others}")


def _one_token(compiled, fused):
    ratio = compiled / fused
    return Found(ratio, f"{compiled:.1f} -> {fused:.1f} us for 1 token, {ratio:.1f} times as fast")


def _kernels(count):
    return Found(count, f"{count:g} kernels are left")


def _first_call(seconds):
    return Found(seconds, f"the first call of this one function takes {seconds:.1f} s")


CLAIMS = (
    Claim(
        PREFACE,
        "in DeepSeek V3's end-to-end test the throughput rises by more than 5 %",
        "the least of its three gains",
        About.ARITHMETIC,
        at_least(5, " %"),
        _least_gain,
    ),
    Claim(
        PREFACE,
        "with torch.compile the time to start the service becomes much longer",
        "time added",
        About.DIRECTION,
        at_least(1, " s"),
        _first_call,
        ("gate: first call of torch.compile",),
        Setup.OTHER,
        "one function, not a service",
    ),
    Claim(
        PREFACE,
        "the performance that torch.compile reaches still falls somewhat short of CUDA by hand",
        "time of torch.compile's kernels over that of moe_fused_gate, least of all sizes",
        About.DIRECTION,
        at_least(1.02),
        _times_as_fast,
        BOTH,
    ),
    Claim(
        PREFACE,
        "since topk and gather are involved, it cannot fuse this operator completely",
        "kernels that are left",
        About.DIRECTION,
        at_least(2),
        _kernels,
        ("gate: kernels of torch.compile",),
    ),
    Claim(
        "0x1, the kernel's pull request",
        "for different numbers of tokens the fused CUDA kernel is ahead of torch.compile by an order of magnitude",
        "time of torch.compile's kernels over that of moe_fused_gate, least of all sizes",
        About.FIGURE,
        at_least(10),
        _beside_the_repetition,
        BOTH,
        Setup.OTHER,
        "float32 and kernel times alone; the pull request's benchmark has bfloat16, 5000 to 40000 tokens, and copies "
        "of the inputs in each call",
    ),
    Claim(
        PROFILE,
        "now there is only one kernel",
        "kernels of a call, the most of all shapes",
        About.CODE,
        exactly(1),
        checks.kernels_of_a_call,
    ),
    Claim(
        PROFILE,
        "36us->8us",
        "time before over time after",
        About.FIGURE,
        figure(36 / 8, ""),
        _one_token,
        ("gate: torch.compile, 1", "gate: moe_fused_gate, 1"),
        Setup.OTHER,
        "kernel times in a CUDA graph; the article profiles a server",
    ),
    *(
        Claim(
            END_TO_END,
            f"qps={qps}: {said}%+",
            "gain of its total throughput",
            About.ARITHMETIC,
            percentage(said),
            lambda qps=qps: _gain(qps),
        )
        for qps, (*_, said) in THROUGHPUT.items()
    ),
    *(
        Claim(
            END_TO_END,
            f"{qps}(main) {main}, {qps}(pr) {pr}",
            "gain of DeepSeek-V3's total throughput",
            About.FIGURE,
            figure(said),
            needs="DeepSeek-V3 served with 8 H200",
        )
        for qps, (main, pr, said) in THROUGHPUT.items()
    ),
    Claim(
        HOST,
        "dispatch to templated kernels; case 1: 256 experts, 8 or 16 groups; case 2: 128 experts, 4 or 8 groups",
        "shapes and dtypes that reach theirs, of 12",
        About.CODE,
        exactly(12),
        checks.templates_reached,
    ),
    Claim(
        HOST,
        "case 3: other cases, which require 8 <= num_experts / num_expert_group <= 32",
        "shapes with fewer than 8 experts in a group that are accepted",
        About.CODE,
        exactly(0),
        checks.small_groups_accepted,
    ),
    Claim(
        HOST,
        "256/8: VPT 32, ROWS_PER_WARP 4, ROWS_PER_CTA 24; 256/16: 16, 2, 12; 128/8: 16, 4, 24",
        "comments that agree with the formulas, of 3",
        About.CODE,
        exactly(3),
        checks.right_comments,
    ),
    Claim(
        HOST,
        "VPT = 128/4 = 32, ROWS_PER_WARP = 32/16 = 2, ROWS_PER_CTA = 6 * 2 = 12",
        "ROWS_PER_WARP by the formula",
        About.CODE,
        exactly(2),
        checks.rows_per_warp_of_128_4,
    ),
    Claim(
        HELPERS,
        "MAX_VPT = 32: must be larger than params.VPT",
        "MAX_VPT - VPT for DeepSeek-V3",
        About.CODE,
        at_least(1),
        checks.room_above_vpt,
    ),
    Claim(
        HELPERS,
        "define the access type, for vectorised loads of data",
        "wide loads in the machine code",
        About.CODE,
        at_least(1),
        needs="SGLang's compiled kernel, since the listing leaves the loads out",
    ),
    Claim(
        KERNEL,
        "if scores are equal, keep the group with the larger index",
        "rows with ties that end otherwise",
        About.CODE,
        exactly(0),
        checks.ties_of_groups,
    ),
    Claim(
        KERNEL,
        "synchronise all threads, to make sure that the exclusion of groups is complete",
        "runs that go wrong without this barrier",
        About.CODE,
        at_least(1),
        checks.runs_that_need_the_barrier,
    ),
    Claim(
        KERNEL,
        "if values are equal, choose the expert with the smaller ID",
        "rows with ties that end otherwise",
        About.CODE,
        exactly(0),
        checks.ties_of_experts,
    ),
    Claim(
        KERNEL,
        "if (k_idx < topk): if this is a valid topk index",
        "iterations that this guard, or its twin for groups, skips",
        About.CODE,
        at_least(1),
        checks.guards_that_skip,
    ),
    Claim(
        "0x3",
        "this kernel should originally come from TensorRT-LLM and FasterTransformer",
        "kernels of these projects with the same loops",
        About.CODE,
        at_least(1),
        needs="the sources of both projects beside SGLang's",
    ),
)

ARTICLE = Article(
    "gate",
    "a fused CUDA kernel for biased_grouped_topk of DeepSeek V3",
    "SGLang's `moe_fused_gate`",
    "https://github.com/sgl-project/sglang/pull/4530",
    ("01_gate",),
    CLAIMS,
)
