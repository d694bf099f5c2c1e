"""Exercises of notebook 00."""

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, function_test, kernel_test, number_test


@cuda.jit
def reverse(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    out[i] = tile[63 - i]


X = np.arange(64, dtype=np.float32)
REVERSED = Run((1, 64), {"x": X, "out": np.full(64, np.nan, np.float32)}, {"out": X[::-1]})


@cuda.jit
def count_positive(x, count):
    i = cuda.grid(1)
    if i < len(x) and x[i] > 0:
        cuda.atomic.add(count, 0, int32(1))


def _counted(size):
    x = np.arange(size, dtype=np.float32) % 3 - 1
    return Run((4, 64), {"x": x, "count": np.zeros(1, np.int32)}, {"count": [(x > 0).sum()]}, f"{size} numbers")


def all_close(result, expected):
    return bool(((result - expected).abs() <= 1e-3).all())  # "not any(... > 1e-3)" would accept NaN


def _changed(element, value):
    result = torch.arange(8.0)
    result[element] = value
    return result, torch.arange(8.0)


_RESULTS = {
    "a result whose largest error is 0.0001": (torch.arange(8.0) + 1e-4, torch.arange(8.0)),
    "a result of which one element is wrong by 1": _changed(5, 6),
    "a result of which one of 8 elements is wrong by 0.002": _changed(2, 2.002),
    "a result that is too small": (torch.arange(8.0) - 1, torch.arange(8.0)),
    "a result of which one element was never written: it is NaN": _changed(0, float("nan")),
}


EXERCISES = {
    1: Exercise(
        "a kernel that reverses 64 numbers through shared memory",
        kernel_test(REVERSED),
        "Which threads write the elements that a thread reads? All of them must have written before it reads.",
        reverse,
    ),
    2: Exercise(
        "a kernel that counts the positive numbers of x, whose size may be no multiple of the block size",
        kernel_test(_counted(256), _counted(250)),
        "Threads that add to the same element need cuda.atomic.add(count, 0, 1). Which threads have no number?",
        count_positive,
    ),
    3: Exercise(
        "two numbers, in microseconds",
        number_test(9, 6),
        "Draw the CPU's calls and the GPU's kernels in two rows, as in the figure of consecutive calls.",
        "(9, 6)  # halving the kernel gains nothing: the GPU waits for the CPU",
    ),
    4: Exercise(
        "a function of a result and the expected tensor that returns whether all elements are within 0.001",
        function_test(all_close, _RESULTS),
        "Comparisons with NaN are false. Ask whether every error is small, not whether any is large.",
        all_close,
    ),
}
