"""Exercises of notebook 12, on dispatch through ring buffers."""

from collections.abc import Callable, Sequence
from math import ceil

import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32

from moe_numba.course.bench.timing.multigpu import settle
from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, expect_between, function_test, kernel_test
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    poll_acquire_cta_shared_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address


def launch_ranks(kernel: Callable, threads: int, num_words: int, arguments: Sequence[Sequence]) -> list:
    """Launch a kernel of one CTA on several ranks with weak memory, each with zeroed memory that its peers can access.

    The kernel's arguments are that memory (int32), the addresses of all ranks' memory, the rank, and ``arguments`` of
    the rank. Returns what that memory contains afterwards, a list per rank.
    """

    def work(transport):
        shared, rank = transport.allocate(4 * num_words), transport.rank
        local = shared.local.view(torch.int32)
        transport.launch(kernel, 1, threads, local, shared.addresses, rank, *arguments[rank])
        settle(transport)
        words = local.tolist()
        shared.close()
        return words

    with simulator.weak_memory():
        return LocalGroup(len(arguments)).run(work)


# 1: CTAs that saturate the link

_LINKS = (2, 50, 350), (8, 40, 350), (2, 43, 340), (8, 43, 340), (4, 60, 355)  # ranks, GB/s of a CTA, of the link


def ctas_that_saturate(ranks, cta_gbps, link_gbps):
    return ceil(link_gbps / (cta_gbps * (ranks - 1) / ranks))


# 2: the first row of a channel


def first_row_of_channel(rank_prefix, start, source, rank):
    from_lower_ranks = rank_prefix[source - 1][rank] if source else 0
    return from_lower_ranks - start - 1


def _channels(seed):
    """Yield the arguments for all channels of a routing."""
    # Tokens of a channel that go to a rank, [source, rank, channel].
    counts = torch.randint(1, 9, (3, 3, 4), generator=torch.Generator().manual_seed(seed))
    rank_prefix = counts.sum(dim=2).cumsum(dim=0).numpy()
    for source, rank, channel in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        yield rank_prefix, -int(counts[source, rank, :channel].sum()) - 1, source, rank


# 3: a ring

SLOTS, TAIL, HEAD, RING = 4, 0, 1, 2


@cuda.jit
def send_through_ring(local, peers, rank, x, rows, out):
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
            st_release_sys_s32(local, HEAD, int32(n + 1))


def _ring(rows, received, case):
    """Return a run in which rank 0 sends ``rows`` elements, and rank 1 is told to receive ``received``."""
    x = torch.arange(rows, dtype=torch.int32) + 100

    def send(kernel, out):
        _, words = launch_ranks(kernel, 1, RING + SLOTS, [(x, rows, out[:0]), (x, received, out)])
        return {"TAIL": words[TAIL], "HEAD": words[HEAD]}

    out = torch.full((received,), -7, dtype=torch.int32)
    return Run(send, {"out": out}, {"out": x[:received], "TAIL": rows, "HEAD": received}, case)


# 4: a signalling warp

DATA = 2


@cuda.jit
def signal_for_others(local, peers, rank, x, out):
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
            fence_acq_rel_sys()
            st_relaxed_sys_s32(remote, lane, 1)
    elif warp < 2:
        while ld_acquire_sys_s32(local, warp) == 0:
            pass
        out[thread] = local[DATA + thread]


_ELEMENTS = torch.arange(64, dtype=torch.int32) + 100


def _signal(kernel, out):
    launch_ranks(kernel, 96, DATA + 64, [(_ELEMENTS, out[:0]), (_ELEMENTS, out)])


_copies = kernel_test(Run(_signal, {"out": torch.full((64,), -7, dtype=torch.int32)}, {"out": _ELEMENTS}), seeds=4)


def _signals(kernel):
    with simulator.trace() as events:
        _copies(kernel)
    remote = [e for e in events if e.what == "store" and e.rank == 0 and e.details["buffer"] == "the buffer of rank 1"]
    expect_between("flags that warps 0 and 1 store", sum(event.warp != 2 for event in remote), most=0)


EXERCISES = {
    1: Exercise(
        "a function of the number of ranks, the GB/s of a CTA and the GB/s of the link",
        function_test(ctas_that_saturate, _LINKS),
        "Of the rows that a CTA copies, one in `ranks` stays on its rank. How many GB/s of a CTA go over the link?",
        ctas_that_saturate,
    ),
    2: Exercise(
        "a function of rank_prefix_matrix, the start flag, the source rank and the receiving rank",
        function_test(first_row_of_channel, [given for seed in range(4) for given in _channels(seed)]),
        "Row `source - 1` of the matrix counts the rows from ranks below `source`; below rank 0 there are none. A "
        "count n is encoded as -n - 1.",
        first_row_of_channel,
    ),
    3: Exercise(
        "a kernel that sends the elements of x through a ring of four slots",
        kernel_test(
            _ring(11, 11, "11 rows"), _ring(SLOTS, 0, f"rank 1 receives nothing, and {SLOTS} rows fit"), seeds=4
        ),
        "How many rows are in the ring when the sender stores row n, if the head is h? And which access to a slot must "
        "come before the store of the head?",
        send_through_ring,
    ),
    4: Exercise(
        "a kernel whose third warp signals the rows that two other warps have stored",
        _signals,
        "A release or a fence covers what the thread itself has stored, or observed. What orders the stores of 31 "
        "lanes before lane 0's release, and in which order must warp 2 execute its fence and its store?",
        signal_for_others,
    ),
}
