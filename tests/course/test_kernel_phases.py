"""Kernels without their later phases: `moe_numba.course.steps.kernel_phases`."""

import numpy as np
import pytest

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32

from moe_numba.course.steps.kernel_phases import phases_of, until, without_earlier


def make_sums(size):
    @cuda.jit
    def kernel(x, doubled, total):
        tile = cuda.shared.array(size, int32)
        i = cuda.threadIdx.x
        # load
        tile[i] = x[i]
        cuda.syncthreads()  # not the beginning of a phase
        # double
        doubled[i] = tile[i] * 2
        # column sums
        if i == 0:
            # nor is this one
            for k in range(size):
                total[0] += tile[k]

    return kernel


def run(make):
    x, doubled, total = np.arange(8, dtype=np.int32), np.full(8, -7, np.int32), np.zeros(1, np.int32)
    make(8)[1, 8](x, doubled, total)
    return doubled.tolist(), total[0]


def test_phases_are_named_by_comments_of_the_kernels_body():
    assert phases_of(make_sums) == ["load", "double", "column sums"]


def test_a_kernel_ends_after_the_phase():
    doubled = [2 * i for i in range(8)]
    assert run(until(make_sums, "load", globals())) == ([-7] * 8, 0)
    assert run(until(make_sums, "double", globals())) == (doubled, 0)
    assert run(until(make_sums, "column sums", globals())) == run(make_sums) == (doubled, 28)


def test_a_shortened_factory_can_be_shortened_again():
    assert phases_of(until(until(make_sums, "double", globals()), "load", globals())) == ["load"]


def test_a_phase_that_the_kernel_lacks_is_refused():
    with pytest.raises(ValueError, match=r"make_sums has the phases \['load', 'double', 'column sums'\], not 'sort'"):
        until(make_sums, "sort", globals())


def test_phases_are_the_differences():
    times = {"fill": 1.0, "load": 2.0, "double": 1.9, "column sums": 5.0, "sort": 3.0}
    found = without_earlier(times, ["load", "double", "column sums"])
    assert found == {"fill": 1.0, "load": 2.0, "double": 0.0, "column sums": 3.0, "sort": 3.0}
    assert list(found) == list(times) and sum(found.values()) == 1 + 5 + 3
