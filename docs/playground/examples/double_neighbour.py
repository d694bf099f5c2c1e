# A race in spite of a barrier: a thread may store to tile[i] before
# the thread below has read it. Which barrier is missing, and where?
import numpy as np
from numba import cuda, float32


@cuda.jit
def double_neighbour(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    tile[i] = tile[(i + 1) % 64] * float32(2)  # the previous thread may not have read tile[i] yet
    cuda.syncthreads()
    out[i] = tile[i]


x = np.arange(64, dtype=np.float32)
out = np.zeros_like(x)
double_neighbour[1, 64](x, out)
print("right:", (out == 2 * np.roll(x, -1)).all())
