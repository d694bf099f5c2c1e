"""The lesson's own answers to the exercises of "Dispatch"; the page uses them until the reader's are right."""

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32, uint64

from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_acquire_cta_shared_u64,
    ld_acquire_sys_s32,
    poll_acquire_cta_shared_s32,
    st_relaxed_gpu_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_u64,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK


@cuda.jit(device=True)
def rows_of(rank_prefix, channel_prefix, source, to, line, channel, ranks, channels):
    lower_ranks = rank_prefix[(source - 1) * ranks + to] if source > 0 else int32(0)
    lower_channels = channel_prefix[line * channels + channel - 1] if channel > 0 else int32(0)
    count = channel_prefix[line * channels + channel] - lower_channels
    return int32(lower_ranks + lower_channels), int32(count)


@cuda.jit(device=True)
def wait_for_space(heads, at, tail, most, has_ring):
    full = has_ring
    while cuda.any_sync(FULL_MASK, full):  # until the ring of each lane has space
        if full:
            full = uint32(tail - uint32(ld_acquire_sys_s32(heads, at))) > most
    cuda.syncwarp()  # all lanes may write now: what one lane has acquired, the others must see


@cuda.jit(device=True)
def signal(board, lane, flags_at, rank, peers, local):
    running = True
    while running:
        idle = lane >= board.warps or poll_acquire_cta_shared_s32(board.words, board.done + lane) != 0
        running = cuda.all_sync(FULL_MASK, idle) == 0  # if all are done, their last posts are published below
        for base in range(0, board.items, 32):
            item, posted, new = int32(base + lane), uint64(0), False
            if item < board.items:
                posted = ld_acquire_cta_shared_u64(board.posts, board.posted + item)
                new = posted != board.posts[board.published + item]
            if cuda.any_sync(FULL_MASK, new):
                fence_acq_rel_sys()  # one fence, for the rows of all warps whose posts this warp has acquired
                if new:
                    channel, peer = int32(int32(posted >> uint64(32)) - 1), int32(item % board.ranks)
                    remote = pointer_from_address(peers[peer], local)
                    st_relaxed_sys_s32(remote, flags_at + channel * board.ranks + rank, int32(uint32(posted)))
                    st_release_cta_shared_u64(board.posts, board.published + item, posted)


@cuda.jit(device=True)
def take(taken, role, channels, lane):
    number = int32(0)
    if lane == 0:
        number = atom_add_relaxed_gpu_s32(taken, role, 1)
        if number == channels - 1:  # the last one of this launch
            st_relaxed_gpu_s32(taken, role, 0)
    return cuda.shfl_sync(FULL_MASK, number, 0)
