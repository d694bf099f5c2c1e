# Hello, GPU: 8 blocks of 128 threads, one element each.
# Change a number and press Run (Ctrl+Enter).
import numpy as np
from numba import cuda, float32


@cuda.jit
def add_one(x, y):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x  # cuda.grid(1) is short for this
    if i < len(x):
        y[i] = x[i] + float32(1)


x = np.arange(1000, dtype=np.float32)
y = np.zeros_like(x)
add_one[8, 128](x, y)

print("first:", y[:5])
print("right:", (y == x + 1).all())
