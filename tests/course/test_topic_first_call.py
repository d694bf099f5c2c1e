"""Benchmark topic first_call: processes and their caches, the check of results, rows, figure and tables."""

import os

import pytest
from bench_topics import record_with
from helpers.figures import misplaced

from moe_numba import simulator
from moe_numba.course.bench import records, topic
from moe_numba.course.bench.timing import fresh_process
from moe_numba.course.bench.topics.first_call import measure

first_call = topic("first_call")
SMALL = 4, 64, 64, 2


@pytest.fixture
def record(monkeypatch):
    """A record whose processes are calls that take 1, 2, ... seconds, and write to their caches."""
    times, caches = iter(range(1, 100)), []

    def call_in_process(function, *arguments, MOE_NUMBA_CACHE):
        was_empty = not os.path.exists(MOE_NUMBA_CACHE)
        caches.append((function.__name__, *arguments[:-1], was_empty))
        os.makedirs(MOE_NUMBA_CACHE, exist_ok=True)
        return dict(us=1e6 * next(times), count=5, kernels=[])

    monkeypatch.setattr(measure, "call_in_process", call_in_process)
    monkeypatch.setattr(measure, "import_us", lambda code: 1e6 * len(code))
    made = record_with("first_call", measure.measure((1, 16), 2, SMALL))
    assert records.invalid(made) == []
    made["caches"] = caches
    return made


def test_each_process_has_an_empty_or_the_full_cache(record):
    both = lambda *call: [(*call, True)] * 2 + [(*call, False)] * 2
    assert record["caches"] == [*both("time_warm_up"), *both("time_first_call", 1), *both("time_first_call", 16)]


def test_rows_figure_and_tables(record):
    rows = [(row["operation"], row["step"], row["config"].get("cache")) for row in record["rows"]]
    assert rows[:5] == [("import", step, None) for step in measure.IMPORTS]
    assert rows[5:] == [
        (name, "final", cache) for name in ("warm_up", *2 * ["first call"]) for cache in ("empty", "full")
    ]
    (floor,) = {row["floor_us"] for row in record["rows"] if "floor_us" in row}
    assert floor == 1e6 * len(measure.IMPORTS[measure.FLOOR])
    lines = first_call.readme_table(record).splitlines()
    assert lines[:4] == [
        "| seconds | empty cache | full cache |",
        "|---|---:|---:|",
        "| warm_up, all sizes | 1.50 | 3.50 |",
        "| first call, 1 token | 5.50 | 7.50 |",
    ]
    assert "compiles 5 kernels in" in lines[6] and lines[8] == "| import | seconds |"
    assert "| `import torch` | 12.00 |" in lines and "Toy" in lines[-1]
    (figure,) = first_call.figures(record).values()
    assert not misplaced(figure)


@pytest.mark.skipif(not simulator.ENABLED, reason="the sizes are a simulator's")
def test_a_new_process_makes_the_first_call(tmp_path):
    found = fresh_process.call_in_process(measure.time_first_call, 3, SMALL, MOE_NUMBA_CACHE=str(tmp_path))
    assert found["us"] > 0 and found["kernels"]
    with pytest.raises(RuntimeError, match="(?s)time_first_call with MOE_NUMBA_CACHE=x returned nothing.*hidden is 60"):
        fresh_process.call_in_process(measure.time_first_call, 3, (4, 60, 64, 2), MOE_NUMBA_CACHE="x")


@pytest.mark.skipif(not simulator.ENABLED, reason="the sizes are a simulator's")
def test_wrong_results_are_not_recorded(monkeypatch):
    monkeypatch.setattr(measure.MoELayer, "forward", lambda layer, x: x)
    with pytest.raises(AssertionError, match="3 tokens: "):
        measure.time_first_call(3, SMALL)


def test_warm_up_is_timed():
    found = measure.time_warm_up(SMALL)
    assert found["us"] > 0 and (found["count"] > 0) != simulator.ENABLED


def test_imports_are_timed_in_new_processes():
    assert measure.import_us("import json") > 0
    with pytest.raises(RuntimeError, match="import nothing_of_this_name failed"):
        measure.import_us("import nothing_of_this_name")
