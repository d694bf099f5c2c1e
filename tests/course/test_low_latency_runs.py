"""Rounds of notebook 10's kernels on virtual ranks, the frames of their traces, and the model of the pair's time."""

import re
from pathlib import Path

import pytest
import torch

from moe_numba import simulator
from moe_numba.course import low_latency_model
from moe_numba.course.bench import code_hash
from moe_numba.course.draw.low_latency import slot_frames
from moe_numba.course.draw.player import Box, Player
from moe_numba.course.low_latency_runs import Round, Sizes, first_error, random_rounds, run_rounds
from moe_numba.course.simulate import changed_source, define

simulated = pytest.mark.skipif(not simulator.ENABLED, reason="the kernels run in the simulator")
CELLS = code_hash.code_cells((Path(__file__).parents[2] / "notebooks" / "10_low_latency.py").read_text())
SHOWN = Sizes(2, 2, 8, 1, 1)
EXPERTS = [[[0], [1]], [[0], [0]]], [[[1], [0]], [[0], [1]]]  # by round, rank and token; rank r has expert r


@pytest.fixture(scope="module")
def kernels():
    """The namespace of the notebook's imports and kernel factories."""
    cells = [cell for cell in CELLS if re.search(r"^import warnings|^@cache|^def wait_vector", cell, re.M)]
    text = re.sub(r"^(ladder\.|PAIR|BASICS|exercise\().*$", "", "\n".join(cells), flags=re.M)
    return define(text, {"__name__": "notebook"}, "notebook_10.py")


def rounds_of(experts):
    rows = torch.ones(4, 8).bfloat16()
    return [Round([rows[:2]] * 2, [torch.tensor(ids) for ids in of_round], [rows] * 2) for of_round in experts]


@simulated
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make, data_is_flag", [("make_flags", False), ("make_lamport", True)])
def test_frames_of_slots(kernels, make, data_is_flag, seed):
    with simulator.seed(seed), simulator.trace(accesses=True) as events:
        run_rounds(SHOWN, rounds_of(EXPERTS), kernels[make](SHOWN))
    frames, width, height = slot_frames(events, SHOWN, data_is_flag)
    Player(frames, width, height, "slots")  # no box is outside
    notes = [frame.note for frame in frames]
    for number, of_round in enumerate(EXPERTS, start=1):
        for source, tokens in enumerate(of_round):
            for token, (rank,) in enumerate(tokens):
                stored = f"Operation {number}: rank {source} stores the row of its token {token} on rank {rank}."
                read = f"Operation {number}: rank {rank} reads the row of rank {source}'s token {token}"
                assert notes.count(stored) == 1
                assert notes.index(stored) < next(i for i, note in enumerate(notes) if note.startswith(read))
    assert len(notes) == 2 * (8 + 4 + 4)  # metadata on both ranks, rows, and reads
    last = [shape for shape in frames[-1].shapes if isinstance(shape, Box)]
    assert sum(box.kind in ("done", "waits") for box in last) == 0, "all rows have been read"
    assert sum(box.text == "sentinel" for box in last) == (16 if data_is_flag else 0)


@simulated
def test_other_traces_are_refused(kernels):
    with simulator.trace() as events:
        pass
    with pytest.raises(ValueError, match="no stores to slots; was it made with accesses=True"):
        slot_frames(events, SHOWN, True)
    with pytest.raises(ValueError, match="hidden is 16"):
        slot_frames(events, SHOWN._replace(hidden=16), True)


@simulated
def test_the_first_error_is_named(kernels):
    sizes = Sizes(2, 2, 16, 2, 2)

    def check(inputs, outputs):
        assert len(inputs.x) == len(outputs) == 2
        poison = sum(int(got["out"].isnan().sum()) for got in outputs)
        return f"{poison} elements were not written" if poison else None

    combine, dispatch = kernels["make_combine"](sizes), kernels["make_lamport"](sizes)
    assert first_error(sizes, check, dispatch, combine, seeds=2) is None
    wrong = lambda inputs, outputs: "wrong" if inputs.topk_idx[0].sum() else None
    assert first_error(sizes, wrong, dispatch, combine, seeds=1) == "seed 0, round 1: wrong"
    one_half = changed_source(kernels["make_lamport"], "int32(number & 1)", "int32(0)")
    dispatch = define(one_half, kernels, "one_half.py")["make_lamport"](sizes)
    assert re.match(r"seed \d: deadlock: ", first_error(sizes, lambda *_: None, dispatch))


def test_random_rounds_have_distinct_experts():
    sizes = Sizes(3, 4, 8, 4, 2)
    for inputs in random_rounds(sizes, 2, 0):
        assert len(inputs.x) == len(inputs.y) == 3 and inputs.y[0].shape == (12, 8)
        for ids in inputs.topk_idx:
            assert all(len(set(experts)) == 4 and max(experts) < 6 for experts in ids.tolist())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_of_the_model_are_those_of_random_routing(ranks):
    experts = torch.rand(4000, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    visited = torch.zeros(4000, ranks).scatter_(1, experts // (256 // ranks), 1.0)
    remote = visited[:, 1:].sum().item() * 2 * 7168
    assert low_latency_model.bytes_each_way(ranks, 4000) == pytest.approx(remote, rel=0.02)


def test_the_model_is_near_the_prototype():
    for tokens, us in low_latency_model.PROTOTYPE_US["data as its own flag"].items():
        assert low_latency_model.pair_us(2, tokens) == pytest.approx(us, rel=0.12)
