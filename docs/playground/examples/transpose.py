# Transpose through shared memory. Press Profile: a column of tile
# lies in one bank, so the 32 lanes of a warp wait for one another.
# Make PITCH 33, and look at the conflicts again.
import numpy as np
from numba import cuda, float32

TILE, ROWS, PITCH = 32, 8, 32


@cuda.jit
def transpose(out, x):
    tile = cuda.shared.array((TILE, PITCH), float32)
    column = cuda.threadIdx.x
    left, top = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
    for row in range(cuda.threadIdx.y, TILE, ROWS):
        tile[row, column] = x[top + row, left + column]
    cuda.syncthreads()
    for row in range(cuda.threadIdx.y, TILE, ROWS):
        out[left + row, top + column] = tile[column, row]


x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
out = np.zeros((32, 64), np.float32)
transpose[(1, 2), (TILE, ROWS)](out, x)
print("right:", (out == x.T).all())
