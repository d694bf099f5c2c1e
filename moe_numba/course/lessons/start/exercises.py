"""Exercises of notebook 00."""

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.exercises import Exercise


@cuda.jit
def reverse(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    out[i] = tile[63 - i]


def _reverses(kernel):
    x, out = np.arange(64, dtype=np.float32), np.full(64, np.nan, np.float32)
    kernel[1, 64](x, out)
    if not (wrong := np.flatnonzero(out != x[::-1])).size:
        return None
    return f"out[{wrong[0]}] is {out[wrong[0]]:g}, not {x[63 - wrong[0]]:g}; {wrong.size} of 64 elements are wrong"


@cuda.jit
def count_positive(x, count):
    i = cuda.grid(1)
    if i < len(x) and x[i] > 0:
        cuda.atomic.add(count, 0, int32(1))


def _counts(kernel):
    for size in (256, 250):
        x, count = np.arange(size, dtype=np.float32) % 3 - 1, np.zeros(1, np.int32)
        kernel[4, 64](x, count)
        if count[0] != (expected := int((x > 0).sum())):
            return f"of {size} numbers {expected} are positive; the kernel counts {count[0]}"
    return None


KERNEL_US, CALL_US = 6, 9  # of exercise 3


def _times_per_call(answer):
    """Per iteration of a loop of calls: with half of the kernel time, and with half of the call time."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return "two numbers are needed, one for each question"
    expected = max(KERNEL_US / 2, CALL_US), max(KERNEL_US, CALL_US / 2)
    wrong = [which for which, a, b in zip(("first", "second"), answer, expected, strict=True) if a != b]
    if not wrong:
        return None
    return f"the {' and the '.join(wrong)} number is wrong: after the change, which of the CPU and the GPU waits?"


def all_close(result, expected):
    return bool(((result - expected).abs() <= 1e-3).all())  # "not any(... > 1e-3)" would accept NaN


def _rejects(check):
    expected = torch.arange(8.0)
    wrong = expected.clone()
    wrong[5] += 1
    slightly_wrong, unwritten = expected.clone(), expected.clone()
    slightly_wrong[2] += 0.002
    unwritten[0] = float("nan")
    if not check(expected + 1e-4, expected):
        return "it rejects a result whose largest error is 0.0001"
    if check(wrong, expected):
        return "it accepts a result of which one element is wrong by 1"
    if check(slightly_wrong, expected):
        return "it accepts a result of which one of 8 elements is wrong by 0.002: each error counts, not their mean"
    if check(wrong - 2, expected):
        return "it accepts a result that is too small"
    if check(unwritten, expected):
        return "it accepts a result of which one element was never written: it is still NaN, and NaN > 0.001 is False"
    return None


EXERCISES = {
    1: Exercise(
        "a kernel that reverses 64 numbers through shared memory",
        _reverses,
        "Which threads write the elements that a thread reads? All of them must have written before it reads.",
        reverse,
    ),
    2: Exercise(
        "a kernel that counts the positive numbers of x, whose size may be no multiple of the block size",
        _counts,
        "Threads that add to the same element need cuda.atomic.add(count, 0, 1). Which threads have no number?",
        count_positive,
    ),
    3: Exercise(
        "two numbers, in microseconds",
        _times_per_call,
        "Draw the CPU's calls and the GPU's kernels in two rows, as in the figure of consecutive calls.",
        "(9, 6)  # halving the kernel gains nothing: the GPU waits for the CPU",
    ),
    4: Exercise(
        "a function of a result and the expected tensor that returns whether all elements are within 0.001",
        _rejects,
        "Comparisons with NaN are false. Ask whether every error is small, not whether any is large.",
        all_close,
    ),
}
