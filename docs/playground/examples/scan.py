# Inclusive scan (prefix sums) of a block, after Hillis and Steele:
# in each round a thread adds the number 1, 2, 4, ... to its left.
# With two buffers, one barrier per round is enough.
import numpy as np
from numba import cuda, int32

N = 256


@cuda.jit
def scan(out, x):
    buffers = cuda.shared.array((2, N), int32)
    t = cuda.threadIdx.x
    buffers[0, t] = x[t]
    cuda.syncthreads()
    now, step = 0, 1
    while step < N:
        value = buffers[now, t]
        if t >= step:
            value += buffers[now, t - step]
        buffers[1 - now, t] = value
        cuda.syncthreads()
        now, step = 1 - now, 2 * step
    out[t] = buffers[now, t]


x = np.random.default_rng(0).integers(0, 10, N).astype(np.int32)
out = np.zeros_like(x)
scan[1, N](out, x)
print("x:   ", x[:12])
print("scan:", out[:12])
print("right:", (out == np.cumsum(x)).all())
