"""Benchmark of call time: the host's time per Python call of every public function, beside torch and the peers.

A call checks its arguments, which for most functions is a look-up of an earlier check of the same shapes, dtypes and
device. It then allocates its outputs from torch's caching allocator, reads torch's current stream, packs the kernel's
arguments, and calls the driver's launch function, which returns before the kernel runs. With ``out=`` it allocates
nothing, but checks the given tensors; functions with a workspace get one, too. A prepared call (`moe_numba.prepare`)
only reads the stream and launches. For comparison, `torch.sigmoid` is one allocation and one launch from C++, and two
`torch.empty` are two allocations alone.

``call_time_measure`` measures the functions, ``call_time_buffer_measure`` the methods of `Buffer`, on two GPUs. A peer
is an installed package, see ``baselines.peer_calls``, or a module of ``--peers`` with the same function ``calls``.
"""

import torch

from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import markdown_table
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.topics.call_time import measure as call_time_measure
from moe_numba.course.bench.topics.call_time import measure_buffer as call_time_buffer_measure

COLUMNS = {"": "call", ", out=": "out=", ", prepared": "prepared"}  # {suffix of a step: heading}
LINES = "torch.sigmoid", "torch.empty, twice"  # of the figure


def measure(peers, quick):
    """Return the rows of the record. Each step's outputs are checked before it is timed."""
    loops = call_time_measure.QUICK_LOOPS if quick else call_time_measure.LOOPS
    rows = call_time_measure.measure_functions(peers, loops)
    if torch.cuda.device_count() >= call_time_buffer_measure.RANKS:
        rows += call_time_buffer_measure.measure_buffer(loops)
    return rows


def out_of_reach(row):
    """Return whether a row needs more GPUs than there are."""
    return row["config"].get("ranks", 0) > torch.cuda.device_count()


def rows_by_operation(record):
    """Return ``{operation: {step: row}}``, with the package's and torch's steps under their suffix: "", ", out="."""
    found: dict = {}
    for row in record["rows"]:
        step = row["step"]
        suffix = step if step.startswith("peer:") else step.removeprefix("torch").removeprefix("final")
        found.setdefault(row["operation"], {})[suffix] = row
    return found


def figures(record):
    """Draw the functions' call times as bars, and two torch calls as lines."""
    operations = rows_by_operation(record)
    rows = [
        {"step": name} | {suffix: steps[suffix]["call_us"] for suffix in COLUMNS if suffix in steps}
        for name, steps in operations.items()
        if not name.startswith("torch.")
    ]
    return {
        "functions": plots.bars_figure(
            rows,
            COLUMNS,
            lines={name: operations[name][""]["call_us"]["median"] for name in LINES},
            title="Time of a Python call",
            caption=plots.caption(record),
        )
    }


def readme_table(record):
    """Return a table of call times in microseconds: called, with ``out=``, prepared, and the peers if there are any."""
    has_peers = any(row["step"].startswith("peer:") for row in record["rows"])
    columns = ["call", "with `out=`", "prepared", *(["other projects"] if has_peers else [])]
    lines = []
    for name, steps in rows_by_operation(record).items():
        times = {step: format_us(row["call_us"]["median"]) for step, row in steps.items()}
        cells = [times.get(suffix, "") for suffix in COLUMNS]
        if has_peers:
            cells.append("; ".join(f"{us} ({step[5:]})" for step, us in times.items() if step.startswith("peer:")))
        lines.append([f"`{name}`", *cells])
    calls = f"median of loops of {call_time_measure.CALLS} calls"
    table = markdown_table(["function", *columns], lines)
    return f"{table}\n\nCall time in microseconds, {calls}, {_provenance(record)}."


def _provenance(record):
    """Return the provenance of the record, and how and, if that was in an earlier run, when `Buffer` was measured."""
    text, row = plots.provenance(record), next((row for row in record["rows"] if "ranks" in row["config"]), None)
    if row:
        text += "; `Buffer` in one process per GPU on two GPUs, the slower one"
    if row and "measured" in row:
        text += f", with commit {row['measured']['commit'][:7]}, {row['measured']['date'][:10]}"
    return text
