"""Wrong answers to the exercises of the notebook on block scales and 4-bit weights."""


def same_for_both(n, x_is_rows):
    return n // 4


def one_scale_of_x(n, x_is_rows):
    return 1 + n // 64 if x_is_rows else n // 4


def nothing_shared(rows, columns, ctas):
    return 128 * (rows + columns) / (rows * columns)


def everything_shared(rows, columns, ctas):
    return 128 * (rows + columns) / ctas / (rows * columns)


def without_signs(byte):
    return (byte & 0x07) << 6 | (byte & 0x70) << 18


def halves_exchanged(byte):
    return (byte & 0x80) << 8 | (byte & 0x70) << 2 | (byte & 0x08) << 28 | (byte & 0x07) << 22


def rows_of_bytes(row, column):
    return row * 2 + column // 32, column // 2 % 16, column % 2


def rows_exchanged(row, column):
    thread = 32 * (row // 16) + 4 * (row % 8) + column % 8 // 2
    return thread, 4 * (column // 16) + 2 * (row // 8 % 2) + column // 8 % 2, column % 2


WRONG = [
    ("grouped_gemm_scales-1", same_for_both, "n = 64 and rows of x as rows you find 16 scales; a thread needs 3"),
    ("grouped_gemm_scales-1", one_scale_of_x, "you find 2 scales"),
    ("grouped_gemm_scales-2", nothing_shared, "2 CTAs per cluster .* 128 rows of x and 96 rows of weight"),
    ("grouped_gemm_scales-2", everything_shared, "2 CTAs per cluster"),
    ("grouped_gemm_scales-4", without_signs, "byte 0x08 becomes 0x00000000; the two bfloat16 are 0x00008000"),
    ("grouped_gemm_scales-4", halves_exchanged, "byte 0x01 becomes 0x00400000"),
    ("grouped_gemm_scales-3", rows_of_bytes, r"row 0, column 2 is not in .*\(0, 1, 0\): the thread is 1"),
    ("grouped_gemm_scales-3", rows_exchanged, "row 0, column 8 is not in .*: the thread is right"),
]
