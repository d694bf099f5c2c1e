"""What the article on hpc-ops' grouped GEMM and its use of TMA claims."""

from moe_numba.course.articles.claims import hpc_ops_checks as checks
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.scheduler import select_tile_m
from moe_numba.course.verdicts import (
    TOLERANCE,
    About,
    Article,
    Claim,
    Found,
    Setup,
    at_least,
    at_most,
    exactly,
    faster,
    least_saving,
    saving,
)

SIZES = ("2048 rows", "32 rows", "8192 rows")
INTERLEAVED = SIZES[:1]  # notebook 06 times the other sizes, and 16 tokens, step by step
AVERAGES = {"2048 rows": 64, "32 rows": 1, "8192 rows": 256}  # per group, of 32
TILES = (8, 16, 32, 48, 64, 96, 128)
STEPS_TILE = 64  # kTileM of the steps "tensor map per group" and "vertical scheduler"
WHY, OVERVIEW, PSEUDOCODE, WHY_MAPS, FOR_W = (
    "why group GEMM",
    "overview",
    "pseudocode",
    "why update_grouped_tma",
    "TMA for W",
)


def _pairs(old, new, sizes=SIZES):
    return tuple(f"{step}, {size}" for size in sizes for step in (old, new))


def _beside_torch(size):
    """Return the lookups of torch's loop and of the port with the kTileM that hpc-ops chooses."""
    tile = select_tile_m(AVERAGES[size])
    return f"torch, {size}", f"vertical scheduler, {size}" if tile == STEPS_TILE else f"kTileM {tile}, {size}"


def _chosen_tile(average):
    """Make a measure of the times of all tiles: the chosen one's beside the fastest's."""

    def measure(*times):
        own = dict(zip(TILES, times, strict=True))
        chosen, best = select_tile_m(average), min(own, key=own.get)
        others = f"of {', '.join(map(str, TILES))} the fastest is {best}, {own[best]:.4g} us"
        return Found(own[chosen] / own[best], f"{chosen} takes {own[chosen]:.4g} us; {others}")

    return measure


def _one_map(maps, one):
    return Found(1, f"one map for all groups, with any first row, is right too: {maps:.4g} -> {one:.4g} us (2048 rows)")


def _without_wait(took):
    return Found(0, f"the port waits for nothing, and its results were right when it was timed ({took:.4g} us)")


GROUPED = (
    Claim(
        "introduction",
        "hands-on examples of building SOTA kernels in just hundreds of lines",
        "time of the fastest other kernel over that of hpc-ops",
        About.DIRECTION,
        at_least(1 - TOLERANCE),
        lookups=("hpc-ops",),
        needs="hpc-ops compiled and timed on an H200 beside torch and DeepGEMM",
    ),
    Claim(
        "what is a group GEMM",
        "torch._scaled_mm(..., scale_a=scale, scale_b=scale)",
        "times that the scale is applied; once in the kernel's pseudocode",
        About.CODE,
        exactly(1),
        checks.scale_of_the_loop,
    ),
    Claim(
        WHY,
        "each expert needs a kernel launch of its own",
        "GEMMs per group with tokens",
        About.CODE,
        exactly(1),
        checks.gemms_of_the_loop,
    ),
    *(
        Claim(
            WHY,
            "so the advantage of a group GEMM is evident: one launch and an efficient pipeline of memory accesses",
            f"time saved beside torch's loop, {size} in 32 groups, kTileM {select_tile_m(average)}",
            About.DIRECTION,
            faster(size in INTERLEAVED),
            saving,
            _beside_torch(size),
            Setup.PORT,
        )
        for size, average in AVERAGES.items()
    ),
    Claim(
        WHY,
        "while the last data of a group are computed, those of the next can be prefetched; single kernels cannot",
        "time saved by the pipeline that runs on across groups",
        About.DIRECTION,
        faster(),
        needs="the port with a pipeline that drains at the end of each group, beside the port",
    ),
    Claim(
        WHY,
        "the results of the groups need not be concatenated, which reduces reads and writes",
        "copies in torch's loop",
        About.CODE,
        at_least(1),
        checks.copies_of_the_loop,
    ),
)

TILING = (
    *(
        Claim(
            OVERVIEW,
            "the choice of kTileM makes sure that the hardware is used well for different distributions of lengths",
            f"time of kTileM {select_tile_m(average)} over that of the fastest; average {average}",
            About.DIRECTION,
            at_most(1 + TOLERANCE),
            _chosen_tile(average),
            tuple(f"kTileM {tile}, {size}" for tile in TILES),
            Setup.PORT,
        )
        for size, average in AVERAGES.items()
    ),
    Claim(
        OVERVIEW,
        "this transposition makes the granularity of the M dimension very fine",
        "of its four kTileM those that wgmma takes",
        About.CODE,
        exactly(4),
        checks.tiles_as_n,
    ),
    Claim(
        OVERVIEW,
        "very friendly to small M",
        "time saved by the transposition, one group of 16 rows",
        About.DIRECTION,
        faster(interleaved=False),
        saving,
        ("16 tokens, not transposed", "16 tokens, transposed"),
        Setup.PORT,
    ),
    Claim(
        OVERVIEW,
        "vertical mode (large matrices, by binary search)",
        "time saved beside horizontal mode, n 4096, k 7168, least of three sizes",
        About.DIRECTION,
        faster(interleaved=False),
        least_saving(SIZES),
        _pairs("tensor map per group", "vertical scheduler"),
        Setup.PORT,
    ),
    Claim(
        OVERVIEW,
        "horizontal mode (small matrices, by linear scan)",
        "time saved beside vertical mode, n or k up to 1024",
        About.DIRECTION,
        faster(),
        needs="both schedulers with n or k up to 1024",
    ),
    Claim(
        PSEUDOCODE,
        "int phase = 0; wait_barrier(writable[s_write], phase)",
        "whether the producer passes a new barrier",
        About.CODE,
        exactly(1),
        checks.new_barrier_passes_phase_0,
    ),
    Claim(
        PSEUDOCODE,
        "tma_copy(...); tma_copy(...); set_barrier_transaction_bytes(readable[s_write], ...)",
        "loads that go wrong in this order",
        About.CODE,
        exactly(0),
        checks.bytes_after_the_copy,
    ),
)

MAPS = (
    Claim(
        WHY_MAPS,
        "so there are two options: pad the data to the copy box, or give each group a TMA descriptor of its own",
        "further ways that work",
        About.CODE,
        exactly(0),
        _one_map,
        ("kTileM by the average, 2048 rows", "one tensor map for X, 2048 rows"),
        Setup.OTHER,
        "coordinates given to TMA directly; the article speaks of CuTe's TiledCopy",
    ),
    Claim(
        OVERVIEW,
        "a TMA descriptor for each group, for an efficient transfer of data",
        "time saved beside padding with its copies, least of three sizes",
        About.DIRECTION,
        faster(interleaved=False),
        least_saving(SIZES),
        _pairs("padding, one tensor map", "tensor map per group"),
        Setup.PORT,
    ),
    Claim(
        FOR_W,
        "the range is given by the first two of three coordinates and the box's dimensions",
        "loads of a box of one group that bring anything else",
        About.CODE,
        exactly(0),
        checks.flat_box,
    ),
    Claim(
        FOR_W,
        "slayout's dimensions 0 and 1 belong to dimensions 0 and 1 of gmem",
        "loads of a box along num_group and n that bring anything else",
        About.CODE,
        exactly(0),
        checks.box_of_two_groups,
    ),
    Claim(
        FOR_W,
        "with gmem (num_group, n, k) and the same slayout the copy box would go along num_group and n",
        "such boxes that TMA takes",
        About.CODE,
        exactly(1),
        checks.box_in_the_other_order,
    ),
    Claim(
        "BlockScan",
        "[a, b, c, d] -> [0, a, a+b, a+b+c], block_aggregate a+b+c+d",
        "wrong results",
        About.CODE,
        exactly(0),
        checks.exclusive_scan,
        (),
        Setup.PORT,
    ),
    Claim(
        "TMA descriptor update",
        "X (k, 1), Y (1, n): k and n are fixed, the same for all groups",
        "pairs of strides",
        About.CODE,
        exactly(1),
        checks.strides_of_groups,
    ),
    Claim(
        "update_tma_gtensor",
        "this PTX requires its operand in shared memory, so smem must be used",
        "other forms that compile",
        About.CODE,
        exactly(0),
        checks.replace_in_global_memory,
        needs="a compiler for sm_90a",
    ),
    Claim(
        "tma_desc_commit_group",
        "a fence must guarantee the order, and commit & wait are a good choice",
        "wrong results without commit and wait",
        About.CODE,
        at_least(1),
        _without_wait,
        ("tensor map per group, 2048 rows",),
        Setup.PORT,
    ),
    Claim(
        "tma_desc_commit_group",
        "update_tma_tensor is a modification of smem that the async proxy performs",
        "errors that a fence between the proxies prevents",
        About.CODE,
        at_least(1),
        needs="a litmus test of tensormap.replace and the copy that follows it, with and without the fence",
    ),
    Claim(
        "tma_desc_commit_group",
        "only one thread waits, but the other threads of the warp cannot run ahead, they wait too",
        "lanes that pass a wait of another lane",
        About.CODE,
        exactly(0),
        needs="a kernel whose other lanes record whether they have passed a wait of one lane",
    ),
    Claim(
        "tma_descriptor_cp_fence_release",
        "is tma_store_fence an acquire or a release? I think both",
        "directions in which it orders accesses",
        About.CODE,
        exactly(2),
        needs="a litmus test of each direction",
    ),
    Claim(
        "tma_descriptor_cp_fence_release",
        "acquire: ensure subsequent reads see the complete descriptor",
        "refused loads without the acquire",
        About.CODE,
        at_least(1),
        checks.load_without_acquire,
        (),
        Setup.PORT,
    ),
)

ARTICLE = Article(
    "hpc-ops",
    "CUTLASS CuTe 7: group GEMM and TMA in hpc-ops",
    "the FP8 grouped GEMM of Tencent's hpc-ops, and its TMA descriptors",
    "https://github.com/Tencent/hpc-ops",
    ("05_hopper_from_numba", "06_grouped_gemm"),
    GROUPED + TILING + MAPS,
)
