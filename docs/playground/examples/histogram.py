# A histogram with atomics: each block counts in shared memory,
# then adds its counts to those in global memory.
# Press Profile: how many lanes update the same bin at once?
import numpy as np
from numba import cuda, int32

BINS = 16


@cuda.jit
def histogram(counts, x):
    bins = cuda.shared.array(BINS, int32)
    t = cuda.threadIdx.x
    if t < BINS:
        bins[t] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(bins, x[i], 1)
    cuda.syncthreads()
    if t < BINS:
        cuda.atomic.add(counts, t, bins[t])


rng = np.random.default_rng(0)
x = np.minimum(rng.geometric(0.3, 2000), BINS - 1).astype(np.int32)
counts = np.zeros(BINS, np.int32)
histogram[4, 128](counts, x)
for value, n in enumerate(counts):
    print(f"{value:3} {n:4} {'#' * (n // 10)}")
print("right:", (counts == np.bincount(x, minlength=BINS)).all())
