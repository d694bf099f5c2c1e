# Count values in shared memory. The result is right - today.
# On a GPU two threads read the same count: an increment is lost.
# With Races off you see the result, with Races on the error.
# Fix it: cuda.atomic.add(bins, x[i], 1)
import numpy as np
from numba import cuda, int32


@cuda.jit
def histogram(counts, x):
    bins = cuda.shared.array(8, int32)
    t = cuda.threadIdx.x
    if t < 8:
        bins[t] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    bins[x[i]] += 1
    cuda.syncthreads()
    if t < 8:
        cuda.atomic.add(counts, t, bins[t])


x = np.random.default_rng(0).integers(0, 8, 256).astype(np.int32)
counts = np.zeros(8, np.int32)
histogram[2, 128](counts, x)
print("counted: ", counts)
print("expected:", np.bincount(x, minlength=8))
