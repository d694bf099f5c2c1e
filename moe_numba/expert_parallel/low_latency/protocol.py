"""Waits of the low-latency kernels: for data that is its own flag, for flags, and for ranks that are late or dead.

Data as its own flag ("Lamport" in TensorRT-LLM): a receiver polls each 16-byte vector until none of its words is the
sentinel, and stores the sentinel again for the operation after the next. The sender replaces words that equal the
sentinel by other NaNs. Flags after data: the sending CTA stores the data, synchronises, and one warp executes a
system-scope fence and stores the flag. No flag is ever cleared, since each carries the number of the operation.

A thread that waits for a rank longer than the timeout marks it in the rank mask. From then on nothing waits for that
rank and nothing is sent to it, and everything that it should have sent counts as NaN.
"""

from typing import NamedTuple

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.expert_parallel.low_latency.layout import (
    BLOCKS_DONE,
    CLEAN_NAN,
    EXPIRED,
    NO_EXPERTS,
    REPORTED,
    SENTINEL,
    STAMP_MASK,
    STAMP_SHIFT,
)
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_acquire_sys_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_sys_s32,
    st_relaxed_gpu_s32,
    st_relaxed_sys_s32,
)
from moe_numba.ptx.fence import fence_acq_rel_gpu, fence_acq_rel_sys
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.system_vectors import ld_acquire_sys_s32x4, ld_relaxed_sys_s32x4, ld_relaxed_sys_u64
from moe_numba.ptx.warp import FULL_MASK

# What a rank waited for: the code in ``status[0]``, and the error message.
METADATA, DISPATCH_ROW, STARTED, WEIGHTS, COMBINE_ROW = range(1, 6)
MESSAGES = {
    METADATA: "low_latency_dispatch: rank {rank} waited for the metadata of token {token} from rank {peer}",
    DISPATCH_ROW: "low_latency_dispatch: rank {rank} waited for the row of token {token} from rank {peer}",
    STARTED: "low_latency_combine: rank {rank} waited for rank {peer} to start",
    WEIGHTS: "low_latency_combine: rank {rank} waited for the weights of token {token} from rank {peer}",
    COMBINE_ROW: "low_latency_combine: rank {rank} waited for the sum of token {token} from rank {peer}",
}
POLLS_PER_CHECK = 16  # reading the clock and the mask takes as long as a poll


class LowLatencyContext(NamedTuple):
    """The arguments with which the low-latency kernels begin."""

    local: object  # int32*, this rank's shared memory
    peers: object  # uint64* [num_ranks], addresses of all ranks' shared memory
    state: object  # int32*, private
    status: object  # int32*, pinned host memory
    timeout_ns: object  # uint64
    rank: object  # int32
    mask: object  # int32* [MASK_WORDS], 1: the rank is late or dead


@cuda.jit(device=True)
def masked_ranks(ctx, num_ranks):
    """Return the mask of ranks that are late or dead; all lanes of the warp must call it."""
    lane = int32(cuda.threadIdx.x & 31)
    is_masked = lane < num_ranks and ld_relaxed_gpu_s32(ctx.mask, lane if lane < num_ranks else int32(0)) != 0
    return uint32(cuda.ballot_sync(FULL_MASK, is_masked))


@cuda.jit(device=True)
def must_stop(ctx, start, code, peer, token):
    """Return whether a wait for a rank that began at ``start`` must end; if it takes too long, mark the rank.

    A sum may wait twice as long: its sender may have waited for the weights of a third rank, which is lost.
    """
    is_masked = ld_relaxed_gpu_s32(ctx.mask, peer) != 0
    timeout_ns = uint64(2 * ctx.timeout_ns) if code == COMBINE_ROW else ctx.timeout_ns
    if not is_masked and uint64(globaltimer() - start) <= timeout_ns:
        return False
    st_relaxed_gpu_s32(ctx.state, EXPIRED, int32(1))  # also if another kernel has masked the rank meanwhile
    if is_masked:
        return True
    st_relaxed_gpu_s32(ctx.mask, peer, int32(1))
    if atom_add_relaxed_gpu_s32(ctx.mask, REPORTED, int32(1)) == 0:
        ctx.status[1], ctx.status[2], ctx.status[3] = ctx.rank, int32(peer), int32(token)
        fence_acq_rel_sys()
        st_relaxed_sys_s32(ctx.status, 0, int32(code))
    return True


@cuda.jit(device=True)
def is_stamped(a, b, c, d, stamp):
    """Return whether all words of a vector of metadata have this stamp."""
    a, b, c, d = uint32(a), uint32(b), uint32(c), uint32(d)
    shift = uint32(STAMP_SHIFT)
    return (a >> shift == stamp) & (b >> shift == stamp) & (c >> shift == stamp) & (d >> shift == stamp)


@cuda.jit(device=True)
def has_arrived(a, b, c, d):
    """Return whether no word of a vector is the sentinel."""
    return (a != SENTINEL) & (b != SENTINEL) & (c != SENTINEL) & (d != SENTINEL)


@cuda.jit(device=True)
def clean(word):
    """Replace a payload word that equals the sentinel by other NaNs."""
    return int32(CLEAN_NAN) if word == SENTINEL else word


@cuda.jit(device=True)
def stamp_of(number):
    """Return the stamp of operation ``number``."""
    return uint32(number & STAMP_MASK)


@cuda.jit(device=True)
def wait_metadata(ctx, offset, number, masked, peer, token, data_is_flag):
    """Wait for a vector of metadata; return its words without their stamps, and whether it has arrived.

    A masked rank's metadata has no experts. With flags after data, the metadata is the flag.
    """
    stamp, start, polls, stopped = stamp_of(number), uint64(0), int32(0), False
    a = b = c = d = int32(NO_EXPERTS)
    if masked >> uint32(peer) & uint32(1) == uint32(0):
        a, b, c, d = _load_metadata(ctx.local, offset, data_is_flag)
        while not stopped and not is_stamped(a, b, c, d, stamp):
            if polls % POLLS_PER_CHECK == 0:
                start = globaltimer() if polls == 0 else start
                stopped = must_stop(ctx, start, METADATA, peer, token)
            polls = int32(polls + 1)
            a, b, c, d = _load_metadata(ctx.local, offset, data_is_flag)
    else:
        stopped = True
    if stopped:
        a = b = c = d = int32(NO_EXPERTS)
    ids = int32((1 << STAMP_SHIFT) - 1)
    return int32(a & ids), int32(b & ids), int32(c & ids), int32(d & ids), not stopped


@cuda.jit(device=True)
def _load_metadata(local, offset, data_is_flag):
    if data_is_flag:
        return ld_relaxed_sys_s32x4(local, offset)
    return ld_acquire_sys_s32x4(local, offset)


@cuda.jit(device=True)
def wait_vector(ctx, offset, code, peer, token, loaded):
    """Wait for a vector that is its own flag and was loaded once; words that are late keep the sentinel, a NaN."""
    start, polls, stopped = uint64(0), int32(0), False
    a, b, c, d = loaded[0], loaded[1], loaded[2], loaded[3]
    while not stopped and not has_arrived(a, b, c, d):
        if polls % POLLS_PER_CHECK == 0:
            start = globaltimer() if polls == 0 else start
            stopped = must_stop(ctx, start, code, peer, token)
        polls = int32(polls + 1)
        a, b, c, d = ld_relaxed_sys_s32x4(ctx.local, offset)
    return a, b, c, d


@cuda.jit(device=True)
def wait_word(ctx, offset, code, peer, token):
    """Wait for a word that is its own flag; if it has not arrived in time, it keeps the sentinel."""
    start, polls, stopped = uint64(0), int32(0), False
    word = ld_relaxed_sys_s32(ctx.local, offset)
    while not stopped and word == SENTINEL:
        if polls % POLLS_PER_CHECK == 0:
            start = globaltimer() if polls == 0 else start
            stopped = must_stop(ctx, start, code, peer, token)
        polls = int32(polls + 1)
        word = ld_relaxed_sys_s32(ctx.local, offset)
    return word


@cuda.jit(device=True)
def wait_number(ctx, offset, number, code, peer, token):
    """Wait until a flag has reached the number of an operation; return whether it has."""
    start, polls, stopped = uint64(0), int32(0), False
    found = ld_acquire_sys_s32(ctx.local, offset)
    while not stopped and int32(found - number) < 0:
        if polls % POLLS_PER_CHECK == 0:
            start = globaltimer() if polls == 0 else start
            stopped = must_stop(ctx, start, code, peer, token)
        polls = int32(polls + 1)
        found = ld_acquire_sys_s32(ctx.local, offset)
    return not stopped


@cuda.jit(device=True)
def wait_weight(ctx, offset, number, peer, token):
    """Wait for a weight of combine ``number``; return its bits, those of a NaN if it has not arrived in time."""
    start, polls, stopped = uint64(0), int32(0), False
    pair = ld_relaxed_sys_u64(ctx.local, offset)
    while not stopped and uint32(pair >> uint64(32)) != uint32(number):
        if polls % POLLS_PER_CHECK == 0:
            start = globaltimer() if polls == 0 else start
            stopped = must_stop(ctx, start, WEIGHTS, peer, token)
        polls = int32(polls + 1)
        pair = ld_relaxed_sys_u64(ctx.local, offset)
    return uint32(CLEAN_NAN) if stopped else uint32(pair)


@cuda.jit(device=True)
def load_expert(topk_idx, token, num_tokens, lane, topk, num_experts):
    """Return a token's expert number ``lane``, or -1."""
    expert = int64(-1)
    if token < num_tokens and lane < topk:
        expert = int64(topk_idx[int64(token) * topk + lane])
    return int32(expert) if (expert >= 0) & (expert < num_experts) else int32(-1)


@cuda.jit(device=True)
def ranks_of(expert, local_experts, num_ranks):
    """Return the mask of ranks that have one of the warp's experts; all lanes of the warp must call it."""
    owner, found = int32(expert // local_experts) if expert >= 0 else int32(-1), uint32(0)
    for r in range(num_ranks):
        if cuda.any_sync(FULL_MASK, owner == r):
            found = uint32(found | uint32(1 << r))
    return found


@cuda.jit(device=True)
def roles(grid, sends, receives, items, ctas_per_sender):
    """Return the number of sending CTAs, which come first, and the first receiving CTA.

    If a kernel sends and receives, each CTA does one of the two, so that rows arrive while others leave. No more CTAs
    send than there are ``items`` to send.
    """
    senders, first_receiver = int32(0), int32(0)
    if sends:
        senders = grid
        if receives and grid > 1:
            senders = first_receiver = min(max(int32(1), int32(grid // ctas_per_sender)), int32(items))
    return senders, first_receiver


@cuda.jit(device=True)
def slot_at(rank, index, own_slots, num_ranks):
    """Return the source rank and token of a rank's ``index``-th slot to receive.

    First come the rank's own tokens, if they are read in place, then the tokens of the others in the order in which
    they are sent.
    """
    if index < own_slots:
        return int32(rank), int32(index)
    index = int32(index - own_slots)
    others = max(1, num_ranks - 1) if own_slots > 0 else num_ranks
    return int32((rank + 1 + index % others) % num_ranks), int32(index // others)


@cuda.jit(device=True)
def count_operation(state, own_state, sends, sent, receives, received):
    """Count this launch in the CTA's state; all threads of the CTA must call it."""
    cuda.syncthreads()  # all threads have read the state
    if cuda.threadIdx.x == 0:
        if sends:
            st_relaxed_gpu_s32(state, own_state, int32(sent + 1))
        if receives:
            st_relaxed_gpu_s32(state, own_state + 1, int32(received + 1))


@cuda.jit(device=True)
def is_last_block(state):
    """Return, to thread 0 of the last CTA to call this after a barrier, whether it is.

    That thread's later accesses come after those of all CTAs.
    """
    is_last = False
    if cuda.threadIdx.x == 0:
        fence_acq_rel_gpu()
        if atom_add_relaxed_gpu_s32(state, BLOCKS_DONE, int32(1)) == int32(cuda.gridDim.x) - 1:
            is_last = True
            fence_acq_rel_gpu()
            st_relaxed_gpu_s32(state, BLOCKS_DONE, int32(0))
    return is_last
