"""The pictures of Hopper's instructions: what is drawn agrees with the simulator."""

import numpy as np
import pytest
from helpers.figures import labelled, said, values_of

from moe_numba import simulator
from moe_numba.course.draw import hopper as draw
from moe_numba.course.draw.hopper_time import barrier_steps
from moe_numba.simulator.core.scheduler import Event

DESCRIPTOR = 1 << 62 | 64 << 32 | 1 << 16 | 0x2400 >> 4


def barrier_trace(phases=2, late=True):
    """A barrier of two arrivals; one announces bytes, which two copies bring."""
    events, copy = [], 0
    note = lambda warp, what, **details: events.append(Event(len(events), (0, 0, 0), warp, 0, what, details))
    name = "mbarrier 0 of dynamic shared memory"
    for phase in range(phases):
        note(0, "mbarrier.arrive", barrier=name, phase=phase, bytes=4096)
        for _ in range(2):
            note(0, "async copy", copy=copy, bytes=2048, event="starts")
            copy += 1
        landings = [lambda c=c: note(0, "async copy", copy=c, bytes=2048, event="lands") for c in (copy - 2, copy - 1)]
        landings.insert(
            2 if late else 0, lambda phase=phase: note(1, "mbarrier.arrive", barrier=name, phase=phase, bytes=0)
        )
        for land in landings:
            land()
        note(1, "mbarrier.wait", barrier=name, phase=phase + 1, parity=phase & 1)
    return events


def ring_trace(stages=3, turns=3, warps=2):
    """A ring in which loads run ahead as far as they can, and each use takes one step."""
    events, names = [], [f"mbarrier {i} of dynamic shared memory" for i in range(2 * stages)]
    note = lambda warp, what, **details: events.append(Event(len(events), (0, 0, 0), warp, 0, what, details))

    def start(k):
        note(9, "mbarrier.arrive", barrier=names[k % stages], phase=k // stages, bytes=100)
        note(9, "async copy", copy=k, bytes=100, event="starts")

    for k in range(min(stages, stages * turns)):
        start(k)
    for k in range(stages * turns):
        note(9, "async copy", copy=k, bytes=100, event="lands")
        for warp in range(warps):
            note(warp, "mbarrier.wait", barrier=names[k % stages], phase=k // stages + 1, parity=k // stages & 1)
        for warp in range(warps):
            note(warp, "mbarrier.arrive", barrier=names[stages + k % stages], phase=k // stages, bytes=0)
        if k + stages < stages * turns:
            start(k + stages)
    return events


def test_the_swizzle_is_the_simulators():
    figure, chunks = draw.swizzle(16), simulator.tensor_map.swizzled_chunks(0, 16 * 128, 128)
    before, after = labelled(figure, "before"), labelled(figure, "after")
    at = {}
    for patch, value in zip(after, values_of(figure, "after"), strict=True):
        at[round(patch.get_y(), 3), round(patch.get_x(), 3)] = int(value)
    rows = sorted({y for y, _ in at}, reverse=True)
    found = [[at[y, x] for x in sorted(x for yy, x in at if yy == y)] for y in rows]
    assert np.array_equal(np.array(found), chunks.reshape(16, 8) % 8)
    assert values_of(figure, "before") == [str(c) for _ in range(16) for c in range(8)] and len(before) == 128


def test_the_banks_are_what_the_swizzle_is_for():
    for column in range(8):
        assert len(draw.banks(column, False)) == 4 and len(draw.banks(column, True)) == 32
    assert "chunk 0 of 8 rows: 4 of 32 banks, 8 passes" in said(draw.swizzle())
    assert "chunk 0 of 8 rows: 32 of 32 banks, 1 pass" in said(draw.swizzle())


def test_a_descriptor_says_what_its_bits_are():
    figure = draw.descriptor(DESCRIPTOR)
    bits = "".join(values_of(figure, "bit"))
    order = "".join(bits[half : half + 32][::-1] for half in (0, 32))
    assert int(order, 2) == DESCRIPTOR
    fields = {name: means for name, *_, means in draw.descriptor_fields(DESCRIPTOR)}
    assert fields == {"address": 0x2400, "leading bytes": 16, "stride bytes": 1024, "base": 0, "swizzle": "128 bytes"}


def test_a_fragment_is_the_simulators():
    row, column = simulator.fragments.accumulator_coordinates(16)
    for thread in range(128):
        for number in range(8):
            assert draw.holder(int(row[thread, number]), int(column[thread, number])) == (thread, number)
    assert len(labelled(draw.fragment(7), "held")) == 8


def test_a_barriers_life_adds_up():
    steps = barrier_steps(barrier_trace(), 0, 2)
    assert [phase for _, _, phase, *_ in steps] == [0] * 4 + [1] * 4
    assert [(pending, due) for *_, pending, due in steps[:4]] == [(1, 4096), (1, 2048), (1, 0), (0, 0)]
    figure = draw.barrier_life(barrier_trace(), 0, 2)
    assert len(labelled(figure, "end of phase")) == len(labelled(figure, "phase")) == 2
    assert len(labelled(figure, "bytes")) == 4 and len(labelled(figure, "arrival")) == 6


@pytest.mark.parametrize("stages, turns, warps", [(1, 3, 1), (2, 2, 4), (3, 3, 2), (4, 2, 8)])
def test_a_rings_stage_is_loaded_or_used_but_never_both(stages, turns, warps):
    spans = draw.ring_spans(ring_trace(stages, turns, warps), 0, stages, stages)
    assert len(spans) == 2 * stages * turns
    for stage in range(stages):
        mine = [span for span in spans if span.stage == stage]
        assert [(span.what, span.iteration) for span in mine] == [(w, t) for t in range(turns) for w in ("load", "use")]
        assert all(one.end <= other.start for one, other in zip(mine, mine[1:]))
    figure = draw.ring(ring_trace(stages, turns, warps), 0, stages, stages)
    assert len(labelled(figure, "load")) == len(labelled(figure, "use")) == stages * turns
