# Count the rows whose sum is above zero. Press Profile: which line
# costs most? Multiply what a request costs by how often it runs.
import numpy as np
from numba import cuda, float32


@cuda.jit
def count_rows(x, count):
    sums = cuda.shared.array(256 * 32, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for column in range(64):
        total += x[t, column]
    sums[32 * t] = total
    cuda.syncthreads()
    if sums[32 * t] > 0:
        cuda.atomic.add(count, 0, 1)


x = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
count = np.zeros(1, np.int32)
count_rows[1, 256](x, count)
print("right:", count[0] == (x.sum(1) > 0).sum())
