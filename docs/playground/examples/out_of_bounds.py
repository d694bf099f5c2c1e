# 8 blocks of 128 threads are 1,024, but x has 1,000 elements.
# A GPU writes behind the array, and nothing tells you.
# Fix it: if i < x.size.
import numpy as np
from numba import cuda


@cuda.jit
def add_one(x):
    i = cuda.grid(1)
    x[i] += 1


x = np.zeros(1000, np.float32)
add_one[8, 128](x)
print("right:", (x == 1).all())
