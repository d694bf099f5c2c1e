"""Benchmark of the kernels for GPUs of compute capability 8.0, run on a newer GPU beside the kernels for that GPU.

It shows what the instructions of the newer GPU gain, and what a kernel without them reaches beside ``torch.mm``. These
are not the times of an older GPU. ``older_gpus_measure`` measures the rows.
"""

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.figures.tables import markdown_table
from moe_numba.course.bench.records import format_us
from moe_numba.course.bench.topics.dispatch_combine import show as dispatch_combine
from moe_numba.course.bench.topics.older_gpus import measure as older_gpus_measure

OLDER = (8, 0)
OLDER_NAME = "{}.{}".format(*OLDER)
QUICK_ROWS = (16,)


def measure(peers, quick):
    """Return the rows of the record. Each step's outputs are checked before it is timed."""
    sizes = older_gpus_measure.Sizes()
    if quick:
        sizes = sizes._replace(rows=QUICK_ROWS)
    capabilities = sorted({OLDER, torch.cuda.get_device_capability()})
    return older_gpus_measure.measure(capabilities, sizes, torch.cuda.device_count() >= older_gpus_measure.RANKS)


def out_of_reach(row):
    """Return whether a row needs more GPUs than there are."""
    return row["config"].get("ranks", 0) > torch.cuda.device_count()


def comparisons(record):
    """Yield (operation, size, row of the older path, {name: row beside it}) of each measurement."""
    for row in records.select(record, config={"capability": OLDER_NAME}):
        config = row["config"]
        if "num_groups" in config:
            groups, rows = config["num_groups"], row["size"]["rows"]
            size = f"{rows} x {config['n']} x {config['k']}"
            if groups > 1:
                size = f"{groups} groups of {rows // groups} row{'s' * (rows > groups)}"
            yield row["operation"], size + row["step"].removeprefix("final"), row, beside(record, row)
    for operation, wanted in dispatch_combine.STEPS.items():
        if row := records.find(record, config={"capability": OLDER_NAME}, **wanted):
            size = f"{row['size']['tokens']} tokens on each of {row['config']['ranks']} GPUs"
            yield operation, size, row, beside(record, row)


def beside(record, row):
    """Return {name: row}: ``torch.mm`` of the same run, and the same step with the kernels for the GPU itself."""
    config = {name: value for name, value in row["config"].items() if name != "capability"}
    same = records.select(record, operation=row["operation"], size=row["size"], dtype=row["dtype"], config=config)
    by_torch = "torch.mm" + row["step"].removeprefix("final")
    found = {}
    for other in same:
        if other["step"] == by_torch and other["run"] == row["run"]:
            found["torch.mm"] = other
        if other["step"] == row["step"] and other["config"]["capability"] != OLDER_NAME:
            found[f"path for {other['config']['capability']}"] = other
    return found


def figures(record):
    """Draw the times of both paths, and of ``torch.mm``, as bars."""
    rows, columns = [], {OLDER_NAME: f"path for {OLDER_NAME}"}
    for operation, size, row, others in comparisons(record):
        times = {OLDER_NAME: row, **others}
        columns |= {name: name for name in others}
        rows.append({"step": f"{operation}, {size}"} | {name: other["kernel_us"] for name, other in times.items()})
    title = f"Kernels for compute capability {OLDER_NAME} on an {record['gpu']}: kernel time"
    return {"paths": plots.bars_figure(rows, columns, title=title, caption=plots.caption(record))}


def readme_table(record):
    """Return a table of kernel times in microseconds: the older path, and what it is compared with."""
    lines = []
    for operation, size, row, others in comparisons(record):
        own, name = row["kernel_us"]["median"], f"`{operation}`" if "num_groups" in row["config"] else operation
        for other, found in others.items():
            us = found["kernel_us"]["median"]
            lines.append([name, size, format_us(own), f"{format_us(us)} ({other})", f"{us / own:.2f}"])
    headings = ["operation", "size", f"path for {OLDER_NAME}", "compared with", "ratio"]
    return f"{markdown_table(headings, lines, text_columns=2)}\n\n{_caption(record)}"


def _caption(record):
    """Return what the table's numbers are, from which runs, and the provenance of the record."""
    text = f"Kernel time in microseconds; the ratio is below 1 where the path for {OLDER_NAME} is slower."
    grouped = next((row["config"] for row in record["rows"] if row["config"].get("num_groups", 1) > 1), None)
    if grouped:
        text += f" Each group has a weight of {grouped['n']} x {grouped['k']}."
    text += " Each path was measured in a process of its own. `torch.mm` was measured in the process of the path for "
    text += f"{OLDER_NAME}: interleaved with it, where the kernel that takes more power lowers the other's clock, and "
    text += "alone."
    exchange = next((row for row in record["rows"] if "ranks" in row["config"]), None)
    if exchange:
        text += f" Dispatch and combine: {exchange['config']['num_sms']} SMs, the slower rank"
        if measured := exchange.get("measured"):
            text += f", {plots.with_commit(measured)}"
        text += "."
    provenance = plots.provenance(record)
    return f"{text} {provenance[0].upper()}{provenance[1:]}."
