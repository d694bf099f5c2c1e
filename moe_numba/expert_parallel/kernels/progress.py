"""What the last warp of every block does: it tells the other ranks how far the block's channels are.

A release at system scope holds a thread up for more than a microsecond, for it waits until everything that its whole
multiprocessor has written is known everywhere. A warp that carries rows would lose more by that than by carrying them.
So they only leave word in shared memory, and one warp, which carries nothing, fences once for all of them.

A word has 8 bytes: a channel, and how far one of its rings is. They are stored as one, so that a channel is never taken
for another. Before a warp goes on to another channel it waits until the last one's word is told.
"""

from functools import cache

from numba import cuda, int32, uint32, uint64

from moe_numba.ptx.atomics import (
    ld_acquire_cta_shared_u64,
    poll_acquire_cta_shared_s32,
    poll_acquire_cta_shared_u64,
    st_relaxed_sys_s32,
    st_release_cta_shared_u64,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address

FULL = 0xFFFFFFFF


@cuda.jit(device=True)
def leave_word(words, at, channel, count):
    """Leave word how far a ring of a channel is."""
    st_release_cta_shared_u64(words, at, uint64(uint64(channel + 1) << uint64(32) | uint64(uint32(count))))


@cuda.jit(device=True)
def wait_until_told(words, at, told):
    """Before word of another channel is left: what was left of the last one must be known."""
    while poll_acquire_cta_shared_u64(words, told) != words[at]:
        pass


@cache
def make_publish(shape):
    """``publish``, until all warps are done: word that each left goes to a flag of the rank concerned."""
    ranks, items, warps = shape.num_ranks, shape.warps * shape.num_ranks, shape.warps
    progress_at, told_at, done_at = shape.progress, shape.told, shape.done
    rounds = -(-items // 32)

    @cuda.jit(device=True)
    def publish(smem, words, lane, rank, flags_at, mine, peers):
        now = cuda.local.array(rounds, uint64)
        going = int32(1)
        while going != 0:
            done = lane >= warps or poll_acquire_cta_shared_s32(smem, done_at + lane) != 0
            going = int32(0 if cuda.all_sync(FULL, done) else 1)
            news = False
            for j in range(rounds):
                item = int32(32 * j + lane)
                if item < items:
                    now[j] = ld_acquire_cta_shared_u64(words, progress_at + item)
                    news = news or now[j] != words[int32(told_at + item)]
            if cuda.any_sync(FULL, news):
                fence_acq_rel_sys()
                for j in range(rounds):
                    item = int32(32 * j + lane)
                    if item < items and now[j] != words[int32(told_at + item)]:
                        channel, to = int32(int32(now[j] >> uint64(32)) - 1), int32(item % ranks)
                        theirs = pointer_from_address(peers[to], mine)
                        st_relaxed_sys_s32(theirs, flags_at + channel * ranks + rank, int32(uint32(now[j])))
                        st_release_cta_shared_u64(words, told_at + item, now[j])

    return publish
