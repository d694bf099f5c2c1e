"""Exercises of notebook 00."""

import sys
from dataclasses import dataclass

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, function_test, kernel_test, number_test
from moe_numba.course.steps.exercises import as_one_of
from moe_numba.course.steps.lesson import Table
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG, Verdict


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


@dataclass(frozen=True)
class Repair:
    """Choose one of several repairs of a kernel from its profile, before their counts appear."""

    rows: int = 256
    columns: int = 64

    def check(self, kernel, repairs: dict, choice=...) -> Verdict:
        """Count what the kernel and its repairs access, and compare the choice with the one that accesses least."""
        name, known, choice = "choose the repair", ", ".join(repairs), as_one_of(choice, repairs)
        if choice not in repairs:
            if choice is ...:
                return Verdict(name, OPEN, f"no choice yet ({known}); the counts appear with it")
            return Verdict(name, WRONG, f"you chose {choice!r}; the choices are {known}")
        kernels = {"as it is": kernel} | repairs
        names, functions = [each.__name__ for each in kernels.values()], kernels.values()
        found = in_simulator(_counts, names, self.rows, self.columns, functions=functions)
        for label, counts in zip(kernels, found, strict=True):
            if counts is None:
                return Verdict(name, WRONG, f"{label} does not count the rows whose sum is above zero: it was edited")
        sums = {label: sum(counts) for label, counts in zip(kernels, found, strict=True)}
        best = min(repairs, key=sums.get)
        lines = [
            [label, *map("{:,}".format, (*counts, sums[label]))] for label, counts in zip(kernels, found, strict=True)
        ]
        verdict = "right" if best == choice else f"wrong, you chose {choice}"
        return Verdict(
            name,
            RIGHT if best == choice else WRONG,
            f"{verdict}: {best} leaves the fewest transactions",
            table=Table(["kernel", "sectors, global", "wavefronts, shared", "lanes, atomic", "together"], lines),
            notes=(_WHY_REPAIR,),
        )


_WHY_REPAIR = (
    "An access to shared memory takes 32 wavefronts instead of one, and a load 32 sectors instead of four. But the "
    "load is in the loop: it is executed 64 times as often. A line costs its requests times what each costs."
)


def _counts(names, rows, columns):
    """Return (sectors, wavefronts, lanes of atomic operations) of kernels of the page; None for one that is wrong."""
    page, found = vars(sys.modules["__main__"]), []
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    for name in names:
        count = torch.zeros(1, dtype=torch.int32)
        with simulator.profile() as profile:
            page[name][1, rows](x, count)
        total = profile[name].total
        lanes = sum(each.lanes for (_, operation, _), each in total.accesses.items() if operation == "atomic")
        counts = total.global_load_sectors, total.shared_load_wavefronts + total.shared_store_wavefronts, lanes
        found.append(counts if int(count) == int((x.double().sum(1) > 0).sum()) else None)
    return found


repair = Repair()
EXERCISES = {
    1: Exercise(
        "a kernel that reverses 64 numbers through shared memory",
        kernel_test(REVERSED, at_least={"loads of a warp from shared memory": 2}),
        "Which threads write the elements that a thread reads? All of them must have written before it reads.",
        reverse,
    ),
    2: Exercise(
        "a kernel that counts the positive numbers of x, whose size may be no multiple of the block size",
        kernel_test(_counted(256), _counted(250), at_most={"loaded sectors": 40}),  # one thread alone loads more
        "Threads that add to the same element need cuda.atomic.add(count, 0, 1). Which threads have no number?",
        count_positive,
    ),
    4: Exercise(
        "two numbers, in microseconds",
        number_test(9, 6),
        "Draw the CPU's calls and the GPU's kernels in two rows, as in the figure of consecutive calls.",
        "(9, 6)  # halving the kernel gains nothing: the GPU waits for the CPU",
    ),
    5: Exercise(
        "a function of a result and the expected tensor that returns whether all elements are within 0.001",
        function_test(all_close, _RESULTS),
        "Comparisons with NaN are false. Ask whether every error is small, not whether any is large.",
        all_close,
    ),
}
