"""Recorded times of a step: only for the code that was timed, and for the sizes of that record."""

from collections.abc import Mapping, Sequence
from typing import Any

from moe_numba.course.bench import records
from moe_numba.course.bench.records.kernel_hash import ast_hash


def recorded_us(
    topic: str, step: str, kernels: Sequence, size: Mapping[str, Any], config: Mapping[str, Any], gpu: str = "h200"
) -> float | None:
    """Return the recorded kernel time of exactly this code at these sizes, in microseconds, or None.

    The code is the syntax trees of the kernels and of everything that they call, and the values that factories passed
    to them (`records.kernel_hash.ast_hash`). So an edit has no recorded time until it is measured.

    Parameters
    ----------
    topic : str
        Of the record, such as "align_published_ladder".
    step : str
        Of the row.
    kernels : sequence of kernels
        All that the step launches, as the page has them now; none if torch alone does the work.
    size, config : dict
        Argument -> value; the row must have the same.
    """
    row = _row(topic, step, size, config, gpu)
    timed = {kernel.get("ast") for kernel in row.get("kernels", ())} if row else set()
    return row["kernel_us"]["median"] if row and all(ast_hash(kernel) in timed for kernel in kernels) else None


def describe(
    topic: str, step: str, kernels: Sequence, size: Mapping[str, Any], config: Mapping[str, Any], gpu: str = "h200"
) -> str:
    """Return what a step prints of its recorded time, a sentence: also why there is none for this code."""
    row, us = _row(topic, step, size, config, gpu), recorded_us(topic, step, kernels, size, config, gpu)
    if us is not None:
        return f"recorded on an {gpu.upper()}: {us:.2f} us"
    if row is None:
        sizes = ", ".join(f"{name} = {value}" for name, value in (*size.items(), *config.items()))
        return f"not recorded on an {gpu.upper()} with {sizes}"
    return f"your version: not timed (the lesson's took {row['kernel_us']['median']:.2f} us on an {gpu.upper()})"


def _row(topic, step, size, config, gpu):
    record = records.recorded(topic, gpu)
    rows = records.select(record, step=step, size=dict(size), config=dict(config)) if record else []
    return next((row for row in rows if "kernel_us" in row), None)
