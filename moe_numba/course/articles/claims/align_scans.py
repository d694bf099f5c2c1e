"""What the article on `moe_align_block_size` claims of its two parallel scans, versions 0x3 and 0x4."""

from moe_numba.course.articles.claims import align_checks as checks
from moe_numba.course.verdicts import (
    About,
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
    saving,
)

SIZES = ("4096 tokens", "64 tokens", "1 token")
INTERLEAVED = SIZES[:1]  # notebook 02 times the other sizes step by step
NO_CPP = "the article's percentage is of SGLang's compiled kernels on a GPU that it does not name"
ONE_SCAN = "of the article's listing, which scans once; SGLang's kernel scans twice"
BOOST_CLOCK_MHZ = 1980  # of an H200


def both(old, new, sizes=SIZES):
    """Return the lookups of two versions, for `saving` and `least_saving`."""
    return tuple(f"{version}, {size}" for size in sizes for version in (old, new))


def _two_scans(*times):
    """Describe 0x3, 0x4 and 0x4 with one scan, size by size; the least saving of 0x4 counts."""
    found = [saving(*times[i : i + 2], f"{size}: ") for i, size in zip(range(0, 9, 3), SIZES)]
    one = [saving(times[i], times[i + 2]) for i in range(0, 9, 3)]
    texts = [f"{f.text} ({o.text.rpartition(', ')[2]} with the article's one scan)" for f, o in zip(found, one)]
    return Found(min(f.value for f in found), "; ".join(texts))


def _shuffle_clocks(shorter, longer):
    each = (longer - shorter) / 1024
    return Found(each * BOOST_CLOCK_MHZ, f"{1000 * each:.1f} ns, {each * BOOST_CLOCK_MHZ:.0f} cycles of 1.98 GHz")


BLELLOCH = (
    Claim(
        "0x3",
        "[3, 4, 7, 7, 4, 5, 6, 9] ... [0, 3, 4, 11, 11, 15, 16, 22]",
        "rows of the example that the sweeps produce, of 7",
        About.CODE,
        exactly(7),
        checks.blelloch_rows,
    ),
    Claim(
        "0x3",
        "for num_experts=128 from O(128) down to O(log 128) = O(7)",
        "levels of a sweep",
        About.CODE,
        exactly(7),
        checks.blelloch_levels,
    ),
    Claim(
        "0x3",
        "all threads take part in the computation",
        "threads that work on 128 numbers, the most of all levels",
        About.CODE,
        exactly(128),
        checks.blelloch_active_threads,
    ),
    Claim(
        "0x3",
        "scan_size must be a power of 2",
        "other sizes up to 64 for which the result is right",
        About.CODE,
        exactly(0),
        checks.blelloch_other_sizes,
    ),
    Claim(
        "0x3",
        "filling expert_ids: 0x2 is O(blocks/experts), unbalanced; 0x3 is O(blocks), balanced",
        "blocks of the busiest of 1024 threads, of 2048 that belong to one expert",
        About.CODE,
        exactly(2),
        checks.busiest_thread,
    ),
    Claim(
        "0x3",
        "the binary search is O(log num_experts)",
        "iterations for 256 experts, the most of all experts",
        About.CODE,
        at_most(9),
        checks.search_iterations,
    ),
    Claim(
        "0x3",
        "suited to an uneven distribution over the experts",
        "time that the search saves beside 0x2's loop, 4096 tokens that all choose the same 8 experts",
        About.DIRECTION,
        faster(),
        saving,
        ("0x3: loop over each expert's blocks instead, uneven", "0x3: search for expert_ids, uneven"),
        Setup.PORT,
    ),
    Claim(
        "0x3",
        "for num_experts=128: (128 + 129 + 128) * 4 = 1540 bytes",
        "bytes of shared memory",
        About.CODE,
        exactly(1540),
        checks.shared_bytes_0x3,
    ),
    Claim(
        "0x6",
        "0x3: the prefix sum in parallel by Blelloch's scan, a clear gain in performance",
        "time saved, 0x2 -> 0x3, least of three sizes",
        About.DIRECTION,
        clear(),
        least_saving(SIZES),
        both("0x2", "0x3"),
        Setup.PORT,
    ),
)

WARP_SCAN = (
    Claim(
        "0x4",
        "0x3: 2 * log(128) = 14 synchronisations",
        "barriers in the loops of 0x3's listing",
        About.CODE,
        exactly(14),
        checks.blelloch_barriers,
    ),
    Claim(
        "0x4",
        "0x4 needs only 3 __syncthreads()",
        "barriers of the scan in 0x4's listing",
        About.CODE,
        exactly(3),
        checks.two_level_barriers,
    ),
    Claim(
        "0x4",
        "[3, 4, 8, 7, 4, 5, 7, 9] ... [0, 3, 4, 11, 11, 15, 16, 22]",
        "rows of the example that the warp scan produces, of 4",
        About.CODE,
        exactly(4),
        checks.warp_scan_rows,
    ),
    Claim(
        "0x4", "O(log 32) = 5 iterations", "exchanges of 32 lanes", About.CODE, exactly(5), checks.warp_scan_iterations
    ),
    Claim(
        "0x4",
        "the threads of a warp are synchronous by nature",
        "exchanges through shared memory that go wrong without syncwarp",
        About.CODE,
        exactly(0),
        needs="a kernel whose lanes diverge before they exchange data",
    ),
    Claim(
        "0x4",
        "shuffles have a low latency: usually a few clock cycles",
        "cycles of one of many dependent shuffles",
        About.FIGURE,
        at_most(10),
        _shuffle_clocks,
        ("a chain of 1024 shuffles", "a chain of 2048 shuffles"),
    ),
    Claim(
        "0x4",
        "additional cost of warp_sums: 32 * 4 = 128 bytes",
        "bytes of shared memory added",
        About.CODE,
        exactly(128),
        checks.shared_bytes_added,
    ),
    *(
        Claim(
            "0x6",
            "0x4: fewer synchronisations by a warp scan improve the performance further",
            f"time saved, 0x3 -> 0x4, {size}",
            About.DIRECTION,
            faster(size in INTERLEAVED),
            saving,
            both("0x3", "0x4, one scan", (size,)),
            Setup.PORT,
            ONE_SCAN,
        )
        for size in SIZES
    ),
    Claim(
        "0x4",
        "fewer synchronisations bring about 10 % of performance",
        "time saved, 0x3 -> 0x4, least of three sizes",
        About.FIGURE,
        figure(10),
        _two_scans,
        tuple(f"{version}, {size}" for size in SIZES for version in ("0x3", "0x4", "0x4, one scan")),
        Setup.PORT,
        NO_CPP,
    ),
    Claim(
        "0x4",
        "instruction-level parallelism is better",
        "instructions per cycle, 0x4 over 0x3",
        About.DIRECTION,
        at_least(1.02),
        needs="the issue slots of both scans from a profiler",
    ),
    Claim(
        "0x4",
        "suited to num_experts >= 128",
        "time saved, 0x3 -> 0x4, with 128 experts, less that with 64",
        About.DIRECTION,
        faster(),
        needs="0x3 beside 0x4 with fewer than 128 experts and with more",
    ),
)
