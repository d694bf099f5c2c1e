# Matrix multiplication with tiles in shared memory: a block computes
# 16 x 16 elements, and loads each of its rows and columns once
# instead of 16 times.
import numpy as np
from numba import cuda, float32

TILE = 16


@cuda.jit
def matmul(c, a, b):
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.grid(2)
    total = float32(0)
    for k in range(0, a.shape[1], TILE):
        a_tile[y, x] = a[row, k + x]
        b_tile[y, x] = b[k + y, column]
        cuda.syncthreads()
        for i in range(TILE):
            total += a_tile[y, i] * b_tile[i, x]
        cuda.syncthreads()
    c[row, column] = total


rng = np.random.default_rng(0)
a, b = rng.random((32, 64), np.float32), rng.random((64, 48), np.float32)
c = np.zeros((32, 48), np.float32)
matmul[(3, 2), (TILE, TILE)](c, a, b)
print("right:", np.allclose(c, a @ b, rtol=1e-5))
