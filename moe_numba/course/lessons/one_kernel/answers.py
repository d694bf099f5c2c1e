"""The lesson's own answers to the exercises of "One kernel"; the page continues with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.lessons.one_kernel.tile import row_tiles, wait_for


@cuda.jit(device=True)
def place_of(counts, at, ranks, experts, source, g):
    place = int32(0)
    for e in range(g // experts * experts, g + 1):
        for s in range(ranks if e < g else source):
            place = int32(place + counts[at + s * ranks * experts + e])
    return place


@cuda.jit(device=True)
def wait_for_expert(done, lengths, e, experts, counts_of_a_tile):
    wait_for(done, e, row_tiles(lengths[e]) * counts_of_a_tile)


@cuda.jit(device=True)
def descending(n, begin, end, cta, ctas):
    return int32(end - 1 - cta - n * ctas)
