"""Run a benchmark topic with small sizes and without a clock."""

from moe_numba.course.bench import Stats, records

ABOUT = {"gpu": "NVIDIA Toy", "driver": "1", "versions": {}, "commit": "1234567", "date": "2026-01-01T00:00:00Z"}

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.95",
    "versions": {"numba-cuda": "0.30.4"},
    "commit": "1a2b3c4d",
    "date": "2026-11-20T10:00:00Z",
}


def patch_topic(monkeypatch, topic, **values):
    """Replace a topic's sizes by ``values``, and the timing functions that it has.

    Each step runs once and takes one microsecond more than the one before.
    """
    times = iter(range(10, 10**6))

    def timed(named, **_):
        for calls in named.values():
            (calls if callable(calls) else calls[0])()
        return {name: Stats(t, t - 1.0, t + 1.0) for name, t in zip(named, times, strict=False)}

    empty = records.row("empty kernel", config={"dependent": True}, kernel=Stats(0.4, 0.3, 0.5))
    timing = {
        "kernel_times": timed,
        "call_times": timed,
        "copy_bandwidth": lambda: 4e12,
        "empty_kernel": lambda: [empty],
    }
    timing = {name: value for name, value in timing.items() if hasattr(topic, name)}
    for name, value in {**timing, **values}.items():
        monkeypatch.setattr(topic, name, value)


def record_of(topic, name):
    """Measure a patched topic; return its record, which is checked."""
    record = record_with(name, topic.measure([], False))
    assert records.invalid(record) == []
    return record


def record_with(name, rows):
    """Return a record with these rows."""
    functions, rows = records.functions_apart(rows)
    return {"topic": name, **ABOUT, "functions": functions, "rows": rows}
