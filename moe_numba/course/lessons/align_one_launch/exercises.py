"""Exercises of the notebook on the alignment in one launch."""

import numpy as np
import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, case, expect_equal, kernel_test, number_test
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


def _ranks(seed, experts):
    ids = np.random.default_rng(seed).integers(0, experts, 64, dtype=np.int32)
    wanted = [(ids[:i] == ids[i]).sum() for i in range(64)]
    return Run((1, 64), {"ids": ids, "ranks": np.full(64, -7, np.int32)}, {"ranks": wanted}, f"{experts} experts")


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
    with case("the first launches"):
        _launch_sums(kernel, counter, 3)
    counter.zero_()
    _launch_sums(kernel, counter, 1)
    step = int(counter) % (1 << 32)  # what a launch adds
    for bits in (31, 32):
        launches = (1 << bits) // step if step else 0
        value = launches * step % (1 << 32)
        for seed in range(_SEEDS):
            counter[0] = value - (value >> 31 << 32)
            when = f"after {launches:,} launches, when the counter is {int(counter):,}"
            with simulator.seed(seed), case(when):
                _launch_sums(kernel, counter, 3)


def _launch_sums(kernel, counter, launches):
    for n in range(launches):
        values = torch.arange(3, dtype=torch.int32) + 10 * n + 1
        rows, sums = torch.full((3,), -7, dtype=torch.int32), torch.full((3,), -7, dtype=torch.int32)
        launch(kernel, 3, 1, values, rows, sums, counter, cooperative=True)
        expect_equal("sums", sums, values.sum().expand(3))


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


_VALUES = torch.tensor([5, 3, 8, 1], dtype=torch.int32)
_CHAIN = Run(
    lambda kernel, *arguments: launch(kernel, 4, 1, *arguments, cooperative=True),
    {"values": _VALUES, "prefix": torch.full((4,), -7, dtype=torch.int32), "flags": torch.zeros(4, dtype=torch.int32)},
    {"prefix": _VALUES.cumsum(0)},
)

EXERCISES = {
    1: Exercise(
        "a kernel that ranks the elements of each expert in ascending order",
        kernel_test(_ranks(0, 3), _ranks(1, 8), seeds=2),
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
        kernel_test(_CHAIN, seeds=_SEEDS),
        "The value first, then cuda.threadfence(), then the flag. The reader needs a fence as well: between the load "
        "of the flag and the load of the value.",
        chained_scan,
    ),
    4: Exercise(
        "three numbers: the most slots per CTA, and the two counts that a reader unpacks",
        number_test((1 << 16) - 1, 1, 5),
        "All slots of a CTA may go to one expert. Write 65537 and 4 << 16 in hexadecimal.",
        "(65535, 1, 5)  # the 17th bit of 65537 lands in the count of expert 1",
    ),
}
