# Count the positive numbers of x. There are two mistakes: which
# threads have no number, and what happens if two add at once?
import numpy as np
from numba import cuda


@cuda.jit
def count_positive(x, count):
    i = cuda.grid(1)
    if x[i] > 0:
        count[0] = count[0] + 1


x = np.arange(250, dtype=np.float32) % 3 - 1
count = np.zeros(1, np.int32)
count_positive[4, 64](x, count)
print("counted", count[0], "right:", count[0] == (x > 0).sum())
