"""Exercises of the notebook on the alignment in one launch."""

from types import FunctionType

import numpy as np
import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.exercises import Exercise
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32, st_relaxed_gpu_s32
from moe_numba.ptx.warp import lanemask_lt
from moe_numba.runtime.launch import launch

_SEEDS = 4


# 1: ranks from bitmasks


@cuda.jit
def stable_ranks(ids, ranks):
    masks = cuda.shared.array(16, int32)  # two words for each of 8 experts
    i = cuda.threadIdx.x
    if i < 16:
        masks[i] = 0
    cuda.syncthreads()
    cuda.atomic.or_(masks, 2 * ids[i] + i // 32, int32(uint32(1) << uint32(i % 32)))
    cuda.syncthreads()
    rank = cuda.popc(uint32(masks[2 * ids[i] + i // 32]) & lanemask_lt())
    if i >= 32:
        rank += cuda.popc(uint32(masks[2 * ids[i]]))
    ranks[i] = rank


def _ranks_stably(kernel):
    for seed in range(_SEEDS):
        ids = np.random.default_rng(seed).integers(0, 8, 64, dtype=np.int32) % (8 if seed % 2 else 3)
        ranks, wanted = np.full(64, -7, np.int32), [int((ids[:i] == ids[i]).sum()) for i in range(64)]
        try:
            with simulator.seed(seed):
                kernel[1, 64](ids, ranks)
        except OverflowError as error:
            return (
                f"{error}. The masks of cuda.match_any_sync and cuda.ballot_sync are int32 and may be negative: "
                "convert them with uint32(...) before an operation with another uint32"
            )
        if (wrong := np.flatnonzero(ranks != wanted)).size:
            i = wrong[0]
            return (
                f"with the thread order of seed {seed}, ids[{i}] is expert {ids[i]} and gets rank {ranks[i]}, but "
                f"{wanted[i]} earlier elements have this expert; {wrong.size} of 64 ranks are wrong"
            )
    return None


# 2: a barrier whose counter is never reset


@cuda.jit
def sum_of_all(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    old = atom_add_relaxed_gpu_s32(counter, 0, int32(uint32(1 << 31) - uint32(2)) if cta == 0 else int32(1))
    while int32(old ^ ld_relaxed_gpu_s32(counter, 0)) >= 0:  # until the top bit differs
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


def _survives_the_wrap(kernel):
    """Launch a kernel with the counters that it would find just before they overflow 31 and 32 bits."""
    counter = torch.zeros(1, dtype=torch.int32)
    if wrong := _launches_of_sum(kernel, counter, "the first launches"):
        return wrong
    counter.zero_()
    _launches_of_sum(kernel, counter, "", launches=1)
    step = int(counter) % (1 << 32)  # what a launch adds
    for bits in (31, 32):
        for seed in range(_SEEDS):
            launches = (1 << bits) // step if step else 0
            value = launches * step % (1 << 32)
            counter[0] = value - (value >> 31 << 32)
            when = f"after {launches:,} launches, when the counter is {int(counter):,}"
            with simulator.seed(seed):
                if wrong := _launches_of_sum(kernel, counter, when):
                    return wrong
    return None


_BARRIER_FINDINGS = {
    "Deadlock": "a CTA waits for a value of the counter that never comes, or that it missed",
    "DataRace": "a CTA passed the barrier before the CTA whose row it loads arrived, or a fence is missing",
}


def _launches_of_sum(kernel, counter, when, launches=3):
    for n in range(launches):
        values = torch.arange(3, dtype=torch.int32) + 10 * n + 1
        rows, sums = torch.full((3,), -7, dtype=torch.int32), torch.full((3,), -7, dtype=torch.int32)
        try:
            launch(kernel, 3, 1, values, rows, sums, counter, cooperative=True)
        except simulator.SimulatorError as error:
            finding = _BARRIER_FINDINGS.get(type(error).__name__)
            return f"{when}: {f'{finding} ' if finding else ''}({type(error).__name__}: {error})"
        if (sums != values.sum()).any():
            return f"{when}: the sums are {sums.tolist()}, not {int(values.sum())}: a CTA did not wait for all rows"
    return None


# 3: values and flags of a chained scan


@cuda.jit
def chained_scan(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        cuda.threadfence()
        before = prefix[cta - 1]
    prefix[cta] = before + values[cta]
    cuda.threadfence()
    st_relaxed_gpu_s32(flags, cta, 1)


def _publishes_in_order(kernel):
    try:
        return _wrong_prefix(kernel)
    except simulator.DataRace as error:
        return f"two threads race: {_unordered_side(kernel)} ({error})"


def _unordered_side(kernel):
    """Say which side of a race lacks order: repair the reader, the writer or both with fences, and run it again."""

    def load(array, index):
        value = ld_relaxed_gpu_s32(array, index)
        cuda.threadfence()
        return value

    def store(array, index, value):
        cuda.threadfence()
        st_relaxed_gpu_s32(array, index, value)

    reader, writer = {"ld_relaxed_gpu_s32": load}, {"st_relaxed_gpu_s32": store}
    for names, words in (
        (reader, "the reader has no fence between the load of the flag and the load of the value"),
        (writer, "the writer has no fence between the store of the value and the store of the flag"),
        (reader | writer, "both the reader and the writer need a fence between the flag and the value"),
    ):
        function = kernel.py_func
        repaired = FunctionType(function.__code__, function.__globals__ | names, function.__name__)
        try:
            _wrong_prefix(cuda.jit(repaired))
        except simulator.SimulatorError:
            continue
        return words
    return "no fence can repair the writer: it must store the value before the flag"


def _wrong_prefix(kernel):
    values = torch.tensor([5, 3, 8, 1], dtype=torch.int32)
    for seed in range(_SEEDS):
        prefix, flags = torch.full((4,), -7, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        with simulator.seed(seed):
            launch(kernel, 4, 1, values, prefix, flags, cooperative=True)
        if prefix.tolist() != (wanted := values.cumsum(0).tolist()):
            return f"prefix is {prefix.tolist()}, not {wanted}"
    return None


# 4: counts of 16 bits

MOST_SLOTS = (1 << 16) - 1
COUNTS = 65537, 4


def _unpacks(answer):
    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        return "three numbers are needed, in parentheses: the most slots, and the two counts"
    most, low, high = answer
    word = COUNTS[0] | COUNTS[1] << 16
    if most == 1 << 16:
        return f"a CTA whose {most} slots all go to one expert has a count of {most}, which needs 17 bits"
    if most != MOST_SLOTS:
        return f"{most} slots per CTA: the largest count of 16 bits is another number"
    if (low, high) != (word & 0xFFFF, word >> 16):
        return f"the word is {COUNTS[0]} | {COUNTS[1]} << 16 = {word:#x}; its halves are not {low} and {high}"
    return None


EXERCISES = {
    1: Exercise(
        "a kernel that ranks the elements of each expert in ascending order",
        _ranks_stably,
        "Give each expert two words of 32 bits. Element i sets bit i % 32 of word i // 32 with cuda.atomic.or_. After "
        "a barrier, cuda.popc counts the bits below its own.",
        stable_ranks,
    ),
    2: Exercise(
        "a kernel whose barrier works after any number of launches",
        _survives_the_wrap,
        "Let the CTAs together add exactly 2^31 in each launch: one of them 2^31 - 2, the others 1. Then the top bit "
        "flips when the last one arrives, and the other bits are 0 again. Wait until old ^ now is negative. A CTA that "
        "resets the counter instead needs a fence between its addition and its store; the check does not notice if "
        "it is missing.",
        sum_of_all,
    ),
    3: Exercise(
        "a kernel in which each CTA adds its value to the sum of the CTA before",
        _publishes_in_order,
        "The value first, then cuda.threadfence(), then the flag. The reader needs a fence as well: between the load "
        "of the flag and the load of the value.",
        chained_scan,
    ),
    4: Exercise(
        "three numbers: the most slots per CTA, and the two counts that a reader unpacks",
        _unpacks,
        "All slots of a CTA may go to one expert. Write 65537 and 4 << 16 in hexadecimal.",
        f"({MOST_SLOTS}, 1, 5)  # the 17th bit of 65537 lands in the count of expert 1",
    ),
}
