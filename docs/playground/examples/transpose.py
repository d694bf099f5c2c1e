# Transpose through shared memory. Press Profile:
# the column of tile lies in one bank, so 32 lanes wait for one another.
# Make PITCH 33, and look at the conflicts again.
import numpy as np
from numba import cuda, float32

TILE, PITCH = 32, 32


@cuda.jit
def transpose(out, x):
    tile = cuda.shared.array((TILE, PITCH), float32)
    column, row = cuda.threadIdx.x, cuda.threadIdx.y
    left, top = cuda.blockIdx.x * TILE, cuda.blockIdx.y * TILE
    tile[row, column] = x[top + row, left + column]
    cuda.syncthreads()
    out[left + row, top + column] = tile[column, row]


x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
out = np.zeros((32, 64), np.float32)
transpose[(1, 2), (TILE, TILE)](out, x)
print("right:", (out == x.T).all())
