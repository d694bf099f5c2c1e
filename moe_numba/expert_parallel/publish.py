"""What the last warp of every block does: it tells the other ranks how far the block's channels are.

A release at system scope holds a thread up for more than a microsecond, for it waits until everything that its whole
multiprocessor has written is known everywhere. A warp that carries rows would lose more by that than by carrying them.
So they only leave word in shared memory, and one warp, which carries nothing, fences once for all of them.
"""

from functools import cache

from numba import cuda, int32

from moe_numba.ptx.shared_flags import ld_acquire_cta_shared_s32, poll_acquire_cta_shared_s32
from moe_numba.ptx.system import fence_acq_rel_sys, pointer_from_address, st_relaxed_sys_s32

FULL = 0xFFFFFFFF


@cache
def make_publish(shape):
    """``publish``, until all warps are done: what each wrote at ``progress`` goes to a flag of the rank concerned.

    What was told last lies at ``said``. It was set down before any warp began: to look at it only now would be late.
    """
    ranks, items, warps = shape.num_ranks, shape.warps * shape.num_ranks, shape.warps
    progress_at, said_at, done_at = shape.progress, shape.said, shape.done
    rounds = -(-items // 32)

    @cuda.jit(device=True)
    def publish(smem, lane, rank, first_channel, flags_at, mine, peers):
        now = cuda.local.array(rounds, int32)
        going = int32(1)
        while going != 0:
            done = lane >= warps or poll_acquire_cta_shared_s32(smem, done_at + lane) != 0
            going = int32(0 if cuda.all_sync(FULL, done) else 1)
            news = False
            for j in range(rounds):
                item = int32(32 * j + lane)
                if item < items:
                    now[j] = ld_acquire_cta_shared_s32(smem, progress_at + item)
                    news = news or now[j] != smem[int32(said_at + item)]
            if cuda.any_sync(FULL, news):
                fence_acq_rel_sys()
                for j in range(rounds):
                    item = int32(32 * j + lane)
                    if item < items and now[j] != smem[int32(said_at + item)]:
                        channel, to = int32(first_channel + item // ranks), int32(item % ranks)
                        theirs = pointer_from_address(peers[to], mine)
                        st_relaxed_sys_s32(theirs, flags_at + channel * ranks + rank, now[j])
                        smem[int32(said_at + item)] = now[j]

    return publish
