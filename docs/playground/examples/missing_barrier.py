# Reverse 64 numbers through shared memory. A thread reads what
# another one may not have written yet.
# Fix it: cuda.syncthreads() between the two accesses to tile.
import numpy as np
from numba import cuda, int32


@cuda.jit
def reverse(out, x):
    tile = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    out[t] = tile[63 - t]


x = np.arange(64, dtype=np.int32)
out = np.zeros_like(x)
reverse[1, 64](out, x)
print(out)
