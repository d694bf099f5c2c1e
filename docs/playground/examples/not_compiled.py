# A plain Python function cannot be called in a kernel.
# The simulator could run it, a GPU could not: so it refuses.
# Fix it: write @cuda.jit(device=True) above `def square`.
import numpy as np
from numba import cuda


def square(v):
    return v * v


@cuda.jit
def squares(x):
    i = cuda.grid(1)
    x[i] = square(x[i])


x = np.arange(64, dtype=np.float32)
squares[1, 64](x)
print(x[:5])
