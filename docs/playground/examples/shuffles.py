# The 32 threads of a warp add their numbers without memory:
# each reads the sum of the lane that is `step` further on.
import numpy as np
from numba import cuda, float32


@cuda.jit
def warp_sums(sums, x):
    i = cuda.grid(1)
    v = x[i] if i < x.size else float32(0)
    step = 16
    while step > 0:
        v += cuda.shfl_down_sync(0xFFFFFFFF, v, step)
        step //= 2
    if cuda.laneid == 0:
        sums[i // 32] = v


x = np.arange(1000, dtype=np.float32)
sums = np.zeros(32, np.float32)
warp_sums[8, 128](sums, x)
print("sums of 32:", sums[:4], "...")
print("right:", sums.sum() == x.sum())
