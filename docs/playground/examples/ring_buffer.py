# Two GPUs: rank 0 sends 12 numbers to rank 1 through 4 slots.
# The sender moves `tail` after it has written a slot,
# the receiver moves `head` after it has read one.
# Make a store relaxed (st_relaxed_sys_s32): the slots race.
import numpy as np
from numba import cuda

from moe_numba import simulator
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32

SLOTS, ITEMS = 4, 12


@cuda.jit
def send(ring, head, tail):
    for i in range(ITEMS):
        while i - ld_acquire_sys_s32(head, 0) == SLOTS:
            pass  # the ring is full
        ring[i % SLOTS] = 100 + i
        st_release_sys_s32(tail, 0, i + 1)


@cuda.jit
def receive(out, ring, head, tail):
    for i in range(ITEMS):
        while ld_acquire_sys_s32(tail, 0) == i:
            pass  # the ring is empty
        out[i] = ring[i % SLOTS]
        st_release_sys_s32(head, 0, i + 1)


ring, out = np.zeros(SLOTS, np.int32), np.zeros(ITEMS, np.int32)
head, tail = (simulator.pointer(np.zeros(1, np.int32)) for _ in range(2))
with simulator.together():  # run both kernels at the same time
    with simulator.on_rank(0):
        send[1, 1](ring, head, tail)
    with simulator.on_rank(1):
        receive[1, 1](out, ring, head, tail)
print("received:", out)
