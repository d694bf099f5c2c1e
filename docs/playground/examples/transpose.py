# Transpose through shared memory. Press Profile: with 32 words in a
# row, a column of tile lies in one bank, and the 32 lanes of a warp
# wait for one another. Make ROW_PITCH 33, and look at the conflicts.
import numpy as np
from numba import cuda, float32

ROW_PITCH = 32


@cuda.jit
def transpose(x, out, row_pitch):
    tile = cuda.shared.array(32 * 33, float32)
    column, row = cuda.threadIdx.x, cuda.threadIdx.y
    tile[row * row_pitch + column] = x[row, column]
    cuda.syncthreads()
    out[row, column] = tile[column * row_pitch + row]


x = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
out = np.zeros_like(x)
transpose[1, (32, 32)](x, out, ROW_PITCH)
print("right:", (out == x.T).all())
