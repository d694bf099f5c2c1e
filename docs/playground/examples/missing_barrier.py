# Reverse 64 numbers through shared memory. The barrier between the
# store and the load is missing. Put cuda.syncthreads() there.
import numpy as np
from numba import cuda, float32


@cuda.jit
def reverse(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    out[i] = tile[63 - i]


x = np.arange(64, dtype=np.float32)
out = np.zeros_like(x)
reverse[1, 64](x, out)
print("right:", (out == x[::-1]).all())
