# Each block waits for the other one's flag before it sets its own.
# A GPU hangs. The simulator says which thread polls what.
# Fix it: let each block set its own flag first.
import numpy as np
from numba import cuda


@cuda.jit
def meet(flags):
    me = cuda.blockIdx.x
    other = 1 - me
    while cuda.atomic.add(flags, other, 0) == 0:
        pass
    cuda.atomic.add(flags, me, 1)


flags = np.zeros(2, np.int32)
meet[2, 1](flags)
print(flags)
