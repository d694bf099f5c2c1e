"""Recorded times of a step: only for the code that was timed, and for the sizes of that record."""

from collections.abc import Mapping
from typing import Any

from moe_numba.course.bench import records
from moe_numba.course.bench.records.kernel_hash import ast_hash


def recorded_us(topic: str, step: str, kernel: Any, size: Mapping[str, Any], gpu: str = "h200") -> float | None:
    """Return the recorded kernel time of exactly this code at these sizes, in microseconds, or None.

    The code is the syntax trees of the kernel and of everything that it calls, and the values that factories passed to
    them (`records.kernel_hash.ast_hash`). So an edit has no recorded time until it is measured.

    Parameters
    ----------
    topic : str
        Of the record, such as "align_ladder".
    step : str
        Of the row.
    kernel : Kernel
        As the page has it now.
    size : dict
        Argument -> number; the row's size must have the same.
    """
    row = _row(topic, step, size, gpu)
    timed = row and [timed.get("ast") for timed in row.get("kernels", ())]
    return row["kernel_us"]["median"] if timed and ast_hash(kernel) in timed else None


def describe(topic: str, step: str, kernel: Any, size: Mapping[str, Any], gpu: str = "h200") -> str:
    """Return what a step prints of its recorded time, a sentence: also why there is none for this code."""
    row, us = _row(topic, step, size, gpu), recorded_us(topic, step, kernel, size, gpu)
    if us is not None:
        return f"recorded on an {gpu.upper()}: {us:.2f} us"
    if row is None:
        return f"not recorded on an {gpu.upper()} with {', '.join(f'{name} = {n}' for name, n in size.items())}"
    return f"your version: not timed (the lesson's took {row['kernel_us']['median']:.2f} us on an {gpu.upper()})"


def _row(topic, step, size, gpu):
    record = records.recorded(topic, gpu)
    rows = records.select(record, step=step, size=dict(size)) if record else []
    return next((row for row in rows if "kernel_us" in row), None)
