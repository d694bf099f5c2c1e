"""Wrong answers to the exercises of notebook 06: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.lessons.grouped_gemm.exercises import fewest_stages, in_bands, one_token, scale_groups
from moe_numba.ptx.warp import FULL_MASK
from wrong_answers import changed

# 1: the stub, two changes of the solution
ALL_LANES = """        for r in range(5):
            total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << r)
        own = total if lane == i else own
    y[first + lane] = own
"""
ONE_LANE = "        if lane == 0:\n            y[first + i] = total\n"
LANES = "range(lane, k, 32)"
token_stub = changed(
    one_token,
    ("    own = float32(0)\n    for i in range(32):\n        total", "    total"),
    (f"        for j in {LANES}:\n            total", "    for j in range(k):\n        total"),
    ("weight[first + i, j]", "weight[first + lane, j]"),
    (ALL_LANES, "    y[first + lane] = total\n"),
)
not_summed = changed(one_token, (ALL_LANES, ONE_LANE))
consecutive_parts = changed(one_token, (LANES, "range(lane * k // 32, (lane + 1) * k // 32)"))
same_elements = changed(one_token, (LANES, "range(k)"))
two_rounds = changed(
    one_token,
    (
        f"for j in {LANES}:\n            total += x[j] * weight[first + i, j]",
        "for j in (lane, lane + 32):\n            total += x[j] * weight[first + i, j]",
    ),
)


@cuda.jit
def swapped_indices(x, weight, y, k):
    lane, first = int32(cuda.threadIdx.x), int32(32 * cuda.blockIdx.x)
    total = float32(0)
    for j in range(k):
        total += x[j] * weight[j, first + lane]
    y[first + lane] = total


@cuda.jit
def pairs_of_elements(x, weight, y, k):
    xs = cuda.shared.array(128, float32)
    lane, first = int32(cuda.threadIdx.x), int32(32 * cuda.blockIdx.x)
    for j in range(lane, k, 32):
        xs[j] = x[j]
    cuda.syncthreads()
    for i in range(32):
        total = float32(0)
        for j in range(2 * lane, k, 64):
            total += xs[j] * weight[first + i, j] + xs[j + 1] * weight[first + i, j + 1]
        for r in range(5):
            total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << r)
        if lane == i:
            y[first + i] = total


# 3: the stub has both of the first two mistakes
WHOLE_TILES = "(seqlens[g] + 3) // 4", "seqlens[g] // 4"
CLIPPED_BY_MATRIX = "if row < seqlens[g]", "if first + row < x.shape[0]"
groups_stub = changed(scale_groups, WHOLE_TILES, CLIPPED_BY_MATRIX)
whole_tiles = changed(scale_groups, WHOLE_TILES)
clipped_by_matrix = changed(scale_groups, CLIPPED_BY_MATRIX)
not_clipped = changed(scale_groups, ("if row < seqlens[g]", "if True"))
one_scale = changed(scale_groups, ("y_scale[g]", "y_scale[0]"))
not_added = changed(scale_groups, ("] += x", "] = x"))
float_tiles = changed(scale_groups, ("(seqlens[g] + 3) // 4", "(seqlens[g] + 3) / 4"))
padded_groups = changed(scale_groups, ("first += seqlens[g]", "first += 4 * tiles"))
every_tile = changed(scale_groups, ("tile += cuda.gridDim.x", "tile += 1"))


def vertical(tile, m_tiles, n_tiles):
    n, m = divmod(tile, m_tiles)
    return m, n


def bands_of_eight(tile, m_tiles, n_tiles):
    band, tile = divmod(tile, 8 * n_tiles)
    n, m = divmod(tile, 8)
    return 8 * band + m, n


def last_band_always(tile, m_tiles, n_tiles):
    band, tile = divmod(tile, 8 * n_tiles)
    n, m = divmod(tile, min(8, m_tiles % 8))
    return 8 * band + m, n


def rows_first(tile, m_tiles, n_tiles):
    band, tile = divmod(tile, 8 * n_tiles)
    m, n = divmod(tile, n_tiles)
    return 8 * band + m, n


WRONG = [
    ("grouped_gemm-1", token_stub, "the result is right, but 384 load requests touch 6336 sectors .* weight has 768"),
    ("grouped_gemm-1", consecutive_parts, "the result is right, but 384 load requests touch"),
    ("grouped_gemm-1", not_summed, r"n = 32, k = 32: y\[0\] is \d+, not \d+; \d+ of 32 are wrong"),
    ("grouped_gemm-1", same_elements, r"y\[0\] is \d+, not \d+; \d+ of 32 are wrong"),
    ("grouped_gemm-1", swapped_indices, r"n = 32, k = 32: y\[0\] is \d+, not \d+; \d+ of 32 are wrong"),
    ("grouped_gemm-1", two_rounds, "an index is out of bounds: .*in the line"),
    (
        "grouped_gemm-1",
        pairs_of_elements,
        "the result is right, but the loads in the line .* touch 6 sectors .*, not 4",
    ),
    ("grouped_gemm-2", lambda latency, iteration: ..., "not answered yet"),
    (
        "grouped_gemm-2",
        lambda latency, iteration: -(-latency // iteration),
        "latency 1400, 512 clocks per iteration: with 3 stages a copy has 2 iterations, 1024 clocks, to arrive",
    ),
    (
        "grouped_gemm-2",
        lambda latency, iteration: 1 + round(latency / iteration),
        "1300, .* with 5 stages .* 1200 clocks",
    ),
    ("grouped_gemm-2", lambda latency, iteration: 1 + latency / iteration, "3.734375 is no integer"),
    ("grouped_gemm-2", lambda latency, iteration: 2 + latency // iteration, "4 stages hide the latency, but so do 3"),
    ("grouped_gemm-2", lambda *times: fewest_stages(*times) + 1, "5 stages hide the latency, but so do 4"),
    ("grouped_gemm-3", groups_stub, r"seqlens \[5, 0, 9, 3\]: row 4 of y, in group 0, was 0.5 and is 0.5, not 5.5"),
    ("grouped_gemm-3", whole_tiles, "row 4 of y, in group 0, was 0.5 and is 0.5, not 5.5"),
    ("grouped_gemm-3", clipped_by_matrix, "two tiles update the same row of y .DataRace"),
    ("grouped_gemm-3", not_clipped, "two tiles update the same row of y|an index is out of bounds"),
    ("grouped_gemm-3", one_scale, "row 5 of y, in group 2, was 0.5 and is 6.5, not 600.5"),
    ("grouped_gemm-3", not_added, "row 0 of y, in group 0, was 0.5 and is 1, not 1.5"),
    ("grouped_gemm-3", float_tiles, r"index \d+\.0 of y .* is no integer.* in the line"),
    ("grouped_gemm-3", padded_groups, "an index is out of bounds: .* in the line `y.first"),
    ("grouped_gemm-3", every_tile, "two tiles update the same row of y .DataRace"),
    ("grouped_gemm-4", lambda tile, m_tiles, n_tiles: ..., "not answered yet"),
    ("grouped_gemm-4", lambda tile, m_tiles, n_tiles: tile, "tile 0 becomes 0; return a pair"),
    ("grouped_gemm-4", vertical, r"m_tiles 16, n_tiles 4: tile 8 becomes \(m, n\) = \(8, 0\), not \(0, 1\)"),
    ("grouped_gemm-4", bands_of_eight, r"m_tiles 19, n_tiles 5: .* = \(19, 0\), which does not exist"),
    ("grouped_gemm-4", last_band_always, "^ZeroDivisionError: .*; in the line `n, m = divmod.tile, min.8, m_tiles % 8"),
    ("grouped_gemm-4", rows_first, r"m_tiles 8, n_tiles 3: tile 1 becomes \(m, n\) = \(0, 1\), not \(1, 0\)"),
    ("grouped_gemm-4", lambda *given: (0, 0), r"m_tiles 8, n_tiles 3: tiles 0 and 1 both become \(m, n\) = \(0, 0\)"),
    ("grouped_gemm-4", lambda *given: in_bands(*given)[::-1], "which does not exist|not"),
]
