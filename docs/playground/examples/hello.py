# Hello, GPU: 8 blocks of 128 threads, one element each.
# Change a number and press Run (Ctrl+Enter).
import numpy as np
from numba import cuda


@cuda.jit
def add_one(x):
    i = cuda.grid(1)  # number of this thread in the whole grid
    if i < x.size:
        x[i] += 1


x = np.arange(1000, dtype=np.float32)
add_one[8, 128](x)

print("first:", x[:5])
print("right:", (x == np.arange(1, 1001)).all())
