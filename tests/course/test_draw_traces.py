"""Figures of simulator traces: rings of a dispatch, phases of mbarriers, and pipeline stages."""

import json

import pytest
from helpers.figures import cut_off, labelled

from moe_numba import simulator
from moe_numba.course.lessons.dispatch.ring_player import describe, rings, stills
from moe_numba.course.lessons.dispatch.ring_trace import Moment, Ring, play, replay
from moe_numba.course.lessons.hopper import draw as hopper
from moe_numba.course.lessons.hopper.draw_time import barrier_steps
from moe_numba.simulator.core.scheduler import Event

simulated = pytest.mark.skipif(not simulator.ENABLED, reason="the figure's data come from the simulator")

# Dispatch

IN_RANK = [
    [[1, 0], [0, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1], [0, 1]],
    [[0, 1], [1, 0], [1, 1], [1, 0], [0, 1], [1, 0], [1, 0], [1, 1]],
]


@pytest.fixture(scope="module", params=[(2, 2, 1, 1, 0), (2, 3, 2, 2, 3), (4, 4, 2, 1, 1)])
def played(request):
    return play(IN_RANK, **dict(zip(("channels", "ring", "chunk", "warps", "seed"), request.param)))


@simulated
def test_trace_is_a_dispatch(played):
    rows = [[[s, t] for s in range(2) for t, to in enumerate(IN_RANK[s]) if to[r]] for r in range(2)]
    assert played["received"] == rows and json.loads(json.dumps(played)) == played
    last = {}
    for moment, states in replay(played):
        key = moment.rank, moment.source, moment.channel
        ring = states[key]
        assert 0 <= ring.tail - ring.head <= played["ring"]
        if moment.what == "row":
            assert IN_RANK[moment.source][moment.token][moment.rank] and ring.state(moment.value) == "written"
        last[key] = ring.tail, ring.head, ring.start, ring.end
    assert sum(moment[0] == "row" for moment in played["moments"]) == sum(map(len, rows))
    assert len(last) == 4 * played["channels"]
    for (rank, source, channel), (tail, head, start, end) in last.items():
        share = len(IN_RANK[source]) // played["channels"]
        counts = [sum(to[rank] for to in IN_RANK[source][c * share : (c + 1) * share]) for c in range(channel + 1)]
        assert tail == head == counts[-1] and (-start - 1, -end - 1) == (sum(counts[:-1]), sum(counts))


@simulated
def test_a_seed_repeats_a_trace():
    first, again, other = (play(IN_RANK, ring=2, chunk=1, channels=1, seed=seed)["moments"] for seed in (3, 3, 4))
    assert first == again != other


def test_slots_are_written_then_full_then_free():
    ring, states = Ring(3), []
    for moment in (Moment("row", 0, 1, 0, 0, 7), Moment("tail", 0, 1, 0, 1), Moment("head", 0, 1, 0, 1)):
        ring.apply(moment)
        states.append(ring.state(0))
    assert states == ["written", "full", "free"] and ring.state(1) == "free" and ring.slots == [7, None, None]
    assert describe(Moment("start", 0, 1, 2, -5)) == "Rank 1, channel 2, stores start -5 at rank 0, which encodes 4."
    assert "writes token 7 to slot 0 at rank 0" in describe(Moment("row", 0, 1, 0, 0, 7))


@simulated
def test_the_player_has_a_frame_for_each_row_tail_and_head(played):
    player = rings(played)
    shown = [moment for moment in played["moments"] if moment[0] in ("row", "tail", "head")]
    assert len(player.frames) == len(shown)
    boxes = lambda frame: [shape for shape in frame.shapes if hasattr(shape, "kind")]
    assert all(len(boxes(frame)) == 4 * played["channels"] * played["ring"] for frame in player.frames)
    for moment, frame in zip(shown, player.frames, strict=True):
        assert moment[0] != "row" or "waits" in {shape.kind for shape in boxes(frame)}
    assert any(shape.kind == "active" for frame in player.frames for shape in boxes(frame))
    assert {shape.kind for shape in boxes(player.frames[-1])} == {"plain"}  # everything has been read


@simulated
def test_stills_show_one_row_written_published_and_read(played):
    player = rings(played)
    notes = [player.frames[number].note for number in stills(player)]
    assert "writes token" in notes[0] and "stores tail" in notes[1] and "has copied rows" in notes[2]
    assert cut_off(player.strip(stills(player))) == []


# Pipelines


def pipeline_trace(stages=1, iterations=2, warps=1):
    """Return a trace in which loads run ahead as far as they can; each use of a stage takes one step."""
    events, names = [], [f"mbarrier {i} of dynamic shared memory" for i in range(2 * stages)]
    note = lambda warp, what, **details: events.append(Event(len(events), (0, 0, 0), warp, 0, what, details))

    def load(k):
        note(9, "mbarrier.arrive", barrier=names[k % stages], phase=k // stages, bytes=100)
        note(9, "async copy", copy=k, bytes=100, event="starts")

    for k in range(stages):
        load(k)
    for k in range(stages * iterations):
        stage, iteration = k % stages, k // stages
        note(9, "async copy", copy=k, bytes=100, event="lands")
        for warp in range(warps):
            note(warp, "mbarrier.wait", barrier=names[stage], phase=iteration + 1, parity=iteration & 1)
        for warp in range(warps):
            note(warp, "mbarrier.arrive", barrier=names[stages + stage], phase=iteration, bytes=0)
        if k + stages < stages * iterations:
            load(k + stages)
    return events


def test_mbarrier_phase_completes_when_no_arrival_and_no_byte_is_pending():
    steps = barrier_steps(pipeline_trace(), 0, 1)
    assert [tuple(step[2:]) for step in steps] == [(0, 0, 100), (0, 0, 0), (1, 0, 100), (1, 0, 0)]
    figure = hopper.barrier_life(pipeline_trace(warps=2), 1, 2)
    assert cut_off(figure) == [] and len(labelled(figure, "arrival")) == 2
    assert len(labelled(figure, "end of phase")) == len(labelled(figure, "phase")) == 2
    assert len(labelled(hopper.barrier_life(pipeline_trace(), 0, 1), "bytes")) == 2


@pytest.mark.parametrize("stages, iterations, warps", [(1, 3, 1), (2, 2, 4), (3, 3, 2), (4, 2, 8)])
def test_a_stage_is_loaded_or_used_but_never_both(stages, iterations, warps):
    trace = pipeline_trace(stages, iterations, warps)
    spans = hopper.ring_spans(trace, 0, stages, stages)
    assert len(spans) == 2 * stages * iterations
    for stage in range(stages):
        own = [span for span in spans if span.stage == stage]
        expected = [(what, iteration) for iteration in range(iterations) for what in ("load", "use")]
        assert [(span.what, span.iteration) for span in own] == expected
        assert all(one.end <= other.start for one, other in zip(own, own[1:]))
    figure = hopper.ring(trace, 0, stages, stages)
    assert cut_off(figure) == []
    assert len(labelled(figure, "load")) == len(labelled(figure, "use")) == stages * iterations
