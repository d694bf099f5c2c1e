"""The Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing open."""

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path

from moe_numba.simulator.core.scheduler import Event
from moe_numba.simulator.timelines.spans import Span, Track, as_spans, from_zero, rows


def write_chrome_trace(
    path: str | os.PathLike, simulated: Iterable[Event | Span] = (), measured: Iterable[Span] = ()
) -> None:
    """Write a simulated trace and measured spans to a file that ui.perfetto.dev and chrome://tracing open.

    Parameters
    ----------
    path : path
        File to write; ``.json`` by convention.
    simulated : events of `simulator.trace`, or Spans
        A step of the scheduler counts as a microsecond.
    measured : Spans
        Such as those of `measured_spans`. Both start at time 0.

    Raises
    ------
    ValueError
        If there is nothing to write.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from pathlib import Path
    >>> stamps = np.array([[1000, 1500, 1800]], np.uint64)  # of one warp, in ns
    >>> spans = moe_numba.simulator.measured_spans(stamps, ["load", "compute"], ["warp 0"])
    >>> file = Path(tempfile.mkdtemp(), "trace.json")
    >>> moe_numba.simulator.write_chrome_trace(file, measured=spans)
    >>> [span.name for span in moe_numba.simulator.read_chrome_trace(file)]
    ['load', 'compute']
    """
    parts = [from_zero(as_spans(values)) for values in (simulated, measured)]
    if not any(parts):
        raise ValueError("the trace has no events: run a kernel with barriers, copies or other operations in the trace")
    processes, records, threads = {}, [], itertools.count(1)
    for part in parts:
        for (track, row), found in rows(part).items():
            process, thread = processes.setdefault(track.process, len(processes) + 1), next(threads)
            name = track.thread if row == 0 else f"{track.thread} ({row + 1})"
            where = {"pid": process, "tid": thread}
            records.append({"ph": "M", "name": "thread_name", "args": {"name": name, "track": track.thread}} | where)
            records.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": thread}} | where)
            records += [_record(span) | where for span in found]
    names = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        for name, process in processes.items()
    ]
    Path(path).write_text(json.dumps({"traceEvents": names + records, "displayTimeUnit": "ns"}, default=str))


def _record(span):
    """Return a span as an event of the format, whose times are in microseconds."""
    record = {"name": span.name, "cat": span.kind, "ts": span.start_ns / 1000, "args": span.args}
    return record | ({"ph": "X", "dur": span.duration_ns / 1000} if span.duration_ns else {"ph": "i", "s": "t"})


def read_chrome_trace(path: str | os.PathLike) -> list[Span]:
    """Return the spans of a file that `write_chrome_trace` wrote.

    Parameters
    ----------
    path : str or path
        The JSON file.

    Raises
    ------
    ValueError
        If it is no such file.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from pathlib import Path
    >>> stamps = np.array([[1000, 1500, 1800]], np.uint64)  # of one warp, in ns
    >>> spans = moe_numba.simulator.measured_spans(stamps, ["load", "compute"], ["warp 0"])
    >>> file = Path(tempfile.mkdtemp(), "trace.json")
    >>> moe_numba.simulator.write_chrome_trace(file, measured=spans)
    >>> [span.name for span in moe_numba.simulator.read_chrome_trace(file)]
    ['load', 'compute']
    """
    try:
        records = json.loads(Path(path).read_text())["traceEvents"]
        names = {
            (r["name"], r["pid"], r["tid"]): r["args"].get("track", r["args"]["name"])
            for r in records
            if r["ph"] == "M" and r["name"] in ("process_name", "thread_name")
        }
        return [_span(r, names) for r in records if r["ph"] != "M"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no trace of write_chrome_trace: {type(error).__name__}: {error}") from error


def _span(record, names):
    track = Track(names["process_name", record["pid"], 0], names["thread_name", record["pid"], record["tid"]])
    # Through integers, since a file's times are decimal fractions of a microsecond.
    times = (round(1000 * value, 3) for value in (record["ts"], record.get("dur", 0)))
    return Span(record["name"], track, *times, record["args"], record["cat"])
