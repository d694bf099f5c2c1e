# The largest of 32 numbers by five shuffles: after each, a lane
# knows the largest of twice as many. All lanes know it at the end.
import numpy as np
from numba import cuda


@cuda.jit
def warp_max(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    for k in range(5):
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << k))
    out[lane] = value


x = (np.arange(32) * 7 % 32).astype(np.int32)
out = np.zeros_like(x)
warp_max[1, 32](x, out)
print("largest:", out[0], "right:", (out == 31).all())
