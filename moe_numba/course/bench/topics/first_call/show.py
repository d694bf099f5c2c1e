"""Benchmark of the first call: imports, `warm_up`, and first calls of a layer with an empty and with a full cache.

Each time is of a new process. ``first_call_measure`` measures the rows.
"""

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import markdown_table
from moe_numba.course.bench.topics.first_call import measure as first_call_measure
from moe_numba.course.bench.topics.first_call.measure import EMPTY, FLOOR, FULL, FUNCTIONS

COLUMNS = {EMPTY: "empty cache", FULL: "full cache"}
IMPORTS = {  # step -> name in the table
    "final": "`import moe_numba`",
    FUNCTIONS: "`from moe_numba import fused_experts`",
    FLOOR: "`import torch; from numba import cuda`",
    "torch": "`import torch`",
    "numba.cuda": "`from numba import cuda`",
}
QUICK_TOKENS = (16,)


def measure(peers, quick):
    """Return the rows of the record. Each first call's output is checked after it is timed."""
    return first_call_measure.measure(QUICK_TOKENS, 1) if quick else first_call_measure.measure()


def calls(record):
    """Yield (name, {cache: row}) of `warm_up` and of each first call."""
    found: dict = {}
    for row in record["rows"]:
        if "cache" in row["config"]:
            tokens = row["size"].get("tokens")
            name = f"first call, {tokens} token{'s' * (tokens > 1)}" if tokens else "warm_up, all sizes"
            found.setdefault(name, {})[row["config"]["cache"]] = row
    yield from found.items()


def figures(record):
    """Draw the times of `warm_up` and of the first calls as bars."""
    rows = [{"step": name} | {cache: row["call_us"] for cache, row in caches.items()} for name, caches in calls(record)]
    title = f"First call of a layer on an {record['gpu']}"
    return {"calls": plots.bars_figure(rows, COLUMNS, title=title, caption=plots.caption(record))}


def readme_table(record):
    """Return tables of `warm_up` and first calls, and of imports, in seconds."""
    seconds = lambda row: f"{row['call_us']['median'] / 1e6:.2f}" if row else ""
    lines = [[name, *(seconds(caches.get(cache)) for cache in COLUMNS)] for name, caches in calls(record)]
    warm = records.find(record, operation="warm_up")
    of_imports = {step: records.find(record, operation="import", step=step) for step in IMPORTS}
    imports = [[name, seconds(of_imports[step])] for step, name in IMPORTS.items() if of_imports[step]]
    layer = warm["config"]["model"]
    return "\n".join(
        [
            markdown_table(["seconds", *COLUMNS.values()], lines),
            "",
            f"A layer of {layer} in bfloat16, gate and experts; each time in a new process, from the call until the "
            f"GPU has finished. `warm_up` compiles {warm['kernels_compiled']} kernels in {warm['processes']} "
            "processes; with a full cache it finds all of them.",
            "",
            markdown_table(["import", "seconds"], imports),
            "",
            f"Imports in new processes, without the start of Python; {plots.provenance(record)}.",
        ]
    )
