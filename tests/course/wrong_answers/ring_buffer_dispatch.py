"""Wrong answers to the exercises of notebook 08: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32

from moe_numba.course.lessons.ring_buffer_dispatch.exercises import (
    first_row_of_channel,
    send_through_ring,
    signal_for_others,
)
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    poll_acquire_cta_shared_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address
from wrong_answers import changed

SLOTS, TAIL, HEAD, RING = 4, 0, 1, 2
DATA = 2


@cuda.jit
def stub_of_ring(local, peers, rank, x, rows, out):
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        for n in range(rows):
            while n - ld_acquire_sys_s32(remote, HEAD) > SLOTS:
                pass
            remote[RING + n % SLOTS] = x[n]
            st_release_sys_s32(remote, TAIL, int32(n + 1))
    else:
        for n in range(rows):
            while ld_acquire_sys_s32(local, TAIL) <= n:
                pass
            st_release_sys_s32(local, HEAD, int32(n + 1))
            out[n] = local[RING + n % SLOTS]


@cuda.jit
def early_head(local, peers, rank, x, rows, out):
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        for n in range(rows):
            while n - ld_acquire_sys_s32(remote, HEAD) >= SLOTS:
                pass
            remote[RING + n % SLOTS] = x[n]
            st_release_sys_s32(remote, TAIL, int32(n + 1))
    else:
        for n in range(rows):
            while ld_acquire_sys_s32(local, TAIL) <= n:
                pass
            st_release_sys_s32(local, HEAD, int32(n + 1))
            out[n] = local[RING + n % SLOTS]


@cuda.jit
def one_row_too_many(local, peers, rank, x, rows, out):
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        for n in range(rows):
            while n - ld_acquire_sys_s32(remote, HEAD) > SLOTS:
                pass
            remote[RING + n % SLOTS] = x[n]
            st_release_sys_s32(remote, TAIL, int32(n + 1))
    else:
        for n in range(rows):
            while ld_acquire_sys_s32(local, TAIL) <= n:
                pass
            out[n] = local[RING + n % SLOTS]
            st_release_sys_s32(local, HEAD, int32(n + 1))


@cuda.jit
def never_publishes_the_head(local, peers, rank, x, rows, out):
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        for n in range(rows):
            while n - ld_acquire_sys_s32(remote, HEAD) >= SLOTS:
                pass
            remote[RING + n % SLOTS] = x[n]
            st_release_sys_s32(remote, TAIL, int32(n + 1))
    else:
        for n in range(rows):
            while ld_acquire_sys_s32(local, TAIL) <= n:
                pass
            out[n] = local[RING + n % SLOTS]


@cuda.jit
def stub_of_signal(local, peers, rank, x, out):
    posted, thread = cuda.shared.array(2, int32), int32(cuda.threadIdx.x)
    warp, lane = thread // 32, thread % 32
    if thread < 2:
        posted[thread] = 0
    cuda.syncthreads()
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        if warp < 2:
            remote[DATA + thread] = x[thread]
            if lane == 0:
                st_release_cta_shared_s32(posted, warp, 1)
        elif lane < 2:
            while poll_acquire_cta_shared_s32(posted, lane) == 0:
                pass
            st_relaxed_sys_s32(remote, lane, 1)
            fence_acq_rel_sys()
    elif warp < 2:
        while ld_acquire_sys_s32(local, warp) == 0:
            pass
        out[thread] = local[DATA + thread]


@cuda.jit
def fence_after_the_flag(local, peers, rank, x, out):
    posted, thread = cuda.shared.array(2, int32), int32(cuda.threadIdx.x)
    warp, lane = thread // 32, thread % 32
    if thread < 2:
        posted[thread] = 0
    cuda.syncthreads()
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        if warp < 2:
            remote[DATA + thread] = x[thread]
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(posted, warp, 1)
        elif lane < 2:
            while poll_acquire_cta_shared_s32(posted, lane) == 0:
                pass
            st_relaxed_sys_s32(remote, lane, 1)
            fence_acq_rel_sys()
    elif warp < 2:
        while ld_acquire_sys_s32(local, warp) == 0:
            pass
        out[thread] = local[DATA + thread]


@cuda.jit
def no_syncwarp(local, peers, rank, x, out):
    posted, thread = cuda.shared.array(2, int32), int32(cuda.threadIdx.x)
    warp, lane = thread // 32, thread % 32
    if thread < 2:
        posted[thread] = 0
    cuda.syncthreads()
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        if warp < 2:
            remote[DATA + thread] = x[thread]
            if lane == 0:
                st_release_cta_shared_s32(posted, warp, 1)
        elif lane < 2:
            while poll_acquire_cta_shared_s32(posted, lane) == 0:
                pass
            st_release_sys_s32(remote, lane, 1)
    elif warp < 2:
        while ld_acquire_sys_s32(local, warp) == 0:
            pass
        out[thread] = local[DATA + thread]


@cuda.jit
def does_not_wait(local, peers, rank, x, out):
    thread = int32(cuda.threadIdx.x)
    if rank == 0 and thread < 64:
        pointer_from_address(peers[1], local)[DATA + thread] = x[thread]
    if rank == 1 and thread < 64:
        out[thread] = local[DATA + thread]


@cuda.jit
def signals_from_the_storing_warps(local, peers, rank, x, out):
    thread = int32(cuda.threadIdx.x)
    warp, lane = thread // 32, thread % 32
    if rank == 0 and warp < 2:
        remote = pointer_from_address(peers[1], local)
        remote[DATA + thread] = x[thread]
        cuda.syncwarp()
        if lane == 0:
            st_release_sys_s32(remote, warp, 1)
    elif warp < 2:
        while ld_acquire_sys_s32(local, warp) == 0:
            pass
        out[thread] = local[DATA + thread]


WRONG = [
    ("ring_buffer_dispatch-1", lambda ranks, cta, link: -(-link // cta), "that stay .*: with 2 ranks one of 2"),
    (
        "ring_buffer_dispatch-1",
        lambda ranks, cta, link: int(link / cta * ranks / (ranks - 1)),
        r"with 2 ranks, 43 GB/s .* you find 15 CTAs. They put 322.5 GB/s on the link",
    ),
    ("ring_buffer_dispatch-1", lambda ranks, cta, link: link / cta * ranks, "you find 70.0 CTAs"),
    ("ring_buffer_dispatch-1", lambda ranks, cta, link: None, "you find None CTAs$"),
    (
        "ring_buffer_dispatch-2",
        lambda rank_prefix, start, source, rank: rank_prefix[source - 1][rank] - start - 1,
        "source 0 and rank 0 you find row .*, not 0: 0 rows come from lower ranks, and 0 from lower channels of rank 0",
    ),
    (
        "ring_buffer_dispatch-2",
        lambda rank_prefix, start, source, rank: first_row_of_channel(rank_prefix, start, source, rank) + 1,
        "you find row 1, not 0",
    ),
    (
        "ring_buffer_dispatch-2",
        lambda rank_prefix, start, source, rank: (rank_prefix[rank][source - 1] if source else 0) - start - 1,
        "source 1 and rank 1 you find row",
    ),
    (
        "ring_buffer_dispatch-2",
        lambda rank_prefix, start, source, rank: (rank_prefix[source - 1][rank] if source else 0) + start,
        "start -1, source 0 and rank 0 you find row -1, not 0",
    ),
    ("ring_buffer_dispatch-3", stub_of_ring, "the tail 5 after it has read the head 0: 5 rows in a ring of 4"),
    ("ring_buffer_dispatch-3", one_row_too_many, r"the tail \d+ .* head \d+: 5 rows in a ring of 4 slots"),
    ("ring_buffer_dispatch-3", early_head, "a counter is published before the access to its slot, .*DataRace"),
    ("ring_buffer_dispatch-3", never_publishes_the_head, "threads wait for ever"),
    (
        "ring_buffer_dispatch-3",
        changed(send_through_ring, ("HEAD, int32(n + 1)", "HEAD, int32(n)")),
        "out is right, but the last HEAD is 10 after 11 rows have been read",
    ),
    (
        "ring_buffer_dispatch-3",
        changed(send_through_ring, (">= SLOTS", ">= SLOTS - 1")),
        "rank 0 waits although a slot is free: 4 rows fit before rank 1 has read one",
    ),
    (
        "ring_buffer_dispatch-3",
        changed(send_through_ring, ("st_release_sys_s32(remote, TAIL", "st_relaxed_sys_s32(remote, TAIL")),
        "a counter is published .* without a release",
    ),
    ("ring_buffer_dispatch-3", changed(send_through_ring, ("TAIL) <= n", "TAIL) < n")), r"out\[0\] is 0, not 100"),
    ("ring_buffer_dispatch-4", stub_of_signal, "the flag does not cover the stores of all lanes"),
    ("ring_buffer_dispatch-4", no_syncwarp, "the flag does not cover the stores of all lanes"),
    ("ring_buffer_dispatch-4", fence_after_the_flag, "no .* fence of the same lane lies between warp 2's poll"),
    ("ring_buffer_dispatch-4", does_not_wait, "the flag does not cover the stores of all lanes"),
    ("ring_buffer_dispatch-4", signals_from_the_storing_warps, "out is right, but warp . stores flag ., not warp 2"),
    (
        "ring_buffer_dispatch-4",
        changed(signal_for_others, ("            cuda.syncwarp()\n", "            fence_acq_rel_sys()\n")),
        "the flag does not cover the stores of all lanes",
    ),
    (
        "ring_buffer_dispatch-4",
        changed(signal_for_others, ("st_release_cta_shared_s32(posted, warp, 1)", "posted[warp] = 1")),
        "two threads race in shared memory",
    ),
    ("ring_buffer_dispatch-4", changed(signal_for_others, ("elif lane < 2", "elif lane < 1")), "threads wait for ever"),
]
