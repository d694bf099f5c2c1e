# All threads of a block must reach the same barrier. Here threads
# below n wait at the first one, and the others at the second.
# Fix it: take the first cuda.syncthreads() out of the `if`.
import numpy as np
from numba import cuda, float32


@cuda.jit
def shift(out, x, n):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    if t < n:
        tile[t] = x[t]
        cuda.syncthreads()
        out[t] = tile[(t + 1) % n]
    cuda.syncthreads()
    if t == 0:
        out[n] = -1


x = np.arange(100, dtype=np.float32)
out = np.zeros(101, np.float32)
shift[1, 128](out, x, 100)
print(out)
