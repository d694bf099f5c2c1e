"""The lesson's own answers to the exercises of "4-bit weights"; the page goes on with them."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.w4_weights.runs import load_rows, mma


def place_of(row, column):
    thread = 32 * (row // 16) + 4 * (row % 8) + column % 8 // 2
    register = 2 * (column // 8 % 2) + row // 8 % 2
    return thread, column // 16, 16 * (column % 2) + 4 * register


@cuda.jit(device=True)
def decode_word(word):
    sign, rest = uint32(0x80008000), uint32(0x01C001C0)
    return (
        uint32((word << uint32(12)) & sign | (word << uint32(6)) & rest),
        uint32((word << uint32(8)) & sign | (word << uint32(2)) & rest),
        uint32((word << uint32(4)) & sign | (word >> uint32(2)) & rest),
        uint32(word & sign | (word >> uint32(6)) & rest),
    )


@cuda.jit(device=True)
def multiply_by_warp(acc, a, smem, at):
    lane = int32(cuda.threadIdx.x & 31)
    row = int32(lane & 7)
    first = int32(at + 128 * row + ((lane >> 3 ^ row) << 4))
    b, c = load_rows(smem, first), load_rows(smem, int32(first ^ 64))
    acc = mma(acc, a[0:4], b[0:2])
    acc = mma(acc, a[4:8], b[2:4])
    acc = mma(acc, a[8:12], c[0:2])
    return mma(acc, a[12:16], c[2:4])
