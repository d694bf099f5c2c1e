"""Frames of the accesses to shared memory: what is read, and whether it was written before."""

import numpy as np
import pytest

from moe_numba import simulator

# isort: split
from numba import cuda, float32

from moe_numba.course.draw.player import Arrow, Box, Player
from moe_numba.course.draw.shared_memory import shared_accesses

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")


@cuda.jit
def reverse(x, out, barrier):
    tile = cuda.shared.array(8, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    if barrier:
        cuda.syncthreads()
    out[i] = tile[7 - i]


def traced(barrier):
    with simulator.seed(1), simulator.trace(accesses=True) as events:
        reverse[1, 8](np.arange(8, dtype=np.float32), np.zeros(8, np.float32), barrier)
    return events


def test_reads_before_the_write_are_marked():
    frames, width, height = shared_accesses(traced(False), 8, 8)
    assert len(frames) == 16 and Player(frames, width, height, "x")
    stale = [frame for frame in frames if "no thread has written" in frame.note]
    assert len(stale) == 4, "each pair of threads: the first one reads too early"
    assert all(any(isinstance(s, Box) and s.kind == "waits" for s in frame.shapes) for frame in stale)


def test_with_a_barrier_all_writes_come_first():
    frames, *_ = shared_accesses(traced(True), 8, 8)
    assert ["writes" in frame.note for frame in frames] == [True] * 8 + [False] * 8
    assert not any("no thread has written" in frame.note for frame in frames)
    last = [s for s in frames[-1].shapes if isinstance(s, Box)]
    assert [s.text for s in last] == list("76543210") + list("01234567")


def test_arrows_point_from_the_writer_and_to_the_reader():
    frames, *_ = shared_accesses(traced(True), 8, 8)
    for frame in frames:
        (arrow,) = [s for s in frame.shapes if isinstance(s, Arrow)]
        assert (arrow.y1 < arrow.y2) == ("writes" in frame.note)


def test_other_threads_and_elements_are_left_out():
    frames, *_ = shared_accesses(traced(True), 2, 8)
    assert len(frames) == 4


@pytest.mark.parametrize("threads, elements", [(0, 8), (15, 8), (8, 15)])
def test_too_many_are_refused(threads, elements):
    with pytest.raises(ValueError, match="1 to 14 can be shown"):
        shared_accesses(traced(True), threads, elements)


def test_a_trace_without_accesses_is_refused():
    with pytest.raises(ValueError, match="accesses=True"):
        shared_accesses([], 8, 8)
