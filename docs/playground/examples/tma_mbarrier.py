# Hopper: an asynchronous copy brings 512 bytes to shared memory,
# and an mbarrier counts them. All threads wait for its phase.
# Delete the wait: the simulator reports a read that is too early.
import numpy as np
from numba import cuda, float32, uint64

from moe_numba import simulator
from moe_numba.ptx import mbarrier
from moe_numba.ptx.cp_async import bulk_load

N = 128


@cuda.jit
def reverse(out, x):
    tile = cuda.shared.array(N, float32, alignment=16)
    barrier = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier.mbarrier_init(barrier, 0, 1)
        mbarrier.fence_mbarrier_init()
        mbarrier.mbarrier_arrive_expect_tx(barrier, 0, 4 * N)
        bulk_load(tile, 0, x, 0, 4 * N, barrier, 0)
    cuda.syncthreads()
    mbarrier.mbarrier_wait_parity(barrier, 0, 0)
    out[t] = tile[N - 1 - t]


x = cuda.to_device(np.arange(N, dtype=np.float32))
out = np.zeros(N, np.float32)
reverse[1, N](out, simulator.pointer(x))
print(out[:4], "...", out[-4:])
