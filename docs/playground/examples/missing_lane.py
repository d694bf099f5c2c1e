# A shuffle in a divergent `if`: its mask names all 32 lanes, but
# 12 never come, so on a GPU the result is undefined.
# Fix it: shuffle first, then branch.
import numpy as np
from numba import cuda


@cuda.jit
def differences(out, x):
    t = cuda.threadIdx.x
    if t < 20:
        out[t] = cuda.shfl_down_sync(0xFFFFFFFF, x[t], 1) - x[t]
    cuda.syncwarp()
    if t == 31:
        out[t] = out[0]


x = np.arange(32, dtype=np.int32) ** 2
out = np.zeros_like(x)
differences[1, 32](out, x)
print(out)
