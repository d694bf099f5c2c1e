"""What the article on the versions of SGLang's `moe_align_block_size` claims."""

from moe_numba.course.articles.claims import align_checks as checks
from moe_numba.course.articles.claims.align_scans import BLELLOCH, INTERLEAVED, NO_CPP, SIZES, WARP_SCAN, both
from moe_numba.course.verdicts import (
    About,
    Article,
    Claim,
    Found,
    Setup,
    at_least,
    at_most,
    clear,
    exactly,
    faster,
    figure,
    least_saving,
    no_cost,
    noise,
    percentage,
    saving,
    share,
)

BEFORE_0X5 = ("0x4, filling first", "0x4")
VERSIONS = ("0x1", "0x2", "0x3", "0x4", "0x5")


def _versions(*times):
    """Compare 0x4 with the fastest version, size by size; the largest ratio counts."""
    worst, texts = 0.0, []
    for i, size in enumerate(SIZES):
        own = dict(zip(VERSIONS, times[i * len(VERSIONS) : (i + 1) * len(VERSIONS)], strict=True))
        best = min(own, key=own.get)
        worst = max(worst, own["0x4"] / own[best])
        texts.append(f"{size}: {best} is fastest, {own[best]:.4g} us, and 0x4 takes {own['0x4']:.4g}")
    return Found(worst, "; ".join(texts))


def _largest_part(scan, *others):
    return Found(scan / max(others), f"the scan {scan:.4g} us, the others {', '.join(f'{o:.4g}' for o in others)} us")


def _counting(counted, without, total):
    """Return the share of the atomics; below zero if the version without them, which needs a comparison, is slower."""
    found = share(counted - without, total, f"counting {counted:.4g} us, {without:.4g} without atomics:")
    if found.value >= 0:
        return found
    return Found(
        found.value,
        f"the version without atomics is slower: counting takes {without:.4g} us instead of {counted:.4g}, "
        f"{-found.value:.1f} % of {total:.4g} us more; it has more instructions per iteration, because a comparison "
        "keeps its loads",
    )


def _sort_atomics(sort, loads, total):
    return share(sort - loads, total, f"the sort kernel {sort:.4g} us, {loads:.4g} with loads instead of the atomics:")


def _store_width(single, wide):
    return Found(single / wide, f"{single:.4g} -> {wide:.4g} us with 16-byte stores, {single / wide:.2f} times as fast")


def _padding(baseline, fill, padding):
    extra = 100 * (padding / (baseline - fill) - 1)
    return Found(extra, f"{baseline - fill:.4g} us without any fill, {padding:.4g} us with the padding: {extra:+.1f} %")


def _gain_by_size(*times):
    """Compare the savings of the largest and the smallest size, after 0x4 as section 0x5 shows it and after 0x4."""
    found, texts = [], []
    for i, before in enumerate(BEFORE_0X5):
        large, small = (saving(size[i], size[-1]).value for size in (times[:3], times[3:]))
        found.append(large - small)
        texts.append(f"{before} -> 0x5: {large:.1f} % less for {SIZES[0]}, {small:.1f} % for {SIZES[2]}")
    return Found(min(found), "; ".join(texts))


BASELINE = (
    Claim(
        "0x0",
        "for small experts (num_expert <= 64 && token <= 1024) I basically kept vLLM's implementation",
        "numbers of tokens for which section 0x1's condition, numel < 1024, says otherwise (top-8)",
        About.CODE,
        exactly(0),
        checks.small_kernel_conditions,
    ),
    Claim(
        "0x0",
        "0x4: this is the version with the best performance at present",
        "its time over that of the fastest version, largest of three sizes",
        About.DIRECTION,
        at_most(1 + noise(interleaved=False)),
        _versions,
        tuple(f"{version}, {size}" for size in SIZES for version in VERSIONS),
        Setup.PORT,
    ),
    Claim(
        "0x3, of 0x2; also 0x1",
        "the prefix sum is still serial, only thread 0 works; this is the largest bottleneck",
        "time of 0x1's scan over that of any other part, 4096 tokens",
        About.DIRECTION,
        at_least(1.02),
        _largest_part,
        ("0x1: serial scan", "0x1: sort kernel", "0x1: counting", "0x1: expert_ids", "0x1: fill"),
        Setup.PORT,
    ),
    Claim(
        "0x1",
        "the counting stage uses many atomicAdd, and atomic operations cost quite a lot",
        "share of 0x1 that the main kernel's atomics take, in shared memory, 4096 tokens",
        About.DIRECTION,
        clear(),
        _counting,
        ("0x1: counting phase", "0x1: counting phase without atomics", "0x1, 4096 tokens"),
        Setup.PORT,
    ),
    Claim(
        "0x1",
        "the counting stage uses many atomicAdd, and atomic operations cost quite a lot",
        "share of 0x1 that the sort kernel's atomics take, in global memory, 4096 tokens",
        About.DIRECTION,
        clear(),
        _sort_atomics,
        ("sort kernel", "sort kernel with loads instead of atomics", "0x1, 4096 tokens"),
        Setup.PORT,
    ),
    Claim(
        "0x1",
        "counts in shared memory reduce the accesses to global memory",
        "time saved beside counts in global memory",
        About.DIRECTION,
        faster(),
        needs="0x1 with its counts in global memory beside 0x1",
    ),
    Claim(
        "0x6",
        "for small sizes the small_batch_expert_kernel, which fuses all operations, is more suitable",
        "time that it saves beside the main and the sort kernel, 64 tokens, 64 experts",
        About.DIRECTION,
        faster(),
        saving,
        tuple(
            f"small kernel or two launches: {kernel}"
            for kernel in ("main and sort kernel of 0x5", "small kernel of 0x5")
        ),
        Setup.PORT,
    ),
)

PADDING = (
    *(
        Claim(
            "0x2",
            "padding directly in the kernel reduces the cost of the fill",
            f"time saved, 0x1 -> 0x2, {size}",
            About.DIRECTION,
            faster(size in INTERLEAVED),
            saving,
            both("0x1", "0x2", (size,)),
            Setup.PORT,
        )
        for size in SIZES
    ),
    Claim(
        "0x2",
        "with int4 four int32_t are written at once, and the use of the memory bandwidth rises by 4 times",
        "time with 4-byte stores over time with 16-byte stores",
        About.FIGURE,
        figure(4, ""),
        _store_width,
        ("fill with 4-byte stores", "fill with 16-byte stores"),
        Setup.PORT,
        f"a kernel of one CTA that only fills; {NO_CPP}",
    ),
    Claim(
        "0x2",
        "vectorised writes can merge several memory transactions",
        "requests of a warp, one for each store instruction, with 4-byte stores over those with 16-byte stores",
        About.CODE,
        at_least(2),
        checks.store_requests,
    ),
    Claim(
        "0x2",
        "it guarantees that the output data are deterministic",
        "sets of places with padding, of which this section speaks, in runs with different orders of the atomics",
        About.CODE,
        exactly(1),
        checks.padding_places,
    ),
    Claim(
        "0x2",
        "the padding runs in parallel with other computation, at almost no extra cost",
        "time added, 4096 tokens",
        About.DIRECTION,
        no_cost(interleaved=False),
        _padding,
        ("0x1, 4096 tokens", "0x1: fill", "0x2, 4096 tokens"),
        Setup.PORT,
    ),
)

PARALLEL_FILL = (
    Claim(
        "0x5",
        "8 tokens, 256 experts, block_size=128: 32520, now 1024 (96.8 % of the memory saved)",
        "memory saved",
        About.ARITHMETIC,
        percentage(96.8),
        checks.saved_for_8_slots,
    ),
    Claim(
        "0x5",
        "the new logic guarantees that each token takes at most one block",
        "blocks per slot, an element of topk_ids, which the article calls a token here",
        About.CODE,
        at_most(1),
        checks.blocks_per_slot,
    ),
    Claim(
        "0x5",
        "memory: 90 %+ saved for small batches",
        "memory saved, least of all numbers of slots to which the rule applies",
        About.CODE,
        at_least(90, " %"),
        checks.least_saved,
    ),
    Claim(
        "0x5",
        "a smaller fill, about 5-10 % of performance",
        "time saved, 1 token, block_size 128",
        About.FIGURE,
        figure(5),
        saving,
        ("serial fill, old length", "serial fill, new length"),
        Setup.PORT,
        NO_CPP,
    ),
    Claim(
        "0x5",
        "the two blocks run completely in parallel and need no synchronisation",
        "runs with a data race or a wrong result",
        About.CODE,
        exactly(0),
        checks.runs_without_races,
    ),
    Claim(
        "0x5",
        "it reduces the latency of the main path",
        "time saved, 0x4 filling first -> 0x5, least of three sizes",
        About.DIRECTION,
        faster(interleaved=False),
        least_saving(SIZES),
        both("0x4, filling first", "0x5"),
        Setup.PORT,
    ),
    Claim(
        "0x5",
        "main kernel: filling and computing fully in parallel, the latency falls by 20-30 %",
        "time saved, 0x4's main kernel, filling first -> CTA 0 of 0x5's, launched without the CTA that fills, 4096 "
        "tokens",
        About.FIGURE,
        figure(20),
        saving,
        ("0x4, filling first: main kernel", "0x5: CTA 0 of the main kernel"),
        Setup.PORT,
        NO_CPP,
    ),
    Claim(
        "0x5",
        "it suits large sizes in particular",
        "percentage points that 4096 tokens gain more than 1 token, the least of both versions of 0x4",
        About.DIRECTION,
        at_least(100 * noise(interleaved=False), " points"),
        _gain_by_size,
        tuple(f"{version}, {size}" for size in (SIZES[0], SIZES[2]) for version in (*BEFORE_0X5, "0x5")),
        Setup.PORT,
    ),
    Claim(
        "0x5",
        "3 __syncthreads() are needed, to make sure that the fill threads wait for the computation",
        "errors that the simulator reports for barriers in these two branches",
        About.CODE,
        exactly(0),
        checks.refused_barriers,
    ),
    Claim(
        "0x5",
        "small-batch kernel: the latency falls by 10-15 %",
        "time saved, 64 tokens, 64 experts",
        About.FIGURE,
        figure(10),
        saving,
        ("small kernel of 0x4", "small kernel of 0x5"),
        Setup.PORT,
        NO_CPP,
    ),
    Claim(
        "0x5",
        "in all, small batches: 15-30 %",
        "time saved, 1 token, block_size 128",
        About.FIGURE,
        figure(15),
        saving,
        ("serial fill, old length", "parallel fill, new length"),
        Setup.PORT,
        NO_CPP,
    ),
    Claim(
        "0x5",
        "in all, large batches: 10-20 %",
        "time saved, 4096 tokens",
        About.FIGURE,
        figure(10),
        saving,
        both("0x4, filling first", "0x5", SIZES[:1]),
        Setup.PORT,
        NO_CPP,
    ),
    Claim(
        "0x6",
        "0x5 can bring another 10-30 % of performance",
        "time saved, 0x4 -> 0x5, least of three sizes",
        About.FIGURE,
        figure(10),
        least_saving(SIZES),
        both("0x4", "0x5"),
        Setup.PORT,
        NO_CPP,
    ),
)

ARTICLE = Article(
    "align",
    "how sgl-kernel's MoE align block size kernel was optimised",
    "SGLang's `moe_align_block_size`, versions 0x1 to 0x5",
    "https://github.com/sgl-project/sglang/blob/9fcf74e1d36629cc616701e2ad4cdde012372e19/"
    "python/sglang/kernels/aot/csrc/moe/moe_align_kernel.cu",
    ("02_align", "03_align_one_launch"),
    BASELINE + PADDING + BLELLOCH + WARP_SCAN + PARALLEL_FILL,
)
