"""Exercises of the notebook on block scales and 4-bit weights."""

from itertools import product

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import function_test

# 1: scales of a thread


def scales_of_thread(n, x_is_rows):
    return 2 + n // 64 if x_is_rows else n // 4


# 2: bytes from L2


def bytes_from_l2(rows, columns, ctas):
    return 128 * (rows + columns / ctas) / (rows * columns)


# 3: the place of a code in the order of fragments


def place_of(row, column):
    thread = 32 * (row // 16) + 4 * (row % 8) + column % 8 // 2
    byte = 4 * (column // 16) + 2 * (column // 8 % 2) + row // 8 % 2
    return thread, byte, column % 2


# 4: two codes become a register


def decode_two(byte):
    first = (byte & 0x08) << 12 | (byte & 0x07) << 6
    second = (byte & 0x80) << 24 | (byte & 0x70) << 18
    return first | second


EXERCISES = {
    1: Exercise(
        "a function of the n of wgmma and of whether rows of x are its rows",
        function_test(scales_of_thread, list(product((64, 128, 192, 256), (False, True)))),
        "A thread has two rows and n / 4 columns of the accumulators. 128 rows of weight share a scale; the kernel "
        "loads one for each 64 columns of a tile.",
        scales_of_thread,
    ),
    2: Exercise(
        "a function of the rows and columns of a tile, and of the CTAs that share its weights",
        function_test(bytes_from_l2, [(128, 128, 1), (128, 192, 1), (128, 192, 2), (64, 256, 2)], rtol=1e-3),
        "For 128 elements of k, which are 128 bytes, a CTA loads its rows of x and its share of the tile's rows of "
        "weight. Divide by the elements of the tile.",
        bytes_from_l2,
    ),
    3: Exercise(
        "a function of the row and the column, both 0 to 63, that returns thread, byte and half (0 is low)",
        function_test(place_of, list(product(range(64), repeat=2))),
        "The register 4 s + 2 h + r of lane l in warp w has the columns 16 s + 8 h + 2 (l % 4) and the next one of row "
        "16 w + l // 4 + 8 r. Byte b of a thread is its register b.",
        place_of,
    ),
    4: Exercise(
        "a function of a byte with two codes, the first in the low half, that returns a 32-bit integer",
        function_test(decode_two, [(byte,) for byte in range(256)]),
        "In each half of the register the sign is bit 15, and the other three bits are bits 8 to 6.",
        decode_two,
    ),
}
