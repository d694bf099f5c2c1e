"""Exercises of notebook 08, on dispatch through ring buffers."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from numbers import Real
from types import FunctionType

import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32

from moe_numba.course.exercises import Exercise
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

_SEEDS = 4


def launch_ranks(kernel: Callable, threads: int, num_words: int, arguments: Sequence[Sequence], seed: int) -> list:
    """Launch a kernel of one CTA on several ranks with weak memory, each with zeroed memory that its peers can access.

    The kernel's arguments are that memory (int32), the addresses of all ranks' memory, the rank, and ``arguments`` of
    the rank. Returns what that memory contains afterwards, a list per rank.
    """

    def work(transport):
        shared, rank = transport.allocate(4 * num_words), transport.rank
        local = shared.local.view(torch.int32)
        transport.launch(kernel, 1, threads, local, shared.addresses, rank, *arguments[rank])
        transport.gather(None)  # runs the kernels
        words = local.tolist()
        shared.close()
        return words

    with simulator.seed(seed), simulator.weak_memory():
        return LocalGroup(len(arguments)).run(work)


def with_globals(kernel, **names):
    """Return the kernel with other functions under some of its global names."""
    function = kernel.py_func
    return cuda.jit(FunctionType(function.__code__, function.__globals__ | names, function.__name__))


def _wrong_output(kernel, threads, num_words, length, sizes=(), wrong_memory=lambda words: None):
    """Return what is wrong with rank 1's ``out``, which must become rank 0's ``x``, under one of the seeds.

    ``wrong_memory`` returns what is wrong with the final contents of rank 1's memory.
    """
    for seed in range(_SEEDS):
        x, out = torch.arange(length, dtype=torch.int32) + 100, torch.full((length,), -7, dtype=torch.int32)
        _, words = launch_ranks(kernel, threads, num_words, [(x, *sizes, out)] * 2, seed)
        if len(wrong := (out != x).nonzero()):
            i = int(wrong[0])
            return f"with the thread order of seed {seed}, out[{i}] is {int(out[i])}, not {int(x[i])}"
        if wrong := wrong_memory(words):
            return wrong
    return None


# 1: CTAs that saturate the link

_LINKS = (2, 50, 350), (8, 40, 350), (2, 43, 340), (8, 43, 340), (4, 60, 355)  # ranks, GB/s of a CTA, of the link


def ctas_that_saturate(ranks, cta_gbps, link_gbps):
    return ceil(link_gbps / (cta_gbps * (ranks - 1) / ranks))


def _saturates(answer):
    for given in _LINKS:
        found, wanted = answer(*given), ctas_that_saturate(*given)
        if found != wanted:
            ranks, cta, link = given
            if found == ceil(link / cta):
                return f"a CTA also copies the rows that stay on their rank: with {ranks} ranks one of {ranks}"
            text = f"with {ranks} ranks, {cta} GB/s per CTA and {link} GB/s of the link you find {found} CTAs"
            if not isinstance(found, Real):
                return text
            return (
                f"{text}. They put {cta * found * (ranks - 1) / ranks:.4g} GB/s on the link; the smallest whole number "
                f"that reaches {link} is wanted"
            )
    return None


# 2: the first row of a channel


def first_row_of_channel(rank_prefix, start, source, rank):
    from_lower_ranks = rank_prefix[source - 1][rank] if source else 0
    return from_lower_ranks - start - 1


def _finds_first_rows(answer):
    for seed in range(_SEEDS):
        # Tokens of a channel that go to a rank, [source, rank, channel].
        counts = torch.randint(1, 9, (3, 3, 4), generator=torch.Generator().manual_seed(seed))
        rank_prefix = counts.sum(dim=2).cumsum(dim=0).numpy()
        for source, rank, channel in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
            earlier = int(counts[source, rank, :channel].sum())
            wanted = first_row_of_channel(rank_prefix, -earlier - 1, source, rank)
            found = answer(rank_prefix, -earlier - 1, source, rank)
            if found != wanted:
                return (
                    f"with rank_prefix {rank_prefix.tolist()}, start {-earlier - 1}, source {source} and rank {rank} "
                    f"you find row {found}, not {wanted}: {wanted - earlier} rows come from lower ranks, and {earlier} "
                    f"from lower channels of rank {source}"
                )
    return None


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


def _wrong_counters(words):
    for name, index, verb in (("TAIL", TAIL, "stored"), ("HEAD", HEAD, "read")):
        if words[index] != 11:
            return f"out is right, but the last {name} is {words[index]} after 11 rows have been {verb}"
    return None


_wrong_row = partial(
    _wrong_output, threads=1, num_words=RING + SLOTS, length=11, sizes=[11], wrong_memory=_wrong_counters
)


def _sends_through_ring(kernel):
    try:
        wrong = _wrong_row(kernel) or _waits_for_free_slots(kernel)
    except simulator.SimulatorError as error:
        if wrong := _overfilled(kernel):
            return f"{wrong} ({type(error).__name__}: {error})"
        if isinstance(error, simulator.DataRace):
            return f"a counter is published before the access to its slot, or without a release (DataRace: {error})"
        raise
    return wrong and (_overfilled(kernel) or wrong)


def _waits_for_free_slots(kernel):
    """Return what is wrong if rank 0 does not fill the ring while rank 1, which gets 0 rows to receive, reads none."""
    x, out = torch.arange(SLOTS, dtype=torch.int32), torch.empty(SLOTS, dtype=torch.int32)
    try:
        launch_ranks(kernel, 1, RING + SLOTS, [(x, SLOTS, out), (x, 0, out)], seed=0)
    except simulator.Deadlock as error:
        return f"rank 0 waits although a slot is free: {SLOTS} rows fit before rank 1 has read one ({error})"
    return None


def _overfilled(kernel):
    """Return what is wrong if rank 0 publishes more rows than the ring has slots, counted from the head it has read."""
    heads, found = [], []

    def load(pointer, index):
        value = ld_acquire_sys_s32(pointer, index)
        heads.extend([int(value)] if index == HEAD else [])
        return value

    def store(pointer, index, tail):
        if index == TAIL and heads and tail - heads[-1] > SLOTS:
            read = f"rank 0 publishes the tail {tail} after it has read the head {heads[-1]}"
            found.append(f"{read}: {tail - heads[-1]} rows in a ring of {SLOTS} slots")
        st_release_sys_s32(pointer, index, tail)

    with contextlib.suppress(simulator.SimulatorError):
        _wrong_row(with_globals(kernel, ld_acquire_sys_s32=load, st_release_sys_s32=store))
    return found[0] if found else None


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


_wrong_element = partial(_wrong_output, threads=96, num_words=DATA + 64, length=64)


def _signals(kernel):
    try:
        with simulator.trace() as events:
            wrong = _wrong_element(kernel)
        flags = [
            e for e in events if e.rank == 0 and e.what == "store" and e.details["buffer"] == "the buffer of rank 1"
        ]
        if other := next((event for event in flags if event.warp != 2), None):
            return wrong or f"out is right, but warp {other.warp} stores flag {other.details['index']}, not warp 2"
        return wrong
    except simulator.DataRace as error:
        if "the shared array" in str(error):
            return f"two threads race in shared memory: {error}"
        fenced = lambda *given: (fence_acq_rel_sys(), st_relaxed_sys_s32(*given))
        try:
            _wrong_element(with_globals(kernel, st_relaxed_sys_s32=fenced))
        except simulator.DataRace as other:
            why = "even if a fence precedes the store of the flag, the flag does not cover the stores of all lanes"
            return f"two threads race: {why} ({other})"
        why = "no system-scope fence of the same lane lies between warp 2's poll and its store of the flag"
        return f"two threads race: {why} ({error})"


EXERCISES = {
    1: Exercise(
        "a function of the number of ranks, the GB/s of a CTA and the GB/s of the link",
        _saturates,
        "Of the rows that a CTA copies, one in `ranks` stays on its rank. How many GB/s of a CTA go over the link?",
        ctas_that_saturate,
    ),
    2: Exercise(
        "a function of rank_prefix_matrix, the start flag, the source rank and the receiving rank",
        _finds_first_rows,
        "Row `source - 1` of the matrix counts the rows from ranks below `source`; below rank 0 there are none. A "
        "count n is encoded as -n - 1.",
        first_row_of_channel,
    ),
    3: Exercise(
        "a kernel that sends the elements of x through a ring of four slots",
        _sends_through_ring,
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
