"""The lesson's own answers to its exercises, and the kernels of the page that they are filled into."""

from math import ceil
from typing import Any, NamedTuple

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.talk_to_a_peer.sizes import DATA, FLAG, HEAD, RING, TAIL, WORD_SLOTS
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    poll_acquire_cta_shared_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address, st_na_s32x4

# The first stores


@cuda.jit
def tell_everyone(peers, local, rank, ranks, value):
    thread = int32(cuda.threadIdx.x)
    if thread < ranks:
        theirs = pointer_from_address(peers[thread], local)
        theirs[rank] = value


# A message


@cuda.jit(device=True)
def publish(there, number):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        st_release_sys_s32(there, FLAG, number)


@cuda.jit(device=True)
def observe(here, number):
    if cuda.threadIdx.x == 0:
        while ld_acquire_sys_s32(here, FLAG) < number:
            pass
    cuda.syncthreads()


@factory
def make_message(publish, observe):
    @cuda.jit
    def message(peers, local, x, out, to, number):
        thread = int32(cuda.threadIdx.x)
        there = pointer_from_address(peers[to], local)
        there[DATA + thread] = x[thread]
        publish(there, number)
        observe(local, number)
        out[thread] = local[DATA + thread]

    return message


# Rows in flight


def rows_in_flight(link_gbps, one_way_us, row_bytes):
    return ceil(2 * one_way_us * link_gbps * 1e3 / row_bytes)


# A ring of words


@cuda.jit
def ring_of_words(peers, local, x, out, sends, receives, to, source):
    if cuda.blockIdx.x == 0:
        there = pointer_from_address(peers[to], local)
        for n in range(sends):
            while n - ld_acquire_sys_s32(local, HEAD) >= WORD_SLOTS:
                pass
            there[RING + n % WORD_SLOTS] = x[n]
            st_release_sys_s32(there, TAIL, int32(n + 1))
    else:
        there = pointer_from_address(peers[source], local)
        for n in range(receives):
            while ld_acquire_sys_s32(local, TAIL) <= n:
                pass
            out[n] = local[RING + n % WORD_SLOTS]
            st_release_sys_s32(there, HEAD, int32(n + 1))


# A ring of rows


class Queue(NamedTuple):
    """One end of a ring; offsets are in words, and the same in both buffers."""

    here: Any  # the buffer of this rank
    there: Any  # the buffer of the rank at the other end
    tail: Any  # in the receiver's buffer: the number of rows that are in the ring, or have been
    head: Any  # in the sender's buffer: how many of them the receiver no longer needs
    ring: Any  # in the receiver's buffer: the first slot
    slots: Any
    row_words: Any
    before: Any  # the number of the first row of this launch


@cuda.jit(device=True)
def copy_row(to, to_at, source, at, words):
    for i in range(4 * int32(cuda.threadIdx.x & 31), words, 128):
        a, b, c, d = ld_global_s32x4(source, int32(at + i))
        st_na_s32x4(to, int32(to_at + i), a, b, c, d)


@cuda.jit(device=True)
def slot_of(queue, number):
    slot = uint32(uint32(number) % uint32(queue.slots))  # 32 bits: a 64-bit division is a function call
    return int32(queue.ring + int32(slot) * queue.row_words)


@cuda.jit(device=True)
def send(queue, x, first, count):
    lane = int32(cuda.threadIdx.x & 31)
    for n in range(count):
        number = int32(queue.before + n)
        if lane == 0:
            while number - ld_acquire_sys_s32(queue.here, queue.head) >= queue.slots:
                pass
        cuda.syncwarp()
        copy_row(queue.there, slot_of(queue, number), x, int32((first + n) * queue.row_words), queue.row_words)
        cuda.syncwarp()
        if lane == 0:
            st_release_sys_s32(queue.there, queue.tail, int32(number + 1))


@cuda.jit(device=True)
def receive(queue, out, first, count):
    lane = int32(cuda.threadIdx.x & 31)
    for n in range(count):
        number = int32(queue.before + n)
        if lane == 0:
            while ld_acquire_sys_s32(queue.here, queue.tail) <= number:
                pass
        cuda.syncwarp()
        copy_row(out, int32((first + n) * queue.row_words), queue.here, slot_of(queue, number), queue.row_words)
        cuda.syncwarp()
        if lane == 0:
            st_release_sys_s32(queue.there, queue.head, int32(number + 1))


@factory
def make_ring(send, receive, pairs=True):
    @cuda.jit
    def ring(peers, local, x, out, rows, share, row_words, slots, launch, to, source):
        channels, cta = int32(cuda.gridDim.x >> 1), int32(cuda.blockIdx.x)
        if pairs:
            channel, sends = int32(cta >> 1), cta & 1 == 0
        else:
            channel, sends = int32(cta if cta < channels else cta - channels), cta < channels
        first = int32(channel * share)
        count = int32(max(0, min(share, rows - first)))
        at, before = int32(channel * (RING + slots * row_words)), int32(launch * count)
        if sends:
            there = pointer_from_address(peers[to], local)
            send(Queue(local, there, at + TAIL, at + HEAD, at + RING, slots, row_words, before), x, first, count)
        else:
            there = pointer_from_address(peers[source], local)
            receive(Queue(local, there, at + TAIL, at + HEAD, at + RING, slots, row_words, before), out, first, count)

    return ring


# Signals for other warps


@cuda.jit(device=True)
def signal_for_others(posted, there):
    thread = int32(cuda.threadIdx.x)
    warp, lane = int32(thread >> 5), int32(thread & 31)
    if warp < 2:
        cuda.syncwarp()
        if lane == 0:
            st_release_cta_shared_s32(posted, warp, 1)
    elif lane < 2:
        while poll_acquire_cta_shared_s32(posted, lane) == 0:
            pass
        fence_acq_rel_sys()
        st_relaxed_sys_s32(there, FLAG + lane, 1)
