# Two copies of a matrix. Press Profile, and compare the sectors of
# a load: by rows the lanes of a warp touch 32, by elements 4.
import numpy as np
from numba import cuda

ROWS, COLUMNS = 64, 32


@cuda.jit
def copy_rows(x, y, rows):
    row = cuda.grid(1)
    if row < rows:
        for column in range(COLUMNS):
            y[row * COLUMNS + column] = x[row * COLUMNS + column]


@cuda.jit
def copy_elements(x, y, rows):
    i = cuda.grid(1)
    if i < rows * COLUMNS:
        y[i] = x[i]


x = np.arange(ROWS * COLUMNS, dtype=np.float32)
by_rows, by_elements = np.zeros_like(x), np.zeros_like(x)
copy_rows[1, ROWS](x, by_rows, ROWS)
copy_elements[ROWS * COLUMNS // 256, 256](x, by_elements, ROWS)
print("right:", (by_rows == x).all() and (by_elements == x).all())
