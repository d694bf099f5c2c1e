"""Frames of the grid-wide barrier of notebook 04, from simulator traces."""

import re

import pytest
import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.draw.player import Box, Label, Player
from moe_numba.course.lessons.align_one_launch.draw import barrier_frames
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32
from moe_numba.runtime.launch import launch

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the frames come from the simulator")


@cuda.jit
def barrier(workspace, passed):
    added = int32(uint32(1 << 31) - uint32(cuda.gridDim.x - 1)) if cuda.blockIdx.x == 0 else int32(1)
    old = atom_add_relaxed_gpu_s32(workspace, 0, added)
    while int32(old ^ ld_relaxed_gpu_s32(workspace, 0)) >= 0:
        pass
    passed[cuda.blockIdx.x] = 1


@cuda.jit
def arrive_only(workspace, passed):
    atom_add_relaxed_gpu_s32(workspace, 0, 1)
    passed[cuda.blockIdx.x] = 1


def traced(kernel, ctas, seed):
    workspace, passed = torch.zeros(4, dtype=torch.int32), torch.zeros(ctas, dtype=torch.int32)
    with simulator.seed(seed), simulator.trace(accesses=True) as events:
        launch(kernel, ctas, 1, workspace, passed, cooperative=True)
    return events


@pytest.mark.parametrize("ctas, seed", [(2, 0), (4, 1), (4, 2), (8, 3)])
def test_ctas_pass_after_the_last_one_has_arrived(ctas, seed):
    frames, width, height = barrier_frames(traced(barrier, ctas, seed), ctas)
    Player(frames, width, height, "a barrier")  # no box is outside
    arrivals = [number for number, frame in enumerate(frames) if "arrives" in frame.note]
    passes = [number for number, frame in enumerate(frames) if "passes" in frame.note]
    assert len(arrivals) == len(passes) == ctas and max(arrivals) < min(passes)
    assert "top bit flips" in frames[max(arrivals)].note
    for number, frame in enumerate(frames):
        arrived, passed = (sum(other <= number for other in of) for of in (arrivals, passes))
        kinds = [shape.kind for shape in frame.shapes if isinstance(shape, Box)]
        assert kinds.count("done") == passed and kinds.count("plain") == ctas - arrived
        (counter,) = [shape.text for shape in frame.shapes if isinstance(shape, Label)]
        top, rest = re.fullmatch(r"counter: top bit (\d), other bits ([\d,]+)", counter).groups()
        assert (int(top), int(rest.replace(",", "")) % ((1 << 31) - (ctas - 1))) == (
            int(arrived == ctas),
            0 if arrived == ctas else sum("CTA 0 " not in frames[n].note for n in arrivals if n <= number),
        )


def test_other_traces_are_refused():
    with pytest.raises(ValueError, match=r"only the CTAs \[\] of 4 pass the barrier"):
        barrier_frames(traced(arrive_only, 4, 0), 4)
