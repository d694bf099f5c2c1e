"""Notebook 14: its kernels on virtual ranks, frames of their traces, the model of the pair's time, and its parts."""

import re
from pathlib import Path

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.bench.records import code_hash
from moe_numba.course.draw.player import Box, Player
from moe_numba.course.lessons.low_latency import model as low_latency_model
from moe_numba.course.lessons.low_latency import times as low_latency_times
from moe_numba.course.lessons.low_latency.draw import slot_frames
from moe_numba.course.lessons.low_latency.runs import Round, Sizes, first_error, random_rounds, run_rounds
from moe_numba.runtime.changed_source import changed_source, define

simulated = pytest.mark.skipif(not simulator.ENABLED, reason="the kernels run in the simulator")
CELLS = code_hash.code_cells((Path(__file__).parents[2] / "notebooks" / "14_low_latency.py").read_text())
SHOWN = Sizes(2, 2, 8, 1, 1)
EXPERTS = [[[0], [1]], [[0], [0]]], [[[1], [0]], [[0], [1]]]  # by round, rank and token; rank r has expert r


@pytest.fixture(scope="module")
def kernels():
    """The namespace of the notebook's imports and kernel factories."""
    cells = [cell for cell in CELLS if re.search(r"^import warnings|^@cache|^def wait_vector", cell, re.M)]
    return define("\n".join(cells), {"__name__": "notebook"}, "notebook_10.py")


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
    last = [shape for shape in frames[-1].shapes if isinstance(shape, Box) and shape.group != "legend"]
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


@simulated
@pytest.mark.parametrize("make, packed", [("make_flags", False), ("make_lamport", False), ("make_packed", True)])
def test_numbers_of_operations_wrap(kernels, make, packed):
    sizes, rounds = Sizes(2, 2, 8, 2, 2), random_rounds(Sizes(2, 2, 8, 2, 2), 4, 0)
    combine = None if packed else kernels["make_combine"](sizes)
    first = run_rounds(sizes, rounds, kernels[make](sizes), combine, packed)
    wrapped = run_rounds(sizes, rounds, kernels[make](sizes), combine, packed, operations=kernels["NUMBERS"] - 3)
    for of_round in zip(first, wrapped, strict=True):
        for found, again in zip(*of_round, strict=True):
            for name, tensor in found.items():
                assert torch.equal(tensor.nan_to_num(-7), again[name].nan_to_num(-7)), name


@simulated
def test_numbers_that_do_not_wrap_are_detected(kernels):
    sizes = Sizes(2, 2, 8, 2, 2)
    source = changed_source(kernels["make_packed"], "epochs[token] + 1 & NUMBERS", "epochs[token] + 1")
    dispatch = define(source, kernels, "no_wrap.py")["make_packed"](sizes)
    with simulator.seed(0), pytest.raises(simulator.SimulatorError, match="deadlock"):
        run_rounds(sizes, random_rounds(sizes, 4, 0), dispatch, packed=True, operations=(1 << 23) - 2)


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


def test_the_fit_finds_the_model_of_its_times():
    model = low_latency_model.PairModel(8.0, 200.0)
    found = low_latency_model.fit(2, times := {tokens: model.pair_us(2, tokens) for tokens in (1, 8, 64)})
    assert found == pytest.approx(model) and found.deviation(2, times) == pytest.approx(0)
    assert found.deviation(2, times | {8: 2 * times[8]}) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="times has 1 numbers of tokens; a fit needs at least 2"):
        low_latency_model.fit(2, {1: 10.0})


def row(step, ranks, us, tokens=1, dtype="bf16"):
    kernel = {"median": us, "p10": us - 1, "p90": us + 1}
    return {"step": step, "config": {"ranks": ranks}, "size": {"tokens": tokens}, "dtype": dtype, "kernel_us": kernel}


RECORD = {
    "rows": [
        *(row("final", 2, 20.0), row("final", 2, 30.0, tokens=8), row("final", 2, 1.0, dtype="e4m3")),
        *(row("final", 1, 9.0), row("peer:NCCL all-to-all", 2, 25.0)),
    ]
}


def test_times_of_a_record():
    assert low_latency_times.times_of(RECORD, "final", 2) == {1: 20, 8: 30}
    assert low_latency_times.times_of(RECORD, "final", 4) == {}
    assert low_latency_times.spread(RECORD, "final", 1) == {"median": 9, "p10": 8, "p90": 10}
    with pytest.raises(ValueError, match="no step 'flags' of 2 ranks with 1 tokens"):
        low_latency_times.spread(RECORD, "flags", 2)
    assert low_latency_times.peer_steps(RECORD) == {"NCCL all-to-all": "peer:NCCL all-to-all"}


def test_a_table_leaves_missing_times_empty():
    assert low_latency_times.table({"a": {1: 20.0}, "b": {1: 5.0, 8: 7.123}}, (1, 8), "tokens").splitlines() == [
        "| tokens | 1 | 8 |",
        "| --- | ---: | ---: |",
        "| a | 20.0 |  |",
        "| b | 5.00 | 7.12 |",
    ]


def test_parts_of_a_pair_add_up():
    parts = low_latency_times.parts_of(RECORD, "final", 0.75)
    assert parts == {"one rank alone": 9, "2 NVLink latencies": 1.5, "rest": 9.5} and sum(parts.values()) == 20
    spans = low_latency_times.spans({name: ("kernel", us) for name, us in parts.items()})
    assert [(name, start, end) for name, _, start, end in spans] == [
        *(("one rank alone", 0, 9), ("2 NVLink latencies", 9, 10.5), ("rest", 10.5, 20))
    ]
